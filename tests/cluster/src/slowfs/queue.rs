//! The file server's time: one queue in virtual time, replies when they are due.

use std::collections::{BTreeMap, HashMap};
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
    /// The same for what each host's link to it carries.
    hosts: HashMap<usize, Instant>,
    /// By due time, then in the order of asking.
    replies: BTreeMap<(Instant, u64), Reply>,
    count: u64,
}

impl Queue {
    /// Starts `threads` threads that send the replies.
    pub(crate) fn start(service: Service, threads: usize) -> Arc<Queue> {
        let pending =
            Mutex::new(Pending { free: Instant::now(), hosts: HashMap::new(), replies: BTreeMap::new(), count: 0 });
        let queue = Arc::new(Queue { service, pending, arrived: Condvar::new() });
        for _ in 0..threads {
            let queue = queue.clone();
            thread::spawn(move || queue.run());
        }
        queue
    }

    /// Takes an operation of a host that moves `bytes`; `reply` runs when a server at the end of the queue would have answered.
    pub(crate) fn submit(&self, host: usize, bytes: usize, reply: impl FnOnce() + Send + 'static) {
        let time = |ns_per_byte: f64| Duration::from_nanos((bytes as f64 * ns_per_byte) as u64);
        let transfer = time(self.service.ns_per_byte);
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.free = pending.free.max(Instant::now()) + self.service.per_op + transfer;
        let done = pending.free;
        let carried = pending.hosts.entry(host).or_insert(done);
        *carried = (*carried).max(done) + time(self.service.host_ns_per_byte);
        let due = *carried + self.service.latency;
        pending.count += 1;
        let key = (due, pending.count);
        pending.replies.insert(key, Box::new(reply));
        drop(pending);
        self.arrived.notify_one();
    }

    fn run(&self) {
        // The default slack of 50 us would be as long as an operation.
        let _ = nix::sys::prctl::set_timerslack(1);
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let wait =
                pending.replies.first_key_value().map(|((due, _), _)| due.saturating_duration_since(Instant::now()));
            pending = match wait {
                None => self.arrived.wait(pending).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    let reply = pending.replies.pop_first();
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
        let queue =
            Queue::start(Service { per_op: ms(25), ns_per_byte: 5000.0, host_ns_per_byte: 0.0, latency: ms(500) }, 2);
        let (done, answers) = mpsc::channel();
        let begin = Instant::now();
        for i in 0..4 {
            let done = done.clone();
            queue.submit(0, 10_000, move || done.send((i, begin.elapsed())).expect("the test waits"));
        }
        let answers: Vec<(i32, Duration)> = answers.iter().take(4).collect();
        let mut order: Vec<i32> = answers.iter().map(|a| a.0).collect();
        order.sort_unstable();
        assert_eq!(order, [0, 1, 2, 3]);
        let last = answers[3].1;
        assert!(last >= ms(800) && last < ms(2000), "4 x (25 + 50) ms in the queue and 500 ms once, but took {last:?}");
    }

    #[test]
    fn hosts_with_slow_links_do_not_wait_for_each_other() {
        let ms = Duration::from_millis;
        let service =
            Service { per_op: Duration::ZERO, ns_per_byte: 0.0, host_ns_per_byte: 10_000.0, latency: Duration::ZERO };
        let queue = Queue::start(service, 2);
        let (done, answers) = mpsc::channel();
        let begin = Instant::now();
        for host in [0, 0, 1] {
            let done = done.clone();
            queue.submit(host, 100_000, move || done.send((host, begin.elapsed())).expect("the test waits"));
        }
        let mut answers: Vec<(usize, Duration)> = answers.iter().take(3).collect();
        answers.sort();
        assert!(answers[1].1 >= ms(2000) && answers[2].1 < ms(1900), "{answers:?}");
    }
}
