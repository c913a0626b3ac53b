//! System calls of the file layer: they leave through one instruction that the dispatcher lets pass.

use core::arch::asm;

pub(super) use crate::call::{PASS as GATE, failed, pass as raw, wait, wait_briefly, wake, wake_one};

/// Numbers on x86-64 (`asm/unistd_64.h`) of what is told apart here, and not yet known to all.
pub(super) mod nr {
    pub(crate) use sys::syscall::nr::*;

    pub(crate) const OPEN: usize = 2;
    pub(crate) const STAT: usize = 4;
    pub(crate) const LSTAT: usize = 6;
    pub(crate) const DUP: usize = 32;
    pub(crate) const DUP2: usize = 33;
    pub(crate) const SHMAT: usize = 30;
    pub(crate) const SENDFILE: usize = 40;
    pub(crate) const WAIT4: usize = 61;
    pub(crate) const FLOCK: usize = 73;
    pub(crate) const FSYNC: usize = 74;
    pub(crate) const FDATASYNC: usize = 75;
    pub(crate) const TRUNCATE: usize = 76;
    pub(crate) const FTRUNCATE: usize = 77;
    pub(crate) const CREAT: usize = 85;
    pub(crate) const READLINK: usize = 89;
    pub(crate) const STATFS: usize = 137;
    pub(crate) const FSTATFS: usize = 138;
    pub(crate) const SETRLIMIT: usize = 160;
    pub(crate) const RT_SIGSUSPEND: usize = 130;
    pub(crate) const WAITID: usize = 247;
    pub(crate) const PSELECT6: usize = 270;
    pub(crate) const PPOLL: usize = 271;
    pub(crate) const EPOLL_PWAIT: usize = 281;
    pub(crate) const PERSONALITY: usize = 135;
    pub(crate) const PKEY_MPROTECT: usize = 329;
    pub(crate) const RT_TGSIGQUEUEINFO: usize = 297;
    pub(crate) const NEWFSTATAT: usize = 262;
    pub(crate) const UNSHARE: usize = 272;
    pub(crate) const SPLICE: usize = 275;
    pub(crate) const SYNC: usize = 162;
    pub(crate) const FADVISE64: usize = 221;
    pub(crate) const SYNCFS: usize = 306;
    pub(crate) const SYNC_FILE_RANGE: usize = 277;
    pub(crate) const FALLOCATE: usize = 285;
    pub(crate) const COPY_FILE_RANGE: usize = 326;
    pub(crate) const STATX: usize = 332;
    pub(crate) const OPENAT2: usize = 437;
}

const SIG_SETMASK: usize = 2;
/// All but those that a fault of our own would raise.
pub(super) const ALL: u64 = !(1 << 10 | 1 << 6 | 1 << 30);

/// Blocks the signals of this thread; returns those that were blocked.
pub(super) fn block_signals() -> u64 {
    let mut before = 0u64;
    let all = ALL;
    let (new, old) = (&raw const all as usize, &raw mut before as usize);
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
