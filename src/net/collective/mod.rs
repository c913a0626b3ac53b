//! Collective operations of a job's members, as state machines without sockets and clocks. Agents are the tree: a member talks to the
//! agent of its node only ([`text`]), a node's part ([`Branch`]) adds up what comes from its own members and from the nodes below and says
//! it upward once, the root's part ([`Trunk`]) answers all.
//!
//! Every operation is complete when every member has called it, a broadcast, too. Members call one at a time, so at most two are under way
//! anywhere: the one that is being answered, and the next.

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
