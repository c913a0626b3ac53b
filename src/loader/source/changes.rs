//! Whether what the log says of the shared file system still holds.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::{Load, Preload, Source, Work, version};
use crate::loader::catalog::{as_path, is_within, kind, parent};
use crate::loader::probe::{FileSystem, Probe};
use crate::loader::tally::Why;
use crate::loader::told::Described;
use crate::loader::version::Version;
use crate::net::wire::control::Need;

/// Operations for a short listing, and names that each further one brings with their attributes, about.
const LISTING: usize = 3;
const LISTED_AT_ONCE: usize = 128;

impl Source {
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

    /// Says a path anew if it is not what the log says any more.
    pub(super) fn compare_one(&self, path: &[u8], job: Option<&Arc<Load>>) {
        let Some(known) = self.state().told(path).filter(|_| !self.excludes(path)) else { return };
        let stat = self.look_at(path, Why::Changes).ok();
        let mut state = self.state();
        if state.told(path) != Some(known) {
            return;
        }
        if stat.as_ref().map(version) == known.version() {
            return state.still(path);
        }
        let is_listed = state.listed.contains_key(path);
        drop(state);
        match stat {
            Some(stat) if is_listed && kind::of_mode(stat.st_mode) == kind::DIR => {
                self.describe_directory(path, &stat, Why::Changes);
            }
            stat => {
                let kind = stat.map(|stat| kind::of_mode(stat.st_mode));
                self.changed(path.to_vec(), kind);
                if matches!(known, Described::Content(..)) {
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
            let now = self.look_at(&path, Why::Changes);
            if now.as_ref().map(version) != Ok(known) {
                let name = String::from_utf8_lossy(&path).into_owned();
                self.warn(format!("{name} changed on the shared file system; what was running kept the old content"));
                self.changed(path, now.ok().map(|stat| kind::of_mode(stat.st_mode)));
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
