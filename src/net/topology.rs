//! Who feeds whom in the bulk overlay: a chain for few nodes, two interleaved binary trees for many.
//!
//! Both keep every link busy about once each way. In a chain each node passes on all it gets. With two trees the log is cut into two
//! stripes, one down each tree; a node passes on in at most one tree, to two children, so it sends as much as it receives (Sanders,
//! Speck, Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing 35, 2009).
//!
//! Tree positions are numbered in symmetric order, where odd positions are leaves. The second tree is the first one mirrored (even
//! number of positions) or shifted by one (odd number), which makes its leaves the even positions of the first. All answers are computed
//! from the numbers alone, in O(log n), so nodes agree without exchanging tables.

use std::time::Duration;

/// A node of the overlay: 0 is the root, the others are numbered without gaps.
pub type Node = u32;

/// How the nodes are connected; together with their number it determines the [`Topology`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One stripe: node i feeds node i + 1.
    Chain,
    /// Two stripes, a binary tree for each.
    TwoTrees,
}

/// What a transfer costs, for the choice of the shape.
#[derive(Debug, Clone, Copy)]
pub struct CostModel {
    /// Bytes every node is to receive.
    pub bytes: u64,
    /// Bytes of one chunk, the unit that is passed on.
    pub chunk: u64,
    /// Bytes per second of a node's link, each way; above 0.
    pub bandwidth: f64,
    /// One way, between any two nodes.
    pub latency: Duration,
    /// What a node does with a chunk before it can pass it on (system calls, verification).
    pub per_chunk: Duration,
}

/// Parents and children of every node in every stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    shape: Shape,
    nodes: u32,
}

impl Topology {
    /// The topology over nodes `0..nodes`; at least the root is there (0 counts as 1).
    pub fn new(shape: Shape, nodes: u32) -> Self {
        Topology { shape, nodes: nodes.max(1) }
    }

    /// The shape whose [`estimate`](Self::estimate) is lower; the chain when they are equal.
    pub fn plan(nodes: u32, cost: &CostModel) -> Self {
        let chain = Topology::new(Shape::Chain, nodes);
        let trees = Topology::new(Shape::TwoTrees, nodes);
        if trees.estimate(cost) < chain.estimate(cost) { trees } else { chain }
    }

    /// Time until the last node has everything: 0.7 to 1.5 times what the simulator takes for few chunks and nodes, nearer for many.
    ///
    /// With c = chunk / bandwidth, K chunks, o = `per_chunk`, l = `latency`, d the depth: K - 1 chunks follow the first at intervals of
    /// max(c, o). The first takes d (c + o + l) in a chain. In the trees it takes (2 d - 1) c + d (o + l), because two children share
    /// a node's link, and two stripes the root's.
    pub fn estimate(&self, cost: &CostModel) -> Duration {
        let copy = cost.chunk as f64 / cost.bandwidth;
        let chunks = cost.bytes.div_ceil(cost.chunk.max(1)).max(1) as f64;
        let own = cost.per_chunk.as_secs_f64();
        let depth = f64::from(self.max_depth());
        let copies = match self.shape {
            Shape::Chain => depth,
            Shape::TwoTrees => 2.0 * depth - 1.0,
        };
        let first = copies.max(0.0) * copy + depth * (own + cost.latency.as_secs_f64());
        Duration::try_from_secs_f64((chunks - 1.0) * copy.max(own) + first).unwrap_or(Duration::MAX)
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Nodes including the root.
    pub fn nodes(&self) -> u32 {
        self.nodes
    }

    /// Stripes of the log, 1 or 2: stripe s holds the records whose sequence number is s modulo the number of stripes.
    pub fn stripes(&self) -> u8 {
        match self.shape {
            Shape::Chain => 1,
            Shape::TwoTrees => 2,
        }
    }

    /// The node that feeds `node` in `stripe`; `None` for the root and for numbers outside of the topology.
    pub fn parent(&self, stripe: u8, node: Node) -> Option<Node> {
        if node == 0 || node >= self.nodes || stripe >= self.stripes() {
            return None;
        }
        match self.shape {
            Shape::Chain => Some(node - 1),
            Shape::TwoTrees => {
                let parent = tree_parent(self.swap(stripe, node), self.positions());
                Some(parent.map_or(0, |position| self.unswap(stripe, position)))
            }
        }
    }

    /// The nodes that `node` feeds in `stripe`: at most two.
    pub fn children(&self, stripe: u8, node: Node) -> impl Iterator<Item = Node> + use<> {
        let mut children = [None; 2];
        if node < self.nodes && stripe < self.stripes() && self.nodes > 1 {
            match self.shape {
                Shape::Chain => children[0] = Some(node + 1).filter(|&child| child < self.nodes),
                Shape::TwoTrees if node == 0 => children[0] = Some(self.unswap(stripe, tree_root(self.positions()))),
                Shape::TwoTrees => {
                    children = tree_children(self.swap(stripe, node), self.positions())
                        .map(|child| child.map(|position| self.unswap(stripe, position)));
                }
            }
        }
        children.into_iter().flatten()
    }

    /// `node`'s parent, that one's parent and so on; ends with the root.
    pub fn ancestors(self, stripe: u8, node: Node) -> impl Iterator<Item = Node> {
        std::iter::successors(self.parent(stripe, node), move |&above| self.parent(stripe, above))
    }

    /// Links between the root and `node`.
    pub fn depth(&self, stripe: u8, node: Node) -> u32 {
        match self.shape {
            Shape::Chain => node,
            Shape::TwoTrees => self.ancestors(stripe, node).zip(1..).last().map_or(0, |(_, depth)| depth),
        }
    }

    /// Links between the root and the farthest node.
    pub fn max_depth(&self) -> u32 {
        match self.shape {
            Shape::Chain => self.positions(),
            Shape::TwoTrees => self.positions().checked_ilog2().map_or(0, |levels| levels + 1),
        }
    }

    fn positions(&self) -> u32 {
        self.nodes - 1
    }

    /// The position of a node (not the root) in the tree of `stripe`.
    fn swap(&self, stripe: u8, node: Node) -> u32 {
        let last = self.positions();
        match stripe {
            0 => node,
            _ if last.is_multiple_of(2) => last + 1 - node,
            _ => node % last + 1,
        }
    }

    /// The inverse of [`swap`](Self::swap).
    fn unswap(&self, stripe: u8, position: u32) -> Node {
        let last = self.positions();
        match stripe {
            0 => position,
            _ if last.is_multiple_of(2) => last + 1 - position,
            _ if position == 1 => last,
            _ => position - 1,
        }
    }
}

/// The top of the tree over positions `1..=last` in symmetric order.
fn tree_root(last: u32) -> u32 {
    1 << last.ilog2()
}

/// The height of a position is its number of trailing zeros. Going up clears that bit and sets the next, until it is a position that exists.
fn tree_parent(position: u32, last: u32) -> Option<u32> {
    if position == tree_root(last) {
        return None;
    }
    let mut at = u64::from(position);
    loop {
        let height = at.trailing_zeros();
        at = at & !(1 << height) | 1 << (height + 1);
        if at <= u64::from(last) {
            return u32::try_from(at).ok();
        }
    }
}

/// Left subtrees are always complete; the right one covers what is left of its range, and its top is found as the tree's is.
fn tree_children(position: u32, last: u32) -> [Option<u32>; 2] {
    let height = position.trailing_zeros();
    if height == 0 {
        return [None; 2];
    }
    let right = (last - position).min((1 << height) - 1);
    [Some(position - (1 << (height - 1))), right.checked_ilog2().map(|bit| position + (1 << bit))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape() -> impl Strategy<Value = Shape> {
        prop_oneof![Just(Shape::Chain), Just(Shape::TwoTrees)]
    }

    /// Everything a node can be asked, checked against its neighbours' answers.
    fn check(topology: Topology, node: Node) {
        let mut feeds_in = 0;
        for stripe in 0..topology.stripes() {
            let children: Vec<_> = topology.children(stripe, node).collect();
            let most = if node == 0 || topology.shape() == Shape::Chain { 1 } else { 2 };
            assert!(children.len() <= most);
            feeds_in += usize::from(!children.is_empty());
            for child in children {
                assert_eq!(topology.parent(stripe, child), Some(node));
                assert_eq!(topology.depth(stripe, child), topology.depth(stripe, node) + 1);
            }
            match topology.parent(stripe, node) {
                Some(parent) => assert!(topology.children(stripe, parent).any(|child| child == node)),
                None => assert_eq!(node, 0),
            }
            assert!(topology.depth(stripe, node) <= topology.max_depth());
            assert!(node == 0 || topology.ancestors(stripe, node).last() == Some(0));
        }
        assert!(node == 0 || feeds_in <= 1, "node {node} passes on in both trees");
    }

    #[test]
    fn small_topologies_are_consistent() {
        for nodes in 1..300 {
            for shape in [Shape::Chain, Shape::TwoTrees] {
                let topology = Topology::new(shape, nodes);
                (0..nodes).for_each(|node| check(topology, node));
                let deepest =
                    (0..topology.stripes()).flat_map(|s| (0..nodes).map(move |node| topology.depth(s, node))).max();
                assert_eq!(deepest, Some(topology.max_depth()));
            }
        }
    }

    #[test]
    fn outside_numbers_have_no_neighbours() {
        let topology = Topology::new(Shape::TwoTrees, 5);
        assert_eq!((topology.parent(0, 5), topology.parent(2, 1)), (None, None));
        assert_eq!(topology.children(0, 5).count() + topology.children(2, 1).count(), 0);
    }

    proptest! {
        #[test]
        fn large_trees_are_consistent(nodes in 1u32..=u32::MAX, picks in prop::collection::vec(any::<prop::sample::Index>(), 20)) {
            let topology = Topology::new(Shape::TwoTrees, nodes);
            for pick in picks {
                check(topology, u32::try_from(pick.index(nodes as usize)).unwrap());
            }
        }

        #[test]
        fn the_plan_takes_the_lower_estimate(nodes in 1u32..200_000, shape in shape(), bytes in 0u64..1 << 40, micros in 0u64..10_000) {
            let cost = CostModel {
                bytes,
                chunk: 1 << 20,
                bandwidth: 1e9,
                latency: Duration::from_micros(micros),
                per_chunk: Duration::from_micros(100),
            };
            let planned = Topology::plan(nodes, &cost).estimate(&cost);
            prop_assert!(planned <= Topology::new(shape, nodes).estimate(&cost));
        }
    }
}
