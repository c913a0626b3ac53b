//! How much memory this process may have, and what says so.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::node::number;

/// Something that bounds this process's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// As a user would look for it.
    pub name: String,
    /// Bytes in all, and bytes that are left of it.
    pub bytes: u64,
    pub left: u64,
}

/// Everything that bounds it: what it shares with others, and its resource limits.
pub fn limits() -> Vec<Limit> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resource = |name: &str, resource, used: &str| {
        let bytes = getrlimit(resource).current?;
        let used = kib(&status, used).unwrap_or(0);
        Some(Limit { name: name.to_owned(), bytes, left: bytes.saturating_sub(used) })
    };
    let own = [
        resource("RLIMIT_AS (ulimit -v)", Resource::As, "VmSize:"),
        resource("RLIMIT_DATA (ulimit -d)", Resource::Data, "VmData:"),
    ];
    own.into_iter().flatten().chain(shared()).collect()
}

/// What it shares with other processes: the machine's memory, its memory cgroup and those above it, what Slurm gave the job here.
pub fn shared() -> Vec<Limit> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = kib(&meminfo, "MemTotal:").map(|bytes| {
        let left = kib(&meminfo, "MemAvailable:").unwrap_or(bytes);
        Limit { name: "this machine's memory".to_owned(), bytes, left }
    });
    let slurm = slurm(|name| std::env::var(name).ok()?.parse().ok());
    [machine, slurm].into_iter().flatten().chain(cgroups()).collect()
}

/// What Slurm says in the environment: the same on all nodes of a job, in MiB. Sites that have no cgroups for memory enforce it, too.
fn slurm(number: impl Fn(&str) -> Option<u64>) -> Option<Limit> {
    let limit = |name: &str, mib: u64| {
        let bytes = mib.checked_mul(1 << 20)?;
        (bytes > 0).then(|| Limit { name: name.to_owned(), bytes, left: bytes })
    };
    if let Some(mib) = number("SLURM_MEM_PER_NODE") {
        return limit("SLURM_MEM_PER_NODE", mib);
    }
    limit("SLURM_MEM_PER_CPU", number("SLURM_MEM_PER_CPU")?.checked_mul(number("SLURM_CPUS_ON_NODE")?)?)
}

fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Limits of the memory cgroup, of either version, and of those above it, which bind it, too.
fn cgroups() -> Vec<Limit> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut found = Vec::new();
    for (mount, files, group) in places(&groups) {
        // A container may see another part of the hierarchy than its own name says: the root is always looked at.
        for group in Path::new(group.trim_start_matches('/')).ancestors() {
            let group = Path::new(mount).join(group);
            let [limit, usage] = files.map(|file| group.join(file));
            let Some(bytes) = number(&limit) else { continue };
            // What can be had back without writing anything is not in the way.
            let used = number(usage).unwrap_or(0).saturating_sub(idle_files(&group));
            found.push(Limit { name: limit.display().to_string(), bytes, left: bytes.saturating_sub(used) });
        }
    }
    found
}

/// Bytes of file pages of a group that nobody has used for a while.
fn idle_files(group: &Path) -> u64 {
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    // Version 1 counts those of the groups below in the second.
    let line = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    line("total_inactive_file ").or_else(|| line("inactive_file ")).unwrap_or(0)
}

/// Where the limits of the groups named by `/proc/self/cgroup` can be: mount point, files of limit and usage, path of the group.
fn places(groups: &str) -> Vec<(&'static str, [&'static str; 2], &str)> {
    const ONE: [&str; 2] = ["memory.limit_in_bytes", "memory.usage_in_bytes"];
    const TWO: [&str; 2] = ["memory.max", "memory.current"];
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        match (fields.next(), fields.next()) {
            (Some(""), Some(group)) => {
                found.push(("/sys/fs/cgroup", TWO, group));
                found.push(("/sys/fs/cgroup/unified", TWO, group));
            }
            (Some(controllers), Some(group)) if controllers.split(',').any(|c| c == "memory") => {
                found.push(("/sys/fs/cgroup/memory", ONE, group));
            }
            _ => {}
        }
    }
    found
}

/// Bytes of memory that this process and its children may use: the least of the limits of its cgroup (version 1 or 2) and of those
/// around it; `None` without a limit below the machine's memory.
pub fn limit() -> Option<u64> {
    cgroups().iter().map(|limit| limit.bytes).min().filter(|&bytes| bytes < machine())
}

fn machine() -> u64 {
    let machine = rustix::system::sysinfo();
    (machine.totalram as u64).saturating_mul(u64::from(machine.mem_unit))
}

/// Bytes that files in memory may take here: half of what the machine has, or of what the cgroup leaves.
pub fn for_files() -> u64 {
    // What the agent itself may take, most of it for what it passes on.
    const AGENT: u64 = 128 << 20;
    let room = limit().unwrap_or_else(machine);
    (room / 2).min(room.saturating_sub(AGENT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_a_limit() {
        let limits = limits();
        let machine = limits.iter().find(|limit| limit.name == "this machine's memory").unwrap();
        assert!(
            machine.left > 0 && machine.left <= machine.bytes && limits.iter().all(|limit| limit.left <= limit.bytes)
        );
        assert_eq!(kib("VmSize:\t  12 kB\nX: 1 kB\n", "VmSize:"), Some(12 << 10));
    }

    #[test]
    fn slurm_says_it_by_node_or_by_processor() {
        let of = |vars: &[(&str, u64)]| {
            slurm(|name| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| *value))
                .map(|limit| limit.bytes >> 20)
        };
        assert_eq!(of(&[("SLURM_MEM_PER_NODE", 512)]), Some(512));
        assert_eq!(of(&[("SLURM_MEM_PER_CPU", 100), ("SLURM_CPUS_ON_NODE", 4)]), Some(400));
        assert_eq!((of(&[("SLURM_MEM_PER_NODE", 0)]), of(&[("SLURM_MEM_PER_CPU", 100)]), of(&[])), (None, None, None));
    }

    #[test]
    fn groups_of_both_versions_are_found() {
        let text = "9:name=systemd:/\n4:cpu,memory:/job_7\n0::/user.slice/a:b\n";
        let expected = [
            ("/sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes"], "/job_7"),
            ("/sys/fs/cgroup", ["memory.max", "memory.current"], "/user.slice/a:b"),
            ("/sys/fs/cgroup/unified", ["memory.max", "memory.current"], "/user.slice/a:b"),
        ];
        assert_eq!(places(text), expected);
    }
}
