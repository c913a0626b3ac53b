//! Raw Linux system calls (the kernel's syscall ABI; `syscall(2)`): no `errno`, so also for a process that shares another's memory.
#![allow(unsafe_code, reason = "system calls without errno")]

use core::arch::asm;
use core::ffi::CStr;
use core::slice;

const AT_FDCWD: usize = -100_isize as usize;
const O_CLOEXEC: usize = 0o2_000_000;
const SEEK_END: usize = 2;
const PROT_READ: usize = 1;
const MAP_SHARED: usize = 1;

/// Numbers of the calls used here (`asm/unistd.h` of each architecture).
#[cfg(target_arch = "x86_64")]
pub mod nr {
    pub const CLOSE: usize = 3;
    pub const MMAP: usize = 9;
    pub const RT_SIGPROCMASK: usize = 14;
    pub const EXECVE: usize = 59;
    pub const EXECVEAT: usize = 322;
    pub const DUP3: usize = 292;
    pub const FCNTL: usize = 72;
    pub const EXIT_GROUP: usize = 231;
    pub const GETPPID: usize = 110;
    pub const SETPGID: usize = 109;
    pub const CHDIR: usize = 80;
    pub const PRCTL: usize = 157;
    pub const PTRACE: usize = 101;
    pub const SCHED_YIELD: usize = 24;
    pub const SCHED_GETAFFINITY: usize = 204;
    pub const SCHED_SETAFFINITY: usize = 203;
    pub const PRLIMIT64: usize = 302;
    pub const READ: usize = 0;
    pub const LSEEK: usize = 8;
    pub const MUNMAP: usize = 11;
    pub const GETPID: usize = 39;
    pub const GETTID: usize = 186;
    pub const SOCKET: usize = 41;
    pub const CONNECT: usize = 42;
    pub const SENDTO: usize = 44;
    pub const RECVFROM: usize = 45;
    pub const SETSOCKOPT: usize = 54;
    pub const GETSOCKOPT: usize = 55;
    pub const KILL: usize = 62;
    pub const WRITE: usize = 1;
    pub const MPROTECT: usize = 10;
    pub const BRK: usize = 12;
    pub const RT_SIGACTION: usize = 13;
    pub const RT_SIGRETURN: usize = 15;
    pub const IOCTL: usize = 16;
    pub const MREMAP: usize = 25;
    pub const MINCORE: usize = 27;
    pub const SYSINFO: usize = 99;
    pub const GETRUSAGE: usize = 98;
    pub const MADVISE: usize = 28;
    pub const MLOCK: usize = 149;
    pub const MUNLOCK: usize = 150;
    pub const MLOCKALL: usize = 151;
    pub const MLOCK2: usize = 325;
    pub const SENDMSG: usize = 46;
    pub const SHUTDOWN: usize = 48;
    pub const RECVMSG: usize = 47;
    pub const CLONE: usize = 56;
    pub const FORK: usize = 57;
    pub const VFORK: usize = 58;
    pub const EXIT: usize = 60;
    pub const FUTEX: usize = 202;
    pub const SECCOMP: usize = 317;
    pub const USERFAULTFD: usize = 323;
    pub const CLONE3: usize = 435;
    pub const CLOSE_RANGE: usize = 436;
    pub const POLL: usize = 7;
    pub const FSTAT: usize = 5;
    pub const PREAD64: usize = 17;
    pub const PWRITE64: usize = 18;
    pub const READV: usize = 19;
    pub const WRITEV: usize = 20;
    pub const GETTIMEOFDAY: usize = 96;
    pub const CLOCK_GETTIME: usize = 228;
    pub const GETDENTS64: usize = 217;
    pub const GETRANDOM: usize = 318;
    pub const PWRITEV: usize = 296;
    pub const PREADV: usize = 295;
    pub const OPENAT: usize = 257;
    pub const READLINKAT: usize = 267;
    pub const NEWFSTATAT: usize = 262;
    pub const TGKILL: usize = 234;
    pub const VMSPLICE: usize = 278;
    pub const IO_SETUP: usize = 206;
    pub const IO_URING_SETUP: usize = 425;
    pub const PROCESS_VM_READV: usize = 310;
    pub const SENDMMSG: usize = 307;
    pub const RECVMMSG: usize = 299;
    pub const PREADV2: usize = 327;
    pub const PWRITEV2: usize = 328;
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
    pub const FCNTL: usize = 25;
    pub const EXIT_GROUP: usize = 94;
    pub const GETPPID: usize = 173;
    pub const SETPGID: usize = 154;
    pub const CHDIR: usize = 49;
    pub const PRCTL: usize = 167;
    pub const PTRACE: usize = 117;
    pub const SCHED_YIELD: usize = 124;
    pub const SCHED_GETAFFINITY: usize = 123;
    pub const SCHED_SETAFFINITY: usize = 122;
    pub const PRLIMIT64: usize = 261;
    pub const READ: usize = 63;
    pub const LSEEK: usize = 62;
    pub const MUNMAP: usize = 215;
    pub const GETPID: usize = 172;
    pub const GETTID: usize = 178;
    pub const SOCKET: usize = 198;
    pub const CONNECT: usize = 203;
    pub const SENDTO: usize = 206;
    pub const RECVFROM: usize = 207;
    pub const SETSOCKOPT: usize = 208;
    pub const GETSOCKOPT: usize = 209;
    pub const KILL: usize = 129;
    pub const OPENAT: usize = 56;
    pub const READLINKAT: usize = 78;
    pub const NEWFSTATAT: usize = 79;
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

/// Maps a whole file to read, for good. It must not become shorter; a word of it that changes may be read volatilely only.
pub fn map_file(path: &CStr) -> Option<&'static [u8]> {
    // SAFETY: a string, then integers; the new mapping stays, and is as long as the file.
    unsafe {
        let file = syscall(nr::OPENAT, [AT_FDCWD, path.as_ptr() as usize, O_CLOEXEC, 0, 0, 0]).ok()?;
        let size = syscall(nr::LSEEK, [file, 0, SEEK_END, 0, 0, 0]).unwrap_or(0);
        let start = syscall(nr::MMAP, [0, size, PROT_READ, MAP_SHARED, file, 0]);
        let _ = syscall(nr::CLOSE, [file, 0, 0, 0, 0, 0]);
        Some(slice::from_raw_parts(start.ok()? as *const u8, size))
    }
}

/// The beginning of a file, as much as one read gives.
pub fn read_file<'a>(path: &CStr, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
    // SAFETY: a string, then a buffer of the length given, which lives across the call.
    let len = unsafe {
        let file = syscall(nr::OPENAT, [AT_FDCWD, path.as_ptr() as usize, O_CLOEXEC, 0, 0, 0]).ok()?;
        let len = syscall(nr::READ, [file, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0]);
        let _ = syscall(nr::CLOSE, [file, 0, 0, 0, 0, 0]);
        len.ok()?
    };
    buffer.get(..len)
}
