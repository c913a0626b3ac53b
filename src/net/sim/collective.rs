//! The collectives of many nodes, some of which are lost: everybody who is left gets what he should, or is told who is missing. Members take
//! their time before they call, and end after their last operation.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::{Input, Link, Machine, Network, Send, Sim};
use crate::net::collective::{Answer, Branch, Trunk, text};
use crate::net::wire::collective::{Act, Fault, Verdict, Word};
use crate::net::wire::control::{NodeId, Target};

/// The last is one that the master gives.
const ROUNDS: u32 = 18;
const CHILDREN: u32 = 3;
const ACTS: [Act; 7] =
    [Act::Barrier, Act::Broadcast, Act::Gather, Act::Scatter, Act::Broadcast, Act::Scatter, Act::AllGather];

enum Message {
    Hello,
    Up(Word, Vec<u8>),
    /// These ranks ended, or their nodes are lost.
    Gone(Vec<u32>),
    Down(Target, Verdict, Vec<u8>),
}

struct Peer {
    node: NodeId,
    nodes: u32,
    /// Ranks of each node but the root, which has none.
    each: u32,
    trunk: Option<Trunk>,
    branch: Option<Branch>,
    /// Of each member here: operations that it has called, and what it was told at the end.
    called: Vec<u32>,
    failed: Vec<Option<Vec<u32>>>,
    /// When it calls the next one, and how long it takes for that at most.
    calls: Vec<Option<Duration>>,
    pause: Duration,
    random: fastrand::Rng,
    orphan: bool,
    out: VecDeque<(Link, Message)>,
}

fn parent(node: NodeId) -> NodeId {
    (node - 1) / CHILDREN
}

fn is_below(mut node: NodeId, top: NodeId) -> bool {
    while node > top {
        node = parent(node);
    }
    node == top
}

fn item(round: u32, rank: u32) -> Vec<u8> {
    format!("{round}.{rank}").repeat(1 + rank as usize % 4).into_bytes()
}

impl Peer {
    fn new(node: NodeId, nodes: u32, each: u32, pause: Duration) -> Peer {
        let size = (nodes - 1) * each;
        let first = node.saturating_sub(1) * each;
        let expected = (1..nodes).filter(|other| is_below(*other, node)).count() as u32 * each;
        let is_root = node == 0;
        let owners = || (0..size).map(|rank| 1 + rank / each).collect();
        Peer {
            node,
            nodes,
            each,
            trunk: is_root.then(|| Trunk::new(owners())),
            branch: (!is_root).then(|| Branch::new(node, size, (first..first + each).collect(), expected)),
            called: vec![0; each as usize],
            failed: vec![None; each as usize],
            calls: vec![None; each as usize],
            pause,
            random: fastrand::Rng::with_seed(node.into()),
            orphan: false,
            out: VecDeque::new(),
        }
    }

    fn size(&self) -> u32 {
        (self.nodes - 1) * self.each
    }

    fn children(&self) -> impl Iterator<Item = NodeId> + use<> {
        let (first, nodes) = (self.node * CHILDREN + 1, self.nodes);
        (first..first + CHILDREN).filter(move |child| *child < nodes)
    }

    fn call(&mut self, member: usize) {
        let (round, size) = (self.called[member], self.size());
        let rank = (self.node - 1) * self.each + member as u32;
        let items: Vec<Vec<u8>> = match ACTS[round as usize % ACTS.len()] {
            Act::Gather | Act::AllGather => vec![item(round, rank)],
            Act::Broadcast if rank == 0 => vec![item(round, 0)],
            Act::Scatter if rank == 0 => (0..size).map(|to| item(round, to)).collect(),
            _ => Vec::new(),
        };
        let items: Vec<&[u8]> = items.iter().map(Vec::as_slice).collect();
        let branch = self.branch.as_mut().unwrap();
        if ACTS[round as usize % ACTS.len()] == Act::Barrier {
            branch.put(member, &item(round, rank), b"value");
        }
        branch.handle_call(member, ACTS[round as usize % ACTS.len()], &items).unwrap();
        self.called[member] += 1;
    }

    fn check(&self, member: usize, reply: &[u8]) {
        let (round, size) = (self.called[member] - 1, self.size());
        let rank = (self.node - 1) * self.each + member as u32;
        let items: Vec<Vec<u8>> = match ACTS[round as usize % ACTS.len()] {
            Act::Barrier => {
                let all = (0..size).all(|other| self.branch.as_ref().unwrap().get(&item(round, other)).is_some());
                assert!(all, "every key is here after the barrier");
                Vec::new()
            }
            Act::Broadcast => vec![item(round, 0)],
            Act::Scatter => vec![item(round, rank)],
            Act::Gather if rank != 0 => Vec::new(),
            Act::Gather | Act::AllGather => (0..size).map(|other| item(round, other)).collect(),
        };
        let items: Vec<&[u8]> = items.iter().map(Vec::as_slice).collect();
        assert_eq!(reply, text::done(&items), "round {round} at rank {rank}");
    }

    fn call_later(&mut self, member: usize, now: Duration) {
        self.calls[member] = Some(now + self.pause.mul_f64(self.random.f64()));
    }

    fn call_due(&mut self, now: Duration) {
        for member in 0..self.calls.len() {
            if self.calls[member].take_if(|at| *at <= now).is_some() {
                self.call(member);
            }
        }
    }

    fn settle(&mut self, now: Duration) {
        while let Some((member, answer)) = self.branch.as_mut().and_then(Branch::poll_answer) {
            match answer {
                Answer::Done(reply) => {
                    self.check(member, &reply);
                    if self.called[member] < ROUNDS {
                        self.call_later(member, now);
                    } else {
                        self.gone(now, vec![(self.node - 1) * self.each + member as u32]);
                    }
                }
                Answer::Failed(broken) => {
                    assert_eq!(broken.kind, Fault::Lost);
                    self.failed[member] = Some(broken.ranks.clone());
                }
            }
        }
        while let Some((word, body)) = self.branch.as_mut().and_then(Branch::poll_word) {
            self.up(Message::Up(word, body));
        }
        while let Some((to, verdict, body)) = self.trunk.as_mut().and_then(Trunk::poll_verdict) {
            self.down(to, verdict, &body);
        }
    }

    fn up(&mut self, message: Message) {
        self.out.push_back((Link { peer: parent(self.node), opened: true }, message));
    }

    fn down(&mut self, to: Target, verdict: Verdict, body: &[u8]) {
        for child in self.children() {
            if !matches!(to, Target::Node(node) if !is_below(node, child)) {
                let message = Message::Down(to, verdict.clone(), body.to_vec());
                self.out.push_back((Link { peer: child, opened: false }, message));
            }
        }
    }

    fn gone(&mut self, now: Duration, ranks: Vec<u32>) {
        match &mut self.trunk {
            Some(trunk) => trunk.handle_gone(now, ranks),
            None => self.up(Message::Gone(ranks)),
        }
    }
}

impl Machine for Peer {
    type Message = Message;

    fn handle(&mut self, now: Duration, input: Input<Message>) {
        match input {
            Input::Start if self.branch.is_some() => {
                self.up(Message::Hello);
                (0..self.called.len()).for_each(|member| self.call_later(member, now));
            }
            Input::Message { message: Message::Up(word, body), .. } => match (&mut self.branch, word) {
                (Some(branch), Word::Joined { node, seq, act, ranks, more }) => {
                    branch.handle_joined(node, seq, act, ranks, more, &body);
                }
                (Some(_), word) => self.up(Message::Up(word, body)),
                (None, word) => self.trunk.as_mut().unwrap().handle_word(now, word, &body),
            },
            Input::Message { message: Message::Gone(ranks), .. } => self.gone(now, ranks),
            Input::Message { message: Message::Down(to, verdict, body), .. } => {
                self.down(to, verdict.clone(), &body);
                if matches!(to, Target::All) || to == Target::Node(self.node) {
                    self.branch.as_mut().unwrap().handle_verdict(verdict, &body);
                }
            }
            Input::Lost(Link { peer, opened: true }) if peer < self.node => self.orphan = true,
            Input::Lost(Link { peer, .. }) => {
                let (each, below) = (self.each, (1..self.nodes).filter(|node| is_below(*node, peer)));
                self.gone(now, below.flat_map(|node| (node - 1) * each..node * each).collect());
            }
            Input::Start | Input::Wake | Input::Message { message: Message::Hello, .. } => {}
        }
        self.trunk.iter_mut().for_each(|trunk| trunk.handle_timeout(now));
        self.call_due(now);
        self.settle(now);
    }

    fn poll_timeout(&self) -> Option<Duration> {
        let trunk = self.trunk.as_ref().and_then(Trunk::poll_timeout);
        self.calls.iter().flatten().copied().chain(trunk).min()
    }

    fn poll_transmit(&mut self, _: Duration, writable: &dyn Fn(Link) -> bool) -> Option<Send<Message>> {
        let at = self.out.iter().position(|(link, _)| writable(*link))?;
        let (to, message) = self.out.remove(at)?;
        Some(Send { to, bytes: 200, message })
    }
}

/// `pause`: that long members take before they call; `crashes`: nodes, and when.
fn run(seed: u64, nodes: u32, each: u32, pause: Duration, crashes: &[(NodeId, Duration)]) {
    let network = Network { jitter: Duration::from_micros(300), ..Network::default() };
    let mut sim = Sim::new(network, seed, (0..nodes).map(|node| Peer::new(node, nodes, each, pause)));
    sim.start_all();
    crashes.iter().for_each(|(node, at)| sim.crash(*node, *at));
    assert!(sim.run(Duration::from_secs(60)), "seed {seed}: it does not come to rest");
    let is_lost = |node: NodeId| crashes.iter().any(|(crashed, _)| is_below(node, *crashed));
    let lost: BTreeSet<u32> =
        (1..nodes).filter(|node| is_lost(*node)).flat_map(|node| (node - 1) * each..node * each).collect();
    for peer in sim.living().filter(|peer| peer.branch.is_some() && !is_lost(peer.node)) {
        assert!(!peer.orphan);
        for (called, failed) in peer.called.iter().zip(&peer.failed) {
            match failed {
                Some(missing) => {
                    let some = !missing.is_empty() && missing.iter().all(|rank| lost.contains(rank));
                    assert!(some, "seed {seed}: {missing:?} of {lost:?}");
                }
                None => assert_eq!(*called, ROUNDS, "seed {seed}: a member of node {} hangs", peer.node),
            }
        }
    }
}

#[test]
fn all_get_what_they_should() {
    for (nodes, each) in [(2, 1), (2, 5), (5, 2), (14, 3), (41, 1)] {
        for pause in [0, 50, 500, 5_000] {
            run(1, nodes, each, Duration::from_micros(pause), &[]);
        }
    }
}

#[test]
fn who_is_left_is_told_who_is_missing() {
    for seed in 0..400 {
        let mut random = fastrand::Rng::with_seed(seed);
        let (nodes, pause) = (random.u32(3..30), random.u64(0..1_000));
        let within = 12_000 + u64::from(ROUNDS) * pause;
        let crash = |random: &mut fastrand::Rng| (random.u32(1..nodes), Duration::from_micros(random.u64(0..within)));
        let crashes: Vec<_> = (0..random.usize(1..4)).map(|_| crash(&mut random)).collect();
        run(seed, nodes, random.u32(1..4), Duration::from_micros(pause), &crashes);
    }
}
