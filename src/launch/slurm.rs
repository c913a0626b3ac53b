//! Agents in a Slurm allocation: one step with one task on each node, beside which the program's own steps still fit. The step brings the
//! binary along (`--bcast`, through Slurm's own tree); what must not be seen goes through the [`super::invitation`].

use std::collections::VecDeque;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::agent::{self, Process};
use super::allocation;
use super::fold::fold;
use super::overlay::Spawner;
use crate::net::auth;
use crate::{Error, Result, error::Context};

/// Variables by which an allocation's wishes for the program would shape the agents' step.
const SHAPES: [&str; 21] = [
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_TRES_PER_TASK",
    "SLURM_THREADS_PER_CORE",
    "SLURM_TASK_PROLOG",
    "SLURM_TASK_EPILOG",
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_DISTRIBUTION",
    "SLURM_HINT",
    "SLURM_KILL_BAD_EXIT",
    "SLURM_WAIT",
    "SLURM_LABELIO",
];

/// Name of the binary on the nodes, followed by letters of chance; whoever is started by it removes it.
const COPY: &str = "/tmp/.hpcrt-step-";

/// The name of this host in the allocation, for a task of a step.
pub fn node_name() -> Option<String> {
    std::env::var("SLURMD_NODENAME").ok()
}

/// The agents' step.
#[derive(Debug)]
pub struct Step {
    process: Process,
    said: Arc<Mutex<VecDeque<String>>>,
}

impl Step {
    /// Starts an agent on each of the hosts. `overlaps`: see [`overlaps`].
    ///
    /// # Errors
    /// There is no `srun`.
    pub fn start(tasks: &Spawner, hosts: &[String], invitation: &Path, overlaps: bool) -> Result<Step> {
        let mut process = Process::start(&mut step(hosts, invitation, overlaps)?).op_on("run", "srun")?;
        let said = Arc::default();
        if let Some(errors) = process.errors() {
            tasks.spawn(agent::listen(errors, Arc::clone(&said))).detach();
        }
        Ok(Step { process, said })
    }

    /// Waits until it has ended, and says why.
    pub async fn ended(&mut self) -> Error {
        self.process.end().await;
        let words = self.said();
        let cause = match self.process.ended() {
            _ if !words.is_empty() => words,
            Some(status) => status.to_string(),
            None => "it ended".to_owned(),
        };
        Error::new("start the agents by srun", cause).remedy(WITHOUT)
    }

    /// The last lines that it wrote.
    pub fn said(&self) -> String {
        self.said.lock().map(|s| s.iter().cloned().collect::<Vec<_>>().join("; ")).unwrap_or_default()
    }

    /// What is left to wait for.
    pub fn into_process(self) -> Process {
        self.process
    }
}

/// Whether steps share an allocation's resources only when told to. Before 20.11 they overlap by themselves, and know no such option.
///
/// # Errors
/// There is no `srun`, or it does not answer soon.
pub async fn overlaps() -> Result<bool> {
    let help = allocation::answer(&["srun", "--help"]).await;
    help.map(|help| help.contains("--overlap")).map_err(|error| error.remedy(WITHOUT))
}

/// How else agents can be started.
const WITHOUT: &str = "--agent ssh starts them without Slurm";

/// The command that starts an agent on each of the hosts.
fn step(hosts: &[String], invitation: &Path, overlaps: bool) -> Result<Command> {
    let count = hosts.len().to_string();
    let mut srun = Command::new("srun");
    if overlaps {
        srun.arg("--overlap");
    }
    srun.args(["--nodes", &count, "--ntasks", &count, "--ntasks-per-node=1", "--nodelist", &fold(hosts)])
        // All of the allocation's memory and processors on each node: the ranks are the agents' descendants.
        .args(["--mem=0", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0", "--wait=0"])
        .args(["--input=none", "--quiet", "--job-name=hpcrt"])
        .arg(format!("--bcast={COPY}{}", auth::random_name(16)))
        .arg(binary()?)
        .args(["serve".as_ref(), "--join".as_ref(), invitation.as_os_str()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    for name in SHAPES {
        srun.env_remove(name);
    }
    Ok(srun)
}

/// A path to this binary for a child of this process.
fn binary() -> Result<PathBuf> {
    let path = std::fs::read_link("/proc/self/exe").op("find this binary")?;
    // What was removed or replaced is still there.
    Ok(if path.exists() { path } else { format!("/proc/{}/exe", std::process::id()).into() })
}

/// A copy that nobody removed in this time belongs to a step that was cancelled while it began.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Removes the copy that a step brought, if this process was started by it, and forgotten ones of this user's.
pub fn remove_copy() {
    let (place, name) = COPY.split_at(COPY.rfind('/').map_or(0, |at| at + 1));
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let old = |meta: &Metadata| meta.modified().is_ok_and(|at| at.elapsed().is_ok_and(|age| age > FORGOTTEN));
        let ours = |meta: &Metadata| meta.uid() == rustix::process::geteuid().as_raw() && meta.is_file();
        if entry.file_name().to_string_lossy().starts_with(name)
            && entry.metadata().is_ok_and(|meta| ours(&meta) && old(&meta))
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    if let Ok(path) = std::fs::read_link("/proc/self/exe")
        && path.to_string_lossy().starts_with(COPY)
    {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agents_step_is_not_shaped_by_wishes_for_the_program() {
        let step = step(&["n1".to_owned(), "n2".to_owned()], Path::new("/join"), true).unwrap();
        let removed: Vec<_> = step.get_envs().filter(|(_, value)| value.is_none()).map(|(name, _)| name).collect();
        for name in ["SLURM_NTASKS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TASK_PROLOG"] {
            assert!(removed.contains(&name.as_ref()), "{name}");
        }
        let words: Vec<_> = step.get_args().filter_map(|word| word.to_str()).collect();
        assert!(words.starts_with(&["--overlap", "--nodes", "2"]) && words.contains(&"n[1-2]"), "{words:?}");
    }
}
