//! `--pull`: what is loaded late goes to the hosts that ask, and to those on the way, and is read once however often and late that is.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use cluster::{Cluster, Spec};
use common::{Done, Run};

/// Bytes of a library here, a little less.
const LIBRARY: u64 = 20_000_000;

/// Four hosts with the program and three libraries of [`LIBRARY`] bytes; `None` without the means.
fn up(name: &str) -> Option<(Cluster, tempfile::TempDir, Vec<String>)> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("{obstacle}");
        return None;
    }
    let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let place = backing.path().join("app");
    fs::create_dir(&place).unwrap();
    let cc = |words: &str| {
        let words = words.split_whitespace();
        assert!(Command::new("cc").args(words).current_dir(&place).status().unwrap().success());
    };
    cc(&format!("-o steps {}/tests/programs/steps.c -ldl", env!("CARGO_MANIFEST_DIR")));
    // A quarter can be compressed.
    let mut pad = vec![0; usize::try_from(LIBRARY).unwrap()];
    File::open("/dev/urandom").unwrap().read_exact(&mut pad[..15_000_000]).unwrap();
    fs::write(place.join("pad"), pad).unwrap();
    fs::write(place.join("big.c"), "__asm__(\".section .rodata\\n.incbin \\\"pad\\\"\\n\");\n").unwrap();
    let names = ["libx.so", "liby.so", "libz.so"];
    names.iter().for_each(|name| cc(&format!("-shared -o {name} big.c")));
    fs::remove_file(place.join("pad")).unwrap();
    let found = names.iter().map(|name| format!("+/shared/app/{name}")).collect();
    let spec = Spec { name: format!("t-pull-{name}"), backing: Some(backing.path().into()), ..Spec::default() };
    Some((Cluster::up(spec).unwrap(), backing, found))
}

/// Runs the program with a rank on each host; the bytes that each host received, and the statistics.
fn run(cluster: &Cluster, uid: u32, flags: &str, steps: &[String]) -> (Done, Vec<u64>, serde_json::Value) {
    let (hosts, agent) = (cluster.hosts(), cluster.agent_command());
    let cache = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(cache.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let (list, stats) = (hosts.join(","), cache.path().join("stats.json"));
    let mut words = vec![env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q", "--label", "--hosts", &list, "--agent", &agent];
    words.extend(flags.split_whitespace());
    words.extend(["--stats", stats.to_str().unwrap(), "--", "/shared/app/steps"]);
    words.extend(steps.iter().map(String::as_str));
    let received = |host: &String| {
        let read = cluster.exec(host, 0, &["cat", "/proc/net/dev"]).unwrap().stdout;
        let read = String::from_utf8(read).unwrap();
        let (_, counts) = read.split_once("eth0:").unwrap();
        counts.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    let before: Vec<u64> = hosts.iter().map(received).collect();
    cluster.reset_ops().unwrap();
    let command = cluster.command("hpc1", uid, &words);
    let done = Run::new(command).within(Duration::from_secs(60)).end().code(0);
    let bytes = hosts.iter().zip(before).map(|(host, before)| received(host) - before).collect();
    (done, bytes, serde_json::from_slice(&fs::read(&stats).unwrap()).unwrap())
}

fn none() -> String {
    "~1500".to_owned()
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
