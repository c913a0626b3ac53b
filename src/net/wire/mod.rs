//! The wire protocol: one file per conversation. Types only, no I/O.

pub mod record;
