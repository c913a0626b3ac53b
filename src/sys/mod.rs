//! The few places with unsafe and raw system calls. Everything above is safe Rust.

pub mod board;
pub mod boot;
pub mod extents_map;
pub mod huge;
pub mod inject;
pub mod memory;
pub mod mpir;
pub mod node;
pub mod patient;
pub mod process;
pub mod program;
pub mod span;
pub mod stdin;
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

/// What programs say to memory servers, shared with the code inside them by file.
#[path = "../../static-bootstrap/sys/src/page.rs"]
pub mod page;
#[cfg(test)]
mod page_tests;

/// The same of the resident in a program and its node's agent.
#[path = "../../static-bootstrap/sys/src/resident.rs"]
pub mod resident;

/// What the pager in a program counts, shared with it by file and, while it runs, in memory.
#[path = "../../static-bootstrap/sys/src/counts.rs"]
pub mod counts;

/// Which memory servers keep what, shared by file likewise.
#[path = "../../static-bootstrap/sys/src/places.rs"]
pub mod places;
#[cfg(test)]
mod places_tests;

/// Sets of processors as the resident has them; here for their tests.
#[cfg(test)]
#[path = "../../static-bootstrap/sys/src/processors.rs"]
pub mod processors;
#[cfg(test)]
mod processors_tests;

/// The tags of frames as the resident makes them; here for their tests.
#[cfg(test)]
#[path = "../../static-bootstrap/sys/src/blake3.rs"]
pub mod blake3;

/// Which system calls it stops where the kernel does not tell its own faults; here for its test.
#[cfg(all(test, target_arch = "x86_64"))]
#[path = "../../static-bootstrap/sys/src/addresses.rs"]
pub mod addresses;
#[cfg(all(test, target_arch = "x86_64"))]
mod addresses_tests;

/// How it knows whether a page has changed; here for its tests.
#[cfg(all(test, target_arch = "x86_64"))]
#[path = "../../static-bootstrap/sys/src/digest.rs"]
pub mod digest;
#[cfg(all(test, target_arch = "x86_64"))]
mod digest_tests;
#[cfg(all(test, target_arch = "x86_64"))]
#[path = "../../static-bootstrap/sys/src/width.rs"]
mod width;

#[cfg(test)]
mod pager_traces;
/// How the pager in a program decides; here for its tests.
#[cfg(test)]
#[path = "../../static-bootstrap/sys/src/policy.rs"]
pub mod policy;
#[cfg(test)]
mod policy_traces;
#[cfg(test)]
#[path = "../../static-bootstrap/sys/src/strides.rs"]
pub mod strides;
#[cfg(test)]
mod strides_traces;

/// Slots through which its pages pass; here for their tests.
#[cfg(test)]
#[path = "../../static-bootstrap/sys/src/pool.rs"]
pub mod pool;
#[cfg(test)]
mod pool_tests;

#[cfg(test)]
#[path = "../../static-bootstrap/sys/src/afresh.rs"]
mod afresh;
/// What is here in the order in which it came; here for its tests.
#[cfg(test)]
#[path = "../../static-bootstrap/sys/src/line.rs"]
pub mod line;
#[cfg(test)]
mod line_tests;
/// What it keeps; here for its tests.
#[cfg(test)]
#[path = "../../static-bootstrap/sys/src/retention.rs"]
pub mod retention;
#[cfg(test)]
mod retention_traces;

#[cfg(all(test, target_arch = "x86_64"))]
#[path = "../../static-bootstrap/sys/src/gaps.rs"]
mod gaps;
#[cfg(all(test, target_arch = "x86_64"))]
mod gaps_tests;
/// Where programs' objects make system calls, as the file layer in a program finds it; here for its tests.
#[cfg(all(test, target_arch = "x86_64"))]
#[path = "../../static-bootstrap/sys/src/instruction.rs"]
pub mod instruction;
#[cfg(all(test, target_arch = "x86_64"))]
mod instruction_tests;
#[cfg(all(test, target_arch = "x86_64"))]
#[path = "../../static-bootstrap/sys/src/object.rs"]
pub mod object;
#[cfg(all(test, target_arch = "x86_64"))]
#[path = "../../static-bootstrap/sys/src/sites.rs"]
pub mod sites;
#[cfg(all(test, target_arch = "x86_64"))]
mod sites_tests;

/// What programs wrote and the I/O worker has not, shared with both in memory and by file.
#[path = "../../static-bootstrap/sys/src/extents.rs"]
pub mod extents;
#[path = "../../static-bootstrap/sys/src/inodes.rs"]
pub mod inodes;

/// What the file layer in a program asks its node's agent.
#[path = "../../static-bootstrap/sys/src/files.rs"]
pub mod files;
