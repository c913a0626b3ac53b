//! The launch plan of one job on one node: a file in memory that the agent writes, and that the keeper and every rank's bootstrapper
//! map shared, so that what a rank leaves in its place comes back to the keeper.
//!
//! One flat block of native-endian words; every offset counts bytes from the start of the block. Strings end with NUL. The
//! writer (hpcrt) and the readers (hpcrt, boot) are built from this one file and embedded in one binary, so that they cannot disagree.

use core::sync::atomic::AtomicU32;

/// First word of every plan ("HPCRTPL2").
pub const MAGIC: u64 = u64::from_le_bytes(*b"HPCRTPL2");
/// The descriptor at which a bootstrapper finds its plan.
pub const PLAN_FD: usize = 3;
/// The descriptor by which a rank talks to its node's agent. One digit, so that every shell can name it.
pub const MEMBER_FD: usize = 8;
/// Exit code of a rank that could not become the program.
pub const NOT_STARTED: i32 = 125;

/// The head of the block.
#[repr(C)]
#[derive(Debug)]
pub struct Plan {
    pub magic: u64,
    /// Bytes in the whole block.
    pub len: u32,
    /// Process that must still be our parent; otherwise the job is over.
    pub keeper: u32,
    /// RLIMIT_NOFILE as the user had it.
    pub nofile: [u64; 2],
    /// Path of the program.
    pub program: u32,
    /// Working directory, and the one to fall back on.
    pub cwd: u32,
    pub home: u32,
    /// `u32` offsets of the strings of argv, and of the environment that all ranks share.
    pub argc: u32,
    pub argv: u32,
    pub envc: u32,
    pub envp: u32,
    /// [`Rank`] entries.
    pub ranks: u32,
    pub rank_table: u32,
    /// Not zero: stop before the program's first instruction, for the keeper as tracer.
    pub hold: u32,
    /// Path of what the keeper puts into the program before its first instruction if it is statically linked; 0: nothing.
    pub resident: u32,
}

/// What differs between the ranks of a node.
#[repr(C)]
#[derive(Debug)]
pub struct Rank {
    /// `u32` offsets of additional environment strings.
    pub envc: u32,
    pub envp: u32,
    /// Processor set for `sched_setaffinity(2)`, in bytes; 0 leaves it alone.
    pub mask_len: u32,
    pub mask: u32,
    pub failures: Failures,
}

/// The errno of what failed for a rank, written by itself; 0: that did not fail.
#[repr(C)]
#[derive(Debug)]
pub struct Failures {
    /// Not fatal: the bootstrapper cannot be executed, the rank starts without it.
    pub image: AtomicU32,
    /// Not 0 while the bootstrapper is on its way to its plan: who ends in between never saw it.
    pub boot: AtomicU32,
    /// Not fatal: there is no such working directory, the fall-back is used.
    pub home: AtomicU32,
    /// Neither the working directory nor the fall-back can be entered.
    pub cwd: AtomicU32,
    /// The process may not be traced.
    pub hold: AtomicU32,
    /// The program cannot be executed.
    pub exec: AtomicU32,
}
