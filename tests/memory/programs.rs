//! Programs as they are installed, and ones with pointers everywhere, each larger than it may be: what they say is what they say anyway.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::{Done, Run, Servers, Who, everybody, place, until};

/// So many MB of each program, of which it may keep `local`.
#[derive(Clone, Copy)]
struct Size {
    megabytes: u32,
    local: u32,
    deadline: Duration,
}

/// As small as shows something, and as large as programs that borrow are.
const SLICE: Size = Size { megabytes: 40, local: 16, deadline: Duration::from_secs(60) };
const WHOLE: Size = Size { megabytes: 1074, local: 200, deadline: Duration::from_secs(900) };

impl Size {
    fn run<S: AsRef<std::ffi::OsStr>>(self, servers: &Servers, directory: &Path, words: &[S]) -> Run {
        let mut command = servers.who.command(servers.config.path());
        command.args(["exec", "-q", "--memory", &servers.list(), "--local-mb", &self.local.to_string()]);
        command.current_dir(directory);
        Run::new(command).program(words).within(self.deadline)
    }

    fn servers(self, who: Who) -> Servers {
        // A fork has everything twice.
        Servers::start(who, &[self.megabytes * 4])
    }
}

/// A directory that this user may write into.
fn directory(who: Who) -> tempfile::TempDir {
    let made = tempfile::tempdir().unwrap();
    chown(made.path(), who.uid, who.uid).unwrap();
    fs::set_permissions(made.path(), fs::Permissions::from_mode(0o755)).unwrap();
    made
}

fn is_there(program: &str, package: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !there {
        eprintln!("SKIPPED: {program}: the package {package} is not installed");
    }
    there
}

#[track_caller]
fn ends_right(who: Who, what: &str, done: Done) {
    println!("{who:?} {what}: {:?}", done.took);
    assert!(done.code(0).text().ends_with("right\n"), "{what}");
}

fn arrays(who: Who, size: Size) {
    let mut numpy = Command::new("/usr/bin/python3");
    if !numpy.args(["-c", "import numpy"]).output().is_ok_and(|output| output.status.success()) {
        return eprintln!("SKIPPED: numpy: the package python3-numpy is not installed");
    }
    let (servers, directory) = (size.servers(who), directory(who));
    let script = directory.path().join("arrays.py");
    fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/arrays.py"), &script).unwrap();
    let words = ["/usr/bin/python3".as_ref(), script.as_os_str(), size.megabytes.to_string().as_ref()]
        .map(|w: &std::ffi::OsStr| w.to_owned());
    ends_right(who, "numpy", size.run(&servers, directory.path(), &words).end());
}

fn map(who: Who, size: Size) {
    if !is_there("g++", "g++") {
        return;
    }
    let (servers, directory) = (size.servers(who), directory(who));
    let program = directory.path().join("map");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/map.cc");
    assert!(Command::new("g++").args(["-O2", "-o"]).arg(&program).arg(source).status().unwrap().success());
    let words = [program.into_os_string(), size.megabytes.to_string().into()];
    ends_right(who, "a map", size.run(&servers, directory.path(), &words).end());
}

fn sort(who: Who, size: Size) {
    let (servers, directory) = (size.servers(who), directory(who));
    let [lines, expected, sorted] = ["lines", "expected", "sorted"].map(|name| directory.path().join(name));
    let mut text = std::io::BufWriter::new(fs::File::create(&lines).unwrap());
    // It follows pointers to lines at random: shorter ones would only show how often.
    const REPEATED: usize = 400;
    // Beside a line, it keeps pointers of so many bytes.
    let count = u64::from(size.megabytes) * 1_000_000 / (20 * REPEATED as u64 + 64);
    for nth in 0..count {
        let key = format!("{:020}", (nth + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        writeln!(text, "{}", key.repeat(REPEATED)).unwrap();
    }
    text.into_inner().unwrap().sync_data().unwrap();
    let mut plain = Command::new("sort");
    assert!(plain.env("LC_ALL", "C").arg("-o").arg(&expected).arg(&lines).status().unwrap().success());
    let buffer = format!("{}M", size.megabytes * 2);
    let words = ["sort", "-S", &buffer, "--parallel=2", "-o", "sorted", "lines"];
    let done = size.run(&servers, directory.path(), &words).env("LC_ALL", "C").end().code(0);
    println!("{who:?} sort: {:?}", done.took);
    let mut cmp = Command::new("cmp");
    assert!(cmp.arg(&expected).arg(&sorted).status().unwrap().success(), "the order");
}

/// What a server of Redis answers.
struct Redis(BufReader<UnixStream>);

impl Redis {
    fn ask(&mut self, command: &str) -> String {
        self.0.get_mut().write_all(format!("{command}\r\n").as_bytes()).unwrap();
        self.answer()
    }

    /// One answer, whose length comes first if it is a long one.
    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        let Some(len) = line.strip_prefix('$').and_then(|len| len.trim().parse::<usize>().ok()) else {
            return line.trim().to_owned();
        };
        let mut text = vec![0; len + 2];
        self.0.read_exact(&mut text).unwrap();
        text.truncate(len);
        String::from_utf8(text).unwrap()
    }

    /// Every value of `keys`, each `bytes` long, and what was added to some.
    fn check(&mut self, keys: usize, bytes: usize, changed: usize) {
        for begin in (0..keys).step_by(500) {
            let batch: String = (begin..keys.min(begin + 500)).map(|key| format!("GET k{key}\r\n")).collect();
            self.0.get_mut().write_all(batch.as_bytes()).unwrap();
            for key in begin..keys.min(begin + 500) {
                let expected = value(key + usize::from(changed > 0 && key % changed == 0), bytes);
                assert!(self.answer() == expected, "the value of k{key}");
            }
        }
    }

    fn set(&mut self, keys: impl Iterator<Item = usize>, bytes: usize, more: usize) {
        let keys: Vec<_> = keys.collect();
        for batch in keys.chunks(500) {
            let text: String = batch.iter().map(|key| format!("SET k{key} {}\r\n", value(key + more, bytes))).collect();
            self.0.get_mut().write_all(text.as_bytes()).unwrap();
            batch.iter().for_each(|_| assert_eq!(self.answer(), "+OK"));
        }
    }
}

fn value(key: usize, bytes: usize) -> String {
    format!("{:016x}", (key as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)).repeat(bytes / 16)
}

/// A database in memory, which it saves by a fork while it goes on to change.
fn redis(who: Who, size: Size) {
    const BYTES: usize = 992;
    if !is_there("redis-server", "redis-server") {
        return;
    }
    let (servers, directory) = (size.servers(who), directory(who));
    let socket = directory.path().join("socket");
    let words =
        "redis-server --port 0 --unixsocket socket --unixsocketperm 777 --save  --loglevel warning --daemonize no";
    let words: Vec<_> = words.split(' ').collect();
    let run = size.run(&servers, directory.path(), &words).start();
    let stream = until(|| UnixStream::connect(&socket).ok());
    let mut redis = Redis(BufReader::new(stream));
    let (begun, keys) = (Instant::now(), size.megabytes as usize * 1_000_000 / 1100);
    redis.set(0..keys, BYTES, 0);
    redis.check(keys, BYTES, 0);
    assert!(redis.ask("BGSAVE").contains("started"));
    redis.set((0..keys).step_by(10), BYTES, 1);
    let saved = || redis.ask("INFO persistence").contains("rdb_bgsave_in_progress:0").then_some(());
    let mut saved = saved;
    while saved().is_none() {
        assert!(begun.elapsed() < size.deadline, "it does not save");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(redis.ask("INFO persistence").contains("rdb_last_bgsave_status:ok"));
    redis.check(keys, BYTES, 10);
    // What was saved is what there was before.
    let mut check = Command::new("redis-check-rdb");
    let found = check.arg(directory.path().join("dump.rdb")).output().unwrap();
    let text = String::from_utf8_lossy(&found.stdout);
    assert!(text.contains("Checksum OK") && text.contains(&format!("{keys} keys read")), "{text}");
    redis.0.get_mut().write_all(b"SHUTDOWN NOSAVE\r\n").unwrap();
    println!("{who:?} redis: {:?}", begun.elapsed());
    run.end().code(0);
}

fn of_our_own(who: Who, size: Size, mode: &str) {
    let servers = size.servers(who);
    let done = servers.run(mode, size.megabytes, size.local).within(size.deadline).end();
    ends_right(who, mode, done);
}

#[test]
fn installed_programs() {
    if place().is_none() {
        return;
    }
    for who in everybody().into_iter().filter(|who| who.without.is_empty()) {
        [arrays, map, sort, redis].iter().for_each(|program| program(who, SLICE));
    }
}

/// As large as a GiB each, in every tier; `cargo xtask proofs memory-programs`.
#[test]
#[ignore = "long: a quarter of an hour"]
fn programs_of_a_gibibyte() {
    if place().is_none() {
        return;
    }
    for who in everybody() {
        [arrays, map, sort, redis].iter().for_each(|program| program(who, WHOLE));
        ["threads", "forks"].iter().for_each(|mode| of_our_own(who, WHOLE, mode));
    }
}
