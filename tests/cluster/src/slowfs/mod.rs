//! The shared file system of the hosts: one server process, one FUSE mount per host, all passing through to one directory.
//!
//! It behaves as a network file system with a single busy server: attributes are cached for 5 s, absences not at all, data as long
//! as a file does not change, requests carry at most 128 KiB.

mod control;
mod files;
mod nodes;
pub(crate) mod ops;
mod queue;
mod server;

pub(crate) use control::ask;
pub(crate) use server::serve;
