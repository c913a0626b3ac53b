//! Threads that the program does not know of: all signals blocked, no thread-local storage, and a table of descriptors of their own, so
//! that a program which closes or looks at all of its descriptors meets none of ours.

use core::arch::naked_asm;

use sys::syscall::{nr, syscall};

use super::call;

const STACK: usize = 256 << 10;
/// CLONE_VM, CLONE_FS, CLONE_SIGHAND, CLONE_THREAD, CLONE_SYSVSEM (sched.h).
const THREAD: usize = 0x100 | 0x200 | 0x800 | 0x1_0000 | 0x4_0000;
const FILES: usize = 0x400;

/// Starts `run(argument)`, which must not return. `shares_files`: its descriptors are the caller's, else a copy of them.
pub(super) fn start(run: extern "C" fn(usize) -> !, argument: usize, shares_files: bool) -> Result<(), u32> {
    let stack = call::map(0, STACK, call::READ_WRITE, 0)?;
    // SAFETY: what is in there stays. A child has no use for it.
    let _ = unsafe { call::advise(stack, STACK, call::DONTFORK) };
    let flags = THREAD | if shares_files { FILES } else { 0 };
    let before = call::block_signals();
    // SAFETY: a stack of its own, which stays; the function takes such an argument.
    let started = unsafe { clone(flags, stack + STACK, run, argument) };
    call::restore_signals(before);
    if started < 0 { Err(started.unsigned_abs() as u32) } else { Ok(()) }
}

/// # Safety
/// `top` is the aligned end of a stack that nobody uses.
#[unsafe(naked)]
unsafe extern "C" fn clone(flags: usize, top: usize, run: extern "C" fn(usize) -> !, argument: usize) -> isize {
    naked_asm!(
        "sub rsi, 16",
        "mov [rsi], rdx",
        "mov [rsi + 8], rcx",
        "xor edx, edx",
        "xor r10d, r10d",
        "xor r8d, r8d",
        "mov eax, {clone}",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2: xor ebp, ebp",
        "pop rax",
        "pop rdi",
        "call rax",
        "ud2",
        clone = const nr::CLONE,
    )
}

/// Closes every descriptor of this thread's table but these, which are in ascending order.
pub(super) fn keep_only(fds: &[i32]) {
    let mut first = 0;
    for (from, to) in fds.iter().map(|fd| *fd as usize).chain([u32::MAX as usize + 1]).map(|end| {
        let range = (first, end);
        first = end + 1;
        range
    }) {
        if from < to {
            // SAFETY: integers.
            let _ = unsafe { syscall(nr::CLOSE_RANGE, [from, to - 1, 0, 0, 0, 0]) };
        }
    }
}

/// How many this process has, ours included.
pub(super) fn count() -> Option<usize> {
    const DIRECTORY_CLOEXEC: usize = 0o2_200_000;
    let mut stat = [0u64; 18];
    let path = c"/proc/self/task".as_ptr() as usize;
    // SAFETY: a path, and room for a `struct stat`, whose third word says how many names the directory has: two, and one for each thread.
    unsafe {
        let task = syscall(nr::OPENAT, [-100_isize as usize, path, DIRECTORY_CLOEXEC, 0, 0, 0]).ok()?;
        let known = syscall(nr::FSTAT, [task, stat.as_mut_ptr() as usize, 0, 0, 0, 0]);
        call::close(task as i32);
        known.ok().and_then(|_| (stat[2] as usize).checked_sub(2))
    }
}
