//! Questions to the running server, over a Unix socket in the cluster's directory: one line each way.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;

use super::server::Server;

const SOCKET: &str = "slowfs.sock";

/// Answers `ops`, `reset` and `paths` until the process ends.
pub(super) fn listen(directory: &Path, server: Arc<Server>) -> Result<()> {
    let listener = UnixListener::bind(directory.join(SOCKET)).context("listen for questions")?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that went away has no use for an error.
            let _ = answer(&stream, &server);
        }
    });
    Ok(())
}

fn answer(stream: &UnixStream, server: &Server) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut question = String::new();
    BufReader::new(stream).read_line(&mut question)?;
    let answer = match question.trim() {
        "ops" => serde_json::to_string(&server.ops())?,
        "reset" => {
            server.reset();
            "null".into()
        }
        "paths" => serde_json::to_string(&server.paths())?,
        other => serde_json::to_string(&format!("unknown question {other}"))?,
    };
    let mut stream = stream;
    stream.write_all(answer.as_bytes())?;
    Ok(())
}

/// Asks the server of the cluster in `directory`.
pub(crate) fn ask<T: DeserializeOwned>(directory: &Path, question: &str) -> Result<T> {
    let mut stream = UnixStream::connect(directory.join(SOCKET))
        .with_context(|| format!("the file server of {} does not answer", directory.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    writeln!(stream, "{question}")?;
    serde_json::from_reader(stream).with_context(|| format!("ask the file server for {question}"))
}
