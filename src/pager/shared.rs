//! A client's pages in a file in memory that a client of the same host and user reads and writes itself: what it borrows is copied once, by whoever
//! wants it, and nobody is asked or woken. The server still counts: it makes room in the file before a client writes there.
//!
//! A span that comes whole gets half of a huge page, if the kernel makes one (MADV_COLLAPSE): that is made in less time than small pages, and read and written in half the time, since
//! the kernel finds one page and not 512. The other half is the next span's room ([`Shared::take_beside`]), and counts until it is needed elsewhere. Where a part is given back, the kernel makes
//! small pages of the rest.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::process::{Resource, getrlimit};

use crate::net::auth::random_words;
use crate::sys::huge::{self, HUGE};
use crate::sys::page::{ALL, Bits, PAGE, SPAN, SPAN_PAGES, runs};
use crate::sys::resident::{WINDOW, WINDOW_BYTES};
use crate::sys::span::Span;

// A pair of spans is a huge page of the file: the first has an even number.
const _: () = assert!(HUGE == 2 * SPAN && WINDOW.is_multiple_of(HUGE as u64));

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    file: File,
    /// At the file's end: who opens it knows by this that it is the one.
    mark: [u64; 2],
    /// Pages that hold something.
    spans: Mutex<HashMap<u64, Bits>>,
    /// Spans that have room and hold nothing: the other halves of huge pages.
    beside: Mutex<HashSet<u64>>,
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
        Some(Shared { file, mark, spans: Mutex::default(), beside: Mutex::default() })
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

    /// Makes room for a span and the one beside it, which hold nothing, in a huge page: whether the kernel could.
    pub(super) fn reserve_both(&self, number: u64) -> bool {
        // It makes none of nothing.
        let made = self.reserve(number, [1, 0, 0, 0]).and_then(|()| offset(number & !1));
        let made = made.and_then(|start| huge::gather_part(&self.file, start, HUGE)).is_ok();
        if made {
            self.beside().insert(number ^ 1);
        }
        made
    }

    /// Whether this span has room and holds nothing; it is not [beside](Shared::reserve_both) another any more.
    pub(super) fn take_beside(&self, number: u64) -> bool {
        self.beside().remove(&number)
    }

    /// Gives back all such room: so many pages.
    pub(super) fn forget_beside(&self) -> u64 {
        // Whoever finds that a span is not beside another any more may write there at once.
        let mut spans = self.beside();
        spans.iter().for_each(|number| self.forget(*number, ALL));
        (spans.drain().count() * SPAN_PAGES) as u64
    }

    fn beside(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.beside.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    /// Pages that the kernel has of the file, besides its mark.
    fn there(shared: &Shared) -> u64 {
        shared.file.metadata().unwrap().blocks() * 512 / PAGE as u64 - 1
    }

    #[test]
    fn halves_of_huge_pages_hold_what_they_are_given_and_are_given_back() {
        let shared = Shared::new().unwrap();
        let first = WINDOW / SPAN as u64 + 4;
        let mut span = Span::new().unwrap();
        if !shared.reserve_both(first + 1) {
            return eprintln!("SKIPPED: the kernel makes no huge pages of files in memory");
        }
        assert_eq!(there(&shared), 512);
        assert!(shared.take_beside(first) && !shared.take_beside(first) && !shared.take_beside(first + 1));
        for number in [first, first + 1] {
            let fill = |(nth, page): (usize, &mut [u8])| page.fill(number as u8 ^ nth as u8);
            span.bytes_mut().chunks_exact_mut(PAGE).enumerate().for_each(fill);
            shared.write(number, ALL, &span).unwrap();
        }
        shared.forget(first + 1, [u64::MAX, 0, 0, 0]);
        assert_eq!(there(&shared), 512 - 64);
        for (number, pages) in [(first, ALL), (first + 1, [0, u64::MAX, u64::MAX, u64::MAX])] {
            shared.read(number, pages, &mut span).unwrap();
            for nth in runs(pages).flat_map(|(start, count)| start..start + count) {
                let page = &span.bytes()[nth * PAGE..(nth + 1) * PAGE];
                assert!(page.iter().all(|byte| *byte == number as u8 ^ nth as u8), "{number} {nth}");
            }
        }
        shared.forget(first, ALL);
        assert!(shared.reserve_both(first + 2));
        assert_eq!((shared.forget_beside(), shared.forget_beside()), (256, 0));
        assert_eq!(there(&shared), 512 - 64 - 256 + 256);
    }
}
