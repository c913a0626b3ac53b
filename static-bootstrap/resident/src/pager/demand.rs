//! Answers faults. While they come soon one after the other, another thread keeps a processor awake ([`super::ahead`]): then the kernel leaves the program's
//! thread and this one where they are, and neither has to be woken elsewhere, which takes longer than all that is done here.

use core::sync::atomic::{AtomicU32, Ordering};

use sys::page::{Bits, PAGE, SPAN_PAGES, count, has, runs};
use sys::policy::Policy;
use sys::resident::{cause, step};

use super::fork::Gate;
use super::{Engine, ahead, fatal, refused};
use crate::lock::Lock;
use crate::table::{NONE, TABLE, address, both, range, with, without};
use crate::uffd::Message;
use crate::window;
use crate::{call, counts, lenders};

pub(super) static GATE: Gate = Gate::new();
/// Faults so far.
pub(super) static COUNT: AtomicU32 = AtomicU32::new(0);
/// Whose the last one was.
pub(super) static THREAD: AtomicU32 = AtomicU32::new(0);
/// Pages from so many on are moved where they are to be: fewer are copied in less time.
const MOVED: usize = 16;
/// Faults within so many ticks of the processor's counter, 100 to 400 microseconds, come soon one after the other.
pub(super) const SOON: u64 = 400_000;
static POLICY: Lock<Policy> = Lock::new(Policy::NEW);

/// Of so many spans of a run one is missed.
pub(super) fn expect(group: usize) {
    POLICY.lock().reach = ((group - 1) * SPAN_PAGES) as u64;
}

/// The thread.
pub(super) fn run(engine: Engine) -> ! {
    let taken = engine.slots.lock().take_any();
    let buffer = match taken.map(|slot| slot.filled(&engine.uffd)) {
        Some(Ok(slot)) => slot,
        Some(Err(errno)) => refused(step::FILL, errno),
        None => fatal::say(cause::SHORT, 0, [0; 2]),
    };
    let zeros = call::map(0, SPAN_PAGES * PAGE, call::READ_WRITE, 0);
    let zeros = zeros.unwrap_or_else(|errno| refused(step::MEMORY, errno));
    let mut demand = Demand { engine, buffer, zeros, slot: None, last: 0 };
    let mut place = [Message::default(); 8];
    loop {
        for message in engine.uffd.faults(&mut place).iter().filter(|message| message.is_fault()) {
            let _passed = GATE.pass();
            THREAD.store(message.thread, Ordering::Relaxed);
            demand.answer(message.address as usize, message.is_write());
        }
    }
}

struct Demand {
    engine: Engine,
    /// A full slot, to receive into what is copied.
    buffer: usize,
    /// As much, never written.
    zeros: usize,
    /// One to receive into what is moved, and its pages that have been.
    slot: Option<(usize, usize)>,
    /// When the last fault was answered.
    last: u64,
}

impl Demand {
    fn answer(&mut self, at: usize, write: bool) {
        let begun = counts::now();
        COUNT.fetch_add(1, Ordering::Relaxed);
        self.resolve(at, write, begun);
        if begun.wrapping_sub(self.last) < SOON {
            ahead::wake();
        }
        self.last = counts::now();
    }

    fn resolve(&mut self, at: usize, write: bool, begun: u64) {
        let engine = self.engine;
        let at = at & !(PAGE - 1);
        if !window::contains(at) {
            // A slot that was emptied: looked at by one of us, or by a debugger.
            let _ = engine.uffd.zero(at, PAGE);
            return;
        }
        let index = (at - window::BASE) / PAGE;
        let (number, page) = (index / SPAN_PAGES, index % SPAN_PAGES);
        let mut table = TABLE.lock();
        let span = table.span(number);
        if has(&span.busy, page) {
            drop(table);
            // Whoever has it wakes the program.
            let (waits, ready) = ahead::wanted(&engine, number, page);
            counts::fault(if waits { counts::FORESEEN } else { counts::AWAITED }, ready.then_some(begun));
            if waits {
                let choice = POLICY.lock().handle_foreseen(index as u64, ((number + 1) * SPAN_PAGES) as u64);
                choice.ahead.into_iter().for_each(|next| ahead::foresee(&engine, next as usize, choice.order));
            }
            return;
        }
        if has(&span.resident, page) || !has(&span.mapped, page) {
            // Never written.
            drop(table);
            let _ = self.zero(at, PAGE, write);
            engine.uffd.wake(at, PAGE);
            return counts::fault(counts::FRESH, Some(begun));
        }
        let choice = POLICY.lock().handle_fault(index as u64);
        let unit = 1 << choice.order;
        let first = page / unit * unit;
        let pages = both(range(first, first + unit), span.mapped);
        let pages = without(without(pages, span.resident), span.busy);
        let away = both(pages, span.remote);
        span.busy = with(span.busy, pages);
        drop(table);
        engine.take_room(count(&pages));
        self.fetch(number, pages, away, write);
        engine.arrived(number, pages);
        counts::fault(if away == NONE { counts::FRESH } else { counts::FETCHED }, Some(begun));
        if away != NONE {
            counts::unit(index, choice.order);
        }
        if let Some(next) = choice.ahead {
            ahead::foresee(&engine, next as usize, choice.order);
        }
    }

    /// Brings `pages`, of which those in `away` are with the server and the others zero.
    fn fetch(&mut self, number: usize, pages: Bits, away: Bits, write: bool) {
        if away != NONE && !self.receive(number, away) {
            lenders::get(number, away, self.buffer);
            self.engine.fill(number, away, self.buffer);
        }
        for (first, count) in runs(without(pages, away)) {
            let filled = self.zero(address(number, first), count * PAGE, write);
            filled.unwrap_or_else(|errno| refused(step::FILL, errno));
        }
    }

    /// Pages of zeros; of their own if the program writes, which would make it miss each once more.
    fn zero(&self, at: usize, len: usize, write: bool) -> Result<(), u32> {
        if write { self.engine.uffd.copy(at, self.zeros, len) } else { self.engine.uffd.zero(at, len) }
    }

    /// Receives pages of a span and moves them to their places, if there are many of them and a slot has as many.
    fn receive(&mut self, number: usize, away: Bits) -> bool {
        let engine = self.engine;
        let first = runs(away).next().map_or(0, |(first, _)| first);
        let len = runs(away).last().map_or(0, |(first, count)| first + count) - first;
        // One with holes would leave some in the slot.
        if len < MOVED || len != count(&away) || !engine.uffd.moves {
            return false;
        }
        if let Some((slot, _)) = self.slot.take_if(|(_, used)| *used + len > SPAN_PAGES) {
            engine.empty(slot);
        }
        let (slot, used) = match self.slot.take() {
            Some(slot) => slot,
            None => match engine.slots.lock().take_full() {
                Some(slot) => (slot, 0),
                None => return false,
            },
        };
        let from = slot + used * PAGE;
        lenders::get(number, away, from.wrapping_sub(first * PAGE));
        if engine.uffd.take(address(number, first), from, len * PAGE).is_err() {
            let filled = engine.uffd.copy(address(number, first), from, len * PAGE);
            filled.unwrap_or_else(|errno| refused(step::FILL, errno));
            engine.empty(slot);
        } else if used + len == SPAN_PAGES {
            engine.slots.lock().give_empty(slot);
        } else {
            self.slot = Some((slot, used + len));
        }
        true
    }
}

/// Moves a whole slot into the program's memory.
pub(super) fn flip(engine: &Engine, number: usize, slot: usize) -> bool {
    if !engine.uffd.moves || engine.uffd.take(address(number, 0), slot, SPAN_PAGES * PAGE).is_err() {
        return false;
    }
    engine.slots.lock().give_empty(slot);
    true
}
