//! How much to fetch when a page is missing, and what to fetch before it is missed: decided from the places of the faults alone.

use super::page::SPAN_PAGES;

/// Ascending runs of faults that are followed at a time.
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

#[derive(Debug, Clone, Copy)]
struct Stream {
    /// The page that is missed next, if the run goes on.
    next: u64,
    hits: u8,
    last: u32,
}

/// What to do about a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Fetch this page and those around it, aligned: 2^order pages.
    pub order: u8,
    /// The run goes on from this page: it is worth fetching more.
    pub ahead: Option<u64>,
}

/// See the module.
#[derive(Debug)]
pub struct Policy {
    streams: [Stream; STREAMS],
    /// Logarithms of units, in [`STEPS`].
    orders: [u8; REGIONS],
    now: u32,
    /// Pages of whole spans that come to a run by themselves, before one that is missed again.
    pub reach: u64,
}

impl Policy {
    pub const NEW: Policy = Policy {
        streams: [Stream { next: u64::MAX, hits: 0, last: 0 }; STREAMS],
        orders: [ORDER_FIRST * STEPS; REGIONS],
        now: 0,
        reach: 0,
    };

    /// A page is missed.
    pub fn handle_fault(&mut self, page: u64) -> Choice {
        self.handle(page, None)
    }

    /// A page is missed that was foreseen; with it come all up to `end`.
    pub fn handle_foreseen(&mut self, page: u64, end: u64) -> Choice {
        self.handle(page, Some(end))
    }

    fn handle(&mut self, page: u64, comes: Option<u64>) -> Choice {
        self.now = self.now.wrapping_add(1);
        let order = &mut self.orders[(page / REGION) as usize % REGIONS];
        let reach = self.reach;
        let follows = |stream: &&mut Stream| {
            let apart = page.wrapping_sub(stream.next);
            let leaps = stream.hits >= CONFIDENT && apart < reach + NEAR && page % (SPAN_PAGES as u64) < NEAR;
            apart < NEAR || leaps
        };
        if let Some(stream) = self.streams.iter_mut().find(follows) {
            stream.hits = stream.hits.saturating_add(1);
            stream.last = self.now;
            *order = ((*order / STEPS + 1) * STEPS).min(ORDER_MAX * STEPS);
            let order = *order / STEPS;
            stream.next = comes.unwrap_or(end(page, order));
            let ahead = (stream.hits >= CONFIDENT).then_some(stream.next);
            return Choice { order, ahead };
        }
        *order = order.saturating_sub(1);
        let order = order.div_ceil(STEPS);
        let now = self.now;
        let oldest = self.streams.iter_mut().max_by_key(|stream| now.wrapping_sub(stream.last));
        if let Some(oldest) = oldest {
            *oldest = Stream { next: comes.unwrap_or(end(page, order)), hits: 0, last: now };
        }
        Choice { order, ahead: None }
    }
}

/// The first page after the unit that holds this one.
fn end(page: u64, order: u8) -> u64 {
    ((page >> order) + 1) << order
}
