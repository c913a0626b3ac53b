//! Long tests and benchmarks by name: what is claimed about large jobs and times is shown by running these.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

use crate::run::{cargo, run_whole, succeeds};

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
    /// Every target in `fuzz/`, for [`FUZZ_SECONDS`].
    Fuzz,
}

/// For each target.
const FUZZ_SECONDS: u32 = 600;

const PROOFS: &[Proof] = &[
    Proof {
        name: "sim",
        what: "256 chunks reach 100,000 simulated nodes, also when one in a hundred of them dies in the middle",
        how: How::Test(&["--lib"], "net::sim::scale::a_hundred_thousand_nodes"),
        memory: 4,
        root: false,
    },
    Proof {
        name: "mirror",
        what: "one of two memory servers is killed at 100 random moments, with --mirror: the result is right",
        how: How::Test(&["--test", "memory"], "lending::a_hundred_losses_with_copies"),
        memory: 2,
        root: false,
    },
    Proof {
        name: "lost",
        what: "the same without --mirror: the error is clear, within 5 s",
        how: How::Test(&["--test", "memory"], "lending::a_hundred_losses_without_copies"),
        memory: 2,
        root: false,
    },
    Proof {
        name: "cuts",
        what: "memory servers on other hosts, whose network ends, loses everything or is slow, with --mirror and without",
        how: How::Test(&["--test", "memory"], "network::networks_that_fail"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "rate",
        what: "STREAM's triad with a tenth of its memory here, the rest behind a link of 1 Gbit/s: nine tenths of what the link carries",
        how: How::Test(&["--test", "memory"], "rates::a_link_is_used_to_nine_tenths"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "swap",
        what: "STREAM's triad with a tenth of its memory here, and an integer sort with a quarter, beside zram and a swap file, which are made for it: 3 times and twice as fast; random updates",
        how: How::Test(&["--test", "memory"], "rates::the_kernels_swap_is_slower"),
        memory: 3,
        root: true,
    },
    Proof {
        name: "seeds",
        what: "100,000 random broadcasts to at most 256 simulated nodes, with everything that can go wrong",
        how: How::Test(&["--lib"], "net::sim::replica::tests::a_hundred_thousand_seeds"),
        memory: 1,
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
        name: "session",
        what: "2,000 one-task launches into a session of 16 agents: median and p99, and nothing adds up",
        how: How::Test(&["--test", "session"], "two_thousand_launches"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "tree",
        what: "up to 256 hosts whose agents take 0.2 s of their starter's time each: flat, fixed fan-outs, greedy rule",
        how: How::Test(&["--test", "start_tree"], "up_to_two_hundred_and_fifty_six"),
        memory: 6,
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
        name: "python",
        what: "280 extension modules, and numpy with scipy, over 1, 4 and 8 hosts: operations at the shared file system",
        how: How::Test(&["--test", "python"], "modules_and_an_environment"),
        memory: 8,
        root: true,
    },
    Proof {
        name: "bytes",
        what: "processor time of a byte of a file, step by step: read, hash, compress, send, receive, decompress, store",
        how: How::Bench("bytes"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "files",
        what: "writes of 8 and 64 bytes and of 16 to 256 MiB with --async-io beside plain ones, and a program that reads, computes and writes, on a slow shared file system",
        how: How::Bench("files"),
        memory: 4,
        root: true,
    },
    Proof {
        name: "kills",
        what: "a thousand programs with --async-io killed at random moments: their files hold what they had written",
        how: How::Test(&["--test", "iofs"], "a_thousand_killed_programs"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "workers",
        what: "a hundred I/O workers killed at random moments: nothing is lost, and nothing appended twice",
        how: How::Test(&["--test", "iofs"], "a_hundred_killed_workers"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "operations",
        what: "a million random operations of one to six processes on one file with --async-io, beside what it should hold",
        how: How::Test(&["--test", "iofs"], "a_million_operations"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "nodes",
        what: "two and four hosts that write one file with --async-io, interleaved, appending, and as a solver its edges: as without, whoever is killed",
        how: How::Test(&["--test", "nodes"], "several_hosts_for_long"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "programs",
        what: "numpy, h5py, netCDF4, LAMMPS and IOR with --async-io, as far as they are installed: their files as without it",
        how: How::Test(&["--test", "iofs"], "scientific_programs_leave_the_same_files"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "costs",
        what: "tar, rsync, git, gcc, sqlite3, Python, numpy, h5py, netCDF4 and LAMMPS with --async-io on local file systems beside plainly: processor time and time",
        how: How::Bench("costs"),
        memory: 2,
        root: false,
    },
    Proof {
        name: "memory",
        what: "memory with a server on this host: faults beside a pager that does nothing else, STREAM's triad, random updates, a sort",
        how: How::Bench("memory"),
        memory: 5,
        root: false,
    },
    Proof {
        name: "memory-programs",
        what: "numpy, a map, sort, redis that saves by a fork, threads and forks, of a GiB each with a fifth here, as root and as an ordinary user",
        how: How::Test(&["--test", "memory"], "programs::programs_of_a_gibibyte"),
        memory: 8,
        root: false,
    },
    Proof {
        name: "static",
        what: "programs that are linked statically, at fixed addresses and others, with glibc and musl, in every tier, with half their memory here",
        how: How::Test(&["--test", "memory"], "alone::statically_linked_programs_of_every_kind"),
        memory: 2,
        root: false,
    },
    Proof {
        name: "nas",
        what: "NAS benchmarks in C, Himeno and STREAM, unmodified: times at 50 to 4 % local memory beside the DLM paper's; downloads them (HPCRT_NAS=DIR has them)",
        how: How::Bench("nas"),
        memory: 6,
        root: false,
    },
    Proof {
        name: "late",
        what: "300 libraries opened late, in an order that differs by rank: operations at the shared file system, and none asked for twice",
        how: How::Test(&["--test", "late"], "three_hundred_libraries_opened_late"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "roots",
        what: "libraries opened late over slow ways to the file server: the gain of 2 and 4 hosts that read, beside one",
        how: How::Test(&["--test", "roots"], "four_readers_beside_one"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "fallbacks",
        what: "programs of every kind on hosts without one ability or several, as three users: output, operations, what is said and left",
        how: How::Test(&["--test", "fallbacks"], "all_fallbacks_and_pairs_with_large_programs"),
        memory: 4,
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
        name: "growth",
        what: "a thousand jobs in one session: memory, descriptors, threads, mounts and stores stay as they are, agents below 24 MiB",
        how: How::Test(&["--test", "growth"], "a_thousand_jobs_in_a_session"),
        memory: 4,
        root: true,
    },
    Proof {
        name: "fuzz",
        what: "ten minutes for everything that reads bytes from outside; with coverage where cargo-fuzz and a nightly are installed",
        how: How::Fuzz,
        memory: 4,
        root: false,
    },
    Proof {
        name: "audit",
        what: "500 libraries without namespaces: time to main beside a plain start, operations of each process at the shared file system",
        how: How::Test(&["--test", "audit"], "warm_start"),
        memory: 4,
        root: true,
    },
    Proof {
        name: "glibc",
        what: "programs of glibc 2.31 and 2.41 without namespaces: staged libraries, and the cost of calls",
        how: How::Test(&["--test", "audit"], "other_versions_of_glibc"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "launches",
        what: "10,000 launches of /bin/true, one after the other",
        how: How::Test(&["--test", "launch"], "ten_thousand_in_a_row"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "ranks",
        what: "jobs of 10,000 local processes, on one host and on eight",
        how: How::Test(&["--test", "launch"], "ten_thousand_ranks"),
        memory: 8,
        root: false,
    },
    Proof {
        name: "jobs",
        what: "10,000 jobs in one session: what its processes hold before and after",
        how: How::Test(&["--test", "session"], "ten_thousand_jobs"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "launch",
        what: "1, 64 and 1,024 local processes beside a bare fork and exec loop and hydra; times of the launch logic",
        how: How::Bench("launch"),
        memory: 1,
        root: false,
    },
    Proof {
        name: "mpich",
        what: "Debian's MPICH, which hangs in MPI_Finalize over TCP elsewhere: 36 runs end, 1 and 4 ranks on each of 2 and 4 hosts, in every view",
        how: How::Test(&["--test", "mpi"], "mpich_ends"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "lammps",
        what: "LAMMPS as Debian has it: energies as without hpcrt, 1 and 4 ranks on each of 2 and 4 hosts",
        how: How::Test(&["--test", "mpi"], "lammps"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "hpcc",
        what: "HPC Challenge as Debian has it: its own checks, 1 and 4 ranks on each of 2 and 4 hosts",
        how: How::Test(&["--test", "mpi"], "hpcc"),
        memory: 2,
        root: true,
    },
    Proof {
        name: "collectives",
        what: "broadcast, barrier, scatter and gather of 64, 256 and 1,024 members beside a bare tree and a star of processes over TCP",
        how: How::Bench("collectives"),
        memory: 4,
        root: false,
    },
];

/// Runs one proof or all of them; what is skipped, be it a part of one, is named with the reason at the end.
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
            How::Bench(bench) => run_whole(&mut cargo(&["bench", "--package", "hpcrt", "--bench", bench])),
            How::Fuzz => fuzz(),
        };
        match done {
            // What leaves something out has not shown all that it claims.
            Ok(parts) if !parts.is_empty() => skipped.push(format!("{}: {}", proof.name, parts.join("; "))),
            Ok(_) => {}
            Err(error) => failed.push(format!("{}: {error:#}", proof.name)),
        }
    }
    skipped.iter().for_each(|line| eprintln!("xtask: SKIPPED {line}"));
    failed.iter().for_each(|line| eprintln!("xtask: FAILED {line}"));
    let passed = chosen.len() - skipped.len() - failed.len();
    eprintln!("xtask: {passed} proofs passed, {} failed, {} skipped", failed.len(), skipped.len());
    ensure!(failed.is_empty(), "a proof failed");
    ensure!(which.is_none() || skipped.is_empty(), "the proof was skipped");
    Ok(())
}

fn long_test(binary: &[&str], test: &str) -> Result<Vec<String>> {
    let cargo = || {
        let mut cargo = cargo(&["test", "--release", "--package", "hpcrt"]);
        cargo.args(binary).args(["--", "--ignored", "--exact", test]);
        cargo
    };
    // A name that matches nothing would pass.
    let list = cargo().arg("--list").stderr(Stdio::inherit()).output()?;
    let line = format!("{test}: test");
    ensure!(String::from_utf8_lossy(&list.stdout).lines().any(|l| l == line), "there is no test {test}");
    run_whole(cargo().arg("--nocapture"))
}

fn fuzz() -> Result<Vec<String>> {
    let mut nightly = Command::new("rustup");
    nightly.args(["run", "nightly", "cargo", "fuzz", "--version"]);
    let (guided, mut skipped) = (succeeds(&mut nightly), Vec::new());
    for target in fuzz_targets()? {
        if guided {
            let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
            let mut fuzz = Command::new("rustup");
            fuzz.args(["run", "nightly", "cargo", "fuzz", "run", "--target", &triple, &target, "--"]);
            skipped.extend(run_whole(fuzz.arg(format!("-max_total_time={FUZZ_SECONDS}")))?);
        } else {
            let test = ["test", "--release", "--test", "fuzz_slice", "--", "--exact", &target, "--nocapture"];
            skipped.extend(run_whole(cargo(&test).env("HPCRT_FUZZ_SECONDS", FUZZ_SECONDS.to_string()))?);
        }
    }
    Ok(skipped)
}

/// Their names, in order.
fn fuzz_targets() -> Result<Vec<String>> {
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/fuzz_targets"))?;
    let stem = |file: std::fs::DirEntry| Some(file.path().file_stem()?.to_str()?.to_owned());
    let mut names: Vec<String> = files.flatten().filter_map(stem).collect();
    names.sort();
    Ok(names)
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

    /// A target is a file, a binary of the fuzzing package, an entry of the list of bodies and a test of the slice.
    #[test]
    fn fuzz_targets_are_complete() {
        let read = |file: &str| std::fs::read_to_string(format!("{}/../{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let (package, bodies, slice) =
            (read("fuzz/Cargo.toml"), read("fuzz/src/bodies.rs"), read("tests/fuzz_slice.rs"));
        let targets = fuzz_targets().unwrap();
        for target in &targets {
            assert!(package.contains(&format!("path = \"fuzz_targets/{target}.rs\"")), "{target}");
            assert!(bodies.contains(&format!("(\"{target}\", {target})")), "{target}");
            assert!(slice.contains(&format!("slice(\"{target}\")")), "{target}");
        }
        assert!(bodies.contains(&format!("ALL: [(&str, fn(&[u8])); {}]", targets.len())));
    }

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
