//! Signals as the program sees them whose system calls come as one: it is never blocked, and its action is ours.

use core::sync::atomic::{AtomicU64, Ordering};

use sys::syscall::nr;

use super::call::pass;

pub(super) const SIGSYS: usize = 31;
/// Signal 31 as a bit of a set.
pub(super) const NEVER_BLOCKED: u64 = 1 << (SIGSYS - 1);
const PPOLL: usize = 271;
const PSELECT6: usize = 270;
const EPOLL_PWAIT: usize = 281;
const EPOLL_PWAIT2: usize = 441;
const RT_SIGSUSPEND: usize = 130;

/// What the program thinks its action is: handler, flags, restorer, mask.
static ACTION: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// What the program's own action was before the signal was ours, or would be.
pub(super) fn take_over(action: [u64; 4]) {
    action.iter().zip(&ACTION).for_each(|(value, word)| word.store(*value, Ordering::Relaxed));
}

/// One that somebody sent.
pub(super) fn foreign(signal: i32, info: *const i32, frame: *mut usize) {
    const DEFAULT: u64 = 0;
    const IGNORE: u64 = 1;
    match ACTION[0].load(Ordering::Relaxed) {
        DEFAULT => {
            let action = [0usize; 4];
            // SAFETY: a `struct sigaction` as the kernel takes it; the process ends.
            unsafe {
                pass(nr::RT_SIGACTION, [SIGSYS, action.as_ptr() as usize, 0, 8, 0, 0]);
                pass(nr::KILL, [pass(nr::GETPID, [0; 6]) as usize, SIGSYS, 0, 0, 0, 0]);
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

/// sigaction(2). What the program gives is changed before the kernel gets it, and the handler that the kernel tells of before the program does.
pub(super) fn set_action(
    args: [usize; 6],
    change: impl FnOnce(&mut [u64; 4]),
    tell: impl FnOnce(&mut [u64; 4]),
) -> isize {
    let [signal, new, old, size, ..] = args;
    if size != 8 {
        // SAFETY: refused by the kernel.
        return unsafe { pass(nr::RT_SIGACTION, args) };
    }
    if signal == SIGSYS {
        let before = [0, 1, 2, 3].map(|nth| ACTION[nth].load(Ordering::Relaxed));
        if new != 0 {
            // SAFETY: the program's structure.
            take_over(unsafe { *(new as *const [u64; 4]) });
        }
        if old != 0 {
            // SAFETY: as above.
            unsafe { *(old as *mut [u64; 4]) = before };
        }
        return 0;
    }
    // SAFETY: the program's structures; of the first the kernel gets a copy.
    unsafe {
        let mut given = [0; 4];
        if new != 0 {
            given = *(new as *const [u64; 4]);
            given[3] &= !NEVER_BLOCKED;
            change(&mut given);
        }
        let action = if new == 0 { 0 } else { given.as_ptr() as usize };
        let result = pass(nr::RT_SIGACTION, [signal, action, old, size, 0, 0]);
        if result == 0 && old != 0 {
            tell(&mut *(old as *mut [u64; 4]));
        }
        result
    }
}

/// sigprocmask(2).
pub(super) fn set_mask(args: [usize; 6]) -> isize {
    const UNBLOCK: usize = 1;
    let [how, new, old, size, ..] = args;
    if new == 0 || how == UNBLOCK || size != 8 {
        // SAFETY: the program's own call.
        return unsafe { pass(nr::RT_SIGPROCMASK, args) };
    }
    // SAFETY: the program's set, of which the kernel gets a copy.
    unsafe {
        let given = *(new as *const u64) & !NEVER_BLOCKED;
        pass(nr::RT_SIGPROCMASK, [how, &raw const given as usize, old, size, 0, 0])
    }
}

/// Has what a call changed stay when the handler in which it was made returns, which restores the thread from this frame (`struct ucontext`).
///
/// # Safety
/// It is that handler's, and [`pass`] can be used.
pub(super) unsafe fn keep(number: usize, frame: *mut usize) {
    const SIGALTSTACK: usize = 131;
    const STACK: usize = 16 / 8;
    const MASK: usize = 296 / 8;
    // SAFETY: the kernel writes a set of signals, or a `stack_t`, in the place of those that were.
    unsafe {
        match number {
            nr::RT_SIGPROCMASK => _ = pass(nr::RT_SIGPROCMASK, [0, 0, frame.add(MASK) as usize, 8, 0, 0]),
            SIGALTSTACK => _ = pass(SIGALTSTACK, [0, frame.add(STACK) as usize, 0, 0, 0, 0]),
            _ => {}
        }
    }
}

/// Whether a call may wait long, and may be made once more when it was interrupted: poll, select, nanosleep, recvfrom, recvmsg, rt_sigtimedwait, futex,
/// semtimedop, clock_nanosleep, epoll_wait and their likes. Not so pause, connect and what sends.
pub(super) fn waits(number: usize) -> bool {
    const SLEEPS: [usize; 10] = [7, 23, 35, nr::RECVFROM, nr::RECVMSG, 128, nr::FUTEX, 220, 230, 232];
    SLEEPS.contains(&number) || matches!(number, PPOLL | PSELECT6 | EPOLL_PWAIT | EPOLL_PWAIT2)
}

/// Makes a call that may wait with other signals blocked.
pub(super) fn waiting<T>(number: usize, mut args: [usize; 6], call: impl FnOnce([usize; 6]) -> T) -> T {
    let (mut pair, set);
    let given = match number {
        RT_SIGSUSPEND => &mut args[0],
        PPOLL => &mut args[3],
        EPOLL_PWAIT | EPOLL_PWAIT2 => &mut args[4],
        PSELECT6 if args[5] != 0 => {
            // SAFETY: the program's set and its length.
            pair = unsafe { *(args[5] as *const [usize; 2]) };
            args[5] = &raw const pair as usize;
            &mut pair[0]
        }
        _ => return call(args),
    };
    if *given != 0 {
        // SAFETY: the program's set, of which the kernel gets a copy.
        set = unsafe { *(*given as *const u64) } & !NEVER_BLOCKED;
        *given = &raw const set as usize;
    }
    call(args)
}
