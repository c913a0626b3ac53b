//! A timer for deadlines that nearly always move before they come: every packet of a link has one, and setting a timer costs system calls.

use std::time::Instant;

use smol::Timer;

/// See the module.
#[derive(Debug)]
pub struct Alarm {
    timer: Timer,
    /// When it fires.
    set: Option<Instant>,
}

impl Default for Alarm {
    fn default() -> Self {
        Alarm { timer: Timer::never(), set: None }
    }
}

impl Alarm {
    /// Waits until then. A timer that is set for an earlier moment, from before, is left as it is and set again when it fires. Safe to cancel.
    pub async fn at(&mut self, when: Instant) {
        while Instant::now() < when {
            if self.set.is_none_or(|set| set > when) {
                self.timer.set_at(when);
                self.set = Some(when);
            }
            (&mut self.timer).await;
            self.set = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use smol::future::FutureExt;

    use super::*;

    #[test]
    fn deadlines_move_in_both_directions() {
        smol::block_on(async {
            let (mut alarm, begun) = (Alarm::default(), Instant::now());
            let after = |ms| begun + Duration::from_millis(ms);
            for when in [20_000, 30, 40] {
                let early = async {
                    Timer::at(after(10)).await;
                };
                alarm.at(after(when)).or(early).await;
            }
            alarm.at(after(60)).await;
            assert!((60..10_000).contains(&begun.elapsed().as_millis()));
            alarm.at(begun).await;
        });
    }
}
