//! The few places with unsafe and raw system calls. Everything above is safe Rust.

pub mod boot;
pub mod node;
pub mod process;
pub mod syscall;
pub mod without;
