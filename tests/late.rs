//! A program that knows its libraries only when it runs: every rank opens the same ones by `dlopen`, each in its own order. What reaches
//! the shared file system does not depend on hosts and ranks, and a second run has everything before it asks.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cluster::generate::libraries::Libraries;
use cluster::{Cluster, Spec};
use common::{Done, Run};

/// Opens the libraries that a file names, from one that the rank chooses, and counts them.
const LATE_C: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv) {
    const char *rank = getenv("HPCRT_RANK");
    static char paths[1000][256];
    int count = 0, opened = 0, first = rank ? atoi(rank) * 37 : 0;
    FILE *list = fopen(argv[1], "r");
    while (count < 1000 && fgets(paths[count], 256, list)) strtok(paths[count++], "\n");
    for (int i = 0; i < count; i++) {
        const char *path = paths[(first + i) % count];
        if (dlopen(path, RTLD_NOW | RTLD_GLOBAL)) opened++;
        else fprintf(stderr, "%s\n", dlerror());
    }
    printf("%d\n", opened);
    return opened != count;
}
"#;

/// A shared directory with the program and `count` libraries; `None` without the means.
fn shared(count: usize) -> Option<tempfile::TempDir> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let place = backing.path().join("late");
    let libraries = Libraries { count, dirs: 4, megabytes: count / 4, at: Some("/shared/late".into()) };
    libraries.generate(&place).unwrap();
    let source = place.join("late.c");
    fs::write(&source, LATE_C).unwrap();
    assert!(Command::new("cc").arg("-o").arg(place.join("late")).arg(source).arg("-ldl").status().unwrap().success());
    Some(backing)
}

/// Paths of the libraries on the hosts.
fn libraries(place: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for directory in fs::read_dir(place.join("late")).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        for file in fs::read_dir(directory.path()).unwrap().flatten() {
            let path = file.path();
            let below = path.strip_prefix(place).unwrap().to_str().unwrap();
            if below.ends_with(".so") {
                found.push(format!("/shared/{below}"));
            }
        }
    }
    found.sort();
    found
}

/// Runs the program on every host; the statistics beside what it said.
fn run(cluster: &Cluster, uid: u32, flags: &str, list: &Path, cache: &Path) -> (Done, serde_json::Value) {
    let (hosts, agent, stats) = (cluster.hosts().join(","), cluster.agent_command(), cache.join("stats.json"));
    // A look for changes that others made would come where the machine is slow.
    let mut words = vec![env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q", "--fresh", "3600"];
    words.extend(["--hosts", &hosts, "--agent", &agent]);
    words.extend(flags.split_whitespace());
    words.extend(["--stats", stats.to_str().unwrap(), "--", "/shared/late/late", list.to_str().unwrap()]);
    let mut run = Run::new(cluster.command("hpc1", uid, &words)).within(Duration::from_secs(120));
    run = run.env("XDG_CACHE_HOME", cache);
    let done = run.end().code(0);
    let stats = serde_json::from_slice(&fs::read(&stats).unwrap()).unwrap();
    (done, stats)
}

fn late(count: usize, shapes: &[(usize, &str)]) {
    let Some(backing) = shared(count) else { return };
    let libraries = libraries(backing.path());
    assert_eq!(libraries.len(), count);
    // Not on the shared file system, where reading it would be counted.
    let list = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("late-{count}"));
    fs::write(&list, libraries.join("\n") + "\n").unwrap();
    let mut before: Option<u64> = None;
    for &(hosts, flags) in shapes {
        for uid in [0, 20001] {
            // However slow the machine is, nobody asks again for what he was told.
            let (backing, trust) = (Some(backing.path().into()), Duration::from_secs(60));
            let spec = Spec { hosts, backing, trust, ..Spec::of(&format!("t-late-{hosts}")) };
            let cluster = Cluster::up(spec).unwrap();
            // Where that user may write, on a disk that the hosts see.
            let cache = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            fs::set_permissions(cache.path(), fs::Permissions::from_mode(0o777)).unwrap();
            cluster.reset_ops().unwrap();
            let (done, stats) = run(&cluster, uid, flags, &list, cache.path());
            let (ops, misses) = (cluster.ops().unwrap().total(), stats["misses"].as_u64().unwrap());
            assert!(done.lines().iter().all(|line| *line == count.to_string()), "{}", done.text());
            assert!(misses > 0, "the first run cannot know");
            let first = *before.get_or_insert(ops);
            assert!(ops.abs_diff(first) <= first / 50 + 4 * hosts as u64, "{ops} operations, {first} on one host");

            let (done, stats) = run(&cluster, uid, flags, &list, cache.path());
            let again = stats["misses"].as_u64().unwrap();
            assert!(done.lines().iter().all(|line| *line == count.to_string()), "{}", done.text());
            eprintln!("{count} libraries, {hosts} hosts {flags}: {ops} operations, {misses} misses, then {again}");
            assert_eq!(again, 0, "{stats:#}");

            // What is left alone, every host reads for itself.
            let without =
                format!("{flags} --exclude nothing,{}", Path::new(&libraries[7]).file_name().unwrap().display());
            cluster.reset_ops().unwrap();
            let (done, _) = run(&cluster, uid, &without, &list, cache.path());
            assert!(done.lines().iter().all(|line| *line == count.to_string()), "{}", done.text());
            for host in cluster.host_ops().unwrap().iter().filter(|host| host.host != "hpc1") {
                assert!(host.ops.open >= 1, "{:?}", host.ops);
            }
        }
    }
}

#[test]
fn libraries_opened_late_and_known_the_next_time() {
    late(40, &[(1, ""), (3, "--ppn 4"), (3, "--ppn 4 --pull")]);
}

/// `cargo xtask proofs late`.
#[test]
#[ignore = "long: a minute"]
fn three_hundred_libraries_opened_late() {
    late(300, &[(1, ""), (4, "--ppn 1"), (4, "--ppn 4"), (4, "--ppn 4 --pull")]);
}
