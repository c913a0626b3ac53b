//! What code inside an application's process stands on: raw system calls and the plan's layout. No libc, no allocator, no TLS.
#![no_std]

pub mod mem;
pub mod plan;
pub mod syscall;
pub mod table;
