//! Hosts, allocations, placement, agents, keeper, standard streams and exit codes.

pub mod start_tree;
