//! What the log says of the shared file system, and what is on its way there.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::catalog::{file_name, is_code, is_within, kind, parent};
use super::probe::Names;
use super::version::Version;
use crate::net::wire::control::Need;
use crate::net::wire::record::FileId;

/// A question about what was told less long ago has crossed its answer. To another one the answer was lost, with a node on its way or
/// because what the node forgot since is more than it had to: it is told again.
const CROSSED: Duration = Duration::from_secs(5);

/// A path that a reader is looking at.
#[derive(Debug)]
struct Look {
    path: Vec<u8>,
    /// Changes that were heard of meanwhile: what the reader found may be older, and stands in the log behind them, so they are said
    /// again.
    overtaken: Vec<Overtaken>,
    /// Somebody asked for its content meanwhile.
    wanted: bool,
}

/// A change that was heard of while a reader looked: he may have told what was there before it.
#[derive(Debug, PartialEq)]
pub(super) struct Overtaken {
    pub(super) path: Vec<u8>,
    pub(super) exists: Option<u8>,
    /// Whether it was seen here, and not only said by a node.
    pub(super) seen: bool,
}

/// What the log says of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Described {
    /// That there is nothing, or something it has no words for.
    Absent,
    /// Everything but content: that is read in the original.
    Whole(Version),
    /// A file's attributes (`Supply::OnOpen`).
    Offered(Version),
    /// A file of which it has or will have the content.
    Content(Version, FileId),
}

impl Described {
    fn content(self) -> Option<FileId> {
        if let Described::Content(_, file) = self { Some(file) } else { None }
    }

    pub(super) fn version(self) -> Option<Version> {
        match self {
            Described::Absent => None,
            Described::Whole(version) | Described::Offered(version) | Described::Content(version, _) => Some(version),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Told {
    pub(super) what: Described,
    pub(super) said: Instant,
    /// When it was said, or compared with the shared file system, last.
    pub(super) at: Instant,
}

/// What a job did, as far as it is heard of.
#[derive(Debug)]
struct Changed {
    exists: bool,
    /// What was told before.
    before: Option<Version>,
    heard: Instant,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) next: FileId,
    /// Files whose content no path leads to any more.
    pub(super) superseded: Vec<FileId>,
    /// Paths that the log describes.
    pub(super) described: HashMap<Vec<u8>, Told>,
    /// The most that was asked for of each path.
    pub(super) asked: HashMap<Vec<u8>, Need>,
    /// Directories that the log lists, as it does.
    pub(super) listed: HashMap<Vec<u8>, Names>,
    /// Code that jobs changed and directories that they made, until they are seen to be what was not told before.
    changed: HashMap<Vec<u8>, Changed>,
    /// By a number of their own: several readers may look at one path.
    looks: HashMap<u64, Look>,
    next_look: u64,
    /// Whether hosts share what lies on a device.
    pub(super) devices: HashMap<u64, bool>,
    pub(super) warnings: Vec<String>,
}

impl State {
    /// Whether somebody has to look because of this question, the first of its kind. Notes it.
    pub(super) fn is_news(&mut self, path: &[u8], need: Need) -> bool {
        match self.told(path) {
            Some(Described::Offered(_)) if need == Need::Content => {}
            Some(_) => return false,
            None => {}
        }
        match self.asked.get_mut(path) {
            Some(asked) => std::mem::replace(asked, need.max(*asked)) < need,
            None => self.asked.insert(path.to_vec(), need).is_none(),
        }
    }

    pub(super) fn told(&self, path: &[u8]) -> Option<Described> {
        self.described.get(path).map(|told| told.what)
    }

    pub(super) fn tell(&mut self, path: &[u8], what: Described) {
        let now = Instant::now();
        let before = self.described.insert(path.to_vec(), Told { what, said: now, at: now });
        let gone = before.and_then(|told| told.what.content()).filter(|gone| what.content() != Some(*gone));
        self.superseded.extend(gone);
    }

    /// What was told of a path, and of this alone, does not hold.
    pub(super) fn retract(&mut self, path: &[u8]) {
        self.superseded.extend(self.described.remove(path).and_then(|told| told.what.content()));
    }

    /// What was told was compared with the shared file system, and holds.
    pub(super) fn still(&mut self, path: &[u8]) {
        if let Some(told) = self.described.get_mut(path) {
            told.at = Instant::now();
        }
    }

    /// Whether a node asks for what it should have heard.
    pub(super) fn is_unheard(&mut self, path: &[u8], need: Need) -> bool {
        match self.described.get_mut(path) {
            Some(Told { what: Described::Offered(_), .. }) if need == Need::Content => false,
            Some(told) if told.at.elapsed() >= CROSSED => {
                told.at = Instant::now();
                true
            }
            _ => false,
        }
    }

    /// A reader begins to look at a path. Returns the number of the look.
    pub(super) fn begin_look(&mut self, path: &[u8]) -> u64 {
        self.next_look += 1;
        self.looks.insert(self.next_look, Look { path: path.to_vec(), overtaken: Vec::new(), wanted: false });
        self.next_look
    }

    /// Returns the changes that were heard of meanwhile, which are to be said again.
    pub(super) fn end_look(&mut self, look: u64) -> Vec<Overtaken> {
        self.looks.remove(&look).map(|look| look.overtaken).unwrap_or_default()
    }

    #[cfg(test)]
    pub(super) fn is_looking(&self) -> bool {
        !self.looks.is_empty()
    }

    /// Somebody asks for a file's content.
    pub(super) fn want(&mut self, path: &[u8]) {
        self.looks.values_mut().filter(|look| look.path == path).for_each(|look| look.wanted = true);
    }

    /// Whether somebody asked for the content since the look began.
    pub(super) fn is_wanted(&self, look: u64) -> bool {
        self.looks.get(&look).is_some_and(|look| look.wanted)
    }

    /// A job changed a path, or it was `seen` here that somebody did: what was told of it and below it no longer holds.
    pub(super) fn change(&mut self, path: &[u8], exists: Option<u8>, seen: bool) {
        let is_code = is_code(file_name(path));
        let before = self.told(path).and_then(Described::version).or_else(|| self.changed.get(path)?.before);
        // What was seen is known not to be what was told.
        let before = before.filter(|_| is_code && !seen);
        let is_asked_for = match exists {
            Some(kind::REG | kind::UNKNOWN) => is_code,
            exists => exists == Some(kind::DIR),
        };
        if is_asked_for || before.is_some() {
            self.changed.insert(path.to_vec(), Changed { exists: exists.is_some(), before, heard: Instant::now() });
        } else {
            self.changed.remove(path);
        }
        self.forget(path);
        for look in self.looks.values_mut() {
            // Who looks at the directory sees it as well.
            if is_within(&look.path, path) || !seen && parent(path) == Some(&look.path) {
                look.overtaken.push(Overtaken { path: path.to_vec(), exists, seen });
            }
        }
    }

    /// Whether what is found at a path (`None`: nothing) is what was there before a job changed it. If it is not, this is over.
    pub(super) fn is_as_before(&mut self, path: &[u8], found: Option<Version>) -> bool {
        let Some(changed) = self.changed.get(path) else { return false };
        let is = found.map_or(changed.exists, |found| changed.before == Some(found));
        if !is {
            self.changed.remove(path);
        }
        is
    }

    /// Whether what is at a path was changed longer than `remembered` ago: then it is what is seen there, which is to be told anew.
    pub(super) fn settle(&mut self, path: &[u8], remembered: Duration) -> bool {
        let settled = self.changed.get(path).is_some_and(|changed| changed.heard.elapsed() >= remembered);
        if settled {
            self.changed.remove(path);
            self.forget(path);
        }
        settled
    }

    /// Forgets a path and what is below it, as the nodes do when they hear that its name came or went.
    pub(super) fn forget(&mut self, path: &[u8]) {
        let keeps = |known: &[u8]| !is_within(known, path);
        let gone = self.described.extract_if(|known, _| !keeps(known));
        self.superseded.extend(gone.filter_map(|(_, told)| told.what.content()));
        self.asked.retain(|known, _| keeps(known));
        self.listed.retain(|known, _| keeps(known));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::version::version;

    #[test]
    fn what_is_seen_long_after_a_change_is_believed() {
        let (mut state, path) = (State::default(), b"/r/m.py");
        let seen = version(&rustix::fs::stat("/").unwrap());
        state.tell(path, Described::Content(seen, 0));
        for exists in [None, Some(kind::REG)] {
            state.change(path, exists, false);
        }
        assert!(state.is_as_before(path, Some(seen)) && state.is_as_before(path, None));
        state.tell(path, Described::Whole(seen));
        assert!(!state.settle(path, Duration::from_secs(60)));
        assert!(state.settle(path, Duration::ZERO) && state.told(path).is_none());
        state.change(path, Some(kind::REG), false);
        assert!(!state.is_as_before(path, Some(seen)));
    }

    #[test]
    fn what_was_seen_is_no_jobs_change_when_it_is_said_again() {
        let (mut state, path) = (State::default(), b"/r/m.py");
        let look = state.begin_look(path);
        state.change(path, Some(kind::REG), true);
        let new = version(&rustix::fs::stat("/").unwrap());
        state.tell(path, Described::Content(new, 0));
        let overtaken = state.end_look(look);
        assert_eq!(overtaken, [Overtaken { path: path.to_vec(), exists: Some(kind::REG), seen: true }]);
        state.change(path, Some(kind::REG), true);
        assert!(!state.is_as_before(path, Some(new)), "it would be left alone");
    }
}
