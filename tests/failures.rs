//! What users of launchers complain about, where no other test has it; docs/FAILURES.md is the whole list.

mod common;

use std::process::Command;
use std::time::Duration;

use common::{Run, exec, from_back_to_front, sh};

/// Launchers that learn of their children too late hang when all end at once.
#[test]
fn sixty_four_that_end_at_once() {
    for round in 0..25 {
        let done = exec("-n 64").arg("-q").program(&["/bin/true"]).within(Duration::from_secs(20)).end().code(0);
        assert!(done.out.is_empty(), "round {round}");
    }
    for (hosts, code) in [("--hosts n[1-64] --agent local -q", 0), ("--hosts n[1-16] --agent local -q -n 64", 7)] {
        sh(hosts, &format!("exit {code}")).within(Duration::from_secs(30)).end().code(code);
    }
}

/// Hosts that may not log in to each other: whoever a node cannot start is started from here.
#[test]
fn hosts_that_only_the_front_end_reaches() {
    let agent =
        "[ -z \"$ON_A_NODE\" ] || { echo 'Permission denied (publickey).' >&2; exit 255; }; ON_A_NODE={host} env";
    for fan_out in ["1", "2"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["exec", "-q", "--hosts", "n[1-5]", "--agent", agent, "--fan-out", fan_out]);
        let done = Run::new(command).program(&["sh", "-c", "echo $HPCRT_NODE"]).end().code(0);
        assert_eq!(done.lines(), ["1", "2", "3", "4", "5"], "{}", done.err);
    }
}

/// One that its parent could not start is not waited for below that: ranks that do something together get it from where it is.
#[test]
fn a_host_below_another_that_only_the_front_end_reaches() {
    let agent = "[ -z \"$ON_A_NODE\" ] || [ {host} != n3 ] || exit 255; ON_A_NODE={host} env";
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    command.args(["exec", "-q", "--hosts", "n[1-3]", "--agent", agent, "--fan-out", "1", "--timeout", "20"]);
    let barrier = "echo 'barrier 0 5' >&8; head -n 1 <&8; echo $HPCRT_NODE";
    let done = Run::new(command).program(&["sh", "-c", barrier]).end().code(0);
    assert_eq!(done.lines(), ["1", "2", "3", "ok 0", "ok 0", "ok 0"], "{}", done.err);
}

/// Signals that have no name end ranks like others.
#[test]
fn a_rank_that_is_killed_by_a_real_time_signal() {
    sh("--hosts a --agent local", "kill -34 $$")
        .within(Duration::from_secs(10))
        .end()
        .code(162)
        .says("killed by signal 34");
}

/// What nohup leaves of standard input where that was a terminal.
#[test]
fn standard_input_that_can_only_be_written() {
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" \"$@\" 0> /dev/null", env!("CARGO_BIN_EXE_hpcrt")]);
    command.args(["exec", "-q", "--hosts", "a,b", "--agent", "local"]);
    let done = Run::new(command).program(&["sh", "-c", "cat; sleep 0.3; echo on"]).end().code(0);
    assert_eq!(done.lines(), ["on", "on"]);
}

/// What is typed is the shell's while the job is in the background, and the job's when it is not any more.
#[test]
fn a_job_that_comes_to_the_front() {
    let done = from_back_to_front(&[env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q"]);
    assert_eq!(done.code(0).lines(), ["job two", "shell one"]);
}
