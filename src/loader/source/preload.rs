//! What a job needs before its ranks can start: what its closure is made of, and what earlier runs loaded.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::{Load, Source, version};
use crate::loader::capture::FILE_MAX;
use crate::loader::catalog::is_below;
use crate::loader::probe::{FileSystem, Listing, Names, Opened, Probe};
use crate::loader::tally::Why;
use crate::net::wire::control::Need;
use crate::net::wire::record::LoadId;

/// What a job needs before its ranks can start: [`Record::Preloaded`] follows when this is dropped and everything it asked for was sent.
#[derive(Debug)]
pub struct Preload {
    pub(super) source: Arc<Source>,
    pub(super) load: Arc<Load>,
}

impl Preload {
    /// The load's number.
    pub fn id(&self) -> LoadId {
        self.load.id
    }

    /// A directory that was listed on the way, below the roots that are compared before the job starts.
    pub fn directory(&self, listing: &Listing) {
        let path = listing.canonical.as_os_str().as_bytes();
        self.source.operation(path, Why::Search);
        let mut state = self.source.state();
        if state.told(path).is_some_and(|known| known.version() == Some(version(&listing.stat))) {
            return state.still(path);
        }
        // What the log lists is compared, see [`Source::compare`]: what jobs have made there since it was listed on the way would be said to
        // be gone.
        if !state.listed.contains_key(path) {
            drop(state);
            self.source.list(path, &listing.stat, &listing.names);
        }
    }

    /// What will probably be asked for, if it lies below `roots`.
    pub fn hint(&self, path: &[u8], need: Need, roots: &[Vec<u8>]) {
        if roots.iter().any(|root| is_below(path, root)) {
            self.source.ask(path.to_vec(), need, Why::Hint, Some(Arc::clone(&self.load)));
        }
    }

    /// Anything else that will be asked for.
    pub fn path(&self, path: &Path, need: Need) {
        self.source.ask(path.as_os_str().as_bytes().to_vec(), need, Why::Closure, Some(Arc::clone(&self.load)));
    }
}

/// Looks for a job's closure and captures what it opens on the way. A file is read from its beginning to its end before anybody looks
/// into it: what follows comes from the page cache, and the file system saw one sequential read.
impl Probe for Preload {
    type File = File;
    type Dir = OwnedFd;

    fn open(&self, path: &Path) -> io::Result<Opened<File>> {
        let opened = FileSystem.open(path)?;
        let regular = rustix::fs::FileType::from_raw_mode(opened.stat.st_mode).is_file();
        let path = opened.canonical.as_os_str().as_bytes();
        if regular
            && opened.size() <= FILE_MAX
            && self.source.shares_device(opened.stat.st_dev, &opened.canonical)
            && !self.source.excludes(path)
        {
            self.source.operation(path, Why::Closure);
            if let Some((id, version)) = self.source.begin(path, &opened.stat, Why::Closure) {
                self.source.transfer(id, path, &opened.file, version, (1, Why::Closure), Some(&self.load));
            }
        }
        Ok(opened)
    }

    fn open_dir(&self, path: &Path) -> io::Result<Opened<OwnedFd>> {
        FileSystem.open_dir(path)
    }

    fn names(&self, dir: &OwnedFd) -> io::Result<Names> {
        FileSystem.names(dir)
    }
}

impl Drop for Preload {
    fn drop(&mut self) {
        self.source.done(Some(&self.load));
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant, SystemTime};

    use super::*;
    use crate::loader::catalog::{as_path, kind};
    use crate::loader::source::tests::{next, started, wait_until_no_reader_looks};
    use crate::net::wire::record::Record;

    #[test]
    fn what_a_job_made_while_another_was_resolved_does_not_vanish() {
        let (directory, tree, source, found) = started();
        source.want(tree.clone(), Need::Attributes);
        assert_eq!(next(&found), "directory");
        let later = SystemTime::now() + Duration::from_secs(1);
        File::open(directory.path()).unwrap().set_modified(later).unwrap();
        let (begun, preload) = (Instant::now(), source.preload());
        let Opened { file, canonical, stat } = preload.open_dir(as_path(&tree)).unwrap();
        let listing = Listing { canonical, stat, names: preload.names(&file).unwrap() };
        std::fs::write(directory.path().join("made"), "").unwrap();
        wait_until_no_reader_looks(&source);
        source.changed([&tree, &b"/made"[..]].concat(), Some(kind::REG));
        assert!(next(&found).starts_with("Changed"));
        preload.directory(&listing);
        source.compare(&[tree], begun, &preload);
        drop(preload);
        let Record::Dir { names, .. } = found.recv_blocking().unwrap().record else { panic!("it is another") };
        assert!(names.iter().any(|name| name.name == b"made"));
        assert!(next(&found).starts_with("Preloaded"), "the job waits for that");
    }
}
