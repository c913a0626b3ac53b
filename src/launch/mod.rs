//! Starting a job: which hosts, which rank where, what becomes of its output and exit codes.

pub mod fold;
pub mod hostfile;
pub mod hostlist;
pub mod placement;
