//! Between a node agent and the I/O worker of a job there, descriptors beside it.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::NodeId;
use super::frame::{Kind, Message};

/// Hosts whose I/O workers write the files of a job.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    pub hosts: Vec<IoHost>,
    /// Their workers' key; on its way between hosts hidden under the session's and `nonce`.
    pub key: [u8; 32],
    pub nonce: [u8; 32],
}

#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct IoHost {
    pub name: String,
    /// Where its worker listens ("address:port"), best first; empty while it has to be started.
    pub addresses: Vec<String>,
}

/// What the agent tells.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Work {
    /// The memory (descriptor); the first word.
    Memory,
    /// These write in its stead; it is this node's.
    Forward { node: NodeId, forward: Forward },
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
    /// All of a log whose program has ended is written: how many writes and bytes that were, how many calls it took, and whether something is
    /// missing of which the program was not told.
    Drained {
        segment: u32,
        writes: u64,
        bytes: u64,
        pieces: u64,
        untold: bool,
    },
    /// What follows in this file was not written, because of this errno, until the program is told.
    Lost {
        segment: u32,
        file: u32,
        errno: i32,
    },
    /// It writes this file itself, because this I/O host cannot.
    Here {
        segment: u32,
        file: u32,
        host: String,
        errno: i32,
    },
    /// This I/O host's worker is gone; whether there are others.
    Gone {
        host: String,
        others: bool,
    },
    /// It may be there, and does not answer.
    Silent {
        host: String,
        error: String,
    },
    Finished,
}

impl Message for Work {
    const KIND: Kind = Kind::Files;
}

impl Message for Worked {
    const KIND: Kind = Kind::Files;
}
