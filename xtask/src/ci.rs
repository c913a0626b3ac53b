//! The checks that every change must pass.

use std::process::Command;

use anyhow::Result;

use crate::run::{cargo, run, succeeds};
use crate::{binary, packages};

/// All tests of the workspace, with cargo-nextest where it is installed. The runner's own summary comes last.
pub(crate) fn test(arguments: &[String]) -> Result<()> {
    run_tests(arguments, &[])
}

fn run_tests(arguments: &[String], environment: &[(&str, &str)]) -> Result<()> {
    packages::install();
    if !rustix::process::geteuid().is_root() {
        eprintln!("xtask: not root: the tests on a cluster of namespaces are SKIPPED");
    }
    if std::fs::File::options().read(true).write(true).open("/dev/fuse").is_err() {
        eprintln!("xtask: /dev/fuse cannot be opened: the tests of the view are SKIPPED");
    }
    let nextest = succeeds(&mut cargo(&["nextest", "--version"]));
    let runner: &[&str] = if nextest { &["nextest", "run"] } else { &["test"] };
    run(cargo(runner).args(["--workspace", "--no-fail-fast"]).args(arguments).envs(environment.iter().copied()))
}

/// Format, lints, release build, and then the tests.
pub(crate) fn ci() -> Result<()> {
    const BOOTSTRAP: &str = "static-bootstrap/Cargo.toml";
    tell_room()?;
    run(&mut cargo(&["fmt", "--all", "--check"]))?;
    run(&mut cargo(&["fmt", "--all", "--check", "--manifest-path", BOOTSTRAP]))?;
    run(&mut cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    run(&mut cargo(&["clippy", "--manifest-path", BOOTSTRAP, "--workspace", "--", "-D", "warnings"]))?;
    other_processor()?;
    binary::check()?;
    // A minute of fuzzing in all.
    run_tests(&[], &[("HPCRT_FUZZ_SECONDS", "5")])
}

/// A full disk fails in many ways: one line to begin with says what there is.
fn tell_room() -> Result<()> {
    for place in [std::env::current_dir()?, std::env::temp_dir()] {
        let room = rustix::fs::statvfs(&place)?;
        eprintln!("xtask: {} MiB free at {}", (room.f_bavail * room.f_frsize) >> 20, place.display());
    }
    Ok(())
}

/// Compiles for this processor, and for the other one where that is possible.
pub(crate) fn check() -> Result<()> {
    run(&mut cargo(&["check", "--workspace", "--all-targets"]))?;
    other_processor()
}

fn other_processor() -> Result<()> {
    const OTHER: &str = "aarch64-unknown-linux-gnu";
    let library = Command::new("rustc").args(["--print", "target-libdir", "--target", OTHER]).output()?;
    let library = String::from_utf8_lossy(&library.stdout).trim().to_owned();
    // C code among the dependencies needs a compiler for that processor, too.
    if !std::path::Path::new(&library).is_dir() || !succeeds(Command::new("aarch64-linux-gnu-gcc").arg("--version")) {
        eprintln!("xtask: SKIPPED: {OTHER} (rustup target add {OTHER}; Debian package gcc-aarch64-linux-gnu)");
        return Ok(());
    }
    run(cargo(&["check", "--target", OTHER])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc"))
}
