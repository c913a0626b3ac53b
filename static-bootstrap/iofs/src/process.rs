//! Processes and threads that the program makes, and what its open files are afterwards. Of an open file that another process has, too, the kernel
//! has the offset: both move it.

use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::kernel::{nr, raw, thread};
use super::{inside, step_aside, table, worker};
use crate::dispatch;

/// Ways on from [`super::sites`]: the call alone, a thread, a process that borrows this one's memory until it executes a program, a copy.
pub(super) const PLAIN: usize = 0;
pub(super) const THREAD: usize = 1;
pub(super) const BORROWS: usize = 2;
pub(super) const FORKS: usize = 3;

const CLONE_VM: usize = 0x100;
const CLONE_FILES: usize = 0x400;
const CLONE_VFORK: usize = 0x4000;
const CLONE_THREAD: usize = 0x1_0000;

/// Threads whose child borrows our memory: where that runs, [`thread`] is the same as in its parent, which waits.
static BORROWERS: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];
/// How many there are.
#[unsafe(link_section = ".data.hot")]
pub(super) static COUNT: AtomicUsize = AtomicUsize::new(0);
/// [`after`] a fork others are let in again, here and in the copy.
#[unsafe(link_section = ".data.hot")]
static HELD: AtomicBool = AtomicBool::new(false);

/// In the copy that a fork made nobody borrows: those threads are not in it.
pub(super) fn forget_borrowers() {
    BORROWERS.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
    COUNT.store(0, Ordering::Relaxed);
}

/// Whether this is a child that borrows our memory.
pub(super) fn borrows() -> bool {
    COUNT.load(Ordering::Relaxed) != 0 && {
        let own = thread();
        BORROWERS.iter().any(|slot| slot.load(Ordering::Relaxed) == own)
    }
}

/// Whether there is none now.
#[inline]
pub(super) fn none_borrows() -> bool {
    COUNT.load(Ordering::Relaxed) == 0
}

/// Before something is made; returns the way on.
pub(super) fn before(number: usize, args: [usize; 6]) -> usize {
    if super::is_off() || borrows() {
        return PLAIN;
    }
    let flags = match number {
        nr::CLONE => args[0],
        nr::VFORK => CLONE_VM | CLONE_VFORK,
        // SAFETY: the program's `struct clone_args`, which begins with the flags.
        nr::CLONE3 => unsafe { *(args[0] as *const u64) as usize },
        _ => 0,
    };
    if flags & CLONE_THREAD != 0 {
        if flags & CLONE_FILES == 0 {
            step_aside();
        }
        inside::several();
        return THREAD;
    }
    super::settle();
    let alone = inside::Inside::enter();
    worker::settle();
    if flags & CLONE_VM != 0 && flags & CLONE_VFORK == 0 || flags & CLONE_FILES != 0 {
        drop(alone);
        step_aside();
        return PLAIN;
    }
    if flags & CLONE_VM != 0 {
        // Until it executes a program it has all of them; meanwhile this thread waits, but no other.
        table::share(inside::is_several());
        let own = thread();
        let free = |slot: &&AtomicUsize| slot.compare_exchange(0, own, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        if BORROWERS.iter().find(free).is_none() {
            drop(alone);
            step_aside();
            return PLAIN;
        }
        COUNT.fetch_add(1, Ordering::SeqCst);
        return BORROWS;
    }
    table::share(true);
    HELD.store(alone.stay(), Ordering::Relaxed);
    FORKS
}

/// Before something is made in a place whose stub does not know that it makes any: the layer steps aside.
pub(super) extern "C" fn unknown() {
    if !borrows() {
        step_aside();
    }
}

/// Afterwards: in the parent of one that borrowed, in both processes of a fork.
pub(super) extern "C" fn after(result: isize) {
    let own = thread();
    if let Some(slot) = BORROWERS.iter().find(|slot| slot.load(Ordering::Relaxed) == own) {
        slot.store(0, Ordering::SeqCst);
        COUNT.fetch_sub(1, Ordering::SeqCst);
        return;
    }
    let held = HELD.swap(false, Ordering::Relaxed);
    if result == 0 {
        super::begin_again();
        dispatch::begin_child();
    }
    if held {
        inside::leave();
    }
}

/// What a child does to descriptors that it has for itself, in memory that its parent goes on with.
pub(super) fn borrowed(number: usize, args: [usize; 6]) -> isize {
    if matches!(number, nr::DUP | nr::DUP2 | nr::DUP3 | nr::FCNTL) {
        table::share_one(args[0]);
    }
    // SAFETY: the program's own call.
    unsafe { raw(number, args) }
}
