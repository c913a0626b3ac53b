//! Calls that threads of the program wait in when the pager begins. Nobody has held for them what the kernel will read or write, and the filter has not seen them.

use core::sync::atomic::AtomicU32;

use sys::addresses::{self, ARGUMENTS};
use sys::syscall::{nr, syscall};
use sys::tasks::{self, Doing};

use super::holds::{self, Holds};
use super::{call, trap, window};

/// So often it is looked, a millisecond apart: who was on his way into the kernel waits there then.
const LOOKS: usize = 3;
/// Bytes at an address of which it is not known how many count.
const GUESS: usize = 512;
/// Parts of a list that are held.
const PARTS: usize = 64;

/// Holds it for them, once every new call is seen. Whoever can be kept from it by that is not to run yet.
pub(super) fn hold() {
    let own = holds::own_thread();
    for _ in 0..LOOKS {
        let mut others = 0;
        tasks::each(holds::ask, |thread| {
            if thread != own && !holds::has(thread) {
                others += 1;
                if let Some(Doing::Waits { call: Some(call), .. }) = holds::doing(thread) {
                    hold_for(thread, call);
                }
            }
        });
        if others == 0 {
            return;
        }
        call::wait_briefly(&AtomicU32::new(0), 0);
    }
}

fn hold_for(thread: u32, call: (usize, [usize; ARGUMENTS])) {
    let (number, args) = call;
    let mut holds = Holds::earlier(thread, holds::digest(call));
    let mut left = holds::share(0);
    let mut hold = |at: usize, len: usize| {
        let len = window::mapped(at, len.min(left));
        if len > 0 && holds.claim(at, len) {
            left -= len;
        }
    };
    for (argument, len) in addresses::lengths(number, &args).into_iter().enumerate() {
        if addresses::calls_with(argument).any(|call| call == number) {
            hold(args[argument], if len > 0 { len } else { GUESS });
        }
    }
    let list = match number {
        nr::RECVMSG | nr::SENDMSG => {
            let mut message = [0; 7];
            copy(args[1], &mut message);
            let [name, _, list, count, control, len, _] = message;
            hold(name, 128);
            hold(control, len);
            hold(list, count.min(PARTS) * size_of::<[usize; 2]>());
            Some((list, count))
        }
        _ if trap::has_list(number) => Some((args[1], args[2])),
        _ => None,
    };
    if let Some((at, count)) = list {
        let mut words = [0; 2 * PARTS];
        let known = copy(at, &mut words[..2 * count.min(PARTS)]);
        words[..known].chunks_exact(2).for_each(|part| hold(part[0], part[1]));
    }
    // It is let go when they are seen to do something else.
    core::mem::forget(holds);
}

/// Copies so many words of a thread's that may go on at any time, from memory that may be gone then. How many came.
fn copy(at: usize, words: &mut [usize]) -> usize {
    let len = size_of_val(words);
    let (to, from) = ([words.as_mut_ptr() as usize, len], [at, len]);
    // SAFETY: room for as much; the kernel reads the other.
    let read = unsafe {
        let process = syscall(nr::GETPID, [0; 6]).unwrap_or(0);
        syscall(nr::PROCESS_VM_READV, [process, &raw const to as usize, 1, &raw const from as usize, 1, 0])
    };
    read.unwrap_or(0) / size_of::<usize>()
}
