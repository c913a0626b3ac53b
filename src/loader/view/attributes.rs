//! Attributes as the kernel wants them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo};
use rustix::fs::Stat;

use crate::loader::catalog::kind;
use crate::net::wire::record::Attr;

pub(super) const S_IFMT: u32 = 0o170_000;
pub(super) const S_IFDIR: u32 = 0o040_000;

/// How owners are shown.
///
/// In a user namespace that maps only the user and his primary group, any other owner is invalid to the kernel, which then ignores the
/// group's permission bits and forbids writing and removing altogether, whatever the mode. So what the user may use as a member of a group,
/// write to, or remove from its directory, is shown as his own or his primary group's. Everything else keeps its owner (and is displayed
/// as the overflow user).
#[derive(Debug, Clone)]
pub enum Identity {
    /// No user namespace: owners as they are.
    Exact,
    Mapped {
        uid: u32,
        gid: u32,
        groups: Vec<u32>,
    },
}

impl Identity {
    /// That of the calling process, for a view inside (`userns`) or outside of a user namespace made by it.
    pub fn current(userns: bool) -> Self {
        if !userns {
            return Identity::Exact;
        }
        let groups = rustix::process::getgroups().unwrap_or_default();
        Identity::Mapped {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: groups.iter().map(|g| g.as_raw()).collect(),
        }
    }

    /// What the user may do, as an octal digit, and whether he is the owner and of the group.
    fn rights(&self, mode: u32, uid: u32, gid: u32) -> (u32, bool, bool) {
        let Identity::Mapped { uid: own, gid: primary, groups } = self else { return (7, true, true) };
        let (owner, member) = (uid == *own, gid == *primary || groups.contains(&gid));
        let shift = if owner { 6 } else { 3 * u32::from(member) };
        (mode >> shift & 7, owner, member)
    }

    /// Whether the user may remove what `uid` owns from a directory.
    fn may_remove(&self, uid: u32, directory: &Attr) -> bool {
        const STICKY: u32 = 0o1000;
        const CHANGE: u32 = 3;
        let (rights, owner, _) = self.rights(directory.mode, directory.uid, directory.gid);
        let Identity::Mapped { uid: own, .. } = self else { return true };
        rights & CHANGE == CHANGE && (directory.mode & STICKY == 0 || owner || uid == *own)
    }

    /// `directory`: the one that holds it, if that is known.
    fn show(&self, mode: u32, uid: u32, gid: u32, directory: impl FnOnce() -> Option<Attr>) -> (u32, u32) {
        let Identity::Mapped { uid: own, gid: primary, .. } = self else { return (uid, gid) };
        let (rights, owner, member) = self.rights(mode, uid, gid);
        // As its owner he must not lose a right that he has; what he has not, the original refuses.
        let removable = || rights & !(mode >> 6) == 0 && directory().is_some_and(|d| self.may_remove(uid, &d));
        let his = rights & 2 != 0 || !(owner && member) && removable();
        (if his { *own } else { uid }, if member || his { *primary } else { gid })
    }
}

/// `id` is the node's number; `directory` tells of the one that holds it, if anything is known.
pub(super) fn of_record(
    attr: &Attr,
    id: u64,
    identity: &Identity,
    directory: impl FnOnce() -> Option<Attr>,
) -> FileAttr {
    let (uid, gid) = identity.show(attr.mode, attr.uid, attr.gid, directory);
    let mtime = time(attr.mtime);
    FileAttr {
        ino: INodeNo(id),
        size: attr.size,
        blocks: attr.size.div_ceil(512),
        atime: mtime,
        mtime,
        ctime: time(attr.ctime),
        crtime: UNIX_EPOCH,
        kind: file_type(attr.mode),
        perm: perm(attr.mode),
        nlink: attr.nlink,
        uid,
        gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// [`of_record`] for what `stat(2)` says.
pub(super) fn of_stat(stat: &Stat, id: u64, identity: &Identity, directory: impl FnOnce() -> Option<Attr>) -> FileAttr {
    let (uid, gid) = identity.show(stat.st_mode, stat.st_uid, stat.st_gid, directory);
    let at = |seconds, nanoseconds: u64| time((seconds, u32::try_from(nanoseconds).unwrap_or(0)));
    FileAttr {
        ino: INodeNo(id),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        blocks: u64::try_from(stat.st_blocks).unwrap_or(0),
        atime: at(stat.st_atime, stat.st_atime_nsec),
        mtime: at(stat.st_mtime, stat.st_mtime_nsec),
        ctime: at(stat.st_ctime, stat.st_ctime_nsec),
        crtime: UNIX_EPOCH,
        kind: file_type(stat.st_mode),
        perm: perm(stat.st_mode),
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid,
        gid,
        rdev: u32::try_from(stat.st_rdev).unwrap_or(0),
        blksize: 4096,
        flags: 0,
    }
}

pub(super) fn top() -> FileAttr {
    let attr = Attr {
        mode: S_IFDIR | 0o555,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        nlink: 2,
        ino: super::inodes::TOP,
        size: 0,
        mtime: (0, 0),
        ctime: (0, 0),
    };
    of_record(&attr, super::inodes::TOP, &Identity::Exact, || None)
}

/// `d_type` of a FUSE type.
pub(super) fn dirent_kind_of(file_type: FileType) -> u8 {
    match file_type {
        FileType::Directory => kind::DIR,
        FileType::Symlink => kind::LNK,
        FileType::NamedPipe => kind::FIFO,
        FileType::Socket => kind::SOCK,
        FileType::CharDevice => kind::CHR,
        FileType::BlockDevice => kind::BLK,
        FileType::RegularFile => kind::REG,
    }
}

/// For a directory entry.
pub(super) fn dirent_type(kind: u8) -> FileType {
    file_type(u32::from(kind) << 12)
}

fn file_type(mode: u32) -> FileType {
    match kind::of_mode(mode) {
        kind::DIR => FileType::Directory,
        kind::LNK => FileType::Symlink,
        kind::FIFO => FileType::NamedPipe,
        kind::SOCK => FileType::Socket,
        kind::CHR => FileType::CharDevice,
        kind::BLK => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn perm(mode: u32) -> u16 {
    u16::try_from(mode & 0o7777).expect("12 bits fit")
}

fn time((seconds, nanoseconds): (i64, u32)) -> SystemTime {
    let fraction = Duration::from_nanos(u64::from(nanoseconds));
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let base = if seconds >= 0 { UNIX_EPOCH.checked_add(whole) } else { UNIX_EPOCH.checked_sub(whole) };
    base.and_then(|t| t.checked_add(fraction)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_members_keep_their_rights() {
        let identity = Identity::Mapped { uid: 10, gid: 20, groups: vec![20, 30] };
        let show = |mode, uid, gid| identity.show(mode, uid, gid, || None);
        assert_eq!(show(0o755, 0, 0), (0, 0), "root's tools stay root's");
        assert_eq!(show(0o750, 5, 30), (5, 20), "readable through a group");
        assert_eq!(show(0o2775, 5, 30), (10, 20), "a shared project directory");
        assert_eq!(show(0o644, 10, 40), (10, 20), "own file of a foreign group");
        assert_eq!(show(0o1777, 0, 0), (10, 20), "a scratch directory for everybody");
        assert_eq!(Identity::Exact.show(0o1777, 0, 0, || None), (0, 0));
    }

    #[test]
    fn what_can_be_removed_is_the_users() {
        let identity = Identity::Mapped { uid: 10, gid: 20, groups: vec![20, 30] };
        let show = |mode, uid, gid, (directory, owner, group)| {
            let attr = Attr {
                mode: directory,
                uid: owner,
                gid: group,
                nlink: 2,
                ino: 5,
                size: 0,
                mtime: (0, 0),
                ctime: (0, 0),
            };
            identity.show(mode, uid, gid, || Some(attr))
        };
        assert_eq!(show(0o644, 0, 0, (0o755, 10, 20)), (10, 20), "root's file in his directory");
        assert_eq!(show(0o644, 5, 30, (0o2775, 6, 30)), (10, 20), "a colleague's in a project's");
        assert_eq!(show(0o444, 10, 40, (0o755, 10, 20)), (10, 20), "his own, of a foreign group");
        assert_eq!(show(0o644, 0, 0, (0o755, 0, 0)), (0, 0), "root's in root's");
        assert_eq!(show(0o644, 5, 5, (0o1777, 0, 0)), (5, 5), "another's in a scratch directory");
        assert_eq!(show(0o044, 5, 5, (0o755, 10, 20)), (5, 5), "he may read it, and its owner may not");
    }

    #[test]
    fn times_before_the_epoch() {
        assert_eq!(time((-2, 500_000_000)), UNIX_EPOCH - Duration::from_millis(1_500));
        assert!(time((i64::MAX, 0)) >= UNIX_EPOCH && time((i64::MIN, 0)) <= UNIX_EPOCH, "no panic on any input");
    }
}
