//! `hpcrt session`: hosts and files stay warm between jobs.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;
use smol::future::FutureExt;
use smol::{Async, LocalExecutor, Timer};

use super::job::{self, Where};
use crate::cli::{Part, SessionRun, SessionStart};
use crate::error::EXIT_FAILED;
use crate::launch::console::{self, Console, catch_signals};
use crate::launch::door::{self, Door, Porter};
use crate::launch::fold::fold;
use crate::launch::foreign::Foreign;
use crate::launch::guest;
use crate::launch::launcher;
use crate::launch::progress::Progress;
use crate::launch::resident;
use crate::launch::session::{Reading, Session, may_share};
use crate::launch::status::Subject;
use crate::net::memory_file;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::control::AgentKind;
use crate::net::wire::session::{JobSpec, SessionAsk, SessionTell};
use crate::sys::process;
use crate::{Error, Result, error::Context};

/// A session ends within this time when it is told to.
const STOP: Duration = Duration::from_secs(15);

/// Brings a session up in the background and prints its name.
pub(super) fn start(flags: &SessionStart) -> Result<u8> {
    let begun = Instant::now();
    let signals = catch_signals()?;
    let Where { hosts, agent, .. } =
        job::place(flags.hosts.as_deref(), flags.hostfile.as_deref(), flags.agent.clone(), Vec::new())?;
    let setup = job::setup!(flags, &hosts, agent);
    let name = door::session_name();
    // Before there are threads, and before the pipe, whose end it would keep open.
    let porter = Porter::start()?;
    let (mut ready, tell_ready) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map(|(r, w)| (File::from(r), w)).op("make a pipe")?;
    if process::fork().op("go into the background")?.is_some() {
        // The resident process's.
        std::mem::forget(porter);
        drop(tell_ready);
        let mut word = Vec::new();
        ready.read_to_end(&mut word).op("wait for the session")?;
        // Without a word it failed, and said why.
        if word.is_empty() {
            return Ok(EXIT_FAILED);
        }
        let _ = writeln!(io::stdout(), "{name}");
        return Ok(0);
    }
    let mut tell_ready = Some(File::from(tell_ready));
    drop(ready);
    let _ = rustix::process::setsid();
    process::raise_nofile();
    process::keep_freed_memory();
    let tasks = Rc::new(LocalExecutor::new());
    let served = smol::block_on(tasks.run(async {
        let mut console = Console::own(&tasks, signals)?;
        *console.progress.borrow_mut() = Some(Progress::new(flags.progress));
        let reading = Reading::start(flags.compress, true, flags.pull)?;
        let subject = Subject::new(name.clone(), None, begun, hosts.len(), reading.source());
        let session = Session::start(&tasks, reading, hosts, &setup, &subject, &console).await?;
        console.clear();
        let door = match Door::open(&name, porter) {
            Ok(door) => door,
            Err(error) => {
                session.stop().await;
                return Err(error);
            }
        };
        detach(&mut console).op("go into the background")?;
        if let Some(mut ready) = tell_ready.take() {
            let _ = ready.write_all(b"ready");
        }
        let signalled = async {
            console.ended_by().await;
        };
        resident::serve(door, &tasks, session, subject, signalled, flags.idle).await;
        Ok(())
    }));
    if let Err(error) = &served {
        crate::error::say(error);
    }
    process::leave(i32::from(served.is_err()))
}

/// Lets go of the terminal, or of whoever reads what this command writes.
fn detach(console: &mut Console) -> io::Result<()> {
    let null = process::let_go_of_streams()?;
    (console.stdin, console.stdout, console.stderr) = (None, null.try_clone()?, null);
    Ok(())
}

/// Runs a job in a session.
pub(super) fn run(flags: &SessionRun, parts: &[Part]) -> Result<u8> {
    // Before anything is opened.
    let front = job::front(flags.front)?;
    let signals = catch_signals()?;
    // What belongs to this host only is not passed on: the session's hosts may be others.
    let mut parts = job::parts(parts, flags.ranks, flags.ppn, None);
    let launcher = job::launcher(&mut parts, flags.view, job::not_ours!(flags))?;
    let spec = job::spec!(flags, &parts, &AgentKind::Ssh)?;
    if let Some(launcher) = launcher.as_ref().filter(|_| !may_share(&spec)) {
        return job::alone(launcher, &spec);
    }
    let session = connect(&flags.session)?;
    let copy = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().op("hand over the standard streams");
    let mut fds = vec![
        memory_file::write("hpcrt-job", &spec).op("write the request")?,
        copy(io::stdout().as_fd())?,
        copy(io::stderr().as_fd())?,
    ];
    let asked = SessionAsk::Run { front: front.is_some(), launcher: launcher.is_some() };
    fds.extend(front);
    if launcher.is_none() {
        fds.extend(console::readable_stdin());
    }
    resident::ask(&session, &asked, &fds)?;
    drop::<Vec<OwnedFd>>(fds);
    smol::block_on(async {
        let (session, signals) =
            (Async::new(session).op("hear the session")?, Async::new(signals).op("watch signals")?);
        match launcher {
            Some(launcher) => launch(&session, &signals, &launcher, &spec).await,
            None => hear_end(&session).or(pass_on(&session, &signals)).await,
        }
    })
}

/// What the session says next.
async fn hear(session: &Async<Seqpacket>) -> Result<SessionTell> {
    match session.read_with(Seqpacket::receive_now::<SessionTell>).await {
        Ok(Some((tell, _))) => Ok(tell),
        _ => Err(Error::new("run the job", "the session ended")),
    }
}

/// Waits for the job's end: its exit code.
async fn hear_end(session: &Async<Seqpacket>) -> Result<u8> {
    loop {
        if let SessionTell::Ended { code } = hear(session).await? {
            return Ok(code);
        }
    }
}

/// Passes signals on to the job; never ends.
async fn pass_on(session: &Async<Seqpacket>, signals: &Async<SignalFd>) -> Result<u8> {
    loop {
        let signal = console::next_signal(signals).await?;
        resident::ask(session.get_ref(), &SessionAsk::Signal { signal: signal as i32 }, &[])?;
        if signal == Signal::SIGTSTP {
            process::stop_here();
            resident::ask(session.get_ref(), &SessionAsk::Signal { signal: Signal::SIGCONT as i32 }, &[])?;
        }
    }
}

/// Runs another launcher when the session's hosts are ready for its programs. The exit code is its own.
async fn launch(
    session: &Async<Seqpacket>,
    signals: &Async<SignalFd>,
    launcher: &Foreign,
    spec: &JobSpec,
) -> Result<u8> {
    let opened = async {
        match hear(session).await? {
            SessionTell::Open { job } => Ok(Ok(job)),
            SessionTell::Ended { code } => Ok(Err(code)),
            other => Err(Error::new("run the job", format!("the session answered {other:?}"))),
        }
    };
    // While the hosts prepare, signals are for them.
    let job = match opened.or(async { pass_on(session, signals).await.map(Err) }).await? {
        Ok(job) => job,
        Err(code) => return Ok(code),
    };
    let words = launcher.with(&guest::prefix(&job)?);
    let mut failed = None;
    let signal = async || match console::next_signal(signals).await {
        Ok(signal) => signal,
        Err(_) => smol::future::pending().await,
    };
    let fails = async || match failed {
        None => failed = Some(hear_end(session).await),
        Some(_) => smol::future::pending().await,
    };
    let code = launcher::run(&words, spec, signal, fails).await;
    if let Some(failed) = failed {
        return failed;
    }
    let over = SessionAsk::Over { code: code.as_ref().copied().unwrap_or(EXIT_FAILED) };
    resident::ask(session.get_ref(), &over, &[])?;
    let ended = hear_end(session).await;
    code.and(ended)
}

/// Connects to a session; a job of its own is none.
fn connect(name: &str) -> Result<Seqpacket> {
    let what = match name.chars().next() {
        Some(door::JOB) => "that is a job, not a session",
        Some(door::MEMORY) => "that is a memory server, not a session",
        _ => return door::connect(name),
    };
    Err(Error::usage("find the session", what).on(name))
}

/// Shows the sessions.
pub(super) fn list() -> Result<u8> {
    for name in door::names()?.into_iter().filter(|name| !name.starts_with([door::JOB, door::MEMORY])) {
        let Ok(session) = connect(&name) else { continue };
        resident::ask(&session, &SessionAsk::About, &[])?;
        if let Some((SessionTell::About { hosts, jobs, stored }, _)) = answer(session)? {
            let _ = writeln!(
                io::stdout(),
                "{name}  {} hosts ({})  {jobs} jobs  {} MiB of files",
                hosts.len(),
                fold(&hosts),
                stored >> 20
            );
        }
    }
    Ok(0)
}

/// Ends a session and waits until it is gone.
pub(super) fn stop(name: &str) -> Result<u8> {
    let session = connect(name)?;
    resident::ask(&session, &SessionAsk::Stop, &[])?;
    answer(session)?;
    Ok(0)
}

/// The session's answer, or its end.
fn answer(session: Seqpacket) -> Result<Option<(SessionTell, Vec<OwnedFd>)>> {
    smol::block_on(async {
        let session = Async::new(session).op("hear the session")?;
        let heard = async { session.read_with(Seqpacket::receive_now::<SessionTell>).await.op("hear the session") };
        let late = async {
            Timer::after(STOP).await;
            Err(Error::new("hear the session", format!("it did not answer within {} s", STOP.as_secs())))
        };
        heard.or(late).await
    })
}
