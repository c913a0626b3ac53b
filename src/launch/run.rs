//! One job, seen from the front end: places its ranks, relays its streams, decides when it is over and with which exit code.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_channel::Receiver;
use nix::sys::signal::Signal;
use smol::Timer;
use smol::future::FutureExt;

use super::blocks::Blocks;
use super::card::{Card, Endings};
use super::console::{Console, ends};
use super::exit::{End, Ends};
use super::hostlist::Host;
use super::input::Input;
use super::keeper::KILLED;
use super::lending::Lending;
use super::loading::Needs;
use super::placement::Placement;
use super::presenter::Presenter;
use super::rendezvous::{self, Aborted, Ask, Front, Rendezvous};
use super::root::{News, Root, Told};
use super::window::{self, Windows};
use crate::error::EXIT_FAILED;
use crate::loader::catalog::as_path;
use crate::net::auth::nonce;
use crate::net::wire::borrow::Borrow;
use crate::net::wire::control::{Aid, Binding, JobId, Launch, NodeId, Order, Place, Status, StdinTo, Target};
use crate::net::wire::files::Forward;
use crate::net::wire::session::{Block, JobSpec};
use crate::sys::{mpir, process};
use crate::{Error, Result};

/// SIGTERM comes this long before SIGKILL when a rank's failure ends the others.
const FAILED_GRACE: Duration = Duration::from_millis(500);
/// The same when the user ends the job or its time is over.
const STOPPED_GRACE: Duration = Duration::from_secs(2);

/// How a job went.
#[derive(Debug)]
pub struct Outcome {
    pub code: u8,
    pub placement: Arc<Placement>,
    pub ends: Ends,
    /// From the launch order until every node had the job's files, from there to the last rank's end, and from there until nothing was
    /// left.
    pub loading: Duration,
    pub ran: Duration,
    pub cleanup: Duration,
    /// Bytes of files that nodes passed on to nodes, and of these to nodes that asked.
    pub received: (u64, u64),
    /// How it went on each host.
    pub card: Rc<Card>,
    /// What was said of what hosts do without: hosts, words.
    pub limits: Vec<(String, String)>,
}

/// What the loop waits for.
enum Next {
    News(News),
    Signal(Signal),
    Input(io::Result<Vec<u8>>),
    Asked(Ask),
    Time,
    Written,
    /// Our own output cannot be written.
    Broken(Error),
    Closed,
}

/// What is said of a node that ended its part of a job without being told to.
const DESERTED: &str = "its agent heard nothing from the job for too long and ended its part of it";

/// A running job.
struct Running<'a> {
    root: &'a Rc<Root>,
    console: &'a Console,
    job: JobId,
    placement: Arc<Placement>,
    /// Node of each share of the placement.
    nodes: Vec<NodeId>,
    /// Program of each share.
    parts: Vec<u32>,
    /// Nodes that still have something of one of the job's programs.
    busy: BTreeSet<(NodeId, u32)>,
    rendezvous: Rendezvous,
    /// A rank ended the job with this exit code.
    aborted: Option<u8>,
    ends: Ends,
    output: Presenter,
    windows: Windows,
    errors: Vec<String>,
    /// What failed on nodes: the same on many is said once.
    failures: Told,
    /// hpcrt itself failed or the job's time is over.
    failed: bool,
    /// The job is being ended; nodes that are not done by then are given up.
    give_up: Option<Instant>,
    interrupts: u32,
    last_loaded: Option<Instant>,
    last_exit: Option<Instant>,
    endings: Endings,
    card: Rc<Card>,
    /// The ranks wait until a debugger has seen their processes.
    held: bool,
}

/// Runs a job on the nodes that are up and waits until nothing of it is left.
///
/// # Errors
/// The ranks cannot be placed, or the output cannot be written.
pub async fn run(root: &Rc<Root>, hosts: &[Host], job: &JobSpec, needs: Needs, console: &Console) -> Result<Outcome> {
    let up: Vec<_> = root.up().into_iter().filter(|(_, at)| *at < hosts.len()).collect();
    let up_hosts: Vec<Host> = up.iter().map(|(_, at)| hosts[*at].clone()).collect();
    let Blocks { placement, parts } = Blocks::new(&up_hosts, hosts, &job.blocks)?;
    let placement = Arc::new(placement);
    for (part, mpi) in &needs.mpi {
        mpi.check(as_path(&job.blocks[*part as usize].program), placement.ranks())?;
    }
    let nodes = nodes_of(&placement, &up, hosts);
    // Whatever can fail comes before the job exists.
    let interrupted = async {
        let signal = console.ended_by().await;
        Err(Error::new("use the output directory", format!("ended by {}", signal.as_str())))
    };
    let output = Presenter::new(job, &placement, console).or(interrupted).await?;
    let front = console.front.take().map(Front::new).transpose()?;
    let main = &job.blocks[0];
    let card = Rc::new(Card {
        program: main.argv.first().map_or_else(String::new, |word| String::from_utf8_lossy(word).into_owned()),
        ranks: placement.ranks(),
        lenders: job.memory.iter().flat_map(|wish| wish.servers.iter().map(|server| server.name.clone())).collect(),
        path: main.program.clone(),
        nodes: nodes.iter().copied().zip(placement.shares.iter().map(|s| s.ranks.clone())).collect(),
        view: !needs.roots.is_empty(),
        begun: Instant::now(),
        ordered: root.now(),
        progress: RefCell::default(),
    });
    let (id, news) = root.new_job(Rc::clone(&card));
    let places = places(&placement, &nodes, job.binding);
    let held = mpir::is_debugged();
    let wiring = rendezvous::wiring(&placement, &nodes, root.is_local(), front.is_some());
    let mut memory = job.memory.clone();
    let mut forward = job.forward.clone();
    // Nobody has both.
    let lending = match (&mut memory, &mut forward) {
        (Some(wish), _) => Some(Lending::memory(root, id, wish, &news, console).await),
        (None, Some(wish)) => Some(Lending::files(root, id, wish, &news, console).await),
        (None, None) => None,
    };
    let lending = lending.transpose().inspect_err(|_| root.forget(id))?;
    let launch = |(part, block): (u32, &Block)| Launch {
        job: id,
        part,
        program: block.program.clone(),
        argv: block.argv.clone(),
        env: block.env.clone(),
        cwd: block.cwd.clone(),
        cwd_named: block.cwd_named,
        umask: block.umask,
        size: placement.ranks(),
        places: places.iter().zip(&parts).filter(|(_, of)| **of == part).map(|(place, _)| place.clone()).collect(),
        load: needs.load,
        bytes: needs.bytes,
        roots: needs.roots.clone(),
        view: job.view,
        stdin: job.stdin,
        memory: memory.as_ref().map(|wish| {
            let nonce = nonce();
            Borrow { key: root.key.hide(&nonce, &wish.key), nonce, ..wish.clone() }
        }),
        files: job.files.clone(),
        forward: forward.as_ref().map(|wish| {
            let nonce = nonce();
            Forward { key: root.key.hide(&nonce, &wish.key), nonce, ..wish.clone() }
        }),
        guests: false,
        hold: held,
        wiring: wiring.clone(),
        window: window::of(placement.shares.len()),
        aid: match needs.mpi.iter().find(|(of, _)| *of == part) {
            _ if placement.ranks() == 1 => Aid::None,
            Some((_, mpi)) => mpi.aid(),
            // Whatever it starts or loads later may be linked with Open MPI.
            None => Aid::Client,
        },
        mpi: placement.ranks() > 1 && needs.mpi.iter().any(|(of, _)| *of == part),
    };
    let launches: Vec<Launch> = (0..).zip(&job.blocks).map(launch).collect();
    let mut running = Running {
        root,
        console,
        job: id,
        busy: nodes.iter().copied().zip(parts.iter().copied()).collect(),
        parts,
        rendezvous: Rendezvous::new(root, id, &placement, &nodes, front),
        aborted: None,
        nodes,
        ends: Ends::new(placement.ranks(), job.keep_going),
        output,
        windows: Windows::new(placement.shares.len()),
        placement,
        errors: Vec::new(),
        failures: Told::new(),
        failed: false,
        give_up: None,
        interrupts: 0,
        last_loaded: None,
        last_exit: None,
        endings: Endings::default(),
        card,
        held,
    };
    let started = Instant::now();
    for launch in launches {
        root.order(Target::All, Order::Launch(Box::new(launch)), Vec::new()).await;
    }
    running.drive(job, &news).await;
    if !running.failed {
        running.rendezvous.finish().await;
    }
    if let Some(lending) = lending {
        lending.end(root).await;
    }
    if root.is_stopping() {
        running.fail("the session was stopped".to_owned());
    }
    root.forget(id);
    console.clear().await;
    running.show_rest().await;
    let ended = running.last_exit.unwrap_or_else(Instant::now);
    let loaded = running.last_loaded.unwrap_or(started);
    for error in &running.errors {
        console.say(error);
    }
    let limits = root.say_told(console, &running.endings.warnings, &running.failures);
    let code = match &running {
        Running { failed: true, .. } => EXIT_FAILED,
        // As a program that writes to a closed pipe.
        Running { output: Presenter { closed: true, .. }, .. } => 128 + Signal::SIGPIPE as u8,
        Running { aborted: Some(code), .. } => *code,
        _ => running.ends.exit_code(),
    };
    let untold = running.card.progress.borrow().writing.as_ref().is_some_and(|writing| writing.untold);
    let code = if untold && code == 0 {
        console.say("not all that a program wrote is there, and it ended without having been told");
        EXIT_FAILED
    } else {
        code
    };
    Ok(Outcome {
        code,
        placement: running.placement,
        ends: running.ends,
        loading: loaded - started,
        ran: ended.saturating_duration_since(loaded),
        cleanup: ended.elapsed(),
        received: running.endings.received,
        card: running.card,
        limits,
    })
}

/// The node behind each share.
fn nodes_of(placement: &Placement, up: &[(NodeId, usize)], hosts: &[Host]) -> Vec<NodeId> {
    let nodes: HashMap<&str, NodeId> = up.iter().map(|(node, at)| (hosts[*at].name.as_str(), *node)).collect();
    placement.shares.iter().map(|share| nodes.get(share.host.name.as_str()).copied().unwrap_or(0)).collect()
}

/// What each share is on its node: there the ranks of all programs are numbered through.
fn places(placement: &Placement, nodes: &[NodeId], bind: Binding) -> Vec<Place> {
    let mut locals = HashMap::<NodeId, u32>::new();
    let mut places = Vec::new();
    for (share, node) in placement.shares.iter().zip(nodes) {
        let (count, local) = (share.ranks.end - share.ranks.start, locals.entry(*node).or_default());
        places.push(Place { node: *node, first: share.ranks.start, count, local: *local, locals: 0, bind });
        *local += count;
    }
    places.iter_mut().for_each(|place| place.locals = locals[&place.node]);
    places
}

impl Running<'_> {
    async fn drive(&mut self, job: &JobSpec, news: &Receiver<News>) {
        let limit = job.timeout_ms.map(Duration::from_millis);
        let timeout = limit.map(|limit| Instant::now() + limit);
        let mut timed_out = false;
        let mut input = Input::new(job.stdin, self.console);
        // While the job was prepared nobody heard of the loss of its hosts.
        for node in BTreeSet::from_iter(self.nodes.clone()) {
            if let Some(error) = self.root.why_gone(node) {
                self.handle(News::Lost { node, error }, &mut input).await;
            }
        }
        while !self.busy.is_empty() {
            let wake = [self.give_up, timeout.filter(|_| !timed_out), self.output.wake(), self.rendezvous.wake()]
                .into_iter()
                .flatten()
                .min();
            let next = self.next(news, &mut input, wake).await;
            match next.unwrap_or_else(Next::Broken) {
                Next::News(news) => self.handle(news, &mut input).await,
                Next::Asked(ask) => self.rendezvous.handle_ask(ask).await,
                Next::Signal(signal) => self.signalled(signal).await,
                Next::Input(Err(error)) => {
                    self.fail(Error::new("read standard input", error).to_string());
                    self.end(FAILED_GRACE).await;
                }
                Next::Input(Ok(bytes)) => {
                    let readers = self.readers(job.stdin);
                    input.sent(&bytes, &readers);
                    let mut nodes: Vec<NodeId> = readers.into_iter().map(|(node, _)| node).collect();
                    nodes.dedup();
                    for node in nodes {
                        self.root.order(Target::Node(node), Order::Stdin { job: self.job }, bytes.clone()).await;
                    }
                }
                Next::Written if self.output.closed && self.give_up.is_none() => self.end(FAILED_GRACE).await,
                Next::Broken(error) => {
                    self.fail(error.to_string());
                    self.end(FAILED_GRACE).await;
                }
                Next::Time | Next::Written => {}
                Next::Closed => break,
            }
            let now = Instant::now();
            self.output.tick(now);
            // Ranks that write faster than our own output is read have to wait.
            while !self.output.is_full()
                && let Some((share, bytes)) = self.windows.poll_grant()
            {
                let (to, part) = (Target::Node(self.nodes[share]), self.parts[share]);
                self.root.order(to, Order::Taken { job: self.job, part, bytes }, Vec::new()).await;
            }
            self.rendezvous.handle_timeout().await;
            if timeout.is_some_and(|t| now >= t) && !timed_out {
                timed_out = true;
                let limit = limit.unwrap_or_default().as_secs_f64();
                self.fail(format!("the job did not end within its {limit} s"));
                self.end(STOPPED_GRACE).await;
            }
            if self.give_up.is_some_and(|t| now >= t) {
                let hosts: Vec<&str> = self.busy.iter().map(|(node, _)| self.root.host(*node)).collect();
                self.fail(format!(
                    "{} did not confirm in time that nothing of the job is left there",
                    super::fold::fold(&hosts)
                ));
                break;
            }
        }
    }

    async fn next(&mut self, news: &Receiver<News>, input: &mut Input, wake: Option<Instant>) -> Result<Next> {
        let hear = async { Ok(news.recv().await.map_or(Next::Closed, Next::News)) };
        let show = async {
            self.output.write().await?;
            Ok(Next::Written)
        };
        let signals = &self.console.signals;
        let signal = async {
            match signals.recv().await {
                Ok(signal) => Ok(Next::Signal(signal)),
                Err(_) => smol::future::pending().await,
            }
        };
        let type_in = async { Ok(Next::Input(input.read().await)) };
        let rendezvous = &mut self.rendezvous;
        let asked = async { Ok(Next::Asked(rendezvous.asked().await)) };
        let time = async {
            match wake {
                Some(at) => Timer::at(at).await,
                None => smol::future::pending().await,
            };
            Ok(Next::Time)
        };
        signal.or(time).or(hear).or(asked).or(type_in).or(show).await
    }

    /// Writes what is left; a reader that does not read holds up only as long as nobody wants an end.
    async fn show_rest(&mut self) {
        if self.failed {
            self.console.hurry();
        }
        let (console, mut shown) = (self.console, Ok(()));
        console.patiently(async { shown = self.output.finish().await }).await;
        if let Err(error) = shown {
            self.fail(error.to_string());
        }
    }

    async fn handle(&mut self, news: News, input: &mut Input) {
        match news {
            News::Output { rank, stream, packet } => {
                self.console.clear().await;
                self.output.bytes(rank, stream, &packet.body);
                if let Some(place) = self.placement.place(rank) {
                    self.windows.handle_output(place.host, packet.body.len());
                }
            }
            News::Exited(exits) => {
                self.last_exit = Some(Instant::now());
                self.card.progress.borrow_mut().ended += u32::try_from(exits.len()).unwrap_or(u32::MAX);
                let (mut end, told) = (false, self.is_ending());
                self.rendezvous.handle_gone(exits.iter().map(|exit| exit.rank)).await;
                for exit in exits {
                    self.card.progress.borrow_mut().pids.entry(exit.rank).or_default();
                    let how = match exit.status {
                        _ if exit.by_us && told => End::Stopped,
                        _ if exit.by_us => {
                            let node = self.placement.place(exit.rank).map(|place| self.nodes[place.host]);
                            self.failures.entry(DESERTED.to_owned()).or_default().extend(node);
                            End::Lost
                        }
                        Status::Code(code) => End::Exited(code),
                        Status::Signal(signal) => End::Killed(u8::try_from(signal).unwrap_or(u8::MAX)),
                    };
                    end |= self.ends.handle_end(exit.rank, how);
                }
                if end {
                    self.end(FAILED_GRACE).await;
                }
                self.release().await;
            }
            News::Failed { node, error } => {
                self.failed = true;
                self.failures.entry(error).or_default().insert(node);
                self.end(Duration::ZERO).await;
            }
            News::Done { part, node, warnings, received, facts } => {
                self.endings.add((self.root, &self.card), node, warnings, received, &facts);
                self.busy.remove(&(node, part));
                if !self.is_ending() {
                    self.done_untold(node, part).await;
                }
                // What it was sent last may have come after its readers were gone.
                input.taken(node, part);
            }
            News::StdinTaken { part, node } => input.taken(node, part),
            News::Open { .. } | News::Lent { .. } => {}
            News::Unlent { node, error } => {
                self.console.say(format_args!("{}: {error}", self.root.host(node)));
            }
            News::Loaded { node } => {
                self.last_loaded = Some(Instant::now());
                self.card.progress.borrow_mut().loaded.insert(node);
            }
            News::Pids(ranks) => {
                let known = ranks.into_iter().filter(|(rank, _)| *rank < self.card.ranks);
                self.card.progress.borrow_mut().pids.extend(known);
                self.release().await;
            }
            News::Lost { node, error } => {
                input.lost(node);
                let busy = self.busy.len();
                self.busy.retain(|(of, _)| *of != node);
                if self.busy.len() < busy {
                    self.lost(node, error).await;
                }
            }
            News::Collective { word, packet } => {
                if let Some(aborted) = self.rendezvous.handle_word(word, &packet.body).await {
                    self.abort(aborted).await;
                }
            }
        }
    }

    /// Shows the held ranks to the debugger once all are there, and lets them go.
    async fn release(&mut self) {
        if self.held && self.card.knows_pids() {
            self.held = false;
            self.card.show_debugger(self.root);
            self.pass_on(Signal::SIGCONT).await;
        }
    }

    /// A rank ends the job; what the others do then is no failure of theirs.
    async fn abort(&mut self, Aborted { rank, code, message }: Aborted) {
        if self.aborted.is_none() && !self.failed {
            self.aborted = Some(code);
            let host = self.placement.host_name(rank);
            let why = if message.is_empty() { String::new() } else { format!(": {message}") };
            self.errors.push(format!("rank {rank} on {host} aborted the job with code {code}{why}"));
        }
        self.end(FAILED_GRACE).await;
    }

    async fn lost(&mut self, node: NodeId, error: String) {
        let shares = self.placement.shares.iter().zip(&self.nodes);
        let ranks: Vec<u32> = shares.filter(|(_, n)| **n == node).flat_map(|(share, _)| share.ranks.clone()).collect();
        // It had not said that it is done: what it had yet to send of their output is lost.
        if ranks.iter().all(|rank| self.ends.has_ended(*rank)) {
            self.failed = true;
            self.errors.push(format!("{error}; what its ranks wrote last may be missing"));
        } else {
            self.errors.push(error);
        }
        self.lose(ranks).await;
    }

    /// Whether nodes were told to end what they have of the job.
    fn is_ending(&self) -> bool {
        self.give_up.is_some() || self.root.is_stopping()
    }

    /// A node is done that was not told to end: ranks that did not end by themselves it ended, since it heard nothing from here or from a
    /// node between.
    async fn done_untold(&mut self, node: NodeId, part: u32) {
        let shares = self.placement.shares.iter().zip(&self.nodes).zip(&self.parts);
        let own = shares.filter(|((_, n), p)| (**n, **p) == (node, part));
        let ranks: Vec<u32> = own.flat_map(|((share, _), _)| share.ranks.clone()).collect();
        if ranks.iter().any(|rank| !self.ends.has_ended(*rank)) {
            self.failures.entry(DESERTED.to_owned()).or_default().insert(node);
            self.lose(ranks).await;
        }
    }

    async fn lose(&mut self, ranks: Vec<u32>) {
        self.rendezvous.handle_gone(ranks.iter().copied()).await;
        let mut end = false;
        for rank in ranks {
            end |= self.ends.handle_end(rank, End::Lost);
            self.card.progress.borrow_mut().pids.entry(rank).or_default();
        }
        if end {
            self.end(FAILED_GRACE).await;
        }
        self.release().await;
    }

    /// A node has not yet what the program needs to start.
    fn is_loading(&self) -> bool {
        let loaded = &self.card.progress.borrow().loaded;
        self.card.view && self.busy.iter().any(|(node, _)| !loaded.contains(node))
    }

    /// The first interrupt goes to the ranks, if all nodes may have some; the second ends them.
    async fn signalled(&mut self, signal: Signal) {
        if ends(signal) && self.is_loading() && !self.is_ending() {
            self.interrupts += 1;
            self.fail(format!("ended by {} while files of the program were on their way", signal.as_str()));
            return self.end(STOPPED_GRACE).await;
        }
        if ends(signal) && signal != Signal::SIGQUIT {
            self.interrupts += 1;
            if self.interrupts > 1 {
                self.fail(format!("ended by a second {}", signal.as_str()));
                return self.end(Duration::ZERO).await;
            }
            if signal == Signal::SIGINT {
                self.console.say("passed the interrupt on; interrupt again to end the job");
            }
        }
        self.pass_on(signal).await;
        if signal == Signal::SIGTSTP && self.console.own {
            // The order must leave before this process stops.
            Timer::after(Duration::from_millis(50)).await;
            process::stop_here();
            self.pass_on(Signal::SIGCONT).await;
        }
    }

    async fn pass_on(&self, signal: Signal) {
        self.root.order(Target::All, Order::Signal { job: self.job, signal: signal as i32 }, Vec::new()).await;
    }

    fn fail(&mut self, error: String) {
        self.failed = true;
        self.console.hurry();
        if !self.errors.contains(&error) {
            self.errors.push(error);
        }
    }

    async fn end(&mut self, grace: Duration) {
        let begins = !std::mem::replace(&mut self.card.progress.borrow_mut().ending, true);
        if begins && mpir::is_debugged() {
            mpir::aborting(self.errors.first().map_or("a rank failed, or the job was interrupted", |error| error));
        }
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        let give_up = Instant::now() + grace + KILLED + Duration::from_secs(2);
        let give_up = self.give_up.map_or(give_up, |before| before.min(give_up));
        self.give_up = Some(give_up);
        // Of who does not take the order it is not waited for more.
        let order = self.root.order(Target::All, Order::End { job: self.job, grace_ms }, Vec::new());
        order.or(async { _ = Timer::at(give_up).await }).await;
    }

    /// Where a rank reads standard input: nodes, ascending, and their programs.
    fn readers(&self, stdin: StdinTo) -> Vec<(NodeId, u32)> {
        let first = (self.nodes[0], self.parts[0]);
        let reads = |program: &(NodeId, u32)| match stdin {
            StdinTo::All => true,
            StdinTo::First => *program == first,
            StdinTo::None => false,
        };
        self.busy.iter().copied().filter(reads).collect()
    }
}
