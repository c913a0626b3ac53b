//! Another launcher's command while it runs: its signals, its end, its exit code.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use smol::Timer;
use smol::future::FutureExt;

use super::agent;
use super::foreign::Foreign;
use super::guest;
use super::keeper::KILLED;
use crate::error::EXIT_FAILED;
use crate::loader::catalog::as_path;
use crate::net::wire::session::JobSpec;
use crate::sys::process;
use crate::sys::stdin::is_others;
use crate::{Error, Result, error::Context};

/// What the loop waits for.
enum Next {
    Died,
    Signal(Signal),
    Failed,
    Late,
}

/// Runs a launcher to its end, with the job's directory and variables: its exit code. It gets the signals that `signal` gives, and is ended
/// when `failed` comes back, which is called again and again.
///
/// # Errors
/// It cannot be started.
pub async fn run(
    words: &[OsString],
    job: &JobSpec,
    mut signal: impl AsyncFnMut() -> Signal,
    mut failed: impl AsyncFnMut(),
) -> Result<u8> {
    let mut command = command(words, job)?;
    let mut child = command.spawn().op_on("run", &words[0])?;
    let pid = Pid::from_raw(child.id().cast_signed());
    let mut ending: Option<Instant> = None;
    loop {
        let died = async {
            agent::end_of(&mut child).await;
            Next::Died
        };
        let signal = async { Next::Signal(signal().await) };
        let failed = async {
            failed().await;
            Next::Failed
        };
        let late = async {
            match ending {
                Some(at) => Timer::at(at).await,
                None => smol::future::pending().await,
            };
            Next::Late
        };
        match died.or(signal).or(late).or(failed).await {
            Next::Died => return ended(child),
            Next::Late => drop(kill(pid, Signal::SIGKILL)),
            Next::Signal(Signal::SIGTSTP) if is_in_front() => process::stop_here(),
            Next::Signal(Signal::SIGINT | Signal::SIGQUIT | Signal::SIGCONT | Signal::SIGWINCH) if is_in_front() => {}
            Next::Signal(signal) => drop(kill(pid, signal)),
            Next::Failed if ending.is_none() => {
                let _ = kill(pid, Signal::SIGTERM);
                ending = Some(Instant::now() + KILLED);
            }
            Next::Failed => {}
        }
    }
}

/// Whether what is typed at the terminal reaches a child without us, wherever its input comes from: it is in our group.
fn is_in_front() -> bool {
    File::open("/dev/tty").is_ok_and(|terminal| !is_others(terminal))
}

/// The exit code of a launcher that ended.
fn ended(mut child: Child) -> Result<u8> {
    let status = child.wait().op("wait for the launcher")?;
    let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(EXIT_FAILED.into());
    Ok(u8::try_from(code).unwrap_or(EXIT_FAILED))
}

/// A launcher's command line, with the job's directory and variables.
fn command(words: &[OsString], job: &JobSpec) -> Result<Command> {
    let mut command = Command::new(&words[0]);
    let cwd = as_path(&job.blocks[0].cwd);
    // Else it would be the launcher that is not found.
    fs::metadata(cwd).map_err(|error| Error::usage("enter the working directory", error).on(cwd))?;
    command.args(&words[1..]).current_dir(cwd);
    guest::set_variables(&mut command, &job.blocks[0].env);
    process::as_given(&mut command);
    Ok(command)
}

impl Foreign {
    /// Becomes the launcher, with nothing taken over.
    ///
    /// # Errors
    /// It cannot be executed.
    pub fn alone(&self, job: &JobSpec) -> Result<u8> {
        let words = self.with(&[]);
        Err(command(&words, job)?.exec()).op_on("execute", &words[0])
    }
}
