//! What code inside an application's process stands on: raw system calls, the plan's layout and how a rank follows it. No libc, no
//! allocator, no TLS. hpcrt compiles `plan`, `rank` and `syscall` into itself, too (`src/sys/mod.rs`).
#![no_std]

#[cfg(target_arch = "x86_64")]
pub mod addresses;
mod afresh;
pub mod blake3;
pub mod counts;
#[cfg(target_arch = "x86_64")]
pub mod digest;
pub mod extents;
pub mod files;
#[cfg(target_arch = "x86_64")]
mod gaps;
pub mod inodes;
#[cfg(target_arch = "x86_64")]
pub mod instruction;
pub mod line;
pub mod mem;
#[cfg(target_arch = "x86_64")]
pub mod object;
pub mod page;
pub mod places;
pub mod plan;
pub mod policy;
pub mod pool;
pub mod processors;
pub mod rank;
pub mod resident;
pub mod retention;
#[cfg(target_arch = "x86_64")]
pub mod sites;
pub mod socket;
pub mod strides;
pub mod syscall;
pub mod table;
pub mod tasks;
#[cfg(target_arch = "x86_64")]
mod width;
