//! Work for the reader's threads: what somebody waits for goes before what somebody may wait for later.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// A queue before a stack.
#[derive(Debug)]
pub(super) struct WorkQueue<T> {
    state: Mutex<State<T>>,
    more: Condvar,
}

#[derive(Debug)]
struct State<T> {
    urgent: VecDeque<T>,
    /// Last in, first out: what was found last is what the program comes to first.
    ahead: Vec<T>,
    closed: bool,
}

impl<T> WorkQueue<T> {
    pub(super) fn new() -> Self {
        let state = State { urgent: VecDeque::new(), ahead: Vec::new(), closed: false };
        WorkQueue { state: Mutex::new(state), more: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, work: T) {
        self.lock().urgent.push_back(work);
        // All: those that do nothing but urgent work must hear of it.
        self.more.notify_all();
    }

    /// Work that comes out in this order, before what was given earlier, when nothing is urgent.
    pub(super) fn push_ahead(&self, work: impl DoubleEndedIterator<Item = T>) {
        self.lock().ahead.extend(work.rev());
        self.more.notify_all();
    }

    /// Waits for work; `None` once the queue is closed. `ahead`: takes what is not urgent, too.
    pub(super) fn pop(&self, ahead: bool) -> Option<T> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(work) = state.urgent.pop_front() {
                return Some(work);
            }
            if ahead && let Some(work) = state.ahead.pop() {
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
        queue.push(0);
        assert_eq!([(); 5].map(|()| queue.pop(true).unwrap()), [0, 1, 2, 3, 4]);
        queue.push_ahead([5].into_iter());
        queue.close();
        assert_eq!(queue.pop(false), None);
    }
}
