//! One file per mode. A mode turns options into one call of a subsystem and its outcome into an exit code.

mod borrow;
mod doctor;
mod exec;
mod job;
pub mod ldd;
mod memserver;
mod sdk;
mod session;
mod status;

use std::io::Write;

use crate::Result;
use crate::cli::{Ioworker, Options, Serve};

/// Runs the chosen mode; the exit code is the process's.
///
/// # Errors
/// Whatever ends the mode; the caller prints it and exits with [`crate::Error::exit_code`].
pub fn run(options: Options) -> Result<u8> {
    match options {
        Options::Exec(flags, program) => exec::run(&flags, &program),
        Options::SessionStart(flags) => session::start(&flags),
        Options::SessionRun(flags, program) => session::run(&flags, &program),
        Options::SessionList => session::list(),
        Options::SessionStop(name) => session::stop(&name),
        Options::Status(flags) => status::run(&flags),
        Options::Memserver(flags) => memserver::run(&flags),
        Options::Ioworker(Ioworker { forward: true }) => memserver::run_for_agent(),
        Options::Ioworker(Ioworker { forward: false }) => crate::iofs::worker::run(),
        Options::Serve(Serve { lend: true, .. }) => memserver::run_for_agent(),
        Options::Serve(Serve { same: Some(hash), .. }) => crate::launch::agent::is_same(&hash),
        Options::Serve(Serve { same: None, join: None, .. }) => crate::launch::node::serve(),
        Options::Serve(Serve { join: Some(file), .. }) if file.as_os_str() == "-" => crate::launch::node::join_told(),
        Options::Serve(Serve { same: None, join: Some(file), .. }) => crate::launch::node::join(&file),
        Options::Enter(job, program) => crate::launch::guest::enter(&job, &program),
        Options::Ldd(flags) => ldd::run(&flags.program, flags.json),
        Options::Doctor(flags) => doctor::run(flags.json).map(|()| 0),
        Options::Sdk(directory) => sdk::run(&directory),
        Options::Completions(text) | Options::Help(text) => {
            let _ = std::io::stdout().write_all(text.as_bytes());
            Ok(0)
        }
    }
}
