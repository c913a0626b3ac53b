//! A job whose ranks another launcher starts: shows every node its files and lets the ranks in, which come as guests
//! ([`super::guest`]); streams and exit codes are the other launcher's.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_channel::Receiver;
use smol::future::FutureExt;
use smol::{Async, Timer};

use super::card::{Card, Endings};
use super::console::Console;
use super::exit::Ends;
use super::foreign::Foreign;
use super::guest;
use super::hostlist::Host;
use super::keeper::KILLED;
use super::launcher;
use super::loading::Needs;
use super::placement::Placement;
use super::root::{News, Root, Told};
use super::run::Outcome;
use crate::error::EXIT_FAILED;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::collective::Wiring;
use crate::net::wire::control::{Aid, Binding, JobId, Launch, NodeId, Order, Place, StdinTo, Target};
use crate::net::wire::session::{JobSpec, SessionTell};
use crate::{Error, Result, error::Context};

/// Who starts the ranks.
#[derive(Debug, Clone, Copy)]
pub enum Ranks<'a> {
    /// hpcrt.
    Ours,
    /// This command, which is run here when every node is ready.
    By(&'a Foreign),
    /// A command that another process runs when it hears that every node is ready.
    Elsewhere(Elsewhere<'a>),
    /// Who started hpcrt: so many come on each node.
    Coming(&'a [u32]),
}

/// Who runs a launcher in a session: the command that asked for the job.
#[derive(Debug, Clone, Copy)]
pub struct Elsewhere<'a> {
    pub command: &'a Async<Seqpacket>,
    /// The launcher's exit code, when it has ended.
    pub over: &'a Receiver<u8>,
}

/// See the module.
struct Hosting<'a> {
    root: &'a Rc<Root>,
    console: &'a Console,
    job: JobId,
    news: Receiver<News>,
    /// Nodes that do not let guests in yet, and those that still have something of the job.
    closed: BTreeSet<NodeId>,
    busy: BTreeSet<NodeId>,
    /// What failed, by host.
    errors: Told,
    endings: Endings,
    card: Rc<Card>,
}

/// Runs a job that others start, to its end.
///
/// # Errors
/// A node cannot show the files, or the launcher cannot be started.
pub async fn run(
    root: &Rc<Root>,
    hosts: &[Host],
    job: &JobSpec,
    needs: Needs,
    console: &Console,
    ranks: Ranks<'_>,
) -> Result<Outcome> {
    if job.memory.is_some() {
        let error = Error::usage("use --memory", "ranks that another launcher starts cannot borrow memory");
        return Err(error.remedy("have hpcrt start them"));
    }
    if job.files.is_some() {
        let error = Error::usage("use --async-io", "that is not built for ranks that another launcher starts");
        return Err(error.remedy("have hpcrt start them"));
    }
    let main = &job.blocks[0];
    let up = root.up();
    let counts: Vec<u32> = match ranks {
        Ranks::Coming(counts) => up.iter().map(|(_, at)| counts[*at]).collect(),
        _ => vec![0; up.len()],
    };
    let up_hosts: Vec<Host> = up.iter().map(|(_, at)| Host { max_slots: None, ..hosts[*at].clone() }).collect();
    let placement = Arc::new(Placement::new(up_hosts, None, Some(1))?);
    let card = Rc::new(Card {
        program: main.argv.first().map_or_else(String::new, |word| String::from_utf8_lossy(word).into_owned()),
        ranks: 0,
        lenders: Vec::new(),
        path: main.program.clone(),
        nodes: up.iter().map(|(node, _)| (*node, 0..0)).collect(),
        view: !needs.roots.is_empty(),
        begun: Instant::now(),
        ordered: root.now(),
        progress: RefCell::default(),
    });
    let (id, news) = root.new_job(Rc::clone(&card));
    let place = |((node, _), count): (&(NodeId, usize), &u32)| Place {
        node: *node,
        first: 0,
        count: *count,
        local: 0,
        locals: *count,
        bind: Binding::None,
    };
    let launch = Launch {
        job: id,
        part: 0,
        program: main.program.clone(),
        argv: main.argv.clone(),
        env: main.env.clone(),
        cwd: main.cwd.clone(),
        cwd_named: main.cwd_named,
        umask: main.umask,
        size: 0,
        places: up.iter().zip(&counts).map(place).collect(),
        load: needs.load,
        bytes: needs.bytes,
        roots: needs.roots,
        view: job.view,
        stdin: StdinTo::None,
        memory: None,
        files: None,
        forward: None,
        guests: true,
        hold: false,
        wiring: Wiring::default(),
        window: 0,
        aid: Aid::None,
        mpi: false,
    };
    let nodes: BTreeSet<NodeId> = up.iter().map(|(node, _)| *node).collect();
    let mut hosting = Hosting {
        root,
        console,
        job: id,
        news,
        closed: nodes.clone(),
        busy: nodes,
        errors: Told::new(),
        endings: Endings::default(),
        card,
    };
    let started = Instant::now();
    root.order(Target::All, Order::Launch(Box::new(launch)), Vec::new()).await;
    let ready = hosting.open().await;
    let (opened, code) = (
        Instant::now(),
        match (ready, ranks) {
            (Err(error), _) => Err(error),
            (Ok(()), Ranks::By(launcher)) => hosting.launcher(launcher, job).await,
            (Ok(()), Ranks::Elsewhere(command)) => hosting.elsewhere(command).await,
            (Ok(()), _) => hosting.all_done().await.map(|()| 0),
        },
    );
    let ended = Instant::now();
    hosting.close().await;
    root.forget(id);
    console.clear().await;
    let limits = root.say_told(console, &hosting.endings.warnings, &hosting.errors);
    let code = code?;
    Ok(Outcome {
        code: if hosting.errors.is_empty() { code } else { EXIT_FAILED },
        placement,
        ends: Ends::new(0, job.keep_going),
        loading: opened - started,
        ran: ended - opened,
        cleanup: ended.elapsed(),
        received: hosting.endings.received,
        card: hosting.card,
        limits,
    })
}

impl Hosting<'_> {
    fn hear(&mut self, news: News) {
        match news {
            News::Open { node } => drop(self.closed.remove(&node)),
            News::Loaded { node } => drop(self.card.progress.borrow_mut().loaded.insert(node)),
            News::Failed { node, error } | News::Lost { node, error } => {
                self.errors.entry(error).or_default().insert(node);
                self.closed.remove(&node);
                if self.root.up().iter().all(|(up, _)| *up != node) {
                    self.busy.remove(&node);
                }
            }
            News::Done { node, warnings, received, facts, .. } => {
                self.endings.add((self.root, &self.card), node, warnings, received, &facts);
                self.closed.remove(&node);
                self.busy.remove(&node);
            }
            News::Output { .. }
            | News::Exited(_)
            | News::StdinTaken { .. }
            | News::Collective { .. }
            | News::Lent { .. }
            | News::Unlent { .. }
            | News::Pids(_) => {}
        }
    }

    /// Hears what the nodes say until something holds, a node fails, or a signal asks for the end.
    async fn until(&mut self, holds: impl Fn(&Self) -> bool) -> Result<()> {
        while !holds(self) {
            if !self.errors.is_empty() {
                return Err(Error::new("run the job", "a host failed"));
            }
            let (news, console) = (self.news.clone(), self.console);
            let signal = async { Err(console.ended_by().await) };
            match (async { Ok(news.recv().await) }).or(signal).await {
                Ok(Ok(news)) => self.hear(news),
                Ok(Err(_)) => return Err(Error::new("run the job", "the session ended")),
                Err(signal) => return Err(Error::new("run the job", format!("ended by {}", signal.as_str()))),
            }
        }
        Ok(())
    }

    async fn open(&mut self) -> Result<()> {
        self.until(|this| this.closed.is_empty()).await?;
        if self.errors.is_empty() { Ok(()) } else { Err(Error::new("run the job", "a host failed")) }
    }

    async fn all_done(&mut self) -> Result<()> {
        self.until(|this| this.busy.is_empty()).await
    }

    /// Runs the launcher; its exit code.
    async fn launcher(&mut self, launcher: &Foreign, job: &JobSpec) -> Result<u8> {
        self.console.clear().await;
        let words = launcher.with(&guest::prefix(&guest::name(&self.root.session, self.job))?);
        let (news, signals) = (self.news.clone(), self.console.signals.clone());
        let signal = async || match signals.recv().await {
            Ok(signal) => signal,
            Err(_) => smol::future::pending().await,
        };
        let failed = async || {
            loop {
                match news.recv().await {
                    Ok(news) => self.hear(news),
                    Err(_) => smol::future::pending().await,
                }
                if !self.errors.is_empty() {
                    return;
                }
            }
        };
        launcher::run(&words, job, signal, failed).await
    }

    /// Has somebody else run the launcher; its exit code.
    async fn elsewhere(&mut self, Elsewhere { command, over }: Elsewhere<'_>) -> Result<u8> {
        let job = guest::name(&self.root.session, self.job);
        command.get_ref().send(&SessionTell::Open { job }, &[]).op("tell who runs the launcher")?;
        let ended = async { over.recv().await.op("hear who runs the launcher") };
        ended.or(async { self.until(|_| false).await.map(|()| EXIT_FAILED) }).await
    }

    /// Has the nodes end what is there, and waits until nothing is.
    async fn close(&mut self) {
        self.card.progress.borrow_mut().ending = true;
        self.root.order(Target::All, Order::End { job: self.job, grace_ms: 0 }, Vec::new()).await;
        let news = self.news.clone();
        let gone = async {
            while !self.busy.is_empty()
                && let Ok(news) = news.recv().await
            {
                self.hear(news);
            }
        };
        let late = async {
            Timer::after(KILLED + Duration::from_secs(2)).await;
        };
        gone.or(late).await;
        for node in std::mem::take(&mut self.busy) {
            let error = "it did not confirm in time that nothing of the job is left there".to_owned();
            self.errors.entry(error).or_default().insert(node);
        }
    }
}
