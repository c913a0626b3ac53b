//! A job as those see it who ask about it: what it is, how far it has come, and what its nodes told at their ends.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::ops::Range;
use std::time::Instant;

use super::root::{Root, Told};
use super::timeline::{Line, Moment};
use crate::loader::tally::{Tally, Why};
use crate::net::wire::control::NodeId;
use crate::net::wire::facts::{JobFacts, Paging, Writing};
use crate::sys::mpir;

/// Paths that ranks read themselves of which is remembered what they cost.
const ORIGINALS: usize = 256;

/// See the module.
#[derive(Debug)]
pub struct Card {
    /// The program as it was named, and its absolute path.
    pub program: String,
    pub path: Vec<u8>,
    pub ranks: u32,
    /// The memory servers that it uses, as the user named them.
    pub lenders: Vec<String>,
    /// Its nodes with their ranks, in order.
    pub nodes: Vec<(NodeId, Range<u32>)>,
    /// Its files are shown through a view.
    pub view: bool,
    pub begun: Instant,
    /// When the order to launch was sent.
    pub ordered: Moment,
    pub progress: RefCell<Progress>,
}

/// How far a job has come.
#[derive(Debug)]
pub struct Progress {
    /// Nodes that have everything the program needs to start.
    pub loaded: BTreeSet<NodeId>,
    /// Nodes on which nothing of the job is left.
    pub done: BTreeSet<NodeId>,
    /// Ranks that ended.
    pub ended: u32,
    /// It is being ended.
    pub ending: bool,
    /// Nodes that are done.
    pub lines: Vec<Line>,
    /// Processes of the ranks, once they were asked for; 0: it ended before.
    pub pids: BTreeMap<u32, u32>,
    /// Answers of those, and what they passed on to originals: operations, bytes, and the paths that cost most.
    pub avoided: u64,
    pub passed: (u64, u64),
    pub originals: Tally,
    /// Of programs that use memory of other nodes.
    pub paging: Option<Paging>,
    pub writing: Option<Writing>,
}

impl Default for Progress {
    fn default() -> Self {
        Progress {
            loaded: BTreeSet::new(),
            done: BTreeSet::new(),
            ended: 0,
            ending: false,
            lines: Vec::new(),
            pids: BTreeMap::new(),
            avoided: 0,
            passed: (0, 0),
            originals: Tally::new(ORIGINALS),
            paging: None,
            writing: None,
        }
    }
}

impl Progress {
    /// Adds what a node told of its part.
    pub fn add(&mut self, facts: &JobFacts) {
        self.avoided += facts.avoided;
        self.passed.0 += facts.passed.0;
        self.passed.1 += facts.passed.1;
        for original in &facts.originals {
            self.originals.add(&original.path, Why::Rank, original.operations, original.bytes);
        }
        if let Some(writing) = &facts.writing {
            self.writing.get_or_insert_default().add(writing);
        }
        if let Some(paging) = &facts.paging {
            self.paging.get_or_insert_default().add(paging);
        }
    }
}

/// What nodes told with the ends of their parts of a job.
#[derive(Debug, Default)]
pub struct Endings {
    /// Bytes of files that nodes passed on to nodes, and of these to nodes that asked.
    pub received: (u64, u64),
    /// What their user should know: the same on many is said once.
    pub warnings: Told,
}

impl Endings {
    /// Adds what a node told.
    pub fn add(
        &mut self,
        (root, card): (&Root, &Card),
        node: NodeId,
        warnings: Vec<String>,
        received: (u64, u64),
        facts: &JobFacts,
    ) {
        self.received = (self.received.0 + received.0, self.received.1 + received.1);
        for warning in warnings {
            self.warnings.entry(warning).or_default().insert(node);
        }
        let mut progress = card.progress.borrow_mut();
        progress.done.insert(node);
        progress.add(facts);
        if let Some((birth, offset)) = root.clocks().get(node) {
            progress.lines.push(Line::new(root.host(node), birth, offset, card.ordered, facts, root.now()));
        }
    }
}

impl Card {
    /// The processes of all ranks are known.
    pub fn knows_pids(&self) -> bool {
        self.progress.borrow().pids.len() >= self.ranks as usize
    }

    /// Gives the table of processes to a debugger that looks for it.
    pub fn show_debugger(&self, root: &Root) {
        let (progress, path) = (self.progress.borrow(), CString::new(self.path.clone()).unwrap_or_default());
        let of = |(node, ranks): &(NodeId, Range<u32>)| {
            let pid = |rank| progress.pids.get(&rank).and_then(|pid| i32::try_from(*pid).ok()).unwrap_or(0);
            ranks.clone().map(|rank| (root.host(*node), pid(rank))).collect::<Vec<_>>()
        };
        let processes: Vec<(&str, i32)> = self.nodes.iter().flat_map(of).collect();
        mpir::show(&path, &processes);
    }

    /// `loading`, `running` or `ending`.
    pub fn phase(&self) -> &'static str {
        let progress = self.progress.borrow();
        if progress.ending || !progress.done.is_empty() || self.ranks > 0 && progress.ended >= self.ranks {
            "ending"
        } else if self.view && self.nodes.iter().any(|(node, _)| !progress.loaded.contains(node)) {
            "loading"
        } else {
            "running"
        }
    }
}
