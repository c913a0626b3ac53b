//! The file server's time: one queue in virtual time, replies when they are due.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::spec::Service;

type Reply = Box<dyn FnOnce() + Send>;

/// Operations of all hosts, in the order in which the server takes them.
pub(crate) struct Queue {
    service: Service,
    pending: Mutex<Pending>,
    arrived: Condvar,
}

struct Pending {
    /// When the server has done everything it was given.
    free: Instant,
    /// Sorted by due time, because every operation has the same latency.
    replies: VecDeque<(Instant, Reply)>,
}

impl Queue {
    /// Starts `threads` threads that send the replies.
    pub(crate) fn start(service: Service, threads: usize) -> Arc<Queue> {
        let pending = Mutex::new(Pending { free: Instant::now(), replies: VecDeque::new() });
        let queue = Arc::new(Queue { service, pending, arrived: Condvar::new() });
        for _ in 0..threads {
            let queue = queue.clone();
            thread::spawn(move || queue.run());
        }
        queue
    }

    /// Takes an operation that moves `bytes`; `reply` runs when a server at the end of the queue would have answered.
    pub(crate) fn submit(&self, bytes: usize, reply: impl FnOnce() + Send + 'static) {
        let transfer = Duration::from_nanos((bytes as f64 * self.service.ns_per_byte) as u64);
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.free = pending.free.max(Instant::now()) + self.service.per_op + transfer;
        let due = pending.free + self.service.latency;
        pending.replies.push_back((due, Box::new(reply)));
        drop(pending);
        self.arrived.notify_one();
    }

    fn run(&self) {
        // The default slack of 50 us would be as long as an operation.
        let _ = nix::sys::prctl::set_timerslack(1);
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let wait = pending.replies.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
            pending = match wait {
                None => self.arrived.wait(pending).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    let reply = pending.replies.pop_front();
                    drop(pending);
                    if let Some((_, reply)) = reply {
                        reply();
                    }
                    self.pending.lock().unwrap_or_else(PoisonError::into_inner)
                }
                Some(wait) => self.arrived.wait_timeout(pending, wait).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn operations_overlap_in_latency_but_not_in_service() {
        let ms = Duration::from_millis;
        let queue = Queue::start(Service { per_op: ms(5), ns_per_byte: 1000.0, latency: ms(100) }, 2);
        let (done, answers) = mpsc::channel();
        let begin = Instant::now();
        for i in 0..4 {
            let done = done.clone();
            queue.submit(10_000, move || done.send((i, begin.elapsed())).expect("the test waits"));
        }
        let answers: Vec<(i32, Duration)> = answers.iter().take(4).collect();
        let mut order: Vec<i32> = answers.iter().map(|a| a.0).collect();
        order.sort_unstable();
        assert_eq!(order, [0, 1, 2, 3]);
        let last = answers[3].1;
        assert!(last >= ms(160) && last < ms(400), "4 x (5 + 10) ms in the queue and 100 ms once, but took {last:?}");
    }
}
