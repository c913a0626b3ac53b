//! A node's part in fetching what the root holds for those who ask: what its own ranks need, and what nodes below ask for through it.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use async_channel::{Receiver, Sender, bounded};
use rustix::io::Errno;
use smol::Timer;
use smol::future::FutureExt;

use super::Node;
use super::replica::Replica;
use crate::error::Context;
use crate::launch::couriers::Pieces;
use crate::loader::catalog::Known;
use crate::loader::chunk;
use crate::net::link::{Body, Packet};
use crate::net::pull::{Pull, pieces};
use crate::net::wire::control::{NodeId, Report};
use crate::net::wire::record::{Attr, Codec, FileId, Piece, Record, Supply};

/// Files that are fetched before somebody needs them, at most, and their bytes together.
const AHEAD: usize = 4;
const AHEAD_BYTES: u64 = 64 << 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Pulls {
    files: RefCell<HashMap<FileId, Held>>,
    pull: RefCell<Pull<NodeId>>,
    /// What is needed after a file.
    follows: RefCell<HashMap<FileId, FileId>>,
    /// What a rank here needed last.
    last: Cell<Option<FileId>>,
    /// Bytes that came.
    bytes: Cell<u64>,
    /// There may be something to ask for.
    wake: (Sender<()>, Receiver<()>),
}

/// How much a node wants a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Want {
    No,
    Ahead,
    Now,
}

/// A file that the root holds.
#[derive(Debug)]
struct Held {
    path: Vec<u8>,
    attr: Attr,
    want: Want,
    /// It was begun in the store.
    begun: bool,
    /// Pieces that came, and how many of them are in the store.
    came: HashSet<u32>,
    stored: u32,
    complete: bool,
    /// How they came.
    codec: Codec,
}

impl Default for Pulls {
    fn default() -> Self {
        let (files, pull, follows, last, bytes) = Default::default();
        Pulls { files, pull, follows, last, bytes, wake: bounded(1) }
    }
}

impl Pulls {
    /// The log tells of a file.
    pub(super) fn hold(&self, file: FileId, path: &[u8], attr: &Attr) {
        self.files.borrow_mut().entry(file).or_insert_with(|| Held {
            path: path.to_vec(),
            attr: *attr,
            want: Want::No,
            begun: false,
            came: HashSet::new(),
            stored: 0,
            complete: false,
            codec: Codec::Raw,
        });
    }

    /// Whether the root holds a file, and it was not given up here.
    pub(super) fn knows(&self, file: FileId) -> bool {
        self.files.borrow().contains_key(&file)
    }

    /// Whether anybody waits for a piece of a file, here or below.
    pub(super) fn is_wanted(&self, file: FileId) -> bool {
        self.pull.borrow().is_wanted(file)
    }

    /// A file will not come, or is not needed any more. Whether the store knows nothing of it.
    pub(super) fn void(&self, file: FileId) -> bool {
        self.pull.borrow_mut().handle_void(file);
        self.follows.borrow_mut().remove(&file);
        self.files.borrow_mut().remove(&file).is_some_and(|held| !held.begun)
    }

    /// Notes what is needed after a file; false if that was known.
    pub(super) fn is_news(&self, file: FileId, next: FileId) -> bool {
        let mut follows = self.follows.borrow_mut();
        let is_news = !follows.contains_key(&file);
        if is_news {
            follows.insert(file, next);
        }
        is_news
    }

    /// Bytes that came because this node asked, for itself or for nodes below.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    fn ask(&self, who: NodeId, piece: Piece, ahead: bool) {
        self.pull.borrow_mut().handle_ask(who, piece, ahead);
        let _ = self.wake.0.try_send(());
    }
}

impl Replica {
    /// Asks for what is wanted, as the answers come.
    pub(super) async fn pull(self: Rc<Self>) {
        loop {
            let next = self.pulls.pull.borrow_mut().poll_ask(Instant::now());
            if let Some(piece) = next {
                let ask = Packet::new(&Report::Fetch { node: self.node, piece }, Vec::new());
                if self.parent.send(ask).await.is_err() {
                    return;
                }
                continue;
            }
            let again = self.pulls.pull.borrow().poll_timeout();
            let late = async {
                match again {
                    Some(at) => drop(Timer::at(at).await),
                    None => smol::future::pending().await,
                }
            };
            let woken = async {
                let _ = self.pulls.wake.1.recv().await;
            };
            woken.or(late).await;
        }
    }

    /// A rank here needs a file: it is fetched, and what was needed after it elsewhere.
    pub(super) async fn need(self: &Rc<Self>, file: FileId) {
        if !self.want(file, Want::Now) {
            return;
        }
        if let Some(before) = self.pulls.last.replace(Some(file))
            && self.pulls.is_news(before, file)
        {
            let _ = self.parent.send(Packet::new(&Report::Followed { file: before, next: file }, Vec::new())).await;
        }
        self.look_ahead(file);
    }

    /// The log tells that `next` is needed after `file`.
    pub(super) fn expect(self: &Rc<Self>, file: FileId, next: FileId) {
        self.pulls.follows.borrow_mut().insert(file, next);
        if self.pulls.last.get() == Some(file) {
            self.look_ahead(file);
        }
    }

    fn look_ahead(self: &Rc<Self>, file: FileId) {
        let (mut at, mut bytes) = (file, 0);
        for _ in 0..AHEAD {
            let next = self.pulls.follows.borrow().get(&at).copied();
            let size = next.and_then(|next| self.pulls.files.borrow().get(&next).map(|held| held.attr.size));
            let (Some(next), Some(size)) = (next, size) else { return };
            bytes += size;
            if bytes > AHEAD_BYTES {
                return;
            }
            self.want(next, Want::Ahead);
            at = next;
        }
    }

    /// Fetches a file, if nobody wanted it that much before; false if somebody did.
    fn want(self: &Rc<Self>, file: FileId, want: Want) -> bool {
        if !self.begin(file) {
            return false;
        }
        let missing: Vec<Piece> = {
            let mut files = self.pulls.files.borrow_mut();
            let Some(held) = files.get_mut(&file).filter(|held| held.want < want) else { return false };
            held.want = want;
            pieces(file, held.attr.size).filter(|piece| !held.came.contains(&piece.index)).collect()
        };
        missing.into_iter().for_each(|piece| self.pulls.ask(self.node, piece, want == Want::Ahead));
        self.complete(file);
        true
    }

    /// Begins a file in the store, if this is the first time; false if it cannot be kept there.
    fn begin(&self, file: FileId) -> bool {
        let attr = {
            let mut files = self.pulls.files.borrow_mut();
            let Some(held) = files.get_mut(&file) else { return false };
            if std::mem::replace(&mut held.begun, true) {
                return !self.lost.borrow().contains(&file);
            }
            self.coming.borrow_mut().insert(file, (held.path.clone(), held.attr.size));
            held.attr
        };
        // It was given up, and is named again: what views take for whole is not to be begun anew under them.
        let was_whole = self.catalog.read().unwrap_or_else(PoisonError::into_inner).is_complete(file);
        let stale = || Err(Errno::STALE).op("begin in the store");
        let made = if was_whole { stale() } else { self.store().create(file, &attr) };
        made.inspect_err(|error| self.lose(file, error)).is_ok()
    }

    /// The file is whole, if its last piece is in the store.
    fn complete(self: &Rc<Self>, file: FileId) {
        let mut files = self.pulls.files.borrow_mut();
        let whole = |held: &&mut Held| held.stored as usize == pieces(file, held.attr.size).count();
        let Some(held) = files.get_mut(&file).filter(whole) else { return };
        if std::mem::replace(&mut held.complete, true) {
            return;
        }
        // What has changed meanwhile is not bound into the views of jobs to come.
        let catalog = self.catalog.read().unwrap_or_else(PoisonError::into_inner);
        if !matches!(catalog.lookup(&held.path), Known::File { content: Supply::Held(known), .. } if known == file) {
            self.coming.borrow_mut().remove(&file);
        }
        drop((catalog, files));
        if let Err(error) = self.deliver(&Record::Complete { file }) {
            self.lose(file, &error);
        }
    }

    /// Takes a piece in that is not here yet; who waits for it below.
    async fn keep(self: &Rc<Self>, piece: Piece, len: u32, codec: Codec, body: Body) -> Vec<NodeId> {
        let Piece { file, index } = piece;
        {
            let mut files = self.pulls.files.borrow_mut();
            let awaited = |held: &&mut Held| held.begun && piece.len(held.attr.size) == Some(len);
            let Some(held) = files.get_mut(&file).filter(awaited) else { return Vec::new() };
            if !held.came.insert(index) {
                return Vec::new();
            }
            held.codec = codec;
        }
        let (store, size) = (Arc::clone(self.store()), body.len() as u64);
        let write = move || store.write_chunk(file, piece.offset(), &chunk::decode(codec, &body, len)?);
        if let Err(error) = smol::unblock(write).await {
            self.lose(file, &error);
            return Vec::new();
        }
        self.count(size);
        self.pulls.bytes.set(self.pulls.bytes.get() + size);
        // It may have become void meanwhile.
        match self.pulls.files.borrow_mut().get_mut(&file) {
            Some(held) => held.stored += 1,
            None => return Vec::new(),
        }
        self.learn(&Record::Chunk { file, offset: piece.offset(), len, codec });
        let waiting = self.pulls.pull.borrow_mut().handle_here(piece);
        let _ = self.pulls.wake.0.try_send(());
        self.complete(file);
        self.give_up(file);
        waiting
    }

    /// Whether a piece is in the store.
    fn has(&self, piece: Piece, len: u32) -> bool {
        let catalog = self.catalog.read().unwrap_or_else(PoisonError::into_inner);
        catalog.has_content(piece.file, piece.offset(), piece.offset() + u64::from(len)) == Some(true)
    }

    /// The length of a piece of a file that this node can keep.
    fn keeps(&self, piece: Piece) -> Option<u32> {
        if !self.begin(piece.file) {
            return None;
        }
        self.pulls.files.borrow().get(&piece.file).and_then(|held| piece.len(held.attr.size))
    }
}

impl Pieces for Replica {
    async fn piece(&self, piece: Piece) -> Option<(u32, Codec, Vec<u8>)> {
        let (codec, len) = {
            let files = self.pulls.files.borrow();
            let held = files.get(&piece.file)?;
            (held.codec, piece.len(held.attr.size)?)
        };
        let store = Arc::clone(self.store());
        let read = move || {
            let mut raw = vec![0; len as usize];
            let got = store.read_at(piece.file, piece.offset(), &mut raw).ok()?;
            let whole = got == raw.len();
            whole.then(|| chunk::encode(&mut raw, codec == Codec::Zstd))
        };
        let (codec, body) = smol::unblock(read).await?;
        Some((len, codec, body))
    }
}

impl Node {
    /// A node below asks for a piece. False: this node cannot keep it, somebody above has to answer.
    pub(super) fn hands_out(&self, to: NodeId, piece: Piece) -> bool {
        let replica = self.replica.borrow();
        let Some((replica, len)) = replica.as_ref().and_then(|r| Some((r, r.keeps(piece)?))) else { return false };
        if replica.has(piece, len) {
            self.couriers.send(replica, to, piece);
        } else {
            replica.pulls.ask(to, piece, false);
        }
        true
    }

    /// A piece that this node asked for.
    pub(super) fn take(self: &Rc<Self>, piece: Piece, len: u32, codec: Codec, body: &Body) {
        let Some(replica) = self.replica.borrow().clone() else { return };
        let (node, body) = (Rc::clone(self), Arc::clone(body));
        let keep = async move {
            for to in replica.keep(piece, len, codec, body).await {
                if to != node.id {
                    node.couriers.send(&replica, to, piece);
                }
            }
        };
        self.tasks.spawn(keep).detach();
    }
}
