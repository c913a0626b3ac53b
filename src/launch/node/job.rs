//! A node's part of a job: its ranks' standard streams, their ends, and the conversation with the job's keeper.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::rc::Rc;
use std::sync::PoisonError;
use std::time::Duration;

use async_channel::{Receiver, Sender, bounded};
use rustix::pipe::PipeFlags;
use smol::future::FutureExt;
use smol::io::AsyncWriteExt;
use smol::{Async, Timer};

use super::Node;
use super::door;
use super::files::Files;
use super::guests::Inside;
use super::members::Members;
use super::memory::Memory;
use super::replica::Replica;
use super::singletons;
use super::streams::Streams;
use super::versions::Images;
use super::view::View;
use crate::launch::window::Credit;
use crate::launch::{allocation, mpi, placement, pmi};
use crate::loader::view::{Closing, Counts};
use crate::net::link::Packet;
use crate::net::seqpacket::{BYTES_MAX, FDS_MAX, Seqpacket};
use crate::net::wire::control::{self, Aid, Binding, Exit, Launch, Place, Report, StdinTo, Stream};
use crate::net::wire::facts::{JobFacts, JobTimes, Writing};
use crate::net::wire::keeper::{Ask, Tell};
use crate::net::wire::record::FileId;
use crate::sys::boot::Stage;
use crate::sys::plan::MEMBER_FD;
use crate::sys::process;
use crate::sys::program::Program;
use crate::{Error, Result, error::Context};

/// See the module.
pub(super) struct Job {
    pub(super) node: Rc<Node>,
    pub(super) launch: Launch,
    pub(super) place: Place,
    /// `None` where others start the ranks.
    members: Option<Rc<Members>>,
    keeper: Async<Seqpacket>,
    /// Standard input of the ranks that read it; `None` after its end.
    stdin: RefCell<Option<Vec<Sender<Vec<u8>>>>>,
    /// The other ends, by rank, until the ranks are spawned.
    readers: RefCell<HashMap<u32, Receiver<Vec<u8>>>>,
    streams: Streams,
    /// Of their output.
    credit: Credit,
    /// No process of the job is left.
    empty: Cell<bool>,
    pub(super) warnings: RefCell<Vec<String>>,
    pub(super) view: RefCell<Option<Rc<View>>>,
    /// What it was shown when it began.
    images: RefCell<Option<Rc<Images>>>,
    /// What the view had counted when the job began to look into it.
    pub(super) before: Cell<Counts>,
    /// The keeper's process, as soon as it may look into the view.
    looks: Cell<Option<u32>>,
    /// The job's processes are being killed.
    closing: RefCell<Option<Closing>>,
    /// Closed when the job is to end, started or not.
    pub(super) abort: (Sender<()>, Receiver<()>),
    /// Ranks were asked for.
    pub(super) started: Cell<bool>,
    /// A rank could not become the program.
    start_failed: Cell<bool>,
    over: Cell<bool>,
    /// How guests come to the files.
    pub(super) inside: RefCell<Inside>,
    pub(super) times: Cell<JobTimes>,
    /// Ranks that have not ended.
    pub(super) running: Cell<u32>,
    pub(super) memory: RefCell<Option<Memory>>,
    files: RefCell<Option<Files>>,
    pub(super) written: RefCell<Option<Writing>>,
}

impl Job {
    /// Starts this node's ranks, if it has any. What fails is reported.
    pub(super) async fn start(node: &Rc<Node>, launch: Launch) -> Option<Rc<Job>> {
        let place = launch.places.iter().find(|p| p.node == node.id)?.clone();
        let (id, part, ranks) = (launch.job, launch.part, place.count);
        match Job::hand_over(node, launch, place) {
            Ok(job) => {
                let work = Rc::clone(&job);
                node.tasks.spawn(async move { work.run().await }).detach();
                Some(job)
            }
            Err(error) => {
                let error = error.to_string();
                node.report(&Report::Failed { job: id, node: node.id, error }).await;
                node.report(&Report::Done {
                    job: id,
                    part,
                    node: node.id,
                    warnings: Vec::new(),
                    received: node.received(),
                    facts: JobFacts { job: id, told: node.clock.now(), ..JobFacts::default() },
                })
                .await;
                node.over(id, ranks);
                None
            }
        }
    }

    fn hand_over(node: &Rc<Node>, mut launch: Launch, place: Place) -> Result<Rc<Job>> {
        let memory = Memory::open(node, &mut launch, &place)?;
        let files = Files::open(node, &mut launch, place.locals)?;
        let members = node.members_of(launch.job);
        let resident = memory.as_ref().and_then(Memory::resident).unwrap_or_default();
        let plan = program(node, &launch, &place, resident).write().op("write the launch plan")?;
        let (ours, theirs) = Seqpacket::pair().op("start the keeper")?;
        node.keep(&Ask::Job { job: launch.job }, &theirs, &plan).map_err(|e| unheard("start the keeper", e))?;
        // Made before the first bytes can come.
        let reads = |rank: &u32| match launch.stdin {
            StdinTo::All => true,
            StdinTo::First => *rank == 0,
            StdinTo::None => false,
        };
        let ranks = (place.first..place.first + place.count).filter(reads);
        let (mut stdin, mut readers) = (Vec::new(), HashMap::new());
        for rank in ranks {
            let (sender, bytes) = bounded(1);
            stdin.push(sender);
            readers.insert(rank, bytes);
        }
        let window = launch.window;
        Ok(Rc::new(Job {
            node: Rc::clone(node),
            launch,
            place,
            members,
            keeper: Async::new(ours).op("start the keeper")?,
            stdin: RefCell::new(Some(stdin)),
            readers: RefCell::new(readers),
            streams: Streams::new().op("watch the output of ranks")?,
            credit: Credit::new(window),
            empty: Cell::new(false),
            warnings: RefCell::default(),
            view: RefCell::default(),
            images: RefCell::default(),
            before: Cell::default(),
            looks: Cell::default(),
            closing: RefCell::default(),
            abort: bounded(1),
            started: Cell::new(false),
            start_failed: Cell::new(false),
            over: Cell::new(false),
            inside: RefCell::default(),
            times: Cell::new(JobTimes { ordered: node.clock.now(), ..JobTimes::default() }),
            running: Cell::new(0),
            memory: RefCell::new(memory),
            files: RefCell::new(files),
            written: RefCell::default(),
        }))
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.get()
    }

    pub(super) fn signal(self: &Rc<Self>, signal: i32) {
        self.ask(Ask::Signal { signal });
    }

    pub(super) fn end(self: &Rc<Self>, grace_ms: u32) {
        // The kernel does not let a process die while it waits for an answer of the view: neither a rank nor a keeper that binds files.
        let grace = if self.started.get() { Duration::from_millis(grace_ms.into()) } else { Duration::ZERO };
        if grace.is_zero() {
            self.close();
        } else {
            let this = Rc::downgrade(self);
            let close = async move {
                Timer::after(grace).await;
                if let Some(job) = this.upgrade() {
                    job.close();
                }
            };
            self.node.tasks.spawn(close).detach();
        }
        self.abort.0.close();
        self.ask(Ask::End { grace_ms });
        self.settle();
    }

    /// More of its output may be sent.
    pub(super) fn grant(&self, bytes: u32) {
        self.credit.grant(bytes);
    }

    /// The end of a job that is ended waits for nobody who reads: what is left is in the pipes of processes that are gone.
    fn settle(&self) {
        if self.empty.get() && self.abort.0.is_closed() {
            self.credit.lift();
        }
    }

    fn close(&self) {
        if let (Some(view), Some(keeper)) = (&*self.view.borrow(), self.looks.get()) {
            self.closing.borrow_mut().get_or_insert_with(|| view.skeleton.close(keeper));
        }
    }

    pub(super) fn ask(self: &Rc<Self>, ask: Ask) {
        let this = Rc::clone(self);
        // A keeper that is gone has nothing left to do; its end is noticed where its words are read.
        self.node.tasks.spawn(async move { this.tell_keeper(&ask, &[]).await }).detach();
    }

    pub(super) async fn tell_keeper(&self, ask: &Ask, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.keeper.write_with(|socket| socket.send(ask, fds)).await
    }

    /// Gives bytes from the front end to the ranks that read standard input; none means its end.
    pub(super) fn feed(self: &Rc<Self>, bytes: Vec<u8>) {
        if bytes.is_empty() {
            self.stdin.borrow_mut().take();
            return;
        }
        let readers = self.stdin.borrow().clone().unwrap_or_default();
        let this = Rc::clone(self);
        let work = async move {
            for reader in readers {
                // A rank that closed its input does not hold up the others.
                let _ = reader.send(bytes.clone()).await;
            }
            let (job, part, node) = (this.launch.job, this.launch.part, this.node.id);
            this.node.report(&Report::StdinTaken { job, part, node }).await;
        };
        self.node.tasks.spawn(work).detach();
    }

    async fn run(self: Rc<Self>) {
        let ended_early = async {
            // Nothing is ever sent: the channel closes when the job is ended.
            let _ = self.abort.1.recv().await;
            Ok(())
        };
        let shown = self.show_all().or(ended_early).await;
        match &shown {
            Err(error) => {
                self.failed(error).await;
                let _ = self.tell_keeper(&Ask::End { grace_ms: 0 }, &[]).await;
            }
            // Also of a node that has no view: it has what it will have.
            Ok(()) if !self.launch.roots.is_empty() && !self.abort.0.is_closed() => {
                self.node.report(&Report::Loaded { job: self.launch.job, node: self.node.id }).await;
            }
            Ok(()) => {}
        }
        let (complete, completed) = bounded::<()>(1);
        let spawning = async {
            let spawned = match &shown {
                Ok(()) if self.abort.0.is_closed() => Ok(()),
                Ok(()) if self.launch.guests => self.have_guests().await,
                Ok(()) => self.spawn().await,
                Err(_) => Ok(()),
            };
            complete.close();
            if let Err(error) = spawned {
                self.failed(&error).await;
                let _ = self.tell_keeper(&Ask::End { grace_ms: 0 }, &[]).await;
            }
        };
        let relaying = async {
            let relayed = self.streams.relay(&completed, &self.credit, async |rank, stream, bytes| {
                self.mark(|times| &mut times.output);
                let report = Report::Output { job: self.launch.job, rank, stream };
                self.node.send_up(Packet::new(&report, bytes)).await;
            });
            if let Err(error) = relayed.await.op("read the output of ranks") {
                self.failed(&error).await;
            }
        };
        // At the same time: a keeper that cannot say which ranks ended does not hear which ones to start either. When every process
        // of the job is gone, every stream is at its end or will be at once.
        let hearing = async {
            self.hear_keeper().await;
            self.empty.set(true);
            self.settle();
        };
        let work = smol::future::zip(smol::future::zip(spawning, hearing), relaying);
        let alone = async {
            if self.launch.aid != Aid::Client || self.launch.guests {
                std::future::pending::<()>().await;
            }
            singletons::watch(&self).await;
        };
        let work = async {
            work.await;
        };
        work.or(alone).await;
        self.over.set(true);
        self.stdin.borrow_mut().take();
        self.readers.borrow_mut().clear();
        self.closing.borrow_mut().take();
        let asked = self.members.as_ref().is_some_and(|members| members.asked.get());
        if self.launch.mpi && !asked && self.started.get() && !self.abort.0.is_closed() {
            self.warnings.borrow_mut().push(mpi::NOBODY_ASKED.to_owned());
        }
        let files = self.files.borrow_mut().take();
        if let Some(files) = files {
            let (told, written) = files.finish().await;
            self.warnings.borrow_mut().extend(told);
            *self.written.borrow_mut() = Some(written);
        }
        let facts = self.facts();
        self.view.borrow_mut().take();
        self.images.borrow_mut().take();
        self.node.replica.borrow().iter().for_each(|replica| replica.give_up_all());
        self.memory.borrow_mut().take();
        self.node.views.tidy();
        let (job, part, node, warnings) = (self.launch.job, self.launch.part, self.node.id, self.warnings.take());
        self.node.over(job, self.place.count);
        self.node.report(&Report::Done { job, part, node, warnings, received: self.node.received(), facts }).await;
        self.node.jobs.borrow_mut().remove(&(job, part));
    }

    async fn show_all(self: &Rc<Self>) -> Result<()> {
        let reach = self.files.borrow().as_ref().map(|files| files.reach(&self.node));
        if let Some(reach) = reach {
            reach.await?;
        }
        self.show().await
    }

    /// Shows the job its view, if it has one, complete with its files.
    async fn show(self: &Rc<Self>) -> Result<()> {
        let replica = self.node.replica.borrow().clone();
        let Some(replica) = replica.filter(|_| !self.launch.roots.is_empty()) else { return Ok(()) };
        replica.reserve(self.launch.bytes)?;
        let audit = replica.audit.borrow().clone();
        match (audit, self.launch.view) {
            (Some(audit), control::View::Auto | control::View::Audit) => {
                return self.show_to_linkers(&replica, audit).await;
            }
            (Some(_), _) => {
                let warning = "no namespaces: ranks read the shared file system themselves";
                self.warnings.borrow_mut().push(warning.to_owned());
                return Ok(());
            }
            (None, control::View::Audit) => {
                let error = Error::new("use --view audit", "the session shows files by namespaces");
                return Err(error.remedy("start a session with --view audit"));
            }
            (None, _) => {}
        }
        let view = self.node.views.of(&self.launch.roots, &replica);
        let named = self.mount(&view).await?;
        if !named {
            let warning = "no FUSE: names are looked up on the shared file system; only contents come from the store";
            self.warnings.borrow_mut().push(warning.to_owned());
        }
        if let Err(error) = replica.loaded(self.launch.load).or(self.keeper_gone()).await {
            // A store that is full says more of it when asked.
            replica.reserve(self.launch.bytes)?;
            return Err(error);
        }
        // Only now: before, the keeper would hang in its look-ups until the log has their answers, and could not even be killed.
        let images = replica.images(&view.roots);
        *self.images.borrow_mut() = Some(Rc::clone(&images));
        self.complete(&replica, &view, &images, named).await?;
        if self.launch.guests {
            self.share().await?;
        }
        self.mark(|times| &mut times.loaded);
        Ok(())
    }

    /// Has the keeper mount the view or join it; false when there is no FUSE.
    async fn mount(&self, view: &Rc<View>) -> Result<bool> {
        let mut mounted = view.mounted.lock().await;
        let shared: Vec<_> = mounted.iter().flat_map(|m| &m.shared).map(AsFd::as_fd).collect();
        self.tell_keeper(&Ask::View { roots: view.roots.clone() }, &shared)
            .await
            .map_err(|e| unheard("mount the view", e))?;
        match self.heard().await? {
            (Tell::Fuse { keeper }, fds) => {
                if mounted.is_none() {
                    *mounted = Some(view.serve(fds, self.place.locals)?);
                }
                self.looks.set(Some(keeper));
                self.before.set(view.skeleton.counts());
                *self.view.borrow_mut() = Some(Rc::clone(view));
                self.mark(|times| &mut times.mounted);
                Ok(true)
            }
            (Tell::Plain, _) => Ok(false),
            (other, _) => Err(misunderstood(&other)),
        }
    }

    /// Has the keeper add to the view what it still lacks and take a copy of it; where names are not served, bind all files.
    async fn complete(&self, replica: &Replica, view: &View, images: &Images, named: bool) -> Result<()> {
        let unheard = |error| unheard("show the program's files", error);
        if named {
            // Of files that were replaced since the last job, before the new ones are bound or read.
            let _ = view.skeleton.forgotten().recv().await;
        }
        let mut mounted = view.mounted.lock().await;
        let mounted = mounted.as_mut().filter(|_| named);
        if mounted.as_ref().is_some_and(|m| !m.shown) {
            self.tell_keeper(&Ask::Show, &[]).await.map_err(unheard)?;
            self.shown().await?;
        }
        let is_new = |(path, id): &(Vec<u8>, FileId)| mounted.as_ref().is_none_or(|m| m.bound.get(path) != Some(id));
        for files in batches(images.iter().filter(|file| is_new(file)).cloned()) {
            self.tell_keeper(&Ask::Bind { files }, &[]).await.map_err(unheard)?;
        }
        if let Some(mounted) = mounted {
            self.tell_keeper(&Ask::Leave, &[]).await.map_err(unheard)?;
            self.shown().await?;
            mounted.shown = true;
            // What was replaced meanwhile may have been forgotten before it was bound.
            let replaced: HashMap<_, _>;
            (mounted.bound, replaced) = {
                let catalog = replica.catalog.read().unwrap_or_else(PoisonError::into_inner);
                images.iter().cloned().partition(|(path, id)| catalog.names(path, *id))
            };
            if !replaced.is_empty() {
                let _ = view.skeleton.uncover(replaced.into_keys().map(Vec::into_boxed_slice).collect()).recv().await;
            }
        }
        Ok(())
    }

    /// What the keeper answers about the view.
    pub(super) async fn heard(&self) -> Result<(Tell, Vec<OwnedFd>)> {
        let heard = self.keeper.read_with(Seqpacket::receive_now::<Tell>).await.op("mount the view")?;
        match heard {
            Some((Tell::Failed { error }, _)) => Err(Error::new("show the program's files", error)),
            Some(heard) => Ok(heard),
            None => Err(keeper_killed()),
        }
    }

    async fn shown(&self) -> Result<()> {
        match self.heard().await? {
            (Tell::Shown, _) => Ok(()),
            (other, _) => Err(misunderstood(&other)),
        }
    }

    /// Watches over a keeper that has nothing to say until it is asked.
    pub(super) async fn keeper_gone(&self) -> Result<()> {
        let (word, _) = self.heard().await?;
        Err(misunderstood(&word))
    }

    async fn spawn(self: &Rc<Self>) -> Result<()> {
        self.started.set(true);
        // Small, so that the keeper forks the first while the pipes of the next are made.
        const BATCH: u32 = 16;
        const { assert!(BATCH as usize * 4 <= FDS_MAX) };
        let nobody = || Error::new("start ranks", "nobody serves them here");
        let members = self.members.as_ref().ok_or_else(nobody)?;
        let null = OwnedFd::from(File::open("/dev/null").op_on("open", "/dev/null")?);
        self.running.set(self.place.count);
        if let Some(object) = pmi::object(self.launch.aid).op("give the ranks what their MPI library needs")? {
            let inherit = Ask::Inherit { number: pmi::AID_FD };
            self.tell_keeper(&inherit, &[object.as_fd()]).await.map_err(|e| unheard("start ranks", e))?;
        }
        let mut first = 0;
        while first < self.place.count {
            let count = BATCH.min(self.place.count - first);
            let mut streams = Vec::with_capacity(count as usize);
            for index in first..first + count {
                let rank = self.place.first + index;
                let input = self.standard_input(rank).op("make a rank's standard input")?;
                let output = |stream| self.streams.add(rank, stream).op("make a rank's output pipe");
                let member = members.add(rank, self.launch.part).op("make a rank's way to its agent")?;
                streams.push((input, output(Stream::Out)?, output(Stream::Err)?, member));
            }
            let mut fds = Vec::with_capacity(count as usize * 4);
            for (input, out, err, member) in &streams {
                fds.extend([input.as_ref().unwrap_or(&null).as_fd(), out.as_fd(), err.as_fd(), member.as_fd()]);
            }
            let spawn = Ask::Spawn { first, count, umask: self.launch.umask };
            self.tell_keeper(&spawn, &fds).await.map_err(|e| unheard("start ranks", e))?;
            first += count;
        }
        self.mark(|times| &mut times.started);
        self.tell_keeper(&Ask::Go, &[]).await.map_err(|e| unheard("start ranks", e))
    }

    /// The end to read from, for a rank that reads standard input.
    fn standard_input(self: &Rc<Self>, rank: u32) -> io::Result<Option<OwnedFd>> {
        let Some(bytes) = self.readers.borrow_mut().remove(&rank) else { return Ok(None) };
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let mut writer = Async::new(File::from(writer))?;
        let work = async move {
            while let Ok(bytes) = bytes.recv().await {
                if writer.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        };
        self.node.tasks.spawn(work).detach();
        Ok(Some(reader))
    }

    /// Reports what the keeper says, until it is done or gone.
    async fn hear_keeper(self: &Rc<Self>) {
        let mut exits = Vec::new();
        loop {
            // Ends that arrive together travel together.
            let heard = match self.keeper.get_ref().receive_now::<Tell>() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.exited(&mut exits).await;
                    self.keeper.read_with(Seqpacket::receive_now::<Tell>).await
                }
                heard => heard,
            };
            match heard {
                Ok(Some((Tell::Exited { ranks }, _))) => {
                    self.ended(ranks.len());
                    let first = self.place.first;
                    exits.extend(ranks.into_iter().map(|r| Exit {
                        rank: first + r.index,
                        status: r.status,
                        by_us: r.by_us,
                    }));
                }
                Ok(Some((Tell::Pids { ranks }, _))) => self.tell_pids(ranks).await,
                Ok(Some((Tell::NotStarted { stage, errno }, _))) => self.not_started(stage, errno).await,
                Ok(Some((Tell::Failed { error }, _))) => self.report_failure(error).await,
                Ok(Some((Tell::Done, _))) => break self.exited(&mut exits).await,
                Ok(Some(_)) => {}
                end => {
                    self.exited(&mut exits).await;
                    let error = end.err().map_or_else(keeper_killed, |error| Error::new("hear the keeper", error));
                    break self.failed(&error).await;
                }
            }
        }
    }

    async fn exited(&self, exits: &mut Vec<Exit>) {
        if !exits.is_empty() {
            let ranks = std::mem::take(exits);
            self.node.report(&Report::Exited { job: self.launch.job, ranks }).await;
        }
    }

    async fn not_started(&self, stage: Stage, errno: i32) {
        let cause = io::Error::from_raw_os_error(errno);
        let path = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match stage {
            Stage::Image => log::debug!("a rank starts without the bootstrapper: {cause}"),
            Stage::Home => {
                let warning = format!("no directory {} here ({cause}); ranks start in HOME", path(&self.launch.cwd));
                let mut warnings = self.warnings.borrow_mut();
                if !warnings.contains(&warning) {
                    warnings.push(warning);
                }
            }
            // Once per node is enough: the ranks of a node fail alike.
            _ if self.start_failed.replace(true) => {}
            Stage::Boot => {
                let error = Error::new("read the launch plan", cause);
                self.failed(&error.remedy("HPCRT_WITHOUT=memfd starts ranks without the bootstrapper")).await;
            }
            Stage::Cwd => {
                self.failed(&Error::new("enter the working directory", cause).on(path(&self.launch.cwd))).await;
            }
            Stage::Hold if self.launch.hold => {
                self.failed(&Error::new("hold the ranks for the debugger", cause)).await;
            }
            Stage::Hold => {
                let error = Error::new("use --memory in a statically linked program, by tracing it", cause);
                self.failed(&error.on(path(&self.launch.program)).remedy("link it dynamically")).await;
            }
            Stage::Exec => self.failed(&Error::new("execute", cause).on(path(&self.launch.program))).await,
        }
    }

    pub(super) async fn failed(&self, error: &Error) {
        self.report_failure(error.to_string()).await;
    }

    async fn report_failure(&self, error: String) {
        // What failed because the view was closed under the preparations is no news.
        if self.abort.0.is_closed() && !self.started.get() {
            return log::debug!("while the job was ended: {error}");
        }
        self.node.report(&Report::Failed { job: self.launch.job, node: self.node.id, error }).await;
    }
}

fn keeper_killed() -> Error {
    Error::new("run the job", "its keeper on this node was killed")
}

/// A keeper said what it was not asked.
pub(super) fn misunderstood(word: &Tell) -> Error {
    Error::new("show the program's files", format!("the keeper answered {word:?}"))
}

/// A keeper could not be told something.
pub(super) fn unheard(operation: &'static str, error: io::Error) -> Error {
    if error.kind() == io::ErrorKind::BrokenPipe { keeper_killed() } else { Error::new(operation, error) }
}

/// Files to bind, in messages of a size that a datagram carries.
fn batches(files: impl IntoIterator<Item = (Vec<u8>, FileId)>) -> Vec<Vec<(Vec<u8>, FileId)>> {
    /// What a file costs beside its path.
    const OVERHEAD: usize = 32;
    let mut batches: Vec<Vec<_>> = Vec::new();
    let mut room = 0;
    for file in files {
        let size = file.0.len() + OVERHEAD;
        if size > room {
            batches.push(Vec::new());
            room = BYTES_MAX / 2;
        }
        room = room.saturating_sub(size);
        if let Some(batch) = batches.last_mut() {
            batch.push(file);
        }
    }
    batches
}

/// Variables that tell a rank who it is.
const OURS: [&str; 17] = [
    "HPCRT_SESSION",
    "HPCRT_SIZE",
    "HPCRT_NODE",
    "HPCRT_HOST",
    "HPCRT_LOCAL_SIZE",
    "HPCRT_PART",
    "HPCRT_RANK",
    "HPCRT_LOCAL_RANK",
    "HPCRT_FD",
    "PMI_FD",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_PORT",
    "PMI_ID",
    "PMI_SPAWNED",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
];

/// The kernel's form of a processor set: one bit each in an array of `unsigned long`.
fn mask(cpus: &[u32]) -> Vec<u8> {
    let words = cpus.iter().max().map_or(0, |last| *last as usize / 64 + 1);
    let mut mask = vec![0u64; words];
    cpus.iter().for_each(|cpu| mask[*cpu as usize / 64] |= 1 << (cpu % 64));
    mask.into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// `resident`: what is put into the program if it is statically linked, or nothing.
pub(super) fn program(node: &Node, launch: &Launch, place: &Place, resident: Vec<u8>) -> Program {
    let pair = |name: &str, value: &dyn std::fmt::Display| format!("{name}={value}").into_bytes();
    // A job within a job: the outer one's are not for these ranks.
    let ours =
        |var: &[u8]| OURS.iter().any(|name| var.strip_prefix(name.as_bytes()).is_some_and(|v| v.starts_with(b"=")));
    let mut env: Vec<_> = launch.env.iter().filter(|var| !ours(var)).cloned().collect();
    env.push(pair("HPCRT_SESSION", &node.session));
    env.push(pair("HPCRT_SIZE", &launch.size));
    env.push(pair("HPCRT_NODE", &node.id));
    env.push(pair("HPCRT_HOST", &node.host));
    env.push(pair("HPCRT_PART", &launch.part));
    env.push(pair("HPCRT_LOCAL_SIZE", &place.locals));
    env.push(pair("HPCRT_FD", &MEMBER_FD));
    env.push(pair("PMI_FD", &MEMBER_FD));
    env.push(pair("PMI_SIZE", &launch.size));
    env.push(pair("MPI_LOCALNRANKS", &place.locals));
    if launch.aid == Aid::Progress {
        door::preload(&mut env, pmi::aid_path().as_bytes());
    }
    if launch.aid == Aid::Client {
        env.extend(pmi::client_variables(&node.session, launch.job).map(String::into_bytes));
        // As its own launcher does where ranks have to share processors.
        const YIELD: &[u8] = b"OMPI_MCA_mpi_yield_when_idle=";
        if place.locals as usize > allocation::usable_cpus().len() && !env.iter().any(|var| var.starts_with(YIELD)) {
            env.push([YIELD, b"1"].concat());
        }
    }
    let usable = if place.bind == Binding::None { Vec::new() } else { allocation::usable_cpus() };
    let bound = if place.bind == Binding::None { 0..0 } else { place.local..place.local + place.count };
    let home = match launch.cwd_named {
        true => launch.cwd.clone(),
        false => std::env::var_os("HOME").unwrap_or_else(|| "/".into()).into_vec(),
    };
    Program {
        path: launch.program.clone(),
        cwd: launch.cwd.clone(),
        home,
        argv: launch.argv.clone(),
        env,
        counted: [
            ("HPCRT_RANK", place.first),
            ("HPCRT_LOCAL_RANK", place.local),
            ("PMI_RANK", place.first),
            ("MPI_LOCALRANKID", place.local),
        ]
        .map(|(name, first)| (name.to_owned(), first))
        .to_vec(),
        ranks: place.count,
        masks: bound.map(|local| mask(placement::cpus(place.bind, &usable, local, place.locals))).collect(),
        nofile: process::nofile(),
        hold: launch.hold,
        resident,
    }
}
