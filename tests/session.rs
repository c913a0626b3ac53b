//! Sessions: hosts that stay up between jobs, on this machine.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{GONE, Run, from_back_to_front, marked, nothing_left, until};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// A session of three hosts with a socket directory of its own; stopped when dropped.
struct Session {
    name: String,
    runtime: tempfile::TempDir,
}

impl Session {
    fn start(flags: &[&str]) -> Session {
        Session::start_with("a,b,c", "", flags)
    }

    /// On hosts that lack these abilities.
    fn start_without(abilities: &str, flags: &[&str]) -> Session {
        Session::start_with("a,b,c", abilities, flags)
    }

    fn start_on(hosts: &str, flags: &[&str]) -> Session {
        Session::start_with(hosts, "", flags)
    }

    fn start_with(hosts: &str, abilities: &str, flags: &[&str]) -> Session {
        let runtime = tempfile::tempdir().unwrap();
        fs::set_permissions(runtime.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let mut session = Session { name: String::new(), runtime };
        let mut begun = session.command(&["start", "--hosts", hosts, "--agent", "local"]).arg_all(flags).0;
        // Processes of the session are found by the mark.
        begun.env("HPCRT_TEST_MARK", session.mark()).env("HPCRT_WITHOUT", abilities);
        let begun = begun.output().unwrap();
        assert!(begun.status.success(), "{}", String::from_utf8_lossy(&begun.stderr));
        session.name = String::from_utf8(begun.stdout).unwrap().trim().to_owned();
        session
    }

    fn mark(&self) -> &str {
        self.runtime.path().to_str().unwrap()
    }

    fn command(&self, words: &[&str]) -> Words {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.arg("session").args(words).env("XDG_RUNTIME_DIR", self.runtime.path());
        Words(command)
    }

    /// Its processes, found by the directory of its socket in their environment.
    fn processes(&self) -> Vec<i32> {
        let mark = format!("XDG_RUNTIME_DIR={}", self.runtime.path().display());
        let has = |pid: &i32| {
            fs::read(format!("/proc/{pid}/environ")).is_ok_and(|e| e.split(|b| *b == 0).any(|v| v == mark.as_bytes()))
        };
        let all = fs::read_dir("/proc").unwrap().flatten();
        all.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter(has).collect()
    }

    fn status(&self) -> serde_json::Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["status", "--json", &self.name]).env("XDG_RUNTIME_DIR", self.runtime.path());
        serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
    }

    fn run(&self, words: &[&str]) -> Words {
        self.command(&["run", &self.name, "-q"]).arg_all(words)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.command(&["stop", &self.name]).0.output();
    }
}

/// A command still to be completed.
struct Words(Command);

impl Words {
    fn arg_all(mut self, words: &[&str]) -> Words {
        self.0.args(words);
        self
    }

    fn run(self) -> Run {
        Run::new(self.0)
    }

    fn end(self) -> common::Done {
        self.run().end()
    }
}

#[test]
fn jobs_one_after_the_other_and_at_once() {
    let session = Session::start(&[]);
    let done = session.run(&["-n", "6", "--label", "--", "sh", "-c", "echo $HPCRT_RANK of $HPCRT_SIZE"]).end().code(0);
    let mut lines = done.lines();
    lines.sort();
    assert_eq!(lines, (0..6).map(|r| format!("[{r}] {r} of 6")).collect::<Vec<_>>());
    session.run(&["-n", "2", "--", "sh", "-c", "exit $((HPCRT_RANK * 5))"]).end().code(5);
    let echoed = session.run(&["--", "cat"]).run().input(vec![b'x'; 1 << 20]).end().code(0);
    assert_eq!(echoed.out.len(), 1 << 20);
    let jobs: Vec<_> =
        (0..8).map(|n| session.run(&["--", "sh", "-c", &format!("sleep 0.2; echo {n}")]).run().start()).collect();
    for (n, job) in jobs.into_iter().enumerate() {
        let lines = job.end().code(0).lines();
        assert_eq!(lines, vec![n.to_string(); 3]);
    }
    let listed = session.command(&["list"]).end().code(0);
    assert!(listed.text().contains(&session.name) && listed.text().contains("(a,b,c)"), "{}", listed.text());
}

#[test]
fn a_command_that_goes_takes_its_job_along() {
    let session = Session::start(&[]);
    let runtime = session.runtime.path().to_owned();
    let mark = runtime.join("pids");
    let script = format!("echo $$ >> {}; exec sleep 1000", mark.display());
    let pids = || fs::read_to_string(&mark).unwrap_or_default().lines().map(str::to_owned).collect::<Vec<_>>();
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let _ = fs::remove_file(&mark);
        let job = session.run(&["--", "sh", "-c", &script]).run().start();
        until(|| (pids().len() == 3).then_some(()));
        let begun = Instant::now();
        job.signal(signal);
        let gone = |pid: &String| !fs::exists(format!("/proc/{pid}")).unwrap();
        while !pids().iter().all(gone) {
            assert!(begun.elapsed() < GONE, "ranks outlive their command");
            thread::sleep(Duration::from_millis(20));
        }
        drop(job.end());
    }
    session.run(&["--", "true"]).end().code(0);
}

#[test]
fn the_first_job_hears_what_hosts_lack() {
    let session = Session::start_without("userns", &[]);
    let tree = tempfile::tempdir().unwrap();
    let prefix = tree.path().to_str().unwrap();
    let said = |times: usize| {
        let done = session.run(&["--prefix", prefix, "--", "true"]).end().code(0);
        assert_eq!(done.err.matches("a,b,c: ").count(), times, "{}", done.err);
    };
    said(1);
    said(0);
}

/// The session cannot see whose the terminal is.
#[test]
fn a_job_that_comes_to_the_front() {
    let session = Session::start(&[]);
    let runtime = format!("XDG_RUNTIME_DIR={}", session.runtime.path().display());
    let command = ["env", &runtime, env!("CARGO_BIN_EXE_hpcrt"), "session", "run", &session.name, "-q", "-n", "1"];
    assert_eq!(from_back_to_front(&command).code(0).lines(), ["job two", "shell one"]);
}

/// What comes on standard input after the job's end is for whoever reads it then.
#[test]
fn a_job_that_is_over_reads_no_more() {
    let session = Session::start(&[]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "$0 session run $1 -q -- head -n 1; echo over; cat", env!("CARGO_BIN_EXE_hpcrt"), &session.name]);
    shell.env("XDG_RUNTIME_DIR", session.runtime.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    let (mut out, mut read) = (BufReader::new(shell.stdout.take().unwrap()), String::new());
    let mut input = shell.stdin.take().unwrap();
    input.write_all(b"early\n").unwrap();
    while !read.ends_with("over\n") && out.read_line(&mut read).unwrap() > 0 {}
    input.write_all(b"late\n").unwrap();
    // The end wakes all who read: whoever waits longest is to have been first.
    thread::sleep(Duration::from_millis(300));
    drop(input);
    out.read_to_string(&mut read).unwrap();
    assert_eq!((read.as_str(), shell.wait().unwrap().code()), ("early\nover\nlate\n", Some(0)));
}

#[test]
fn a_job_whose_output_cannot_be_written_is_ended() {
    let session = Session::start(&[]);
    let mark = session.runtime.path().join("pids");
    let script = format!("echo $$ >> {}; echo words; exec sleep 1000", mark.display());
    let mut command = session.run(&["--", "sh", "-c", &script]).0;
    let done = command.stdout(fs::File::options().write(true).open("/dev/full").unwrap()).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!((done.status.code(), said.matches("No space left").count()), (Some(125), 1), "{said}");
    let pids = fs::read_to_string(&mark).unwrap();
    assert!(pids.lines().all(|pid| !fs::exists(format!("/proc/{pid}")).unwrap()), "ranks outlive their job");
}

#[test]
fn a_stopped_session_is_gone() {
    let session = Session::start(&[]);
    let job = session.run(&["--", "sleep", "1000"]).run().start();
    until(|| (session.status()["jobs"][0]["phase"] == "running").then_some(()));
    session.command(&["stop", &session.name]).end().code(0);
    job.end().code(125);
    session.run(&["--", "true"]).end().code(2).says("there is no such session");
    assert!(session.command(&["list"]).end().code(0).lines().is_empty());
    assert_eq!(fs::read_dir(session.runtime.path()).unwrap().count(), 0, "no socket is left");
}

#[test]
fn a_session_that_nobody_uses_ends() {
    let session = Session::start(&["--idle", "1"]);
    // A job that takes longer than that is use.
    let begun = Instant::now();
    session.run(&["--", "sleep", "1.5"]).end().code(0);
    until(|| (fs::read_dir(session.runtime.path()).unwrap().count() == 0).then_some(()));
    assert!(begun.elapsed() > Duration::from_millis(1500 + 700), "{:?}", begun.elapsed());
    until(|| session.processes().is_empty().then_some(()));
    session.run(&["--", "true"]).end().code(2).says("there is no such session");
}

/// Descriptors and resident memory (KiB) of a process.
fn holds(pid: i32) -> (usize, u64) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0");
    let rss = rss.trim().trim_end_matches(" kB").parse().unwrap();
    (fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(), rss)
}

/// What others are promised of short jobs in a session of 16 agents: nothing adds up, and a launch is quick.
#[test]
#[ignore = "half a minute of short jobs"]
fn two_thousand_launches() {
    let session = Session::start_on("a[1-16]", &[]);
    let launch = |words: &[&str]| {
        let begun = Instant::now();
        let status = session.run(words).0.status().unwrap();
        assert!(status.success(), "{status}");
        begun.elapsed().as_secs_f64() * 1e3
    };
    let quantiles = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
        format!("median {:.1} ms, p99 {:.1} ms, slowest {:.1} ms", at(0.5), at(0.99), at(1.0))
    };
    let one = ["-n", "1", "--", "/bin/true"];
    (0..200).for_each(|_| {
        launch(&one);
    });
    let before: Vec<(i32, (usize, u64))> = session.processes().into_iter().map(|pid| (pid, holds(pid))).collect();
    let memory = |name: &str| fs::read_dir(name).unwrap().count();
    let places = ["/dev/shm", "/tmp"].map(memory);
    println!("2,000 one-task launches into 16 agents: {}", quantiles((0..2000).map(|_| launch(&one)).collect()));
    thread::sleep(Duration::from_millis(200));
    let mut grown = 0;
    for (pid, (descriptors, rss)) in &before {
        let (now, rss_now) = holds(*pid);
        assert!(now <= *descriptors, "process {pid} has {now} descriptors, it had {descriptors}");
        grown += rss_now.saturating_sub(*rss);
        assert!(rss_now < rss + 2048, "process {pid} has {rss_now} KiB, it had {rss}");
    }
    assert_eq!(session.processes().len(), before.len(), "processes");
    // Others use these, too.
    assert!(["/dev/shm", "/tmp"].map(memory).iter().zip(places).all(|(now, then)| *now < then + 100));
    let status = session.status();
    assert!(status["nodes"].as_array().unwrap().iter().all(|node| node["stored"] == 0), "{status:#}");
    println!("{} processes: no more descriptors, {grown} KiB more memory in all", before.len());
    let all: Vec<f64> = (0..200).map(|_| launch(&["--", "/bin/true"])).collect();
    println!("a rank on each of 16 agents: {}", quantiles(all));
}

#[test]
fn strangers_and_mistakes() {
    let session = Session::start(&[]);
    session.command(&["run", "../x", "--", "true"]).end().code(2).says("that is no name of a session");
    session.command(&["run", "nosuch", "--", "true"]).end().code(2).says("there is no such session");
    session.command(&["run", &session.name]).end().code(2).says("no program is named");
    fs::set_permissions(session.runtime.path().join("hpcrt"), fs::Permissions::from_mode(0o755)).unwrap();
    session.command(&["list"]).end().code(125).says("only you can reach");
    fs::set_permissions(session.runtime.path().join("hpcrt"), fs::Permissions::from_mode(0o700)).unwrap();
}

/// Descriptors and KiB of memory of each process of a session.
fn held(session: &Session) -> BTreeMap<Pid, (usize, u64)> {
    let look = |pid: Pid| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let memory =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
        (pid, (fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count(), memory.unwrap()))
    };
    marked(session.mark()).into_iter().map(look).collect()
}

#[test]
#[ignore = "several minutes"]
fn ten_thousand_jobs() {
    let session = Session::start(&[]);
    let run = |count: u32| {
        let begun = Instant::now();
        for _ in 0..count {
            assert!(session.run(&["--", "/bin/true"]).0.status().unwrap().success());
        }
        println!("{count} jobs of three ranks: {:.1} ms each", begun.elapsed().as_secs_f64() * 1e3 / f64::from(count));
    };
    run(500);
    let before = held(&session);
    run(10_000);
    let after = held(&session);
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "the same processes");
    for (pid, (fds, memory)) in &before {
        println!("process {pid}: {fds} descriptors, {memory} KiB, then {:?}", after[pid]);
        assert!(after[pid].0 <= fds + 2 && after[pid].1 < memory + 4096);
    }
    let mark = session.mark().to_owned();
    drop(session);
    nothing_left(&mark);
}

/// A library of [`VERSION_SIZE`] bytes that all tell its version, and a program that says it: once, or as soon as a file is there, and then once
/// more as another process.
const LIBRARY: &str = r#"
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
asm(".data\n.globl filler\nfiller: .fill 4194304, 1, " TEXT(VERSION) "\n.text\n");
extern unsigned char filler[4194304];
int version(void) {
    for (unsigned at = 0; at < sizeof filler; at += 512) if (filler[at] != VERSION) return -1;
    return VERSION;
}
"#;
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int version(void);
int main(int argc, char **argv) {
    char here[4096];
    if (argc > 1) {
        snprintf(here, sizeof here, "%s.%s", argv[1], getenv("HPCRT_RANK"));
        fclose(fopen(here, "w"));
        while (access(argv[1], F_OK)) usleep(10000);
    }
    printf("%d\n", version());
    fflush(stdout);
    return argc > 1 ? execl(argv[0], argv[0], NULL) : 0;
}
"#;
const VERSION_SIZE: u64 = 4 << 20;

/// Makes a version of the library, and puts it in the place of the last one.
fn make(tree: &Path, version: u32) {
    let cc = |words: &[&str]| assert!(Command::new("cc").args(words).current_dir(tree).status().unwrap().success());
    fs::write(tree.join("v.c"), LIBRARY).unwrap();
    cc(&["-shared", "-fPIC", &format!("-DVERSION={version}"), "-o", "new", "v.c"]);
    fs::rename(tree.join("new"), tree.join("libv.so")).unwrap();
    if !tree.join("say").exists() {
        fs::write(tree.join("say.c"), PROGRAM).unwrap();
        cc(&["-o", "say", "say.c", "-L.", "-lv", "-Wl,-rpath,$ORIGIN"]);
    }
}

/// Bytes of the files below a directory, by inode.
fn sizes(directory: &Path, files: &mut BTreeMap<u64, u64>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(at) if at.is_dir() => sizes(&entry.path(), files),
            Ok(at) => drop(files.insert(at.ino(), at.blocks() * 512)),
            Err(_) => {}
        }
    }
}

impl Session {
    /// Bytes in the store of each host, and what the front end holds for those who ask.
    fn stored(&self) -> Vec<u64> {
        let stored = |node: &serde_json::Value| node["stored"].as_u64().unwrap();
        let mut all: Vec<u64> = self.status()["nodes"].as_array().unwrap().iter().map(stored).collect();
        let descriptors = self.processes().into_iter().flat_map(|pid| fs::read_dir(format!("/proc/{pid}/fd")));
        let descriptors: Vec<_> = descriptors.flatten().flatten().map(|fd| fd.path()).collect();
        let is_held = |fd: &&PathBuf| fs::read_link(fd).is_ok_and(|to| to.to_string_lossy().contains("hpcrt-held"));
        all.extend(descriptors.iter().filter(is_held).filter_map(|fd| Some(fs::metadata(fd).ok()?.blocks() * 512)));
        // What was removed and is in use, too: of RAM disks that only the session sees.
        let device = |path: &Path| fs::metadata(path).map_or(0, |at| at.dev());
        let others: Vec<u64> = ["/", "/tmp", "/run", "/dev", "/dev/shm"].map(|path| device(path.as_ref())).into();
        let is_disk = |fd: &&PathBuf| {
            let tmpfs = rustix::fs::statfs(fd.as_path()).is_ok_and(|fs| fs.f_type == 0x0102_1994);
            tmpfs && fd.is_dir() && !others.contains(&device(fd))
        };
        let disks: BTreeMap<u64, &PathBuf> = descriptors.iter().filter(is_disk).map(|fd| (device(fd), fd)).collect();
        let used = |fd: &PathBuf| rustix::fs::statvfs(fd).map(|fs| (fs.f_blocks - fs.f_bfree) * fs.f_frsize);
        all.extend(disks.values().filter_map(|fd| used(fd).ok()));
        let places = descriptors.iter().filter_map(|fd| fs::read_link(fd).ok());
        let places: BTreeSet<PathBuf> =
            places.filter(|place| place.is_dir() && place.to_string_lossy().contains("/hpcrt-store.")).collect();
        all.extend(places.iter().map(|place| {
            let mut files = BTreeMap::new();
            sizes(place, &mut files);
            files.values().sum::<u64>()
        }));
        all
    }

    /// Waits until the stores have room for no more than so many versions.
    fn keeps(&self, versions: u64) {
        let few = || self.stored().iter().all(|stored| *stored < versions * VERSION_SIZE + VERSION_SIZE / 2);
        let since = Instant::now();
        while !few() {
            let stored: Vec<u64> = self.stored().iter().map(|bytes| bytes >> 20).collect();
            assert!(since.elapsed() < GONE, "more than {versions} versions: {stored:?} MiB");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

#[test]
fn what_was_replaced_leaves_the_stores() {
    // The program as such, whose library is sent to all hosts; and as something that a shell asks for, with what goes to those who ask.
    for (abilities, flags) in [("", &[][..]), ("userns", &[]), ("fuse", &[]), ("", &["--pull"])] {
        let session = Session::start_without(abilities, flags);
        let tree = tempfile::tempdir().unwrap();
        let (program, go) = (tree.path().join("say"), session.runtime.path().join("go"));
        let (program, go) = (program.to_str().unwrap(), go.to_str().unwrap());
        let run = |words: &[&str]| {
            let run = session.run(&["-n", "3", "--prefix", tree.path().to_str().unwrap(), "--"]);
            match flags {
                [] => run.arg_all(&[program]).arg_all(words),
                _ => run.arg_all(&["sh", "-c", &format!("{program} {}; true", words.join(" "))]),
            }
        };
        let says = |version: u32| {
            make(tree.path(), version);
            assert_eq!(run(&[]).end().code(0).lines(), vec![version.to_string(); 3], "{abilities} {flags:?}");
        };
        for version in 1..=3 {
            says(version);
            session.keeps(1);
        }
        let waits = run(&[go]).run().start();
        until(|| (0..3).all(|rank| fs::exists(format!("{go}.{rank}")).unwrap()).then_some(()));
        for version in 4..=6 {
            says(version);
        }
        session.keeps(if flags.is_empty() { 2 } else { 4 });
        fs::write(go, "").unwrap();
        let expected: Vec<String> = [3, 6].into_iter().flat_map(|version: u32| vec![version.to_string(); 3]).collect();
        assert_eq!(waits.end().code(0).lines(), expected, "{abilities} {flags:?}: what was open stays what it was");
        session.keeps(1);
        // Nobody asks for it again.
        fs::remove_file(tree.path().join("libv.so")).unwrap();
        session.run(&["-n", "3", "--prefix", tree.path().to_str().unwrap(), "--", "true"]).end().code(0);
        session.keeps(0);
    }
}
