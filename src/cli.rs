//! The only file that knows flags.
