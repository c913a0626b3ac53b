//! What travels up the control tree at the end of a job: exit codes, losses and statistics, merged at every node.
//!
//! [`Tally::merge`] is commutative and associative with the empty tally as identity, so the result does not depend on the shape of the
//! tree nor on the order of arrival. Each rank, host and number must be counted by one node only.

use std::collections::{BTreeMap, BTreeSet};

use rkyv::{Archive, Deserialize, Serialize};

use crate::error::EXIT_FAILED;

/// A rank that failed by itself. The order is that of time, then of rank.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Failure {
    /// Nanoseconds since the job's start, by the root's clock as well as the node knows it.
    pub at: u64,
    pub rank: u32,
    /// Exit code, 128 + signal for a killed rank; not 0.
    pub code: u8,
}

/// Some numbers of one kind, one from each rank or node. Sums saturate.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistic {
    pub count: u64,
    pub sum: u64,
    pub max: u64,
}

/// The sum of what is known about a job's end.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Ranks that ended by themselves, well or not.
    pub exited: u64,
    /// Of these, those with a code other than 0.
    pub failed: u64,
    /// Ranks that were ended by hpcrt.
    pub stopped: u64,
    pub first: Option<Failure>,
    /// The highest exit code of a rank that ended by itself.
    pub highest: u8,
    /// Hosts whose agent was lost, by number.
    pub lost: BTreeSet<u32>,
    /// By name, as in the statistics file.
    pub statistics: BTreeMap<String, Statistic>,
}

impl Tally {
    /// A rank ended by itself, `at` nanoseconds after the job's start, with `code` as in [`Failure`] or 0.
    pub fn exited(&mut self, at: u64, rank: u32, code: u8) {
        let first = (code != 0).then_some(Failure { at, rank, code });
        self.merge(Tally { exited: 1, failed: first.is_some().into(), first, highest: code, ..Tally::default() });
    }

    /// Adds one number to a statistic.
    pub fn record(&mut self, name: &str, value: u64) {
        self.statistics.entry(name.to_owned()).or_default().merge(Statistic { count: 1, sum: value, max: value });
    }

    pub fn merge(&mut self, other: Tally) {
        self.exited = self.exited.saturating_add(other.exited);
        self.failed = self.failed.saturating_add(other.failed);
        self.stopped = self.stopped.saturating_add(other.stopped);
        self.first = self.first.into_iter().chain(other.first).min();
        self.highest = self.highest.max(other.highest);
        self.lost.extend(other.lost);
        for (name, statistic) in other.statistics {
            self.statistics.entry(name).or_default().merge(statistic);
        }
    }

    /// The exit code of the job: 125 when a host was lost, else the highest (`keep_going`) or that of the first failure.
    pub fn exit_code(&self, keep_going: bool) -> u8 {
        match self.first {
            _ if !self.lost.is_empty() => EXIT_FAILED,
            Some(first) if !keep_going => first.code,
            _ => self.highest,
        }
    }
}

impl Statistic {
    pub fn merge(&mut self, other: Statistic) {
        self.count = self.count.saturating_add(other.count);
        self.sum = self.sum.saturating_add(other.sum);
        self.max = self.max.max(other.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Happening {
        Exit(u64, u32, u8),
        Stopped,
        Lost(u32),
        Number(String, u64),
    }

    fn happening() -> impl Strategy<Value = Happening> {
        prop_oneof![
            (0u64..5, 0u32..5, 0u8..4).prop_map(|(at, rank, code)| Happening::Exit(at, rank, code)),
            Just(Happening::Stopped),
            (0u32..4).prop_map(Happening::Lost),
            ("[ab]", prop_oneof![0u64..100, Just(u64::MAX - 50)])
                .prop_map(|(name, value)| Happening::Number(name, value)),
        ]
    }

    fn tally(happenings: &[Happening]) -> Tally {
        let mut tally = Tally::default();
        for happening in happenings {
            match happening {
                Happening::Exit(at, rank, code) => tally.exited(*at, *rank, *code),
                Happening::Stopped => tally.stopped += 1,
                Happening::Lost(host) => _ = tally.lost.insert(*host),
                Happening::Number(name, value) => tally.record(name, *value),
            }
        }
        tally
    }

    fn merged(mut one: Tally, other: Tally) -> Tally {
        one.merge(other);
        one
    }

    proptest! {
        #[test]
        fn the_shape_of_the_tree_does_not_matter(
            all in prop::collection::vec(happening(), 0..30),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 2),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(all.len() + 1)).collect();
            cuts.sort_unstable();
            let (a, b, c) = (tally(&all[..cuts[0]]), tally(&all[cuts[0]..cuts[1]]), tally(&all[cuts[1]..]));
            let whole = tally(&all);
            prop_assert_eq!(&merged(merged(a.clone(), b.clone()), c.clone()), &whole);
            prop_assert_eq!(&merged(a.clone(), merged(b.clone(), c.clone())), &whole);
            prop_assert_eq!(&merged(c, merged(b, a)), &whole);
            prop_assert_eq!(&merged(whole.clone(), Tally::default()), &whole);
        }
    }

    #[test]
    fn exit_codes() {
        let mut tally = Tally::default();
        assert_eq!(tally.exit_code(false), 0);
        tally.exited(9, 1, 3);
        tally.exited(5, 2, 2);
        tally.exited(5, 3, 139);
        tally.exited(1, 0, 0);
        assert_eq!((tally.exit_code(false), tally.exit_code(true)), (2, 139));
        assert_eq!((tally.exited, tally.failed), (4, 3));
        tally.lost.insert(7);
        assert_eq!((tally.exit_code(false), tally.exit_code(true)), (125, 125));
    }

    #[test]
    fn travels() {
        let mut tally = Tally::default();
        tally.exited(5, 2, 2);
        tally.record("bytes", 7);
        tally.lost.insert(3);
        let bytes = rkyv::to_bytes::<rkyv::rancor::Error>(&tally).unwrap();
        assert_eq!(rkyv::from_bytes::<Tally, rkyv::rancor::Error>(&bytes).unwrap(), tally);
    }
}
