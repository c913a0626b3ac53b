//! Between a node agent and its keeper: one message per datagram on a SEQPACKET pair, descriptors beside it (SCM_RIGHTS).

use rkyv::{Archive, Deserialize, Serialize};

use super::control::{JobId, Limits, Status, View};
use super::frame::{Kind, Message};
use crate::sys::boot::Stage;

/// What the agent asks of its keeper.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Ask {
    /// Make what the session's view needs, and its store, of at most `bytes` where it is a RAM disk of its own; answered by [`Tell::Store`].
    Store { view: View, directory: Option<Vec<u8>>, bytes: u64 },
    /// A job: a keeper of its own is forked for it. Descriptors: its end of a new SEQPACKET pair, the plan
    /// ([`crate::sys::program::Program::write`]).
    Job { job: JobId },
    /// To a job's keeper: mount the view of these directory trees or, with the descriptors of one that is there, join it; answered by
    /// [`Tell::Fuse`], or by [`Tell::Plain`] where there is no FUSE.
    View { roots: Vec<Vec<u8>> },
    /// To a job's keeper: the view is served, put it over the originals; answered by [`Tell::Shown`].
    Show,
    /// To a job's keeper: bind these staged files (path, number in the log) onto their originals.
    Bind { files: Vec<(Vec<u8>, u32)> },
    /// To a job's keeper: this plan (descriptor) counts from now on.
    Plan,
    /// To a job's keeper: the view is complete, leave it with a copy for the job; answered by [`Tell::Shown`].
    Leave,
    /// To a job's keeper: let others, who know the job by this name, into its namespaces; their place is to be removed in the end; answered by [`Tell::Inside`].
    Share { name: String },
    /// To a job's keeper: the ranks shall have this descriptor, too, under this number.
    Inherit { number: i32 },
    /// To a job's keeper: start ranks with this `umask(2)`. Descriptors: stdin, stdout, stderr and the way to the agent of each.
    Spawn { first: u32, count: u32, umask: u32 },
    /// To a job's keeper: every rank was asked for.
    Go,
    /// To a job's keeper: say which processes are the ranks; answered by [`Tell::Pids`].
    Pids,
    /// To a job's keeper: deliver a signal to each rank's process group.
    Signal { signal: i32 },
    /// To a job's keeper: SIGTERM to every descendant, SIGKILL after `grace_ms`.
    End { grace_ms: u32 },
}

/// What a keeper answers.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Tell {
    /// The store's directory (descriptor). `directory`: its path, where it is not on a RAM disk of the session's own; `audit`: it is not in
    /// a namespace.
    Store { directory: Option<Vec<u8>>, audit: bool, limits: Limits },
    /// The view is mounted. Of a new one the descriptors are: the skeleton's /dev/fuse, to be served now, and three to join the view by.
    /// `keeper`: this keeper's process, which looks things up in the view.
    Fuse { keeper: u32 },
    /// There is no FUSE: staged files can be bound, but no names served.
    Plain,
    /// Done: ranks started from now on see it.
    Shown,
    /// Descriptors of the job's mount namespace and, unless root made it, of its user namespace.
    Inside,
    /// Ranks by index, and their processes: because it was asked, or because all that are to be held for a debugger are held.
    Pids { ranks: Vec<(u32, u32)> },
    /// Ranks ended.
    Exited { ranks: Vec<Ended> },
    /// A rank could not become the program.
    NotStarted { stage: Stage, errno: i32 },
    /// Something asked for could not be done.
    Failed { error: String },
    /// No process of the job is left; the keeper is about to exit.
    Done,
}

/// The end of a rank.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Its index on this node.
    pub index: u32,
    pub status: Status,
    /// hpcrt ended it, or could not start it.
    pub by_us: bool,
}

impl Message for Ask {
    const KIND: Kind = Kind::Keeper;
}

impl Message for Tell {
    const KIND: Kind = Kind::Keeper;
}
