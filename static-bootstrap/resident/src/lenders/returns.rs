//! Servers that were lost and are there again: they take copies. The agent tries them, from time to time, while nobody waits for it.

use core::sync::atomic::Ordering;

use super::{Fresh, LOST, MIRROR, servers};
use crate::{call, counts, door};

/// Nanoseconds between two questions.
const EVERY: u64 = 3_000_000_000;

/// See the module.
pub(crate) struct Returns {
    /// Where the answer will come, or -1.
    door: i32,
    /// When the agent was asked last.
    asked: u64,
}

impl Returns {
    pub(crate) const fn new() -> Returns {
        Returns { door: -1, asked: 0 }
    }

    /// Asks, or looks for the answer: true if it is here. For the thread that makes room.
    pub(crate) fn are_here(&mut self) -> bool {
        let lost = LOST.load(Ordering::Relaxed);
        if lost == 0 || !MIRROR.load(Ordering::Relaxed) {
            return false;
        }
        if self.door >= 0 {
            return door::is_answered(self.door);
        }
        let now = counts::clock();
        if now.wrapping_sub(self.asked) >= EVERY {
            self.asked = now;
            self.door = door::ask_again(lost).unwrap_or(-1);
        }
        false
    }

    /// Takes those back that the agent has reached; only while no gift is open.
    pub(crate) fn take(&mut self) {
        let lost = LOST.load(Ordering::Relaxed);
        let answer = door::answer(self.door);
        self.door = -1;
        let Ok(granted) = answer else { return };
        let fresh = Fresh::new(&granted);
        let back = |server: usize| lost >> server & 1 == 1 && granted.grant.absent >> server & 1 == 0;
        for server in 0..servers() {
            if back(server) {
                fresh.take_back(server, granted.grant.weights[server]);
            } else {
                fresh.close(server);
            }
        }
        call::close(granted.counts);
        call::close(granted.door);
    }
}
