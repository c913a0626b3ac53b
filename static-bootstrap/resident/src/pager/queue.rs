//! What is here, in the order in which it came, and what servers are to be told that they need not keep.

use sys::line::{Line, PIECE};
use sys::page::{Bits, NONE, SPAN_PAGES, both, count, without};
use sys::resident::cause;
use sys::retention::{Retention, Source};

use super::fatal;
use crate::call;
use crate::table::Table;

/// Words of a line.
const WORDS: usize = 1 << 24;
/// Discarded pages that servers were not told of yet, at most.
const DISCARDED: usize = 1024;

/// A line that takes what is used of it.
fn line() -> Result<Line, u32> {
    let at = call::map(0, WORDS * size_of::<u64>(), call::READ_WRITE, 0)?;
    // SAFETY: memory of its own, zeroed, for good.
    Ok(Line::new(unsafe { core::slice::from_raw_parts_mut(at as *mut u64, WORDS) }))
}

/// Gives back the memory of words that are not needed; what comes is written before it is read.
fn give_back(words: &mut [u64]) {
    // SAFETY: they are the caller's alone, and may be zero.
    let _ = unsafe { call::advise(words.as_mut_ptr() as usize, size_of_val(words), call::DONTNEED) };
}

/// What is here, in the order in which it came: what is kept, and what is not.
pub(super) struct Queue {
    pub(super) retention: Retention,
    kept: Line,
    passing: Line,
    /// It was more than there was room for.
    next: Option<(Source, (usize, Bits))>,
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
        next: None,
        longest: WORDS,
        discarded: [(0, NONE); DISCARDED],
        discards: 0,
    };

    pub(super) fn make(&mut self) -> Result<(), u32> {
        (self.kept, self.passing) = (line()?, line()?);
        Ok(())
    }

    pub(super) fn push(&mut self, number: usize, pages: Bits, kept: bool) {
        let line = if kept { &mut self.kept } else { &mut self.passing };
        if !line.push(number, pages) {
            fatal::say(cause::SHORT, 0, [0; 2]);
        }
    }

    /// What is to go next, or is first of the others, if it is not more than so many pages: else that is next. `samples`: it need not be the first.
    pub(super) fn pop(&mut self, most: usize, other: bool, samples: bool) -> Option<(Source, (usize, Bits))> {
        let next = self.next.take().or_else(|| self.take(other, samples))?;
        if count(&next.1.1) <= most {
            return Some(next);
        }
        self.next = Some(next);
        None
    }

    fn take(&mut self, other: bool, samples: bool) -> Option<(Source, (usize, Bits))> {
        let source = self.retention.source();
        let kept = if source.is_kept() != other { !self.kept.is_empty() } else { self.passing.is_empty() };
        Some(match source {
            _ if !kept => (Source::Passing, self.passing.pop(SPAN_PAGES, give_back)?),
            Source::Sample(behind) if samples && !other => (source, self.kept.sample(behind, SPAN_PAGES)?),
            _ => (Source::Kept, self.kept.pop(SPAN_PAGES, give_back)?),
        })
    }

    /// So many pages may be here.
    pub(super) fn fit(&mut self, pages: usize) {
        self.longest = (3 * pages + PIECE).min(WORDS / 2);
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
        self.next = None;
        self.kept.clear(give_back);
        self.passing.clear(give_back);
        for number in table.window.given().into_iter().flatten() {
            let span = table.span(number);
            let (here, kept) = (span.resident, span.kept);
            self.push(number, both(here, kept), true);
            self.push(number, without(here, kept), false);
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
