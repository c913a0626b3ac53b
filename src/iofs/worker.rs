//! `hpcrt ioworker`: writes what the programs of a job on this node left in shared memory, each program's in its order and each file's in that of
//! all programs. It depends on nobody's life but its own: programs may be killed at any moment, and another worker goes on where this one was.
//! Every file system has a thread of its own, so that a slow one delays no other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use rustix::fs::{Advice, SeekFrom, fadvise};

use super::forward::{Away, Hosts};
use super::queue::{Due, Queue, advance};
use crate::error::{Context, Error, Result};
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::files::{Work, Worked};
use crate::net::wire::forward::Name;
use crate::sys::extents::{self, APPEND, KNOWN, Log, NOBODY, NONE, NOT_TAKEN, RUN, SLOW};
use crate::sys::extents_map::{Extents, wait, wake};
use crate::sys::process;

/// What is pending is written when it has been seen twice, this long after each other: within 50 ms.
const LOOK: Duration = Duration::from_millis(15);
/// Without an agent the rest is written within this time, or not.
const ORPHANED: Duration = Duration::from_secs(60);
const EIO: i32 = 5;
/// Shorter pieces say nothing about how fast a file system is.
const TELLING: u64 = 64 << 10;
/// Memory of a log is given back when nothing has been pending for so long; when memory is short, at once.
const IDLE: Duration = Duration::from_secs(60);
/// How often it is asked how much memory is free.
const ASKED: Duration = Duration::from_secs(1);
/// Written of one program before the next one's turn.
const TURN: u64 = 64 << 20;
/// Where a piece is looked for that a worker before this one may have appended.
const LOOKED_AT: u64 = 64 << 20;

/// What the agent told.
#[derive(Debug, Default)]
struct Told {
    files: BTreeMap<(u32, u32), Arc<OwnedFd>>,
    /// Segments that programs have; true: the program has ended.
    segments: BTreeMap<u32, bool>,
    /// Files that are being closed, to be forgotten then.
    closing: BTreeSet<Name>,
    /// Files that their queues are to forget, where other hosts write.
    dropped: BTreeSet<Name>,
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) extents: Extents,
    agent: Seqpacket,
    told: Mutex<Told>,
    /// Who writes in its stead.
    hosts: OnceLock<Arc<Hosts>>,
    /// It has been told all that an earlier worker knew: before that files may be missing.
    ready: AtomicBool,
    finish: AtomicBool,
    /// The agent is gone.
    orphan: AtomicBool,
}

/// Runs the mode: the agent's socket is standard input.
///
/// # Errors
/// The agent says something else, or there is no room for the memory.
pub fn run() -> Result<u8> {
    // One for each file that is kept.
    process::raise_nofile();
    let agent = Seqpacket::from_fd(rustix::stdio::stdin().as_fd().try_clone_to_owned().op("hear the agent")?);
    let Some((Work::Memory, fds)) = agent.receive().op("hear the agent")? else {
        return Err(Error::new("hear the agent", "it says something else"));
    };
    let [memory] = &fds[..] else { return Err(Error::new("hear the agent", "it gives no memory")) };
    let extents = Extents::map(memory).op("map the memory of programs")?;
    let worker = Arc::new(Worker {
        extents,
        agent,
        told: Mutex::default(),
        hosts: OnceLock::new(),
        ready: AtomicBool::new(false),
        finish: AtomicBool::new(false),
        orphan: AtomicBool::new(false),
    });
    let hearing = Arc::clone(&worker);
    thread::Builder::new().name("agent".to_owned()).spawn(move || hearing.hear()).op("hear the agent")?;
    worker.work();
    Ok(0)
}

/// How often this thread has given the processor away.
fn waits() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.voluntary_context_switches())
}

impl Worker {
    fn told(&self) -> MutexGuard<'_, Told> {
        // Nothing in here is left half done.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(self: &Arc<Self>) {
        while let Ok(Some((word, fds))) = self.agent.receive::<Work>() {
            self.obey(word, fds);
            self.ring();
        }
        self.orphan.store(true, Ordering::SeqCst);
        self.ring();
    }

    fn ring(&self) {
        let bell = &self.extents.head().bell;
        bell.fetch_add(1, Ordering::SeqCst);
        wake(bell);
    }

    /// Something that programs may wait for has happened.
    pub(super) fn done(&self) {
        let done = &self.extents.head().done;
        done.fetch_add(1, Ordering::SeqCst);
        wake(done);
    }

    fn obey(self: &Arc<Self>, word: Work, fds: Vec<OwnedFd>) {
        let set_known = |segment, file, known| self.set_known((segment, file), known);
        match word {
            Work::Memory => {}
            Work::Forward { node, forward } => _ = self.hosts.set(Arc::new(Hosts::new(node, forward))),
            Work::Begin { segment } => {
                self.told().segments.insert(segment, false);
                self.extents.log(segment).iter().for_each(Log::not_giving);
            }
            Work::File { segment, file } => {
                match fds.into_iter().next() {
                    Some(fd) => {
                        let mut told = self.told();
                        told.closing.remove(&(segment, file));
                        told.files.insert((segment, file), Arc::new(fd));
                        set_known(segment, file, KNOWN);
                    }
                    // There is no room for it among ours.
                    None => set_known(segment, file, NOT_TAKEN),
                }
            }
            Work::Drop { segment, file } => {
                let mut told = self.told();
                told.closing.insert((segment, file));
                let (dropped, worker) = (told.files.remove(&(segment, file)), Arc::clone(self));
                smol::unblock(move || worker.close((segment, file), dropped)).detach();
            }
            Work::Over { segment } => _ = self.told().segments.insert(segment, true),
            Work::Known => {
                let told = self.told();
                for segment in told.segments.keys() {
                    let files = self.extents.log(*segment).map_or(0, |log| log.segment.files.len());
                    for file in (0..files).filter_map(|file| u32::try_from(file).ok()) {
                        set_known(*segment, file, u32::from(told.files.contains_key(&(*segment, file))));
                    }
                }
                self.ready.store(true, Ordering::SeqCst);
            }
            Work::Finish => self.finish.store(true, Ordering::SeqCst),
        }
        self.done();
    }

    /// Closes an open file and forgets it. That may take as long as the file system does to write what others wrote to the file.
    fn close(&self, name: Name, file: Option<Arc<OwnedFd>>) {
        // Its last writes are done, so nobody else holds it for long.
        while file.as_ref().is_some_and(|file| Arc::strong_count(file) > 1) {
            thread::yield_now();
        }
        let was_taken = file.is_some();
        drop(file);
        let mut told = self.told();
        // Else its program has ended, and another one may have the segment.
        if told.closing.remove(&name) {
            // Who has it open elsewhere closes it first.
            match self.hosts.get() {
                Some(_) if was_taken => _ = told.dropped.insert(name),
                _ => self.set_known(name, 0),
            }
        }
        drop(told);
        self.done();
        self.ring();
    }

    fn set_known(&self, (segment, file): Name, known: u32) {
        let log = self.extents.log(segment);
        if let Some(file) = log.as_ref().and_then(|log| log.segment.files.get(file as usize)) {
            file.known.store(known, Ordering::SeqCst);
        }
    }

    /// Files of a file system that are to be forgotten; then each is.
    pub(super) fn dropped(&self, device: u64) -> Vec<Name> {
        self.told().dropped.extract_if(.., |(segment, _)| self.device(*segment) == Some(device)).collect()
    }

    pub(super) fn forget(&self, name: Name) {
        self.set_known(name, 0);
        self.done();
    }

    pub(super) fn file(&self, name: Name) -> Option<Arc<OwnedFd>> {
        self.told().files.get(&name).cloned()
    }

    /// Tells the agent, if there is one.
    pub(super) fn tell(&self, word: &Worked) {
        let _ = self.agent.send(word, &[]);
    }

    fn ends(&self) -> bool {
        self.finish.load(Ordering::SeqCst) || self.orphan.load(Ordering::SeqCst)
    }

    /// Has every file system's thread write, and returns when they have ended.
    fn work(self: &Arc<Self>) {
        let mut queues: BTreeMap<u64, Option<JoinHandle<()>>> = BTreeMap::new();
        loop {
            let seen = self.extents.head().bell.load(Ordering::SeqCst);
            let ends = self.ends();
            if self.ready.load(Ordering::SeqCst) {
                let segments: Vec<_> = self.told().segments.iter().map(|(segment, over)| (*segment, *over)).collect();
                // A program that kept nothing is nobody's.
                let unused =
                    |(segment, over): &(u32, bool)| (*over && self.device(*segment).is_none()).then_some(*segment);
                for segment in segments.iter().filter_map(unused) {
                    self.extents.log(segment).iter().for_each(|log| self.end(segment, log));
                }
                for device in segments.into_iter().filter_map(|(segment, _)| self.device(segment)) {
                    queues.entry(device).or_insert_with(|| {
                        let worker = Arc::clone(self);
                        let queue = thread::Builder::new().name(format!("device {device:x}"));
                        queue.spawn(move || worker.serve(device)).ok()
                    });
                }
                // What could not be begun is tried again.
                queues.retain(|_, queue| queue.is_some());
            } else if self.orphan.load(Ordering::SeqCst) {
                return;
            }
            if ends && self.ready.load(Ordering::SeqCst) {
                queues.into_values().flatten().for_each(|queue| _ = queue.join());
                if !self.orphan.load(Ordering::SeqCst) {
                    let _ = self.agent.send(&Worked::Finished, &[]);
                }
                return;
            }
            wait(&self.extents.head().bell, seen, LOOK);
        }
    }

    fn device(&self, segment: u32) -> Option<u64> {
        let device = self.extents.log(segment).map(|log| log.segment.device.load(Ordering::SeqCst));
        device.filter(|device| *device != NONE)
    }

    /// Writes all that goes to one file system.
    fn serve(&self, device: u64) {
        let away = self.hosts.get().map(|hosts| Away::new(hosts, device));
        let mut queue = Queue::new(device, away);
        let mut alone = None;
        loop {
            let seen = self.extents.head().bell.load(Ordering::SeqCst);
            let ends = self.ends();
            self.limit(&mut queue);
            let mut segments: Vec<_> = self.told().segments.iter().map(|(segment, over)| (*segment, *over)).collect();
            segments.retain(|(segment, _)| self.device(*segment) == Some(queue.device));
            for (segment, over) in &segments {
                self.visit(*segment, *over || ends, &mut queue);
            }
            if let Some(away) = &mut queue.away {
                away.drain(self);
                away.attend(self);
            }
            let mut left = false;
            for (segment, over) in segments {
                let Some(log) = self.extents.log(segment) else { continue };
                let pending = log.pending() > 0;
                left |= pending;
                if over && !pending {
                    queue.away.iter_mut().for_each(|away| away.end(self, segment));
                    queue.forget(segment);
                    self.end(segment, &log);
                }
            }
            if ends && !left {
                return;
            }
            if self.orphan.load(Ordering::SeqCst) && alone.get_or_insert_with(Instant::now).elapsed() > ORPHANED {
                return;
            }
            wait(&self.extents.head().bell, seen, LOOK);
        }
    }

    /// Writes what is due of one program.
    fn visit(&self, segment: u32, at_once: bool, queue: &mut Queue) {
        let Some(log) = self.extents.log(segment) else { return };
        let mut budget = TURN;
        while budget > 0 {
            let (mut run, position) = queue.from(segment, &log);
            let pending = log.pending_behind(position);
            if pending == 0 {
                queue.waiting.remove(&segment);
                let _ = log.next();
                self.give_back(segment, &log, queue);
                break;
            }
            let wanted = log.segment.wanted.load(Ordering::SeqCst) > position;
            let old = queue.waiting.get(&segment).is_some_and(|since| since.elapsed() >= LOOK);
            if !(at_once || wanted || old || pending >= RUN) {
                queue.waiting.entry(segment).or_insert_with(Instant::now);
                break;
            }
            queue.idle.remove(&segment);
            // The log hears that the worker is at this one: what is before it in the ring is free.
            let next = if queue.away.is_some() { log.after(&mut run, position) } else { log.next() };
            match next {
                Ok(Some(piece)) => {
                    let first = queue.first(&self.extents, (segment, piece));
                    let mut pieces = queue.gather(&self.extents, first);
                    let written = match &mut queue.away {
                        Some(away) => away.write(self, &mut pieces),
                        None => self.write(&pieces),
                    };
                    budget = budget.saturating_sub(written);
                }
                Ok(None) => break,
                Err(_) => {
                    let tail = log.now().tail;
                    self.lose(segment, &log, EIO);
                    log.segment.upto.store(tail, Ordering::SeqCst);
                    self.done();
                    break;
                }
            }
        }
    }

    /// Nothing of a log is pending.
    fn give_back(&self, segment: u32, log: &Log<'_>, queue: &mut Queue) {
        let idle = queue.idle.entry(segment).or_insert_with(|| Some(Instant::now()));
        let short = self.extents.head().limit.load(Ordering::Relaxed) < self.extents.ring() / 2;
        if idle.is_some_and(|since| short || since.elapsed() >= IDLE) && self.extents.give_back(log) {
            *idle = None;
        }
    }

    /// Has programs keep no more than there is memory for.
    fn limit(&self, queue: &mut Queue) {
        let pending = |segment: &u32| self.extents.log(*segment).map_or(0, |log| log.pending());
        if queue.asked.elapsed() >= ASKED {
            let logs: Vec<_> = self.told().segments.keys().map(pending).collect();
            let (pending, logs) = (logs.iter().sum(), u32::try_from(logs.len()).unwrap_or(u32::MAX));
            if pending > 0 || queue.idle.values().any(Option::is_some) {
                self.extents.limit(pending, logs);
            }
            queue.asked = Instant::now();
        }
    }

    /// Writes pieces that go on where the one before ends. Returns the bytes that are done with.
    pub(super) fn write(&self, pieces: &[Due]) -> u64 {
        let Some(&(segment, ref piece)) = pieces.first() else { return 0 };
        let Some(log) = &self.extents.log(segment) else { return 0 };
        let state = log.segment.files.get(piece.file as usize);
        let failed = state.is_some_and(|file| file.error.load(Ordering::SeqCst) != 0);
        let fd = self.file((segment, piece.file));
        let lost = |errno: i32| {
            self.fail((segment, piece.file), piece.inode as usize, errno);
            piece.len
        };
        let (begun, waited) = (Instant::now(), waits());
        let written = match fd.filter(|_| !failed) {
            None if failed => piece.len,
            None => lost(EIO),
            Some(fd) => {
                let written = match piece.offset {
                    APPEND => self.append(pieces, &fd),
                    _ if pieces.len() > 1 => self.extents.write_all(pieces, fd.as_fd()),
                    _ => self.extents.write(log, piece, fd.as_fd()),
                };
                written.unwrap_or_else(|error| lost(error.raw_os_error().unwrap_or(EIO)))
            }
        };
        if written >= TELLING {
            let pace = u32::try_from(begun.elapsed().as_nanos() as u64 * 1024 / written).unwrap_or(u32::MAX).max(1);
            // Unless it waited, others had the processor.
            let pace = if waits() == waited { pace.min(SLOW) } else { pace };
            let before = log.segment.pace.load(Ordering::Relaxed);
            log.segment.pace.store(if before == 0 { pace } else { before / 4 * 3 + pace / 4 }, Ordering::Relaxed);
        }
        log.segment.pieces.fetch_add(1, Ordering::Relaxed);
        // Who finds nothing pending any more finds that something was done.
        self.extents.head().done.fetch_add(1, Ordering::SeqCst);
        advance(&self.extents, pieces, written);
        self.done();
        written
    }

    /// Writes pieces at their file's end, wherever that is for the file system, unless a worker before this one has.
    fn append(&self, pieces: &[Due], fd: &OwnedFd) -> io::Result<u64> {
        let (first, piece) = pieces[0];
        let log = self.extents.log(first).ok_or(io::ErrorKind::NotFound)?;
        let segment = log.segment;
        let offset = rustix::fs::tell(fd)?;
        // In an ordinary user's view the kernel lets this process write, and tells it no more than where the end is: by going there, as appending does.
        let (size, at) = match rustix::fs::fstat(fd) {
            Ok(stat) => (u64::try_from(stat.st_size).unwrap_or(0), offset),
            Err(_) => rustix::fs::seek(fd, SeekFrom::End(0)).map(|end| (end, end))?,
        };
        if segment.appends.load(Ordering::SeqCst) == piece.position + 1 {
            let before = segment.append_size.load(Ordering::SeqCst);
            // What is appended moves the open file's offset behind it: almost always to another place.
            let total: u64 = pieces.iter().map(|(_, piece)| piece.len).sum();
            let moved = offset != segment.append_offset.load(Ordering::SeqCst)
                || (before + 1..=before + total).contains(&offset);
            let done = if moved { self.appended(pieces, fd, before, size) } else { 0 };
            if done > 0 {
                return Ok(done);
            }
        }
        log.note_append(piece.position, size, at);
        self.extents.append(pieces, fd.as_fd())
    }

    /// How much of pieces is in the file from where it ended before, one behind the other: all of each behind what others appended meanwhile, or the
    /// beginning of the last.
    pub(super) fn appended(&self, pieces: &[Due], fd: &OwnedFd, mut before: u64, size: u64) -> u64 {
        // Theirs may be open to write only.
        let file = File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        let mut done = 0;
        for next @ (_, piece) in pieces {
            let left = size.saturating_sub(before);
            let len = left.min(piece.len);
            let bytes = self.extents.gathered(&[*next]);
            // Neither from what this host's kernel had before others appended, nor left there for who reads after they have again.
            let read = |most: u64| {
                let mut there = vec![0; usize::try_from(left.min(most)).unwrap_or(0)];
                let file = file.as_ref().ok()?;
                let _ = fadvise(file, 0, None, Advice::DontNeed);
                let read = file.read_exact_at(&mut there, before);
                let _ = fadvise(file, 0, None, Advice::DontNeed);
                read.ok().map(|()| there)
            };
            // Whether it can be read or not.
            let begins = read(len).is_none_or(|there| bytes.starts_with(&there));
            let behind = || memchr::memmem::find(&read(LOOKED_AT)?, &bytes).map(|at| at as u64 + piece.len);
            let found = if begins { len } else { behind().unwrap_or(0) };
            (done, before) = (done + found.min(piece.len), before + found);
            if found < piece.len {
                break;
            }
        }
        done
    }

    /// Something is missing in a file, and its writes fail from here on.
    pub(super) fn fail(&self, name: Name, place: usize, errno: i32) {
        self.extents.fail(name, place, errno);
        self.tell(&Worked::Lost { segment: name.0, file: name.1, errno });
    }

    /// Writes to all files of a program fail from here on, until it has been told.
    fn lose(&self, segment: u32, log: &Log<'_>, errno: i32) {
        for state in &log.segment.files {
            let _ = state.error.compare_exchange(0, errno.cast_unsigned(), Ordering::SeqCst, Ordering::SeqCst);
        }
        self.tell(&Worked::Lost { segment, file: NOBODY, errno });
    }

    /// A program has ended, and everything of it is written.
    fn end(&self, segment: u32, log: &Log<'_>) {
        let mut told = self.told();
        told.segments.remove(&segment);
        told.closing.retain(|(of, _)| *of != segment);
        told.dropped.retain(|(of, _)| *of != segment);
        let files: Vec<_> = told.files.extract_if((segment, 0)..=(segment, u32::MAX), |_, _| true).collect();
        drop(told);
        // Other queues do not wait for this one's file system.
        drop(files);
        let count = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let [writes, bytes, pieces] = [&log.segment.writes, &log.segment.bytes, &log.segment.pieces].map(count);
        let is_untold =
            |file: &extents::File| file.known.load(Ordering::SeqCst) == KNOWN && file.error.load(Ordering::SeqCst) != 0;
        let untold = log.segment.untold.load(Ordering::SeqCst) != 0 || log.segment.files.iter().any(is_untold);
        let _ = self.agent.send(&Worked::Drained { segment, writes, bytes, pieces, untold }, &[]);
    }
}
