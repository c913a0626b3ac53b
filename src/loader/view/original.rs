//! The original files, by place, with the agent's own rights. The agent is outside of the job's mount namespace, so paths lead to them.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::time::{SystemTime, UNIX_EPOCH};

use fuser::TimeOrNow;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::{Errno, Result};

use super::handles::{Handle, Original};
use super::place::Place;
use crate::loader::catalog::Listing;
use crate::loader::probe::{FileSystem, Probe};

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// `lstat(2)`.
pub(super) fn stat(place: &Place<'_>) -> Result<Stat> {
    rustix::fs::statat(place.directory(), place.name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Opens what exists with the program's flags, without those that concern only its own descriptor or would create or follow anything.
/// Waits for nobody: what the program takes for a file may be a FIFO by now.
pub(super) fn open(place: &Place<'_>, flags: i32) -> Result<(OwnedFd, Stat)> {
    let drop = OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC | OFlags::DIRECT;
    let own = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(place.directory(), place.name, (of_bits(flags) - drop) | own, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    // Some file systems fetch what lies elsewhere only for readers that wait.
    rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok((file, stat))
}

/// Opens what a descriptor leads to once more, as another user of it would.
pub(super) fn open_again(file: impl AsFd, flags: OFlags) -> Result<OwnedFd> {
    rustix::fs::open(path_to(file), flags | OFlags::CLOEXEC, Mode::empty())
}

/// A program's flags for [`open_again`].
pub(super) fn flags_again(flags: i32) -> OFlags {
    of_bits(flags) - (OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC | OFlags::DIRECT | OFlags::NOFOLLOW)
}

fn path_to(file: impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// Makes (or, without `O_EXCL`, perhaps only opens) a regular file.
pub(super) fn create(place: &Place<'_>, flags: i32, mode: u32) -> Result<OwnedFd> {
    let flags = (of_bits(flags) - OFlags::DIRECT) | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(place.directory(), place.name, flags, Mode::from_raw_mode(mode & 0o7777))
}

fn of_bits(flags: i32) -> OFlags {
    OFlags::from_bits_retain(flags.cast_unsigned())
}

/// A directory, and all names in it but `.` and `..`.
pub(super) fn list(place: &Place<'_>) -> Result<(Stat, Listing)> {
    let directory = rustix::fs::openat(place.directory(), place.name, DIRECTORY, Mode::empty())?;
    let names = FileSystem.names(&directory).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    let names = names.into_iter().map(|(name, kind)| (name.into_vec().into(), kind)).collect();
    Ok((rustix::fs::fstat(&directory)?, names))
}

/// Writes all of `bytes` at `offset`; on an `O_APPEND` descriptor the kernel appends whatever the offset.
pub(super) fn write_at(file: impl AsFd, offset: u64, bytes: &[u8]) -> Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(&file, &bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(_) if done > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// What `setattr` asks for; `None` fields stay.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish {
    pub(super) mode: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) size: Option<u64>,
    pub(super) atime: Option<TimeOrNow>,
    pub(super) mtime: Option<TimeOrNow>,
}

/// Applies a wish to the file at a place, if that `is` what is meant, or to an open one where it has lost its name or the program came
/// through a descriptor.
pub(super) fn set(
    place: Option<&Place<'_>>,
    is: impl FnOnce(&Stat) -> bool,
    handle: Option<&Handle>,
    wish: Wish,
) -> Result<()> {
    let open = match handle {
        Some(Handle::Original(Original { file, .. })) => Some(file),
        _ => None,
    };
    let found;
    let file = match (open, place) {
        (Some(file), _) => file,
        (None, Some(place)) => {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            found = rustix::fs::openat(place.directory(), place.name, flags, Mode::empty())?;
            if !is(&rustix::fs::fstat(&found)?) {
                return Err(Errno::STALE);
            }
            &found
        }
        (None, None) => return Err(Errno::STALE),
    };
    if let Some(size) = wish.size {
        match open {
            Some(file) => rustix::fs::ftruncate(file, size)?,
            None => rustix::fs::ftruncate(open_again(file, OFlags::WRONLY)?, size)?,
        }
    }
    // By the descriptor, whatever has the name by now.
    let path = path_to(file);
    if let Some(mode) = wish.mode {
        rustix::fs::chmodat(CWD, &path, Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())?;
    }
    if wish.uid.is_some() || wish.gid.is_some() {
        let (uid, gid) = (wish.uid.map(rustix::fs::Uid::from_raw), wish.gid.map(rustix::fs::Gid::from_raw));
        rustix::fs::chownat(CWD, &path, uid, gid, AtFlags::empty())?;
    }
    if wish.atime.is_some() || wish.mtime.is_some() {
        let times = Timestamps { last_access: timespec(wish.atime), last_modification: timespec(wish.mtime) };
        rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty())?;
    }
    Ok(())
}

fn timespec(time: Option<TimeOrNow>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeOrNow::SpecificTime(time)) => since_epoch(time),
    }
}

fn since_epoch(time: SystemTime) -> Timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Timespec { tv_sec: after.as_secs().cast_signed(), tv_nsec: after.subsec_nanos().into() },
        Err(e) => {
            let before = e.duration();
            let borrow = i64::from(before.subsec_nanos() > 0);
            let nanoseconds = (1_000_000_000 - i64::from(before.subsec_nanos())) % 1_000_000_000;
            Timespec { tv_sec: -before.as_secs().cast_signed() - borrow, tv_nsec: nanoseconds }
        }
    }
}
