//! Threads that run already, told of what each has to ask of the kernel for itself: by SIGSYS, which nobody blocks.

use core::sync::atomic::{AtomicU32, Ordering};

use sys::tasks;

use super::kernel::{nr, raw, wait_briefly};
use crate::dispatch;

const SIGSYS: usize = 31;

/// Shows the numbers of all threads of this process; false: the kernel does not tell them.
pub(super) fn each(visit: impl FnMut(u32)) -> bool {
    tasks::each(call, visit)
}

fn call(number: usize, args: [usize; 6]) -> isize {
    // SAFETY: what `sys::tasks` asks for: a path of its own, a buffer of its own, an integer.
    unsafe { raw(number, args) }
}

/// Has a thread ask the kernel, and waits until it has, or is no more.
pub(super) fn join(thread: u32) {
    // SAFETY: integers.
    let (process, own) = unsafe { (raw(nr::GETPID, [0; 6]) as usize, raw(nr::GETTID, [0; 6])) };
    if own == thread as isize {
        return;
    }
    let joined: &AtomicU32 = dispatch::wanted(thread);
    // SAFETY: integers.
    while unsafe { raw(nr::TGKILL, [process, thread as usize, SIGSYS, 0, 0, 0]) } == 0 {
        for _ in 0..100 {
            if joined.load(Ordering::SeqCst) != thread {
                return;
            }
            wait_briefly(joined, thread);
        }
        if has_ended(thread) {
            return;
        }
    }
}

/// A process's first thread that has ended stays in the list.
fn has_ended(thread: u32) -> bool {
    let mut stat = [0u8; 256];
    let Some(told) = tasks::read(call, thread, b"stat", &mut stat) else { return true };
    // NUMBER (NAME) STATE ...
    let behind = told.iter().rposition(|byte| *byte == b')');
    behind.and_then(|at| told.get(at + 2)).is_none_or(|state| matches!(state, b'Z' | b'X'))
}
