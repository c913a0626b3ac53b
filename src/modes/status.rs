//! `hpcrt status`: what runs, and how far it is.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use serde_json::Value;
use smol::future::FutureExt;
use smol::{Async, Timer};

use crate::cli::Status;
use crate::error::{EXIT_USAGE, say};
use crate::launch::root::GATHER;
use crate::launch::{door, resident, status_text};
use crate::net::memory_file;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::session::{SessionAsk, SessionTell};
use crate::{Error, Result, error::Context};

/// A front end answers within this time: it asks its nodes, and may be busy.
const ANSWER: Duration = Duration::from_secs(2 * GATHER.as_secs() + 3);
/// An answer is at most this long: a hundred thousand nodes' worth.
const ANSWER_MAX: u64 = 64 << 20;
/// Time between two looks with `--watch`.
const AGAIN: Duration = Duration::from_secs(1);

/// Shows one, or all.
pub(super) fn run(flags: &Status) -> Result<u8> {
    let mut shown = 0;
    loop {
        let begun = Instant::now();
        let (text, code) = match &flags.id {
            Some(id) => match one(id, flags.pids) {
                Ok(status) => (show(&status, flags, status_text::one), 0),
                // What was shown before is over now.
                Err(error) if shown > 0 && error.exit_code() == EXIT_USAGE => return Ok(0),
                Err(error) => return Err(error),
            },
            None => all(flags)?,
        };
        if write(flags, &text).is_err() || !flags.watch {
            return Ok(code);
        }
        shown += 1;
        std::thread::sleep(AGAIN.saturating_sub(begun.elapsed()));
    }
}

fn show(status: &Value, flags: &Status, text: impl FnOnce(&Value) -> String) -> String {
    match (flags.json, flags.watch) {
        (true, false) => format!("{status:#}\n"),
        // A line for each look.
        (true, true) => format!("{status}\n"),
        (false, _) => text(status),
    }
}

fn write(flags: &Status, text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if flags.watch && !flags.json {
        // ECMA-48: to the first column of the first line, and erase from there.
        let clear = if out.is_terminal() { "\x1b[H\x1b[J" } else { "" };
        out.write_all(clear.as_bytes())?;
    }
    out.write_all(text.as_bytes())?;
    if flags.watch && !flags.json && !out.is_terminal() {
        out.write_all(b"\n")?;
    }
    out.flush()
}

fn one(id: &str, pids: bool) -> Result<Value> {
    let connection = door::connect(id)?;
    let server = connection.peer();
    resident::ask(&connection, &SessionAsk::Status { nodes: true, pids }, &[])?;
    let answered = smol::block_on(answer(connection, Instant::now() + ANSWER));
    answered.map_err(|error| error.unwrap_or_else(|| silent(id, server)))
}

/// All that answer; the code is 1 if one did not, which is said.
fn all(flags: &Status) -> Result<(String, u8)> {
    // All are asked before the first answer is awaited: they share the time.
    let mut asked = Vec::new();
    for name in door::names()? {
        let Ok(connection) = door::connect(&name) else { continue };
        let server = connection.peer();
        if resident::ask(&connection, &SessionAsk::Status { nodes: false, pids: false }, &[]).is_ok() {
            asked.push((name, connection, server));
        }
    }
    let (until, mut statuses, mut code) = (Instant::now() + ANSWER, Vec::new(), 0);
    for (name, connection, server) in asked {
        match smol::block_on(answer(connection, until)) {
            Ok(status) => statuses.push(status),
            // It ended meanwhile.
            Err(Some(error)) if error.exit_code() == EXIT_USAGE => {}
            Err(error) => {
                say(error.unwrap_or_else(|| silent(&name, server)));
                code = 1;
            }
        }
    }
    let statuses = Value::Array(statuses);
    Ok((show(&statuses, flags, |all| status_text::list(all.as_array().map_or(&[], Vec::as_slice))), code))
}

/// What is to be said of one that does not answer.
fn silent(name: &str, pid: Option<i32>) -> Error {
    let stopped = pid.and_then(|pid| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let state = stat.rsplit_once(')')?.1.split_whitespace().next()?;
        matches!(state, "T" | "t").then_some(())
    });
    let cause = match (pid, stopped) {
        (Some(pid), Some(())) => format!("its process {pid} is stopped"),
        (Some(pid), None) => format!("its process {pid} did not answer within {} s", ANSWER.as_secs()),
        (None, _) => format!("it did not answer within {} s", ANSWER.as_secs()),
    };
    let error = Error::new("show the status", cause).on(name);
    match (pid, stopped) {
        (Some(pid), Some(())) => error.remedy(format!("kill -CONT {pid} lets it go on")),
        _ => error,
    }
}

/// The answer; an error of `None`: there is none in time.
async fn answer(connection: Seqpacket, until: Instant) -> std::result::Result<Value, Option<Error>> {
    let heard = async {
        let connection = Async::new(connection).op("hear the front end")?;
        match connection.read_with(Seqpacket::receive_now::<SessionTell>).await.op("hear the front end")? {
            Some((SessionTell::Status, mut fds)) if fds.len() == 1 => fds.pop().map_or(Ok(Value::Null), read),
            Some(_) => Err(Error::new("hear the front end", "it answered something else; use one version of hpcrt")),
            None => Err(Error::usage("show the status", "it ended")),
        }
    };
    let late = async {
        Timer::at(until).await;
        Err(None)
    };
    async { heard.await.map_err(Some) }.or(late).await
}

fn read(file: OwnedFd) -> Result<Value> {
    let text = memory_file::read_bytes(file, ANSWER_MAX).op("read the status")?;
    serde_json::from_slice(&text).op("read the status")
}
