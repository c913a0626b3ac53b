//! Requests on their way up the control tree, each sent once: who asks for what is already asked for waits for the same answer.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

/// What to do about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Send it upward.
    Forward,
    /// It is already on its way.
    Joined,
}

#[derive(Debug)]
struct Flight<W> {
    deadline: Instant,
    waiting: Vec<W>,
}

/// Open requests by key `K`, with who waits for each (`W`: a child or a local request).
#[derive(Debug)]
pub struct SingleFlight<K, W> {
    timeout: Duration,
    flights: HashMap<K, Flight<W>>,
    /// In the order of deadlines. An entry whose deadline is not that of its flight belongs to an earlier, answered one.
    deadlines: VecDeque<(Instant, K)>,
}

impl<K: Hash + Eq + Clone, W: Eq> SingleFlight<K, W> {
    /// A request is given up when it has no answer after `timeout`, for all who wait then.
    pub fn new(timeout: Duration) -> Self {
        SingleFlight { timeout, flights: HashMap::new(), deadlines: VecDeque::new() }
    }

    /// `who` wants the answer to `key`; asking twice is asking once. `now` must not go back between calls.
    pub fn ask(&mut self, key: K, who: W, now: Instant) -> Asked {
        if let Some(flight) = self.flights.get_mut(&key) {
            if !flight.waiting.contains(&who) {
                flight.waiting.push(who);
            }
            return Asked::Joined;
        }
        let deadline = now + self.timeout;
        self.deadlines.push_back((deadline, key.clone()));
        self.flights.insert(key, Flight { deadline, waiting: vec![who] });
        Asked::Forward
    }

    /// The answer is there: who waited for it, in the order of asking. Empty if nobody did.
    pub fn answer(&mut self, key: &K) -> Vec<W> {
        let flight = self.flights.remove(key);
        self.trim();
        flight.map_or_else(Vec::new, |flight| flight.waiting)
    }

    /// The requests whose keys match are on nobody's way any more; who waited for them has to ask again.
    pub fn answer_if(&mut self, matches: impl Fn(&K) -> bool) {
        self.flights.retain(|key, _| !matches(key));
        self.trim();
    }

    /// `who` is gone and waits for nothing any more. What only it asked for stays on its way.
    pub fn forget(&mut self, who: &W) {
        self.flights.values_mut().for_each(|flight| flight.waiting.retain(|waiting| waiting != who));
    }

    /// What to ask a new upstream peer for, after the loss of the former one. Deadlines stay.
    pub fn open(&self) -> impl Iterator<Item = &K> {
        self.flights.keys()
    }

    /// When to call [`poll_expired`](Self::poll_expired) next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadlines.front().map(|&(deadline, _)| deadline)
    }

    /// The next request whose time is over at `now`, and who waited for it.
    pub fn poll_expired(&mut self, now: Instant) -> Option<(K, Vec<W>)> {
        let (_, key) = self.deadlines.front().filter(|&&(deadline, _)| deadline <= now)?.clone();
        let waiting = self.answer(&key);
        Some((key, waiting))
    }

    /// Keeps the first deadline that of an open request.
    fn trim(&mut self) {
        while let Some((deadline, key)) = self.deadlines.front()
            && self.flights.get(key).is_none_or(|flight| flight.deadline != *deadline)
        {
            self.deadlines.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TIMEOUT: Duration = Duration::from_millis(50);

    #[test]
    fn one_request_answers_all() {
        let (mut requests, now) = (SingleFlight::new(TIMEOUT), Instant::now());
        assert_eq!(requests.ask("a", 1, now), Asked::Forward);
        assert_eq!(requests.ask("a", 2, now), Asked::Joined);
        assert_eq!(requests.ask("a", 1, now), Asked::Joined);
        assert_eq!(requests.ask("b", 1, now), Asked::Forward);
        assert_eq!(requests.open().count(), 2);
        requests.forget(&1);
        assert_eq!(requests.answer(&"a"), [2]);
        assert_eq!(requests.answer(&"a"), [0; 0]);
        assert_eq!(requests.ask("a", 3, now), Asked::Forward);
    }

    proptest! {
        /// Against a plain list: every request ends once, answered or given up at its own deadline.
        #[test]
        fn every_request_ends_once(steps in prop::collection::vec((0u8..3, 0u8..5, 0u8..4, 0u64..30), 0..200)) {
            let start = Instant::now();
            let (mut requests, mut now) = (SingleFlight::new(TIMEOUT), start);
            let mut model: Vec<(u8, Vec<u8>, Instant)> = Vec::new();
            for (step, key, who, millis) in steps {
                let at = model.iter().position(|open| open.0 == key);
                match (step, at) {
                    (0, None) => {
                        prop_assert_eq!(requests.ask(key, who, now), Asked::Forward);
                        model.push((key, vec![who], now + TIMEOUT));
                    }
                    (0, Some(at)) => {
                        prop_assert_eq!(requests.ask(key, who, now), Asked::Joined);
                        let waiting = &mut model[at].1;
                        if !waiting.contains(&who) {
                            waiting.push(who);
                        }
                    }
                    (1, at) => prop_assert_eq!(requests.answer(&key), at.map(|at| model.remove(at).1).unwrap_or_default()),
                    _ => {
                        now += Duration::from_millis(millis);
                        while let Some((key, waiting)) = requests.poll_expired(now) {
                            let at = model.iter().position(|open| open.0 == key && open.2 <= now);
                            prop_assert_eq!(at.map(|at| model.remove(at).1), Some(waiting));
                        }
                    }
                }
                prop_assert_eq!(requests.poll_timeout(), model.iter().map(|open| open.2).min());
                prop_assert!(step < 2 || requests.poll_timeout().is_none_or(|deadline| deadline > now));
            }
        }
    }
}
