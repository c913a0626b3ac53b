//! Keeps at most so much of the window here, and the rest with memory servers. Begins when the program asks for more.
//!
//! Three threads: [`demand`] answers faults, [`ahead`] fetches what will be missed, [`evict`] makes room before there is none. A page that is in
//! somebody's hands is marked busy in the table; the others leave it alone, and whoever waits for it is woken when that is over.

mod ahead;
mod demand;
mod evict;
mod fork;
mod gather;
mod parts;
mod queue;
mod slots;

use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use sys::page::{Bits, Layout, NONE, PAGE, SPAN, SPAN_PAGES, both, bounds, count, range, runs, with, without};
use sys::policy::Hint;
use sys::pool::{Pool, Slot};
use sys::resident::{ASK, DESCRIPTORS, SERVERS, cause, step};
use sys::retention::Comes;

use super::lenders::{self, Fresh};
use super::lock::{Event, Guard, Lock};
use super::table::{TABLE, Table, address, spans};
use super::uffd::Uffd;
use super::{call, counts, digest, door, early, fatal, heirs, holds, pins, segments, settings, thread, trap, window};
pub(super) use fork::fork;
pub(super) use gather::part;
use queue::Queue;

/// Written by who is alone in here ([`super::entry`]).
static RUNS: AtomicBool = AtomicBool::new(false);
/// Pages that may be here, and of those how many may still come, in slots or in the program; negative while too many are.
static MOST: AtomicI64 = AtomicI64::new(0);
static FREE: AtomicI64 = AtomicI64::new(0);
/// Below so many room is to be made.
static LEAST: AtomicI64 = AtomicI64::new(0);
/// Room is wanted; there is more room; nobody has this page in his hands any more.
static WANTED: Event = Event::new();
static ROOM: Event = Event::new();
static SETTLED: Event = Event::new();

/// Set once, before other threads of ours exist.
static ENGINE: Lock<Option<Engine>> = Lock::new(None);

/// What all threads need, to be copied.
#[derive(Clone, Copy)]
struct Engine {
    uffd: Uffd,
    slots: &'static Lock<Pool>,
    /// A span that nobody writes to.
    zeros: usize,
    queue: &'static Lock<Queue>,
    /// Pages that are to be free, unless nearly all is needed.
    reserve: i64,
    /// Bytes of slots that are taken to be there always: of the one that is being filled (but see `Evictor::is_counted`), and of all where pages are copied.
    staged: usize,
    /// Spans ahead of a run; and of how many one waits until it is missed.
    depth: usize,
    group: usize,
}

/// madvise(2)
const NORMAL: usize = 0;
const RANDOM: usize = 1;
const SEQUENTIAL: usize = 2;
const WILL_NEED: usize = 3;
/// Pages from so many on that come together go together.
const TOGETHER: usize = 64;
/// Slots of which all pages are there at times, at least.
const SLOTS_LEAST: usize = 3;
/// Bytes that it takes to know of pages, at least: what is static (551 KiB), stacks, and parts of the queue that are not given back yet; and by which they become more.
const TABLES: usize = 704 << 10;
const MORE: usize = 256 << 10;

static SLOTS: Lock<Pool> = Lock::new(Pool::NEW);
static QUEUE: Lock<Queue> = Lock::new(Queue::NEW);

/// The program asks for so many bytes more.
pub(super) fn before_growth(bytes: usize) {
    if RUNS.load(Ordering::Acquire) {
        return;
    }
    let has = TABLE.lock().window.pages * PAGE;
    if has + bytes > settings::get().local as usize {
        start();
        RUNS.store(true, Ordering::Release);
    }
}

/// What the program says of a captured range, which it has.
pub(super) fn advise(at: usize, len: usize, advice: usize) {
    match advice {
        NORMAL => demand::hint(at, len, Hint::Nothing),
        RANDOM => demand::hint(at, len, Hint::Random),
        SEQUENTIAL => demand::hint(at, len, Hint::Sequential),
        WILL_NEED => ahead::need(at, len),
        _ => {}
    }
}

/// What is in this range does not matter any more: `give` takes it from the program, parts of it in turn, which nobody of ours has in his hands.
pub(super) fn forget(at: usize, len: usize, give: impl Fn(usize, usize)) {
    if !RUNS.load(Ordering::Acquire) {
        return give(at, len.next_multiple_of(PAGE));
    }
    for (number, pages) in spans(at, len) {
        let mut table = undisturbed(number, pages);
        // Who missed a page beside these would else find them here, and take what they were for what they are to be.
        let span = table.span(number);
        span.busy = with(span.busy, pages);
        drop(table);
        runs(pages).for_each(|(first, count)| give(address(number, first), count * PAGE));
        let mut table = TABLE.lock();
        let span = table.span(number);
        let is_awaited = span.settle(pages);
        let (here, away) = (count(&both(span.resident, pages)), both(span.remote, pages));
        let kept = count(&both(span.kept, pages));
        span.resident = without(span.resident, pages);
        span.kept = without(span.kept, pages);
        span.note(pages, 0);
        span.remote = without(span.remote, pages);
        drop(table);
        // Who missed one meanwhile was told that it is in somebody's hands.
        if let Some(engine) = *ENGINE.lock() {
            engine.settled(number, pages, is_awaited);
        }
        QUEUE.lock().retention.forget(kept);
        if here > 0 {
            FREE.fetch_add(here as i64, Ordering::AcqRel);
            ROOM.tell();
        }
        discard(number, away);
    }
}

/// Whether somebody of ours has a page of this range in his hands.
pub(super) fn is_in_hands(at: usize, len: usize) -> bool {
    let mut table = TABLE.lock();
    spans(at, len).any(|(number, pages)| both(table.span(number).busy, pages) != NONE)
}

/// Whether all pages of a range are here that the program can reach. If not, they may be when somebody who had one in his hands has been waited for.
pub(super) fn is_here(at: usize, len: usize) -> bool {
    let (seen, mut busy) = (SETTLED.now(), false);
    let mut table = TABLE.lock();
    let all = spans(at, len).fold(true, |all, (number, pages)| {
        let span = table.span(number);
        busy |= both(span.busy, pages) != NONE;
        all && without(both(pages, span.mapped), span.resident) == NONE
    });
    drop(table);
    if !all && busy {
        SETTLED.wait(seen, 10);
    }
    all
}

/// Servers need not keep these any more: they are told soon, or now if they are to be told much.
fn discard(number: usize, pages: Bits) {
    loop {
        let seen = ROOM.now();
        if pages == NONE || QUEUE.lock().discard(number, pages) {
            return;
        }
        WANTED.tell();
        ROOM.wait(seen, 10);
    }
}

/// The table, when nobody of ours has any of these pages of a span in his hands.
pub(super) fn undisturbed(number: usize, pages: Bits) -> Guard<'static, Table> {
    loop {
        let seen = SETTLED.now();
        let mut table = TABLE.lock();
        if both(table.span(number).busy, pages) == NONE {
            return table;
        }
        drop(table);
        ahead::let_go(number, pages);
        SETTLED.wait(seen, 10);
    }
}

fn refused(step: u64, errno: u32) -> ! {
    fatal::say(cause::KERNEL, 0, [step, errno.into()])
}

/// Everything that is needed from now on, on a thread of the program.
fn start() {
    let settings = settings::get();
    let granted = match door::ask(ASK) {
        Ok(granted) => granted,
        // The agent has told the user why, or is gone.
        Err(_) => fatal::end(),
    };
    counts::open(granted.counts).unwrap_or_else(|errno| refused(step::MEMORY, errno));
    lenders::deal(&granted);
    Fresh::new(&granted).install();
    let uffd = Uffd::open().unwrap_or_else(|errno| refused(step::USERFAULTFD, errno));
    if !uffd.moves && pins::is_asynchronous() {
        fatal::say(cause::PINNED, 0, [0; 2]);
    }
    let zeros = call::map(0, SPAN, call::READ_WRITE, 0);
    let zeros = zeros.unwrap_or_else(|errno| refused(step::MEMORY, errno));
    let budget = settings.local as usize;
    let made = slots::make(&uffd).and_then(|pool| {
        *SLOTS.lock() = pool;
        QUEUE.lock().make()
    });
    made.and_then(|()| digest::draw()).unwrap_or_else(|errno| refused(step::MEMORY, errno));
    let watched = window::visit(|at, len| uffd.register(at, len));
    watched.unwrap_or_else(|errno| refused(step::REGISTER, errno));
    // A child would find nothing in there, and must not take that for zeros.
    let hidden = fork::inherited(false);
    hidden.unwrap_or_else(|errno| refused(step::MEMORY, errno));
    let staged = if uffd.moves { SPAN } else { slots::number(&uffd) * SPAN };
    let pages = (budget - staged - TABLES) / PAGE;
    let had = adopt();
    MOST.store(pages as i64, Ordering::Relaxed);
    FREE.store(pages as i64 - had as i64, Ordering::Release);
    let reserve = (pages / 48).clamp(64, 8 * SPAN_PAGES) as i64;
    LEAST.store(reserve, Ordering::Relaxed);
    let depth = (pages / SPAN_PAGES / 16).clamp(2, 8);
    let group = (depth / 2).max(2);
    fit(pages.saturating_sub(SLOTS_LEAST * SPAN_PAGES).max(SPAN_PAGES), pages, group, depth);
    gather::allow(heirs::watch());
    // Nothing goes before what other threads ask the kernel for is stopped.
    if uffd.traps {
        trap::install().unwrap_or_else(|errno| refused(step::FILTER, errno));
        early::hold();
    }
    begin(Engine { uffd, zeros, slots: &SLOTS, queue: &QUEUE, reserve, staged, depth, group }, &granted);
    holds::bring_earlier();
}

/// So many pages fit, and so many while few slots are used.
fn fit(pages: usize, most: usize, group: usize, depth: usize) {
    /// Runs whose spans are not to go before they are used.
    const RUNS: usize = 3;
    /// Runs beside each other need room for some pages each, and not a part of what there is.
    const CROWD: usize = 4 * SPAN_PAGES;
    let runs = (pages / 8 + RUNS * depth * SPAN_PAGES).min(pages / 2);
    // A span that is used, and what comes without steps until it is.
    let columns = (most / 10 + SPAN_PAGES).min(most / 2);
    let crowd = (pages / 2 + CROWD).min(pages * 3 / 4);
    QUEUE.lock().retention.fit(pages, most, [pages / 8, runs, crowd, columns]);
    demand::fit(group, depth, [runs, crowd]);
    lenders::fit(most * PAGE);
}

/// Bytes that it takes to know of all pages.
fn known() -> usize {
    (TABLES + TABLE.lock().size() + QUEUE.lock().size()).next_multiple_of(MORE)
}

/// Starts the threads, and leaves them the descriptors.
fn begin(engine: Engine, granted: &door::Granted) {
    *ENGINE.lock() = Some(engine);
    let seen = ROOM.now();
    thread::start(first_thread, 0, false).unwrap_or_else(|errno| refused(step::THREAD, errno));
    while ROOM.now() == seen {
        ROOM.wait(seen, 1000);
    }
    segments::free_of_file(Some(&engine.uffd));
    // From here on they are our threads' alone.
    granted.close();
    call::close(engine.uffd.fd);
}

/// What the program has touched so far is here.
fn adopt() -> usize {
    let mut table = TABLE.lock();
    let mut pages = 0;
    let [heap, rest] = table.window.given();
    for number in heap.chain(rest) {
        let span = table.span(number);
        if span.mapped != NONE {
            span.resident = evict::there(address(number, 0), span.mapped);
            pages += count(&span.resident);
            QUEUE.lock().push(number, span.resident, false);
        }
    }
    pages
}

extern "C" fn first_thread(_: usize) -> ! {
    let Some(engine) = *ENGINE.lock() else { fatal::end() };
    let mut fds = [i32::MAX; SERVERS * DESCRIPTORS + 2];
    let all = lenders::fds().chain([engine.uffd.fd, fatal::DOOR.load(Ordering::Relaxed)]);
    let mut len = 0;
    for fd in all {
        let at = fds[..len].partition_point(|other| *other < fd);
        fds.copy_within(at..len, at + 1);
        fds[at] = fd;
        len += 1;
    }
    thread::keep_only(&fds[..len]);
    for run in [evict::run, ahead::run] {
        thread::start(run, 0, true).unwrap_or_else(|errno| refused(step::THREAD, errno));
    }
    ROOM.tell();
    demand::run(engine)
}

/// The same, counted from the window's beginning.
fn index(number: usize, pages: Bits) -> Range<u64> {
    let (first, end) = bounds(pages);
    (number * SPAN_PAGES + first) as u64..(number * SPAN_PAGES + end) as u64
}

impl Engine {
    /// Pages that may be here within so many bytes, of which so many are slots' or what is known of pages. With less than what system calls hold, and
    /// what both threads bring, nothing would be left to go, nor with less than slots have at times.
    fn fits(&self, budget: usize, others: usize) -> usize {
        let least = (2 * holds::most() / PAGE + SPAN_PAGES).max(3 * SPAN_PAGES).max(self.reserve as usize * 4);
        let least = if self.uffd.moves { least + SLOTS_LEAST * SPAN_PAGES } else { least };
        (budget.saturating_sub(others) / PAGE).max(least)
    }

    /// Whether who makes room does so for slots, too, where they are short.
    fn makes_slots(&self) -> bool {
        let free = FREE.load(Ordering::Acquire);
        self.uffd.moves && free < 2 * (self.reserve + SPAN_PAGES as i64) && !self.queue.lock().retention.is_afresh()
    }

    /// Takes room for so many pages; waits until there is some.
    fn take_room(&self, pages: usize) {
        /// Tenths of a second in which nothing at all was evicted: a server that hangs ends the program before.
        const STALLED: usize = 100;
        if FREE.fetch_sub(pages as i64, Ordering::AcqRel) - (pages as i64) < LEAST.load(Ordering::Relaxed) {
            WANTED.tell();
        }
        if pages == 0 || FREE.load(Ordering::Acquire) >= 0 {
            return;
        }
        let (begun, mut stalled) = (counts::now(), 0);
        while stalled < STALLED {
            let seen = ROOM.now();
            if FREE.load(Ordering::Acquire) >= 0 {
                return counts::stalled(begun);
            }
            WANTED.tell();
            ROOM.wait(seen, 100);
            stalled = if ROOM.now() == seen { stalled + 1 } else { 0 };
        }
        fatal::say(cause::SHORT, 0, [0; 2])
    }

    /// Pages have come: they are the program's again, and may be evicted in their turn.
    fn arrived(&self, number: usize, pages: Bits, how: Comes) {
        let mut table = TABLE.lock();
        let span = table.span(number);
        span.resident = with(span.resident, pages);
        span.busy = without(span.busy, pages);
        let mut queue = self.queue.lock();
        let went = span.went(pages);
        let keep = queue.retention.arrive(index(number, pages), count(&pages), went, how);
        // Small pieces between what comes and goes together go on with it: else it would be in pieces, too, each of which takes an interrupt of all processors to move.
        let (first, end) = bounds(pages);
        let together = count(&pages) >= TOGETHER.max((end - first) / 2);
        let whole = if together { range(first, end) } else { pages };
        let all = both(whole, span.resident);
        let kept = count(&both(all, span.kept));
        if keep {
            queue.retention.join(count(&without(all, pages)) - kept);
            span.kept = with(span.kept, all);
        } else {
            queue.retention.forget(kept);
            span.kept = without(span.kept, all);
        }
        let spares = keep && queue.retention.is_at_once(went);
        span.spared = if spares { with(span.spared, all) } else { without(span.spared, all) };
        queue.push(number, whole, keep);
        let is_long = queue.is_long();
        drop(queue);
        drop(table);
        SETTLED.tell();
        if is_long {
            WANTED.tell();
        }
    }

    /// Pages could not be taken away.
    fn stays(&self, number: usize, pages: Bits) {
        let mut table = TABLE.lock();
        let span = table.span(number);
        span.resident = with(span.resident, pages);
        let is_awaited = span.settle(pages);
        self.queue.lock().push(number, pages, false);
        drop(table);
        self.settled(number, pages, is_awaited);
    }

    /// Nobody has these pages in his hands any more: who waits for one looks again, the program's threads if `Span::settle` said so.
    fn settled(&self, number: usize, pages: Bits, is_awaited: bool) {
        if is_awaited {
            self.wake(number, pages);
        }
        SETTLED.tell();
    }

    /// Has threads of the program that wait for one of these pages go on.
    fn wake(&self, number: usize, pages: Bits) {
        let (first, end) = bounds(pages);
        self.uffd.wake(address(number, first), (end - first) * PAGE);
    }

    /// Gives back a slot in which so many pages are left that are counted.
    fn empty(&self, at: usize, there: usize) {
        slots::free(at, there);
        self.slots.lock().give(Slot::empty(at));
    }

    /// Puts pages that lie there into the program's memory. Who waits for one goes on at once if that is said, or is to be woken.
    fn fill(&self, number: usize, pages: Bits, base: Layout, wakes: bool) {
        for (first, at, count) in base.runs(pages) {
            let filled = self.uffd.copy(address(number, first), at, count * PAGE, wakes);
            filled.unwrap_or_else(|errno| refused(step::FILL, errno));
        }
    }
}
