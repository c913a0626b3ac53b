//! One job of processes that another launcher started: `srun hpcrt exec -- ./app`, `mpiexec hpcrt exec -- ./app`.
//!
//! Each of these processes stays and has the program as its child, so that streams, exit code, limits and place in the batch system are those
//! of its own task. The first on each node also starts an agent, the first of all the front end; they meet through the launcher's
//! key-value space. The programs come to the agents as guests. Who fails, and what that means for the others, is the launcher's business:
//! agents and front end stay until the last guest is gone.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::unistd::{Pid, getpid};

use super::guest::{self, Own};
use super::invitation::Invitation;
use super::keeper::{ended, wait, watch_children};
use super::outer::{Outer, Relay};
use super::root::FIRST_JOB;
use crate::error::EXIT_FAILED;
use crate::net::auth::{self, SessionKey};
use crate::net::listen;
use crate::net::wire::control::Status;
use crate::sys::process;
use crate::{Error, Result, error::Context};

/// A process whose program failed stays this long for the others, which may be ending as well.
const LINGER: Duration = Duration::from_secs(1);

/// Where the agents find the front end; arranged before it starts.
#[derive(Debug, Clone)]
pub struct Meeting {
    pub key: SessionKey,
    pub session: String,
    pub listener: Arc<TcpListener>,
}

impl Meeting {
    fn arrange() -> Result<Meeting> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).op("listen for the agents")?;
        let session = auth::random_name(16);
        Ok(Meeting { key: SessionKey::random(), session, listener: Arc::new(listener) })
    }

    /// As the others are told, without blanks.
    fn text(&self) -> Result<String> {
        let addresses = listen::addresses_of(&self.listener).join(",");
        Ok(format!("{};{};{addresses}", self.session, blake3::Hash::from_bytes(self.key.0).to_hex()))
    }
}

/// Session, key and addresses.
fn told(text: &str) -> Option<(String, Invitation)> {
    let mut parts = text.split(';');
    let session = parts.next()?.to_owned();
    let key = SessionKey(*blake3::Hash::from_hex(parts.next()?).ok()?.as_bytes());
    let addresses = parts.next()?.split(',').map(str::to_owned).collect();
    Some((session, Invitation { key, addresses, hosts: Vec::new() }))
}

/// What the front end has to know: the hosts, the ranks on each, and where it is expected.
#[derive(Debug)]
pub struct Party {
    pub hosts: Vec<String>,
    pub counts: Vec<u32>,
    pub meeting: Meeting,
}

/// Key of what the first process tells, and that of a host's name, before its number.
const FRONT: &str = "hpcrt-front";
const HOST: &str = "hpcrt-host-";
/// Instead of a meeting: there is nothing to show.
const PLAIN: &str = "plain";

/// Runs this process's rank and what is left to it of the rest. `shown`: the program's files are captured. `front` is the front end, in a
/// process of its own. For a process without threads.
///
/// # Errors
/// The processes do not find each other, or the program cannot be started.
pub fn run(
    mut outer: Outer,
    program: &Own<'_>,
    shown: bool,
    signals: SignalFd,
    front: impl FnOnce(Party) -> Result<u8>,
) -> Result<u8> {
    let rank = outer.rank;
    let nodes = outer.nodes()?;
    let node = nodes[rank as usize];
    let leads = |rank: u32| nodes.iter().position(|node| *node == nodes[rank as usize]) == Some(rank as usize);
    let meeting = (rank == 0 && shown).then(Meeting::arrange).transpose()?;
    if leads(rank) {
        let name = rustix::system::uname();
        outer.put(&format!("{HOST}{node}"), &name.nodename().to_string_lossy())?;
    }
    if rank == 0 {
        let text = meeting.as_ref().map_or_else(|| Ok(PLAIN.to_owned()), Meeting::text)?;
        outer.put(FRONT, &text)?;
    }
    outer.barrier()?;
    let text = outer.get(FRONT)?;
    let met = match text.as_str() {
        PLAIN => None,
        text => Some(told(text).ok_or_else(|| Error::new("join the job", "it is not from this version of hpcrt"))?),
    };
    let children = watch_children().op("watch the program")?;
    let mut helpers = Vec::new();
    if let Some(meeting) = meeting {
        let all = nodes.iter().max().map_or(0, |last| last + 1);
        let hosts = (0..all).map(|node| outer.get(&format!("{HOST}{node}"))).collect::<Result<_>>()?;
        let count = |node: u32| u32::try_from(nodes.iter().filter(|other| **other == node).count()).unwrap_or(u32::MAX);
        let counts = (0..all).map(count).collect();
        match process::fork().op("start the front end")? {
            Some(pid) => helpers.push(pid),
            None => {
                drop(outer);
                let ended = front(Party { hosts, counts, meeting });
                if let Err(error) = &ended {
                    crate::error::say(error);
                }
                process::leave(ended.unwrap_or(EXIT_FAILED).into());
            }
        }
    }
    let (ours, theirs) = UnixStream::pair().op("start the program")?;
    let parent = getpid();
    let Some(child) = process::fork().op("start the program")? else {
        drop((outer, ours));
        let job = met.as_ref().map(|(session, _)| guest::name(session, FIRST_JOB));
        let became = become_program(job.as_deref(), program, &theirs, parent);
        if let Err(error) = &became {
            crate::error::say(error);
        }
        process::leave(EXIT_FAILED.into());
    };
    drop(theirs);
    if let Some((_, invitation)) = met.filter(|_| leads(rank)) {
        helpers.push(agent(node + 1, &invitation)?);
    }
    Task { child, helpers, relay: outer.relay(ours), ended: None }.serve(&signals, &children)
}

/// In a fresh child: the program in place of this process.
fn become_program(job: Option<&str>, program: &Own<'_>, launcher: &UnixStream, parent: Pid) -> Result<u8> {
    rustix::io::fcntl_setfd(launcher, rustix::io::FdFlags::empty()).op("hand the launcher on")?;
    let number = launcher.as_raw_fd().to_string();
    guest::become_program(job, program, &[("PMI_FD", number)], parent)
}

/// Starts this node's agent.
fn agent(node: u32, invitation: &Invitation) -> Result<Pid> {
    let mut agent = Command::new("/proc/self/exe");
    agent.args(["serve", "--join", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut started = agent.spawn().op("start the agent")?;
    if let Some(mut input) = started.stdin.take() {
        input.write_all(format!("{node}\n{}", invitation.text()).as_bytes()).op("start the agent")?;
    }
    Ok(Pid::from_raw(started.id().cast_signed()))
}

/// A task of the other launcher, seen from this process.
struct Task {
    child: Pid,
    /// Agent and front end, if they are this process's.
    helpers: Vec<Pid>,
    relay: Relay,
    ended: Option<Status>,
}

impl Task {
    fn serve(mut self, signals: &SignalFd, children: &SignalFd) -> Result<u8> {
        let mut leave: Option<Instant> = None;
        let failed = loop {
            let failed = self.reap();
            // The batch system may end the helpers with this process: who succeeds waits until nobody needs them. Who fails says so soon.
            match self.ended {
                _ if failed => break true,
                Some(_) if self.helpers.is_empty() || leave.is_some_and(|at| Instant::now() >= at) => break false,
                Some(Status::Code(0)) | None => {}
                Some(_) => drop(leave.get_or_insert_with(|| Instant::now() + LINGER)),
            }
            let conversation = self.relay.wait_for();
            let over = conversation.is_none();
            let left = leave.map(|at| at.saturating_duration_since(Instant::now()));
            let [server, program] = conversation.unwrap_or([signals.as_fd(); 2]);
            let [signal, died, server, program] =
                wait([signals.as_fd(), children.as_fd(), server, program], left).op("wait for the program")?;
            if !over && (server || program) {
                self.relay.handle_readable(server, program);
            }
            if died {
                while let Ok(Some(_)) = children.read_signal() {}
            }
            if signal {
                self.pass_on(signals);
            }
        };
        self.relay.end();
        match self.ended {
            Some(Status::Code(code)) => Ok(code),
            Some(Status::Signal(signal)) => die_by(signal),
            None if failed => Err(Error::new("run the job", "its agent or front end failed")),
            None => Ok(EXIT_FAILED),
        }
    }

    /// Notes who ended. Returns whether a helper failed while the program depends on it.
    fn reap(&mut self) -> bool {
        let mut failed = false;
        while let Some((pid, fate)) = process::reap() {
            let Some(status) = ended(fate) else { continue };
            if pid == self.child {
                self.ended = Some(status);
            }
            let known = self.helpers.len();
            self.helpers.retain(|helper| *helper != pid);
            failed |= self.helpers.len() < known && status != Status::Code(0);
        }
        if failed && self.ended.is_none() {
            let _ = kill(self.child, Signal::SIGKILL);
        }
        failed && self.ended.is_none()
    }

    fn pass_on(&self, signals: &SignalFd) {
        while let Ok(Some(signal)) = signals.read_signal() {
            let number = i32::try_from(signal.ssi_signo).unwrap_or(0);
            if let Ok(signal) = Signal::try_from(number)
                && self.ended.is_none()
            {
                let _ = kill(self.child, signal);
            }
        }
    }
}

/// Ends as the program did.
fn die_by(signal: i32) -> Result<u8> {
    if let Ok(signal) = Signal::try_from(signal) {
        process::die_by(signal);
    }
    Ok(u8::try_from(128 + signal).unwrap_or(EXIT_FAILED))
}
