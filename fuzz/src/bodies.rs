//! One body per kind of bytes from outside. Whatever the bytes are, a body returns; it panics where a parser does, or breaks a promise.

use std::ffi::OsStr;

use hpcrt::launch::{fold, hostfile, hostlist};
use hpcrt::loader::arch::{self, Cpu};
use hpcrt::loader::elf::Elf;
use hpcrt::loader::imports;
use hpcrt::loader::ldcache::LdCache;
use hpcrt::loader::ldso::Ldso;
use hpcrt::loader::prefetch::Prefetch;
use hpcrt::loader::script::Shebang;
use hpcrt::net::auth::{Handshake, SessionKey};
use hpcrt::net::wire::control::{Down, Report};
use hpcrt::net::wire::frame::{BODY_MAX, HEADER_MAX, HELLO_MAX, Message, PREFIX, Prefix};
use hpcrt::net::wire::hello::{Hello, Purpose};
use hpcrt::net::wire::keeper::{Ask, Tell};
use hpcrt::net::wire::log::LogFrame;
use rkyv::util::AlignedVec;

/// Name and body, for those who run all.
pub const ALL: [(&str, fn(&[u8])); 7] = [
    ("frame", frame),
    ("hello", hello),
    ("elf", elf),
    ("ldcache", ldcache),
    ("python", python),
    ("hostlist", hostlist),
    ("hostfile", hostfile),
];

/// A prefix, then a header: of every type, since a stranger chooses.
pub fn frame(bytes: &[u8]) {
    let Some((prefix, header)) = bytes.split_first_chunk::<PREFIX>() else { return };
    for limit in [(HEADER_MAX, BODY_MAX), (HELLO_MAX, 0)] {
        if let Ok(decoded) = Prefix::decode(prefix, limit) {
            assert!(decoded.header <= limit.0 && decoded.body <= limit.1);
            assert_eq!(&decoded.encode(), prefix, "there is one way to say it");
        }
    }
    let mut aligned = AlignedVec::with_capacity(header.len());
    aligned.extend_from_slice(header);
    again::<Down>(&aligned);
    again::<Report>(&aligned);
    again::<Hello>(&aligned);
    again::<LogFrame>(&aligned);
    again::<Ask>(&aligned);
    again::<Tell>(&aligned);
}

/// What was understood can be said, and is understood alike.
fn again<M: Message>(bytes: &AlignedVec) {
    if let Ok(message) = M::decode(bytes) {
        let said = message.encode();
        let heard = M::decode(&said).expect("own words are understood");
        assert_eq!(said.as_slice(), heard.encode().as_slice());
    }
}

/// A handshake with somebody who has not the key: nothing he says is accepted.
pub fn hello(bytes: &[u8]) {
    let mut aligned = AlignedVec::with_capacity(bytes.len());
    aligned.extend_from_slice(bytes);
    let Ok(said) = Hello::decode(&aligned) else { return };
    let key = SessionKey([7; 32]);
    assert!(Handshake::check(&key, [9; 32], &said).is_err(), "accepted without the key");
    if let Ok((handshake, _)) = Handshake::answer(&key, &said, 1, Purpose::Log) {
        assert!(handshake.confirm(&said).is_err(), "a challenge is no proof");
    }
}

/// An executable or library: what names its libraries, the constants of a dynamic linker, the first line of a script.
pub fn elf(bytes: &[u8]) {
    let file = bytes.to_vec();
    if let Ok(elf) = Elf::read(&file, None) {
        assert!(Elf::read(&file, Some(elf.abi)).is_ok(), "a file is made for what it says");
    }
    for cpu in processors() {
        let _ = Ldso::scan(bytes, &cpu).subdirectories(&cpu);
    }
    if let Some(shebang) = Shebang::parse(bytes) {
        let _ = shebang.env_target();
    }
}

/// `ld.so.cache`.
pub fn ldcache(bytes: &[u8]) {
    let Some(cache) = LdCache::parse(bytes.to_vec()) else { return };
    for cpu in processors() {
        for name in ["libc.so.6", "", "x"] {
            let _ = cache.lookup(OsStr::new(name), &cpu);
        }
    }
}

/// A Python module, as source and as bytecode, and what is looked for because of it.
pub fn python(bytes: &[u8]) {
    let directory = "/p/a/b";
    for name in ["m.py", "m.pyc"] {
        let path = format!("{directory}/{name}").into_bytes();
        let mut prefetch = Prefetch::default();
        prefetch.add_search(directory.as_bytes());
        prefetch.handle_listing(directory.as_bytes(), [(b"os".to_vec(), 4), (b"x.py".to_vec(), 8)].into_iter());
        prefetch.handle_module(&path, imports::of_module(&path, bytes));
        for guess in prefetch.poll_guesses() {
            let within = guess.path.strip_prefix(directory.as_bytes()).expect("nothing else is of interest");
            assert!(!within.split(|b| *b == b'/').any(|part| part == b".."), "{guess:?}");
        }
    }
}

/// x86-64 and aarch64, wherever this runs.
fn processors() -> impl Iterator<Item = Cpu> {
    [62, 183].into_iter().filter_map(|machine| arch::of(machine, true)).map(Cpu::detect)
}

/// `--hosts`, and what batch systems hand over.
pub fn hostlist(bytes: &[u8]) {
    let Ok(hosts) = hostlist::expand(&String::from_utf8_lossy(bytes)) else { return };
    assert!((1..=hostlist::MAX_HOSTS).contains(&hosts.len()));
    if hosts.len() <= 1000 && hosts.iter().all(|host| !host.contains('@')) {
        let mut twice = hostlist::expand(&fold::fold(&hosts)).expect("what is folded can be read");
        let mut once = hosts;
        once.sort();
        twice.sort();
        assert_eq!(once, twice);
    }
}

/// `--hostfile`.
pub fn hostfile(bytes: &[u8]) {
    if let Ok(hosts) = hostfile::parse(&String::from_utf8_lossy(bytes), "fuzz") {
        assert!((1..=hostlist::MAX_HOSTS).contains(&hosts.len()));
    }
}
