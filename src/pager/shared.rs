//! A client's pages in a file in memory that a client of the same host and user reads and writes itself: what it borrows is copied once, by whoever
//! wants it, and nobody is asked or woken. The server still counts: it makes room in the file before a client writes there.
//!
//! A span of which enough is kept gets half of a huge page, if the kernel makes one (MADV_COLLAPSE): that is made in less time than small pages, and read and written in half the time, since
//! the kernel finds one page and not 512. What of it holds nothing is room for what comes, and counts until it is needed elsewhere. Where a part is given back, the kernel makes
//! small pages of the rest.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
use rustix::process::{Resource, getrlimit};

use crate::net::auth::random_words;
use crate::sys::huge::{self, HUGE};
use crate::sys::page::{Bits, PAGE, SPAN, SPAN_PAGES, count, runs};
use crate::sys::resident::{WINDOW, WINDOW_BYTES};
use crate::sys::span::Span;

const PUNCH: FallocateFlags = FallocateFlags::KEEP_SIZE.union(FallocateFlags::PUNCH_HOLE);
// A pair of spans is a huge page of the file: the first has an even number.
const _: () = assert!(HUGE == 2 * SPAN && WINDOW.is_multiple_of(HUGE as u64));

/// What is kept of a span.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// Pages that hold something.
    pub(super) data: Bits,
    /// The others have room, too.
    pub(super) roomy: bool,
}

impl Held {
    /// Pages that it takes.
    pub(super) fn pages(&self) -> u64 {
        if self.roomy { SPAN_PAGES as u64 } else { count(&self.data) as u64 }
    }

    /// Pages that it takes and that hold nothing.
    pub(super) fn room(&self) -> u64 {
        self.pages() - count(&self.data) as u64
    }

    /// Of which nothing holds anything.
    pub(super) fn is_empty(&self) -> bool {
        self.data == Bits::default()
    }

    /// Pages that hold nothing.
    pub(super) fn rest(&self) -> Bits {
        self.data.map(|word| !word)
    }
}

/// By their numbers.
pub(super) type Spans = BTreeMap<u64, Held>;

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    file: File,
    /// At the file's end: who opens it knows by this that it is the one.
    mark: [u64; 2],
    spans: Mutex<Spans>,
}

impl Shared {
    /// An empty one; `None` where the kernel does not allow it.
    pub(super) fn new() -> Option<Shared> {
        // Beyond the limit a write would be a signal.
        if getrlimit(Resource::Fsize).current.is_some() {
            return None;
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("hpcrt-shared", flags).ok()?);
        let mark = random_words();
        file.write_all_at(&mark.map(u64::to_le_bytes).concat(), WINDOW_BYTES).ok()?;
        // Its client maps it.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
        Some(Shared { file, mark, spans: Mutex::default() })
    }

    /// What its client is told: process, descriptor, mark.
    pub(super) fn address(&self) -> Bits {
        [u64::from(std::process::id()), u64::from(self.file.as_raw_fd().unsigned_abs()), self.mark[0], self.mark[1]]
    }

    /// What is kept.
    pub(super) fn spans(&self) -> MutexGuard<'_, Spans> {
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
        let _ = self.allocate(number, pages, PUNCH);
    }

    /// The same of a pair: in one step, so that its huge page need not become small ones.
    pub(super) fn forget_pair(&self, pair: u64) {
        let _ = offset(pair).map(|start| fallocate(&self.file, PUNCH, start, HUGE as u64));
    }

    /// Has a pair lie in a huge page: whether the kernel could. Else what holds nothing has no room.
    pub(super) fn gather(&self, pair: u64, spans: &Spans) -> bool {
        // It makes none of nothing.
        let begun = self.reserve(pair, [1, 0, 0, 0]);
        let made = begun.and_then(|()| huge::gather_part(&self.file, offset(pair)?, HUGE)).is_ok();
        for number in [pair, pair + 1].into_iter().filter(|_| !made) {
            self.forget(number, spans.get(&number).copied().unwrap_or_default().rest());
        }
        made
    }

    /// Gives back room of what holds nothing, until it is so many pages: how many it was.
    pub(super) fn squeeze(&self, wanted: u64) -> u64 {
        let mut pages = 0;
        self.spans().retain(|number, held| {
            if pages < wanted && held.room() > 0 {
                self.forget(*number, held.rest());
                pages += held.room();
                held.roomy = false;
            }
            held.pages() > 0
        });
        pages
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
    use crate::sys::page::ALL;
    use std::os::unix::fs::MetadataExt;

    /// Pages that the kernel has of the file, besides its mark.
    fn there(shared: &Shared) -> u64 {
        shared.file.metadata().unwrap().blocks() * 512 / PAGE as u64 - 1
    }

    #[test]
    fn huge_pages_hold_what_they_are_given_and_are_given_back() {
        const SOME: Bits = [0, u64::MAX, 0, 0];
        let shared = Shared::new().unwrap();
        let first = WINDOW / SPAN as u64 + 4;
        let held = |data, roomy| Held { data, roomy };
        let mut span = Span::new().unwrap();
        let fill = |span: &mut Span, number: u64| {
            let fill = |(nth, page): (usize, &mut [u8])| page.fill(number as u8 ^ nth as u8);
            span.bytes_mut().chunks_exact_mut(PAGE).enumerate().for_each(fill);
        };
        // Of small pages that are there already.
        shared.reserve(first, SOME).unwrap();
        fill(&mut span, first);
        shared.write(first, SOME, &span).unwrap();
        if !shared.gather(first, &Spans::from([(first, held(SOME, false))])) {
            assert_eq!(there(&shared), 64);
            return eprintln!("SKIPPED: the kernel makes no huge pages of files in memory");
        }
        assert_eq!(there(&shared), 512);
        fill(&mut span, first + 1);
        shared.write(first + 1, ALL, &span).unwrap();
        shared.spans().extend([
            (first, held(SOME, true)),
            (first + 1, held(ALL, true)),
            (first + 2, held([0; 4], true)),
        ]);
        assert_eq!((shared.squeeze(1), shared.squeeze(256), shared.squeeze(1)), (192, 256, 0));
        assert_eq!(there(&shared), 64 + 256);
        assert!(shared.spans().iter().eq(&Spans::from([(first, held(SOME, false)), (first + 1, held(ALL, true))])));
        for (number, pages) in [(first, SOME), (first + 1, ALL)] {
            shared.read(number, pages, &mut span).unwrap();
            for nth in runs(pages).flat_map(|(start, count)| start..start + count) {
                let page = &span.bytes()[nth * PAGE..(nth + 1) * PAGE];
                assert!(page.iter().all(|byte| *byte == number as u8 ^ nth as u8), "{number} {nth}");
            }
        }
    }
}
