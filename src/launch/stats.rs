//! What a job cost: the `--stats` object and the two lines after a job. Fields are described in docs/STATS.md.

use std::time::Duration;

use indicatif::{HumanBytes, HumanCount};
use serde_json::{Map, Value, json};

use super::placement::plural;
use super::timeline::Spread;
use crate::loader::tally::{Cost, Tally, Why};
use crate::net::wire::facts::{Paging, Part, Writing};
use crate::sys::counts::kind;
use crate::sys::page::PAGE;
use crate::sys::places::PLACES;

/// Version of the object's layout: changes when a field changes its meaning or goes; new fields do not change it.
pub const SCHEMA: u32 = 1;

/// Time spent in the phases of a job, which follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Phases {
    /// Finding the hosts and placing the ranks.
    pub discover: Duration,
    /// Resolving the program's closure.
    pub resolve: Duration,
    /// From the first agent's start until all are in the tree.
    pub start_agents: Duration,
    /// From then until every node has the closure.
    pub load: Duration,
    /// From the first rank's start until the last rank's end.
    pub run: Duration,
    /// From then until nothing of the job is left.
    pub cleanup: Duration,
}

impl Phases {
    /// The phases with their names in the object, in order.
    fn named(&self) -> [(&'static str, Duration); 6] {
        [
            ("discover", self.discover),
            ("resolve", self.resolve),
            ("start_agents", self.start_agents),
            ("load", self.load),
            ("run", self.run),
            ("cleanup", self.cleanup),
        ]
    }

    /// All phases together.
    pub fn total(&self) -> Duration {
        self.named().iter().map(|(_, time)| *time).sum()
    }
}

/// The counts of one job.
#[derive(Debug, Clone)]
pub struct Stats {
    pub hosts: u32,
    pub ranks: u32,
    pub phases: Phases,
    /// Different files whose content was captured.
    pub files: u64,
    /// Bytes of content read from the shared file system.
    pub bytes_read: u64,
    /// Bytes put on the network, by all nodes together.
    pub bytes_sent: u64,
    /// Of these, to nodes that asked.
    pub bytes_pulled: u64,
    /// Files that were already in the stores of the nodes when the job asked for them.
    pub cache_hits: u64,
    /// Questions of the hosts that only the shared file system could answer.
    pub misses: u64,
    /// Operations made at the shared file system (open, stat, read, directory listing).
    pub operations_done: u64,
    /// Operations of the ranks answered by a node instead.
    pub operations_avoided: u64,
    /// What ranks did past the store, at the originals: operations, bytes read.
    pub original: (u64, u64),
    /// What the reader did at the shared file system, and what ranks did past the store, by path.
    pub paths: Tally,
    pub originals: Tally,
    /// How long the hosts took.
    pub spreads: Vec<Spread>,
    /// Seconds by which hosts may be misplaced against each other.
    pub clock_error: f64,
    /// Of programs that used memory of other nodes, and the names of its servers.
    pub paging: Option<(Paging, Vec<String>)>,
    /// Of programs that wrote asynchronously.
    pub writing: Option<Writing>,
    /// The code hpcrt exits with.
    pub exit_code: u8,
    /// [`super::exit::Ends::to_json`].
    pub failures: Vec<Value>,
    /// What hosts did without, and what came instead: hosts, words.
    pub limits: Vec<(String, String)>,
}

impl Stats {
    /// The `--stats` object.
    pub fn to_json(&self) -> Value {
        let mut seconds: Map<String, Value> =
            self.phases.named().iter().map(|(name, time)| ((*name).to_owned(), json!(time.as_secs_f64()))).collect();
        seconds.insert("total".to_owned(), json!(self.phases.total().as_secs_f64()));
        json!({
            "schema": SCHEMA,
            "hpcrt": env!("CARGO_PKG_VERSION"),
            "hosts": self.hosts,
            "ranks": self.ranks,
            "seconds": seconds,
            "files": self.files,
            "cache_hits": self.cache_hits,
            "misses": self.misses,
            "bytes": {
                "read": self.bytes_read,
                "sent": self.bytes_sent,
                "pulled": self.bytes_pulled,
                "original": self.original.1,
            },
            "operations": {
                "done": self.operations_done,
                "avoided": self.operations_avoided,
                "original": self.original.0,
            },
            "paths": paths_json(&self.paths),
            "originals": paths_json(&self.originals),
            "phases": self.spreads.iter().map(Spread::to_json).collect::<Vec<_>>(),
            "clock_error": self.clock_error,
            "memory": self.paging.as_ref().map(|(paging, lenders)| memory_json(paging, lenders)),
            "async_io": self.writing.as_ref().map(writing_json),
            "exit_code": self.exit_code,
            "failures": self.failures,
            "limits": self.limits.iter().map(|(hosts, what)| json!({ "hosts": hosts, "what": what })).collect::<Vec<_>>(),
        })
    }

    /// `8 ranks on 4 hosts`.
    pub fn size(&self) -> String {
        if self.ranks == 0 {
            return format!("ranks of another launcher on {}", plural(self.hosts.into(), "host"));
        }
        format!("{} on {}", plural(self.ranks.into(), "rank"), plural(self.hosts.into(), "host"))
    }

    /// The two lines after a job, each ending with a newline. Phases that took no time are left out.
    pub fn summary(&self) -> String {
        let phase = |(name, time): &(&str, Duration)| format!("{} {:.2} s", name.replace('_', " "), time.as_secs_f64());
        let took: Vec<String> = self.phases.named().iter().filter(|(_, time)| !time.is_zero()).map(phase).collect();
        let loaded = self.files + self.cache_hits + self.operations_done + self.operations_avoided;
        let first =
            format!("{}, exit code {}, {:.2} s", self.size(), self.exit_code, self.phases.total().as_secs_f64());
        let first = format!("hpcrt: {first} ({})", took.join(", "));
        if loaded == 0 {
            return format!("{first}\nhpcrt: no file was captured: each host read its own\n");
        }
        format!(
            "{first}\nhpcrt: {}, {} read, {} sent, {} at the shared file system, {} avoided\n",
            counted(self.files, "file"),
            HumanBytes(self.bytes_read),
            HumanBytes(self.bytes_sent),
            counted(self.operations_done, "operation"),
            HumanCount(self.operations_avoided),
        )
    }
}

/// The ten paths that cost most: an array of path, operations, bytes, and, of those that the reader touched, operations by reason.
pub fn paths_json(paths: &Tally) -> Value {
    const SHOWN: usize = 10;
    let path = |(path, cost): (&[u8], Cost)| {
        let mut shown =
            json!({ "path": String::from_utf8_lossy(path), "operations": cost.operations, "bytes": cost.bytes });
        let by = Why::ALL.iter().filter(|why| **why != Why::Rank && cost.by[**why as usize] > 0);
        let by: Map<String, Value> = by.map(|why| (why.name().to_owned(), cost.by[*why as usize].into())).collect();
        if let (false, Value::Object(shown)) = (by.is_empty(), &mut shown) {
            shown.insert("by".to_owned(), by.into());
        }
        shown
    };
    paths.top(SHOWN).into_iter().map(path).collect()
}

fn writing_json(writing: &Writing) -> Value {
    let lost = |(path, error): &(String, String)| json!({ "path": path, "error": error });
    json!({
        "writes": writing.writes,
        "bytes": writing.bytes,
        "pieces": writing.pieces,
        "lost": writing.lost.iter().map(lost).collect::<Vec<_>>(),
    })
}

/// What the pagers of a job counted; `lenders`: names of the servers.
pub fn memory_json(paging: &Paging, lenders: &[String]) -> Value {
    let at = |list: &[u64], at: usize| list.get(at).copied().unwrap_or(0);
    let away = lenders.iter().enumerate().map(|(nth, name)| json!({ "server": name, "bytes": at(&paging.away, nth) }));
    let units = paging.units.iter().enumerate().filter(|(_, faults)| **faults > 0);
    let units = units.map(|(order, faults)| json!({ "bytes": PAGE << order, "faults": faults }));
    let part = |part: &Part| json!({ "from": format!("{:#x}", part.begin), "unit": part.unit, "faults": part.faults });
    let ahead = |which| at(&paging.ahead, which);
    json!({
        "programs": paging.programs,
        "running": paging.running,
        "budget": paging.budget,
        "resident": paging.resident,
        "away": away.collect::<Vec<_>>(),
        "most_away": paging.most_away,
        "without_copy": (paging.running > 0).then(|| paging.bare as f64 / (u64::from(paging.running) * PLACES as u64) as f64),
        "faults": {
            "fetched": at(&paging.faults, kind::FETCHED),
            "foreseen": at(&paging.faults, kind::FORESEEN),
            "fresh": at(&paging.faults, kind::FRESH),
            "awaited": at(&paging.faults, kind::AWAITED),
        },
        "fault_seconds": { "p50": paging.percentile(0.5), "p99": paging.percentile(0.99) },
        "units": units.collect::<Vec<_>>(),
        "regions": paging.parts.iter().map(part).collect::<Vec<_>>(),
        "ahead": {
            "bytes": ahead(0),
            "used": ahead(1),
            "in_vain": ahead(2),
            "hit_rate": (ahead(0) > 0).then(|| ahead(1) as f64 / ahead(0) as f64),
        },
        "bytes": { "received": paging.received, "sent": paging.sent },
        "evicted": { "bytes": at(&paging.evicted, 0), "unchanged": at(&paging.evicted, 1), "zero": at(&paging.evicted, 2) },
        "stalls": { "count": paging.stalls.0, "seconds": paging.stalls.1 as f64 / 1e9 },
    })
}

/// `1,234 files`.
pub(super) fn counted(count: u64, noun: &str) -> String {
    format!("{} {noun}{}", HumanCount(count), if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::exit::{End, Ends};
    use super::super::hostlist::Host;
    use super::super::placement::Placement;
    use super::*;

    fn sample() -> Stats {
        let placement = Placement::new(vec![Host::named("n1")], Some(2), None).unwrap();
        let mut ends = Ends::new(2, false);
        ends.handle_end(1, End::Exited(3));
        let phases = Phases { load: Duration::from_millis(1250), run: Duration::from_secs(2), ..Phases::default() };
        let (mut paths, mut originals) = (Tally::new(1), Tally::new(1));
        Why::ALL.iter().for_each(|why| paths.add(b"/a", *why, 1, 1));
        originals.add(b"/b", Why::Rank, 1, 1);
        let parts = vec![Part { begin: 1, unit: 2, faults: 3 }];
        let paging = Paging { units: vec![1], times: vec![1], parts, ahead: vec![1], ..Paging::default() };
        let counts = (1234, 5 << 20, 3 << 30, 17, 20, 98_765);
        let (files, bytes_read, bytes_sent, cache_hits, operations_done, operations_avoided) = counts;
        Stats {
            hosts: 1,
            ranks: 2,
            phases,
            files,
            bytes_read,
            bytes_sent,
            bytes_pulled: 0,
            cache_hits,
            misses: 0,
            operations_done,
            operations_avoided,
            original: (7, 8),
            paths,
            originals,
            spreads: vec![Spread {
                phase: super::super::timeline::Phase::Load,
                least: 0.0,
                median: 0.0,
                p90: 0.0,
                most: 0.0,
                slowest: "a".to_owned(),
            }],
            clock_error: 0.001,
            paging: Some((paging, vec!["m".to_owned()])),
            writing: Some(Writing { lost: vec![(String::new(), String::new())], ..Writing::default() }),
            exit_code: 3,
            failures: ends.to_json(&placement),
            limits: vec![("n1".to_owned(), "no".to_owned())],
        }
    }

    #[test]
    fn two_lines() {
        assert_eq!(
            sample().summary(),
            "hpcrt: 2 ranks on 1 host, exit code 3, 3.25 s (load 1.25 s, run 2.00 s)\n\
             hpcrt: 1,234 files, 5.00 MiB read, 3.00 GiB sent, 20 operations at the shared file system, 98,765 avoided\n"
        );
        let nothing = Stats { files: 0, cache_hits: 0, operations_done: 0, operations_avoided: 0, ..sample() };
        assert_eq!(nothing.summary().lines().nth(1), Some("hpcrt: no file was captured: each host read its own"));
    }

    fn fields(value: &Value, path: &str, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(key, value)| {
                let dot = if path.is_empty() { "" } else { "." };
                fields(value, &format!("{path}{dot}{key}"), found);
            }),
            Value::Array(items) if !items.is_empty() => {
                items.iter().for_each(|item| fields(item, &format!("{path}[]"), found));
            }
            _ => drop(found.insert(path.to_owned())),
        }
    }

    /// docs/STATS.md and the object name the same fields, with the same schema version.
    #[test]
    fn every_field_is_documented() {
        let mut found = BTreeSet::new();
        fields(&sample().to_json(), "", &mut found);
        let text = include_str!("../../docs/STATS.md").split("\n## ").nth(1).expect("the first section");
        let field = |line: &str| Some(line.strip_prefix("| `")?.split_once("` |")?.0.to_owned());
        let documented: BTreeSet<String> = text.lines().filter_map(field).collect();
        assert_eq!(found, documented);
        assert!(text.contains(&format!("schema version {SCHEMA}.")));
    }
}
