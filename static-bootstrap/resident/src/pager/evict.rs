//! Makes room before it is needed: takes what came first, and gives it to the servers.

use core::sync::atomic::Ordering;

use sys::page::{Bits, PAGE, SPAN, SPAN_PAGES, count, runs};
use sys::resident::{cause, step};
use sys::syscall::{nr, syscall};

use super::fork::Gate;
use super::{ENGINE, Engine, FREE, ROOM, WANTED, fatal};
use crate::lenders::{self, Healer, Keepers};
use crate::table::{NONE, TABLE, address, both, range, with, without};
use crate::{call, counts, digest, settings, trap};

/// Entries of the queue; a power of two.
const ENTRIES: usize = 1 << 24;
/// Discarded pages that servers were not told of yet.
const DISCARDED: usize = 1024;
/// Gifts that were not answered, at most.
const OPEN: usize = 8;
/// While room is made, every so many turns are for copies of what has lost its own.
const HEALS: usize = 4;
/// Waiting for nothing in particular, servers are looked at this often, in milliseconds.
const LOOK: u64 = 1000;

/// What is here, in the order in which it came: number of the span, first page, pages.
pub(super) struct Queue {
    entries: *mut u64,
    head: usize,
    tail: usize,
    discarded: [(usize, Bits); DISCARDED],
    discards: usize,
}

// SAFETY: the pointer is to memory of its own.
unsafe impl Send for Queue {}

impl Queue {
    pub(super) const NEW: Queue =
        Queue { entries: core::ptr::null_mut(), head: 0, tail: 0, discarded: [(0, NONE); DISCARDED], discards: 0 };

    pub(super) fn make(&mut self) -> Result<(), u32> {
        self.entries = call::map(0, ENTRIES * size_of::<u64>(), call::READ_WRITE, 0)? as *mut u64;
        Ok(())
    }

    pub(super) fn push(&mut self, number: usize, first: usize, pages: usize) {
        if self.tail - self.head == ENTRIES {
            fatal::say(cause::SHORT, 0, [0; 2]);
        }
        let entry = (number << 16 | first << 8 | (pages - 1)) as u64;
        // SAFETY: `make` has made that many.
        unsafe { *self.entries.add(self.tail % ENTRIES) = entry };
        self.tail += 1;
    }

    fn pop(&mut self) -> Option<(usize, usize, usize)> {
        if self.head == self.tail {
            return None;
        }
        // SAFETY: as above; it was written.
        let entry = unsafe { *self.entries.add(self.head % ENTRIES) } as usize;
        self.head += 1;
        Some((entry >> 16, entry >> 8 & 0xff, (entry & 0xff) + 1))
    }

    /// A server need not keep these any more. When it was told too much at once, it keeps some in vain.
    pub(super) fn discard(&mut self, number: usize, pages: Bits) {
        if let Some(place) = self.discarded.get_mut(self.discards) {
            *place = (number, pages);
            self.discards += 1;
        }
    }

    fn discarded(&mut self) -> Option<(usize, Bits)> {
        self.discards = self.discards.checked_sub(1)?;
        self.discarded.get(self.discards).copied()
    }
}

/// A gift that was not answered.
#[derive(Clone, Copy)]
struct Gift {
    number: usize,
    /// All that were evicted, and those of them that the server keeps.
    pages: Bits,
    data: Bits,
    keepers: Keepers,
}

pub(super) static GATE: Gate = Gate::new();

struct Evictor {
    engine: Engine,
    /// In the order in which they were sent.
    open: [Gift; OPEN],
    len: usize,
    /// Bytes that may be kept here, as the agent said last.
    budget: u64,
    healer: Healer,
}

/// The thread.
pub(super) extern "C" fn run(_: usize) -> ! {
    let Some(engine) = *ENGINE.lock() else { fatal::end() };
    let none = Gift { number: 0, pages: NONE, data: NONE, keepers: Keepers::NONE };
    let mut evictor =
        Evictor { engine, open: [none; OPEN], len: 0, budget: settings::get().local, healer: Healer::new() };
    let (mut passed, mut turn) = (GATE.pass(), 0usize);
    loop {
        let seen = WANTED.now();
        evictor.follow_budget();
        if GATE.is_closed() {
            while evictor.len > 0 {
                evictor.complete();
            }
            drop(passed);
            passed = GATE.pass();
        }
        evictor.discard();
        turn = turn.wrapping_add(1);
        if turn.is_multiple_of(HEALS) && evictor.heal() {
            continue;
        }
        let enough = FREE.load(Ordering::Acquire) >= engine.reserve;
        if !enough && evictor.evict() {
            continue;
        }
        if evictor.len > 0 {
            evictor.complete();
            continue;
        }
        if enough && evictor.heal() {
            continue;
        }
        // Nothing can be taken, or need be.
        WANTED.wait(seen, if enough { LOOK } else { 1 });
        if enough {
            lenders::look();
        }
    }
}

impl Evictor {
    /// Tells how things are, and does as the agent says: what may stay here can become less, and more again.
    fn follow_budget(&mut self) {
        let page = |bytes: u64| (bytes / PAGE as u64) as i64;
        let beside = (self.engine.beside / PAGE) as i64;
        let resident = page(self.budget) - beside - FREE.load(Ordering::Relaxed);
        let Some(budget) = counts::keep(resident, lenders::kept()) else { return };
        // Less would be evicted as soon as it comes.
        let budget = budget.max(self.engine.beside as u64 + self.engine.reserve as u64 * 2 * PAGE as u64);
        if budget != self.budget {
            FREE.fetch_add(page(budget) - page(self.budget), Ordering::AcqRel);
            self.budget = budget;
            ROOM.tell();
        }
    }

    /// Tells servers what they need not keep.
    fn discard(&mut self) {
        loop {
            let next = self.engine.queue.lock().discarded();
            let Some((number, pages)) = next else { return };
            lenders::count_kept(number, 0, count(&pages));
            self.give(Gift { number, pages: NONE, data: NONE, keepers: Keepers::NONE }, NONE, pages, 0);
        }
    }

    /// Evicts what came first; false when there is nothing.
    fn evict(&mut self) -> bool {
        let engine = self.engine;
        // Others have them all for a moment.
        let Some(slot) = engine.slots.lock().take_empty() else { return false };
        let next = engine.queue.lock().pop();
        let Some((number, first, len)) = next else {
            slot.untouched(&mut engine.slots.lock());
            return false;
        };
        let mut table = TABLE.lock();
        let span = table.span(number);
        let asked = without(both(range(first, first + len), span.resident), span.busy);
        let held = both(asked, trap::held(number));
        let pages = without(asked, held);
        span.resident = without(span.resident, pages);
        span.busy = with(span.busy, pages);
        let kept = both(span.remote, pages);
        drop(table);
        engine.enqueue(number, held);
        if pages == NONE {
            slot.untouched(&mut engine.slots.lock());
            return held == NONE;
        }
        let slot = slot.emptied();
        let mut moved = NONE;
        for (first, count) in runs(pages) {
            if engine.uffd.take(slot + first * PAGE, address(number, first), count * PAGE).is_ok() {
                moved = with(moved, range(first, first + count));
                continue;
            }
            // What another process has in common with this one, after a fork, moves when this one has its own. Some may stay: the kernel has pinned them.
            let run = range(first, first + count);
            for (first, count) in runs(there(address(number, 0), run)) {
                // SAFETY: this writes nothing; and pages that are not there, which would be waited for, were left out.
                let _ = unsafe { call::advise(address(number, first), count * PAGE, call::POPULATE_WRITE) };
                if engine.uffd.take(slot + first * PAGE, address(number, first), count * PAGE).is_err() {
                    for page in first..first + count {
                        let _ = engine.uffd.take(slot + page * PAGE, address(number, page), PAGE);
                    }
                }
            }
            moved = with(moved, without(run, there(address(number, 0), run)));
        }
        let stuck = without(pages, moved);
        if stuck != NONE {
            engine.arrived(number, stuck);
        }
        FREE.fetch_add(count(&moved) as i64, Ordering::AcqRel);
        ROOM.tell();
        let data = contents(slot, moved);
        let sent = without(data, both(kept, unchanged(number, slot, data)));
        let zero = both(kept, without(moved, data));
        lenders::count_kept(number, count(&data), count(&both(kept, moved)));
        counts::evicted(count(&moved), count(&without(data, sent)), count(&without(moved, data)));
        let gift = Gift { number, pages: moved, data, keepers: Keepers::NONE };
        if sent == NONE && zero == NONE {
            self.settle(&gift);
        } else {
            self.give(gift, sent, zero, slot);
        }
        // What was sent is the kernel's now.
        if data == crate::table::ALL {
            engine.slots.lock().give_full(slot);
        } else {
            // SAFETY: a slot of ours; what is left in it does not matter.
            let _ = unsafe { call::advise(slot, SPAN, call::DONTNEED) };
            engine.slots.lock().give_empty(slot);
        }
        moved != NONE
    }

    fn give(&mut self, gift: Gift, sent: Bits, zero: Bits, slot: usize) {
        if self.len == OPEN {
            self.complete();
        }
        let keepers = lenders::give(gift.number, sent, zero, slot);
        self.open[self.len] = Gift { keepers, ..gift };
        self.len += 1;
    }

    /// Waits for the oldest answer.
    fn complete(&mut self) {
        let gift = self.open[0];
        let open = |server| self.open[..self.len].iter().filter(|other| other.keepers.has(server)).count();
        lenders::given(gift.keepers, open);
        self.open.copy_within(1..self.len, 0);
        self.len -= 1;
        self.settle(&gift);
    }

    /// The server has it: it can be fetched from there.
    fn settle(&self, gift: &Gift) {
        if gift.pages == NONE {
            return;
        }
        let mut table = TABLE.lock();
        let span = table.span(gift.number);
        span.remote = with(without(span.remote, gift.pages), gift.data);
        span.busy = without(span.busy, gift.pages);
        drop(table);
        self.engine.settled(gift.number, gift.pages);
    }

    /// Makes a copy of something that has none; false when nothing is without, or no slot is to spare.
    fn heal(&mut self) -> bool {
        if !Healer::is_needed() {
            return false;
        }
        while self.len > 0 {
            self.complete();
        }
        let Some(slot) = self.engine.slots.lock().take_spare() else { return false };
        let slot = match slot.filled(&self.engine.uffd) {
            Ok(slot) => slot,
            Err(errno) => super::refused(step::FILL, errno),
        };
        let healed = self.healer.step(slot);
        self.engine.slots.lock().give_full(slot);
        healed
    }
}

/// Which of these pages of a span or a slot are there at all.
fn there(base: usize, pages: Bits) -> Bits {
    let mut bytes = [0u8; SPAN_PAGES];
    // SAFETY: a byte for each page of a mapped range.
    let _ = unsafe { call::gated(nr::MINCORE, [base, SPAN, bytes.as_mut_ptr() as usize, 0, 0, 0]) };
    core::array::from_fn(|at| {
        let bits = (0..64).fold(0, |all, bit| all | (u64::from(bytes[at * 64 + bit]) & 1) << bit);
        bits & pages[at]
    })
}

/// Which of these pages hold anything but zeros.
fn contents(slot: usize, pages: Bits) -> Bits {
    let mut data = NONE;
    for (first, count) in runs(there(slot, pages)) {
        for page in first..first + count {
            // SAFETY: it is there, and nobody else's.
            let words = unsafe { &*((slot + page * PAGE) as *const [u64; PAGE / 8]) };
            if words.iter().any(|word| *word != 0) {
                data[page / 64] |= 1 << (page % 64);
            }
        }
    }
    data
}

/// Which of these pages are what they were when they were last given away.
fn unchanged(number: usize, slot: usize, pages: Bits) -> Bits {
    let digests = TABLE.lock().digests(number);
    let mut same = NONE;
    for page in runs(pages).flat_map(|(first, count)| first..first + count) {
        // SAFETY: the page is there, and nobody else's; its digest is ours while it is busy.
        let (words, kept) = unsafe { (&*((slot + page * PAGE) as *const [u64; PAGE / 8]), &mut (*digests)[page]) };
        let now = digest::of(words);
        if core::mem::replace(kept, now) == now {
            same[page / 64] |= 1 << (page % 64);
        }
    }
    same
}
