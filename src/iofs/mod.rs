//! Asynchronous file I/O: the worker that writes what programs left in shared memory.

pub mod worker;

#[cfg(test)]
mod oracle;
