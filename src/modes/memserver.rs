//! `hpcrt memserver`: lends this node's memory.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;

use crate::cli::Memserver;
use crate::error::{Context, Error, Result, say};
use crate::iofs::receiver;
use crate::launch::door::{self, Door, Porter};
use crate::launch::lender;
use crate::net::listen;
use crate::net::wire::control::Service;
use crate::pager::server::{self, Terms};
use crate::pager::{key, promise, store::Store};
use crate::sys::process;
use crate::sys::without::Without;

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
    // Before there are threads.
    let porter = Porter::start();
    let listener = listen::listen_at(flags.listen).map_err(|error| {
        let error = Error::new("listen at", error).on(flags.listen.to_string());
        error.remedy("name another address or port with --listen")
    })?;
    let (addresses, store, name) = (listen::addresses(&listener), Store::new(bytes), door::lender_name());
    let shown = porter
        .and_then(|porter| Door::open(&name, porter))
        .and_then(|door| lender::answer_at(door, name, addresses.clone(), Arc::clone(&store)));
    if let Err(error) = shown {
        say(format_args!("hpcrt status will not show this memory server: {error}"));
    }
    std::io::stdout().write_all(format!("{}\n", addresses.join("\n")).as_bytes()).op("print the addresses")?;
    server::lend(listener, key, &store)?;
    Ok(0)
}

/// The same, or an I/O host's worker, on the [`Terms`] of the agent that started it and whose socket is standard input; ends with that.
///
/// # Errors
/// As [`run`]'s.
pub(super) fn run_for_agent() -> Result<u8> {
    process::die_with(nix::unistd::getppid());
    let socket = File::from(rustix::stdio::stdin().as_fd().try_clone_to_owned().op("hear the agent")?);
    let (mut hear, mut tell) = (BufReader::new(&socket), &socket);
    let mut line = String::new();
    hear.read_line(&mut line).op("hear the agent")?;
    let Terms { service, here, key } =
        Terms::parse(&line).ok_or_else(|| Error::new("hear the agent", "it says something else"))?;
    if let Service::Memory { bytes } = service {
        promise::check(bytes)?;
    }
    process::raise_nofile();
    let listener = listen::listen(here, &Without::from_env()?).op("listen")?;
    let listener = listener.ok_or_else(|| Error::new("listen", "HPCRT_WITHOUT forbids TCP connections"))?;
    let lines: String = listen::addresses(&listener).into_iter().map(|address| address + "\n").collect();
    tell.write_all(format!("{lines}\n").as_bytes()).op("tell the agent")?;
    let watch = move || {
        // It never says another word.
        let _ = (&socket).read(&mut [0]);
        process::leave(0)
    };
    thread::Builder::new().name("agent".to_owned()).spawn(watch).op("watch the agent")?;
    match service {
        Service::Memory { bytes } => server::lend(listener, key, &Store::new(bytes))?,
        Service::Files => receiver::serve(listener, key)?,
    }
    Ok(0)
}
