//! What can be asked about a front end while it runs: the JSON object behind `hpcrt status`. docs/STATS.md describes its fields.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use smol::future::FutureExt;
use smol::{Async, Timer};

use super::card::{Card, Progress};
use super::door::Door;
use super::limits;
use super::overlay::Spawner;
use super::root::{GATHER, Root, State};
use super::stats;
use crate::loader::source::Source;
use crate::loader::tally::{Tally, Why};
use crate::net::memory_file;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::control::{JobId, NodeId, Order, Target};
use crate::net::wire::facts::{Facts, JobFacts};
use crate::net::wire::session::{SessionAsk, SessionTell};

/// Version of the object's layout, as [`stats::SCHEMA`].
pub const SCHEMA: u32 = 1;

/// What a front end is asked about.
#[derive(Debug)]
pub struct Subject {
    pub id: String,
    /// The program of a job of its own; without one it is a resident session.
    program: Option<String>,
    begun: Instant,
    hosts: usize,
    source: Arc<Source>,
    /// Once agents are being started.
    pub root: OnceCell<Rc<Root>>,
}

impl Subject {
    /// `program`: that of a job of its own; without one it is a resident session.
    pub fn new(id: String, program: Option<String>, begun: Instant, hosts: usize, source: Arc<Source>) -> Rc<Subject> {
        Rc::new(Subject { id, program, begun, hosts, source, root: OnceCell::new() })
    }

    fn is_session(&self) -> bool {
        self.program.is_none()
    }

    /// Answers whoever comes through the door, for as long as this is awaited.
    pub async fn answer_at(self: Rc<Self>, door: Door, tasks: &Spawner) -> std::convert::Infallible {
        loop {
            let (command, subject) = (door.accept().await, Rc::clone(&self));
            let answer = async move {
                let Ok(command) = Async::new(command) else { return };
                if let Ok(Some((SessionAsk::Status { nodes, pids }, _))) =
                    command.read_with(Seqpacket::receive_now::<SessionAsk>).await
                {
                    subject.answer(&command, nodes, pids).await;
                }
            };
            tasks.spawn(answer).detach();
        }
    }

    /// Answers one question. Who does not take the answer does not get it.
    pub async fn answer(&self, command: &Async<Seqpacket>, nodes: bool, pids: bool) {
        let gone = async {
            let _ = command.readable().await;
            None
        };
        let status = async { Some(self.status(nodes, pids).await) };
        if let Some(status) = status.or(gone).await
            && let Ok(file) = memory_file::write_bytes("hpcrt-status", status.to_string().as_bytes())
        {
            let _ = command.get_ref().send(&SessionTell::Status, &[file.as_fd()]);
        }
    }

    /// The object. `nodes`: after asking every node, `pids`: for the ranks' processes too; without, what is known here.
    pub async fn status(&self, nodes: bool, pids: bool) -> Value {
        let root = self.root.get();
        let silent = match root {
            Some(root) if nodes => root.gather().await,
            _ => Vec::new(),
        };
        if let Some(root) = root.filter(|_| pids) {
            self.ask_pids(root).await;
        }
        let (mut up, mut starting, mut lost) = (0u32, 0u32, 0u32);
        let mut shown = Vec::new();
        let jobs: BTreeMap<JobId, Rc<Card>> = root.map(|root| root.jobs()).unwrap_or_default().into_iter().collect();
        let mut told: BTreeMap<JobId, Progress> = BTreeMap::new();
        if let Some(root) = root {
            root.each_node(|node, parent, host, state, facts| {
                match state {
                    State::Up { .. } => up += 1,
                    State::Starting => starting += 1,
                    State::Gone { .. } => lost += 1,
                }
                if nodes {
                    for part in facts.iter().flat_map(|facts| &facts.jobs) {
                        // Of a node that is done since, the job's card has the last word.
                        if jobs.get(&part.job).is_some_and(|card| !card.progress.borrow().done.contains(&node)) {
                            told.entry(part.job).or_default().add(part);
                        }
                    }
                    shown.push(node_json((node, parent, host), state, facts, silent.contains(&node)));
                }
            });
        } else {
            starting = u32::try_from(self.hosts).unwrap_or(u32::MAX);
        }
        let jobs: Vec<Value> =
            jobs.iter().map(|(job, card)| job_json(*job, card, told.get(job), root.filter(|_| pids))).collect();
        let read = self.source.counters.read();
        json!({
            "schema": SCHEMA,
            "hpcrt": env!("CARGO_PKG_VERSION"),
            "id": self.id,
            "kind": if self.is_session() { "session" } else { "job" },
            "pid": std::process::id(),
            "program": self.program,
            "phase": self.phase(starting),
            "seconds": self.begun.elapsed().as_secs_f64(),
            "hosts": { "named": self.hosts, "up": up, "starting": starting, "lost": lost, "silent": silent.len() },
            "reader": {
                "files": read.files,
                "bytes": read.bytes,
                "operations": read.operations,
                "cache_hits": read.hits,
                "misses": read.misses,
            },
            "paths": stats::paths_json(&self.source.touched()),
            "jobs": jobs,
            "nodes": shown,
        })
    }

    /// Has the nodes tell the processes of the ranks, which are shown to debuggers that attach to this process, too.
    async fn ask_pids(&self, root: &Root) {
        let jobs = root.jobs();
        for (job, _) in jobs.iter().filter(|(_, card)| !card.knows_pids()) {
            root.order(Target::All, Order::Pids { job: *job }, Vec::new()).await;
        }
        let told = async {
            while !jobs.iter().all(|(_, card)| card.knows_pids()) {
                Timer::after(Duration::from_millis(10)).await;
            }
        };
        told.or(async {
            Timer::after(GATHER).await;
        })
        .await;
        if let Some((_, card)) = jobs.first().filter(|_| !self.is_session()) {
            card.show_debugger(root);
        }
    }

    fn phase(&self, starting: u32) -> &'static str {
        match self.root.get() {
            None => "starting",
            Some(root) if root.is_stopping() => "ending",
            _ if starting > 0 => "starting",
            _ if self.is_session() => "up",
            Some(root) => root.jobs().first().map_or("resolving", |(_, card)| card.phase()),
        }
    }
}

fn job_json(job: JobId, card: &Card, told: Option<&Progress>, pids: Option<&Rc<Root>>) -> Value {
    let progress = card.progress.borrow();
    let mut originals = progress.originals.clone();
    for (path, cost) in told.iter().flat_map(|told| told.originals.top(usize::MAX)) {
        originals.add(path, Why::Rank, cost.operations, cost.bytes);
    }
    let mut paging = progress.paging.clone();
    if let Some(told) = told.and_then(|told| told.paging.as_ref()) {
        paging.get_or_insert_default().add(told);
    }
    let told = told.map_or((0, (0, 0)), |told| (told.avoided, told.passed));
    json!({
        "job": job,
        "program": card.program,
        "phase": card.phase(),
        "seconds": card.begun.elapsed().as_secs_f64(),
        "ranks": { "all": card.ranks, "ended": progress.ended },
        "hosts": {
            "all": card.nodes.len(),
            "loaded": if card.view { progress.loaded.len() } else { card.nodes.len() },
            "done": progress.done.len(),
        },
        "view": card.view,
        "operations": { "avoided": progress.avoided + told.0, "original": progress.passed.0 + told.1.0 },
        "bytes": { "original": progress.passed.1 + told.1.1 },
        "originals": stats::paths_json(&originals),
        "memory": paging.map(|paging| stats::memory_json(&paging, &card.lenders)),
        "processes": pids.map(|root| processes_json(card, &progress, root)),
    })
}

fn processes_json(card: &Card, progress: &Progress, root: &Root) -> Value {
    let of = |(node, ranks): &(NodeId, Range<u32>)| {
        let rank = |rank: u32| (rank, progress.pids.get(&rank).filter(|pid| **pid > 0));
        let shown = |(rank, pid)| json!({ "rank": rank, "host": root.host(*node), "pid": pid });
        ranks.clone().map(rank).map(shown).collect::<Vec<_>>()
    };
    card.nodes.iter().flat_map(of).collect()
}

fn node_json(
    (node, parent, host): (NodeId, NodeId, &str),
    state: &State,
    facts: Option<&Facts>,
    silent: bool,
) -> Value {
    let (name, why) = match state {
        State::Up { .. } if silent => ("silent", Vec::new()),
        State::Up { limits, .. } => ("up", [limits::of_view(limits), limits::of_tree(limits)].concat()),
        State::Starting => ("starting", Vec::new()),
        State::Gone { error } => ("lost", vec![error.clone()]),
    };
    let why = (!why.is_empty()).then(|| why.join("; "));
    let mut shown = json!({ "node": node, "parent": parent, "host": host, "state": name, "why": why });
    if let (Some(facts), Value::Object(shown)) = (facts, &mut shown) {
        shown.insert("received".into(), facts.received.into());
        shown.insert("pulled".into(), facts.pulled.into());
        shown.insert("stored".into(), facts.stored.into());
        shown.insert("misses".into(), facts.misses.into());
        shown.insert("jobs".into(), facts.jobs.iter().map(part_json).collect());
    }
    shown
}

/// A node's part of a job.
fn part_json(facts: &JobFacts) -> Value {
    let times = facts.times;
    // On the node's own clock; what has not happened is null.
    let since = |from: u64, to: u64| (from > 0 && to > 0).then(|| (to as f64 - from as f64) / 1e6);
    let mut originals = Tally::new(facts.originals.len());
    facts.originals.iter().for_each(|o| originals.add(&o.path, Why::Rank, o.operations, o.bytes));
    json!({
        "job": facts.job,
        "running": facts.running,
        "operations": { "avoided": facts.avoided, "original": facts.passed.0 },
        "bytes": { "original": facts.passed.1 },
        "originals": stats::paths_json(&originals),
        "seconds": {
            "ordered": since(times.ordered, facts.told),
            "mounted": since(times.ordered, times.mounted),
            "loaded": since(times.ordered, times.loaded),
            "started": since(times.ordered, times.started),
            "output": since(times.ordered, times.output),
            "ended": since(times.ordered, times.ended),
        },
    })
}
