//! The system calls used here, with names.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use sys::resident::WINDOW;
use sys::syscall::{nr, syscall};

use super::signals;

pub(super) const READ_WRITE: usize = 3;
pub(super) const EXECUTE: usize = 4;
pub(super) const SHARED: usize = 1;
pub(super) const ANONYMOUS: usize = 0x20;
const PRIVATE_ANONYMOUS_NORESERVE: usize = 0x2 | ANONYMOUS | 0x4000;
pub(super) const FIXED: usize = 0x10;
pub(super) const FIXED_NOREPLACE: usize = 0x10_0000;
pub(super) const DONTNEED: usize = 4;
pub(super) const DONTFORK: usize = 10;
pub(super) const DOFORK: usize = 11;
/// Linux 5.14
pub(super) const POPULATE_WRITE: usize = 23;
const SIG_BLOCK: usize = 0;
const SIG_SETMASK: usize = 2;

pub(super) const EINTR: u32 = 4;
pub(super) const EAGAIN: u32 = 11;
pub(super) const ENOMEM: u32 = 12;
pub(super) const EFAULT: u32 = 14;
pub(super) const EEXIST: u32 = 17;
pub(super) const EINVAL: u32 = 22;

/// Anonymous memory: zero, and free until it is touched.
pub(super) fn map(at: usize, len: usize, protection: usize, flags: usize) -> Result<usize, u32> {
    let flags = PRIVATE_ANONYMOUS_NORESERVE | flags;
    let args = [at, len, protection, flags, usize::MAX, 0];
    // SAFETY: a new mapping; who gives an address gives FIXED_NOREPLACE, too, and has made the gate before what is behind it.
    unsafe { if at > GATE { gated(nr::MMAP, args) } else { syscall(nr::MMAP, args) } }
}

/// # Safety
/// Nobody relies on how the range can be reached.
pub(super) unsafe fn protect(at: usize, len: usize, protection: usize) -> Result<(), u32> {
    // SAFETY: the caller vouches for the range.
    unsafe { gated(nr::MPROTECT, [at, len, protection, 0, 0, 0]) }.map(drop)
}

/// # Safety
/// Nobody relies on what is in the range.
pub(super) unsafe fn advise(at: usize, len: usize, advice: usize) -> Result<(), u32> {
    // SAFETY: the caller vouches for the range.
    unsafe { gated(nr::MADVISE, [at, len, advice, 0, 0, 0]) }.map(drop)
}

pub(super) fn close(fd: i32) {
    // SAFETY: an integer.
    let _ = unsafe { syscall(nr::CLOSE, [fd as usize, 0, 0, 0, 0, 0]) };
}

/// Blocks all signals of this thread; returns those that were blocked.
pub(super) fn block_signals() -> u64 {
    let (all, mut before) = (u64::MAX, 0u64);
    let (new, old) = (&raw const all as usize, &raw mut before as usize);
    set_signals([SIG_BLOCK, new, old, size_of::<u64>(), 0, 0]);
    before
}

fn set_signals(args: [usize; 6]) {
    // SAFETY: sets of this size. The stack they are on may be the program's memory and away, which this filter does not stop.
    while unsafe { gated(nr::RT_SIGPROCMASK, args) } == Err(EFAULT) {
        // SAFETY: as above; brings it.
        args[1..3].iter().filter(|at| **at != 0).for_each(|at| _ = unsafe { (*at as *const u8).read_volatile() });
    }
}

pub(super) fn restore_signals(before: u64) {
    let new = &raw const before as usize;
    set_signals([SIG_SETMASK, new, 0, size_of::<u64>(), 0, 0]);
}

/// Where the one instruction is that may make system calls about the window whatever filter there is: the same place in every program, since a
/// filter stays when a program executes another.
pub(super) const GATE: usize = WINDOW as usize - (64 << 10);
/// The instruction pointer that the filter sees.
pub(super) const GATE_NEXT: usize = GATE + 2;

/// Puts the instruction in its place.
pub(super) fn make_gate() -> Result<(), u32> {
    const READ_EXECUTE: usize = 5;
    let at = map(GATE, 4096, READ_WRITE, FIXED_NOREPLACE)?;
    if at != GATE {
        return Err(ENOMEM);
    }
    PASS.store(GATE, Ordering::Relaxed);
    // SAFETY: a fresh mapping; syscall, ret.
    unsafe {
        (GATE as *mut [u8; 3]).write([0x0f, 0x05, 0xc3]);
        syscall(nr::MPROTECT, [GATE, 4096, READ_EXECUTE, 0, 0, 0]).map(drop)
    }
}

/// A system call with addresses in the window.
///
/// # Safety
/// As for [`syscall`]; [`make_gate`] has been called.
pub(super) unsafe fn gated(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    // SAFETY: as the caller says.
    let result = unsafe { through(GATE, number, args) };
    if failed(result) { Err(result.unsigned_abs() as u32) } else { Ok(result as usize) }
}

/// Address of `syscall; ret` from which calls pass whatever stops the program's ([`super::dispatch`]); set before that is in force.
#[unsafe(link_section = ".data.hot")]
pub(super) static PASS: AtomicUsize = AtomicUsize::new(0);

/// What [`pass`] finds where a call was interrupted to no purpose; the kernel never returns it (ERESTARTSYS).
pub(super) const ONCE_MORE: isize = -512;

/// A system call that is not stopped, as the kernel returns it: negative errno.
///
/// # Safety
/// As for [`syscall`].
pub(super) unsafe fn pass(number: usize, args: [usize; 6]) -> isize {
    loop {
        // SAFETY: as the caller says.
        let result = unsafe { through(PASS.load(Ordering::Relaxed), number, args) };
        match result {
            ONCE_MORE if signals::waits(number) => {}
            ONCE_MORE => return -(EINTR as isize),
            _ => return result,
        }
    }
}

/// A system call as the kernel returns it (negative errno), made by the instructions `syscall; ret` at `gate`.
///
/// # Safety
/// As for [`syscall`]; the instructions are there.
pub(super) unsafe fn through(gate: usize, number: usize, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the gate makes the call that the caller vouches for, and returns; the kernel clobbers rcx and r11 only.
    unsafe {
        core::arch::asm!("call r12", inlateout("rax") number => result, in("rdi") args[0], in("rsi") args[1],
            in("rdx") args[2], in("r10") args[3], in("r8") args[4], in("r9") args[5], in("r12") gate,
            lateout("rcx") _, lateout("r11") _);
    }
    result
}

const FUTEX_WAIT: usize = 0;
const FUTEX_WAKE: usize = 1;

/// Waits until the word is not `value`, at most a second.
pub(super) fn wait(word: &AtomicU32, value: u32) {
    wait_for(word, value, [1, 0]);
}

/// The same, at most a millisecond.
pub(super) fn wait_briefly(word: &AtomicU32, value: u32) {
    wait_for(word, value, [0, 1_000_000]);
}

fn wait_for(word: &AtomicU32, value: u32, time: [usize; 2]) {
    // SAFETY: a live word and a time.
    let _ =
        unsafe { pass(nr::FUTEX, [word.as_ptr() as usize, FUTEX_WAIT, value as usize, time.as_ptr() as usize, 0, 0]) };
}

/// Wakes who waits on it.
pub(super) fn wake(word: &AtomicU32) {
    wake_some(word, i32::MAX as usize);
}

/// One of them.
pub(super) fn wake_one(word: &AtomicU32) {
    wake_some(word, 1);
}

fn wake_some(word: &AtomicU32, count: usize) {
    // SAFETY: a live word.
    let _ = unsafe { pass(nr::FUTEX, [word.as_ptr() as usize, FUTEX_WAKE, count, 0, 0, 0]) };
}

/// Whether a result of the kernel's is an error.
pub(super) fn failed(result: isize) -> bool {
    (-4095..0).contains(&result)
}
