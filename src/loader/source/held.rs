//! What only those get who ask: read once like everything else, held in memory, and announced in the log without its content.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use async_channel::{Receiver, Sender, unbounded};

use super::{Source, Why};
use crate::loader::chunk;
use crate::loader::grace::Grace;
use crate::loader::shelf::Shelf;
use crate::net::wire::record::{Codec, FileId, PIECE, Piece, Record, Supply};
use crate::sys::memory;
use rustix::io::Errno;

/// See the module.
#[derive(Debug)]
pub(super) struct Held {
    shelf: Shelf,
    /// Pieces that have come to the shelf.
    fresh: (Sender<Piece>, Receiver<Piece>),
    /// What those who asked for a file asked for after it: as it was the first time.
    follows: Mutex<HashMap<FileId, FileId>>,
    /// Jobs, and files that are superseded: those that ran then may still have them open, on any host.
    grace: Mutex<Grace<FileId>>,
}

/// A job that runs. What is superseded meanwhile is held until it is over.
#[derive(Debug)]
pub struct Run {
    source: Arc<Source>,
    number: u64,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.source.give_up(|jobs| jobs.end(self.number));
    }
}

impl Held {
    pub(super) fn new() -> Held {
        let (follows, grace) = Default::default();
        Held { shelf: Shelf::new(memory::for_files()), fresh: unbounded(), follows, grace }
    }

    /// Adds the next bytes of a file.
    pub(super) fn add(&self, file: FileId, bytes: &[u8]) -> io::Result<()> {
        let here = self.shelf.add(file, bytes)?;
        let index = |offset: u64| u32::try_from(offset / PIECE).unwrap_or(u32::MAX);
        // They begin with a piece.
        for index in index(here - bytes.len() as u64)..index(here + PIECE - 1) {
            let _ = self.fresh.0.try_send(Piece { file, index });
        }
        Ok(())
    }

    pub(super) fn remove(&self, file: FileId) {
        self.shelf.remove(file);
        self.follows.lock().unwrap_or_else(PoisonError::into_inner).remove(&file);
    }
}

impl Source {
    /// Where files go that are not sent to all; `why` they are read.
    pub(super) fn withholds(&self, why: Why) -> Option<&Held> {
        self.held.as_ref().filter(|_| why != Why::Closure)
    }

    /// Where the content of this file is held, if it is.
    pub(super) fn held(&self, file: FileId) -> Option<&Held> {
        self.held.as_ref().filter(|held| held.shelf.holds(file))
    }

    /// How the content of a file comes to the nodes.
    pub(super) fn supply(&self, file: FileId) -> Supply {
        if self.holds(file) { Supply::Held(file) } else { Supply::Log(file) }
    }

    /// Sets a place aside for a file; false if there is none.
    pub(super) fn hold(&self, held: &Held, file: FileId, size: u64) -> bool {
        let room = held.shelf.has_room(size);
        if room {
            held.shelf.begin(file, size);
        }
        room
    }

    /// A job begins.
    pub fn run(self: &Arc<Self>) -> Run {
        Run { source: Arc::clone(self), number: self.give_up(Grace::begin).unwrap_or(0) }
    }

    /// A job begins or ends: files that are superseded and that no job may use any more are held no longer. `None`: none is held anyway.
    fn give_up<T>(&self, change: impl FnOnce(&mut Grace<FileId>) -> T) -> Option<T> {
        let superseded = std::mem::take(&mut self.state().superseded);
        let held = self.held.as_ref()?;
        let mut grace = held.grace.lock().unwrap_or_else(PoisonError::into_inner);
        superseded.into_iter().filter(|file| held.shelf.holds(*file)).for_each(|file| grace.retire(file));
        let changed = change(&mut grace);
        let unused: Vec<FileId> = std::iter::from_fn(|| grace.poll()).collect();
        for file in unused {
            if held.shelf.is_whole(file) {
                held.remove(file);
                // For those on whose way to somebody it was.
                self.find(Record::Void { file, errno: Errno::STALE.raw_os_error() }, Vec::new());
            } else if held.shelf.holds(file) {
                // It is being read.
                grace.retire(file);
            }
        }
        Some(changed)
    }

    /// Whether a file is held, and its pieces are here or coming.
    pub fn holds(&self, file: FileId) -> bool {
        self.held(file).is_some()
    }

    /// Whether a piece can be had by [`Source::piece`].
    pub fn has(&self, piece: Piece) -> bool {
        self.held.as_ref().is_some_and(|held| held.shelf.has(piece))
    }

    /// A piece as it travels: its length, and how it is encoded.
    pub fn piece(&self, piece: Piece) -> Option<(u32, Codec, Vec<u8>)> {
        let mut raw = self.held.as_ref()?.shelf.read(piece)?;
        let len = u32::try_from(raw.len()).ok()?;
        let (codec, body) = chunk::encode(&mut raw, self.compress.load(Ordering::Relaxed));
        Some((len, codec, body))
    }

    /// The next piece that can be had from now on. `None`: nothing is held in this session.
    pub async fn fresh(&self) -> Option<Piece> {
        self.held.as_ref()?.fresh.1.recv().await.ok()
    }

    /// Somebody needed `next` after `file`: from now on who needs `file` may have it before he asks.
    pub fn followed(&self, file: FileId, next: FileId) {
        let Some(held) = &self.held else { return };
        let mut follows = held.follows.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Entry::Vacant(vacant), true) = (follows.entry(file), held.shelf.holds(file) && held.shelf.holds(next)) {
            vacant.insert(next);
            self.find(Record::Follows { file, next }, Vec::new());
        }
    }
}
