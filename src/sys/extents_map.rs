//! The memory that programs with asynchronous I/O share with their node's I/O worker, as the worker has it.
#![allow(unsafe_code, reason = "a mapping that several processes write to")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use nix::libc;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;

use super::extents::{BYTES, Head, Log, Piece, RING_AT, SEGMENTS, Segment, segment_at};

/// A fresh file for it, whose length stays.
///
/// # Errors
/// The kernel refuses files in memory.
pub fn create() -> io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("hpcrt-extents", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, BYTES as u64)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// See the module. Programs may write anything at any time: what is read is checked.
pub struct Extents(NonNull<u8>);

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
    /// Maps the file.
    ///
    /// # Errors
    /// It is none of [`create`]'s, or there is no room.
    pub fn map(memory: &OwnedFd) -> io::Result<Extents> {
        let length = u64::try_from(rustix::fs::fstat(memory)?.st_size).unwrap_or(0);
        if length != BYTES as u64 || !rustix::fs::fcntl_get_seals(memory)?.contains(SealFlags::SHRINK) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), BYTES, protection, flags, memory, 0)? };
        NonNull::new(at.cast()).map(Extents).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Its beginning.
    pub fn head(&self) -> &Head {
        // SAFETY: the mapping begins with it, is aligned to a page, and holds nothing but atomics.
        unsafe { self.0.cast().as_ref() }
    }

    /// The log of a program; `None`: there is no such segment.
    pub fn log(&self, segment: u32) -> Option<Log<'_>> {
        let nth = usize::try_from(segment).ok().filter(|nth| *nth < SEGMENTS)?;
        // SAFETY: the mapping has so many, each with its ring, for as long as `self` lives.
        Some(unsafe {
            let place = self.0.add(segment_at(nth));
            Log::new(place.cast::<Segment>().as_ref(), place.add(RING_AT).as_ptr())
        })
    }

    /// Writes a piece of a log to a file, or its beginning; returns how much.
    ///
    /// # Errors
    /// `pwrite(2)`'s.
    pub fn write(&self, log: &Log<'_>, piece: &Piece, file: BorrowedFd<'_>) -> io::Result<u64> {
        let (len, offset) = (piece.len as usize, libc::off_t::try_from(piece.offset).unwrap_or(libc::off_t::MAX));
        loop {
            // SAFETY: `Log::next` has seen that the piece lies in the ring; the kernel copies what is there.
            let written = unsafe { libc::pwrite(file.as_raw_fd(), log.address(piece.at).cast(), len, offset) };
            match u64::try_from(written) {
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
}

impl Drop for Extents {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nobody has a reference into it any more.
        let _ = unsafe { rustix::mm::munmap(self.0.as_ptr().cast(), BYTES) };
    }
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

/// Begins an empty log in the file.
///
/// # Errors
/// It cannot be mapped.
pub fn reset(memory: &OwnedFd, segment: u32) -> io::Result<()> {
    Extents::map(memory)?.log(segment).ok_or(io::ErrorKind::InvalidInput)?.reset();
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
