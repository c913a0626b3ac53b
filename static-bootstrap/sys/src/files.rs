//! What the file layer in a program and the agent of its node say to each other at the [`DOOR`](super::resident::DOOR), one question a connection.

/// What is asked.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    pub mark: [u8; 8],
    /// One of [`op`].
    pub op: u32,
    /// Number of the open file.
    pub file: u32,
    pub segment: u32,
    pub detail: u32,
}

pub const MARK: [u8; 8] = *b"files 01";

pub mod op {
    /// Take part; answered by [`Terms`](super::Terms), with the memory.
    pub const ATTACH: u32 = 1;
    /// Have the worker write this file, whose descriptor comes beside it; answered by a word, an errno or 0.
    pub const KEEP: u32 = 2;
    /// Forget it; answered likewise.
    pub const DROP: u32 = 3;
    /// This program cannot be handled; `detail`: one of [`why`](super::why).
    pub const REFUSE: u32 = 4;
}

pub mod why {
    pub const NO_LIBC: u32 = 1;
    pub const OTHER_LIBC: u32 = 2;
    pub const NO_DISPATCH: u32 = 3;
    pub const NO_MEMORY: u32 = 4;
    /// There is no worker any more.
    pub const NO_WORKER: u32 = 5;
}

/// Bytes of the list of directories.
pub const ROOTS_MAX: usize = 1024;

/// The answer to [`op::ATTACH`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub mark: [u8; 8],
    pub segment: u32,
    /// An errno, or 0.
    pub error: u32,
    /// Directories, each ended by NUL; none: file systems that hosts share, and FUSE.
    pub roots: [u8; ROOTS_MAX],
}
