//! What nodes say happened when, laid over the front end's clock.
//!
//! The clocks of hosts need not agree. A node counts from its agent's begin, and what it says and hears bounds the difference: an order
//! arrives after it was sent, a report before it was heard. Between the tightest two bounds lies the difference, the middle is taken, and
//! half their distance is the error that is told with it. What lies between two events of one host has no such error.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::net::wire::control::NodeId;
use crate::net::wire::facts::{Birth, JobFacts, Micros};

/// Microseconds since the front end began; before that: negative.
pub type Moment = i64;

/// By how much a node's clock is behind the front end's: between these, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offset {
    low: i64,
    high: i64,
}

fn signed(time: Micros) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX / 4)
}

impl Offset {
    /// An agent that was started by nobody before `begun`.
    pub fn of_agent(begun: Moment) -> Offset {
        Offset { low: begun, high: i64::MAX / 4 }
    }

    /// What was sent down at `sent` arrived at `arrived`.
    pub fn handle_order(&mut self, sent: Moment, arrived: Micros) {
        self.low = self.low.max(sent - signed(arrived));
    }

    /// What was told at `told` was heard at `heard`.
    pub fn handle_report(&mut self, told: Micros, heard: Moment) {
        self.high = self.high.min(heard - signed(told));
    }

    /// The front end's time of a node's.
    pub fn moment(&self, time: Micros) -> Moment {
        signed(time) + self.low + (self.high - self.low) / 2
    }

    /// By how much [`Offset::moment`] may be wrong, in microseconds.
    pub fn error(&self) -> u64 {
        (self.high - self.low).unsigned_abs() / 2
    }
}

/// What a host does after one another, each until the next event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// From the agent's begin until its link is made.
    Connect,
    /// Until it has its namespaces and store.
    Prepare,
    /// Until the order to launch comes: other hosts join, the closure is being found.
    Wait,
    /// Until the view is mounted.
    Mount,
    /// Until everything is there that the program needs to start.
    Load,
    /// Until all ranks were asked for.
    Start,
    /// Until the last of them ended.
    Run,
    /// Until no process of the job is left.
    Cleanup,
}

impl Phase {
    pub const ALL: [Phase; 8] = [
        Phase::Connect,
        Phase::Prepare,
        Phase::Wait,
        Phase::Mount,
        Phase::Load,
        Phase::Start,
        Phase::Run,
        Phase::Cleanup,
    ];

    /// The phase's name in JSON and reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Connect => "connect",
            Phase::Prepare => "prepare",
            Phase::Wait => "wait",
            Phase::Mount => "mount",
            Phase::Load => "load",
            Phase::Start => "start",
            Phase::Run => "run",
            Phase::Cleanup => "cleanup",
        }
    }
}

/// One host of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub host: String,
    /// When its agent began.
    pub begun: Moment,
    /// When each phase ended; phases that did not happen are not there.
    pub ends: Vec<(Phase, Moment)>,
    /// When the first byte of a file came, and when a rank first wrote something.
    pub fed: Option<Moment>,
    pub output: Option<Moment>,
    /// Microseconds by which all these may be wrong, alike.
    pub error: u64,
}

impl Line {
    /// Lays a node's times over the front end's clock. `ordered`: when the order to launch was sent; `done`: when its end was heard.
    pub fn new(host: &str, birth: Birth, mut offset: Offset, ordered: Moment, facts: &JobFacts, done: Moment) -> Line {
        let times = facts.times;
        if times.ordered > 0 {
            offset.handle_order(ordered, times.ordered);
        }
        offset.handle_report(facts.told, done);
        let ends = [
            (Phase::Connect, birth.connected),
            (Phase::Prepare, birth.joined),
            (Phase::Wait, times.ordered),
            (Phase::Mount, times.mounted),
            (Phase::Load, times.loaded),
            (Phase::Start, times.started),
            (Phase::Run, times.ended),
            (Phase::Cleanup, facts.told),
        ];
        let happened = |time: Micros| (time > 0).then(|| offset.moment(time));
        Line {
            host: host.to_owned(),
            begun: offset.moment(0),
            ends: ends.into_iter().filter_map(|(phase, time)| Some((phase, happened(time)?))).collect(),
            fed: happened(times.fed),
            output: happened(times.output),
            error: offset.error(),
        }
    }

    /// The phases with their begin and end.
    pub fn spans(&self) -> impl Iterator<Item = (Phase, Moment, Moment)> {
        let mut from = self.begun;
        self.ends.iter().map(move |(phase, to)| (*phase, std::mem::replace(&mut from, *to), *to))
    }

    /// When its ranks were started, or the last that is known of it.
    pub fn ready(&self) -> Moment {
        let started = self.ends.iter().rfind(|(phase, _)| *phase <= Phase::Start);
        started.map_or(self.begun, |(_, at)| *at)
    }
}

/// How long a phase took on the hosts, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Spread {
    pub phase: Phase,
    pub least: f64,
    pub median: f64,
    /// Nine in ten hosts took no longer.
    pub p90: f64,
    pub most: f64,
    /// A host that took longest.
    pub slowest: String,
}

/// How long each phase took, in order.
pub fn spreads(lines: &[Line]) -> Vec<Spread> {
    let mut took: BTreeMap<Phase, Vec<(i64, &str)>> = BTreeMap::new();
    for line in lines {
        for (phase, from, to) in line.spans() {
            took.entry(phase).or_default().push((to - from, &line.host));
        }
    }
    let spread = |(phase, mut hosts): (Phase, Vec<(i64, &str)>)| {
        hosts.sort_unstable();
        let seconds = |at: usize| hosts[at.min(hosts.len() - 1)].0 as f64 / 1e6;
        Spread {
            phase,
            least: seconds(0),
            median: seconds(hosts.len() / 2),
            p90: seconds((hosts.len() * 9).div_ceil(10) - 1),
            most: seconds(hosts.len() - 1),
            slowest: hosts[hosts.len() - 1].1.to_owned(),
        }
    };
    took.into_iter().map(spread).collect()
}

impl Spread {
    /// An element of `phases` in docs/STATS.md.
    pub fn to_json(&self) -> Value {
        json!({
            "phase": self.phase.name(),
            "min": self.least,
            "median": self.median,
            "p90": self.p90,
            "max": self.most,
            "slowest": self.slowest,
        })
    }
}

/// The clocks of a session's nodes, as far as they are known.
#[derive(Debug, Default)]
pub struct Clocks(BTreeMap<NodeId, (Birth, Offset)>);

impl Clocks {
    /// A node joined; who started it did so after `begun`.
    pub fn handle_join(&mut self, node: NodeId, birth: Birth, begun: Moment, heard: Moment) {
        let mut offset = Offset::of_agent(begun);
        offset.handle_report(birth.joined, heard);
        self.0.insert(node, (birth, offset));
    }

    /// What is known of a node's clock.
    pub fn get(&self, node: NodeId) -> Option<(Birth, Offset)> {
        self.0.get(&node).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::wire::facts::JobTimes;

    /// A host whose agent began 1 s after the front end; orders take 2 ms, reports 4 ms.
    fn line(host: &str, load: u64) -> Line {
        let birth = Birth { enrolled: 10, connected: 2_000, joined: 10_000 };
        let mut clocks = Clocks::default();
        clocks.handle_join(1, birth, 0, 1_000_000 + 10_000 + 4_000);
        let times = JobTimes {
            ordered: 20_000,
            loaded: 20_000 + load,
            started: 30_000 + load,
            ended: 90_000,
            ..JobTimes::default()
        };
        let facts = JobFacts { told: 100_000, times, ..JobFacts::default() };
        let (birth, offset) = clocks.get(1).unwrap();
        Line::new(host, birth, offset, 1_000_000 + 20_000 - 2_000, &facts, 1_000_000 + 100_000 + 4_000)
    }

    #[test]
    fn the_error_is_half_a_round_trip() {
        let line = line("a", 5_000);
        assert_eq!(line.error, 3_000);
        assert!((line.begun - 1_000_000).abs() <= 3_000, "{line:?}");
        let spans: Vec<_> = line.spans().map(|(phase, from, to)| (phase.name(), to - from)).collect();
        let expected = [
            ("connect", 2_000),
            ("prepare", 8_000),
            ("wait", 10_000),
            ("load", 5_000),
            ("start", 10_000),
            ("run", 55_000),
            ("cleanup", 10_000),
        ];
        assert_eq!(spans, expected, "what did not happen is not there");
        assert_eq!(line.ready() - line.begun, 35_000);
    }

    #[test]
    fn the_slowest_host_is_named() {
        let lines: Vec<Line> = (1..=20).map(|n| line(&format!("n{n}"), n * 1_000)).collect();
        let spreads = spreads(&lines);
        let load = spreads.iter().find(|s| s.phase == Phase::Load).unwrap();
        assert_eq!((load.least, load.median, load.p90, load.most), (0.001, 0.011, 0.018, 0.020));
        assert_eq!(load.slowest, "n20");
        assert!(super::spreads(&[]).is_empty());
    }
}
