//! System calls of the file layer: they leave through one instruction that the dispatcher lets pass.

use core::arch::asm;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Numbers on x86-64 (`asm/unistd_64.h`) of what is told apart here.
pub(super) mod nr {
    pub(crate) const READ: usize = 0;
    pub(crate) const WRITE: usize = 1;
    pub(crate) const OPEN: usize = 2;
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const STAT: usize = 4;
    pub(crate) const FSTAT: usize = 5;
    pub(crate) const LSTAT: usize = 6;
    pub(crate) const LSEEK: usize = 8;
    pub(crate) const MMAP: usize = 9;
    pub(crate) const RT_SIGACTION: usize = 13;
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const RT_SIGRETURN: usize = 15;
    pub(crate) const IOCTL: usize = 16;
    pub(crate) const PREAD64: usize = 17;
    pub(crate) const PWRITE64: usize = 18;
    pub(crate) const READV: usize = 19;
    pub(crate) const WRITEV: usize = 20;
    pub(crate) const DUP: usize = 32;
    pub(crate) const DUP2: usize = 33;
    pub(crate) const GETPID: usize = 39;
    pub(crate) const SENDFILE: usize = 40;
    pub(crate) const SOCKET: usize = 41;
    pub(crate) const CONNECT: usize = 42;
    pub(crate) const SENDMSG: usize = 46;
    pub(crate) const RECVMSG: usize = 47;
    pub(crate) const SETSOCKOPT: usize = 54;
    pub(crate) const CLONE: usize = 56;
    pub(crate) const FORK: usize = 57;
    pub(crate) const VFORK: usize = 58;
    pub(crate) const EXECVE: usize = 59;
    pub(crate) const KILL: usize = 62;
    pub(crate) const FCNTL: usize = 72;
    pub(crate) const FLOCK: usize = 73;
    pub(crate) const FSYNC: usize = 74;
    pub(crate) const FDATASYNC: usize = 75;
    pub(crate) const TRUNCATE: usize = 76;
    pub(crate) const FTRUNCATE: usize = 77;
    pub(crate) const CREAT: usize = 85;
    pub(crate) const READLINK: usize = 89;
    pub(crate) const FSTATFS: usize = 138;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const SETRLIMIT: usize = 160;
    pub(crate) const FUTEX: usize = 202;
    pub(crate) const IO_SETUP: usize = 206;
    pub(crate) const EXIT_GROUP: usize = 231;
    pub(crate) const OPENAT: usize = 257;
    pub(crate) const NEWFSTATAT: usize = 262;
    pub(crate) const UNSHARE: usize = 272;
    pub(crate) const SPLICE: usize = 275;
    pub(crate) const SYNC_FILE_RANGE: usize = 277;
    pub(crate) const FALLOCATE: usize = 285;
    pub(crate) const DUP3: usize = 292;
    pub(crate) const PREADV: usize = 295;
    pub(crate) const PWRITEV: usize = 296;
    pub(crate) const PRLIMIT64: usize = 302;
    pub(crate) const SENDMMSG: usize = 307;
    pub(crate) const EXECVEAT: usize = 322;
    pub(crate) const COPY_FILE_RANGE: usize = 326;
    pub(crate) const PREADV2: usize = 327;
    pub(crate) const PWRITEV2: usize = 328;
    pub(crate) const STATX: usize = 332;
    pub(crate) const IO_URING_SETUP: usize = 425;
    pub(crate) const CLONE3: usize = 435;
    pub(crate) const CLOSE_RANGE: usize = 436;
    pub(crate) const OPENAT2: usize = 437;
}

const FUTEX_WAIT: usize = 0;
const FUTEX_WAKE: usize = 1;

/// Address of `syscall; ret` in the part that may make system calls.
pub(super) static GATE: AtomicUsize = AtomicUsize::new(0);

/// A system call as the kernel returns it: negative errno.
///
/// # Safety
/// As for the call.
pub(super) unsafe fn raw(number: usize, args: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the gate makes the call that the caller vouches for, and returns; the kernel clobbers rcx and r11 only.
    unsafe {
        asm!("call r12", inlateout("rax") number => result, in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5], in("r12") GATE.load(Ordering::Relaxed),
            lateout("rcx") _, lateout("r11") _);
    }
    result
}

/// Whether a result is an error.
pub(super) fn failed(result: isize) -> bool {
    (-4095..0).contains(&result)
}

/// Waits until the word is not `value`, at most a second.
pub(super) fn wait(word: &AtomicU32, value: u32) {
    let time = [1usize, 0];
    // SAFETY: a live word and a time.
    let _ =
        unsafe { raw(nr::FUTEX, [word.as_ptr() as usize, FUTEX_WAIT, value as usize, time.as_ptr() as usize, 0, 0]) };
}

/// Wakes who waits on it.
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: a live word.
    let _ = unsafe { raw(nr::FUTEX, [word.as_ptr() as usize, FUTEX_WAKE, i32::MAX as usize, 0, 0, 0]) };
}

const SIG_SETMASK: usize = 2;
/// All but those that a fault of our own would raise.
static ALL: u64 = !(1 << 10 | 1 << 6 | 1 << 30);

/// Blocks the signals of this thread; returns those that were blocked.
pub(super) fn block_signals() -> u64 {
    let mut before = 0u64;
    let (new, old) = (&raw const ALL as usize, &raw mut before as usize);
    // SAFETY: sets of this size.
    let _ = unsafe { raw(nr::RT_SIGPROCMASK, [SIG_SETMASK, new, old, 8, 0, 0]) };
    before
}

pub(super) fn restore_signals(before: u64) {
    // SAFETY: as above.
    let _ = unsafe { raw(nr::RT_SIGPROCMASK, [SIG_SETMASK, &raw const before as usize, 0, 8, 0, 0]) };
}

/// Tells threads apart.
pub(super) fn thread() -> usize {
    let own: usize;
    // SAFETY: where libc keeps the address of the thread's own block.
    unsafe { asm!("mov {}, fs:[0]", out(reg) own, options(nostack, readonly, preserves_flags)) };
    own
}
