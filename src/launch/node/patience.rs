//! Whether a parent that says nothing is to be waited for without a limit: one whose front end was stopped at its terminal, or by a
//! debugger, says nothing until it is continued.

use nix::sys::signal::Signal;

use crate::net::wire::control::Order;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Patience {
    stopped: bool,
    held: bool,
}

impl Patience {
    /// Whether there is no limit.
    pub(super) fn is_endless(&self) -> bool {
        self.stopped || self.held
    }

    /// The parent said this. A front end that passes a stop on may say other things until it stops itself.
    pub(super) fn handle_order(&mut self, order: &Order) {
        match order {
            Order::Signal { signal, .. } => self.stopped = *signal == Signal::SIGTSTP as i32,
            Order::Launch(launch) => (self.stopped, self.held) = (false, self.held || launch.hold),
            Order::End { .. } => self.stopped = false,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_between_the_signal_and_the_stop_changes_nothing() {
        let mut patience = Patience::default();
        let signal = |signal: Signal| Order::Signal { job: 1, signal: signal as i32 };
        patience.handle_order(&Order::Ping);
        assert!(!patience.is_endless());
        for order in [signal(Signal::SIGTSTP), Order::Ping, Order::Taken { job: 1, part: 0, bytes: 9 }, Order::Facts] {
            patience.handle_order(&order);
            assert!(patience.is_endless(), "{order:?}");
        }
        for order in [signal(Signal::SIGCONT), signal(Signal::SIGTERM), Order::End { job: 1, grace_ms: 0 }] {
            patience.handle_order(&signal(Signal::SIGTSTP));
            patience.handle_order(&order);
            assert!(!patience.is_endless(), "{order:?}");
        }
    }
}
