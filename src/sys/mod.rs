//! The few places with unsafe and raw system calls. Everything above is safe Rust.

pub mod boot;
pub mod mpir;
pub mod node;
pub mod process;
pub mod program;
pub mod tcp;
pub mod without;

// Shared with the bootstrapper by file: one source for the writer of a plan and its readers, and one for what a rank does with it.
#[path = "../../static-bootstrap/sys/src/plan.rs"]
pub mod plan;
#[path = "../../static-bootstrap/sys/src/rank.rs"]
pub mod rank;
#[path = "../../static-bootstrap/sys/src/syscall.rs"]
pub mod syscall;

/// The layout of the audit view's table and the questions of its auditor, shared with that by file.
#[path = "../../static-bootstrap/sys/src/table.rs"]
pub mod audit_table;
