//! A program of many libraries over hosts: what reaches the shared file system does not depend on how many hosts and ranks there are,
//! and the output is that of the plain run. The long variant measures the whole program over 1, 4 and 8 hosts beside a plain run.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cluster::generate::libraries::Libraries;
use cluster::{Cluster, Ops, Spec};
use common::{Done, Run};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

/// Hosts that share a directory with the binary and the generated program; fresh, so that no host has anything cached. Tests that run at
/// the same time differ in having a limit of the links, or not. However slow the machine is, nobody asks again for what he was told.
fn up(backing: &Path, hosts: usize, rate: Option<&str>) -> Cluster {
    let spec = Spec {
        hosts,
        trust: Duration::from_secs(60),
        rate: rate.map(Into::into),
        backing: Some(backing.to_owned()),
        ..Spec::of(if rate.is_some() { "t-load-slow" } else { "t-load" })
    };
    Cluster::up(spec).unwrap()
}

/// A shared directory with a program on `count` libraries; `None` without the means.
fn shared(count: usize, megabytes: usize) -> Option<tempfile::TempDir> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = Libraries { count, megabytes, at: Some("/shared/program".into()), ..Libraries::default() };
    program.generate(&backing.path().join("program")).unwrap();
    Some(backing)
}

/// Runs the program on every host, from the first; the time of the last rank's main since the start is in its standard error.
fn run(cluster: &Cluster, uid: u32, flags: &str) -> Done {
    let hosts = cluster.hosts().join(",");
    // Not from the shared file system, where it would be counted.
    let binary = env!("CARGO_BIN_EXE_hpcrt");
    let agent = cluster.agent_command();
    let mut words = vec![binary, "exec", "-q", "--fresh", "3600", "--hosts", &hosts, "--agent", &agent];
    words.extend(flags.split_whitespace());
    words.extend(["--", "/shared/program/driver"]);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let mut command = cluster.command("hpc1", uid, &words);
    command.env("GEN_T0", now.to_string());
    Run::new(command).within(Duration::from_secs(120)).end().code(0)
}

/// Seconds from the start until every rank was in main.
fn startup(err: &str) -> f64 {
    let times = err.lines().filter_map(|line| line.strip_prefix("main_at ")?.rsplit_once(' ')?.1.parse::<f64>().ok());
    times.fold(0.0, f64::max)
}

fn plain(cluster: &Cluster) -> Vec<u8> {
    let done = cluster.exec("hpc1", 0, &["/shared/program/driver"]).unwrap();
    assert!(done.status.success());
    done.stdout
}

#[test]
fn operations_do_not_depend_on_hosts_and_ranks() {
    let Some(backing) = shared(60, 30) else { return };
    let mut before: Option<u64> = None;
    for (hosts, flags) in [(1, ""), (3, "--ppn 4"), (3, "--ppn 2 --compress always")] {
        for uid in [0, 20001] {
            let cluster = up(backing.path(), hosts, None);
            cluster.reset_ops().unwrap();
            let done = run(&cluster, uid, flags);
            let ops = cluster.ops().unwrap().total();
            let one = plain(&cluster);
            for line in done.lines() {
                assert_eq!(format!("{line}\n").as_bytes(), one);
            }
            // Beside what the program is made of, each host looks up a handful of names on the way to it.
            let first = *before.get_or_insert(ops);
            assert!(ops.abs_diff(first) <= first / 50 + 4 * hosts as u64, "{ops} operations, {first} on one host");
        }
    }
}

/// The choice made from the speed of the links, of which the one from the front end is within its host.
#[test]
fn slow_links_get_compressed_content() {
    let Some(backing) = shared(40, 60) else { return };
    // Links without a limit take processor time here, of which others may leave little: within a host there is none.
    let share = |hosts| {
        let Figures { wire, ops, .. } = measure(backing.path(), hosts, "100mbit", "--compress auto");
        wire / ops.read_bytes as f64
    };
    // On a busy machine the link may be known too late for a program of 60 MB, but not always.
    let shares: Vec<f64> = (0..3).map(|_| share(2)).collect();
    assert!(shares.iter().any(|share| (0.2..=0.9).contains(share)), "{shares:?} of what was read was sent to each");
    assert_eq!(share(1), 1.0);
}

/// What a job over hosts took.
struct Figures {
    /// Seconds from the start until every rank was in main.
    last: f64,
    /// Seconds of processor time of the front end, the agents and the ranks.
    processor: f64,
    /// Bytes of content that reached each node on average.
    wire: f64,
    ops: Ops,
}

fn measure(backing: &Path, hosts: usize, rate: &str, flags: &str) -> Figures {
    let cluster = up(backing, hosts, Some(rate));
    cluster.reset_ops().unwrap();
    let stats = Path::new(env!("CARGO_TARGET_TMPDIR")).join("loading.json");
    let used = || {
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap();
        let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
        seconds(usage.user_time()) + seconds(usage.system_time())
    };
    let before = used();
    let done = run(&cluster, 0, &format!("{flags} --stats {}", stats.display()));
    let processor = used() - before;
    let stats: serde_json::Value = serde_json::from_slice(&fs::read(&stats).unwrap()).unwrap();
    let wire = stats["bytes"]["sent"].as_u64().unwrap() as f64 / hosts as f64;
    Figures { last: startup(&done.err), processor, wire, ops: cluster.ops().unwrap() }
}

/// Figures for the whole program; `cargo xtask proofs loading`.
#[test]
#[ignore = "long: five minutes, 257 MB generated"]
fn five_hundred_libraries() {
    let Some(backing) = shared(495, 259) else { return };
    let cores = std::thread::available_parallelism().unwrap().get() as f64;
    println!(
        "hosts ppn    rate compress last in main  link time  limit  processor  wire  look-ups opens reads all  (limit: seconds)"
    );
    let mut first = None;
    for (rate, bandwidth) in [("1gbit", 125e6), ("100mbit", 12.5e6)] {
        for (hosts, ranks, compress) in [
            (1, 1, "never"),
            (1, 4, "never"),
            (4, 1, "never"),
            (8, 1, "never"),
            (8, 4, "never"),
            (8, 1, "auto"),
            (8, 1, "always"),
        ] {
            let Figures { last, processor, wire, ops } =
                measure(backing.path(), hosts, rate, &format!("--ppn {ranks} --compress {compress}"));
            let link = if hosts == 1 { 0.0 } else { wire / bandwidth };
            let limit = if compress == "never" { 1.3 * link + 0.5 } else { 1.3 * link.max(processor / cores) + 0.5 };
            println!(
                "{hosts:5} {ranks:3} {rate:>7} {compress:>8} {last:10.2} s {link:8.2} s {limit:6.2} {processor:8.2} s  {:4.2} \
                 {:9} {:5} {:5} {:5}",
                wire / ops.read_bytes as f64,
                ops.lookup + ops.absent + ops.getattr,
                ops.open,
                ops.read,
                ops.total(),
            );
            assert!(ops.read_bytes < 258_000_000, "each byte is read once");
            assert!(ops.total() <= 3_100, "{ops:?}");
            let one: u64 = *first.get_or_insert(ops.total());
            assert!(ops.total().abs_diff(one) <= one / 50, "{ops:?}, {one} on one host");
        }
    }
    plainly(backing.path());
}

/// The same on eight hosts without hpcrt.
fn plainly(backing: &Path) {
    let cluster = up(backing, 8, Some("1gbit"));
    cluster.reset_ops().unwrap();
    let agent = cluster.agent_command();
    let start = SystemTime::now();
    let mut all: Vec<_> = cluster
        .hosts()
        .iter()
        .map(|host| {
            let mut words = agent.replace("{host}", host);
            words.push_str(" /shared/program/driver");
            Command::new("sh").arg("-c").arg(words).stdout(std::process::Stdio::null()).spawn().unwrap()
        })
        .collect();
    all.iter_mut().for_each(|child| assert!(child.wait().unwrap().success()));
    let took = start.elapsed().unwrap().as_secs_f64();
    println!("plain on 8 hosts: {took:.2} s to the end, {} operations", cluster.ops().unwrap().total());
}
