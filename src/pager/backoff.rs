//! When huge pages are not made. For each the kernel waits until every processor has emptied its lists of pages (`lru_add_drain_all`): that takes 0.1 ms, and where
//! other programs miss page after page 5 to 600, in which a connection is not answered.

use std::time::{Duration, Instant};

/// Who waited less was let wait by one other program at most.
const SHORT: Duration = Duration::from_millis(5);
/// Of all time one part in so many may be waited, and at first all of `CREDIT`'s.
const PART: u32 = 16;
const CREDIT: Duration = Duration::from_millis(320);

/// See the module.
#[derive(Debug)]
pub(super) struct Backoff {
    /// What was waited so far is made up for by then.
    until: Instant,
}

impl Backoff {
    pub(super) fn new(now: Instant) -> Backoff {
        Backoff { until: now }
    }

    /// Whether one may be made now.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.until <= now + CREDIT
    }

    /// For one that was made the kernel `waited` until now.
    pub(super) fn add(&mut self, now: Instant, waited: Duration) {
        if waited >= SHORT {
            self.until = self.until.max(now) + waited * PART;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many are made in ten seconds, one after the other, and what part of that was waited for them.
    fn made(waited: Duration) -> (u32, f64) {
        let begun = Instant::now();
        let (mut backoff, mut now, mut made) = (Backoff::new(begun), begun, 0);
        while now < begun + Duration::from_secs(10) {
            now += Duration::from_micros(500);
            if backoff.is_over(now) {
                now += waited;
                backoff.add(now, waited);
                made += 1;
            }
        }
        (made, (waited * made).as_secs_f64() / (now - begun).as_secs_f64())
    }

    #[test]
    fn who_waits_long_waits_seldom() {
        assert!(made(Duration::from_micros(150)).0 > 15_000);
        for waited in [5, 40, 250].map(Duration::from_millis) {
            let (made, part) = made(waited);
            assert!(made >= 2 && part < 0.1, "{made}, {part} of {waited:?}");
        }
    }
}
