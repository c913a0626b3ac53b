//! Work for the reader's threads: what somebody waits for goes before what somebody may wait for later.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Whose turn is before whose.
#[derive(Debug, Clone, Copy)]
pub(super) enum Turn {
    /// A rank's question.
    Question,
    /// A file that a rank reads.
    Content,
    /// Questions of a job that starts, as many as there may be at once.
    Bulk,
    /// Files that it will read.
    BulkContent,
}

const TURNS: [Turn; 4] = [Turn::Question, Turn::Content, Turn::Bulk, Turn::BulkContent];

impl Turn {
    /// Whether it takes as long as the slowest that the file passes on its way.
    fn is_long(self) -> bool {
        matches!(self, Turn::Content | Turn::BulkContent)
    }
}

/// Queues before a stack.
#[derive(Debug)]
pub(super) struct WorkQueue<T> {
    state: Mutex<State<T>>,
    more: Condvar,
}

#[derive(Debug)]
struct State<T> {
    /// By their turns.
    urgent: [VecDeque<T>; TURNS.len()],
    /// Last in, first out: what was found last is what the program comes to first.
    ahead: Vec<T>,
    closed: bool,
}

impl<T> WorkQueue<T> {
    pub(super) fn new() -> Self {
        let state = State { urgent: Default::default(), ahead: Vec::new(), closed: false };
        WorkQueue { state: Mutex::new(state), more: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, turn: Turn, work: T) {
        self.lock().urgent[turn as usize].push_back(work);
        // All: those that do only what is short must hear of it.
        self.more.notify_all();
    }

    /// Work that comes out in this order, before what was given earlier, when nothing is urgent.
    pub(super) fn push_ahead(&self, work: impl DoubleEndedIterator<Item = T>) {
        self.lock().ahead.extend(work.rev());
        self.more.notify_all();
    }

    /// Waits for work; `None` once the queue is closed. `long`: takes what takes long, and what is not urgent, too.
    pub(super) fn pop(&self, long: bool) -> Option<T> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let mut mine = TURNS.into_iter().filter(|turn| long || !turn.is_long());
            if let Some(work) = mine.find_map(|turn| state.urgent[turn as usize].pop_front()) {
                return Some(work);
            }
            if long && let Some(work) = state.ahead.pop() {
                return Some(work);
            }
            state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.more.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urgent_work_first_then_what_was_found_last() {
        let queue = WorkQueue::new();
        queue.push_ahead([3, 4].into_iter());
        queue.push_ahead([1, 2].into_iter());
        queue.push(Turn::Question, 0);
        assert_eq!([(); 5].map(|()| queue.pop(true).unwrap()), [0, 1, 2, 3, 4]);
        queue.push_ahead([5].into_iter());
        queue.close();
        assert_eq!(queue.pop(false), None);
    }

    #[test]
    fn questions_wait_for_no_file_and_for_no_job_that_starts() {
        let queue = WorkQueue::new();
        for (turn, work) in TURNS.into_iter().zip(0..4).rev() {
            queue.push(turn, work);
            queue.push(turn, work + 10);
        }
        assert_eq!([(); 4].map(|()| queue.pop(false).unwrap()), [0, 10, 2, 12]);
        queue.push(Turn::Question, 20);
        assert_eq!([(); 5].map(|()| queue.pop(true).unwrap()), [20, 1, 11, 3, 13]);
    }
}
