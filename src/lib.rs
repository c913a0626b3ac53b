//! hpcrt: runs unmodified programs on clusters. Layers, with imports pointing downward only:
//! `modes` -> `launch`, `loader`, `pager`, `iofs` -> `net` -> `sys`, `error`.
//!
//! Everything but a short `main` is a library, so that tests and benches reach it.

pub mod cli;
pub mod error;
pub mod iofs;
pub mod launch;
pub mod loader;
pub mod modes;
pub mod net;
pub mod pager;
pub mod sys;

pub use error::{Error, Result};
