//! System calls that come as a signal: Syscall User Dispatch (Linux 5.11) stops every one that is not made in a certain part of the address space, thread by
//! thread. It ends where a program is executed or a process made, so nobody meets it who does not have what handles them.

use core::ops::Range;
use core::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

use sys::syscall::nr;

use super::call::{EINTR, ONCE_MORE, PASS, pass, wait, wake};
use super::signals::{self, NEVER_BLOCKED, SIGSYS};

/// SA_SIGINFO, SA_RESTORER, SA_RESTART, SA_NODEFER, SA_ONSTACK off.
const FLAGS: usize = 0x4 | 0x400_0000 | 0x1000_0000 | 0x4000_0000;
pub(super) const SET_DISPATCH: usize = 59;
const ENABLE: usize = 1;
/// `si_code` of a call that was stopped, and of what a thread was sent.
const USER_DISPATCH: i32 = 2;
const TOLD: i32 = -6;

/// What restores a thread after the handler: in the part where calls pass.
pub(super) static RESTORE: AtomicUsize = AtomicUsize::new(0);
/// Read by the kernel: 1 stops.
static SELECTOR: AtomicU8 = AtomicU8::new(0);
/// Where calls pass: address and bytes.
static PASSING: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
static HANDLER: AtomicUsize = AtomicUsize::new(0);
static AGAIN: AtomicUsize = AtomicUsize::new(0);
/// For how many threads it is in force: none, those that were made since, all.
const OFF: u32 = 0;
const BEGINNING: u32 = 1;
const ON: u32 = 2;
#[unsafe(link_section = ".data.hot")]
pub(super) static STATE: AtomicU32 = AtomicU32::new(OFF);
/// See [`wanted`].
static WANTED: AtomicU32 = AtomicU32::new(0);

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

/// Says what will be done once it is in force: calls pass that are made in `passing`, `handler` makes the others. `again` tells by the address behind a call that
/// was interrupted to no purpose which it was, if it is to be made again.
pub(super) fn prepare(passing: Range<usize>, handler: fn(Stopped), again: fn(usize) -> Option<usize>) {
    let action = [stopped as *const () as usize, FLAGS, RESTORE.load(Ordering::Relaxed), 0];
    let unblocked = NEVER_BLOCKED;
    const UNBLOCK: usize = 1;
    PASSING[0].store(passing.start, Ordering::Relaxed);
    PASSING[1].store(passing.len(), Ordering::Relaxed);
    HANDLER.store(handler as *const () as usize, Ordering::Relaxed);
    AGAIN.store(again as *const () as usize, Ordering::Relaxed);
    // SAFETY: a `struct sigaction` as the kernel takes it; a set of signals.
    unsafe {
        pass(nr::RT_SIGACTION, [SIGSYS, action.as_ptr() as usize, 0, 8, 0, 0]);
        pass(nr::RT_SIGPROCMASK, [UNBLOCK, &raw const unblocked as usize, 0, 8, 0, 0]);
    }
}

/// Whether the kernel has it.
pub(super) fn is_there() -> bool {
    // SAFETY: integers.
    unsafe { pass(nr::PRCTL, [SET_DISPATCH, 0, 0, 0, 0, 0]) == 0 }
}

/// Whether it is in force for every thread.
pub(super) fn is_on() -> bool {
    STATE.load(Ordering::SeqCst) == ON
}

/// Puts it in force for this thread, and all that are made from now on: whether the kernel does; `None`: another thread is at it, or was.
pub(super) fn begin_all() -> Option<bool> {
    STATE.compare_exchange(OFF, BEGINNING, Ordering::SeqCst, Ordering::SeqCst).ok()?;
    SELECTOR.store(1, Ordering::SeqCst);
    Some(begin_thread() == 0)
}

/// Every other thread has begun, too.
pub(super) fn all_begun() {
    STATE.store(ON, Ordering::SeqCst);
    wake(&STATE);
}

/// For a program with one thread.
pub(super) fn begin() -> bool {
    let begun = begin_all() == Some(true);
    all_begun();
    begun
}

/// Waits until they have.
pub(super) fn wait_for_all() {
    while STATE.load(Ordering::SeqCst) == BEGINNING {
        wait(&STATE, BEGINNING);
    }
}

/// For another thread, which has inherited the rest, if it is in force.
pub(super) extern "C" fn begin_thread() -> isize {
    if STATE.load(Ordering::SeqCst) == OFF {
        return 0;
    }
    let [from, len] = PASSING.each_ref().map(|word| word.load(Ordering::Relaxed));
    // SAFETY: a word that stays.
    unsafe { pass(nr::PRCTL, [SET_DISPATCH, ENABLE, from, len, SELECTOR.as_ptr() as usize, 0]) }
}

/// In a child whose parent has it in force, or was at it.
pub(super) fn begin_child() {
    if STATE.load(Ordering::SeqCst) == BEGINNING {
        STATE.store(ON, Ordering::SeqCst);
    }
    begin_thread();
}

/// The next thread that is to begin when it gets SIGSYS: the word is another once it has.
pub(super) fn wanted(thread: u32) -> &'static AtomicU32 {
    WANTED.store(thread, Ordering::SeqCst);
    &WANTED
}

/// Lets every call pass.
pub(super) fn end() {
    SELECTOR.store(0, Ordering::SeqCst);
}

/// Whether this thread is the one that is to begin.
fn is_wanted() -> bool {
    // SAFETY: no arguments.
    let own = unsafe { pass(nr::GETTID, [0; 6]) };
    WANTED.load(Ordering::SeqCst) == own as u32
}

/// Begins, and has go on what was interrupted for that.
fn join(stopped: &mut Stopped) {
    const INTERRUPTED: usize = -(EINTR as isize) as usize;
    begin_thread();
    WANTED.store(0, Ordering::SeqCst);
    wake(&WANTED);
    if stopped.number() != INTERRUPTED {
        return;
    }
    let next = *stopped.at(NEXT);
    if next == PASS.load(Ordering::Relaxed) + 2 {
        return stopped.answer(ONCE_MORE);
    }
    // SAFETY: written by `prepare`, before this could be called.
    let again: fn(usize) -> Option<usize> = unsafe { core::mem::transmute(AGAIN.load(Ordering::Relaxed)) };
    if let Some(number) = again(next) {
        stopped.answer(number as isize);
        stopped.repeat();
    }
}

extern "C" fn stopped(signal: i32, info: *const i32, frame: *mut usize) {
    let mut stopped = Stopped(frame);
    // SAFETY: the kernel gives a `siginfo_t`.
    match unsafe { *info.add(2) } {
        USER_DISPATCH => {}
        TOLD if is_wanted() => return join(&mut stopped),
        _ => return signals::foreign(signal, info, frame),
    }
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
