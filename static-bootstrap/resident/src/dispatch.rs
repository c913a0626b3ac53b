//! System calls that come as a signal: Syscall User Dispatch (Linux 5.11) stops every one that is not made in a certain part of the address space, thread by
//! thread. It ends where a program is executed or a process made, so nobody meets it who does not have what handles them.

use core::ops::Range;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use sys::syscall::nr;

use super::call::pass;
use super::signals::{self, NEVER_BLOCKED, SIGSYS};

/// SA_SIGINFO, SA_RESTORER, SA_RESTART, SA_NODEFER, SA_ONSTACK off.
const FLAGS: usize = 0x4 | 0x400_0000 | 0x1000_0000 | 0x4000_0000;
pub(super) const SET_DISPATCH: usize = 59;
const ON: usize = 1;
/// `si_code` of a call that was stopped.
const USER_DISPATCH: i32 = 2;

/// What restores a thread after the handler: in the part where calls pass.
pub(super) static RESTORE: AtomicUsize = AtomicUsize::new(0);
/// Read by the kernel: 1 stops.
static SELECTOR: AtomicU8 = AtomicU8::new(0);
/// Where calls pass: address and bytes.
static PASSING: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
static HANDLER: AtomicUsize = AtomicUsize::new(0);

/// Registers of a stopped thread, in a signal's frame (`asm/ucontext.h`): r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip, ...
pub(super) struct Stopped(*mut usize);

const REGISTERS: usize = 40 / 8;
pub(super) const STACK: usize = 15;
pub(super) const NEXT: usize = 16;
const RESULT: usize = 13;
const FLOATING: usize = 23;

impl Stopped {
    fn at(&mut self, nth: usize) -> &mut usize {
        // SAFETY: the kernel gives a frame with these registers, which are ours to change.
        unsafe { &mut *self.0.add(REGISTERS + nth) }
    }

    pub(super) fn number(&mut self) -> usize {
        *self.at(RESULT)
    }

    pub(super) fn arguments(&mut self) -> [usize; 6] {
        [8, 9, 12, 2, 0, 1].map(|nth| *self.at(nth))
    }

    /// As the kernel returns it.
    pub(super) fn answer(&mut self, result: isize) {
        *self.at(RESULT) = result as usize;
    }

    /// Has the call made again, by the program.
    pub(super) fn repeat(&mut self) {
        *self.at(NEXT) -= 2;
    }

    /// Those that a new thread begins with, up to [`NEXT`]; and how both of its units compute: MXCSR, and the other's control word.
    pub(super) fn all(&mut self) -> ([usize; NEXT + 1], [u32; 2]) {
        let floating = *self.at(FLOATING);
        // SAFETY: what fxsave writes, which the kernel always gives.
        let units = unsafe { [*((floating + 24) as *const u32), u32::from(*(floating as *const u16))] };
        (core::array::from_fn(|nth| *self.at(nth)), units)
    }
}

/// Puts it in force for this thread: calls pass that are made in `passing`, `handler` makes the others.
pub(super) fn begin(passing: Range<usize>, handler: fn(Stopped)) -> bool {
    let action = [stopped as *const () as usize, FLAGS, RESTORE.load(Ordering::Relaxed), 0];
    let unblocked = NEVER_BLOCKED;
    const UNBLOCK: usize = 1;
    PASSING[0].store(passing.start, Ordering::Relaxed);
    PASSING[1].store(passing.len(), Ordering::Relaxed);
    HANDLER.store(handler as *const () as usize, Ordering::Relaxed);
    // SAFETY: a `struct sigaction` as the kernel takes it; a set of signals.
    unsafe {
        pass(nr::RT_SIGACTION, [SIGSYS, action.as_ptr() as usize, 0, 8, 0, 0]);
        pass(nr::RT_SIGPROCMASK, [UNBLOCK, &raw const unblocked as usize, 0, 8, 0, 0]);
    }
    SELECTOR.store(1, Ordering::SeqCst);
    begin_thread() == 0
}

/// The same for another thread, which has inherited the rest.
pub(super) extern "C" fn begin_thread() -> isize {
    let [from, len] = PASSING.each_ref().map(|word| word.load(Ordering::Relaxed));
    // SAFETY: a word that stays.
    unsafe { pass(nr::PRCTL, [SET_DISPATCH, ON, from, len, SELECTOR.as_ptr() as usize, 0]) }
}

/// Lets every call pass.
pub(super) fn end() {
    SELECTOR.store(0, Ordering::SeqCst);
}

extern "C" fn stopped(signal: i32, info: *const i32, frame: *mut usize) {
    // SAFETY: the kernel gives a `siginfo_t`.
    if unsafe { *info.add(2) } != USER_DISPATCH {
        return signals::foreign(signal, info, frame);
    }
    let mut stopped = Stopped(frame);
    let number = stopped.number();
    if number == nr::RT_SIGRETURN {
        // The frame of the handler that returns is where it found it.
        // SAFETY: as if the program had come to these instructions.
        unsafe {
            core::arch::asm!("mov rsp, {}", "jmp {}", in(reg) *stopped.at(STACK), in(reg) RESTORE.load(Ordering::Relaxed),
                options(noreturn))
        }
    }
    // SAFETY: written by `begin`, before this could be called.
    let handler: fn(Stopped) = unsafe { core::mem::transmute(HANDLER.load(Ordering::Relaxed)) };
    handler(stopped);
    // SAFETY: this is the handler.
    unsafe { signals::keep(number, frame) };
}
