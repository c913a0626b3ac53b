//! The socket shell around [`Relay`]: feeds children over their links, follows upstream peers, and tells the owner what arrived.
//!
//! Entries with bodies travel as they came: the encoded header is kept with the record, and the body is shared. Of others only what is long
//! is kept encoded, and the end of a load takes no memory beside its place: a log has one for each job of its session. A body is verified once, against the hash in its header, before anything else sees it.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use async_channel::{Receiver, Sender, bounded};
use rkyv::util::AlignedVec;
use smol::Timer;
use smol::future::FutureExt;

use super::link::{LinkError, Packet};
use super::relay::{self, Child, Entry, LATE, Relay, Transmit, Upstream, WINDOW, Weight};
use super::wire::frame::{FrameError, Kind, Message};
use super::wire::log::LogFrame;
use super::wire::record::{LoadId, Record};

/// A header of an entry without a body that is kept has so many bytes at least; of a shorter one the record is encoded again.
const KEPT: usize = 512;

/// A record in the log; clones share it.
#[derive(Debug, Clone)]
pub struct Logged(Keeping);

#[derive(Debug, Clone)]
enum Keeping {
    /// [`Record::Preloaded`].
    Preloaded(LoadId),
    Record(Arc<Kept>),
}

/// A record with the header it travels under, unless that is made again for each child.
#[derive(Debug)]
struct Kept {
    record: Record,
    header: Option<Arc<AlignedVec>>,
}

impl Logged {
    /// `header`: the entry's, with a body's hash if it `has_body`.
    fn new(record: Record, header: Arc<AlignedVec>, has_body: bool) -> Logged {
        if let Record::Preloaded { load } = record {
            return Logged(Keeping::Preloaded(load));
        }
        let header = Some(header).filter(|header| has_body || header.len() >= KEPT);
        Logged(Keeping::Record(Arc::new(Kept { record, header })))
    }

    pub fn record(&self) -> Cow<'_, Record> {
        match &self.0 {
            Keeping::Preloaded(load) => Cow::Owned(Record::Preloaded { load: *load }),
            Keeping::Record(kept) => Cow::Borrowed(&kept.record),
        }
    }

    fn header(&self, seq: u64) -> Arc<AlignedVec> {
        let again = || Arc::new(LogFrame::Entry { seq, record: self.record().into_owned(), hash: [0; 32] }.encode());
        match &self.0 {
            Keeping::Record(kept) => kept.header.clone().unwrap_or_else(again),
            Keeping::Preloaded(_) => again(),
        }
    }
}

/// The bytes beside a record; shared.
#[derive(Debug, Clone)]
pub struct Bytes(pub Arc<Vec<u8>>);

impl Weight for Bytes {
    fn weight(&self) -> usize {
        self.0.len()
    }
}

/// An entry as the relay holds it.
pub type LogEntry = Entry<Logged, Bytes>;

/// A node's log with its sockets' state.
pub struct Log {
    relay: RefCell<Relay<Logged, Bytes>>,
    /// Woken when the relay has something new: feeders, and every other [`Listener`].
    wake: RefCell<HashMap<Child, Sender<()>>>,
    next_child: Cell<Child>,
    stripes: u64,
    begun: Instant,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("children", &self.children()).finish_non_exhaustive()
    }
}

/// Rebuilds a body that left the window: raw bytes of a chunk, from the store or the original; `None` when they can no longer be had.
pub trait Rebuild {
    /// `record` is a [`Record::Chunk`].
    fn rebuild(&self, record: &Record) -> impl Future<Output = Option<(Record, Vec<u8>)>>;
}

/// Whoever has a log to feed others from.
pub trait FeedsLog {
    fn log(&self) -> &Rc<Log>;
    /// Hears how fast one of the links is over which it feeds, in bytes per second. False: it cannot pass that on now, and is to be told again.
    fn hear_rate(&self, rate: u64) -> bool;
}

impl Log {
    /// The root's log, or a node's.
    pub fn new(root: bool, stripes: u8) -> Rc<Log> {
        let relay = if root { Relay::root(stripes, WINDOW) } else { Relay::replica(stripes, WINDOW) };
        let (relay, wake, next_child) = (RefCell::new(relay), RefCell::default(), Cell::new(1));
        Rc::new(Log { relay, wake, next_child, stripes: stripes.into(), begun: Instant::now() })
    }

    /// The stripe in which an entry travels.
    pub fn stripe_of(&self, seq: u64) -> usize {
        usize::try_from(seq % self.stripes).unwrap_or(0)
    }

    /// Children being fed, once for each stripe.
    pub fn children(&self) -> usize {
        self.relay.borrow().children().count()
    }

    /// At the root: adds a record. Bodies are hashed by the caller, on a thread of its own.
    pub fn append(&self, record: Record, body: Vec<u8>, hash: [u8; 32]) {
        let has_body = !body.is_empty();
        let entry = |seq| {
            let frame = LogFrame::Entry { seq, record, hash };
            let header = Arc::new(frame.encode());
            let LogFrame::Entry { record, .. } = frame else { unreachable!("made above") };
            let header = Logged::new(record, header, has_body);
            Entry { header, body: has_body.then(|| Bytes(Arc::new(body))) }
        };
        let mut relay = self.relay.borrow_mut();
        let seq = relay.next_seq();
        relay.append(entry(seq));
        // The root needs no store: what leaves the window is read again from the original.
        relay.handle_stored(seq);
        drop(relay);
        self.notify();
    }

    /// Until more may be put in, see [`Relay::wants_more`].
    pub async fn room(&self) {
        let wants_more = || self.relay.borrow().wants_more(self.begun.elapsed());
        if wants_more() {
            return;
        }
        let changed = self.listener();
        while !wants_more() {
            let late = async {
                Timer::after(LATE).await;
            };
            changed.woken().or(late).await;
        }
    }

    /// The next body to be written to the store.
    pub fn poll_arrived(&self) -> Option<(u64, LogEntry)> {
        self.relay.borrow_mut().poll_arrived()
    }

    /// A body is in the store (at the root: it can be read again).
    pub fn stored(&self, seq: u64) {
        self.relay.borrow_mut().handle_stored(seq);
        self.notify();
    }

    /// The next record in the order of the log.
    pub fn poll_deliver(&self) -> Option<Logged> {
        self.relay.borrow_mut().poll_deliver().map(|(_, logged)| logged.clone())
    }

    /// Hears of what changes from now on.
    pub fn listener(&self) -> Listener<'_> {
        let child = self.next_child.replace(self.next_child.get() + 1);
        let (sender, woken) = bounded(1);
        self.wake.borrow_mut().insert(child, sender);
        Listener { log: self, child, woken }
    }

    fn notify(&self) {
        for wake in self.wake.borrow().values() {
            let _ = wake.try_send(());
        }
    }

    /// Feeds one child until its link ends, or this is dropped: `asked` brings its [`LogFrame::Attach`]es and [`LogFrame::Leave`]s, `outbox` leads
    /// to it.
    ///
    /// # Errors
    /// Its link ended, or it does not follow the protocol.
    pub async fn feed(
        &self,
        asked: Receiver<Packet>,
        outbox: Sender<Packet>,
        rebuild: &impl Rebuild,
    ) -> Result<(), LinkError> {
        let fed = Fed(self.listener());
        let child = fed.0.child;
        loop {
            while let Ok(packet) = asked.try_recv() {
                self.attach(child, &packet)?;
            }
            let next = self.relay.borrow_mut().poll_transmit(child, self.begun.elapsed());
            match next {
                Transmit::Entry { seq, entry } => {
                    let body = entry.body.map_or_else(Arc::default, |b| b.0);
                    let packet = Packet { kind: Kind::Log, header: entry.header.header(seq), body };
                    outbox.send(packet).await.map_err(|_| LinkError::Closed)?;
                    // At the root, room in the window lets the readers go on.
                    self.notify();
                }
                Transmit::Refetch { seq } => {
                    let Some(record) = self.relay.borrow().header(seq).map(|l| l.record().into_owned()) else {
                        continue;
                    };
                    let (record, body) = match rebuild.rebuild(&record).await {
                        Some((record, body)) => (record, Some(body)),
                        None => (record, None),
                    };
                    let hash = body.as_ref().map_or([0; 32], |b| *blake3::hash(b).as_bytes());
                    let header = Arc::new(LogFrame::Entry { seq, record: record.clone(), hash }.encode());
                    let body = body.map(|b| Bytes(Arc::new(b)));
                    let entry = Entry { header: Logged::new(record, header, body.is_some()), body };
                    self.relay.borrow_mut().handle_refetched(child, seq, entry);
                }
                Transmit::Slow { stripe } => {
                    let packet = Packet::new(&LogFrame::Slow { stripe: stripe.into() }, Vec::new());
                    outbox.send(packet).await.map_err(|_| LinkError::Closed)?;
                }
                Transmit::Leave { stripe } => {
                    let packet = Packet::new(&LogFrame::Leave { stripe: stripe.into() }, Vec::new());
                    outbox.send(packet).await.map_err(|_| LinkError::Closed)?;
                }
                Transmit::Idle => {
                    let more = async {
                        let packet = asked.recv().await.map_err(|_| LinkError::Closed)?;
                        self.attach(child, &packet)
                    };
                    let wake = async {
                        fed.0.woken().await;
                        Ok(())
                    };
                    smol::future::or(more, wake).await?;
                }
            }
        }
    }

    fn attach(&self, child: Child, packet: &Packet) -> Result<(), LinkError> {
        match packet.message::<LogFrame>()? {
            LogFrame::Attach { stripe, from } => {
                let stripe = u8::try_from(stripe).map_err(|_| FrameError::Header)?;
                self.relay.borrow_mut().attach(child, stripe, from).map_err(|_| FrameError::Header)?;
                self.notify();
                Ok(())
            }
            LogFrame::Leave { stripe } => {
                let stripe = u8::try_from(stripe).map_err(|_| FrameError::Header)?;
                self.relay.borrow_mut().detach(child, Some(stripe));
                self.notify();
                Ok(())
            }
            LogFrame::Ping => Ok(()),
            LogFrame::Entry { .. } | LogFrame::Slow { .. } => Err(FrameError::Header.into()),
        }
    }

    /// The next entry that is missing in a stripe.
    pub fn next(&self, stripe: u8) -> u64 {
        self.relay.borrow().resume_from(stripe)
    }

    /// See [`Relay::set_upstream`].
    pub fn set_upstream(&self, stripe: u8, upstream: Upstream) {
        self.relay.borrow_mut().set_upstream(stripe, upstream);
    }

    /// What to ask an upstream peer for.
    pub fn attachment(&self, stripe: u8) -> Packet {
        let from = self.next(stripe);
        Packet::new(&LogFrame::Attach { stripe: stripe.into(), from }, Vec::new())
    }

    /// Takes in a frame from the upstream peer of `stripe`; the record, if it was one, is for preparations only: it may not be its turn.
    ///
    /// # Errors
    /// The peer does not follow the protocol, or the body is not what its header says: drop the link and resume elsewhere.
    pub fn receive(&self, stripe: u8, packet: Packet) -> Result<Option<Logged>, LinkError> {
        let (seq, record, hash) = match packet.message::<LogFrame>()? {
            LogFrame::Entry { seq, record, hash } => (seq, record, hash),
            LogFrame::Slow { .. } => {
                log::debug!("this node takes little of stripe {stripe}: those that it feeds there leave it");
                self.relay.borrow_mut().handle_slow(stripe);
                self.notify();
                return Ok(None);
            }
            LogFrame::Leave { .. } => return Err(LinkError::Left),
            LogFrame::Attach { .. } | LogFrame::Ping => return Ok(None),
        };
        if !record.is_sound() {
            return Err(FrameError::Header.into());
        }
        let body = (!packet.body.is_empty()).then(|| Bytes(Arc::clone(&packet.body)));
        if body.as_ref().is_some_and(|b| *blake3::hash(&b.0).as_bytes() != hash) {
            return Err(FrameError::Tag.into());
        }
        let logged = Logged::new(record, packet.header, body.is_some());
        let entry = Entry { header: logged.clone(), body };
        let taken = self.relay.borrow_mut().handle_entry(stripe, seq, entry);
        taken.map_err(|error: relay::ProtocolError| {
            log::warn!("the log came out of order: {error}");
            LinkError::from(FrameError::Header)
        })?;
        self.notify();
        Ok(Some(logged))
    }
}

/// One who hears of changes of a log, until dropped.
#[derive(Debug)]
pub struct Listener<'a> {
    log: &'a Log,
    child: Child,
    woken: Receiver<()>,
}

impl Listener<'_> {
    /// Until something has changed since the last call.
    pub async fn woken(&self) {
        let _ = self.woken.recv().await;
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        self.log.wake.borrow_mut().remove(&self.child);
    }
}

/// A child that is being fed. Whatever ends that, the relay has to know: for one that is gone it would wait.
struct Fed<'a>(Listener<'a>);

impl Drop for Fed<'_> {
    fn drop(&mut self) {
        self.0.log.relay.borrow_mut().detach(self.0.child, None);
        self.0.log.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::wire::record::Codec;

    struct Nothing;

    impl Rebuild for Nothing {
        async fn rebuild(&self, _: &Record) -> Option<(Record, Vec<u8>)> {
            None
        }
    }

    #[test]
    fn a_child_is_forgotten_when_its_link_ends_while_it_is_fed() {
        let log = Log::new(true, 1);
        let (ask, asked) = bounded(1);
        let (outbox, _full) = bounded(1);
        ask.try_send(Packet::new(&LogFrame::Attach { stripe: 0, from: 0 }, Vec::new())).unwrap();
        let mut feed = Box::pin(log.feed(asked, outbox, &Nothing));
        let mut poll = || smol::block_on(smol::future::poll_once(&mut feed));
        assert!(poll().is_none() && log.children() == 1);
        let mut offset = 0;
        let has_room = || smol::block_on(smol::future::poll_once(log.room())).is_some();
        while has_room() {
            let len = 1 << 20;
            log.append(Record::Chunk { file: 1, offset, len, codec: Codec::Raw }, vec![0; len as usize], [0; 32]);
            offset += u64::from(len);
            assert!(poll().is_none() && offset < 20 << 20, "its link takes one");
        }
        drop(feed);
        assert!(log.children() == 0 && has_room());
    }

    #[test]
    fn a_child_that_leaves_a_stripe_gets_no_more_of_it_until_it_comes_back() {
        let log = Log::new(true, 2);
        let ((ask, asked), (outbox, sent)) = (async_channel::unbounded(), async_channel::unbounded());
        let mut feed = Box::pin(log.feed(asked, outbox, &Nothing));
        let mut say = |frame: LogFrame| {
            ask.try_send(Packet::new(&frame, Vec::new())).unwrap();
            for load in 1..=2 {
                log.append(Record::Preloaded { load }, Vec::new(), [0; 32]);
            }
            assert!(smol::block_on(smol::future::poll_once(&mut feed)).is_none());
            let seq = |packet: Packet| match packet.message() {
                Ok(LogFrame::Entry { seq, .. }) => seq,
                other => panic!("{other:?}"),
            };
            std::iter::from_fn(|| sent.try_recv().ok()).map(seq).collect::<Vec<_>>()
        };
        assert_eq!(say(LogFrame::Attach { stripe: 0, from: 0 }), [0]);
        assert_eq!(say(LogFrame::Attach { stripe: 1, from: 1 }), [1, 2, 3]);
        assert_eq!(say(LogFrame::Leave { stripe: 0 }), [5]);
        assert_eq!(say(LogFrame::Attach { stripe: 0, from: 2 }), [2, 4, 6, 7]);
    }

    #[test]
    fn the_end_of_a_load_is_kept_in_its_place_and_sent_as_it_came() {
        let frame = LogFrame::Entry { seq: 9, record: Record::Preloaded { load: 7 }, hash: [0; 32] };
        let LogFrame::Entry { record, .. } = &frame else { unreachable!("made above") };
        let logged = Logged::new(record.clone(), Arc::new(frame.encode()), false);
        assert!(matches!(logged.0, Keeping::Preloaded(7)) && size_of::<Logged>() <= 16);
        assert_eq!((logged.record().as_ref(), &logged.header(9)[..]), (record, &frame.encode()[..]));
    }
}
