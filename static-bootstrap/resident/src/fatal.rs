//! The end of a program that cannot go on: never with wrong data, and never without a word.

use core::sync::atomic::{AtomicI32, Ordering};

use sys::resident::Failure;
use sys::syscall::{nr, syscall};

use super::door;

const EXIT_CODE: usize = 125;

/// The door, in the table of descriptors of our own threads.
pub(super) static DOOR: AtomicI32 = AtomicI32::new(-1);

/// Tells the agent, which tells the user, and ends the process.
pub(super) fn say(cause: u32, server: u32, detail: [u64; 2]) -> ! {
    door::tell_last(DOOR.load(Ordering::Relaxed), &Failure { cause, server, detail });
    end()
}

/// Tells the agent something that does not end the program.
pub(super) fn tell(failure: &Failure) {
    let door = DOOR.load(Ordering::Relaxed);
    if door >= 0 {
        let _ = door::tell(door, failure);
    }
}

/// Ends the process.
pub(super) fn end() -> ! {
    loop {
        // SAFETY: an integer.
        let _ = unsafe { syscall(nr::EXIT_GROUP, [EXIT_CODE, 0, 0, 0, 0, 0]) };
    }
}
