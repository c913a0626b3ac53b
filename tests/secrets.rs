//! The session's key is in memory and on the way to agents only: not in an argument, an environment variable, a log, an output or a report.
//! Slurm's way is in `slurm.rs`. Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;
#[path = "common/secret.rs"]
mod secret;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use cluster::{Cluster, Spec};
use common::{Role, Run, exec, marked, role, until};
use nix::unistd::Pid;
use secret::Secret;

/// Uid of the ordinary user on the hosts.
const USER: u32 = 20001;
/// Says what a rank is shown, and stays until `DIR/go` is there.
const RANK: &str = "env; tr '\\0' ' ' </proc/self/cmdline; while [ ! -e $DIR/go ]; do sleep 0.1; done";

/// The files below a directory that hold the secret.
fn holders(place: &Path, secret: &Secret) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(place).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(holders(&path, secret));
        } else if fs::read(&path).is_ok_and(|bytes| secret.is_in(&bytes)) {
            found.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    found
}

/// Each host is started by the one before, by a command through which the test hears what agents are told.
#[test]
fn agents_that_a_command_starts() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED: {obstacle}");
    }
    let cluster = Cluster::up(Spec { hosts: 3, ..Spec::of("t-secret") }).unwrap();
    let place = cluster.backing().join("seen");
    fs::create_dir(&place).unwrap();
    fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).unwrap();
    fs::copy("/bin/sh", cluster.backing().join("sh")).unwrap();
    let strip = ["-o", "hpcrt", env!("CARGO_BIN_EXE_hpcrt")];
    assert!(Command::new("strip").args(strip).current_dir(cluster.backing()).status().unwrap().success());
    let agent = format!("tee /tmp/{{host}}.input | HPCRT_LOG=debug {}", cluster.agent_command());
    let hosts = cluster.hosts().join(",");
    let words = ["/shared/hpcrt", "exec", "-v", "--hosts", &hosts, "--agent", &agent, "--fan-out", "1"];
    let told = ["--stats", "/shared/seen/stats", "--report", "/shared/seen/report.svg", "-x", "DIR=/shared/seen"];
    let words: Vec<&str> = words.into_iter().chain(told).collect();
    let run =
        Run::new(cluster.command("hpc1", USER, &words)).env("HPCRT_LOG", "debug").env("XDG_CACHE_HOME", "/shared/seen");
    let run = run.program(&["/shared/sh", "-c", RANK]).start();
    let is_rank =
        |pid: &Pid| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|words| words.starts_with(b"/shared/sh"));
    until(|| (marked(&run.mark).iter().filter(|pid| is_rank(pid)).count() >= 3).then_some(()));
    let heard = |by: &str, of: u32| {
        let cat = cluster.exec(by, USER, &["cat", &format!("/tmp/hpc{of}.input")]).unwrap();
        assert!(cat.status.success(), "{cat:?}");
        cat.stdout
    };
    let inputs = [heard("hpc1", 1), heard("hpc1", 2), heard("hpc2", 3)];
    let secret = until(|| Secret::on_its_way(&inputs[0]));
    assert!(inputs.iter().all(|input| secret.is_in(input)), "every agent is told");
    assert_eq!(secret.shown_by(), [""; 0]);
    assert!(!Secret::new(b"/shared/seen/report").shown_by().is_empty(), "the search finds what is there");
    fs::write(place.join("go"), "").unwrap();
    let done = run.end().code(0);
    assert!(
        done.text().matches("HPCRT_RANK=").count() == 3 && done.err.contains(" DEBUG] agent: "),
        "{}{}",
        done.text(),
        done.err
    );
    assert!(!secret.is_in(&done.out) && !secret.is_in(done.err.as_bytes()));
    assert_eq!(holders(&place, &secret), [""; 0]);
    assert!(place.join("stats").exists() && place.join("report.svg").exists());
}

/// Words of a process, or its variables.
fn words(pid: Pid, file: &str) -> BTreeSet<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Nobody hears what these are told; they are given nothing that the front end does not have from the user.
#[test]
fn agents_of_this_machine() {
    let place = tempfile::tempdir().unwrap();
    let dir = format!("DIR={}", place.path().display());
    let run = exec("--hosts a,b --agent local -q -x").arg(&dir).program(&["sh", "-c", RANK]).start();
    let of_both = |of: Role| Some(role(&run.mark, of)).filter(|pids| pids.len() == 2);
    let agents = [Role::JobKeeper, Role::Keeper, Role::Agent].into_iter().flat_map(|of| until(|| of_both(of)));
    let agents = agents.collect::<Vec<_>>();
    // Not before: what has just been executed shows no variables for a moment.
    let own = words(run.pid(), "environ");
    for agent in agents {
        let more: Vec<_> = words(agent, "environ").difference(&own).cloned().collect();
        assert!(more.is_empty(), "{agent}: {more:?}");
        let line: Vec<_> = words(agent, "cmdline").into_iter().filter(|word| !word.is_empty()).collect();
        assert!(line.len() == 2 && line.contains(&"serve".to_owned()), "{agent}: {line:?}");
    }
    fs::write(place.path().join("go"), "").unwrap();
    run.end().code(0);
}
