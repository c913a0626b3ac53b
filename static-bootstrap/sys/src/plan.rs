//! The launch plan of one job on one node: written by the keeper into a sealed memfd, read by every rank's bootstrapper.
//!
//! One flat block of native-endian words; every offset counts bytes from the start of the block. Strings end with NUL. The
//! writer (hpcrt) and the reader (boot) are built from this one file and embedded in one binary, so that they cannot disagree.

/// First word of every plan ("HPCRTPL1").
pub const MAGIC: u64 = u64::from_le_bytes(*b"HPCRTPL1");
/// The descriptor at which a bootstrapper finds its plan.
pub const PLAN_FD: i32 = 3;
/// The descriptor to which a bootstrapper writes a [`Failure`]; closed by a successful exec.
pub const FAILURE_FD: i32 = 4;

/// The head of the block.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
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
}

/// What differs between the ranks of a node.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rank {
    /// `u32` offsets of additional environment strings.
    pub envc: u32,
    pub envp: u32,
    /// Processor set for `sched_setaffinity(2)`, in bytes; 0 leaves it alone.
    pub mask_len: u32,
    pub mask: u32,
}

/// Why a rank could not become the program.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    /// Index into the rank table.
    pub rank: u32,
    pub stage: u32,
    pub errno: u32,
}

/// [`Failure::stage`]: the plan itself is unusable.
pub const STAGE_PLAN: u32 = 0;
/// [`Failure::stage`]: neither the working directory nor the fall-back can be entered.
pub const STAGE_CWD: u32 = 1;
/// [`Failure::stage`]: exec failed.
pub const STAGE_EXEC: u32 = 2;
/// [`Failure::stage`]: not fatal: the fall-back directory is used.
pub const STAGE_HOME: u32 = 3;
/// [`Failure::stage`]: the process may not be traced.
pub const STAGE_HOLD: u32 = 4;
