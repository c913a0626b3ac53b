//! Whom a node asks to feed it in a stripe: its ancestors in the topology from the nearest on, then the way that it has besides, then all anew.

use std::time::Duration;

/// Who has asked in vain for so long goes on to the root: where packets are dropped without a word every ancestor would take its time, and
/// with many of them the job would fail before the way besides is tried. One attempt to connect takes less, two take more
/// ([`super::listen`]); to be refused takes none.
const PATIENCE: Duration = Duration::from_secs(5);

/// See the module. Times are since any one moment.
#[derive(Debug, Clone, Copy)]
pub struct Ascent {
    ancestors: usize,
    /// Who is asked now; the number of ancestors: the way besides.
    at: usize,
    /// Nobody has fed this node since then.
    since: Duration,
}

impl Ascent {
    /// Begins with the nearest of so many ancestors, of whom the last is the root.
    pub fn new(ancestors: usize, now: Duration) -> Ascent {
        Ascent { ancestors, at: 0, since: now }
    }

    /// Whom to ask: the nearest ancestor is 0; `None`: the way besides.
    pub fn asked(&self) -> Option<usize> {
        (self.at < self.ancestors).then_some(self.at)
    }

    /// Who was asked cannot be reached, or feeds this node no more after it `fed` it.
    pub fn handle_end(&mut self, fed: bool, now: Duration) {
        if fed {
            self.since = now;
        }
        let next = self.at + 1;
        if next > self.ancestors {
            *self = Ascent::new(self.ancestors, now);
        } else if next < self.ancestors && now > self.since + PATIENCE {
            self.at = self.ancestors - 1;
        } else {
            self.at = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whom one with 13 ancestors asks when each takes so many seconds to be given up, and after how many seconds the way besides.
    fn asked(each: u64) -> (Vec<usize>, u64) {
        let (mut ascent, mut asked, mut now) = (Ascent::new(13, Duration::ZERO), Vec::new(), 0);
        while let Some(at) = ascent.asked() {
            asked.push(at);
            now += each;
            ascent.handle_end(false, Duration::from_secs(now));
        }
        (asked, now)
    }

    #[test]
    fn who_is_refused_asks_all_and_who_hears_nothing_asks_few() {
        assert_eq!(asked(0), ((0..13).collect(), 0));
        assert_eq!(asked(3), (vec![0, 1, 12], 9));
        assert_eq!(asked(10), (vec![0, 12], 20), "a handshake that is not answered");
    }

    #[test]
    fn who_was_fed_goes_on_with_the_next_and_begins_anew_after_all() {
        let (mut ascent, at) = (Ascent::new(3, Duration::ZERO), Duration::from_secs);
        ascent.handle_end(true, at(100));
        assert_eq!(ascent.asked(), Some(1));
        ascent.handle_end(false, at(103));
        assert_eq!(ascent.asked(), Some(2));
        ascent.handle_end(false, at(106));
        assert_eq!(ascent.asked(), None);
        ascent.handle_end(true, at(500));
        assert_eq!(ascent.asked(), Some(0));
        ascent.handle_end(false, at(503));
        assert_eq!(ascent.asked(), Some(1), "the time before does not count");
    }
}
