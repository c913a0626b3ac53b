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
    /// A log of the program's.
    pub segment: u32,
    pub detail: u32,
    /// The file system that a log is for; the file by its file system and number there.
    pub device: u64,
    pub number: u64,
}

pub const MARK: [u8; 8] = *b"files 04";

pub mod op {
    /// Take part; answered by [`Terms`](super::Terms), with the memory.
    pub const ATTACH: u32 = 1;
    /// A log; answered likewise. `detail`: not 0 if it is the program's first.
    pub const LOG: u32 = 2;
    /// Have the worker write this file, whose descriptor comes beside it; this and the others are answered by [`Answer`](super::Answer).
    pub const KEEP: u32 = 3;
    /// Forget it.
    pub const DROP: u32 = 4;
    /// Nobody is to keep the file whose descriptor comes beside it, as long as this program runs.
    pub const DIRECT: u32 = 5;
    /// This program cannot be handled; `detail`: one of [`why`](super::why).
    pub const REFUSE: u32 = 6;
    /// The user is to hear of `detail`, and the program goes on.
    pub const SAY: u32 = 7;
}

pub mod why {
    pub const NO_LIBC: u32 = 1;
    pub const OTHER_LIBC: u32 = 2;
    pub const NO_DISPATCH: u32 = 3;
    /// There is no worker any more.
    pub const NO_WORKER: u32 = 4;
    /// It may reach other hosts without system calls.
    pub const UNSEEN: u32 = 5;
}

/// Bytes of the list of directories.
pub const ROOTS_MAX: usize = 1024;

/// The answer to [`op::ATTACH`] and [`op::LOG`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub mark: [u8; 8],
    /// [`NOBODY`](super::extents::NOBODY): no log was asked for, or there is none left.
    pub segment: u32,
    /// An errno, or 0.
    pub error: u32,
    /// Bytes of a log.
    pub ring: u64,
}

/// An errno or 0, and the place of the file in the table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Answer {
    pub error: u32,
    pub inode: u32,
}
