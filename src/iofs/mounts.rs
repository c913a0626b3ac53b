//! Whether this host has file systems that are kept where the user names no directories: those that hosts share, and FUSE.

use std::fs;

/// As the kernel names those that the resident knows (`files/place.rs`), and what mounts others when they are used.
const SHARED: [&str; 17] = [
    "nfs", "nfs4", "fuse", "fuseblk", "virtiofs", "lustre", "gpfs", "cifs", "smb3", "smbfs", "9p", "ceph", "beegfs",
    "pvfs2", "afs", "coda", "autofs",
];

/// Whether there may be one among what is mounted.
pub fn any() -> bool {
    fs::read_to_string("/proc/self/mountinfo").map_or(true, |mounts| is_shared(&mounts))
}

/// The kind of each is the first word behind " - " (proc_pid_mountinfo(5)).
fn is_shared(mounts: &str) -> bool {
    let kinds = mounts.lines().filter_map(|line| line.split(" - ").nth(1)?.split(' ').next());
    kinds.into_iter().any(|kind| SHARED.contains(&kind) || kind.starts_with("fuse."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_apart() {
        let mount = |kind: &str| format!("36 35 98:0 /a /b c rw,noatime master:1 - {kind} /dev/x rw\n");
        let local = mount("ext4") + &mount("tmpfs") + &mount("fusectl") + &mount("overlay");
        assert!(!is_shared(&local));
        for kind in ["nfs4", "fuse.sshfs", "fuse", "lustre", "autofs"] {
            assert!(is_shared(&(local.clone() + &mount(kind))), "{kind}");
        }
    }
}
