//! The project's chores.

mod binary;
mod ci;
mod packages;
mod proofs;
mod run;
mod slowdown;

use std::process::ExitCode;

use anyhow::Result;

const HELP: &str = "\
cargo xtask test [ARGS]    all tests; as root on Debian it first installs the packages they need. ARGS go to the runner
cargo xtask ci             what .ci/run does: format, lints, release build, then the tests
cargo xtask proofs [NAME]  long tests and benchmarks, all or one; `cargo xtask proofs list` names them
cargo xtask check          cargo check, also for aarch64 where its target is installed
cargo xtask slowdown [--ratios 50,25,10,4] [--rounds 2] [--after TEXT] [--memory LIST] [--svg FILE] [--paper NAME] -- PROGRAM [ARGS]
                           how much slower a program is with so many percent of its memory here, the rest with a server on this host (or LIST)
cargo xtask binary         build the release and check that it is one small static file";

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(words: &[String]) -> Result<()> {
    std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))?;
    match words.first().map(String::as_str) {
        Some("test") => ci::test(&words[1..]),
        Some("ci") => ci::ci(),
        Some("proofs") => proofs::proofs(words.get(1).map(String::as_str)),
        Some("check") => ci::check(),
        Some("binary") => binary::check(),
        Some("slowdown") => slowdown::slowdown(&words[1..]),
        Some("help" | "--help" | "-h") => {
            println!("{HELP}");
            Ok(())
        }
        _ => anyhow::bail!("one of these is needed:\n{HELP}"),
    }
}
