//! The texts of libraries that a job's programs map over their own (`static-bootstrap/iofs/src/image.rs`). The first program makes them, of small pages, since it is
//! waited for; jobs that last get them in huge ones.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use smol::Timer;

use crate::sys::huge::{self, HUGE};

/// A job that is there for so long lasts.
const LASTS: Duration = Duration::from_secs(1);

/// See the module; `directory`: where they are made.
pub(super) async fn gather(directory: PathBuf) {
    Timer::after(LASTS).await;
    let gathered = smol::unblock(move || gather_large(&directory)).await;
    if let Err(error) = gathered {
        log::debug!("texts stay in small pages: {error}");
    }
}

/// Those that take most of a huge page.
fn gather_large(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b"text.") && entry.metadata()?.len() >= HUGE as u64 / 2 {
            huge::gather(&File::options().read(true).write(true).open(entry.path())?)?;
        }
    }
    Ok(())
}
