//! Sessions: hosts that stay up between jobs, on this machine.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use common::{GONE, Run, marked, nothing_left, until};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// A session of three hosts with a socket directory of its own; stopped when dropped.
struct Session {
    name: String,
    runtime: tempfile::TempDir,
}

impl Session {
    fn start(flags: &[&str]) -> Session {
        let runtime = tempfile::tempdir().unwrap();
        fs::set_permissions(runtime.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let mut session = Session { name: String::new(), runtime };
        let mut begun = session.command(&["start", "--hosts", "a,b,c", "--agent", "local"]).arg_all(flags).0;
        // Processes of the session are found by it.
        begun.env("HPCRT_TEST_MARK", session.mark());
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
fn a_stopped_session_is_gone() {
    let session = Session::start(&[]);
    let job = session.run(&["--", "sleep", "1000"]).run().start();
    thread::sleep(Duration::from_millis(300));
    session.command(&["stop", &session.name]).end().code(0);
    job.end().code(125);
    session.run(&["--", "true"]).end().code(2).says("there is no such session");
    assert!(session.command(&["list"]).end().code(0).lines().is_empty());
    assert_eq!(fs::read_dir(session.runtime.path()).unwrap().count(), 0, "no socket is left");
}

#[test]
fn strangers_and_mistakes() {
    let session = Session::start(&[]);
    session.command(&["run", "../x", "--", "true"]).end().code(2).says("not a session's name");
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
