//! Answers faults.

use sys::page::{PAGE, SPAN_PAGES, count, has, runs};
use sys::policy::Policy;
use sys::resident::{cause, step};

use super::fork::Gate;
use super::{Engine, ahead, fatal, refused};
use crate::lock::Lock;
use crate::table::{NONE, TABLE, address, both, range, with, without};
use crate::uffd::Message;
use crate::window;
use crate::{counts, lenders};

pub(super) static GATE: Gate = Gate::new();
static POLICY: Lock<Policy> = Lock::new(Policy::NEW);

/// Of so many spans of a run one is missed.
pub(super) fn expect(group: usize) {
    POLICY.lock().reach = ((group - 1) * SPAN_PAGES) as u64;
}

/// The thread.
pub(super) fn run(engine: Engine) -> ! {
    let mut demand = Demand { engine, buffer: 0 };
    let taken = engine.slots.lock().take_any();
    match taken.map(|slot| slot.filled(&engine.uffd)) {
        Some(Ok(slot)) => demand.buffer = slot,
        Some(Err(errno)) => refused(step::FILL, errno),
        None => fatal::say(cause::SHORT, 0, [0; 2]),
    }
    let mut place = [Message::default(); 8];
    loop {
        for message in engine.uffd.faults(&mut place).iter().filter(|message| message.is_fault()) {
            let _passed = GATE.pass();
            demand.answer(message.address as usize);
        }
    }
}

struct Demand {
    engine: Engine,
    /// A full slot, to receive into.
    buffer: usize,
}

impl Demand {
    fn answer(&mut self, at: usize) {
        let (engine, begun) = (self.engine, counts::now());
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
            let _ = engine.uffd.zero(at, PAGE);
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
        self.fetch(number, pages, away);
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
    fn fetch(&mut self, number: usize, pages: sys::page::Bits, away: sys::page::Bits) {
        let engine = self.engine;
        if away != NONE {
            lenders::get(number, away, self.buffer);
            if away == crate::table::ALL && engine.uffd.moves {
                // Nothing is moved before there is another one to receive into.
                let other = engine.slots.lock().take_full();
                if let Some(other) = other {
                    if flip(&engine, number, self.buffer) {
                        self.buffer = other;
                        return;
                    }
                    engine.slots.lock().give_full(other);
                }
            }
            engine.fill(number, away, self.buffer);
        }
        for (first, count) in runs(without(pages, away)) {
            let filled = engine.uffd.zero(address(number, first), count * PAGE);
            filled.unwrap_or_else(|errno| refused(step::FILL, errno));
        }
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
