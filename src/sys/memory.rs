//! How much memory this process may have, and what says so.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

/// Something that bounds this process's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// As a user would look for it.
    pub name: String,
    /// Bytes in all, and bytes that are left of it.
    pub bytes: u64,
    pub left: u64,
}

/// Everything that bounds it: the machine, its memory cgroup and those above it, its resource limits.
pub fn limits() -> Vec<Limit> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resource = |name: &str, resource, used: &str| {
        let bytes = getrlimit(resource).current?;
        let used = kib(&status, used).unwrap_or(0);
        Some(Limit { name: name.to_owned(), bytes, left: bytes.saturating_sub(used) })
    };
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = kib(&meminfo, "MemTotal:").map(|bytes| {
        let left = kib(&meminfo, "MemAvailable:").unwrap_or(bytes);
        Limit { name: "this machine's memory".to_owned(), bytes, left }
    });
    let own = [
        machine,
        resource("RLIMIT_AS (ulimit -v)", Resource::As, "VmSize:"),
        resource("RLIMIT_DATA (ulimit -d)", Resource::Data, "VmData:"),
    ];
    own.into_iter().flatten().chain(cgroups()).collect()
}

fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Limits of the memory cgroup, of either version, and of those above it, which bind it, too.
fn cgroups() -> Vec<Limit> {
    let number = |path: PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut found = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (mount, limit, usage) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max", "memory.current"),
            c if c.split(',').any(|c| c == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => continue,
        };
        for group in Path::new(path).ancestors() {
            let group = Path::new(mount).join(group.strip_prefix("/").unwrap_or(group));
            let Some(bytes) = number(group.join(limit)) else { continue };
            let used = number(group.join(usage)).unwrap_or(0);
            let name = group.join(limit).display().to_string();
            found.push(Limit { name, bytes, left: bytes.saturating_sub(used) });
        }
    }
    found
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
}
