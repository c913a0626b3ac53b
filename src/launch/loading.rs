//! The root's side of loading: resolves what a job needs, feeds what the reader finds into the log, and the log to the first nodes.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use async_channel::{Receiver, Sender, bounded};
use smol::Timer;
use smol::future::FutureExt;

use super::couriers::{Couriers, Pieces};
use super::mpi::Mpi;
use super::node::feed_arrivals;
use super::overlay::{Children, Spawner};
use super::subtree::Arrivals;
use crate::Result;
use crate::error::Error;
use crate::loader::capture::{self, Capture};
use crate::loader::catalog::as_path;
use crate::loader::closure::{self, Environment, How};
use crate::loader::elf;
use crate::loader::source::{Finding, Preload, READERS, Source};
use crate::net::replicate::{FeedsLog, Log, Rebuild};
use crate::net::topology::{CostModel, Shape, Topology};
use crate::net::wire::control::{Feeder, Need, NodeId, Order, Target};
use crate::net::wire::record::{CHUNK_MAX, Codec, LoadId, Piece, Record};

/// Nanoseconds of a core to compress a byte, and what each further host on the machine takes to receive, decompress and store it: about three
/// times what `cargo bench --bench bytes` says, since whoever else runs here has his own use for the cores.
const COMPRESS: u128 = 10;
const TAKE: u128 = 4;
/// So much content goes ahead before anything is known of the links, and then the first of them has so long to be told of: what is sent
/// meanwhile goes as it is.
const AHEAD: u64 = 4 << 20;
const TOLD: Duration = Duration::from_millis(150);

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
#[derive(Debug, Clone, Copy)]
pub struct Wishes<'a> {
    /// `--prefix`.
    pub prefixes: &'a [Vec<u8>],
    /// `--exclude`.
    pub excludes: &'a [Vec<u8>],
    /// Scripts among the program's arguments, without symbolic links: they are as good as part of it.
    pub scripts: &'a [PathBuf],
}

/// See the module.
pub struct Loading {
    pub source: Arc<Source>,
    log: Rc<Log>,
    pub topology: Topology,
    couriers: Couriers,
    /// Who waits for pieces that are not here yet.
    waiting: RefCell<HashMap<Piece, BTreeSet<NodeId>>>,
    /// A link's speed was told.
    told: (Sender<()>, Receiver<()>),
    heard: Cell<bool>,
    /// `None`: there is no link.
    machine: Option<Machine>,
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

/// The root's machine.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub cores: usize,
    /// Nodes on it: more than one only in containers and tests.
    pub hosts: usize,
}

impl Machine {
    /// Whether a link of so many bytes per second is slower than compression.
    fn outpaces(self, rate: u64) -> bool {
        let others = self.hosts.saturating_sub(1) as u128;
        u128::from(rate) * (COMPRESS + TAKE * others) < 1_000_000_000 * self.cores.min(READERS) as u128
    }
}

impl Loading {
    /// A log for `nodes` nodes (the root included), fed by a reader of the shared file system. `machine`: `None` when they are all on this host.
    pub fn start(
        tasks: &Spawner,
        arrivals: &Arrivals,
        children: &Rc<Children>,
        nodes: u32,
        machine: Option<Machine>,
        source: Arc<Source>,
        found: Receiver<Finding>,
    ) -> Rc<Loading> {
        let topology = topology(nodes);
        let log = Log::new(true, topology.stripes());
        let couriers = Couriers::new(Rc::clone(tasks), Rc::clone(children));
        let waiting = RefCell::default();
        let this = Rc::new(Loading {
            source,
            log,
            topology,
            couriers,
            waiting,
            told: bounded(1),
            heard: Cell::default(),
            machine,
        });
        tasks.spawn(Rc::clone(&this).write(found)).detach();
        tasks.spawn(Rc::clone(&this).hand_out()).detach();
        tasks.spawn(order(Arc::clone(&this.source), Rc::clone(children))).detach();
        let (spawner, arrivals, feeder) = (Rc::clone(tasks), arrivals.clone(), Rc::clone(&this));
        tasks.spawn(async move { feed_arrivals(spawner, arrivals, feeder).await }).detach();
        this
    }

    /// Whether every node computes two trees (else a chain).
    pub fn two_trees(&self) -> bool {
        self.topology.shape() == Shape::TwoTrees
    }

    async fn write(self: Rc<Self>, found: Receiver<Finding>) {
        let changed = self.log.listener();
        // Content that nobody waits for yet would have to be read again for those who come.
        let fed: usize = (0..self.topology.stripes()).map(|s| self.topology.children(s, 0).count()).sum();
        let attached = async {
            while self.log.children() < fed {
                changed.woken().await;
            }
        };
        attached
            .or(async {
                Timer::after(ATTACH).await;
            })
            .await;
        let (mut ahead, mut may_compress) = (0, self.machine.is_some() && self.source.chooses_compression());
        while let Ok(Finding { record, body, hash, .. }) = found.recv().await {
            ahead += body.len() as u64;
            if ahead > AHEAD && std::mem::take(&mut may_compress) {
                let heard = async {
                    let _ = self.told.1.recv().await;
                };
                let late = async {
                    Timer::after(TOLD).await;
                };
                heard.or(late).await;
            }
            self.log.room().await;
            self.log.append(record, body, hash);
        }
    }

    /// A node asks for a piece of a file that is held here.
    pub fn hand(self: &Rc<Self>, to: NodeId, piece: Piece) {
        if self.source.has(piece) {
            self.couriers.send(self, to, piece);
        } else if self.source.holds(piece.file) {
            self.waiting.borrow_mut().entry(piece).or_default().insert(to);
        }
    }

    /// Hands pieces to those who wait for them, as they are read.
    async fn hand_out(self: Rc<Self>) {
        while let Some(piece) = self.source.fresh().await {
            let waiting = self.waiting.borrow_mut().remove(&piece).unwrap_or_default();
            waiting.into_iter().for_each(|node| self.couriers.send(&self, node, piece));
        }
    }
}

impl FeedsLog for Loading {
    fn log(&self) -> &Rc<Log> {
        &self.log
    }

    /// Also of a link between two nodes.
    fn hear_rate(&self, rate: u64) -> bool {
        log::debug!("a link carries {} MB/s", rate / 1_000_000);
        // Where hosts share processors, who is told of later waited longer for these, and compression would take more of them.
        let first = !self.heard.replace(true);
        if self.machine.is_some_and(|machine| (first || machine.hosts == 1) && machine.outpaces(rate)) {
            self.source.compress_slow_links();
        }
        let _ = self.told.0.try_send(());
        true
    }
}

impl Pieces for Loading {
    async fn piece(&self, piece: Piece) -> Option<(u32, Codec, Vec<u8>)> {
        let source = Arc::clone(&self.source);
        smol::unblock(move || source.piece(piece)).await
    }
}

impl Rebuild for Loading {
    async fn rebuild(&self, record: &Record) -> Option<(Record, Vec<u8>)> {
        let (source, record) = (Arc::clone(&self.source), record.clone());
        smol::unblock(move || source.read_again(&record)).await
    }
}

/// Tells nodes what to read.
async fn order(source: Arc<Source>, children: Rc<Children>) {
    while let Some((node, extent)) = source.forest.order().await {
        children.order(Target::Node(node), Order::Read(extent), Vec::new()).await;
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
    wishes: &Wishes<'_>,
) -> Result<Needs> {
    // Of all jobs of a session, and before anything is found.
    let canonical = |word: &Vec<u8>| match as_path(word).canonicalize() {
        Ok(path) if word.contains(&b'/') => path.into_os_string().into_vec(),
        _ => word.clone(),
    };
    let mut prefixes = Vec::new();
    for prefix in wishes.prefixes.iter().map(|prefix| as_path(prefix)) {
        let missing = |error| Error::usage("capture the directory", error).on(prefix);
        let prefix = prefix.canonicalize().map_err(missing)?;
        if !prefix.is_dir() {
            return Err(Error::usage("capture the directory", "it is none")
                .on(prefix)
                .remedy("name the directory it is in"));
        }
        prefixes.push(prefix.into_os_string().into_vec());
    }
    let excludes = wishes.excludes.iter().map(canonical).collect();
    source.capture(Capture { excludes, shared: prefixes.clone(), ..Capture::default() });
    let mut needs = Needs { load: preload.id(), ..Needs::default() };
    let mut directories = BTreeSet::new();
    let (mut pythons, mut environments, mut scripts) = (Vec::new(), Vec::new(), Vec::new());
    let closure = closure::resolve(preload, env, program, |object, file| {
        if object.how == How::Program {
            pythons.extend(capture::python_trees(&object.canonical));
        }
        // By the name that it is started by: an environment's interpreter is a link out of it.
        if matches!(object.how, How::Program | How::Script | How::Env) {
            let environment = capture::virtual_environment(&object.path);
            environments.extend(environment.map(|path| path.into_os_string().into_vec()));
        }
        if source.shares_device(object.inode.0, &object.canonical) {
            needs.bytes += if object.size <= capture::FILE_MAX { object.size } else { 0 };
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
    let mut trees: Vec<_> = pythons.iter().chain(&environments).cloned().chain(prefixes).collect();
    trees.retain(|tree| source.shares(as_path(tree)));
    directories.extend(trees.iter().cloned());
    // A script that an interpreter is given by name.
    for script in wishes.scripts.iter().filter(|script| source.shares(script)) {
        directories.insert(directory_of(script));
        scripts.push((script.clone(), None));
    }
    source.capture(Capture { trees: trees.clone(), ..Capture::default() });
    if !pythons.is_empty() {
        source.prefetch(|prefetch| {
            scripts.iter().for_each(|(script, _)| prefetch.add_search(&directory_of(script)));
            // An environment hides the packages of its installation.
            for tree in &trees {
                prefetch.add_tree(tree, environments.is_empty() || !pythons.contains(tree));
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
        preload.path(as_path(root), Need::Attributes);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_pays_on_links_that_are_slower_than_it() {
        let outpaces = |mbit: u64, cores, hosts| Machine { cores, hosts }.outpaces(mbit * 1_000_000 / 8);
        for (mbit, cores, slow) in [(100, 1, true), (1_000, 2, true), (1_000, 1, false), (10_000, 2, false)] {
            assert_eq!(outpaces(mbit, cores, 1), slow, "{mbit} Mbit/s, {cores} cores");
        }
        assert!(outpaces(5_000, 64, 1) && !outpaces(10_000, 64, 1), "no more cores than read");
        assert!(outpaces(1_000, 2, 2) && !outpaces(1_000, 2, 8) && outpaces(100, 2, 8), "hosts that share the cores");
        assert!(!Machine { cores: 64, hosts: 1 }.outpaces(u64::MAX));
    }
}
