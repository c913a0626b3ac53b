//! What the readers do.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::loader::prefetch::Guess;
use crate::loader::tally::Why;
use crate::loader::version::Version;
use crate::loader::work_queue::Turn;
use crate::net::wire::control::Need;
use crate::net::wire::record::{FileId, LoadId};

/// What must be in the log before a job can start; complete when the last part of it is dropped.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) id: LoadId,
    pub(super) open: AtomicUsize,
}

/// See the module. `job`: it is a part of what that one waits for.
#[derive(Debug)]
pub(super) enum Work {
    Guess(Guess),
    Describe { path: Vec<u8>, need: Need, why: Why, job: Option<Arc<Load>> },
    Compare { path: Vec<u8>, job: Option<Arc<Load>> },
    Read { id: FileId, path: Vec<u8>, file: File, version: Version, tries: u32, why: Why, job: Option<Arc<Load>> },
}

impl Work {
    pub(super) fn job(&self) -> Option<&Arc<Load>> {
        match self {
            Work::Guess(_) => None,
            Work::Describe { job, .. } | Work::Compare { job, .. } | Work::Read { job, .. } => job.as_ref(),
        }
    }

    pub(super) fn turn(&self) -> Turn {
        match self {
            Work::Describe { job: None, .. } => Turn::Question,
            Work::Read { why: Why::Attributes | Why::Content, .. } => Turn::Content,
            Work::Read { .. } => Turn::BulkContent,
            Work::Guess(_) | Work::Describe { .. } | Work::Compare { .. } => Turn::Bulk,
        }
    }
}
