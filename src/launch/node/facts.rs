//! What a node knows of itself and its jobs, for who asks at the front end.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use super::Node;
use super::job::Job;
use crate::net::wire::control::Report;
use crate::net::wire::facts::{Facts, JobFacts, JobTimes, Micros, ORIGINALS, Original};

/// The node's own clock, from the agent's begin.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock(Instant);

impl Clock {
    pub(super) fn start() -> Clock {
        Clock(Instant::now())
    }

    /// Never zero, which would mean that nothing happened.
    pub(super) fn now(self) -> Micros {
        Micros::try_from(self.0.elapsed().as_micros()).unwrap_or(Micros::MAX).max(1)
    }
}

impl Job {
    /// Notes that something happened, the first time.
    pub(super) fn mark(&self, which: impl Fn(&mut JobTimes) -> &mut Micros) {
        let mut times = self.times.get();
        let time = which(&mut times);
        if *time == 0 {
            *time = self.node.clock.now();
            self.times.set(times);
        }
    }

    /// Ranks ended.
    pub(super) fn ended(&self, ranks: usize) {
        let running = self.running.get().saturating_sub(u32::try_from(ranks).unwrap_or(u32::MAX));
        self.running.set(running);
        self.times.set(JobTimes { ended: self.node.clock.now(), ..self.times.get() });
    }

    /// How far the job is on this node.
    pub(super) fn facts(&self) -> JobFacts {
        let fed = self.node.replica.borrow().as_ref().map_or(0, |replica| replica.counts().1);
        let view = self.view.borrow();
        let (now, before) = (view.as_ref().map(|view| view.skeleton.counts()).unwrap_or_default(), self.before.get());
        let originals = view.as_ref().map(|view| view.skeleton.originals(ORIGINALS)).unwrap_or_default();
        let original = |(path, operations, bytes)| Original { path, operations, bytes };
        JobFacts {
            job: self.launch.job,
            told: self.node.clock.now(),
            times: JobTimes { fed, ..self.times.get() },
            running: self.running.get(),
            // Of a view that another job of the session uses at the same time, both are told all.
            avoided: now.avoided.saturating_sub(before.avoided),
            passed: (now.operations.saturating_sub(before.operations), now.bytes.saturating_sub(before.bytes)),
            originals: originals.into_iter().map(original).collect(),
            paging: self.memory.borrow().as_ref().and_then(|memory| memory.paging(self.is_over())).map(Box::new),
            writing: self.written.borrow().clone().map(Box::new),
        }
    }

    /// Ranks of this node and their processes, told upward by their numbers in the job.
    pub(super) async fn tell_pids(&self, ranks: Vec<(u32, u32)>) {
        let ranks = ranks.into_iter().map(|(index, pid)| (self.place.first + index, pid)).collect();
        self.node.report(&Report::Pids { job: self.launch.job, ranks }).await;
    }
}

impl Node {
    pub(super) async fn tell_facts(self: Rc<Self>) {
        let replica = self.replica.borrow().clone();
        let mut facts = Facts::default();
        if let Some(replica) = replica {
            (facts.received, _, facts.misses) = replica.counts();
            facts.pulled = replica.pulls.bytes();
            let store = Arc::clone(replica.store());
            facts.stored = smol::unblock(move || store.used()).await;
        }
        facts.jobs = self.jobs.borrow().values().map(|job| job.facts()).collect();
        self.report(&Report::Facts { node: self.id, facts }).await;
    }
}
