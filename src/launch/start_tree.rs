//! Who starts whom: LIBI's greedy rule. Whoever is free first starts the next host, so that the last host is up as early as possible.
//!
//! A starter is busy for the sequential time with each host that it starts; the host is up, and can start others, the remote time after its
//! start began. Hence a fan-out of at least remote / sequential where there are many hosts. The rule is that of LIBI's reference
//! implementation (published with MRNet, 2011), with measured times in place of its constants.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::Duration;

use crate::{Error, Result};

/// What one start costs, measured, and how many a node may do.
#[derive(Debug, Clone, Copy)]
pub struct StartCost {
    /// From the beginning of a start until the new host can start others.
    pub remote: Duration,
    /// The starter is busy with one start.
    pub sequential: Duration,
    /// Hosts that one node starts, at most; at least 1.
    pub cap: u32,
}

impl StartCost {
    /// What ssh costs on usual machines: a quarter of a second, of which the starter is busy for a few milliseconds.
    pub fn of_ssh(cap: NonZeroU32) -> StartCost {
        StartCost { remote: Duration::from_millis(250), sequential: Duration::from_millis(7), cap: cap.get() }
    }

    /// `REMOTE,SEQUENTIAL` in milliseconds, as somebody measured them.
    ///
    /// # Errors
    /// That is not what it says.
    pub fn parse(text: &str, cap: NonZeroU32) -> Result<StartCost> {
        let read = |text: &str| text.trim().parse().ok().map(Duration::from_millis);
        let both = text.split_once(',').and_then(|(remote, sequential)| Some((read(remote)?, read(sequential)?)));
        let (remote, sequential) = both.ok_or_else(|| {
            Error::usage("understand the cost of a start", "it is not REMOTE,SEQUENTIAL in milliseconds").on(text)
        })?;
        Ok(StartCost { remote, sequential, cap: cap.get() })
    }
}

/// When somebody can start the next host.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Slot {
    at: Duration,
    order: u32,
    starts: u32,
    /// The direct child above it; `None` for this node itself.
    branch: Option<usize>,
}

/// Parts `hosts` hosts (numbers from 0) into one range for each host that this node starts itself, in the order of starting. The first of
/// a range is that host, which splits the rest of the range in the same way.
pub fn split(hosts: u32, cost: &StartCost) -> Vec<Range<u32>> {
    let mut sizes: Vec<u32> = Vec::new();
    assign(hosts, cost, |branch| match branch {
        Some(branch) => {
            sizes[branch] += 1;
            branch
        }
        None => {
            sizes.push(1);
            sizes.len() - 1
        }
    });
    let mut from = 0;
    let range = |size| {
        from += size;
        from - size..from
    };
    sizes.into_iter().map(range).collect()
}

/// The whole tree that [`split`] leads to: who starts each host; `None` is this node.
pub fn plan(hosts: u32, cost: &StartCost) -> Vec<Option<u32>> {
    let mut parents = vec![None; hosts as usize];
    let mut todo = vec![(None, 0..hosts)];
    while let Some((parent, list)) = todo.pop() {
        for part in split(list.len() as u32, cost) {
            let (child, end) = (list.start + part.start, list.start + part.end);
            parents[child as usize] = parent;
            todo.push((Some(child), child + 1..end));
        }
    }
    parents
}

/// When the last host is up.
pub fn finish(hosts: u32, cost: &StartCost) -> Duration {
    assign(hosts, cost, |_| 0)
}

/// Assigns hosts to the earliest slots. `place` is told the branch a new host falls into (`None`: it begins one) and returns it.
fn assign(hosts: u32, cost: &StartCost, mut place: impl FnMut(Option<usize>) -> usize) -> Duration {
    let mut slots = BinaryHeap::from([Reverse(Slot { at: Duration::ZERO, order: 0, starts: 0, branch: None })]);
    let mut last = Duration::ZERO;
    for order in 1..=hosts {
        let Some(Reverse(slot)) = slots.pop() else { break };
        let child = Some(place(slot.branch));
        let up = slot.at + cost.remote;
        last = last.max(up);
        slots.push(Reverse(Slot { at: up, order, starts: 0, branch: child }));
        if slot.starts + 1 < cost.cap {
            slots.push(Reverse(Slot { at: slot.at + cost.sequential, starts: slot.starts + 1, ..slot }));
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::sim::{Input, Link, Machine, Network, Send, Sim};
    use crate::net::topology::Node;
    use proptest::prelude::*;

    /// The constants of LIBI's implementation.
    const LIBI: StartCost =
        StartCost { remote: Duration::from_millis(257), sequential: Duration::from_millis(7), cap: 1000 };

    /// The earliest end over all trees: the first child takes `m` hosts, the others come one sequential time later.
    fn brute_force(hosts: u32, left: u32, cost: &StartCost) -> Option<Duration> {
        if hosts == 0 {
            return Some(Duration::ZERO);
        }
        let left = left.checked_sub(1)?;
        let first = |m| Some(cost.remote + brute_force(m - 1, cost.cap, cost)?);
        let others = |m| match hosts - m {
            0 => Some(Duration::ZERO),
            rest => Some(cost.sequential + brute_force(rest, left, cost)?),
        };
        (1..=hosts).filter_map(|m| Some(Ord::max(first(m)?, others(m)?))).min()
    }

    /// The end of the start by a tree, from its parents alone: children are started in the order of their numbers.
    fn replay(parents: &[Option<u32>], cost: &StartCost) -> Duration {
        let mut up = vec![Duration::ZERO; parents.len()];
        let mut starts = vec![0; parents.len() + 1];
        for (host, &parent) in parents.iter().enumerate() {
            let (begin, count) = match parent {
                Some(parent) => (up[parent as usize], &mut starts[parent as usize + 1]),
                None => (Duration::ZERO, &mut starts[0]),
            };
            up[host] = begin + cost.sequential * *count + cost.remote;
            *count += 1;
            assert!(*count <= cost.cap);
        }
        up.into_iter().max().unwrap_or_default()
    }

    proptest! {
        #[test]
        fn no_tree_is_faster(hosts in 0u32..9, remote in 1u64..100, sequential in 0u64..60, cap in 1u32..6) {
            let cost = StartCost { remote: Duration::from_millis(remote), sequential: Duration::from_millis(sequential), cap };
            prop_assert_eq!(Some(finish(hosts, &cost)), brute_force(hosts, cap, &cost));
        }

        #[test]
        fn splitting_again_at_each_host_keeps_the_time(hosts in 0u32..600, remote in 1u64..500, sequential in 1u64..60, cap in 1u32..40) {
            let cost = StartCost { remote: Duration::from_millis(remote), sequential: Duration::from_millis(sequential), cap };
            let parts = split(hosts, &cost);
            prop_assert!(parts.iter().all(|part| !part.is_empty()));
            prop_assert_eq!(parts.iter().map(|part| part.len() as u32).sum::<u32>(), hosts);
            prop_assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert_eq!(replay(&plan(hosts, &cost), &cost), finish(hosts, &cost));
        }
    }

    /// The hosts that are up at t grow as e^(g t), where g solves e^(-g remote) + e^(-g sequential) = 1: each slot makes these two.
    #[test]
    fn the_time_grows_with_the_logarithm_of_the_hosts() {
        let (remote, sequential) = (LIBI.remote.as_secs_f64(), LIBI.sequential.as_secs_f64());
        let grows = |g: &f64| (-g * remote).exp() + (-g * sequential).exp() >= 1.0;
        let growth = (1..10_000).map(|g| f64::from(g) / 100.0).rfind(grows).expect("small g");
        for hosts in [100, 1000, 10_000] {
            let added = (finish(10 * hosts, &LIBI) - finish(hosts, &LIBI)).as_secs_f64();
            assert!((0.8..1.2).contains(&(added * growth / 10f64.ln())), "{hosts}: {added} s, growth {growth}");
        }
        let star = |hosts: u32| (hosts - 1) * LIBI.sequential + LIBI.remote;
        assert_eq!(finish(30, &LIBI), star(30), "few hosts are all started by the first");
        assert!(finish(1000, &LIBI) * 8 < star(1000), "{:?} {:?}", finish(1000, &LIBI), star(1000));
    }

    #[test]
    fn the_cap_is_kept() {
        let fan_out = |cap| split(100_000, &StartCost { cap, ..LIBI }).len();
        assert_eq!((fan_out(1), fan_out(32)), (1, 32));
        assert!(fan_out(1000) > 37, "beyond remote / sequential: later starts fill the time until the last host is up");
    }

    /// A host that starts its sub-list: a start is a message, the next one is not before the sequential time, and it arrives at the end of the remote time.
    struct Starter {
        list: Range<u32>,
        todo: Vec<Range<u32>>,
        up: Duration,
        free: Duration,
    }

    impl Machine for Starter {
        type Message = Range<u32>;

        fn handle(&mut self, now: Duration, input: Input<Range<u32>>) {
            match input {
                Input::Message { message, .. } => (self.list, self.up) = (message, now),
                Input::Start if !self.list.is_empty() => {}
                _ => return,
            }
            self.todo = split(self.list.len() as u32, &LIBI);
            self.todo.reverse();
        }

        fn poll_transmit(&mut self, now: Duration, _: &dyn Fn(Link) -> bool) -> Option<Send<Range<u32>>> {
            let part = if now < self.free { None } else { self.todo.pop() }?;
            self.free = now + LIBI.sequential;
            let (child, end) = (self.list.start + part.start, self.list.start + part.end);
            Some(Send { to: Link { peer: child as Node, opened: true }, bytes: 0, message: child + 1..end })
        }

        fn poll_timeout(&self) -> Option<Duration> {
            (!self.todo.is_empty()).then_some(self.free)
        }
    }

    #[test]
    fn hosts_that_only_know_their_own_list_finish_in_time() {
        let hosts = 5000;
        let network = Network { latency: LIBI.remote, ..Network::default() };
        let starter = |node| Starter {
            list: if node == 0 { 1..hosts + 1 } else { 0..0 },
            todo: Vec::new(),
            up: Duration::ZERO,
            free: Duration::ZERO,
        };
        let mut sim = Sim::new(network, 0, (0..=hosts).map(starter));
        sim.start_all();
        assert!(sim.run(Duration::from_secs(100)));
        assert_eq!(sim.living().skip(1).filter(|host| host.up.is_zero()).count(), 0);
        assert_eq!(sim.living().map(|host| host.up).max(), Some(finish(hosts, &LIBI)));
    }
}
