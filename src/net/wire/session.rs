//! Between a resident session and the commands that use it: one message per datagram on a Unix socket that only its owner can reach.

use rkyv::{Archive, Deserialize, Serialize};

use super::borrow::Borrow;
use super::control::{Binding, StdinTo, View};
use super::files::Forward;
use super::frame::{Kind, Message};

/// What to run, and how its output is shown.
#[derive(Archive, Serialize, Deserialize, Debug, Clone)]
pub struct JobSpec {
    /// The programs, at least one; their ranks follow each other.
    pub blocks: Vec<Block>,
    pub stdin: StdinTo,
    pub binding: Binding,
    pub label: bool,
    pub gather: bool,
    /// Directory for a file per rank; absolute.
    pub output: Option<Vec<u8>>,
    pub timeout_ms: Option<u64>,
    pub keep_going: bool,
    pub view: View,
    /// Directories to capture besides those of the closure; absolute.
    pub prefixes: Vec<Vec<u8>>,
    /// File names, or absolute paths with all below them, that are never captured.
    pub excludes: Vec<Vec<u8>>,
    /// Where to write the statistics; absolute.
    pub stats: Option<Vec<u8>>,
    /// Where to draw when the hosts did what; absolute, its ending says as what.
    pub report: Option<Vec<u8>>,
    /// Memory servers that its programs use; their key is not hidden.
    pub memory: Option<Borrow>,
    /// Its programs write files asynchronously: below these directories, absolute; none: on file systems that hosts share.
    pub files: Option<Vec<Vec<u8>>>,
    /// Others write them; the key is not hidden.
    pub forward: Option<Forward>,
    pub quiet: bool,
    pub verbose: bool,
}

/// One program of a job.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Default)]
pub struct Block {
    pub ranks: Option<u32>,
    pub per_host: Option<u32>,
    /// Those of the job's hosts on which it runs, with its slots there, as a host list; `None`: any.
    pub hosts: Option<String>,
    /// Absolute path.
    pub program: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    /// "NAME=value".
    pub env: Vec<Vec<u8>>,
    pub cwd: Vec<u8>,
    /// The user named it: without it no rank starts.
    pub cwd_named: bool,
    /// Of the ranks: the bits that files which they make do not get (`umask(2)`).
    pub umask: u32,
}

/// What a command asks of a session.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum SessionAsk {
    /// Run a job. Descriptors: a file with a [`JobSpec`], standard output, standard error, with `front` a socket for who talks to the master,
    /// and standard input if it can be read. `launcher`: the command runs another launcher for the ranks when it hears
    /// [`SessionTell::Open`].
    Run {
        front: bool,
        launcher: bool,
    },
    /// The launcher has ended, with this exit code.
    Over {
        code: u8,
    },
    /// Whether the command's standard input may be read: its terminal is its own, or it is none. Not before the first of these.
    Reads {
        may: bool,
    },
    /// The command got a signal.
    Signal {
        signal: i32,
    },
    About,
    /// What runs; with `nodes`, after asking every node; with `pids`, also for the processes of the ranks. The answer's descriptor is a file
    /// of JSON (docs/STATS.md).
    Status {
        nodes: bool,
        pids: bool,
    },
    /// End the jobs and the session; the socket closes when nothing is left.
    Stop,
}

/// What a session answers.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum SessionTell {
    /// Programs that enter this job find its files on every host.
    Open {
        job: String,
    },
    /// The job is over; the command exits with this code.
    Ended {
        code: u8,
    },
    /// The descriptor is a file with the names of the hosts that are up, one a line.
    About {
        jobs: u32,
        /// Bytes of files in each node's store.
        stored: u64,
    },
    Status,
}

impl Message for JobSpec {
    const KIND: Kind = Kind::Session;
}

impl Message for SessionAsk {
    const KIND: Kind = Kind::Session;
}

impl Message for SessionTell {
    const KIND: Kind = Kind::Session;
}
