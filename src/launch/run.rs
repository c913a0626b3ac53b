//! One job, seen from the front end: places its ranks, relays its streams, decides when it is over and with which exit code.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_channel::Receiver;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use smol::future::FutureExt;
use smol::io::{AsyncReadExt, AsyncWriteExt};
use smol::{Async, Timer, Unblock};

use super::exit::{End, Ends};
use super::hostlist::Host;
use super::keeper::KILLED;
use super::output::{Output, PROMPT_DELAY, Style};
use super::placement::Placement;
use super::root::{News, Root};
use crate::error::{EXIT_FAILED, say};
use crate::net::wire::control::{Binding, JobId, Launch, NodeId, Order, Place, Status, StdinTo, Stream, Target};
use crate::{Result, error::Context};

/// SIGTERM comes this long before SIGKILL when a rank's failure ends the others.
const FAILED_GRACE: Duration = Duration::from_millis(500);
/// The same when the user ends the job or its time is over.
const STOPPED_GRACE: Duration = Duration::from_secs(2);

/// What to run, and how its output is shown.
#[derive(Debug, Clone)]
pub struct Job {
    pub hosts: Vec<Host>,
    pub ranks: Option<u32>,
    pub per_host: Option<u32>,
    /// Absolute path.
    pub program: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    pub cwd: Vec<u8>,
    pub stdin: StdinTo,
    pub binding: Binding,
    pub label: bool,
    pub gather: bool,
    pub output: Option<std::path::PathBuf>,
    pub timeout: Option<Duration>,
    pub keep_going: bool,
}

/// How a job went.
#[derive(Debug)]
pub struct Outcome {
    pub code: u8,
    pub placement: Arc<Placement>,
    pub ends: Ends,
    /// From the launch order to the last rank's end, and from there until nothing was left.
    pub ran: Duration,
    pub cleanup: Duration,
}

/// The signals that are passed on to the ranks.
const FORWARDED: [Signal; 9] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGTSTP,
    Signal::SIGCONT,
    Signal::SIGWINCH,
];

/// Signals to this process, from now on read instead of acted upon; before any thread exists.
///
/// # Errors
/// No descriptor is free.
pub fn catch_signals() -> Result<SignalFd> {
    let set: SigSet = FORWARDED.into_iter().collect();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&set), None).op("block signals")?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).op("watch signals")
}

/// What the loop waits for.
enum Next {
    News(News),
    Signal(Signal),
    Input(io::Result<Vec<u8>>),
    Time,
    Closed,
}

/// A running job.
struct Running<'a> {
    root: &'a Rc<Root>,
    job: JobId,
    placement: Arc<Placement>,
    /// Node of each share of the placement.
    nodes: Vec<NodeId>,
    /// Nodes that still have something of the job.
    busy: BTreeSet<NodeId>,
    ends: Ends,
    output: Presenter,
    errors: Vec<String>,
    /// hpcrt itself failed or the job's time is over.
    failed: bool,
    /// The job is being ended; nodes that are not done by then are given up.
    give_up: Option<Instant>,
    interrupts: u32,
    last_exit: Option<Instant>,
}

/// Runs a job on the nodes that are up and waits until nothing of it is left.
///
/// # Errors
/// The ranks cannot be placed, or the output cannot be written.
pub async fn run(root: &Rc<Root>, job: &Job, signals: &Async<SignalFd>) -> Result<Outcome> {
    let up = root.up();
    let hosts: Vec<Host> = up.iter().map(|(_, at)| job.hosts[*at].clone()).collect();
    let placement = Arc::new(Placement::new(hosts, job.ranks, job.per_host)?);
    let nodes = nodes_of(&placement, &up, job);
    let (id, news) = root.new_job();
    let places = placement.shares.iter().zip(&nodes).map(|(share, node)| Place {
        node: *node,
        first: share.ranks.start,
        count: share.ranks.end - share.ranks.start,
        bind: job.binding,
    });
    let launch = Launch {
        job: id,
        program: job.program.clone(),
        argv: job.argv.clone(),
        env: job.env.clone(),
        cwd: job.cwd.clone(),
        size: placement.ranks(),
        places: places.collect(),
        roots: Vec::new(),
        stdin: job.stdin,
    };
    let mut running = Running {
        root,
        job: id,
        busy: nodes.iter().copied().collect(),
        nodes,
        ends: Ends::new(placement.ranks(), job.keep_going),
        output: Presenter::new(job, &placement)?,
        placement,
        errors: Vec::new(),
        failed: false,
        give_up: None,
        interrupts: 0,
        last_exit: None,
    };
    let started = Instant::now();
    root.order(Target::All, Order::Launch(Box::new(launch)), Vec::new()).await;
    running.drive(job, &news, signals).await?;
    root.forget(id);
    running.output.finish().await?;
    let ended = running.last_exit.unwrap_or_else(Instant::now);
    for error in &running.errors {
        say(error);
    }
    let code = if running.failed { EXIT_FAILED } else { running.ends.exit_code() };
    Ok(Outcome {
        code,
        placement: running.placement,
        ends: running.ends,
        ran: ended.saturating_duration_since(started),
        cleanup: ended.elapsed(),
    })
}

/// The node behind each share: shares keep the order of the hosts, but hosts without ranks have none.
fn nodes_of(placement: &Placement, up: &[(NodeId, usize)], job: &Job) -> Vec<NodeId> {
    let mut candidates = up.iter();
    let node = |share: &super::placement::Share| {
        candidates.find(|(_, at)| job.hosts[*at] == share.host).map_or(0, |(node, _)| *node)
    };
    placement.shares.iter().map(node).collect()
}

impl Running<'_> {
    async fn drive(&mut self, job: &Job, news: &Receiver<News>, signals: &Async<SignalFd>) -> Result<()> {
        let timeout = job.timeout.map(|limit| Instant::now() + limit);
        let mut timed_out = false;
        let mut input = Input::new(job.stdin);
        while !self.busy.is_empty() {
            let wake = [self.give_up, timeout.filter(|_| !timed_out), self.output.wake()].into_iter().flatten().min();
            match self.next(news, signals, &mut input, wake).await? {
                Next::News(news) => self.handle(news, &mut input).await,
                Next::Signal(signal) => self.signalled(signal).await,
                Next::Input(bytes) => {
                    let bytes = bytes.unwrap_or_default();
                    let readers = self.readers(job.stdin);
                    input.sent(&bytes, &readers);
                    for node in readers {
                        self.root.order(Target::Node(node), Order::Stdin { job: self.job }, bytes.clone()).await;
                    }
                }
                Next::Time => {}
                Next::Closed => break,
            }
            let now = Instant::now();
            self.output.tick(now).await?;
            if timeout.is_some_and(|t| now >= t) && !timed_out {
                timed_out = true;
                let limit = job.timeout.unwrap_or_default().as_secs_f64();
                self.fail(format!("the job did not end within its {limit} s"));
                self.end(STOPPED_GRACE).await;
            }
            if self.give_up.is_some_and(|t| now >= t) {
                let hosts: Vec<&str> = self.busy.iter().map(|n| self.root.host(*n)).collect();
                self.fail(format!(
                    "{} did not confirm in time that nothing of the job is left there",
                    super::fold::fold(&hosts)
                ));
                break;
            }
        }
        Ok(())
    }

    async fn next(
        &self,
        news: &Receiver<News>,
        signals: &Async<SignalFd>,
        input: &mut Input,
        wake: Option<Instant>,
    ) -> Result<Next> {
        let hear = async { Ok(news.recv().await.map_or(Next::Closed, Next::News)) };
        let signal = async {
            let got = signals
                .read_with(|s| s.read_signal().map_err(io::Error::from)?.ok_or(io::ErrorKind::WouldBlock.into()))
                .await;
            let number = i32::try_from(got.op("read a signal")?.ssi_signo).unwrap_or(0);
            Ok(Next::Signal(Signal::try_from(number).op("read a signal")?))
        };
        let type_in = async { Ok(Next::Input(input.read().await)) };
        let time = async {
            match wake {
                Some(at) => Timer::at(at).await,
                None => smol::future::pending().await,
            };
            Ok(Next::Time)
        };
        hear.or(signal).or(time).or(type_in).await
    }

    async fn handle(&mut self, news: News, input: &mut Input) {
        match news {
            News::Output { rank, stream, packet } => self.output.bytes(rank, stream, &packet.body),
            News::Exited(exits) => {
                self.last_exit = Some(Instant::now());
                let mut end = false;
                for exit in exits {
                    let how = match exit.status {
                        _ if exit.by_us => End::Stopped,
                        Status::Code(code) => End::Exited(code),
                        Status::Signal(signal) => End::Killed(u8::try_from(signal).unwrap_or(u8::MAX)),
                    };
                    end |= self.ends.handle_end(exit.rank, how);
                }
                if end {
                    self.end(FAILED_GRACE).await;
                }
            }
            News::Failed { error } => {
                self.fail(error);
                self.end(Duration::ZERO).await;
            }
            News::Done { node, warnings } => {
                warnings.into_iter().for_each(say);
                self.busy.remove(&node);
            }
            News::StdinTaken { node } => input.taken(node),
            News::Loaded { .. } => {}
            News::Lost { node, error } => {
                input.taken(node);
                if self.busy.remove(&node) {
                    self.lost(node, error).await;
                }
            }
        }
    }

    async fn lost(&mut self, node: NodeId, error: String) {
        self.errors.push(error);
        let shares = self.placement.shares.iter().zip(&self.nodes);
        let ranks: Vec<u32> = shares.filter(|(_, n)| **n == node).flat_map(|(share, _)| share.ranks.clone()).collect();
        let mut end = false;
        for rank in ranks {
            end |= self.ends.handle_end(rank, End::Lost);
        }
        if end {
            self.end(FAILED_GRACE).await;
        }
    }

    /// The first interrupt goes to the ranks; the second ends them.
    async fn signalled(&mut self, signal: Signal) {
        if matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP) {
            self.interrupts += 1;
            if self.interrupts > 1 {
                self.fail(format!("ended by a second {}", signal.as_str()));
                return self.end(Duration::ZERO).await;
            }
            if signal == Signal::SIGINT {
                say("passed the interrupt on; interrupt again to end the job");
            }
        }
        self.root.order(Target::All, Order::Signal { job: self.job, signal: signal as i32 }, Vec::new()).await;
    }

    fn fail(&mut self, error: String) {
        self.failed = true;
        if !self.errors.contains(&error) {
            self.errors.push(error);
        }
    }

    async fn end(&mut self, grace: Duration) {
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        self.root.order(Target::All, Order::End { job: self.job, grace_ms }, Vec::new()).await;
        let give_up = Instant::now() + grace + KILLED + Duration::from_secs(2);
        self.give_up = Some(self.give_up.map_or(give_up, |g| g.min(give_up)));
    }

    /// Nodes that have a rank that reads standard input.
    fn readers(&self, stdin: StdinTo) -> Vec<NodeId> {
        let nodes = match stdin {
            StdinTo::All => &self.nodes[..],
            StdinTo::First => &self.nodes[..1],
            StdinTo::None => &[],
        };
        nodes.iter().copied().filter(|n| self.busy.contains(n)).collect()
    }
}

/// Standard input on its way to the ranks: one block at a time, the next when every reader took the last.
struct Input {
    from: Option<Unblock<io::Stdin>>,
    waiting: BTreeSet<NodeId>,
}

impl Input {
    fn new(to: StdinTo) -> Input {
        let stdin = io::stdin();
        // Reading a terminal from the background would stop us.
        let background = stdin.is_terminal()
            && rustix::termios::tcgetpgrp(&stdin).is_ok_and(|group| group != rustix::process::getpgrp());
        let reads = to != StdinTo::None && !background;
        Input { from: reads.then(|| Unblock::with_capacity(64 << 10, stdin)), waiting: BTreeSet::new() }
    }

    /// The next block; empty at the end. Safe to cancel: what was read stays in the buffer of `from`.
    async fn read(&mut self) -> io::Result<Vec<u8>> {
        let Some(from) = self.from.as_mut().filter(|_| self.waiting.is_empty()) else {
            return smol::future::pending().await;
        };
        let mut bytes = vec![0; 64 << 10];
        let got = from.read(&mut bytes).await?;
        bytes.truncate(got);
        Ok(bytes)
    }

    fn sent(&mut self, bytes: &[u8], readers: &[NodeId]) {
        if bytes.is_empty() || readers.is_empty() {
            self.from = None;
        } else {
            self.waiting.extend(readers);
        }
    }

    fn taken(&mut self, node: NodeId) {
        self.waiting.remove(&node);
    }
}

/// Shows what ranks write: on our own streams, or in a file for each.
struct Presenter {
    output: Output,
    out: Unblock<io::Stdout>,
    err: Unblock<io::Stderr>,
    files: Option<super::output_files::OutputFiles>,
}

impl Presenter {
    fn new(job: &Job, placement: &Arc<Placement>) -> Result<Presenter> {
        const GATHERED: usize = 256 << 20;
        let (out, err) = (io::stdout(), io::stderr());
        let style = match job {
            Job { gather: true, .. } => Style::Gathered { memory: GATHERED },
            Job { label: true, .. } => Style::Labelled,
            _ => Style::Plain { prompt: out.is_terminal().then_some(PROMPT_DELAY) },
        };
        let same = out.is_terminal() && err.is_terminal();
        let files = match &job.output {
            Some(directory) => Some(super::output_files::OutputFiles::create(directory, placement.ranks())?),
            None => None,
        };
        let output = Output::new(style, Arc::clone(placement), same);
        Ok(Presenter { output, out: Unblock::new(out), err: Unblock::new(err), files })
    }

    fn bytes(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        match &mut self.files {
            Some(files) => files.write(rank, stream, bytes),
            None => self.output.handle_bytes(rank, stream, bytes, Instant::now()),
        }
    }

    fn wake(&self) -> Option<Instant> {
        self.output.poll_timeout()
    }

    async fn tick(&mut self, now: Instant) -> Result<()> {
        self.output.handle_timeout(now);
        self.write().await
    }

    async fn write(&mut self) -> Result<()> {
        let mut wrote = false;
        loop {
            let (out, err) = (self.output.poll_output(Stream::Out), self.output.poll_output(Stream::Err));
            if !out.is_empty() {
                let count = self.out.write(out).await.op("write standard output")?;
                self.output.consume(Stream::Out, count);
            } else if !err.is_empty() {
                let count = self.err.write(err).await.op("write standard error")?;
                self.output.consume(Stream::Err, count);
            } else {
                break;
            }
            wrote = true;
        }
        if wrote {
            self.out.flush().await.op("write standard output")?;
            self.err.flush().await.op("write standard error")?;
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<()> {
        self.output.handle_finish();
        self.write().await?;
        self.files.take().map_or(Ok(()), super::output_files::OutputFiles::finish)
    }
}
