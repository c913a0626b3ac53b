//! What is to be done about a system call, by its number, before it is made where the program makes it.

use super::kernel::nr;

pub(super) const CALLS: usize = 512;

/// Nothing to do; wait first for what is pending, if anything is; look closer.
pub(super) const HARMLESS: u8 = 0;
pub(super) const SETTLE: u8 = 1;
pub(super) const LOOK: u8 = 2;
/// The first argument is a descriptor: look closer unless it is known not to concern us.
pub(super) const FILE: u8 = 3;
/// Tells of a file: look closer unless nobody on the node keeps any, so that nothing is pending, and nothing is missing.
pub(super) const TELLS: u8 = 4;
/// Changes what memory may be used for: look closer where it can be executed then.
pub(super) const PROTECTS: u8 = 5;
/// Maps memory: look closer unless it is private, of no file, and not executed.
pub(super) const MAPS: u8 = 6;
/// Makes a process or thread, from where we cannot follow: the layer steps aside before.
pub(super) const MAKES: u8 = 7;
/// As [`LOOK`], but for what [`idle`](super::idle) knows to be nothing.
pub(super) const IDLE: u8 = 8;

#[unsafe(link_section = ".data.hot.classes")]
pub(super) static CLASS: [u8; CALLS] = classes();

const fn classes() -> [u8; CALLS] {
    let mut all = [SETTLE; CALLS];
    // Memory, clocks, sleeping, numbers of processes; what waits or only hears: poll select access recvfrom recvmsg getcwd getdents
    // readlink epoll_wait ...
    mark(
        &mut all,
        HARMLESS,
        &[
            7, 11, 12, 21, 23, 24, 25, 27, 28, 35, 39, 41, 45, 47, 51, 52, 55, 63, 78, 79, 89, 95, 96, 98, 99, 100,
            102, 104, 107, 108, 110, 111, 115, 118, 120, 121, 124, 127, 131, 137, 138, 158, 186, 187, 202, 201, 203,
            204, 213, 217, 218, 221, 228, 229, 230, 232, 233, 267, 269, 273, 291, 309, 318, 324, 334, 439,
        ],
    );
    let files =
        [nr::READ, nr::WRITE, nr::FSTAT, nr::LSEEK, nr::IOCTL, nr::PREAD64, nr::PWRITE64, nr::READV, nr::WRITEV];
    mark(&mut all, FILE, &files);
    mark(&mut all, TELLS, &[nr::STAT, nr::LSTAT, nr::NEWFSTATAT, nr::STATX]);
    mark(&mut all, PROTECTS, &[nr::MPROTECT, nr::PKEY_MPROTECT]);
    mark(&mut all, IDLE, &[nr::OPEN, nr::OPENAT, nr::CLOSE, nr::FCNTL, nr::PPOLL, nr::PSELECT6]);
    mark(&mut all, MAPS, &[nr::MMAP]);
    mark(&mut all, MAKES, &[nr::CLONE, nr::FORK, nr::VFORK, nr::CLONE3]);
    mark(
        &mut all,
        LOOK,
        &[
            nr::SHMAT,
            nr::WAIT4,
            nr::WAITID,
            nr::RT_SIGACTION,
            nr::RT_SIGPROCMASK,
            nr::RT_SIGSUSPEND,
            nr::EPOLL_PWAIT,
            nr::DUP,
            nr::DUP2,
            nr::SENDFILE,
            nr::SENDMSG,
            nr::EXECVE,
            nr::FLOCK,
            nr::FSYNC,
            nr::FDATASYNC,
            nr::TRUNCATE,
            nr::FTRUNCATE,
            nr::CREAT,
            nr::PRCTL,
            nr::SETRLIMIT,
            nr::IO_SETUP,
            nr::EXIT_GROUP,
            nr::UNSHARE,
            nr::PERSONALITY,
            nr::SPLICE,
            nr::SYNC,
            nr::SYNCFS,
            nr::SYNC_FILE_RANGE,
            nr::FALLOCATE,
            nr::DUP3,
            nr::PREADV,
            nr::PWRITEV,
            nr::PRLIMIT64,
            nr::SENDMMSG,
            nr::EXECVEAT,
            nr::COPY_FILE_RANGE,
            nr::PREADV2,
            nr::PWRITEV2,
            nr::IO_URING_SETUP,
            nr::CLOSE_RANGE,
            nr::OPENAT2,
        ],
    );
    all
}

const fn mark(all: &mut [u8; CALLS], class: u8, numbers: &[usize]) {
    let mut nth = 0;
    while nth < numbers.len() {
        all[numbers[nth]] = class;
        nth += 1;
    }
}
