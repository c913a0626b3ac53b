//! Ranks on several hosts that write files asynchronously and tell each other of it: what is there is what is there without `--async-io`, whoever is
//! killed. Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "common/nodes.rs"]
mod hosts;
#[path = "common/site.rs"]
mod site;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Running, until};
use hosts::{Nodes, PORT, Place, TWO, USERS};
use nix::sys::signal::{Signal, kill};

/// One rank on each of four.
const FOUR: (&str, &str) = ("hpc1,hpc2,hpc3,hpc4", "hpc1 hpc2 hpc3 hpc4");

/// Writes that were kept, and the calls that made them.
fn kept(stats: &Path) -> (u64, u64) {
    let told: serde_json::Value = serde_json::from_slice(&fs::read(stats).unwrap()).unwrap();
    let number = |name: &str| told["async_io"][name].as_u64().unwrap();
    (number("writes"), number("pieces"))
}

/// The same program without `--async-io` and with it: at least this part of so many writes are kept, and of these files each is the same.
fn same(nodes: &Nodes, at: &Place, (hosts, names): (&str, &str), mode: &str, count: u32, files: &[&str]) {
    let words = |name: &str| format!("{mode} {{}}/{name} {count} {PORT} {names}");
    let plain = nodes.right(at, hosts, "", &words("plain"));
    let stats = format!("{}/stats", at.there);
    let ours = nodes.right(at, hosts, &format!("--async-io --stats {stats}"), &words("kept"));
    let (writes, pieces) = kept(&at.here.join("stats"));
    println!("{mode} on {hosts} as {}: plain {plain:.2?}, kept {ours:.2?}, {writes} writes in {pieces}", at.uid);
    assert!(writes > u64::from(count) * 9 / 10, "{writes} writes were kept");
    for file in files {
        let [plain, ours] = ["plain", "kept"].map(|name| fs::read(at.here.join(format!("{name}{file}"))).unwrap());
        assert!(plain == ours && !plain.is_empty(), "{mode}{file}");
    }
}

const ALL: [&str; 3] = [".interleaved", ".solver", ".tcp"];

#[test]
fn what_several_hosts_write_is_right() {
    let Some(nodes) = Nodes::up("nodes") else { return };
    for (uid, layout) in USERS.into_iter().zip([TWO, FOUR]) {
        let at = nodes.place(uid, "w");
        same(&nodes, &at, layout, "all", 320, &ALL);
    }
    // Told by memory that two ranks share, and from there by TCP; what cannot be seen is not relied on.
    let at = nodes.place(USERS[1], "relay");
    same(&nodes, &at, TWO, "relay", 100, &[""]);
    let done = nodes.start(&at, TWO.0, "--async-io", "mapped {}/m 64").end().code(0).says("one has mapped a device");
    assert_eq!(done.text(), "right\n");
}

/// Kills workers on all hosts, one after the other, until the run has ended; how many were.
fn kill_workers(nodes: &Nodes, run: &mut Running) -> u32 {
    let mut kills = 0;
    while run.child.try_wait().unwrap().is_none() {
        let workers = nodes.named(run, "ioworker", None);
        if !workers.is_empty() {
            kills += u32::from(kill(workers[fastrand::usize(0..workers.len())], Signal::SIGKILL).is_ok());
        }
        std::thread::sleep(Duration::from_millis(100 + fastrand::u64(0..50)));
    }
    kills
}

fn killed_workers(nodes: &Nodes, uid: u32, count: u32) -> u32 {
    let at = nodes.place(uid, "k");
    let mut kills = 0;
    for (mode, layout, count) in
        [("appending", TWO, 4 * count), ("interleaved", FOUR, 8 * count), ("solver", TWO, count)]
    {
        let mut run = nodes.start(&at, layout.0, "--async-io", &format!("{mode} {{}}/f {count}"));
        kills += kill_workers(nodes, &mut run);
        let done = run.end().code(0);
        assert_eq!(done.text(), "right\n", "{mode}: {}", done.err);
    }
    fs::remove_dir_all(&at.here).unwrap();
    kills
}

/// A host goes with all that runs there: what everybody was told of is there, and of each rank the beginning of what it wrote.
fn killed_host(nodes: &Nodes, uid: u32) {
    let at = nodes.place(uid, "h");
    let run = nodes.start(&at, TWO.0, "--async-io", "forever {}/f {}/told");
    until(|| at.told().filter(|number| *number >= 2000));
    std::thread::sleep(Duration::from_micros(fastrand::u64(0..100_000)));
    let victims = nodes.named(&run, "", Some(1));
    assert!(victims.len() > 3, "{victims:?}");
    let begun = Instant::now();
    victims.into_iter().for_each(|pid| _ = kill(pid, Signal::SIGKILL));
    let done = run.end();
    assert!(begun.elapsed() < Duration::from_secs(20));
    done.says("hpc2").gone();
    at.holds_what_was_told();
    fs::remove_dir_all(&at.here).unwrap();
}

#[test]
fn who_is_killed_loses_nothing_that_was_told() {
    let Some(nodes) = Nodes::up("nodeskill") else { return };
    println!("{} workers were killed", killed_workers(&nodes, USERS[0], 100));
    for uid in USERS {
        killed_host(&nodes, uid);
    }
}

/// The same, larger and many times.
#[test]
#[ignore = "minutes"]
fn several_hosts_for_long() {
    let Some(nodes) = Nodes::up("nodeslong") else { return };
    for uid in USERS {
        for layout in [TWO, FOUR] {
            let at = nodes.place(uid, "w");
            same(&nodes, &at, layout, "all", 2400, &ALL);
            same(&nodes, &at, TWO, "relay", 1000, &[""]);
            fs::remove_dir_all(&at.here).unwrap();
        }
        let mut kills = 0;
        while kills < 25 {
            kills += killed_workers(&nodes, uid, 1000);
        }
        (0..5).for_each(|_| killed_host(&nodes, uid));
        println!("as {uid}: {kills} workers and 5 hosts were killed");
    }
}
