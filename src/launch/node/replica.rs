//! A node's copy of the log: follows its upstream peers, writes contents to the store, tells the catalog and the views, and feeds others.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use async_channel::{Receiver, Sender, bounded, unbounded};
use rustix::io::Errno;
use smol::Timer;
use smol::future::FutureExt;

use super::Node;
use super::pull::Pulls;
use super::versions::{Images, Versions};
use crate::loader::audit::Audit;
use crate::loader::catalog::{Catalog, Effects, is_within, parent};
use crate::loader::chunk;
use crate::loader::store::Store;
use crate::loader::version::now;
use crate::loader::view::{DEADLINE, Identity, Setup, Siblings, Skeleton, Upcall};
use crate::net::ascent::Ascent;
use crate::net::auth::SessionKey;
use crate::net::link::{self, LinkError, Packet};
use crate::net::listen;
use crate::net::relay::Upstream;
use crate::net::replicate::{FeedsLog, Log, LogEntry, Rebuild};
use crate::net::single_flight::{Asked, SingleFlight};
use crate::net::topology::{Shape, Topology};
use crate::net::wire::control::{Feeder, Need, NodeId, Report};
use crate::net::wire::facts::Micros;
use crate::net::wire::hello::Purpose;
use crate::net::wire::log::LogFrame;
use crate::net::wire::record::{Codec, FileId, LoadId, Record, Supply};
use crate::{Error, Result};

/// The same question goes up again after this long; views repeat theirs less often.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// Pause between two rounds of attempts to find somebody who feeds us.
const RETRY: Duration = Duration::from_millis(200);
/// Whom a slow feeder sent away comes back to it after so long without anything new.
const HOME: Duration = Duration::from_secs(10);
/// Without anybody who feeds us for this long, jobs that wait for files fail.
const UNFED: Duration = Duration::from_secs(30);
/// First bytes of an ELF file.
const ELF: &[u8; 4] = b"\x7fELF";

/// Loads that are complete; they are numbered from 1 without gaps, and a session has one for each of its jobs.
#[derive(Debug, Default)]
struct Loads {
    /// All up to this one.
    last: LoadId,
    beyond: BTreeSet<LoadId>,
}

impl Loads {
    fn insert(&mut self, load: LoadId) {
        self.beyond.insert(load);
        while self.last.checked_add(1).is_some_and(|next| self.beyond.remove(&next)) {
            self.last += 1;
        }
    }

    fn contains(&self, load: LoadId) -> bool {
        load <= self.last || self.beyond.contains(&load)
    }
}

/// See the module.
pub(super) struct Replica {
    pub(super) node: NodeId,
    log: Rc<Log>,
    pub(super) catalog: Arc<RwLock<Catalog>>,
    store: Arc<Store>,
    identity: Identity,
    upcall: Arc<Questions>,
    views: RefCell<Vec<std::rc::Weak<Skeleton>>>,
    /// What the dynamic linkers of programs are told, where there are no views; or why that is not to be had.
    pub(super) audit: RefCell<Option<Result<Arc<Audit>, String>>>,
    siblings: Siblings,
    /// Files whose content is coming, by number.
    pub(super) coming: RefCell<HashMap<FileId, (Vec<u8>, u64)>>,
    /// Files that were begun in the store.
    announced: RefCell<HashSet<FileId>>,
    /// Files whose content this node has not all of: whoever wants them reads the originals.
    pub(super) lost: RefCell<HashSet<FileId>>,
    /// Complete ELF files: they are bound, not read through the view.
    pub(super) images: RefCell<Images>,
    pub(super) versions: Versions,
    open_questions: RefCell<SingleFlight<(Vec<u8>, Need), ()>>,
    preloaded: RefCell<Loads>,
    /// Why no content can be stored any more.
    broken: RefCell<Option<String>>,
    /// Closed, and replaced, when a load is complete or the replica broken: so everybody who waits hears of it.
    progress: RefCell<(Sender<()>, Receiver<()>)>,
    /// Bodies received, as they came over the network.
    bytes: Cell<u64>,
    /// When the first of them came.
    begun: Cell<Micros>,
    /// Paths that ranks here asked for before the log spoke of them.
    misses: Cell<u64>,
    /// Of [`Replica::bytes`] and [`Pulls::bytes`], what a job's end has told already.
    told: Cell<(u64, u64)>,
    pub(super) pulls: Pulls,
    /// When something was heard last of who feeds us, by stripe.
    fed: Vec<Cell<Instant>>,
    /// Of each stripe whether it comes down the control link.
    by_parent: [Cell<bool>; 2],
    pace: Cell<Pace>,
    /// The control link to the parent.
    pub(super) parent: Sender<Packet>,
}

/// How fast content comes to this node.
#[derive(Debug, Clone, Copy)]
enum Pace {
    Unknown,
    /// The first body came then, and so many bytes since.
    Timed(Instant, u64),
    /// The root has been told.
    Told,
}

/// The way from the view's threads to the node's task.
struct Questions(Sender<Question>);

/// What a view's thread says.
pub(super) enum Question {
    Want(Vec<u8>, Need),
    Fetch(FileId),
    Changed(Vec<u8>, Option<u8>),
}

impl Upcall for Questions {
    fn want(&self, path: &[u8], need: Need) {
        let _ = self.0.try_send(Question::Want(path.to_vec(), need));
    }

    fn fetch(&self, file: FileId) {
        let _ = self.0.try_send(Question::Fetch(file));
    }

    fn changed(&self, path: &[u8], exists: Option<u8>) {
        let _ = self.0.try_send(Question::Changed(path.to_vec(), exists));
    }
}

impl Replica {
    /// A replica with an empty log and this directory as its store. `sealed`: see [`Store::new`].
    pub(super) fn new(
        node: NodeId,
        (store, sealed): (OwnedFd, bool),
        two_trees: bool,
        mapped: bool,
        parent: Sender<Packet>,
    ) -> (Rc<Replica>, Receiver<Question>) {
        let (ask, questions) = unbounded();
        let replica = Replica {
            node,
            log: Log::new(false, if two_trees { 2 } else { 1 }),
            catalog: Arc::default(),
            store: Arc::new(Store::new(store, sealed)),
            identity: Identity::current(mapped),
            upcall: Arc::new(Questions(ask)),
            views: RefCell::default(),
            audit: RefCell::default(),
            siblings: Siblings::default(),
            coming: RefCell::default(),
            announced: RefCell::default(),
            lost: RefCell::default(),
            images: RefCell::default(),
            versions: Versions::default(),
            open_questions: RefCell::new(SingleFlight::new(ASK_AGAIN)),
            preloaded: RefCell::default(),
            broken: RefCell::default(),
            progress: RefCell::new(bounded(1)),
            bytes: Cell::new(0),
            begun: Cell::new(0),
            misses: Cell::new(0),
            told: Cell::default(),
            pulls: Pulls::default(),
            fed: vec![Cell::new(Instant::now()); if two_trees { 2 } else { 1 }],
            by_parent: Default::default(),
            pace: Cell::new(Pace::Unknown),
            parent,
        };
        (Rc::new(replica), questions)
    }

    /// Bytes of content that came over the network, when the first did, and what ranks here asked for before the log spoke of it.
    pub(super) fn counts(&self) -> (u64, Micros, u64) {
        (self.bytes.get(), self.begun.get(), self.misses.get())
    }

    /// Adds to the bytes that came.
    pub(super) fn count(&self, bytes: u64) {
        self.bytes.set(self.bytes.get() + bytes);
    }

    pub(super) fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Bytes received since this was called last, and how many of them because this node asked.
    pub(super) fn received(&self) -> (u64, u64) {
        let now = (self.bytes.get(), self.pulls.bytes());
        let before = self.told.replace(now);
        (now.0 - before.0, now.1 - before.1)
    }

    /// Fails now rather than in the middle when `bytes`, what is here included, do not fit into the store.
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        self.store.reserve(bytes)
    }

    /// What [`Replica::audit`] is made with.
    pub(super) fn audit_at(&self, place: &[u8]) -> Result<Audit> {
        let upcall = Arc::clone(&self.upcall) as Arc<dyn Upcall>;
        Audit::create(place, Arc::clone(&self.catalog), Arc::clone(&self.store), upcall)
    }

    /// The skeleton of a view of these directory trees, fed by this replica.
    pub(super) fn skeleton(&self, roots: &[Vec<u8>]) -> Rc<Skeleton> {
        self.catalog.write().unwrap_or_else(PoisonError::into_inner).add_roots(roots.to_vec());
        let setup = Setup {
            catalog: Arc::clone(&self.catalog),
            store: Arc::clone(&self.store),
            upcall: Arc::clone(&self.upcall) as Arc<dyn Upcall>,
            identity: self.identity.clone(),
            deadline: DEADLINE,
            siblings: self.siblings.clone(),
        };
        let view = Rc::new(Skeleton::new(setup, roots.to_vec()));
        self.views.borrow_mut().push(Rc::downgrade(&view));
        view
    }

    /// Waits until everything that belongs to a load is in the store.
    ///
    /// # Errors
    /// The store is full or broken, or nobody feeds this node.
    pub(super) async fn loaded(&self, load: LoadId) -> Result<()> {
        let begun = Instant::now();
        loop {
            if let Some(error) = &*self.broken.borrow() {
                return Err(Error::new("stage the program's files", error.clone()));
            }
            if self.preloaded.borrow().contains(load) {
                return Ok(());
            }
            let fed = self.fed.iter().map(Cell::get).min().unwrap_or(begun);
            let unfed = fed.max(begun) + UNFED;
            if unfed <= Instant::now() {
                return Err(Error::new("receive the program's files", "no node that has them can be reached"));
            }
            let progress = self.progress.borrow().1.clone();
            let progress = async {
                let _ = progress.recv().await;
            };
            let late = async {
                Timer::at(unfed).await;
            };
            progress.or(late).await;
        }
    }

    /// Whether a question has to go up, or is on its way.
    pub(super) fn asks(&self, path: &[u8], need: Need) -> bool {
        let mut open = self.open_questions.borrow_mut();
        let now = Instant::now();
        while open.poll_expired(now).is_some() {}
        open.ask((path.to_vec(), need), (), now) == Asked::Forward
    }

    /// Follows the log in one stripe: from the nearest of our feeders that can be reached, at last over the control link.
    pub(super) async fn follow(
        self: Rc<Self>,
        stripe: u8,
        feeders: Vec<(Feeder, Upstream)>,
        key: SessionKey,
        down: Vec<Receiver<Packet>>,
    ) {
        let (begun, heard) = (Instant::now(), &self.fed[usize::from(stripe)]);
        let mut ascent = Ascent::new(feeders.len(), Duration::ZERO);
        // A parent that has fed us can do so as long as it lives, and without it this node does not: its silence means no news.
        let (mut parent_feeds, mut left) = (false, false);
        loop {
            let before = heard.get();
            if let Some((feeder, upstream)) = ascent.asked().map(|at| &feeders[at]) {
                self.log.set_upstream(stripe, *upstream);
                let Err(ended) = self.fed_by(stripe, feeder, &key, left).await else {
                    (ascent, left) = (Ascent::new(feeders.len(), begun.elapsed()), false);
                    continue;
                };
                log::debug!("node {}: not fed by node {} any more: {ended}", self.node, feeder.node);
                left |= matches!(ended, LinkError::Left);
            } else {
                self.log.set_upstream(stripe, Upstream::Other);
                let next = self.log.next(stripe);
                let ended = self.fed_by_parent(stripe, &down).await;
                parent_feeds |= self.log.next(stripe) != next;
                if parent_feeds {
                    heard.set(Instant::now());
                }
                log::debug!("node {}: not fed by its parent any more: {ended}", self.node);
                left = false;
                Timer::after(RETRY).await;
            }
            ascent.handle_end(heard.get() != before, begun.elapsed());
        }
    }

    /// Until the link ends. `left`: a nearer feeder sent us away; we go back, with `Ok`, when for [`HOME`] there was nothing to be fed.
    async fn fed_by(&self, stripe: u8, feeder: &Feeder, key: &SessionKey, left: bool) -> Result<(), LinkError> {
        let (mut reader, mut writer) = listen::reach(&feeder.addresses, key, self.node, Purpose::Log).await?;
        writer.send(&self.log.attachment(stripe)).await?;
        let (mut next, mut since) = (self.log.next(stripe), Instant::now());
        loop {
            self.receive(stripe, reader.receive_within()).await?;
            if self.log.next(stripe) != next {
                (next, since) = (self.log.next(stripe), Instant::now());
            }
            if left && since.elapsed() > HOME {
                return Ok(());
            }
        }
    }

    /// Whether anybody waits for what of a stripe comes down the control link. What is on its way when the parent is told to end that still comes.
    pub(super) fn is_fed_by_parent(&self, stripe: usize) -> bool {
        self.by_parent.get(stripe).is_some_and(Cell::get)
    }

    /// The control link as a way for the log; `down`: what comes down it, by stripe.
    async fn fed_by_parent(&self, stripe: u8, down: &[Receiver<Packet>]) -> LinkError {
        let (by_parent, down) = (&self.by_parent[usize::from(stripe)], &down[usize::from(stripe)]);
        let empty = || while down.try_recv().is_ok() {};
        empty();
        by_parent.set(true);
        let ended = self.fed_down(stripe, down).await;
        by_parent.set(false);
        // Who hands one over now would else wait for good, and hear no orders.
        empty();
        let _ = self.parent.send(Packet::new(&LogFrame::Leave { stripe: stripe.into() }, Vec::new())).await;
        ended
    }

    async fn fed_down(&self, stripe: u8, down: &Receiver<Packet>) -> LinkError {
        if self.parent.send(self.log.attachment(stripe)).await.is_err() {
            return LinkError::Closed;
        }
        loop {
            let packet = async { down.recv().await.map_err(|_| LinkError::Closed) };
            let packet = async {
                let packet = packet.or(link::late(link::SILENCE, LinkError::Silent)).await?;
                self.time(packet.body.len());
                Ok(packet)
            };
            match self.receive(stripe, packet).await {
                Ok(()) => {}
                Err(error) => return error,
            }
        }
    }

    async fn receive(
        &self,
        stripe: u8,
        next: impl Future<Output = Result<Packet, LinkError>>,
    ) -> Result<(), LinkError> {
        self.log.room().await;
        let packet = next.await?;
        self.fed[usize::from(stripe)].set(Instant::now());
        let bare = packet.body.is_empty();
        let Some(logged) = self.log.receive(stripe, packet)? else { return Ok(()) };
        match &*logged.record() {
            // Nobody upstream could rebuild it.
            Record::Chunk { file, .. } if bare => self.void(*file, Errno::IO),
            record => self.announce(record),
        }
        Ok(())
    }

    /// Tells once how fast content comes here over the control link, of which nobody knows more: the root compresses where links are slow.
    fn time(&self, body: usize) {
        /// Bytes that tell: beyond the first body, which may have waited for its sender.
        const TELLING: u64 = 1 << 20;
        match self.pace.get() {
            Pace::Unknown if body > 0 => self.pace.set(Pace::Timed(Instant::now(), 0)),
            Pace::Unknown | Pace::Told => {}
            Pace::Timed(since, bytes) => {
                let bytes = bytes + body as u64;
                self.pace.set(Pace::Timed(since, bytes));
                if bytes >= TELLING {
                    self.pace.set(Pace::Told);
                    self.hear_rate((bytes as f64 / since.elapsed().as_secs_f64().max(1e-6)) as u64);
                }
            }
        }
    }

    /// Makes the file for content that is coming, before its turn in the log: chunks are written as they arrive.
    fn announce(&self, record: &Record) {
        let Record::File { path, attr, content: Supply::Log(id) } = record else { return };
        if self.announced.borrow_mut().insert(*id) && !self.lost.borrow().contains(id) {
            if let Err(error) = self.store.create(*id, attr) {
                self.lose(*id, &error);
            }
            self.coming.borrow_mut().insert(*id, (path.clone(), attr.size));
        }
    }

    /// A file cannot be stored: jobs that wait for files fail, those that run read its original.
    pub(super) fn lose(&self, file: FileId, error: &Error) {
        if !self.lost.borrow().contains(&file) {
            self.fail(error);
            self.void(file, Errno::NOSPC);
        }
    }

    /// This node will never have all of a file's content: whoever wants it reads the original.
    fn void(&self, file: FileId, errno: Errno) {
        if self.lost.borrow_mut().insert(file) {
            self.learn(&Record::Void { file, errno: errno.raw_os_error() });
        }
    }

    /// Moves what arrives into the store, the catalog and the views.
    pub(super) async fn apply(self: Rc<Self>, node: Rc<Node>) {
        let changed = self.log.listener();
        loop {
            while let Some((seq, entry)) = self.log.poll_arrived() {
                self.store_chunk(seq, entry, &node);
            }
            while let Some(logged) = self.log.poll_deliver() {
                if let Err(error) = self.deliver(&logged.record()) {
                    self.fail(&error);
                }
            }
            changed.woken().await;
        }
    }

    fn store_chunk(self: &Rc<Self>, seq: u64, entry: LogEntry, node: &Rc<Node>) {
        let Record::Chunk { file, .. } = *entry.header.record() else {
            return self.log.stored(seq);
        };
        // What announces the file may come later, in another stripe that lost its feeder: nothing may wait for that, or no room would be
        // left for it.
        if !self.lost.borrow().contains(&file)
            && let Err(error) = self.store.begin(file)
        {
            self.lose(file, &error);
        }
        if self.lost.borrow().contains(&file) {
            return self.log.stored(seq);
        }
        if self.begun.get() == 0 {
            self.begun.set(node.clock.now());
        }
        let (this, store) = (Rc::clone(self), Arc::clone(&self.store));
        let work = async move {
            let size = entry.body.as_ref().map_or(0, |b| b.0.len() as u64);
            match smol::unblock(move || write_chunk(&store, &entry)).await {
                Ok(()) => this.count(size),
                Err(error) => this.lose(file, &error),
            }
            this.log.stored(seq);
        };
        node.tasks.spawn(work).detach();
    }

    /// Takes in a record whose predecessors are all here.
    pub(super) fn deliver(self: &Rc<Self>, record: &Record) -> Result<()> {
        match record {
            Record::Complete { file } | Record::Void { file, .. } if self.lost.borrow().contains(file) => {
                self.coming.borrow_mut().remove(file);
                let _ = self.store.remove(*file);
                // It may have been lost before its turn to be announced.
                self.learn(&Record::Void { file: *file, errno: Errno::IO.raw_os_error() });
                return Ok(());
            }
            Record::Complete { file } => {
                self.store.finish(*file)?;
                if let Some((path, size)) = self.coming.borrow_mut().remove(file) {
                    let mut head = [0; 4];
                    if size >= 4 && self.store.read_at(*file, 0, &mut head)? == 4 && head == *ELF {
                        let mut images = self.images.borrow_mut();
                        images.retain(|(known, _)| *known != path);
                        images.push((path, *file));
                    }
                }
            }
            Record::File { path, attr, content: Supply::Held(file) } => self.pulls.hold(*file, path, attr),
            Record::Follows { file, next } => self.expect(*file, *next),
            Record::Void { file, .. } if self.pulls.void(*file) => {}
            Record::Void { file, .. } => {
                self.coming.borrow_mut().remove(file);
                // It may be superseded, and gone.
                let _ = self.store.remove(*file);
            }
            Record::Changed { path, .. } => {
                self.images.borrow_mut().retain(|(known, _)| !is_within(known, path));
                // One that crossed its answer is on nobody's way: the root let it be, and what was told then is forgotten now.
                self.open_questions.borrow_mut().answer_if(|(asked, _)| is_within(asked, path));
            }
            Record::Preloaded { load } => {
                self.preloaded.borrow_mut().insert(*load);
                self.progress.replace(bounded(1));
            }
            _ => {}
        }
        if let Record::Dir { path, .. }
        | Record::Link { path, .. }
        | Record::File { path, .. }
        | Record::Absent { path, .. } = record
        {
            let mut open = self.open_questions.borrow_mut();
            open.answer(&(path.clone(), Need::Attributes));
            if matches!(record, Record::Dir { .. }) {
                // What it says of its names may not be what the root had told of them before.
                open.answer_if(|(asked, _)| parent(asked) == Some(path));
            }
            if !matches!(record, Record::File { content: Supply::OnOpen, .. }) {
                open.answer(&(path.clone(), Need::Content));
            }
        }
        self.learn(record);
        Ok(())
    }

    /// Tells the catalog and the views; what they do not lead to any more is superseded.
    pub(super) fn learn(&self, record: &Record) {
        let (effects, superseded) = {
            let mut catalog = self.catalog.write().unwrap_or_else(PoisonError::into_inner);
            (catalog.apply(record, now()), catalog.take_superseded())
        };
        self.tell_views(&effects);
        if let Some(Ok(audit)) = &*self.audit.borrow()
            && audit.applied(record)
        {
            let audit = Arc::clone(audit);
            smol::unblock(move || audit.refresh().unwrap_or_else(|error| log::warn!("{error}"))).detach();
        }
        self.supersede(superseded);
        // It may be whole now, or void.
        effects.content.into_iter().for_each(|file| self.give_up(file));
    }

    pub(super) fn tell_views(&self, effects: &Effects) {
        self.views.borrow_mut().retain(|view| view.strong_count() > 0);
        for view in self.views.borrow().iter().filter_map(std::rc::Weak::upgrade) {
            view.applied(effects);
        }
    }

    /// From now on every job that waits for files fails, with this reason.
    fn fail(&self, error: &Error) {
        self.broken.borrow_mut().get_or_insert_with(|| error.to_string());
        self.progress.replace(bounded(1));
    }
}

/// Who may feed a node, nearest first, for each stripe of the topology, and where they are.
pub(super) fn feeders(node: NodeId, two_trees: bool, nodes: &[Feeder]) -> Vec<Vec<(Feeder, Upstream)>> {
    let shape = if two_trees { Shape::TwoTrees } else { Shape::Chain };
    let topology = Topology::new(shape, u32::try_from(nodes.len()).unwrap_or(u32::MAX));
    let Some(me) = nodes.iter().position(|f| f.node == node) else { return Vec::new() };
    let here = &nodes[me].addresses;
    let me = u32::try_from(me).unwrap_or(u32::MAX);
    let at = |position: u32| {
        let feeder = nodes[position as usize].clone();
        let near = listen::on_one_host(&feeder.addresses, here);
        (feeder, if near { Upstream::Near } else { Upstream::Linked })
    };
    (0..topology.stripes()).map(|stripe| topology.ancestors(stripe, me).map(at).collect()).collect()
}

fn write_chunk(store: &Store, entry: &LogEntry) -> Result<()> {
    let Record::Chunk { file, offset, len, codec } = *entry.header.record() else { return Ok(()) };
    let Some(body) = &entry.body else { return Ok(()) };
    store.write_chunk(file, offset, &chunk::decode(codec, &body.0, len)?)
}

impl FeedsLog for Replica {
    fn log(&self) -> &Rc<Log> {
        &self.log
    }

    fn hear_rate(&self, rate: u64) -> bool {
        self.parent.try_send(Packet::new(&Report::Rate { rate }, Vec::new())).is_ok()
    }
}

impl Rebuild for Replica {
    async fn rebuild(&self, record: &Record) -> Option<(Record, Vec<u8>)> {
        let Record::Chunk { file, offset, len, codec } = *record else { return None };
        if self.lost.borrow().contains(&file) {
            return None;
        }
        let store = Arc::clone(&self.store);
        let read = move || {
            let mut body = vec![0; len as usize];
            if store.read_at(file, offset, &mut body).ok()? < body.len() {
                return None;
            }
            // As it came, so that a slow link gets no more to carry than others.
            match codec {
                Codec::Zstd => Some((codec, chunk::compress(&body)?)),
                Codec::Raw => Some((codec, body)),
            }
        };
        let (codec, body) = smol::unblock(read).await?;
        Some((Record::Chunk { file, offset, len, codec }, body))
    }
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica").field("node", &self.node).field("log", &self.log).finish_non_exhaustive()
    }
}

impl Node {
    /// Passes on what the views ask, once for each question.
    pub(super) async fn ask(self: Rc<Self>, replica: Rc<Replica>, questions: Receiver<Question>) {
        while let Ok(question) = questions.recv().await {
            if let Question::Want(..) = question {
                replica.misses.set(replica.misses.get() + 1);
            }
            match question {
                Question::Want(path, need) if replica.asks(&path, need) => {
                    self.report(&Report::Want { path, need }).await;
                }
                Question::Want(..) => {}
                Question::Fetch(file) => replica.need(file).await,
                Question::Changed(path, exists) => self.report(&Report::Changed { path, exists }).await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::catalog::kind;

    #[test]
    fn hosts_with_the_same_bridge_are_not_near() {
        let at = |node, host: &str| {
            let addresses = [host, "172.17.0.1"].map(|host| format!("{host}:{}", 4000 + node)).to_vec();
            Feeder { node, addresses }
        };
        let nodes = [at(0, "10.0.0.1"), at(1, "10.0.0.1"), at(2, "10.0.0.2"), at(3, "10.0.0.3")];
        let near = |node| {
            let found = feeders(node, false, &nodes).remove(0);
            found.into_iter().filter(|found| found.1 == Upstream::Near).map(|found| found.0.node).collect::<Vec<_>>()
        };
        assert_eq!([1, 2, 3].map(near), [vec![0], vec![], vec![]]);
    }

    #[test]
    fn a_parent_that_is_left_is_told() {
        let place = tempfile::tempdir().unwrap();
        let (parent, heard) = unbounded();
        let store = std::fs::File::open(place.path()).unwrap().into();
        let (replica, _) = Replica::new(3, (store, false), false, false, parent);
        let (say, down) = bounded(1);
        let said = || async { heard.recv().await.unwrap().message::<LogFrame>().unwrap() };
        let parent = async {
            assert_eq!(said().await, LogFrame::Attach { stripe: 0, from: 0 });
            let gap = LogFrame::Entry { seq: 7, record: Record::Preloaded { load: 1 }, hash: [0; 32] };
            say.send(Packet::new(&gap, Vec::new())).await.unwrap();
            assert_eq!(said().await, LogFrame::Leave { stripe: 0 });
        };
        let (ended, ()) = smol::block_on(smol::future::zip(replica.fed_by_parent(0, &[down]), parent));
        assert!(matches!(ended, LinkError::Frame(_)), "{ended}");
    }

    #[test]
    fn what_changed_is_asked_for_though_an_older_question_crossed_its_answer() {
        let place = tempfile::tempdir().unwrap();
        let store = std::fs::File::open(place.path()).unwrap().into();
        let (replica, _) = Replica::new(3, (store, false), false, false, unbounded().0);
        let asks = |path: &[u8]| replica.asks(path, Need::Content);
        let paths = [&b"/r/a"[..], b"/r/a/m.py", b"/r/ab"];
        assert_eq!(paths.map(asks), [true; 3]);
        assert_eq!(paths.map(asks), [false; 3]);
        replica.deliver(&Record::Changed { path: b"/r/a".to_vec(), exists: Some(kind::DIR) }).unwrap();
        assert_eq!(paths.map(asks), [true, true, false]);
    }

    #[test]
    fn loads_that_are_complete_take_no_memory() {
        let mut loads = Loads::default();
        for (load, beyond) in [(2, 1), (4, 2), (1, 1), (3, 0), (5, 0)] {
            assert!(!loads.contains(load));
            loads.insert(load);
            assert!(loads.contains(load));
            assert_eq!(loads.beyond.len(), beyond);
        }
        assert!((1..=5).all(|load| loads.contains(load)) && !loads.contains(6));
    }
}
