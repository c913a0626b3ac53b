//! The root's side of loading: resolves what a job needs, feeds what the reader finds into the log, and the log to the first nodes.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use async_channel::{Receiver, Sender, bounded};
use smol::Timer;
use smol::future::FutureExt;

use super::mpi::Mpi;
use super::node::feed_arrivals;
use super::overlay::Spawner;
use super::subtree::Arrivals;
use crate::Result;
use crate::error::Context;
use crate::loader::capture::{self, Capture};
use crate::loader::closure::{self, Environment, How};
use crate::loader::elf;
use crate::loader::source::{Finding, Preload, READERS, Source};
use crate::net::replicate::{FeedsLog, Log, Rebuild};
use crate::net::topology::{CostModel, Shape, Topology};
use crate::net::wire::control::{Feeder, Need, NodeId};
use crate::net::wire::record::{CHUNK_MAX, LoadId, Record};

/// Bytes sent before the nodes are heard of how fast they come.
const MEASURED: u64 = 4 << 20;
/// The nodes have this long to say so.
const RATED: Duration = Duration::from_millis(150);
/// Bytes per second and core that are worth compressing: a third of what zstd's fast end does with libraries, since the other two thirds
/// have their own use for the cores.
const COMPRESSED_PER_CORE: f64 = 100e6;

/// The first nodes attach to the log within this time; after it, what they missed is read again for them.
const ATTACH: Duration = Duration::from_secs(5);

/// What a program needs from file systems that the hosts share.
#[derive(Debug, Default)]
pub struct Needs {
    /// Directory trees to show through the view; none: nothing is captured.
    pub roots: Vec<Vec<u8>>,
    /// Bytes of the closure's captured files.
    pub bytes: u64,
    /// What the job waits for.
    pub load: LoadId,
    /// The MPI libraries of the programs, by their numbers.
    pub mpi: Vec<(u32, Mpi)>,
}

/// What is to be captured besides the closure.
#[derive(Debug, Clone, Default)]
pub struct Wishes {
    /// `--prefix`.
    pub prefixes: Vec<PathBuf>,
    /// `--exclude`.
    pub excludes: Vec<Vec<u8>>,
    /// Arguments of the program: a script among them is as good as part of it.
    pub arguments: Vec<PathBuf>,
}

/// See the module.
pub struct Loading {
    pub source: Arc<Source>,
    log: Rc<Log>,
    pub topology: Topology,
    /// Bytes per second at the node that content reaches slowest, and how many have spoken.
    slowest: Cell<(u64, u32)>,
    heard: (Sender<()>, Receiver<()>),
}

impl Needs {
    /// What both need, of the same load.
    pub fn join(&mut self, other: Needs) {
        self.roots = capture::roots(self.roots.drain(..).chain(other.roots));
        self.bytes += other.bytes;
        self.load = self.load.max(other.load);
        self.mpi.extend(other.mpi);
    }
}

impl std::fmt::Debug for Loading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loading").field("topology", &self.topology).finish_non_exhaustive()
    }
}

/// The topology of the log over that many nodes, the root included.
///
/// Two trees only where they gain clearly: in a chain a root that shares its host with the first node loads that host's link once, in two
/// trees twice.
fn topology(nodes: u32) -> Topology {
    const GAIN: f64 = 0.8;
    // Typical of what is loaded and of what it is sent over; the choice depends little on them.
    let cost = CostModel {
        bytes: 256 << 20,
        chunk: CHUNK_MAX as u64,
        bandwidth: 1.25e8,
        latency: Duration::from_micros(50),
        per_chunk: Duration::from_micros(400),
    };
    let [chain, trees] = [Shape::Chain, Shape::TwoTrees].map(|shape| Topology::new(shape, nodes));
    if trees.estimate(&cost) < chain.estimate(&cost).mul_f64(GAIN) { trees } else { chain }
}

impl Loading {
    /// A log for `nodes` nodes (the root included), fed by a reader of the shared file system.
    ///
    /// # Errors
    /// The reader's threads cannot be started.
    pub fn start(
        tasks: &Spawner,
        arrivals: &Arrivals,
        nodes: u32,
        source: Arc<Source>,
        found: Receiver<Finding>,
    ) -> Rc<Loading> {
        let topology = topology(nodes);
        let log = Log::new(true, topology.stripes());
        let slowest = Cell::new((u64::MAX, 0));
        let this = Rc::new(Loading { source, log, topology, slowest, heard: bounded(1) });
        tasks.spawn(Rc::clone(&this).write(found)).detach();
        let (spawner, arrivals, feeder) = (Rc::clone(tasks), arrivals.clone(), Rc::clone(&this));
        tasks.spawn(async move { feed_arrivals(spawner, arrivals, feeder).await }).detach();
        this
    }

    /// Whether every node computes two trees (else a chain).
    pub fn two_trees(&self) -> bool {
        self.topology.shape() == Shape::TwoTrees
    }

    async fn write(self: Rc<Self>, found: Receiver<Finding>) {
        let (_, woken) = self.log.listener();
        // Content that nobody waits for yet would have to be read again for those who come.
        let fed: usize = (0..self.topology.stripes()).map(|s| self.topology.children(s, 0).count()).sum();
        let attached = async {
            while self.log.children() < fed {
                let _ = woken.recv().await;
            }
        };
        attached
            .or(async {
                Timer::after(ATTACH).await;
            })
            .await;
        let mut appended = 0;
        while let Ok(Finding { record, body, hash, .. }) = found.recv().await {
            appended += body.len() as u64;
            if appended > MEASURED && self.source.is_undecided() {
                self.decide().await;
            }
            while !self.log.wants_more() {
                let _ = woken.recv().await;
            }
            self.log.append(record, body, hash);
        }
    }

    /// Hears how fast content comes to a node.
    pub fn hear_rate(&self, rate: u64) {
        let (slowest, heard) = self.slowest.get();
        self.slowest.set((slowest.min(rate), heard + 1));
        let _ = self.heard.0.try_send(());
    }

    /// Compresses where the slowest link is slower than this machine compresses; the nodes decompress faster than that.
    async fn decide(&self) {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(READERS);
        let pays = || (self.slowest.get().0 as f64) < COMPRESSED_PER_CORE * cores as f64;
        let heard = async {
            while !pays() && self.slowest.get().1 + 1 < self.topology.nodes() {
                let _ = self.heard.1.recv().await;
            }
        };
        let late = async {
            Timer::after(RATED).await;
        };
        heard.or(late).await;
        log::debug!("content comes at {} MB/s or more; compressing: {}", self.slowest.get().0 / 1_000_000, pays());
        self.source.decide(pays());
    }
}

impl FeedsLog for Loading {
    fn log(&self) -> &Rc<Log> {
        &self.log
    }
}

impl Rebuild for Loading {
    async fn rebuild(&self, record: &Record) -> Option<(Record, Vec<u8>)> {
        let (source, record) = (Arc::clone(&self.source), record.clone());
        smol::unblock(move || source.read_again(&record)).await
    }
}

/// The nodes of the topology, in its order.
pub fn feeders(root: Vec<String>, nodes: Vec<(NodeId, Vec<String>)>) -> Vec<Feeder> {
    let root = Feeder { node: 0, addresses: root };
    std::iter::once(root).chain(nodes.into_iter().map(|(node, addresses)| Feeder { node, addresses })).collect()
}

/// Finds what a program, one of a job's, needs and hands what the hosts share of it to the reader. Blocks on the shared file system: for a thread.
///
/// # Errors
/// The program's closure cannot be resolved.
pub fn resolve(
    source: &Source,
    preload: &Preload,
    part: u32,
    program: &Path,
    env: &Environment,
    wishes: &Wishes,
) -> Result<Needs> {
    // Of all jobs of a session, and before anything is found.
    let canonical = |word: &Vec<u8>| match path(word).canonicalize() {
        Ok(path) if word.contains(&b'/') => path.into_os_string().into_vec(),
        _ => word.clone(),
    };
    source.capture(Capture { excludes: wishes.excludes.iter().map(canonical).collect(), ..Capture::default() });
    let mut needs = Needs { load: preload.id(), ..Needs::default() };
    let mut directories = BTreeSet::new();
    let (mut pythons, mut scripts) = (Vec::new(), Vec::new());
    let closure = closure::resolve(preload, env, program, |object, file| {
        pythons.extend(capture::python_trees(&object.canonical));
        if source.shares_device(object.inode.0, &object.canonical) {
            needs.bytes += object.size;
            directories.insert(directory_of(&object.canonical));
            if object.how == How::Script {
                scripts.push((object.canonical.clone(), elf::read_up_to(&file, 0, CHUNK_MAX).ok()));
            }
        }
    });
    let closure = match closure {
        Ok(closure) => closure,
        // The nodes may have what is missing here, and will say if they have not.
        Err(error) => {
            if program.exists() {
                source.warn(format!("{error}; its files are not captured"));
            }
            return Ok(Needs::default());
        }
    };
    needs.mpi.extend(Mpi::of(&closure).map(|mpi| (part, mpi)));
    for listing in &closure.directories {
        if source.shares_device(listing.stat.st_dev, &listing.canonical) {
            preload.directory(listing);
            directories.insert(listing.canonical.as_os_str().as_bytes().to_vec());
        }
    }
    let environment = capture::virtual_environment(program).map(|p| p.as_os_str().as_bytes().to_vec());
    let mut trees: Vec<_> = pythons.iter().cloned().chain(environment.clone()).collect();
    for prefix in &wishes.prefixes {
        let prefix = prefix.canonicalize().op_on("capture the directory", prefix)?;
        trees.push(prefix.as_os_str().as_bytes().to_vec());
    }
    trees.retain(|tree| source.shares(path(tree)));
    directories.extend(trees.iter().cloned());
    // A script that an interpreter is given by name.
    for argument in wishes.arguments.iter().filter(|argument| is_script(argument)) {
        let Ok(canonical) = argument.canonicalize() else { continue };
        if source.shares(&canonical) {
            directories.insert(directory_of(&canonical));
            scripts.push((canonical, None));
        }
    }
    source.capture(Capture { trees: trees.clone(), ..Capture::default() });
    if !pythons.is_empty() {
        source.prefetch(|prefetch| {
            scripts.iter().for_each(|(script, _)| prefetch.add_search(&directory_of(script)));
            // An environment hides the packages of its installation.
            for tree in &trees {
                prefetch.add_tree(tree, environment.is_none() || !pythons.contains(tree));
            }
        });
    }
    for (script, read) in scripts {
        match read {
            Some(content) => source.handle_module(script.as_os_str().as_bytes(), &content),
            None => preload.path(&script, Need::Content),
        }
    }
    needs.roots = capture::roots(directories);
    for root in &needs.roots {
        preload.path(path(root), Need::Attributes);
    }
    Ok(needs)
}

/// Whether an argument of a program is a file that an interpreter runs.
pub fn is_script(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_bytes();
    path.is_file() && (crate::loader::catalog::is_code(name) || path.extension() == Some(OsStr::new("sh")))
}

fn directory_of(file: &Path) -> Vec<u8> {
    file.parent().unwrap_or(Path::new("/")).as_os_str().as_bytes().to_vec()
}

fn path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}
