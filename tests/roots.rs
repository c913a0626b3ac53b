//! `--roots`: several hosts read from the shared file system at the same time, every byte by one of them.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs::{self, File};
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster::spec::Service;
use cluster::{Cluster, Spec};
use common::{Done, Role, Run, openers, role, until};
use nix::sys::signal::{Signal, kill};

/// Libraries here, and bytes of each, a little less.
const COUNT: usize = 4;
const LIBRARY: usize = 16 << 20;

/// Four hosts whose own ways to the file server carry so many MB/s, and a program that opens [`COUNT`] libraries; `None` without the means.
fn up(name: &str, rate: f64) -> Option<(Cluster, tempfile::TempDir)> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    let mut pad = vec![0; LIBRARY];
    File::open("/dev/urandom").unwrap().read_exact(&mut pad).unwrap();
    let names: Vec<String> = (0..COUNT).map(|nth| format!("lib{nth}.so")).collect();
    let backing = openers(&pad, &names.iter().map(String::as_str).collect::<Vec<_>>());
    let service = Service { host_ns_per_byte: 1e3 / rate, ns_per_byte: 0.0, ..Spec::default().service };
    let spec = Spec { backing: Some(backing.path().into()), service, ..Spec::of(&format!("t-roots-{name}")) };
    Some((Cluster::up(spec).unwrap(), backing))
}

/// One rank on each host opens all libraries. The run, as it begins.
fn start(cluster: &Cluster, uid: u32, flags: &str) -> common::Running {
    // So that no host has anything of them cached.
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let (place, fresh) = (cluster.backing().join("app"), format!("run{}", RUNS.fetch_add(1, Ordering::Relaxed)));
    fs::create_dir(place.join(&fresh)).unwrap();
    for nth in 0..COUNT {
        fs::copy(place.join(format!("lib{nth}.so")), place.join(&fresh).join(format!("lib{nth}.so"))).unwrap();
    }
    let (hosts, agent) = (cluster.hosts().join(","), cluster.agent_command());
    let mut words = vec![env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q", "--compress", "never", "--hosts", &hosts];
    words.extend(["--agent", &agent]);
    words.extend(flags.split_whitespace());
    let steps: Vec<String> = (0..COUNT).map(|nth| format!("+/shared/app/{fresh}/lib{nth}.so")).collect();
    let steps = steps.join(",");
    words.extend(["--", "/shared/app/steps", &steps]);
    cluster.reset_ops().unwrap();
    Run::new(cluster.command("hpc1", uid, &words)).within(Duration::from_secs(90)).start()
}

/// Every rank has opened all; how many operations there were, and how many bytes each host read.
fn check(cluster: &Cluster, done: &Done, ranks: usize) -> (u64, Vec<u64>) {
    assert_eq!(done.lines(), vec![format!("opened {COUNT}"); ranks], "{}", done.err);
    let read = cluster.host_ops().unwrap().iter().map(|host| host.ops.read_bytes).collect();
    (cluster.ops().unwrap().total(), read)
}

#[test]
fn several_hosts_read_and_each_byte_is_read_once() {
    let Some((cluster, _backing)) = up("share", 40.0) else { return };
    let mut before = None;
    for (uid, flags) in [(0, ""), (0, "--roots 4"), (20001, "--roots 3"), (0, "--roots 4 --pull")] {
        let done = start(&cluster, uid, flags).end().code(0);
        let (operations, read) = check(&cluster, &done, 4);
        eprintln!("{flags:?} as {uid}: {:.2} s, {operations} operations, read {read:?}", done.took.as_secs_f64());
        let readers = read.iter().filter(|bytes| **bytes > LIBRARY as u64 / 4).count();
        let wanted = flags.split_whitespace().nth(1).map_or(1, |roots| roots.parse().unwrap());
        assert_eq!(readers, wanted, "{read:?}");
        assert!(read.iter().sum::<u64>() < (COUNT * LIBRARY) as u64 * 103 / 100, "{read:?}");
        // Besides, each host that reads a file opens it.
        let one = *before.get_or_insert(operations);
        let more = 4 * (COUNT * wanted) as u64;
        assert!(operations < one + one / 50 + more, "{operations} operations, {one} by one host");
    }
}

/// Hosts that have a bridge of containers, with the same address on each, are not one.
#[test]
fn hosts_that_share_an_address_of_their_bridges_read() {
    let Some((cluster, _backing)) = up("bridge", 40.0) else { return };
    let bridge = "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up";
    for host in cluster.hosts() {
        assert!(cluster.exec(&host, 0, &["sh", "-c", bridge]).unwrap().status.success());
    }
    let done = start(&cluster, 0, "--roots 4").end().code(0);
    let (_, read) = check(&cluster, &done, 4);
    assert!(read.iter().all(|bytes| *bytes > LIBRARY as u64 / 4), "{read:?} {}", done.err);
}

/// A host that reads is killed in the middle; the front end's reads what it did not.
#[test]
fn a_reader_that_dies_is_replaced() {
    let Some((cluster, _backing)) = up("dies", 40.0) else { return };
    let run = start(&cluster, 0, "--roots 4 --keep-going");
    let there = || cluster.host_ops().unwrap().iter().map(|host| host.ops.read_bytes).nth(2).unwrap();
    until(|| (there() > LIBRARY as u64 / 4).then_some(()));
    let net = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let third = net(cluster.state().hosts[2].pid);
    let agent = role(&run.mark, Role::Agent).into_iter().find(|pid| net(pid.as_raw()) == third);
    kill(agent.unwrap(), Signal::SIGKILL).unwrap();
    let done = run.end();
    let (operations, read) = check(&cluster, &done, 3);
    eprintln!("killed: {:.2} s, {operations} operations, read {read:?}", done.took.as_secs_f64());
    assert!(done.err.contains("hpc3") && done.took < Duration::from_secs(30), "{}", done.err);
    assert!(cluster.leftovers().unwrap().is_empty());
}

/// A host that does not see the file as the front end's host does is not believed.
#[test]
fn a_reader_that_sees_something_else_is_not_believed() {
    let Some((cluster, _backing)) = up("other", 40.0) else { return };
    let other = "mount -t tmpfs none /shared/app";
    assert!(cluster.exec("hpc2", 0, &["sh", "-c", other]).unwrap().status.success());
    let other = "for run in 0 1 2 3 4 5 6 7 8 9; do mkdir -p /tmp/other/run$run; \
                 for n in 0 1 2 3; do : >/tmp/other/run$run/lib$n.so; done; done; mount --bind /tmp/other /shared/app";
    assert!(cluster.exec("hpc3", 0, &["sh", "-c", other]).unwrap().status.success());
    let done = start(&cluster, 0, "--roots 3").end();
    let read = cluster.host_ops().unwrap();
    eprintln!("{:?} {} {read:?}", done.lines(), done.err);
    assert_eq!(done.lines().iter().filter(|line| **line == format!("opened {COUNT}")).count(), 4, "{}", done.err);
    assert!(read[1].ops.read_bytes + read[2].ops.read_bytes == 0);
}

/// Seconds from the first byte that is read of the shared file system to the last.
fn reading(cluster: &Cluster, flags: &str) -> f64 {
    let over = AtomicBool::new(false);
    cluster.reset_ops().unwrap();
    thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let (mut seen, mut first, mut last) = (0, None, Instant::now());
            while !over.load(Ordering::Relaxed) {
                let read = cluster.ops().unwrap().read_bytes;
                if read > seen {
                    (seen, last) = (read, Instant::now());
                    first.get_or_insert(last);
                }
                thread::sleep(Duration::from_millis(10));
            }
            last.duration_since(first.unwrap()).as_secs_f64()
        });
        let done = start(cluster, 0, flags).end();
        over.store(true, Ordering::Relaxed);
        let (_, read) = check(cluster, &done.code(0), 4);
        let (seconds, most) = (watch.join().unwrap(), *read.iter().max().unwrap() as f64 / 1e6);
        println!("{flags:>10}: {seconds:.2} s, {most:.1} MB read by one host at most");
        seconds
    })
}

/// `cargo xtask proofs roots`. The ways to the file server are so slow that all else hardly counts, and the runs that are compared
/// follow each other.
#[test]
#[ignore = "a benchmark: two minutes"]
fn four_readers_beside_one() {
    const RATE: f64 = 4.0;
    let Some((cluster, _backing)) = up("bench", RATE) else { return };
    let mut gains = Vec::new();
    for _ in 0..3 {
        let times = ["", "--roots 2", "--roots 4"].map(|flags| reading(&cluster, flags));
        gains.push([times[0] / times[1], times[0] / times[2]]);
    }
    let median = |which: usize| {
        let mut all: Vec<f64> = gains.iter().map(|gain| gain[which]).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let (two, four, bytes) = (median(0), median(1), (COUNT * LIBRARY) as f64 / 1e6);
    println!(
        "{bytes:.0} MB over ways of {RATE} MB/s to the file server: 2 and 4 hosts are {two:.2} and {four:.2} times as fast"
    );
    assert!(two > 1.6 && four > 2.6, "{gains:?}");
}
