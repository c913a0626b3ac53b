//! Collective operations of a job's members, as state machines without sockets and clocks. Agents are the tree: a member talks to the
//! agent of its node only ([`text`]), a node's part ([`Branch`]) adds up what comes from its own members and from the nodes below and says
//! it upward once, the root's part ([`Trunk`]) answers all.
//!
//! An operation is complete when every member has called it. What the master gives (a broadcast, a scatter) is an exception, unless the operation
//! before it was one, too: it is said to all at once ([`is_given`]), and a node answers it when all members there have called. That all have
//! called it is known when they have called the next one; a node says it only if its members wait for long, so that contradictions and
//! who is missing are found then. So at most two operations are under way anywhere: the one that is being answered, and the next.

mod branch;
mod entries;
pub mod text;
mod trunk;

use std::collections::HashMap;

use super::wire::collective::{Act, PIECE};
use super::wire::control::NodeId;

pub use branch::{Answer, Branch};
pub use entries::{entries, entry, key_entry, key_of};
pub use trunk::Trunk;

/// Bytes that the members give to one operation, in all and with what is added for each, at most.
pub const TOTAL_MAX: usize = 64 << 20;

/// One operation at one node while calls come.
#[derive(Debug, Default)]
struct Gathering {
    /// What the first called.
    act: Option<Act>,
    /// Ranks that have called.
    ranks: u32,
    entries: Vec<u8>,
    /// Of nodes below of which there is more to come.
    partial: HashMap<NodeId, Vec<u8>>,
}

impl Gathering {
    /// Ranks have called: their entries.
    ///
    /// # Errors
    /// They called something else than those before them, or gave too much.
    fn add(&mut self, act: Act, ranks: u32, bytes: &[u8]) -> Result<(), String> {
        let first = *self.act.get_or_insert(act);
        if first != act {
            return Err(format!("some members called {}, others {}", name(first), name(act)));
        }
        if self.entries.len() + bytes.len() > TOTAL_MAX {
            return Err(format!("more than {} MiB in one operation", TOTAL_MAX >> 20));
        }
        self.ranks += ranks;
        self.entries.extend_from_slice(bytes);
        Ok(())
    }

    /// The same of a node below, in pieces.
    fn add_piece(&mut self, from: NodeId, act: Act, ranks: u32, more: bool, bytes: &[u8]) -> Result<(), String> {
        let mut all = self.partial.remove(&from).unwrap_or_default();
        if all.len() + bytes.len() > TOTAL_MAX {
            return Err(format!("more than {} MiB in one operation", TOTAL_MAX >> 20));
        }
        if !more && all.is_empty() {
            return self.add(act, ranks, bytes);
        }
        all.extend_from_slice(bytes);
        if more {
            self.partial.insert(from, all);
            return Ok(());
        }
        self.add(act, ranks, &all)
    }
}

/// Whether an operation's outcome is said as soon as the master has called it. `before`: that was so with the one before it.
fn is_given(act: Act, before: bool) -> bool {
    matches!(act, Act::Broadcast | Act::Scatter) && !before
}

/// As members call it.
pub fn name(act: Act) -> &'static str {
    match act {
        Act::Barrier => "barrier",
        Act::Broadcast => "broadcast",
        Act::Gather => "gather",
        Act::Scatter => "scatter",
        Act::AllGather => "allgather",
    }
}

/// A body in pieces, each with whether more come. An empty one is one piece.
pub fn pieces(body: &[u8]) -> impl Iterator<Item = (&[u8], bool)> {
    let last = body.len().saturating_sub(1) / PIECE;
    (0..=last).map(move |nth| (&body[nth * PIECE..body.len().min((nth + 1) * PIECE)], nth < last))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::net::wire::collective::Fault;
    use crate::net::wire::control::Target;

    /// Two nodes below the root, with two ranks each.
    struct Job {
        trunk: Trunk,
        branches: [Branch; 2],
    }

    impl Job {
        fn new() -> Job {
            let branch = |node: NodeId, first| Branch::new(node, 4, vec![first, first + 1], 2);
            Job { trunk: Trunk::new(vec![1, 1, 2, 2]), branches: [branch(1, 0), branch(2, 2)] }
        }

        fn call(&mut self, rank: usize, act: Act, items: &[&[u8]]) {
            self.branches[rank / 2].handle_call(rank % 2, act, items).unwrap();
        }

        /// Carries everything where it belongs. Returns the ranks that are answered, and whether well.
        fn settle(&mut self) -> Vec<(usize, Result<(), Fault>)> {
            let mut answers = Vec::new();
            loop {
                let words: Vec<_> =
                    self.branches.iter_mut().flat_map(|b| std::iter::from_fn(|| b.poll_word())).collect();
                for (word, body) in &words {
                    self.trunk.handle_word(Duration::ZERO, word.clone(), body);
                }
                let verdicts: Vec<_> = std::iter::from_fn(|| self.trunk.poll_verdict()).collect();
                for (to, verdict, body) in &verdicts {
                    let is_for = |node| *to == Target::All || *to == Target::Node(node);
                    let to = (1..).zip(&mut self.branches).filter(|(node, _)| is_for(*node));
                    to.for_each(|(_, branch)| branch.handle_verdict(verdict.clone(), body));
                }
                for (nth, branch) in self.branches.iter_mut().enumerate() {
                    let told = |answer| match answer {
                        Answer::Done(_) => Ok(()),
                        Answer::Failed(broken) => Err(broken.kind),
                    };
                    let all = std::iter::from_fn(|| branch.poll_answer());
                    answers.extend(all.map(|(member, answer)| (nth * 2 + member, told(answer))));
                }
                if words.is_empty() && verdicts.is_empty() {
                    return answers;
                }
            }
        }
    }

    const ITEMS: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];

    #[test]
    fn what_is_given_does_not_wait_for_other_nodes() {
        let mut job = Job::new();
        job.call(0, Act::Scatter, &ITEMS);
        assert_eq!(job.settle(), []);
        job.call(1, Act::Scatter, &[]);
        assert_eq!(job.settle(), [(0, Ok(())), (1, Ok(()))]);
        // The next one waits for all.
        job.call(0, Act::Broadcast, &[b"x"]);
        job.call(1, Act::Broadcast, &[]);
        assert_eq!(job.settle(), []);
        [2, 3].into_iter().for_each(|rank| job.call(rank, Act::Scatter, &[]));
        assert_eq!(job.settle(), [(2, Ok(())), (3, Ok(()))]);
        [2, 3].into_iter().for_each(|rank| job.call(rank, Act::Broadcast, &[]));
        assert_eq!(job.settle(), [0, 1, 2, 3].map(|rank| (rank, Ok(()))));
    }

    #[test]
    fn who_ends_after_it_takes_nothing_from_those_who_are_slow() {
        let mut job = Job::new();
        job.call(0, Act::Scatter, &ITEMS);
        job.call(1, Act::Scatter, &[]);
        job.call(2, Act::Scatter, &[]);
        assert_eq!(job.settle(), [(0, Ok(())), (1, Ok(()))]);
        job.trunk.handle_gone(Duration::ZERO, [0]);
        assert_eq!(job.settle(), []);
        job.call(3, Act::Scatter, &[]);
        assert_eq!(job.settle(), [(2, Ok(())), (3, Ok(()))]);
        job.call(3, Act::Barrier, &[]);
        assert_eq!(job.settle(), [(3, Err(Fault::Lost))]);
        // But who waits for one that has ended does not wait.
        let mut job = Job::new();
        job.call(0, Act::Scatter, &ITEMS);
        job.call(2, Act::Scatter, &[]);
        assert_eq!(job.settle(), []);
        job.trunk.handle_gone(Duration::ZERO, [3]);
        assert_eq!(job.settle(), [(2, Err(Fault::Lost))]);
        job.call(1, Act::Scatter, &[]);
        assert_eq!(job.settle(), [(0, Ok(())), (1, Ok(()))]);
    }

    #[test]
    fn who_calls_something_else_breaks_it_off() {
        // The master gives, others do something else: before it comes, and after.
        for early in [true, false] {
            let mut job = Job::new();
            if early {
                job.call(2, Act::Barrier, &[]);
            }
            job.call(0, Act::Scatter, &ITEMS);
            let mut answers = job.settle();
            if !early {
                job.call(2, Act::Barrier, &[]);
                answers = job.settle();
            }
            assert_eq!(answers, [0, 2].map(|rank| (rank, Err(Fault::Misused))));
        }
        // Others wait for what the master does not give.
        let mut job = Job::new();
        [2, 3].into_iter().for_each(|rank| job.call(rank, Act::Broadcast, &[]));
        [0, 1].into_iter().for_each(|rank| job.call(rank, Act::Barrier, &[]));
        assert_eq!(job.settle(), []);
        job.branches.iter_mut().for_each(Branch::hurry);
        assert_eq!(job.settle(), [0, 1, 2, 3].map(|rank| (rank, Err(Fault::Misused))));
    }

    #[test]
    fn who_is_late_is_named_after_what_was_given() {
        let mut job = Job::new();
        job.call(0, Act::Broadcast, &[b"x"]);
        job.call(1, Act::Broadcast, &[]);
        job.call(2, Act::Broadcast, &[]);
        assert_eq!(job.settle(), [(0, Ok(())), (1, Ok(()))]);
        job.branches[1].handle_late();
        // Nobody else waits; those who are beyond it are not absent.
        assert_eq!(job.settle(), [(2, Err(Fault::Late))]);
        assert!(job.branches[0].handle_call(0, Act::Barrier, &[]).is_ok());
        assert_eq!(job.settle(), [(0, Err(Fault::Late))]);
    }
}
