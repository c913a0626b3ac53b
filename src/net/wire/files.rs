//! Between a node agent and the I/O worker of a job there, descriptors beside it.

use rkyv::{Archive, Deserialize, Serialize};

use super::frame::{Kind, Message};

/// What the agent tells.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// The memory (descriptor); the first word.
    Memory,
    /// A program has this segment.
    Begin { segment: u32 },
    /// It writes to this open file (descriptor).
    File { segment: u32, file: u32 },
    /// It does not any more.
    Drop { segment: u32, file: u32 },
    /// It has ended; answered by [`Worked::Drained`].
    Over { segment: u32 },
    /// That was everything that an earlier worker knew.
    Known,
    /// Write what there is, and end; answered by [`Worked::Finished`].
    Finish,
}

/// What the worker tells.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Worked {
    /// All of a log whose program has ended is written: how many writes and bytes that were, and how many calls it took.
    Drained {
        segment: u32,
        writes: u64,
        bytes: u64,
        pieces: u64,
    },
    /// What follows in this file was not written, because of this errno, until the program is told.
    Lost {
        segment: u32,
        file: u32,
        errno: i32,
    },
    Finished,
}

impl Message for Work {
    const KIND: Kind = Kind::Files;
}

impl Message for Worked {
    const KIND: Kind = Kind::Files;
}
