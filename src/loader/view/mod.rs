//! How a job sees the captured directories: under their original paths, out of the catalog and the store.
//!
//! The keeper makes the namespaces and mounts ([`namespace`]); the agent serves the FUSE file system mounted there ([`skeleton`]).

mod absent;
mod answers;
mod attributes;
mod content;
pub mod directory;
mod handles;
mod inodes;
pub mod namespace;
mod original;
mod parked;
mod passed;
mod place;
pub mod probe;
mod server;
pub mod skeleton;
mod ssh;

pub use attributes::Identity;
pub use skeleton::{Closing, Counts, DEADLINE, Need, Serving, Setup, Siblings, Skeleton, Upcall};
