//! A session that outlives the command that started it: a door, and a job for each command that asks for one. The command's own standard streams do the talking; they are handed over with the question.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_channel::{Sender, bounded, unbounded};
use nix::sys::signal::Signal;
use smol::future::FutureExt;
use smol::{Async, Timer};

use super::console::Console;
use super::door::Door;
use super::hosting::{Elsewhere, Ranks};
use super::overlay::Spawner;
use super::session::Session;
use super::stats::Phases;
use super::status::Subject;
use crate::error::EXIT_FAILED;
use crate::net::memory_file;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::session::{SessionAsk, SessionTell};
use crate::{Result, error::Context};

/// A request is at most this long: arguments and environment have limits of their own.
const SPEC_MAX: u64 = 16 << 20;

/// What the tasks of a resident session share.
struct Resident {
    session: Session,
    subject: Rc<Subject>,
    tasks: Spawner,
    jobs: Cell<u32>,
    /// When their number changed last.
    changed: Cell<Instant>,
    stop: Sender<Seqpacket>,
}

/// Serves commands at a session's door until one says stop, `signalled` is over, or no job was there for the time `idle`; then ends the
/// session, and whoever said stop sees its socket close.
pub async fn serve(
    door: Door,
    tasks: &Spawner,
    session: Session,
    subject: Rc<Subject>,
    signalled: impl Future<Output = ()>,
    idle: Option<Duration>,
) {
    let (stop, stopped) = bounded(1);
    let (jobs, changed) = (Cell::new(0), Cell::new(Instant::now()));
    let resident = Rc::new(Resident { session, subject, tasks: Rc::clone(tasks), jobs, changed, stop });
    let accept = async {
        loop {
            let command = door.accept().await;
            tasks.spawn(Rc::clone(&resident).hear(command)).detach();
        }
    };
    let signalled = async {
        signalled.await;
        None
    };
    let idle = async {
        match idle {
            Some(limit) => resident.idle_for(limit).await,
            None => smol::future::pending().await,
        }
        None
    };
    let last = accept.or(async { stopped.recv().await.ok() }).or(signalled).or(idle).await;
    resident.session.stop().await;
    drop(door);
    drop(last);
}

impl Resident {
    fn count(&self, jobs: u32) {
        self.jobs.set(jobs);
        self.changed.set(Instant::now());
    }

    /// Waits until no job was there for so long.
    async fn idle_for(&self, limit: Duration) {
        loop {
            let since = if self.jobs.get() == 0 { self.changed.get() } else { Instant::now() };
            if since.elapsed() >= limit && self.jobs.get() == 0 {
                return;
            }
            match since.checked_add(limit) {
                Some(at) => Timer::at(at).await,
                None => smol::future::pending().await,
            };
        }
    }

    /// One command: a question, or a job with its signals.
    async fn hear(self: Rc<Self>, command: Seqpacket) {
        let Ok(command) = Async::new(command) else { return };
        match command.read_with(Seqpacket::receive_now::<SessionAsk>).await {
            Ok(Some((SessionAsk::Run { front, launcher }, fds))) => {
                self.count(self.jobs.get() + 1);
                let code = self.run(&command, fds, front, launcher).await;
                self.count(self.jobs.get() - 1);
                let _ = command.get_ref().send(&SessionTell::Ended { code }, &[]);
            }
            Ok(Some((SessionAsk::About, _))) => {
                let about = SessionTell::About { jobs: self.jobs.get(), stored: self.session.stored() };
                if let Ok(hosts) = memory_file::write_bytes("hpcrt-hosts", self.session.hosts().join("\n").as_bytes()) {
                    let _ = command.get_ref().send(&about, &[hosts.as_fd()]);
                }
            }
            Ok(Some((SessionAsk::Status { nodes, pids }, _))) => self.subject.answer(&command, nodes, pids).await,
            Ok(Some((SessionAsk::Stop, _))) => {
                if let Ok(command) = command.into_inner() {
                    let _ = self.stop.try_send(command);
                }
            }
            _ => {}
        }
    }

    async fn run(&self, command: &Async<Seqpacket>, fds: Vec<OwnedFd>, front: bool, launcher: bool) -> u8 {
        let mut fds = fds.into_iter();
        let (Some(spec), Some(stdout), Some(stderr)) = (fds.next(), fds.next(), fds.next()) else {
            return EXIT_FAILED;
        };
        let front = if front { fds.next() } else { None };
        let (sender, signals) = unbounded();
        let (ended, over) = bounded(1);
        let Ok(console) = Console::of(&self.tasks, [stdout, stderr], fds.next(), signals, front) else {
            return EXIT_FAILED;
        };
        // A command that is gone wants its job ended; its signals are passed on.
        let listen = async {
            loop {
                match command.read_with(Seqpacket::receive_now::<SessionAsk>).await {
                    Ok(Some((SessionAsk::Signal { signal }, _))) => {
                        let _ = Signal::try_from(signal).map(|signal| sender.try_send(signal));
                    }
                    Ok(Some((SessionAsk::Reads { may }, _))) => console.reads.store(may, Ordering::Relaxed),
                    Ok(Some((SessionAsk::Over { code }, _))) => drop(ended.try_send(code)),
                    _ => break,
                }
            }
            for _ in 0..2 {
                let _ = sender.try_send(Signal::SIGTERM);
            }
            smol::future::pending().await
        };
        let job = async {
            let spec = memory_file::read(spec, SPEC_MAX).op("read the request")?;
            let resolving = self.session.resolve(&self.tasks, &spec);
            let ranks = if launcher { Ranks::Elsewhere(Elsewhere { command, over: &over }) } else { Ranks::Ours };
            self.session.run(&spec, resolving, Phases::default(), &console, ranks).await
        };
        let job = async { console.conclude(job.await).await };
        job.or(listen).await
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
