//! The programs of a job over its hosts: each has a block of consecutive ranks.
//!
//! A program with hosts of its own gets those, whatever runs there. One without gets the slots that those before it left free, and when
//! there are too few of them, all hosts.

use super::hostlist::{self, Host};
use super::placement::{Note, Placement, Share};
use crate::net::wire::session::Block;
use crate::{Error, Result};

/// Where all programs run.
#[derive(Debug)]
pub struct Blocks {
    pub placement: Placement,
    /// The program of each share, by its number.
    pub parts: Vec<u32>,
}

impl Blocks {
    /// Places the programs on `hosts`, those of `all` that are there: others of them that a program names are left out.
    ///
    /// # Errors
    /// As [`Placement::new`]'s; none of a program's hosts is there, or one is none of `all`.
    pub fn new(hosts: &[Host], all: &[Host], blocks: &[Block]) -> Result<Blocks> {
        let (mut shares, mut notes, mut parts) = (Vec::<Share>::new(), Vec::new(), Vec::new());
        for (part, block) in (0..).zip(blocks) {
            let first = shares.last().map_or(0, |share| share.ranks.end);
            let place = |hosts| Placement::new(hosts, block.ranks, block.per_host);
            let placed = match &block.hosts {
                Some(list) => place(own(list, hosts, all)?)?,
                None if shares.is_empty() => place(hosts.to_vec())?,
                None => match place(free(hosts, &shares)) {
                    Ok(placed) if !placed.notes.iter().any(|note| matches!(note, Note::Crowded(_))) => placed,
                    _ => place(hosts.to_vec())?,
                },
            };
            parts.extend(placed.shares.iter().map(|_| part));
            let moved = placed.shares.into_iter().map(|Share { host, ranks }| {
                let ranks = first + ranks.start..first + ranks.end;
                Share { host, ranks }
            });
            shares.extend(moved);
            // That a program does not need every host is as it should be.
            let is_news = |note: &Note| blocks.len() == 1 || !matches!(note, Note::Idle(_));
            notes.extend(placed.notes.into_iter().filter(is_news));
        }
        Ok(Blocks { placement: Placement { shares, notes }, parts })
    }
}

/// Those of `hosts` that are named, with the slots that the list gives them.
fn own(list: &str, hosts: &[Host], all: &[Host]) -> Result<Vec<Host>> {
    let named = hostlist::parse(list, &mut || {
        Err(Error::usage("place the ranks", "the hosts of one program cannot be read from standard input"))
    })?;
    let is_in = |hosts: &[Host], own: &Host| hosts.iter().any(|host| host.name == own.name);
    if let Some(stranger) = named.iter().find(|own| !is_in(all, own)) {
        return Err(Error::usage("place the ranks", "there is no such host in the job or session").on(&stranger.name));
    }
    let there: Vec<Host> = named.into_iter().filter(|own| is_in(hosts, own)).collect();
    if there.is_empty() {
        return Err(Error::usage("place the ranks", format!("none of the hosts {list} is up")));
    }
    Ok(there)
}

/// The hosts with slots that are not taken.
fn free(hosts: &[Host], shares: &[Share]) -> Vec<Host> {
    let left = |host: &Host| {
        let taken: u32 = shares.iter().filter(|s| s.host.name == host.name).map(|s| s.ranks.end - s.ranks.start).sum();
        let slots = host.slots.unwrap_or(1).saturating_sub(taken);
        let max_slots = host.max_slots.map(|max| max.saturating_sub(taken));
        (slots > 0).then(|| Host { slots: Some(slots), max_slots, ..host.clone() })
    };
    hosts.iter().filter_map(left).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(list: &str, blocks: &[(Option<u32>, Option<&str>)]) -> String {
        let hosts = hostlist::parse(list, &mut || Ok(Vec::new())).unwrap();
        let block = |(ranks, hosts): &(Option<u32>, Option<&str>)| Block {
            ranks: *ranks,
            hosts: hosts.map(str::to_owned),
            ..Block::default()
        };
        let placed = Blocks::new(&hosts, &hosts, &blocks.iter().map(block).collect::<Vec<_>>()).unwrap();
        let share = |(share, part): (&Share, &u32)| format!("{part}:{}={:?} ", share.host.name, share.ranks);
        placed.placement.shares.iter().zip(&placed.parts).map(share).collect()
    }

    #[test]
    fn programs_follow_each_other() {
        assert_eq!(map("a:2,b:2", &[(Some(2), None), (Some(2), None)]), "0:a=0..2 1:b=2..4 ");
        assert_eq!(map("a:2,b:2", &[(Some(3), None), (Some(1), None)]), "0:a=0..2 0:b=2..3 1:b=3..4 ");
        assert_eq!(map("a:2,b:2", &[(Some(4), None), (Some(1), None)]), "0:a=0..2 0:b=2..4 1:a=4..5 ");
        assert_eq!(map("a,b,c", &[(None, Some("a,b:2")), (None, Some("c,a"))]), "0:a=0..1 0:b=1..3 1:c=3..4 1:a=4..5 ");
    }
}
