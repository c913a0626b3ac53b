//! Starting programs: hosts, agents, plans, keepers, output, exit codes.

pub mod agent;
mod job_keeper;
pub mod keeper;
pub mod node;
pub mod overlay;
pub mod plan;
pub mod subtree;
