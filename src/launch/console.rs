//! Where a job's streams and signals come from and go to: this process's own, or those of the command that asked a session to run it.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_channel::{Receiver, unbounded};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use smol::future::FutureExt;
use smol::{Async, Timer};

use super::overlay::Spawner;
use super::progress::{Counters, Progress};
use super::voice::Voice;
use crate::sys::process;
use crate::{Error, Result, error::Context};

/// Who reads what hpcrt says has this long for it after somebody asked for the end.
pub const LAST: Duration = Duration::from_secs(2);
/// The progress line is gone within this time, or the terminal takes nothing.
const CLEARED: Duration = Duration::from_millis(250);

/// See the module.
#[derive(Debug)]
pub struct Console {
    /// `None`: nothing may be read, and ranks find its end.
    pub stdin: Option<Arc<File>>,
    /// It may be read now, as far as the command says that asked; of its own terminal this process sees it.
    pub reads: Arc<AtomicBool>,
    pub stdout: File,
    pub stderr: File,
    pub signals: Receiver<Signal>,
    /// These are this process's own: a stop signal stops it.
    pub own: bool,
    voice: Voice,
    /// A line shows how far the job is; gone with the first output.
    progress: Cell<bool>,
    /// Somebody wants the end: nobody is waited for much longer.
    hurried: Cell<bool>,
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

/// This process's standard input, unless it can only be written, as nohup leaves it.
pub fn readable_stdin() -> Option<OwnedFd> {
    let stdin = io::stdin();
    let flags = rustix::fs::fcntl_getfl(&stdin).ok()?;
    if flags & rustix::fs::OFlags::ACCMODE == rustix::fs::OFlags::WRONLY {
        return None;
    }
    stdin.as_fd().try_clone_to_owned().ok()
}

impl Console {
    /// The streams of a command that asked for a job. `front`: see [`Console::front`].
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn of(
        tasks: &Spawner,
        [stdout, stderr]: [OwnedFd; 2],
        stdin: Option<OwnedFd>,
        signals: Receiver<Signal>,
        front: Option<OwnedFd>,
    ) -> Result<Console> {
        let stderr = File::from(stderr);
        let voice = Voice::new(tasks, stderr.try_clone().op("use the standard streams")?, None);
        Ok(Console {
            stdin: stdin.map(|stdin| Arc::new(stdin.into())),
            reads: Arc::default(),
            stdout: stdout.into(),
            stderr,
            signals,
            own: false,
            voice,
            progress: Cell::new(false),
            hurried: Cell::new(false),
            front: RefCell::new(front),
        })
    }

    /// This process's own streams and caught signals.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn own(tasks: &Spawner, signals: SignalFd, progress: Progress, front: Option<OwnedFd>) -> Result<Console> {
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
        let streams = [copy(io::stdout().as_fd())?, copy(io::stderr().as_fd())?];
        let console = Console::of(tasks, streams, readable_stdin(), receiver, front)?;
        let voice = Voice::new(tasks, copy(io::stderr().as_fd())?.into(), Some(progress));
        console.reads.store(true, Ordering::Relaxed);
        Ok(Console { own: true, voice, progress: Cell::new(true), ..console })
    }

    /// Lets go of the terminal, or of whoever reads what this command writes: what was said is written, what will be is not.
    ///
    /// # Errors
    /// No descriptor is free.
    pub async fn let_go(&mut self, tasks: &Spawner) -> io::Result<()> {
        self.voice.clear();
        self.flush().await;
        let null = process::let_go_of_streams()?;
        self.voice = Voice::new(tasks, null.try_clone()?, None);
        (self.stdin, self.stdout, self.stderr) = (None, null.try_clone()?, null);
        Ok(())
    }

    /// Tells the user something, some time: this waits for nobody.
    pub fn say(&self, line: impl Display) {
        self.voice.say(format!("hpcrt: {line}\n"));
    }

    /// [`Console::say`] for lines that are as they should be.
    pub fn print(&self, lines: String) {
        self.voice.say(lines);
    }

    /// How far the job is.
    pub fn show(&self, counters: &Counters) {
        if self.progress.get() {
            self.voice.show(*counters);
        }
    }

    /// The ranks have begun to write, or it is all over: the line goes.
    pub async fn clear(&self) {
        if self.progress.take() {
            self.voice.clear();
            self.voice
                .heard()
                .or(async {
                    Timer::after(CLEARED).await;
                })
                .await;
        }
    }

    /// From now on who reads what is written has [`LAST`].
    pub fn hurry(&self) {
        self.hurried.set(true);
    }

    /// Waits until `written` is over, for whoever reads: until a signal asks for the end, and [`LAST`] from then on. False if that was too
    /// late.
    pub async fn patiently(&self, written: impl Future<Output = ()>) -> bool {
        let late = async {
            if !self.hurried.get() {
                self.ended_by().await;
            }
            Timer::after(LAST).await;
            false
        };
        let written = async {
            written.await;
            true
        };
        written.or(late).await
    }

    /// Waits until what was said is written.
    pub async fn flush(&self) {
        self.patiently(self.voice.heard()).await;
    }

    /// It is all over: what failed is said, and the exit code returned when it is written.
    pub async fn conclude(&self, ended: Result<u8>) -> u8 {
        self.clear().await;
        let code = ended.unwrap_or_else(|error: Error| {
            self.say(&error);
            error.exit_code()
        });
        self.flush().await;
        code
    }

    /// Waits for a signal that asks the job to end.
    pub async fn ended_by(&self) -> Signal {
        while let Ok(signal) = self.signals.recv().await {
            if ends(signal) {
                self.hurry();
                return signal;
            }
            if signal == Signal::SIGTSTP && self.own {
                process::stop_here();
            }
        }
        smol::future::pending().await
    }
}
