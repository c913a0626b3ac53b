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
/// group's permission bits and forbids writing altogether, whatever the mode. So what the user may use as a member of a group,
/// or write to, is shown as his own or his primary group's. Everything else keeps its owner (and is displayed as the overflow user).
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

    fn show(&self, mode: u32, uid: u32, gid: u32) -> (u32, u32) {
        let Identity::Mapped { uid: own, gid: primary, groups } = self else { return (uid, gid) };
        let member = gid == *primary || groups.contains(&gid);
        let writable = match () {
            () if uid == *own => mode & 0o200 != 0,
            () if member => mode & 0o020 != 0,
            () => mode & 0o002 != 0,
        };
        (if writable { *own } else { uid }, if member || writable { *primary } else { gid })
    }
}

/// `id` is the node's number.
pub(super) fn of_record(attr: &Attr, id: u64, identity: &Identity) -> FileAttr {
    let (uid, gid) = identity.show(attr.mode, attr.uid, attr.gid);
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

pub(super) fn of_stat(stat: &Stat, id: u64, identity: &Identity) -> FileAttr {
    let (uid, gid) = identity.show(stat.st_mode, stat.st_uid, stat.st_gid);
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
    of_record(&attr, super::inodes::TOP, &Identity::Exact)
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
        assert_eq!(identity.show(0o755, 0, 0), (0, 0), "root's tools stay root's");
        assert_eq!(identity.show(0o750, 5, 30), (5, 20), "readable through a group");
        assert_eq!(identity.show(0o2775, 5, 30), (10, 20), "a shared project directory");
        assert_eq!(identity.show(0o644, 10, 40), (10, 20), "own file of a foreign group");
        assert_eq!(identity.show(0o1777, 0, 0), (10, 20), "a scratch directory for everybody");
        assert_eq!(Identity::Exact.show(0o1777, 0, 0), (0, 0));
    }

    #[test]
    fn times_before_the_epoch() {
        assert_eq!(time((-2, 500_000_000)), UNIX_EPOCH - Duration::from_millis(1_500));
        assert!(time((i64::MAX, 0)) >= UNIX_EPOCH && time((i64::MIN, 0)) <= UNIX_EPOCH, "no panic on any input");
    }
}
