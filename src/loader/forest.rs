//! Readers on other hosts (`--roots`): the root hands parts of large files to nodes that read them from the shared file system and send
//! the bytes up; what they cannot or do not read, it reads itself. Every byte is read by one host.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_channel::{Receiver as AsyncReceiver, Sender as AsyncSender, unbounded};

use crate::net::wire::control::{Extent, NodeId};

/// A smaller file is not worth another host's opening it.
const WORTH: u64 = 4 << 20;
/// Bytes for which one more host opens a file.
const SHARE: u64 = 4 << 20;
/// Parts of a file that one host is asked for at a time.
const AHEAD: usize = 4;
/// A reader that is silent for so long is asked no more.
const PATIENCE: Duration = Duration::from_secs(10);

/// See the module. All methods may be called from any thread.
#[derive(Debug)]
pub struct Forest {
    /// What nodes are to be asked.
    orders: (AsyncSender<(NodeId, Extent)>, AsyncReceiver<(NodeId, Extent)>),
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    readers: Vec<NodeId>,
    /// Whose turn it is: one more than there are readers, for the root itself.
    turn: usize,
    next: u32,
    /// Who was asked, and where his answer goes.
    asked: HashMap<u32, (NodeId, SyncSender<Vec<u8>>)>,
}

/// Who reads a file: its parts go round them; `None` is the root.
#[derive(Debug)]
pub struct Shares {
    readers: Vec<Option<NodeId>>,
    part: usize,
}

/// A part of a file that was asked for.
#[derive(Debug)]
pub struct Ticket {
    reader: NodeId,
    answer: Receiver<Vec<u8>>,
    come: Option<Vec<u8>>,
}

impl Ticket {
    /// Whether the answer is here.
    pub fn has_come(&mut self) -> bool {
        self.come = self.come.take().or_else(|| self.answer.try_recv().ok());
        self.come.is_some()
    }
}

impl Default for Forest {
    fn default() -> Self {
        Forest { orders: unbounded(), state: Mutex::default() }
    }
}

impl Forest {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on these nodes read, too.
    pub fn plant(&self, readers: Vec<NodeId>) {
        self.state().readers = readers;
    }

    /// A node is asked no more. What it was asked for, the root reads.
    pub fn fell(&self, node: NodeId) {
        let mut state = self.state();
        state.readers.retain(|reader| *reader != node);
        state.asked.retain(|_, (asked, _)| *asked != node);
    }

    /// Who reads the next file; it has `size` bytes.
    pub fn shares(&self, size: u64) -> Shares {
        let mut state = self.state();
        let all = state.readers.len() + 1;
        let many = usize::try_from(size / SHARE).unwrap_or(usize::MAX).clamp(1, all);
        if all == 1 || size < WORTH {
            return Shares { readers: vec![None], part: 0 };
        }
        let first = state.turn;
        state.turn = (first + many) % all;
        let reader = |nth| state.readers.get((first + nth) % all).copied();
        Shares { readers: (0..many).map(reader).collect(), part: 0 }
    }

    /// Asks whose turn it is for a part of a file; `None`: the root is to read it. The extent's ticket is set here.
    pub fn ask(&self, shares: &mut Shares, extent: Extent) -> Option<Ticket> {
        let reader = shares.readers[shares.part % shares.readers.len()];
        shares.part += 1;
        let mut state = self.state();
        let reader = reader.filter(|reader| state.readers.contains(reader))?;
        let (sender, answer) = sync_channel(1);
        let ticket = state.next;
        state.next = state.next.wrapping_add(1);
        state.asked.insert(ticket, (reader, sender));
        drop(state);
        self.orders.0.try_send((reader, Extent { ticket, ..extent })).ok()?;
        Some(Ticket { reader, answer, come: None })
    }

    /// What a node read; nothing if it could not.
    pub fn answer(&self, ticket: u32, bytes: Vec<u8>) {
        if let Some((_, waiting)) = self.state().asked.remove(&ticket) {
            let _ = waiting.try_send(bytes);
        }
    }

    /// Waits for the answer. `None`: the root has to read that part, too.
    pub fn wait(&self, ticket: Ticket, len: usize) -> Option<Vec<u8>> {
        match ticket.come.map_or_else(|| ticket.answer.recv_timeout(PATIENCE), Ok) {
            Ok(bytes) => Some(bytes).filter(|bytes| bytes.len() == len),
            Err(_) => {
                self.fell(ticket.reader);
                None
            }
        }
    }

    /// The next question for a node.
    pub async fn order(&self) -> Option<(NodeId, Extent)> {
        self.orders.1.recv().await.ok()
    }
}

impl Shares {
    /// Parts that may be under way at a time.
    pub fn ahead(&self) -> usize {
        let others = self.readers.iter().flatten().count();
        (others * AHEAD).max(1)
    }

    /// Whether the root is not the only reader.
    pub fn are_shared(&self) -> bool {
        self.readers.iter().any(Option::is_some)
    }

    /// Whether the part at `offset` is the last of its reader, in a file that ends at `end` and has parts of `len` bytes.
    pub fn is_last(&self, offset: u64, len: u64, end: u64) -> bool {
        offset + len * self.readers.len() as u64 >= end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::wire::control::Seen;

    fn extent() -> Extent {
        let seen = Seen { ino: 1, size: 1, mtime: (0, 0), ctime: (0, 0) };
        Extent { ticket: 0, path: b"/s/a".to_vec(), seen, offset: 0, len: 3, last: true }
    }

    #[test]
    fn files_and_parts_go_round_all_readers_and_the_root() {
        let forest = Forest::default();
        assert_eq!(forest.shares(1 << 30).readers, [None]);
        forest.plant(vec![5, 6]);
        assert_eq!(forest.shares(WORTH - 1).readers, [None]);
        assert_eq!([(); 4].map(|()| forest.shares(WORTH).readers[0]), [Some(5), Some(6), None, Some(5)]);
        assert_eq!(forest.shares(SHARE * 100).readers, [Some(6), None, Some(5)]);
        let two = forest.shares(SHARE * 2);
        assert!(!two.is_last(0, 1, 3) && two.is_last(1, 1, 3) && two.is_last(2, 1, 3));
    }

    #[test]
    fn who_is_gone_or_cannot_is_replaced_by_the_root() {
        let forest = Forest::default();
        forest.plant(vec![5]);
        let mut shares = Shares { readers: vec![Some(5)], part: 0 };
        let [first, second, third] = [(); 3].map(|()| forest.ask(&mut shares, extent()).unwrap());
        forest.answer(0, b"abc".to_vec());
        forest.answer(1, Vec::new());
        assert_eq!(forest.wait(first, 3).as_deref(), Some(&b"abc"[..]));
        assert_eq!(forest.wait(second, 3), None);
        forest.fell(5);
        assert_eq!(forest.wait(third, 3), None);
        assert!(forest.ask(&mut shares, extent()).is_none());
        forest.answer(2, b"abc".to_vec());
    }
}
