//! Standard input on its way to the ranks: one block at a time, the next when every reader took the last.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smol::Unblock;
use smol::io::AsyncReadExt;

use super::console::Console;
use crate::net::wire::control::{NodeId, StdinTo};
use crate::sys::stdin::Stdin;

/// See the module.
pub(super) struct Input {
    from: Option<Unblock<Box<dyn Read + Send>>>,
    terminal: bool,
    /// Nothing more is read.
    over: Arc<AtomicBool>,
    /// Nodes and programs of the job on them that have yet to take the last block: with two under way one could pass the other.
    waiting: BTreeSet<(NodeId, u32)>,
}

impl Input {
    /// What the job reads of the console.
    pub(super) fn new(to: StdinTo, console: &Console) -> Input {
        let terminal = console.stdin.as_ref().is_some_and(|stdin| stdin.is_terminal());
        let over = Arc::default();
        let stdin: Box<dyn Read + Send> = match &console.stdin {
            Some(stdin) => Box::new(Stdin::new(Arc::clone(stdin), Arc::clone(&console.reads), Arc::clone(&over))),
            None => Box::new(io::empty()),
        };
        let from = (to != StdinTo::None).then(|| Unblock::with_capacity(64 << 10, stdin));
        Input { from, terminal, over, waiting: BTreeSet::new() }
    }

    /// The next block; empty at the end. Safe to cancel: what was read stays in the buffer of `from`.
    ///
    /// # Errors
    /// It cannot be read; it is at its end then.
    pub(super) async fn read(&mut self) -> io::Result<Vec<u8>> {
        let Some(from) = self.from.as_mut().filter(|_| self.waiting.is_empty()) else {
            return smol::future::pending().await;
        };
        let mut bytes = vec![0; 64 << 10];
        let got = match from.read(&mut bytes).await {
            // A terminal that is gone gives no more.
            Err(_) if self.terminal => 0,
            Err(error) => {
                self.close();
                return Err(error);
            }
            Ok(got) => got,
        };
        bytes.truncate(got);
        Ok(bytes)
    }

    /// A block went to these programs on these nodes.
    pub(super) fn sent(&mut self, bytes: &[u8], readers: &[(NodeId, u32)]) {
        if bytes.is_empty() || readers.is_empty() {
            self.close();
        } else {
            self.waiting.extend(readers);
        }
    }

    /// This program took it on this node, or is over there.
    pub(super) fn taken(&mut self, node: NodeId, part: u32) {
        self.waiting.remove(&(node, part));
    }

    /// This node takes nothing any more.
    pub(super) fn lost(&mut self, node: NodeId) {
        self.waiting.retain(|(waiting, _)| *waiting != node);
    }

    fn close(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.from = None;
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_over_has_taken_nothing_for_another() {
        let mut input = Input { from: None, terminal: false, over: Arc::default(), waiting: BTreeSet::new() };
        input.sent(b"block", &[(1, 0), (1, 1), (2, 0)]);
        // None of its ranks reads; then it ends.
        input.taken(1, 1);
        input.taken(1, 1);
        input.lost(2);
        assert_eq!(Vec::from_iter(input.waiting.clone()), [(1, 0)]);
        input.taken(1, 0);
        assert!(input.waiting.is_empty());
    }
}
