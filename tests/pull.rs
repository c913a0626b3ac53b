//! `--pull`: what is loaded late goes to the hosts that ask, and to those on the way, and is read once however often and late that is.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, SystemTime};

use cluster::{Cluster, Spec};
use common::{Done, Role, Run, openers, role, until};
use nix::sys::signal::{Signal, kill};

/// Bytes of a library here, a little less.
const LIBRARY: u64 = 20_000_000;
const NAMES: [&str; 3] = ["libx.so", "liby.so", "libz.so"];

/// Four hosts with the program and three libraries of [`LIBRARY`] bytes; `None` without the means.
fn up(name: &str) -> Option<(Cluster, tempfile::TempDir, Vec<String>)> {
    up_at(name, None)
}

fn up_at(name: &str, rate: Option<&str>) -> Option<(Cluster, tempfile::TempDir, Vec<String>)> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    // A quarter can be compressed.
    let mut pad = vec![0; usize::try_from(LIBRARY).unwrap()];
    File::open("/dev/urandom").unwrap().read_exact(&mut pad[..15_000_000]).unwrap();
    let backing = openers(&pad, &NAMES);
    let found = NAMES.iter().map(|name| format!("+/shared/app/{name}")).collect();
    let spec = Spec {
        rate: rate.map(Into::into),
        backing: Some(backing.path().into()),
        ..Spec::of(&format!("t-pull-{name}"))
    };
    Some((Cluster::up(spec).unwrap(), backing, found))
}

/// Bytes that a host (from 0) received so far.
fn received(cluster: &Cluster, host: usize) -> u64 {
    let table = fs::read_to_string(format!("/proc/{}/net/dev", cluster.state().hosts[host].pid)).unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Runs the program with a rank on each host; the bytes that each host received, and the statistics.
fn run(cluster: &Cluster, uid: u32, flags: &str, steps: &[String]) -> (Done, Vec<u64>, serde_json::Value) {
    // So that no host has anything of them cached.
    for library in NAMES {
        let opened = File::options().write(true).open(cluster.backing().join("app").join(library));
        opened.unwrap().set_modified(SystemTime::now()).unwrap();
    }
    let (hosts, agent) = (cluster.hosts(), cluster.agent_command());
    let cache = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(cache.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (list, stats) = (hosts.join(","), cache.path().join("stats.json"));
    let mut words = vec![env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q", "--label", "--hosts", &list, "--agent", &agent];
    words.extend(flags.split_whitespace());
    words.extend(["--stats", stats.to_str().unwrap(), "--", "/shared/app/steps"]);
    words.extend(steps.iter().map(String::as_str));
    let received = || (0..hosts.len()).map(|host| received(cluster, host));
    let before: Vec<u64> = received().collect();
    cluster.reset_ops().unwrap();
    let command = cluster.command("hpc1", uid, &words);
    let done = Run::new(command).within(Duration::from_secs(60)).end().code(0);
    let bytes = received().zip(before).map(|(now, before)| now - before).collect();
    (done, bytes, serde_json::from_slice(&fs::read(&stats).unwrap()).unwrap())
}

fn none() -> String {
    "~1000".to_owned()
}

#[test]
fn who_does_not_ask_does_not_get_it() {
    let Some((cluster, _backing, libraries)) = up("who") else { return };
    let third = [none(), none(), libraries[0].clone(), none()];
    // In a chain the second is on the third's way.
    for (uid, flags, get) in [
        (0, "", [false, true, true, true]),
        (0, "--pull", [false, false, true, false]),
        (20001, "--pull", [false, false, true, false]),
        (0, "--pull --fan-out 1", [false, true, true, false]),
        (0, "--pull --view audit", [false, false, true, false]),
        (0, "--pull --compress always", [false, false, true, false]),
    ] {
        let (done, bytes, stats) = run(&cluster, uid, flags, &third);
        assert!(done.text().contains("opened 1"), "{}", done.text());
        let ops = cluster.ops().unwrap();
        eprintln!("{flags} as {uid}: received {bytes:?}, {} operations; {}", ops.total(), stats["bytes"]);
        // The front end's host has its copy through memory.
        for (host, get) in (1..).zip(get).skip(1) {
            let much = bytes[host - 1] > LIBRARY / 4;
            assert_eq!(much, get, "hpc{host} received {} with {flags:?}", bytes[host - 1]);
        }
        assert!(ops.read_bytes < LIBRARY * 11 / 10, "{ops:?}");
        let pulled = stats["bytes"]["pulled"].as_u64().unwrap();
        assert_eq!(pulled > 0, flags.contains("pull"), "{stats:#}");
    }
}

#[test]
fn read_once_however_late_and_before_it_is_asked_for() {
    let Some((cluster, _backing, libraries)) = up("once") else { return };
    let [x, y, z] = <[String; 3]>::try_from(libraries).unwrap();
    // The third comes when the file server's answers are out of date, and finds that the first went on from x to y.
    let steps = [format!("{x},~200,{y}"), none(), format!("~5500,#,{x},~1500,#,{y},{z}"), none()];
    let (done, bytes, stats) = run(&cluster, 20001, "--pull", &steps);
    let ops = cluster.ops().unwrap();
    eprintln!("received {bytes:?}, {} operations; {}", ops.total(), stats["bytes"]);
    assert!(ops.read_bytes < LIBRARY * 31 / 10, "{ops:?}");
    assert!(bytes[1] < LIBRARY / 4 && bytes[3] < LIBRARY / 4 && bytes[2] > 3 * LIBRARY, "{bytes:?}");
    let lines = done.lines();
    let rank: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("[2] ")).collect();
    let counts: Vec<u64> = rank.iter().filter_map(|line| line.parse().ok()).collect();
    assert!(counts[1] - counts[0] > 2 * LIBRARY, "y is there before it is asked for: {rank:?}");
    assert!(rank.iter().any(|line| line.contains("opened 3")), "{rank:?}");
}

/// Who asks dies, or who is on the way of those who ask; the others get what they asked for, and what was lost is named.
#[test]
fn agents_killed_while_pieces_come() {
    let Some((cluster, _backing, libraries)) = up_at("kill", Some("200mbit")) else { return };
    // In a chain, everybody behind the second is lost with it.
    for (flags, killed, whole) in [("", 2, 3), ("--fan-out 1", 1, 1), ("--fan-out 1", 3, 3)] {
        let (list, agent) = (cluster.hosts().join(","), cluster.agent_command());
        let mut words = vec![env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q", "--pull", "--keep-going", "--hosts", &list];
        words.extend(["--agent", &agent]);
        words.extend(flags.split_whitespace());
        words.extend(["--", "/shared/app/steps", &libraries[0]]);
        let before = received(&cluster, 1);
        let run = Run::new(cluster.command("hpc1", 0, &words)).within(Duration::from_secs(60)).start();
        until(|| (received(&cluster, 1) > before + LIBRARY / 4).then_some(()));
        let net = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let there = net(cluster.state().hosts[killed].pid);
        let agent = role(&run.mark, Role::Agent).into_iter().find(|pid| net(pid.as_raw()) == there);
        kill(agent.unwrap(), Signal::SIGKILL).unwrap();
        let done = run.end();
        eprintln!("{flags} hpc{}: {:?} {}", killed + 1, done.took, done.err.trim());
        assert_eq!(done.lines(), vec!["opened 1"; whole], "{flags} {killed}: {}", done.err);
        assert!(
            done.took < Duration::from_secs(20) && done.err.contains(&format!("hpc{}", killed + 1)),
            "{}",
            done.err
        );
        assert!(cluster.leftovers().unwrap().is_empty());
    }
}
