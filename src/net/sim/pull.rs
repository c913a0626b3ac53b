//! Nodes that pass on what they are asked for: [`Pull`] as the simulator's machine, over a tree in which node n's parent is (n - 1) / `arity`.
//!
//! It does what the shell around the sockets does: answers with what it has, keeps what comes. Beyond it, who loses its parent asks the next
//! ancestor, as a tree that heals would have it; nothing else tells him what to ask for anew but the time.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::{Input, Link, Machine, Send};
use crate::net::pull::{Pull, pieces};
use crate::net::topology::Node;
use crate::net::wire::record::{PIECE, Piece};

/// Bytes of a question, and of an answer beside its body.
const HEADER: u64 = 96;

#[derive(Debug)]
pub enum Message {
    Fetch(Piece),
    Piece(Piece),
}

/// One node; 0 is the root, which has everything.
#[derive(Debug)]
pub struct Fetcher {
    node: Node,
    parent: Node,
    arity: Node,
    epoch: Instant,
    pull: Pull<Node>,
    /// What it needs, and when it begins to.
    needs: Vec<Piece>,
    from: Duration,
    begun: bool,
    has: HashSet<Piece>,
    asks: VecDeque<Piece>,
    answers: VecDeque<(Node, Piece)>,
    finished: Option<Duration>,
    /// Questions of one piece, at most.
    questions: Vec<(Piece, u32)>,
    /// Questions from one child that were not answered, at most.
    most_open: usize,
}

impl Fetcher {
    /// `needs`: files of so many bytes, from this moment on.
    pub fn new(node: Node, arity: Node, epoch: Instant, needs: &[(u32, u64)], from: Duration) -> Fetcher {
        let needs = needs.iter().flat_map(|(file, size)| pieces(*file, *size)).collect();
        Fetcher {
            node,
            parent: node.saturating_sub(1) / arity,
            arity,
            epoch,
            pull: Pull::default(),
            needs,
            from,
            begun: false,
            has: HashSet::new(),
            asks: VecDeque::new(),
            answers: VecDeque::new(),
            finished: None,
            questions: Vec::new(),
            most_open: 0,
        }
    }

    fn answer_or_ask(&mut self, who: Node, piece: Piece) {
        if self.node == 0 || self.has.contains(&piece) {
            self.answers.push_back((who, piece));
            let open = self.answers.iter().filter(|(to, _)| *to == who).count();
            self.most_open = self.most_open.max(open);
        } else {
            self.pull.handle_ask(who, piece, false);
        }
    }
}

impl Machine for Fetcher {
    type Message = Message;

    fn handle(&mut self, now: Duration, input: Input<Message>) {
        match input {
            Input::Message { from, message: Message::Fetch(piece) } => self.answer_or_ask(from.peer, piece),
            Input::Message { message: Message::Piece(piece), .. } => {
                self.has.insert(piece);
                let me = self.node;
                let waiting = self.pull.handle_here(piece);
                self.answers.extend(waiting.into_iter().filter(|who| *who != me).map(|who| (who, piece)));
            }
            Input::Lost(Link { peer, opened: true }) if peer == self.parent && peer != 0 => {
                self.parent = (self.parent - 1) / self.arity;
            }
            Input::Lost(Link { peer, opened: false }) => self.answers.retain(|(to, _)| *to != peer),
            Input::Start | Input::Wake | Input::Lost(_) => {}
        }
        if now >= self.from && self.finished.is_none() {
            let missing: Vec<Piece> = self.needs.iter().filter(|piece| !self.has.contains(piece)).copied().collect();
            if missing.is_empty() {
                self.finished = Some(now);
            } else if !std::mem::replace(&mut self.begun, true) {
                missing.into_iter().for_each(|piece| self.pull.handle_ask(self.node, piece, false));
            }
        }
        while self.node != 0
            && let Some(piece) = self.pull.poll_ask(self.epoch + now)
        {
            self.asks.push_back(piece);
        }
    }

    fn poll_transmit(&mut self, _: Duration, writable: &dyn Fn(Link) -> bool) -> Option<Send<Message>> {
        let up = Link { peer: self.parent, opened: true };
        if writable(up)
            && let Some(piece) = self.asks.pop_front()
        {
            match self.questions.iter_mut().find(|(known, _)| *known == piece) {
                Some((_, count)) => *count += 1,
                None => self.questions.push((piece, 1)),
            }
            return Some(Send { to: up, bytes: HEADER, message: Message::Fetch(piece) });
        }
        let down = |peer| Link { peer, opened: false };
        let at = self.answers.iter().position(|(to, _)| writable(down(*to)))?;
        let (to, piece) = self.answers.remove(at)?;
        Some(Send { to: down(to), bytes: HEADER + PIECE, message: Message::Piece(piece) })
    }

    fn poll_timeout(&self) -> Option<Duration> {
        let again = self.pull.poll_timeout().map(|at| at - self.epoch);
        let begin = (!self.begun && self.finished.is_none()).then_some(self.from);
        again.into_iter().chain(begin).min()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Network, Sim};
    use super::*;
    use crate::net::pull::WINDOW;
    use fastrand::Rng;

    const PATIENCE: Duration = Duration::from_secs(100_000);

    /// The nodes between one and the root.
    fn above(node: Node, arity: Node) -> impl Iterator<Item = Node> {
        std::iter::successors((node > 0).then(|| (node - 1) / arity), move |n| (*n > 0).then(|| (n - 1) / arity))
    }

    #[test]
    fn only_who_asks_and_who_is_on_the_way_gets_it_and_every_link_carries_it_once() {
        let (nodes, arity, epoch, size) = (1000, 8, Instant::now(), 20_000_000);
        for askers in [vec![777], vec![600, 601, 777, 5], (1..nodes).collect()] {
            let need = |node| if askers.contains(&node) { vec![(1, size)] } else { Vec::new() };
            // Not all at once: what is above answers those who are late.
            let from = |node: Node| Duration::from_millis(u64::from(node % 7) * 30);
            let machines = (0..nodes).map(|n| Fetcher::new(n, arity, epoch, &need(n), from(n)));
            let mut sim = Sim::new(Network::default(), 1, machines);
            sim.start_all();
            assert!(sim.run(PATIENCE));
            let count = pieces(1, size).count();
            let on_the_way: HashSet<Node> = askers.iter().flat_map(|n| above(*n, arity).chain([*n])).collect();
            let mut sent_by_root = 0;
            for node in sim.living() {
                let got = if node.node > 0 && on_the_way.contains(&node.node) { count } else { 0 };
                assert_eq!(node.has.len(), got, "node {}", node.node);
                assert_eq!(sim.traffic(node.node).received_bytes / PIECE, got as u64, "node {}", node.node);
                assert!(node.most_open <= WINDOW, "{}", node.most_open);
                assert!(node.finished.is_some() && node.questions.iter().all(|(_, times)| *times == 1));
                sent_by_root += u64::from(node.node > 0 && node.parent == 0 && got > 0);
            }
            assert_eq!(sim.traffic(0).sent, sent_by_root * count as u64, "one piece for each child that asks");
        }
    }

    /// Random askers, files, moments; nodes that crash, links that break. Everybody alive gets what he needs.
    fn disturbed(seed: u64) {
        let (mut random, epoch) = (Rng::with_seed(seed), Instant::now());
        let (nodes, arity) = (random.u32(2..64), random.u32(1..5));
        let files: Vec<(u32, u64)> = (0..random.u32(1..5)).map(|file| (file, random.u64(0..30) * PIECE / 2)).collect();
        let network = Network {
            latency: Duration::from_micros(random.u64(1..2000)),
            jitter: Duration::from_micros(random.u64(1..5000)),
            buffer: PIECE * random.u64(1..5),
            detection: Duration::from_millis(random.u64(1..30)),
            ..Network::default()
        };
        let mut machines = Vec::new();
        for node in 0..nodes {
            let needs: Vec<(u32, u64)> = files.iter().copied().filter(|_| node > 0 && random.bool()).collect();
            machines.push(Fetcher::new(node, arity, epoch, &needs, Duration::from_micros(random.u64(0..50_000))));
        }
        let mut sim = Sim::new(network, seed, machines);
        sim.start_all();
        for node in 1..nodes {
            let moment = Duration::from_micros(random.u64(0..120_000));
            match random.u8(0..12) {
                0 => sim.crash(node, moment),
                1 => sim.cut(node, (node - 1) / arity, moment),
                2 => sim.set_bandwidth(node, network.bandwidth / 20.0),
                _ => {}
            }
        }
        assert!(sim.run(PATIENCE), "seed {seed}");
        for node in sim.living() {
            assert!(node.finished.is_some(), "seed {seed}: node {} of {nodes}: {:?}", node.node, node.pull);
            // A question is repeated every ten seconds, and nobody waits that long more than a few times.
            assert!(node.questions.iter().all(|(_, times)| *times <= nodes), "seed {seed}");
        }
    }

    #[test]
    fn everybody_alive_gets_what_he_needs_whatever_happens() {
        (0..300).for_each(disturbed);
    }
}
