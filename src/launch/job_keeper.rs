//! The keeper of one job on one node: starts the ranks, reaps them, and ends only when no process of the job is left.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::ptrace;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, killpg, sigprocmask};
use nix::sys::signalfd::SignalFd;
use nix::unistd::{Pid, getpid};
use rustix::fs::Mode;

use super::guest::Porch;
use super::keeper::{KILLED, ended, failed, signal_children, wait, watch_children};
use crate::Error;
use crate::loader::view::namespace::{Base, Failure, Lacks, Mounts, Shared};
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::control::Status;
use crate::net::wire::keeper::{Ask, Ended, Tell};
use crate::sys::boot::{Stage, Starter};
use crate::sys::process::Fate;
use crate::sys::without::{Ability, Without};
use crate::sys::{inject, process};

/// Keeps a job until nothing of it is left.
///
/// # Errors
/// The agent is gone, or the kernel refuses what a keeper needs.
pub(super) fn keep(
    agent: Seqpacket,
    plan: OwnedFd,
    image: Option<OwnedFd>,
    base: Option<Base>,
    without: &Without,
) -> io::Result<()> {
    let told = agent.try_clone()?;
    let fuse = !without.has(Ability::Fuse);
    let keeper = Starter::new(plan, image).and_then(|starter| JobKeeper::new(agent, starter, base, fuse));
    let kept = keeper.and_then(|mut keeper| keeper.keep());
    if let Err(error) = &kept {
        told.send(&failed(&Error::new("keep the job", error.to_string())), &[])?;
    }
    kept
}

/// See the module.
struct JobKeeper {
    agent: Seqpacket,
    /// The session's namespaces; `None` when the session has no views.
    base: Option<Base>,
    /// FUSE may be tried.
    fuse: bool,
    view: Option<Mounts>,
    starter: Starter,
    children_died: SignalFd,
    ranks: HashMap<Pid, u32>,
    /// Came while ranks were still to be started, which get them, too; each once, the last to come last.
    early: Vec<Signal>,
    /// Every rank was asked for, so that none left means over.
    complete: bool,
    ending: Option<Ending>,
    /// Where guests find the job, if any may come.
    porch: Option<Porch>,
}

/// Signals a rank with all of its group, or alone while it has not made that yet.
fn give(rank: Pid, signal: Signal) {
    if killpg(rank, signal).is_err() {
        let _ = kill(rank, signal);
    }
}

/// The job is being ended.
#[derive(Clone, Copy)]
struct Ending {
    kill_at: Instant,
}

impl JobKeeper {
    fn new(agent: Seqpacket, starter: Starter, base: Option<Base>, fuse: bool) -> io::Result<JobKeeper> {
        process::become_subreaper();
        process::default_action(Signal::SIGPIPE);
        // A rank that still shares this memory would take it along (`sys/boot.rs`); it hears of it when it is on its own.
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::from(Signal::SIGQUIT)), None)?;
        Ok(JobKeeper {
            agent,
            base,
            fuse,
            view: None,
            starter,
            children_died: watch_children()?,
            ranks: HashMap::new(),
            early: Vec::new(),
            complete: false,
            ending: None,
            porch: None,
        })
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
            Ask::Spawn { first, count, umask } => {
                rustix::process::umask(Mode::from_raw_mode(umask));
                self.spawn(first, count, fds)
            }
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
            Ask::Share { name } => self.share(&name),
            Ask::Plan => match <[OwnedFd; 1]>::try_from(fds) {
                Ok([plan]) => self.starter.follow(plan),
                Err(_) => self.failed("start ranks", "a plan comes with one descriptor".to_owned()),
            },
            Ask::Inherit { number } => match fds.first().map(|fd| process::pass_on(fd, number)) {
                Some(Ok(())) => Ok(()),
                Some(Err(error)) => self.failed("give the ranks a descriptor", error.to_string()),
                None => self.failed("give the ranks a descriptor", "there is none".to_owned()),
            },
            Ask::Go => {
                self.complete = true;
                Ok(())
            }
            Ask::Pids => self.tell_pids(|_| true),
            Ask::Signal { signal } => {
                let signal = Signal::try_from(signal)?;
                self.ranks.keys().for_each(|pid| give(*pid, signal));
                if !self.complete {
                    self.early.retain(|early| *early != signal);
                    self.early.push(signal);
                }
                Ok(())
            }
            Ask::End { grace_ms } => {
                for pid in self.ranks.keys() {
                    give(*pid, Signal::SIGTERM);
                    give(*pid, Signal::SIGCONT);
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
            Err(failure) => self.refused(&failure.error),
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
                let made = if self.fuse { view.mount_fuse() } else { Err(Failure::no_fuse()) };
                (view, made.map(|(fuse, shared)| [fuse].into_iter().chain(shared).collect()))
            }),
        };
        let (view, fds) = match mounted {
            Ok(mounted) => mounted,
            Err(failure) => return self.refused(&failure.error),
        };
        self.view = Some(view);
        match fds {
            // Our copy of the device is closed with this function: while anybody had one, requests would wait for a dead agent.
            Ok(fds) => {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                self.agent.send(&Tell::Fuse { keeper: getpid().as_raw().cast_unsigned() }, &fds)
            }
            Err(Failure { lacks: Some(Lacks::Fuse), .. }) => self.agent.send(&Tell::Plain, &[]),
            Err(failure) => self.refused(&failure.error),
        }
    }

    fn spawn(&mut self, first: u32, count: u32, fds: Vec<OwnedFd>) -> io::Result<()> {
        let mut fds = fds.into_iter();
        for index in (first..).take(count as usize) {
            let (Some(a), Some(b), Some(c), Some(d)) = (fds.next(), fds.next(), fds.next(), fds.next()) else {
                return self.failed("start ranks", "the agent sent too few descriptors".to_owned());
            };
            if self.ending.is_some() {
                continue;
            }
            match self.starter.start(index, [a.as_fd(), b.as_fd(), c.as_fd(), d.as_fd()]) {
                Ok(pid) => {
                    self.ranks.insert(pid, index);
                    self.early.iter().for_each(|signal| give(pid, *signal));
                }
                Err(error) => self.failed("start a rank", error.to_string())?,
            }
        }
        Ok(())
    }

    fn share(&mut self, name: &str) -> io::Result<()> {
        let Some(base) = &self.base else {
            return self.failed("share the job's files", "the session has no namespaces".to_owned());
        };
        self.porch = Porch::of(name).ok();
        let mounts = std::fs::File::open("/proc/self/ns/mnt")?;
        let fds: Vec<_> = std::iter::once(mounts.as_fd()).chain(base.user.as_ref().map(AsFd::as_fd)).collect();
        self.agent.send(&Tell::Inside, &fds)
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
                && let Some((pid, fate)) = process::reap()
            {
                let Some(status) = ended(fate) else {
                    held.extend(Some(pid).filter(|pid| self.stopped(*pid, fate)));
                    continue;
                };
                let Some(index) = self.ranks.remove(&pid) else { continue };
                let mut by_us = self.ending.is_some();
                for (stage, errno) in self.starter.failed(index) {
                    // Killed on the way: the signal says it all.
                    if stage == Stage::Boot && matches!(status, Status::Signal(_)) {
                        continue;
                    }
                    by_us |= !matches!(stage, Stage::Image | Stage::Home);
                    self.agent.send(&Tell::NotStarted { stage, errno }, &[])?;
                }
                ranks.push(Ended { index, status, by_us });
            }
            if !held.is_empty() {
                self.tell_pids(|pid| held.contains(pid))?;
            }
            if ranks.is_empty() {
                return Ok(());
            }
            self.agent.send(&Tell::Exited { ranks }, &[])?;
        }
    }

    /// A rank that is to be held, or given something, has just become its program, which has not begun: is held stopped, and free for a debugger to trace.
    /// Whatever else stops it before is passed on. Whether it is held.
    fn stopped(&self, pid: Pid, fate: Fate) -> bool {
        let signal = if let Fate::Stopped(signal) = fate { Signal::try_from(signal).ok() } else { None };
        if signal != Some(Signal::SIGTRAP) {
            let _ = ptrace::cont(pid, signal);
            return false;
        }
        let (held, resident) = self.starter.stops();
        if let (Some(resident), Some(index)) = (resident, self.ranks.get(&pid))
            && let Err(error) = inject::inject(pid, resident)
        {
            self.starter.fail(*index, error.raw_os_error().unwrap_or(nix::libc::EIO));
            let _ = kill(pid, Signal::SIGKILL);
        }
        ptrace::detach(pid, held.then_some(Signal::SIGSTOP)).is_ok() && held
    }

    fn failed(&self, operation: &'static str, error: String) -> io::Result<()> {
        self.refused(&Error::new(operation, error))
    }

    fn refused(&self, error: &Error) -> io::Result<()> {
        self.agent.send(&failed(error), &[])
    }

    /// Removes what ranks left running.
    fn sweep(&self) {
        if let Some(porch) = &self.porch {
            porch.remove();
        }
        if !process::kill_descendants(&[], KILLED) {
            log::warn!("processes of the job hang in the kernel and could not be ended");
        }
    }
}
