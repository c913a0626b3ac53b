//! The control tree: orders go down, reports go up. Bodies (output, standard input) follow their header as raw bytes.

use rkyv::{Archive, Deserialize, Serialize};

use super::borrow::Borrow;
use super::collective::{Verdict, Wiring, Word};
use super::facts::{Birth, Facts, JobFacts};
use super::files::Forward;
use super::frame::{Kind, Message};
use super::record::{Codec, FileId, LoadId, Piece};

/// Number of a node in the session: 0 is the root (the front end), agents count from 1.
pub type NodeId = u32;
/// Number of a job in the session.
pub type JobId = u32;

/// A frame from a parent to a child; relayed unopened except for `to`.
#[derive(Archive, Serialize, Deserialize, Debug, Clone)]
pub struct Down {
    pub to: Target,
    pub order: Order,
}

/// Who an order is for.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    All,
    Node(NodeId),
}

/// What a node is told.
#[derive(Archive, Serialize, Deserialize, Debug, Clone)]
pub enum Order {
    /// First frame on a fresh agent's private pipe.
    Enroll(Enroll),
    /// Start these nodes: those whose `parent` is the receiver itself, and hand the others on.
    Start { nodes: Vec<NodeSpec> },
    /// The topology of the log: every node that takes part in its order (the root first), so that all compute the same feeders.
    Feed { two_trees: bool, nodes: Vec<Feeder> },
    /// Start a job's ranks, when the log says that it is loaded.
    Launch(Box<Launch>),
    /// Deliver a signal to every rank of the job on the node.
    Signal { job: JobId, signal: i32 },
    /// So many bytes of the output of this program of the job were taken: the node may send as many more.
    Taken { job: JobId, part: u32, bytes: u32 },
    /// Standard input for the job's readers on the node; an empty body is its end.
    Stdin { job: JobId },
    /// Kill what is left of the job: SIGTERM now, SIGKILL after `grace_ms`.
    End { job: JobId, grace_ms: u32 },
    /// Of what the job's members do together.
    Collective { job: JobId, verdict: Verdict },
    /// Run a server for a job, with this key, hidden under the session's and `nonce`: [`Report::Lent`].
    Lend { job: JobId, service: Service, key: [u8; 32], nonce: [u8; 32] },
    /// End the job's server.
    Unlend { job: JobId },
    /// Tell what you know of yourself: [`Report::Facts`].
    Facts,
    /// Tell which processes are the job's ranks: [`Report::Pids`].
    Pids { job: JobId },
    /// The answer to [`Report::Fetch`]: `len` raw bytes, encoded by `codec`, in the body.
    Piece { piece: Piece, len: u32, codec: Codec },
    /// Read this from the shared file system and send it up: [`Report::Read`].
    Read(Extent),
    /// Everything is over: clean up and leave.
    Leave,
    /// Nothing; keeps the link's watchdog content.
    Ping,
}

/// What a node does for programs of a job on other nodes.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Lends so many bytes of memory.
    Memory { bytes: u64 },
    /// Writes their files.
    Files,
}

impl Service {
    /// What runs for it.
    pub fn server(self) -> &'static str {
        match self {
            Service::Memory { .. } => "memory server",
            Service::Files => "I/O worker",
        }
    }
}

/// What an agent must know to be a node.
#[derive(Archive, Serialize, Deserialize, Debug, Clone)]
pub struct Enroll {
    pub node: NodeId,
    /// The host as the user named it.
    pub host: String,
    pub key: [u8; 32],
    /// Public name of the session, in ranks' environments and in what is left after a crash.
    pub session: String,
    /// Where the parent listens ("address:port"); empty: stay on the pipe.
    pub parent: Vec<String>,
    /// How this node starts its own children.
    pub agent: AgentKind,
    /// Make what this needs at once (jobs with captured files will come), or nothing.
    pub view: View,
    /// Directory for the store; `None`: a private RAM disk.
    pub store: Option<Vec<u8>>,
}

/// How programs see their captured files.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// By mounts where the node allows them, else through their dynamic linkers.
    Auto,
    /// By mounts.
    Namespace,
    /// Through their dynamic linkers.
    Audit,
    /// Not at all: nothing is captured.
    None,
}

/// How agents are started.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum AgentKind {
    /// Processes of this machine.
    Local,
    /// `ssh HOST`.
    Ssh,
    /// A shell command; `{host}` is replaced, or the host appended.
    Command(String),
    /// One step of the Slurm allocation starts all of them; they come to the front end by themselves.
    Srun,
    /// Somebody else starts them; they come to the front end by themselves.
    Launched,
}

impl AgentKind {
    /// Agents connect to the front end instead of being started one by one.
    pub fn come(&self) -> bool {
        matches!(self, AgentKind::Srun | AgentKind::Launched)
    }
}

/// One node of a sub-tree to start.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct NodeSpec {
    pub node: NodeId,
    pub parent: NodeId,
    pub host: String,
}

/// One node of the bulk topology.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Feeder {
    pub node: NodeId,
    /// Where it listens ("address:port"), best first.
    pub addresses: Vec<String>,
}

/// A job as every node needs it.
#[derive(Archive, Serialize, Deserialize, Debug, Clone)]
pub struct Launch {
    pub job: JobId,
    /// Which of the job's programs this is; each has a launch of its own.
    pub part: u32,
    /// Absolute path, as the user would see it.
    pub program: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    /// "NAME=value", for all ranks.
    pub env: Vec<Vec<u8>>,
    pub cwd: Vec<u8>,
    /// Without it no rank starts; else those start in HOME.
    pub cwd_named: bool,
    /// Of the ranks: the bits that files which they make do not get (`umask(2)`).
    pub umask: u32,
    /// Ranks in the job.
    pub size: u32,
    pub places: Vec<Place>,
    /// Directory trees shown through the view; none: the program runs plainly.
    pub roots: Vec<Vec<u8>>,
    pub view: View,
    /// What must be in the log before ranks start. Only with roots.
    pub load: LoadId,
    /// Bytes of content known to be needed.
    pub bytes: u64,
    pub stdin: StdinTo,
    /// Programs use memory of other nodes.
    pub memory: Option<Borrow>,
    /// They write files asynchronously: below these directories; none: on file systems that hosts share.
    pub files: Option<Vec<Vec<u8>>>,
    /// Others write them.
    pub forward: Option<Forward>,
    /// Another launcher starts the ranks; they come as guests ([`super::guest`]). A place's count is how many will, 0: any number until
    /// the job is ended. Answered by [`Report::Open`].
    pub guests: bool,
    /// A debugger watches: each rank stops before its program's first instruction until it is sent SIGCONT, and who gave this order may be
    /// stopped himself for any time. Answered by [`Report::Pids`].
    pub hold: bool,
    /// The same for all programs of the job.
    pub wiring: Wiring,
    /// Bytes of output that a node may send of each program before it hears that some were taken ([`Order::Taken`]).
    pub window: u32,
    pub aid: Aid,
    /// The ranks are one job of an MPI library that the program is linked with: they must ask who the others are.
    pub mpi: bool,
}

impl Launch {
    /// Programs write files asynchronously, and there are others on other hosts.
    pub fn writes_elsewhere(&self) -> bool {
        self.files.is_some() && self.wiring.nodes.len() > 1
    }
}

/// What the ranks are given for the MPI library of their program.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aid {
    None,
    /// A client of PMI-1: whatever the program starts or loads later may need one.
    Client,
    /// What lets UCX go on while MPICH waits for PMI.
    Progress,
}

/// The ranks of one node.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub node: NodeId,
    pub first: u32,
    pub count: u32,
    /// Of all ranks of the job on the node, the number of the first of these, and how many there are.
    pub local: u32,
    pub locals: u32,
    pub bind: Binding,
}

/// How the ranks of a node are pinned to its processors.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// Not at all: each may use every usable one.
    None,
    /// One each, in the order of the system's numbers.
    Compact,
    /// The usable ones are cut into equal consecutive parts, one for each rank; for ranks with threads.
    Spread,
}

/// Which ranks read the front end's standard input.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum StdinTo {
    First,
    All,
    None,
}

/// What a node does without, and why it does; `launch::limits` says what comes instead.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq, Default)]
pub struct Limits {
    /// Any view of captured files, though one was asked for.
    pub view: Option<String>,
    /// Namespaces, though they were wanted.
    pub namespaces: Option<String>,
    /// A RAM disk for its store; with the directory that holds it.
    pub memory: Option<String>,
    /// Executing from memory, hence the bootstrapper.
    pub memfd: Option<String>,
    /// TCP connections to the node that started it.
    pub tcp: Option<String>,
    /// Another node that starts it: the root had to, and notes that.
    pub ssh: Option<String>,
}

/// A frame from a child to its parent; passed on to the root, with what concerns the sub-tree noted on the way.
#[derive(Archive, Serialize, Deserialize, Debug, Clone)]
pub enum Report {
    /// This node is up. `machine`: see [`crate::sys::node::machine`].
    Joined { node: NodeId, addresses: Vec<String>, machine: Option<u64>, limits: Box<Limits>, birth: Birth },
    /// This node's child could not be started, nor what should have been below it.
    NotStarted { node: NodeId, error: String },
    /// The link to this node broke.
    Lost { node: NodeId, error: String },
    /// Somebody below needs to know about a path: see `Need`.
    Want { path: Vec<u8>, need: Need },
    /// A rank below changed the shared file system.
    Changed { path: Vec<u8>, exists: Option<u8> },
    /// `node` is to be sent this piece. Who has it answers, in place of the root; who can keep it asks for it in its own name.
    Fetch { node: NodeId, piece: Piece },
    /// Ranks below needed the content of `next` after that of `file`.
    Followed { file: FileId, next: FileId },
    /// The answer to [`Order::Read`]; the body holds the bytes, an empty one says that the file is not there, or not the same.
    Read { ticket: u32 },
    /// Output of a rank; the body holds the bytes, an empty one is the end of the stream.
    Output { job: JobId, rank: u32, stream: Stream },
    /// These ranks ended.
    Exited { job: JobId, ranks: Vec<Exit> },
    /// The node could not run its part of the job. The error does not name the host: where many fail alike, it is said once.
    Failed { job: JobId, node: NodeId, error: String },
    /// Every process of this program of the job on this node is gone. `received`: bytes of files that came to the node since its last
    /// job's end, as on the wire, and how many of them because it asked ([`Report::Fetch`]).
    Done { job: JobId, part: u32, node: NodeId, warnings: Vec<String>, received: (u64, u64), facts: JobFacts },
    /// The job's standard input was taken by this program's readers on this node: send more.
    StdinTaken { job: JobId, part: u32, node: NodeId },
    /// Guests of the job are let in on the node.
    Open { job: JobId, node: NodeId },
    /// The node has the job's files and starts its ranks.
    Loaded { job: JobId, node: NodeId },
    /// The answer to [`Order::Lend`]: where the server is, best first; or [`Report::Unlent`].
    Lent { job: JobId, node: NodeId, addresses: Vec<String> },
    /// The job's server on this node could not be started, or has ended though it should not have; or programs on this node go on without
    /// one.
    Unlent { job: JobId, node: NodeId, error: String },
    /// The answer to [`Order::Facts`].
    Facts { node: NodeId, facts: Facts },
    /// Ranks and their processes, as the node numbers them; several of these together tell of all.
    Pids { job: JobId, ranks: Vec<(u32, u32)> },
    /// How fast content comes to a node below, in bytes per second (`u64::MAX`: without a link); only the slowest are passed on.
    Rate { rate: u64 },
    /// Of what the job's members do together; the body belongs to the word.
    Collective { job: JobId, word: Word },
    /// Nothing; keeps the link's watchdog content.
    Ping,
}

/// What a node needs to know about a path.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Need {
    /// Attributes, or a directory's listing.
    Attributes,
    /// A file's content too, if it is of a kind that is captured.
    Content,
}

/// Which version of a file: the same on every host that sees it.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Seconds and nanoseconds since the epoch.
    pub mtime: (i64, u32),
    /// Seconds and nanoseconds since the epoch.
    pub ctime: (i64, u32),
}

/// A part of a file that a node is to read in the root's stead.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// The number of the question.
    pub ticket: u32,
    pub path: Vec<u8>,
    pub seen: Seen,
    pub offset: u64,
    /// At most [`CHUNK_MAX`](super::record::CHUNK_MAX).
    pub len: u32,
    /// The node will not be asked for more of the file.
    pub last: bool,
}

/// Which stream of a rank.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stream {
    Out,
    Err,
}

/// The end of a rank.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    pub rank: u32,
    pub status: Status,
    /// hpcrt ended it.
    pub by_us: bool,
}

/// How a process ended.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    Code(u8),
    Signal(i32),
}

impl Message for Down {
    const KIND: Kind = Kind::Control;
}

impl Message for Report {
    const KIND: Kind = Kind::Control;
}
