//! What a node knows about itself and its part of a job: told when it is asked, and at the job's end.
//!
//! Times are microseconds of the node's own clock since its agent began; zero says that it has not happened. The clocks of the hosts
//! need not agree: `launch::timeline` lays these times over the front end's.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::JobId;

/// Microseconds since the agent began.
pub type Micros = u64;

/// Paths that a node names in [`JobFacts::originals`], at most.
pub const ORIGINALS: usize = 4;

/// How an agent came up.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Birth {
    /// Its parent had told it who it is.
    pub enrolled: Micros,
    /// Its link to the parent was made.
    pub connected: Micros,
    /// Its namespaces and store were made too, and it said that it joined.
    pub joined: Micros,
}

/// When a node's part of a job came how far.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JobTimes {
    /// The order to launch it came.
    pub ordered: Micros,
    /// Its view was mounted.
    pub mounted: Micros,
    /// The first byte of any file came to the node; in a session that may be long before.
    pub fed: Micros,
    /// Everything it needs to start was there.
    pub loaded: Micros,
    /// All ranks were asked for.
    pub started: Micros,
    /// A rank wrote something.
    pub output: Micros,
    /// The last rank so far ended.
    pub ended: Micros,
}

/// Reads past the store: what ranks read from an original themselves.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Original {
    pub path: Vec<u8>,
    /// Look-ups, opens and listings.
    pub operations: u64,
    /// Bytes read through descriptors that were closed since.
    pub bytes: u64,
}

/// A node's part of a job.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub struct JobFacts {
    pub job: JobId,
    /// When this was told.
    pub told: Micros,
    pub times: JobTimes,
    /// Ranks that have not ended.
    pub running: u32,
    /// Questions of ranks that the node answered instead of the shared file system.
    pub avoided: u64,
    /// What was passed on to originals, in all: operations, bytes read.
    pub passed: (u64, u64),
    /// Of that, the paths that cost most, [`ORIGINALS`] at most.
    pub originals: Vec<Original>,
}

/// A node as a whole.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// Bytes of files that came over the network, as on the wire.
    pub received: u64,
    /// Of these, what came because this node asked (`Report::Fetch`), for itself or for nodes below.
    pub pulled: u64,
    /// Bytes that the store occupies.
    pub stored: u64,
    /// Paths that ranks here asked for before the log spoke of them.
    pub misses: u64,
    pub jobs: Vec<JobFacts>,
}
