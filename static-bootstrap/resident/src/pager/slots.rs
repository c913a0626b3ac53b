//! Spans of memory through which pages pass: full ones to receive into, empty ones to move evicted pages to. Moving a span of pages in or out
//! makes one of the other kind; nothing is allocated, zeroed or copied. What is there of them is of the budget, page for page ([`super::staged`]): so as many are kept
//! full as are asked for. Whoever can do without a full one does when there is none: pages that are made for one are zero at first, and each costs a fault, and an
//! interrupt on all processors, to be written to.

use sys::page::{SPAN, SPAN_PAGES};

use crate::call;
use crate::uffd::Uffd;

const MOST: usize = 40;
/// Times in a row that room was made and no full one was taken, until one less is kept.
const UNUSED: u32 = 64;

/// See the module.
pub(super) struct Slots {
    full: Stack,
    empty: Stack,
    /// Of which only so many pages from the first on are there; as (slot, pages).
    parts: [(usize, usize); MOST],
    parted: usize,
    /// Pages that are to be there in them, at most so many; and how often room was made since some were taken.
    wanted: usize,
    most: usize,
    unused: u32,
}

struct Stack {
    slots: [usize; MOST],
    len: usize,
}

impl Stack {
    const NEW: Stack = Stack { slots: [0; MOST], len: 0 };

    fn push(&mut self, slot: usize) {
        if let Some(place) = self.slots.get_mut(self.len) {
            *place = slot;
            self.len += 1;
        }
    }

    fn pop(&mut self) -> Option<usize> {
        self.len = self.len.checked_sub(1)?;
        self.slots.get(self.len).copied()
    }
}

impl Slots {
    pub(super) const NEW: Slots = Slots {
        full: Stack::NEW,
        empty: Stack::NEW,
        parts: [(0, 0); MOST],
        parted: 0,
        wanted: SPAN_PAGES,
        most: 0,
        unused: 0,
    };

    /// Makes so many, in place of what were there. A child of the program does not find them.
    pub(super) fn make(&mut self, uffd: &Uffd, count: usize) -> Result<(), u32> {
        let start = call::map(0, (count + 1) * SPAN, call::READ_WRITE, 0)?.next_multiple_of(SPAN);
        if uffd.moves {
            uffd.register(start, count * SPAN)?;
        }
        // SAFETY: what is in there stays.
        unsafe { call::advise(start, count * SPAN, call::DONTFORK) }?;
        *self = Slots { most: count / 4 * SPAN_PAGES, ..Slots::NEW };
        (0..count).for_each(|nth| self.empty.push(start + nth * SPAN));
        Ok(())
    }

    /// One to receive into: all of its pages are there, or will be.
    pub(super) fn take_any(&mut self) -> Option<Taken> {
        let full = self.full.pop().map(|at| Taken { at, there: SPAN_PAGES });
        full.or_else(|| self.empty.pop().map(|at| Taken { at, there: 0 })).or_else(|| self.pop_part())
    }

    /// One of which some pages are there, as many as are wanted if there is such a one; and how many.
    pub(super) fn take_some(&mut self, pages: usize) -> Option<(usize, usize)> {
        let parts = &self.parts[..self.parted];
        let found = match parts.iter().rposition(|(_, there)| *there >= pages) {
            Some(nth) => Some(self.remove_part(nth)),
            None => self.full.pop().map(|slot| (slot, SPAN_PAGES)),
        };
        self.note(found.is_some());
        found.or_else(|| {
            let (nth, _) = self.parts[..self.parted].iter().enumerate().max_by_key(|(_, (_, there))| *there)?;
            Some(self.remove_part(nth))
        })
    }

    /// Whether what was asked for was there.
    fn note(&mut self, found: bool) {
        self.unused = 0;
        if !found {
            self.wanted = (self.wanted + SPAN_PAGES).min(self.most);
        }
    }

    fn remove_part(&mut self, nth: usize) -> (usize, usize) {
        self.parted -= 1;
        self.parts.swap(nth, self.parted);
        self.parts[self.parted]
    }

    /// The one with the fewest pages.
    fn pop_part(&mut self) -> Option<Taken> {
        let (nth, _) = self.parts[..self.parted].iter().enumerate().min_by_key(|(_, (_, there))| *there)?;
        let (at, there) = self.remove_part(nth);
        Some(Taken { at, there })
    }

    /// A full one, for who can wait: some are left for those who cannot.
    pub(super) fn take_spare(&mut self) -> Option<usize> {
        const LEFT: usize = 2;
        if self.full.len + self.empty.len <= LEFT {
            return None;
        }
        let found = self.full.pop();
        self.note(found.is_some());
        found
    }

    /// One without any page.
    pub(super) fn take_empty(&mut self) -> Option<Taken> {
        let empty = self.empty.pop().map(|at| Taken { at, there: 0 });
        empty.or_else(|| self.pop_part()).or_else(|| self.full.pop().map(|at| Taken { at, there: SPAN_PAGES }))
    }

    /// Whether fewer pages are there than are asked for.
    pub(super) fn are_wanted(&self) -> bool {
        let parts = self.parts[..self.parted].iter().map(|(_, there)| there);
        self.full.len * SPAN_PAGES + parts.sum::<usize>() < self.wanted
    }

    /// Room was made: what nobody takes meanwhile need not be there. The one with the fewest pages of what is more than is asked for.
    pub(super) fn take_surplus(&mut self) -> Option<Taken> {
        self.unused += 1;
        if self.unused > UNUSED {
            (self.unused, self.wanted) = (0, self.wanted.saturating_sub(SPAN_PAGES));
        }
        if self.are_wanted() {
            return None;
        }
        let part = self.pop_part();
        let taken = part.or_else(|| self.full.pop().map(|at| Taken { at, there: SPAN_PAGES }))?;
        if self.are_wanted() {
            match taken.there {
                SPAN_PAGES => self.give_full(taken.at),
                there => self.give_part(taken.at, there),
            }
            return None;
        }
        Some(taken)
    }

    pub(super) fn give_full(&mut self, at: usize) {
        self.full.push(at);
    }

    pub(super) fn give_empty(&mut self, at: usize) {
        self.empty.push(at);
    }

    /// One of which only so many pages from the first on are there.
    pub(super) fn give_part(&mut self, at: usize, pages: usize) {
        if let Some(place) = self.parts.get_mut(self.parted) {
            *place = (at, pages);
            self.parted += 1;
        }
    }
}

/// A slot of which some pages are there, from the first on.
pub(super) struct Taken {
    at: usize,
    there: usize,
}

impl Taken {
    /// Its address, with all pages there.
    pub(super) fn filled(self, uffd: &Uffd) -> Result<usize, u32> {
        // Where pages are copied, a slot is memory like any other.
        if uffd.moves && self.there < SPAN_PAGES {
            super::staged((SPAN_PAGES - self.there) as i64);
            uffd.zero(self.at, SPAN)?;
        }
        Ok(self.at)
    }

    /// Its address, with no page there if pages are to be moved to it.
    pub(super) fn emptied(self, uffd: &Uffd) -> usize {
        if uffd.moves && self.there > 0 {
            // SAFETY: what is in a slot that nobody has does not matter.
            let _ = unsafe { call::advise(self.at, SPAN, call::DONTNEED) };
            super::staged(-(self.there as i64));
        }
        self.at
    }
}
