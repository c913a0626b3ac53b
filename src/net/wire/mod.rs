//! The wire protocol: one file per conversation. Types only, no I/O.

pub mod borrow;
pub mod collective;
pub mod control;
pub mod facts;
pub mod files;
pub mod forward;
pub mod frame;
pub mod guest;
pub mod hello;
pub mod keeper;
pub mod log;
pub mod page;
pub mod record;
pub mod session;
