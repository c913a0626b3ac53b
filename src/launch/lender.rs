//! A memory server of its own as those see it who ask `hpcrt status`.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use smol::future::FutureExt;
use smol::{Async, Timer};

use super::door::Door;
use super::status::SCHEMA;
use crate::error::{Context, Result};
use crate::net::memory_file;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::page::label;
use crate::net::wire::session::{SessionAsk, SessionTell};
use crate::pager::store::{Store, Use};
use crate::sys::page::bytes;

/// Whoever comes asks within this time.
const PATIENCE: Duration = Duration::from_secs(1);

/// Answers who comes through the door, for as long as this process runs.
///
/// # Errors
/// No thread can be started.
pub fn answer_at(door: Door, id: String, addresses: Vec<String>, store: Arc<Store>) -> Result<()> {
    let begun = Instant::now();
    let work = move || {
        smol::block_on(async {
            loop {
                let Ok(command) = Async::new(door.accept().await) else { continue };
                let asked = command.read_with(Seqpacket::receive_now::<SessionAsk>);
                let late = async {
                    Timer::after(PATIENCE).await;
                    Ok(None)
                };
                if let Ok(Some((SessionAsk::Status { .. }, _))) = asked.or(late).await {
                    let status = status(&id, &addresses, &store, begun).to_string();
                    let file = memory_file::write_bytes("hpcrt-status", status.as_bytes());
                    let _ = file.map(|file| command.get_ref().send(&SessionTell::Status, &[file.as_fd()]));
                }
            }
        })
    };
    thread::Builder::new().name("status".to_owned()).spawn(work).op("answer questions").map(drop)
}

fn status(id: &str, addresses: &[String], store: &Store, begun: Instant) -> Value {
    let mut uses = store.uses();
    uses.sort_by_key(|one| std::cmp::Reverse(one.pages));
    let client = |Use { label: bits, pages }: &Use| json!({ "client": label(bits), "bytes": bytes(*pages) });
    json!({
        "schema": SCHEMA,
        "hpcrt": env!("CARGO_PKG_VERSION"),
        "id": id,
        "kind": "memserver",
        "pid": std::process::id(),
        "phase": "up",
        "seconds": begun.elapsed().as_secs_f64(),
        "addresses": addresses,
        "lends": bytes(store.capacity()),
        "used": bytes(store.used()),
        "clients": uses.iter().map(client).collect::<Vec<_>>(),
    })
}
