//! What the resident and the agent of its node say to each other. Both are built from this one file and embedded in one binary.

use super::files::ROOTS_MAX;
use super::places::{PLACES, Place};

/// Where the resident finds its settings: after this mark in its own file, where the agent puts [`Settings`].
pub const MARK: [u8; 16] = *b"hpcrt's memory =";
/// The resident's name in its directory, and that of the socket at which the agent answers.
pub const FILE: &str = "resident.so";
pub const DOOR: &str = "door";
/// Leads to the memory that programs of the file layer share, for those that the kernel lets look into the agent; others ask.
pub const MEMORY: &str = "memory";
/// Bytes of the directory's path; a Unix socket's path is not longer either.
pub const PLACE_MAX: usize = 88;

/// What the agent writes into the resident's file.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The directory that has the door, ended by NUL.
    pub place: [u8; PLACE_MAX],
    /// Bytes of captured memory that the program keeps here.
    pub local: u64,
    /// Not 0: faults inside the kernel are not asked for, even where they could be.
    pub user_mode_only: u64,
    /// Not 0: pages are copied, even where they could be moved.
    pub without_move: u64,
    /// Not 0: the file layer; some of [`files`].
    pub files: u64,
    /// Number of the file that [`MEMORY`] leads to.
    pub memory: u64,
    /// Directories, each ended by NUL; none: file systems that hosts share, and FUSE.
    pub roots: [u8; ROOTS_MAX],
}

impl Settings {
    /// As the resident is built.
    pub const NONE: Settings = Settings {
        place: [0; PLACE_MAX],
        local: 0,
        user_mode_only: 0,
        without_move: 0,
        files: 0,
        memory: 0,
        roots: [0; ROOTS_MAX],
    };

    /// The directory, without that NUL.
    pub fn place(&self) -> &[u8] {
        &self.place[..self.place.iter().position(|byte| *byte == 0).unwrap_or(PLACE_MAX)]
    }
}

/// Of the file layer.
pub mod files {
    pub const ON: u64 = 1;
    /// Only below certain directories.
    pub const NAMED: u64 = 2;
    /// Whatever it costs.
    pub const ALWAYS: u64 = 4;
    /// The job has programs on other hosts.
    pub const HOSTS: u64 = 8;
    /// Other hosts write: everything is kept from the first write on.
    pub const ELSEWHERE: u64 = 16;
}

/// Where the resident is put in a statically linked program: nothing but it and its gate lies from here on up to the window.
pub const PLACE: u64 = WINDOW - (32 << 20);
/// Where captured memory begins.
pub const WINDOW: u64 = 0x6800_0000_0000;
/// And how long that part of the address space is.
pub const WINDOW_BYTES: u64 = 1 << 40;

/// Memory servers of a program, at most.
pub const SERVERS: usize = 16;
/// Connections to each: for what the program waits for, for what it will need, for what it gives away.
pub const LINKS: usize = 3;

/// What a program asks at the door; and what for a child that it is about to have, without which it goes on. Both are answered as the first.
pub const ASK: [u8; 8] = *b"memory01";
pub const ASK_FOR_CHILD: [u8; 8] = *b"child001";

/// What a program asks there that has lost servers: whether they are there again. Answered as [`ASK`]; who is not among them is absent.
pub const AGAIN: [u8; 8] = *b"again001";

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Again {
    pub asked: [u8; 8],
    /// A bit for each.
    pub lost: u64,
}

/// Descriptors for each server: its links, and what it shares with this program.
pub const DESCRIPTORS: usize = LINKS + 1;

/// What is answered, with descriptors beside it: those of all servers, one after the other, and a file for [`Counts`](super::counts).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Grant {
    pub asked: [u8; 8],
    pub servers: u64,
    /// The name under which servers know this program.
    pub client: [u64; 2],
    /// Not 0: everything is kept twice.
    pub mirror: u64,
    /// A bit for each server that cannot be reached, and for each that shares the program's pages with it: in a file, where each has its distance
    /// from [`WINDOW`].
    pub absent: u64,
    pub shared: u64,
    /// What each lends, in pages.
    pub weights: [u64; SERVERS],
    pub places: [Place; PLACES],
    pub links: [[Link; LINKS]; SERVERS],
}

/// How a socket is used that the agent has connected, and on which both sides have proved themselves.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// Not 0: frames carry tags.
    pub tagged: u64,
    /// Frames that went each way so far.
    pub counter: u64,
    pub send: [u8; 32],
    pub receive: [u8; 32],
}

/// Why a program ends, told at the door.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Failure {
    /// One of [`cause`].
    pub cause: u32,
    /// Number of the server.
    pub server: u32,
    pub detail: [u64; 2],
}

pub mod cause {
    /// A server's connection ended; detail: errno, pages that it kept.
    pub const LOST: u32 = 1;
    /// It does not answer; detail: 0, pages that it kept.
    pub const SILENT: u32 = 2;
    /// It is full; detail: pages it lends, pages in use.
    pub const FULL: u32 = 3;
    /// What it says is not the protocol, or altered.
    pub const ALTERED: u32 = 4;
    /// The kernel refused something; detail: which ([`super::step`]), errno.
    pub const KERNEL: u32 = 5;
    /// What may stay local is too little for what the program holds.
    pub const SHORT: u32 = 6;
    /// A server is lost, and the program goes on without it; detail: why (one of these), pages that it kept.
    pub const GOES_ON: u32 = 7;
    /// The kernel cannot move pages, and something may use the program's behind its back.
    pub const PINNED: u32 = 8;
}

pub mod step {
    pub const WINDOW: u64 = 1;
    pub const USERFAULTFD: u64 = 2;
    pub const REGISTER: u64 = 3;
    pub const THREAD: u64 = 4;
    pub const FILTER: u64 = 5;
    pub const FILL: u64 = 6;
    pub const PATCH: u64 = 7;
    pub const MEMORY: u64 = 8;
    pub const MOVE: u64 = 9;
    pub const DISPATCH: u64 = 10;
}
