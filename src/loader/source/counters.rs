//! What the reader counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the reader did so far; see docs/STATS.md.
#[derive(Debug, Default)]
pub struct Counters {
    pub files: AtomicU64,
    pub bytes: AtomicU64,
    /// Operations at the shared file system.
    pub operations: AtomicU64,
    /// Files that were asked for again and were in the log already.
    pub hits: AtomicU64,
    /// Questions of nodes that came all the way.
    pub misses: AtomicU64,
}

/// [`Counters`] at one time.
#[derive(Debug, Clone, Copy)]
pub struct Counted {
    pub files: u64,
    pub bytes: u64,
    pub operations: u64,
    pub hits: u64,
    pub misses: u64,
}

impl Counters {
    /// What they say now.
    pub fn read(&self) -> Counted {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Counters { files, bytes, operations, hits, misses } = self;
        Counted {
            files: get(files),
            bytes: get(bytes),
            operations: get(operations),
            hits: get(hits),
            misses: get(misses),
        }
    }
}
