//! The few places with unsafe and raw system calls. Everything above is safe Rust.

pub mod mpir;
pub mod node;
pub mod process;
pub mod without;

/// The layout of the launch plan, shared with the bootstrapper by file: one source for writer and reader.
#[path = "../../static-bootstrap/sys/src/plan.rs"]
pub mod boot_plan;

/// The layout of the audit view's table and the questions of its auditor, shared with that by file.
#[path = "../../static-bootstrap/sys/src/table.rs"]
pub mod audit_table;
