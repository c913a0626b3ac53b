//! A session that outlives the command that started it: a socket in a directory that only its owner can enter, and a job for each
//! command that asks for one. The command's own standard streams do the talking; they are handed over with the question.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::rc::Rc;

use async_channel::{Sender, bounded, unbounded};
use nix::sys::signal::Signal;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use smol::Async;
use smol::future::FutureExt;

use super::console::Console;
use super::overlay::Spawner;
use super::session::Session;
use super::stats::Phases;
use crate::net::memory_file;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::session::{SessionAsk, SessionTell};
use crate::{Error, Result, error::Context};

/// A request is at most this long: arguments and environment have limits of their own.
const SPEC_MAX: u64 = 16 << 20;

/// The directory of this user's session sockets; made on first use.
///
/// # Errors
/// It cannot be made, or others can reach into it.
pub fn directory() -> Result<PathBuf> {
    let user = rustix::process::getuid();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|d| d.is_dir());
    let path = runtime.map_or_else(|| format!("/tmp/hpcrt-{}", user.as_raw()).into(), |d| d.join("hpcrt"));
    match fs::DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).op_on("make", &path),
        _ => {}
    }
    let meta = fs::symlink_metadata(&path).op_on("inspect", &path)?;
    if !meta.is_dir() || meta.uid() != user.as_raw() || meta.mode() & 0o077 != 0 {
        return Err(Error::new("use", "it is not a directory that only you can reach").on(path).remedy("remove it"));
    }
    Ok(path)
}

fn socket(name: &str) -> Result<(PathBuf, SocketAddrUnix)> {
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return Err(Error::usage("find the session", "that is not a session's name").on(name));
    }
    let path = directory()?.join(name);
    let address = SocketAddrUnix::new(&path).op_on("name the socket", &path)?;
    Ok((path, address))
}

fn seqpacket(flags: SocketFlags) -> Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)
        .op("make a socket")
}

/// Connects to a session of this user on this host. A socket that nobody serves any more is removed.
///
/// # Errors
/// There is no such session.
pub fn connect(name: &str) -> Result<Seqpacket> {
    let (path, address) = socket(name)?;
    let fd = seqpacket(SocketFlags::empty())?;
    match rustix::net::connect(&fd, &address) {
        Ok(()) => Ok(Seqpacket::from_fd(fd)),
        Err(error) => {
            if error == rustix::io::Errno::CONNREFUSED {
                let _ = fs::remove_file(path);
            }
            let no = Error::usage("find the session", "there is no such session on this host").on(name);
            Err(no.remedy("hpcrt session list shows yours"))
        }
    }
}

/// Names of the sockets in [`directory`].
///
/// # Errors
/// The directory cannot be used.
pub fn names() -> Result<Vec<String>> {
    let path = directory()?;
    let entries = fs::read_dir(&path).op_on("list", &path)?;
    let mut names: Vec<String> = entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort_unstable();
    Ok(names)
}

/// A resident session's socket; its name disappears with this.
#[derive(Debug)]
pub struct Door {
    listener: Async<OwnedFd>,
    path: PathBuf,
}

impl Drop for Door {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// What the tasks of a resident session share.
struct Resident {
    session: Session,
    tasks: Spawner,
    jobs: Cell<u32>,
    stop: Sender<Seqpacket>,
}

impl Door {
    /// Opens the socket of a session called `name`.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(name: &str) -> Result<Door> {
        let (path, address) = socket(name)?;
        let fd = seqpacket(SocketFlags::NONBLOCK)?;
        rustix::net::bind(&fd, &address).op_on("make the session's socket", &path)?;
        rustix::net::listen(&fd, 64).op_on("listen on", &path)?;
        Ok(Door { listener: Async::new(fd).op("watch the session's socket")?, path })
    }

    /// Serves commands until one says stop or `signalled` is over; then ends the session, and whoever said stop sees its socket close.
    pub async fn serve(self, tasks: &Spawner, session: Session, signalled: impl Future<Output = ()>) {
        let (stop, stopped) = bounded(1);
        let resident = Rc::new(Resident { session, tasks: Rc::clone(tasks), jobs: Cell::new(0), stop });
        let accept = async {
            loop {
                let accepted =
                    self.listener.read_with(|fd| Ok(rustix::net::accept_with(fd, SocketFlags::CLOEXEC)?)).await;
                let Ok(command) = accepted else { continue };
                // The directory keeps others out already.
                let mine =
                    rustix::net::sockopt::socket_peercred(&command).is_ok_and(|c| c.uid == rustix::process::getuid());
                if mine {
                    tasks.spawn(Rc::clone(&resident).hear(Seqpacket::from_fd(command))).detach();
                }
            }
        };
        let signalled = async {
            signalled.await;
            None
        };
        let last = accept.or(async { stopped.recv().await.ok() }).or(signalled).await;
        resident.session.stop().await;
        drop(self);
        drop(last);
    }
}

impl Resident {
    /// One command: a question, or a job with its signals.
    async fn hear(self: Rc<Self>, command: Seqpacket) {
        let Ok(command) = Async::new(command) else { return };
        match command.read_with(Seqpacket::receive_now::<SessionAsk>).await {
            Ok(Some((SessionAsk::Run, fds))) => {
                self.jobs.set(self.jobs.get() + 1);
                let code = self.run(&command, fds).await;
                self.jobs.set(self.jobs.get() - 1);
                let _ = command.get_ref().send(&SessionTell::Ended { code }, &[]);
            }
            Ok(Some((SessionAsk::About, _))) => {
                let (hosts, stored) = (self.session.hosts(), self.session.stored());
                let _ = command.get_ref().send(&SessionTell::About { hosts, jobs: self.jobs.get(), stored }, &[]);
            }
            Ok(Some((SessionAsk::Stop, _))) => {
                if let Ok(command) = command.into_inner() {
                    let _ = self.stop.try_send(command);
                }
            }
            _ => {}
        }
    }

    async fn run(&self, command: &Async<Seqpacket>, fds: Vec<OwnedFd>) -> u8 {
        let mut fds = fds.into_iter().map(File::from);
        let (Some(spec), Some(stdout), Some(stderr)) = (fds.next(), fds.next(), fds.next()) else { return 125 };
        let (sender, signals) = unbounded();
        let console = Console { stdin: fds.next(), stdout, stderr, signals, own: false, progress: RefCell::default() };
        // A command that is gone wants its job ended; its signals are passed on.
        let listen = async {
            while let Ok(Some((SessionAsk::Signal { signal }, _))) =
                command.read_with(Seqpacket::receive_now::<SessionAsk>).await
            {
                let _ = Signal::try_from(signal).map(|signal| sender.try_send(signal));
            }
            for _ in 0..2 {
                let _ = sender.try_send(Signal::SIGTERM);
            }
            smol::future::pending().await
        };
        let job = async {
            let spec = memory_file::read(spec.into(), SPEC_MAX).op("read the request")?;
            let resolving = self.session.resolve(&self.tasks, &spec);
            self.session.run(&spec, resolving, Phases::default(), &console).await
        };
        job.or(listen).await.unwrap_or_else(|error: Error| {
            console.say(&error);
            error.exit_code()
        })
    }
}

/// Asks a session one thing.
///
/// # Errors
/// The session is gone.
pub fn ask(command: &Seqpacket, question: &SessionAsk, fds: &[OwnedFd]) -> Result<()> {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    command.send(question, &fds).op("ask the session")
}
