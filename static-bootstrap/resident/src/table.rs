//! What is known of each page of the window, under one lock.

pub(super) use sys::page::ALL;
use sys::page::{Bits, NONE, PAGE, SPAN, SPAN_PAGES, has, range, runs, without};

use super::lock::Lock;
use super::{call, segments, window};

/// A span of the window.
#[repr(C)]
pub(super) struct Span {
    /// The program has these; and can reach these of them.
    pub(super) given: Bits,
    pub(super) mapped: Bits,
    /// These are here, or were never written; only counts once the pager runs.
    pub(super) resident: Bits,
    /// These are kept by a server.
    pub(super) remote: Bits,
    /// Somebody is about to change one of the above: leave them alone.
    pub(super) busy: Bits,
    /// Of those that are here, what is to stay longer than others.
    pub(super) kept: Bits,
    /// Of what is kept, what is to be passed over once when it would go, since it came back at once.
    pub(super) spared: Bits,
    /// When each page went the last time; 0: never.
    pub(super) went: [u16; SPAN_PAGES],
    /// Something else was put here: not 0, and never given again.
    pub(super) foreign: u64,
    /// Not 0 if some of its digests may be there.
    digested: u64,
    /// Not 0 if threads of the program may wait for pages that are busy: who settles them has to wake those.
    awaited: u64,
}

impl Span {
    /// When the first of these pages went.
    pub(super) fn went(&self, pages: Bits) -> u16 {
        runs(pages).next().map_or(0, |(first, _)| self.went[first])
    }

    /// A thread of the program waits for a page that is busy.
    pub(super) fn await_busy(&mut self) {
        self.awaited = 1;
    }

    /// Nobody of ours has these pages in his hands any more; whether a thread of the program may wait for one.
    pub(super) fn settle(&mut self, pages: Bits) -> bool {
        let is_awaited = self.awaited != 0;
        self.busy = without(self.busy, pages);
        if self.busy == NONE {
            self.awaited = 0;
        }
        is_awaited
    }

    pub(super) fn note(&mut self, pages: Bits, time: u16) {
        for (first, count) in runs(pages) {
            self.went[first..first + count].fill(time);
        }
    }
}

/// All spans; zero at first.
pub(super) struct Table {
    spans: *mut Span,
    /// Of each page what [`super::digest`] made of it when it was last given away.
    digests: *mut [u64; SPAN_PAGES],
    /// Spans of which some may be there.
    digested: usize,
    pub(super) window: window::State,
}

// SAFETY: the pointer is to memory of its own.
unsafe impl Send for Table {}

pub(super) static TABLE: Lock<Table> = Lock::new(Table {
    spans: core::ptr::null_mut(),
    digests: core::ptr::null_mut(),
    digested: 0,
    window: window::State::NEW,
});

impl Table {
    /// Before everything else.
    pub(super) fn make(&mut self) -> Result<(), u32> {
        self.spans = call::map(0, window::SIZE / SPAN * size_of::<Span>(), call::READ_WRITE, 0)? as *mut Span;
        self.digests = call::map(0, window::SIZE / PAGE * size_of::<u64>(), call::READ_WRITE, 0)? as *mut _;
        Ok(())
    }

    /// The digests of a span's pages; they are of those whose pages are busy, without the lock.
    pub(super) fn digests(&mut self, number: usize) -> *mut [u64; SPAN_PAGES] {
        self.digested += usize::from(core::mem::replace(&mut self.span(number).digested, 1) == 0);
        self.digests.wrapping_add(number.min(window::SIZE / SPAN - 1))
    }

    /// Bytes that it has of memory.
    pub(super) fn size(&self) -> usize {
        let spans: usize = self.window.given().into_iter().map(|given| given.len()).sum();
        spans * size_of::<Span>() + self.digested * size_of::<[u64; SPAN_PAGES]>()
    }

    /// Whether a page need not be fetched: it is here, or the program does not have it.
    pub(super) fn is_here(&mut self, page: u64) -> bool {
        let (span, page) = (self.span(page as usize / SPAN_PAGES), page as usize % SPAN_PAGES);
        has(&span.resident, page) || !has(&span.mapped, page)
    }

    /// A span by its number from the window's beginning.
    pub(super) fn span(&mut self, number: usize) -> &mut Span {
        let number = number.min(window::SIZE / SPAN - 1);
        // SAFETY: `make` has made that many, zero is a valid one, and `self` is borrowed alone.
        unsafe { &mut *self.spans.add(number) }
    }
}

/// The spans of a range of captured pages, each with its pages of that range.
pub(super) fn spans(at: usize, len: usize) -> impl Iterator<Item = (usize, Bits)> {
    let at = segments::to_window(at);
    let (first, last) = ((at - window::BASE) / PAGE, (at - window::BASE + len).div_ceil(PAGE));
    (first / SPAN_PAGES..last.div_ceil(SPAN_PAGES)).map(move |span| {
        let from = first.max(span * SPAN_PAGES) - span * SPAN_PAGES;
        let to = last.min((span + 1) * SPAN_PAGES) - span * SPAN_PAGES;
        (span, range(from, to))
    })
}

/// Where a page of a span is, or would be.
pub(super) fn address(span: usize, page: usize) -> usize {
    segments::from_window(window::BASE + span * SPAN + page * PAGE)
}
