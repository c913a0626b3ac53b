//! A client's pages in a file in memory that a client of the same host and user reads and writes itself: what it borrows is copied once, by whoever
//! wants it, and nobody is asked or woken. The server still counts: it makes room in the file before a client writes there.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::process::{Resource, getrlimit};

use crate::net::auth::random_words;
use crate::sys::page::{Bits, PAGE, SPAN, runs};
use crate::sys::resident::{WINDOW, WINDOW_BYTES};
use crate::sys::span::Span;

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    file: File,
    /// At the file's end: who opens it knows by this that it is the one.
    mark: [u64; 2],
    /// Pages that hold something.
    spans: Mutex<HashMap<u64, Bits>>,
}

impl Shared {
    /// An empty one; `None` where the kernel does not allow it.
    pub(super) fn new() -> Option<Shared> {
        // Beyond the limit a write would be a signal.
        if getrlimit(Resource::Fsize).current.is_some() {
            return None;
        }
        let file = File::from(memfd_create("hpcrt-shared", MemfdFlags::CLOEXEC).ok()?);
        let mark = random_words();
        file.write_all_at(&mark.map(u64::to_le_bytes).concat(), WINDOW_BYTES).ok()?;
        Some(Shared { file, mark, spans: Mutex::default() })
    }

    /// What its client is told: process, descriptor, mark.
    pub(super) fn address(&self) -> Bits {
        [u64::from(std::process::id()), u64::from(self.file.as_raw_fd().unsigned_abs()), self.mark[0], self.mark[1]]
    }

    /// What each span holds.
    pub(super) fn spans(&self) -> MutexGuard<'_, HashMap<u64, Bits>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads pages of a span to their places.
    pub(super) fn read(&self, number: u64, pages: Bits, to: &mut Span) -> io::Result<()> {
        let start = offset(number)?;
        runs(pages).try_for_each(|(first, count)| {
            let part = &mut to.bytes_mut()[first * PAGE..(first + count) * PAGE];
            self.file.read_exact_at(part, start + (first * PAGE) as u64)
        })
    }

    /// Writes pages of a span from their places.
    pub(super) fn write(&self, number: u64, pages: Bits, from: &Span) -> io::Result<()> {
        let start = offset(number)?;
        runs(pages).try_for_each(|(first, count)| {
            let part = &from.bytes()[first * PAGE..(first + count) * PAGE];
            self.file.write_all_at(part, start + (first * PAGE) as u64)
        })
    }

    /// Makes room for pages: in this process, whose memory it is.
    pub(super) fn reserve(&self, number: u64, pages: Bits) -> io::Result<()> {
        self.allocate(number, pages, FallocateFlags::KEEP_SIZE)
    }

    /// Gives pages back: they cost nothing and are zero.
    pub(super) fn forget(&self, number: u64, pages: Bits) {
        let _ = self.allocate(number, pages, FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE);
    }

    fn allocate(&self, number: u64, pages: Bits, flags: FallocateFlags) -> io::Result<()> {
        let start = offset(number)?;
        runs(pages).try_for_each(|(first, count)| {
            Ok(fallocate(&self.file, flags, start + (first * PAGE) as u64, (count * PAGE) as u64)?)
        })
    }
}

/// Where a span begins in the file.
fn offset(number: u64) -> io::Result<u64> {
    let first = WINDOW / SPAN as u64;
    let inside = number.checked_sub(first).map(|nth| nth * SPAN as u64).filter(|start| *start < WINDOW_BYTES);
    inside.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}
