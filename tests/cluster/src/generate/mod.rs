//! Programs for the hosts to run: what real ones are made of, at known sizes. Nothing here needs root.

pub mod environment;
pub mod libraries;
pub mod modules;

pub mod payload;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, anyhow, bail};

/// Changes whenever the generated files would.
const VERSION: u32 = 1;
const STAMP: &str = ".generated";

/// Calls `make` on the emptied directory, unless it was made with the same parameters before. `true`: something was made.
fn once(dir: &Path, parameters: &str, make: impl FnOnce() -> Result<()>) -> Result<bool> {
    let stamp = dir.join(STAMP);
    let wanted = format!("{VERSION} {parameters}\n");
    let found = fs::read_to_string(&stamp).ok();
    if found.as_ref() == Some(&wanted) {
        return Ok(false);
    }
    let foreign = found.is_none() && fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    if foreign {
        bail!("{} is not empty and was not generated: choose another directory", dir.display());
    }
    let _ = fs::remove_dir_all(dir);
    fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
    // A stamp from the start, so that an interrupted run can be repeated.
    fs::write(&stamp, "unfinished\n").with_context(|| format!("write {}", stamp.display()))?;
    make()?;
    fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))?;
    Ok(true)
}

/// Runs a tool to success; its complaint becomes the error.
fn run(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("start {:?}", command.get_program()))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Does `work` for every number, on all processors; the first error ends it.
fn in_parallel(numbers: impl Iterator<Item = usize> + Send, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let numbers = Mutex::new(numbers);
    let next = || numbers.lock().ok().and_then(|mut n| n.next());
    std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..threads).map(|_| scope.spawn(|| std::iter::from_fn(next).try_for_each(&work))).collect();
        workers.into_iter().try_for_each(|w| w.join().map_err(|_| anyhow!("a worker panicked"))?)
    })
}
