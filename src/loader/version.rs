//! Whether a file is still what it was.

use std::os::fd::AsFd;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, Stat, StatxFlags, statx};
use rustix::io::Errno;

use crate::net::wire::control::Seen;
use crate::net::wire::record::Attr;

/// A version of a file: these together do not stay the same when it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Version {
    dev: u64,
    ino: u64,
    /// Bytes.
    pub(super) size: u64,
    mtime: (i64, u32),
    ctime: (i64, u32),
}

/// Seconds and nanoseconds since the epoch, as in [`Attr`].
pub(crate) fn now() -> (i64, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_secs().cast_signed(), now.subsec_nanos())
}

/// Has the host ask its file server what is at `path`, whatever it believes.
pub(super) fn refresh(path: &[u8]) {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    // What fails here fails again for who looks.
    let _ = statx(CWD, path, flags, StatxFlags::BASIC_STATS);
}

impl Version {
    /// What every host sees of it.
    pub(super) fn seen(&self) -> Seen {
        Seen { ino: self.ino, size: self.size, mtime: self.mtime, ctime: self.ctime }
    }
}

/// The version of an open file as every host sees it.
pub(crate) fn seen(file: impl AsFd) -> Result<Seen, Errno> {
    current(file).map(|version| version.seen())
}

/// What a record says of an inode.
pub(super) fn attr(stat: &Stat) -> Attr {
    let nanoseconds = |n| u32::try_from(n).unwrap_or(0);
    Attr {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        ino: stat.st_ino,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mtime: (stat.st_mtime, nanoseconds(stat.st_mtime_nsec)),
        ctime: (stat.st_ctime, nanoseconds(stat.st_ctime_nsec)),
    }
}

/// The version that was looked at.
pub(super) fn version(stat: &Stat) -> Version {
    let Attr { ino, size, mtime, ctime, .. } = attr(stat);
    Version { dev: stat.st_dev, ino, size, mtime, ctime }
}

/// The version of an open file as it is now, without asking for times of access: reading changed those, and the answer would cost a
/// request. Network file systems learn the rest with every read.
pub(super) fn current(file: impl AsFd) -> Result<Version, Errno> {
    let mask = StatxFlags::INO | StatxFlags::SIZE | StatxFlags::MTIME | StatxFlags::CTIME;
    let now = statx(file, c"", AtFlags::EMPTY_PATH, mask)?;
    let time = |t: rustix::fs::StatxTimestamp| (t.tv_sec, t.tv_nsec);
    let dev = rustix::fs::makedev(now.stx_dev_major, now.stx_dev_minor);
    Ok(Version { dev, ino: now.stx_ino, size: now.stx_size, mtime: time(now.stx_mtime), ctime: time(now.stx_ctime) })
}
