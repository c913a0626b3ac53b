//! Memory that is lent: a server as users start it, and clients of it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hpcrt::net::auth::SessionKey;
use hpcrt::net::direct::{Direct, connect};
use hpcrt::net::link::LinkError;
use hpcrt::net::wire::page::Page;
use hpcrt::pager::key;
use hpcrt::sys::page::{Bits, PAGE, SPAN, count, op};

/// A running server; killed when it goes.
struct Server {
    child: Child,
    address: SocketAddr,
    key: SessionKey,
}

impl Server {
    fn start(mb: u32, key: &Path) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["memserver", "--listen", "127.0.0.1:0", "--mb", &mb.to_string(), "--key"]).arg(key);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Server { child, address: line.trim().parse().unwrap(), key: key::read(key).unwrap() }
    }

    fn client(&self, name: u64, tagged: bool) -> Client {
        let mut client = Client(smol::block_on(connect(self.address, &self.key, tagged)).unwrap());
        assert_eq!(client.ask(op::OPEN, 0, [name, 1, 0, 0], [0; 4], &[]).0.op, op::OPENED);
        client
    }

    /// Pages in use.
    fn used(&self) -> u64 {
        let mut client = Client(smol::block_on(connect(self.address, &self.key, true)).unwrap());
        client.ask(op::OPEN, 0, [u64::MAX, 0, 0, 0], [0; 4], &[]).0.data[1]
    }

    /// Bytes of memory it has.
    fn resident(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Client(Direct);

impl Client {
    fn ask(&mut self, op: u32, span: u64, data: Bits, zero: Bits, body: &[&[u8]]) -> (Page, Vec<u8>) {
        self.try_ask(op, span, data, zero, body).unwrap().expect("it is there")
    }

    fn try_ask(
        &mut self,
        op: u32,
        span: u64,
        data: Bits,
        zero: Bits,
        body: &[&[u8]],
    ) -> Result<Option<(Page, Vec<u8>)>, LinkError> {
        self.0.send(&Page { op, sequence: 9, span, data, zero }, body)?;
        let Some((page, len)) = self.0.receive()? else { return Ok(None) };
        let mut bytes = vec![0; len];
        if len > 0 {
            self.0.body(vec![&mut bytes])?;
        }
        Ok(Some((page, bytes)))
    }

    fn put(&mut self, span: u64, value: u8) -> u32 {
        self.ask(op::PUT, span, ALL, NONE, &[&vec![value; SPAN / 2], &vec![value + 1; SPAN / 2]]).0.op
    }
}

const ALL: Bits = [u64::MAX; 4];
const NONE: Bits = [0; 4];

#[test]
fn what_is_kept_comes_back_and_only_to_its_owner() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(64, &place.path().join("key"));
    for tagged in [false, true] {
        let (mut one, mut two) = (server.client(1, tagged), server.client(2, tagged));
        assert_eq!(one.put(7, 40), op::DONE);
        let (page, bytes) = one.ask(op::GET, 7, [1, 0, 0, 1 << 63], NONE, &[]);
        assert_eq!((page.op, page.data, bytes.len()), (op::GOT, [1, 0, 0, 1 << 63], 2 * PAGE));
        assert_eq!((bytes[0], bytes[PAGE]), (40, 41));
        let (page, bytes) = two.ask(op::GET, 7, ALL, NONE, &[]);
        assert_eq!((page.data, page.zero, bytes.len()), (NONE, ALL, 0));
        // One page anew, one forgotten; over another connection of the same client.
        let mut more = server.client(1, tagged);
        assert_eq!(more.ask(op::PUT, 7, [2, 0, 0, 0], [1, 0, 0, 0], &[&[9; PAGE]]).0.op, op::DONE);
        let (page, bytes) = one.ask(op::GET, 7, [7, 0, 0, 0], NONE, &[]);
        assert_eq!((page.data[0], page.zero[0], bytes[0], bytes[PAGE]), (6, 1, 9, 40));
    }
}

#[test]
fn full_is_refused_and_what_is_given_back_is_free() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(8, &place.path().join("key"));
    let mut one = server.client(1, false);
    // Zero pages take nothing.
    for span in 0..1000 {
        assert_eq!(one.ask(op::PUT, span, NONE, ALL, &[]).0.op, op::DONE);
    }
    let capacity = 8_000_000 / PAGE as u64;
    let fit = capacity * PAGE as u64 / SPAN as u64;
    (0..fit).for_each(|span| assert_eq!(one.put(span, 1), op::DONE));
    assert_eq!(one.put(fit, 1), op::FULL);
    let (page, bytes) = one.ask(op::GET, fit - 1, ALL, NONE, &[]);
    assert_eq!((count(&page.data), bytes.len(), server.used()), (256, SPAN, fit * 256));
    assert!(server.resident() < 8_000_000 + (24 << 20), "{}", server.resident());
    let mut two = server.client(2, false);
    assert_eq!(two.put(0, 1), op::FULL);
    assert_eq!(one.ask(op::DROP, 0, [fit, 0, 0, 0], NONE, &[]).0.op, op::DONE);
    assert_eq!((server.used(), two.put(0, 1)), (0, op::DONE));
    drop(two);
    let since = Instant::now();
    while server.used() > 0 {
        assert!(since.elapsed() < Duration::from_secs(5), "the memory of a client that is gone stays in use");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn strangers_and_nonsense_are_refused() {
    let place = tempfile::tempdir().unwrap();
    let server = Server::start(8, &place.path().join("key"));
    let refused = smol::block_on(connect(server.address, &SessionKey::random(), true));
    assert!(matches!(refused, Err(LinkError::Closed)), "{refused:?}");
    let mut unnamed = Client(smol::block_on(connect(server.address, &server.key, true)).unwrap());
    assert!(!matches!(unnamed.try_ask(op::GET, 0, ALL, NONE, &[]), Ok(Some(_))), "nobody's memory");
    let mut one = server.client(1, false);
    assert!(!matches!(one.try_ask(op::PUT, 0, ALL, NONE, &[&[0; PAGE]]), Ok(Some(_))), "a body of another length");
    assert_eq!(server.client(1, false).put(0, 1), op::DONE, "others are served");
}

#[test]
fn more_than_there_is_is_not_promised() {
    let place = tempfile::tempdir().unwrap();
    let key = place.path().join("key");
    let refused = |limit: &str, mb: &str| {
        let script = format!("{limit} exec \"$0\" memserver --listen 127.0.0.1:0 --mb {mb} --key \"$1\"");
        let mut command = Command::new("sh");
        let child = command
            .args(["-c", &script, env!("CARGO_BIN_EXE_hpcrt")])
            .arg(&key)
            .stderr(Stdio::piped())
            .stdout(Stdio::null());
        let mut child = child.spawn().unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(2), "{said}");
        said
    };
    let said = refused("", "4000000000");
    assert!(said.contains("of which") && said.contains("can be lent here"), "{said}");
    let said = refused("ulimit -v 500000;", "600");
    assert!(said.contains("RLIMIT_AS"), "{said}");
}
