//! Reading of what is shared, in pieces, by two threads: by who fetches it, and by who has nothing else to do, awake for the next fault or waiting for this to come. To copy a
//! MiB takes one processor most of the time of a fault.

use core::sync::atomic::{AtomicBool, Ordering};

use sys::page::{Bits, Layout, NONE, SPAN_PAGES, both, count, range};

use super::Source;
use crate::lock::Lock;
use crate::processors;

/// Pages of a piece. Less than so many are read by one: it might have to wait for the other longer than that takes.
const PIECE: usize = 16;
const WORTH: usize = 128;

/// What is being read.
struct Work {
    source: Source,
    number: usize,
    pages: Bits,
    base: Layout,
    /// The page that the next piece begins with, pieces that somebody reads now, and whether all that were are here.
    next: usize,
    open: usize,
    good: bool,
}

const NOTHING: Work = Work {
    source: Source::Mapped(0),
    number: 0,
    pages: NONE,
    base: Layout::NOWHERE,
    next: SPAN_PAGES,
    open: 0,
    good: true,
};
/// Of who answers faults, and of who fetches ahead.
static WORKS: [Lock<Work>; 2] = [const { Lock::new(NOTHING) }; 2];
/// Of which some piece is nobody's yet.
static LEFT: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];

/// In a child whose parent's thread may have held them.
pub(super) fn reset() {
    WORKS.iter().for_each(Lock::reset);
}

/// Reads pages of a span to their places in `base`; for the one thread that has this lane.
pub(super) fn read(lane: usize, source: Source, number: usize, pages: Bits, base: Layout) -> bool {
    if count(&pages) < WORTH {
        return source.read(number, pages, base);
    }
    *WORKS[lane].lock() = Work { source, number, pages, base, next: 0, ..NOTHING };
    LEFT[lane].store(true, Ordering::Release);
    while help_with(lane) {}
    loop {
        let work = WORKS[lane].lock();
        if work.open == 0 {
            return work.good;
        }
        drop(work);
        // Who has it goes first.
        processors::give_way();
    }
}

/// Reads a piece of what somebody waits for; false when none is left.
pub(crate) fn help() -> bool {
    (0..WORKS.len()).any(help_with)
}

fn help_with(lane: usize) -> bool {
    if !LEFT[lane].load(Ordering::Acquire) {
        return false;
    }
    let mut work = WORKS[lane].lock();
    let mine = loop {
        if work.next >= SPAN_PAGES {
            LEFT[lane].store(false, Ordering::Relaxed);
            return false;
        }
        let mine = both(work.pages, range(work.next, work.next + PIECE));
        work.next += PIECE;
        if mine != NONE {
            break mine;
        }
    };
    work.open += 1;
    let Work { source, number, base, .. } = *work;
    drop(work);
    let good = source.read(number, mine, base);
    let mut work = WORKS[lane].lock();
    work.open -= 1;
    work.good &= good;
    true
}
