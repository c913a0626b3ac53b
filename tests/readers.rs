//! Who does not read, or does not wait, what hpcrt writes: streams, messages, files. Everybody else goes on.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Role, exec, marked, nothing_left, role, sh, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};

const AB: &str = "--hosts a,b --agent local -q";
/// Writes without an end, whatever it is interrupted by.
const BABBLE: &str = "trap '' INT; yes";
/// What waits for nobody who reads comes within this time.
const SOON: Duration = Duration::from_secs(8);

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

/// How a process ended within that time.
#[track_caller]
fn end_within(child: &mut Child, limit: Duration) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if begun.elapsed() > limit {
            child.kill().unwrap();
            panic!("it did not end within {limit:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// A session of hosts a and b with a directory of its own, by which its processes are found; stopped when dropped.
struct Session {
    runtime: tempfile::TempDir,
    name: String,
}

impl Session {
    fn start(flags: &[&str]) -> Session {
        let runtime = tempfile::tempdir().unwrap();
        fs::set_permissions(runtime.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let mut session = Session { runtime, name: String::new() };
        let words = ["start", "--hosts", "a,b", "--agent", "local"];
        let begun = session.command(&words).args(flags).output().unwrap();
        assert!(begun.status.success(), "{}", String::from_utf8_lossy(&begun.stderr));
        session.name = String::from_utf8(begun.stdout).unwrap().trim().to_owned();
        session
    }

    fn mark(&self) -> &str {
        self.runtime.path().to_str().unwrap()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.arg("session").args(words).stdin(Stdio::null());
        command.env("XDG_RUNTIME_DIR", self.runtime.path()).env("HPCRT_TEST_MARK", self.mark());
        command
    }

    /// A job: its flags and program.
    fn run(&self, words: &[&str]) -> Command {
        let mut command = self.command(&["run", &self.name, "-q"]);
        command.args(words);
        command
    }

    /// The jobs that run.
    fn jobs(&self) -> usize {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["status", "--json", &self.name]).env("XDG_RUNTIME_DIR", self.runtime.path());
        let status: serde_json::Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        status["jobs"].as_array().unwrap().len()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.command(&["stop", &self.name]).output();
    }
}

/// One pipe that nobody reads for both streams.
fn mute(command: &mut Command) -> (Child, OwnedFd) {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let child = command.stdin(Stdio::null()).stdout(writer.try_clone().unwrap()).stderr(writer).spawn().unwrap();
    // It has copies of the writing end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    (child, reader)
}

#[test]
fn a_job_that_nobody_reads_hears_signals_and_losses() {
    let mark = format!("mute{}", std::process::id());
    let job = |flags: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.arg("exec").args(flags.split_whitespace()).args(["--", "sh", "-c", BABBLE]);
        command.env("HPCRT_TEST_MARK", &mark);
        let muted = mute(&mut command);
        until(|| (role(&mark, Role::Rank).len() >= 2).then_some(()));
        thread::sleep(Duration::from_millis(500));
        muted
    };
    let (mut child, _reader) = job("--hosts a --agent local -n 1");
    signal(&child, Signal::SIGINT);
    thread::sleep(Duration::from_millis(200));
    signal(&child, Signal::SIGINT);
    assert_eq!(end_within(&mut child, SOON).code(), Some(125));
    nothing_left(&mark);
    // Nobody can be told, but the other ranks are ended.
    let (mut child, reader) = job(&format!("{AB} -n 2"));
    kill(role(&mark, Role::Agent)[0], Signal::SIGKILL).unwrap();
    let begun = Instant::now();
    until(|| role(&mark, Role::Rank).is_empty().then_some(()));
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    drop(reader);
    end_within(&mut child, SOON);
    nothing_left(&mark);
}

#[test]
fn a_job_that_nobody_reads_holds_up_no_other() {
    let session = Session::start(&["--idle", "1e19"]);
    let (mut mute, _reader) = mute(&mut session.run(&["-n", "1", "--", "sh", "-c", BABBLE]));
    let babbles = |pid: &Pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "yes\n");
    until(|| marked(session.mark()).iter().any(babbles).then_some(()));
    thread::sleep(Duration::from_millis(500));
    signal(&mute, Signal::SIGINT);
    thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    let told = session.run(&["-n", "2", "--", "echo", "B"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&told.stdout), "B\nB\n");
    let listed = session.command(&["list"]).output().unwrap();
    let line = String::from_utf8(listed.stdout).unwrap();
    assert!(line.contains("2 hosts (a,b)  1 jobs"), "{line}");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    signal(&mute, Signal::SIGINT);
    assert_eq!(end_within(&mut mute, SOON).code(), Some(125));
    assert_eq!(session.jobs(), 0);
}

/// More than any window, by a reader that is slow and one that stops for a while: everything arrives.
#[test]
fn all_output_arrives_however_slowly_it_is_read() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    command.arg("exec").args(AB.split_whitespace()).args([
        "-n",
        "4",
        "--",
        "sh",
        "-c",
        "yes 0123456789abcde | head -c 20000000",
    ]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let (mut all, mut block) = (0, vec![0; 1 << 20]);
    thread::sleep(Duration::from_secs(1));
    loop {
        match out.read(&mut block).unwrap() {
            0 => break,
            got => all += got,
        }
        if all % 7 == 0 {
            thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!((all, end_within(&mut child, SOON).code()), (80_000_000, Some(0)));
}

#[test]
fn a_host_that_is_lost_while_memory_servers_start() {
    let session = Session::start(&[]);
    let ancestors = "p=$$; while [ $p -gt 1 ]; do echo $p; p=$(sed -n 's/^PPid:\t//p' /proc/$p/status); done";
    let ancestors = session.run(&["-n", "1", "--", "sh", "-c", ancestors]).output().unwrap();
    let ancestors = String::from_utf8(ancestors.stdout).unwrap();
    // The first rank runs on host a.
    let is_of_a = |agent: &Pid| ancestors.lines().any(|line| line == agent.to_string());
    // What an agent has just forked looks like one for a moment.
    let (a, b) = until(|| {
        let agents: (Vec<_>, Vec<_>) = role(session.mark(), Role::Agent).into_iter().partition(is_of_a);
        let ([a], [b]) = (&agents.0[..], &agents.1[..]) else { return None };
        Some((*a, *b))
    });
    kill(b, Signal::SIGSTOP).unwrap();
    let words = ["--memory", "b:20M", "--local-mb", "64", "--keep-going", "--", "true"];
    let mut job = session.run(&words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_millis(700));
    kill(a, Signal::SIGKILL).unwrap();
    thread::sleep(Duration::from_millis(300));
    kill(b, Signal::SIGCONT).unwrap();
    let status = end_within(&mut job, Duration::from_secs(15));
    let mut said = String::new();
    job.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(status.code(), Some(125), "{said}");
    assert!(said.contains("a: cannot reach the agent") || said.contains("userfaultfd"), "{said}");
}

#[test]
fn streams_that_others_made_non_blocking() {
    let (reader, mut writer) = pipe_with(PipeFlags::CLOEXEC).map(|(r, w)| (r, File::from(w))).unwrap();
    rustix::fs::fcntl_setfl(&reader, OFlags::NONBLOCK).unwrap();
    let count = |input: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["exec", "-q", "--", "wc", "-c"]);
        command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let child = count(reader.into());
    thread::sleep(Duration::from_millis(700));
    writer.write_all(&vec![b'x'; 300_000]).unwrap();
    drop(writer);
    let done = child.wait_with_output().unwrap();
    assert_eq!((done.status.code(), String::from_utf8_lossy(&done.stdout).trim()), (Some(0), "300000"));
    let done = count(File::open("/tmp").unwrap().into()).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(125) && said.contains("cannot read standard input"), "{said}");

    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    rustix::fs::fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    command.args(["exec", "-q", "--", "head", "-c", "3000000", "/dev/zero"]).stdin(Stdio::null()).stdout(writer);
    let mut child = command.spawn().unwrap();
    drop(command);
    thread::sleep(Duration::from_millis(700));
    let mut all = Vec::new();
    File::from(reader).read_to_end(&mut all).unwrap();
    assert_eq!((all.len(), end_within(&mut child, SOON).code()), (3_000_000, Some(0)));
}

/// The owner of `--front` asks and asks, and does not read an answer.
#[test]
fn a_front_that_is_not_read() {
    let front = "
import os, socket, subprocess, sys, threading
ours, theirs = socket.socketpair()
command = [sys.argv[1], 'exec', '-q', '-n', '2', '--agent', 'local', '--timeout', '2', '--front', str(theirs.fileno()), '--', 'sleep', '60']
job = subprocess.Popen(command, pass_fds=[theirs.fileno()])
theirs.close()
ours.settimeout(1)
try:
    while True: ours.sendall(b'members 0\\n' * 1000)
except OSError: pass
print(job.wait(15))";
    let mut python = Command::new("python3");
    let done = python.args(["-c", front, env!("CARGO_BIN_EXE_hpcrt")]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "125\n", "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn files_that_cannot_be_written() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name).to_str().unwrap().to_owned();
    // A rank's file fails: the job is ended, and the other's is there.
    fs::create_dir(at("out")).unwrap();
    fs::write(at("out/rank.1.err"), "of an earlier job").unwrap();
    let lines = format!(
        "cd {}; if [ $HPCRT_RANK = 0 ]; then ln -s /dev/full rank.1.out; else until [ -s rank.0.out ]; do sleep 0.01; done; fi; \
         echo words; sleep 30",
        at("out")
    );
    let done = sh(&format!("{AB} -n 2 --output {}", at("out")), &lines).within(SOON).end().code(125);
    assert!(done.err.matches("No space left").count() == 1 && done.err.contains("rank.1.out"), "{}", done.err);
    assert_eq!(fs::read_to_string(at("out/rank.0.out")).unwrap(), "words\n");
    assert!(!fs::exists(at("out/rank.1.err")).unwrap());
    // Statistics and drawing: known before, and what fails later does not hide the job's own code.
    sh(&format!("{AB} --stats {}", at("none/x")), &format!("touch {}", at("ran"))).end().code(2).says("--stats");
    assert!(!fs::exists(at("ran")).unwrap());
    for (own, code) in [(3, 3), (0, 125)] {
        let report = at(&format!("{own}.svg"));
        let flags = format!("{AB} -n 1 --stats /dev/full --report {report}");
        let done = sh(&flags, &format!("exit {own}")).end().code(code).says("cannot write the statistics");
        assert!(fs::metadata(report).unwrap().len() > 0, "{}", done.err);
    }
    // A job that cannot begin leaves nothing in its session.
    let session = Session::start(&[]);
    let done = session.run(&["--memory", "a:100M", "--output", "/proc/x", "--", "true"]).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(2) && said.contains("output directory"), "{said}");
    assert_eq!((session.jobs(), role(session.mark(), Role::Lender).len()), (0, 0));
    // Hosts that it never had are no hosts that were lost.
    let words = ["--", "--hosts", "a", "true", ":", "--hosts", "b,zz", "true"];
    let done = session.run(&words).output().unwrap();
    assert!(done.status.code() == Some(2) && String::from_utf8_lossy(&done.stderr).contains("zz"), "{done:?}");
}

#[test]
fn a_session_that_starts_ends_with_its_command() {
    let runtime = tempfile::tempdir().unwrap();
    fs::set_permissions(runtime.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let mark = runtime.path().to_str().unwrap();
    let start = |agent: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["session", "start", "--hosts", "a", "--agent", agent]).stdin(Stdio::null());
        command.env("XDG_RUNTIME_DIR", runtime.path()).env("HPCRT_TEST_MARK", mark);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until(|| (marked(mark).len() > 2).then_some(()));
        thread::sleep(Duration::from_millis(300));
        child
    };
    for (agent, with) in [("sleep 40;#", Signal::SIGINT), ("sleep 1; : {host};", Signal::SIGKILL)] {
        let mut child = start(agent);
        signal(&child, with);
        end_within(&mut child, SOON);
        until(|| marked(mark).is_empty().then_some(()));
        assert_eq!(fs::read_dir(runtime.path().join("hpcrt")).map_or(0, Iterator::count), 0, "{agent}");
    }
    // What the command was started with is not the session's.
    let lock = runtime.path().join("lock");
    let line = format!("exec 9>{}; \"$0\" session start --hosts a --agent local", lock.display());
    let mut shell = Command::new("sh");
    shell.args(["-c", &line, env!("CARGO_BIN_EXE_hpcrt")]).env("XDG_RUNTIME_DIR", runtime.path());
    let name = shell.env("HPCRT_TEST_MARK", mark).stdin(Stdio::null()).output().unwrap().stdout;
    let holds = |pid: &Pid| {
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        fds.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|open| open == lock)
    };
    let (session, holding) = (marked(mark).len(), marked(mark).iter().filter(|pid| holds(pid)).count());
    let mut stop = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    stop.args(["session", "stop", String::from_utf8_lossy(&name).trim()]).env("XDG_RUNTIME_DIR", runtime.path());
    assert!(stop.status().unwrap().success());
    assert!(session >= 3 && holding == 0, "{holding} of {session} hold the lock");
    for least in ["0", "9"] {
        exec(&format!("{AB} --min-hosts {least}")).program(&["true"]).end().code(2).says("--min-hosts");
    }
}
