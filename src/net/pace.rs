//! Who of those that a node feeds takes far less than the others do: a slow link or host, below which all would wait.
//!
//! A taker is judged only while it has something to take all the time, by what others here take meanwhile: with all of them slow, the
//! feeder is. It is judged over periods long enough to tell, and several in a row, so that a busy moment says nothing.

use std::time::Duration;

/// Between two looks at who waits.
const SAMPLE: Duration = Duration::from_millis(5);
/// Least length of a period.
const PERIOD: Duration = Duration::from_millis(100);
/// A period without a look for this long tells nothing.
const STALE: Duration = Duration::from_secs(2);
/// Somebody takes as much in a period, or would have at the rate seen.
const TELLING: f64 = (4 << 20) as f64;
/// Slow is who takes less than one part in this many. Feeding its children as well would cost the feeder about half as much.
const FAR: f64 = 3.0;
/// Periods in a row.
const STRIKES: u8 = 3;
/// With more takers nobody is judged: they would come to feed from here.
const TAKERS: usize = 6;

/// The periods of a feeder. Times are since any one moment.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    since: Duration,
    looked: Duration,
}

/// One of those fed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Taker {
    /// Taken in this period; its owner adds to it.
    pub bytes: u64,
    /// Had nothing to take at some moment of this period.
    idled: bool,
    /// Bytes per second: the best of the others since it waits without a break.
    others: f64,
    strikes: u8,
}

impl Pace {
    /// Whether [`Pace::judge`] would look.
    pub fn is_due(&self, now: Duration) -> bool {
        now >= self.looked + SAMPLE
    }

    /// Looks at all takers and whether each has something to take. Returns whether each has just been found slow, in the same order.
    pub fn judge<'a>(&mut self, now: Duration, takers: impl IntoIterator<Item = (&'a mut Taker, bool)>) -> Vec<bool> {
        let mut takers: Vec<_> = takers.into_iter().collect();
        let stale = now > self.looked + STALE || !(2..=TAKERS).contains(&takers.len());
        self.looked = now;
        if stale {
            self.since = now;
            takers.iter_mut().for_each(|(taker, _)| **taker = Taker::default());
            return vec![false; takers.len()];
        }
        for (taker, waits) in &mut takers {
            if !*waits {
                **taker = Taker { bytes: taker.bytes, idled: true, ..Taker::default() };
            }
        }
        let seconds = now.saturating_sub(self.since).as_secs_f64();
        let tells = |taker: &Taker| taker.bytes as f64 >= TELLING || taker.others * seconds >= TELLING;
        if now < self.since + PERIOD || !takers.iter().any(|(taker, _)| tells(taker)) {
            return vec![false; takers.len()];
        }
        self.since = now;
        let bytes: Vec<u64> = takers.iter().map(|(taker, _)| taker.bytes).collect();
        let most = |but: usize| bytes.iter().enumerate().filter(|(at, _)| *at != but).map(|(_, b)| *b).max();
        let judge = |(at, (taker, _)): (usize, &mut (&mut Taker, bool))| {
            let own = std::mem::take(&mut taker.bytes) as f64 / seconds;
            if std::mem::take(&mut taker.idled) {
                return false;
            }
            taker.others = taker.others.max(most(at).unwrap_or(0) as f64 / seconds);
            taker.strikes = if own * FAR < taker.others { taker.strikes + 1 } else { 0 };
            let slow = taker.strikes == STRIKES;
            if slow {
                taker.strikes = 0;
            }
            slow
        };
        takers.iter_mut().enumerate().map(judge).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Megabytes that each takes in every 10 ms, and whether it waits; who was found slow, and after how many milliseconds.
    fn over(millis: u64, takers: &[(f64, bool)]) -> Option<(usize, u64)> {
        let (mut pace, mut state) = (Pace::default(), vec![Taker::default(); takers.len()]);
        (1..millis / 10).find_map(|step| {
            let waits = state.iter_mut().zip(takers).map(|(taker, (megabytes, waits))| {
                taker.bytes += (megabytes * 1e6) as u64;
                (taker, *waits)
            });
            let found = pace.judge(Duration::from_millis(10 * step), waits);
            found.iter().position(|slow| *slow).map(|at| (at, 10 * step))
        })
    }

    #[test]
    fn who_takes_a_tenth_is_found_after_three_periods() {
        assert_eq!(over(1000, &[(5.0, false), (0.5, true)]), Some((1, 300)));
        assert_eq!(over(1000, &[(5.0, true), (5.0, true), (0.5, true)]), Some((2, 300)));
        let slow_links = over(20_000, &[(0.05, true), (0.005, true)]);
        assert!(slow_links.is_some_and(|(at, after)| at == 1 && after > 2000), "{slow_links:?}");
    }

    #[test]
    fn others_are_not_blamed() {
        assert_eq!(over(5000, &[(5.0, true), (2.0, true)]), None, "not far enough behind");
        assert_eq!(over(5000, &[(0.5, true)]), None, "nobody to compare with");
        assert_eq!(over(5000, &[(0.5, true), (0.5, true)]), None, "the feeder is slow");
        assert_eq!(over(5000, &[(5.0, true), (0.5, false)]), None, "it takes all there is");
        assert_eq!(over(5000, &[(0.0, true), (0.0, true)]), None, "nothing is sent");
        assert_eq!(over(5000, &[[(5.0, true); 6].as_slice(), &[(0.1, true)]].concat()), None, "too many already");
    }

    /// What the others took before they had all counts still.
    #[test]
    fn who_is_left_alone_at_the_end_is_found() {
        let (mut pace, mut state) = (Pace::default(), [Taker::default(); 2]);
        let found = (1..100).find(|step| {
            state[0].bytes += if *step < 15 { 5_000_000 } else { 0 };
            state[1].bytes += 500_000;
            let [fast, slow] = &mut state;
            pace.judge(Duration::from_millis(10 * step), [(fast, *step < 15), (slow, true)])[1]
        });
        assert!(found.is_some_and(|step| step < 50), "{found:?}");
    }
}
