//! A node that replicates the root's log: [`Relay`] and [`Topology`] as the simulator's machine. Bodies are sizes without bytes.
//!
//! It does what the shell around the sockets does: attaches to its parent in each stripe and, when that is lost, to the next ancestor (after
//! the root to its parent again), writes bodies to a store that takes time, rebuilds bodies for children that fell behind, and serves its
//! children in turn.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Input, Link, Machine, Network, Send, Sim};
use crate::net::ascent::Ascent;
use crate::net::relay::{Child, Entry, LATE, ProtocolError, Relay, Transmit, Upstream, Weight};
use crate::net::topology::{Node, Topology};

/// Bytes on the wire beside a body, and of a message without one.
const HEADER: u64 = 168;

/// The root waits for its first children this long.
const ATTACH: Duration = Duration::from_secs(5);

/// A body: its size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u32);

impl Weight for Size {
    fn weight(&self) -> usize {
        self.0 as usize
    }
}

/// What is replicated, and how fast nodes store it.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub entries: u64,
    /// Bytes in a body; every `bare`-th entry has none.
    pub chunk: u32,
    /// 0: all entries have a body.
    pub bare: u64,
    /// Window of every [`Relay`], in bytes.
    pub window: usize,
    /// To write one body to the store, or to rebuild one from it.
    pub store: Duration,
    /// So many nodes, by number, are on one host.
    pub crowd: u32,
}

impl Load {
    fn entry(&self, seq: u64) -> Entry<u32, Size> {
        let bare = self.bare > 0 && seq.is_multiple_of(self.bare);
        Entry { header: seq as u32, body: (!bare).then_some(Size(self.chunk)) }
    }
}

#[derive(Debug)]
pub enum Message {
    Attach { stripe: u8, from: u64 },
    Entry { stripe: u8, seq: u64, entry: Entry<u32, Size> },
    Slow { stripe: u8 },
    Leave { stripe: u8 },
}

/// One node; 0 is the root.
#[derive(Debug)]
pub struct Replica {
    node: Node,
    topology: Topology,
    load: Load,
    relay: Relay<u32, Size>,
    /// Of the last input.
    now: Duration,
    /// Who feeds this node, by stripe.
    upstream: [Option<Node>; 2],
    /// How it came to that, and whether anything was heard of that one.
    ascent: [Ascent; 2],
    heard: [bool; 2],
    attach: Vec<u8>,
    turn: usize,
    /// Children that the root waits for before it reads anything.
    firsts: usize,
    store_free: Duration,
    storing: VecDeque<(Duration, u64)>,
    rebuilding: VecDeque<(Duration, Child, u64)>,
    appended: u64,
    delivered: u64,
    finished: Option<Duration>,
    rebuilt: u64,
    left: u64,
    repeated: u64,
    most_held: usize,
    failure: Option<String>,
}

impl Replica {
    pub fn new(node: Node, topology: Topology, load: Load) -> Self {
        let new = if node == 0 { Relay::root } else { Relay::replica };
        Replica {
            node,
            topology,
            load,
            relay: new(topology.stripes(), load.window),
            now: Duration::ZERO,
            upstream: [None; 2],
            ascent: [Ascent::new(0, Duration::ZERO); 2],
            heard: [false; 2],
            attach: Vec::new(),
            turn: 0,
            firsts: (0..topology.stripes()).map(|stripe| topology.children(stripe, 0).count()).sum(),
            store_free: Duration::ZERO,
            storing: VecDeque::new(),
            rebuilding: VecDeque::new(),
            appended: 0,
            delivered: 0,
            finished: None,
            rebuilt: 0,
            left: 0,
            repeated: 0,
            most_held: 0,
            failure: None,
        }
    }

    /// Its number.
    pub fn node(&self) -> Node {
        self.node
    }

    /// When the whole log was delivered.
    pub fn finished(&self) -> Option<Duration> {
        self.finished
    }

    /// Bodies rebuilt from the store for children.
    pub fn rebuilt(&self) -> u64 {
        self.rebuilt
    }

    /// How often a slow feeder sent it away.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Entries that came although they were here.
    pub fn repeated(&self) -> u64 {
        self.repeated
    }

    /// Bytes of bodies held at one time, at most.
    pub fn most_held(&self) -> usize {
        self.most_held
    }

    /// Who feeds it in a stripe: nobody feeds the root.
    pub fn fed_by(&self, stripe: u8) -> Option<Node> {
        self.upstream.get(usize::from(stripe)).copied().flatten()
    }

    /// Why the node broke, if it did: a peer against the protocol, an entry out of order, memory beyond its bound.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    fn entry(&mut self, stripe: u8, seq: u64, entry: Entry<u32, Size>) -> Result<(), ProtocolError> {
        self.heard[usize::from(stripe)] = true;
        self.repeated += u64::from(seq < self.relay.resume_from(stripe));
        self.relay.handle_entry(stripe, seq, entry)
    }

    /// `peer` does not feed this node in `stripe` any more, if it did.
    fn lost_upstream(&mut self, peer: Node, stripe: u8) {
        if self.fed_by(stripe) == Some(peer) {
            let (ascent, heard) = (&mut self.ascent[usize::from(stripe)], &mut self.heard[usize::from(stripe)]);
            ascent.handle_end(std::mem::take(heard), self.now);
            if ascent.asked().is_none() {
                ascent.handle_end(false, self.now);
            }
            self.follow(stripe);
        }
    }

    fn follow(&mut self, stripe: u8) {
        let host = |node: Node| node / self.load.crowd.max(1);
        let asked = self.ascent[usize::from(stripe)].asked();
        let feeder = asked.and_then(|at| self.topology.ancestors(stripe, self.node).nth(at));
        self.upstream[usize::from(stripe)] = feeder;
        if let Some(feeder) = feeder {
            let near = host(feeder) == host(self.node);
            self.relay.set_upstream(stripe, if near { Upstream::Near } else { Upstream::Linked });
            self.attach.push(stripe);
        }
    }

    /// Everything that needs no network: the source, the store, delivery.
    fn advance(&mut self, now: Duration) {
        while self.storing.front().is_some_and(|&(at, _)| at <= now)
            && let Some((_, seq)) = self.storing.pop_front()
        {
            self.relay.handle_stored(seq);
        }
        while self.rebuilding.front().is_some_and(|&(at, ..)| at <= now)
            && let Some((_, child, seq)) = self.rebuilding.pop_front()
        {
            self.relay.handle_refetched(child, seq, self.load.entry(seq));
        }
        loop {
            let begun = self.appended > 0 || self.relay.children().count() >= self.firsts || now >= ATTACH;
            let source = self.node == 0 && begun && self.appended < self.load.entries && self.relay.wants_more(now);
            if source {
                self.relay.append(self.load.entry(self.appended));
                self.appended += 1;
            }
            while let Some((seq, _)) = self.relay.poll_arrived() {
                if self.load.store.is_zero() {
                    self.relay.handle_stored(seq);
                } else {
                    self.store_free = self.store_free.max(now) + self.load.store;
                    self.storing.push_back((self.store_free, seq));
                }
            }
            if !source {
                break;
            }
        }
        while let Some((seq, &header)) = self.relay.poll_deliver() {
            if (seq, header) != (self.delivered, self.delivered as u32) {
                self.failure = Some(format!("delivered {header} as {seq} after {}", self.delivered));
            }
            self.delivered += 1;
            if self.delivered == self.load.entries {
                self.finished = Some(now);
            }
        }
        let bound = self.load.window + self.load.chunk as usize * (2 + self.relay.children().count());
        let held = self.relay.memory();
        self.most_held = self.most_held.max(held);
        if held > bound {
            self.failure = Some(format!("{held} bytes held"));
        }
    }
}

impl Machine for Replica {
    type Message = Message;

    fn handle(&mut self, now: Duration, input: Input<Message>) {
        self.now = now;
        let result = match input {
            Input::Start => {
                for stripe in 0..self.topology.stripes() {
                    self.ascent[usize::from(stripe)] =
                        Ascent::new(self.topology.ancestors(stripe, self.node).count(), now);
                    self.follow(stripe);
                }
                Ok(())
            }
            Input::Message { from, message: Message::Attach { stripe, from: seq } } => {
                self.relay.attach(from.peer.into(), stripe, seq)
            }
            Input::Message { message: Message::Entry { stripe, seq, entry }, .. } => self.entry(stripe, seq, entry),
            Input::Message { message: Message::Slow { stripe }, .. } => {
                self.relay.handle_slow(stripe);
                Ok(())
            }
            Input::Message { from, message: Message::Leave { stripe } } => {
                self.left += 1;
                self.lost_upstream(from.peer, stripe);
                Ok(())
            }
            Input::Lost(Link { peer, opened: true }) => {
                (0..self.topology.stripes()).for_each(|stripe| self.lost_upstream(peer, stripe));
                Ok(())
            }
            Input::Lost(Link { peer, opened: false }) => {
                self.relay.detach(peer.into(), None);
                Ok(())
            }
            Input::Wake => Ok(()),
        };
        if let Err(error) = result {
            self.failure = Some(error.to_string());
        }
        self.advance(now);
    }

    fn poll_transmit(&mut self, now: Duration, writable: &dyn Fn(Link) -> bool) -> Option<Send<Message>> {
        // What was sent makes room for the source; others have advanced with what they were told.
        if self.node == 0 {
            self.advance(now);
        }
        let fed_by = |stripe: u8| Some(Link { peer: self.upstream[usize::from(stripe)]?, opened: true });
        if let Some((at, to)) =
            (0..self.attach.len()).find_map(|at| Some((at, fed_by(self.attach[at]).filter(|to| writable(*to))?)))
        {
            let stripe = self.attach.remove(at);
            let message = Message::Attach { stripe, from: self.relay.resume_from(stripe) };
            return Some(Send { to, bytes: HEADER, message });
        }
        let feeds = self.relay.children().count();
        for turn in (0..feeds).map(|n| (self.turn + n) % feeds) {
            let child = self.relay.children().nth(turn)?;
            let link = Link { peer: child as Node, opened: false };
            while writable(link) {
                match self.relay.poll_transmit(child, now) {
                    Transmit::Entry { seq, entry } => {
                        self.turn = turn + 1;
                        let stripe = (seq % u64::from(self.topology.stripes())) as u8;
                        let bytes = HEADER + entry.body.map_or(0, |body| u64::from(body.0));
                        return Some(Send { to: link, bytes, message: Message::Entry { stripe, seq, entry } });
                    }
                    Transmit::Refetch { seq } => {
                        self.rebuilt += 1;
                        if self.load.store.is_zero() {
                            self.relay.handle_refetched(child, seq, self.load.entry(seq));
                        } else {
                            self.rebuilding.push_back((now + self.load.store, child, seq));
                        }
                    }
                    Transmit::Slow { stripe } => {
                        return Some(Send { to: link, bytes: HEADER, message: Message::Slow { stripe } });
                    }
                    Transmit::Leave { stripe } => {
                        return Some(Send { to: link, bytes: HEADER, message: Message::Leave { stripe } });
                    }
                    Transmit::Idle => break,
                }
            }
        }
        None
    }

    fn poll_timeout(&self) -> Option<Duration> {
        let stored = self.storing.front().map(|&(at, _)| at);
        let rebuilt = self.rebuilding.front().map(|&(at, ..)| at);
        let begin = (self.node == 0 && self.appended == 0).then_some(ATTACH);
        let room = (self.node != 0 && !self.relay.wants_more(self.now)).then(|| self.now + LATE);
        stored.into_iter().chain(rebuilt).chain(begin).chain(room).min()
    }

    fn accepts(&self, message: &Message) -> bool {
        self.relay.wants_more(self.now) || !matches!(message, Message::Entry { .. })
    }
}

/// The simulation of a whole broadcast, nothing started yet.
pub fn broadcast(topology: Topology, load: Load, network: Network, seed: u64) -> Sim<Replica> {
    Sim::new(network, seed, (0..topology.nodes()).map(|node| Replica::new(node, topology, load)))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::net::relay::WINDOW;
    use crate::net::topology::{CostModel, Shape};
    use crate::net::wire::frame::{Message as _, PREFIX, TAG};
    use crate::net::wire::log::LogFrame;
    use crate::net::wire::record::{Codec, Record};
    use fastrand::Rng;

    pub(in super::super) const CHUNK: u32 = 1 << 20;
    pub(in super::super) const PATIENCE: Duration = Duration::from_secs(100_000);

    pub(in super::super) fn load(entries: u64) -> Load {
        Load { entries, chunk: CHUNK, bare: 0, window: WINDOW, store: Duration::ZERO, crowd: 1 }
    }

    /// Everybody alive has everything, in order and within memory; the time when the last one had.
    pub(in super::super) fn completed(sim: &Sim<Replica>) -> Duration {
        for node in sim.living() {
            assert_eq!(node.failure(), None, "node {}", node.node);
            assert!(node.finished().is_some(), "node {} has {} entries", node.node, node.delivered);
        }
        sim.living().filter_map(Replica::finished).max().expect("the root is alive")
    }

    pub(in super::super) fn undisturbed(topology: Topology, load: Load, network: Network) -> Sim<Replica> {
        let mut sim = broadcast(topology, load, network, 0);
        sim.start_all();
        assert!(sim.run(PATIENCE));
        sim
    }

    #[test]
    fn frames_are_as_long_as_the_real_ones() {
        let record = Record::Chunk { file: 7, offset: 1 << 30, len: CHUNK, codec: Codec::Raw };
        let header = LogFrame::Entry { seq: 1 << 20, record, hash: [1; 32] }.encode().len();
        assert_eq!(HEADER, (PREFIX + header + TAG) as u64);
    }

    #[test]
    fn every_link_is_used_all_the_time() {
        let network = Network::default();
        for shape in [Shape::Chain, Shape::TwoTrees] {
            for nodes in [2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 100] {
                let topology = Topology::new(shape, nodes);
                let entries = 200;
                let took = completed(&undisturbed(topology, load(entries), network)).as_secs_f64();
                let chunk = f64::from(CHUNK) / network.bandwidth;
                let hops = f64::from(topology.max_depth()) * (network.latency.as_secs_f64() + chunk);
                let bound = 1.15 * entries as f64 * chunk + hops;
                assert!(took <= bound, "{shape:?} {nodes}: {took} s, bound {bound} s");
            }
        }
    }

    /// The plan against the simulator: the other shape is never much better, and the estimate is near.
    #[test]
    fn the_plan_is_good() {
        for (latency, per_chunk) in [(10, 1), (50, 200), (1000, 100), (50, 1500)] {
            let (latency, per_chunk) = (Duration::from_micros(latency), Duration::from_micros(per_chunk));
            let network =
                Network { latency, processing: f64::from(CHUNK) / per_chunk.as_secs_f64(), ..Network::default() };
            let attaching = latency.as_secs_f64();
            for entries in [1, 3, 10, 30, 100] {
                let bytes = entries * u64::from(CHUNK);
                let cost = CostModel { bytes, chunk: CHUNK.into(), bandwidth: network.bandwidth, latency, per_chunk };
                for nodes in [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 20, 24, 31, 33, 48, 100, 200] {
                    let [chain, trees] = [Shape::Chain, Shape::TwoTrees].map(|shape| {
                        let topology = Topology::new(shape, nodes);
                        let took = completed(&undisturbed(topology, load(entries), network)).as_secs_f64() - attaching;
                        let off = topology.estimate(&cost).as_secs_f64() / took;
                        assert!((0.7..1.5).contains(&off), "{topology:?} {cost:?}: estimate {off} of {took} s");
                        took
                    });
                    let planned = Topology::plan(nodes, &cost).shape();
                    let took = if planned == Shape::Chain { chain } else { trees };
                    assert!(took <= 1.2 * chain.min(trees), "{nodes} {cost:?}: {planned:?}, {chain} s, {trees} s");
                }
            }
        }
    }

    /// A broadcast with everything that can go wrong, by the seed.
    fn disturbed(seed: u64, most_nodes: u32) -> Sim<Replica> {
        let mut rng = Rng::with_seed(seed);
        let nodes = rng.u32(1..=most_nodes);
        let shape = if rng.bool() { Shape::Chain } else { Shape::TwoTrees };
        let network = Network {
            latency: Duration::from_micros(rng.u64(1..2000)),
            jitter: Duration::from_micros(rng.u64(1..5000)),
            processing: 1e9 * f64::from(rng.u32(1..20)),
            buffer: u64::from(CHUNK) * rng.u64(1..5),
            detection: Duration::from_millis(rng.u64(1..30)),
            ..Network::default()
        };
        let load = Load {
            entries: rng.u64(1..60),
            bare: rng.u64(0..5),
            window: CHUNK as usize * rng.usize(1..16),
            store: Duration::from_micros(rng.u64(0..1500) * u64::from(rng.bool())),
            crowd: rng.u32(1..4),
            ..load(0)
        };
        let mut sim = broadcast(Topology::new(shape, nodes), load, network, seed);
        sim.start(0, Duration::ZERO);
        let moment = |rng: &mut Rng| Duration::from_micros(rng.u64(0..120_000));
        for node in 1..nodes {
            let late = if rng.u8(0..8) == 0 { moment(&mut rng) } else { Duration::from_micros(rng.u64(0..1000)) };
            sim.start(node, late);
            match rng.u8(0..16) {
                0 => sim.crash(node, late + moment(&mut rng)),
                1 => sim.cut(node, rng.u32(0..nodes), moment(&mut rng)),
                2 => sim.set_bandwidth(node, network.bandwidth / 20.0),
                3 => (0..nodes).for_each(|other| sim.cut(node, other, late + Duration::from_millis(20))),
                _ => {}
            }
        }
        sim
    }

    /// Small ones reach more of the rare orders of events, large ones deeper trees.
    #[test]
    fn everybody_alive_gets_the_log_whatever_happens() {
        survive(0..1500, 12);
        survive(1500..3500, 256);
    }

    #[test]
    #[ignore = "takes minutes"]
    fn a_hundred_thousand_seeds() {
        survive(0..100_000, 256);
    }

    fn survive(seeds: std::ops::Range<u64>, most_nodes: u32) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for first in 0..threads {
                let mine = seeds.clone().skip(first).step_by(threads);
                scope.spawn(move || mine.for_each(|seed| one(seed, most_nodes)));
            }
        });
    }

    fn one(seed: u64, most_nodes: u32) {
        let checked = std::panic::catch_unwind(|| {
            let mut sim = disturbed(seed, most_nodes);
            assert!(sim.run(PATIENCE));
            completed(&sim);
        });
        assert!(checked.is_ok(), "seed {seed} with at most {most_nodes} nodes");
    }

    #[test]
    fn equal_seeds_give_equal_runs() {
        let run = |seed| {
            let mut sim = disturbed(seed, 50);
            assert!(sim.run(PATIENCE));
            (sim.now(), sim.events())
        };
        assert_eq!(run(7), run(7));
    }

    /// Of all above it only the root answers, and it takes as long as a connection is tried until that is known of each.
    #[test]
    fn who_hears_nothing_of_its_ancestors_goes_to_the_root() {
        let network = Network { detection: Duration::from_secs(3), ..Network::default() };
        let mut sim = broadcast(Topology::new(Shape::Chain, 14), load(100), network, 0);
        [0, 13].into_iter().for_each(|node| sim.start(node, Duration::ZERO));
        assert!(sim.run(PATIENCE));
        assert!(completed(&sim) < Duration::from_secs(8));
    }

    #[test]
    fn who_joins_late_gets_all() {
        let topology = Topology::new(Shape::Chain, 3);
        let mut sim = broadcast(topology, load(100), Network::default(), 0);
        sim.start(0, Duration::ZERO);
        sim.start(1, Duration::ZERO);
        sim.start(2, Duration::from_secs(10));
        assert!(sim.run(PATIENCE));
        assert!(completed(&sim) < Duration::from_millis(10_200));
        assert_eq!(sim.living().map(Replica::rebuilt).max(), Some(100));
    }
}
