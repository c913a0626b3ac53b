//! Long tests and benchmarks by name: what is claimed about large jobs and times is shown by running these.

use std::process::Stdio;

use anyhow::{Result, ensure};

use crate::run::{cargo, run};

struct Proof {
    name: &'static str,
    what: &'static str,
    how: How,
    /// GiB of free memory.
    memory: u64,
    root: bool,
}

enum How {
    /// An `#[ignore]`d test: arguments of cargo that choose the test binary, and the test's full name.
    Test(&'static [&'static str], &'static str),
    /// A benchmark in `benches/`.
    Bench(&'static str),
}

const PROOFS: &[Proof] = &[
    Proof {
        name: "simulator",
        what: "the log reaches 100,000 simulated nodes",
        how: How::Test(&["--lib"], "net::sim::replica::tests::a_hundred_thousand_nodes"),
        memory: 3,
        root: false,
    },
    Proof {
        name: "closure",
        what: "the closure of every program of this machine, compared with its dynamic linker",
        how: How::Test(&["--test", "closure"], "every_program"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "loading",
        what: "500 libraries over 1, 4 and 8 hosts: time until all are in main, operations at the shared file system",
        how: How::Test(&["--test", "loading"], "five_hundred_libraries"),
        memory: 8,
        root: true,
    },
    Proof {
        name: "late",
        what: "300 libraries opened late, in an order that differs by rank: operations at the shared file system, and none asked for twice",
        how: How::Test(&["--test", "late"], "three_hundred_libraries_opened_late"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "faults",
        what: "a thousand processes killed or stopped and links cut while a program is started on 8 hosts, loaded and run",
        how: How::Test(&["--test", "loading_faults"], "a_thousand_hit_at_any_moment"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "launch",
        what: "1, 64 and 1,024 local processes beside a bare fork and exec loop and hydra; times of the launch logic",
        how: How::Bench("launch"),
        memory: 1,
        root: false,
    },
];

/// Runs one proof or all of them; what is skipped is named with the reason at the end.
pub(crate) fn proofs(which: Option<&str>) -> Result<()> {
    if which == Some("list") {
        PROOFS.iter().for_each(|proof| println!("{:<12} {}", proof.name, proof.what));
        return Ok(());
    }
    let chosen: Vec<_> = PROOFS.iter().filter(|proof| which.is_none_or(|name| name == proof.name)).collect();
    ensure!(!chosen.is_empty(), "there is no such proof; `cargo xtask proofs list` names them");
    let (mut skipped, mut failed) = (Vec::new(), Vec::new());
    for proof in &chosen {
        if let Some(reason) = obstacle(proof) {
            skipped.push(format!("{}: {reason}", proof.name));
            continue;
        }
        eprintln!("xtask: {}: {}", proof.name, proof.what);
        let done = match proof.how {
            How::Test(binary, test) => long_test(binary, test),
            How::Bench(bench) => run(&mut cargo(&["bench", "--package", "hpcrt", "--bench", bench])),
        };
        if let Err(error) = done {
            failed.push(format!("{}: {error:#}", proof.name));
        }
    }
    skipped.iter().for_each(|line| eprintln!("xtask: SKIPPED {line}"));
    failed.iter().for_each(|line| eprintln!("xtask: FAILED {line}"));
    let passed = chosen.len() - skipped.len() - failed.len();
    eprintln!("xtask: {passed} proofs passed, {} failed, {} skipped", failed.len(), skipped.len());
    ensure!(failed.is_empty(), "a proof failed");
    Ok(())
}

fn long_test(binary: &[&str], test: &str) -> Result<()> {
    let cargo = || {
        let mut cargo = cargo(&["test", "--release", "--package", "hpcrt"]);
        cargo.args(binary).args(["--", "--ignored", "--exact", test]);
        cargo
    };
    // A name that matches nothing would pass.
    let list = cargo().arg("--list").stderr(Stdio::inherit()).output()?;
    let line = format!("{test}: test");
    ensure!(String::from_utf8_lossy(&list.stdout).lines().any(|l| l == line), "there is no test {test}");
    run(cargo().arg("--nocapture"))
}

fn obstacle(proof: &Proof) -> Option<String> {
    if proof.root && !rustix::process::geteuid().is_root() {
        return Some("needs root".to_owned());
    }
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let free: u64 = free.and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or(u64::MAX);
    (free >> 20 < proof.memory).then(|| format!("needs {} GiB of free memory", proof.memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_benchmark_exists() {
        for (nth, proof) in PROOFS.iter().enumerate() {
            assert!(PROOFS[..nth].iter().all(|other| other.name != proof.name), "{}", proof.name);
            if let How::Bench(bench) = proof.how {
                let file = format!("{}/../benches/{bench}.rs", env!("CARGO_MANIFEST_DIR"));
                assert!(std::path::Path::new(&file).exists(), "{file}");
            }
        }
    }
}
