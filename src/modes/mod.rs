//! The modes of `hpcrt`, one per file.

pub mod ldd;
