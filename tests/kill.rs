//! SIGKILL and SIGSTOP to every kind of process of a job at every phase: a right result or one clear error in time, and nothing left.
//!
//! Deadlines: a killed process is noticed at once, and the job has ended within [`ENDED`]; an agent that does not speak is lost after
//! 15 s of silence, and the job has ended [`ENDED`] later.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Done, Role, Running, exec, parent, role, sh, until};
use nix::sys::signal::{Signal, kill};

/// From the loss of a process to the end of the front end.
const ENDED: Duration = Duration::from_secs(10);

const HOSTS: &str = "--hosts a,b,c,d --agent local -q --fan-out 2 -n 8";

/// Ranks with children of their own, one of them a daemon.
const FAMILY: &str = "setsid sleep 1000 </dev/null >/dev/null 2>&1 & sleep 1000 & wait";

/// Kills one process of a role once the job runs.
fn kill_while_running(victim: Role) -> (Done, Duration) {
    let run = sh(HOSTS, FAMILY).start();
    until(|| (role(&run.mark, Role::Rank).len() >= 24).then_some(()));
    let victims = role(&run.mark, victim);
    let since = Instant::now();
    kill(victims[victims.len() / 2], Signal::SIGKILL).unwrap();
    let done = run.end();
    (done, since.elapsed())
}

#[test]
fn a_killed_front_end() {
    let (done, took) = kill_while_running(Role::FrontEnd);
    assert!(took < Duration::from_secs(1), "{took:?}");
    done.gone();
}

#[test]
fn a_killed_agent() {
    let (done, took) = kill_while_running(Role::Agent);
    assert!(took < ENDED, "{took:?}");
    done.gone().code(125).says("cannot reach the agent: the connection was closed");
}

/// Its rank has ended, and not all of its output has left the host, since nobody reads it.
#[test]
fn a_killed_agent_that_has_output_yet_to_send() {
    const BYTES: usize = 3 << 20;
    // The pipe holds the last MiB.
    let place = tempfile::tempdir().unwrap();
    let written = place.path().join("written");
    let script =
        format!("import fcntl, os; fcntl.fcntl(1, 1031, 1 << 20); os.write(1, b'x' * {BYTES}); open({written:?}, 'w')");
    // How much the front end takes before it waits for its reader differs.
    for round in 0..10 {
        let mark = format!("output{}-{round}", std::process::id());
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["exec", "--hosts", "a", "--agent", "local", "-q", "--", "python3", "-c", &script]);
        command.env("HPCRT_TEST_MARK", &mark).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        until(|| fs::remove_file(&written).ok());
        until(|| role(&mark, Role::Rank).is_empty().then_some(()));
        // Its end is told.
        thread::sleep(Duration::from_millis(300));
        role(&mark, Role::Agent).into_iter().for_each(|agent| kill(agent, Signal::SIGKILL).unwrap_or_default());
        let done = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        common::nothing_left(&mark);
        if done.stdout.len() < BYTES {
            assert_eq!(done.status.code(), Some(125), "{said}");
            assert!(said.contains("a: cannot reach the agent"), "{said}");
            return assert!(said.contains("what its ranks wrote last may be missing"), "{said}");
        }
    }
    panic!("all of it had come");
}

#[test]
fn a_killed_session_keeper() {
    let (done, took) = kill_while_running(Role::Keeper);
    assert!(took < ENDED, "{took:?}");
    done.gone().code(125).says("its keeper on this node was killed");
}

#[test]
fn a_killed_job_keeper() {
    let (done, took) = kill_while_running(Role::JobKeeper);
    assert!(took < ENDED, "{took:?}");
    done.gone().code(125).says("its keeper on this node was killed");
}

#[test]
fn a_killed_rank() {
    let run = exec(HOSTS).program(&["sleep", "1000"]).start();
    until(|| (role(&run.mark, Role::Rank).len() == 8).then_some(()));
    thread::sleep(Duration::from_millis(100));
    let since = Instant::now();
    kill(role(&run.mark, Role::Rank)[3], Signal::SIGKILL).unwrap();
    run.end().code(128 + 9).says("killed by SIGKILL");
    assert!(since.elapsed() < Duration::from_secs(2), "{:?}", since.elapsed());
}

/// The loss of a host on which nothing of the job runs changes nothing.
#[test]
fn a_killed_agent_without_ranks() {
    let place = tempfile::tempdir().unwrap();
    let go = place.path().join("go");
    let script = format!("echo up; while [ ! -e {} ]; do sleep 0.1; done; echo done", go.display());
    for flags in ["", "--keep-going", "--min-hosts 3"] {
        let hosts = format!("--hosts a,b,c,d --agent local -q -n 2 --ppn 1 {flags}");
        let run = sh(&hosts, &script).start();
        run.printed(2);
        let job_keepers = role(&run.mark, Role::JobKeeper);
        assert_eq!(job_keepers.len(), 2);
        let busy: Vec<_> = job_keepers.into_iter().filter_map(|pid| parent(parent(pid)?)).collect();
        // What an agent has just forked looks like one for a moment.
        let idle = until(|| {
            let agents = role(&run.mark, Role::Agent).into_iter();
            let idle: Vec<_> = agents.filter(|pid| !busy.contains(pid)).collect();
            (idle.len() == 2).then_some(idle)
        });
        kill(idle[0], Signal::SIGKILL).unwrap();
        // The loss is noticed while the job runs.
        thread::sleep(Duration::from_secs(1));
        fs::write(&go, "").unwrap();
        let done = run.end().gone().code(0);
        assert_eq!(done.lines(), ["done", "done", "up", "up"], "{flags}: {}", done.err);
        fs::remove_file(&go).unwrap();
    }
}

#[test]
fn a_stopped_agent() {
    let run = sh(HOSTS, FAMILY).start();
    until(|| (role(&run.mark, Role::Rank).len() >= 24).then_some(()));
    let since = Instant::now();
    kill(role(&run.mark, Role::Agent)[1], Signal::SIGSTOP).unwrap();
    run.end().gone().code(125).says("nothing was heard for 15 s");
    let took = since.elapsed();
    assert!(took > Duration::from_secs(10) && took < Duration::from_secs(15) + ENDED, "{took:?}");
}

/// Its agents take it for dead and end the ranks: then it must not take these for done.
#[test]
fn a_stopped_front_end() {
    let run = sh(HOSTS, "sleep 40; echo done").start();
    until(|| (role(&run.mark, Role::Rank).len() >= 8).then_some(()));
    kill(run.pid(), Signal::SIGSTOP).unwrap();
    until(|| role(&run.mark, Role::Rank).is_empty().then_some(()));
    kill(run.pid(), Signal::SIGCONT).unwrap();
    run.end().gone().code(125).says("heard nothing from the job for too long and ended its part of it");
}

/// Kills a process at a time that is spread over start, run and end.
fn kill_at(run: Running, victim: Role, after: Duration) {
    thread::sleep(after);
    let (mark, since) = (run.mark.clone(), Instant::now());
    // An agent that is being started looks like the front end until it is executed.
    let victims = if matches!(victim, Role::FrontEnd) { vec![run.pid()] } else { role(&mark, victim) };
    let hit = victims.get(victims.len() / 2).is_some_and(|pid| kill(*pid, Signal::SIGKILL).is_ok());
    let done = run.end();
    assert!(since.elapsed() < ENDED, "{victim:?} after {after:?}: {:?}\n{}", since.elapsed(), done.err);
    let expected: &[Option<i32>] = match (hit, victim) {
        (false, _) => &[Some(0)],
        // It may have ended by itself when the signal came.
        (true, Role::FrontEnd) => &[None, Some(0)],
        (true, Role::Rank) => &[Some(128 + 9), Some(0)],
        (true, _) => &[Some(125), Some(0)],
    };
    let code = done.status.code();
    assert!(expected.contains(&code), "{victim:?} after {after:?}: {:?}\n{}", done.status, done.err);
    if code == Some(0) {
        assert_eq!(done.lines(), ["done"; 8], "{victim:?} after {after:?}: {}", done.err);
    } else if code == Some(125) {
        assert!(done.err.starts_with("hpcrt: "), "{}", done.err);
    }
    assert!(!done.err.contains("panicked"), "{}", done.err);
    done.gone();
}

fn at_any_moment(rounds: u64) {
    for round in 0..rounds {
        for victim in [Role::FrontEnd, Role::Agent, Role::Keeper, Role::JobKeeper, Role::Rank] {
            let run = sh(HOSTS, "sleep 0.05; echo done").start();
            // 0 to 400 ms, in steps that differ from round to round.
            kill_at(run, victim, Duration::from_millis((round * 89 + victim as u64 * 31) % 400));
        }
    }
}

#[test]
fn killed_at_any_moment() {
    at_any_moment(12);
}

#[test]
#[ignore = "many minutes"]
fn killed_at_any_moment_for_long() {
    at_any_moment(400);
}
