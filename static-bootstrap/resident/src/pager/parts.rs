//! Pages of a span that are evicted together: in a slot, before a server has them.

use sys::digest::{self, Key, LINE, Words};
use sys::page::{Bits, Layout, NONE, PAGE, SPAN_PAGES, both, count, without};

use crate::counts;
use crate::lenders::{self, Keepers};

/// A gift that was not answered.
#[derive(Clone, Copy)]
pub(super) struct Gift {
    pub(super) number: usize,
    /// All that were evicted, and those of them that the server keeps.
    pub(super) pages: Bits,
    pub(super) data: Bits,
    pub(super) keepers: Keepers,
}

impl Gift {
    pub(super) const NONE: Gift = Gift { number: 0, pages: NONE, data: NONE, keepers: Keepers::NONE };
}

/// What is evicted together.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) gift: Gift,
    /// What the server is sent, what it is told, and what it has.
    pub(super) sent: Bits,
    pub(super) zero: Bits,
    pub(super) kept: Bits,
    /// Where they lie; and which of those that were evicted are there.
    pub(super) base: Layout,
    pub(super) there: Bits,
    /// Of the span's pages, if any are there: those of what was evicted are ours until it is settled.
    pub(super) digests: *mut [u64; SPAN_PAGES],
}

impl Part {
    pub(super) const NONE: Part = Part {
        gift: Gift::NONE,
        sent: NONE,
        zero: NONE,
        kept: NONE,
        base: Layout::NOWHERE,
        there: NONE,
        digests: core::ptr::null_mut(),
    };

    /// Servers need not be told of it.
    pub(super) fn is_nothing(&self) -> bool {
        self.sent == NONE && self.zero == NONE
    }

    /// All its places have a page.
    pub(super) fn is_whole(&self) -> bool {
        count(&self.there) == self.base.places()
    }

    /// Has the processor fetch what is looked at first when it is weighed.
    pub(super) fn warm(&self) {
        /// Bytes of a page until the processor is ahead by itself.
        const BEGINNING: usize = 4 * LINE;
        for (first, page, _) in self.base.runs(self.there) {
            digest::fetch(self.digests.wrapping_byte_add(first * size_of::<u64>()).cast());
            (page..page + BEGINNING).step_by(LINE).for_each(|at| digest::fetch(at as *const u8));
        }
    }

    /// Finds what of it is to be sent.
    pub(super) fn weigh(&mut self, key: &Key) {
        let (number, pages, kept) = (self.gift.number, self.gift.pages, self.kept);
        let (data, unchanged) = self.contents(key);
        self.gift.data = data;
        self.sent = without(data, both(kept, unchanged));
        self.zero = both(kept, without(pages, data));
        lenders::count_kept(number, count(&data), count(&both(kept, pages)));
        counts::evicted(count(&pages), count(&without(data, self.sent)), count(&without(pages, data)));
    }

    /// Which of its pages hold anything but zeros; and which of those are what they were when they were last given away.
    fn contents(&self, key: &Key) -> (Bits, Bits) {
        let (mut data, mut same) = (NONE, NONE);
        let places = self.base.runs(self.there);
        for (page, at) in
            places.flat_map(|(first, at, count)| (0..count).map(move |nth| (first + nth, at + nth * PAGE)))
        {
            // SAFETY: the page is there, and nobody else's; its digest is ours while it is busy.
            let (words, kept) = unsafe { (&*(at as *const Words), &mut (*self.digests)[page]) };
            if words.iter().all(|word| *word == 0) {
                continue;
            }
            data[page / 64] |= 1 << (page % 64);
            let now = key.digest(words);
            if core::mem::replace(kept, now) == now {
                same[page / 64] |= 1 << (page % 64);
            }
        }
        (data, same)
    }
}
