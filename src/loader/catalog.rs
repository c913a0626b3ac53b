//! What a node knows about the shared file system: the log replayed into a table. Pure: no I/O, time is a parameter.
//!
//! Three degrees of knowledge. *Stable*: told by the root, valid until the log says otherwise, so the kernel may cache it
//! without limit. *Volatile*: changed by a job, so whoever looks asks the original file system each time, and nobody has to be told of
//! further changes. *Unknown*: the root has to be asked.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use crate::net::wire::record::{Attr, FileId, Record, Supply};

/// `d_type` values (`readdir(3)`), as carried by [`Record`].
pub mod kind {
    pub const UNKNOWN: u8 = 0;
    pub const FIFO: u8 = 1;
    pub const CHR: u8 = 2;
    pub const DIR: u8 = 4;
    pub const BLK: u8 = 6;
    pub const REG: u8 = 8;
    pub const LNK: u8 = 10;
    pub const SOCK: u8 = 12;

    /// The `d_type` of a file mode: the two encodings differ by a shift (`IFTODT`).
    pub fn of_mode(mode: u32) -> u8 {
        const FORMAT: u32 = 0o170_000;
        u8::try_from((mode & FORMAT) >> 12).unwrap_or(UNKNOWN)
    }
}

/// The names in a directory with their `d_type`, sorted by name.
pub type Listing = Vec<(Box<[u8]>, u8)>;

/// The answer to [`Catalog::lookup`].
#[derive(Debug, PartialEq)]
pub enum Known<'a> {
    /// Stable. The listing is complete.
    Dir { attr: &'a Attr, listing: &'a Arc<Listing> },
    /// Stable.
    Link { attr: &'a Attr, target: &'a [u8] },
    /// Stable. `content` is [`Supply::Original`] also when its capture failed, [`Supply::Log`] also when all of what is held elsewhere came.
    File { attr: &'a Attr, content: Supply },
    /// Stable: the error of whoever tries to reach it.
    Absent(Errno),
    /// To be looked up in the original each time.
    Volatile,
    /// It exists (with this `d_type`), and the root has to be asked for more.
    Listed(u8),
    /// The root has to be asked.
    Unknown,
    /// Not below any root of the view.
    Outside,
}

/// Whom a record concerns; see [`Catalog::apply`].
#[derive(Debug, Default, PartialEq)]
pub struct Effects {
    /// Questions about these paths may have an answer now.
    pub settled: Vec<Box<[u8]>>,
    /// Questions about names directly below this directory may have an answer now.
    pub listed: Option<Box<[u8]>>,
    /// Waits for the content of this file may be over.
    pub content: Option<FileId>,
    /// What a kernel holds of these names, and of the inodes they led to, is no longer true.
    pub stale: Vec<Box<[u8]>>,
    /// This node's own change comes back: the kernel made it, and knows of names that were made and removed.
    pub own: bool,
}

/// What a job on this node did to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Made, replaced (`Some`: `d_type`) or removed the name.
    Named(Option<u8>),
    /// Changed the content or attributes of what has the name and this `d_type`.
    Written(u8),
}

#[derive(Debug)]
enum Entry {
    /// `outdated`: forgotten, and kept only so that the next listing can be compared with this one.
    Dir {
        attr: Attr,
        listing: Arc<Listing>,
        outdated: bool,
    },
    Link {
        attr: Attr,
        target: Box<[u8]>,
    },
    File {
        attr: Attr,
        content: Supply,
    },
    Absent(Errno),
    Volatile,
}

#[derive(Debug)]
enum Content {
    /// Sorted, disjoint, non-adjacent byte ranges that have arrived.
    Coming(Vec<(u64, u64)>),
    Complete,
    Void,
}

/// The table. Paths are absolute and canonical up to their last component.
#[derive(Debug, Default)]
pub struct Catalog {
    roots: Vec<Box<[u8]>>,
    entries: HashMap<Box<[u8]>, Entry>,
    contents: HashMap<FileId, Content>,
    /// Files that had several names when they were described, by inode number. Some may be something else by now.
    linked: HashMap<u64, Vec<Box<[u8]>>>,
    /// How many changes of a path by this node have not come back in the log yet.
    told: HashMap<Box<[u8]>, u32>,
    /// See [`Catalog::take_superseded`].
    superseded: Vec<Superseded>,
}

/// A file's content that the path at which it was does not lead to any more.
pub type Superseded = (Box<[u8]>, FileId);

impl Entry {
    /// The file of the store that has or will have its content.
    fn content(&self) -> Option<FileId> {
        match self {
            Entry::File { content: Supply::Log(id) | Supply::Held(id), .. } => Some(*id),
            _ => None,
        }
    }
}

/// The same path, for whoever wants it by this type.
pub fn as_path(path: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(path))
}

/// The directory of an absolute path; `None` for `/`.
pub fn parent(path: &[u8]) -> Option<&[u8]> {
    let slash = path.iter().rposition(|&b| b == b'/')?;
    match slash {
        _ if path.len() == 1 => None,
        0 => Some(b"/"),
        _ => Some(&path[..slash]),
    }
}

/// The last component of an absolute path.
pub fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&b| b == b'/').next().unwrap_or_default()
}

/// `directory/name`.
pub fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(directory.len() + 1 + name.len());
    path.extend_from_slice(directory);
    if directory != b"/" {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

/// Whether `path` lies strictly below `directory`.
pub fn is_below(path: &[u8], directory: &[u8]) -> bool {
    match path.strip_prefix(directory) {
        Some(rest) => !rest.is_empty() && (rest[0] == b'/' || directory == b"/"),
        None => false,
    }
}

/// Whether `path` is `directory` or lies below it.
pub fn is_within(path: &[u8], directory: &[u8]) -> bool {
    path == directory || is_below(path, directory)
}

fn find(listing: &Listing, name: &[u8]) -> Result<usize, usize> {
    listing.binary_search_by(|(n, _)| (**n).cmp(name))
}

impl Catalog {
    /// `roots`: the directories that views show, none inside another.
    pub fn new(roots: impl IntoIterator<Item = Vec<u8>>) -> Self {
        Catalog { roots: roots.into_iter().map(Vec::into_boxed_slice).collect(), ..Catalog::default() }
    }

    /// Adds the roots of one more job; those inside a known one change nothing.
    pub fn add_roots(&mut self, roots: impl IntoIterator<Item = Vec<u8>>) {
        for root in roots {
            if !self.covers(&root) {
                self.roots.retain(|r| !is_below(r, &root));
                self.roots.push(root.into_boxed_slice());
            }
        }
    }

    fn covers(&self, path: &[u8]) -> bool {
        self.roots.iter().any(|root| is_within(path, root))
    }

    /// What is known about `path`. A name missing in a complete listing is `Absent` without any question.
    pub fn lookup(&self, path: &[u8]) -> Known<'_> {
        if !self.covers(path) {
            return Known::Outside;
        }
        match self.entries.get(path) {
            Some(Entry::Dir { outdated: true, .. }) => return Known::Listed(kind::DIR),
            Some(Entry::Dir { attr, listing, .. }) => return Known::Dir { attr, listing },
            Some(Entry::Link { attr, target }) => return Known::Link { attr, target },
            Some(Entry::File { attr, content }) => {
                let void = |id| matches!(self.contents.get(id), Some(Content::Void));
                let content = match content {
                    Supply::Log(id) | Supply::Held(id) if void(id) => Supply::Original,
                    Supply::Held(id) if self.is_complete(*id) => Supply::Log(*id),
                    content => *content,
                };
                return Known::File { attr, content };
            }
            Some(Entry::Absent(errno)) => return Known::Absent(*errno),
            Some(Entry::Volatile) => return Known::Volatile,
            None => {}
        }
        let Some(directory) = parent(path).filter(|d| self.covers(d)) else { return Known::Unknown };
        match self.lookup(directory) {
            Known::Dir { listing, .. } => match find(listing, file_name(path)) {
                // A listing knows no attributes, and the root captures none of these.
                Ok(i) if matches!(listing[i].1, kind::FIFO | kind::SOCK | kind::CHR | kind::BLK) => Known::Volatile,
                Ok(i) => Known::Listed(listing[i].1),
                Err(_) => Known::Absent(Errno::NOENT),
            },
            Known::File { .. } => Known::Absent(Errno::NOTDIR),
            Known::Absent(errno) => Known::Absent(errno),
            Known::Volatile => Known::Volatile,
            _ => Known::Unknown,
        }
    }

    /// Takes in the next record of the log; a chunk's bytes must be in the store before. `now`: seconds and nanoseconds since the epoch.
    pub fn apply(&mut self, record: &Record, now: (i64, u32)) -> Effects {
        let mut effects = Effects::default();
        match record {
            Record::Dir { path, .. }
            | Record::Link { path, .. }
            | Record::Absent { path, .. }
            | Record::File { path, .. }
                if self.overtaken(path, record) =>
            {
                // Perhaps older than what was changed here since. Whoever asked is answered by that, or asks again when it comes back.
                effects.settled.push(path.clone().into_boxed_slice());
                effects.listed = matches!(record, Record::Dir { .. }).then(|| path.clone().into_boxed_slice());
                if let Record::File { content: Supply::Log(id) | Supply::Held(id), .. } = record {
                    self.contents.entry(*id).or_insert_with(|| Content::Coming(Vec::new()));
                    self.superseded.push((path.clone().into_boxed_slice(), *id));
                }
            }
            Record::Dir { path, attr, names } => {
                let mut fresh: Listing = names.iter().map(|n| (n.name.clone().into_boxed_slice(), n.kind)).collect();
                fresh.sort_unstable();
                self.amend_listing(path, &mut fresh);
                effects.settled.push(path.clone().into_boxed_slice());
                effects.listed = Some(path.clone().into_boxed_slice());
                self.list(path, *attr, fresh, &mut effects);
            }
            Record::Link { path, attr, target } => {
                self.put(path, Entry::Link { attr: *attr, target: target.clone().into_boxed_slice() }, &mut effects);
            }
            Record::File { path, attr, content } => {
                if attr.nlink > 1 {
                    let names = self.linked.entry(attr.ino).or_default();
                    if !names.iter().any(|name| **name == **path) {
                        names.push(path.clone().into_boxed_slice());
                    }
                }
                self.put(path, Entry::File { attr: *attr, content: *content }, &mut effects);
                if let Supply::Log(id) | Supply::Held(id) = content {
                    self.contents.entry(*id).or_insert_with(|| Content::Coming(Vec::new()));
                }
            }
            Record::Absent { path, errno } => {
                // 0: it is there, and not of a type that the log can describe.
                let entry = if *errno == 0 { Entry::Volatile } else { Entry::Absent(Errno::from_raw_os_error(*errno)) };
                self.put(path, entry, &mut effects);
            }
            Record::Chunk { file, offset, len, .. } => {
                if let Content::Coming(spans) = self.contents.entry(*file).or_insert(Content::Coming(Vec::new())) {
                    insert_span(spans, *offset, offset.saturating_add(u64::from(*len)));
                }
                effects.content = Some(*file);
            }
            Record::Complete { file } => {
                self.contents.insert(*file, Content::Complete);
                effects.content = Some(*file);
            }
            Record::Void { file, .. } => {
                self.contents.insert(*file, Content::Void);
                effects.content = Some(*file);
            }
            Record::Changed { path, exists } => {
                effects.own = self.told.contains_key(&**path);
                if !self.is_last_of_own(path) {
                    // Older than what was changed here since; and should it be another node's, the original knows.
                    effects.stale.push(path.clone().into_boxed_slice());
                    effects.settled.push(path.clone().into_boxed_slice());
                    self.replace(path, Some(Entry::Volatile));
                    return effects;
                }
                // Code that a job made is captured like any other; the rest each node reads for itself.
                let ask = matches!(exists, Some(kind::REG | kind::UNKNOWN)) && is_code(file_name(path));
                if !effects.own
                    && !ask
                    && exists.is_some()
                    && matches!(self.entries.get(&**path), Some(Entry::Volatile))
                {
                    // Nothing about it is held that could be forgotten.
                    effects.settled.push(path.clone().into_boxed_slice());
                    return effects;
                }
                self.amend(path, *exists, ask, now, &mut effects);
            }
            Record::Preloaded { .. } | Record::Follows { .. } => {}
        }
        effects
    }

    /// A change made on this node, ahead of the log: `path` is volatile now, or gone. Returns whether the other nodes have to be told,
    /// and whom it concerns here: nobody holds anything about what is volatile already.
    pub fn changed_here(&mut self, path: &[u8], change: Change, now: (i64, u32)) -> (bool, Effects) {
        let mut effects = Effects::default();
        let tell = match self.lookup(path) {
            Known::Outside => return (false, effects),
            // Written through a descriptor, perhaps while the name was being removed: that makes no name.
            Known::Volatile | Known::Absent(_) if matches!(change, Change::Written(_)) => return (false, effects),
            Known::Volatile => !matches!(parent(path).map(|d| self.lookup(d)), Some(Known::Volatile)),
            _ => true,
        };
        let exists = match change {
            Change::Written(kind) => Some(kind),
            Change::Named(exists) => exists,
        };
        self.amend(path, exists, false, now, &mut effects);
        if tell {
            *self.told.entry(path.into()).or_default() += 1;
        }
        (tell, effects)
    }

    /// `path` turned out to exist, as a `d_type`, before the log said so.
    pub fn found_here(&mut self, path: &[u8], kind: u8, now: (i64, u32)) -> Effects {
        let mut effects = Effects::default();
        self.amend(path, Some(kind), false, now, &mut effects);
        effects
    }

    /// Whether `[from, to)` of a file's content is in the store. `None`: never will be.
    pub fn has_content(&self, id: FileId, from: u64, to: u64) -> Option<bool> {
        match self.contents.get(&id) {
            None => Some(false),
            Some(Content::Complete) => Some(true),
            Some(Content::Void) => None,
            Some(Content::Coming(spans)) => Some(from >= to || spans.iter().any(|&(a, b)| a <= from && to <= b)),
        }
    }

    /// Whether every byte of a file is in the store.
    pub fn is_complete(&self, id: FileId) -> bool {
        matches!(self.contents.get(&id), Some(Content::Complete))
    }

    /// Whether what is at `path` is this file of the store, as far as that has come.
    pub fn has_at(&self, path: &[u8], id: FileId) -> bool {
        let Known::File { content: Supply::Log(there) | Supply::Held(there), .. } = self.lookup(path) else {
            return false;
        };
        there == id
    }

    /// What was superseded since this was called last. It may be named again: see [`Catalog::names`].
    pub fn take_superseded(&mut self) -> Vec<Superseded> {
        std::mem::take(&mut self.superseded)
    }

    /// Whether the log says that `path` leads to this file, whether it lies below a root or not.
    pub fn names(&self, path: &[u8], id: FileId) -> bool {
        self.entries.get(path).and_then(Entry::content) == Some(id)
    }

    /// Whether anything is held about a file at `path`.
    pub fn has_file(&self, path: &[u8]) -> bool {
        matches!(self.lookup(path), Known::File { .. })
    }

    /// The other paths of the file at `path` of which anything is held. `ino`: its inode number.
    pub fn links(&self, path: &[u8], ino: u64) -> Vec<Box<[u8]>> {
        let is = |other: &[u8]| matches!(self.lookup(other), Known::File { attr, .. } if attr.ino == ino);
        self.linked.get(&ino).into_iter().flatten().filter(|other| ***other != *path && is(other)).cloned().collect()
    }

    /// Number of paths known.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Counts down what comes back. Without it, "removed" would come back after the file was made again, and hide it.
    fn is_last_of_own(&mut self, path: &[u8]) -> bool {
        match self.told.get_mut(path) {
            Some(left) if *left > 1 => {
                *left -= 1;
                false
            }
            Some(_) => self.told.remove(path).is_some(),
            None => true,
        }
    }

    /// Whether what a node did to `path` since may be news to the record: this one, of which the log will say so, or any in a volatile
    /// directory, of which it will not.
    fn overtaken(&self, path: &[u8], record: &Record) -> bool {
        if matches!((self.entries.get(path), record), (Some(Entry::Volatile), Record::Dir { .. })) {
            return true;
        }
        let agrees = matches!(
            (self.entries.get(path), record),
            (Some(Entry::Dir { .. }), Record::Dir { .. }) | (None, Record::Absent { .. })
        );
        self.told.contains_key(path) && !agrees
    }

    /// The same for the names in a listing.
    fn amend_listing(&self, directory: &[u8], fresh: &mut Listing) {
        for path in self.told.keys().filter(|p| parent(p) == Some(directory)) {
            let (name, exists) = (file_name(path), self.entries.contains_key(path));
            match (find(fresh, name), exists) {
                (Ok(i), false) => drop(fresh.remove(i)),
                (Err(i), true) => fresh.insert(i, (name.into(), kind::UNKNOWN)),
                _ => {}
            }
        }
    }

    fn put(&mut self, path: &[u8], entry: Entry, effects: &mut Effects) {
        effects.settled.push(path.into());
        match (self.entries.get(path), &entry) {
            (None, _) => {}
            // Content that was asked for changes nothing of what a kernel holds: it could not read the file before.
            (Some(Entry::File { attr: a, content: c }), Entry::File { attr: b, content: d })
                if a == b && (c == d || *c == Supply::OnOpen) => {}
            (Some(Entry::Link { attr: a, target: s }), Entry::Link { attr: b, target: t }) if a == b && s == t => {}
            (Some(Entry::Volatile), _) => {}
            (Some(_), _) => effects.stale.push(path.into()),
        }
        self.replace(path, Some(entry));
    }

    /// Sets what is known of `path`, or forgets it; returns what was known.
    fn replace(&mut self, path: &[u8], entry: Option<Entry>) -> Option<Entry> {
        let now = entry.as_ref().and_then(Entry::content);
        let before = match entry {
            Some(entry) => self.entries.insert(path.into(), entry),
            None => self.entries.remove(path),
        };
        let gone = before.as_ref().and_then(Entry::content).filter(|gone| Some(*gone) != now);
        self.superseded.extend(gone.map(|gone| (path.into(), gone)));
        before
    }

    fn list(&mut self, path: &[u8], attr: Attr, fresh: Listing, effects: &mut Effects) {
        match self.entries.get(path) {
            Some(Entry::Dir { attr: old_attr, listing: old, .. }) => {
                if *old_attr != attr || **old != fresh {
                    effects.stale.push(path.into());
                }
                let has = |listing: &Listing, name: &[u8], kind: u8| {
                    let same = |there: u8| there == kind || there == kind::UNKNOWN || kind == kind::UNKNOWN;
                    find(listing, name).is_ok_and(|at| same(listing[at].1))
                };
                let gone = old.iter().filter(|(n, kind)| !has(&fresh, n, *kind));
                let new = fresh.iter().filter(|(n, _)| find(old, n).is_err());
                let names: Vec<_> = gone.chain(new).map(|(n, kind)| (join(path, n), *kind)).collect();
                for (name, kind) in names {
                    self.forget_as(&name, kind, effects);
                    effects.stale.push(name.into_boxed_slice());
                }
            }
            None | Some(Entry::Volatile) => {}
            Some(_) => effects.stale.push(path.into()),
        }
        self.replace(path, Some(Entry::Dir { attr, listing: Arc::new(fresh), outdated: false }));
    }

    /// Forgets everything below `path`. `keep`: directories stay, outdated, to be compared with their next listing.
    fn forget_below(&mut self, path: &[u8], keep: bool, effects: &mut Effects) {
        self.entries.retain(|p, entry| {
            if !is_below(p, path) {
                return true;
            }
            effects.stale.push(p.clone());
            match entry {
                Entry::Dir { outdated, .. } if keep => {
                    *outdated = true;
                    true
                }
                _ => {
                    self.superseded.extend(entry.content().map(|gone| (p.clone(), gone)));
                    false
                }
            }
        });
    }

    /// The same of what is of a kind, or was: below a directory that was missing something may have been looked for in vain.
    fn forget_as(&mut self, path: &[u8], kind: u8, effects: &mut Effects) {
        if kind == kind::REG {
            return self.forget(path, effects);
        }
        self.replace(path, None);
        self.forget_below(path, false, effects);
    }

    fn forget(&mut self, path: &[u8], effects: &mut Effects) {
        if let Some(Entry::Dir { .. }) = self.replace(path, None) {
            self.forget_below(path, false, effects);
        }
    }

    /// `ask`: what exists now is the root's to tell; otherwise it is volatile.
    fn amend(&mut self, path: &[u8], exists: Option<u8>, ask: bool, now: (i64, u32), effects: &mut Effects) {
        effects.settled.push(path.into());
        effects.stale.push(path.into());
        let mut ask = ask;
        match self.entries.get_mut(path) {
            Some(Entry::Dir { outdated, .. }) if exists == Some(kind::DIR) => {
                *outdated = true;
                ask = true;
                self.forget_below(path, true, effects);
            }
            _ => self.forget_as(path, exists.unwrap_or(kind::REG), effects),
        }
        let directory = parent(path).unwrap_or_default();
        let inherits = match self.entries.get_mut(directory) {
            Some(Entry::Dir { attr, listing, .. }) => {
                let names = Arc::make_mut(listing);
                let position = find(names, file_name(path));
                match (position, exists) {
                    (Ok(i), None) => drop(names.remove(i)),
                    (Ok(i), Some(kind)) => names[i].1 = kind,
                    (Err(i), Some(kind)) => names.insert(i, (file_name(path).into(), kind)),
                    (Err(_), None) => {}
                }
                if position.is_ok() != exists.is_some() {
                    // Near enough to what the file server set, without asking it: programs look whether it differs.
                    attr.mtime = now;
                    attr.ctime = now;
                    effects.stale.push(directory.into());
                }
                false
            }
            _ => matches!(self.lookup(path), Known::Volatile),
        };
        if exists.is_some() && !ask && !inherits {
            self.replace(path, Some(Entry::Volatile));
        }
    }
}

/// Adds `[from, to)` to sorted, disjoint spans.
fn insert_span(spans: &mut Vec<(u64, u64)>, from: u64, to: u64) {
    let first = spans.partition_point(|s| s.1 < from);
    let last = spans.partition_point(|s| s.0 <= to);
    let merged = match spans.get(first..last) {
        Some([a, .., b]) => (from.min(a.0), to.max(b.1)),
        Some([a]) => (from.min(a.0), to.max(a.1)),
        _ => (from, to),
    };
    spans.splice(first..last.max(first), [merged]);
}

/// Whether a file of this name is code that many processes load: shared objects and Python modules.
pub fn is_code(name: &[u8]) -> bool {
    let endings: [&[u8]; 4] = [b".so", b".py", b".pyc", b".pth"];
    if endings.iter().any(|e| name.ends_with(e)) {
        return true;
    }
    let version = |v: &[u8]| !v.is_empty() && v.iter().all(|b| b.is_ascii_digit() || *b == b'.');
    name.windows(4).enumerate().any(|(i, w)| w == b".so." && version(&name[i + 4..]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::net::wire::record::{Codec, Name};

    const NOW: (i64, u32) = (7, 0);

    fn attr(size: u64) -> Attr {
        Attr { mode: 0o100_644, uid: 1, gid: 1, nlink: 1, ino: 9, size, mtime: (1, 2), ctime: (1, 2) }
    }

    fn dir(path: &str, names: &[(&str, u8)]) -> Record {
        let names = names.iter().map(|(n, k)| Name { name: n.as_bytes().to_vec(), kind: *k }).collect();
        Record::Dir { path: path.into(), attr: attr(0), names }
    }

    fn file(path: &str, content: FileId) -> Record {
        Record::File { path: path.into(), attr: attr(3), content: Supply::Log(content) }
    }

    fn changed(path: &str, exists: Option<u8>) -> Record {
        Record::Changed { path: path.into(), exists }
    }

    fn catalog() -> Catalog {
        let mut c = Catalog::new([b"/r".to_vec()]);
        let _ = c.apply(&dir("/r", &[("lib", kind::DIR), ("a.so", kind::REG), ("pipe", kind::FIFO)]), NOW);
        let _ = c.apply(&dir("/r/lib", &[("b.so", kind::REG)]), NOW);
        let _ = c.apply(&file("/r/a.so", 0), NOW);
        c
    }

    #[test]
    fn what_a_complete_listing_lacks_does_not_exist() {
        let c = catalog();
        assert_eq!(c.lookup(b"/r/none"), Known::Absent(Errno::NOENT));
        assert_eq!(c.lookup(b"/r/none/deeper"), Known::Absent(Errno::NOENT));
        assert_eq!(c.lookup(b"/r/a.so/x"), Known::Absent(Errno::NOTDIR));
        assert_eq!(c.lookup(b"/r/lib/b.so"), Known::Listed(kind::REG));
        assert_eq!(c.lookup(b"/r/pipe"), Known::Volatile);
        assert_eq!(c.lookup(b"/elsewhere"), Known::Outside);
        assert_eq!(c.lookup(b"/rr"), Known::Outside);
        assert_eq!(Catalog::new([b"/r".to_vec()]).lookup(b"/r/x"), Known::Unknown);
    }

    #[test]
    fn what_was_missing_with_its_directory_is_asked_for_when_that_is_made() {
        for made in [dir("/r", &[("new", kind::DIR)]), changed("/r/new", Some(kind::DIR))] {
            let mut c = catalog();
            let _ = c.apply(&Record::Absent { path: b"/r/new/f.so".to_vec(), errno: 2 }, NOW);
            assert!(matches!(c.lookup(b"/r/new/f.so"), Known::Absent(_)));
            let _ = c.apply(&made, NOW);
            assert!(matches!(c.lookup(b"/r/new/f.so"), Known::Unknown | Known::Volatile));
        }
    }

    #[test]
    fn content_counts_when_its_bytes_are_there() {
        let mut c = catalog();
        let chunk = |offset| Record::Chunk { file: 0, offset, len: 10, codec: Codec::Raw };
        assert_eq!(c.apply(&chunk(20), NOW).content, Some(0));
        let _ = c.apply(&chunk(0), NOW);
        assert_eq!(c.has_content(0, 0, 10), Some(true));
        assert_eq!(c.has_content(0, 5, 25), Some(false));
        let _ = c.apply(&chunk(10), NOW);
        assert_eq!(c.has_content(0, 0, 30), Some(true));
        assert!(!c.is_complete(0));
        let _ = c.apply(&Record::Complete { file: 0 }, NOW);
        assert!(c.is_complete(0));
        let _ = c.apply(&Record::Void { file: 0, errno: 5 }, NOW);
        assert_eq!(c.has_content(0, 0, 1), None);
        assert!(matches!(c.lookup(b"/r/a.so"), Known::File { content: Supply::Original, .. }));
    }

    #[test]
    fn content_that_comes_later_is_no_change() {
        let mut c = catalog();
        let offer = |content| Record::File { path: b"/r/lib/b.so".to_vec(), attr: attr(3), content };
        let _ = c.apply(&offer(Supply::OnOpen), NOW);
        assert!(matches!(c.lookup(b"/r/lib/b.so"), Known::File { content: Supply::OnOpen, .. }));
        let effects = c.apply(&offer(Supply::Log(1)), NOW);
        assert!(effects.stale.is_empty() && effects.settled == [b"/r/lib/b.so".to_vec().into_boxed_slice()]);
        assert!(matches!(c.lookup(b"/r/lib/b.so"), Known::File { content: Supply::Log(1), .. }));
        assert!(!c.apply(&offer(Supply::Original), NOW).stale.is_empty());
    }

    #[test]
    fn a_new_name_is_amended_and_read_from_the_original() {
        let mut c = catalog();
        let effects = c.apply(&changed("/r/out.txt", Some(kind::REG)), NOW);
        assert!(effects.stale.iter().any(|p| **p == *b"/r/out.txt") && effects.stale.iter().any(|p| **p == *b"/r"));
        assert_eq!(c.lookup(b"/r/out.txt"), Known::Volatile);
        assert!(matches!(c.lookup(b"/r"), Known::Dir { attr, listing } if attr.mtime == NOW && listing.len() == 4));
        let _ = c.apply(&changed("/r/out.txt", None), NOW);
        assert_eq!(c.lookup(b"/r/out.txt"), Known::Absent(Errno::NOENT));
    }

    #[test]
    fn the_names_of_a_file_are_known() {
        let mut c = catalog();
        for name in ["/r/one", "/r/two"] {
            let attr = Attr { nlink: 2, ino: 5, ..attr(3) };
            let _ = c.apply(&Record::File { path: name.into(), attr, content: Supply::Original }, NOW);
        }
        assert_eq!(c.links(b"/r/one", 5), [b"/r/two".to_vec().into_boxed_slice()]);
        let _ = c.apply(&changed("/r/two", Some(kind::REG)), NOW);
        assert!(c.links(b"/r/one", 5).is_empty() && c.links(b"/r/a.so", 9).is_empty());
    }

    #[test]
    fn changed_code_is_asked_for_again() {
        let mut c = catalog();
        let _ = c.apply(&changed("/r/a.so", Some(kind::REG)), NOW);
        assert_eq!(c.lookup(b"/r/a.so"), Known::Listed(kind::REG));
        let _ = c.apply(&file("/r/a.so", 5), NOW);
        assert!(matches!(c.lookup(b"/r/a.so"), Known::File { content: Supply::Log(5), .. }));
    }

    #[test]
    fn content_that_no_path_leads_to_is_told_once() {
        let gone = |c: &mut Catalog| c.take_superseded().into_iter().map(|(_, id)| id).collect::<Vec<_>>();
        let mut c = catalog();
        let _ = c.apply(&file("/r/a.so", 0), NOW);
        assert!(gone(&mut c).is_empty(), "said again");
        let _ = c.apply(&file("/r/a.so", 1), NOW);
        assert!(c.names(b"/r/a.so", 1) && !c.names(b"/r/a.so", 0));
        assert_eq!(gone(&mut c), [0]);
        let held = Record::File { path: b"/r/lib/b.so".to_vec(), attr: attr(3), content: Supply::Held(2) };
        let _ = c.apply(&held, NOW);
        let _ = c.apply(&changed("/r/lib", Some(kind::DIR)), NOW);
        assert_eq!(gone(&mut c), [2], "with its directory");
        let _ = c.apply(&file("/r/lib/b.so", 3), NOW);
        let _ = c.apply(&dir("/r/lib", &[]), NOW);
        assert_eq!(gone(&mut c), [3], "with its name");
        let _ = c.changed_here(b"/r/a.so", Change::Written(kind::REG), NOW);
        assert_eq!(gone(&mut c), [1], "by a rank here");
        let _ = c.apply(&file("/r/a.so", 4), NOW);
        assert_eq!(gone(&mut c), [4], "read before that");
        let _ = c.apply(&changed("/r/a.so", Some(kind::REG)), NOW);
        let _ = c.apply(&file("/elsewhere/c.so", 5), NOW);
        let _ = c.apply(&Record::Absent { path: b"/elsewhere/c.so".to_vec(), errno: 2 }, NOW);
        assert_eq!(gone(&mut c), [5], "where no view is");
    }

    #[test]
    fn changes_where_nobody_holds_anything_are_not_told() {
        let mut c = catalog();
        assert!(c.changed_here(b"/r/out", Change::Named(Some(kind::DIR)), NOW).0);
        assert_eq!(c.lookup(b"/r/out/x"), Known::Volatile);
        let entries = c.len();
        assert!(!c.changed_here(b"/r/out/x", Change::Named(Some(kind::REG)), NOW).0);
        assert!(!c.changed_here(b"/r/out/x", Change::Named(None), NOW).0);
        assert_eq!(c.len(), entries, "a volatile directory costs one entry");
        assert!(c.changed_here(b"/r/a.so", Change::Written(kind::REG), NOW).0);
        assert!(!c.changed_here(b"/r/a.so", Change::Written(kind::REG), NOW).0);
        assert!(c.changed_here(b"/r/a.so", Change::Named(None), NOW).0);
        assert!(!c.changed_here(b"/r/a.so", Change::Written(kind::REG), NOW).0);
        assert_eq!(c.lookup(b"/r/a.so"), Known::Absent(Errno::NOENT));
        assert!(!c.changed_here(b"/elsewhere", Change::Named(None), NOW).0);
    }

    #[test]
    fn what_comes_back_late_hides_nothing() {
        let mut c = catalog();
        assert!(c.changed_here(b"/r/a.so", Change::Named(None), NOW).0);
        assert!(c.changed_here(b"/r/a.so", Change::Named(Some(kind::REG)), NOW).0);
        assert!(c.changed_here(b"/r/t", Change::Named(Some(kind::REG)), NOW).0);
        assert!(c.changed_here(b"/r/t", Change::Named(None), NOW).0);
        let _ = c.apply(&changed("/r/a.so", None), NOW);
        assert_eq!(c.lookup(b"/r/a.so"), Known::Volatile);
        let _ = c.apply(&changed("/r/a.so", Some(kind::REG)), NOW);
        assert_eq!(c.lookup(b"/r/a.so"), Known::Listed(kind::REG));
        let _ = c.apply(&changed("/r/t", Some(kind::REG)), NOW);
        assert!(matches!(c.lookup(b"/r"), Known::Dir { listing, .. } if find(listing, b"t").is_err()));
        let _ = c.apply(&changed("/r/t", None), NOW);
        assert_eq!(c.lookup(b"/r/t"), Known::Absent(Errno::NOENT));
        let _ = c.apply(&changed("/r/t", Some(kind::REG)), NOW);
        assert_eq!(c.lookup(b"/r/t"), Known::Volatile, "another node's");
    }

    #[test]
    fn what_the_root_saw_before_hides_nothing() {
        let mut c = catalog();
        assert!(c.changed_here(b"/r/out", Change::Named(Some(kind::DIR)), NOW).0);
        let _ = c.apply(&dir("/r/out", &[("old", kind::REG)]), NOW);
        assert_eq!(c.lookup(b"/r/out"), Known::Volatile, "a listing from before it was removed and made again");
        assert!(c.changed_here(b"/r/a.so", Change::Named(None), NOW).0);
        let names = [("lib", kind::DIR), ("a.so", kind::REG)];
        let effects = c.apply(&dir("/r", &names), NOW);
        assert!(effects.listed.is_some());
        assert_eq!(c.lookup(b"/r/a.so"), Known::Absent(Errno::NOENT));
        assert_eq!(c.lookup(b"/r/out"), Known::Volatile);
        assert!(matches!(c.lookup(b"/r"), Known::Dir { listing, .. } if find(listing, b"out").is_ok()));
        let _ = c.apply(&changed("/r/a.so", None), NOW);
        let _ = c.apply(&dir("/r", &names), NOW);
        assert_eq!(c.lookup(b"/r/a.so"), Known::Listed(kind::REG), "made again by another");
        assert!(c.changed_here(b"/r/lib", Change::Written(kind::DIR), NOW).0);
        let _ = c.apply(&dir("/r/lib", &[]), NOW);
        assert!(matches!(c.lookup(b"/r/lib"), Known::Dir { .. }), "the question is not asked in vain");
    }

    #[test]
    fn a_changed_directory_is_listed_again_and_compared() {
        let mut c = catalog();
        let _ = c.apply(&changed("/r/lib", Some(kind::DIR)), NOW);
        assert_eq!(c.lookup(b"/r/lib"), Known::Listed(kind::DIR));
        assert_eq!(c.lookup(b"/r/lib/b.so"), Known::Unknown);
        let effects = c.apply(&dir("/r/lib", &[("new", kind::REG)]), NOW);
        assert!(
            effects.stale.iter().any(|p| **p == *b"/r/lib/new") && effects.stale.iter().any(|p| **p == *b"/r/lib/b.so")
        );
        let _ = c.apply(&changed("/r/lib", None), NOW);
        assert_eq!(c.lookup(b"/r/lib/new"), Known::Absent(Errno::NOENT));
    }

    #[test]
    fn code_is_known_by_its_name() {
        for yes in ["libc.so", "libc.so.6", "libx.so.1.2.3", "a.py", "a.pyc", "site.pth"] {
            assert!(is_code(yes.as_bytes()), "{yes}");
        }
        for no in ["libx.so.conf", "x.so.", "a.txt", "so", "data.h5"] {
            assert!(!is_code(no.as_bytes()), "{no}");
        }
    }

    proptest! {
        #[test]
        fn spans_hold_exactly_what_was_inserted(inserts in prop::collection::vec((0_u64..60, 1_u64..9), 0..20)) {
            let mut spans = Vec::new();
            let mut model = [false; 70];
            for (from, len) in inserts {
                insert_span(&mut spans, from, from + len);
                model[from as usize..(from + len) as usize].fill(true);
            }
            for (i, &present) in model.iter().enumerate() {
                prop_assert_eq!(spans.iter().any(|&(a, b)| a <= i as u64 && (i as u64) < b), present);
            }
            prop_assert!(spans.windows(2).all(|w| w[0].1 < w[1].0));
        }
    }
}
