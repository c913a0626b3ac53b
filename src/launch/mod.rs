//! Starting programs: hosts, agents, keepers, output, exit codes.

pub mod agent;
pub mod allocation;
pub mod console;
pub mod exit;
pub mod fold;
mod gather;
pub mod hostfile;
pub mod hostlist;
mod job_keeper;
pub mod keeper;
pub mod loading;
pub mod node;
pub mod output;
pub mod output_files;
pub mod overlay;
pub mod placement;
pub mod progress;
pub mod resident;
pub mod root;
pub mod run;
pub mod session;
pub mod start_tree;
pub mod stats;
pub mod subtree;
