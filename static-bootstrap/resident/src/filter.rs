//! Filters of system calls: they stop those with addresses of captured memory. They stay in force with whatever the program executes, which a call that is stopped
//! would end. So only arguments count that are addresses ([`addresses`]): a number may be anything, as the processor's time, which the dynamic linker leaves in a
//! register, is one of the window's addresses for some minutes of a machine's life. And the one names nothing but addresses in the window, where no program has
//! anything else, and the other stops only what is called from where this program's libraries lie, since others have something at addresses of segments.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use sys::addresses::{self, ARGUMENTS};
use sys::syscall::nr;

use super::objects::{self, PARTS};
use super::{call, segments, window};

/// One instruction: operation, jumps, operand.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Step(u16, u8, u8, u32);

const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const EQUAL: u16 = 0x15;
const GREATER: u16 = 0x25;
const NOT_LESS: u16 = 0x35;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const TRAP: u32 = 0x3_0000;
const NO_SUCH_CALL: u32 = 0x5_0000 | 38;
/// Offsets in `struct seccomp_data`, and of the high half of a word.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const POINTER: u32 = 8;
const ARGUMENT: u32 = 16;
const HIGH: u32 = 4;

/// What goes on when the call has returned: nobody would know what is to stay here for it, and who finds that a kernel has none of them does without.
pub(super) const ASYNCHRONOUS: [usize; 2] = [nr::IO_SETUP, nr::IO_URING_SETUP];
const X86_64: u32 = 0xc000_003e;

/// Steps of a comparison of two words.
const BLOCK: usize = 10;
/// Calls of which one argument is an address, at most: a jump over them has eight bits.
const CALLS: usize = 240;
/// The other stops what the window's does, and has comparisons.
const MOST: usize = 12 + ARGUMENTS * (CALLS + 6) + (PARTS + segments::MOST * ARGUMENTS) * (BLOCK + 2);

struct Filter {
    steps: [Step; MOST],
    len: usize,
}

impl Filter {
    const fn new() -> Filter {
        Filter { steps: [Step(RETURN, 0, 0, ALLOW); MOST], len: 0 }
    }

    fn put(&mut self, step: Step) {
        if let Some(place) = self.steps.get_mut(self.len) {
            *place = step;
            self.len += 1;
        }
    }

    /// With what it does at the end, unless it stopped the call.
    fn complete(&mut self) -> &[Step] {
        self.put(Step(RETURN, 0, 0, ALLOW));
        &self.steps[..self.len]
    }

    /// If the word at this offset is in one of the ranges, the step behind the next one is next.
    fn within(&mut self, offset: u32, ranges: impl Iterator<Item = Range<usize>> + Clone) {
        let high = |at: usize| (at >> 32) as u32;
        const NO: u8 = BLOCK as u8;
        let count = ranges.clone().count();
        for (nth, range) in ranges.enumerate() {
            let (from, to) = (range.start, range.end - 1);
            let others = (count - nth - 1) * (BLOCK + 1);
            for step in [
                Step(LOAD, 0, 0, offset + HIGH),
                Step(GREATER, NO - 1, 0, high(to)),
                Step(NOT_LESS, 0, NO - 2, high(from)),
                Step(EQUAL, 0, 2, high(from)),
                Step(LOAD, 0, 0, offset),
                Step(NOT_LESS, 0, NO - 5, from as u32),
                Step(LOAD, 0, 0, offset + HIGH),
                Step(EQUAL, 0, 2, high(to)),
                Step(LOAD, 0, 0, offset),
                Step(GREATER, 1, 0, to as u32),
                Step(JUMP, 0, 0, others as u32 + 1),
            ] {
                self.put(step);
            }
        }
    }

    /// Stops the calls of which this argument is an address; the step before goes here where it is one of ours, or else `over` so many steps.
    fn stop(&mut self, argument: usize, before: impl FnOnce(&mut Filter, usize)) {
        // libc makes one with all signals blocked, of which this one must not be: `heirs` sees to that.
        let calls = || addresses::calls_with(argument).filter(|call| *call != nr::SCHED_SETAFFINITY);
        let count = calls().count();
        before(self, count + 4);
        self.put(Step(LOAD, 0, 0, NUMBER));
        self.put(Step(NOT_LESS, count as u8 + 1, 0, addresses::UNKNOWN as u32));
        for (nth, call) in calls().enumerate() {
            self.put(Step(EQUAL, (count - nth) as u8, 0, call as u32));
        }
        self.put(Step(JUMP, 0, 0, 1));
        self.put(Step(RETURN, 0, 0, TRAP));
    }
}

const fn offset(argument: usize) -> u32 {
    ARGUMENT + 8 * argument as u32
}

/// Makes the one that stops calls with an address in the window, but for those of the gate.
pub(super) fn of_window<T>(set: impl FnOnce(&[Step]) -> T) -> T {
    // The window as the high halves of its addresses: a power of two.
    const MASK: u32 = !((window::SIZE >> 32) as u32 - 1);
    const VALUE: u32 = (window::BASE >> 32) as u32;
    let mut filter = Filter::new();
    filter.put(Step(LOAD, 0, 0, ARCHITECTURE));
    filter.put(Step(EQUAL, 0, 4, X86_64));
    filter.put(Step(LOAD, 0, 0, NUMBER));
    filter.put(Step(EQUAL, 1, 0, ASYNCHRONOUS[0] as u32));
    filter.put(Step(EQUAL, 0, 1, ASYNCHRONOUS[1] as u32));
    filter.put(Step(RETURN, 0, 0, NO_SUCH_CALL));
    filter.put(Step(LOAD, 0, 0, POINTER));
    filter.put(Step(EQUAL, 0, 3, call::GATE_NEXT as u32));
    filter.put(Step(LOAD, 0, 0, POINTER + HIGH));
    filter.put(Step(EQUAL, 0, 1, (call::GATE_NEXT >> 32) as u32));
    filter.put(Step(RETURN, 0, 0, ALLOW));
    for argument in 0..ARGUMENTS {
        filter.put(Step(LOAD, 0, 0, offset(argument) + HIGH));
        filter.put(Step(AND, 0, 0, MASK));
        filter.stop(argument, |filter, over| filter.put(Step(EQUAL, 0, over as u8, VALUE)));
    }
    set(filter.complete())
}

/// Where the libraries lie with which the program starts.
static LIBRARIES: [[AtomicUsize; 2]; PARTS] = [const { [const { AtomicUsize::new(0) }; 2] }; PARTS];

/// Before any library can be opened.
pub(super) fn learn() {
    for (place, part) in LIBRARIES.iter().zip(objects::libraries()) {
        place[0].store(part.start, Ordering::Relaxed);
        place[1].store(part.end, Ordering::Relaxed);
    }
}

/// Makes the one that stops calls with an address in a segment, if there are any.
pub(super) fn of_segments<T>(set: impl FnOnce(&[Step]) -> T) -> T {
    if segments::bounds().next().is_none() {
        return set(&[]);
    }
    let mut filter = Filter::new();
    let libraries = LIBRARIES.each_ref().map(|[from, to]| from.load(Ordering::Relaxed)..to.load(Ordering::Relaxed));
    filter.within(POINTER, libraries.into_iter().filter(|part| !part.is_empty()));
    filter.put(Step(RETURN, 0, 0, ALLOW));
    for argument in 0..ARGUMENTS {
        filter.stop(argument, |filter, over| {
            filter.within(offset(argument), segments::bounds());
            filter.put(Step(JUMP, 0, 0, over as u32));
        });
    }
    set(filter.complete())
}
