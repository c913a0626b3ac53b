//! MPI programs as their distribution built them, started by hpcrt alone, on hosts of their own.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "common/site.rs"]
mod site;

use std::fs;
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
const USERS: [u32; 2] = [20001, 0];
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
    let done = Command::new(compiler).arg(source("mpihello.c")).arg("-o").arg(site.backing("mpi").join(to)).output();
    let done = done.unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Some(format!("/shared/mpi/{to}"))
}

/// Ranks know each other, add up, share memory within a host and know their program.
fn hello(site: &Site, program: &str, flags: &[&str]) {
    for (list, hosts) in PLACES {
        for each in [1, 4] {
            let uid = USERS[(hosts / 2 + each) % 2];
            let per_host = each.to_string();
            let (size, sum) = (hosts * each, (0..hosts * each).sum::<usize>());
            let line = |rank| format!("rank {rank} of {size} sum {sum} local {each} app 0 on hpc{}", rank / each + 1);
            let expected: Vec<String> = (0..size).map(line).collect();
            let flags = [&["-q", "--ppn", &per_host][..], flags].concat();
            let done = (0..8).any(|_| {
                let output = site.start_within(12, uid, list, &flags, &[program]).output().unwrap();
                let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
                let mut lines: Vec<&str> = out.lines().collect();
                lines.sort_by_key(|line| line.split(' ').nth(1).and_then(|rank| rank.parse::<usize>().ok()));
                assert_eq!(lines, expected, "{err}");
                let ended = output.status.success();
                assert!(ended || err.contains("did not end within"), "{err}");
                ended
            });
            assert!(done, "{size} ranks never end");
        }
    }
}

/// On busy processors MPICH 4.0.2 over UCX's TCP may not come back from MPI_Finalize, under Hydra as well.
#[test]
#[ignore = "cargo xtask proofs mpich"]
fn mpich() {
    let Some(site) = up("mpich") else { return };
    let Some(program) = built(&site, "mpicc.mpich", "mpich") else { return };
    hello(&site, &program, MPICH);
}

#[test]
fn open_mpi_4() {
    let Some(site) = up("openmpi") else { return };
    let Some(program) = built(&site, "mpicc.openmpi", "openmpi") else { return };
    hello(&site, &program, OPEN_MPI);
    // A rank that aborts ends the job with its code.
    let run = site.run(0, "hpc[1-2]", &[&["--ppn", "2"][..], OPEN_MPI].concat(), &[&program, "abort"]).code(7);
    run.says(&["rank 3 on hpc2 aborted the job with code 7"]);
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
            let run = site.run(20001, list, &flags, &program).code(0);
            assert_eq!(energies(&run.out()), expected, "{list} {each}: {}{}", run.out(), run.err());
            let ranks = format!("on {} procs", hosts * each);
            assert!(run.out().contains(&ranks), "{ranks}: {}", run.out());
        }
    }
}
