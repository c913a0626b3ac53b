//! What a job left behind on the hosts.

use std::fmt::{self, Display};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::processes::members;
use crate::state::State;

/// Something on a host that was not there when the cluster came up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leftover {
    /// In the host's network namespace, or with the cluster's mark in its environment.
    Process { host: String, pid: i32, command: String },
    /// In the host's own mount namespace; those of jobs end with their last process.
    Mount { host: String, point: String },
    /// Below /tmp or /dev/shm.
    File { host: String, path: PathBuf },
}

impl Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Leftover::Process { host, pid, command } => write!(f, "{host}: process {pid}: {command}"),
            Leftover::Mount { host, point } => write!(f, "{host}: mount on {point}"),
            Leftover::File { host, path } => write!(f, "{host}: file {}", path.display()),
        }
    }
}

/// Everything that is on the hosts now and was not at `up`. The calling process and its ancestors do not count.
pub fn leftovers(state: &State) -> Result<Vec<Leftover>> {
    let mut found = Vec::new();
    let nets: Vec<Option<PathBuf>> =
        state.hosts.iter().map(|h| fs::read_link(format!("/proc/{}/ns/net", h.pid)).ok()).collect();
    for process in members(&state.spec.name) {
        let command = process.command();
        if is_infrastructure(state, &command) {
            continue;
        }
        let host = nets.iter().position(|n| n.as_ref() == Some(&process.net));
        let host = host.map_or("(no host)".into(), |i| state.hosts[i].name.clone());
        found.push(Leftover::Process { host, pid: process.pid, command });
    }
    for host in &state.hosts {
        let new = mount_points(host.pid)?.into_iter().filter(|m| !host.mounts.contains(m));
        found.extend(new.map(|point| Leftover::Mount { host: host.name.clone(), point }));
        for place in ["tmp", "dev/shm"] {
            let root = Path::new("/proc").join(host.pid.to_string()).join("root");
            walk(&root.join(place), &mut |path| {
                let path = Path::new("/").join(path.strip_prefix(&root).unwrap_or(path));
                found.push(Leftover::File { host: host.name.clone(), path });
            });
        }
    }
    Ok(found)
}

/// The holders, the file server and the listening sshds.
fn is_infrastructure(state: &State, command: &str) -> bool {
    let name = &state.spec.name;
    command.starts_with(&format!("/proc/self/exe hold {name}"))
        || command.starts_with(&format!("/proc/self/exe serve {name}"))
        || (command.starts_with("sshd: /usr/sbin/sshd") && command.contains("[listener]"))
}

/// Sorted mount points as the process sees them.
pub(crate) fn mount_points(pid: i32) -> Result<Vec<String>> {
    let path = format!("/proc/{pid}/mountinfo");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let mut points: Vec<String> = text.lines().filter_map(|line| line.split(' ').nth(4)).map(str::to_owned).collect();
    points.sort();
    Ok(points)
}

fn walk(directory: &Path, found: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        found(&path);
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            walk(&path, found);
        }
    }
}
