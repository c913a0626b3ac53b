//! The root's part: answers complete operations, and breaks those off that cannot become complete.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::{Gathering, entries, entry, is_given, pieces};
use crate::net::wire::collective::{Act, Broken, Fault, Verdict, Word};
use crate::net::wire::control::{NodeId, Target};

/// Nodes say who is absent within this time, or are taken to be absent with all their ranks.
const ROLL: Duration = Duration::from_secs(2);
/// Nodes are told who else is gone this often at most: at a job's end its ranks go one by one.
const SPREAD: Duration = Duration::from_millis(50);

/// See the module. Calling order: any `handle_*`, then [`Trunk::poll_verdict`] until it is empty, and [`Trunk::poll_timeout`]. Times are
/// since any fixed moment.
#[derive(Debug)]
pub struct Trunk {
    /// The node of each rank.
    nodes: Vec<NodeId>,
    /// The operation that is under way, and whether the one before it was given ([`is_given`]).
    seq: u32,
    given_before: bool,
    gatherings: BTreeMap<u32, Gathering>,
    /// A member has called something.
    begun: bool,
    gone: BTreeSet<u32>,
    /// Of those the ones that nodes were not told of; and before when they are not.
    untold: BTreeSet<u32>,
    quiet_until: Duration,
    broken: Option<Broken>,
    roll: Option<Roll>,
    verdicts: VecDeque<(Target, Verdict, Vec<u8>)>,
}

/// Who is absent is being asked.
#[derive(Debug)]
struct Roll {
    seq: u32,
    awaited: BTreeSet<NodeId>,
    absent: BTreeSet<u32>,
    until: Duration,
}

impl Trunk {
    /// For a job whose ranks are on these nodes.
    pub fn new(nodes: Vec<NodeId>) -> Trunk {
        Trunk {
            nodes,
            seq: 0,
            given_before: false,
            gatherings: BTreeMap::new(),
            begun: false,
            gone: BTreeSet::new(),
            untold: BTreeSet::new(),
            quiet_until: Duration::ZERO,
            broken: None,
            roll: None,
            verdicts: VecDeque::new(),
        }
    }

    /// A node has said something; what is not about operations is ignored.
    pub fn handle_word(&mut self, now: Duration, word: Word, body: &[u8]) {
        match word {
            Word::Begun if !self.begun => {
                self.begun = true;
                self.miss(now);
            }
            Word::Given { seq, act, more } if seq == self.seq && self.broken.is_none() => {
                let master = self.master();
                match self.gatherings.entry(seq).or_default().add_piece(master, act, 0, more, body) {
                    Err(why) => self.break_off(Fault::Misused, BTreeSet::new(), why),
                    Ok(()) if more => {}
                    Ok(()) => self.conclude(),
                }
            }
            Word::Joined { node, seq, act, ranks, more } if seq.wrapping_sub(self.seq) <= 1 => {
                let added = self.gatherings.entry(seq).or_default().add_piece(node, act, ranks, more, body);
                match added {
                    Err(why) => self.break_off(Fault::Misused, BTreeSet::new(), why),
                    Ok(()) => self.complete(),
                }
            }
            Word::Fault { why, .. } => self.break_off(Fault::Misused, BTreeSet::new(), why),
            // Or at the last one, which was given: its node waits for others there.
            Word::Late { seq } if self.seq.wrapping_sub(seq) <= 1 && self.roll.is_none() && self.broken.is_none() => {
                let awaited: BTreeSet<NodeId> = self.nodes.iter().copied().collect();
                self.roll = Some(Roll { seq, awaited, absent: BTreeSet::new(), until: now + ROLL });
                self.verdicts.push_back((Target::All, Verdict::Roll { seq }, Vec::new()));
            }
            Word::Absent { node, seq, ranks } => {
                if let Some(roll) = self.roll.as_mut().filter(|roll| roll.seq == seq) {
                    roll.awaited.remove(&node);
                    roll.absent.extend(ranks);
                    if roll.awaited.is_empty() {
                        self.call_off();
                    }
                }
            }
            _ => {}
        }
    }

    /// These ranks ended, or their nodes were lost: they call nothing any more.
    pub fn handle_gone(&mut self, now: Duration, ranks: impl IntoIterator<Item = u32>) {
        self.untold.extend(ranks.into_iter().filter(|rank| self.gone.insert(*rank)));
        self.miss(now);
    }

    /// The time of [`Trunk::poll_timeout`] has come, perhaps.
    pub fn handle_timeout(&mut self, now: Duration) {
        if let Some(roll) = self.roll.as_mut().filter(|roll| roll.until <= now) {
            let silent = (0..).zip(&self.nodes).filter(|(_, node)| roll.awaited.contains(node));
            roll.absent.extend(silent.map(|(rank, _)| rank));
            self.call_off();
        }
        self.miss(now);
    }

    /// When [`Trunk::handle_timeout`] is wanted.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let roll = self.roll.as_ref().map(|roll| roll.until);
        let told = self.misses().then_some(self.quiet_until);
        roll.into_iter().chain(told).min()
    }

    /// What is to be said downward, with its body.
    pub fn poll_verdict(&mut self) -> Option<(Target, Verdict, Vec<u8>)> {
        self.verdicts.pop_front()
    }

    /// The node of rank 0.
    pub fn master(&self) -> NodeId {
        self.nodes.first().copied().unwrap_or_default()
    }

    /// Nodes are to be told of somebody, while anybody is left who could wait for him.
    fn misses(&self) -> bool {
        self.begun && !self.untold.is_empty() && self.gone.len() < self.nodes.len()
    }

    fn miss(&mut self, now: Duration) {
        if self.misses() && self.quiet_until <= now {
            self.quiet_until = now + SPREAD;
            let gone = std::mem::take(&mut self.untold);
            self.break_off(Fault::Lost, gone, "they ended, or their hosts were lost".to_owned());
        }
    }

    fn call_off(&mut self) {
        if let Some(roll) = self.roll.take().filter(|roll| !roll.absent.is_empty()) {
            self.break_off(Fault::Late, roll.absent, "they did not call it in time".to_owned());
        }
    }

    fn break_off(&mut self, kind: Fault, ranks: BTreeSet<u32>, why: String) {
        // What broke them first stays, but others may be missing, too.
        if self.broken.as_ref().is_some_and(|broken| broken.kind != kind || kind != Fault::Lost) {
            return;
        }
        let broken = Broken { kind, ranks: ranks.into_iter().collect(), why };
        self.broken = Some(broken.clone());
        self.gatherings.clear();
        self.verdicts.push_back((Target::All, Verdict::Broken { from: self.seq, broken }, Vec::new()));
    }

    fn complete(&mut self) {
        if self.broken.is_some() || self.gatherings.get(&self.seq).is_none_or(|g| g.ranks < self.size()) {
            return;
        }
        self.conclude();
    }

    /// The operation that is under way has come to this: all that it needs is gathered.
    fn conclude(&mut self) {
        let Some(done) = self.gatherings.remove(&self.seq) else { return };
        let (act, body) = (done.act.unwrap_or(Act::Barrier), &done.entries[..]);
        self.roll = None;
        match act {
            Act::Barrier => self.same(act, body),
            Act::Broadcast => self.same(act, entries(body).next().map_or(&[], |(_, item)| item)),
            Act::AllGather => self.same(act, &sorted(body)),
            Act::Gather => {
                let mut part = Vec::new();
                entry(&mut part, 0, &sorted(body));
                // First to the one that waits for it. Its node is then beyond this operation.
                self.parts(act, self.master(), &part);
                self.same(act, &[]);
            }
            Act::Scatter => {
                let mut parts = BTreeMap::<NodeId, Vec<u8>>::new();
                let all = entries(body).next().map_or(&[][..], |(_, all)| all);
                for ((rank, item), node) in entries(all).zip(&self.nodes) {
                    entry(parts.entry(*node).or_default(), rank, item);
                }
                parts.iter().for_each(|(node, part)| self.parts(act, *node, part));
            }
        }
        self.seq = self.seq.wrapping_add(1);
        self.given_before = is_given(act, self.given_before);
    }

    fn size(&self) -> u32 {
        u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)
    }

    fn same(&mut self, act: Act, body: &[u8]) {
        for (piece, more) in pieces(body) {
            self.verdicts.push_back((Target::All, Verdict::Same { seq: self.seq, act, more }, piece.to_vec()));
        }
    }

    fn parts(&mut self, act: Act, node: NodeId, body: &[u8]) {
        for (piece, more) in pieces(body) {
            let verdict = Verdict::Parts { seq: self.seq, act, more };
            self.verdicts.push_back((Target::Node(node), verdict, piece.to_vec()));
        }
    }
}

/// The entries by rank.
fn sorted(body: &[u8]) -> Vec<u8> {
    let mut all: Vec<_> = entries(body).collect();
    all.sort_by_key(|(rank, _)| *rank);
    let mut sorted = Vec::with_capacity(body.len());
    all.into_iter().for_each(|(rank, item)| entry(&mut sorted, rank, item));
    sorted
}
