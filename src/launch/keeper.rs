//! The keeper: a single-threaded fork of the agent that forks one keeper per job; each of those makes its job's view, starts the
//! ranks, reaps them, and leaves nothing behind.
//!
//! Who watches whom: a job's keeper dies with the session's keeper and ranks with their job's keeper (parent-death signal); all are
//! subreapers, so whoever survives finds the orphans among its own children and kills them. A keeper sees its agent's death as the
//! end of its socket.
//!
//! Hazard: this code runs in forks of the agent. It must never touch the agent's standard input and output (its link to the parent)
//! and leaves through `_exit` only.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpid};

use super::job_keeper;
use crate::error::Context;
use crate::loader::view::directory::{self, Directory};
use crate::loader::view::namespace::{Base, Failure, Lacks, Place, SMALL};
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::control::{JobId, Limits, Status, View};
use crate::net::wire::keeper::{Ask, Tell};
use crate::sys::process::Fate;
use crate::sys::without::{Ability, Without};
use crate::sys::{boot, process};

/// How long what was killed may take to disappear before it is given up (it hangs in the kernel).
pub(super) const KILLED: Duration = Duration::from_secs(3);

/// Forks the session's keeper; the agent must not have threads yet. Returns the agent's end of their socket.
///
/// # Errors
/// `fork(2)`'s.
pub fn start() -> io::Result<(Seqpacket, Pid)> {
    let (ours, theirs) = Seqpacket::pair()?;
    match process::fork()? {
        Some(pid) => Ok((ours, pid)),
        None => {
            drop(ours);
            let served = Keeper::new(theirs).and_then(Keeper::serve);
            process::leave(i32::from(served.is_err()))
        }
    }
}

/// A [`Tell::Store`], and the store's directory.
type Store = (Tell, OwnedFd);

/// The session's keeper.
struct Keeper {
    agent: Seqpacket,
    children_died: SignalFd,
    /// The session's namespaces, in which this process is since they were made.
    base: Option<Base>,
    /// The bootstrapper; or why ranks start without it.
    image: Result<OwnedFd, String>,
    without: Without,
    /// The session's store, where it has no namespaces.
    directory: Option<Directory>,
    jobs: Vec<Pid>,
}

impl Keeper {
    fn new(agent: Seqpacket) -> io::Result<Keeper> {
        let null = fs::File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::thread::set_name(c"hpcrt-keeper")?;
        process::become_subreaper();
        // Who kills the agent's process group must leave the keepers, so that they can remove what it ran.
        nix::unistd::setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
        let without = Without::from_env().unwrap_or_else(|error| {
            log::warn!("{error}");
            Without::default()
        });
        Ok(Keeper {
            agent,
            children_died: watch_children()?,
            base: None,
            image: image(&without),
            without,
            directory: None,
            jobs: Vec::new(),
        })
    }

    fn serve(mut self) -> io::Result<()> {
        let obeyed = self.obey();
        // The agent is gone. The jobs' keepers see the end of their own sockets; give them time to end in order.
        let end = Instant::now() + KILLED;
        while !self.jobs.is_empty() && Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            if let [true] = wait([self.children_died.as_fd()], Some(left))? {
                self.children_died.read_signal()?;
                self.reap();
            }
        }
        process::kill_descendants(&[], KILLED);
        if let Some(base) = &self.base {
            base.remove_store();
        }
        if let Some(directory) = &self.directory {
            directory.remove();
        }
        obeyed
    }

    /// Follows the agent until it is gone.
    fn obey(&mut self) -> io::Result<()> {
        loop {
            let [asked, died] = wait([self.agent.as_fd(), self.children_died.as_fd()], None)?;
            if died {
                self.children_died.read_signal()?;
                self.reap();
            }
            if asked {
                match self.agent.receive::<Ask>()? {
                    Some((Ask::Job { job }, fds)) => self.fork_job(job, fds)?,
                    Some((Ask::Store { view, directory, bytes }, _)) => {
                        let directory = directory.map(|d| PathBuf::from(OsString::from_vec(d)));
                        self.make_store(view, directory, bytes)?;
                    }
                    Some(_) => {}
                    None => return Ok(()),
                }
            }
        }
    }

    /// A dead job's keeper may leave orphans, which are our children now.
    fn reap(&mut self) {
        let mut died = false;
        while let Some((pid, fate)) = process::reap() {
            let at = self.jobs.iter().position(|job| *job == pid);
            if let Some(at) = at.filter(|_| !matches!(fate, Fate::Stopped(_))) {
                self.jobs.swap_remove(at);
                died = true;
                if fate != Fate::Exited(0) {
                    log::warn!("the keeper of a job ended unexpectedly: {fate:?}");
                }
            }
        }
        if died {
            process::kill_descendants(&self.jobs, KILLED);
        }
    }

    fn make_store(&mut self, view: View, place: Option<PathBuf>, bytes: u64) -> io::Result<()> {
        let made = match view {
            View::Audit => self.make_directory(place, None),
            _ => match self.make_base(place.as_deref().map_or(Place::Memory(bytes), Place::Directory)) {
                Err(Failure { lacks: Some(Lacks::Namespaces), error }) if view == View::Auto => {
                    self.make_directory(place, Some(error.bare().to_string()))
                }
                made => made.map_err(|failure| failure.error),
            },
        };
        match made {
            Ok((told, store)) => self.agent.send(&told, &[store.as_fd()]),
            Err(error) => self.agent.send(&failed(&error), &[]),
        }
    }

    fn make_base(&mut self, place: Place<'_>) -> Result<Store, Failure> {
        if let Some(cause) = self.without.denies(Ability::Userns) {
            let error = crate::Error::new("make namespaces", cause);
            return Err(Failure { lacks: Some(Lacks::Namespaces), error });
        }
        // What fails half-way leaves a user without a name, in whose place no rank may run: somebody else tries first.
        if !rustix::process::geteuid().is_root() {
            try_base(&self.without)?;
        }
        let base = Base::create(place, &self.without)?;
        let store = base.store.try_clone().op("keep the store open")?;
        let limits = Limits { memory: base.spilled.clone(), ..self.limits() };
        let directory = base.directory.as_ref().map(path_of);
        self.base = Some(base);
        Ok((Tell::Store { directory, audit: false, limits }, store))
    }

    /// `why`: there are no namespaces, though they were wanted.
    fn make_directory(&mut self, place: Option<PathBuf>, why: Option<String>) -> crate::Result<Store> {
        let place = place.map_or_else(|| directory::executable(&self.without), Ok)?;
        let directory = Directory::create(&place)?;
        let store = directory.own.try_clone().op("keep the store open")?;
        let limits = Limits { namespaces: why, ..self.limits() };
        let told = Tell::Store { directory: Some(path_of(&directory)), audit: true, limits };
        self.directory = Some(directory);
        Ok((told, store))
    }

    fn limits(&self) -> Limits {
        Limits { memfd: self.image.as_ref().err().cloned(), ..Limits::default() }
    }

    fn fork_job(&mut self, job: JobId, fds: Vec<OwnedFd>) -> io::Result<()> {
        let Ok([socket, plan]) = <[OwnedFd; 2]>::try_from(fds) else {
            return Err(io::Error::other("a job comes with two descriptors"));
        };
        let socket = Seqpacket::from_fd(socket);
        let parent = getpid();
        match process::fork() {
            Ok(Some(pid)) => {
                self.jobs.push(pid);
                return Ok(());
            }
            Ok(None) => {}
            // Others of the session go on: a limit on processes may be reached for a while only.
            Err(error) => {
                let error = crate::Error::new("start the keeper of a job", error)
                    .remedy("see ulimit -u and the cgroup's pids.max");
                let _ = socket.send(&failed(&error), &[]).and_then(|()| socket.send(&Tell::Done, &[]));
                return Ok(());
            }
        }
        if !process::die_with(parent) {
            process::leave(1);
        }
        log::debug!("keeper of job {job} is process {}", getpid());
        process::leave(i32::from({
            let (image, base) = (std::mem::replace(&mut self.image, Err(String::new())).ok(), self.base.take());
            job_keeper::keep(socket, plan, image, base, &self.without).is_err()
        }))
    }
}

fn path_of(directory: &Directory) -> Vec<u8> {
    directory.path.clone().into_os_string().into_vec()
}

fn image(without: &Without) -> Result<OwnedFd, String> {
    without.denies(Ability::Memfd).map_or_else(|| boot::image().map_err(|error| error.to_string()), Err)
}

/// Has a child make namespaces, to see whether that can be done.
fn try_base(without: &Without) -> Result<(), Failure> {
    let forbidden = |error: crate::Error| Failure { lacks: Some(Lacks::Namespaces), error };
    let (reader, writer) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).op("make a pipe").map_err(Failure::from)?;
    let Some(child) = process::fork().op("fork a process to try things in")? else {
        drop(reader);
        let made = Base::create(Place::Memory(SMALL), without);
        let code = i32::from(made.is_err());
        match made {
            Ok(base) => base.remove_store(),
            Err(failure) => {
                let (tried, cause) = failure.error.parts();
                _ = rustix::io::write(&writer, format!("{tried}\0{cause}").as_bytes());
            }
        }
        process::leave(code)
    };
    drop(writer);
    let mut cause = String::new();
    let _ = fs::File::from(reader).read_to_string(&mut cause);
    if let Ok(nix::sys::wait::WaitStatus::Exited(_, 0)) = nix::sys::wait::waitpid(child, None) {
        return Ok(());
    }
    let (tried, cause) = cause.split_once('\0').unwrap_or(("make namespaces", &cause));
    Err(forbidden(crate::Error::new(tried.to_owned(), cause)))
}

/// An error as the agent is told.
pub(super) fn failed(error: &crate::Error) -> Tell {
    Tell::Failed { error: error.to_string() }
}

/// Blocks SIGCHLD and makes it readable.
pub(super) fn watch_children() -> io::Result<SignalFd> {
    let set = SigSet::from(Signal::SIGCHLD);
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&set), None)?;
    Ok(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}

/// Waits until one of the descriptors can be read or has ended, or the time is over.
///
/// # Errors
/// `poll(2)`'s.
pub fn wait<const N: usize>(fds: [std::os::fd::BorrowedFd<'_>; N], limit: Option<Duration>) -> io::Result<[bool; N]> {
    let mut set = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    // Round up: a timeout cut to 0 ms would spin until the deadline.
    let limit = limit.map_or(PollTimeout::NONE, |l| {
        PollTimeout::try_from(l + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX)
    });
    match poll(&mut set, limit) {
        Ok(_) => Ok(set.map(|fd| fd.any().unwrap_or(false))),
        Err(nix::errno::Errno::EINTR) => Ok([false; N]),
        Err(error) => Err(error.into()),
    }
}

/// Sends a signal to every direct child.
pub(super) fn signal_children(signal: Signal) -> usize {
    let children = process::children();
    children.iter().filter(|pid| kill(**pid, signal).is_ok()).count()
}

/// An end as the wire tells it; `None` for a mere stop.
pub(super) fn ended(fate: Fate) -> Option<Status> {
    match fate {
        Fate::Exited(code) => Some(Status::Code(u8::try_from(code).unwrap_or(u8::MAX))),
        Fate::Killed(signal) => Some(Status::Signal(signal)),
        Fate::Stopped(_) => None,
    }
}
