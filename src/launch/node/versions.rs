//! Versions of files that nothing leads to any more: each leaves the store as soon as it is whole, no node below waits for it, and no job
//! that runs here was shown it when it began. Who has it open keeps it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::PoisonError;

use rustix::io::Errno;

use super::replica::Replica;
use crate::loader::catalog::{Superseded, is_below};
use crate::net::wire::record::{FileId, Record};

/// Staged programs and libraries with their paths, as one job is shown them.
pub(super) type Images = Vec<(Vec<u8>, FileId)>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Versions {
    /// Those that are still in the store, or coming, and where they were.
    superseded: RefCell<HashMap<FileId, Box<[u8]>>>,
    /// What jobs are shown.
    shown: RefCell<Vec<Weak<Images>>>,
}

impl Replica {
    /// The staged programs and libraries below these roots. They stay in the store as long as this is held.
    pub(super) fn images(&self, roots: &[Vec<u8>]) -> Rc<Images> {
        let below = |path: &[u8]| roots.iter().any(|root| is_below(path, root));
        let images = Rc::new(self.images.borrow().iter().filter(|(path, _)| below(path)).cloned().collect());
        let mut shown = self.versions.shown.borrow_mut();
        shown.retain(|images| images.strong_count() > 0);
        shown.push(Rc::downgrade(&images));
        images
    }

    /// These files are to leave the store.
    pub(super) fn supersede(&self, superseded: Vec<Superseded>) {
        for (path, file) in superseded {
            self.images.borrow_mut().retain(|(_, known)| *known != file);
            self.versions.superseded.borrow_mut().insert(file, path);
            self.give_up(file);
        }
    }

    /// Removes a file that is superseded, if it may go now.
    pub(super) fn give_up(&self, file: FileId) {
        let Some(path) = self.versions.superseded.borrow().get(&file).cloned() else { return };
        let catalog = self.catalog.read().unwrap_or_else(PoisonError::into_inner);
        let (named, whole) = (catalog.names(&path, file), catalog.is_complete(file));
        let void = catalog.has_content(file, 0, 0).is_none();
        drop(catalog);
        let coming = !void && if self.pulls.knows(file) { self.pulls.is_wanted(file) } else { !whole };
        if !named && (coming || self.is_shown(file)) {
            return;
        }
        self.versions.superseded.borrow_mut().remove(&file);
        if named {
            return;
        }
        self.images.borrow_mut().retain(|(_, known)| *known != file);
        self.coming.borrow_mut().remove(&file);
        // Of what only those get who ask there may be nothing.
        let _ = self.store().remove(file);
        self.pulls.void(file);
        if let Some(Ok(audit)) = &*self.audit.borrow() {
            audit.give_up(&path, file);
        }
        if !whole && !void {
            // Who waits for it reads the original.
            self.learn(&Record::Void { file, errno: Errno::NOENT.raw_os_error() });
        }
    }

    /// A job is over: removes what only it kept.
    pub(super) fn give_up_all(&self) {
        let superseded: Vec<FileId> = self.versions.superseded.borrow().keys().copied().collect();
        superseded.into_iter().for_each(|file| self.give_up(file));
    }

    fn is_shown(&self, file: FileId) -> bool {
        let shown = self.versions.shown.borrow();
        shown.iter().filter_map(Weak::upgrade).any(|images| images.iter().any(|(_, shown)| *shown == file))
    }
}
