//! A node: what the agent process runs. Relays orders down and reports up, starts its own children, and runs its part of each job.

mod audit;
mod board;
mod door;
mod facts;
mod files;
mod forest;
mod guests;
mod job;
mod lend;
mod members;
mod memory;
mod patience;
mod pull;
mod replica;
mod singletons;
mod streams;
mod texts;
mod versions;
mod view;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use async_channel::{Receiver, Sender, bounded};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use smol::future::FutureExt;
use smol::net::TcpStream;
use smol::{Async, LocalExecutor, Task, Timer};
use socket2::SockRef;

use self::facts::Clock;
use self::job::Job;
use self::lend::Lend;
use self::members::Members;
use self::patience::Patience;
use self::replica::{Replica, feeders};
use self::view::Views;
use super::couriers::Couriers;
use super::invitation::Invitation;
use super::overlay::{Children, Event, LOG_OUTBOX, Spawner, ping_up, pump, pump_with};
use super::subtree::{Arrivals, Subtree};
use super::{agent, keeper, slurm};
use crate::error::Context;
use crate::loader::catalog::as_path;
use crate::loader::view::directory;
use crate::net::auth::SessionKey;
use crate::net::gauge::Gauge;
use crate::net::link::{self, LinkError, Packet, Reader, SILENCE, Writer};
use crate::net::listen;
use crate::net::replicate::{FeedsLog, Rebuild};
use crate::net::seqpacket::Seqpacket;
use crate::net::welcome::welcome;
use crate::net::wire::collective::Word;
use crate::net::wire::control::{
    AgentKind, Down, Enroll, Exit, Feeder, JobId, Launch, Limits, NodeId, NodeSpec, Order, Report, Target, View,
};
use crate::net::wire::facts::Birth;
use crate::net::wire::frame::Kind;
use crate::net::wire::hello::Purpose;
use crate::net::wire::keeper::{Ask, Tell};
use crate::net::wire::log::LogFrame;
use crate::sys::without::{Ability, Without};
use crate::sys::{self, process, tcp};
use crate::{Error, Result};

/// The parent must enrol a fresh agent within this time.
const ENROLMENT: Duration = Duration::from_secs(30);

/// How a node gets its first link.
enum Way {
    /// Of the descriptors that the agent was started with.
    Pipes(OwnedFd, OwnedFd),
    /// By going to who invited it, as this node.
    Join(NodeId, Invitation),
}

/// The `serve` mode: becomes a node and returns when the session is over.
///
/// # Errors
/// The link to the parent cannot be made or ended early; everything of the node's jobs is gone then.
pub fn serve() -> Result<u8> {
    run(|input, output| Ok(Way::Pipes(input, output)))
}

/// The same for an agent that Slurm started on one of the hosts in an [`Invitation`].
///
/// # Errors
/// As [`serve`]; this host is not invited.
pub fn join(file: &Path) -> Result<u8> {
    slurm::remove_copy();
    let invitation = Invitation::read(file)?;
    let me = slurm::node_name().ok_or_else(|| Error::new("join", "SLURMD_NODENAME is not set"))?;
    let at = invitation.hosts.iter().position(|host| *host == me);
    let at = at.ok_or_else(|| Error::new("join", "this host is not invited").at(me))?;
    let node = NodeId::try_from(at + 1).op("number this host")?;
    let ended = run(|_, _| Ok(Way::Join(node, invitation)));
    // Of a front end that was killed meanwhile.
    if ended.is_err() {
        let _ = std::fs::remove_file(file);
    }
    ended
}

/// The same for an agent whose starter tells it everything on standard input: first its number, then the [`Invitation`].
///
/// # Errors
/// As [`serve`].
pub fn join_told() -> Result<u8> {
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).op("read the invitation")?;
    let told = text.split_once('\n').and_then(|(node, rest)| Some((node.parse().ok()?, Invitation::parse(rest)?)));
    let (node, invitation) = told.ok_or_else(|| Error::new("join", "standard input holds no invitation"))?;
    run(|_, _| Ok(Way::Join(node, invitation)))
}

fn run(way: impl FnOnce(OwnedFd, OwnedFd) -> Result<Way>) -> Result<u8> {
    let clock = Clock::start();
    process::default_action(Signal::SIGCHLD);
    // The keepers receive hundreds of descriptors at once.
    process::raise_nofile();
    // Before anything that might start a thread.
    let (keeper, keeper_pid) = keeper::start().op("start the keeper")?;
    let hang_up = keeper.try_clone().op("start the keeper")?;
    process::become_subreaper();
    process::keep_freed_memory();
    let (input, output) = take_standard_streams().op("take over the standard streams")?;
    let tasks: Spawner = Rc::new(LocalExecutor::new());
    let left = Rc::new(RefCell::new(None));
    let life = live(Rc::clone(&tasks), clock, way(input, output)?, keeper, keeper_pid, Rc::clone(&left));
    let ended = smol::block_on(tasks.run(life));
    // The keeper sees its socket close; whatever it leaves is ours.
    let _ = rustix::net::shutdown(&hang_up, rustix::net::Shutdown::Both);
    process::await_end(keeper_pid, keeper::KILLED);
    process::kill_descendants(&[], keeper::KILLED);
    // The keeper has removed it, unless it was killed.
    if let Some((place, store)) = left.take() {
        directory::remove(&place, &store);
    }
    ended.map(|()| 0)
}

/// The parent's pipes, out of the reach of anything started from here.
fn take_standard_streams() -> io::Result<(OwnedFd, OwnedFd)> {
    let (input, output) = (rustix::stdio::stdin(), rustix::stdio::stdout());
    let (input, output) =
        (process::above_standard(input.try_clone_to_owned()?)?, process::above_standard(output.try_clone_to_owned()?)?);
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok((input, output))
}

/// The link made of the descriptors that the agent was started with.
fn first_link(input: OwnedFd, output: OwnedFd) -> io::Result<(Reader, Writer)> {
    if rustix::net::sockopt::socket_type(&input).is_ok() {
        let stream = smol::net::unix::UnixStream::from(Async::new(std::os::unix::net::UnixStream::from(input))?);
        return Ok(link::trusted(stream.clone(), stream));
    }
    let ready = format!("\n{}\n", agent::READY);
    rustix::io::write(&output, ready.as_bytes())?;
    link::trusted_fds(input, output)
}

/// A node of the tree.
pub(super) struct Node {
    tasks: Spawner,
    clock: Clock,
    id: NodeId,
    host: String,
    session: String,
    parent: Sender<Packet>,
    children: Rc<Children>,
    subtree: Subtree,
    /// Why it starts no agents on other hosts.
    starts_none: Option<String>,
    keeper: Seqpacket,
    key: SessionKey,
    arrivals: Arrivals,
    /// The store, until the log needs it.
    store: RefCell<Option<OwnedFd>>,
    /// The path of the store, where it is not in a namespace.
    audit: Option<Vec<u8>>,
    replica: RefCell<Option<Rc<Replica>>>,
    couriers: Couriers,
    /// Files of which parts are read for the root.
    opened: RefCell<HashMap<Vec<u8>, forest::Opened>>,
    views: Views,
    /// Frames of the log that came down the control link, by stripe.
    fed: [(Sender<Packet>, Receiver<Packet>); 2],
    /// By job and part.
    jobs: RefCell<HashMap<(JobId, u32), Rc<Job>>>,
    /// What the ranks of each job here do together.
    members: RefCell<HashMap<JobId, Rc<Members>>>,
    /// Of jobs that write files asynchronously here.
    files: RefCell<HashMap<JobId, Weak<files::Shared>>>,
    /// The memory servers that jobs have here.
    lends: RefCell<HashMap<JobId, Lend>>,
    /// Of those, what was stopped and may not have ended yet.
    stopped: RefCell<Vec<Task<()>>>,
}

/// A store in a directory of the user's: where, and its own directory.
type Left = Rc<RefCell<Option<(PathBuf, OwnedFd)>>>;

/// Comes to a front end to which thousands may come at once, more than it can greet: again and again, unless it is gone, until it would not wait any more.
async fn come(addresses: &[String], key: &SessionKey, node: NodeId) -> Result<(Reader, Writer), LinkError> {
    const PATIENCE: Duration = Duration::from_secs(40);
    const PAUSE: Range<u64> = 100..1000;
    let begun = Instant::now();
    loop {
        let error = match listen::reach(addresses, key, node, Purpose::Control).await {
            Err(error) if begun.elapsed() < PATIENCE => error,
            result => return result,
        };
        if !error.may_pass() {
            return Err(error);
        }
        log::info!("the front end is not reached, again: {error}");
        Timer::after(Duration::from_millis(fastrand::u64(PAUSE))).await;
    }
}

async fn live(tasks: Spawner, clock: Clock, way: Way, keeper: Seqpacket, keeper_pid: Pid, left: Left) -> Result<()> {
    let (mut reader, writer) = match way {
        Way::Pipes(input, output) => first_link(input, output).op("open the link to the parent")?,
        Way::Join(node, Invitation { key, addresses, .. }) => come(&addresses, &key, node)
            .await
            .map_err(|error| Error::new("reach the front end", error).on(addresses.join(", ")))?,
    };
    let enroll = enrolment(&mut reader).await?;
    let mut birth = Birth { enrolled: clock.now(), ..Birth::default() };
    let me = enroll.host.clone();
    let key = SessionKey(enroll.key);
    let without = Without::from_env().map_err(|e| e.at(me.clone()))?;
    let listener =
        listen::listen(enroll.agent == AgentKind::Local, &without).op("listen").map_err(|e| e.at(me.clone()))?;
    let addresses = listener.as_ref().map(listen::addresses).unwrap_or_default();
    log::debug!("node {} on {me}: listening on {addresses:?}, keeper {keeper_pid}", enroll.node);

    // Better than the pipe: a connection of our own. The pipe stays open; its end would tell of the parent's death just the same.
    let mut tcp = without.denies(Ability::Tcp);
    let pipe;
    let (mut reader, writer) = match listen::reach(&enroll.parent, &key, enroll.node, Purpose::Control).await {
        Ok(link) => {
            pipe = Some((reader, writer));
            link
        }
        Err(error) => {
            if !enroll.parent.is_empty() {
                tcp.get_or_insert_with(|| error.to_string());
            }
            pipe = None;
            (reader, writer)
        }
    };
    birth.connected = clock.now();
    let made = if enroll.view == View::None { Ok(None) } else { make_store(&keeper, &enroll).await.map(Some) };
    let (made, view) = made.map_or_else(|why| (None, Some(why)), |made| (made, None));
    let (mut store, mut audit, mut limits) = (None, None, Limits { view, ..Limits::default() });
    if let Some((own, directory, audits, found)) = made {
        limits = found;
        if let Some(directory) = directory {
            // The directory in which the store's own was made.
            let place = as_path(&directory).parent().map(Path::to_owned);
            *left.borrow_mut() = place.zip(own.try_clone().ok());
            audit = audits.then_some(directory);
        }
        store = Some(own);
    }
    limits.tcp = tcp;
    let (parent, pumping) = pump(&tasks, writer, ping_up());
    let (children, events) = Children::new(Rc::clone(&tasks));
    let arrivals = Arrivals::default();
    if let Some(listener) = listener {
        tasks.spawn(welcome(Rc::clone(&tasks), listener, key.clone(), arrivals.door())).detach();
    }
    let subtree = Subtree::new(Rc::clone(&tasks), Rc::clone(&children), arrivals.clone(), &enroll, addresses.clone());
    let node = Rc::new(Node {
        tasks: Rc::clone(&tasks),
        clock,
        id: enroll.node,
        host: me,
        session: enroll.session.clone(),
        parent,
        couriers: Couriers::new(Rc::clone(&tasks), Rc::clone(&children)),
        opened: RefCell::default(),
        children,
        subtree,
        starts_none: without.denies(Ability::Ssh),
        keeper,
        key,
        arrivals,
        store: RefCell::new(store),
        audit,
        replica: RefCell::default(),
        views: Views::default(),
        fed: [bounded(1), bounded(1)],
        jobs: RefCell::default(),
        members: RefCell::default(),
        files: RefCell::default(),
        lends: RefCell::default(),
        stopped: RefCell::default(),
    });
    birth.joined = clock.now();
    let machine = sys::node::machine();
    node.report(&Report::Joined { node: node.id, addresses, machine, limits: Box::new(limits), birth }).await;
    tasks.spawn(Rc::clone(&node).relay_up(events)).detach();
    tasks.spawn(Rc::clone(&node).watch_keeper(keeper_pid)).detach();
    let ended = Rc::clone(&node).follow(&mut reader).await;
    node.leave().await;
    drop(pipe);
    node.parent.close();
    pumping
        .or(async {
            Timer::after(Duration::from_secs(1)).await;
        })
        .await;
    ended
}

/// The store's directory, and what [`Tell::Store`] says of it.
type Made = (OwnedFd, Option<Vec<u8>>, bool, Limits);

/// Has the keeper make what the session's view needs; without it the node's ranks run plainly, and the reason is told.
async fn make_store(keeper: &Seqpacket, enroll: &Enroll) -> Result<Made, String> {
    let ask = Ask::Store { view: enroll.view, directory: enroll.store.clone(), bytes: sys::memory::for_files() };
    let keeper = keeper.try_clone().map_err(|error| error.to_string())?;
    let answer = smol::unblock(move || keeper.send(&ask, &[]).and_then(|()| keeper.receive::<Tell>())).await;
    match answer {
        Ok(Some((Tell::Store { directory, audit, limits }, fds))) => match <[OwnedFd; 1]>::try_from(fds) {
            Ok([store]) => Ok((store, directory, audit, limits)),
            Err(_) => Err("the keeper told of a store without a descriptor".to_owned()),
        },
        Ok(Some((Tell::Failed { error }, _))) => Err(error),
        _ => Err("the keeper was killed".to_owned()),
    }
}

async fn enrolment(reader: &mut Reader) -> Result<Enroll> {
    let late = async {
        Timer::after(ENROLMENT).await;
        Err(Error::new("join the session", "the parent did not enrol this agent in time"))
    };
    let first = async { reader.receive().await.op("join the session") };
    let down: Down = first.or(late).await?.message().op("join the session")?;
    match down.order {
        Order::Enroll(enroll) => Ok(enroll),
        _ => Err(Error::new("join the session", "the parent's first word is not an enrolment")),
    }
}

/// Feeds whoever connects for the log.
pub(super) async fn feed_arrivals<R: Rebuild + FeedsLog + 'static>(tasks: Spawner, arrivals: Arrivals, feeder: Rc<R>) {
    while let Some((node, (mut reader, writer), socket)) = arrivals.next_fed().await {
        let feeder = Rc::clone(&feeder);
        // What is sent to one whose network is gone keeps the link for a quarter of an hour otherwise.
        let _ = SockRef::from(&socket).set_tcp_user_timeout(Some(SILENCE));
        let (outbox, pumping) = pump_with(&tasks, writer, Packet::new(&LogFrame::Ping, Vec::new()), LOG_OUTBOX);
        let (asked, attachments) = bounded(2);
        let listen = async move {
            loop {
                asked.send(reader.receive().await?).await.map_err(|_| LinkError::Closed)?;
            }
        };
        let work = async move {
            log::debug!("feeding node {node}");
            let feed: Result<(), LinkError> =
                feeder.log().feed(attachments, outbox, &*feeder).or(listen).or(gauge(&socket, &*feeder)).await;
            log::debug!("not feeding node {node} any more: {feed:?}");
            drop(pumping);
        };
        tasks.spawn(work).detach();
    }
}

/// Tells once how fast a link is over which the log goes; never ends.
async fn gauge(socket: &TcpStream, feeder: &impl FeedsLog) -> Result<(), LinkError> {
    const PAUSE: Duration = Duration::from_millis(5);
    /// Looks after something was put into the log.
    const LOOKS: u32 = 20;
    let mut gauge = Gauge::default();
    // Within a host there is no link, however little of the processors is left for us.
    let is_local = |socket: &TcpStream| Some(socket.peer_addr().ok()?.ip() == socket.local_addr().ok()?.ip());
    if is_local(socket) == Some(true) {
        return std::future::pending().await;
    }
    let changed = feeder.log().listener();
    loop {
        changed.woken().await;
        for _ in 0..LOOKS {
            if let Some(rate) = tcp::sent(socket).and_then(|sent| gauge.handle_sent(sent)) {
                // They share what this host can send.
                let links = u64::try_from(feeder.log().children()).unwrap_or(1);
                if feeder.hear_rate(rate.saturating_mul(links)) {
                    return std::future::pending().await;
                }
            }
            Timer::after(PAUSE).await;
        }
    }
}

impl Node {
    async fn report(&self, report: &Report) {
        self.send_up(Packet::new(report, Vec::new())).await;
    }

    async fn send_up(&self, packet: Packet) {
        // A closed outbox means that the parent is gone; the node is leaving already.
        let _ = self.parent.send(packet).await;
    }

    /// Without its keeper a node runs no more jobs; it stays, for those below it.
    async fn watch_keeper(self: Rc<Self>, keeper: Pid) {
        // Before Linux 5.3 it is noticed with the next job.
        let Ok(died) = process::watch(keeper).and_then(Async::new_nonblocking) else { return };
        if died.readable().await.is_err() {
            return;
        }
        // The jobs there are say so themselves.
        for _ in 0..50 {
            if self.jobs.borrow().is_empty() {
                break;
            }
            Timer::after(Duration::from_millis(20)).await;
        }
        self.report(&Report::Lost { node: self.id, error: "its keeper on this node was killed".to_owned() }).await;
    }

    async fn exited(&self, exits: &mut Vec<(JobId, Vec<Exit>)>) {
        for (job, ranks) in exits.drain(..) {
            self.report(&Report::Exited { job, ranks }).await;
        }
    }

    /// Passes on what the children report.
    async fn relay_up(self: Rc<Self>, events: Receiver<Event>) {
        let mut slowest = u64::MAX;
        let mut exits: Vec<(JobId, Vec<Exit>)> = Vec::new();
        loop {
            let event = match events.try_recv() {
                Ok(event) => event,
                Err(_) => {
                    self.exited(&mut exits).await;
                    let Ok(event) = events.recv().await else { return };
                    event
                }
            };
            // What is said of a node is said behind the ends of its ranks.
            if !matches!(event, Event::Report { report: Report::Exited { .. } | Report::Output { .. }, .. }) {
                self.exited(&mut exits).await;
            }
            match event {
                // Ends that arrive together travel together.
                Event::Report { report: Report::Exited { job, ranks }, .. } => {
                    match exits.iter_mut().find(|(known, _)| *known == job) {
                        Some((_, waiting)) => waiting.extend(ranks),
                        None => exits.push((job, ranks)),
                    }
                }
                Event::Report { report: Report::Want { path, need }, .. }
                    if self.replica.borrow().as_ref().is_some_and(|r| !r.asks(&path, need)) => {}
                Event::Report { report: Report::Fetch { node, piece }, .. } if self.hands_out(node, piece) => {}
                Event::Report { report: Report::Followed { file, next }, .. }
                    if self.replica.borrow().as_ref().is_some_and(|r| !r.pulls.is_news(file, next)) => {}
                Event::Report { report: Report::Rate { rate }, .. } if rate >= slowest => {}
                Event::Report { report: Report::Collective { job, word }, packet, .. } => {
                    match (self.members_of(job), word) {
                        (Some(members), Word::Joined { node, seq, act, ranks, more }) => {
                            members.handle_joined(node, seq, act, ranks, more, &packet.body);
                        }
                        _ => self.send_up(packet).await,
                    }
                }
                Event::Report { report, packet, .. } => {
                    match report {
                        Report::Rate { rate } => slowest = rate,
                        Report::NotStarted { node, .. } => self.children.forget(node),
                        _ => {}
                    }
                    self.send_up(packet).await;
                }
                Event::Log { child, packet } => {
                    let replica = self.replica.borrow().clone();
                    if let Some(replica) = replica {
                        self.children.feed(&replica, child, packet).await;
                    }
                }
                Event::Broken { .. } if self.children.leaving() => {}
                Event::Broken { child, error } => {
                    for node in self.children.below(child) {
                        let error =
                            if node == child { error.to_string() } else { format!("its parent was lost: {error}") };
                        self.report(&Report::Lost { node, error }).await;
                    }
                }
            }
        }
    }

    /// Follows the parent's orders until it says leave or is gone.
    async fn follow(self: Rc<Self>, reader: &mut Reader) -> Result<()> {
        let mut patience = Patience::default();
        loop {
            let received = if patience.is_endless() { reader.receive().await } else { reader.receive_within().await };
            let packet = received.op("hear the parent").map_err(|e| e.at(self.host.clone()))?;
            if packet.kind == Kind::Log {
                self.fed_by_parent(packet).await;
                continue;
            }
            let down: Down = packet.message().op("understand the parent").map_err(|e| e.at(self.host.clone()))?;
            let mine = match down.to {
                Target::All => true,
                Target::Node(node) => node == self.id,
            };
            patience.handle_order(&down.order);
            if matches!(down.order, Order::Ping) {
                continue;
            }
            if matches!(down.order, Order::Leave) {
                self.children.expect_leaving();
            }
            if let Order::Launch(launch) = &down.order {
                self.prepare(launch).await;
            }
            if down.to == Target::All || !mine {
                self.children.send(down.to, &packet).await;
            }
            if mine && self.obey(down.order, &packet).await {
                return Ok(());
            }
        }
    }

    /// Carries out an order; true if it was the last.
    async fn obey(self: &Rc<Self>, order: Order, packet: &Packet) -> bool {
        match order {
            Order::Leave => return true,
            Order::Start { nodes } => {
                if let Some(cause) = &self.starts_none {
                    for NodeSpec { node, host, .. } in nodes {
                        let error = Error::new("start the agent", cause).at(host).to_string();
                        self.report(&Report::NotStarted { node, error }).await;
                    }
                    return false;
                }
                let parent = self.parent.clone();
                self.subtree.start(nodes, move |report| {
                    let parent = parent.clone();
                    async move {
                        let _ = parent.send(Packet::new(&report, Vec::new())).await;
                    }
                    .boxed_local()
                });
            }
            Order::Launch(launch) => {
                let part = (launch.job, launch.part);
                if let Some(started) = Job::start(self, *launch).await {
                    self.jobs.borrow_mut().insert(part, started);
                }
            }
            Order::Signal { job, signal } => self.job(job, |j| j.signal(signal)),
            Order::End { job, grace_ms } => self.job(job, |j| j.end(grace_ms)),
            Order::Taken { job, part, bytes } => {
                if let Some(job) = self.jobs.borrow().get(&(job, part)) {
                    job.grant(bytes);
                }
            }
            Order::Stdin { job } => self.job(job, |j| j.feed(packet.body.as_ref().clone())),
            Order::Collective { job, verdict } => {
                if let Some(members) = self.members_of(job) {
                    members.handle_verdict(verdict, &packet.body);
                }
            }
            Order::Piece { piece, len, codec } => self.take(piece, len, codec, &packet.body),
            Order::Read(extent) => self.read(extent),
            Order::Lend { job, service, key, nonce } => {
                let key = SessionKey(self.key.hide(&nonce, &key));
                self.lends.borrow_mut().insert(job, Lend::start(self, job, service, key));
            }
            Order::Unlend { job } => {
                let lend = self.lends.borrow_mut().remove(&job);
                let mut stopped = self.stopped.borrow_mut();
                stopped.retain(|task| !task.is_finished());
                stopped.extend(lend.map(Lend::stop));
            }
            Order::Facts => self.tasks.spawn(Rc::clone(self).tell_facts()).detach(),
            Order::Pids { job } => self.job(job, |j| j.ask(Ask::Pids)),
            Order::Feed { two_trees, nodes } => self.join_log(two_trees, &nodes).await,
            Order::Enroll(_) | Order::Ping => {}
        }
        false
    }

    /// Takes its place in the topology of the log, if it can show files.
    async fn join_log(self: &Rc<Self>, two_trees: bool, nodes: &[Feeder]) {
        let Some(store) = self.store.borrow_mut().take() else { return };
        let mapped = !rustix::process::geteuid().is_root();
        let (replica, questions) =
            Replica::new(self.id, (store, self.audit.is_none()), two_trees, mapped, self.parent.clone());
        if let Some(place) = &self.audit {
            audit::open(self, &replica, place);
        }
        self.tasks.spawn(Rc::clone(self).ask(Rc::clone(&replica), questions)).detach();
        self.tasks.spawn(Rc::clone(&replica).apply(Rc::clone(self))).detach();
        self.tasks.spawn(Rc::clone(&replica).pull()).detach();
        let log: Vec<_> = self.fed.iter().map(|(_, receiver)| receiver.clone()).collect();
        for (stripe, feeders) in (0..).zip(feeders(self.id, two_trees, nodes)) {
            self.tasks.spawn(Rc::clone(&replica).follow(stripe, feeders, self.key.clone(), log.clone())).detach();
        }
        let (tasks, arrivals, feeder) = (Rc::clone(&self.tasks), self.arrivals.clone(), Rc::clone(&replica));
        self.tasks.spawn(async move { feed_arrivals(tasks, arrivals, feeder).await }).detach();
        *self.replica.borrow_mut() = Some(replica);
    }

    /// The log comes down the control link: this node reaches none of its feeders.
    async fn fed_by_parent(&self, packet: Packet) {
        let stripe = match packet.message() {
            // The stripe is told by the sequence number; with one stripe all belong to it.
            Ok(LogFrame::Entry { seq, .. }) => self.replica.borrow().as_ref().map_or(0, |r| r.log().stripe_of(seq)),
            Ok(LogFrame::Slow { stripe } | LogFrame::Leave { stripe }) => stripe as usize,
            _ => return,
        };
        // Where it attaches again it says what is to come.
        if self.replica.borrow().as_ref().is_some_and(|replica| !replica.is_fed_by_parent(stripe)) {
            return;
        }
        let Some((fed, _)) = self.fed.get(stripe) else { return };
        let _ = fed.send(packet).await;
    }

    fn job(&self, job: JobId, act: impl Fn(&Rc<Job>)) {
        let parts: Vec<_> =
            self.jobs.borrow().iter().filter(|(of, _)| of.0 == job).map(|(_, j)| Rc::clone(j)).collect();
        parts.iter().for_each(act);
    }

    fn members_of(&self, job: JobId) -> Option<Rc<Members>> {
        self.members.borrow().get(&job).cloned()
    }

    /// Before those below can say what it is about.
    async fn prepare(self: &Rc<Self>, launch: &Launch) {
        if self.members.borrow().contains_key(&launch.job) {
            return;
        }
        match Members::new(self, launch, &self.children.reached()) {
            Ok(Some(members)) => drop(self.members.borrow_mut().insert(launch.job, members)),
            Ok(None) => {}
            Err(error) => {
                let error = Error::new("serve the ranks", error).to_string();
                self.report(&Report::Failed { job: launch.job, node: self.id, error }).await;
            }
        }
    }

    /// So many ranks of a job are over here.
    fn over(&self, job: JobId, ranks: u32) {
        if self.members_of(job).is_some_and(|members| members.over(ranks)) {
            self.members.borrow_mut().remove(&job);
        }
    }

    /// Ends the jobs and waits for the children, both with a deadline.
    async fn leave(&self) {
        self.children.expect_leaving();
        let packet = Packet::new(&Down { to: Target::All, order: Order::Leave }, Vec::new());
        self.children.send(Target::All, &packet).await;
        for job in self.jobs.borrow().values() {
            job.end(0);
        }
        let over = async {
            while !(self.jobs.borrow().values().all(|j| j.is_over()) && self.children.is_empty()) {
                Timer::after(Duration::from_millis(5)).await;
            }
        };
        over.or(async {
            Timer::after(keeper::KILLED).await;
        })
        .await;
        self.lends.borrow_mut().clear();
        self.subtree.reap().await;
    }

    /// Bytes of files that this node received since the last job's end, and how many of them because it asked.
    fn received(&self) -> (u64, u64) {
        self.replica.borrow().as_ref().map_or((0, 0), |r| r.received())
    }

    /// Hands a job to the keeper, which forks one for it.
    fn keep(&self, ask: &Ask, socket: &Seqpacket, plan: &OwnedFd) -> io::Result<()> {
        self.keeper.send(ask, &[socket.as_fd(), plan.as_fd()])
    }
}
