//! The FUSE file system of a view on a node: one superblock, whose top directory has the view's roots as children `0`, `1`, ...
//! A keeper binds each over its original directory. Jobs with the same roots share it, so that the kernel knows the names already.
//!
//! What is stable in the catalog is given to the kernel without time limit, so a program's second look costs no request; what is
//! volatile with a limit of zero; what is unknown makes the question wait, never the thread, until the log answers.
//!
//! Three threads stand beside FUSE's own, because they may wait for each other: invalidating a name waits for the kernel's lock on its
//! directory, which a waiting question may hold; so questions are answered by another thread, and only the log feeds both. Either may wait
//! for the shared file system; the third, which refuses what is late and what the killed ask, never waits.
//! A change made on this node is not invalidated on this node by its own handler: the kernel holds the directory and already knows.
//!
//! Not implemented: POSIX and BSD locks are the kernel's, so they bind the processes of one node only. Extended attributes are not shown.
//! Times of last access are those of last modification.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use fuser::{Config, Errno, INodeNo, Notifier, Session, SessionACL};
use rustix::fs::Stat;

use super::absent::Absent;
use super::handles::Handles;
use super::inodes::{Inodes, Pages};
use super::parked::{Asked, Key, Parked, Waiting};
use super::passed::Passed;
use super::place::Tree;
use super::server::Server;
use super::{Identity, attributes};
use crate::error::{Context, Result};
use crate::loader::catalog::{Catalog, Change, Effects, Known, file_name, is_code, join, kind, parent};
use crate::loader::store::Store;
use crate::loader::version::{self, now};
pub use crate::net::wire::control::Need;
use crate::net::wire::record::{Attr, FileId};
use crate::sys::process;

/// Time between two looks for questions that are late or whose askers were killed,
const SWEEP: Duration = Duration::from_secs(1);
/// and while a job is being killed.
const SWEEP_CLOSING: Duration = Duration::from_millis(10);
/// A job that is being killed longer than this may wait behind a question of another one.
const PATIENCE: Duration = Duration::from_millis(500);

/// How long a question should wait for the log, in general; see [`Setup::deadline`].
pub const DEADLINE: Duration = Duration::from_secs(60);

/// A question that the log does not answer is asked again after this long: it, or its answer, may have been lost with a node.
const REPEAT: Duration = Duration::from_secs(10);

/// The way up to the root. All are called from FUSE threads and must not wait.
pub trait Upcall: Send + Sync {
    /// The log is to say something about `path`.
    fn want(&self, path: &[u8], need: Need);
    /// Somebody needs the content of this file, which the root holds ([`Supply::Held`](crate::net::wire::record::Supply::Held)). To be
    /// said whenever somebody does.
    fn fetch(&self, file: FileId);
    /// A job on this node changed `path`; now it is a `d_type`, or gone. The log is to say `Changed` to all, this node included.
    fn changed(&self, path: &[u8], exists: Option<u8>);
}

/// What a view is made of; shared by the views of all jobs of a session on a node.
#[derive(Clone)]
pub struct Setup {
    pub catalog: Arc<RwLock<Catalog>>,
    pub store: Arc<Store>,
    pub upcall: Arc<dyn Upcall>,
    pub identity: Identity,
    /// A question waits at most this long (and a second more) for the log, or the next part of a file; then the program gets `EIO`.
    pub deadline: Duration,
    pub siblings: Siblings,
}

/// The views on a node: a change made through one of them is news to the kernel's memory of the others.
#[derive(Debug, Clone, Default)]
pub struct Siblings(Arc<Mutex<Vec<Weak<View>>>>);

impl std::fmt::Debug for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setup")
            .field("identity", &self.identity)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// Names of inodes that are to be forgotten by the kernel.
#[derive(Debug)]
struct Stale {
    paths: Vec<Box<[u8]>>,
    /// See [`Effects::own`].
    own: bool,
    /// Closed when this and all before it is forgotten.
    done: Option<async_channel::Sender<()>>,
}

#[derive(Debug)]
struct Idle {
    to_answer: Receiver<Vec<Key>>,
    to_invalidate: Receiver<Stale>,
    to_sweep: Receiver<()>,
}

/// What a view did with the kernel's questions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answered without the shared file system. What the kernel answers from its own cache is not counted.
    pub avoided: u64,
    /// Passed on to originals, and bytes read there.
    pub operations: u64,
    pub bytes: u64,
}

/// A view on one node.
#[derive(Debug)]
pub struct Skeleton {
    view: Arc<View>,
    woken: Sender<Vec<Key>>,
    swept: Sender<()>,
    /// The receivers of the threads that [`Skeleton::serve`] starts.
    idle: Mutex<Option<Idle>>,
}

/// What the threads share. The catalog is locked before any other, and no two of the others at once.
#[derive(Debug)]
pub(super) struct View {
    pub(super) setup: Setup,
    pub(super) roots: Vec<Box<[u8]>>,
    parked: Mutex<Parked>,
    inodes: Mutex<Inodes>,
    /// Where [`View::roots`] are on this host; once it is served.
    pub(super) trees: OnceLock<Vec<Tree>>,
    pub(super) handles: Handles,
    stale: Mutex<Sender<Stale>>,
    /// Files that jobs on this node wrote, and code that they made: what the root read of them may be older.
    written: Mutex<HashSet<Box<[u8]>>>,
    /// What others changed, until it is looked at again here: the host may believe what it knew of the original before.
    doubted: Mutex<HashSet<Box<[u8]>>>,
    absent: Mutex<Absent>,
    closing: Mutex<Vec<Closed>>,
    /// Names that [`View::look_up_originals`] is busy with.
    sought: Mutex<HashSet<Box<[u8]>>>,
    /// Questions answered from the catalog or the store.
    pub(super) avoided: AtomicU64,
    pub(super) passed: Passed,
}

/// A job that is being killed.
#[derive(Debug, Clone, Copy)]
struct Closed {
    keeper: u32,
    since: Instant,
}

/// While this exists, a job of the view is being killed; see [`Skeleton::close`].
#[derive(Debug)]
pub struct Closing {
    view: Weak<View>,
    keeper: u32,
}

impl Drop for Closing {
    fn drop(&mut self) {
        if let Some(view) = self.view.upgrade() {
            lock(&view.closing).retain(|c| c.keeper != self.keeper);
        }
    }
}

/// Of [`View::written`], at most. Beyond it is emptied: the files written last are written again soon, and noted again.
const WRITTEN_MAX: usize = 4096;

/// A view in service. It ends when its mount does (with the last namespace that holds it).
#[derive(Debug)]
pub struct Serving {
    ended: Receiver<std::io::Result<()>>,
}

impl Serving {
    /// Waits until the mount is gone; `false` when it is still there after `limit`.
    pub fn wait_end(&self, limit: Duration) -> bool {
        !matches!(self.ended.recv_timeout(limit), Err(RecvTimeoutError::Timeout))
    }
}

impl Skeleton {
    /// `roots`: absolute canonical directories, none inside another, all covered by the catalog.
    pub fn new(setup: Setup, roots: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let (woken, to_answer) = channel();
        let (stale, to_invalidate) = channel();
        let (swept, to_sweep) = channel();
        let view = View {
            setup,
            roots: roots.into_iter().map(Vec::into_boxed_slice).collect(),
            parked: Mutex::default(),
            inodes: Mutex::default(),
            trees: OnceLock::new(),
            handles: Handles::default(),
            stale: Mutex::new(stale),
            written: Mutex::default(),
            doubted: Mutex::default(),
            absent: Mutex::default(),
            closing: Mutex::default(),
            sought: Mutex::default(),
            avoided: AtomicU64::new(0),
            passed: Passed::default(),
        };
        let view = Arc::new(view);
        let mut siblings = lock(&view.setup.siblings.0);
        siblings.retain(|other| other.strong_count() > 0);
        siblings.push(Arc::downgrade(&view));
        drop(siblings);
        Skeleton { view, woken, swept, idle: Mutex::new(Some(Idle { to_answer, to_invalidate, to_sweep })) }
    }

    /// To be called after each [`Catalog::apply`], with the catalog unlocked. Does not wait.
    pub fn applied(&self, effects: &Effects) {
        let mut keys = self.view.parked().settled(effects);
        let written = lock(&self.view.written);
        if !written.is_empty() {
            keys.extend(effects.settled.iter().filter(|p| written.contains(*p)).map(|p| Key::Path(p.clone())));
        }
        drop(written);
        if !keys.is_empty() {
            let _ = self.woken.send(keys);
        }
        if !effects.stale.is_empty() {
            self.view.invalidate(effects.stale.clone(), effects.own);
        }
    }

    /// What was counted since the view was made, for all its jobs.
    pub fn counts(&self) -> Counts {
        let (operations, bytes) = self.view.passed.totals();
        Counts { avoided: self.view.avoided.load(Ordering::Relaxed), operations, bytes }
    }

    /// The `count` originals on which ranks cost the shared file system most: path, operations, bytes.
    pub fn originals(&self, count: usize) -> Vec<(Vec<u8>, u64, u64)> {
        self.view.passed.top(count)
    }

    /// Inodes that the kernel holds.
    pub fn inodes(&self) -> usize {
        self.view.inodes().len()
    }

    /// What is mounted on these names is not what they lead to any more: forgets them, and the mounts with them. What is returned is closed as
    /// soon as that is done.
    pub fn uncover(&self, paths: Vec<Box<[u8]>>) -> async_channel::Receiver<()> {
        let mut inodes = self.view.inodes();
        // With whatever limit the kernel was given a name: what is mounted on it lasts.
        for path in &paths {
            inodes.of_mut(path).into_iter().for_each(|(_, node)| node.stable = true);
        }
        drop(inodes);
        self.view.invalidate(paths, false);
        self.forgotten()
    }

    /// Closed as soon as the kernel has forgotten everything that was applied before this call. For a view in service.
    pub fn forgotten(&self) -> async_channel::Receiver<()> {
        let (done, forgotten) = async_channel::bounded(1);
        let _ = lock(&self.view.stale).send(Stale { paths: Vec::new(), own: false, done: Some(done) });
        forgotten
    }

    /// A job is being killed, and `keeper` is its keeper's process. A process cannot even be killed while the kernel waits for the answer
    /// to its question, so whoever of the job waits for the log, or would, is refused: the killed, by what the kernel says of them,
    /// and the keeper. Nobody else is; but a killed process may also wait, unseen, until somebody else's question about the same name is
    /// answered. So if the job takes long to die, the names that others look up are looked up in the original.
    #[must_use]
    pub fn close(&self, keeper: u32) -> Closing {
        lock(&self.view.closing).push(Closed { keeper, since: Instant::now() });
        let _ = self.swept.send(());
        Closing { view: Arc::downgrade(&self.view), keeper }
    }

    /// Serves the file system mounted with `fuse`, an opened `/dev/fuse`, by `threads` threads. Returns when the mount can be used.
    pub fn serve(&self, fuse: OwnedFd, threads: usize) -> Result<Serving> {
        let Idle { to_answer, to_invalidate, to_sweep } = lock(&self.idle).take().expect("a skeleton is served once");
        let mut config = Config::default();
        config.acl = SessionACL::All;
        config.n_threads = Some(threads.max(1));
        let server = Server(self.view.clone());
        let session = Session::from_fd(server, fuse, SessionACL::All, config).op("serve the view")?;
        let notifier = session.notifier();
        let (end, ended) = channel();
        let spawn = |name: &str, f: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.into()).spawn(f).op("start a thread of the view")
        };
        let view = self.view.clone();
        spawn(
            "view-serve",
            Box::new(move || {
                // The kernel has applied the program's umask already; ours must not be applied too, and is nobody else's business.
                if nix::sched::unshare(nix::sched::CloneFlags::CLONE_FS).is_ok() {
                    rustix::process::umask(rustix::fs::Mode::empty());
                }
                let _ = view.trees.set(view.roots.iter().map(|root| Tree::new(root)).collect());
                let result = session.run();
                if let Err(e) = &result {
                    log::warn!("the view ended: {e}");
                }
                let all = view.parked().take_if(|_, _| true);
                all.into_iter().for_each(|(_, waiting)| waiting.question.refuse(Errno::EIO));
                // Ends the threads below: their channels close.
                *lock(&view.stale) = channel().0;
                let _ = end.send(result);
            }),
        )?;
        let view = self.view.clone();
        spawn(
            "view-invalidate",
            Box::new(move || {
                for Stale { paths, own, done } in to_invalidate {
                    for path in paths {
                        view.forget_in_kernel(&notifier, &path, own);
                    }
                    drop(done);
                }
            }),
        )?;
        let view = Arc::downgrade(&self.view);
        spawn(
            "view-answer",
            Box::new(move || {
                for keys in to_answer {
                    let Some(view) = view.upgrade() else { return };
                    view.answer_settled(&keys);
                }
            }),
        )?;
        let view = Arc::downgrade(&self.view);
        spawn(
            "view-sweep",
            Box::new(move || {
                let mut pause = SWEEP;
                while !matches!(to_sweep.recv_timeout(pause), Err(RecvTimeoutError::Disconnected)) {
                    let Some(view) = view.upgrade() else { return };
                    pause = view.sweep();
                }
            }),
        )?;
        Ok(Serving { ended })
    }
}

/// A poisoned lock means that a thread panicked between two consistent states of a table of independent entries.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl View {
    pub(super) fn catalog(&self) -> RwLockReadGuard<'_, Catalog> {
        self.setup.catalog.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn parked(&self) -> MutexGuard<'_, Parked> {
        lock(&self.parked)
    }

    pub(super) fn inodes(&self) -> MutexGuard<'_, Inodes> {
        lock(&self.inodes)
    }

    pub(super) fn absent(&self) -> MutexGuard<'_, Absent> {
        lock(&self.absent)
    }

    pub(super) fn invalidate(&self, paths: Vec<Box<[u8]>>, own: bool) {
        let _ = lock(&self.stale).send(Stale { paths, own, done: None });
    }

    /// The catalog has it already: when the log says the same, nothing will be news to it.
    fn tell_siblings(&self, stale: &[Box<[u8]>]) {
        let siblings = if stale.is_empty() { Vec::new() } else { lock(&self.setup.siblings.0).clone() };
        for other in siblings.iter().filter_map(Weak::upgrade).filter(|v| !std::ptr::eq(&raw const **v, self)) {
            other.invalidate(stale.to_vec(), false);
        }
    }

    /// Another node made `path`, and the log has not said so yet. Returns whether the kernel was told otherwise, and has to look again.
    pub(super) fn found(&self, path: &[u8]) -> bool {
        let Ok(stat) = self.stat(path) else { return false };
        let mut catalog = self.setup.catalog.write().unwrap_or_else(PoisonError::into_inner);
        if !matches!(catalog.lookup(path), Known::Absent(_)) {
            return false;
        }
        let mut effects = catalog.found_here(path, kind::of_mode(stat.st_mode), now());
        drop(catalog);
        self.tell_siblings(&effects.stale);
        effects.stale.retain(|p| **p != *path);
        self.invalidate(effects.stale, true);
        true
    }

    /// A job on this node changed `path`, and the original has it already.
    pub(super) fn note(&self, path: &[u8], change: Change) {
        let is_code = || is_code(file_name(path));
        if change == Change::Written(kind::REG) || change == Change::Named(Some(kind::REG)) && is_code() {
            let mut written = lock(&self.written);
            if written.len() >= WRITTEN_MAX {
                written.clear();
            }
            written.insert(path.into());
        }
        let mut catalog = self.setup.catalog.write().unwrap_or_else(PoisonError::into_inner);
        let (tell, effects) = catalog.changed_here(path, change, now());
        drop(catalog);
        if let Change::Written(_) = change {
            self.originals_from_now(path);
        }
        self.tell_siblings(&effects.stale);
        if tell {
            match change {
                Change::Named(exists) => self.setup.upcall.changed(path, exists),
                Change::Written(kind) => self.setup.upcall.changed(path, Some(kind)),
            }
        }
    }

    /// [`View::note`] of what was done to a file that has this `stat`, also under its other names.
    pub(super) fn note_written(&self, path: &[u8], stat: &Stat) {
        let change = Change::Written(kind::of_mode(stat.st_mode));
        self.note(path, change);
        if stat.st_nlink > 1 && change == Change::Written(kind::REG) {
            let links = self.catalog().links(path, stat.st_ino);
            links.iter().for_each(|link| self.note(link, change));
        }
    }

    /// Has the host ask its file server about what others changed, before it is looked at.
    pub(super) fn refresh(&self, path: &[u8]) {
        if lock(&self.doubted).remove(path) {
            version::refresh(path);
        }
    }

    /// What is open at `path` is read from the original: later, it may have lost its name.
    fn originals_from_now(&self, path: &[u8]) {
        let ino = self.inodes().of(path).map(|(ino, _)| ino);
        if let Some(ino) = ino {
            self.inodes().fill(ino, Pages::Volatile);
            self.overtake_all(ino);
        }
    }

    /// The root may have read `path` before, and its record have come after a job here wrote it.
    fn compare_written(&self, path: &[u8]) {
        let attr = match self.catalog().lookup(path) {
            Known::File { attr, .. } if lock(&self.written).contains(path) => *attr,
            _ => return,
        };
        let same = self.stat(path).is_ok_and(|stat| {
            let now = version::attr(&stat);
            (now.ino, now.size, now.mtime) == (attr.ino, attr.size, attr.mtime)
        });
        if !same {
            self.note(path, Change::Written(kind::REG));
        }
    }

    fn answer_settled(&self, keys: &[Key]) {
        for key in keys {
            if let Key::Path(path) = key {
                self.compare_written(path);
            }
            let waiting = self.parked().take(key);
            for Waiting { question, asked, .. } in waiting {
                let until = match key {
                    // It is coming: what is late is the next part of it.
                    Key::Content(_) => Instant::now() + self.setup.deadline,
                    Key::Path(_) => asked.until,
                };
                self.answer(question, Asked { until, ..asked });
            }
        }
    }

    /// Whether who asks is being killed together with his job.
    pub(super) fn is_doomed(&self, asker: u32) -> bool {
        let closing = lock(&self.closing).clone();
        !closing.is_empty() && (closing.iter().any(|c| c.keeper == asker) || process::is_dying(asker))
    }

    /// Refuses questions that are late, and those of the killed. Returns when to do so again.
    fn sweep(self: &Arc<Self>) -> Duration {
        let closing = lock(&self.closing).clone();
        let mut askers = self.parked().askers();
        askers.retain(|asker| closing.iter().any(|c| c.keeper == *asker) || process::is_dying(*asker));
        let refused = self.parked().take_if(|_, w| askers.contains(&w.asked.by));
        refused.into_iter().for_each(|(_, waiting)| waiting.question.refuse(Errno::EIO));
        if closing.iter().any(|c| c.since.elapsed() > PATIENCE) {
            self.look_up_originals();
        }
        let now = Instant::now();
        for (path, need) in self.parked().repeat(REPEAT, now) {
            self.setup.upcall.want(&path, need);
        }
        let late = self.parked().take_if(|_, w| w.asked.until <= now);
        for (key, waiting) in late {
            match &key {
                Key::Path(path) => log::warn!("no answer about {:?} within its deadline", OsStr::from_bytes(path)),
                Key::Content(id) => log::warn!("staged file {id} did not arrive within its deadline"),
            }
            waiting.question.refuse(Errno::EIO);
        }
        if closing.is_empty() { SWEEP } else { SWEEP_CLOSING }
    }

    /// Answers look-ups of names from the originals, so that the killed who wait behind them find out. They stay parked meanwhile, and the
    /// thread is one of its own: the shared file system may hang.
    fn look_up_originals(self: &Arc<Self>) {
        let mut names: Vec<_> = self.parked().looked_up().collect();
        names.retain(|path| lock(&self.sought).insert(path.clone()));
        if names.is_empty() {
            return;
        }
        let view = Arc::clone(self);
        let look = move || {
            for path in names {
                let stat = view.stat(&path);
                let lookups = view.parked().take_if(|key, w| w.question.is_lookup() && *key == Key::Path(path.clone()));
                for (_, Waiting { question, .. }) in lookups {
                    view.answer_from_original(&path, question, stat);
                }
                lock(&view.sought).remove(&path);
            }
        };
        if let Err(e) = thread::Builder::new().name("view-original".into()).spawn(look) {
            log::warn!("no thread to answer questions of the view: {e}");
            // The names are with it; those of other threads may be sought twice.
            lock(&self.sought).clear();
        }
    }

    fn forget_in_kernel(&self, notifier: &Notifier, path: &[u8], own: bool) {
        let catalog = self.catalog();
        let (is_dir, mut inode) = match catalog.lookup(path) {
            Known::Dir { attr, .. } => (Some(true), Some(attr.ino)),
            Known::Listed(kind::DIR) => (Some(true), None),
            Known::Volatile => (None, None),
            _ => (Some(false), None),
        };
        drop(catalog);
        if is_dir.is_none() && !own {
            lock(&self.doubted).insert(path.into());
        }
        self.originals_from_now(path);
        let is_dir = is_dir.unwrap_or_else(|| {
            let was = self.inodes().of(path).is_some_and(|(_, node)| node.stable && node.is_dir());
            let stat = if was { self.stat(path).ok() } else { None };
            inode = stat.map(|stat| stat.st_ino);
            stat.is_some_and(|stat| kind::of_mode(stat.st_mode) == kind::DIR)
        });
        let mut is_another = false;
        let mut inodes = self.inodes();
        let directory = parent(path).and_then(|d| inodes.of(d)).map(|(id, _)| id);
        let node = match inodes.of_mut(path) {
            // Everything about it was given with a time limit of zero.
            Some((_, node)) if !node.stable => return,
            Some((id, node)) => {
                // A directory that stays one keeps its name: dropping it would take the working directory from under programs.
                let keeps_name = is_dir && node.is_dir();
                node.stable = keeps_name;
                is_another = keeps_name && inode.is_some_and(|inode| inode != node.original);
                Some((id, keeps_name))
            }
            // A job here may be making it again at this moment: forgotten, a directory would be lost as its working directory.
            None if own => return,
            None => None,
        };
        // The kernel may wait for a request that needs this lock.
        drop(inodes);
        if let Some((id, _)) = node {
            report(notifier.inval_inode(INodeNo(id), 0, 0), path);
            // In the other one these may be. (Else what a job here is making would be lost as its working directory.)
            let absent = if is_another { self.absent().take(path) } else { Vec::new() };
            for name in absent.iter().filter(|name| self.inodes().of(&join(path, name)).is_none()) {
                report(notifier.inval_entry(INodeNo(id), OsStr::from_bytes(name)), path);
            }
        }
        let is_root = self.roots.iter().any(|r| **r == *path);
        if let Some(directory) = directory
            && !is_root
            && !matches!(node, Some((_, true)))
        {
            report(notifier.inval_entry(INodeNo(directory), OsStr::from_bytes(file_name(path))), path);
        }
    }

    /// Attributes of the original, and the number of its node.
    pub(super) fn look_up_original(&self, path: &[u8]) -> rustix::io::Result<fuser::FileAttr> {
        self.known_as(path, &self.stat(path)?)
    }

    /// Attributes of the original for a kernel that is told of it.
    pub(super) fn known_as(&self, path: &[u8], original: &Stat) -> rustix::io::Result<fuser::FileAttr> {
        let target = match kind::of_mode(original.st_mode) {
            kind::LNK => {
                let place = self.place(path)?;
                Some(rustix::fs::readlinkat(place.directory(), place.name, Vec::new())?.into_bytes())
            }
            _ => None,
        };
        let id = self.inodes().look_up(path, original.st_ino, original.st_mode, target.as_deref(), false);
        Ok(attributes::of_stat(original, id, &self.setup.identity, || self.directory_of(path)))
    }

    /// The attributes of the directory that holds a name.
    pub(super) fn directory_of(&self, path: &[u8]) -> Option<Attr> {
        let directory = parent(path)?;
        match self.catalog().lookup(directory) {
            Known::Dir { attr, .. } => return Some(*attr),
            Known::Volatile => {}
            _ => return None,
        }
        self.passed.add(directory, 1, 0);
        self.stat(directory).ok().map(|stat| version::attr(&stat))
    }
}

fn report(result: std::io::Result<()>, path: &[u8]) {
    if let Err(e) = result {
        log::debug!("the kernel did not forget {:?}: {e}", OsStr::from_bytes(path));
    }
}
