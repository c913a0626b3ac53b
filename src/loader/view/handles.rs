//! What the kernel has open.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use crate::loader::catalog::Listing;
use crate::net::wire::record::FileId;

#[derive(Debug)]
pub(super) enum Handle {
    /// A captured file, perhaps still arriving. `fallback`: the original, once the capture turned out void.
    Staged { id: FileId, file: OwnedFd, size: u64, complete: AtomicBool, path: Arc<[u8]>, fallback: OnceLock<OwnedFd> },
    /// Passed through. `read`: bytes read from it through this handle.
    Original { ino: u64, file: OwnedFd, writes: bool, read: AtomicU64 },
    /// A directory as it was when it was opened.
    Directory(Arc<Listing>),
}

#[derive(Debug, Default)]
pub(super) struct Handles {
    open: RwLock<HashMap<u64, Arc<Handle>>>,
    last: AtomicU64,
}

impl Handles {
    pub(super) fn add(&self, handle: Handle) -> u64 {
        let fh = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(fh, Arc::new(handle));
        fh
    }

    pub(super) fn get(&self, fh: u64) -> Option<Arc<Handle>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).get(&fh).cloned()
    }

    pub(super) fn remove(&self, fh: u64) -> Option<Arc<Handle>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&fh)
    }

    /// Some handle through which an inode without a name can be reached.
    pub(super) fn of_inode(&self, wanted: u64) -> Option<Arc<Handle>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.values().find(|h| matches!(***h, Handle::Original { ino, .. } if ino == wanted)).cloned()
    }
}
