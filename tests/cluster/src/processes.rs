//! Finding and ending the processes of a cluster.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::state::ROOT;

/// In the environment of everything a cluster starts: `HPCRT_CLUSTER_MEMBER=NAME`.
pub(crate) const MARK: &str = "HPCRT_CLUSTER_MEMBER";

#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// The network namespace as the kernel prints it.
    pub(crate) net: PathBuf,
    marked: bool,
}

impl Process {
    /// Its arguments, joined by blanks.
    pub(crate) fn command(&self) -> String {
        let raw = fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        String::from_utf8_lossy(&raw).replace('\0', " ").trim_end().to_owned()
    }
}

/// `comm` of a holder once it is in a network namespace of its own.
pub(crate) const HOLDER: &str = "cluster-holder";

/// Processes with the cluster's mark, and all others in a network namespace that one of its holders made.
///
/// Members get killed, so this must never name the machine's own network namespace, in which the file server and a holder that
/// has only just started are: a namespace counts by its holder's `comm`, which is set after the namespace was made, and the
/// namespaces of the caller, of init and of the kernel's threads count never.
pub(crate) fn members(name: &str) -> Vec<Process> {
    let mark = format!("{MARK}={name}").into_bytes();
    // sshd writes its title over its environment.
    let sshd = format!("sshd: /usr/sbin/sshd -f {ROOT}/{name}/ssh/");
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let callers = ancestors();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let all: Vec<Process> = entries
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid > 2 && *pid != own && !callers.contains(pid))
        .filter_map(|pid: i32| {
            // A zombie has no namespaces any more and is not ours to end.
            let net = net_of(pid)?;
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let mut process = Process { pid, net, marked: environment.split(|&b| b == 0).any(|v| v == mark) };
            process.marked |= process.command().starts_with(&sshd);
            Some(process)
        })
        .collect();
    let never: Vec<PathBuf> = callers.iter().chain(&[1, 2]).filter_map(|&pid| net_of(pid)).collect();
    let holds = |p: &&Process| {
        p.marked
            && fs::read_to_string(format!("/proc/{}/comm", p.pid)).is_ok_and(|comm| comm.trim_end() == HOLDER)
            && !never.contains(&p.net)
    };
    let nets: HashSet<PathBuf> = all.iter().filter(holds).map(|p| p.net.clone()).collect();
    all.into_iter().filter(|p| p.marked || nets.contains(&p.net)).collect()
}

fn net_of(pid: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/net")).ok()
}

/// The processes above this one, up to but without init.
fn ancestors() -> Vec<i32> {
    let mut pids = Vec::new();
    let mut pid = nix::unistd::getppid().as_raw();
    while pid > 1 {
        pids.push(pid);
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(1)?.parse().ok());
        pid = parent.unwrap_or(0);
    }
    pids
}

/// Ends all members; returns when none is left.
pub(crate) fn end_all(name: &str) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(15);
    loop {
        let alive = members(name);
        if alive.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            let list: Vec<String> = alive.iter().map(|p| format!("{} ({})", p.pid, p.command())).collect();
            bail!("cannot end processes of cluster {name:?} within 15 s: {}", list.join(", "));
        }
        for process in alive {
            // Gone in the meantime is what we want.
            let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
        }
        sleep(Duration::from_millis(3));
    }
}

/// Start time of a process in clock ticks since boot (proc(5), field 22 of `stat`).
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}
