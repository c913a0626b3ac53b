//! Servers on other hosts, which are namespaces: a network that ends, loses everything, or is slow. Needs root; says so and passes otherwise.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::common::{Run, Running, marked, network, until};
use super::{place, right};

/// Uid of the ordinary user on the hosts.
const USER: u32 = 20001;
/// Two servers that lend to the first host.
const DONORS: [&str; 2] = ["hpc2", "hpc3"];

/// A shared directory with hpcrt and the program.
pub(super) fn backing() -> Option<tempfile::TempDir> {
    let (place, backing) = (place()?, tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::copy(place.join("memory"), backing.path().join("memory")).unwrap();
    let stripped = Command::new("strip").arg("-o").arg(backing.path().join("hpcrt")).arg(place.join("hpcrt")).status();
    assert!(stripped.unwrap().success());
    Some(backing)
}

fn up(name: &str, rate: Option<&str>) -> Option<(Cluster, tempfile::TempDir)> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    let backing = backing()?;
    let spec = Spec { hosts: 3, rate: rate.map(str::to_owned), backing: Some(backing.path().into()), ..Spec::of(name) };
    Some((Cluster::up(spec).unwrap(), backing))
}

/// A program on the first host that has 90 MB, of which it keeps 20.
fn run(cluster: &Cluster, uid: u32, flags: &str, mode: &str) -> Run {
    let agent = cluster.agent_command();
    let mut words = vec!["/shared/hpcrt", "exec", "-q", "--hosts", "hpc1", "--agent", &agent];
    words.extend(["--memory", "hpc[2-3]:300M", "--local-mb", "20"]);
    words.extend(flags.split_whitespace());
    let run = Run::new(cluster.command("hpc1", uid, &words)).within(Duration::from_secs(100));
    run.cwd("/").program(&["/shared/memory", mode, "90"])
}

/// Runs `ip` or `tc` in a host's network.
pub(super) fn change(cluster: &Cluster, host: usize, command: &str) {
    let (tool, words) = command.split_once(' ').unwrap();
    let work = || Command::new(tool).args(words.split(' ')).status().unwrap().success();
    assert!(network::in_network(cluster, host, work), "{command}");
}

/// Bytes that a host (from 0) received so far.
fn received(cluster: &Cluster, host: usize) -> u64 {
    let read = || fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let table = network::in_network(cluster, host, read);
    let line = table.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Both servers have a good part of the program's memory.
fn borrowing(cluster: &Cluster, run: Run) -> Running {
    let before = [1, 2].map(|host| received(cluster, host));
    let running = run.start();
    until(|| {
        [1, 2].iter().zip(before).all(|(host, before)| received(cluster, *host) > before + (20 << 20)).then_some(())
    });
    running
}

/// Processes of the program.
fn programs(mark: &str) -> Vec<Pid> {
    let name = |pid: &Pid| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    marked(mark).into_iter().filter(|pid| name(pid).trim() == "memory").collect()
}

/// How a host's packets are lost, and how that ends.
const CUTS: [(&str, &str); 2] = [
    ("ip link set eth0 down", "ip link set eth0 up"),
    ("ip route add blackhole 10.77.0.1", "ip route del blackhole 10.77.0.1"),
];

/// Without copies the program has ended within about as long as a silent server is waited for; the front end then waits for a host that it cannot reach.
fn end_by(cluster: &Cluster, (cut, heal): (&str, &str)) {
    let running = borrowing(cluster, run(cluster, USER, "", "laps"));
    let since = Instant::now();
    change(cluster, 1, cut);
    until(|| programs(&running.mark).is_empty().then_some(()));
    let took = since.elapsed();
    let done = running.end();
    change(cluster, 1, heal);
    println!("{cut}: {took:?}, {:?}: {}", since.elapsed(), done.err.trim_end());
    assert!(took < Duration::from_secs(5), "{took:?}");
    done.code(125).says(DONORS[0]).says("of the program's memory");
}

/// With copies it goes on, for so long and then until it has fetched more.
fn survive(cluster: &Cluster, (cut, heal): (&str, &str), lasts: Duration) {
    let running = borrowing(cluster, run(cluster, USER, "--mirror", "laps"));
    change(cluster, 1, cut);
    std::thread::sleep(lasts);
    let before = received(cluster, 0);
    until(|| (received(cluster, 0) > before + (20 << 20)).then_some(()));
    running.signal(Signal::SIGTERM);
    let done = running.end();
    change(cluster, 1, heal);
    println!("{cut}, copies: {:?}: {}", done.took, done.err.trim_end());
    assert!(!done.err.contains("wrong"), "{}", done.err);
    done.says(DONORS[0]).says("goes on with the copy");
}

/// A server is so slow for so long.
fn wait_for(cluster: &Cluster, flags: &str, lasts: Duration) {
    let running = borrowing(cluster, run(cluster, USER, flags, "triad"));
    change(cluster, 1, "tc qdisc replace dev eth0 root tbf rate 4mbit burst 32kb latency 20ms");
    std::thread::sleep(lasts);
    change(cluster, 1, "tc qdisc replace dev eth0 root tbf rate 1gbit burst 256kb latency 20ms");
    let done = running.end();
    println!("slow {flags}: {:?}", done.took);
    assert_eq!(done.err, "");
    right(done, 20);
}

/// The program is stopped for so long, in the middle of what comes to it, and goes on.
fn stop(cluster: &Cluster, lasts: Duration) {
    let running = borrowing(cluster, run(cluster, USER, "", "triad"));
    let program = programs(&running.mark)[0];
    nix::sys::signal::kill(program, Signal::SIGSTOP).unwrap();
    std::thread::sleep(lasts);
    nix::sys::signal::kill(program, Signal::SIGCONT).unwrap();
    let done = running.end();
    println!("stopped: {:?}", done.took);
    assert_eq!(done.err, "");
    right(done, 20);
}

/// Longer than a silent server is waited for.
const SILENT: Duration = Duration::from_secs(5);

#[test]
fn a_cut_network_ends_the_program_or_is_survived() {
    let Some((cluster, _backing)) = up("t-memory-cut", None) else { return };
    end_by(&cluster, CUTS[0]);
    survive(&cluster, CUTS[1], SILENT);
}

#[test]
fn a_slow_server_is_waited_for() {
    let Some((cluster, _backing)) = up("t-memory-slow", Some("1gbit")) else { return };
    wait_for(&cluster, "", SILENT);
}

#[test]
#[ignore = "three minutes"]
fn networks_that_fail() {
    // Also longer than agents wait for each other, and than servers for a host that is gone.
    const LONG: Duration = Duration::from_secs(27);
    let Some((cluster, _backing)) = up("t-memory-net", Some("1gbit")) else { return };
    for cut in CUTS {
        end_by(&cluster, cut);
        survive(&cluster, cut, SILENT);
        survive(&cluster, cut, LONG);
    }
    wait_for(&cluster, "", LONG);
    wait_for(&cluster, "--mirror", LONG);
    stop(&cluster, LONG);
}
