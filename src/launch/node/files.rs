//! A job's programs that write files asynchronously: the resident that is preloaded into them, the door at which they hand open files over, and
//! the I/O worker that writes, which is started again if it is killed.
//!
//! Open files are kept here, too, so that a worker's end loses none. Whatever it has not been told when it ends, the next one is told.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use async_channel::{Receiver, Sender, bounded};
use nix::unistd::Pid;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use smol::future::FutureExt;
use smol::{Async, Task, Timer};

use super::Node;
use super::memory::{listen, preload, send};
use crate::launch::agent::{OURSELVES, Process};
use crate::loader::elf::Elf;
use crate::loader::script::Shebang;
use crate::loader::view::directory::{self, Directory};
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::control::{JobId, Launch, Report};
use crate::net::wire::files::{Work, Worked};
use crate::pager::borrow;
use crate::sys::extents::{FILES, NOBODY, SEGMENTS};
use crate::sys::extents_map;
use crate::sys::files::{MARK, Question, ROOTS_MAX, Terms, op, why};
use crate::sys::process;
use crate::sys::resident::{DOOR, FILE};
use crate::sys::without::Without;
use crate::{Error, Result, error::Context};

/// Before the next attempt when no connection can be accepted.
const PAUSE: Duration = Duration::from_millis(50);
/// A worker that ends sooner has not worked.
const SHORT: Duration = Duration::from_millis(100);
/// So many of them in a row, and there will be no other.
const ATTEMPTS: u32 = 10;
/// What is left of a job is written within this time.
const PATIENCE: Duration = Duration::from_secs(120);

/// See the module.
pub(super) struct Files {
    directory: Directory,
    job: Rc<Writing>,
    ended: Receiver<()>,
    _door: Task<()>,
    _worker: Task<()>,
}

/// The programs of a job that write, and their worker.
struct Writing {
    memory: OwnedFd,
    roots: [u8; ROOTS_MAX],
    /// By segment.
    programs: RefCell<BTreeMap<u32, Program>>,
    kept: RefCell<BTreeMap<(u32, u32), OwnedFd>>,
    worker: RefCell<Option<Rc<Async<Seqpacket>>>>,
    finishing: Cell<bool>,
    broken: Cell<bool>,
    /// What the user is to hear at the end.
    told: RefCell<Vec<String>>,
}

struct Program {
    pid: i32,
    over: bool,
}

impl Drop for Files {
    fn drop(&mut self) {
        self.directory.remove();
    }
}

impl Files {
    /// Prepares what a job needs, and puts it into its environment; `None`: it writes its files itself.
    ///
    /// # Errors
    /// There is no place for the resident, or the program is none that it can be in.
    pub(super) fn open(node: &Rc<Node>, launch: &mut Launch) -> Result<Option<Files>> {
        let Some(roots) = launch.files.clone() else { return Ok(None) };
        check(Path::new(std::ffi::OsStr::from_bytes(&launch.program)), true)?;
        let mut list = [0; ROOTS_MAX];
        let bytes: Vec<u8> = roots.iter().flat_map(|root| root.iter().chain(&[0])).copied().collect();
        match list.get_mut(..bytes.len()) {
            Some(room) => room.copy_from_slice(&bytes),
            None => {
                let cause = format!("the directories have more than {ROOTS_MAX} bytes");
                return Err(Error::usage("use --io-roots", cause));
            }
        }
        let memory = extents_map::create().op("share memory with programs")?;
        let directory = Directory::create(&directory::executable(&Without::from_env()?)?)?;
        let path = directory.path.clone();
        let door = (|| {
            let resident = borrow::resident_for_files(path.as_os_str().as_bytes(), !roots.is_empty())?;
            fs::write(path.join(FILE), resident).op_on("write", path.join(FILE))?;
            listen(path.join(DOOR))
        })();
        let door = door.inspect_err(|_| directory.remove())?;
        preload(&mut launch.env, path.join(FILE).as_os_str());
        let job = Rc::new(Writing {
            memory,
            roots: list,
            programs: RefCell::default(),
            kept: RefCell::default(),
            worker: RefCell::default(),
            finishing: Cell::new(false),
            broken: Cell::new(false),
            told: RefCell::default(),
        });
        let (over, ended) = bounded(1);
        let _worker = node.tasks.spawn(supervise(Rc::clone(node), launch.job, Rc::clone(&job), over));
        let _door = node.tasks.spawn(serve(Rc::clone(node), door, launch.job, Rc::clone(&job)));
        Ok(Some(Files { directory, job, ended, _door, _worker }))
    }

    /// Has everything written that the job's programs left. None of them runs any more. What was not written is told.
    pub(super) async fn finish(self) -> Vec<String> {
        self.job.finishing.set(true);
        for (segment, program) in self.job.programs.borrow_mut().iter_mut().filter(|(_, program)| !program.over) {
            program.over = true;
            log::debug!("segment {segment} is over");
        }
        self.job.tell_all().await;
        let late = async {
            Timer::after(PATIENCE).await;
            let seconds = PATIENCE.as_secs();
            self.job.told.borrow_mut().push(format!("not all that programs wrote could be written within {seconds} s"));
        };
        let ended = async {
            // Nothing is ever sent.
            let _ = self.ended.recv().await;
        };
        ended.or(late).await;
        self.job.told.take()
    }
}

impl Writing {
    /// Tells the worker, if there is one now; the next one is told anyway.
    async fn tell(&self, word: Work, fds: &[std::os::fd::BorrowedFd<'_>]) {
        let worker = self.worker.borrow().clone();
        if let Some(worker) = worker {
            let _ = worker.write_with(|socket| socket.send(&word, fds)).await;
        }
    }

    /// Tells a fresh worker what there is; or an old one that it is to finish.
    async fn tell_all(&self) {
        let programs: Vec<_> =
            self.programs.borrow().iter().map(|(segment, program)| (*segment, program.over)).collect();
        let kept: Vec<_> =
            self.kept.borrow().iter().filter_map(|(name, fd)| Some((*name, fd.try_clone().ok()?))).collect();
        for (segment, _) in &programs {
            self.tell(Work::Begin { segment: *segment }, &[]).await;
        }
        for ((segment, file), fd) in kept {
            self.tell(Work::File { segment, file }, &[fd.as_fd()]).await;
        }
        self.tell(Work::Known, &[]).await;
        for (segment, _) in programs.iter().filter(|(_, over)| *over) {
            self.tell(Work::Over { segment: *segment }, &[]).await;
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
            Worked::Drained { segment } => {
                self.programs.borrow_mut().remove(segment);
                self.kept.borrow_mut().retain(|(of, _), _| of != segment);
            }
            Worked::Lost { segment, file, errno } => {
                let kept = self.kept.borrow();
                let fd = kept.get(&(*segment, *file)).map(AsRawFd::as_raw_fd);
                let path = fd.and_then(|fd| fs::read_link(format!("/proc/self/fd/{fd}")).ok());
                let name = path.map_or_else(|| "a file".to_owned(), |path| path.display().to_string());
                let error = io::Error::from_raw_os_error(*errno);
                self.told.borrow_mut().push(format!("{name}: what a program wrote is not there: {error}"));
            }
            Worked::Finished => {}
        }
    }
}

/// Whether the resident can be in a program; in what a script names likewise.
fn check(program: &Path, follow: bool) -> Result<()> {
    // Who cannot be read here cannot be executed either, or is shown by the view: the resident looks again.
    let Ok(file) = fs::File::open(program) else { return Ok(()) };
    match Elf::read(&file, None) {
        Ok(Elf { interpreter: None, .. }) => {
            let error =
                Error::usage("use --async-io", "it is statically linked: its system calls cannot be told apart");
            Err(error.on(program).remedy("run it without --async-io"))
        }
        Ok(_) => Ok(()),
        Err(_) => {
            let head = crate::loader::elf::read_up_to(&file, 0, 256).unwrap_or_default();
            match Shebang::parse(&head).filter(|_| follow) {
                Some(script) => check(Path::new(&script.interpreter), false),
                None => Ok(()),
            }
        }
    }
}

/// Runs workers, one after the other, until one has finished.
async fn supervise(node: Rc<Node>, id: JobId, job: Rc<Writing>, _over: Sender<()>) {
    let mut failures = 0;
    loop {
        let begun = Instant::now();
        let cause = match work(&job).await {
            Ok(true) => return,
            Ok(false) => "it ended".to_owned(),
            Err(error) => error.to_string(),
        };
        job.worker.borrow_mut().take();
        failures = if begun.elapsed() < SHORT { failures + 1 } else { 0 };
        if failures == ATTEMPTS {
            job.broken.set(true);
            let _ = extents_map::give_up(&job.memory);
            let error = Error::new("run the I/O worker", cause).to_string();
            node.report(&Report::Failed { job: id, node: node.id, error }).await;
            return;
        }
        Timer::after(PAUSE * failures).await;
    }
}

/// Runs one worker; true: it has finished.
async fn work(job: &Writing) -> Result<bool> {
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
    job.tell_all().await;
    let mut finished = false;
    while let Ok(Some((word, _))) = socket.read_with(Seqpacket::receive_now::<Worked>).await {
        finished |= word == Worked::Finished;
        job.heard(&word);
    }
    worker.end().await;
    Ok(finished)
}

async fn serve(node: Rc<Node>, door: Async<OwnedFd>, id: JobId, job: Rc<Writing>) {
    use rustix::net::SocketFlags;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accepted = door.read_with(|fd| Ok(rustix::net::accept_with(fd, flags)?)).await;
        let Ok(program) = accepted.and_then(Async::new) else {
            Timer::after(PAUSE).await;
            continue;
        };
        let (tasks, node, job) = (Rc::clone(&node.tasks), Rc::clone(&node), Rc::clone(&job));
        let answering = async move {
            if let Err(error) = answer(&node, id, &program, &job).await {
                log::debug!("a program that writes: {error}");
            }
        };
        tasks.spawn(answering).detach();
    }
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
    let question = Question { mark: MARK, op: word(8), file: word(12), segment: word(16), detail: word(20) };
    Ok(ours.then_some((question, fd)))
}

/// Answers one question of a program.
async fn answer(node: &Rc<Node>, id: JobId, program: &Async<OwnedFd>, job: &Rc<Writing>) -> Result<()> {
    // The directory keeps others out already.
    let peer = rustix::net::sockopt::socket_peercred(program).op("ask who a program is")?;
    if peer.uid != rustix::process::geteuid() {
        return Ok(());
    }
    let Some((question, fd)) = program.read_with(receive).await.op("hear a program")? else { return Ok(()) };
    let pid = peer.pid.as_raw_nonzero().get();
    let name = (question.segment, question.file);
    let owned = || job.programs.borrow().get(&name.0).is_some_and(|program| program.pid == pid && !program.over);
    let mut error = 0u32;
    match question.op {
        op::ATTACH => return attach(node, job, program, pid).await,
        op::KEEP if owned() && (name.1 as usize) < FILES => match fd.map(|fd| (fd.try_clone(), fd)) {
            Some((Ok(copy), fd)) => {
                job.kept.borrow_mut().insert(name, fd);
                job.tell(Work::File { segment: name.0, file: name.1 }, &[copy.as_fd()]).await;
            }
            _ => error = rustix::io::Errno::MFILE.raw_os_error().cast_unsigned(),
        },
        op::DROP if owned() => {
            job.kept.borrow_mut().remove(&name);
            job.tell(Work::Drop { segment: name.0, file: name.1 }, &[]).await;
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
        _ => error = rustix::io::Errno::INVAL.raw_os_error().cast_unsigned(),
    }
    send(program, &error.to_ne_bytes(), &[]).op("answer a program")
}

/// A program takes part.
async fn attach(node: &Rc<Node>, job: &Rc<Writing>, program: &Async<OwnedFd>, pid: i32) -> Result<()> {
    // Of the same process: what it executed before, or before a fork.
    let before = job.programs.borrow().iter().find(|(_, other)| other.pid == pid && !other.over).map(|(nth, _)| *nth);
    if let Some(segment) = before {
        job.end(segment).await;
    }
    let free = {
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
    terms.extend(job.roots);
    debug_assert_eq!(terms.len(), size_of::<Terms>());
    if let Some((segment, ended)) = free {
        let state = extents_map::reset(&job.memory, segment);
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
