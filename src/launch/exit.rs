//! How the ranks ended, what hpcrt's exit code follows from it, and the table of failures.
//!
//! The exit code of a job is that of the first rank that failed by itself (128 + signal for a killed one); ranks that
//! hpcrt ended do not count. A lost host counts as 125 in its turn. With `--keep-going` the highest code counts.

use std::fmt;
use std::fmt::Write;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::fold::{fold, fold_ranks};
use super::placement::{Placement, plural};
use crate::error::EXIT_FAILED;

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum End {
    /// It exited with this code.
    Exited(u8),
    /// This signal killed it.
    Killed(u8),
    /// Its host was lost.
    Lost,
    /// hpcrt ended it (whatever `wait` said then), or it ended itself when told to.
    Stopped,
}

impl End {
    /// The exit code this end stands for: 0 for one that is no failure of the rank's own.
    pub fn code(self) -> u8 {
        match self {
            End::Exited(code) => code,
            End::Killed(signal) => 128u8.saturating_add(signal),
            End::Lost => EXIT_FAILED,
            End::Stopped => 0,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            End::Exited(code) => write!(f, "exit code {code}"),
            End::Killed(signal) => match Signal::try_from(i32::from(signal)) {
                Ok(name) => write!(f, "killed by {}", name.as_str()),
                Err(_) => write!(f, "killed by signal {signal}"),
            },
            End::Lost => f.write_str("host lost"),
            End::Stopped => f.write_str("ended by hpcrt"),
        }
    }
}

/// The ends of a job's ranks, in the order they became known.
#[derive(Debug)]
pub struct Ends {
    keep_going: bool,
    /// By rank; `None` while it runs.
    ends: Vec<Option<End>>,
    running: usize,
    first: Option<(u32, End)>,
    highest: u8,
}

impl Ends {
    /// For a job of `ranks` ranks, all running. `keep_going`: a failure does not end the job.
    pub fn new(ranks: u32, keep_going: bool) -> Self {
        Ends { keep_going, ends: vec![None; ranks as usize], running: ranks as usize, first: None, highest: 0 }
    }

    /// `rank` ended. Only its first end counts: a rank that ended before its host was lost is not lost.
    /// Returns whether the other ranks are to be ended now.
    pub fn handle_end(&mut self, rank: u32, end: End) -> bool {
        let Some(slot @ None) = self.ends.get_mut(rank as usize) else { return false };
        *slot = Some(end);
        self.running -= 1;
        let failed = end.code() != 0;
        if failed {
            self.highest = self.highest.max(end.code());
            self.first.get_or_insert((rank, end));
        }
        failed && !self.keep_going && self.running > 0
    }

    pub fn has_ended(&self, rank: u32) -> bool {
        self.ends.get(rank as usize).is_some_and(Option::is_some)
    }

    /// Ranks that have not ended.
    pub fn running(&self) -> usize {
        self.running
    }

    /// The job's exit code as far as it is known.
    pub fn exit_code(&self) -> u8 {
        match self.first {
            Some((_, end)) if !self.keep_going => end.code(),
            _ => self.highest,
        }
    }

    /// Every kind of end but success, with its ranks (ascending): failures first, stopped ranks last.
    pub fn failures(&self) -> Vec<(End, Vec<u32>)> {
        let mut failed: Vec<(End, u32)> = Vec::new();
        for (rank, end) in (0..).zip(&self.ends) {
            failed.extend(end.filter(|end| *end != End::Exited(0)).map(|end| (end, rank)));
        }
        failed.sort_unstable();
        let group = |group: &[(End, u32)]| (group[0].0, group.iter().map(|(_, rank)| *rank).collect());
        failed.chunk_by(|a, b| a.0 == b.0).map(group).collect()
    }

    /// The failures as a table, a line for each kind below a line about the first; empty when all went well. `placement`: of these ranks.
    pub fn table(&self, placement: &Placement) -> String {
        let mut text = String::new();
        let Some((rank, end)) = self.first else { return text };
        let host = placement.host_name(rank);
        let failed = self.ends.iter().flatten().filter(|end| end.code() != 0).count();
        let of = plural(self.ends.len() as u64, "rank");
        writeln!(text, "{failed} of {of} failed, first rank {rank} on {host}: {end}").expect("a String takes all");
        let failures = self.failures();
        let rows = failures.iter().map(|(end, ranks)| (end.to_string(), fold_ranks(ranks), hosts(placement, ranks)));
        let rows: Vec<_> = rows.collect();
        let width =
            |cell: fn(&(String, String, String)) -> &String| rows.iter().map(|row| cell(row).len()).max().unwrap_or(0);
        let (ends, ranks) = (width(|row| &row.0), width(|row| &row.1).min(40));
        for (end, rank, host) in &rows {
            writeln!(text, "  {end:ends$}  ranks {rank:ranks$}  on {host}").expect("a String takes all");
        }
        text
    }

    /// [`Ends::failures`] for `--stats`: objects described in docs/STATS.md.
    pub fn to_json(&self, placement: &Placement) -> Vec<Value> {
        let row = |(end, ranks): (End, Vec<u32>)| {
            let (kind, number) = match end {
                End::Exited(code) => ("exited", Some(code)),
                End::Killed(signal) => ("killed", Some(signal)),
                End::Lost => ("lost", None),
                End::Stopped => ("stopped", None),
            };
            json!({
                "end": kind,
                "number": number,
                "count": ranks.len(),
                "ranks": fold_ranks(&ranks),
                "hosts": hosts(placement, &ranks),
            })
        };
        self.failures().into_iter().map(row).collect()
    }
}

/// The folded names of the hosts of these ranks.
fn hosts(placement: &Placement, ranks: &[u32]) -> String {
    let mut names: Vec<&str> = ranks.iter().map(|&rank| placement.host_name(rank)).collect();
    names.dedup();
    fold(&names)
}

#[cfg(test)]
mod tests {
    use super::super::hostlist::Host;
    use super::*;

    fn ends(keep_going: bool, events: &[(u32, End)]) -> Ends {
        let mut ends = Ends::new(8, keep_going);
        for &(rank, end) in events {
            ends.handle_end(rank, end);
        }
        ends
    }

    fn placement() -> Placement {
        Placement::new((1..=4).map(|i| Host::named(format!("n{i}"))).collect(), None, Some(2)).unwrap()
    }

    #[test]
    fn the_first_failure_of_its_own_counts() {
        let events = [(0, End::Exited(0)), (1, End::Stopped), (5, End::Exited(3)), (2, End::Killed(9)), (3, End::Lost)];
        assert_eq!(ends(false, &events).exit_code(), 3);
        assert_eq!(ends(true, &events).exit_code(), 137);
        assert_eq!(ends(false, &[(1, End::Killed(11)), (2, End::Exited(200))]).exit_code(), 139);
        assert_eq!(ends(false, &[(3, End::Lost), (2, End::Killed(9))]).exit_code(), 125);
        assert_eq!(ends(true, &[(3, End::Lost), (2, End::Exited(3))]).exit_code(), 125);
        assert_eq!(ends(false, &[(1, End::Stopped), (0, End::Exited(0))]).exit_code(), 0);
        assert_eq!(ends(false, &[]).exit_code(), 0);
    }

    #[test]
    fn a_rank_ends_once() {
        let mut ends = ends(false, &[(0, End::Exited(0)), (0, End::Lost), (99, End::Lost)]);
        assert_eq!((ends.exit_code(), ends.running()), (0, 7));
        assert!(ends.handle_end(1, End::Exited(1)));
        assert!(!ends.handle_end(1, End::Exited(1)));
        assert!(!ends.handle_end(2, End::Stopped));
        assert!(!Ends::new(2, true).handle_end(0, End::Exited(1)));
    }

    #[test]
    fn table() {
        let placement = placement();
        assert_eq!(ends(false, &[(0, End::Exited(0))]).table(&placement), "");
        let all = [
            (3, End::Killed(11)),
            (0, End::Exited(3)),
            (1, End::Exited(3)),
            (6, End::Lost),
            (7, End::Lost),
            (4, End::Stopped),
        ];
        assert_eq!(
            ends(false, &all).table(&placement),
            "5 of 8 ranks failed, first rank 3 on n2: killed by SIGSEGV
  exit code 3        ranks 0-1  on n1
  killed by SIGSEGV  ranks 3    on n2
  host lost          ranks 6-7  on n4
  ended by hpcrt     ranks 4    on n3\n"
        );
        assert_eq!(End::Killed(40).to_string(), "killed by signal 40");
    }

    #[test]
    fn json() {
        let json = ends(false, &[(0, End::Exited(3)), (1, End::Exited(3)), (2, End::Lost)]).to_json(&placement());
        let expected = [
            json!({"end": "exited", "number": 3, "count": 2, "ranks": "0-1", "hosts": "n1"}),
            json!({"end": "lost", "number": null, "count": 1, "ranks": "2", "hosts": "n2"}),
        ];
        assert_eq!(json, expected);
    }
}
