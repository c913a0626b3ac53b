//! `cluster down`: leaves the machine as it was before `up`, also after an `up` that was killed half-way.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};

use crate::processes::end_all;
use crate::state::{ROOT, directory};

/// Keeps other `up` and `down` of the machine waiting: clusters share mount points.
pub(crate) fn lock(name: &str) -> Result<Flock<File>> {
    directory(name)?;
    // The directory itself is the lock: a lock file would have to stay.
    let file = File::open("/run").context("open /run")?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e).context("lock the clusters")
}

/// Backing directory of a cluster that was given none.
pub(crate) fn own_backing(name: &str) -> PathBuf {
    Path::new("/var/tmp/hpcrt-cluster").join(name)
}

/// Makes a directory that the hosts mount something on, and notes that it must go.
pub(crate) fn make_place(own: &Path, place: &Path) -> Result<()> {
    if place.is_dir() {
        return Ok(());
    }
    let notes = own.join("places");
    let noted = fs::read_to_string(&notes).unwrap_or_default();
    fs::write(&notes, format!("{noted}{}\n", place.display())).context("note a mount point")?;
    fs::create_dir_all(place).with_context(|| format!("make {}", place.display()))
}

/// Ends the cluster's processes, with which its namespaces, mounts and links vanish, and removes its files.
///
/// The caller holds the [`lock`].
pub(crate) fn remove(name: &str) -> Result<()> {
    let own = directory(name)?;
    end_all(name)?;
    let backing = own_backing(name);
    remove_tree(&backing)?;
    // Fails while other clusters have theirs there.
    let _ = backing.parent().map(fs::remove_dir);
    let places = fs::read_to_string(own.join("places")).unwrap_or_default();
    let heir = fs::read_dir(ROOT).into_iter().flatten().flatten().map(|e| e.path()).find(|p| *p != own);
    match heir {
        // Removing a directory detaches what other clusters have mounted there: leave that to the last one.
        Some(heir) => {
            let noted = fs::read_to_string(heir.join("places")).unwrap_or_default();
            fs::write(heir.join("places"), noted + &places).context("hand mount points over")?;
        }
        None => {
            for place in places.lines() {
                // Not empty or already gone: it is not ours.
                let _ = fs::remove_dir(place);
            }
        }
    }
    remove_tree(&own)?;
    // Fails while there are other clusters.
    let _ = fs::remove_dir(ROOT);
    Ok(())
}

/// What an `up` that was killed had begun to execute may make files for a moment.
fn remove_tree(path: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match fs::remove_dir_all(path) {
            Err(e) if e.kind() == ErrorKind::DirectoryNotEmpty && Instant::now() < deadline => {
                sleep(Duration::from_millis(3));
            }
            Err(e) if e.kind() != ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("remove {}", path.display()));
            }
            _ => return Ok(()),
        }
    }
}
