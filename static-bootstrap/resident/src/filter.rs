//! Filters of system calls: they stop those with addresses of captured memory. They stay in force with whatever the program executes, so the one
//! names nothing but addresses in the window, where no program has anything else, and the other stops only what is called from where this
//! program's libraries lie, since addresses of segments may be mere numbers elsewhere.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

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
/// Offsets in `struct seccomp_data`, and of the high half of a word.
const NUMBER: u32 = 0;
const POINTER: u32 = 8;
const ARGUMENTS: u32 = 16;
const HIGH: u32 = 4;

/// Calls that go on elsewhere, or on another stack, are left alone: leftovers in registers would stop them.
const LEFT_ALONE: [usize; 7] = [nr::RT_SIGRETURN, nr::CLONE, nr::CLONE3, nr::FORK, nr::VFORK, nr::EXIT, nr::EXIT_GROUP];
const STEPS: usize = 1 + LEFT_ALONE.len() + 4 + 6 * 3 + 2;

/// Stops calls with an address in the window, but for those of the gate.
pub(super) fn of_window() -> [Step; STEPS] {
    // The window as the high halves of its addresses: a power of two.
    const MASK: u32 = !((window::SIZE >> 32) as u32 - 1);
    const VALUE: u32 = (window::BASE >> 32) as u32;
    let mut steps = [Step(RETURN, 0, 0, ALLOW); STEPS];
    steps[STEPS - 1] = Step(RETURN, 0, 0, TRAP);
    let (allow, trap) = (STEPS - 2, STEPS - 1);
    let mut at = 0;
    let mut put = |step: Step| {
        steps[at] = step;
        at += 1;
        at
    };
    let mut next = put(Step(LOAD, 0, 0, NUMBER));
    for number in LEFT_ALONE {
        next = put(Step(EQUAL, (allow - next - 1) as u8, 0, number as u32));
    }
    put(Step(LOAD, 0, 0, POINTER));
    put(Step(EQUAL, 0, 2, call::GATE_NEXT as u32));
    next = put(Step(LOAD, 0, 0, POINTER + HIGH));
    next = put(Step(EQUAL, (allow - next - 1) as u8, 0, (call::GATE_NEXT >> 32) as u32));
    for argument in 0..6 {
        put(Step(LOAD, 0, 0, ARGUMENTS + 8 * argument + HIGH));
        next = put(Step(AND, 0, 0, MASK));
        next = put(Step(EQUAL, (trap - next - 1) as u8, 0, VALUE));
    }
    let _ = next;
    steps
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

/// Steps of a comparison.
const BLOCK: usize = 10;
const MOST: usize = 2 * LEFT_ALONE.len() + 1 + PARTS * (BLOCK + 1) + 1 + segments::MOST * 6 * (BLOCK + 1) + 1;

struct Long {
    steps: [Step; MOST],
    len: usize,
}

impl Long {
    fn put(&mut self, step: Step) {
        if let Some(place) = self.steps.get_mut(self.len) {
            *place = step;
            self.len += 1;
        }
    }

    /// If the word at this offset is in the range, this step is next, else that behind it.
    fn within(&mut self, offset: u32, range: &Range<usize>, step: Step) {
        let (from, to) = (range.start, range.end - 1);
        let high = |at: usize| (at >> 32) as u32;
        const NO: u8 = BLOCK as u8;
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
            step,
        ] {
            self.put(step);
        }
    }
}

/// Makes the one that stops calls with an address in a segment, if there are any.
pub(super) fn of_segments<T>(set: impl FnOnce(&[Step]) -> T) -> T {
    let mut filter = Long { steps: [Step(RETURN, 0, 0, ALLOW); MOST], len: 0 };
    let libraries = LIBRARIES.each_ref().map(|[from, to]| from.load(Ordering::Relaxed)..to.load(Ordering::Relaxed));
    let parts = libraries.iter().filter(|part| !part.is_empty());
    if segments::bounds().next().is_none() {
        return set(&[]);
    }
    filter.put(Step(LOAD, 0, 0, NUMBER));
    for number in LEFT_ALONE {
        filter.put(Step(EQUAL, 0, 1, number as u32));
        filter.put(Step(RETURN, 0, 0, ALLOW));
    }
    for (nth, part) in parts.clone().enumerate() {
        // To behind the others and the end.
        let left = (parts.clone().count() - nth - 1) * (BLOCK + 1) + 1;
        filter.within(POINTER, part, Step(JUMP, 0, 0, left as u32));
    }
    filter.put(Step(RETURN, 0, 0, ALLOW));
    for (start, end) in segments::bounds() {
        for argument in 0..6 {
            filter.within(ARGUMENTS + 8 * argument, &(start..end), Step(RETURN, 0, 0, TRAP));
        }
    }
    filter.put(Step(RETURN, 0, 0, ALLOW));
    set(&filter.steps[..filter.len])
}
