//! Who starts whom.

/// The parent of each of nodes 1..=`count`: the root (0) while it may, then in turn.
pub fn parents(count: u32, fan_out: u32) -> Vec<u32> {
    let fan_out = fan_out.max(1);
    (1..=count).map(|node| (node - 1) / fan_out).collect()
}
