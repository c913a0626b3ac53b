//! What is here, in the order in which it came, and what servers are to be told that they need not keep.

use sys::page::{Bits, NONE, both, count, without};
use sys::resident::cause;
use sys::retention::{Retention, Source};

use super::{bounds, fatal};
use crate::call;
use crate::table::{Table, range};

/// Entries of the queue, and of a part whose memory is given back when all of it went; powers of two.
const ENTRIES: usize = 1 << 24;
const PIECE: usize = 1 << 13;
const SCATTERED: u64 = 1 << 16;
/// Entries that are passed over for a sample, at most: others wait for the queue meanwhile.
const STEPS: usize = 1 << 12;
/// Discarded pages that servers were not told of yet, at most.
const DISCARDED: usize = 1024;

/// Pages in an order: number of the span, first page, pages; those that are not in a row by [`SCATTERED`] and their bits, which follow.
struct Line {
    entries: *mut u64,
    head: usize,
    tail: usize,
    /// Where the last sample was.
    sample: usize,
}

// SAFETY: the pointer is to memory of its own.
unsafe impl Send for Line {}

impl Line {
    const NEW: Line = Line { entries: core::ptr::null_mut(), head: 0, tail: 0, sample: 0 };

    fn make(&mut self) -> Result<(), u32> {
        self.entries = call::map(0, ENTRIES * size_of::<u64>(), call::READ_WRITE, 0)? as *mut u64;
        Ok(())
    }

    fn push(&mut self, number: usize, pages: Bits) {
        let (first, end) = bounds(pages);
        if first == end {
            return;
        }
        let scattered = count(&pages) < end - first;
        self.add((number << 17 | first << 8 | (end - first - 1)) as u64 | if scattered { SCATTERED } else { 0 });
        pages.into_iter().filter(|_| scattered).for_each(|word| self.add(word));
    }

    fn add(&mut self, word: u64) {
        if self.len() >= ENTRIES - PIECE {
            fatal::say(cause::SHORT, 0, [0; 2]);
        }
        // SAFETY: `make` has made that many.
        unsafe { *self.entries.add(self.tail % ENTRIES) = word };
        self.tail += 1;
    }

    fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    fn len(&self) -> usize {
        self.tail - self.head
    }

    fn clear(&mut self) {
        self.head = self.tail;
        // SAFETY: entries that are not needed; what comes is written before it is read.
        let _ = unsafe { call::advise(self.entries as usize, ENTRIES * size_of::<u64>(), call::DONTNEED) };
    }

    /// The word at a place from the head on.
    fn word(&self, at: usize) -> u64 {
        // SAFETY: as above; it was written.
        unsafe { *self.entries.add(at % ENTRIES) }
    }

    /// Of what begins at a place: pages from the first to the last, and the place after it.
    fn extent(&self, at: usize) -> (usize, usize) {
        let entry = self.word(at);
        let words = if entry & SCATTERED == 0 { 1 } else { 1 + NONE.len() };
        ((entry as usize & 0xff) + 1, at + words)
    }

    /// What begins at a place: number of the span, and pages.
    fn entry(&self, at: usize) -> (usize, Bits) {
        let entry = self.word(at);
        let (number, first) = (entry as usize >> 17, entry as usize >> 8 & 0xff);
        let scattered = entry & SCATTERED != 0;
        let all = range(first, first + self.extent(at).0);
        (number, if scattered { core::array::from_fn(|nth| self.word(at + 1 + nth)) } else { all })
    }

    /// What is so many pages behind the last sample, if it does not take more than so many pages with what lies between. It stays in the line, which may name what is not
    /// here.
    fn sample(&mut self, behind: usize, most: usize) -> Option<(usize, Bits)> {
        if self.is_empty() {
            return None;
        }
        let (mut at, mut left) = (self.sample.max(self.head), behind);
        for steps in 0.. {
            at = if at < self.tail { at } else { self.head };
            let (len, next) = self.extent(at);
            if left < len || steps == STEPS {
                break;
            }
            (at, left) = (next, left - len);
        }
        let (len, next) = self.extent(at);
        self.sample = if len > most { at } else { next };
        (len <= most).then(|| self.entry(at))
    }

    /// What is first, if it does not take more than so many pages with what lies between.
    fn pop(&mut self, most: usize) -> Option<(usize, Bits)> {
        if self.is_empty() {
            return None;
        }
        let (len, next) = self.extent(self.head);
        if len > most {
            return None;
        }
        let (number, pages) = self.entry(self.head);
        let before = self.head / PIECE * PIECE;
        self.head = next;
        if self.head >= before + PIECE {
            // SAFETY: entries that went; what comes is not written to their places before all others are full.
            let _ = unsafe {
                call::advise(self.entries.add(before % ENTRIES) as usize, PIECE * size_of::<u64>(), call::DONTNEED)
            };
        }
        Some((number, pages))
    }
}

/// What is here, in the order in which it came: what is kept, and what is not.
pub(super) struct Queue {
    pub(super) retention: Retention,
    kept: Line,
    passing: Line,
    /// Words that it takes at most if it names nothing twice, and nothing that the program has given up.
    longest: usize,
    discarded: [(usize, Bits); DISCARDED],
    discards: usize,
}

impl Queue {
    pub(super) const NEW: Queue = Queue {
        retention: Retention::NEW,
        kept: Line::NEW,
        passing: Line::NEW,
        longest: ENTRIES,
        discarded: [(0, NONE); DISCARDED],
        discards: 0,
    };

    pub(super) fn make(&mut self) -> Result<(), u32> {
        self.kept.make()?;
        self.passing.make()
    }

    pub(super) fn push(&mut self, number: usize, pages: Bits, kept: bool) {
        let line = if kept { &mut self.kept } else { &mut self.passing };
        line.push(number, pages);
    }

    /// What is to go next, or is first of the others, if it is not more than so many pages. `samples`: it need not be the first.
    pub(super) fn pop(&mut self, most: usize, other: bool, samples: bool) -> Option<(Source, (usize, Bits))> {
        let source = self.retention.source();
        let kept = if source.is_kept() != other { !self.kept.is_empty() } else { self.passing.is_empty() };
        Some(match source {
            _ if !kept => (Source::Passing, self.passing.pop(most)?),
            Source::Sample(behind) if samples && !other => (source, self.kept.sample(behind, most)?),
            _ => (Source::Kept, self.kept.pop(most)?),
        })
    }

    /// So many pages may be here.
    pub(super) fn fit(&mut self, pages: usize) {
        self.longest = (3 * pages + PIECE).min(ENTRIES / 2);
    }

    fn words(&self) -> usize {
        self.kept.len() + self.passing.len()
    }

    /// It is to be made anew.
    pub(super) fn is_long(&self) -> bool {
        self.words() > self.longest
    }

    /// Bytes that it takes beside two pieces, which are always there.
    pub(super) fn size(&self) -> usize {
        self.words().saturating_sub(2 * PIECE) * size_of::<u64>()
    }

    /// Makes it anew: what is here, by addresses. Nothing else shortens it where pages come and are given up, but none need go.
    pub(super) fn renew(&mut self, table: &mut Table) {
        self.kept.clear();
        self.passing.clear();
        for number in table.window.given().into_iter().flatten() {
            let span = table.span(number);
            let (here, kept) = (span.resident, span.kept);
            self.kept.push(number, both(here, kept));
            self.passing.push(number, without(here, kept));
        }
    }

    /// A server need not keep these any more; false: it is to be told of too many others first.
    pub(super) fn discard(&mut self, number: usize, pages: Bits) -> bool {
        let Some(place) = self.discarded.get_mut(self.discards) else { return false };
        *place = (number, pages);
        self.discards += 1;
        true
    }

    pub(super) fn discarded(&mut self) -> Option<(usize, Bits)> {
        self.discards = self.discards.checked_sub(1)?;
        self.discarded.get(self.discards).copied()
    }
}
