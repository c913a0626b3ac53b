//! A slice of fuzzing on every test run: the bodies of `fuzz/`, fed with mutated seeds.
//!
//! `HPCRT_FUZZ_SECONDS`: seconds per body (2). `HPCRT_FUZZ_SEED`: the first case of each body, as a failure printed it.
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(unreachable_pub, reason = "the fuzz targets use it as a crate")]
#[path = "../fuzz/src/bodies.rs"]
mod bodies;

use std::panic::catch_unwind;
use std::process::Command;
use std::time::{Duration, Instant};

use fastrand::Rng;
use hpcrt::launch::invitation::Invitation;
use hpcrt::loader::audit::table::Entries;
use hpcrt::net::auth::SessionKey;
use hpcrt::net::wire::control::{Down, Exit, Extent, Limits, Need, NodeSpec, Order, Report, Seen, Status, Target};
use hpcrt::net::wire::facts::{Birth, Facts, JobFacts};
use hpcrt::net::wire::forward::Put;
use hpcrt::net::wire::frame::{Message, Prefix};
use hpcrt::net::wire::guest::{Guest, Welcome};
use hpcrt::net::wire::hello::{Hello, Purpose};
use hpcrt::net::wire::keeper::{Ask, Tell};
use hpcrt::net::wire::log::LogFrame;
use hpcrt::net::wire::page::Page;
use hpcrt::net::wire::record::{Attr, Codec, Name, Piece, Record, Supply};
use hpcrt::net::wire::session::{SessionAsk, SessionTell};
use hpcrt::sys::audit_table::kind;
use hpcrt::sys::page::op;

/// A case that takes longer hangs somewhere. (A million host names take their time in a debug build on a busy machine.)
const CASE_MAX: Duration = Duration::from_secs(30);
/// Bytes in a case, at most.
const LEN_MAX: usize = 512 << 10;

fn framed<M: Message>(message: &M) -> Vec<u8> {
    let header = message.encode();
    [&Prefix { kind: M::KIND, header: header.len(), body: 0 }.encode()[..], &header].concat()
}

fn frames() -> Vec<Vec<u8>> {
    let node = NodeSpec { node: 2, parent: 1, host: "n[1-4]".into() };
    let attr = Attr { mode: 0o40755, uid: 1, gid: 2, nlink: 3, ino: 4, size: 5, mtime: (6, 7), ctime: (8, 9) };
    let names = vec![Name { name: b"libx.so".to_vec(), kind: 8 }; 3];
    let dir = Record::Dir { path: b"/shared/lib".to_vec(), attr, names };
    let piece = Piece { file: 1, index: 2 };
    let seen = Seen { ino: 1, size: 2, mtime: (3, 4), ctime: (5, 6) };
    let extent = Extent { ticket: 1, path: b"/s/a".to_vec(), seen, offset: 2, len: 3, last: true };
    let exit = Exit { rank: 3, status: Status::Signal(9), by_us: true };
    vec![
        framed(&Down { to: Target::Node(3), order: Order::Start { nodes: vec![node; 3] } }),
        framed(&Down { to: Target::All, order: Order::Leave }),
        framed(&Report::Joined {
            node: 1,
            addresses: vec!["192.0.2.1:1".into(), "[::1]:2".into()],
            machine: Some(7),
            limits: Box::new(Limits { view: Some("no".into()), ..Limits::default() }),
            birth: Birth { enrolled: 1, connected: 2, joined: 3 },
        }),
        framed(&Report::Facts { node: 1, facts: Facts { jobs: vec![JobFacts::default(); 2], ..Facts::default() } }),
        framed(&Report::Pids { job: 1, ranks: vec![(0, 7); 3] }),
        framed(&Report::Want { path: b"/a/b".to_vec(), need: Need::Content }),
        framed(&Report::Fetch { node: 3, piece }),
        framed(&Down { to: Target::Node(3), order: Order::Piece { piece, len: 3, codec: Codec::Zstd } }),
        framed(&Down { to: Target::Node(3), order: Order::Read(extent) }),
        framed(&Report::Exited { job: 1, ranks: vec![exit; 4] }),
        framed(&LogFrame::Entry { seq: 5, record: dir, hash: [1; 32] }),
        framed(&Ask::View { roots: vec![b"/shared".to_vec()] }),
        framed(&Tell::Failed { error: "no".into() }),
        framed(&Hello::Challenge { nonce: [3; 32] }),
        framed(&SessionAsk::Signal { signal: 15 }),
        framed(&SessionTell::About { jobs: 1, stored: 2 }),
    ]
}

/// Entries of a log, each after its length.
fn log() -> Vec<u8> {
    let attr = Attr { mode: 0o100_755, uid: 1, gid: 2, nlink: 1, ino: 4, size: 4, mtime: (6, 7), ctime: (8, 9) };
    let directory = Attr { mode: 0o40755, ..attr };
    let name = |name: &[u8]| Name { name: name.to_vec(), kind: 8 };
    let path = b"/s/a".to_vec();
    let records = [
        Record::Dir { path: b"/s".to_vec(), attr: directory, names: vec![name(b"a"), name(b"b")] },
        Record::File { path: path.clone(), attr, content: Supply::Log(3) },
        Record::Chunk { file: 3, offset: 0, len: 4, codec: Codec::Zstd },
        Record::Complete { file: 3 },
        Record::Link { path: b"/s/b".to_vec(), attr, target: b"a".to_vec() },
        Record::Changed { path, exists: Some(8) },
        Record::Absent { path: b"/s/c".to_vec(), errno: 2 },
        Record::Void { file: 3, errno: 5 },
        Record::File { path: b"/s/d".to_vec(), attr, content: Supply::Held(4) },
        Record::Follows { file: 3, next: 4 },
        Record::Preloaded { load: 1 },
    ];
    let frame = |(seq, record)| {
        let entry = LogFrame::Entry { seq, record, hash: [0; 32] }.encode();
        [&u16::try_from(entry.len()).unwrap().to_le_bytes()[..], &entry].concat()
    };
    (0..).zip(records).flat_map(frame).collect()
}

/// A client's questions.
fn pages() -> Vec<u8> {
    let ask = |op, span, data: [u64; 4], zero| Page { op, sequence: op, span, data, zero }.encode().to_vec();
    let none = [0; 4];
    [
        ask(op::OPEN, 0, [1, 2, 0, 0], none),
        ask(op::PUT, 7, [u64::MAX, 1, 0, 1 << 63], none),
        ask(op::GET, 7, [u64::MAX; 4], none),
        ask(op::PUT, 7, [0, 2, 0, 0], [1, 0, 0, 0]),
        ask(op::PUT, 8, [u64::MAX; 4], none),
        ask(op::DROP, 7, [1, 0, 0, 0], none),
    ]
    .concat()
}

/// A queue's requests, each with the length of its body.
fn requests() -> Vec<u8> {
    let (name, seen) = ((1, 2), Seen { ino: 1, size: 2, mtime: (3, 4), ctime: (5, 6) });
    let write = |offset, anew| Put::Write { name, epoch: 1, position: 64, offset, anew };
    let all = [
        (Put::Begin { queue: 7 }, 0),
        (Put::Open { name, path: b"/a/b".to_vec(), device: 7, seen }, 0),
        (write(8, false), 9),
        (write(u64::MAX, true), 3),
        (Put::Sync { name }, 0),
        (Put::Close { name }, 0),
    ];
    let said = |(put, body): (Put, u8)| {
        let put = put.encode();
        [&u16::try_from(put.len()).unwrap().to_le_bytes()[..], &put, &[body]].concat()
    };
    all.into_iter().flat_map(said).collect()
}

/// Source text, and a module of the standard library as the machine's interpreter compiled it, in every dialect.
fn modules() -> Vec<Vec<u8>> {
    let source = "import os, a.b as c\nfrom . import (x,\n  y)\ndef f():\n    from ..z import *\n";
    let mut seeds = vec![source.as_bytes().to_vec()];
    let question = "import json, sys; sys.stdout.buffer.write(open(json.__cached__, 'rb').read())";
    let compiled = Command::new("python3").args(["-c", question]).output().map(|done| done.stdout).unwrap_or_default();
    if compiled.len() > 16 {
        // Python 3.8 and 3.10 to 3.13.
        seeds.extend([3413_u16, 3439, 3495, 3531, 3571].map(|magic| [&magic.to_le_bytes(), &compiled[2..]].concat()));
    }
    seeds
}

fn seeds(name: &str) -> Vec<Vec<u8>> {
    let texts = |texts: &[&str]| texts.iter().map(|text| text.as_bytes().to_vec()).collect::<Vec<_>>();
    let files = |paths: &[&str]| paths.iter().filter_map(|path| std::fs::read(path).ok()).collect::<Vec<_>>();
    let mut seeds = match name {
        "frame" => frames(),
        "hello" => [
            Hello::Challenge { nonce: [3; 32] },
            Hello::Proof { node: 1, purpose: Purpose::Control, nonce: [4; 32], proof: [5; 32] },
            Hello::Welcome { proof: [6; 32] },
        ]
        .iter()
        .map(|hello| hello.encode().to_vec())
        .collect(),
        "link" => vec![frames().concat()],
        "seqpacket" => vec![Ask::View { roots: vec![b"/s".to_vec()] }.encode().to_vec(), Ask::Go.encode().to_vec()],
        "records" => vec![log()],
        "allocation" => texts(&[
            "\0n[1-3],x\n",
            "\x01/f\nn1\nn1\nn2\n",
            "\x03a 4 b 2\n",
            "\x04/f\nn1 4 all.q UNDEFINED\n",
            "\x050\n{\"execution\":{\"R_lite\":[{\"rank\":\"0-1\",\"children\":{\"core\":\"0-3,5\"}}],\"nodelist\":[\"n[1-2]\"]}}",
        ]),
        "fetch" => vec![
            [&[0, 0, 1, 0][..], &[0, 1, 0, 0, 0, 0, 1, 2, 1, 0, 0, 0, 2, 1, 0, 0, 0, 0, 3, 0, 11, 0, 0, 0]].concat(),
        ],
        "guests" => {
            let variables = || vec![b"LD_PRELOAD=/s/x.so".to_vec(), b"A=".to_vec()];
            let key = SessionKey([7; 32]);
            let invitation =
                Invitation { key, addresses: vec!["10.0.0.1:7".into()], hosts: vec!["n1".into(), "n2".into()] };
            vec![
                Guest { env: variables() }.encode().to_vec(),
                Welcome::Linker { env: variables() }.encode().to_vec(),
                invitation.text().into_bytes(),
            ]
        }
        "members" => texts(&[
            "broadcast 1 2.5\n5\nhelloput 2\n1\nk1\nvbarrier\nreceive 0 1\n",
            "cmd=init pmi_version=1 pmi_subversion=1\ncmd=put kvsname=a key=b value=c d\ncmd=abort exitcode=3 message=x y\n",
            "mcmd=spawn\ntotspawns=1\nspawnssofar=1\nendcmd\n",
        ]),
        "hints" => texts(&["hpcrt hints 1\n3\na/s/x\0c/s/y\0"]),
        "elf" => {
            [texts(&["#!/usr/bin/env -S python3 -u\n"]), files(&["/bin/true", "/lib64/ld-linux-x86-64.so.2"])].concat()
        }
        "ldcache" => files(&["/etc/ld.so.cache"]),
        "table" => {
            let mut entries = Entries::default();
            entries.set(&[kind::PATH, b"/s/libx.so"], b"/store/root/s/libx.so");
            entries.set(&[kind::PROGRAM, b"/s/app", b""], b"7 1536");
            entries.set(&[kind::NAME, b"7", b"", b"libx.so"], b"/store/root/s/libx.so");
            entries.table(b"/store/root", &[b"/s".to_vec()]).into_iter().collect()
        }
        "python" => modules(),
        "page" => vec![pages()],
        "forward" => vec![requests()],
        "hostlist" => texts(&["n[01-04,7]:2,login1", "r[1-3]c[001-020]^r2c[5-9],user@x:4", "a,b,a,[1-2]x"]),
        _ => texts(&["n1 slots=4 max_slots=8 # x\n4/n2\nn[3-5]:2\n\nn6\nn6\n"]),
    };
    seeds.retain(|seed| seed.len() <= LEN_MAX);
    seeds.push(Vec::new());
    seeds
}

/// A seed, changed in a few places in the ways that parsers get wrong.
fn mutate(seeds: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    const NUMBERS: [u32; 8] = [0, 1, 4, 0x7f, 0xffff, 0x7fff_ffff, 0xffff_fff0, u32::MAX];
    let mut bytes = seeds[rng.usize(..seeds.len())].clone();
    for _ in 0..rng.usize(0..8) {
        let len = bytes.len();
        // Most of what matters is at the beginning.
        let at = if rng.bool() { rng.usize(..=len.min(256)) } else { rng.usize(..=len) };
        match rng.u8(..7) {
            0 if at < len => bytes[at] ^= 1 << rng.u8(..8),
            1 if at < len => bytes[at] = rng.u8(..),
            2 if at + 4 <= len => bytes[at..at + 4].copy_from_slice(&NUMBERS[rng.usize(..8)].to_le_bytes()),
            3 => bytes.truncate(at),
            4 => {
                let piece: Vec<u8> = (0..rng.usize(..9)).map(|_| rng.u8(..)).collect();
                bytes.splice(at..at, piece);
            }
            5 => {
                let end = (at + rng.usize(..64)).min(len);
                bytes.extend_from_within(at..end);
            }
            _ => {
                let other = &seeds[rng.usize(..seeds.len())];
                let from = rng.usize(..=other.len());
                let end = (from + rng.usize(..256)).min(other.len());
                bytes.splice(at.., other[from..end].iter().copied());
            }
        }
    }
    bytes
}

fn slice(name: &str) {
    let body = bodies::ALL.iter().find(|(body, _)| *body == name).unwrap().1;
    let number = |variable: &str| std::env::var(variable).ok().map(|text| text.parse::<u64>().unwrap());
    let time = Duration::from_secs(number("HPCRT_FUZZ_SECONDS").unwrap_or(2));
    let first = number("HPCRT_FUZZ_SEED").unwrap_or_else(|| fastrand::u64(..));
    let (seeds, begun, mut cases) = (seeds(name), Instant::now(), 0);
    seeds.iter().for_each(|seed| body(seed));
    while begun.elapsed() < time {
        let seed = first.wrapping_add(cases);
        let bytes = mutate(&seeds, &mut Rng::with_seed(seed));
        let started = Instant::now();
        let outcome = catch_unwind(|| body(&bytes));
        let again = format!("HPCRT_FUZZ_SEED={seed} cargo test --test fuzz_slice {name}");
        assert!(
            outcome.is_ok(),
            "{name}: panic at {} bytes; {again}\n{:?}",
            bytes.len(),
            bytes.get(..512).unwrap_or(&bytes)
        );
        assert!(started.elapsed() < CASE_MAX, "{name}: took {:?}; {again}", started.elapsed());
        cases += 1;
    }
    println!("{name}: {cases} cases");
    assert!(cases > 0);
}

#[test]
fn frame() {
    slice("frame");
}

#[test]
fn hello() {
    slice("hello");
}

#[test]
fn elf() {
    slice("elf");
}

#[test]
fn ldcache() {
    slice("ldcache");
}

#[test]
fn table() {
    slice("table");
}

#[test]
fn python() {
    slice("python");
}

#[test]
fn hostlist() {
    slice("hostlist");
}

#[test]
fn hostfile() {
    slice("hostfile");
}

#[test]
fn link() {
    slice("link");
}

#[test]
fn seqpacket() {
    slice("seqpacket");
}

#[test]
fn records() {
    slice("records");
}

#[test]
fn page() {
    slice("page");
}

#[test]
fn forward() {
    slice("forward");
}

#[test]
fn allocation() {
    slice("allocation");
}

#[test]
fn guests() {
    slice("guests");
}

#[test]
fn members() {
    slice("members");
}

#[test]
fn hints() {
    slice("hints");
}

#[test]
fn fetch() {
    slice("fetch");
}
