//! What the members of a job (its ranks) do together, as it travels in the control tree.
//!
//! A body longer than [`PIECE`] comes in pieces, in order; all but the last say that there is more.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::NodeId;

/// Bytes in one piece of a body, at most.
pub const PIECE: usize = 1 << 20;

/// A collective operation. All members take part in each, in the same order; `net::collective` says when it ends for a member.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Carries the keys that were put before it, too.
    Barrier,
    Broadcast,
    Gather,
    Scatter,
    AllGather,
}

/// What a node says upward.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Word {
    /// A member here has called something; said once.
    Begun,
    /// The master has called number `seq`, whose outcome is what it gives: the body, an entry as in [`Word::Joined`].
    Given { seq: u32, act: Act, more: bool },
    /// So many ranks, all at and below `node`, have called number `seq`. The body has their entries.
    Joined { node: NodeId, seq: u32, act: Act, ranks: u32, more: bool },
    /// A member does not want to wait any longer.
    Late { seq: u32 },
    /// The answer to [`Verdict::Roll`]: ranks of this node that have not called it.
    Absent { node: NodeId, seq: u32, ranks: Vec<u32> },
    /// The members contradict each other.
    Fault { seq: u32, why: String },
    /// The master sends the front end a message.
    ToFront { more: bool },
    /// The master has received one.
    Received,
    /// A member wants something of the table of names; answered by [`Verdict::Named`].
    Name { node: NodeId, rank: u32, ask: Name },
    /// A member ends the job.
    Abort { rank: u32, code: i32, message: String },
}

/// What the root answers.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Number `seq` has this body for every member. Of a gather, only for nodes without the master.
    Same { seq: u32, act: Act, more: bool },
    /// Number `seq` has an entry in this body for each member of this node who gets something.
    Parts { seq: u32, act: Act, more: bool },
    /// Number `from` and all later ones fail; nothing more is said of earlier ones.
    Broken { from: u32, broken: Broken },
    /// Who of you has not called number `seq`?
    Roll { seq: u32 },
    /// The front end sends the master a message.
    ToMaster { more: bool },
    /// The front end has received one.
    Received,
    /// The answer to [`Word::Name`].
    Named { rank: u32, port: Result<Vec<u8>, String> },
}

/// Why collectives fail from now on.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    pub kind: Fault,
    /// Of which ranks that is said, ascending.
    pub ranks: Vec<u32>,
    pub why: String,
}

/// See [`Broken`].
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// They ended, or their hosts were lost.
    Lost,
    /// They did not call it in time.
    Late,
    /// The members contradict each other.
    Misused,
}

/// A question to the session's table of names (PMI-1's publish, unpublish and lookup).
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Name {
    Publish { service: Vec<u8>, port: Vec<u8> },
    Unpublish { service: Vec<u8> },
    LookUp { service: Vec<u8> },
}

/// What the members of a job know of it from the start.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub struct Wiring {
    /// The job's nodes with the ranks of each: runs of (first rank, ranks), ascending.
    pub nodes: Vec<(NodeId, Vec<(u32, u32)>)>,
    /// Which ranks share a node, as PMI-1's `PMI_process_mapping` says it; empty when that would be too long.
    pub mapping: String,
    /// Somebody listens at the front end.
    pub front: bool,
}
