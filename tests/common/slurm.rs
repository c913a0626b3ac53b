//! A real Slurm on the hosts of a cluster: one controller, a daemon on each host, no authentication. Gone with the cluster.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test crate uses its part")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::site::Site;

/// Processors that each host pretends to have.
pub const PROCESSORS: usize = 4;
/// Slurm's answers take no longer.
const PATIENCE: Duration = Duration::from_secs(90);

pub struct Slurm<'a> {
    pub site: &'a Site,
    place: PathBuf,
}

impl<'a> Slurm<'a> {
    /// Why there can be none.
    pub fn obstacle() -> Option<&'static str> {
        let found = |name: &str| Command::new(name).arg("-V").output().is_ok();
        let all = found("slurmctld") && found("slurmd") && found("sbatch");
        (!all).then_some("SKIPPED what needs Slurm: it is not here (Debian: slurm-wlm)")
    }

    /// Brings it up on all hosts; the first has the controller.
    pub fn up(site: &'a Site) -> Slurm<'a> {
        let place = site.cluster.state().file("slurm");
        fs::create_dir_all(place.join("state")).unwrap();
        // The output of jobs.
        fs::set_permissions(&place, fs::Permissions::from_mode(0o1777)).unwrap();
        let hosts = site.cluster.hosts();
        let at = place.display();
        let text = format!(
            "ClusterName=hpcrt\nSlurmctldHost={}\nAuthType=auth/none\nCredType=cred/none\nProctrackType=proctrack/pgid\n\
             TaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/none\nSelectType=select/cons_tres\n\
             SelectTypeParameters=CR_CPU\nSlurmUser=root\nSlurmdUser=root\nSwitchType=switch/none\nMpiDefault=pmi2\n\
             SlurmdParameters=config_overrides\nReturnToService=2\nKillWait=2\nStateSaveLocation={at}/state\n\
             SlurmdSpoolDir={at}/spool.%n\nSlurmctldPidFile={at}/slurmctld.pid\nSlurmdPidFile={at}/slurmd.%n.pid\n\
             SlurmctldLogFile={at}/slurmctld.log\nSlurmdLogFile={at}/slurmd.%n.log\nSlurmdTimeout=10\n\
             NodeName={} CPUs={PROCESSORS} RealMemory=1000\nPartitionName=all Nodes=ALL Default=YES State=UP\n",
            hosts[0],
            hosts.join(","),
        );
        fs::write(place.join("slurm.conf"), text).unwrap();
        fs::write(place.join("cgroup.conf"), "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n").unwrap();
        let slurm = Slurm { site, place };
        let start = |host: &str, line: &str| {
            let done = slurm.on(host, 0, &["sh", "-c", line]).output().unwrap();
            assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
        };
        start(&hosts[0], "slurmctld");
        for host in &hosts {
            start(host, &format!("mount -t tmpfs none /sys/fs/cgroup && slurmd -N {host}"));
        }
        let begun = Instant::now();
        while slurm.sinfo() != format!("{} idle", hosts.len()) {
            assert!(begun.elapsed() < PATIENCE, "Slurm does not come up: {}", slurm.sinfo());
            thread::sleep(Duration::from_millis(100));
        }
        slurm
    }

    fn sinfo(&self) -> String {
        let said = self.on("hpc1", 0, &["sinfo", "-h", "-o", "%D %t"]).output().unwrap();
        String::from_utf8_lossy(&said.stdout).trim().to_owned()
    }

    /// A command on a host, which finds this Slurm.
    pub fn on(&self, host: &str, uid: u32, words: &[&str]) -> Command {
        let mut command = self.site.cluster.command(host, uid, words);
        command.env("SLURM_CONF", self.place.join("slurm.conf")).stdin(Stdio::null());
        // What is typed at the test is none of its business, and it may be killed by its group.
        command.env_remove("XDG_CACHE_HOME");
        command
    }

    /// Runs a script as a batch job of that many hosts and ranks in a directory; its exit code and what it wrote.
    #[track_caller]
    pub fn batch(&self, uid: u32, size: [usize; 2], cwd: &str, script: &str) -> (i32, String) {
        let job = self.submit(uid, size, cwd, script);
        self.end(uid, &job)
    }

    /// Submits a script; the number of its job.
    #[track_caller]
    pub fn submit(&self, uid: u32, [hosts, ranks]: [usize; 2], cwd: &str, script: &str) -> String {
        let name = format!("{}-{}", std::process::id(), script.len() + 1000 * ranks);
        let file = self.place.join(format!("{name}.sh"));
        fs::write(&file, format!("#!/bin/sh\nexec 2>&1\n{script}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        let output = format!("{}/%j.out", self.place.display());
        let (hosts, ranks) = (hosts.to_string(), ranks.to_string());
        let words =
            ["sbatch", "--parsable", "-N", &hosts, "-n", &ranks, "-D", cwd, "-o", &output, file.to_str().unwrap()];
        let said = self.on("hpc1", uid, &words).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8_lossy(&said.stdout).trim().to_owned()
    }

    /// Waits for a job's end.
    #[track_caller]
    pub fn end(&self, uid: u32, job: &str) -> (i32, String) {
        let begun = Instant::now();
        let show =
            |job: &str| -> Output { self.on("hpc1", uid, &["scontrol", "-o", "show", "job", job]).output().unwrap() };
        loop {
            let said = String::from_utf8_lossy(&show(job).stdout).into_owned();
            let field = |name: &str| {
                said.split_whitespace().find_map(|word| word.strip_prefix(name)).unwrap_or_default().to_owned()
            };
            if !["PENDING", "RUNNING", "COMPLETING", ""].contains(&field("JobState=").as_str()) {
                let code = field("ExitCode=").split(':').next().and_then(|code| code.parse().ok()).unwrap_or(-1);
                return (code, self.output(job));
            }
            assert!(begun.elapsed() < PATIENCE, "{said}\n{}", self.output(job));
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// What it keeps and logs, without its directories.
    pub fn files(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(&self.place).unwrap().flatten().map(|entry| entry.path());
        files.filter(|path| path.is_file()).collect()
    }

    /// What a job wrote so far.
    pub fn output(&self, job: &str) -> String {
        fs::read_to_string(self.place.join(format!("{job}.out"))).unwrap_or_default()
    }
}

impl Drop for Slurm<'_> {
    fn drop(&mut self) {
        let _ = self.on("hpc1", 0, &["scancel", "--state=RUNNING", "-u", "hpcuser"]).output();
        let _ = self.on("hpc1", 0, &["scontrol", "shutdown"]).output();
    }
}
