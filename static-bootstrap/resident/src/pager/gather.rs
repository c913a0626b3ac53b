//! Where the program's thread and ours run. To move a page out of a program interrupts every processor that has that program's memory, whichever of its threads
//! runs there, and to wake a thread on another processor interrupts that one, too. Where pages come and go one by one that takes longer than all else: then the
//! program's thread and ours are gathered on one processor, and nobody is interrupted. Where they come and go many at a time, who makes room and who fetches ahead work
//! elsewhere, where they share a cache with it; but who answers faults never works while the thread does that waits for him, and is paired with it on one processor: neither has to wake an idle one for the other.
//!
//! A program with threads of its own is left alone. What is started by the bound thread would inherit its one processor: it gets its own ones back before
//! ([`crate::heirs`]), and now and then anyway, so that it is not held where others are busy, unless all are gathered and hardly anybody else was there.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use sys::page::{self, Bits, runs};
use sys::syscall::{nr, syscall};

use super::WANTED;
use crate::lock::Lock;
use crate::processors::{self, Processors};
use crate::{counts, entry, thread};

/// Pages in a move, on the average, below which the threads are gathered, and from which on they are not any more.
const FEW: u32 = 40;
const MANY: u32 = 56;
/// Moves from one look to the next.
const SAMPLE: u32 = 128;
/// Faults after a rest from which on they are bound.
const SOME: u32 = 32;
/// Ticks of the processor's counter, 10 to 40 milliseconds, for which they are bound to one place, and for which they are not after the program started something.
const STAYS: u64 = 40_000_000;
/// Who is gathered stays longer where others have less of the processor than one part in so many.
const OTHERS: u64 = 8;
/// Milliseconds after which who makes room looks whether they need be.
pub(super) const LOOK: u64 = 20;
/// Ours.
pub(super) const DEMAND: usize = 0;
pub(super) const AHEAD: usize = 1;
pub(super) const BACK: usize = 2;
const THREADS: usize = 3;

static MOVES: AtomicU32 = AtomicU32::new(0);
static PAGES: AtomicU32 = AtomicU32::new(0);
static OURS: [AtomicU32; THREADS] = [const { AtomicU32::new(0) }; THREADS];
static ALLOWED: AtomicBool = AtomicBool::new(false);
/// They were gathered when they were bound last.
static SINGLY: AtomicBool = AtomicBool::new(false);
/// How they are bound now.
static BOUND: AtomicU8 = AtomicU8::new(FREE);
const FREE: u8 = 0;
const PAIRED: u8 = 1;
const GATHERED: u8 = 2;
/// When they were bound, or parted for the program; [`counts::now`].
static SINCE: AtomicU64 = AtomicU64::new(0);
/// How often they were parted for the program.
static PARTED: AtomicU32 = AtomicU32::new(0);
/// Faults so far; and when who makes room looked last.
static FAULTS: AtomicU32 = AtomicU32::new(0);
static SEEN: AtomicU32 = AtomicU32::new(0);
/// The program has missed nothing for a while: what it missed before decides nothing any more.
static RESTED: AtomicBool = AtomicBool::new(false);
static STATE: Lock<State> = Lock::new(State { thread: 0, own: Processors::NONE, here: Processors::NONE });

/// The program's thread, what it may use, and the one that it uses now.
struct State {
    thread: u32,
    own: Processors,
    here: Processors,
}

/// Whether the program's thread gets its processors back before it starts anything.
pub(super) fn allow(yes: bool) {
    ALLOWED.store(yes, Ordering::Relaxed);
}

/// This thread is one of ours.
pub(super) fn join(which: usize) {
    // SAFETY: no arguments.
    let own = unsafe { syscall(nr::GETTID, [0; 6]) };
    OURS[which].store(own.unwrap_or(0) as u32, Ordering::Relaxed);
}

/// All use one processor.
pub(super) fn is_gathered() -> bool {
    BOUND.load(Ordering::Relaxed) == GATHERED
}

/// Pages come and go one by one of late: all use one processor, but for moments in which they are bound anew.
pub(super) fn is_singly() -> bool {
    SINGLY.load(Ordering::Relaxed)
}

/// The program's thread uses one, with us or not.
pub(super) fn is_bound() -> bool {
    BOUND.load(Ordering::Relaxed) != FREE
}

/// These pages are moved out of the program's memory.
pub(super) fn count(pages: Bits) {
    MOVES.fetch_add(runs(pages).count() as u32, Ordering::Relaxed);
    PAGES.fetch_add(page::count(&pages) as u32, Ordering::Relaxed);
}

/// Pages that were to be moved out so far.
pub(super) fn gone() -> u32 {
    PAGES.load(Ordering::Relaxed)
}

/// Decides; of the thread that answers faults.
pub(super) struct Judge {
    moves: u32,
    pages: u32,
    few: bool,
    /// Faults until the last rest.
    rested: u32,
    /// When it was decided last that they are bound or stay so, and what the process had had of processors, in nanoseconds; and [`PARTED`] when they were bound.
    clock: u64,
    used: u64,
    parted: u32,
}

impl Judge {
    /// From what was moved so far: by the parent, in a child.
    pub(super) fn new() -> Judge {
        Judge {
            moves: MOVES.load(Ordering::Relaxed),
            pages: gone(),
            few: false,
            rested: FAULTS.load(Ordering::Relaxed),
            clock: 0,
            used: 0,
            parted: 0,
        }
    }

    /// A thread of the program waits for a page.
    pub(super) fn fault(&mut self, thread: u32) {
        let before = FAULTS.fetch_add(1, Ordering::Relaxed);
        let (moves, pages) = (MOVES.load(Ordering::Relaxed), PAGES.load(Ordering::Relaxed));
        let made = moves.wrapping_sub(self.moves);
        if RESTED.swap(false, Ordering::Relaxed) {
            (self.moves, self.pages, self.few, self.rested) = (moves, pages, false, before);
        } else if made >= SAMPLE {
            self.few = pages.wrapping_sub(self.pages) < made * if self.few { MANY } else { FEW };
            (self.moves, self.pages) = (moves, pages);
        }
        if !self.few {
            SINGLY.store(false, Ordering::Relaxed);
        }
        let parted = PARTED.load(Ordering::SeqCst);
        let stayed = counts::now().wrapping_sub(SINCE.load(Ordering::Relaxed)) > STAYS;
        let (bound, wanted) = (BOUND.load(Ordering::Relaxed), if self.few { GATHERED } else { PAIRED });
        if bound == FREE {
            if stayed && before.wrapping_sub(self.rested) >= SOME - 1 {
                self.parted = parted;
                self.bind(wanted, thread);
            }
        } else if bound != wanted {
            spread();
            self.bind(wanted, thread);
        } else if stayed && !(bound == GATHERED && self.is_alone()) {
            spread();
        }
    }

    /// Binds them, unless they were parted for the program meanwhile.
    fn bind(&mut self, how: u8, waiting: u32) {
        (self.clock, self.used) = (counts::clock(), counts::used());
        bind(how, waiting, self.parted);
    }

    /// Whether hardly anybody else used the processor that all are gathered on: then they stay for as long again. To part them and see where they would run takes a millisecond or two, in which
    /// whatever is moved interrupts two processors.
    fn is_alone(&mut self) -> bool {
        let before = (self.clock, self.used);
        (self.clock, self.used) = (counts::clock(), counts::used());
        let (passed, used) = (self.clock.saturating_sub(before.0), self.used.saturating_sub(before.1));
        let is = passed.saturating_sub(used) * OTHERS < passed;
        if is {
            SINCE.store(counts::now(), Ordering::Relaxed);
        }
        is
    }
}

/// Has this thread of the program and who answers its faults use the processor that it used last, and the others that one or those beside it. The thread waits, or has been
/// woken by somebody else meanwhile: then it may have been parted since `parted`, and is left alone.
fn bind(how: u8, waiting: u32, parted: u32) {
    SINGLY.store(false, Ordering::Relaxed);
    SINCE.store(counts::now(), Ordering::Relaxed);
    let alone = ALLOWED.load(Ordering::Relaxed) && thread::count() == Some(1 + THREADS);
    let Some(processor) = processors::used_by(waiting).filter(|_| alone) else { return };
    let (own, here) = (processors::allowed_to(waiting), Processors::one(processor));
    let others = if how == GATHERED { Some(here) } else { processors::beside(own, processor) };
    let Some(others) = others else { return };
    let mut state = STATE.lock();
    *state = State { thread: waiting, own, here };
    // Who parts them from now on waits for the lock.
    BOUND.store(how, Ordering::SeqCst);
    if PARTED.load(Ordering::SeqCst) != parted {
        return BOUND.store(FREE, Ordering::SeqCst);
    }
    processors::use_by(waiting, &here);
    for (which, thread) in OURS.iter().enumerate() {
        let place = if which == DEMAND { here } else { others };
        processors::use_by(thread.load(Ordering::Relaxed), &place);
    }
    SINGLY.store(how == GATHERED, Ordering::Relaxed);
    // Who makes room looks whether they stay.
    WANTED.tell();
}

/// The program's thread is about to do something for which it has to have its own processors.
pub(crate) fn part() {
    SINCE.store(counts::now(), Ordering::Relaxed);
    PARTED.fetch_add(1, Ordering::SeqCst);
    if BOUND.load(Ordering::SeqCst) != FREE {
        entry::enter_elsewhere(spread);
    }
}

/// Has all use what the program's thread may.
pub(super) fn spread() {
    let state = STATE.lock();
    if BOUND.load(Ordering::SeqCst) == FREE {
        return;
    }
    // Somebody else may have changed it.
    if processors::allowed_to(state.thread) == state.here {
        processors::use_by(state.thread, &state.own);
    }
    OURS.iter().for_each(|thread| processors::use_by(thread.load(Ordering::Relaxed), &state.own));
    // Not before: the program would go on with one processor.
    BOUND.store(FREE, Ordering::SeqCst);
}

/// Of who makes room, when there is enough: a program that misses nothing need not stay where it is.
pub(super) fn rest() {
    let faults = FAULTS.load(Ordering::Relaxed);
    if SEEN.swap(faults, Ordering::Relaxed) == faults {
        RESTED.store(true, Ordering::Relaxed);
        spread();
    }
}
