//! Whether two hosts mean the same file.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::{AtFlags, FileType, StatxFlags, statx};
use rustix::io::Errno;

use crate::net::wire::control::Seen;

/// The file system of an open regular file, as this host numbers it, and what every host sees of the file now: the file server is asked.
///
/// # Errors
/// It is no regular file, or the file server does not tell.
pub(super) fn seen(file: impl AsFd) -> io::Result<(u64, Seen)> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let found = statx(file, c"", flags, StatxFlags::BASIC_STATS)?;
    if FileType::from_raw_mode(found.stx_mode.into()) != FileType::RegularFile {
        return Err(Errno::INVAL.into());
    }
    let device = u64::from(found.stx_dev_major) << 32 | u64::from(found.stx_dev_minor);
    let [mtime, ctime] = [found.stx_mtime, found.stx_ctime].map(|time| (time.tv_sec, time.tv_nsec));
    Ok((device, Seen { ino: found.stx_ino, size: found.stx_size, mtime, ctime }))
}
