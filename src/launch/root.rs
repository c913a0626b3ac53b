//! The root of the tree: brings the nodes up, keeps the table of who is there, and hands what they report to the jobs.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_channel::{Receiver, Sender, bounded, unbounded};
use smol::Timer;
use smol::future::FutureExt;

use super::card::Card;
use super::console::Console;
use super::invitation::{Invitation, Posted};
use super::joined::Meeting;
use super::keeper::KILLED;
use super::limits;
use super::loading::{self, Loading, Machine};
use super::overlay::{Children, Event, Spawner};
use super::rendezvous::Names;
use super::slurm::{self, Step};
use super::start_tree::{self, StartCost};
use super::subtree::{Arrivals, Subtree};
use super::timeline::{Clocks, Moment};
use crate::error::Context;
use crate::loader::source::{Finding, Source};
use crate::net::auth::{SessionKey, random_name};
use crate::net::link::Packet;
use crate::net::listen;
use crate::net::replicate::FeedsLog;
use crate::net::welcome::welcome;
use crate::net::wire::collective::Word;
use crate::net::wire::control::{
    AgentKind, Enroll, Exit, JobId, Limits, NodeId, NodeSpec, Order, Report, Stream, Target, View,
};
use crate::net::wire::facts::{Facts, JobFacts};
use crate::sys::node;
use crate::sys::without::Without;
use crate::{Error, Result};

/// Number of a session's first job.
pub const FIRST_JOB: JobId = 1;

/// Nodes tell what they know of themselves within this time, or are taken to be silent.
pub const GATHER: Duration = Duration::from_secs(2);

/// How a session is to be started.
#[derive(Debug, Clone)]
pub struct Setup {
    pub hosts: Vec<String>,
    /// The last so many of them lend memory or write files, and run no ranks.
    pub lenders: usize,
    /// The first is this machine, however the others are reached.
    pub first_here: bool,
    pub agent: AgentKind,
    /// What it costs to start an agent, and how many a node starts at most.
    pub start: StartCost,
    /// Hosts that must come up; `None`: all.
    pub min_hosts: Option<u32>,
    /// How jobs will see their captured files, if there are any.
    pub view: View,
    pub store: Option<Vec<u8>>,
    /// Hosts that read from the shared file system; at least 1, the front end's.
    pub roots: u32,
    /// What others change on the shared file system is seen within this time.
    pub fresh: Duration,
    /// Where agents that come by themselves expect the front end, if that was told before it started.
    pub meeting: Option<Meeting>,
}

/// Who starts each of nodes 1..=`count`, by LIBI's greedy rule.
pub fn parents(count: u32, cost: &StartCost) -> Vec<NodeId> {
    start_tree::plan(count, cost).into_iter().map(|parent| parent.map_or(0, |host| host + 1)).collect()
}

/// What a job hears.
#[derive(Debug)]
pub enum News {
    Output { rank: u32, stream: Stream, packet: Packet },
    Exited(Vec<Exit>),
    Failed { node: NodeId, error: String },
    Done { part: u32, node: NodeId, warnings: Vec<String>, received: (u64, u64), facts: JobFacts },
    StdinTaken { part: u32, node: NodeId },
    Loaded { node: NodeId },
    Open { node: NodeId },
    Lent { node: NodeId, addresses: Vec<String> },
    Unlent { node: NodeId, error: String },
    Pids(Vec<(u32, u32)>),
    Collective { word: Word, packet: Packet },
    Lost { node: NodeId, error: String },
}

/// What nodes said, and which.
pub type Told = BTreeMap<String, BTreeSet<NodeId>>;

/// A node as the root sees it.
#[derive(Debug, Clone)]
pub enum State {
    Starting,
    Up { addresses: Vec<String>, machine: Option<u64>, limits: Box<Limits> },
    Gone { error: String },
}

/// See the module.
pub struct Root {
    pub tasks: Spawner,
    pub session: String,
    /// The session's key.
    pub key: SessionKey,
    children: Rc<Children>,
    subtree: Subtree,
    hosts: Vec<String>,
    /// Nodes up to this one run ranks; the others lend memory or write files.
    last: NodeId,
    /// Where this process listens.
    addresses: Vec<String>,
    arrivals: Arrivals,
    roots: u32,
    loading: RefCell<Option<Rc<Loading>>>,
    nodes: RefCell<BTreeMap<NodeId, State>>,
    changed: (Sender<()>, Receiver<()>),
    jobs: RefCell<BTreeMap<JobId, (Sender<News>, Rc<Card>)>>,
    begun: Instant,
    clocks: RefCell<Clocks>,
    /// Who starts each node: node 1 first.
    parents: RefCell<Vec<NodeId>>,
    /// Nodes that their parent could not start, or that had none, and why.
    restarted: RefCell<BTreeMap<NodeId, String>>,
    /// What was said of what hosts do without: hosts, words.
    said: RefCell<Vec<(String, String)>>,
    /// What nodes said of themselves, and when the root heard it; and when it asked last.
    facts: RefCell<BTreeMap<NodeId, (Instant, Facts)>>,
    asked: Cell<Option<Instant>>,
    next_job: Cell<JobId>,
    /// What ranks have published.
    pub(super) names: Names,
}

impl std::fmt::Debug for Root {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Root").field("nodes", &self.nodes.borrow()).finish_non_exhaustive()
    }
}

impl Root {
    /// Starts the agents and waits until every one is up or has failed. `progress` is called when it begins and when a host is up.
    /// What `interrupted` gives, if it does, ends the start.
    ///
    /// # Errors
    /// Fewer hosts than needed are up (every failure is named), or the interruption. No agent is left then.
    pub async fn start(
        tasks: Spawner,
        setup: &Setup,
        console: &Console,
        mut progress: impl FnMut(&Rc<Root>),
        interrupted: impl Future<Output = Error>,
    ) -> Result<Rc<Root>> {
        let (key, listener, session) = match &setup.meeting {
            Some(Meeting { key, session, listener }) => {
                let listener = listener.try_clone().and_then(smol::Async::new).map(Some);
                (key.clone(), listener, session.clone())
            }
            None => {
                let session = random_name(16);
                let listener = listen::listen(setup.agent == AgentKind::Local, &Without::from_env()?);
                (SessionKey::random(), listener, session)
            }
        };
        let listener = listener.op("listen for the agents")?;
        let addresses = listener.as_ref().map(listen::addresses).unwrap_or_default();
        let (children, events) = Children::new(Rc::clone(&tasks));
        let arrivals = Arrivals::default();
        if let Some(listener) = listener {
            tasks.spawn(welcome(Rc::clone(&tasks), listener, key.clone(), arrivals.door())).detach();
        }
        let enroll = Enroll {
            node: 0,
            host: String::new(),
            key: key.0,
            session: session.clone(),
            parent: addresses.clone(),
            agent: setup.agent.clone(),
            view: setup.view,
            store: setup.store.clone(),
        };
        let subtree =
            Subtree::new(Rc::clone(&tasks), Rc::clone(&children), arrivals.clone(), &enroll, addresses.clone());
        let count = NodeId::try_from(setup.hosts.len()).op("number the hosts")?;
        let root = Rc::new(Root {
            tasks: Rc::clone(&tasks),
            session,
            key: key.clone(),
            children,
            subtree,
            hosts: setup.hosts.clone(),
            last: count - NodeId::try_from(setup.lenders).op("number the hosts")?,
            addresses,
            arrivals,
            roots: setup.roots.max(1),
            loading: RefCell::default(),
            nodes: RefCell::new((1..=count).map(|node| (node, State::Starting)).collect()),
            changed: bounded(1),
            jobs: RefCell::default(),
            begun: Instant::now(),
            clocks: RefCell::default(),
            parents: RefCell::new(match setup.agent.come() {
                true => vec![0; setup.hosts.len()],
                false => parents(count, &setup.start),
            }),
            restarted: RefCell::default(),
            said: RefCell::default(),
            facts: RefCell::default(),
            asked: Cell::new(None),
            next_job: Cell::new(FIRST_JOB),
            names: Names::default(),
        });
        tasks.spawn(Rc::clone(&root).hear(events)).detach();

        progress(&root);
        if setup.first_here {
            root.subtree.start_here(1);
        }
        let specs = (1..=count).zip(&setup.hosts).zip(root.parents.borrow().clone());
        let specs = specs.map(|((node, host), parent)| NodeSpec { node, parent, host: host.clone() }).collect();
        root.bring_up(specs);
        let mut interrupted = std::pin::pin!(interrupted);
        let start = async {
            match setup.agent {
                AgentKind::Srun => root.start_step(key.clone()).await.map(Some),
                _ => Ok(None),
            }
        };
        let mut step = match start.or(async { Err(interrupted.as_mut().await) }).await {
            Ok(step) => step,
            Err(error) => {
                root.stop().await;
                return Err(error);
            }
        };
        let up = async {
            while root.count(|s| matches!(s, State::Starting)) > 0 {
                let _ = root.changed.1.recv().await;
                progress(&root);
            }
            root.enough(setup.min_hosts, |line| console.say(line))?;
            root.say_limits(limits::of_tree, |line| console.say(line));
            Ok(())
        };
        let fell = async {
            match &mut step {
                Some((step, _)) => Err(step.ended().await),
                None => smol::future::pending().await,
            }
        };
        let up = up.or(async { Err(interrupted.await) }).or(fell).await;
        if let Some((step, _)) = step {
            root.subtree.adopt(step.into_process());
        }
        if let Err(error) = up {
            root.stop().await;
            return Err(error);
        }
        Ok(root)
    }

    /// Has Slurm start the agents, which find their way here by the file.
    async fn start_step(&self, key: SessionKey) -> Result<(Step, Posted)> {
        let (addresses, hosts) = (self.addresses.clone(), self.hosts.clone());
        if addresses.is_empty() {
            let error = Error::new("start the agents in a Slurm step", "there is no address at which they could come");
            return Err(error.remedy("start them over ssh, which needs no TCP connection back, with --agent ssh"));
        }
        let overlaps = slurm::overlaps().await?;
        let posted = Invitation { key, addresses, hosts }.post()?;
        Ok((Step::start(&self.tasks, &self.hosts, posted.path(), overlaps)?, posted))
    }

    fn bring_up(self: &Rc<Self>, nodes: Vec<NodeSpec>) {
        let this = Rc::clone(self);
        self.subtree.start(nodes, move |report| {
            let this = Rc::clone(&this);
            async move { this.note(report).await }.boxed_local()
        });
    }

    fn count(&self, which: impl Fn(&State) -> bool) -> u32 {
        u32::try_from(self.nodes.borrow().values().filter(|s| which(s)).count()).unwrap_or(u32::MAX)
    }

    /// Says which hosts are missing.
    ///
    /// # Errors
    /// They are too many: of those that run ranks fewer than `min_hosts` are up (`None`: all are needed), or one of the others is not.
    pub fn enough(&self, min_hosts: Option<u32>, say: impl Fn(String)) -> Result<()> {
        if let Some(error) = self.lost_of(self.last + 1..=NodeId::MAX).pop() {
            return Err(Error::new("start the job", error).remedy("name others for --memory and --io-forward"));
        }
        let is_up = |(_, state): (_, &State)| matches!(state, State::Up { .. });
        let up = self.nodes.borrow().range(1..=self.last).filter(|node| is_up(*node)).count();
        let (up, all) = (u32::try_from(up).unwrap_or(u32::MAX), self.last);
        let errors = self.lost_of(1..=self.last);
        if up >= min_hosts.unwrap_or(all).max(1) {
            for error in errors {
                say(format!("going on without a host: {error}"));
            }
            return Ok(());
        }
        const SHOWN: usize = 8;
        for error in errors.iter().skip(1).take(SHOWN - 1) {
            say(error.clone());
        }
        let more = if errors.len() > SHOWN { format!(" and {} more", errors.len() - SHOWN) } else { String::new() };
        let cause =
            format!("{} of {all} hosts are missing{more}: {}", all - up, errors.first().cloned().unwrap_or_default());
        let error = Error::new("start the job", cause);
        Err(if up > 0 { error.remedy("--min-hosts N goes on with N of them") } else { error })
    }

    /// The nodes that are up, with their host's place in the list.
    pub fn up(&self) -> Vec<(NodeId, usize)> {
        let nodes = self.nodes.borrow();
        let up = nodes.iter().filter(|(_, s)| matches!(s, State::Up { .. }));
        up.map(|(node, _)| (*node, *node as usize - 1)).collect()
    }

    /// Why a node is not up any more, or was never.
    pub fn why_gone(&self, node: NodeId) -> Option<String> {
        match self.nodes.borrow().get(&node) {
            Some(State::Gone { error }) => Some(error.clone()),
            _ => None,
        }
    }

    /// Why nodes are not up.
    pub fn lost(&self) -> Vec<String> {
        self.lost_of(1..=NodeId::MAX)
    }

    fn lost_of(&self, meant: RangeInclusive<NodeId>) -> Vec<String> {
        let nodes = self.nodes.borrow();
        let error = |state: &State| match state {
            State::Gone { error } => Some(error.clone()),
            _ => None,
        };
        nodes.range(meant).filter_map(|(_, state)| error(state)).collect()
    }

    /// Nodes on this machine, as containers are.
    fn crowd(&self) -> usize {
        let here = node::machine();
        let is_here = |state: &State| matches!(state, State::Up { machine, .. } if here.is_some() && *machine == here);
        self.nodes.borrow().values().filter(|state| is_here(state)).count()
    }

    /// Lays the log over the nodes that can show captured files, once in a session; what the reader finds is written into it. What nodes
    /// lack is among the reader's warnings then.
    pub async fn start_log(self: &Rc<Self>, source: Arc<Source>, found: Receiver<Finding>) {
        self.say_limits(limits::of_view, |line| source.warn(line));
        let able: Vec<_> = {
            let nodes = self.nodes.borrow();
            let able = |(node, state): (&NodeId, &State)| match state {
                State::Up { addresses, limits, .. } if limits.view.is_none() => Some((*node, addresses.clone())),
                _ => None,
            };
            nodes.iter().filter_map(able).collect()
        };
        // This host reads anyway.
        let elsewhere = || able.iter().filter(|(_, addresses)| !listen::on_one_host(addresses, &self.addresses));
        let apart = elsewhere().next().is_some();
        let others = usize::try_from(self.roots - 1).unwrap_or(usize::MAX);
        let readers: Vec<NodeId> = elsewhere().map(|(node, _)| *node).take(others).collect();
        if readers.len() < others {
            let hosts = readers.len() + 1;
            source.warn(format!("--roots {}: only {hosts} of the hosts can read apart from each other", self.roots));
        }
        source.forest.plant(readers);
        let nodes = u32::try_from(able.len() + 1).unwrap_or(u32::MAX);
        let machine = Machine { cores: node::cores(), hosts: self.crowd() };
        let links = apart.then_some(machine);
        let loading = Loading::start(&self.tasks, &self.arrivals, &self.children, nodes, links, source, found);
        let two_trees = loading.two_trees();
        *self.loading.borrow_mut() = Some(loading);
        let nodes = loading::feeders(self.addresses.clone(), able);
        self.order(Target::All, Order::Feed { two_trees, nodes }, Vec::new()).await;
    }

    /// Says what hosts do without and what comes instead: one line for each kind.
    fn say_limits(&self, words: impl Fn(&Limits) -> Vec<String>, tell: impl Fn(String)) {
        let mut lacking = BTreeMap::<String, Vec<&str>>::new();
        for (node, state) in &*self.nodes.borrow() {
            let State::Up { limits, .. } = state else { continue };
            for lack in words(limits) {
                lacking.entry(lack).or_default().push(self.host(*node));
            }
        }
        for (lack, hosts) in lacking {
            let hosts = super::fold::fold(&hosts);
            tell(format!("{hosts}: {lack}"));
            self.said.borrow_mut().push((hosts, lack));
        }
    }

    /// Says of what a job's hosts warned, and what failed there. Returns all that was said of what hosts do without: hosts, words.
    pub fn say_told(&self, console: &Console, warnings: &Told, failures: &Told) -> Vec<(String, String)> {
        let folded = |nodes: &BTreeSet<NodeId>| {
            super::fold::fold(&nodes.iter().map(|node| self.host(*node)).collect::<Vec<_>>())
        };
        let warned = warnings.iter().map(|(words, nodes)| (folded(nodes), words.clone())).collect::<Vec<_>>();
        for (hosts, words) in &warned {
            console.say(format_args!("{hosts}: {words}"));
        }
        for (words, nodes) in failures {
            console.say(format_args!("{}: {words}", folded(nodes)));
        }
        [self.said.borrow().clone(), warned].concat()
    }

    /// The log's writer, once there is a log.
    pub fn loading(&self) -> Option<Rc<Loading>> {
        self.loading.borrow().clone()
    }

    /// The host of a node as the user named it.
    pub fn host(&self, node: NodeId) -> &str {
        self.hosts.get((node as usize).wrapping_sub(1)).map_or("the front end", String::as_str)
    }

    /// A new job, and where its news arrive: they are few, but for output, of which its nodes send no more than was granted
    /// ([`super::window`]). So one that does not hear holds up no other.
    pub fn new_job(&self, card: Rc<Card>) -> (JobId, Receiver<News>) {
        let job = self.next_job.replace(self.next_job.get() + 1);
        let (sender, news) = unbounded();
        self.jobs.borrow_mut().insert(job, (sender, card));
        (job, news)
    }

    /// A job is over: late news of it are dropped.
    pub fn forget(&self, job: JobId) {
        self.jobs.borrow_mut().remove(&job);
    }

    /// The jobs under way.
    pub fn jobs(&self) -> Vec<(JobId, Rc<Card>)> {
        self.jobs.borrow().iter().map(|(job, (_, card))| (*job, Rc::clone(card))).collect()
    }

    /// Who starts a node; 0: this process.
    fn parent(&self, node: NodeId) -> NodeId {
        self.parents.borrow().get((node as usize).wrapping_sub(1)).copied().unwrap_or(0)
    }

    /// Every node with its parent (0: this process), its host, its state, and what it said of itself last, if it did.
    pub fn each_node(&self, mut show: impl FnMut(NodeId, NodeId, &str, &State, Option<&Facts>)) {
        let (nodes, facts) = (self.nodes.borrow(), self.facts.borrow());
        for (node, state) in &*nodes {
            show(*node, self.parent(*node), self.host(*node), state, facts.get(node).map(|(_, facts)| facts));
        }
    }

    /// This moment, on the clock of [`Root::clocks`].
    pub fn now(&self) -> Moment {
        Moment::try_from(self.begun.elapsed().as_micros()).unwrap_or(Moment::MAX / 4)
    }

    /// What is known of the nodes' clocks.
    pub fn clocks(&self) -> std::cell::Ref<'_, Clocks> {
        self.clocks.borrow()
    }

    /// Asks every node what it knows of itself and waits until all have answered, [`GATHER`] at most. Who asks within a second of
    /// another shares his answers. Returns the nodes that are up and have not answered.
    pub async fn gather(&self) -> Vec<NodeId> {
        let again = self.asked.get().is_none_or(|asked| asked.elapsed() > Duration::from_secs(1));
        if again {
            self.asked.set(Some(Instant::now()));
        }
        let since = self.asked.get().unwrap_or_else(Instant::now);
        let silent = || {
            let facts = self.facts.borrow();
            let answered = |node: &NodeId| facts.get(node).is_some_and(|(heard, _)| *heard >= since);
            self.up().into_iter().map(|(node, _)| node).filter(|node| !answered(node)).collect::<Vec<_>>()
        };
        let ask = async {
            if again {
                self.order(Target::All, Order::Facts, Vec::new()).await;
            }
            while !silent().is_empty() {
                Timer::after(Duration::from_millis(10)).await;
            }
        };
        ask.or(async {
            Timer::at(since + GATHER).await;
        })
        .await;
        silent()
    }

    /// Whether all nodes are this machine.
    pub fn is_local(&self) -> bool {
        self.subtree.is_local()
    }

    /// Sends an order down the tree.
    pub async fn order(&self, to: Target, order: Order, body: Vec<u8>) {
        self.children.order(to, order, body).await;
    }

    /// The session is being ended.
    pub fn is_stopping(&self) -> bool {
        self.children.leaving()
    }

    /// Ends the session: every node cleans up and leaves.
    pub async fn stop(&self) {
        self.children.expect_leaving();
        let gone = async {
            self.order(Target::All, Order::Leave, Vec::new()).await;
            while !self.children.is_empty() {
                let _ = self.changed.1.recv().await;
            }
        };
        gone.or(async {
            Timer::after(KILLED + Duration::from_secs(1)).await;
        })
        .await;
        self.subtree.reap().await;
    }

    async fn hear(self: Rc<Self>, events: Receiver<Event>) {
        while let Ok(event) = events.recv().await {
            match event {
                Event::Report { report: Report::Output { job, rank, stream }, packet, .. } => {
                    self.tell(job, News::Output { rank, stream, packet });
                }
                Event::Report { report: Report::Read { ticket }, packet, .. } => {
                    self.reader(|source| source.forest.answer(ticket, packet.body.to_vec()));
                }
                Event::Report { report: Report::Collective { job, word }, packet, .. } => {
                    self.tell(job, News::Collective { word, packet });
                }
                Event::Report { report, .. } => self.note(report).await,
                Event::Log { child, packet } => {
                    let loading = self.loading.borrow().clone();
                    if let Some(loading) = loading {
                        self.children.feed(&loading, child, packet).await;
                    }
                }
                Event::Broken { .. } if self.children.leaving() => {
                    let _ = self.changed.0.try_send(());
                }
                Event::Broken { child, error } => {
                    for node in self.children.below(child) {
                        let error = if node == child {
                            error.to_string()
                        } else {
                            format!("{} was lost: {error}", self.host(child))
                        };
                        self.lose(node, error).await;
                    }
                }
            }
        }
    }

    /// What a node reports, or this process of one that it starts itself.
    async fn note(self: &Rc<Self>, report: Report) {
        match report {
            Report::Joined { node, addresses, machine, mut limits, birth } => {
                limits.ssh = self.restarted.borrow_mut().remove(&node);
                self.clocks.borrow_mut().handle_join(node, birth, 0, self.now());
                self.nodes.borrow_mut().insert(node, State::Up { addresses, machine, limits });
            }
            // We have tried ourselves, or nobody is to try any more.
            Report::NotStarted { node, error } if self.parent(node) == 0 || self.is_stopping() => {
                self.nodes.borrow_mut().insert(node, State::Gone { error });
            }
            // Its parent is not there itself, or could not reach it; perhaps we can (many sites forbid ssh between compute nodes).
            Report::NotStarted { node, error } => {
                let host = self.host(node).to_owned();
                log::info!("{error}; starting {host} from here");
                self.children.forget(node);
                let why = error.strip_prefix(&format!("{host}: ")).unwrap_or(&error).to_owned();
                self.restarted.borrow_mut().insert(node, why);
                if let Some(parent) = self.parents.borrow_mut().get_mut((node as usize).wrapping_sub(1)) {
                    *parent = 0;
                }
                self.bring_up(vec![NodeSpec { node, parent: 0, host }]);
            }
            Report::Lost { node, error } => self.lose(node, error).await,
            Report::Exited { job, ranks } => self.tell(job, News::Exited(ranks)),
            Report::Failed { job, node, error } => self.tell(job, News::Failed { node, error }),
            Report::Done { job, part, node, warnings, received, facts } => {
                self.tell(job, News::Done { part, node, warnings, received, facts });
            }
            Report::StdinTaken { job, part, node } => self.tell(job, News::StdinTaken { part, node }),
            Report::Loaded { job, node } => self.tell(job, News::Loaded { node }),
            Report::Open { job, node } => self.tell(job, News::Open { node }),
            Report::Lent { job, node, addresses } => self.tell(job, News::Lent { node, addresses }),
            Report::Unlent { job, node, error } => self.tell(job, News::Unlent { node, error }),
            Report::Pids { job, ranks } => self.tell(job, News::Pids(ranks)),
            Report::Facts { node, facts } => {
                self.facts.borrow_mut().insert(node, (Instant::now(), facts));
            }
            Report::Want { path, need } => self.reader(|source| source.want(path, need)),
            Report::Fetch { node, piece } => {
                if let Some(loading) = self.loading() {
                    loading.hand(node, piece);
                }
            }
            Report::Followed { file, next } => self.reader(|source| source.followed(file, next)),
            Report::Changed { path, exists } => self.reader(|source| source.changed(path, exists)),
            Report::Rate { rate } => {
                if let Some(loading) = self.loading() {
                    loading.hear_rate(rate);
                }
            }
            Report::Output { .. } | Report::Collective { .. } | Report::Read { .. } | Report::Ping => {}
        }
        let _ = self.changed.0.try_send(());
    }

    fn reader(&self, ask: impl FnOnce(&Source)) {
        if let Some(loading) = &*self.loading.borrow() {
            ask(&loading.source);
        }
    }

    async fn lose(&self, node: NodeId, error: String) {
        self.reader(|source| source.forest.fell(node));
        let error = Error::new("reach the agent", error).at(self.host(node).to_owned()).to_string();
        self.nodes.borrow_mut().insert(node, State::Gone { error: error.clone() });
        let jobs: Vec<JobId> = self.jobs.borrow().keys().copied().collect();
        for job in jobs {
            self.tell(job, News::Lost { node, error: error.clone() });
        }
        let _ = self.changed.0.try_send(());
    }

    fn tell(&self, job: JobId, news: News) {
        if let Some((inbox, _)) = self.jobs.borrow().get(&job) {
            let _ = inbox.try_send(news);
        }
    }
}
