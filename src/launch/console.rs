//! Where a job's streams and signals come from and go to: this process's own, or those of the command that asked a session to run it.

use std::cell::RefCell;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use async_channel::{Receiver, unbounded};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use smol::Async;

use super::overlay::Spawner;
use super::progress::{Counters, Progress};
use crate::sys::process;
use crate::{Result, error::Context};

/// See the module.
#[derive(Debug)]
pub struct Console {
    /// `None`: nothing may be read.
    pub stdin: Option<File>,
    pub stdout: File,
    pub stderr: File,
    pub signals: Receiver<Signal>,
    /// These are this process's own: a stop signal stops it.
    pub own: bool,
    /// The line that shows how far the job is; gone with the first output.
    pub progress: RefCell<Option<Progress>>,
    /// A connected stream socket: who wants to talk to a job's master.
    pub front: RefCell<Option<OwnedFd>>,
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
    process::default_action(Signal::SIGCHLD);
    // Blocked signals would be heard even if this process was started to ignore them, as by nohup.
    let ignored = process::ignored();
    let set: SigSet = FORWARDED.into_iter().filter(|signal| ignored >> (*signal as u32 - 1) & 1 == 0).collect();
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&set), None).op("block signals")?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).op("watch signals")
}

/// The next of the signals that are caught.
///
/// # Errors
/// The descriptor cannot be read.
pub async fn next_signal(signals: &Async<SignalFd>) -> Result<Signal> {
    let got =
        signals.read_with(|s| s.read_signal().map_err(io::Error::from)?.ok_or(io::ErrorKind::WouldBlock.into())).await;
    let number = i32::try_from(got.op("read a signal")?.ssi_signo).unwrap_or(0);
    Signal::try_from(number).op("read a signal")
}

/// Whether a signal asks a process to end.
pub fn ends(signal: Signal) -> bool {
    matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT)
}

/// This process's standard input, unless it is a terminal that would stop us for reading it in the background.
pub fn readable_stdin() -> Option<OwnedFd> {
    let stdin = io::stdin();
    let background = stdin.is_terminal()
        && rustix::termios::tcgetpgrp(&stdin).is_ok_and(|group| group != rustix::process::getpgrp());
    if background { None } else { stdin.as_fd().try_clone_to_owned().ok() }
}

impl Console {
    /// This process's own streams and caught signals.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn own(tasks: &Spawner, signals: SignalFd) -> Result<Console> {
        let signals = Async::new(signals).op("watch signals")?;
        let (sender, receiver) = unbounded();
        let listen = async move {
            while let Ok(signal) = next_signal(&signals).await {
                if sender.send(signal).await.is_err() {
                    return;
                }
            }
        };
        tasks.spawn(listen).detach();
        let copy = |fd: rustix::fd::BorrowedFd<'_>| fd.try_clone_to_owned().op("use the standard streams");
        Ok(Console {
            stdin: readable_stdin().map(File::from),
            stdout: copy(io::stdout().as_fd())?.into(),
            stderr: copy(io::stderr().as_fd())?.into(),
            signals: receiver,
            own: true,
            front: RefCell::default(),
            progress: RefCell::default(),
        })
    }

    /// Tells the user something; nobody can be told that this fails.
    pub fn say(&self, line: impl Display) {
        let write = || drop(writeln!(&self.stderr, "hpcrt: {line}"));
        match &*self.progress.borrow() {
            Some(progress) => progress.suspend(write),
            None => write(),
        }
    }

    /// How far the job is.
    pub fn show(&self, counters: &Counters) {
        if let Some(progress) = &mut *self.progress.borrow_mut() {
            progress.update(counters, Instant::now());
        }
    }

    /// The ranks have begun to write, or it is all over: the line goes.
    pub fn clear(&self) {
        self.progress.borrow_mut().take();
    }

    /// Waits for a signal that asks the job to end.
    pub async fn ended_by(&self) -> Signal {
        while let Ok(signal) = self.signals.recv().await {
            if ends(signal) {
                return signal;
            }
        }
        smol::future::pending().await
    }
}
