//! What a view passed on to the originals: the ranks' own share of the load on the shared file system, as far as it goes through here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::loader::tally::{Tally, Why};

/// Paths of which it is known what they cost.
const PATHS: usize = 256;

#[derive(Debug)]
pub(super) struct Passed {
    operations: AtomicU64,
    bytes: AtomicU64,
    paths: Mutex<Tally>,
}

impl Default for Passed {
    fn default() -> Self {
        Passed { operations: AtomicU64::new(0), bytes: AtomicU64::new(0), paths: Mutex::new(Tally::new(PATHS)) }
    }
}

impl Passed {
    /// Operations at `path`, and bytes read from it. Writing is not counted.
    pub(super) fn add(&self, path: &[u8], operations: u64, bytes: u64) {
        self.operations.fetch_add(operations, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.paths.lock().unwrap_or_else(PoisonError::into_inner).add(path, Why::Rank, operations, bytes);
    }

    /// Operations and bytes in all.
    pub(super) fn totals(&self) -> (u64, u64) {
        (self.operations.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// The `count` paths that cost most: path, operations, bytes.
    pub(super) fn top(&self, count: usize) -> Vec<(Vec<u8>, u64, u64)> {
        let paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        paths.top(count).into_iter().map(|(path, cost)| (path.to_vec(), cost.operations, cost.bytes)).collect()
    }
}
