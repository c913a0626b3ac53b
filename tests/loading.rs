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
use cluster::{Cluster, Spec};
use common::{Done, Run};

/// Hosts that share a directory with the binary and the generated program; fresh, so that no host has anything cached.
fn up(backing: &Path, hosts: usize, rate: Option<&str>) -> Cluster {
    let spec = Spec {
        hosts,
        rate: rate.map(Into::into),
        backing: Some(backing.to_owned()),
        ..Spec::of(&format!("t-load-{hosts}"))
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
    let mut words = vec![binary, "exec", "-q", "--hosts", &hosts, "--agent", &agent];
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

/// Figures for the whole program; `cargo xtask proofs loading`.
#[test]
#[ignore = "long: five minutes, 257 MB generated"]
fn five_hundred_libraries() {
    let Some(backing) = shared(495, 259) else { return };
    let megabytes = 257.1;
    println!("hosts ppn     rate compress  last in main  link time   operations   bytes read");
    for (rate, bandwidth) in [("1gbit", 118.0), ("100mbit", 11.8)] {
        for (hosts, flags) in [
            (1, "--compress never"),
            (4, "--compress never"),
            (8, "--compress never"),
            (8, "--compress auto"),
            (8, "--compress always"),
            (8, "--ppn 4 --compress never"),
        ] {
            let cluster = up(backing.path(), hosts, Some(rate));
            cluster.reset_ops().unwrap();
            let done = run(&cluster, 0, flags);
            let ops = cluster.ops().unwrap();
            let link = if hosts == 1 { 0.0 } else { megabytes / bandwidth };
            println!(
                "{hosts:5} {:>3} {rate:>8} {:>8} {:10.2} s {link:8.2} s {:12} {:12}",
                if flags.contains("ppn") { 4 } else { 1 },
                flags.rsplit(' ').next().unwrap_or_default(),
                startup(&done.err),
                ops.total(),
                ops.read_bytes,
            );
            assert!(ops.read_bytes < 258_000_000, "each byte is read once");
        }
    }
    let cluster = up(backing.path(), 8, Some("1gbit"));
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
