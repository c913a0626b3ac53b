//! The few places with unsafe and raw system calls. Everything above is safe Rust.

pub mod process;
pub mod seqpacket;
