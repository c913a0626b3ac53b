//! System calls from anywhere but the rewritten places ([`dispatch`]).

use core::sync::atomic::Ordering;

use super::kernel::{block_signals, nr, raw, restore_signals};
use super::sites::{AREA, BEGIN, OFF};
use super::stubs::{self, FIRST};
use super::{inside, process, step_aside, threads};
use crate::dispatch::{self, Stopped};
use crate::signals;

/// SA_RESTORER.
const RESTORER: u64 = 0x400_0000;

/// Before any other; puts it in force for all threads unless all calls are `known` to be rewritten. False: there is no such thing.
pub(super) fn begin(known: bool) -> bool {
    let from = BEGIN.load(Ordering::Relaxed);
    dispatch::prepare(from..from + AREA, stopped, again);
    dispatch::is_there() && (known || dispatch::begin())
}

/// Whether it is.
pub(super) fn is_in_force() -> bool {
    dispatch::is_on() || OFF.load(Ordering::Relaxed) != 0
}

/// Puts it in force for every thread that there is: code comes of which nothing is known.
#[cold]
pub(super) fn spread() {
    if is_in_force() || process::borrows() {
        return;
    }
    let before = block_signals();
    match dispatch::begin_all() {
        Some(begun) => {
            // Who ends while they are listed may hide another.
            let all = begun && (!inside::is_several() || (0..2).all(|_| threads::each(threads::join)));
            dispatch::all_begun();
            if !all {
                step_aside();
            }
        }
        None => dispatch::wait_for_all(),
    }
    restore_signals(before);
}

/// What to go on with where a thread's call was interrupted for nothing: the number, if it is to be made again. `next` is behind it.
fn again(next: usize) -> Option<usize> {
    let from = BEGIN.load(Ordering::Relaxed);
    // SAFETY: stubs, behind what precedes them.
    let stub = || (from + FIRST..from + AREA).contains(&next).then(|| unsafe { stubs::made_before(next) });
    stub().flatten().filter(|number| signals::waits(*number))
}

fn stopped(mut stopped: Stopped) {
    let (number, args) = (stopped.number(), stopped.arguments());
    let result = match number {
        // Whoever makes processes by himself goes on alone, from the same instruction.
        nr::CLONE | nr::FORK | nr::VFORK | nr::CLONE3 if !process::borrows() => {
            step_aside();
            return stopped.repeat();
        }
        nr::CLONE | nr::FORK | nr::VFORK | nr::CLONE3 => -38,
        // SAFETY: the program's own call.
        _ if OFF.load(Ordering::Relaxed) != 0 => unsafe { raw(number, args) },
        _ => super::perform(number, args),
    };
    stopped.answer(result);
}

/// sigaction(2): [`inside`] stands before every handler, which returns without being stopped.
pub(super) fn set_action(args: [usize; 6]) -> isize {
    let signal = args[0];
    let before = inside::behind(signal);
    let change = |action: &mut [u64; 4]| {
        action[1] |= RESTORER;
        action[2] = dispatch::RESTORE.load(Ordering::Relaxed) as u64;
        inside::stand_before(signal, action);
    };
    signals::set_action(args, change, |action| {
        if action[0] == inside::own() {
            (action[0], action[1]) = (before.0, action[1] & !before.1);
        }
    })
}
