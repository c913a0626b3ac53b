//! Whether what the log says of the shared file system still holds.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::Stat;
use rustix::io::Errno;

use super::{Load, Preload, Source, Work, version};
use crate::loader::catalog::{as_path, is_within, kind, parent};
use crate::loader::probe::{FileSystem, Probe};
use crate::loader::tally::Why;
use crate::loader::told::Described;
use crate::loader::version::Version;
use crate::net::wire::control::Need;
use crate::net::wire::record::Record;

/// After this long a host has asked its file server again, whatever it knew (NFS: `acregmax`).
const REMEMBERED: Duration = Duration::from_secs(60);
/// Operations for a short listing, and names that each further one brings with their attributes, about.
const LISTING: usize = 3;
const LISTED_AT_ONCE: usize = 128;

impl Source {
    /// Nothing can be reached at a path, for whoever tries; or the front end alone cannot: its file server is busy with something else, or
    /// it has not heard yet of what a job made.
    pub(super) fn absent(&self, path: &[u8], error: &io::Error) {
        let errno = Errno::from_io_error(error).unwrap_or(Errno::IO);
        let everybodys = match errno {
            Errno::NOENT => !self.state().is_as_before(path, None),
            errno => matches!(errno, Errno::NOTDIR | Errno::LOOP | Errno::ACCESS | Errno::NAMETOOLONG),
        };
        if !everybodys {
            return self.leave_alone(path, Described::Absent);
        }
        self.state().tell(path, Described::Absent);
        self.find(Record::Absent { path: path.to_vec(), errno: errno.raw_os_error() }, Vec::new());
    }

    /// Every node looks for itself, each time.
    pub(super) fn leave_alone(&self, path: &[u8], what: Described) {
        self.state().tell(path, what);
        self.find(Record::Absent { path: path.to_vec(), errno: 0 }, Vec::new());
    }

    /// Whether a job changed a path and this is still what was told of it before: this host remembers it, for as long as its file system
    /// lets it, and another may know better. Then it is left alone.
    pub(super) fn is_as_before(&self, path: &[u8], version: Version) -> bool {
        let is = self.state().is_as_before(path, Some(version));
        if is {
            self.leave_alone(path, Described::Whole(version));
        }
        is
    }

    /// Looks whether what the log says below `roots` is still true, where nobody looked since `begun`; what is not is said anew before the
    /// job starts.
    pub fn compare(&self, roots: &[Vec<u8>], begun: Instant, job: &Preload) {
        let old: Vec<Vec<u8>> = {
            let state = self.state();
            let below = |path: &[u8]| roots.iter().any(|root| is_within(path, root));
            let old = state.described.iter().filter(|(path, told)| told.at < begun && below(path));
            old.map(|(path, _)| path.clone()).collect()
        };
        for path in old {
            self.enqueue(Work::Compare { path, job: Some(Arc::clone(&job.load)) });
        }
    }

    /// What is at a path now, if anything. An error says nothing of that: the front end alone may have it.
    fn see(&self, path: &[u8]) -> Result<Option<Stat>, Errno> {
        match self.look_at(path, Why::Changes) {
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
            seen => seen.map(Some),
        }
    }

    /// Says a path anew if it is not what the log says any more.
    pub(super) fn compare_one(&self, path: &[u8], job: Option<&Arc<Load>>) {
        let Some(known) = self.state().told(path).filter(|_| !self.excludes(path)) else { return };
        let seen = self.see(path);
        let mut state = self.state();
        if state.told(path) != Some(known) {
            return;
        }
        let stat = match seen {
            Ok(stat) => stat,
            Err(_) if known == Described::Absent => return,
            Err(_) => {
                drop(state);
                return self.leave_alone(path, Described::Absent);
            }
        };
        let settled = stat.as_ref().map(version) == known.version();
        if settled && !state.settle(path, REMEMBERED) {
            return state.still(path);
        }
        let is_listed = state.listed.contains_key(path);
        drop(state);
        match stat {
            Some(stat) if is_listed && kind::of_mode(stat.st_mode) == kind::DIR => {
                self.look(path, |_| self.describe_directory(path, &stat, Why::Changes));
            }
            stat => {
                let kind = stat.map(|stat| kind::of_mode(stat.st_mode));
                self.change(path.to_vec(), kind, true);
                if settled || matches!(known, Described::Content(..)) {
                    self.ask(path.to_vec(), Need::Content, Why::Changes, job.cloned());
                } else if kind == Some(kind::LNK) {
                    // Else each node would look for itself, each time.
                    self.ask(path.to_vec(), Need::Attributes, Why::Changes, job.cloned());
                }
            }
        }
    }

    /// Compares what the log says with the shared file system while a job runs: directories that others changed are listed again, and, with
    /// `files`, captured files that changed are named. A job keeps the content that it began with. Blocks: for a thread.
    pub fn look_for_changes(&self, files: bool) {
        let (directories, captured) = {
            let state = self.state();
            let versions =
                state.described.iter().filter_map(|(path, told)| Some((path, told.what, told.what.version()?)));
            let (mut directories, mut captured) = (Vec::new(), Vec::new());
            for (path, what, version) in versions {
                if state.listed.contains_key(path) {
                    directories.push((path.clone(), version));
                } else if files && matches!(what, Described::Content(..)) {
                    captured.push((path.clone(), version));
                }
            }
            (directories, captured)
        };
        for (path, known) in directories {
            if self.look_at(&path, Why::Changes).as_ref().map(version) != Ok(known) {
                log::debug!("{} changed", String::from_utf8_lossy(&path));
                self.enqueue(Work::Describe { path, need: Need::Attributes, why: Why::Changes, job: None });
            }
        }
        self.fetch_attributes(&captured);
        for (path, known) in captured {
            if let Ok(now) = self.see(&path)
                && now.as_ref().map(version) != Some(known)
            {
                let name = String::from_utf8_lossy(&path).into_owned();
                self.warn(format!("{name} changed on the shared file system; what was running kept the old content"));
                self.change(path, now.map(|stat| kind::of_mode(stat.st_mode)), true);
            }
        }
    }

    /// Lists directories in which many files are to be looked at: network file systems bring the attributes of what a listing names, and
    /// the kernel answers from them.
    fn fetch_attributes(&self, files: &[(Vec<u8>, Version)]) {
        let mut directories = HashMap::<&[u8], usize>::new();
        for directory in files.iter().filter_map(|(path, _)| parent(path)) {
            *directories.entry(directory).or_default() += 1;
        }
        let names = |path: &[u8]| self.state().listed.get(path).map_or(usize::MAX, |names| names.len());
        directories.retain(|path, files| names(path) / LISTED_AT_ONCE + LISTING < *files);
        for path in directories.into_keys() {
            self.operation(path, Why::Changes);
            if let Ok(opened) = FileSystem.open_dir(as_path(path)) {
                // Only the kernel needs to hear of them.
                let _ = FileSystem.names(&opened.file);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::loader::catalog::kind;
    use crate::loader::source::tests::{next, started, wait_until_no_reader_looks};

    use super::*;

    const LEFT_ALONE: &str = "errno: 0 }";

    fn change(source: &Source, path: &[u8], exists: Option<u8>) {
        wait_until_no_reader_looks(source);
        source.changed(path.to_vec(), exists);
    }

    #[test]
    fn what_fails_here_may_succeed_elsewhere() {
        let (_directory, tree, source, found) = started();
        for (errno, is_told) in
            [(Errno::IO, false), (Errno::TIMEDOUT, false), (Errno::STALE, false), (Errno::NOENT, true)]
        {
            source.absent(&tree, &errno.into());
            assert_eq!(!next(&found).ends_with(LEFT_ALONE), is_told, "{errno}");
        }
    }

    #[test]
    fn what_is_seen_to_be_another_is_captured_though_its_directory_is_listed_meanwhile() {
        let (directory, tree, source, found) = started();
        let path = [tree.as_slice(), b"/other.py"].concat();
        source.want(path.clone(), Need::Content);
        assert_eq!([(); 3].map(|()| next(&found)), ["Log(0)", "6 bytes", "complete"]);
        std::fs::write(directory.path().join("other.py"), "x = 123\n").unwrap();
        wait_until_no_reader_looks(&source);
        let look = source.state().begin_look(&tree);
        source.compare_one(&path, None);
        assert!(next(&found).starts_with("Changed"));
        assert_eq!([(); 3].map(|()| next(&found)), ["Log(1)", "8 bytes", "complete"]);
        assert!(source.state().end_look(look).is_empty(), "as a job's change it would be left alone from then on");
    }

    #[test]
    fn what_cannot_be_compared_is_not_said_to_be_removed() {
        let (directory, tree, source, found) = started();
        let (place, path) = (directory.path().join("sub"), [&tree, &b"/sub/m.py"[..]].concat());
        std::fs::create_dir(&place).unwrap();
        std::fs::rename(directory.path().join("m.py"), place.join("m.py")).unwrap();
        source.want(path.clone(), Need::Content);
        assert_eq!([(); 3].map(|()| next(&found)), ["Log(0)", "13 bytes", "complete"]);
        let aside = directory.path().join("aside");
        std::fs::rename(&place, &aside).unwrap();
        std::os::unix::fs::symlink("sub", &place).unwrap();
        source.look_for_changes(true);
        assert!(found.is_empty() && source.warnings().is_empty(), "the job keeps what it has");
        source.compare_one(&path, None);
        assert!(next(&found).ends_with(LEFT_ALONE), "another begins with what is there");
        std::fs::remove_file(&place).unwrap();
        source.compare_one(&path, None);
        assert!(found.is_empty(), "it is left alone still");
        std::fs::rename(&aside, &place).unwrap();
        source.compare_one(&path, None);
        assert!(next(&found).starts_with("Changed"), "who asks now is told");
    }

    #[test]
    fn what_a_job_made_and_this_host_does_not_see_is_left_alone() {
        let (_directory, tree, source, found) = started();
        let path = [tree.as_slice(), b"/new.py"].concat();
        change(&source, &path, Some(kind::REG));
        source.want(path, Need::Content);
        assert!(next(&found).starts_with("Changed"));
        assert!(next(&found).ends_with(LEFT_ALONE));
    }

    #[test]
    fn what_a_job_replaced_is_not_captured_until_it_is_seen_to_be_another() {
        let (directory, tree, source, found) = started();
        let path = [tree.as_slice(), b"/other.py"].concat();
        source.want(path.clone(), Need::Content);
        assert_eq!([(); 3].map(|()| next(&found)), ["Log(0)", "6 bytes", "complete"]);
        for changes in [&[Some(kind::REG)][..], &[None, Some(kind::REG)]] {
            for exists in changes {
                change(&source, &path, *exists);
                assert!(next(&found).starts_with("Changed"));
            }
            source.want(path.clone(), Need::Content);
            assert!(next(&found).ends_with(LEFT_ALONE));
        }
        source.compare_one(&path, None);
        source.want(tree, Need::Attributes);
        assert_eq!(next(&found), "directory", "it may still be remembered");
        std::fs::write(directory.path().join("other.py"), "x = 123\n").unwrap();
        change(&source, &path, Some(kind::REG));
        source.want(path, Need::Content);
        assert!(next(&found).starts_with("Changed"));
        assert_eq!([(); 3].map(|()| next(&found)), ["Log(1)", "8 bytes", "complete"]);
    }
}
