//! Commands shown as they are run.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The cargo that started us.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
}

/// Runs it with our own output; anything but success is an error that names it.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = shown(command);
    let status = command.status().with_context(|| line.clone())?;
    ensure!(status.success(), "`{line}` ended with {status}");
    Ok(())
}

/// The same; returns what it said that it skipped.
pub(crate) fn run_whole(command: &mut Command) -> Result<Vec<String>> {
    let line = shown(command);
    let mut child = command.stderr(Stdio::piped()).spawn().with_context(|| line.clone())?;
    let mut skipped = Vec::new();
    for said in child.stderr.take().into_iter().flat_map(|stderr| BufReader::new(stderr).lines()) {
        let said = said.with_context(|| line.clone())?;
        eprintln!("{said}");
        skipped.extend(said.strip_prefix("SKIPPED").map(|what| what.trim_start_matches([':', ' ']).to_owned()));
    }
    let status = child.wait().with_context(|| line.clone())?;
    ensure!(status.success(), "`{line}` ended with {status}");
    Ok(skipped)
}

fn shown(command: &Command) -> String {
    let arguments: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let program = std::path::Path::new(command.get_program()).file_name().unwrap_or_default();
    let line = format!("{} {}", program.display(), arguments.join(" "));
    eprintln!("xtask: {line}");
    line
}

/// Whether it runs and succeeds; shows nothing.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}
