//! Starting a job: which hosts, which rank where, what becomes of its output and exit codes.

pub mod allocation;
pub mod exit;
pub mod fold;
mod gather;
pub mod hostfile;
pub mod hostlist;
pub mod output;
pub mod placement;
pub mod progress;
pub mod stats;
