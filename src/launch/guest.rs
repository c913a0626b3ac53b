//! A process that another launcher started (`srun`, `mpiexec`) and that becomes a program of the job: it asks its node's agent for the
//! job's view, enters it, and executes the program. Process, streams, environment, limits and place in the batch system stay what its
//! launcher gave it.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use nix::unistd::Pid;
use rustix::io::Errno;

use crate::error::say;
use crate::net::seqpacket::{Listener, Seqpacket};
use crate::net::wire::control::JobId;
use crate::net::wire::guest::{Guest, Welcome};
use crate::sys::process;
use crate::{Error, Result, error::Context};

/// Variables that an answer may change.
const LINKER: [&str; 3] = ["LD_AUDIT", "GLIBC_TUNABLES", "PYTHONPATH"];
/// The agent answers within this time.
const ANSWER: Duration = Duration::from_secs(30);
/// An agent that is being started is there within this time.
const AGENT: Duration = Duration::from_secs(90);

/// What guests of a session's job are told to enter.
pub fn name(session: &str, job: JobId) -> String {
    format!("{session}-{job}")
}

/// Where guests of a job find its agent: the same path on every node, whatever the environment of agents and launchers.
#[derive(Debug, Clone)]
pub struct Porch(PathBuf);

impl Porch {
    /// Of a job by its [`name`].
    ///
    /// # Errors
    /// That is none.
    pub fn of(job: &str) -> Result<Porch> {
        if job.is_empty() || !job.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Err(Error::usage("find the job", "that is not what another launcher's programs enter").on(job));
        }
        let user = rustix::process::geteuid().as_raw();
        Ok(Porch(format!("/tmp/hpcrt-guests-{user}/{job}").into()))
    }

    /// The socket at which the agent answers.
    pub fn door(&self) -> PathBuf {
        self.0.join("door")
    }

    /// This binary, as long as the agent lives.
    pub fn binary(&self) -> PathBuf {
        self.0.join("hpcrt")
    }

    /// Makes the directory and what is in it; `None` when another agent of the session (on the same machine) has.
    ///
    /// # Errors
    /// Somebody else has the place, or it cannot be written.
    pub fn open(&self) -> Result<Option<Opened>> {
        let above = self.0.parent().unwrap_or(&self.0);
        for directory in [above, &self.0] {
            match fs::DirBuilder::new().mode(0o700).create(directory) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(error).op_on("make", directory);
                }
                _ => {}
            }
            let meta = fs::symlink_metadata(directory).op_on("inspect", directory)?;
            if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o077 != 0 {
                return Err(Error::new("use", "it is not a directory that only you can reach").on(directory));
            }
        }
        if Seqpacket::connect(&self.door()).is_err_and(|error| error == Errno::CONNREFUSED) {
            // Of an agent that was killed.
            let _ = fs::remove_file(self.door());
        }
        let door = match Listener::bind(&self.door(), 1024) {
            Err(_) if self.door().exists() => return Ok(None),
            bound => bound?,
        };
        let opened = Opened { door, porch: self.clone() };
        let binary = self.binary();
        std::os::unix::fs::symlink(format!("/proc/{}/exe", std::process::id()), &binary).op_on("make", &binary)?;
        sweep(above);
        Ok(Some(opened))
    }

    /// Removes it, with the directory above when that is empty.
    pub fn remove(&self) {
        let _ = fs::remove_file(self.door());
        let _ = fs::remove_file(self.binary());
        let _ = fs::remove_dir(&self.0);
        let _ = self.0.parent().map(fs::remove_dir);
    }
}

/// The agent's side, removed with this.
#[derive(Debug)]
pub struct Opened {
    pub door: Listener,
    porch: Porch,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.porch.remove();
    }
}

/// Removes what agents left that were killed together with their keepers.
fn sweep(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let porch = Porch(entry.path());
        if Seqpacket::connect(&porch.door()).is_err_and(|error| error == Errno::CONNREFUSED) {
            porch.remove();
        }
    }
}

/// Becomes the program, shown the job's files where this node has an agent of it. For a process without threads.
///
/// # Errors
/// The program cannot be executed, or the view not be entered.
pub fn enter(job: &str, program: &[OsString]) -> Result<u8> {
    let porch = Porch::of(job)?;
    let mut command = Command::new(&program[0]);
    command.args(&program[1..]);
    match knock(&porch) {
        Ok(welcome) => accept(welcome, &mut command)?,
        Err(error) => say(format_args!("{error}; the program reads the shared file system itself")),
    }
    Err(command.exec()).op_on("execute", &program[0])
}

/// A program that is not started by an agent.
#[derive(Debug)]
pub struct Own<'a> {
    pub words: Vec<OsString>,
    /// Where it is, as its first word says.
    pub path: PathBuf,
    /// Where it is to start, if not here.
    pub cwd: Option<PathBuf>,
    /// Variables to set.
    pub env: Vec<(&'a str, OsString)>,
}

/// The same for a child of a process that is part of the session, which waits until the agent is there and dies with its parent. Without a
/// job there is nothing to enter.
///
/// # Errors
/// As [`enter`]; the agent does not come; there is no such directory.
pub fn become_program(job: Option<&str>, own: &Own<'_>, env: &[(&str, String)], parent: Pid) -> Result<u8> {
    let mut command = Command::new(&own.path);
    command.arg0(&own.words[0]).args(&own.words[1..]);
    process::as_given(&mut command);
    command.envs(own.env.iter().map(|(name, value)| (name, value))).envs(env.iter().map(|(name, value)| (name, value)));
    if let Some(cwd) = &own.cwd {
        std::env::set_current_dir(cwd).op_on("enter the working directory", cwd)?;
    }
    if let Some(job) = job {
        let (porch, begun) = (Porch::of(job)?, Instant::now());
        let welcome = loop {
            match knock(&porch) {
                Err(error) if begun.elapsed() > AGENT => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
                Ok(welcome) => break welcome,
            }
        };
        accept(welcome, &mut command)?;
    }
    // Only now: the kernel forgets it where namespaces are entered.
    if !process::die_with(parent) {
        return Err(Error::new("start the program", "whoever started it is gone"));
    }
    Err(command.exec()).op_on("execute", &own.path)
}

/// Gives a program these lines of an environment.
pub(super) fn set_variables(command: &mut Command, lines: &[Vec<u8>]) {
    for line in lines {
        let (name, value) = line.split_at(line.iter().position(|byte| *byte == b'=').unwrap_or(line.len()));
        command.env(OsStr::from_bytes(name), OsStr::from_bytes(value.get(1..).unwrap_or_default()));
    }
}

fn accept((welcome, fds): (Welcome, Vec<OwnedFd>), command: &mut Command) -> Result<()> {
    match welcome {
        Welcome::Namespaces => follow(fds),
        Welcome::Linker { env } => {
            set_variables(command, &env);
            Ok(())
        }
        Welcome::Plain => Ok(()),
    }
}

/// Asks the agent.
fn knock(porch: &Porch) -> Result<(Welcome, Vec<OwnedFd>)> {
    let agent = Seqpacket::connect(&porch.door()).op("reach hpcrt's agent on this host")?;
    let time = rustix::net::sockopt::Timeout::Recv;
    rustix::net::sockopt::set_socket_timeout(&agent, time, Some(ANSWER)).op("ask hpcrt's agent")?;
    let value = |name: &&str| Some([name.as_bytes(), b"=", std::env::var_os(name)?.as_bytes()].concat());
    agent.send(&Guest { env: LINKER.iter().filter_map(value).collect() }, &[]).op("ask hpcrt's agent")?;
    let answer = agent.receive::<Welcome>().op("hear hpcrt's agent")?;
    answer.ok_or_else(|| Error::new("hear hpcrt's agent", "the job is over"))
}

/// Enters the namespaces; the working directory keeps its path.
fn follow(fds: Vec<OwnedFd>) -> Result<()> {
    let here = std::env::current_dir();
    let mut fds = fds.into_iter();
    let mounts = fds.next().ok_or_else(|| Error::new("enter the job's view", "it came without descriptors"))?;
    if let Some(user) = fds.next() {
        setns(user, CloneFlags::CLONE_NEWUSER).op("enter the job's user namespace")?;
    }
    setns(mounts, CloneFlags::CLONE_NEWNS).op("enter the job's mount namespace")?;
    let here = here.op("find the working directory")?;
    std::env::set_current_dir(&here).op_on("enter the working directory", here)
}

/// `hpcrt enter JOB --`, as a launcher is told to run it in front of the program.
pub fn prefix(job: &str) -> Result<Vec<OsString>> {
    let binary = Porch::of(job)?.binary().into_os_string();
    Ok(vec![binary, "enter".into(), job.into(), "--".into()])
}
