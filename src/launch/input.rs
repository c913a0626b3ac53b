//! Standard input on its way to the ranks: one block at a time, the next when every reader took the last.

use std::io::{self, IsTerminal, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smol::Unblock;
use smol::io::AsyncReadExt;

use super::console::Console;
use crate::net::wire::control::{NodeId, StdinTo};
use crate::sys::keyboard::Keyboard;
use crate::sys::patient::Patient;

/// See the module.
pub(super) struct Input {
    from: Option<Unblock<Box<dyn Read + Send>>>,
    terminal: bool,
    /// Nothing more is read.
    over: Arc<AtomicBool>,
    /// A node stands here for each program of the job that it has.
    waiting: Vec<NodeId>,
}

impl Input {
    /// What the job reads of the console.
    pub(super) fn new(to: StdinTo, console: &Console) -> Input {
        let from = console.stdin.as_ref().filter(|_| to != StdinTo::None).and_then(|stdin| stdin.try_clone().ok());
        let (terminal, over) = (from.as_ref().is_some_and(IsTerminal::is_terminal), Arc::default());
        let from = from.map(|stdin| -> Box<dyn Read + Send> {
            if terminal { Box::new(Keyboard::new(stdin, Arc::clone(&over))) } else { Box::new(Patient(stdin)) }
        });
        let from = from.map(|stdin| Unblock::with_capacity(64 << 10, stdin));
        Input { from, terminal, over, waiting: Vec::new() }
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
            got => got.inspect_err(|_| self.from = None)?,
        };
        bytes.truncate(got);
        Ok(bytes)
    }

    /// A block went to these.
    pub(super) fn sent(&mut self, bytes: &[u8], readers: &[NodeId]) {
        if bytes.is_empty() || readers.is_empty() {
            self.from = None;
        } else {
            self.waiting.extend(readers);
        }
    }

    /// A program on this node took it.
    pub(super) fn taken(&mut self, node: NodeId) {
        if let Some(at) = self.waiting.iter().position(|waiting| *waiting == node) {
            self.waiting.swap_remove(at);
        }
    }

    /// This node takes nothing any more.
    pub(super) fn lost(&mut self, node: NodeId) {
        self.waiting.retain(|waiting| *waiting != node);
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}
