//! Spans of memory through which pages pass: full ones to receive into, empty ones to move evicted pages to. Moving a span of pages in or out
//! makes one of the other kind; nothing is allocated, zeroed or copied. Whoever can do without a full one does when there is none: pages that are made for
//! one are zero at first, and each costs a fault, and an interrupt on all processors, to be written to.

use sys::page::{SPAN, SPAN_PAGES};

use crate::call;
use crate::uffd::Uffd;

const MOST: usize = 40;

/// See the module.
pub(super) struct Slots {
    full: Stack,
    empty: Stack,
    /// Of which only so many pages from the first on are there; as (slot, pages).
    parts: [(usize, usize); MOST],
    parted: usize,
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
    pub(super) const NEW: Slots = Slots { full: Stack::NEW, empty: Stack::NEW, parts: [(0, 0); MOST], parted: 0 };

    /// Makes so many, in place of what were there. A child of the program does not find them.
    pub(super) fn make(&mut self, uffd: &Uffd, count: usize) -> Result<(), u32> {
        let start = call::map(0, (count + 1) * SPAN, call::READ_WRITE, 0)?.next_multiple_of(SPAN);
        if uffd.moves {
            uffd.register(start, count * SPAN)?;
        }
        // SAFETY: what is in there stays.
        unsafe { call::advise(start, count * SPAN, call::DONTFORK) }?;
        *self = Slots::NEW;
        (0..count).for_each(|nth| self.empty.push(start + nth * SPAN));
        Ok(())
    }

    /// One to receive into: all of its pages are there, or will be.
    pub(super) fn take_any(&mut self) -> Option<Taken> {
        let full = self.full.pop().map(|at| Taken { at, ready: true });
        full.or_else(|| self.empty.pop().or_else(|| self.pop_part()).map(|at| Taken { at, ready: false }))
    }

    /// One of which some pages are there, as many as are wanted if there is such a one; and how many.
    pub(super) fn take_some(&mut self, pages: usize) -> Option<(usize, usize)> {
        let parts = &self.parts[..self.parted];
        if let Some(nth) = parts.iter().rposition(|(_, there)| *there >= pages) {
            return Some(self.remove_part(nth));
        }
        if let Some(slot) = self.full.pop() {
            return Some((slot, SPAN_PAGES));
        }
        let (nth, _) = parts.iter().enumerate().max_by_key(|(_, (_, there))| *there)?;
        Some(self.remove_part(nth))
    }

    fn remove_part(&mut self, nth: usize) -> (usize, usize) {
        self.parted -= 1;
        self.parts.swap(nth, self.parted);
        self.parts[self.parted]
    }

    /// The one with the fewest pages.
    fn pop_part(&mut self) -> Option<usize> {
        let (nth, _) = self.parts[..self.parted].iter().enumerate().min_by_key(|(_, (_, there))| *there)?;
        Some(self.remove_part(nth).0)
    }

    /// As [`Slots::take_full`], for who can wait: some are left for those who cannot.
    pub(super) fn take_spare(&mut self) -> Option<usize> {
        const LEFT: usize = 2;
        if self.full.len + self.empty.len > LEFT { self.full.pop() } else { None }
    }

    /// One without any page.
    pub(super) fn take_empty(&mut self) -> Option<Taken> {
        let empty = self.empty.pop().map(|at| Taken { at, ready: true });
        empty.or_else(|| self.pop_part().or_else(|| self.full.pop()).map(|at| Taken { at, ready: false }))
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

/// A slot; one that is not ready is of the other kind.
pub(super) struct Taken {
    at: usize,
    ready: bool,
}

impl Taken {
    /// Its address, with all pages there.
    pub(super) fn filled(self, uffd: &Uffd) -> Result<usize, u32> {
        if !self.ready {
            // Where pages are copied, a slot is memory like any other.
            if uffd.moves {
                uffd.zero(self.at, SPAN)?;
            }
        }
        Ok(self.at)
    }

    /// Its address, with no page there if pages are to be moved to it.
    pub(super) fn emptied(self, uffd: &Uffd) -> usize {
        if !self.ready && uffd.moves {
            // SAFETY: what is in a slot that nobody has does not matter.
            let _ = unsafe { call::advise(self.at, SPAN, call::DONTNEED) };
        }
        self.at
    }
}
