//! Which rank runs on which host, and on which CPUs there.
//!
//! Ranks are placed in blocks: each host gets consecutive ranks, in the order of the host list.
//!
//! | given | ranks per host |
//! |---|---|
//! | nothing | its slots; one where nobody told the slots |
//! | `-n N` | its slots in order until N are placed; what is left over is dealt out evenly, first to hosts of unknown slots, then to all (a note says so) |
//! | `--ppn P` | P |
//! | `-n N --ppn P` | P in order until N are placed; an error if they do not fit |
//!
//! `max_slots` of a host is never exceeded.

use std::fmt::{self, Write};
use std::ops::Range;

use super::fold::fold;
use super::hostlist::Host;
use crate::error::{Error, Result};
use crate::net::wire::control::Binding;

/// Ranks of one job, at most.
pub const MAX_RANKS: u32 = 1 << 24;

/// A host of the job with its ranks (at least one).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    pub host: Host,
    /// Its ranks; local rank 0 is the first.
    pub ranks: Range<u32>,
}

/// What the user may not have wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// More ranks than slots on these hosts.
    Crowded(Vec<String>),
    /// No rank on these.
    Idle(Vec<String>),
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (hosts, [one, more], what) = match self {
            Note::Crowded(hosts) => (hosts, ["runs", "run"], "more ranks than slots"),
            Note::Idle(hosts) => (hosts, ["gets", "get"], "no rank"),
        };
        let verb = if hosts.len() == 1 { one } else { more };
        write!(f, "{} {verb} {what}: {}", plural(hosts.len() as u64, "host"), fold(hosts))
    }
}

/// The ranks of a job over its hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Hosts that run something; their ranges follow each other from rank 0.
    pub shares: Vec<Share>,
    /// What the user should know, a sentence each: oversubscription, unused hosts.
    pub notes: Vec<Note>,
}

/// Where a rank runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Index into [`Placement::shares`].
    pub host: usize,
    pub local_rank: u32,
    pub local_size: u32,
}

impl Placement {
    /// Places `ranks` (`-n`) with `per_host` (`--ppn`) on `hosts`, by the rules of the module.
    ///
    /// # Errors
    /// Usage errors: no host, no or too many ranks, more than fit.
    pub fn new(hosts: Vec<Host>, ranks: Option<u32>, per_host: Option<u32>) -> Result<Self> {
        let error = |cause: String| Error::usage("place the ranks", cause);
        if hosts.is_empty() {
            return Err(error("there is no host".to_owned()));
        }
        if let Some((option, _)) = [("-n", ranks), ("--ppn", per_host)].iter().find(|(_, n)| *n == Some(0)) {
            return Err(error(format!("{option} 0 asks for no rank")));
        }
        let aim: Vec<u32> = hosts.iter().map(|host| per_host.unwrap_or(host.slots.unwrap_or(1))).collect();
        let mut counts: Vec<u32> = aim.iter().zip(&hosts).map(|(&n, host)| n.min(room(host))).collect();
        let total = |counts: &[u32]| counts.iter().map(|&n| u64::from(n)).sum::<u64>();
        if let Some(per_host) = per_host
            && ranks.is_none()
            && let Some(host) = hosts.iter().find(|host| room(host) < per_host)
        {
            return Err(error(format!("--ppn {per_host} is more than max_slots={} of {}", room(host), host.name)));
        }
        if let Some(ranks) = ranks {
            let mut left = ranks;
            for count in &mut counts {
                *count = left.min(*count);
                left -= *count;
            }
            if left > 0
                && let Some(per_host) = per_host
            {
                let (fit, hosts) = (total(&counts), plural(hosts.len() as u64, "host"));
                let cause = format!("-n {ranks} does not fit: {hosts} at --ppn {per_host} take {fit}");
                return Err(error(cause).remedy("raise --ppn, lower -n or name more hosts"));
            }
            left = deal(&hosts, &mut counts, left, &|host| host.slots.is_none());
            left = deal(&hosts, &mut counts, left, &|_| true);
            if left > 0 {
                let fit = total(&counts);
                let cause = format!("-n {ranks} does not fit: max_slots of the hosts allow {fit}");
                return Err(error(cause).remedy("lower -n or name more hosts"));
            }
        }
        if total(&counts) > u64::from(MAX_RANKS) {
            return Err(error(format!("{} ranks are more than {MAX_RANKS}", total(&counts))));
        }
        let notes = notes(&hosts, &counts);
        let mut next = 0;
        let share = |(host, count): (Host, u32)| {
            let ranks = next..next + count;
            next = ranks.end;
            Share { host, ranks }
        };
        let shares = hosts.into_iter().zip(counts).filter(|(_, count)| *count > 0).map(share).collect();
        Ok(Placement { shares, notes })
    }

    /// Number of ranks of the job.
    pub fn ranks(&self) -> u32 {
        self.shares.last().map_or(0, |share| share.ranks.end)
    }

    /// Where `rank` runs; `None` for a rank the job does not have.
    pub fn place(&self, rank: u32) -> Option<Place> {
        let host = self.shares.partition_point(|share| share.ranks.end <= rank);
        let ranks = &self.shares.get(host)?.ranks;
        Some(Place { host, local_rank: rank - ranks.start, local_size: ranks.end - ranks.start })
    }

    /// Name of the host of `rank`; empty for a rank the job does not have.
    pub fn host_name(&self, rank: u32) -> &str {
        self.place(rank).map_or("", |place| &self.shares[place.host].host.name)
    }

    /// The map as `--dry-run` prints it: a line per run of hosts that are alike, then the notes.
    pub fn render(&self) -> String {
        let size = |share: &Share| share.ranks.end - share.ranks.start;
        let title = |ranks: u64, hosts: u64| format!("{} on {}", plural(ranks, "rank"), plural(hosts, "host"));
        let mut text = title(self.ranks().into(), self.shares.len() as u64) + "\n";
        for run in self.shares.chunk_by(|a, b| size(a) == size(b) && a.host.slots == b.host.slots) {
            let (first, last) = (&run[0], &run[run.len() - 1]);
            let names: Vec<&str> = run.iter().map(|share| share.host.name.as_str()).collect();
            let ranks = if last.ranks.end - first.ranks.start == 1 { "rank" } else { "ranks" };
            let span = fold_ends(first.ranks.start, last.ranks.end - 1);
            write!(text, "  {}: {ranks} {span}", fold(&names)).expect("a String takes all");
            if run.len() > 1 {
                write!(text, ", {} each", size(first)).expect("a String takes all");
            }
            if let Some(slots) = first.host.slots {
                write!(text, " ({})", plural(slots.into(), "slot")).expect("a String takes all");
            }
            text.push('\n');
        }
        for note in &self.notes {
            writeln!(text, "note: {note}").expect("a String takes all");
        }
        text
    }
}

fn fold_ends(first: u32, last: u32) -> String {
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

/// `1 host`, `2 hosts`.
pub(super) fn plural(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

fn room(host: &Host) -> u32 {
    host.max_slots.unwrap_or(u32::MAX)
}

/// Deals `left` more ranks out evenly to the hosts that are `open` and have room; returns what found none.
/// Every round but the last fills a host up, or gives each its full even part.
fn deal(hosts: &[Host], counts: &mut [u32], mut left: u32, open: &dyn Fn(&Host) -> bool) -> u32 {
    let mut takers: Vec<usize> = (0..hosts.len()).filter(|&i| open(&hosts[i])).collect();
    while left > 0 {
        takers.retain(|&i| counts[i] < room(&hosts[i]));
        if takers.is_empty() {
            break;
        }
        let even = (left as usize / takers.len()).max(1) as u32;
        for &i in &takers {
            let given = even.min(room(&hosts[i]) - counts[i]).min(left);
            counts[i] += given;
            left -= given;
        }
    }
    left
}

fn notes(hosts: &[Host], counts: &[u32]) -> Vec<Note> {
    let named = |wanted: &dyn Fn(&Host, u32) -> bool| -> Vec<String> {
        let pairs = hosts.iter().zip(counts);
        pairs.filter(|(host, count)| wanted(host, **count)).map(|(host, _)| host.name.clone()).collect()
    };
    let over = named(&|host, count| host.slots.is_some_and(|slots| count > slots));
    let idle = named(&|_, count| count == 0);
    let notes = [(Note::Crowded as fn(_) -> _, over), (Note::Idle, idle)];
    notes.into_iter().filter(|(_, hosts)| !hosts.is_empty()).map(|(note, hosts)| note(hosts)).collect()
}

/// The CPUs of the `local_rank`-th of `local_size` ranks on a host with these `usable` CPUs (system numbers, ascending).
/// More ranks than CPUs share them. With no usable CPU known the set is empty: do not bind.
pub fn cpus(binding: Binding, usable: &[u32], local_rank: u32, local_size: u32) -> &[u32] {
    let (cpus, rank, size) = (usable.len(), local_rank as usize, local_size.max(1) as usize);
    if cpus == 0 || binding == Binding::None {
        return usable;
    }
    match binding {
        Binding::Spread if size <= cpus => {
            &usable[(rank * cpus / size).min(cpus)..((rank + 1) * cpus / size).min(cpus)]
        }
        Binding::Spread => std::slice::from_ref(&usable[(rank * cpus / size).min(cpus - 1)]),
        _ => std::slice::from_ref(&usable[rank % cpus]),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::hostlist::parse;
    use super::*;

    fn place(list: &str, ranks: Option<u32>, per_host: Option<u32>) -> Result<Placement> {
        Placement::new(parse(list, &mut || Ok(Vec::new())).unwrap(), ranks, per_host)
    }

    fn map(list: &str, ranks: Option<u32>, per_host: Option<u32>) -> String {
        let placement = place(list, ranks, per_host).unwrap();
        placement.shares.iter().map(|share| format!("{}={:?} ", share.host.name, share.ranks)).collect::<String>()
    }

    #[test]
    fn rules() {
        assert_eq!(map("a,b", None, None), "a=0..1 b=1..2 ");
        assert_eq!(map("a:3,b", None, None), "a=0..3 b=3..4 ");
        assert_eq!(map("a:3,b:3", Some(4), None), "a=0..3 b=3..4 ");
        assert_eq!(map("a,b,c", Some(8), None), "a=0..3 b=3..6 c=6..8 ");
        assert_eq!(map("a:2,b", Some(7), None), "a=0..2 b=2..7 ");
        assert_eq!(map("a:2,b:1", Some(6), None), "a=0..4 b=4..6 ");
        assert_eq!(map("a:8,b", None, Some(2)), "a=0..2 b=2..4 ");
        assert_eq!(map("a,b,c", Some(3), Some(2)), "a=0..2 b=2..3 ");
    }

    #[test]
    fn limits_hold() {
        let limited = |name: &str, max| Host { max_slots: Some(max), ..Host::named(name) };
        let hosts = || vec![limited("a", 2), Host::named("b"), limited("c", 3)];
        let sizes: Vec<_> =
            Placement::new(hosts(), Some(12), None).unwrap().shares.into_iter().map(|s| s.ranks.len()).collect();
        assert_eq!(sizes, [2, 7, 3]);
        let error = Placement::new(vec![limited("a", 2)], Some(3), None).unwrap_err().to_string();
        assert!(error.contains("-n 3 does not fit: max_slots of the hosts allow 2"), "{error}");
        let error = Placement::new(hosts(), None, Some(3)).unwrap_err().to_string();
        assert!(error.contains("--ppn 3 is more than max_slots=2 of a"), "{error}");
    }

    #[test]
    fn errors_are_sentences() {
        let error = |list, n, ppn| place(list, n, ppn).unwrap_err().to_string();
        assert!(error("a,b", Some(5), Some(2)).contains("-n 5 does not fit: 2 hosts at --ppn 2 take 4 (raise --ppn"));
        assert!(error("a", Some(0), None).contains("-n 0 asks for no rank"));
        assert!(error("a", None, Some(0)).contains("--ppn 0"));
        assert!(error("a", Some(u32::MAX), None).contains("more than 16777216"));
        assert!(Placement::new(Vec::new(), None, None).unwrap_err().to_string().contains("no host"));
    }

    #[test]
    fn rendering() {
        let placement = place("n[1-3]:2,m:1,spare:2", Some(7), None).unwrap();
        assert_eq!(
            placement.render(),
            "7 ranks on 4 hosts\n  n[1-3]: ranks 0-5, 2 each (2 slots)\n  m: rank 6 (1 slot)\nnote: 1 host gets no rank: spare\n"
        );
        let placement = place("a:1", Some(2), None).unwrap();
        assert_eq!(placement.notes[0].to_string(), "1 host runs more ranks than slots: a");
        assert_eq!(placement.host_name(1), "a");
        assert_eq!(placement.host_name(2), "");
    }

    #[test]
    fn binding_sets() {
        let usable = [0, 1, 4, 5, 6];
        let sets =
            |binding, size| (0..size).map(|rank| cpus(binding, &usable, rank, size).to_vec()).collect::<Vec<_>>();
        assert_eq!(sets(Binding::Compact, 3), [[0], [1], [4]]);
        assert_eq!(sets(Binding::Spread, 2), [vec![0, 1], vec![4, 5, 6]]);
        assert_eq!(sets(Binding::Compact, 6)[5], [0]);
        assert_eq!(sets(Binding::Spread, 10)[9], [6]);
        assert_eq!(sets(Binding::None, 1), [usable]);
        assert!(cpus(Binding::Spread, &[], 3, 4).is_empty());
    }

    proptest! {
        #[test]
        fn every_rank_has_one_place(
            slots in prop::collection::vec((prop::option::of(1u32..9), prop::option::of(1u32..12)), 1..20),
            ranks in prop::option::of(1u32..200),
            per_host in prop::option::of(1u32..9),
        ) {
            let host = |(i, &(slots, max_slots))| Host { slots, max_slots, ..Host::named(format!("n{i}")) };
            let hosts: Vec<Host> = slots.iter().enumerate().map(host).collect();
            if let Ok(placement) = Placement::new(hosts, ranks, per_host) {
                prop_assert!(ranks.is_none_or(|ranks| placement.ranks() == ranks));
                let mut next = 0;
                for (i, share) in placement.shares.iter().enumerate() {
                    prop_assert_eq!(share.ranks.start, next);
                    prop_assert!(!share.ranks.is_empty());
                    prop_assert!(share.ranks.len() <= room(&share.host) as usize);
                    prop_assert!(per_host.is_none_or(|n| share.ranks.len() <= n as usize));
                    for rank in share.ranks.clone() {
                        let size = share.ranks.len() as u32;
                        prop_assert_eq!(placement.place(rank), Some(Place { host: i, local_rank: rank - next, local_size: size }));
                    }
                    next = share.ranks.end;
                }
                prop_assert_eq!(placement.place(next), None);
            }
        }

        #[test]
        fn spread_uses_every_cpu_once(count in 1usize..64, size in 1u32..64) {
            let usable: Vec<u32> = (0..count as u32).collect();
            let all: Vec<u32> = (0..size).flat_map(|rank| cpus(Binding::Spread, &usable, rank, size).to_vec()).collect();
            if size as usize <= count {
                prop_assert_eq!(all, usable);
            }
        }
    }
}
