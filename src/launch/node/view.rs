//! The views of a node: one for each set of directory trees, shared by all jobs of the session that are shown these, at once or one after
//! the other. So the kernel asks for each name only once per session.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use smol::lock::Mutex;

use super::replica::Replica;
use crate::loader::view::{Serving, Skeleton};
use crate::net::wire::record::FileId;
use crate::{Error, Result};

/// Views that no job uses, at most.
const IDLE_MAX: usize = 8;
/// A view that no job uses is given up when the kernel holds more inodes of it: each costs the agent some 300 bytes.
const INODES_MAX: usize = 1 << 16;
/// Threads that serve a view, one for each rank of its first job: each waits for one operation at an original, however long that takes, and
/// keeps the memory that its largest request needed (up to 1 MiB).
const THREADS_MIN: usize = 8;
const THREADS_MAX: usize = 32;

/// All views of a node, the last used at the end.
#[derive(Debug, Default)]
pub(super) struct Views(RefCell<Vec<Rc<View>>>);

/// A view; who holds it beside [`Views`] uses it.
#[derive(Debug)]
pub(super) struct View {
    pub(super) roots: Vec<Vec<u8>>,
    pub(super) skeleton: Rc<Skeleton>,
    /// Locked while the keeper of a job changes it.
    pub(super) mounted: Mutex<Option<Mounted>>,
    service: OnceCell<Option<Serving>>,
}

/// The mounts of a view that is served.
#[derive(Debug)]
pub(super) struct Mounted {
    /// What a job's keeper joins it by.
    pub(super) shared: Vec<OwnedFd>,
    /// It covers the originals.
    pub(super) shown: bool,
    /// Staged files, as they were bound in it last.
    pub(super) bound: HashMap<Vec<u8>, FileId>,
}

impl Views {
    /// The view of these directory trees, fed by this replica.
    pub(super) fn of(&self, roots: &[Vec<u8>], replica: &Replica) -> Rc<View> {
        let mut views = self.0.borrow_mut();
        let known = views.iter().position(|v| v.roots == roots && v.is_usable());
        let view = known.map(|at| views.remove(at)).unwrap_or_else(|| {
            Rc::new(View {
                roots: roots.to_vec(),
                skeleton: replica.skeleton(roots),
                mounted: Mutex::default(),
                service: OnceCell::new(),
            })
        });
        views.push(Rc::clone(&view));
        view
    }

    /// Gives up views that no job uses: those that cannot be used, have grown large, or are too many.
    pub(super) fn tidy(&self) {
        let mut views = self.0.borrow_mut();
        let idle = |view: &Rc<View>| Rc::strong_count(view) == 1;
        let mut spare = views.iter().filter(|v| idle(v)).count().saturating_sub(IDLE_MAX);
        let given_up = views.extract_if(.., |view| {
            let up = idle(view) && (spare > 0 || !view.is_usable() || view.skeleton.inodes() > INODES_MAX);
            spare = spare.saturating_sub(up.into());
            up
        });
        let mounts: Vec<_> = given_up.filter_map(|v| Rc::into_inner(v)?.mounted.into_inner()).collect();
        if !mounts.is_empty() {
            // The kernel takes its time over the last descriptor of a namespace with many mounts.
            smol::unblock(move || drop(mounts)).detach();
        }
    }
}

impl View {
    /// Serves the view, as a job's keeper mounted it: the descriptors are those of [`Tell::Fuse`]. `ranks`: how many of the job are here.
    ///
    /// [`Tell::Fuse`]: crate::net::wire::keeper::Tell::Fuse
    pub(super) fn serve(&self, mut fds: Vec<OwnedFd>, ranks: u32) -> Result<Mounted> {
        if fds.is_empty() || self.service.get().is_some() {
            return Err(Error::new("serve the view", "it was served before"));
        }
        let serving = self.skeleton.serve(fds.remove(0), (ranks as usize).clamp(THREADS_MIN, THREADS_MAX));
        let (service, result) = match serving {
            Ok(serving) => (Some(serving), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let _ = self.service.set(service);
        result.map(|()| Mounted { shared: fds, shown: false, bound: HashMap::new() })
    }

    /// Whether it is served, or can be.
    fn is_usable(&self) -> bool {
        match self.service.get() {
            Some(Some(serving)) => !serving.wait_end(Duration::ZERO),
            Some(None) => false,
            None => true,
        }
    }
}
