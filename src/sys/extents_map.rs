//! The memory that programs with asynchronous I/O share with their node's I/O worker, as the worker has it.
#![allow(unsafe_code, reason = "a mapping that several processes write to")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::libc;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise};
use rustix::process::{Resource, getrlimit};
use rustix::thread::futex;

use super::extents::{
    CONTROL, Head, Log, Piece, RING_LEAST, RING_MOST, SEGMENTS, Segment, limit_of, ring_at, segment_at,
};
use super::memory;
use super::page::PAGE;

/// Of the memory that is free, what all logs of a job may hold; and what each may at least.
const SHARE: u64 = 8;
const LEAST: u64 = 8 << 20;
/// Runs that one call may append.
const TOGETHER: usize = 1024;

/// What each of so many logs may hold, if so many bytes are pending.
fn share(pending: u64, logs: u32) -> u64 {
    let free = memory::shared().iter().map(|limit| limit.left).min();
    free.map_or(u64::MAX, |free| free.saturating_add(pending) / SHARE / u64::from(logs.max(1)))
}

/// A fresh file for it, whose length stays, with logs as large as so many ranks on this node may have.
///
/// # Errors
/// The kernel refuses files in memory.
pub fn create(ranks: u32) -> io::Result<OwnedFd> {
    // The worker maps all of them.
    let addresses = getrlimit(Resource::As).current.map_or(u64::MAX, |bytes| bytes / 4 / SEGMENTS as u64);
    let ring = share(0, ranks).min(addresses).clamp(RING_LEAST, RING_MOST);
    let memory = create_with(1 << ring.ilog2())?;
    let extents = Extents::map_control(&memory)?;
    extents.head().ranks.store(ranks, Ordering::SeqCst);
    extents.limit(0, 0);
    Ok(memory)
}

/// The same with rings of so many bytes.
pub(crate) fn create_with(ring: u64) -> io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("hpcrt-extents", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, ring_at(SEGMENTS, ring) as u64)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// See the module. Programs may write anything at any time: what is read is checked.
pub struct Extents {
    at: NonNull<u8>,
    len: usize,
    /// Bytes of a ring.
    ring: u64,
}

// SAFETY: nothing but atomics, and bytes that only the kernel reads.
unsafe impl Send for Extents {}
// SAFETY: as above.
unsafe impl Sync for Extents {}

impl fmt::Debug for Extents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Extents")
    }
}

impl Extents {
    /// Maps the file, with the rings of all logs.
    ///
    /// # Errors
    /// It is none of [`create`]'s, or there is no room.
    pub fn map(memory: &OwnedFd) -> io::Result<Extents> {
        Self::map_some(memory, true)
    }

    /// Maps the file without the rings: from these logs nothing can be taken.
    ///
    /// # Errors
    /// See [`Extents::map`].
    pub fn map_control(memory: &OwnedFd) -> io::Result<Extents> {
        Self::map_some(memory, false)
    }

    fn map_some(memory: &OwnedFd, with_rings: bool) -> io::Result<Extents> {
        let length = u64::try_from(rustix::fs::fstat(memory)?.st_size).unwrap_or(0);
        let ring = length.saturating_sub(CONTROL as u64) / SEGMENTS as u64;
        let fits = ring.is_power_of_two() && (RING_LEAST..=RING_MOST).contains(&ring);
        let sealed = rustix::fs::fcntl_get_seals(memory)?.contains(SealFlags::SHRINK);
        if !fits || !sealed || length != ring_at(SEGMENTS, ring) as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let len = if with_rings { ring_at(SEGMENTS, ring) } else { CONTROL };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, memory, 0)? };
        NonNull::new(at.cast()).map(|at| Extents { at, len, ring }).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Its beginning.
    pub fn head(&self) -> &Head {
        // SAFETY: the mapping begins with it, is aligned to a page, and holds nothing but atomics.
        unsafe { self.at.cast().as_ref() }
    }

    /// The log of a program; `None`: there is no such segment.
    pub fn log(&self, segment: u32) -> Option<Log<'_>> {
        let nth = usize::try_from(segment).ok().filter(|nth| *nth < SEGMENTS)?;
        let has_rings = self.len > CONTROL;
        // SAFETY: the mapping has so many, each with its ring or all without, for as long as `self` lives.
        Some(unsafe {
            let ring = if has_rings { self.at.add(ring_at(nth, self.ring)).as_ptr() } else { std::ptr::null_mut() };
            Log::new(self.at.add(segment_at(nth)).cast::<Segment>().as_ref(), ring, self.ring)
        })
    }

    /// Bytes of a log's ring.
    pub fn ring(&self) -> u64 {
        self.ring
    }

    /// Has each log hold no more than its share of the memory that is free now, of which so many bytes are pending. There are so many logs, more than
    /// ranks where those start programs or write to several file systems; each rank may have one.
    pub fn limit(&self, pending: u64, logs: u32) {
        let (most, ranks) = (limit_of(self.ring), self.head().ranks.load(Ordering::SeqCst));
        self.head().limit.store(share(pending, logs.max(ranks)).clamp(LEAST, most), Ordering::SeqCst);
    }

    /// Something is missing in a file, which has this place in the table: writes to a program's open file fail from here on, until that has been told.
    pub fn fail(&self, (segment, file): (u32, u32), place: usize, errno: i32) {
        let errno = errno.cast_unsigned();
        self.head().lost.store(1, Ordering::SeqCst);
        self.head().inodes[place].failed.store(errno, Ordering::SeqCst);
        if let Some(state) = self.log(segment).as_ref().and_then(|log| log.segment.files.get(file as usize)) {
            let _ = state.error.compare_exchange(0, errno, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// Gives back what a log's ring holds and nobody needs; false: not now.
    pub fn give_back(&self, log: &Log<'_>) -> bool {
        log.give_back(|at, len| {
            // SAFETY: a part of the ring that the log says holds nothing.
            let _ = unsafe { madvise(at.cast(), len, Advice::LinuxRemove) };
        })
    }

    /// Writes a piece of a log to a file, or its beginning; returns how much.
    ///
    /// # Errors
    /// `pwrite(2)`'s.
    pub fn write(&self, log: &Log<'_>, piece: &Piece, file: BorrowedFd<'_>) -> io::Result<u64> {
        let (len, offset) = (piece.len as usize, libc::off_t::try_from(piece.offset).unwrap_or(libc::off_t::MAX));
        let bytes = populated(log, piece);
        // SAFETY: `Log::next` has seen that the piece lies in the ring; the kernel copies what is there.
        some_of(|| unsafe { libc::pwrite(file.as_raw_fd(), bytes, len, offset) })
    }

    /// Appends pieces to a file by one call, or their beginning; returns how much. That moves the open file's offset, as the program's own
    /// write would.
    ///
    /// # Errors
    /// `writev(2)`'s.
    pub fn append(&self, pieces: &[(u32, Piece)], file: BorrowedFd<'_>) -> io::Result<u64> {
        let part = |(segment, piece): &(u32, Piece)| {
            let iov_base = populated(&self.log(*segment)?, piece).cast_mut();
            Some(libc::iovec { iov_base, iov_len: piece.len as usize })
        };
        let parts: Vec<_> = pieces.iter().take(TOGETHER).map_while(part).collect();
        let count = libc::c_int::try_from(parts.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: as above.
        some_of(|| unsafe { libc::writev(file.as_raw_fd(), parts.as_ptr(), count) })
    }
}

/// Address of a piece, mapped here: FUSE cuts a request where a page is not yet; before Linux 5.14 it still does.
fn populated(log: &Log<'_>, piece: &Piece) -> *const libc::c_void {
    let bytes = log.address(piece.at).cast::<libc::c_void>();
    let within = bytes.addr() % PAGE;
    // SAFETY: pages of the ring, which stay as they are.
    let _ =
        unsafe { madvise(bytes.byte_sub(within).cast_mut(), within + piece.len as usize, Advice::LinuxPopulateRead) };
    bytes
}

/// What a call wrote, made again where a signal came before it did.
fn some_of(call: impl Fn() -> isize) -> io::Result<u64> {
    loop {
        match u64::try_from(call()) {
            Ok(0) => return Err(io::Error::from_raw_os_error(libc::EIO)),
            Ok(written) => return Ok(written),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

impl Extents {
    /// Writes pieces, of which each goes on in the file where the one before ends, by one call; returns how much. None of them appends.
    ///
    /// # Errors
    /// `pwrite(2)`'s.
    pub fn write_all(&self, pieces: &[(u32, Piece)], file: BorrowedFd<'_>) -> io::Result<u64> {
        let Some((_, first)) = pieces.first() else { return Ok(0) };
        let bytes = self.gathered(pieces);
        loop {
            match rustix::io::pwrite(file, &bytes, first.offset) {
                Ok(0) => return Err(io::Error::from_raw_os_error(libc::EIO)),
                Ok(written) => return Ok(written as u64),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The bytes of pieces, given with the segments of their logs, one behind the other.
    pub fn gathered(&self, pieces: &[(u32, Piece)]) -> Vec<u8> {
        let mut bytes: Vec<u8> = Vec::with_capacity(pieces.iter().map(|(_, piece)| piece.len as usize).sum());
        for (segment, piece) in pieces {
            let Some(log) = self.log(*segment) else { break };
            let len = piece.len as usize;
            // SAFETY: `Log::after` has seen that the piece lies in the ring; there is room for all, and who writes meanwhile spoils bytes only.
            unsafe {
                log.address(piece.at).copy_to_nonoverlapping(bytes.as_mut_ptr().add(bytes.len()), len);
                bytes.set_len(bytes.len() + len);
            }
        }
        bytes
    }
}

impl Drop for Extents {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nobody has a reference into it any more.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// Has this host's kernel write what it holds back of a part of a file (without a length: to its end), and waits until the file server has it.
///
/// # Errors
/// `sync_file_range(2)`'s: what it was to write is lost.
pub fn written(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    const ALL: libc::c_uint =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let part = [offset, len].map(|part| libc::off64_t::try_from(part).unwrap_or(libc::off64_t::MAX));
    // SAFETY: a descriptor and integers.
    let done = unsafe { libc::sync_file_range(file.as_fd().as_raw_fd(), part[0], part[1], ALL) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits until a word is not `seen`, or the time is over.
pub fn wait(word: &AtomicU32, seen: u32, time: Duration) {
    let time = futex::Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() };
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&time));
}

/// Wakes all that wait for a word to change.
pub fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
}

/// Begins an empty log in the file, for a file system.
///
/// # Errors
/// The file cannot give its memory back.
pub fn reset(memory: &OwnedFd, extents: &Extents, segment: u32, device: u64) -> io::Result<()> {
    let log = extents.log(segment).ok_or(io::ErrorKind::InvalidInput)?;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(memory, flags, ring_at(segment as usize, extents.ring) as u64, extents.ring)?;
    log.reset();
    extents.head().set_sharing(segment, false);
    log.segment.device.store(device, Ordering::SeqCst);
    Ok(())
}

/// Says in the file that no worker will come any more.
///
/// # Errors
/// It cannot be written.
pub fn give_up(memory: impl AsFd) -> io::Result<()> {
    let at = std::mem::offset_of!(Head, broken) as u64;
    Ok(rustix::io::pwrite(memory, &1u32.to_ne_bytes(), at).map(drop)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn logs_share_what_is_free() {
        let extents = Extents::map_control(&create_with(RING_MOST).unwrap()).unwrap();
        let limit = |logs: usize| {
            // As if that had been free: what is free beside it counts for little.
            extents.limit((SEGMENTS as u64) << 29, logs as u32);
            extents.head().limit.load(Ordering::SeqCst)
        };
        let all = limit_of(RING_MOST);
        let few = 64 << 20..all;
        assert_eq!(limit(0), all);
        assert!(few.contains(&limit(SEGMENTS)));
        extents.head().ranks.store(SEGMENTS as u32, Ordering::SeqCst);
        assert!(few.contains(&limit(1)));
    }
}
