//! What users of launchers complain about, where no other test has it; docs/FAILURES.md is the whole list.

mod common;

use std::process::Command;
use std::time::Duration;

use common::{Run, exec, sh};

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
