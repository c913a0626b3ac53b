//! One node's part in replicating the root's append-only log. No sockets and no clock: the caller moves entries between peers.
//!
//! Entry n of the log travels in stripe n modulo the number of stripes, each stripe in order along its own tree. The caller
//! 1. hands in what came from upstream ([`Relay::handle_entry`]; at the root [`Relay::append`]), but only while [`Relay::wants_more`];
//! 2. writes bodies to the node's store as they come ([`Relay::poll_arrived`]) and says when they are there ([`Relay::handle_stored`]);
//! 3. applies headers in the log's order ([`Relay::poll_deliver`]): all bodies before a delivered header are in the store;
//! 4. sends to every child whose link takes more what [`Relay::poll_transmit`] gives.
//!
//! After the loss of an upstream peer the node attaches to another one and asks it for [`Relay::resume_from`]; nothing is acknowledged.
//!
//! Headers are kept for good, so that anybody can join late. Bodies are held while a child or the store still needs them, within a window;
//! a child that falls behind the window makes the caller rebuild bodies from the store ([`Transmit::Refetch`]), and so delays only itself.
//! Those that it feeds would wait with it: a child that takes far less than others here ([`super::pace`]) is told so ([`Transmit::Slow`]),
//! and sends its own children of the stripe to their next ancestor ([`Transmit::Leave`]). As all go to ancestors only, nobody comes to feed
//! himself.

use std::collections::VecDeque;
use std::time::Duration;

use thiserror::Error;

use super::pace::{Pace, Taker};

/// Default for the bytes of bodies that a node holds for its children.
pub const WINDOW: usize = 6 << 20;
/// A child that has taken nothing for so long keeps its feeder from nothing any more, but for the root.
pub const LATE: Duration = Duration::from_secs(2);

/// What a body costs while it is held, in bytes. Cloning a body must be cheap (an `Arc`).
pub trait Weight {
    fn weight(&self) -> usize;
}

/// Who feeds a node in a stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Upstream {
    /// A process of the same host. What the children have not taken yet is left with it, for [`LATE`]: taken at once, at the speed of memory,
    /// it would keep the host's processors from sending.
    Near,
    /// A peer over a link like those to the children: a child that is fed alone is compared with it.
    Linked,
    /// Nobody so far, or a way that carries more than the log.
    #[default]
    Other,
}

/// The caller's number for its connection to a child. A new connection of the same child gets a new one, so that the late end of the old
/// one does no harm.
pub type Child = u64;

/// One record of the log as it travels. A record that should have a body may come without one when it can no longer be had;
/// the log then voids it further on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<H, B> {
    pub header: H,
    pub body: Option<B>,
}

/// What to do for a child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transmit<H, B> {
    /// Send this.
    Entry { seq: u64, entry: Entry<H, B> },
    /// Rebuild this entry from the store and give it to [`Relay::handle_refetched`]; said once. Other stripes go on meanwhile: ask again.
    Refetch { seq: u64 },
    /// Tell it that it takes far less of this stripe than others do: what calls [`Relay::handle_slow`] there.
    Slow { stripe: u8 },
    /// It is not fed here in this stripe any more: tell it to attach to its next ancestor.
    Leave { stripe: u8 },
    /// Nothing until something new is handed in.
    Idle,
}

/// A peer that does not follow the protocol: drop its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ProtocolError {
    #[error("entry {got} of the log came where {expected} was due")]
    Gap { expected: u64, got: u64 },
    #[error("entry {seq} of the log does not belong to stripe {stripe}")]
    WrongStripe { stripe: u8, seq: u64 },
}

#[derive(Debug)]
enum Held<B> {
    /// The record has no body.
    None,
    /// Not yet in the store: may not be dropped.
    Arrived(B),
    /// In the store, held for children.
    Stored(B),
    /// Only in the store.
    Dropped,
}

#[derive(Debug)]
struct Slot<H, B> {
    header: H,
    body: Held<B>,
}

#[derive(Debug)]
struct Stripe<H, B> {
    log: Vec<Slot<H, B>>,
    /// Every body below this index is in the store.
    stored: usize,
    /// No body below this index is held.
    released: usize,
    upstream: Upstream,
    /// What came from there.
    came: Taker,
}

#[derive(Debug)]
enum Refetch<H, B> {
    No,
    Asked,
    Ready(Entry<H, B>),
}

/// A child in one stripe.
#[derive(Debug)]
struct Feed<H, B> {
    child: Child,
    stripe: usize,
    /// Index in the stripe of the next entry to send.
    next: usize,
    refetch: Refetch<H, B>,
    taker: Taker,
    /// When it last was given something or had all there was; zero before.
    took: Duration,
    notice: Option<Notice>,
}

/// What a child is to be told before anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notice {
    Slow,
    Leave,
}

/// See the module. `H`: the header, `B`: the body.
#[derive(Debug)]
pub struct Relay<H, B> {
    root: bool,
    window: usize,
    stripes: Vec<Stripe<H, B>>,
    feeds: Vec<Feed<H, B>>,
    /// Entries with a body that the caller has not taken yet, in the order they came.
    arrived: VecDeque<u64>,
    /// Entries whose body is `Stored`, oldest first; later ones may have been dropped since, the first has not.
    droppable: VecDeque<u64>,
    deliver: u64,
    /// Bytes in `Arrived` and `Stored` bodies.
    held: usize,
    /// Bytes in `Arrived` bodies.
    unstored: usize,
    /// Bytes in the largest body so far: what the next one may take.
    largest: usize,
    pace: Pace,
}

impl<H: Clone, B: Clone + Weight> Relay<H, B> {
    /// The node that writes the log. `stripes` as the topology says, `window` in bytes, usually [`WINDOW`].
    pub fn root(stripes: u8, window: usize) -> Self {
        Relay { root: true, ..Relay::replica(stripes, window) }
    }

    /// A node that gets the log from others.
    pub fn replica(stripes: u8, window: usize) -> Self {
        let stripe = || Stripe {
            log: Vec::new(),
            stored: 0,
            released: 0,
            upstream: Upstream::default(),
            came: Taker::default(),
        };
        Relay {
            root: false,
            window,
            stripes: (0..stripes.max(1)).map(|_| stripe()).collect(),
            feeds: Vec::new(),
            arrived: VecDeque::new(),
            droppable: VecDeque::new(),
            deliver: 0,
            held: 0,
            unstored: 0,
            largest: 0,
            pace: Pace::default(),
        }
    }

    /// Adds the next entry at the root and returns its sequence number.
    pub fn append(&mut self, entry: Entry<H, B>) -> u64 {
        let seq = self.next_seq();
        self.insert(seq, entry);
        seq
    }

    /// The sequence number that the next [`append`](Self::append) will get.
    pub fn next_seq(&self) -> u64 {
        self.stripes.iter().map(|stripe| stripe.log.len() as u64).sum()
    }

    /// The header of an entry that is here.
    pub fn header(&self, seq: u64) -> Option<&H> {
        let (stripe, index) = self.place(seq);
        self.stripes[stripe].log.get(index).map(|slot| &slot.header)
    }

    /// An entry from the upstream peer of `stripe`, verified by the caller. What is already known is ignored.
    pub fn handle_entry(&mut self, stripe: u8, seq: u64, entry: Entry<H, B>) -> Result<(), ProtocolError> {
        let (at, _) = self.checked(stripe, seq)?;
        let expected = self.seq(at, self.stripes[at].log.len());
        if seq > expected {
            return Err(ProtocolError::Gap { expected, got: seq });
        }
        if seq == expected {
            self.insert(seq, entry);
        }
        Ok(())
    }

    /// The body of `seq`, given out by [`poll_arrived`](Self::poll_arrived), is in the store. In any order.
    pub fn handle_stored(&mut self, seq: u64) {
        let (stripe, index) = self.place(seq);
        let Some(slot) = self.stripes[stripe].log.get_mut(index) else { return };
        slot.body = match std::mem::replace(&mut slot.body, Held::None) {
            Held::Arrived(body) => {
                self.unstored -= body.weight();
                self.droppable.push_back(seq);
                Held::Stored(body)
            }
            other => other,
        };
        self.release(stripe);
        self.shrink();
    }

    /// Says who feeds this node in `stripe`, one that it has.
    pub fn set_upstream(&mut self, stripe: u8, upstream: Upstream) {
        self.stripes[usize::from(stripe)].upstream = upstream;
    }

    /// Starts (or restarts) to feed `child` in `stripe` with the entries from `from`, which is the child's
    /// [`resume_from`](Self::resume_from) and may lie beyond what this node has.
    pub fn attach(&mut self, child: Child, stripe: u8, from: u64) -> Result<(), ProtocolError> {
        let (stripe, next) = self.checked(stripe, from)?;
        self.feeds.retain(|feed| (feed.child, feed.stripe) != (child, stripe));
        let (refetch, taker) = (Refetch::No, Taker::default());
        self.feeds.push(Feed { child, stripe, next, refetch, taker, took: Duration::ZERO, notice: None });
        self.stripes.iter_mut().for_each(|stripe| stripe.came = Taker::default());
        self.release(stripe);
        Ok(())
    }

    /// Stops feeding `child`, in `stripe` or in all.
    pub fn detach(&mut self, child: Child, stripe: Option<u8>) {
        self.feeds.retain(|feed| feed.child != child || stripe.is_some_and(|of| usize::from(of) != feed.stripe));
        (0..self.stripes.len()).for_each(|stripe| self.release(stripe));
    }

    /// The entry that [`Transmit::Refetch`] asked for. Its header may differ from the log's where the body does (another codec). Ignored if
    /// the child has detached or moved since.
    pub fn handle_refetched(&mut self, child: Child, seq: u64, entry: Entry<H, B>) {
        let (stripe, index) = self.place(seq);
        let asked = |feed: &&mut Feed<H, B>| {
            (feed.child, feed.stripe, feed.next) == (child, stripe, index) && matches!(feed.refetch, Refetch::Asked)
        };
        if let Some(feed) = self.feeds.iter_mut().find(asked) {
            feed.refetch = Refetch::Ready(entry);
        }
    }

    /// This node is slow, its feeder of `stripe` says: those that it feeds there are sent to their next ancestors.
    pub fn handle_slow(&mut self, stripe: u8) {
        let of_stripe = self.feeds.iter_mut().filter(|feed| feed.stripe == usize::from(stripe));
        of_stripe.for_each(|feed| feed.notice = Some(Notice::Leave));
    }

    /// The next thing to do for `child`. A child that is fed in several stripes gets their entries by sequence number as far as they are there.
    /// `now`: since any one moment.
    pub fn poll_transmit(&mut self, child: Child, now: Duration) -> Transmit<H, B> {
        self.judge(now);
        if let Some(at) = self.feeds.iter().position(|feed| feed.child == child && feed.notice.is_some()) {
            let stripe = self.feeds[at].stripe as u8;
            if self.feeds[at].notice.take() == Some(Notice::Slow) {
                return Transmit::Slow { stripe };
            }
            self.feeds.remove(at);
            self.release(stripe.into());
            return Transmit::Leave { stripe };
        }
        // Its link takes more.
        self.feeds.iter_mut().filter(|feed| feed.child == child).for_each(|feed| feed.took = now);
        let stripes = self.stripes.len();
        let seq = |feed: &Feed<H, B>| (feed.next * stripes + feed.stripe) as u64;
        let ready = |feed: &Feed<H, B>| {
            let slot = self.stripes[feed.stripe].log.get(feed.next);
            slot.is_some_and(|slot| !matches!((&slot.body, &feed.refetch), (Held::Dropped, Refetch::Asked)))
        };
        let mine = self.feeds.iter_mut().filter(|feed| feed.child == child && ready(feed));
        let Some(feed) = mine.min_by_key(|feed| seq(feed)) else { return Transmit::Idle };
        let (seq, stripe, slot) = (seq(feed), feed.stripe, &self.stripes[feed.stripe].log[feed.next]);
        let body = match (&slot.body, std::mem::replace(&mut feed.refetch, Refetch::No)) {
            (Held::Arrived(body) | Held::Stored(body), _) => Some(body.clone()),
            (Held::None, _) => None,
            (Held::Dropped, Refetch::Ready(entry)) => {
                feed.next += 1;
                feed.taker.bytes += entry.body.as_ref().map_or(0, Weight::weight) as u64;
                return Transmit::Entry { seq, entry };
            }
            (Held::Dropped, Refetch::No | Refetch::Asked) => {
                feed.refetch = Refetch::Asked;
                return Transmit::Refetch { seq };
            }
        };
        feed.next += 1;
        feed.taker.bytes += body.as_ref().map_or(0, Weight::weight) as u64;
        let entry = Entry { header: slot.header.clone(), body };
        self.release(stripe);
        Transmit::Entry { seq, entry }
    }

    /// The next entry with a body, as they come: the body may be written to the store at once, whatever its place in the log.
    /// A body that was reported as stored before is left out (the root may have it from elsewhere).
    pub fn poll_arrived(&mut self) -> Option<(u64, Entry<H, B>)> {
        loop {
            let seq = self.arrived.pop_front()?;
            let (stripe, index) = self.place(seq);
            let slot = &self.stripes[stripe].log[index];
            if let Held::Arrived(body) = &slot.body {
                return Some((seq, Entry { header: slot.header.clone(), body: Some(body.clone()) }));
            }
        }
    }

    /// The next header in the order of the whole log; the body, if it has one, is in the store, and so are all before.
    pub fn poll_deliver(&mut self) -> Option<(u64, &H)> {
        let seq = self.deliver;
        let (stripe, index) = self.place(seq);
        let slot = self.stripes[stripe].log.get(index).filter(|slot| !matches!(slot.body, Held::Arrived(_)))?;
        self.deliver += 1;
        Some((seq, &slot.header))
    }

    /// The next sequence number this node wants in `stripe`: what to ask for when attaching to an upstream peer.
    pub fn resume_from(&self, stripe: u8) -> u64 {
        let stripe = usize::from(stripe).min(self.stripes.len() - 1);
        self.seq(stripe, self.stripes[stripe].log.len())
    }

    /// Whether to read more: from the upstream peers, or, at the root, from the source of the log.
    ///
    /// False while a window's worth of bodies waits for the node's store. At the root, and where the upstream peer is [`Upstream::Near`], also
    /// while one more would push out a body that no child has taken yet: so the source runs as fast as the fastest link. The root waits as long
    /// as that takes, for it would have to read again; others only for children that have taken something within [`LATE`]: the rest may be gone,
    /// and all behind this node would wait with it. `now` as in [`poll_transmit`](Self::poll_transmit).
    pub fn wants_more(&self, now: Duration) -> bool {
        let untaken = || {
            self.droppable.front().is_some_and(|&seq| {
                let (stripe, index) = self.place(seq);
                let mut feeds = self.feeds.iter().filter(|feed| feed.stripe == stripe);
                let waits = match self.stripes[stripe].upstream {
                    _ if self.root => true,
                    Upstream::Near => feeds.clone().any(|feed| now < feed.took + LATE),
                    _ => false,
                };
                waits && !feeds.any(|feed| feed.next > index)
            })
        };
        self.unstored < self.window && !(self.held + self.largest > self.window && untaken())
    }

    /// Children that are fed in some stripe; one fed in two comes twice.
    pub fn children(&self) -> impl Iterator<Item = Child> + '_ {
        self.feeds.iter().map(|feed| feed.child)
    }

    /// Bytes of bodies held: at most the window, one body for each upstream peer beyond it, and one for each child and stripe being refetched.
    pub fn memory(&self) -> usize {
        let refetched = self.feeds.iter().map(|feed| match &feed.refetch {
            Refetch::Ready(Entry { body: Some(body), .. }) => body.weight(),
            _ => 0,
        });
        self.held + refetched.sum::<usize>()
    }

    fn judge(&mut self, now: Duration) {
        if !self.pace.is_due(now) {
            return;
        }
        let waits: Vec<bool> = self.feeds.iter().map(|f| f.next < self.stripes[f.stripe].log.len()).collect();
        let alone = if let [only] = &self.feeds[..] { Some(&mut self.stripes[only.stripe]) } else { None };
        let came = alone.filter(|stripe| stripe.upstream == Upstream::Linked).map(|stripe| (&mut stripe.came, false));
        let slow = self.pace.judge(now, self.feeds.iter_mut().map(|feed| &mut feed.taker).zip(waits).chain(came));
        for (feed, _) in self.feeds.iter_mut().zip(slow).filter(|(_, slow)| *slow) {
            feed.notice.get_or_insert(Notice::Slow);
        }
    }

    fn insert(&mut self, seq: u64, Entry { header, body }: Entry<H, B>) {
        let (stripe, _) = self.place(seq);
        let body = match body {
            Some(body) => {
                self.held += body.weight();
                self.largest = self.largest.max(body.weight());
                self.unstored += body.weight();
                self.arrived.push_back(seq);
                self.stripes[stripe].came.bytes += body.weight() as u64;
                Held::Arrived(body)
            }
            None => Held::None,
        };
        self.stripes[stripe].log.push(Slot { header, body });
        self.release(stripe);
        self.shrink();
    }

    /// Drops the bodies that neither the store nor a child needs.
    fn release(&mut self, stripe: usize) {
        let Stripe { log, stored, released, .. } = &mut self.stripes[stripe];
        *stored += log[*stored..].iter().take_while(|slot| !matches!(slot.body, Held::Arrived(_))).count();
        let taken = self.feeds.iter().filter(|feed| feed.stripe == stripe).map(|feed| feed.next).min();
        let floor = taken.unwrap_or(usize::MAX).min(*stored);
        while *released < floor {
            drop_body(&mut log[*released], &mut self.held);
            *released += 1;
        }
        self.trim();
    }

    /// Drops the oldest bodies that are in the store until the rest fits the window, whoever needs them.
    fn shrink(&mut self) {
        while self.held > self.window
            && let Some(seq) = self.droppable.pop_front()
        {
            let (stripe, index) = self.place(seq);
            drop_body(&mut self.stripes[stripe].log[index], &mut self.held);
            self.trim();
        }
    }

    /// Keeps the promise of `droppable` about its first.
    fn trim(&mut self) {
        while let Some(&seq) = self.droppable.front() {
            let (stripe, index) = self.place(seq);
            if matches!(self.stripes[stripe].log[index].body, Held::Stored(_)) {
                break;
            }
            self.droppable.pop_front();
        }
    }

    fn place(&self, seq: u64) -> (usize, usize) {
        let stripes = self.stripes.len() as u64;
        ((seq % stripes) as usize, usize::try_from(seq / stripes).unwrap_or(usize::MAX))
    }

    fn seq(&self, stripe: usize, index: usize) -> u64 {
        (index * self.stripes.len() + stripe) as u64
    }

    fn checked(&self, stripe: u8, seq: u64) -> Result<(usize, usize), ProtocolError> {
        let (at, index) = self.place(seq);
        if at == usize::from(stripe) { Ok((at, index)) } else { Err(ProtocolError::WrongStripe { stripe, seq }) }
    }
}

fn drop_body<H, B: Weight>(slot: &mut Slot<H, B>, held: &mut usize) {
    if let Held::Stored(body) = &slot.body {
        *held -= body.weight();
        slot.body = Held::Dropped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, PartialEq)]
    struct Bytes(usize);

    impl Weight for Bytes {
        fn weight(&self) -> usize {
            self.0
        }
    }

    type Log = Relay<u64, Bytes>;

    fn entry(header: u64, bytes: usize) -> Entry<u64, Bytes> {
        Entry { header, body: Some(Bytes(bytes)) }
    }

    fn store_all(relay: &mut Log) -> Vec<u64> {
        let arrived: Vec<u64> = std::iter::from_fn(|| relay.poll_arrived().map(|(seq, _)| seq)).collect();
        arrived.iter().for_each(|&seq| relay.handle_stored(seq));
        arrived
    }

    fn deliver_all(relay: &mut Log) -> Vec<u64> {
        std::iter::from_fn(|| relay.poll_deliver().map(|(seq, _)| seq)).collect()
    }

    #[test]
    fn stripes_merge_into_one_order() {
        let mut relay = Log::replica(2, 100);
        relay.handle_entry(1, 1, entry(1, 5)).unwrap();
        relay.handle_entry(1, 3, entry(3, 5)).unwrap();
        assert_eq!(store_all(&mut relay), [1, 3]);
        assert_eq!(deliver_all(&mut relay), [0; 0]);
        relay.handle_entry(0, 0, Entry { header: 0, body: None }).unwrap();
        relay.handle_entry(0, 2, entry(2, 5)).unwrap();
        assert_eq!(deliver_all(&mut relay), [0, 1], "2 is not stored yet");
        store_all(&mut relay);
        assert_eq!(deliver_all(&mut relay), [2, 3]);
        assert_eq!((relay.resume_from(0), relay.resume_from(1)), (4, 5));
        assert_eq!(relay.memory(), 0, "no children: nothing to hold");
    }

    #[test]
    fn peers_that_break_the_protocol_are_told_apart() {
        let mut relay = Log::replica(2, 100);
        assert_eq!(relay.handle_entry(0, 2, entry(2, 1)), Err(ProtocolError::Gap { expected: 0, got: 2 }));
        assert_eq!(relay.handle_entry(0, 1, entry(1, 1)), Err(ProtocolError::WrongStripe { stripe: 0, seq: 1 }));
        assert_eq!(relay.handle_entry(7, 1, entry(1, 1)), Err(ProtocolError::WrongStripe { stripe: 7, seq: 1 }));
        assert_eq!(relay.attach(1, 1, 4), Err(ProtocolError::WrongStripe { stripe: 1, seq: 4 }));
        relay.handle_entry(0, 0, entry(0, 1)).unwrap();
        relay.handle_entry(0, 0, entry(0, 1)).unwrap();
        assert_eq!(relay.resume_from(0), 2, "a duplicate changes nothing");
        assert!(relay.handle_entry(0, u64::MAX - 1, entry(0, 1)).is_err());
        relay.attach(1, 0, u64::MAX - 1).unwrap();
        assert_eq!(relay.poll_transmit(1, Duration::ZERO), Transmit::Idle);
        relay.handle_stored(u64::MAX);
    }

    #[test]
    fn a_slow_child_is_refetched_and_delays_nobody() {
        let mut relay = Log::root(1, 30);
        relay.attach(1, 0, 0).unwrap();
        relay.attach(2, 0, 0).unwrap();
        for seq in 0..10 {
            assert!(relay.wants_more(Duration::ZERO));
            relay.append(entry(seq, 10));
            store_all(&mut relay);
            assert!(matches!(relay.poll_transmit(1, Duration::ZERO), Transmit::Entry { seq: sent, .. } if sent == seq));
            assert!(relay.memory() <= 30);
        }
        for seq in 0..7 {
            assert_eq!(relay.poll_transmit(2, Duration::ZERO), Transmit::Refetch { seq });
            assert_eq!(relay.poll_transmit(2, Duration::ZERO), Transmit::Idle);
            relay.handle_refetched(2, seq, entry(seq, 10));
            assert_eq!(relay.poll_transmit(2, Duration::ZERO), Transmit::Entry { seq, entry: entry(seq, 10) });
        }
        assert_eq!(relay.poll_transmit(2, Duration::ZERO), Transmit::Entry { seq: 7, entry: entry(7, 10) });
        relay.detach(2, None);
        assert_eq!(relay.memory(), 0);
    }

    #[test]
    fn the_root_waits_for_its_fastest_child_and_everybody_for_its_store() {
        let mut root = Log::root(1, 30);
        root.attach(1, 0, 0).unwrap();
        for seq in 0..3 {
            root.append(entry(seq, 10));
        }
        assert!(!root.wants_more(Duration::ZERO), "the store has not taken anything");
        store_all(&mut root);
        assert!(!root.wants_more(2 * LATE), "the child has not taken anything");
        root.poll_transmit(1, Duration::ZERO);
        assert!(root.wants_more(Duration::ZERO));

        let mut replica = Log::replica(1, 30);
        replica.attach(1, 0, 0).unwrap();
        for seq in 0..3 {
            replica.handle_entry(0, seq, entry(seq, 10)).unwrap();
        }
        assert!(!replica.wants_more(Duration::ZERO));
        store_all(&mut replica);
        assert!(replica.wants_more(Duration::ZERO), "its children are not the business of its upstream peer");

        replica.set_upstream(0, Upstream::Near);
        assert!(!replica.wants_more(Duration::ZERO), "unless that is on the same host");
        assert!(replica.wants_more(LATE), "and then not for good");
        replica.poll_transmit(1, Duration::ZERO);
        assert!(replica.wants_more(Duration::ZERO));
        replica.detach(1, None);
        assert!(replica.wants_more(Duration::ZERO), "without children");
    }

    #[test]
    fn a_late_refetch_is_ignored() {
        let mut relay = Log::root(1, 30);
        relay.append(entry(0, 10));
        store_all(&mut relay);
        relay.attach(1, 0, 0).unwrap();
        assert_eq!(relay.poll_transmit(1, Duration::ZERO), Transmit::Refetch { seq: 0 });
        relay.attach(1, 0, 1).unwrap();
        relay.handle_refetched(1, 0, entry(0, 10));
        assert_eq!((relay.poll_transmit(1, Duration::ZERO), relay.memory()), (Transmit::Idle, 0));
        relay.detach(1, None);
        assert_eq!(relay.children().count(), 0);
    }

    /// What a caller may do, in any order.
    #[derive(Debug, Clone)]
    enum Step {
        Append(usize),
        Take,
        Store(prop::sample::Index),
        Deliver,
        Send(Child),
        Refetched(Child),
        Attach(Child, u8, prop::sample::Index),
        Detach(Child, Option<u8>),
    }

    fn step() -> impl Strategy<Value = Step> {
        let child = 0u64..4;
        prop_oneof![
            4 => (0usize..20).prop_map(Step::Append),
            4 => Just(Step::Take),
            4 => any::<prop::sample::Index>().prop_map(Step::Store),
            2 => Just(Step::Deliver),
            6 => child.clone().prop_map(Step::Send),
            3 => child.clone().prop_map(Step::Refetched),
            2 => (child.clone(), 0u8..2, any::<prop::sample::Index>()).prop_map(|(child, stripe, from)| Step::Attach(child, stripe, from)),
            1 => (child, prop::option::of(0u8..2)).prop_map(|(child, stripe)| Step::Detach(child, stripe)),
        ]
    }

    proptest! {
        /// Whatever the order of calls: bodies and headers belong to their number, children get every stripe in order, memory is bounded.
        #[test]
        fn any_order_of_calls_is_safe(stripes in 1u8..=2, steps in prop::collection::vec(step(), 0..300)) {
            let mut relay = Log::root(stripes, 50);
            let count = u64::from(stripes);
            let (mut sizes, mut taken, mut delivered) = (Vec::new(), Vec::new(), 0);
            let mut stored = std::collections::HashSet::new();
            let mut expected = std::collections::HashMap::new();
            let mut asked = Vec::new();
            for step in steps {
                match step {
                    Step::Append(bytes) if relay.wants_more(Duration::ZERO) => {
                        let seq = sizes.len() as u64;
                        let body = (bytes > 0).then_some(Bytes(bytes));
                        prop_assert_eq!(relay.append(Entry { header: seq, body }), seq);
                        sizes.push(bytes);
                    }
                    Step::Append(_) => {}
                    Step::Take => {
                        if let Some((seq, entry)) = relay.poll_arrived() {
                            prop_assert_eq!((entry.header, entry.body), (seq, Some(Bytes(sizes[seq as usize]))));
                            taken.push(seq);
                        }
                    }
                    Step::Store(pick) => if !taken.is_empty() {
                        let seq = taken.swap_remove(pick.index(taken.len()));
                        stored.insert(seq);
                        relay.handle_stored(seq);
                    },
                    Step::Deliver => {
                        while let Some((seq, &header)) = relay.poll_deliver() {
                            prop_assert_eq!((seq, header), (delivered, delivered));
                            prop_assert!(sizes[seq as usize] == 0 || stored.contains(&seq));
                            delivered += 1;
                        }
                    }
                    Step::Send(child) => match relay.poll_transmit(child, Duration::ZERO) {
                        Transmit::Entry { seq, entry } => {
                            let next = expected.get_mut(&(child, seq % count)).unwrap();
                            prop_assert_eq!(*next, seq);
                            *next += count;
                            prop_assert_eq!(entry.header, seq);
                            prop_assert_eq!(entry.body.map_or(0, |body| body.0), sizes[seq as usize]);
                        }
                        Transmit::Refetch { seq } => {
                            prop_assert!(stored.contains(&seq), "asked to rebuild what is not in the store");
                            asked.push((child, seq));
                        }
                        Transmit::Idle => {}
                        Transmit::Slow { .. } | Transmit::Leave { .. } => prop_assert!(false, "nobody is slow at one moment"),
                    },
                    Step::Refetched(child) => if let Some(at) = asked.iter().position(|asked| asked.0 == child) {
                        let (child, seq) = asked.swap_remove(at);
                        relay.handle_refetched(child, seq, entry(seq, sizes[seq as usize]));
                    },
                    Step::Attach(child, stripe, pick) => if stripe < stripes {
                        let from = pick.index(sizes.len() / usize::from(stripes) + 2) as u64 * count + u64::from(stripe);
                        relay.attach(child, stripe, from).unwrap();
                        expected.insert((child, u64::from(stripe)), from);
                    },
                    Step::Detach(child, stripe) => relay.detach(child, stripe),
                }
                prop_assert!(relay.memory() <= 50 + 20 + 20 * relay.children().count());
            }
        }
    }
}
