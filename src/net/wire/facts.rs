//! What a node knows about itself and its part of a job: told when it is asked, and at the job's end.
//!
//! Times are microseconds of the node's own clock since its agent began; zero says that it has not happened. The clocks of the hosts
//! need not agree: `launch::timeline` lays these times over the front end's.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::JobId;
use crate::sys::counts::time_of;

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
    /// Of programs that use memory of other nodes.
    pub paging: Option<Box<Paging>>,
    /// Of programs that write asynchronously, when all have ended.
    pub writing: Option<Box<Writing>>,
}

/// What was written for programs.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub struct Writing {
    /// Writes that were kept, their bytes, and the calls that were made for them.
    pub writes: u64,
    pub bytes: u64,
    pub pieces: u64,
    /// Files in which something is missing, and why.
    pub lost: Vec<(String, String)>,
    /// A program ended without having been told of that.
    pub untold: bool,
}

impl Writing {
    /// Adds what others count.
    pub fn add(&mut self, other: &Writing) {
        self.writes += other.writes;
        self.bytes += other.bytes;
        self.pieces += other.pieces;
        self.lost.extend_from_slice(&other.lost);
        self.untold |= other.untold;
    }
}

/// What the pagers of programs counted: of one, or of several together. All sizes are bytes.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub struct Paging {
    /// Programs that had asked for more than they may keep, and how many of them run.
    pub programs: u32,
    pub running: u32,
    /// What those that run may keep, and keep.
    pub budget: u64,
    pub resident: u64,
    /// What each server has of them, in the order in which the job names the servers; and the most that all had of each, summed.
    pub away: Vec<u64>,
    pub most_away: u64,
    /// Parts of the memory of those that run of which there is to be a copy and is none (`sys::places::PLACES` of each program).
    pub bare: u64,
    /// By kind (`sys::counts::kind`).
    pub faults: Vec<u64>,
    /// Faults by time in nanoseconds (`sys::counts::time_bucket`).
    pub times: Vec<u64>,
    /// Fetches by the logarithm of their pages.
    pub units: Vec<u64>,
    /// Fetched ahead; of that, missed later, and let go of.
    pub ahead: Vec<u64>,
    /// Pages from and to servers.
    pub received: u64,
    pub sent: u64,
    /// Evicted; of that, what the server had already, and zeros.
    pub evicted: Vec<u64>,
    /// How often a pager waited for room, and nanoseconds.
    pub stalls: (u64, u64),
    /// The parts of memory that were fetched from most.
    pub parts: Vec<Part>,
}

/// A part of a program's memory.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its address.
    pub begin: u64,
    /// Bytes fetched at a time, lately.
    pub unit: u64,
    pub faults: u64,
}

/// Parts told of, at most.
const PARTS: usize = 10;

impl Paging {
    /// Adds those of another.
    pub fn add(&mut self, other: &Paging) {
        let sum = |into: &mut Vec<u64>, more: &[u64]| {
            into.resize(into.len().max(more.len()), 0);
            into.iter_mut().zip(more).for_each(|(into, more)| *into += more);
        };
        self.programs += other.programs;
        self.running += other.running;
        for (into, more) in [
            (&mut self.away, &other.away),
            (&mut self.faults, &other.faults),
            (&mut self.times, &other.times),
            (&mut self.units, &other.units),
            (&mut self.ahead, &other.ahead),
            (&mut self.evicted, &other.evicted),
        ] {
            sum(into, more);
        }
        self.budget += other.budget;
        self.resident += other.resident;
        self.most_away += other.most_away;
        self.bare += other.bare;
        self.received += other.received;
        self.sent += other.sent;
        self.stalls = (self.stalls.0 + other.stalls.0, self.stalls.1 + other.stalls.1);
        self.parts.extend_from_slice(&other.parts);
        self.parts.sort_unstable_by_key(|part| std::cmp::Reverse(part.faults));
        self.parts.truncate(PARTS);
    }

    /// As of programs that have ended: they keep nothing anywhere.
    pub fn ended(self) -> Paging {
        Paging { running: 0, budget: 0, resident: 0, bare: 0, away: vec![0; self.away.len()], ..self }
    }

    /// The time in seconds within which this part of the faults (0 to 1) was answered; `None` without any.
    pub fn percentile(&self, part: f64) -> Option<f64> {
        let all: u64 = self.times.iter().sum();
        let rank = (all as f64 * part).ceil() as u64;
        let mut seen = 0;
        let found = self.times.iter().position(|count| {
            seen += count;
            seen >= rank && all > 0
        })?;
        Some((time_of(found) + time_of(found + 1)) as f64 / 2e9)
    }
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
