//! Answers faults. While they come soon one after the other, this thread and the program's are bound to one processor ([`super::gather`]), or else another thread keeps one awake
//! ([`super::ahead`], or [`super::evict`]) and the kernel leaves the two where they are: that neither has to be woken elsewhere, which takes longer than all that is done here.

use core::iter;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use sys::page::{Bits, Layout, NONE, PAGE, SPAN_PAGES, both, count, has, pieces, range, runs, with, without};
use sys::policy::{Hint, Policy};
use sys::pool::Slot;
use sys::resident::{cause, step};
use sys::retention::Comes;
use sys::strides::Steps;

use super::fork::Gate;
use super::{Engine, FREE, ROOM, WANTED, ahead, fatal, gather, refused, slots};
use crate::lock::{Guard, Lock};
use crate::table::{ALL, TABLE, Table, address};
use crate::uffd::Message;
use crate::window;
use crate::{counts, lenders};

pub(super) static GATE: Gate = Gate::new();
/// A fault is being answered for which it is worth that another processor is awake.
pub(super) static ANSWERS: AtomicBool = AtomicBool::new(false);
/// Such faults so far.
pub(super) static COUNT: AtomicU32 = AtomicU32::new(0);
/// Whose the last fault was.
pub(super) static THREAD: AtomicU32 = AtomicU32::new(0);
/// Pages from so many on are moved where they are to be: fewer are copied in less time, where that interrupts other processors.
const MOVED: usize = 16;
/// From so many pages on it is worth waking who helps to read them: as long as he is awake all that is moved interrupts him.
const HELPED: usize = 128;
/// Where there is no room to copy pages to, so many or more wait for a slot so often, a millisecond each time at most: to copy takes as long again as to make one.
const AWAITED: usize = 64;
const SLOT_WAITS: usize = 4;
/// Where all threads share a processor no more than so many pages are copied at a time, unless they come from other hosts; and faults after which the buffer has no more.
const NARROW: usize = 16;
const UNUSED: u32 = 64;
/// A slot with so many pages of those that are free, or more, is worth making.
const SURPLUS: i64 = 32;
/// Faults within so many ticks of the processor's counter, 100 to 400 microseconds, come soon one after the other.
pub(super) const SOON: u64 = 400_000;
static POLICY: Lock<Policy> = Lock::new(Policy::NEW);

/// Of so many spans of a run one is missed, so many are fetched ahead, and what comes goes after so many pages: usually, and while runs are crowded.
pub(super) fn fit(group: usize, depth: usize, passing: [usize; 2]) {
    POLICY.lock().fit(group, depth, passing);
}

/// This page was left out of what is fetched ahead.
pub(super) fn left_out(page: u64) {
    POLICY.lock().left_out(page);
}

/// What the program says of a captured range.
pub(super) fn hint(at: usize, len: usize, hint: Hint) {
    if let Some(first) = window::page(at) {
        POLICY.lock().hint(first as u64, (first + len.div_ceil(PAGE)) as u64, hint);
    }
}

/// The thread.
pub(super) fn run(engine: Engine) -> ! {
    let taken = engine.slots.lock().take_any();
    let buffer = taken.unwrap_or_else(|| fatal::say(cause::SHORT, 0, [0; 2]));
    gather::join(gather::DEMAND);
    let mut demand = Demand { engine, buffer, unused: 0, slot: None, in_vain: false, last: 0 };
    demand.buffer(SPAN_PAGES);
    let mut judge = gather::Judge::new();
    let mut place = [Message::default(); 8];
    loop {
        for message in engine.uffd.faults(&mut place).iter().filter(|message| message.is_fault()) {
            let _passed = GATE.pass();
            THREAD.store(message.thread, Ordering::Relaxed);
            judge.fault(message.thread);
            demand.answer(message.address as usize);
        }
    }
}

struct Demand {
    engine: Engine,
    /// A slot to receive into what is copied; and faults since more than [`NARROW`] pages of it were needed.
    buffer: Slot,
    unused: u32,
    /// One to receive into what is moved: its pages that have been, and up to where there are any.
    slot: Option<(usize, usize, usize)>,
    /// The last slot that was waited for did not come.
    in_vain: bool,
    /// When the last fault was answered.
    last: u64,
}

impl Demand {
    /// A place for so many pages that are to be copied.
    fn buffer(&mut self, pages: usize) -> usize {
        if pages > NARROW {
            self.unused = 0;
        }
        if pages > self.buffer.there {
            let more = SPAN_PAGES - self.buffer.there;
            self.engine.take_room(more);
            // They are counted as the slot's.
            FREE.fetch_add(more as i64, Ordering::AcqRel);
            let filled = slots::fill(self.buffer, &self.engine);
            self.buffer = Slot::full(filled.unwrap_or_else(|errno| refused(step::FILL, errno)));
        }
        self.buffer.at
    }

    /// Gives back most of the buffer if it has not been needed for long.
    fn narrow(&mut self) {
        self.unused += 1;
        if self.unused >= UNUSED && self.buffer.there > NARROW && self.engine.uffd.moves && gather::is_gathered() {
            let surplus = self.buffer.there - NARROW;
            slots::let_go(self.buffer.at + NARROW * PAGE, surplus);
            slots::count_more(-(surplus as i64));
            self.buffer.there = NARROW;
        }
    }

    fn answer(&mut self, at: usize) {
        let begun = counts::now();
        ANSWERS.store(!gather::is_bound(), Ordering::Relaxed);
        self.resolve(at, begun);
        self.narrow();
        if ANSWERS.swap(false, Ordering::Relaxed) {
            COUNT.fetch_add(1, Ordering::Relaxed);
            // Where the program's thread is bound, nobody need be awake for the next.
            if begun.wrapping_sub(self.last) < SOON && !gather::is_bound() {
                ahead::wake();
            }
        }
        self.last = counts::now();
    }

    fn resolve(&mut self, at: usize, begun: u64) {
        let engine = self.engine;
        let (at, offset) = (at & !(PAGE - 1), at % PAGE);
        let Some(index) = window::page(at) else {
            // A slot that was emptied: looked at by one of us, or by a debugger.
            let _ = engine.uffd.zero(at, PAGE);
            // Also where one was moved there meanwhile, which wakes nobody.
            engine.uffd.wake(at, PAGE);
            return;
        };
        let (number, page) = (index / SPAN_PAGES, index % SPAN_PAGES);
        let mut table = TABLE.lock();
        let span = table.span(number);
        let busy = span.busy;
        if has(&busy, page) {
            span.await_busy();
            let choice = ahead::is_coming(number, page).then(|| {
                let first = (number * SPAN_PAGES) as u64;
                let comes = first..first + SPAN_PAGES as u64;
                let here = |at| comes.contains(&at) && has(&busy, (at - first) as usize) || table.is_here(at);
                POLICY.lock().handle_foreseen(index as u64, comes.clone(), here)
            });
            drop(table);
            // Before the program goes on, which may take the processor from this thread.
            choice.into_iter().for_each(|choice| ahead::foresee(&engine, choice));
            // Whoever has it wakes the program.
            let (waits, ready) = ahead::wanted(&engine, number, page);
            counts::fault(if waits { counts::FORESEEN } else { counts::AWAITED }, ready.then_some(begun));
            if waits {
                ahead::hasten(&engine, number, page);
            }
            return;
        }
        let is_away = has(&span.remote, page);
        if has(&span.resident, page) || !has(&span.mapped, page) && !is_away {
            // Never written, and nobody takes it meanwhile; or it came since, with what another thread missed.
            let came = has(&span.resident, page);
            let _ = self.zero(at, PAGE);
            drop(table);
            engine.uffd.wake(at, PAGE);
            let (kind, begun) = if came { (counts::AWAITED, None) } else { (counts::FRESH, Some(begun)) };
            return counts::fault(kind, begun);
        }
        if !has(&span.mapped, page) {
            // It was closed, and opened again by a call that nobody told us of.
            let missed = range(page, page + 1);
            span.busy = with(span.busy, missed);
            drop(table);
            let moved = self.fetch(number, missed, missed);
            engine.arrived(number, missed, Comes::Alone);
            if moved {
                engine.wake(number, missed);
            }
            return counts::fault(counts::FETCHED, Some(begun));
        }
        let mut policy = POLICY.lock();
        let choice = policy.handle_fault((index * PAGE + offset) as u64, is_away, |page| table.is_here(page));
        let crowded = policy.is_crowded();
        drop(policy);
        engine.queue.lock().retention.crowd(crowded);
        if let Some(steps) = choice.steps {
            self.fetch_steps(table, (number, page), steps, choice.hole);
            return counts::fault(counts::FETCHED, Some(begun));
        }
        let unit = 1 << choice.order;
        let first = page / unit * unit;
        let hole = choice.hole.map_or(NONE, |hole| range(hole as usize % SPAN_PAGES, hole as usize % SPAN_PAGES + 1));
        let span = table.span(number);
        let pages = without(both(range(first, first + unit), span.mapped), hole);
        let pages = without(without(pages, span.resident), span.busy);
        let away = both(pages, span.remote);
        span.busy = with(span.busy, pages);
        drop(table);
        let moved = self.fetch(number, pages, away);
        engine.arrived(number, pages, if choice.of_run { Comes::OfRun } else { Comes::Alone });
        counts::fault(if away == NONE { counts::FRESH } else { counts::FETCHED }, Some(begun));
        if away != NONE {
            counts::unit(index, choice.order);
        }
        // If many came, before the program goes on, which may take the processor from this thread.
        ahead::foresee(&engine, choice);
        if moved {
            engine.wake(number, pages);
        }
    }

    /// Brings this page and what else of these steps is with servers and fits into the buffer, but for one page.
    fn fetch_steps(
        &mut self,
        mut table: Guard<'_, Table>,
        (number, page): (usize, usize),
        steps: Steps,
        hole: Option<u64>,
    ) {
        let (engine, missed) = (self.engine, range(page, page + 1));
        let hole = hole.map_or(NONE, |hole| range(hole as usize % SPAN_PAGES, hole as usize % SPAN_PAGES + 1));
        let (mut parts, mut len, mut used) = ([(0, NONE, Layout::NOWHERE); lenders::EACH], 0, 0);
        let beside =
            steps.spans().filter(|(other, _)| *other == number).fold(missed, |all, (_, pages)| with(all, pages));
        let beside = without(beside, hole);
        for (number, pages) in iter::once((number, beside)).chain(steps.spans().filter(|(other, _)| *other != number)) {
            let span = table.span(number);
            let mut rest = without(both(pages, both(span.remote, span.mapped)), with(span.resident, span.busy));
            while rest != NONE && len < parts.len() {
                // Of runs each comes by itself.
                let run = runs(rest).next().filter(|_| steps.are_of_runs());
                let pages = run.map_or(rest, |(first, count)| range(first, first + count));
                if used + count(&pages) > SPAN_PAGES {
                    break;
                }
                span.busy = with(span.busy, pages);
                parts[len] = (number, pages, Layout::NOWHERE);
                (len, used) = (len + 1, used + count(&pages));
                rest = without(rest, pages);
            }
        }
        drop(table);
        // Much is done by the time of the next: nobody need be awake for that.
        ANSWERS.store(false, Ordering::Relaxed);
        let (parts, mut rest) = (&parts[..len], parts);
        let rest = &mut rest[..len];
        // Who reads them himself takes them one after the other anyway.
        for (number, pages, _) in rest.iter_mut().filter(|part| lenders::is_read(part.0)) {
            *pages = self.receive(*number, *pages, *pages, moved_from(*number), false);
        }
        if gather::is_gathered() {
            // But for the page that is waited for.
            for (other, pages, _) in rest.iter_mut().filter(|part| lenders::is_read(part.0)) {
                let now = if *other == number { without(*pages, missed) } else { *pages };
                self.copy(*other, now, true);
                *pages = without(*pages, now);
            }
        }
        let left = rest.iter().map(|(_, pages, _)| count(pages)).sum();
        let mut at = self.buffer(left);
        for (_, pages, place) in rest.iter_mut() {
            *place = Layout::new(at, *pages);
            at += count(pages) * PAGE;
        }
        engine.take_room(left);
        lenders::get_each(rest);
        // Who waits is woken when all are there.
        let is_missed = |part: &&(usize, Bits, Layout)| part.0 == number && has(&part.1, page);
        rest.iter().for_each(|part| {
            engine.fill(part.0, if is_missed(&part) { without(part.1, missed) } else { part.1 }, part.2, true);
        });
        rest.iter().filter(is_missed).for_each(|part| engine.fill(number, missed, part.2, true));
        let how = if steps.are_of_runs() { Comes::OfRun } else { Comes::WithSteps };
        parts.iter().for_each(|(number, pages, _)| engine.arrived(*number, *pages, how));
        // Whoever waits for another of them by now is heard of after this.
        if !rest.iter().any(|part| is_missed(&part)) {
            engine.wake(number, missed);
        }
        counts::unit(number * SPAN_PAGES + page, used.ilog2() as u8);
    }

    /// Brings `pages`, of which those in `away` are with the server and the others zero. Whether who waits is to be woken, but for a zero page.
    fn fetch(&mut self, number: usize, pages: Bits, away: Bits) -> bool {
        // One page alone is copied, and who waits for it woken, by one call.
        let least = if count(&pages) > 1 { moved_from(number) } else { MOVED };
        let is_many = count(&pages) >= least;
        let (mut seen, mut rest) = (ROOM.now(), self.receive(number, pages, away, least, false));
        let lacks = |rest: &Bits| count(rest) >= AWAITED && FREE.load(Ordering::Acquire) < count(rest) as i64;
        let is_moved = |rest| runs(rest).any(|(_, count)| count >= MOVED);
        for _ in 0..SLOT_WAITS {
            if !self.engine.uffd.moves || !lacks(&rest) || !is_moved(rest) {
                break;
            }
            WANTED.tell();
            ROOM.wait(seen, 1);
            (seen, rest) = (ROOM.now(), self.receive(number, rest, away, least, true));
        }
        self.copy(number, both(rest, away), !is_many);
        self.engine.take_room(count(&without(rest, away)));
        for (first, count) in runs(without(rest, away)) {
            let filled = self.zero(address(number, first), count * PAGE);
            filled.unwrap_or_else(|errno| refused(step::FILL, errno));
        }
        is_many
    }

    /// Brings pages to their places by the buffer: a few at a time where all threads share a processor, so that it need not have more.
    fn copy(&mut self, number: usize, pages: Bits, wakes: bool) {
        if pages == NONE {
            return;
        }
        let most = if gather::is_gathered() && lenders::is_read(number) { NARROW } else { SPAN_PAGES };
        self.engine.take_room(count(&pages));
        for piece in pieces(pages, most) {
            let buffer = Layout::new(self.buffer(count(&piece)), piece);
            lenders::get(number, piece, buffer);
            self.engine.fill(number, piece, buffer, wakes);
        }
    }

    /// Pages of zeros, each of its own: the kernel moves those that it shares one by one, with an interrupt of all processors for each.
    fn zero(&self, at: usize, len: usize) -> Result<(), u32> {
        self.engine.uffd.copy(at, self.engine.zeros, len, true)
    }

    /// A slot for pages that come one by one: who makes room makes one where this thread waits, since they share a processor, unless more is free than is to be.
    fn make_slot(&mut self) -> Option<(usize, usize, usize)> {
        let seen = ROOM.now();
        let mut found = take_slot(&self.engine, 1, false).or_else(|| slot_of_surplus(&self.engine));
        if found.is_none() && !self.in_vain && self.engine.makes_slots() {
            ROOM.wait(seen, 1);
            found = take_slot(&self.engine, 1, true);
        }
        self.in_vain = found.is_none();
        found.map(|slot| (slot.at, 0, slot.there))
    }

    /// Receives pages of a span, of which those that are not away are zero, and moves them to their places, as far as there are so many in a row and slots have as many; returns the
    /// others. `again`: after a wait for slots.
    fn receive(&mut self, number: usize, all: Bits, away: Bits, least: usize, again: bool) -> Bits {
        let engine = self.engine;
        // While much is free, new pages find frames of the kernel's.
        if !engine.uffd.moves || count(&all) < least || both(all, away) == NONE && !engine.makes_slots() {
            return all;
        }
        if count(&both(all, away)) >= HELPED {
            ANSWERS.store(true, Ordering::Relaxed);
            ahead::wake();
        }
        let mut rest = all;
        for (first, count) in runs(all) {
            let (mut page, end) = (first, first + count);
            while end - page >= least {
                let taken = match self.slot.take() {
                    None if least < MOVED => self.make_slot(),
                    None => take_slot(&engine, end - page, again).map(|slot| (slot.at, 0, slot.there)),
                    taken => taken,
                };
                let Some((slot, used, there)) = taken else { return rest };
                let len = (there - used).min(end - page);
                if len < least && used + len == there {
                    // So few are not worth moving.
                    engine.empty(slot, len);
                    continue;
                }
                let (at, from) = (address(number, page), slot + used * PAGE);
                let pages = range(page, page + len);
                let (base, missed) = (Layout::new(from, pages), both(pages, away));
                if missed != NONE {
                    lenders::get_at_once(lenders::DEMAND, number, missed, base);
                }
                base.runs(without(pages, away)).for_each(|(_, at, count)| slots::clear(at, count));
                let moved = engine.uffd.bring(at, from, len * PAGE);
                slots::pass(len);
                if !moved.unwrap_or_else(|errno| refused(step::FILL, errno)) {
                    slots::let_go(from, len);
                }
                if used + len == there {
                    engine.slots.lock().give(Slot::empty(slot));
                } else {
                    self.slot = Some((slot, used + len, there));
                }
                rest = without(rest, pages);
                page += len;
            }
        }
        rest
    }
}

/// A slot with so many pages, or fewer.
fn take_slot(engine: &Engine, pages: usize, again: bool) -> Option<Slot> {
    let mut pool = engine.slots.lock();
    let found = pool.take_some(pages, again);
    let lacks = found.is_none_or(|slot| (slot.there == SPAN_PAGES || gather::is_gathered()) && pool.is_low());
    drop(pool);
    if lacks && engine.makes_slots() {
        WANTED.tell();
    }
    found
}

/// A slot with what is free beyond what is to be, which little else takes where pages come one by one.
fn slot_of_surplus(engine: &Engine) -> Option<Slot> {
    if !engine.makes_slots() {
        return None;
    }
    let slot = engine.slots.lock().take_empty()?;
    let some = |free: i64| {
        let most = (SPAN_PAGES - slot.there) as i64;
        Some((free - engine.reserve).min(most)).filter(|pages| *pages >= SURPLUS)
    };
    // Nobody else counts on them from then on.
    let before = FREE.fetch_update(Ordering::AcqRel, Ordering::Acquire, |free| Some(free - some(free)?));
    let Some(pages) = before.ok().and_then(some) else {
        engine.slots.lock().give(slot);
        return None;
    };
    let made = slots::make_of_free(slot, pages as usize, engine);
    Some(made.unwrap_or_else(|errno| refused(step::FILL, errno)))
}

/// From so many pages in a row on those of this span are moved to their places.
fn moved_from(number: usize) -> usize {
    if gather::is_gathered() && lenders::is_read(number) { 1 } else { MOVED }
}

/// Moves pages that lie in their places in a slot into the program's memory.
pub(super) fn flip(engine: &Engine, number: usize, pages: Bits, slot: usize) {
    let mut moved = pages == ALL;
    for (first, count) in runs(pages) {
        let brought = engine.uffd.bring(address(number, first), slot + first * PAGE, count * PAGE);
        moved &= brought.unwrap_or_else(|errno| refused(step::FILL, errno));
    }
    slots::pass(count(&pages));
    if moved {
        engine.slots.lock().give(Slot::empty(slot));
    } else {
        engine.empty(slot, SPAN_PAGES - count(&pages));
    }
}
