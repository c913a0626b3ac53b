//! `hpcrt session`: hosts and files stay warm between jobs.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::unistd::{Pid, getpid};
use smol::future::FutureExt;
use smol::{Async, LocalExecutor, Timer};

use super::job::{self, Passed, Where};
use crate::cli::{Part, SessionRun, SessionStart};
use crate::error::{EXIT_FAILED, say};
use crate::launch::console::{self, Console, catch_signals};
use crate::launch::door::{self, Door, Porter};
use crate::launch::fold::fold;
use crate::launch::foreign::Foreign;
use crate::launch::guest;
use crate::launch::keeper;
use crate::launch::launcher;
use crate::launch::progress::Progress;
use crate::launch::resident;
use crate::launch::session::{Reading, Session, may_share};
use crate::launch::status::Subject;
use crate::net::memory_file;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::control::View;
use crate::net::wire::session::{JobSpec, SessionAsk, SessionTell};
use crate::sys::process;
use crate::sys::stdin::{LOOK, is_others};
use crate::{Error, Result, error::Context};

/// A session ends within this time when it is told to.
const STOP: Duration = Duration::from_secs(15);
/// One that is asked about itself answers within this time.
const ANSWER: Duration = Duration::from_secs(5);
/// The names of its hosts are at most this long.
const HOSTS_MAX: u64 = 64 << 20;

/// Brings a session up in the background and prints its name.
pub(super) fn start(flags: &SessionStart) -> Result<u8> {
    if flags.view == View::None {
        let error = Error::usage("use --view none", "its hosts are brought up to show programs their files");
        return Err(error.remedy("each of its jobs may have it: hpcrt session run --view none"));
    }
    let begun = Instant::now();
    let signals = catch_signals()?;
    let Where { hosts, agent, .. } =
        job::place(flags.hosts.as_deref(), flags.hostfile.as_deref(), flags.agent.clone(), Vec::new())?;
    let setup = job::setup!(flags, &hosts, 0, agent);
    let name = door::session_name();
    // It is not for the session's processes to hold the caller's locks and pipes.
    process::close_inherited().op("close what was inherited")?;
    let parent = getpid();
    // Before there are threads, and before the pipe, whose end it would keep open.
    let porter = Porter::start()?;
    let (ready, tell_ready) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map(|(r, w)| (File::from(r), w)).op("make a pipe")?;
    if let Some(resident) = process::fork().op("go into the background")? {
        // The resident process's.
        std::mem::forget(porter);
        drop(tell_ready);
        // Without a word it failed, and said why.
        if !hear_ready(ready, &signals, resident).op("wait for the session")? {
            return Ok(EXIT_FAILED);
        }
        let _ = writeln!(io::stdout(), "{name}");
        return Ok(0);
    }
    let mut tell_ready = File::from(tell_ready);
    drop(ready);
    let _ = rustix::process::setsid();
    // Until it is ready nobody knows of it but its command.
    if !process::end_with(Some(parent)) {
        process::leave(EXIT_FAILED.into());
    }
    process::raise_nofile();
    process::keep_freed_memory();
    let tasks = Rc::new(LocalExecutor::new());
    let code = smol::block_on(tasks.run(async {
        let console = Console::own(&tasks, signals, Progress::new(flags.progress), None);
        let prepared = console.and_then(|console| Ok((console, Reading::start(flags.compress, true, flags.pull)?)));
        let (mut console, reading) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                say(error);
                return EXIT_FAILED;
            }
        };
        let subject = Subject::new(name.clone(), None, begun, hosts.len(), reading.source());
        let session = match Session::start(&tasks, reading, hosts, &setup, &subject, &console).await {
            Ok(session) => session,
            Err(error) => return console.conclude(Err(error)).await,
        };
        let opened = match Door::open(&name, porter) {
            Ok(door) => console.let_go(&tasks).await.map(|()| door).op("go into the background"),
            Err(error) => Err(error),
        };
        process::end_with(None);
        let ready = opened.and_then(|door| tell_ready.write_all(b"ready").map(|()| door).op("tell that it is ready"));
        drop(tell_ready);
        let door = match ready {
            Ok(door) => door,
            Err(error) => {
                session.stop().await;
                return console.conclude(Err(error)).await;
            }
        };
        let signalled = async {
            console.ended_by().await;
        };
        resident::serve(door, &tasks, session, subject, signalled, flags.idle).await;
        0
    }));
    process::leave(code.into())
}

/// Waits for the resident process to be ready or to end, and passes it the signals that ask for an end: whether it is ready.
fn hear_ready(mut ready: File, signals: &SignalFd, resident: Pid) -> io::Result<bool> {
    loop {
        let [told, signalled] = keeper::wait([ready.as_fd(), signals.as_fd()], None)?;
        while signalled && let Ok(Some(signal)) = signals.read_signal() {
            match i32::try_from(signal.ssi_signo).map(Signal::try_from) {
                Ok(Ok(signal)) if console::ends(signal) => drop(kill(resident, signal)),
                Ok(Ok(Signal::SIGTSTP)) => process::stop_here(),
                _ => {}
            }
        }
        if told {
            let mut word = Vec::new();
            ready.read_to_end(&mut word)?;
            return Ok(!word.is_empty());
        }
    }
}

/// Runs a job in a session.
pub(super) fn run(flags: &SessionRun, parts: &[Part]) -> Result<u8> {
    // Before anything is opened.
    let front = job::front(flags.front)?;
    let signals = catch_signals()?;
    // What belongs to this host only is not passed on: the session's hosts may be others.
    let mut parts = job::parts(parts, flags.ranks, flags.ppn, None);
    let launcher = job::launcher(&mut parts, flags.view, job::not_ours!(flags))?;
    let spec = job::spec!(flags, &parts, Passed { host: false, rank: launcher.is_some() })?;
    if let Some(launcher) = launcher.as_ref().filter(|_| !may_share(&spec)) {
        return job::alone(launcher, &spec);
    }
    let session = connect(&flags.session)?;
    job::make_papers(&spec)?;
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

/// Passes signals on to the job, and whose the terminal is, which the session cannot see; never ends.
async fn pass_on(session: &Async<Seqpacket>, signals: &Async<SignalFd>) -> Result<u8> {
    // That the session is gone is noticed where it is heard.
    let ask = |question| drop(resident::ask(session.get_ref(), &question, &[]));
    let pass = |signal| ask(SessionAsk::Signal { signal: signal as i32 });
    let mut told = None;
    loop {
        let may = !is_others(io::stdin());
        if told.replace(may) != Some(may) {
            ask(SessionAsk::Reads { may });
        }
        // A shell that puts a running job to the front sends no signal.
        let look = async {
            match io::stdin().is_terminal() {
                true => Timer::after(Duration::from_millis(LOOK.into())).await,
                false => smol::future::pending().await,
            };
            Ok(None)
        };
        let Some(signal) = (async { console::next_signal(signals).await.map(Some) }).or(look).await? else { continue };
        if signal == Signal::SIGTSTP {
            told = None;
            ask(SessionAsk::Reads { may: false });
            pass(signal);
            process::stop_here();
            pass(Signal::SIGCONT);
        } else {
            pass(signal);
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

/// Shows the sessions; the code is [`EXIT_FAILED`] if one does not answer, which is said.
pub(super) fn list() -> Result<u8> {
    let mut code = 0;
    // All are asked before the first answer is awaited: they share the time.
    let names = door::names()?.into_iter().filter(|name| !name.starts_with([door::JOB, door::MEMORY]));
    let asked = names.filter_map(|name| {
        let session = connect(&name).ok()?;
        Some((name, resident::ask(&session, &SessionAsk::About, &[]).map(|()| session)))
    });
    let (asked, until) = (asked.collect::<Vec<_>>(), Instant::now() + ANSWER);
    for (name, session) in asked {
        let told = session.and_then(|session| answer(session, until)).and_then(|told| match told {
            Some((SessionTell::About { jobs, stored }, fds)) => {
                let hosts =
                    fds.into_iter().next().ok_or_else(|| Error::new("hear the session", "it names no hosts"))?;
                let hosts = memory_file::read_bytes(hosts, HOSTS_MAX).op("read the names of hosts")?;
                Ok(Some((String::from_utf8_lossy(&hosts).into_owned(), jobs, stored)))
            }
            _ => Ok(None),
        });
        match told {
            Ok(Some((hosts, jobs, stored))) => {
                let hosts: Vec<&str> = hosts.lines().collect();
                let (count, hosts, stored) = (hosts.len(), fold(&hosts), stored >> 20);
                let _ = writeln!(io::stdout(), "{name}  {count} hosts ({hosts})  {jobs} jobs  {stored} MiB of files");
            }
            // It ended meanwhile.
            Ok(None) => {}
            Err(error) => {
                say(error.on(name));
                code = EXIT_FAILED;
            }
        }
    }
    Ok(code)
}

/// Ends a session and waits until it is gone.
pub(super) fn stop(name: &str) -> Result<u8> {
    let session = connect(name)?;
    resident::ask(&session, &SessionAsk::Stop, &[])?;
    answer(session, Instant::now() + STOP)?;
    Ok(0)
}

/// The session's answer by then, or its end.
fn answer(session: Seqpacket, until: Instant) -> Result<Option<(SessionTell, Vec<OwnedFd>)>> {
    smol::block_on(async {
        let session = Async::new(session).op("hear the session")?;
        let heard = async { session.read_with(Seqpacket::receive_now::<SessionTell>).await.op("hear the session") };
        let late = async {
            Timer::at(until).await;
            Err(Error::new("hear the session", "it did not answer in time"))
        };
        heard.or(late).await
    })
}
