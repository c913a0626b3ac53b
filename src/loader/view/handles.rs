//! What the kernel has open.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use rustix::fs::OFlags;
use rustix::io::Result;

use super::original;
use crate::loader::catalog::Listing;
use crate::net::wire::record::{Attr, FileId};

#[derive(Debug)]
pub(super) enum Handle {
    Staged(Staged),
    Original(Original),
    Directory(Directory),
}

/// A captured file, perhaps still arriving. All handles of an inode fill one page cache: what this one reads comes from the store only
/// while the catalog says that the store has what is at `path`.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) ino: u64,
    pub(super) id: FileId,
    pub(super) path: Arc<[u8]>,
    /// As it was captured.
    pub(super) attr: Attr,
    /// See [`Handles::file`].
    pub(super) file: Arc<OwnedFd>,
    /// Bytes in the store.
    pub(super) size: u64,
    /// Once the catalog says otherwise: the original, or nothing if the name led to another file before anybody here had it open.
    pub(super) original: OnceLock<Option<OwnedFd>>,
}

impl Staged {
    /// One more handle of the same.
    pub(super) fn again(&self) -> Staged {
        let Staged { ino, id, attr, size, .. } = *self;
        let (path, file) = (Arc::clone(&self.path), Arc::clone(&self.file));
        Staged { ino, id, path, attr, file, size, original: OnceLock::new() }
    }
}

/// Passed through.
#[derive(Debug)]
pub(super) struct Original {
    pub(super) ino: u64,
    pub(super) file: OwnedFd,
    pub(super) writes: bool,
    /// Whether `file` appends whatever the offset.
    appends: bool,
    /// The same file, opened the other way.
    otherwise: OnceLock<OwnedFd>,
    /// Bytes read from it through this handle.
    pub(super) read: AtomicU64,
}

impl Original {
    /// `flags`: those that `file` was opened with.
    pub(super) fn new(ino: u64, file: OwnedFd, flags: i32) -> Self {
        let flags = OFlags::from_bits_retain(flags.cast_unsigned());
        let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        let (appends, otherwise, read) = (flags.contains(OFlags::APPEND), OnceLock::new(), AtomicU64::new(0));
        Original { ino, file, writes, appends, otherwise, read }
    }

    /// A descriptor that appends, whatever the offset, or one that does not. What a mapping changed must not be appended, and a program
    /// may change its mind about O_APPEND.
    pub(super) fn writer(&self, appends: bool) -> Result<&OwnedFd> {
        if appends == self.appends {
            return Ok(&self.file);
        }
        if let Some(file) = self.otherwise.get() {
            return Ok(file);
        }
        let file =
            original::open_again(&self.file, if appends { OFlags::WRONLY | OFlags::APPEND } else { OFlags::WRONLY })?;
        Ok(self.otherwise.get_or_init(|| file))
    }
}

/// A directory.
#[derive(Debug)]
pub(super) struct Directory {
    ino: u64,
    /// When it was opened.
    attr: Attr,
    /// When its reader began to read it.
    listing: Mutex<Arc<Listing>>,
    /// The listing is from when it was opened.
    pub(super) unread: AtomicBool,
}

impl Directory {
    pub(super) fn new(ino: u64, attr: Attr, listing: Arc<Listing>) -> Self {
        Directory { ino, attr, listing: Mutex::new(listing), unread: AtomicBool::new(true) }
    }

    pub(super) fn listing(&self) -> Arc<Listing> {
        Arc::clone(&self.listing.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set_listing(&self, listing: Arc<Listing>) {
        *self.listing.lock().unwrap_or_else(PoisonError::into_inner) = listing;
    }
}

impl Handle {
    fn ino(&self) -> u64 {
        match self {
            Handle::Staged(Staged { ino, .. })
            | Handle::Original(Original { ino, .. })
            | Handle::Directory(Directory { ino, .. }) => *ino,
        }
    }

    /// The original, if it is open.
    pub(super) fn original(&self) -> Option<&OwnedFd> {
        match self {
            Handle::Original(original) => Some(&original.file),
            Handle::Staged(staged) => staged.original.get()?.as_ref(),
            Handle::Directory(_) => None,
        }
    }

    /// What is left of an inode of which nothing but this is known, when it has lost the name by which it was opened.
    pub(super) fn attr_unlinked(&self) -> Option<Attr> {
        match self {
            Handle::Original(_) => None,
            Handle::Staged(staged) => Some(Attr { nlink: staged.attr.nlink.saturating_sub(1), ..staged.attr }),
            Handle::Directory(directory) => Some(Attr { nlink: 0, ..directory.attr }),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Handles {
    open: RwLock<Open>,
    /// Files of the store that handles here lead to.
    files: Mutex<HashMap<FileId, Weak<OwnedFd>>>,
    last: AtomicU64,
}

#[derive(Debug, Default)]
struct Open {
    handles: HashMap<u64, Arc<Handle>>,
    by_inode: HashMap<u64, Vec<u64>>,
}

impl Handles {
    pub(super) fn add(&self, handle: Handle) -> u64 {
        let fh = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        open.by_inode.entry(handle.ino()).or_default().push(fh);
        open.handles.insert(fh, Arc::new(handle));
        fh
    }

    /// A file of the store, opened once: all ranks of a host together have it open more often than a process may have files.
    pub(super) fn file(&self, id: FileId, open: impl FnOnce() -> Result<OwnedFd>) -> Result<Arc<OwnedFd>> {
        let mut files = self.files();
        if let Some(file) = files.get(&id).and_then(Weak::upgrade) {
            return Ok(file);
        }
        let file = Arc::new(open()?);
        files.insert(id, Arc::downgrade(&file));
        Ok(file)
    }

    fn files(&self) -> MutexGuard<'_, HashMap<FileId, Weak<OwnedFd>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, fh: u64) -> Option<Arc<Handle>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).handles.get(&fh).cloned()
    }

    pub(super) fn remove(&self, fh: u64) -> Option<Arc<Handle>> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        let handle = open.handles.remove(&fh)?;
        if let Handle::Staged(Staged { id, file, .. }) = &*handle {
            let mut files = self.files();
            // This handle's own is the last.
            if Arc::strong_count(file) == 1 {
                files.remove(id);
            }
        }
        let ino = handle.ino();
        if let Some(of_inode) = open.by_inode.get_mut(&ino) {
            of_inode.retain(|other| *other != fh);
            if of_inode.is_empty() {
                open.by_inode.remove(&ino);
            }
        }
        Some(handle)
    }

    /// All through which an inode can be reached, whether it has a name or not; originals first.
    pub(super) fn of_inode(&self, ino: u64) -> Vec<Arc<Handle>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let of_inode = open.by_inode.get(&ino).into_iter().flatten();
        let mut handles: Vec<_> = of_inode.filter_map(|fh| open.handles.get(fh).cloned()).collect();
        handles.sort_by_key(|handle| !matches!(**handle, Handle::Original(_)));
        handles
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_store_is_opened_once_and_closed_by_its_last_handle() {
        let (handles, opened) = (Handles::default(), AtomicU64::new(0));
        let open = || {
            opened.fetch_add(1, Ordering::Relaxed);
            rustix::fs::open("/dev/null", OFlags::RDONLY, rustix::fs::Mode::empty())
        };
        let add = || {
            let zero = (0, 0);
            let attr = Attr { mode: 0, uid: 0, gid: 0, nlink: 1, ino: 7, size: 0, mtime: zero, ctime: zero };
            let file = handles.file(3, open).unwrap();
            let (path, original) = (b"/r/f"[..].into(), OnceLock::new());
            handles.add(Handle::Staged(Staged { ino: 7, id: 3, path, attr, file, size: 0, original }))
        };
        for round in 1..3 {
            let all = [add(), add(), add()];
            assert_eq!(opened.load(Ordering::Relaxed), round);
            all.into_iter().for_each(|fh| assert!(handles.remove(fh).is_some()));
            assert!(handles.files().is_empty());
        }
    }
}
