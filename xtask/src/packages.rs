//! The Debian packages that the tests use.

use std::process::Command;

use crate::run::{run, succeeds};

/// Package and what for.
const PACKAGES: [(&str, &str); 23] = [
    ("gcc", "test programs"),
    ("libc6-dev", "test programs"),
    ("musl-tools", "test programs with another C library"),
    ("iproute2", "test hosts"),
    ("util-linux", "test hosts, the doctor's tests"),
    ("openssh-client", "agents over ssh"),
    ("openssh-server", "agents over ssh; Debian starts its service, the tests start their own"),
    ("python3-venv", "programs in Python, the reference for host lists"),
    ("python3-pip", "programs in Python"),
    ("gdb", "debuggers on ranks"),
    ("strace", "counting system calls"),
    ("slurm-wlm", "allocations of Slurm"),
    ("mpich", "launchers and programs of MPI"),
    ("libmpich-dev", "programs of MPI"),
    ("openmpi-bin", "programs of Open MPI 4"),
    ("libopenmpi-dev", "programs of Open MPI 4"),
    ("lammps", "a real program of MPI"),
    ("hpcc", "a real program of MPI"),
    ("debootstrap", "programs of other versions of glibc"),
    ("g++", "a program with much memory"),
    ("python3-numpy", "a program with much memory"),
    ("redis-server", "a program with much memory; Debian starts its service, the tests start their own"),
    ("rsync", "the reference for distribution"),
];

/// Installs what is missing, as root on Debian; otherwise says what will be skipped. Tests skip themselves.
pub(crate) fn install() {
    if !succeeds(Command::new("dpkg-query").arg("--version")) {
        let all = PACKAGES.map(|(package, _)| package).join(" ");
        eprintln!("xtask: this is not Debian: tests whose tools are missing are SKIPPED; as Debian calls them: {all}");
        return;
    }
    let installed = |package: &str| {
        let status = Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]).output();
        status.is_ok_and(|output| output.stdout == b"installed")
    };
    let missing: Vec<_> = PACKAGES.iter().filter(|(package, _)| !installed(package)).collect();
    if missing.is_empty() {
        return;
    }
    let names: Vec<&str> = missing.iter().map(|(package, _)| *package).collect();
    if !rustix::process::geteuid().is_root() {
        eprintln!("xtask: SKIPPED are the tests that need packages which only root can install:");
        missing.iter().for_each(|(package, what)| eprintln!("xtask:   {package}: {what}"));
        eprintln!("xtask: to run them, too: sudo apt-get install {}", names.join(" "));
        return;
    }
    eprintln!("xtask: installing what the tests need:");
    missing.iter().for_each(|(package, what)| eprintln!("xtask:   {package}: {what}"));
    let apt = |arguments: &[&str]| {
        run(Command::new("apt-get").args(["-qq", "-y"]).args(arguments).env("DEBIAN_FRONTEND", "noninteractive"))
    };
    let install = [&["install", "--no-install-recommends"], &names[..]].concat();
    // Lists that are old or absent are the usual reason of a failure.
    if let Err(error) = apt(&install).or_else(|_| apt(&["update"]).and_then(|()| apt(&install))) {
        eprintln!("xtask: {error:#}; tests that need these packages are SKIPPED");
    }
}
