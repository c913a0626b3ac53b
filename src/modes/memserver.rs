//! `hpcrt memserver`: lends this node's memory.

use std::io::Write;

use crate::cli::Memserver;
use crate::error::{Context, Result};
use crate::net::listen;
use crate::pager::{key, promise, server, store::Store};
use crate::sys::process;

/// Runs the mode, until it is killed.
///
/// # Errors
/// It cannot lend as much, cannot listen there, or has no key.
pub(super) fn run(flags: &Memserver) -> Result<u8> {
    let bytes = u64::from(flags.mb.get()) * 1_000_000;
    promise::check(bytes)?;
    let place = flags.key.clone().map_or_else(key::place, Ok)?;
    let key = key::read_or_make(&place)?;
    process::raise_nofile();
    let listener = listen::listen_at(flags.listen).map_err(|error| {
        let error = crate::Error::new("listen at", error).on(flags.listen.to_string());
        error.remedy("name another address or port with --listen")
    })?;
    let mut text = listen::addresses(&listener).join("\n");
    text.push('\n');
    std::io::stdout().write_all(text.as_bytes()).op("print the addresses")?;
    server::lend(listener, key, &Store::new(bytes))?;
    Ok(0)
}
