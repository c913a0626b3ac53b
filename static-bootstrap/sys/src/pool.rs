//! Slots, each of one span, through which pages pass: which of them have pages, and how many of those are to be kept for who receives into them next.
//!
//! A page that a slot has is of the program's budget like one that the program has. So no more are kept than were asked for of late: one who finds too few has one slot more be
//! kept, and each time that room was made often without anybody taking any, it is one less.

use super::page::SPAN_PAGES;

/// Slots at most.
const MOST: usize = 40;
/// Slots with no page or all that are left for who cannot wait: so many, or half of all.
const LEFT: usize = 5;
/// Times in a row that room is made and no pages are taken, until fewer are kept.
const UNUSED: u32 = 16;
/// With so many pages a slot is as good as a full one to who can wait: the others are made.
const NEARLY: usize = SPAN_PAGES / 4 * 3;

/// A slot: its address, and how many of its pages are there, from the first on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    pub at: usize,
    pub there: usize,
}

impl Slot {
    pub const fn empty(at: usize) -> Slot {
        Slot { at, there: 0 }
    }

    pub const fn full(at: usize) -> Slot {
        Slot { at, there: SPAN_PAGES }
    }
}

/// See the module. A slot that was taken is the taker's until it is given.
#[derive(Debug)]
pub struct Pool {
    slots: [Slot; MOST],
    len: usize,
    /// Pages that are to be there, at most so many; and how often room was made since any were taken.
    wanted: usize,
    most: usize,
    unused: u32,
    left: usize,
    /// Pages that are kept at most, where that is said.
    narrow: Option<usize>,
}

impl Pool {
    pub const NEW: Pool =
        Pool { slots: [Slot::empty(0); MOST], len: 0, wanted: SPAN_PAGES, most: 0, unused: 0, left: 0, narrow: None };

    /// So many slots, without pages, of which a third may be kept full while nobody has them.
    pub fn new(slots: impl ExactSizeIterator<Item = usize>) -> Pool {
        let (most, left) = (slots.len() / 3 * SPAN_PAGES, LEFT.min(slots.len() / 2));
        let mut pool = Pool { most, left, ..Pool::NEW };
        slots.for_each(|at| pool.give(Slot::empty(at)));
        pool
    }

    /// There are never more than [`MOST`]. What was given last is taken first, since it is in the processors' caches.
    pub fn give(&mut self, slot: Slot) {
        if let Some(place) = self.slots.get_mut(self.len) {
            *place = slot;
            self.len += 1;
        }
    }

    /// The last for which `rank` is greatest, if that is not 0.
    fn take_by(&mut self, rank: impl Fn(&Slot) -> usize) -> Option<Slot> {
        let ranked = self.slots[..self.len].iter().enumerate().map(|(nth, slot)| (rank(slot), nth));
        let (_, nth) = ranked.max().filter(|(rank, _)| *rank > 0)?;
        let slot = self.slots[nth];
        self.slots.copy_within(nth + 1..self.len, nth);
        self.len -= 1;
        Some(slot)
    }

    fn take_full(&mut self) -> Option<Slot> {
        self.take_by(|slot| slot.there / SPAN_PAGES)
    }

    fn there(&self) -> usize {
        self.slots[..self.len].iter().map(|slot| slot.there).sum()
    }

    /// Pages of slots that are as good as full.
    fn whole(&self) -> usize {
        self.slots[..self.len].iter().filter(|slot| slot.there >= NEARLY).count() * SPAN_PAGES
    }

    /// Whether what was asked for was there.
    fn note(&mut self, found: bool) {
        self.unused = 0;
        if !found {
            let most = self.narrow.map_or(self.most, |narrow| narrow.min(self.most));
            self.wanted = (self.wanted + SPAN_PAGES).min(most);
        }
    }

    /// From now on no more than so many pages are kept, whatever is asked for; `None`: as many as usual.
    pub fn narrow(&mut self, most: Option<usize>) {
        self.narrow = most;
        self.wanted = most.map_or(self.wanted, |most| self.wanted.min(most));
    }

    /// One to receive into that will have all of its pages: a full one, an empty one, or else one that has few.
    pub fn take_any(&mut self) -> Option<Slot> {
        self.take_full().or_else(|| self.take_empty())
    }

    /// One with so many pages, if possible without more; else the one with the most. `again`: who asks has waited for it.
    pub fn take_some(&mut self, pages: usize, again: bool) -> Option<Slot> {
        let enough = |slot: &Slot| usize::from((pages..SPAN_PAGES).contains(&slot.there));
        let found = self.take_by(enough).or_else(|| self.take_full());
        self.note(found.is_some() || again);
        found.or_else(|| self.take_by(|slot| slot.there))
    }

    /// Whether somebody who can wait may take one.
    fn can_spare(&self) -> bool {
        self.len - self.parts() > self.left
    }

    /// A full one, for who can wait: not one of the last. Or nearly, if there is room for so many pages, which are to be made.
    pub fn take_spare(&mut self, room: usize) -> Option<Slot> {
        if !self.can_spare() {
            return None;
        }
        let found =
            self.take_by(|slot| if slot.there < NEARLY.max(SPAN_PAGES.saturating_sub(room)) { 0 } else { slot.there });
        self.note(found.is_some());
        found
    }

    /// The same without pages.
    pub fn take_spare_empty(&mut self) -> Option<Slot> {
        if self.can_spare() { self.take_by(|slot| usize::from(slot.there == 0)) } else { None }
    }

    /// The one with the fewest pages, to have none.
    pub fn take_empty(&mut self) -> Option<Slot> {
        self.take_by(|slot| 1 + SPAN_PAGES - slot.there)
    }

    /// The same for who moves pages to it. While none can be spared, what is there of one of several parts is given up before another slot is lost to who can wait: of the one with the
    /// fewest pages.
    pub fn take_to_fill(&mut self) -> Option<Slot> {
        let is_scarce = self.narrow.is_none() && self.parts() > 1 && !self.can_spare();
        let is_before_empty = |slot: &Slot| is_scarce && (1..NEARLY).contains(&slot.there);
        self.take_by(|slot| 1 + SPAN_PAGES - slot.there + if is_before_empty(slot) { SPAN_PAGES } else { 0 })
    }

    fn parts(&self) -> usize {
        self.slots[..self.len].iter().filter(|slot| (1..SPAN_PAGES).contains(&slot.there)).count()
    }

    /// Whether more pages should be kept than are there.
    pub fn is_short(&self) -> bool {
        self.there() < self.wanted
    }

    /// The same, and at most half of them are in slots that are as good as full: who makes room is to begin before there are none.
    pub fn is_low(&self) -> bool {
        self.is_short() && 2 * self.whole() <= self.wanted
    }

    /// Room is being made: one whose pages are more than should be kept.
    pub fn take_surplus(&mut self) -> Option<Slot> {
        self.unused += 1;
        if self.unused > UNUSED {
            (self.unused, self.wanted) = (0, self.wanted.saturating_sub(SPAN_PAGES));
        }
        let surplus = self.there().checked_sub(self.wanted)?;
        self.take_by(|slot| if slot.there <= surplus { slot.there } else { 0 })
    }
}
