//! Asynchronous file I/O: the worker that writes what programs left in shared memory, and the one on an I/O host that writes what it is sent.

pub mod forward;
pub mod mounts;
mod queue;
pub mod receiver;
mod same;
pub mod worker;

#[cfg(test)]
mod oracle;
