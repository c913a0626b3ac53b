//! What the simulator shows about the log: times, messages and memory with many nodes, losses in the middle, slow nodes.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use fastrand::Rng;

use super::replica::tests::{CHUNK, PATIENCE, completed, load, undisturbed};
use super::replica::{Load, Replica, broadcast};
use super::{Network, Sim, Traffic};
use crate::net::topology::{CostModel, Node, Shape, Topology};

/// Chunks in the broadcasts of this file, 1 MiB each.
const ENTRIES: u64 = 256;

/// The time that one link needs for everything.
fn link_time(load: &Load, network: &Network) -> Duration {
    Duration::from_secs_f64(load.entries as f64 * f64::from(load.chunk) / network.bandwidth)
}

fn planned(nodes: u32, network: &Network) -> Topology {
    let bytes = ENTRIES * u64::from(CHUNK);
    let (bandwidth, latency) = (network.bandwidth, network.latency);
    Topology::plan(nodes, &CostModel { bytes, chunk: CHUNK.into(), bandwidth, latency, per_chunk: Duration::ZERO })
}

/// The most that any node but the root, and that the root, sent and received.
fn traffic(sim: &Sim<Replica>) -> (Traffic, Traffic) {
    let others = sim.living().map(Replica::node).filter(|node| *node != 0).map(|node| sim.traffic(node));
    let most = others.reduce(|a, b| Traffic {
        sent: a.sent.max(b.sent),
        sent_bytes: a.sent_bytes.max(b.sent_bytes),
        received: a.received.max(b.received),
        received_bytes: a.received_bytes.max(b.received_bytes),
    });
    (most.unwrap_or_default(), sim.traffic(0))
}

/// Bytes of this process, at most so far.
fn own_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Without faults, to clusters of these sizes; `print` for the documentation.
fn without_faults(sizes: &[u32]) {
    let (network, load) = (Network::default(), load(ENTRIES));
    let one_link = link_time(&load, &network);
    let chunk = one_link / ENTRIES as u32;
    for &nodes in sizes {
        let topology = planned(nodes, &network);
        let begun = Instant::now();
        let sim = undisturbed(topology, load, network);
        let (took, real) = (completed(&sim), begun.elapsed());
        let (most, root) = traffic(&sim);
        let held =
            |root| sim.living().filter(|r| (r.node() == 0) == root).map(Replica::most_held).max().unwrap_or(0) >> 20;
        let (shape, depth, events) = (topology.shape(), topology.max_depth(), sim.events());
        let ratio = |bound: Duration| took.as_secs_f64() / bound.as_secs_f64();
        // A node passes a chunk on when it has verified it: a hop takes the latency and the time of one chunk.
        let (bare, hops) = (one_link + network.latency * depth, one_link + (network.latency + chunk) * depth);
        println!(
            "{nodes} nodes, {shape:?}, depth {depth}: {took:?} (link + depth x latency: {:.3}, with a chunk's time per hop: {:.3}); \
             most of a node: {most:?} and {} MiB held, root: {root:?} and {} MiB held; {events} events in {real:?}, {} MiB",
            ratio(bare),
            ratio(hops),
            held(false),
            held(true),
            own_memory() >> 20
        );
        assert!(ratio(hops) <= 1.15, "{nodes} nodes: {took:?}");
        assert!(sim.living().all(|replica| replica.repeated() + replica.rebuilt() == 0));
        assert_eq!(root.sent, ENTRIES, "every chunk leaves the root once");
        assert!(most.sent.max(most.received) <= ENTRIES + 2, "a node passes on as much as it gets");
        assert!(real < Duration::from_secs(300) && own_memory() < 4 << 30, "{real:?}");
    }
}

/// One in a hundred nodes dies halfway, all at once; returns the time with and without.
fn crashes(nodes: u32, seed: u64) -> (Duration, Duration) {
    let (network, load) = (Network::default(), load(ENTRIES));
    let topology = planned(nodes, &network);
    let usual = topology.estimate(&CostModel {
        bytes: ENTRIES * u64::from(CHUNK),
        chunk: CHUNK.into(),
        bandwidth: network.bandwidth,
        latency: network.latency,
        per_chunk: Duration::ZERO,
    });
    let mut rng = Rng::with_seed(seed);
    let mut dead = HashSet::new();
    while dead.len() < nodes as usize / 100 {
        dead.insert(rng.u32(1..nodes));
    }
    let mut sim = broadcast(topology, load, network, seed);
    sim.start_all();
    dead.iter().for_each(|&node| sim.crash(node, usual / 2));
    assert!(sim.run(PATIENCE));
    assert_eq!(sim.living().count(), nodes as usize - dead.len());
    for replica in sim.living() {
        for stripe in 0..topology.stripes() {
            let alive = topology.ancestors(stripe, replica.node()).find(|node| !dead.contains(node));
            assert_eq!(replica.fed_by(stripe), alive, "node {} in stripe {stripe}", replica.node());
        }
        assert_eq!(replica.repeated(), 0, "node {} did not go on where it was", replica.node());
    }
    (completed(&sim), usual)
}

#[test]
fn survivors_of_one_in_a_hundred_go_on_where_they_were() {
    for (nodes, seeds) in [(200, 10), (1000, 2)] {
        for seed in 0..seeds {
            let (took, usual) = crashes(nodes, seed);
            let bound = 2 * usual + Network::default().detection;
            assert!(took > usual && took <= bound, "seed {seed}: {took:?} instead of {usual:?}");
        }
    }
}

#[test]
fn nobody_sends_or_holds_more_in_a_larger_cluster() {
    without_faults(&[2, 8, 64, 1024]);
}

/// A node among `nodes` whose link is `factor` times slower; the times of the others outside and inside of what it feeds, and its own.
/// `bypassed`: from that time on it feeds nobody.
fn slow(nodes: u32, slow: Node, factor: f64, bypassed: Option<Duration>) -> [Option<Duration>; 3] {
    let (network, load) = (Network::default(), load(ENTRIES));
    let topology = Topology::new(Shape::TwoTrees, nodes);
    let mut sim = broadcast(topology, load, network, 0);
    sim.set_bandwidth(slow, network.bandwidth / factor);
    sim.start_all();
    if let Some(at) = bypassed {
        (0..2).flat_map(|stripe| topology.children(stripe, slow)).for_each(|child| sim.cut(child, slow, at));
    }
    assert!(sim.run(PATIENCE));
    completed(&sim);
    let below = |node| (0..2).any(|stripe| topology.ancestors(stripe, node).any(|above| above == slow));
    [0, 1, 2].map(|which| {
        let kind = |node| if node == slow { 2 } else { usize::from(below(node)) };
        sim.living().filter(|r| kind(r.node()) == which).filter_map(Replica::finished).max()
    })
}

/// Ten times slower than the others: it delays those that it feeds, directly or not, and nobody else. When they leave it, they catch up.
#[test]
fn a_slow_node_delays_only_those_below_it() {
    let nodes = 256;
    let topology = Topology::new(Shape::TwoTrees, nodes);
    let (network, usual) = (Network::default(), completed(&undisturbed(topology, load(ENTRIES), Network::default())));
    let at_depth = |depth| (1..nodes).find(|&n| topology.depth(0, n) == depth && topology.children(0, n).count() == 2);
    for depth in [2, 4, 7] {
        let node = at_depth(depth).expect("an inner node of the first tree");
        let [outside, inside, own] = slow(nodes, node, 10.0, None).map(Option::unwrap_or_default);
        println!(
            "node {node} at depth {depth}: outside {outside:?}, below {inside:?}, itself {own:?}, usual {usual:?}"
        );
        assert!(outside <= usual.mul_f64(1.05), "{outside:?} instead of {usual:?}");
        assert!(inside > 5 * usual && own > 5 * usual && inside.max(own) < 12 * usual);
        let [outside, inside, own] = slow(nodes, node, 10.0, Some(usual / 2)).map(Option::unwrap_or_default);
        println!("  left by those below at {:?}: outside {outside:?}, below {inside:?}, itself {own:?}", usual / 2);
        let bound = 2 * usual + network.detection;
        assert!(outside.max(inside) <= bound, "{outside:?} and {inside:?} instead of {usual:?}");
    }
}

/// One receiver with a hundredth of the bandwidth: it gets everything, with bodies rebuilt for it, and its siblings do not notice.
#[test]
fn a_slow_leaf_delays_only_itself() {
    let (network, nodes) = (Network::default(), 32);
    let topology = Topology::new(Shape::TwoTrees, nodes);
    let leaf = (1..nodes).find(|&node| (0..2).all(|stripe| topology.children(stripe, node).count() == 0));
    let leaf = leaf.expect("with 31 positions one node is a leaf in both trees");
    let usual = completed(&undisturbed(topology, load(ENTRIES), network));
    let [outside, _, own] = slow(nodes, leaf, 100.0, None).map(Option::unwrap_or_default);
    assert!(outside <= usual.mul_f64(1.05), "{outside:?} instead of {usual:?}");
    assert!(own > 20 * usual && own < 110 * usual, "{own:?} instead of {usual:?}");
}

/// The proof `sim`, see `docs/WORKING.md`.
#[test]
#[ignore = "takes minutes and gigabytes"]
fn a_hundred_thousand_nodes() {
    without_faults(&[8, 64, 1024, 16_384, 100_000]);
    for (nodes, seed) in [(10_000, 1), (100_000, 2)] {
        let begun = Instant::now();
        let (took, usual) = crashes(nodes, seed);
        let (detection, real) = (Network::default().detection, begun.elapsed());
        println!("{} of {nodes} nodes die at {:?}: {took:?} instead of {usual:?}, in {real:?}", nodes / 100, usual / 2);
        assert!(took <= 2 * usual + detection && real < Duration::from_secs(300));
    }
}
