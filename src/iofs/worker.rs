//! `hpcrt ioworker`: writes what the programs of a job on this node left in shared memory, each program's in its order. It depends on nobody's
//! life but its own: programs may be killed at any moment, and another worker goes on where this one was.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::files::{Work, Worked};
use crate::sys::extents::{Log, NOBODY, Piece, RING, RUN, inode};
use crate::sys::extents_map::{Extents, wait, wake};

/// What is pending is written when it has been seen twice, this long after each other: within 50 ms.
const LOOK: Duration = Duration::from_millis(15);
/// Without an agent the rest is written within this time, or not.
const ORPHANED: Duration = Duration::from_secs(60);
const EIO: i32 = 5;

/// What the agent told.
#[derive(Debug, Default)]
struct Told {
    files: BTreeMap<(u32, u32), Arc<OwnedFd>>,
    /// Segments that programs have; true: the program has ended.
    segments: BTreeMap<u32, bool>,
}

#[derive(Debug)]
struct Worker {
    extents: Extents,
    agent: Seqpacket,
    told: Mutex<Told>,
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
        ready: AtomicBool::new(false),
        finish: AtomicBool::new(false),
        orphan: AtomicBool::new(false),
    });
    let hearing = Arc::clone(&worker);
    thread::Builder::new().name("agent".to_owned()).spawn(move || hearing.hear()).op("hear the agent")?;
    worker.work();
    Ok(0)
}

impl Worker {
    fn told(&self) -> MutexGuard<'_, Told> {
        // Nothing in here is left half done.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self) {
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
    fn done(&self) {
        let done = &self.extents.head().done;
        done.fetch_add(1, Ordering::SeqCst);
        wake(done);
    }

    fn obey(&self, word: Work, fds: Vec<OwnedFd>) {
        let set_known = |segment, file: u32, known| {
            let log = self.extents.log(segment);
            if let Some(file) = log.as_ref().and_then(|log| log.segment.files.get(file as usize)) {
                file.known.store(known, Ordering::SeqCst);
            }
        };
        match word {
            Work::Memory => {}
            Work::Begin { segment } => _ = self.told().segments.insert(segment, false),
            Work::File { segment, file } => {
                if let Some(fd) = fds.into_iter().next() {
                    self.told().files.insert((segment, file), Arc::new(fd));
                    set_known(segment, file, 1);
                }
            }
            Work::Drop { segment, file } => {
                let dropped = self.told().files.remove(&(segment, file));
                // Its last writes are done, so nobody else holds it for long.
                while dropped.as_ref().is_some_and(|file| Arc::strong_count(file) > 1) {
                    thread::yield_now();
                }
                drop(dropped);
                set_known(segment, file, 0);
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

    fn work(&self) {
        let mut waiting = BTreeMap::new();
        let mut alone = None;
        loop {
            let seen = self.extents.head().bell.load(Ordering::SeqCst);
            if !self.ready.load(Ordering::SeqCst) {
                if self.orphan.load(Ordering::SeqCst) {
                    return;
                }
                wait(&self.extents.head().bell, seen, LOOK);
                continue;
            }
            let ends = self.finish.load(Ordering::SeqCst) || self.orphan.load(Ordering::SeqCst);
            let segments: Vec<_> = self.told().segments.iter().map(|(segment, over)| (*segment, *over)).collect();
            let mut left = BTreeSet::new();
            for (segment, over) in segments {
                if self.visit(segment, over || ends, over, &mut waiting) {
                    left.insert(segment);
                }
            }
            if ends && left.is_empty() {
                let _ = self.agent.send(&Worked::Finished, &[]);
                return;
            }
            if self.orphan.load(Ordering::SeqCst) && alone.get_or_insert_with(Instant::now).elapsed() > ORPHANED {
                return;
            }
            wait(&self.extents.head().bell, seen, LOOK);
        }
    }

    /// Writes what is due of one program; true: something is left. `waiting`: since when something is pending, by segment.
    fn visit(&self, segment: u32, at_once: bool, over: bool, waiting: &mut BTreeMap<u32, Instant>) -> bool {
        let Some(log) = self.extents.log(segment) else { return false };
        let mut budget = RING;
        while budget > 0 {
            let pending = log.pending();
            if pending == 0 {
                waiting.remove(&segment);
                break;
            }
            let wanted = log.segment.wanted.load(Ordering::SeqCst) > log.segment.upto.load(Ordering::SeqCst);
            let old = waiting.get(&segment).is_some_and(|since| since.elapsed() >= LOOK);
            if !(at_once || wanted || old || pending >= RUN) {
                waiting.entry(segment).or_insert_with(Instant::now);
                break;
            }
            match log.next() {
                Ok(Some(piece)) => budget = budget.saturating_sub(self.write(segment, &log, &piece)),
                Ok(None) => break,
                Err(_) => {
                    let tail = log.now().tail;
                    self.lose(segment, &log, NOBODY, EIO);
                    log.segment.upto.store(tail, Ordering::SeqCst);
                    self.done();
                    break;
                }
            }
        }
        let left = log.pending() > 0;
        if over && !left {
            self.close(segment, &log);
        }
        left
    }

    /// Returns the bytes that are done with.
    fn write(&self, segment: u32, log: &Log<'_>, piece: &Piece) -> u64 {
        let state = log.segment.files.get(piece.file as usize);
        let failed = state.is_some_and(|file| file.error.load(Ordering::SeqCst) != 0);
        let fd = self.told().files.get(&(segment, piece.file)).cloned();
        let written = match fd.filter(|_| !failed) {
            None if failed => piece.len,
            None => {
                self.lose(segment, log, piece.file, EIO);
                piece.len
            }
            Some(fd) => self.extents.write(log, piece, fd.as_fd()).unwrap_or_else(|error| {
                self.lose(segment, log, piece.file, error.raw_os_error().unwrap_or(EIO));
                piece.len
            }),
        };
        log.advance(written);
        self.done();
        written
    }

    /// A file's writes fail from here on, until the program has been told.
    fn lose(&self, segment: u32, log: &Log<'_>, file: u32, errno: i32) {
        let all = log.segment.files.iter().enumerate();
        for (_, state) in all.filter(|(nth, _)| file == NOBODY || *nth == file as usize) {
            let _ = state.error.compare_exchange(0, errno.cast_unsigned(), Ordering::SeqCst, Ordering::SeqCst);
        }
        let _ = self.agent.send(&Worked::Lost { segment, file, errno }, &[]);
    }

    /// A program has ended, and everything of it is written.
    fn close(&self, segment: u32, log: &Log<'_>) {
        for inode in &self.extents.head().inodes {
            if inode.state.load(Ordering::SeqCst) != inode::FREE && inode.owner.load(Ordering::SeqCst) == segment {
                inode.owner.store(NOBODY, Ordering::SeqCst);
            }
        }
        let mut told = self.told();
        told.segments.remove(&segment);
        told.files.retain(|(of, _), _| *of != segment);
        drop(told);
        log.reset();
        let _ = self.agent.send(&Worked::Drained { segment }, &[]);
    }
}
