//! The way from the program into what takes locks: one thread at a time, without signals in between, whose handlers might wait for a page,
//! and not on a stack that may be away.

use core::arch::{asm, naked_asm};
use core::cell::UnsafeCell;

use super::lock::Lock;
use super::{call, window};

const SIZE: usize = 128 << 10;

#[repr(align(64))]
struct Stack(UnsafeCell<[u8; SIZE]>);

// SAFETY: who holds `INSIDE` has it.
unsafe impl Sync for Stack {}

static STACK: Stack = Stack(UnsafeCell::new([0; SIZE]));
static INSIDE: Lock<()> = Lock::new(());

/// Runs what takes locks. What it is told it must own: what lies on the caller's stack may be away.
pub(super) fn enter<T>(work: impl FnOnce() -> T) -> T {
    let here: usize;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) here, options(nomem, nostack, preserves_flags)) };
    let before = call::block_signals();
    let inside = INSIDE.lock();
    let result = if window::contains(here) { elsewhere(work) } else { work() };
    drop(inside);
    call::restore_signals(before);
    result
}

/// [`enter`], never on the caller's stack.
pub(super) fn enter_elsewhere<T>(work: impl FnOnce() -> T) -> T {
    let before = call::block_signals();
    let inside = INSIDE.lock();
    let result = elsewhere(work);
    drop(inside);
    call::restore_signals(before);
    result
}

struct Job<F, T> {
    work: Option<F>,
    result: Option<T>,
}

/// With `INSIDE` held.
fn elsewhere<F: FnOnce() -> T, T>(work: F) -> T {
    extern "C" fn run<F: FnOnce() -> T, T>(job: *mut Job<F, T>) {
        // SAFETY: the caller waits, and nobody else knows of its job. What is to be done comes over to this stack.
        if let Some(work) = unsafe { (*job).work.take() } {
            let result = work();
            // SAFETY: as above.
            unsafe { (*job).result = Some(result) };
        }
    }
    let mut job = Job { work: Some(work), result: None };
    let run: extern "C" fn(*mut Job<F, T>) = run::<F, T>;
    // SAFETY: the whole stack is ours, and its end aligned.
    unsafe { switch(STACK.0.get() as usize + SIZE, run as usize, &raw mut job as usize) };
    match job.result {
        Some(result) => result,
        None => super::fatal::end(),
    }
}

/// Calls `run(argument)` on another stack.
///
/// # Safety
/// `top` is the aligned end of a stack that nobody uses.
#[unsafe(naked)]
unsafe extern "C" fn switch(top: usize, run: usize, argument: usize) {
    naked_asm!("push rbp", "mov rbp, rsp", "mov rsp, rdi", "mov rdi, rdx", "call rsi", "mov rsp, rbp", "pop rbp", "ret")
}
