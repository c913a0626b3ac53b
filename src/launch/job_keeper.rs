//! The keeper of one job on one node: starts the ranks, reaps them, and ends only when no process of the job is left.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::signalfd::SignalFd;
use nix::sys::wait::WaitStatus;
use nix::unistd::{Pid, getpid};

use super::keeper::{KILLED, ended, failed, signal_children, wait, watch_children};
use super::plan::KEEPER_AT;
use crate::Error;
use crate::loader::view::namespace::{Base, Failure, Lacks, Mounts, Shared};
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::keeper::{Ask, Ended, Tell};
use crate::sys::boot_plan::{Failure as Excuse, STAGE_HOME};
use crate::sys::process;

/// See the module.
pub(super) struct JobKeeper {
    agent: Seqpacket,
    /// The session's namespaces; `None` when the session has no views.
    base: Option<Base>,
    view: Option<Mounts>,
    plan: OwnedFd,
    boot: OwnedFd,
    children_died: SignalFd,
    /// Where ranks say why they could not become the program.
    failures: std::fs::File,
    failures_in: OwnedFd,
    ranks: HashMap<Pid, u32>,
    /// Ranks that did not become the program: their exit code is the bootstrapper's.
    not_started: HashSet<u32>,
    /// Every rank was asked for, so that none left means over.
    complete: bool,
    ending: Option<Ending>,
}

/// The job is being ended.
#[derive(Clone, Copy)]
struct Ending {
    kill_at: Instant,
}

/// A plan with this process in it.
fn with_keeper(plan: OwnedFd) -> io::Result<OwnedFd> {
    let plan = process::above_standard(plan)?;
    let pid = u32::try_from(getpid().as_raw()).unwrap_or(0);
    rustix::io::pwrite(&plan, &pid.to_ne_bytes(), KEEPER_AT)?;
    Ok(plan)
}

impl JobKeeper {
    pub(super) fn new(agent: Seqpacket, plan: OwnedFd, boot: OwnedFd, base: Option<Base>) -> io::Result<JobKeeper> {
        process::become_subreaper();
        process::default_action(Signal::SIGPIPE);
        let plan = with_keeper(plan)?;
        let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
        let (failures, failures_in) = rustix::pipe::pipe_with(flags)?;
        Ok(JobKeeper {
            agent,
            base,
            view: None,
            plan,
            boot,
            children_died: watch_children()?,
            failures: failures.into(),
            failures_in: process::above_standard(failures_in)?,
            ranks: HashMap::new(),
            not_started: HashSet::new(),
            complete: false,
            ending: None,
        })
    }

    pub(super) fn serve(mut self) -> io::Result<()> {
        let kept = self.keep();
        if let Err(error) = &kept {
            self.failed("keep the job", error.to_string())?;
        }
        kept
    }

    fn keep(&mut self) -> io::Result<()> {
        while !(self.complete && self.ranks.is_empty()) {
            let limit =
                self.ending.map(|e| e.kill_at.saturating_duration_since(Instant::now()).max(Duration::from_millis(5)));
            let [asked, died] = wait([self.agent.as_fd(), self.children_died.as_fd()], limit)?;
            if died {
                self.children_died.read_signal()?;
                self.reap()?;
            }
            if asked {
                match self.agent.receive::<Ask>()? {
                    Some((ask, fds)) => self.handle(ask, fds)?,
                    None => {
                        self.sweep();
                        return Ok(());
                    }
                }
            }
            if let Some(ending) = self.ending
                && Instant::now() >= ending.kill_at
            {
                signal_children(Signal::SIGKILL);
                if Instant::now() >= ending.kill_at + KILLED {
                    let error = "processes do not die; they hang in the kernel".to_owned();
                    self.failed("end the job", error)?;
                    break;
                }
            }
        }
        self.sweep();
        self.agent.send(&Tell::Done, &[])
    }

    fn handle(&mut self, ask: Ask, fds: Vec<OwnedFd>) -> io::Result<()> {
        match ask {
            Ask::Spawn { first, count } => self.spawn(first, count, fds),
            Ask::View { roots } => self.mount_view(roots, fds),
            Ask::Show => self.shown(self.view.as_ref().map_or(Ok(()), Mounts::bind_roots)),
            Ask::Leave => {
                let left = self.view.take().map_or(Ok(()), Mounts::leave);
                self.shown(left)
            }
            Ask::Bind { files } => {
                if let Some(view) = &self.view {
                    view.bind_files(files.iter().map(|(path, id)| (&path[..], *id)));
                }
                Ok(())
            }
            Ask::Plan => match <[OwnedFd; 1]>::try_from(fds) {
                Ok([plan]) => {
                    self.plan = with_keeper(plan)?;
                    Ok(())
                }
                Err(_) => self.failed("start ranks", "a plan comes with one descriptor".to_owned()),
            },
            Ask::Go => {
                self.complete = true;
                Ok(())
            }
            Ask::Pids => self.tell_pids(|_| true),
            Ask::Signal { signal } => {
                let signal = Signal::try_from(signal)?;
                for pid in self.ranks.keys() {
                    let _ = killpg(*pid, signal);
                }
                Ok(())
            }
            Ask::End { grace_ms } => {
                for pid in self.ranks.keys() {
                    let _ = killpg(*pid, Signal::SIGTERM);
                    let _ = killpg(*pid, Signal::SIGCONT);
                }
                let kill_at = Instant::now() + Duration::from_millis(grace_ms.into());
                let kill_at = self.ending.map_or(kill_at, |e| e.kill_at.min(kill_at));
                self.ending = Some(Ending { kill_at });
                self.complete = true;
                Ok(())
            }
            Ask::Store { .. } | Ask::Job { .. } => {
                self.failed("serve the agent", format!("{ask:?} is not for a job's keeper"))
            }
        }
    }

    fn shown(&self, result: Result<(), Failure>) -> io::Result<()> {
        match result {
            Ok(()) => self.agent.send(&Tell::Shown, &[]),
            Err(failure) => self.agent.send(&failed(&failure.error), &[]),
        }
    }

    /// Where FUSE is missing, staged files are still bound onto the originals: contents come from the store, names do not.
    fn mount_view(&mut self, roots: Vec<Vec<u8>>, shared: Vec<OwnedFd>) -> io::Result<()> {
        let Some(base) = &self.base else {
            return self.failed("show the program's files", "the session has no store".to_owned());
        };
        let mounted = match Shared::try_from(shared) {
            Ok(shared) => Mounts::join(shared, roots).map(|view| (view, Ok(Vec::new()))),
            Err(_) => Mounts::create(base.sealed.as_fd(), roots).map(|mut view| {
                let made = view.mount_fuse();
                (view, made.map(|(fuse, shared)| [fuse].into_iter().chain(shared).collect()))
            }),
        };
        let (view, fds) = match mounted {
            Ok(mounted) => mounted,
            Err(failure) => return self.agent.send(&failed(&failure.error), &[]),
        };
        self.view = Some(view);
        match fds {
            // Our copy of the device is closed with this function: while anybody had one, requests would wait for a dead agent.
            Ok(fds) => {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                self.agent.send(&Tell::Fuse { keeper: getpid().as_raw().cast_unsigned() }, &fds)
            }
            Err(Failure { lacks: Some(Lacks::Fuse), .. }) => self.agent.send(&Tell::Plain, &[]),
            Err(failure) => self.agent.send(&failed(&failure.error), &[]),
        }
    }

    fn spawn(&mut self, first: u32, count: u32, fds: Vec<OwnedFd>) -> io::Result<()> {
        let mut fds = fds.into_iter();
        for index in (first..).take(count as usize) {
            let (Some(a), Some(b), Some(c)) = (fds.next(), fds.next(), fds.next()) else {
                return self.failed("start ranks", "the agent sent too few descriptors".to_owned());
            };
            if self.ending.is_some() {
                continue;
            }
            match process::spawn_rank(self.boot.as_fd(), self.plan.as_fd(), self.failures_in.as_fd(), &[a, b, c], index)
            {
                Ok(pid) => {
                    self.ranks.insert(pid, index);
                }
                Err(error) => self.failed("start a rank", error.to_string())?,
            }
        }
        Ok(())
    }

    /// Which processes the ranks are: all, or these.
    fn tell_pids(&self, which: impl Fn(&Pid) -> bool) -> io::Result<()> {
        /// Ranks in one message: no more than a datagram takes.
        const BATCH: usize = 4096;
        let asked = self.ranks.iter().filter(|(pid, _)| which(pid));
        let ranks: Vec<(u32, u32)> = asked.map(|(pid, index)| (*index, pid.as_raw().cast_unsigned())).collect();
        ranks.chunks(BATCH).try_for_each(|ranks| self.agent.send(&Tell::Pids { ranks: ranks.to_vec() }, &[]))
    }

    fn reap(&mut self) -> io::Result<()> {
        /// Ends in one message: all that are there, but no more than a datagram takes.
        const BATCH: usize = 1024;
        loop {
            let (mut ranks, mut held) = (Vec::new(), Vec::new());
            while ranks.len() < BATCH
                && let Some(status) = process::reap()
            {
                let Some((pid, status)) = ended(status) else {
                    held.extend(hold(status));
                    continue;
                };
                let Some(index) = self.ranks.remove(&pid) else { continue };
                ranks.push(Ended { index, status, by_us: self.ending.is_some() });
            }
            if !held.is_empty() {
                self.tell_pids(|pid| held.contains(pid))?;
            }
            self.read_failures()?;
            if ranks.is_empty() {
                return Ok(());
            }
            ranks.iter_mut().for_each(|r| r.by_us |= self.not_started.contains(&r.index));
            self.agent.send(&Tell::Exited { ranks }, &[])?;
        }
    }

    fn read_failures(&mut self) -> io::Result<()> {
        const WORD: usize = size_of::<u32>();
        let mut bytes = [0; size_of::<Excuse>()];
        // Writes below PIPE_BUF are atomic: a record is there whole or not at all.
        while let Ok(got) = self.failures.read(&mut bytes) {
            if got != bytes.len() {
                break;
            }
            let word = |n: usize| {
                u32::from_ne_bytes([bytes[n * WORD], bytes[n * WORD + 1], bytes[n * WORD + 2], bytes[n * WORD + 3]])
            };
            let errno = i32::try_from(word(2)).unwrap_or(0);
            if word(1) != STAGE_HOME {
                self.not_started.insert(word(0));
            }
            self.agent.send(&Tell::NotStarted { index: word(0), stage: word(1), errno }, &[])?;
        }
        Ok(())
    }

    fn failed(&self, operation: &'static str, error: String) -> io::Result<()> {
        self.agent.send(&failed(&Error::new(operation, error)), &[])
    }

    /// Removes what ranks left running.
    fn sweep(&self) {
        if !process::kill_descendants(&[], KILLED) {
            log::warn!("processes of the job hang in the kernel and could not be ended");
        }
    }
}

/// A rank that is to be held has just become its program, which has not begun: leaves it stopped, and free for a debugger to trace.
/// Whatever else stops it before is passed on.
fn hold(status: WaitStatus) -> Option<Pid> {
    let WaitStatus::Stopped(pid, signal) = status else { return None };
    let held = signal == Signal::SIGTRAP;
    nix::sys::ptrace::detach(pid, if held { Signal::SIGSTOP } else { signal }).ok().filter(|()| held).map(|()| pid)
}
