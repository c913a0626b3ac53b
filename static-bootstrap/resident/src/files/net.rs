//! System calls from anywhere but the rewritten places: Syscall User Dispatch (Linux 5.11) stops every one of them, thread by thread. It ends
//! where a program is executed or a process made, so nobody meets it who does not have this layer.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::kernel::{nr, raw};
use super::sites::{BEGIN, OFF};
use super::{process, step_aside};

const SIGSYS: usize = 31;
/// Signal 31 as a bit of a set.
pub(super) const NEVER_BLOCKED: u64 = 1 << (SIGSYS - 1);
/// SA_SIGINFO, SA_RESTORER, SA_RESTART, SA_NODEFER, SA_ONSTACK off.
const FLAGS: usize = 0x4 | 0x400_0000 | 0x1000_0000 | 0x4000_0000;
const SET_DISPATCH: usize = 59;
const ON: usize = 1;
/// Bytes from [`BEGIN`] on.
const LEN: usize = 128 << 10;
/// `si_code` of a call that was stopped.
const USER_DISPATCH: i32 = 2;

/// What restores a thread after the handler.
pub(super) static RESTORE: AtomicUsize = AtomicUsize::new(0);
/// Read by the kernel: 1 stops.
static SELECTOR: core::sync::atomic::AtomicU8 = core::sync::atomic::AtomicU8::new(0);
/// What the program thinks its action is: handler, flags, restorer, mask.
static ACTION: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// Puts it in force, for this thread.
pub(super) fn begin() -> bool {
    let action = [stopped as *const () as usize, FLAGS, RESTORE.load(Ordering::Relaxed), 0];
    let unblocked = NEVER_BLOCKED;
    const UNBLOCK: usize = 1;
    // SAFETY: a `struct sigaction` as the kernel takes it; a set of signals.
    unsafe {
        raw(nr::RT_SIGACTION, [SIGSYS, action.as_ptr() as usize, 0, 8, 0, 0]);
        raw(nr::RT_SIGPROCMASK, [UNBLOCK, &raw const unblocked as usize, 0, 8, 0, 0]);
    }
    SELECTOR.store(1, Ordering::SeqCst);
    begin_thread() == 0
}

/// The same for another thread, which has inherited the rest.
pub(super) extern "C" fn begin_thread() -> isize {
    let args = [SET_DISPATCH, ON, BEGIN.load(Ordering::Relaxed), LEN, SELECTOR.as_ptr() as usize, 0];
    // SAFETY: a word that stays.
    unsafe { raw(nr::PRCTL, args) }
}

/// Lets every call pass.
pub(super) fn end() {
    SELECTOR.store(0, Ordering::SeqCst);
}

/// Registers of a signal's frame (`asm/ucontext.h`): r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip.
const REGISTERS: usize = 40 / 8;

extern "C" fn stopped(signal: i32, info: *const i32, frame: *mut usize) {
    // SAFETY: the kernel gives a `siginfo_t` and a frame with these registers, which are ours to change.
    unsafe {
        if *info.add(2) != USER_DISPATCH {
            return foreign(signal, info, frame);
        }
        let at = |nth: usize| frame.add(REGISTERS + nth);
        let number = *at(13);
        let args = [*at(8), *at(9), *at(12), *at(2), *at(0), *at(1)];
        match number {
            // The frame of the handler that returns is where it found it.
            nr::RT_SIGRETURN => {
                core::arch::asm!("mov rsp, {}", "jmp {}", in(reg) *at(15), in(reg) RESTORE.load(Ordering::Relaxed),
                options(noreturn))
            }
            // Whoever makes processes by himself goes on alone, from the same instruction.
            nr::CLONE | nr::FORK | nr::VFORK | nr::CLONE3 if !process::borrows() => {
                step_aside();
                *at(16) -= 2;
            }
            nr::CLONE | nr::FORK | nr::VFORK | nr::CLONE3 => *at(13) = (38_usize).wrapping_neg(),
            _ if OFF.load(Ordering::Relaxed) != 0 => *at(13) = raw(number, args) as usize,
            _ => *at(13) = super::dispatch(number, args) as usize,
        }
    }
}

/// A signal that somebody sent.
fn foreign(signal: i32, info: *const i32, frame: *mut usize) {
    const DEFAULT: u64 = 0;
    const IGNORE: u64 = 1;
    match ACTION[0].load(Ordering::Relaxed) {
        DEFAULT => {
            let action = [0usize; 4];
            // SAFETY: as in `begin`; the process ends.
            unsafe {
                raw(nr::RT_SIGACTION, [SIGSYS, action.as_ptr() as usize, 0, 8, 0, 0]);
                raw(nr::KILL, [raw(nr::GETPID, [0; 6]) as usize, SIGSYS, 0, 0, 0, 0]);
            }
        }
        IGNORE => {}
        // SAFETY: the program's own handler.
        handler => unsafe {
            let run: extern "C" fn(i32, *const i32, *mut usize) = core::mem::transmute(handler as usize);
            run(signal, info, frame);
        },
    }
}

/// sigaction(2), as the program sees it: our signal is not blocked and its action is ours.
pub(super) fn set_action(args: [usize; 6]) -> isize {
    let [signal, new, old, size, ..] = args;
    if size != 8 {
        // SAFETY: refused by the kernel.
        return unsafe { raw(nr::RT_SIGACTION, args) };
    }
    if signal == SIGSYS {
        let before = [0, 1, 2, 3].map(|nth| ACTION[nth].load(Ordering::Relaxed));
        if new != 0 {
            // SAFETY: the program's structure.
            let given = unsafe { *(new as *const [u64; 4]) };
            given.iter().zip(&ACTION).for_each(|(value, word)| word.store(*value, Ordering::Relaxed));
        }
        if old != 0 {
            // SAFETY: as above.
            unsafe { *(old as *mut [u64; 4]) = before };
        }
        return 0;
    }
    if new == 0 {
        // SAFETY: the program's own call.
        return unsafe { raw(nr::RT_SIGACTION, args) };
    }
    // SAFETY: the program's structure, of which the kernel gets a copy.
    unsafe {
        let mut given = *(new as *const [u64; 4]);
        given[3] &= !NEVER_BLOCKED;
        raw(nr::RT_SIGACTION, [signal, given.as_ptr() as usize, old, size, 0, 0])
    }
}

/// sigprocmask(2) likewise.
pub(super) fn set_mask(args: [usize; 6]) -> isize {
    const UNBLOCK: usize = 1;
    let [how, new, old, size, ..] = args;
    if new == 0 || how == UNBLOCK || size != 8 {
        // SAFETY: the program's own call.
        return unsafe { raw(nr::RT_SIGPROCMASK, args) };
    }
    // SAFETY: the program's set, of which the kernel gets a copy.
    unsafe {
        let given = *(new as *const u64) & !NEVER_BLOCKED;
        raw(nr::RT_SIGPROCMASK, [how, &raw const given as usize, old, size, 0, 0])
    }
}
