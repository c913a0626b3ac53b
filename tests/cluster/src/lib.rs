//! Test hosts on one machine: network namespaces joined by rate-limited links, each with its own mounts, and one counting and
//! delaying shared file system ("slowfs") mounted on all of them.
//!
//! Tests use [`Cluster`]; the same things are reached from a shell through the `cluster` binary (README.md).

pub mod cli;
pub mod generate;
pub mod spec;
pub mod state;

mod down;
mod enter;
mod handle;
mod host;
mod leftovers;
mod network;
mod processes;
mod slowfs;
mod ssh;
mod up;

pub use handle::Cluster;
pub use leftovers::{Leftover, leftovers};
pub use slowfs::ops::{HostOps, Ops};
pub use spec::Spec;
