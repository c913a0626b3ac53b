//! Flow control of a job's output: how much each of its nodes may send before it hears that some was taken. So output that nobody reads
//! stays in the pipes of the ranks, and everything else that is said of the job, and of others, passes.

use std::cell::Cell;

use async_channel::{Receiver, Sender, bounded};

/// Bytes under way of all nodes together, about.
const ALL: usize = 32 << 20;
/// Bytes that a node may send unheard, at least and at most.
const LEAST: usize = 4 << 10;
const MOST: usize = 1 << 20;

/// What each of so many nodes may send, in bytes.
pub(super) fn of(nodes: usize) -> u32 {
    (ALL / nodes.max(1)).clamp(LEAST, MOST) as u32
}

/// The front end's side: who is to hear that it may send more.
#[derive(Debug)]
pub(super) struct Windows {
    half: u32,
    /// Bytes of each share that were taken, and of which it has not heard.
    taken: Vec<u32>,
    /// Shares of which that is half a window or more.
    due: Vec<usize>,
}

impl Windows {
    /// Of a job with so many shares.
    pub(super) fn new(shares: usize) -> Windows {
        Windows { half: of(shares) / 2, taken: vec![0; shares], due: Vec::new() }
    }

    /// Output of this share came.
    pub(super) fn handle_output(&mut self, share: usize, bytes: usize) {
        let Some(taken) = self.taken.get_mut(share) else { return };
        let before = *taken;
        *taken = taken.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        if before < self.half && *taken >= self.half {
            self.due.push(share);
        }
    }

    /// A share that is to hear that it may send so many bytes more; to be asked while there is room for them.
    pub(super) fn poll_grant(&mut self) -> Option<(usize, u32)> {
        let share = self.due.pop()?;
        Some((share, std::mem::take(&mut self.taken[share])))
    }
}

/// A node's side: what it may still send.
#[derive(Debug)]
pub(super) struct Credit {
    /// Bytes; `None`: there is no limit any more.
    left: Cell<Option<usize>>,
    more: (Sender<()>, Receiver<()>),
}

impl Credit {
    /// For a window of so many bytes.
    pub(super) fn new(window: u32) -> Credit {
        Credit { left: Cell::new(Some(window as usize)), more: bounded(1) }
    }

    /// So many bytes more.
    pub(super) fn grant(&self, bytes: u32) {
        self.left.set(self.left.get().map(|left| left + bytes as usize));
        let _ = self.more.0.try_send(());
    }

    /// Nobody is waited for any more: what is left is little.
    pub(super) fn lift(&self) {
        self.left.set(None);
        let _ = self.more.0.try_send(());
    }

    /// Waits until something may be sent: how much, `most` at most.
    pub(super) async fn room(&self, most: usize) -> usize {
        loop {
            match self.left.get() {
                Some(0) => drop(self.more.1.recv().await),
                left => return left.map_or(most, |left| left.min(most)),
            }
        }
    }

    /// So much is being sent.
    pub(super) fn spend(&self, bytes: usize) {
        self.left.set(self.left.get().map(|left| left.saturating_sub(bytes)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever comes in whatever pieces, a node that has sent its whole window hears of more as soon as there is room.
    #[test]
    fn a_full_window_is_always_granted() {
        for nodes in [1, 3, 32, 33, 8191, 100_000] {
            let (window, mut windows) = (of(nodes) as usize, Windows::new(nodes));
            let credit = Credit::new(of(nodes));
            for piece in [1, 7, 4096, 65536, usize::MAX] {
                while credit.left.get() > Some(0) {
                    let sent = smol::block_on(credit.room(piece));
                    credit.spend(sent);
                    windows.handle_output(nodes - 1, sent);
                }
                assert_eq!(windows.poll_grant(), Some((nodes - 1, window as u32)));
                assert_eq!(windows.poll_grant(), None);
                credit.grant(window as u32);
            }
        }
    }
}
