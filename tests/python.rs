//! Python programs over hosts: what reaches the shared file system does not depend on how many hosts and ranks there are and is about
//! what one plain run does, and the output is that of the plain run.
//! Needs root, and packages from where pip finds them; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cluster::generate::modules::Modules;
use cluster::{Cluster, Spec};
use common::Run;

/// A shared directory that is kept, so that what is expensive to make is made once; `None` without the means.
fn shared() -> Option<PathBuf> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    let backing = Path::new(env!("CARGO_TARGET_TMPDIR")).join("py-programs");
    fs::create_dir_all(&backing).unwrap();
    Some(backing)
}

/// Fresh hosts, so that none has anything cached.
fn up(backing: &Path, hosts: usize) -> Cluster {
    // However slow the machine is, nobody asks again for what he was told.
    let (backing, trust) = (Some(backing.to_owned()), Duration::from_secs(60));
    let spec = Spec { hosts, backing, trust, trust_absent: trust, ..Spec::of(&format!("t-py-{hosts}")) };
    let cluster = Cluster::up(spec).unwrap();
    cluster.reset_ops().unwrap();
    cluster
}

/// Runs the program without hpcrt on one host, then with it on so many hosts with so many ranks each. Returns the operations of these.
fn costs_the_same<const N: usize>(
    backing: &Path,
    program: &[&str],
    code: i32,
    shapes: [(usize, usize); N],
) -> [u64; N] {
    let cluster = up(backing, 1);
    let plain = cluster.exec("hpc1", 0, program).unwrap();
    assert_eq!(plain.status.code(), Some(code), "{}", String::from_utf8_lossy(&plain.stderr));
    let without = cluster.ops().unwrap().total();
    drop(cluster);
    shapes.map(|(hosts, ranks)| {
        let cluster = up(backing, hosts);
        let (names, agent, per_host) = (cluster.hosts().join(","), cluster.agent_command(), ranks.to_string());
        // A look for changes that others made would come where the machine is slow.
        let mut words = vec![env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q", "--keep-going", "--fresh", "3600"];
        words.extend(["--hosts", &names, "--agent", &agent, "--ppn", &per_host, "--"]);
        words.extend(program);
        let done = Run::new(cluster.command("hpc1", 0, &words)).within(Duration::from_secs(180)).end().code(code);
        let operations = cluster.ops().unwrap().total();
        let expected = String::from_utf8(plain.stdout.repeat(hosts * ranks)).unwrap();
        assert_eq!(done.lines().join("\n"), expected.trim_end());
        println!("{program:?}: {operations} operations on {hosts} hosts with {ranks} ranks each, {without} of one without hpcrt");
        // Beside what the program is made of, each host looks up a handful of names on the way to it.
        assert!(operations <= without * 11 / 10 + 6 * (hosts as u64 - 1), "too many");
        operations
    })
}

/// Programs beside the environment: one on the standard library alone, one in a virtual environment with a package of its own, one whose
/// imports fail.
fn programs(backing: &Path) {
    let interpreter = fs::read_dir(backing.join("pyenv/lib")).unwrap().map(|entry| entry.unwrap().file_name());
    let version =
        interpreter.map(|name| name.into_string().unwrap()).find(|name| name.starts_with("python3.")).unwrap();
    let _ = fs::remove_dir_all(backing.join("own"));
    let packages = format!("own/venv/lib/{version}/site-packages/mine");
    for directory in ["own/venv/bin", &packages] {
        fs::create_dir_all(backing.join(directory)).unwrap();
    }
    symlink("/shared/pyenv/bin/python3", backing.join("own/venv/bin/python3")).unwrap();
    for (name, text) in [
        ("own/venv/pyvenv.cfg", "home = /shared/pyenv/bin\n"),
        (&format!("{packages}/__init__.py"), "from . import part\n"),
        (&format!("{packages}/part.py"), "import decimal\nVALUE = decimal.Decimal(1) / 7\n"),
        ("own/near.py", "import csv\n"),
        ("own/standard.py", "import argparse, asyncio, json, near, sqlite3, unittest\nprint(json.dumps([1]))\n"),
        ("own/packaged.py", "import json, mine, urllib.request\nprint(mine.part.VALUE)\n"),
        (
            "own/failing.py",
            "try:\n    import json.nothing\nexcept ImportError as e:\n    print(e)\nimport nothing.at_all\n",
        ),
    ] {
        fs::write(backing.join(name), text).unwrap();
    }
    // Else the plain run, the first, would.
    let mut compile = Command::new(backing.join("pyenv/bin/python3"));
    assert!(compile.args(["-I", "-m", "compileall", "-q"]).arg(backing.join("own")).status().unwrap().success());
}

#[test]
fn programs_cost_what_one_plain_run_does() {
    let Some(backing) = shared() else { return };
    if let Err(error) = cluster::generate::environment::generate(&backing.join("pyenv")) {
        return eprintln!("SKIPPED: no environment with numpy and scipy: {error:#}");
    }
    programs(&backing);
    let (base, shapes) = ("/shared/pyenv/bin/python3", [(1, 1), (4, 2)]);
    let [one, four] = costs_the_same(&backing, &[base, "/shared/pyenv/job.py"], 0, shapes);
    assert!(one.abs_diff(four) <= one / 50, "{one} operations on one host, {four} on four");
    // How many wrong guesses come to nothing at the end of a job is a matter of luck, and weighs more in small ones.
    costs_the_same(&backing, &[base, "/shared/own/standard.py"], 0, shapes);
    costs_the_same(&backing, &["/shared/own/venv/bin/python3", "/shared/own/packaged.py"], 0, shapes);
    costs_the_same(&backing, &[base, "/shared/own/failing.py"], 1, shapes);
}

/// Figures for extension modules and for an environment with numpy and scipy; `cargo xtask proofs python`.
#[test]
#[ignore = "long: three minutes, 155 MB generated"]
fn modules_and_an_environment() {
    let Some(backing) = shared() else { return };
    if let Err(error) = cluster::generate::environment::generate(&backing.join("pyenv")) {
        return eprintln!("SKIPPED: no environment with numpy and scipy: {error:#}");
    }
    Modules { count: 280, megabytes: 155 }.generate(&backing.join("modules")).unwrap();
    let base = "/shared/pyenv/bin/python3";
    for program in ["/shared/modules/driver.py", "/shared/pyenv/job.py"] {
        let shapes = [(1, 1), (1, 4), (4, 1), (4, 4), (8, 1), (8, 4)];
        let operations = costs_the_same(&backing, &[base, program], 0, shapes);
        let (least, most) = (operations.into_iter().min().unwrap(), operations.into_iter().max().unwrap());
        assert!(most - least <= least / 50, "{least} to {most} operations");
    }
}
