//! System calls from anywhere but the rewritten places ([`dispatch`]).

use core::sync::atomic::Ordering;

use super::kernel::{nr, raw};
use super::sites::{AREA, BEGIN, OFF};
use super::{inside, process, step_aside};
use crate::dispatch::{self, Stopped};
use crate::signals;

/// SA_RESTORER.
const RESTORER: u64 = 0x400_0000;

/// Puts it in force, for this thread.
pub(super) fn begin() -> bool {
    let from = BEGIN.load(Ordering::Relaxed);
    dispatch::begin(from..from + AREA, stopped)
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
        _ => super::dispatch(number, args),
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
