//! How much to fetch when a page is missing, and what to fetch before it is missed: decided from the places of the faults alone.

use core::ops::Range;

use super::page::SPAN_PAGES;

/// Runs of faults, upwards or downwards, that are followed at a time.
const STREAMS: usize = 16;
/// Pages of the part of memory that has a unit of its own: 64 MiB.
const REGION: u64 = 16 << 10;
/// Units are remembered for this many regions; others share.
const REGIONS: usize = 512;
/// Logarithms of units in pages: of what a region begins with, of a span.
const ORDER_FIRST: u8 = 4;
const ORDER_MAX: u8 = SPAN_PAGES.trailing_zeros() as u8;
/// Faults in order after which a run is believed.
const CONFIDENT: u8 = 2;
/// A run may leave out a few pages that are here already.
const NEAR: u64 = 8;
/// A unit doubles when a run goes on, and halves when so many faults belong to none.
const STEPS: u8 = 4;
/// Ranges of which the program has said something that are remembered.
const HINTS: usize = 32;

/// What the program says of a range (madvise(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    Nothing,
    /// One page says nothing of the others.
    Random,
    /// It will be run through.
    Sequential,
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    /// What came the last time: missed next is the page after that, or before it.
    start: u64,
    end: u64,
    down: bool,
    hits: u8,
    /// Logarithm of its unit, which is not held back by scattered faults beside it.
    order: u8,
    last: u32,
}

/// What to do about a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Fetch this page and those around it, aligned: 2^order pages.
    pub order: u8,
    /// The run goes on from this page: it is worth fetching more.
    pub ahead: Option<Ahead>,
}

/// Where a run goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    pub page: u64,
    pub down: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Policy {
    streams: [Stream; STREAMS],
    /// Logarithms of units, in [`STEPS`].
    orders: [u8; REGIONS],
    /// First pages and those after the last; empty: none. And where the next is put when there are too many.
    hints: [(u64, u64, Hint); HINTS],
    oldest: usize,
    now: u32,
    /// Pages of whole spans that come to a run by themselves, before one that is missed again.
    pub reach: u64,
}

impl Policy {
    pub const NEW: Policy = Policy {
        streams: [Stream { start: 0, end: u64::MAX, down: false, hits: 0, order: 0, last: 0 }; STREAMS],
        orders: [ORDER_FIRST * STEPS; REGIONS],
        hints: [(0, 0, Hint::Nothing); HINTS],
        oldest: 0,
        now: 0,
        reach: 0,
    };

    /// The program says something of the pages from `first` up to `end`; it replaces what it said of them before.
    pub fn hint(&mut self, first: u64, end: u64, hint: Hint) {
        for (from, to, _) in self.hints.iter_mut().filter(|(from, to, _)| *from < end && *to > first) {
            // Of what lies on both sides only the one before is still known.
            if *from < first {
                *to = first;
            } else {
                *from = (*to).min(end);
            }
        }
        if hint != Hint::Nothing {
            let free = self.hints.iter().position(|(from, to, _)| from >= to);
            let place = free.unwrap_or(self.oldest);
            self.oldest = (place + 1) % HINTS;
            self.hints[place] = (first, end, hint);
        }
    }

    fn hinted(&self, page: u64) -> Hint {
        let holds = |(from, to, _): &&(u64, u64, Hint)| (*from..*to).contains(&page);
        self.hints.iter().find(holds).map_or(Hint::Nothing, |(_, _, hint)| *hint)
    }

    /// A page is missed.
    pub fn handle_fault(&mut self, page: u64) -> Choice {
        self.handle(page, None)
    }

    /// A page is missed that was foreseen; with it come all of these, or as many of them as were missing.
    pub fn handle_foreseen(&mut self, page: u64, comes: Range<u64>) -> Choice {
        self.handle(page, Some(comes))
    }

    fn handle(&mut self, page: u64, comes: Option<Range<u64>>) -> Choice {
        self.now = self.now.wrapping_add(1);
        let hint = self.hinted(page);
        if hint == Hint::Random {
            return Choice { order: 0, ahead: None };
        }
        let sequential = hint == Hint::Sequential;
        let order = &mut self.orders[(page / REGION) as usize % REGIONS];
        let reach = self.reach;
        let followed = self.streams.iter_mut().find_map(|stream| Some((stream.follow(page, reach)?, stream)));
        if let Some((down, stream)) = followed {
            stream.hits = if stream.hits > 0 && stream.down != down { 1 } else { stream.hits.saturating_add(1) };
            (stream.down, stream.last) = (down, self.now);
            *order = ((*order / STEPS + 1) * STEPS).min(ORDER_MAX * STEPS);
            stream.order = if sequential { ORDER_MAX } else { (stream.order + 1).clamp(*order / STEPS, ORDER_MAX) };
            let Range { start, end } = comes.unwrap_or(unit(page, stream.order));
            (stream.start, stream.end) = (start, end);
            let from = if down { start.checked_sub(1) } else { Some(end) };
            let ahead = from.filter(|_| stream.hits >= CONFIDENT).map(|page| Ahead { page, down });
            return Choice { order: stream.order, ahead };
        }
        *order = order.saturating_sub(1);
        let order = if sequential { ORDER_MAX } else { order.div_ceil(STEPS) };
        let Range { start, end } = comes.unwrap_or(unit(page, order));
        let now = self.now;
        let oldest = self.streams.iter_mut().max_by_key(|stream| now.wrapping_sub(stream.last));
        if let Some(oldest) = oldest {
            let hits = if sequential { CONFIDENT } else { 0 };
            *oldest = Stream { start, end, down: false, hits, order, last: now };
        }
        Choice { order, ahead: sequential.then_some(Ahead { page: end, down: false }) }
    }
}

impl Stream {
    /// Whether it goes on with this page, and then whether downwards.
    fn follow(&self, page: u64, reach: u64) -> Option<bool> {
        let leaps = |down| self.hits >= CONFIDENT && self.down == down;
        let within = page % SPAN_PAGES as u64;
        let (above, below) = (page.wrapping_sub(self.end), self.start.wrapping_sub(page).wrapping_sub(1));
        if above < NEAR || leaps(false) && above < reach + NEAR && within < NEAR {
            return Some(false);
        }
        let last = SPAN_PAGES as u64 - NEAR;
        (below < NEAR || leaps(true) && below < reach + NEAR && within >= last).then_some(true)
    }
}

/// The pages of the unit that holds this one.
fn unit(page: u64, order: u8) -> Range<u64> {
    let start = page >> order << order;
    start..start + (1 << order)
}
