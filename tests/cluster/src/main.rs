//! The command line of the test cluster; see README.md.

use std::process::ExitCode;

fn main() -> ExitCode {
    cluster::cli::run(std::env::args_os().collect())
}
