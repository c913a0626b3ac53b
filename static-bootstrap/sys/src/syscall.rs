//! Raw Linux system calls (the kernel's syscall ABI; `syscall(2)`): no `errno`, so also for a process that shares another's memory.
#![allow(unsafe_code, reason = "system calls without errno")]

use core::arch::asm;

/// Numbers of the calls used here (`asm/unistd.h` of each architecture).
#[cfg(target_arch = "x86_64")]
pub mod nr {
    pub const CLOSE: usize = 3;
    pub const MMAP: usize = 9;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const EXECVE: usize = 59;
    pub const EXECVEAT: usize = 322;
    pub const DUP3: usize = 292;
    pub const EXIT_GROUP: usize = 231;
    pub const GETPPID: usize = 110;
    pub const SETPGID: usize = 109;
    pub const CHDIR: usize = 80;
    pub const PRCTL: usize = 157;
    pub const SCHED_SETAFFINITY: usize = 203;
    pub const PRLIMIT64: usize = 302;
}

/// Numbers of the calls used here (`asm-generic/unistd.h`).
#[cfg(target_arch = "aarch64")]
pub mod nr {
    pub const CLOSE: usize = 57;
    pub const MMAP: usize = 222;
    pub const RT_SIGPROCMASK: usize = 135;
    pub const EXECVE: usize = 221;
    pub const EXECVEAT: usize = 281;
    pub const DUP3: usize = 24;
    pub const EXIT_GROUP: usize = 94;
    pub const GETPPID: usize = 173;
    pub const SETPGID: usize = 154;
    pub const CHDIR: usize = 49;
    pub const PRCTL: usize = 167;
    pub const SCHED_SETAFFINITY: usize = 122;
    pub const PRLIMIT64: usize = 261;
}

/// Makes a system call; an error comes back as the positive errno.
///
/// # Safety
/// The arguments must be valid for the call `number`: pointers live and of the right type, for as long as the kernel uses them.
pub unsafe fn syscall(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel clobbers rcx and r11 only and keeps the stack; the caller vouches for the arguments.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
             in("r10") args[3], in("r8") args[4], in("r9") args[5], lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel clobbers x0 only and keeps the stack; the caller vouches for the arguments.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") args[0] => result, in("x1") args[1], in("x2") args[2],
             in("x3") args[3], in("x4") args[4], in("x5") args[5], options(nostack));
    }
    if (-4095..0).contains(&result) { Err(result.unsigned_abs() as u32) } else { Ok(result as usize) }
}
