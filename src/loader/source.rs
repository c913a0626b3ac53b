//! The root's reader: the only one in the job that touches the shared file system. Turns what it finds into records of the log.
//!
//! Questions and files wait in one queue that a few threads serve, so that the file system's latency overlaps; what they find goes into
//! a channel that the log empties at the pace of the fastest child, with room for a few chunks. Every path is described once and every file version read
//! once, however many ask. What a Python program will probably import is looked at when there is no question to answer.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use async_channel::{Receiver, Sender, bounded, unbounded};
use rustix::fs::{AtFlags, Mode, Stat, StatxFlags, statx};
use rustix::io::Errno;
use smol::future::FutureExt;

use super::capture::{self, Capture};
use super::catalog::{file_name, is_below, join, kind, parent};
use super::chunk;
use super::hints::Hint;
use super::probe::{FileSystem, Listing, Names, Opened, Probe};
use super::python::{Guess, Imports};
use crate::Result;
use crate::error::Context;
use crate::net::wire::control::Need;
use crate::net::wire::record::{Attr, CHUNK_MAX, Codec, FileId, LoadId, Name, Record, Supply};

/// Reading threads: enough to overlap a file system's latency, few enough not to storm it.
pub const READERS: usize = 8;
/// Chunks that wait for the log, at most.
const CHUNKS: usize = 8;
/// A file that changes while it is read is read again this often.
const TRIES: u32 = 3;
/// A question about what was told less long ago has crossed its answer. To another one the answer was lost, with a node on its way or
/// because what the node forgot since is more than it had to: it is told again.
const CROSSED: Duration = Duration::from_secs(5);

/// Whether what the nodes send each other is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// When the links turn out to be slower than the machines.
    Auto,
    Always,
    Never,
}

/// A record for the log, with its body (empty: none) and the body's BLAKE3.
#[derive(Debug)]
pub struct Finding {
    pub record: Record,
    pub body: Vec<u8>,
    pub hash: [u8; 32],
    _room: Option<Room>,
}

/// A place among the waiting chunks, given back when dropped.
#[derive(Debug)]
struct Room(Receiver<()>);

impl Drop for Room {
    fn drop(&mut self) {
        let _ = self.0.try_recv();
    }
}

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

/// A version of a file: these together do not stay the same when it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    dev: u64,
    ino: u64,
    size: u64,
    mtime: (i64, u32),
    ctime: (i64, u32),
}

#[derive(Debug)]
enum Work {
    Guess(Guess),
    Describe { path: Vec<u8>, need: Need, job: Option<Arc<Load>> },
    Compare { path: Vec<u8>, job: Option<Arc<Load>> },
    Read { id: FileId, path: Vec<u8>, file: File, version: Version, tries: u32, job: Option<Arc<Load>> },
}

/// What must be in the log before a job can start; complete when the last part of it is dropped.
#[derive(Debug)]
struct Load {
    id: LoadId,
    open: AtomicUsize,
}

/// What the log says of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Described {
    /// That there is nothing, or something it has no words for.
    Absent,
    /// Everything but content: that is read in the original.
    Whole(Version),
    /// A file's attributes ([`Supply::OnOpen`]).
    Offered(Version),
    /// A file of which it has or will have the content.
    Content(Version, FileId),
}

impl Described {
    fn version(self) -> Option<Version> {
        match self {
            Described::Absent => None,
            Described::Whole(version) | Described::Offered(version) | Described::Content(version, _) => Some(version),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Told {
    what: Described,
    said: Instant,
    /// When it was said, or compared with the shared file system, last.
    at: Instant,
}

#[derive(Debug, Default)]
struct State {
    next: FileId,
    /// Paths that the log describes.
    described: HashMap<Vec<u8>, Told>,
    /// The most that was asked for of each path.
    asked: HashMap<Vec<u8>, Need>,
    /// Directories that the log lists, as it does.
    listed: HashMap<Vec<u8>, Names>,
    /// Paths that a reader is looking at, with the changes that were heard of meanwhile: what it found may be older, and stands in the log
    /// behind them, so they are said again.
    describing: HashMap<Vec<u8>, Vec<(Vec<u8>, Option<u8>)>>,
    /// Whether hosts share what lies on a device.
    devices: HashMap<u64, bool>,
    warnings: Vec<String>,
}

impl State {
    /// Whether somebody has to look because of this question, the first of its kind. Notes it.
    fn is_news(&mut self, path: &[u8], need: Need) -> bool {
        match self.told(path) {
            Some(Described::Offered(_)) if need == Need::Content => {}
            Some(_) => return false,
            None => {}
        }
        match self.asked.get_mut(path) {
            Some(asked) => std::mem::replace(asked, need.max(*asked)) < need,
            None => self.asked.insert(path.to_vec(), need).is_none(),
        }
    }

    fn told(&self, path: &[u8]) -> Option<Described> {
        self.described.get(path).map(|told| told.what)
    }

    fn tell(&mut self, path: &[u8], what: Described) {
        let now = Instant::now();
        self.described.insert(path.to_vec(), Told { what, said: now, at: now });
    }

    fn still(&mut self, path: &[u8]) {
        if let Some(told) = self.described.get_mut(path) {
            told.at = Instant::now();
        }
    }

    /// Whether a node asks for what it should have heard.
    fn is_unheard(&mut self, path: &[u8], need: Need) -> bool {
        match self.described.get_mut(path) {
            Some(Told { what: Described::Offered(_), .. }) if need == Need::Content => false,
            Some(told) if told.at.elapsed() >= CROSSED => {
                told.at = Instant::now();
                true
            }
            _ => false,
        }
    }

    /// Forgets a path and what is below it, as the nodes do when they hear that its name came or went.
    fn forget(&mut self, path: &[u8]) {
        let keeps = |known: &Vec<u8>| known != path && !is_below(known, path);
        self.described.retain(|known, _| keeps(known));
        self.asked.retain(|known, _| keeps(known));
        self.listed.retain(|known, _| keeps(known));
    }
}

/// See the module.
#[derive(Debug)]
pub struct Source {
    findings: Sender<Finding>,
    /// A token for each chunk that waits: who reads waits here, who only describes never does.
    room: (Sender<()>, Receiver<()>),
    /// Closed when the first file is captured.
    begun: (Sender<()>, Receiver<()>),
    queue: Sender<Work>,
    /// What will probably be asked for; served when the queue is empty.
    ahead: Sender<Guess>,
    /// Once a Python program is among the jobs.
    imports: OnceLock<Mutex<Imports>>,
    state: Mutex<State>,
    capture: RwLock<Capture>,
    compress: AtomicBool,
    /// Nobody has said yet whether to compress.
    undecided: AtomicBool,
    loads: AtomicU32,
    pub counters: Counters,
}

impl Source {
    /// Starts `readers` threads, [`READERS`] where there is anything to read; what they find comes out of the receiver.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(compression: Compression, readers: usize) -> Result<(Arc<Source>, Receiver<Finding>)> {
        let (findings, found) = unbounded();
        let (queue, work) = unbounded();
        let (ahead, guesses) = unbounded();
        let room = bounded(CHUNKS);
        let (state, capture, counters) = Default::default();
        let this = Arc::new(Source {
            findings,
            room,
            begun: bounded(1),
            queue,
            ahead,
            imports: OnceLock::new(),
            state,
            capture,
            compress: AtomicBool::new(compression == Compression::Always),
            undecided: AtomicBool::new(compression == Compression::Auto),
            loads: AtomicU32::new(1),
            counters,
        });
        for _ in 0..readers {
            let (this, work, guesses) = (Arc::downgrade(&this), work.clone(), guesses.clone());
            let serve = move || {
                let guess = async || guesses.recv().await.map(Work::Guess);
                while let Ok(work) = smol::block_on(work.recv().or(guess()))
                    && let Some(this) = this.upgrade()
                {
                    this.serve(work);
                }
            };
            thread::Builder::new().name("reader".into()).spawn(serve).op("start a reader")?;
        }
        Ok((this, found))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to what the user should know.
    pub fn warn(&self, warning: String) {
        self.state().warnings.push(warning);
    }

    /// What the user should know; each is said once.
    pub fn warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.state().warnings)
    }

    /// Adds to what is captured.
    pub fn capture(&self, more: Capture) {
        let mut rule = self.capture.write().unwrap_or_else(PoisonError::into_inner);
        rule.trees.extend(more.trees);
        rule.shared.extend(more.shared);
        rule.excludes.extend(more.excludes);
    }

    /// A job runs Python: from now on what it imports is guessed.
    pub fn expect_python(&self) {
        let _ = self.imports.set(Mutex::default());
    }

    fn guess(&self, guesses: impl FnOnce(&mut Imports) -> Vec<Guess>) {
        let Some(imports) = self.imports.get() else { return };
        let guesses = guesses(&mut imports.lock().unwrap_or_else(PoisonError::into_inner));
        for guess in guesses {
            let _ = self.ahead.try_send(guess);
        }
    }

    /// Whether a path lies on a file system that the hosts share.
    pub fn shares(&self, path: &Path) -> bool {
        let rule = self.capture.read().unwrap_or_else(PoisonError::into_inner);
        let path_bytes = path.as_os_str().as_bytes();
        rule.shared.iter().any(|s| is_below(path_bytes, s) || **s == *path_bytes) || capture::is_shared(path)
    }

    /// A question from a node. The answer to [`Need::Content`] is never [`Supply::OnOpen`], so it is not asked again.
    pub fn want(&self, path: Vec<u8>, need: Need) {
        self.counters.misses.fetch_add(1, Ordering::Relaxed);
        if self.state().is_unheard(&path, need) {
            return self.enqueue(Work::Describe { path, need, job: None });
        }
        self.ask(path, need, None);
    }

    /// [`Source::shares`], asked once for each device.
    pub fn shares_device(&self, device: u64, at: &Path) -> bool {
        if let Some(shared) = self.state().devices.get(&device) {
            return *shared;
        }
        let shared = self.shares(at);
        self.state().devices.insert(device, shared);
        shared
    }

    fn ask(&self, path: Vec<u8>, need: Need, job: Option<Arc<Load>>) {
        if self.state().is_news(&path, need) {
            self.enqueue(Work::Describe { path, need, job });
        }
    }

    fn enqueue(&self, work: Work) {
        if let Work::Describe { job: Some(job), .. }
        | Work::Compare { job: Some(job), .. }
        | Work::Read { job: Some(job), .. } = &work
        {
            job.open.fetch_add(1, Ordering::SeqCst);
        }
        self.queue.try_send(work).expect("the queue is unbounded and its readers live as long as this");
    }

    /// A node says that a job changed `path`.
    pub fn changed(&self, path: Vec<u8>, exists: Option<u8>) {
        let mut state = self.state();
        state.forget(&path);
        for (seen, overtaken) in &mut state.describing {
            if *seen == path || is_below(seen, &path) || parent(&path) == Some(seen) {
                overtaken.push((path.clone(), exists));
            }
        }
        // With the lock: who asks after this is answered behind it.
        self.find(Record::Changed { path, exists }, Vec::new());
    }

    /// Looks whether what the log says below `roots` is still true, where nobody looked since `begun`; what is not is said anew before the
    /// job starts.
    pub fn compare(&self, roots: &[Vec<u8>], begun: Instant, job: &Preload) {
        let old: Vec<Vec<u8>> = {
            let state = self.state();
            let below = |path: &[u8]| roots.iter().any(|root| **root == *path || is_below(path, root));
            let old = state.described.iter().filter(|(path, told)| told.at < begun && below(path));
            old.map(|(path, _)| path.clone()).collect()
        };
        for path in old {
            self.enqueue(Work::Compare { path, job: Some(Arc::clone(&job.load)) });
        }
    }

    /// What was said since `begun` of what lies below `roots`: what another run of the program will ask for.
    pub fn told_since(&self, roots: &[Vec<u8>], begun: Instant) -> Vec<Hint> {
        let state = self.state();
        let of = |path: &[u8]| roots.iter().any(|root| is_below(path, root));
        let told = state.described.iter().filter(|(path, told)| told.said >= begun && of(path));
        let need = |what| if matches!(what, Described::Content(..)) { Need::Content } else { Need::Attributes };
        told.map(|(path, told)| (path.clone(), need(told.what))).collect()
    }

    /// Says a path anew if it is not what the log says any more.
    fn compare_one(&self, path: &[u8], job: Option<&Arc<Load>>) {
        let Some(known) = self.state().told(path).filter(|_| !self.excludes(path)) else { return };
        self.operation();
        let stat = rustix::fs::lstat(Path::new(std::ffi::OsStr::from_bytes(path))).ok();
        let mut state = self.state();
        if state.told(path) != Some(known) {
            return;
        }
        if stat.as_ref().map(version) == known.version() {
            return state.still(path);
        }
        let is_listed = state.listed.contains_key(path);
        drop(state);
        match stat {
            Some(stat) if is_listed && kind::of_mode(stat.st_mode) == kind::DIR => {
                self.describe_directory(path, Path::new(std::ffi::OsStr::from_bytes(path)));
            }
            stat => {
                self.changed(path.to_vec(), stat.map(|stat| kind::of_mode(stat.st_mode)));
                if matches!(known, Described::Content(..)) {
                    self.ask(path.to_vec(), Need::Content, job.cloned());
                }
            }
        }
    }

    /// Compares what the log says with the shared file system while a job runs: directories that others changed are listed again, and, with
    /// `files`, captured files that changed are named. A job keeps the content that it began with. Blocks: for a thread.
    pub fn look_for_changes(&self, files: bool) {
        let (directories, captured) = {
            let state = self.state();
            let versions =
                state.described.iter().filter_map(|(path, told)| Some((path, told.what, told.what.version()?)));
            let (mut directories, mut captured) = (Vec::new(), Vec::new());
            for (path, what, version) in versions {
                if state.listed.contains_key(path) {
                    directories.push((path.clone(), version));
                } else if files && matches!(what, Described::Content(..)) {
                    captured.push((path.clone(), version));
                }
            }
            (directories, captured)
        };
        let look = |path: &[u8]| {
            self.operation();
            rustix::fs::lstat(Path::new(std::ffi::OsStr::from_bytes(path)))
        };
        for (path, known) in directories {
            if look(&path).as_ref().map(version) != Ok(known) {
                log::debug!("{} changed", String::from_utf8_lossy(&path));
                self.enqueue(Work::Describe { path, need: Need::Attributes, job: None });
            }
        }
        for (path, known) in captured {
            let now = look(&path);
            if now.as_ref().map(version) != Ok(known) {
                let name = String::from_utf8_lossy(&path).into_owned();
                self.warn(format!("{name} changed on the shared file system; what was running kept the old content"));
                self.changed(path, now.ok().map(|stat| kind::of_mode(stat.st_mode)));
            }
        }
    }

    /// Begins what a job needs before it can start; see [`Preload`].
    pub fn preload(self: &Arc<Self>) -> Preload {
        let id = self.loads.fetch_add(1, Ordering::SeqCst);
        Preload { source: Arc::clone(self), load: Arc::new(Load { id, open: AtomicUsize::new(1) }) }
    }

    fn done(&self, job: Option<&Arc<Load>>) {
        if let Some(load) = job
            && load.open.fetch_sub(1, Ordering::SeqCst) == 1
        {
            self.find(Record::Preloaded { load: load.id }, Vec::new());
        }
    }

    /// Gives a record to the log, and waits if it has a body and too many do. When the log is gone, so is the session.
    fn find(&self, record: Record, body: Vec<u8>) {
        let hash = if body.is_empty() { [0; 32] } else { *blake3::hash(&body).as_bytes() };
        let room = (!body.is_empty()).then(|| {
            let _ = self.room.0.send_blocking(());
            Room(self.room.1.clone())
        });
        let _ = self.findings.try_send(Finding { record, body, hash, _room: room });
    }

    fn operation(&self) {
        self.counters.operations.fetch_add(1, Ordering::Relaxed);
    }

    fn serve(&self, work: Work) {
        match work {
            Work::Guess(guess) => {
                let (path, need) = match guess {
                    Guess::Attributes(path) => (path, Need::Attributes),
                    Guess::Content(path) => (path, Need::Content),
                };
                // It may have been asked for since it was guessed.
                if self.state().is_news(&path, need) {
                    self.serve(Work::Describe { path, need, job: None });
                }
            }
            Work::Describe { path, need, job } => {
                self.state().describing.insert(path.clone(), Vec::new());
                self.describe(&path, need, job.as_ref());
                let overtaken = self.state().describing.remove(&path).unwrap_or_default();
                for (path, exists) in overtaken {
                    self.changed(path, exists);
                }
                self.done(job.as_ref());
            }
            Work::Compare { path, job } => {
                self.compare_one(&path, job.as_ref());
                self.done(job.as_ref());
            }
            Work::Read { id, path, file, version, tries, job } => {
                self.transfer(id, &path, &file, version, tries, job.as_ref());
                self.done(job.as_ref());
            }
        }
    }

    /// A file changed under our eyes, or cannot be read.
    fn unsteady(&self, path: &[u8], errno: Errno, tries: u32, job: Option<&Arc<Load>>) {
        let name = String::from_utf8_lossy(path).into_owned();
        let mut state = self.state();
        state.described.remove(path);
        if errno != Errno::STALE {
            state.warnings.push(format!("{name} cannot be read ({errno}); ranks read the original"));
        } else if tries >= TRIES {
            state.warnings.push(format!("{name} keeps changing while it is read; ranks read the original"));
        } else {
            state.warnings.push(format!("{name} changed while it was read; it was read again"));
            drop(state);
            match FileSystem.open(Path::new(std::ffi::OsStr::from_bytes(path))) {
                Ok(opened) => self.publish(path, &opened.stat, opened.file, tries + 1, job),
                Err(error) => self.absent(path, &error),
            }
        }
    }

    fn absent(&self, path: &[u8], error: &io::Error) {
        self.state().tell(path, Described::Absent);
        let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
        self.find(Record::Absent { path: path.to_vec(), errno }, Vec::new());
    }

    /// Says what a path is.
    fn describe(&self, path: &[u8], need: Need, job: Option<&Arc<Load>>) {
        if self.excludes(path) {
            return self.leave_alone(path, Described::Absent);
        }
        let name = Path::new(std::ffi::OsStr::from_bytes(path));
        if need == Need::Content && matches!(self.state().told(path), Some(Described::Offered(_))) {
            self.operation();
            if let Ok(opened) = FileSystem.open(name)
                && rustix::fs::FileType::from_raw_mode(opened.stat.st_mode).is_file()
            {
                return self.publish(path, &opened.stat, opened.file, 1, job);
            }
        }
        self.operation();
        let stat = match rustix::fs::lstat(name) {
            Ok(stat) => stat,
            Err(error) => return self.absent(path, &error.into()),
        };
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::Directory => self.describe_directory(path, name),
            rustix::fs::FileType::Symlink => {
                self.operation();
                match rustix::fs::readlink(name, Vec::new()) {
                    Ok(target) => {
                        self.state().tell(path, Described::Whole(version(&stat)));
                        self.find(
                            Record::Link { path: path.to_vec(), attr: attr(&stat), target: target.into_bytes() },
                            Vec::new(),
                        );
                    }
                    Err(error) => self.absent(path, &error.into()),
                }
            }
            rustix::fs::FileType::RegularFile => {
                let takes = {
                    let rule = self.capture.read().unwrap_or_else(PoisonError::into_inner);
                    rule.takes(path, stat.st_mode, u64::try_from(stat.st_size).unwrap_or(0))
                };
                if !takes {
                    return self.pass_through(path, &stat);
                }
                if need == Need::Attributes && !capture::is_loaded(file_name(path)) {
                    return self.offer(path, &stat);
                }
                if let Some(Described::Content(known, id)) = self.state().told(path)
                    && known == version(&stat)
                {
                    // Said again to who did not hear it.
                    let content = Supply::Log(id);
                    return self.find(Record::File { path: path.to_vec(), attr: attr(&stat), content }, Vec::new());
                }
                self.operation();
                match FileSystem.open(name) {
                    Ok(opened) => self.publish(path, &opened.stat, opened.file, 1, job),
                    // Not readable by us: whoever may, reads it himself.
                    Err(_) => self.pass_through(path, &stat),
                }
            }
            // The log has no words for it.
            _ => self.leave_alone(path, Described::Whole(version(&stat))),
        }
    }

    fn excludes(&self, path: &[u8]) -> bool {
        self.capture.read().unwrap_or_else(PoisonError::into_inner).excludes(path)
    }

    /// Every node looks for itself, each time.
    fn leave_alone(&self, path: &[u8], what: Described) {
        self.state().tell(path, what);
        self.find(Record::Absent { path: path.to_vec(), errno: 0 }, Vec::new());
    }

    /// Tells a file's attributes, unless its content was asked for meanwhile: that says more.
    fn offer(&self, path: &[u8], stat: &Stat) {
        let mut state = self.state();
        if !matches!(state.told(path), Some(Described::Content(..))) {
            state.tell(path, Described::Offered(version(stat)));
            // With the lock: the content's record stands behind it.
            self.find(Record::File { path: path.to_vec(), attr: attr(stat), content: Supply::OnOpen }, Vec::new());
        }
    }

    fn pass_through(&self, path: &[u8], stat: &Stat) {
        self.state().tell(path, Described::Whole(version(stat)));
        self.find(Record::File { path: path.to_vec(), attr: attr(stat), content: Supply::Original }, Vec::new());
    }

    fn describe_directory(&self, path: &[u8], name: &Path) {
        self.operation();
        let listed = FileSystem.open_dir(name).and_then(|dir| Ok((FileSystem.names(&dir.file)?, dir.stat)));
        match listed {
            Ok((names, stat)) => self.list(path, &stat, &names),
            Err(error) => self.absent(path, &error),
        }
    }

    fn list(&self, path: &[u8], stat: &Stat, names: &Names) {
        self.guess(|imports| imports.handle_listing(path, names.keys().map(|name| name.as_bytes())));
        let kinds = names.iter().map(|(name, kind)| Name { name: name.as_bytes().to_vec(), kind: *kind }).collect();
        let mut state = self.state();
        state.tell(path, Described::Whole(version(stat)));
        if let Some(before) = state.listed.insert(path.to_vec(), names.clone()) {
            let came = names.keys().filter(|name| !before.contains_key(*name));
            let went = before.keys().filter(|name| !names.contains_key(*name));
            for changed in came.chain(went).map(|name| join(path, name.as_bytes())) {
                if state.described.contains_key(&changed) || state.asked.contains_key(&changed) {
                    state.forget(&changed);
                }
            }
        }
        // With the lock: who asks after this is answered behind it.
        self.find(Record::Dir { path: path.to_vec(), attr: attr(stat), names: kinds }, Vec::new());
    }

    /// Puts a captured file into the log, unless this version of it is there.
    fn publish(&self, path: &[u8], stat: &Stat, file: File, tries: u32, job: Option<&Arc<Load>>) {
        if let Some((id, version)) = self.begin(path, stat) {
            self.enqueue(Work::Read { id, path: path.to_vec(), file, version, tries, job: job.cloned() });
        }
    }

    /// Announces a file's content, unless this version of it is in the log.
    fn begin(&self, path: &[u8], stat: &Stat) -> Option<(FileId, Version)> {
        let version = version(stat);
        let id = {
            let mut state = self.state();
            if let Some(Described::Content(same, _)) = state.told(path)
                && same == version
            {
                state.still(path);
                self.counters.hits.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            let id = state.next;
            state.next += 1;
            state.tell(path, Described::Content(version, id));
            id
        };
        self.counters.files.fetch_add(1, Ordering::Relaxed);
        self.begin_log();
        if changes_user(stat) {
            let name = String::from_utf8_lossy(path).into_owned();
            let warning = format!("{name} is set-user-ID or set-group-ID: ranks run it with their own rights");
            self.state().warnings.push(warning);
        }
        self.find(Record::File { path: path.to_vec(), attr: attr(stat), content: Supply::Log(id) }, Vec::new());
        Some((id, version))
    }

    /// Reads all of a file into the log, or voids it there and tries again.
    fn transfer(&self, id: FileId, path: &[u8], file: &File, version: Version, tries: u32, job: Option<&Arc<Load>>) {
        if let Err(errno) = self.read(id, path, file, version) {
            self.find(Record::Void { file: id, errno: errno.raw_os_error() }, Vec::new());
            self.unsteady(path, errno, tries, job);
        }
    }

    /// Whether somebody who knows the links should [`decide`](Source::decide).
    pub fn is_undecided(&self) -> bool {
        self.undecided.load(Ordering::Relaxed)
    }

    /// Whether chunks are compressed from now on, if they shrink.
    pub fn decide(&self, compress: bool) {
        self.undecided.store(false, Ordering::Relaxed);
        self.compress.store(compress, Ordering::Relaxed);
    }

    /// There will be a log, even if no file is captured.
    pub fn begin_log(&self) {
        self.begun.0.close();
    }

    /// Waits until the first file is captured; a log is needed from then on.
    pub async fn begun(&self) {
        let _ = self.begun.1.recv().await;
    }

    /// Reads a file once, from its beginning to its end.
    fn read(&self, id: FileId, path: &[u8], file: &File, version: Version) -> Result<(), Errno> {
        let (mut offset, mut buffer) = (0, Vec::new());
        while offset < version.size {
            let want = usize::try_from(version.size - offset).unwrap_or(usize::MAX).min(CHUNK_MAX);
            buffer.resize(want, 0);
            let got = super::store::read_at(file, offset, &mut buffer)?;
            self.counters.operations.fetch_add(got.div_ceil(128 << 10) as u64, Ordering::Relaxed);
            if got < want {
                return Err(Errno::STALE);
            }
            self.counters.bytes.fetch_add(got as u64, Ordering::Relaxed);
            let len = u32::try_from(got).map_err(|_| Errno::OVERFLOW)?;
            if offset == 0 && (path.ends_with(b".pyc") || path.ends_with(b".py")) {
                self.guess(|imports| imports.handle_module(path, &buffer));
            }
            let (codec, body) = self.encode(&mut buffer);
            self.find(Record::Chunk { file: id, offset, len, codec }, body);
            offset += got as u64;
        }
        if current(file)? != version {
            return Err(Errno::STALE);
        }
        self.find(Record::Complete { file: id }, Vec::new());
        Ok(())
    }

    fn encode(&self, raw: &mut Vec<u8>) -> (Codec, Vec<u8>) {
        // What does not shrink by an eighth is not worth every node's time.
        let worth_it = |small: &Vec<u8>| small.len() < raw.len() - raw.len() / 8;
        let small = if self.compress.load(Ordering::Relaxed) { chunk::compress(raw).filter(worth_it) } else { None };
        match small {
            Some(small) => (Codec::Zstd, small),
            None => (Codec::Raw, std::mem::take(raw)),
        }
    }

    /// Reads a chunk again for a node that fell behind; `None` when the file is no longer what it was.
    pub fn read_again(&self, record: &Record) -> Option<(Record, Vec<u8>)> {
        let Record::Chunk { file: id, offset, len, .. } = *record else { return None };
        let (path, version) = {
            let state = self.state();
            let found = state.described.iter().find_map(|(path, told)| match told.what {
                Described::Content(version, known) if known == id => Some((path.clone(), version)),
                _ => None,
            });
            found?
        };
        self.operation();
        let opened = FileSystem.open(Path::new(std::ffi::OsStr::from_bytes(&path))).ok()?;
        if self::version(&opened.stat) != version {
            return None;
        }
        let mut body = vec![0; len as usize];
        let got = super::store::read_at(&opened.file, offset, &mut body).ok()?;
        self.counters.operations.fetch_add(got.div_ceil(128 << 10) as u64, Ordering::Relaxed);
        if got < body.len() {
            return None;
        }
        let (codec, body) = self.encode(&mut body);
        Some((Record::Chunk { file: id, offset, len, codec }, body))
    }
}

/// What a job needs before its ranks can start: [`Record::Preloaded`] follows when this is dropped and everything it asked for was sent.
#[derive(Debug)]
pub struct Preload {
    source: Arc<Source>,
    load: Arc<Load>,
}

impl Preload {
    /// The load's number.
    pub fn id(&self) -> LoadId {
        self.load.id
    }

    /// A directory that was listed on the way.
    pub fn directory(&self, listing: &Listing) {
        let path = listing.canonical.as_os_str().as_bytes();
        self.source.operation();
        let mut state = self.source.state();
        match state.told(path) {
            Some(known) if known.version() == Some(version(&listing.stat)) => state.still(path),
            _ => {
                drop(state);
                self.source.list(path, &listing.stat, &listing.names);
            }
        }
    }

    /// What will probably be asked for, if it lies below `roots`.
    pub fn hint(&self, path: &[u8], need: Need, roots: &[Vec<u8>]) {
        if roots.iter().any(|root| is_below(path, root)) {
            self.source.ask(path.to_vec(), need, Some(Arc::clone(&self.load)));
        }
    }

    /// Anything else that will be asked for.
    pub fn path(&self, path: &Path, need: Need) {
        self.source.ask(path.as_os_str().as_bytes().to_vec(), need, Some(Arc::clone(&self.load)));
    }
}

/// Looks for a job's closure and captures what it opens on the way. A file is read from its beginning to its end before anybody looks
/// into it: what follows comes from the page cache, and the file system saw one sequential read.
impl Probe for Preload {
    type File = File;
    type Dir = OwnedFd;

    fn open(&self, path: &Path) -> io::Result<Opened<File>> {
        let opened = FileSystem.open(path)?;
        let regular = rustix::fs::FileType::from_raw_mode(opened.stat.st_mode).is_file();
        let path = opened.canonical.as_os_str().as_bytes();
        if regular && self.source.shares_device(opened.stat.st_dev, &opened.canonical) && !self.source.excludes(path) {
            self.source.operation();
            if let Some((id, version)) = self.source.begin(path, &opened.stat) {
                self.source.transfer(id, path, &opened.file, version, 1, Some(&self.load));
            }
        }
        Ok(opened)
    }

    fn open_dir(&self, path: &Path) -> io::Result<Opened<OwnedFd>> {
        FileSystem.open_dir(path)
    }

    fn names(&self, dir: &OwnedFd) -> io::Result<Names> {
        FileSystem.names(dir)
    }
}

impl Drop for Preload {
    fn drop(&mut self) {
        self.source.done(Some(&self.load));
    }
}

/// Whether executing the file would give it rights that its caller lacks; file systems of a view are `nosuid`.
fn changes_user(stat: &Stat) -> bool {
    let mode = Mode::from_raw_mode(stat.st_mode);
    mode.intersects(Mode::XUSR | Mode::XGRP | Mode::XOTH)
        && (mode.contains(Mode::SUID) && stat.st_uid != rustix::process::geteuid().as_raw()
            || mode.contains(Mode::SGID | Mode::XGRP) && stat.st_gid != rustix::process::getegid().as_raw())
}

fn attr(stat: &Stat) -> Attr {
    let nanoseconds = |n| u32::try_from(n).unwrap_or(0);
    Attr {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        ino: stat.st_ino,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mtime: (stat.st_mtime, nanoseconds(stat.st_mtime_nsec)),
        ctime: (stat.st_ctime, nanoseconds(stat.st_ctime_nsec)),
    }
}

fn version(stat: &Stat) -> Version {
    let Attr { ino, size, mtime, ctime, .. } = attr(stat);
    Version { dev: stat.st_dev, ino, size, mtime, ctime }
}

/// The version of an open file as it is now, without asking for times of access: reading changed those, and the answer would cost a
/// request. Network file systems learn the rest with every read.
fn current(file: impl AsFd) -> Result<Version, Errno> {
    let mask = StatxFlags::INO | StatxFlags::SIZE | StatxFlags::MTIME | StatxFlags::CTIME;
    let now = statx(file, c"", AtFlags::EMPTY_PATH, mask)?;
    let time = |t: rustix::fs::StatxTimestamp| (t.tv_sec, t.tv_nsec);
    let dev = rustix::fs::makedev(now.stx_dev_major, now.stx_dev_minor);
    Ok(Version { dev, ino: now.stx_ino, size: now.stx_size, mtime: time(now.stx_mtime), ctime: time(now.stx_ctime) })
}
