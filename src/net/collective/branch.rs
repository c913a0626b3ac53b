//! A node's part: adds up the calls of its own members and of the nodes below, and hands out the answers.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;

use super::{Gathering, entries, entry, is_given, key_entry, key_of, name, pieces, text};
use crate::net::wire::collective::{Act, Broken, Fault, Verdict, Word};
use crate::net::wire::control::NodeId;

/// What a member is answered.
#[derive(Debug, Clone)]
pub enum Answer {
    /// The reply of the text protocol, the same bytes for all who get the same.
    Done(Rc<Vec<u8>>),
    Failed(Rc<Broken>),
}

/// What an operation has come to.
#[derive(Debug)]
struct Outcome {
    act: Act,
    /// For each member something else.
    parts: bool,
    body: Vec<u8>,
}

/// See the module. Calling order: any `handle_*`, then [`Branch::poll_word`] and [`Branch::poll_answer`] until both are empty.
#[derive(Debug)]
pub struct Branch {
    node: NodeId,
    /// Ranks of the job.
    size: u32,
    /// Ranks here, ascending; members are called by their index in it.
    ranks: Vec<u32>,
    /// Ranks here and below.
    expected: u32,
    /// The operation that members here are at, and whether the one before it was given ([`is_given`]).
    seq: u32,
    given_before: bool,
    /// Members that wait for its answer.
    waiting: Vec<bool>,
    calls: usize,
    /// They have waited for long: that they have called is said of a given one, too.
    hurried: bool,
    begun: bool,
    gatherings: BTreeMap<u32, Gathering>,
    /// What the root has said of this operation so far, and all of it.
    partial: Vec<u8>,
    outcome: Option<Outcome>,
    /// From that operation on.
    broken: Option<(u32, Rc<Broken>)>,
    keys: HashMap<Vec<u8>, Vec<u8>>,
    /// Keys that were put here since the last barrier.
    put: Vec<u8>,
    words: VecDeque<(Word, Vec<u8>)>,
    answers: VecDeque<(usize, Answer)>,
}

impl Branch {
    /// Of `node`, which has these ranks (at least one, ascending) of a job of `size`; `expected` ranks are here and below.
    pub fn new(node: NodeId, size: u32, ranks: Vec<u32>, expected: u32) -> Branch {
        Branch {
            node,
            size,
            waiting: vec![false; ranks.len()],
            ranks,
            expected,
            seq: 0,
            given_before: false,
            calls: 0,
            hurried: false,
            begun: false,
            gatherings: BTreeMap::new(),
            partial: Vec::new(),
            outcome: None,
            broken: None,
            keys: HashMap::new(),
            put: Vec::new(),
            words: VecDeque::new(),
            answers: VecDeque::new(),
        }
    }

    /// A member calls an operation; it waits until it is answered.
    ///
    /// # Errors
    /// It cannot be called so; nothing has happened then.
    pub fn handle_call(&mut self, member: usize, act: Act, items: &[&[u8]]) -> Result<(), String> {
        let rank = self.ranks[member];
        let master = rank == 0;
        let wanted = match act {
            Act::Barrier => 0,
            Act::Gather | Act::AllGather => 1,
            Act::Broadcast => u32::from(master),
            Act::Scatter if master => self.size,
            Act::Scatter => 0,
        };
        if items.len() != wanted as usize {
            let call = name(act);
            return Err(format!("rank {rank} calls {call} with {} items; {wanted} are wanted", items.len()));
        }
        if self.waiting[member] {
            return Err("the last call is not answered yet".to_owned());
        }
        if let Some((_, broken)) = self.broken.as_ref().filter(|(from, _)| !is_before(self.seq, *from)) {
            self.answers.push_back((member, Answer::Failed(Rc::clone(broken))));
            return Ok(());
        }
        if !std::mem::replace(&mut self.begun, true) {
            self.words.push_back((Word::Begun, Vec::new()));
        }
        let mut bytes = Vec::new();
        match (act, items) {
            (Act::Scatter, [_, ..]) => {
                let mut all = Vec::new();
                (0..).zip(items).for_each(|(to, item)| entry(&mut all, to, item));
                entry(&mut bytes, rank, &all);
            }
            (_, [item]) => entry(&mut bytes, rank, item),
            _ => {}
        }
        if master && is_given(act, self.given_before) {
            for (piece, more) in pieces(&bytes) {
                self.words.push_back((Word::Given { seq: self.seq, act, more }, piece.to_vec()));
            }
            bytes.clear();
        }
        self.waiting[member] = true;
        self.calls += 1;
        let added = self.gatherings.entry(self.seq).or_default().add(act, 1, &bytes);
        self.check(self.seq, added.map_err(|why| format!("rank {rank}: {why}")));
        Ok(())
    }

    /// A node below has said [`Word::Joined`].
    pub fn handle_joined(&mut self, from: NodeId, seq: u32, act: Act, ranks: u32, more: bool, body: &[u8]) {
        // Nobody is more than one ahead of his parent.
        if seq != self.seq && seq != self.seq.wrapping_add(1) {
            return;
        }
        let added = self.gatherings.entry(seq).or_default().add_piece(from, act, ranks, more, body);
        self.check(seq, added);
    }

    fn check(&mut self, seq: u32, added: Result<(), String>) {
        if let Err(why) = added {
            // Nobody here gets what he has not called.
            self.outcome.take_if(|_| seq == self.seq);
            self.words.push_back((Word::Fault { seq, why }, Vec::new()));
            return self.give_up();
        }
        self.conclude();
        let Some(gathering) = self.gatherings.get(&seq) else { return };
        let act = gathering.act.unwrap_or(Act::Barrier);
        // Only of the operation that is called here can it be all.
        let is_held_back = is_given(act, self.given_before) && !self.hurried;
        if gathering.ranks < self.expected || is_held_back {
            return;
        }
        let Some(mut done) = self.gatherings.remove(&seq) else { return };
        if act == Act::Barrier {
            done.entries.append(&mut self.put);
        }
        for (piece, more) in pieces(&done.entries) {
            let word = Word::Joined { node: self.node, seq, act, ranks: done.ranks, more };
            self.words.push_back((word, piece.to_vec()));
        }
    }

    /// The root has spoken; what is not about operations is ignored.
    pub fn handle_verdict(&mut self, verdict: Verdict, body: &[u8]) {
        match verdict {
            Verdict::Same { seq, act, more } | Verdict::Parts { seq, act, more } => {
                self.partial.extend_from_slice(body);
                if more {
                    return;
                }
                let body = std::mem::take(&mut self.partial);
                if seq != self.seq {
                    return;
                }
                let parts = matches!(verdict, Verdict::Parts { .. });
                self.outcome = Some(Outcome { act, parts, body });
                // Those who call something else, here or below, are told so, whether they have or will.
                let added = self.gatherings.entry(seq).or_default().add(act, 0, &[]);
                self.check(seq, added);
            }
            Verdict::Broken { from, mut broken } => {
                if let Some((_, before)) = self.broken.as_ref().filter(|(_, before)| before.kind == broken.kind) {
                    broken.ranks.extend_from_slice(&before.ranks);
                    broken.ranks.sort_unstable();
                }
                self.broken = Some((from, Rc::new(broken)));
                self.give_up();
            }
            Verdict::Roll { seq } => {
                // Who is not here keeps the others here from calling the next.
                let absent = |(_, waits): &(&u32, &bool)| !is_before(seq, self.seq) && !**waits;
                let ranks = self.ranks.iter().zip(&self.waiting).filter(absent).map(|(rank, _)| *rank).collect();
                self.words.push_back((Word::Absent { node: self.node, seq, ranks }, Vec::new()));
            }
            Verdict::ToMaster { .. } | Verdict::Received | Verdict::Named { .. } => {}
        }
    }

    /// Answers all here at once, when all have called and the root has spoken: the first of them calls the next operation at once, too.
    fn conclude(&mut self) {
        let Some(outcome) = self.outcome.take_if(|_| self.calls == self.ranks.len()) else { return };
        match outcome.parts {
            false => self.answer_all(outcome.act, &outcome.body),
            true => self.answer_parts(outcome.act, &outcome.body),
        }
        self.gatherings.remove(&self.seq);
        self.seq = self.seq.wrapping_add(1);
        self.given_before = is_given(outcome.act, self.given_before);
        self.hurried = false;
    }

    /// Nobody here waits for what cannot come any more: all that is broken off, but for an operation that the root spoke of before and that all
    /// here can still call.
    fn give_up(&mut self) {
        let Some((from, broken)) = &self.broken else { return };
        let is_lost = |(rank, waits): (&u32, &bool)| !waits && broken.ranks.binary_search(rank).is_ok();
        let can_end = broken.kind == Fault::Lost && self.outcome.is_some() && is_before(self.seq, *from);
        if can_end && !self.ranks.iter().zip(&self.waiting).any(is_lost) {
            return;
        }
        let broken = Rc::clone(broken);
        self.broken = Some((self.seq, Rc::clone(&broken)));
        for member in 0..self.ranks.len() {
            self.answer(member, Answer::Failed(Rc::clone(&broken)));
        }
    }

    fn answer_all(&mut self, act: Act, body: &[u8]) {
        let reply = match act {
            Act::Barrier => {
                let pairs = entries(body).filter_map(|(_, pair)| key_of(pair));
                self.keys.extend(pairs.map(|(key, value)| (key.to_vec(), value.to_vec())));
                text::done(&[])
            }
            Act::Broadcast => text::done(&[body]),
            Act::AllGather => text::done(&entries(body).map(|(_, item)| item).collect::<Vec<_>>()),
            Act::Gather | Act::Scatter => text::done(&[]),
        };
        let reply = Rc::new(reply);
        for member in 0..self.ranks.len() {
            self.answer(member, Answer::Done(Rc::clone(&reply)));
        }
    }

    fn answer_parts(&mut self, act: Act, body: &[u8]) {
        for (rank, part) in entries(body) {
            let Ok(member) = self.ranks.binary_search(&rank) else { continue };
            let reply = match act {
                Act::Gather => text::done(&entries(part).map(|(_, item)| item).collect::<Vec<_>>()),
                _ => text::done(&[part]),
            };
            self.answer(member, Answer::Done(Rc::new(reply)));
        }
        // Of a gather, those who are not the master; of nothing else anybody is left.
        let nothing = Rc::new(text::done(&[]));
        for member in 0..self.ranks.len() {
            self.answer(member, Answer::Done(Rc::clone(&nothing)));
        }
    }

    fn answer(&mut self, member: usize, answer: Answer) {
        if std::mem::take(&mut self.waiting[member]) {
            self.calls -= 1;
            self.answers.push_back((member, answer));
        }
    }

    /// The members that wait do not want to any longer.
    pub fn handle_late(&mut self) {
        if self.calls > 0 {
            self.words.push_back((Word::Late { seq: self.seq }, Vec::new()));
        }
    }

    /// The members that wait have done so for long: that they have called is said in any case.
    pub fn hurry(&mut self) {
        if self.calls > 0 {
            self.hurried = true;
            self.check(self.seq, Ok(()));
        }
    }

    /// A member puts a key: seen here at once, by all after the next barrier.
    pub fn put(&mut self, member: usize, key: &[u8], value: &[u8]) {
        key_entry(&mut self.put, self.ranks[member], key, value);
        self.keys.insert(key.to_vec(), value.to_vec());
    }

    /// The value of a key.
    pub fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.keys.get(key).map(Vec::as_slice)
    }

    /// Whether a member waits.
    pub fn is_waiting(&self) -> bool {
        self.calls > 0
    }

    /// Whether nothing is to be said of members that call for what the master gives, before that is here. Not where the master is: it is to be heard.
    pub fn is_patient(&self) -> bool {
        !self.given_before && self.outcome.is_none() && self.ranks.first() != Some(&0)
    }

    /// The operation that members here are at.
    pub fn seq(&self) -> u32 {
        self.seq
    }

    /// Ranks here, ascending.
    pub fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// What is to be said upward, with its body.
    pub fn poll_word(&mut self) -> Option<(Word, Vec<u8>)> {
        self.words.pop_front()
    }

    /// What a member is to be answered.
    pub fn poll_answer(&mut self) -> Option<(usize, Answer)> {
        self.answers.pop_front()
    }
}

/// Of two operations that are close to each other.
fn is_before(one: u32, other: u32) -> bool {
    one.wrapping_sub(other).cast_signed() < 0
}

impl Broken {
    /// The first word of the text protocol's reply.
    pub fn word(&self) -> &'static str {
        match self.kind {
            Fault::Lost => "lost",
            Fault::Late => "late",
            Fault::Misused => "error",
        }
    }
}
