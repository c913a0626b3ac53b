//! The root's reader: the only one in the job that touches the shared file system. Turns what it finds into records of the log.
//!
//! Questions and files wait in one queue that a few threads serve, so that the file system's latency overlaps; what they find goes into
//! a channel that the log empties at the pace of the fastest child, with room for a few chunks. Every path is described once and every file version read
//! once, however many ask. What a Python program will probably import next is looked at when there is no question to answer.

mod changes;
mod counters;
mod held;
mod preload;
mod work;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread;
use std::time::Instant;

use async_channel::{Receiver, Sender, bounded, unbounded};
use rustix::fs::{Mode, Stat};
use rustix::io::Errno;

use super::capture::{self, Capture};
use super::catalog::{as_path, file_name, is_below, is_code, is_within, join, kind};
use super::chunk;
use super::elf::Elf;
use super::forest::{Forest, Ticket};
use super::hints::Hint;
use super::imports;
use super::prefetch::{Guess, Prefetch};
use super::probe::{FileSystem, Names, Probe};
use super::store::read_vec;
use super::tally::{Tally, Why, requests};
use super::told::{Described, Overtaken, State};
use super::version::{Version, attr, current, version};
use super::work_queue::WorkQueue;
use crate::Result;
use crate::error::Context;
use crate::net::wire::control::{Extent, Need};
use crate::net::wire::frame::HEADER_MAX;
use crate::net::wire::record::{CHUNK_MAX, FileId, Name, Record, Supply};

pub use counters::{Counted, Counters};
use held::Held;
pub use held::Run;
pub use preload::Preload;
use work::{Load, Work};

/// Reading threads: enough to overlap a file system's latency, few enough not to storm it.
pub const READERS: usize = 8;
/// Of these, at most so many read contents, or look at what nobody has asked for yet: questions wait for none of that.
const CONTENT_READERS: usize = 6;
/// Bytes of one file, and of all files of a session, that are read before anybody asks.
const GUESSED_FILE_MAX: u64 = 64 << 20;
const GUESSED_MAX: u64 = 1 << 30;
/// Chunks that wait for the log, at most.
const CHUNKS: usize = 8;
/// Paths of which it is known what they cost.
const PATHS: usize = 4096;
/// A file that changes while it is read is read again this often.
const TRIES: u32 = 3;

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

/// A part of a file on its way into the log.
#[derive(Debug)]
enum Part {
    /// To be read here.
    Own,
    Read(Vec<u8>),
    Asked(Ticket),
}

/// See the module.
#[derive(Debug)]
pub struct Source {
    findings: Sender<Finding>,
    /// A token for each chunk that waits: who reads waits here, who only describes never does.
    room: (Sender<()>, Receiver<()>),
    /// Closed when the first file is captured.
    begun: (Sender<()>, Receiver<()>),
    queue: Arc<WorkQueue<Work>>,
    state: Mutex<State>,
    prefetch: Mutex<Prefetch>,
    /// Bytes of the files that were guessed.
    guessed: AtomicU64,
    capture: RwLock<Capture>,
    /// What is not sent to all, with `--pull`.
    held: Option<Held>,
    /// Who reads on other hosts.
    pub forest: Forest,
    compress: AtomicBool,
    compression: Compression,
    loads: AtomicU32,
    pub counters: Counters,
    touched: Mutex<Tally>,
}

impl Source {
    /// Starts `readers` threads, [`READERS`] where there is anything to read; what they find comes out of the receiver. `pull`: what no
    /// program needs to start goes to those who ask.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(compression: Compression, readers: usize, pull: bool) -> Result<(Arc<Source>, Receiver<Finding>)> {
        let (findings, found) = unbounded();
        let queue = Arc::new(WorkQueue::new());
        let room = bounded(CHUNKS);
        let (state, prefetch, guessed, capture, counters) = Default::default();
        let this = Arc::new(Source {
            findings,
            room,
            begun: bounded(1),
            queue: Arc::clone(&queue),
            state,
            prefetch,
            guessed,
            capture,
            held: pull.then(Held::new),
            forest: Forest::default(),
            compress: AtomicBool::new(compression == Compression::Always),
            compression,
            loads: AtomicU32::new(1),
            counters,
            touched: Mutex::new(Tally::new(PATHS)),
        });
        for reader in 0..readers {
            let (this, queue) = (Arc::downgrade(&this), Arc::clone(&queue));
            let serve = move || {
                while let Some(work) = queue.pop(reader < CONTENT_READERS)
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

    /// Tells something to who knows what Python programs ask for next, and queues what he says. Returns what `tell` does.
    pub fn prefetch<T>(&self, tell: impl FnOnce(&mut Prefetch) -> T) -> T {
        let mut prefetch = self.prefetch.lock().unwrap_or_else(PoisonError::into_inner);
        let told = tell(&mut prefetch);
        let guesses = prefetch.poll_guesses();
        if !guesses.is_empty() {
            // With the lock: what was told last is what the program comes to first.
            self.queue.push_ahead(guesses.into_iter().map(Work::Guess));
        }
        told
    }

    /// Follows the imports of a module or a script.
    pub fn handle_module(&self, path: &[u8], content: &[u8]) {
        if self.prefetch(|prefetch| prefetch.is_active()) {
            let imports = imports::of_module(path, content);
            self.prefetch(|prefetch| prefetch.handle_module(path, imports));
        }
    }

    /// Whether a path lies on a file system that the hosts share, or is said to.
    pub fn shares(&self, path: &Path) -> bool {
        self.is_said_to_be_shared(path) || capture::is_shared(path)
    }

    fn is_said_to_be_shared(&self, path: &Path) -> bool {
        let rule = self.capture.read().unwrap_or_else(PoisonError::into_inner);
        let path = path.as_os_str().as_bytes();
        rule.shared.iter().any(|shared| is_within(path, shared))
    }

    /// A question from a node. The answer to [`Need::Content`] is never [`Supply::OnOpen`], so it is not asked again.
    pub fn want(&self, path: Vec<u8>, need: Need) {
        self.counters.misses.fetch_add(1, Ordering::Relaxed);
        if self.state().is_unheard(&path, need) {
            return self.enqueue(Work::Describe { path, need, why: asked(need), job: None });
        }
        self.ask(path, need, asked(need), None);
    }

    /// [`Source::shares`], asked once for each device.
    pub fn shares_device(&self, device: u64, at: &Path) -> bool {
        if self.is_said_to_be_shared(at) {
            return true;
        }
        if let Some(shared) = self.state().devices.get(&device) {
            return *shared;
        }
        let shared = capture::is_shared(at);
        self.state().devices.insert(device, shared);
        shared
    }

    fn ask(&self, path: Vec<u8>, need: Need, why: Why, job: Option<Arc<Load>>) {
        let mut state = self.state();
        let is_news = state.is_news(&path, need);
        if need == Need::Content {
            state.want(&path);
        }
        drop(state);
        if is_news {
            self.enqueue(Work::Describe { path, need, why, job });
        }
    }

    fn enqueue(&self, work: Work) {
        if let Some(job) = work.job() {
            job.open.fetch_add(1, Ordering::SeqCst);
        }
        self.queue.push(work.turn(), work);
    }

    /// A node says that a job changed `path`.
    pub fn changed(&self, path: Vec<u8>, exists: Option<u8>) {
        self.change(path, exists, false);
    }

    fn change(&self, path: Vec<u8>, exists: Option<u8>, seen: bool) {
        let mut state = self.state();
        state.change(&path, exists, seen);
        // With the lock: who asks after this is answered behind it.
        self.find(Record::Changed { path, exists }, Vec::new());
    }

    /// What was said since `begun` of what lies below `roots`: what another run of the program will ask for.
    pub fn told_since(&self, roots: &[Vec<u8>], begun: Instant) -> Vec<Hint> {
        let state = self.state();
        let of = |path: &[u8]| roots.iter().any(|root| is_below(path, root));
        // Looking at a library means to load it, and this one was only offered: a guess that nobody asked for.
        let unasked = |path: &[u8], what| matches!(what, Described::Offered(_)) && capture::is_loaded(file_name(path));
        let told = state.described.iter().filter(|(path, told)| told.said >= begun && of(path));
        let told = told.filter(|(path, told)| !unasked(path, told.what));
        let need = |what| if matches!(what, Described::Content(..)) { Need::Content } else { Need::Attributes };
        told.map(|(path, told)| (path.clone(), need(told.what))).collect()
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

    fn operation(&self, path: &[u8], why: Why) {
        self.touch(path, why, 1, 0);
    }

    fn look_at(&self, path: &[u8], why: Why) -> Result<Stat, Errno> {
        self.operation(path, why);
        rustix::fs::lstat(path)
    }

    fn touch(&self, path: &[u8], why: Why, operations: u64, bytes: u64) {
        self.counters.operations.fetch_add(operations, Ordering::Relaxed);
        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.touched.lock().unwrap_or_else(PoisonError::into_inner).add(path, why, operations, bytes);
    }

    /// What this reader did at the shared file system, by path.
    pub fn touched(&self) -> Tally {
        self.touched.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn serve(&self, work: Work) {
        match work {
            Work::Guess(Guess { path, need }) => self.look(&path, |look| {
                // It may have been asked for since it was guessed.
                if self.state().is_news(&path, need) {
                    match need {
                        Need::Content if !self.excludes(&path) => self.read_ahead(&path, look),
                        _ => self.describe(&path, need, Why::Guess, None),
                    }
                }
            }),
            Work::Describe { path, need, why, job } => {
                self.look(&path, |_| self.describe(&path, need, why, job.as_ref()));
                self.done(job.as_ref());
            }
            Work::Compare { path, job } => {
                self.compare_one(&path, job.as_ref());
                self.done(job.as_ref());
            }
            Work::Read { id, path, file, version, tries, why, job } => {
                self.transfer(id, &path, &file, version, (tries, why), job.as_ref());
                self.done(job.as_ref());
            }
        }
    }

    /// Looks at a path, then says again what changed meanwhile.
    fn look(&self, path: &[u8], look: impl FnOnce(u64)) {
        let number = self.state().begin_look(path);
        look(number);
        let overtaken = self.state().end_look(number);
        for Overtaken { path, exists, seen } in overtaken {
            self.change(path, exists, seen);
        }
    }

    /// A file changed under our eyes, or cannot be read.
    fn unsteady(&self, path: &[u8], errno: Errno, (tries, why): (u32, Why), job: Option<&Arc<Load>>) {
        let name = String::from_utf8_lossy(path).into_owned();
        let mut state = self.state();
        state.retract(path);
        if errno != Errno::STALE {
            state.warnings.push(format!("{name} cannot be read ({errno}); ranks read the original"));
        } else if tries >= TRIES {
            state.warnings.push(format!("{name} keeps changing while it is read; ranks read the original"));
        } else {
            state.warnings.push(format!("{name} changed while it was read; it was read again"));
            drop(state);
            match FileSystem.open_canonical(as_path(path)) {
                Ok(opened) => self.publish(path, &opened.stat, opened.file, (tries + 1, why), job),
                Err(error) => self.absent(path, &error),
            }
        }
    }

    /// Says what a path is.
    fn describe(&self, path: &[u8], need: Need, why: Why, job: Option<&Arc<Load>>) {
        if self.excludes(path) {
            return self.leave_alone(path, Described::Absent);
        }
        if need == Need::Content && matches!(self.state().told(path), Some(Described::Offered(_))) {
            self.operation(path, why);
            if let Ok(opened) = FileSystem.open_canonical(as_path(path))
                && self.is_shared_file(path, &opened.stat)
            {
                return self.publish(path, &opened.stat, opened.file, (1, why), job);
            }
        }
        let stat = match self.look_at(path, why) {
            Ok(stat) => stat,
            Err(error) => return self.absent(path, &error.into()),
        };
        if self.is_as_before(path, version(&stat)) {
            return;
        }
        // What is mounted within a captured directory is each host's own.
        if !self.shares_device(stat.st_dev, as_path(path)) {
            return self.leave_alone(path, Described::Whole(version(&stat)));
        }
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::Directory => self.describe_directory(path, &stat, why),
            rustix::fs::FileType::Symlink => {
                self.operation(path, why);
                match rustix::fs::readlink(path, Vec::new()) {
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
                if !self.takes(path, &stat) {
                    return self.pass_through(path, &stat);
                }
                if need == Need::Attributes && !capture::is_loaded(file_name(path)) {
                    return self.offer(path, &stat);
                }
                if let Some(Described::Content(known, id)) = self.state().told(path)
                    && known == version(&stat)
                {
                    // Said again to who did not hear it.
                    let content = self.supply(id);
                    return self.find(Record::File { path: path.to_vec(), attr: attr(&stat), content }, Vec::new());
                }
                self.operation(path, why);
                match FileSystem.open_canonical(as_path(path)) {
                    Ok(opened) => self.publish(path, &opened.stat, opened.file, (1, why), job),
                    // Not readable by us: whoever may, reads it himself.
                    Err(_) => self.pass_through(path, &stat),
                }
            }
            // The log has no words for it.
            _ => self.leave_alone(path, Described::Whole(version(&stat))),
        }
    }

    /// Reads a file that nobody has asked for yet; in this thread, so that some are left for questions.
    fn read_ahead(&self, path: &[u8], look: u64) {
        self.operation(path, Why::Guess);
        let name = as_path(path);
        let opened = FileSystem.open(name).ok().filter(|opened| {
            opened.canonical == name && self.is_shared_file(path, &opened.stat) && self.takes(path, &opened.stat)
        });
        let Some(opened) = opened else { return self.describe(path, Need::Content, Why::Guess, None) };
        let size = opened.size();
        if size > GUESSED_FILE_MAX || self.guessed.fetch_add(size, Ordering::Relaxed) + size > GUESSED_MAX {
            let mut state = self.state();
            if !state.is_wanted(look) {
                // Too much for a guess: from now on it is news when somebody asks for it.
                state.asked.insert(path.to_vec(), Need::Attributes);
                drop(state);
                return self.offer(path, &opened.stat);
            }
        }
        if let Some((id, version)) = self.begin(path, &opened.stat, Why::Guess) {
            self.transfer(id, path, &opened.file, version, (1, Why::Guess), None);
        }
    }

    /// Whether it is a file, and the hosts have the same one: what is mounted over one of theirs is each host's own.
    fn is_shared_file(&self, path: &[u8], stat: &Stat) -> bool {
        rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() && self.shares_device(stat.st_dev, as_path(path))
    }

    fn takes(&self, path: &[u8], stat: &Stat) -> bool {
        let rule = self.capture.read().unwrap_or_else(PoisonError::into_inner);
        rule.takes(path, stat.st_mode, u64::try_from(stat.st_size).unwrap_or(0))
    }

    fn excludes(&self, path: &[u8]) -> bool {
        self.capture.read().unwrap_or_else(PoisonError::into_inner).excludes(path)
    }

    /// Tells a file's attributes, unless its content was asked for meanwhile: that says more.
    fn offer(&self, path: &[u8], stat: &Stat) {
        if self.is_as_before(path, version(stat)) {
            return;
        }
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

    fn describe_directory(&self, path: &[u8], seen: &Stat, why: Why) {
        self.operation(path, why);
        let opened = FileSystem.open_dir(as_path(path)).and_then(|dir| dir.reached_by(as_path(path)));
        let listed = opened.and_then(|dir| Ok((FileSystem.names(&dir.file)?, dir.stat)));
        match listed {
            Ok((names, stat)) => self.list(path, &stat, &names),
            // It may be entered, and what is in it have names that its users know.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.leave_alone(path, Described::Whole(version(seen)));
            }
            Err(error) => self.absent(path, &error),
        }
    }

    fn list(&self, path: &[u8], stat: &Stat, names: &Names) {
        if listing_size(path, names) > HEADER_MAX {
            self.state().listed.remove(path);
            return self.leave_alone(path, Described::Whole(version(stat)));
        }
        let entries = names.iter().map(|(name, kind)| (name.as_bytes().to_vec(), *kind));
        self.prefetch(|prefetch| prefetch.handle_listing(path, entries));
        let kinds = names.iter().map(|(name, kind)| Name { name: name.as_bytes().to_vec(), kind: *kind }).collect();
        let mut state = self.state();
        state.tell(path, Described::Whole(version(stat)));
        if let Some(before) = state.listed.insert(path.to_vec(), names.clone()) {
            let same = |a: u8, b: u8| a == b || a == kind::UNKNOWN || b == kind::UNKNOWN;
            let came = names.iter().filter(|(name, _)| !before.contains_key(*name));
            let went = before.iter().filter(|(name, kind)| !names.get(*name).is_some_and(|now| same(*now, **kind)));
            for (changed, kind) in came.chain(went).map(|(name, kind)| (join(path, name.as_bytes()), *kind)) {
                // Below a directory that was missing something may have been looked for in vain.
                if kind != kind::REG || state.described.contains_key(&changed) || state.asked.contains_key(&changed) {
                    state.forget(&changed);
                }
            }
            // What was renamed over another of its kind. Captured files keep what the job began with, and directories are looked at anyway.
            for path in names.keys().map(|name| join(path, name.as_bytes())) {
                if matches!(state.told(&path), Some(Described::Whole(_))) && !state.listed.contains_key(&path) {
                    self.enqueue(Work::Compare { path, job: None });
                }
            }
        }
        // With the lock: who asks after this is answered behind it.
        self.find(Record::Dir { path: path.to_vec(), attr: attr(stat), names: kinds }, Vec::new());
    }

    /// Puts a captured file into the log, unless this version of it is there.
    fn publish(&self, path: &[u8], stat: &Stat, file: File, (tries, why): (u32, Why), job: Option<&Arc<Load>>) {
        if let Some((id, version)) = self.begin(path, stat, why) {
            // Nobody's start waits for what he has not asked for.
            let job = job.filter(|_| self.held(id).is_none()).cloned();
            self.enqueue(Work::Read { id, path: path.to_vec(), file, version, tries, why, job });
        }
    }

    /// Announces a file's content, unless this version of it is in the log.
    fn begin(&self, path: &[u8], stat: &Stat, why: Why) -> Option<(FileId, Version)> {
        let version = version(stat);
        if self.is_as_before(path, version) {
            return None;
        }
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
            if self.withholds(why).is_some_and(|held| !self.hold(held, id, version.size)) {
                drop(state);
                self.pass_through(path, stat);
                return None;
            }
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
        self.find(Record::File { path: path.to_vec(), attr: attr(stat), content: self.supply(id) }, Vec::new());
        Some((id, version))
    }

    /// Reads all of a file into the log, or voids it there and tries again.
    fn transfer(
        &self,
        id: FileId,
        path: &[u8],
        file: &File,
        version: Version,
        (tries, why): (u32, Why),
        job: Option<&Arc<Load>>,
    ) {
        if let Err(errno) = self.read(id, path, file, version, why) {
            self.find(Record::Void { file: id, errno: errno.raw_os_error() }, Vec::new());
            self.held.iter().for_each(|held| held.remove(id));
            self.unsteady(path, errno, (tries, why), job);
        } else if is_code(file_name(path))
            && !imports::is_module(path)
            && self.prefetch(|prefetch| prefetch.is_active())
            && let Ok(elf) = Elf::read(file, None)
        {
            self.prefetch(|prefetch| prefetch.handle_library(path, &elf));
        }
    }

    /// The links are slower than this machine compresses: unless somebody decided otherwise, chunks are compressed from now on, if they
    /// shrink.
    pub fn compress_slow_links(&self) {
        if self.chooses_compression() {
            self.compress.store(true, Ordering::Relaxed);
        }
    }

    /// Whether [`Source::compress_slow_links`] decides.
    pub fn chooses_compression(&self) -> bool {
        self.compression == Compression::Auto
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
    fn read(&self, id: FileId, path: &[u8], file: &File, version: Version, why: Why) -> Result<(), Errno> {
        let (held, mut shares) = (self.held(id), self.forest.shares(version.size));
        if shares.are_shared() {
            // What lies behind a part is another host's to read.
            let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
        }
        // The next parts, in order, and who was asked for each.
        let (mut parts, mut end) = (VecDeque::new(), 0);
        loop {
            while end < version.size && parts.len() < shares.ahead() {
                let len = u32::try_from((version.size - end).min(CHUNK_MAX as u64)).map_err(|_| Errno::OVERFLOW)?;
                let last = shares.is_last(end, CHUNK_MAX as u64, version.size);
                let extent = Extent { ticket: 0, path: path.to_vec(), seen: version.seen(), offset: end, len, last };
                let part = self.forest.ask(&mut shares, extent).map_or(Part::Own, Part::Asked);
                parts.push_back((end, len, part));
                end += u64::from(len);
            }
            // While others read what comes next, this host reads its own parts.
            if let Some((.., Part::Asked(ticket))) = parts.front_mut()
                && !ticket.has_come()
                && let Some((offset, len, part)) = parts.iter_mut().find(|(.., part)| matches!(part, Part::Own))
            {
                *part = Part::Read(read_vec(file, *offset, *len as usize)?);
                continue;
            }
            let Some((offset, len, part)) = parts.pop_front() else { break };
            let bytes = match part {
                Part::Own => None,
                Part::Read(bytes) => Some(bytes),
                Part::Asked(ticket) => self.forest.wait(ticket, len as usize),
            };
            let mut buffer = match bytes {
                Some(bytes) => bytes,
                None => read_vec(file, offset, len as usize)?,
            };
            self.touch(path, why, requests(buffer.len() as u64), buffer.len() as u64);
            if buffer.len() < len as usize {
                return Err(Errno::STALE);
            }
            if u64::from(len) == version.size && imports::is_module(path) {
                self.handle_module(path, &buffer);
            }
            if let Some(held) = held {
                held.add(id, &buffer).map_err(|_| Errno::NOMEM)?;
            } else {
                let (codec, body) = chunk::encode(&mut buffer, self.compress.load(Ordering::Relaxed));
                self.find(Record::Chunk { file: id, offset, len, codec }, body);
            }
        }
        if current(file)? != version {
            return Err(Errno::STALE);
        }
        if held.is_none() {
            self.find(Record::Complete { file: id }, Vec::new());
        }
        Ok(())
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
        self.operation(&path, Why::Again);
        let opened = FileSystem.open(as_path(&path)).ok()?;
        if self::version(&opened.stat) != version {
            return None;
        }
        let mut body = read_vec(&opened.file, offset, len as usize).ok()?;
        let got = body.len();
        self.touch(&path, Why::Again, requests(got as u64), got as u64);
        if got < len as usize {
            return None;
        }
        let (codec, body) = chunk::encode(&mut body, self.compress.load(Ordering::Relaxed));
        Some((Record::Chunk { file: id, offset, len, codec }, body))
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.queue.close();
    }
}

/// Bytes of a directory's record, at most.
fn listing_size(path: &[u8], names: &Names) -> usize {
    /// Of a record without names, and of a name beside its bytes: length, place, kind and alignment.
    const RECORD: usize = 1024;
    const NAME: usize = 16;
    RECORD + path.len() + names.keys().map(|name| name.len() + NAME).sum::<usize>()
}

/// Why a path is touched that a node asks for.
fn asked(need: Need) -> Why {
    match need {
        Need::Attributes => Why::Attributes,
        Need::Content => Why::Content,
    }
}

/// Whether executing the file would give it rights that its caller lacks; file systems of a view are `nosuid`.
fn changes_user(stat: &Stat) -> bool {
    let mode = Mode::from_raw_mode(stat.st_mode);
    mode.intersects(Mode::XUSR | Mode::XGRP | Mode::XOTH)
        && (mode.contains(Mode::SUID) && stat.st_uid != rustix::process::geteuid().as_raw()
            || mode.contains(Mode::SGID | Mode::XGRP) && stat.st_gid != rustix::process::getegid().as_raw())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A file `m.py` that imports `other.py`, and a source that was told nothing.
    pub(super) fn started() -> (tempfile::TempDir, Vec<u8>, Arc<Source>, Receiver<Finding>) {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("m.py"), "import other\n").unwrap();
        std::fs::write(directory.path().join("other.py"), "x = 1\n").unwrap();
        let tree = directory.path().canonicalize().unwrap().into_os_string().into_encoded_bytes();
        let (source, found) = Source::start(Compression::Never, READERS, false).unwrap();
        source.capture(Capture { shared: vec![b"/".to_vec()], ..Capture::default() });
        (directory, tree, source, found)
    }

    /// A reader that still looks would say again what changes.
    pub(super) fn wait_until_no_reader_looks(source: &Source) {
        while source.state().is_looking() {
            thread::yield_now();
        }
    }

    pub(super) fn next(found: &Receiver<Finding>) -> String {
        match found.recv_blocking().unwrap().record {
            Record::File { content, .. } => format!("{content:?}"),
            Record::Chunk { len, .. } => format!("{len} bytes"),
            Record::Complete { .. } => "complete".into(),
            Record::Dir { .. } => "directory".into(),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn content_is_read_when_it_is_asked_for_and_once() {
        let (_directory, tree, source, found) = started();
        let path = [tree.as_slice(), b"/m.py"].concat();
        source.want(path.clone(), Need::Attributes);
        assert_eq!(next(&found), "OnOpen");
        source.want(path.clone(), Need::Content);
        assert_eq!([(); 3].map(|()| next(&found)), ["Log(0)", "13 bytes", "complete"]);
        source.want(path.clone(), Need::Content);
        source.want(path, Need::Attributes);
        source.want(tree, Need::Attributes);
        assert_eq!(next(&found), "directory", "nothing is said twice");
    }

    #[test]
    fn what_is_read_ahead_of_questions_answers_them() {
        let (_directory, tree, source, found) = started();
        source.prefetch(|prefetch| prefetch.add_search(&tree));
        source.want([tree.as_slice(), b"/m.py"].concat(), Need::Content);
        let mut complete = 0;
        while complete < 2 {
            complete += u32::from(next(&found) == "complete");
        }
        source.want([tree.as_slice(), b"/other.py"].concat(), Need::Content);
        source.want(b"/".to_vec(), Need::Attributes);
        assert_eq!(next(&found), "directory");
        assert_eq!(source.counters.files.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn what_is_too_large_for_a_record_is_not_listed() {
        let (_directory, tree, source, found) = started();
        let stat = rustix::fs::stat(&*tree).unwrap();
        let names = |count: usize| -> Names { (0..count).map(|n| (format!("{n:0150}").into(), kind::REG)).collect() };
        for count in [1, 1_000] {
            let names = names(count);
            let kinds = names.iter().map(|(name, kind)| Name { name: name.as_bytes().to_vec(), kind: *kind }).collect();
            let record = Record::Dir { path: tree.clone(), attr: attr(&stat), names: kinds };
            let encoded = rkyv::to_bytes::<rkyv::rancor::Error>(&record).unwrap().len();
            assert!(encoded <= listing_size(&tree, &names), "{count} names need {encoded} bytes");
        }
        source.list(&tree, &stat, &names(250_000));
        assert!(next(&found).starts_with("Absent"));
    }

    #[test]
    fn what_is_excluded_is_not_read_ahead() {
        let (_directory, tree, source, found) = started();
        source.capture(Capture { excludes: vec![b"other.py".to_vec()], ..Capture::default() });
        source.prefetch(|prefetch| prefetch.add_search(&tree));
        source.want([tree.as_slice(), b"/m.py"].concat(), Need::Content);
        assert!(std::iter::repeat_with(|| next(&found)).take(5).any(|record| record.starts_with("Absent")));
        assert_eq!(source.counters.files.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn what_is_mounted_within_a_captured_directory_is_not_read_ahead() {
        let (directory, tree, source, found) = started();
        source.capture.write().unwrap().shared.clear();
        let device = rustix::fs::stat(directory.path()).unwrap().st_dev;
        source.state().devices.insert(device, false);
        let path = [tree.as_slice(), b"/other.py"].concat();
        source.queue.push_ahead([Work::Guess(Guess { path, need: Need::Content })].into_iter());
        assert!(next(&found).starts_with("Absent"));
        assert_eq!(source.counters.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_question_waits_for_no_content() {
        let (directory, tree, source, found) = started();
        // More than all readers could be busy with, while the log takes nothing.
        for name in 0..CHUNKS + 2 * READERS {
            std::fs::write(directory.path().join(format!("{name}.so")), "x").unwrap();
            source.want([&tree, format!("/{name}.so").as_bytes()].concat(), Need::Content);
        }
        while source.counters.bytes.load(Ordering::Relaxed) < (CHUNKS + CONTENT_READERS) as u64 {
            thread::yield_now();
        }
        source.want(tree, Need::Attributes);
        let findings = std::iter::repeat_with(|| found.recv_blocking().unwrap());
        let before: Vec<_> = findings.take_while(|finding| !matches!(finding.record, Record::Dir { .. })).collect();
        assert_eq!(before.iter().filter(|finding| !finding.body.is_empty()).count(), CHUNKS);
    }

    #[test]
    fn a_guess_that_would_cost_too_much_is_not_read_until_somebody_asks() {
        let (directory, tree, source, found) = started();
        let path = [tree.as_slice(), b"/other.py"].concat();
        let size = std::fs::metadata(directory.path().join("other.py")).unwrap().len();
        source.guessed.store(GUESSED_MAX - size + 1, Ordering::Relaxed);
        source.queue.push_ahead([Work::Guess(Guess { path: path.clone(), need: Need::Content })].into_iter());
        assert_eq!(next(&found), "OnOpen");
        source.want(path, Need::Content);
        assert_eq!([(); 3].map(|()| next(&found)), ["Log(0)", "6 bytes", "complete"]);
    }
}
