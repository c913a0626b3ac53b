//! Fetches what will be missed: whole spans. Most go to their places as they come; every few, one waits in a slot until the program misses it, so
//! that its faults go on to tell where it is.

use core::sync::atomic::{AtomicBool, Ordering};

use sys::page::{Bits, Layout, NONE, SPAN_PAGES, both, count, has, range, runs, with, without};
use sys::policy::Choice;
use sys::pool::Slot;
use sys::resident::step;
use sys::retention::Comes;

use super::demand::{self, flip};
use super::fork::Gate;
use super::{ENGINE, Engine, FREE, MOST as FITS, WANTED, evict, fatal, gather, refused, slots};
use crate::counts;
use crate::lenders::{self, Ticket};
use crate::lock::{Event, Lock};
use crate::processors;
use crate::table::{TABLE, spans};

/// Spans that wait or are on their way, at most.
const MOST: usize = 32;
/// Questions that were not answered, at most.
const OPEN: usize = 4;
/// Pieces of a span that are moved to their places; more are copied.
const FLIPPED: usize = 4;
/// log2 of pages: shorter units are not worth it.
const ORDER_WORTH: u8 = 6;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// To be fetched.
    Asked,
    Fetching,
    Ready,
}

#[derive(Clone, Copy)]
struct Entry {
    state: State,
    /// To be put into its place as soon as it comes.
    wanted: bool,
    /// To be let go of as soon as it comes.
    dropped: bool,
    number: usize,
    pages: Bits,
    slot: Slot,
    age: u64,
    /// What had gone when it came.
    gone: u32,
}

impl Entry {
    fn holds(&self, number: usize, page: usize) -> bool {
        self.state != State::Idle && self.number == number && has(&self.pages, page)
    }
}

struct Cache {
    entries: [Entry; MOST],
    now: u64,
}

const NOTHING: Entry = Entry {
    state: State::Idle,
    wanted: false,
    dropped: false,
    number: 0,
    pages: NONE,
    slot: Slot::empty(0),
    age: 0,
    gone: 0,
};
static CACHE: Lock<Cache> = Lock::new(Cache { entries: [NOTHING; MOST], now: 0 });
pub(super) static GATE: Gate = Gate::new();
/// The thread waits for work, and not awake.
static ASLEEP: AtomicBool = AtomicBool::new(false);
/// Something is asked for.
static WORK: Event = Event::new();

/// The thread.
pub(super) extern "C" fn run(_: usize) -> ! {
    let Some(engine) = *ENGINE.lock() else { fatal::end() };
    gather::join(gather::AHEAD);
    // In the order in which they were asked.
    let (mut open, mut len) = ([(0, NOTHING, Ticket::default()); OPEN], 0);
    loop {
        let seen = WORK.now();
        let passed = GATE.pass();
        loop {
            while len < OPEN && !GATE.is_closed() {
                let Some((nth, entry)) = take_asked(&engine, |_| true) else { break };
                open[len] = (nth, entry, lenders::want(lenders::AHEAD, entry.number, entry.pages));
                len += 1;
            }
            if len == 0 {
                break;
            }
            let (nth, entry, ticket) = open[0];
            lenders::got(lenders::AHEAD, ticket, entry.number, entry.pages, Layout::whole(entry.slot.at));
            open.copy_within(1..len, 0);
            len -= 1;
            came(&engine, nth, entry);
        }
        drop(passed);
        if !GATE.is_closed() && !was_awake(seen) {
            ASLEEP.store(true, Ordering::Relaxed);
            WORK.wait(seen, 60_000);
            ASLEEP.store(false, Ordering::Relaxed);
        }
    }
}

/// Stays awake while faults that are counted come soon one after the other; false when they do not any more. Unless it is bound, it leaves the program's processor meanwhile.
fn was_awake(seen: u32) -> bool {
    /// Faults between two looks at where the program runs.
    const LOOK: u32 = 256;
    if gather::is_gathered() {
        return false;
    }
    let (mut own, mut looked) = (None, None);
    let (mut faults, mut since) = (demand::COUNT.load(Ordering::Relaxed), counts::now());
    let awake = loop {
        if WORK.now() != seen {
            break true;
        }
        if lenders::help() {
            continue;
        }
        if is_in_the_way() {
            break false;
        }
        if !gather::is_bound() && looked.is_none_or(|looked| faults.wrapping_sub(looked) > LOOK) {
            looked = Some(faults);
            let (used, allowed) = (processors::used_by(demand::THREAD.load(Ordering::Relaxed)), processors::allowed());
            // Else they may be those that it was bound to meanwhile.
            if let Some(processor) = used.filter(|_| !gather::is_bound()) {
                let Some(others) = processors::beside(*own.get_or_insert(allowed), processor) else { break false };
                processors::use_by_this_thread(&others);
            }
        }
        processors::give_way();
        let (count, now) = (demand::COUNT.load(Ordering::Relaxed), counts::now());
        if count != faults || demand::ANSWERS.load(Ordering::Relaxed) {
            (faults, since) = (count, now);
        } else if now.wrapping_sub(since) > demand::SOON {
            break false;
        }
    };
    if let Some(own) = own.filter(|_| !gather::is_bound()) {
        processors::use_by_this_thread(&own);
    }
    awake
}

/// Faults come soon one after the other. Where they are answered by another host or another thread, that one is awake.
pub(super) fn wake() {
    if ASLEEP.load(Ordering::Relaxed) && !is_in_the_way() && lenders::shares() {
        WORK.tell();
    }
}

/// Who makes room keeps a processor awake, too, and would have to interrupt this one for all that he moves; and where all use one processor, others wait for it.
fn is_in_the_way() -> bool {
    evict::BUSY.load(Ordering::Relaxed) || gather::is_gathered()
}

fn came(engine: &Engine, nth: usize, entry: Entry) {
    let mut cache = CACHE.lock();
    let place = &mut cache.entries[nth];
    if !place.wanted && !place.dropped {
        (place.state, place.gone) = (State::Ready, gather::gone());
        return;
    }
    let dropped = place.dropped;
    *place = NOTHING;
    drop(cache);
    if dropped { put_back(engine, entry) } else { install(engine, entry) }
}

/// Of a child: nothing is on its way to it.
pub(super) fn abandon() {
    let entries = core::mem::replace(&mut CACHE.lock().entries, [NOTHING; MOST]);
    let mut table = TABLE.lock();
    for entry in entries.iter().filter(|entry| entry.state != State::Idle) {
        let span = table.span(entry.number);
        span.busy = without(span.busy, entry.pages);
    }
}

/// What was asked for first of those that are meant, in a slot whose pages are all there.
fn take_asked(engine: &Engine, is_meant: impl Fn(&Entry) -> bool) -> Option<(usize, Entry)> {
    let mut cache = CACHE.lock();
    let asked =
        cache.entries.iter_mut().enumerate().filter(|(_, entry)| entry.state == State::Asked && is_meant(entry));
    let (nth, entry) = asked.min_by_key(|(_, entry)| entry.age)?;
    let there = core::mem::replace(&mut entry.slot.there, SPAN_PAGES);
    entry.state = State::Fetching;
    let entry = *entry;
    drop(cache);
    let filled = slots::fill(Slot { there, ..entry.slot }, engine);
    filled.unwrap_or_else(|errno| refused(step::FILL, errno));
    Some((nth, entry))
}

/// Puts what came into the program's memory.
fn install(engine: &Engine, entry: Entry) {
    if engine.uffd.moves && runs(entry.pages).count() <= FLIPPED {
        flip(engine, entry.number, entry.pages, entry.slot.at);
    } else {
        engine.take_room(count(&entry.pages));
        engine.fill(entry.number, entry.pages, Layout::whole(entry.slot.at), false);
        engine.slots.lock().give(entry.slot);
    }
    engine.arrived(entry.number, entry.pages, Comes::OfRun);
    engine.wake(entry.number, entry.pages);
}

/// What came is not wanted here: the server still has it.
fn put_back(engine: &Engine, entry: Entry) {
    counts::in_vain(count(&entry.pages));
    engine.slots.lock().give(entry.slot);
    let mut table = TABLE.lock();
    let span = table.span(entry.number);
    let is_awaited = span.settle(entry.pages);
    drop(table);
    engine.settled(entry.number, entry.pages, is_awaited);
}

/// The program misses a page that is in somebody's hands. Whether it waits here, which brings it as soon as it can, and whether it was ready.
pub(super) fn wanted(engine: &Engine, number: usize, page: usize) -> (bool, bool) {
    let mut cache = CACHE.lock();
    let Some(entry) = cache.entries.iter_mut().find(|entry| entry.holds(number, page)) else { return (false, false) };
    if entry.state != State::Ready {
        // One that is not fetched yet comes first.
        if !entry.wanted {
            counts::foreseen(count(&entry.pages));
        }
        (entry.wanted, entry.age) = (true, 0);
        return (true, false);
    }
    let found = *entry;
    *entry = NOTHING;
    drop(cache);
    counts::foreseen(count(&found.pages));
    install(engine, found);
    (true, true)
}

/// The program waits for this page, if it is still on its way: who answers faults helps to bring it, and brings what is asked for after it meanwhile. Not from other
/// hosts: that would share the link with it, and the next fault would wait for the answer.
pub(super) fn hasten(engine: &Engine, number: usize, page: usize) {
    let shares = lenders::shares();
    while is_coming(number, page) && !demand::GATE.is_closed() {
        if lenders::help() {
            continue;
        }
        let asked = take_asked(engine, |entry| shares || entry.holds(number, page));
        let Some((nth, entry)) = asked else { return };
        lenders::get_at_once(lenders::DEMAND, entry.number, entry.pages, Layout::whole(entry.slot.at));
        came(engine, nth, entry);
    }
}

pub(super) fn is_coming(number: usize, page: usize) -> bool {
    CACHE.lock().entries.iter().any(|entry| entry.holds(number, page))
}

/// Asks for where a run goes on, if it does.
pub(super) fn foresee(engine: &Engine, choice: Choice) {
    let Some(next) = choice.ahead.filter(|_| choice.order >= ORDER_WORTH) else { return };
    let mut left = next.spans;
    for number in next.numbers() {
        if left == 0 {
            break;
        }
        left -= u64::from(ask(engine, number as usize, next.probe));
    }
}

/// The program says that it will need this range: as much of its beginning comes as is under way at a time.
pub(super) fn need(at: usize, len: usize) {
    let Some(engine) = *ENGINE.lock() else { return };
    for (number, _) in spans(at, len).take(MOST) {
        ask(&engine, number, None);
    }
}

/// False when most of this span is here: a run goes on behind it. `probe`: a page that is left out if it is in there.
fn ask(engine: &Engine, number: usize, probe: Option<u64>) -> bool {
    let mut table = TABLE.lock();
    let span = table.span(number);
    let pages = without(without(span.remote, span.resident), span.busy);
    let probe = probe.map(|page| page as usize).filter(|page| page / SPAN_PAGES == number);
    let probe = probe.filter(|page| has(&pages, page % SPAN_PAGES));
    let hole = probe.map_or(NONE, |page| range(page % SPAN_PAGES, page % SPAN_PAGES + 1));
    let pages = without(pages, hole);
    // A span of which something is here is seldom part of a run.
    if count(&pages) < SPAN_PAGES / 2 {
        return count(&span.resident) < SPAN_PAGES / 2;
    }
    let mut cache = CACHE.lock();
    cache.now += 1;
    let now = cache.now;
    let is_old = |entry: &Entry| entry.state == State::Ready && now - entry.age > MOST as u64;
    let place = cache.entries.iter().position(|entry| entry.state == State::Idle);
    let Some(nth) = place.or_else(|| cache.entries.iter().position(is_old)) else { return true };
    let old = cache.entries[nth];
    let slot = if old.state == State::Ready { Some(old.slot) } else { None };
    if let Some(slot) = slot {
        let gone = table.span(old.number);
        let is_awaited = gone.settle(old.pages);
        cache.entries[nth] = NOTHING;
        counts::in_vain(count(&old.pages));
        drop(cache);
        drop(table);
        engine.slots.lock().give(slot);
        engine.settled(old.number, old.pages, is_awaited);
        // The next fault asks again.
        return true;
    }
    let mut pool = engine.slots.lock();
    let found = pool.take_spare(usize::try_from(FREE.load(Ordering::Acquire)).unwrap_or(0));
    // Pages are made for it, which takes as long as to receive them, and is worth it only where nobody has to make room.
    let is_free = || FREE.load(Ordering::Acquire) > FITS.load(Ordering::Relaxed) / 4;
    let taken = found.or_else(|| if is_free() { pool.take_spare_empty() } else { None });
    let is_low = pool.is_low();
    drop(pool);
    let Some(slot) = taken else {
        drop(cache);
        drop(table);
        if is_low {
            WANTED.tell();
        }
        return true;
    };
    let span = table.span(number);
    span.busy = with(span.busy, pages);
    counts::ahead(count(&pages));
    cache.entries[nth] = Entry {
        state: State::Asked,
        wanted: !number.is_multiple_of(engine.group),
        number,
        pages,
        slot,
        age: now,
        ..NOTHING
    };
    drop(cache);
    probe.into_iter().for_each(|page| demand::left_out(page as u64));
    drop(table);
    WORK.tell();
    if is_low {
        WANTED.tell();
    }
    true
}

/// Lets go of something that has waited while half as much went as fits: it is not missed as was foreseen. `any`: of anything that waits. False when there is none.
pub(super) fn expire(engine: &Engine, any: bool) -> bool {
    let (gone, most) = (gather::gone(), FITS.load(Ordering::Relaxed) / 2);
    let mut cache = CACHE.lock();
    let is_late = |entry: &Entry| any || i64::from(gone.wrapping_sub(entry.gone)) > most;
    let late = cache.entries.iter_mut().find(|entry| entry.state == State::Ready && is_late(entry));
    let Some(entry) = late else { return false };
    let found = core::mem::replace(entry, NOTHING);
    drop(cache);
    put_back(engine, found);
    true
}

/// Nobody wants these any more; the caller looks again until they are not busy.
pub(super) fn let_go(number: usize, pages: Bits) {
    let Some(engine) = *ENGINE.lock() else { return };
    let mut cache = CACHE.lock();
    let meant = |entry: &&mut Entry| entry.number == number && both(entry.pages, pages) != NONE;
    let Some(entry) = cache.entries.iter_mut().filter(|entry| entry.state != State::Idle).find(meant) else { return };
    match entry.state {
        State::Ready | State::Asked => {
            let found = *entry;
            *entry = NOTHING;
            drop(cache);
            put_back(&engine, found);
        }
        _ => entry.dropped = true,
    }
}
