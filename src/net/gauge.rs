//! How fast a link is, from what was sent over it: by the time in which only the network was waited for, so that ends which have too little
//! of their processors do not look like a slow link.

use std::time::Duration;

use crate::sys::tcp::Sent;

/// Fewer bytes tell nothing of a link: words, of which each waits for its acknowledgement.
const WORDS: u64 = 64 << 10;
/// After so many looks words are forgotten.
const LOOKS: u32 = 20;
/// So many bytes tell how fast a link is, or so much time.
const ENOUGH: u64 = 3 << 20;
const LONG_ENOUGH: Duration = Duration::from_millis(20);
/// Half of a tick of the kernel's clock: by so much the time may be too long.
const HALF_TICK: Duration = Duration::from_millis(2);

/// A link being gauged.
#[derive(Debug, Default)]
pub struct Gauge {
    /// Before the content, and how long ago, in looks.
    before: Option<Sent>,
    looks: u32,
}

impl Gauge {
    /// Takes in what was sent so far; called from time to time while content is. Returns the link's bytes per second as soon as that can be
    /// told ([`u64::MAX`]: there is hardly any link).
    pub fn handle_sent(&mut self, now: Sent) -> Option<u64> {
        let before = *self.before.get_or_insert(now);
        let (bytes, carrying) = (now.bytes.saturating_sub(before.bytes), now.carrying.saturating_sub(before.carrying));
        self.looks += 1;
        if bytes < WORDS {
            if carrying < LONG_ENOUGH && self.looks >= LOOKS {
                *self = Gauge { before: Some(now), looks: 0 };
            }
            return None;
        }
        let told = bytes >= ENOUGH || carrying >= LONG_ENOUGH;
        let seconds = carrying.saturating_sub(HALF_TICK).as_secs_f64();
        told.then(|| if seconds > 0.0 { (bytes as f64 / seconds) as u64 } else { u64::MAX })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a link of so many bytes per second is found to have, looked at every 5 ms, with an end that is busy otherwise for so many of
    /// 100 ms, and after how much time.
    fn gauged(rate: u64, busy: u64) -> (u64, Duration) {
        let mut gauge = Gauge::default();
        let mut sent = Sent { bytes: 3000, carrying: Duration::from_millis(8) };
        let mut carried = Duration::ZERO;
        for step in 0..1000 {
            if let Some(rate) = gauge.handle_sent(sent) {
                return (rate, Duration::from_millis(step * 5));
            }
            if step % 20 * 5 >= busy {
                sent.bytes += rate / 200;
                carried += Duration::from_millis(5);
                // In ticks of 4 ms.
                sent.carrying = Duration::from_millis(8 + carried.as_millis() as u64 / 4 * 4);
            }
        }
        panic!("nothing is told");
    }

    #[test]
    fn slow_links_are_told_soon_whatever_else_their_ends_do() {
        for rate in [1_000_000, 12_500_000, 125_000_000, 300_000_000] {
            for busy in [0, 30, 60] {
                let (found, after) = gauged(rate, busy);
                assert!((rate / 2..2 * rate).contains(&found), "{rate}: {found}");
                assert!(after <= Duration::from_millis(90 + 6 * busy), "{rate}, {busy}: {after:?}");
            }
        }
    }

    #[test]
    fn what_is_there_at_once_has_no_limit() {
        let at = |bytes| Sent { bytes, carrying: Duration::ZERO };
        let mut gauge = Gauge::default();
        assert_eq!(gauge.handle_sent(at(500)), None);
        assert_eq!(gauge.handle_sent(at(1 << 20)), None);
        assert_eq!(gauge.handle_sent(at(4 << 20)), Some(u64::MAX));
    }

    #[test]
    fn a_link_that_hardly_moves_is_told_too() {
        let mut gauge = Gauge::default();
        let sent = |bytes, ms| Sent { bytes, carrying: Duration::from_millis(ms) };
        assert_eq!(gauge.handle_sent(sent(0, 0)), None);
        assert_eq!(gauge.handle_sent(sent(100, 4)), None);
        assert_eq!(gauge.handle_sent(sent(30_000, 102)), None);
        assert_eq!(gauge.handle_sent(sent(100_000, 402)), Some(250_000));
        // Words now and then are no content.
        let mut gauge = Gauge::default();
        assert!((0..1000).all(|look| gauge.handle_sent(sent(look * 400, look / 2)).is_none()));
    }
}
