//! What may be given up once nobody uses it who could: who runs when something is retired may use it, who begins later does not. Pure.

use std::collections::{BTreeSet, VecDeque};

/// See the module. `T`: what is retired.
#[derive(Debug)]
pub(super) struct Grace<T> {
    next: u64,
    running: BTreeSet<u64>,
    /// With the number that who began next got: those below it may use it.
    retired: VecDeque<(u64, T)>,
}

impl<T> Default for Grace<T> {
    fn default() -> Self {
        Grace { next: 0, running: BTreeSet::new(), retired: VecDeque::new() }
    }
}

impl<T> Grace<T> {
    /// Somebody begins to run; returns his number.
    pub(super) fn begin(&mut self) -> u64 {
        self.next += 1;
        self.running.insert(self.next - 1);
        self.next - 1
    }

    /// He has ended.
    pub(super) fn end(&mut self, number: u64) {
        self.running.remove(&number);
    }

    /// Who begins from now on will not use this.
    pub(super) fn retire(&mut self, what: T) {
        self.retired.push_back((self.next, what));
    }

    /// The next that nobody uses any more.
    pub(super) fn poll(&mut self) -> Option<T> {
        let (before, _) = self.retired.front()?;
        if self.running.first().is_some_and(|first| first < before) {
            return None;
        }
        self.retired.pop_front().map(|(_, what)| what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_retired_outlives_those_who_ran() {
        let mut grace = Grace::default();
        grace.retire('a');
        assert_eq!((grace.poll(), grace.poll()), (Some('a'), None), "nobody runs");
        let first = grace.begin();
        grace.retire('b');
        let second = grace.begin();
        grace.retire('c');
        assert_eq!(grace.poll(), None);
        grace.end(first);
        assert_eq!((grace.poll(), grace.poll()), (Some('b'), None), "the second began when it was retired");
        let _third = grace.begin();
        grace.end(second);
        assert_eq!((grace.poll(), grace.poll()), (Some('c'), None));
    }
}
