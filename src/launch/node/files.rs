//! A job's programs that write files asynchronously: the resident that is preloaded into them, the door at which they hand open files over, and
//! the I/O worker that writes, which is started again if it is killed.
//!
//! Open files are kept here, too, so that a worker's end loses none. Whatever it has not been told when it ends, the next one is told.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_channel::{Receiver, Sender, bounded};
use nix::unistd::Pid;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use smol::future::FutureExt;
use smol::{Async, Task, Timer};

use super::Node;
use super::door::{self, Door, peer, send};
use super::texts;
use crate::iofs::{forward, mounts};
use crate::launch::agent::{OURSELVES, Process};
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::control::{JobId, Launch, Report};
use crate::net::wire::facts::Writing;
use crate::net::wire::files::{Forward, Work, Worked};
use crate::sys::extents::{FILES, NOBODY, SEGMENTS, inode};
use crate::sys::extents_map::{self, Extents};
use crate::sys::files::{Answer, MARK, Question, ROOTS_MAX, Terms, op, why};
use crate::sys::process;
use crate::sys::resident::{MEMORY, Settings, files};
use crate::sys::without::{Ability, Without};
use crate::{Error, Result, error::Context};

/// Before the next worker, for each in a row that ended at once.
const PAUSE: Duration = Duration::from_millis(50);
/// A worker that ends sooner has not worked.
const SHORT: Duration = Duration::from_millis(100);
/// So many of them in a row, and there will be no other.
const ATTEMPTS: u32 = 10;
/// What is left of a job is written within this time.
const PATIENCE: Duration = Duration::from_secs(120);

/// See the module. Programs beside each other in a job have one.
pub(super) struct Files(Rc<Shared>);

pub(super) struct Shared {
    job: Rc<Written>,
    ended: Receiver<()>,
    door: Door,
    _serving: Task<()>,
    _texts: Task<()>,
    _worker: Task<()>,
}

/// The programs of a job that write, and their worker.
struct Written {
    memory: OwnedFd,
    extents: Extents,
    /// By segment.
    programs: RefCell<BTreeMap<u32, Program>>,
    /// By segment and number.
    kept: RefCell<BTreeMap<(u32, u32), Kept>>,
    /// Files that are not to be kept: places, with a segment of who said so.
    direct: RefCell<BTreeSet<(usize, u32)>>,
    /// There was no room for one of them: nothing is kept any more.
    full: Cell<bool>,
    /// Names of files of which something may be missing and that are not kept any more.
    names: RefCell<BTreeMap<(u32, u32), String>>,
    worker: RefCell<Option<Rc<Async<Seqpacket>>>>,
    /// Who writes in the worker's stead.
    forward: Option<Forward>,
    finishing: Cell<bool>,
    counts: RefCell<Writing>,
    /// What else the user is to hear at the end.
    told: RefCell<BTreeSet<String>>,
}

struct Program {
    pid: i32,
    over: bool,
}

/// An open file of a program's.
struct Kept {
    /// `None`: it is being closed.
    fd: Option<OwnedFd>,
    /// Of its file in the table.
    place: usize,
}

impl Files {
    /// Prepares what a job with so many ranks here needs, and puts it into its environment; `None`: it writes its files itself.
    ///
    /// # Errors
    /// There is no place for the resident, or the program is none that it can be in.
    pub(super) fn open(node: &Rc<Node>, launch: &mut Launch, ranks: u32) -> Result<Option<Files>> {
        let Some(roots) = launch.files.clone() else { return Ok(None) };
        const OPERATION: &str = "use --async-io";
        if let Some(path) = door::statically_linked(launch, OPERATION)? {
            let error = Error::usage(OPERATION, "it is statically linked: its system calls cannot be told apart");
            return Err(error.on(path).remedy("run it without --async-io"));
        }
        if roots.is_empty() && launch.forward.is_none() && !mounts::any() {
            return Ok(None);
        }
        let shared = node.files.borrow().get(&launch.job).and_then(Weak::upgrade);
        if let Some(shared) = shared {
            shared.door.preload(&mut launch.env);
            return Ok(Some(Files(shared)));
        }
        let mut list = [0; ROOTS_MAX];
        let bytes: Vec<u8> = roots.iter().flat_map(|root| root.iter().chain(&[0])).copied().collect();
        match list.get_mut(..bytes.len()) {
            Some(room) => room.copy_from_slice(&bytes),
            None => {
                let cause = format!("the directories have more than {ROOTS_MAX} bytes");
                return Err(Error::usage("use --io-roots", cause));
            }
        }
        const SHARING: &str = "share memory with programs";
        let memory = extents_map::create(ranks).op(SHARING)?;
        let extents = Extents::map_control(&memory).op(SHARING)?;
        let named = if roots.is_empty() { 0 } else { files::NAMED };
        let always = if Without::from_env()?.has(Ability::Pace) { files::ALWAYS } else { 0 };
        let hosts = if launch.writes_elsewhere() { files::HOSTS } else { 0 };
        let shown = launch.forward.clone().map(|wish| Forward { key: node.key.hide(&wish.nonce, &wish.key), ..wish });
        let elsewhere = if shown.is_some() { files::ELSEWHERE | files::ALWAYS } else { 0 };
        let files = files::ON | named | always | hosts | elsewhere;
        let number = rustix::fs::fstat(&memory).op(SHARING)?.st_ino;
        let settings = Settings { files, memory: number, roots: list, ..Settings::NONE };
        let door = Door::open("use --async-io", &mut launch.env, settings)?;
        door.show(MEMORY, memory.as_fd())?;
        let job = Rc::new(Written {
            memory,
            extents,
            programs: RefCell::default(),
            kept: RefCell::default(),
            direct: RefCell::default(),
            full: Cell::new(false),
            names: RefCell::default(),
            counts: RefCell::default(),
            worker: RefCell::default(),
            forward: shown,
            finishing: Cell::new(false),
            told: RefCell::default(),
        });
        let (over, ended) = bounded(1);
        let _worker = node.tasks.spawn(supervise(Rc::clone(node), launch.job, Rc::clone(&job), over));
        let (at, id, writing) = (Rc::clone(node), launch.job, Rc::clone(&job));
        let _serving = door.serve(node, move |program| {
            let (node, job) = (Rc::clone(&at), Rc::clone(&writing));
            async move {
                if let Err(error) = answer(&node, id, &program, &job).await {
                    log::debug!("a program that writes: {error}");
                }
            }
        });
        let _texts = node.tasks.spawn(texts::gather(door.directory().to_owned()));
        let shared = Rc::new(Shared { job, ended, door, _serving, _texts, _worker });
        let mut all = node.files.borrow_mut();
        all.retain(|_, other| other.strong_count() > 0);
        all.insert(launch.job, Rc::downgrade(&shared));
        Ok(Some(Files(shared)))
    }

    /// Tries whether everybody can be reached who is to write: who cannot is the error.
    pub(super) fn reach(&self, node: &Rc<Node>) -> impl Future<Output = Result<()>> + use<> {
        let (job, node) = (Rc::clone(&self.0.job), Rc::clone(node));
        async move {
            let Some(wish) = &job.forward else { return Ok(()) };
            for (nth, host) in wish.hosts.iter().enumerate() {
                let reached = forward::connect(node.id, wish, nth).await;
                reached.map_err(|error| Error::new("reach its I/O worker", error).on(&host.name))?;
            }
            Ok(())
        }
    }

    /// Has everything written that the job's programs left: none of these runs any more, and where others of the job do, they do it. What was
    /// not written is told.
    pub(super) async fn finish(self) -> (Vec<String>, Writing) {
        match Rc::try_unwrap(self.0) {
            Ok(shared) => shared.finish().await,
            Err(_) => (Vec::new(), Writing::default()),
        }
    }
}

impl Shared {
    async fn finish(self) -> (Vec<String>, Writing) {
        self.job.finishing.set(true);
        self.job.programs.borrow_mut().values_mut().for_each(|program| program.over = true);
        self.job.tell_ends().await;
        let late = async {
            Timer::after(PATIENCE).await;
            let seconds = PATIENCE.as_secs();
            self.job
                .told
                .borrow_mut()
                .insert(format!("not all that programs wrote could be written within {seconds} s"));
        };
        let ended = async {
            // Nothing is ever sent.
            let _ = self.ended.recv().await;
        };
        ended.or(late).await;
        close_elsewhere(self.job.kept.take().into_values().filter_map(|kept| kept.fd).collect());
        (self.job.told.take().into_iter().collect(), self.job.counts.take())
    }
}

impl Written {
    /// Tells the worker, if there is one now; the next one is told anyway.
    async fn tell(&self, word: Work, fds: &[std::os::fd::BorrowedFd<'_>]) {
        self.tell_by(|socket| socket.send(&word, fds)).await;
    }

    async fn tell_by(&self, send: impl FnMut(&Seqpacket) -> io::Result<()>) {
        let worker = self.worker.borrow().clone();
        if let Some(worker) = worker {
            let _ = worker.write_with(send).await;
        }
    }

    /// Tells of an open file, unless it has been closed meanwhile. Nobody else has a descriptor of it that would be closed later.
    async fn tell_file(&self, name: (u32, u32)) {
        let word = Work::File { segment: name.0, file: name.1 };
        self.tell_by(|socket| match self.kept.borrow().get(&name).and_then(|kept| kept.fd.as_ref()) {
            Some(fd) => socket.send(&word, &[fd.as_fd()]),
            None => Ok(()),
        })
        .await;
    }

    /// Tells a fresh worker what there is.
    async fn tell_all(&self) {
        let programs: Vec<_> = self.programs.borrow().keys().copied().collect();
        let kept: Vec<_> = self.kept.borrow().keys().copied().collect();
        for segment in programs {
            self.tell(Work::Begin { segment }, &[]).await;
        }
        for name in kept {
            self.tell_file(name).await;
        }
        self.tell(Work::Known, &[]).await;
        self.tell_ends().await;
    }

    /// Tells which programs have ended, and whether all have.
    async fn tell_ends(&self) {
        let ended = |(segment, program): (&u32, &Program)| program.over.then_some(*segment);
        let ended: Vec<_> = self.programs.borrow().iter().filter_map(ended).collect();
        for segment in ended {
            self.tell(Work::Over { segment }, &[]).await;
        }
        if self.finishing.get() {
            self.tell(Work::Finish, &[]).await;
        }
    }

    async fn end(&self, segment: u32) {
        if let Some(program) = self.programs.borrow_mut().get_mut(&segment) {
            program.over = true;
        }
        self.tell(Work::Over { segment }, &[]).await;
    }

    fn heard(&self, word: &Worked) {
        match word {
            Worked::Drained { segment, writes, bytes, pieces, untold } => {
                // Who is told twice that a program is over says twice that it is.
                if self.programs.borrow_mut().remove(segment).is_none() {
                    return;
                }
                let names: Vec<_> =
                    self.kept.borrow().range((*segment, 0)..=(*segment, u32::MAX)).map(|(name, _)| *name).collect();
                close_elsewhere(names.into_iter().filter_map(|name| self.forget(name)).collect());
                let said: Vec<_> = self.direct.borrow().iter().filter(|(_, by)| by == segment).copied().collect();
                for name in said {
                    self.direct.borrow_mut().remove(&name);
                    self.release(name.0);
                }
                let [writes, bytes, pieces] = [*writes, *bytes, *pieces];
                self.counts.borrow_mut().add(&Writing { writes, bytes, pieces, untold: *untold, ..Writing::default() });
            }
            Worked::Lost { segment, file, errno } => {
                let (name, error) = (self.name((*segment, *file)), io::Error::from_raw_os_error(*errno).to_string());
                self.told.borrow_mut().insert(format!("{name}: what a program wrote is not there: {error}"));
                self.counts.borrow_mut().lost.push((name, error));
            }
            Worked::Here { segment, file, host, errno } => {
                let (name, error) = (self.name((*segment, *file)), io::Error::from_raw_os_error(*errno));
                let said =
                    format!("{name}: written by this host itself: {host} cannot open it as the same file: {error}");
                self.told.borrow_mut().insert(said);
            }
            Worked::Gone { host, others } => {
                let who =
                    if *others { "the others of --io-forward write" } else { "each host writes its files itself" };
                self.told.borrow_mut().insert(format!("the I/O worker on {host} is gone: {who}"));
            }
            Worked::Silent { .. } | Worked::Finished => {}
        }
    }
}

impl Written {
    /// The path of a program's open file.
    fn name(&self, name: (u32, u32)) -> String {
        if let Some(known) = self.names.borrow().get(&name) {
            return known.clone();
        }
        let kept = self.kept.borrow();
        let fd = kept.get(&name).and_then(|kept| kept.fd.as_ref());
        let path = fd.and_then(|fd| fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok());
        path.map_or_else(|| "a file".to_owned(), |path| path.display().to_string())
    }

    /// Has a program's open file, which is this one of a file system, kept; returns its file's place.
    /// An error leaves the descriptor where it is.
    fn keep(
        &self,
        name: (u32, u32),
        (device, number): (u64, u64),
        fd: &mut Option<OwnedFd>,
    ) -> std::result::Result<usize, Errno> {
        let head = self.extents.head();
        if fd.is_none() {
            return Err(Errno::MFILE);
        }
        let place = head.claim(device, number, inode::KEPT).filter(|_| !self.full.get()).ok_or(Errno::NOSPC)?;
        let inode = &head.inodes[place];
        if inode.state.load(Ordering::SeqCst) == inode::DIRECT {
            return Err(Errno::BUSY);
        }
        inode.set_writer(name.0, true);
        head.owned.fetch_add(1, Ordering::SeqCst);
        self.names.borrow_mut().remove(&name);
        self.kept.borrow_mut().insert(name, Kept { fd: fd.take(), place });
        Ok(place)
    }

    /// Closes a program's open file, in which nothing is pending, before the worker and the program do, and has the worker forget it. That takes as long
    /// as the kernel has something to write that it held back, and only who closes first is told what could not be written (NFS, sshfs).
    async fn close(&self, name: (u32, u32)) {
        let epoch = || self.extents.log(name.0).map(|log| log.segment.epoch.load(Ordering::SeqCst));
        let (path, before) = (self.name(name), epoch());
        let fd = self.kept.borrow_mut().get_mut(&name).and_then(|kept| kept.fd.take());
        if let Some(fd) = fd {
            self.names.borrow_mut().insert(name, path);
            let closed = smol::unblock(move || nix::unistd::close(fd)).await;
            // Else its program has ended, and another one may have the segment.
            let place = self.kept.borrow().get(&name).map(|kept| kept.place).filter(|_| epoch() == before);
            let Some(place) = place else { return };
            if let Err(errno) = closed {
                self.extents.fail(name, place, errno as i32);
                self.heard(&Worked::Lost { segment: name.0, file: name.1, errno: errno as i32 });
            }
            self.forget(name);
        }
        self.tell(Work::Drop { segment: name.0, file: name.1 }, &[]).await;
    }

    /// A program's open file is not kept any more: nothing is pending there. Returns what is to be closed.
    fn forget(&self, name: (u32, u32)) -> Option<OwnedFd> {
        let head = self.extents.head();
        let place = self.kept.borrow().get(&name).map(|kept| kept.place)?;
        // What another host's closing says comes later.
        if head.inodes[place].failed.load(Ordering::SeqCst) != 0 || self.forward.is_some() {
            let path = self.name(name);
            self.names.borrow_mut().insert(name, path);
        } else {
            self.names.borrow_mut().remove(&name);
        }
        let kept = self.kept.borrow_mut().remove(&name);
        head.owned.fetch_sub(1, Ordering::SeqCst);
        if !self.kept.borrow().range((name.0, 0)..=(name.0, u32::MAX)).any(|(_, kept)| kept.place == place) {
            head.inodes[place].set_writer(name.0, false);
        }
        self.release(place);
        kept?.fd
    }

    /// From now on nobody is to keep a file, as long as the program with this segment runs.
    fn direct(&self, segment: u32, (device, number): (u64, u64)) {
        let head = self.extents.head();
        match head.claim(device, number, inode::DIRECT) {
            Some(place) => {
                head.inodes[place].state.store(inode::DIRECT, Ordering::SeqCst);
                self.direct.borrow_mut().insert((place, segment));
            }
            None => self.full.set(true),
        }
    }

    /// A place is free if nobody needs it.
    fn release(&self, place: usize) {
        let inode = &self.extents.head().inodes[place];
        let kept = inode.writers().next().is_some();
        let direct = self.direct.borrow().range((place, 0)..=(place, u32::MAX)).next().is_some();
        if !kept && !direct && inode.failed.load(Ordering::SeqCst) == 0 {
            self.extents.head().release(place);
        }
    }
}

/// Closes what may take as long as its file system does to write what the kernel holds back.
fn close_elsewhere(fds: Vec<OwnedFd>) {
    smol::unblock(move || drop(fds)).detach();
}

/// Runs workers, one after the other, until one has finished.
async fn supervise(node: Rc<Node>, id: JobId, job: Rc<Written>, _over: Sender<()>) {
    let mut failures = 0;
    loop {
        let begun = Instant::now();
        let cause = match work(&node, id, &job).await {
            Ok(true) => return,
            Ok(false) => "it ended".to_owned(),
            Err(error) => error.to_string(),
        };
        job.worker.borrow_mut().take();
        failures = if begun.elapsed() < SHORT { failures + 1 } else { 0 };
        if failures == ATTEMPTS {
            let _ = extents_map::give_up(&job.memory);
            let error = Error::new("run the I/O worker", cause).to_string();
            node.report(&Report::Failed { job: id, node: node.id, error }).await;
            return;
        }
        Timer::after(PAUSE * failures).await;
    }
}

/// Runs one worker; true: it has finished.
async fn work(node: &Node, id: JobId, job: &Written) -> Result<bool> {
    const OPERATION: &str = "start the I/O worker";
    let (ours, theirs) = Seqpacket::pair().op(OPERATION)?;
    let mut command = Command::new(OURSELVES);
    command.arg("ioworker").stdin(OwnedFd::from(theirs)).stdout(Stdio::null());
    let mut worker = Process::start(&mut command).op(OPERATION)?;
    // Ours: what it inherited from the command would keep the socket open.
    drop(command);
    let socket = Rc::new(Async::new(ours).op(OPERATION)?);
    *job.worker.borrow_mut() = Some(Rc::clone(&socket));
    job.tell(Work::Memory, &[job.memory.as_fd()]).await;
    if let Some(forward) = &job.forward {
        job.tell(Work::Forward { node: node.id, forward: forward.clone() }, &[]).await;
    }
    job.tell_all().await;
    let mut finished = false;
    while let Ok(Some((word, _))) = socket.read_with(Seqpacket::receive_now::<Worked>).await {
        finished |= word == Worked::Finished;
        if let Worked::Silent { host, error } = &word {
            let error = Error::new(format!("have {host} write files"), error).remedy("leave it out of --io-forward");
            node.report(&Report::Failed { job: id, node: node.id, error: error.to_string() }).await;
        }
        job.heard(&word);
    }
    worker.end().await;
    Ok(finished)
}

/// A question, and what came beside it.
fn receive(socket: &OwnedFd) -> io::Result<Option<(Question, Option<OwnedFd>)>> {
    let mut bytes = [0; size_of::<Question>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [io::IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let len = rustix::net::recvmsg(socket, &mut slices, &mut control, flags)?.bytes;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let ours = len == bytes.len() && bytes[..MARK.len()] == MARK;
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    let (device, number) = (long(24), long(32));
    let question =
        Question { mark: MARK, op: word(8), file: word(12), segment: word(16), detail: word(20), device, number };
    Ok(ours.then_some((question, fd)))
}

/// Answers one question of a program.
async fn answer(node: &Rc<Node>, id: JobId, program: &Async<OwnedFd>, job: &Rc<Written>) -> Result<()> {
    let Some(pid) = peer(program)? else { return Ok(()) };
    let Some((question, mut fd)) = program.read_with(receive).await.op("hear a program")? else { return Ok(()) };
    let pid = pid.as_raw_nonzero().get();
    let name = (question.segment, question.file);
    let owned = || job.programs.borrow().get(&name.0).is_some_and(|program| program.pid == pid && !program.over);
    let mut place = Ok(0);
    let (file, free) = ((question.device, question.number), !job.kept.borrow().contains_key(&name));
    match question.op {
        op::ATTACH | op::LOG => return attach(node, job, program, pid, &question).await,
        op::KEEP if owned() && (name.1 as usize) < FILES && free => {
            place = job.keep(name, file, &mut fd);
            if place.is_ok() {
                job.tell_file(name).await;
            }
        }
        // The program waits for what the worker says then, without a deadline of its own.
        op::DROP if owned() => {}
        op::DIRECT if owned() || name.0 == NOBODY => job.direct(name.0, file),
        op::SAY => {
            let told = "programs that share memory have written as without --async-io from some time on: one has mapped a device by which it \
                        may reach other hosts, or to write to a file that they share";
            job.told.borrow_mut().insert(told.to_owned());
        }
        op::REFUSE => {
            let cause = match question.detail {
                why::NO_LIBC => "it is not linked with the GNU C library",
                why::OTHER_LIBC => "the system calls of its C library are not where they can be told apart",
                why::NO_DISPATCH => "the kernel has no Syscall User Dispatch (Linux 5.11)",
                _ => "the I/O worker does not run any more",
            };
            let error = Error::new("use --async-io for a program", cause).remedy("run it without --async-io");
            // A worker that does not run was told of.
            if question.detail != why::NO_WORKER {
                node.report(&Report::Failed { job: id, node: node.id, error: error.to_string() }).await;
            }
        }
        _ => place = Err(Errno::INVAL),
    }
    let answer = match place {
        Ok(place) => Answer { error: 0, inode: u32::try_from(place).unwrap_or(u32::MAX) },
        Err(errno) => Answer { error: errno.raw_os_error().cast_unsigned(), inode: 0 },
    };
    let answered = send(program, &[answer.error.to_ne_bytes(), answer.inode.to_ne_bytes()].concat(), &[]);
    if question.op == op::DROP && place.is_ok() {
        job.close(name).await;
    }
    close_elsewhere(fd.into_iter().collect());
    answered.op("answer a program")
}

/// A program takes part, or needs a log.
async fn attach(
    node: &Rc<Node>,
    job: &Rc<Written>,
    program: &Async<OwnedFd>,
    pid: i32,
    asked: &Question,
) -> Result<()> {
    if asked.detail != 0 {
        // Of the same process: what it executed before, or before a fork.
        let before: Vec<_> = job
            .programs
            .borrow()
            .iter()
            .filter(|(_, other)| other.pid == pid && !other.over)
            .map(|(nth, _)| *nth)
            .collect();
        for segment in before {
            job.end(segment).await;
        }
    }
    let free = if asked.op == op::ATTACH {
        None
    } else {
        let mut programs = job.programs.borrow_mut();
        let free = (0..SEGMENTS).filter_map(|nth| u32::try_from(nth).ok()).find(|nth| !programs.contains_key(nth));
        let watched = process::watch(Pid::from_raw(pid)).and_then(Async::new_nonblocking);
        free.zip(watched.ok()).map(|(segment, ended)| {
            programs.insert(segment, Program { pid, over: false });
            (segment, ended)
        })
    };
    let mut terms = MARK.to_vec();
    let segment = free.as_ref().map_or(NOBODY, |(segment, _)| *segment);
    terms.extend(segment.to_ne_bytes());
    terms.extend(0u32.to_ne_bytes());
    terms.extend(job.extents.ring().to_ne_bytes());
    debug_assert_eq!(terms.len(), size_of::<Terms>());
    if let Some((segment, ended)) = free {
        let state = extents_map::reset(&job.memory, &job.extents, segment, asked.device);
        state.op("share memory with a program")?;
        job.tell(Work::Begin { segment }, &[]).await;
        let job = Rc::clone(job);
        let watching = async move {
            let _ = ended.readable().await;
            let mine = job.programs.borrow().get(&segment).is_some_and(|program| program.pid == pid && !program.over);
            if mine {
                job.end(segment).await;
            }
        };
        node.tasks.spawn(watching).detach();
    }
    send(program, &terms, &[job.memory.as_fd()]).op("answer a program")
}
