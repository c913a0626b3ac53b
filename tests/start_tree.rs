//! What a tree gains where starting an agent keeps the starter busy: a fake login that takes 0.2 s, of which its starter can do one at a time.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use hpcrt::launch::start_tree::{StartCost, finish};

/// Shapes of the tree by what hpcrt is told of the cost (remote, sequential, in ms) and the fan-out.
const SHAPES: [(&str, [u64; 2], u32); 5] = [
    ("flat", [1_000_000, 1], 10_000),
    ("fan-out 2", [200, 0], 2),
    ("fan-out 8", [200, 0], 8),
    ("fan-out 32", [200, 0], 32),
    ("greedy", [200, 200], 10_000),
];

/// The fake login: who starts it (its parent, the shell that hpcrt runs having become it) is busy for 0.2 s.
fn fake(place: &Path) -> String {
    let script = place.join("fake");
    let text = format!("#!/bin/sh\nshift\nflock {}/busy.$PPID sleep 0.2\nexec \"$@\"\n", place.display());
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    format!("exec {} {{host}}", script.display())
}

/// A small copy of the program: the debug build's symbols would be hashed on every host.
fn small(place: &Path) -> String {
    let copy = place.join("hpcrt");
    let stripped = Command::new("strip").arg("-o").arg(&copy).arg(env!("CARGO_BIN_EXE_hpcrt")).status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(env!("CARGO_BIN_EXE_hpcrt"), &copy).unwrap();
    }
    copy.display().to_string()
}

/// Seconds until that many agents are in the tree.
fn start(hpcrt: &str, fake: &str, hosts: u32, [remote, sequential]: [u64; 2], fan_out: u32) -> f64 {
    let stats = Path::new(hpcrt).with_file_name("stats");
    let status = Command::new(hpcrt)
        .args([
            "exec",
            "-q",
            "-n",
            "1",
            "--hosts",
            &format!("n[1-{hosts}]"),
            "--agent",
            fake,
            "--fan-out",
            &fan_out.to_string(),
        ])
        .arg("--stats")
        .arg(&stats)
        .args(["--", "true"])
        .env("HPCRT_START_COST", format!("{remote},{sequential}"))
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    let stats: serde_json::Value = serde_json::from_slice(&fs::read(stats).unwrap()).unwrap();
    stats["seconds"]["start_agents"].as_f64().unwrap()
}

fn predicted(hosts: u32, [remote, sequential]: [u64; 2], cap: u32) -> f64 {
    let cost = StartCost { remote: Duration::from_millis(remote), sequential: Duration::from_millis(sequential), cap };
    finish(hosts, &cost).as_secs_f64()
}

#[test]
fn a_tree_beats_a_flat_start() {
    let place = tempfile::tempdir().unwrap();
    let (fake, hpcrt) = (fake(place.path()), small(place.path()));
    let [flat, greedy] = [&SHAPES[0], &SHAPES[4]].map(|(_, cost, fan_out)| start(&hpcrt, &fake, 12, *cost, *fan_out));
    assert!(flat >= 12.0 * 0.2, "one after the other: {flat}");
    // Four rounds of 0.2 s each, and whatever else this machine does.
    assert!(greedy >= predicted(12, [200, 200], 10_000) && greedy < flat, "{greedy}, flat {flat}");
}

#[test]
#[ignore = "two minutes of sleeping"]
fn sixty_four_and_more() {
    let place = tempfile::tempdir().unwrap();
    let (fake, hpcrt) = (fake(place.path()), small(place.path()));
    println!("| hosts | {} | greedy, predicted |", SHAPES.map(|(name, ..)| name).join(" | "));
    for hosts in [64, 256] {
        let times = SHAPES.map(|(_, cost, fan_out)| start(&hpcrt, &fake, hosts, cost, fan_out));
        let [flat, rest @ ..] = times;
        let predicted = predicted(hosts, [200, 200], 10_000);
        println!("| {hosts} | {} | {predicted:.1} s |", times.map(|time| format!("{time:.1} s")).join(" | "));
        assert!(rest.iter().all(|time| *time < flat), "every tree is faster than a flat start");
    }
}
