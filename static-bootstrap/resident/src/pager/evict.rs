//! Makes room before it is needed: takes what is to go next (what came first, but for samples of what is kept), and gives it to the servers.

use core::sync::atomic::{AtomicBool, Ordering};

use sys::digest::Key;
use sys::page::{Bits, Layout, NONE, PAGE, SPAN_PAGES, both, bounds, count, range, runs, with, without};
use sys::pool::Slot;
use sys::resident::{cause, step};
use sys::retention::Source;
use sys::syscall::{nr, syscall};

use super::fork::Gate;
use super::parts::{Gift, Part};
use super::{ENGINE, Engine, FREE, LEAST, MOST, ROOM, WANTED, ahead, fatal, gather, index, slots};
use crate::lenders::{self, Healer, Keepers, Parcel, Returns};
use crate::pins::Pins;
use crate::table::{TABLE, address};
use crate::{call, counts, digest, holds, processors, settings};

/// Gifts that were not answered, at most; and what is evicted at once.
const OPEN: usize = 64;
const PARTS: usize = TURN;
/// And so many pages, about, where all threads share a processor: nobody uses what goes earlier than it has to.
const TURN: usize = 96;
/// While room is made, every so many turns are for copies of what has lost its own.
const HEALS: usize = 4;
/// And every so many are for a look at the servers: one of this host may be needed for nothing.
const LOOKS: usize = 256;
/// And after every so many the program gets a page of what slots do not have any more.
const FADES: usize = 2;
/// Waiting for nothing in particular, servers are looked at this often, in milliseconds.
const LOOK: u64 = 1000;

enum Taken {
    Pages,
    /// They have to stay for now.
    Held,
    Nothing,
}

pub(super) static GATE: Gate = Gate::new();
/// Room is being made.
pub(super) static BUSY: AtomicBool = AtomicBool::new(false);

struct Evictor {
    engine: Engine,
    /// In the order in which they were sent.
    open: [Gift; OPEN],
    len: usize,
    /// Bytes that may be kept here, as the agent said last; and those that it takes to know of pages.
    budget: usize,
    known: usize,
    /// Pages that fit beside slots, as was told last to who decides what comes and stays; and the most that slots had of late.
    room: usize,
    staged: usize,
    /// What is in the slot that is being filled is no room until all of it was sent, and none need be left for it: where all threads share a processor nobody would use that room meanwhile.
    is_counted: bool,
    healer: Healer,
    returns: Returns,
    /// Where pages are copied.
    pins: Option<Pins>,
    key: Key,
}

/// The thread.
pub(super) extern "C" fn run(_: usize) -> ! {
    let Some(engine) = *ENGINE.lock() else { fatal::end() };
    gather::join(gather::BACK);
    let (healer, returns) = (Healer::new(), Returns::new());
    let (budget, known) = (settings::get().local as usize, super::known());
    let (open, pins) = ([Gift::NONE; OPEN], Pins::new(!engine.uffd.moves));
    let key = digest::key();
    let mut evictor = Evictor {
        engine,
        open,
        len: 0,
        budget,
        known,
        room: 0,
        staged: 0,
        is_counted: false,
        healer,
        returns,
        pins,
        key,
    };
    let (mut behind, mut turn) = (false, 0usize);
    let mut passed = GATE.pass();
    loop {
        let seen = WANTED.now();
        let narrow = evictor.follow_use();
        evictor.follow_budget(narrow || turn.is_multiple_of(FADES));
        if GATE.is_closed() {
            while evictor.len > 0 {
                evictor.complete();
            }
            drop(passed);
            passed = GATE.pass();
        }
        evictor.discard();
        evictor.shorten();
        turn = turn.wrapping_add(1);
        if turn.is_multiple_of(LOOKS) {
            evictor.look();
        }
        if turn.is_multiple_of(HEALS) && evictor.heal() {
            continue;
        }
        let free = FREE.load(Ordering::Acquire);
        let goes_on = behind;
        // Once it has begun, it goes on for a while: whoever makes room is woken seldom.
        let least = LEAST.load(Ordering::Relaxed);
        behind = free < if goes_on && !narrow && !gather::is_singly() { 2 * least } else { least };
        if behind && (ahead::expire(&engine, false) || evictor.give_surplus()) {
            continue;
        }
        // Slots are seldom whole where pages go in pieces: then enough is free.
        let plenty = 2 * engine.reserve + SPAN_PAGES as i64;
        if engine.makes_slots() {
            let pool = engine.slots.lock();
            behind |= pool.is_short() && (goes_on || free < plenty) || pool.is_low();
        }
        let enough = !behind;
        BUSY.store(behind, Ordering::Relaxed);
        if behind && evictor.evict() {
            if gather::is_gathered() {
                processors::give_way();
            }
            continue;
        }
        if evictor.len > 0 {
            evictor.complete();
            continue;
        }
        if enough && evictor.heal() || free < 0 && ahead::expire(&engine, true) {
            continue;
        }
        // Nothing can be taken, or need be.
        let rest = if gather::is_bound() { gather::LOOK } else { LOOK };
        WANTED.wait(seen, if enough { rest } else { 1 });
        if enough && WANTED.now() == seen {
            gather::rest();
        }
        if enough {
            evictor.look();
        }
    }
}

impl Evictor {
    /// Tells how things are, and does as the agent says: what may stay here can become less, and more again. `fades`: so can what slots are taken to have.
    fn follow_budget(&mut self, fades: bool) {
        let most = MOST.load(Ordering::Relaxed);
        if let Some(budget) = counts::keep(most - FREE.load(Ordering::Relaxed), lenders::kept()) {
            self.budget = budget as usize;
        }
        self.is_counted = self.engine.uffd.moves && gather::is_singly();
        let staged = if self.is_counted { 0 } else { self.engine.staged };
        let fits = self.engine.fits(self.budget, staged + self.known);
        if fits as i64 != most {
            MOST.store(fits as i64, Ordering::Relaxed);
            FREE.fetch_add(fits as i64 - most, Ordering::AcqRel);
            ROOM.tell();
        }
        // What slots have is not the program's; what they had lately is not soon either, since what is kept here goes as soon as less fits, however much it is used.
        self.staged = slots::staged().max(self.staged.saturating_sub(usize::from(fades)));
        let room = fits.saturating_sub(self.staged.next_multiple_of(SPAN_PAGES)).max(SPAN_PAGES);
        if room != self.room {
            self.room = room;
            self.engine.queue.lock().fit(fits);
            // A slot, where those are not left out already, and what is to be free.
            let most = fits.saturating_sub(if self.engine.uffd.moves { 2 } else { 1 } * SPAN_PAGES);
            super::fit(room, most, self.engine.group, self.engine.depth);
        }
    }

    /// Whether all that is used may fit: as little as can be is kept in slots, and free, then. Nor is much in slots where all threads share a processor: they are made as they are wanted.
    fn follow_use(&self) -> bool {
        let narrow = self.engine.queue.lock().retention.is_afresh();
        let (most, least) = match gather::is_singly() {
            // Of one span: who fetches one whole would wait for a slot, otherwise.
            _ if narrow => (Some(SPAN_PAGES), SPAN_PAGES as i64),
            // Little is copied: room is not made for every page of that.
            true => (Some(TURN), self.engine.reserve / 2),
            false => (None, self.engine.reserve),
        };
        self.engine.slots.lock().narrow(most);
        LEAST.store(least, Ordering::Relaxed);
        narrow
    }

    /// Tells servers what they need not keep.
    fn discard(&mut self) {
        loop {
            let next = self.engine.queue.lock().discarded();
            let Some((number, pages)) = next else { return };
            lenders::count_kept(number, 0, count(&pages));
            let gift = Gift { number, ..Gift::NONE };
            self.give(&Part { gift, zero: pages, ..Part::NONE }, &[]);
            ROOM.tell();
        }
    }

    /// Makes the queue anew if it names too much that is not here.
    fn shorten(&self) {
        if self.engine.queue.lock().is_long() {
            let mut table = TABLE.lock();
            self.engine.queue.lock().renew(&mut table);
        }
    }

    /// Gives up a slot that nobody asks for, of which pages are there; false when there is none.
    fn give_surplus(&self) -> bool {
        let engine = self.engine;
        let taken = if engine.uffd.moves { engine.slots.lock().take_surplus() } else { None };
        taken.is_some_and(|slot| {
            engine.empty(slot.at, slot.there);
            true
        })
    }

    /// Evicts what is to go next, as much as one slot takes at most; false when there is nothing.
    fn evict(&mut self) -> bool {
        let engine = self.engine;
        // Others have them all for a moment.
        let Some(slot) = engine.slots.lock().take_to_fill() else { return false };
        let slot = slots::empty(slot, &engine.uffd);
        // Whoever wants a full slot is to find one, and no room before, which would be taken to copy to.
        let is_wanted = || FREE.load(Ordering::Acquire) >= 0 && engine.slots.lock().is_short();
        let keeps = self.is_counted || engine.uffd.moves && is_wanted();
        let (mut parts, mut len, mut used, mut held) = ([Part::NONE; PARTS], 0, 0, 0);
        let mut samples = true;
        let most = if gather::is_gathered() { TURN } else { SPAN_PAGES };
        while len < PARTS && held < PARTS && used < most {
            // What has to stay may be all that is in one of the lines.
            let next = engine.queue.lock().pop(SPAN_PAGES - used, held % 2 == 1, samples);
            let Some((from, next)) = next else { break };
            // If nothing of it was here any more, the next might be like it.
            samples &= !matches!(from, Source::Sample(_));
            match self.take(from, next, slot + used * PAGE, keeps, &mut parts[len]) {
                Taken::Pages => (len, used) = (len + 1, used + parts[len].base.places()),
                Taken::Held => held += 1,
                Taken::Nothing => {}
            }
        }
        if !engine.uffd.moves {
            self.give_up(&parts[..len]);
        }
        parts[..len].iter_mut().for_each(|part| part.weigh(&self.key));
        // What was discarded before these came would be lost after they are given.
        self.discard();
        let is_short = engine.uffd.moves && engine.slots.lock().is_short();
        let there = if is_short && parts[..len].iter().all(Part::is_whole) { used } else { 0 };
        for (nth, part) in parts[..len].iter().enumerate() {
            if part.is_nothing() {
                self.settle(&part.gift);
            } else {
                self.give(part, &parts[nth + 1..len]);
            }
        }
        // What was sent is the kernel's now.
        let mut pool = engine.slots.lock();
        if keeps {
            FREE.fetch_add(parts[..len].iter().map(|part| count(&part.gift.pages) as i64).sum(), Ordering::AcqRel);
        }
        let stays = there > 0 && FREE.load(Ordering::Acquire) >= there as i64;
        if !engine.uffd.moves {
            pool.give(Slot::full(slot));
        } else if stays {
            slots::count_more(there as i64);
            pool.give(Slot { at: slot, there });
        }
        // Who waits for it takes it at once.
        drop(pool);
        if engine.uffd.moves && !stays {
            engine.empty(slot, 0);
        }
        if keeps || stays {
            ROOM.tell();
        }
        len > 0
    }

    /// Takes a run of pages away from the program, to this place. `keeps`: they are room when all that is evicted with them was sent. They are written to `part`, if they are taken.
    fn take(&self, from: Source, (number, pages): (usize, Bits), place: usize, keeps: bool, part: &mut Part) -> Taken {
        let engine = self.engine;
        let mut table = TABLE.lock();
        let span = table.span(number);
        let here = without(both(pages, span.resident), span.busy);
        let asked = if from.is_kept() { both(here, span.kept) } else { without(here, span.kept) };
        // What the program cannot reach now we cannot either.
        let held = with(both(asked, holds::held(number)), without(asked, span.mapped));
        let spared = if from == Source::Kept { without(both(asked, span.spared), held) } else { NONE };
        span.spared = without(span.spared, spared);
        let pages = without(asked, with(held, spared));
        span.resident = without(span.resident, pages);
        span.kept = without(span.kept, pages);
        span.busy = with(span.busy, pages);
        let kept = both(span.remote, pages);
        let mut queue = engine.queue.lock();
        span.note(pages, queue.retention.time());
        if pages != NONE {
            queue.retention.leave(index(number, pages).start, count(&pages), from);
        }
        queue.push(number, with(held, spared), from.is_kept());
        drop(queue);
        if pages == NONE {
            return if held == NONE { Taken::Nothing } else { Taken::Held };
        }
        let digests = table.digests(number);
        drop(table);
        gather::count(pages);
        let base = Layout::new(place, pages);
        let (moved, there) =
            if engine.uffd.moves { self.shift(number, pages, base) } else { self.copy(number, pages, base) };
        let stuck = without(pages, moved);
        if stuck != NONE {
            engine.stays(number, stuck);
        }
        if moved == NONE {
            return Taken::Held;
        }
        // The slot that they are in now is of what is always there.
        if !keeps && engine.uffd.moves {
            FREE.fetch_add(count(&moved) as i64, Ordering::AcqRel);
            ROOM.tell();
        }
        let gift = Gift { number, pages: moved, ..Gift::NONE };
        *part = Part { gift, kept, base, there, digests, ..Part::NONE };
        part.warm();
        Taken::Pages
    }

    /// Moves pages of a span to their places: those that are not the program's any more, and those of them that there are.
    fn shift(&self, number: usize, pages: Bits, base: Layout) -> (Bits, Bits) {
        let (uffd, mut moved, mut came) = (self.engine.uffd, NONE, NONE);
        let take = |first: usize, count: usize| uffd.take(base.of(first), address(number, first), count * PAGE).is_ok();
        for (first, count) in runs(pages) {
            let run = range(first, first + count);
            // Seldom is any missing, and to look which are takes as long as to move some.
            if take(first, count) {
                (moved, came) = (with(moved, run), with(came, run));
                continue;
            }
            // What another process has in common with this one, after a fork, moves when this one has its own. Some may stay: the kernel
            // has pinned them.
            for (first, count) in runs(there(address(number, 0), run)) {
                // SAFETY: this writes nothing; and pages that are not there, which would be waited for, were left out.
                let _ = unsafe { call::advise(address(number, first), count * PAGE, call::POPULATE_WRITE) };
                if !take(first, count) {
                    (first..first + count).for_each(|page| _ = take(page, 1));
                }
            }
            let gone = without(run, there(address(number, 0), run));
            (moved, came) = (with(moved, gone), with(came, there(base.of(first).wrapping_sub(first * PAGE), gone)));
        }
        (moved, came)
    }

    /// As [`Evictor::shift`], where the kernel cannot move pages: nobody writes to them while they are copied.
    fn copy(&self, number: usize, pages: Bits, base: Layout) -> (Bits, Bits) {
        let there = there(address(number, 0), pages);
        for (first, to, count) in base.runs(there) {
            let (from, len) = (address(number, first), count * PAGE);
            let protected = self.engine.uffd.protect(from, len);
            protected.unwrap_or_else(|errno| super::refused(step::MOVE, errno));
            // SAFETY: pages that are there, which nobody takes away but we, and a place of ours.
            unsafe { core::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
        }
        (pages, there)
    }

    /// Takes what was copied away from the program, if nothing is pinned: since it was protected it cannot have been.
    fn give_up(&self, parts: &[Part]) {
        if !parts.is_empty() && self.pins.as_ref().is_some_and(Pins::any) {
            fatal::say(cause::PINNED, 0, [0; 2]);
        }
        for Gift { number, pages, .. } in parts.iter().map(|part| part.gift) {
            for (first, count) in runs(pages) {
                // SAFETY: the program does not want these back before they are asked for again.
                let gone = unsafe { call::advise(address(number, first), count * PAGE, call::DONTNEED) };
                gone.unwrap_or_else(|errno| super::refused(step::MOVE, errno));
            }
            FREE.fetch_add(count(&pages) as i64, Ordering::AcqRel);
        }
        ROOM.tell();
    }

    /// Gives it to its servers, which get those `after` it at once.
    fn give(&mut self, part: &Part, after: &[Part]) {
        let at_once = lenders::is_shared(part.gift.number);
        while self.len == OPEN || at_once && self.len > 0 {
            self.complete();
        }
        // Before one that is written at once all answers are waited for: what is held back for more would not come.
        let soon = || {
            let rest = after.iter().filter(|part| !part.is_nothing());
            rest.take_while(|part| !lenders::is_shared(part.gift.number))
        };
        let more = |server| !at_once && soon().any(|part| lenders::keeps(part.gift.number, server));
        let Part { sent, zero, kept, base, .. } = *part;
        let keepers = lenders::give(&Parcel { number: part.gift.number, sent, zero, kept, base }, more);
        if keepers == Keepers::NONE {
            return self.settle(&part.gift);
        }
        self.open[self.len] = Gift { keepers, ..part.gift };
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
        let is_awaited = span.settle(gift.pages);
        drop(table);
        self.engine.settled(gift.number, gift.pages, is_awaited);
    }

    /// Looks at what is known of pages, and at the servers: who is gone, and who is there again.
    fn look(&mut self) {
        self.known = super::known();
        lenders::look();
        if self.returns.are_here() {
            while self.len > 0 {
                self.complete();
            }
            self.returns.take();
        }
    }

    /// Makes a copy of something that has none; false when nothing is without, or no slot is to spare.
    fn heal(&mut self) -> bool {
        if !Healer::is_needed() {
            return false;
        }
        while self.len > 0 {
            self.complete();
        }
        let Some(slot) = self.engine.slots.lock().take_any() else { return false };
        let slot = match slots::fill(slot, &self.engine) {
            Ok(at) => at,
            Err(errno) => super::refused(step::FILL, errno),
        };
        let healed = self.healer.step(slot);
        self.engine.slots.lock().give(Slot::full(slot));
        healed
    }
}

/// Which of these pages of a span or a slot are there at all.
pub(super) fn there(base: usize, pages: Bits) -> Bits {
    let mut bytes = [0u8; SPAN_PAGES];
    let mut look = |first: usize, end: usize| {
        let place = bytes[first..end].as_mut_ptr() as usize;
        // SAFETY: a byte for each page.
        unsafe { call::gated(nr::MINCORE, [base.wrapping_add(first * PAGE), (end - first) * PAGE, place, 0, 0, 0]) }
    };
    let (first, end) = bounds(pages);
    // Between them there may be nothing at all (of a static array a part can be unmapped), of which the kernel says no more than that.
    if first < end && look(first, end).is_err() {
        runs(pages).for_each(|(first, count)| _ = look(first, first + count));
    }
    let here = core::array::from_fn(|at| {
        let bits = (0..64).fold(0, |all, bit| all | (u64::from(bytes[at * 64 + bit]) & 1) << bit);
        bits & pages[at]
    });
    let absent = without(pages, here);
    if absent != NONE && is_swapping() { with(here, swapped(base, absent)) } else { here }
}

/// Whether this machine has anything in a swap device.
fn is_swapping() -> bool {
    /// `struct sysinfo`: its words after the eighth are what there is of swap and what is free of it.
    const WORDS: usize = 16;
    let mut words = [0u64; WORDS];
    // SAFETY: room for the structure.
    let known = unsafe { syscall(nr::SYSINFO, [words.as_mut_ptr() as usize, 0, 0, 0, 0, 0]) };
    known.is_err() || words[8] != words[9]
}

/// Which of these pages the kernel has in a swap device, or has brought back from it meanwhile: they are there, but mincore(2) does not, or did not, say so.
fn swapped(base: usize, pages: Bits) -> Bits {
    const PRESENT_OR_IN_SWAP: u64 = 3 << 62;
    const CLOEXEC: usize = 0o2_000_000;
    let mut entries = [0u64; SPAN_PAGES];
    let path = c"/proc/self/pagemap".as_ptr() as usize;
    // SAFETY: a path, and room for as many entries as are read.
    let read = unsafe {
        syscall(nr::OPENAT, [-100_isize as usize, path, CLOEXEC, 0, 0, 0]).and_then(|file| {
            let at = base / PAGE * size_of::<u64>();
            let read = syscall(nr::PREAD64, [file, entries.as_mut_ptr() as usize, size_of_val(&entries), at, 0, 0]);
            call::close(file as i32);
            read
        })
    };
    // Else what is there would be taken for zeros.
    read.unwrap_or_else(|errno| super::refused(step::MOVE, errno));
    let is_there = |page: usize| (entries[page] & PRESENT_OR_IN_SWAP != 0) as u64;
    core::array::from_fn(|at| (0..64).fold(0, |all, bit| all | is_there(at * 64 + bit) << bit) & pages[at])
}
