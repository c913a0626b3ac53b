//! The inodes a kernel knows: node number <-> path.
//!
//! A node's number is what programs see as `st_ino`, so it is the original's where that is free, else one that no file system uses: for the
//! second path of a hard-linked file, and for equal numbers from two file systems.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::loader::catalog::{is_below, kind};
use crate::net::wire::record::{Attr, FileId};

/// The directory whose children are the roots of the view.
pub(super) const TOP: u64 = 1;

const OWN_NUMBERS: u64 = 1 << 62;

#[derive(Debug)]
pub(super) struct Node {
    /// `None` once the name is gone, while the kernel still has the inode.
    pub(super) path: Option<Arc<[u8]>>,
    pub(super) original: u64,
    /// `st_mode & S_IFMT`.
    kind: u32,
    /// Of a symbolic link. The kernel keeps it without limit, so a link with another is another node, whatever its number.
    target: Option<Box<[u8]>>,
    lookups: u64,
    /// A program here took the name away: no path leads to it any more, and who opens it comes through a descriptor.
    pub(super) unlinked: bool,
    /// The kernel may hold its name without limit.
    pub(super) stable: bool,
    /// The pages that the kernel holds are of this, if any.
    cached: Pages,
    /// When its original was compared last with what the log says, or the kernel told of it first.
    compared: Instant,
}

/// What fills the pages of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pages {
    /// Nothing yet: there are none.
    None,
    /// What may change at any time.
    Volatile,
    /// A file of the store.
    Store(FileId),
    /// The original of these attributes.
    Original(Attr),
}

impl Node {
    pub(super) fn d_type(&self) -> u8 {
        kind::of_mode(self.kind)
    }

    pub(super) fn is_dir(&self) -> bool {
        self.kind == super::attributes::S_IFDIR
    }
}

#[derive(Debug, Default)]
pub(super) struct Inodes {
    nodes: HashMap<u64, Node>,
    by_path: HashMap<Arc<[u8]>, u64>,
    made: u64,
}

impl Inodes {
    /// The node of `path`, given the original's inode number and mode; a kernel that is told of it will `forget` it.
    pub(super) fn look_up(
        &mut self,
        path: &[u8],
        original: u64,
        mode: u32,
        target: Option<&[u8]>,
        stable: bool,
    ) -> u64 {
        let kind = mode & super::attributes::S_IFMT;
        if let Some(&id) = self.by_path.get(path)
            && let Some(node) = self.nodes.get_mut(&id)
        {
            if (node.original, node.kind, node.target.as_deref()) == (original, kind, target) {
                node.lookups += 1;
                node.stable |= stable;
                return id;
            }
            self.detach(path);
        }
        let id = if original > TOP && original < OWN_NUMBERS && !self.nodes.contains_key(&original) {
            original
        } else {
            self.made += 1;
            OWN_NUMBERS + self.made
        };
        let path: Arc<[u8]> = path.into();
        self.by_path.insert(path.clone(), id);
        let target = target.map(Box::from);
        self.nodes.insert(
            id,
            Node {
                path: Some(path),
                original,
                kind,
                target,
                lookups: 1,
                unlinked: false,
                stable,
                cached: Pages::None,
                compared: Instant::now(),
            },
        );
        id
    }

    /// Whether what has this number and mode is the inode that the kernel means. A directory goes on in the place of another: programs
    /// work in it.
    pub(super) fn is(&self, id: u64, original: u64, mode: u32) -> bool {
        let same =
            |node: &Node| node.kind == mode & super::attributes::S_IFMT && (node.original == original || node.is_dir());
        self.nodes.get(&id).is_none_or(same)
    }

    /// Its name leads elsewhere by now.
    pub(super) fn lose_name(&mut self, id: u64) {
        if let Some(path) = self.nodes.get_mut(&id).and_then(|node| node.path.take())
            && self.by_path.get(&path) == Some(&id)
        {
            self.by_path.remove(&path);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn get(&self, id: u64) -> Option<&Node> {
        self.nodes.get(&id)
    }

    /// Where a symbolic link leads.
    pub(super) fn target(&self, id: u64) -> Option<&[u8]> {
        self.nodes.get(&id)?.target.as_deref()
    }

    /// The kernel is given this inode's attributes without limit.
    pub(super) fn mark_stable(&mut self, id: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.stable = true;
        }
    }

    /// From now on its pages are filled from `content`. Returns whether those that the kernel has may stay. The first that opens a file must
    /// not have them dropped: a second may have read some before the kernel sees the first one's answer.
    pub(super) fn fill(&mut self, id: u64, content: Pages) -> bool {
        let Some(node) = self.nodes.get_mut(&id) else { return false };
        // What the log tells of is to be forgotten when it says so.
        node.stable |= content != Pages::Volatile;
        let before = std::mem::replace(&mut node.cached, content);
        before == Pages::None || (before == content && content != Pages::Volatile)
    }

    /// Whether its original is to be compared again; then it counts as compared.
    pub(super) fn is_due(&mut self, id: u64, fresh: Duration) -> bool {
        let due = self.nodes.get_mut(&id).filter(|node| node.compared.elapsed() >= fresh);
        due.map(|node| node.compared = Instant::now()).is_some()
    }

    pub(super) fn of(&self, path: &[u8]) -> Option<(u64, &Node)> {
        let id = *self.by_path.get(path)?;
        Some((id, self.nodes.get(&id)?))
    }

    pub(super) fn of_mut(&mut self, path: &[u8]) -> Option<(u64, &mut Node)> {
        let id = *self.by_path.get(path)?;
        Some((id, self.nodes.get_mut(&id)?))
    }

    /// The name is gone; the inode stays until it is forgotten.
    pub(super) fn detach(&mut self, path: &[u8]) {
        if let Some(id) = self.by_path.remove(path)
            && let Some(node) = self.nodes.get_mut(&id)
        {
            node.path = None;
        }
    }

    /// [`Inodes::detach`], of what the kernel knows by no name either.
    pub(super) fn unlink(&mut self, path: &[u8]) {
        if let Some((_, node)) = self.of_mut(path) {
            node.unlinked = true;
        }
        self.detach(path);
    }

    /// `old` (and what is below it) got the name `new`. Returns the new paths of what is below.
    pub(super) fn rename(&mut self, old: &[u8], new: &[u8]) -> Vec<Box<[u8]>> {
        self.unlink(new);
        let is_dir = self.of(old).is_none_or(|(_, node)| node.is_dir());
        let mut moved = Vec::new();
        if is_dir {
            moved.extend(self.by_path.keys().filter(|p| is_below(p, old)).cloned());
        }
        let mut below = Vec::new();
        for from in moved.into_iter().chain([old.into()]) {
            let Some(id) = self.by_path.remove(&from) else { continue };
            let to: Arc<[u8]> = [new, &from[old.len()..]].concat().into();
            if from.len() > old.len() {
                below.push((*to).into());
            }
            if let Some(node) = self.nodes.get_mut(&id) {
                node.path = Some(to.clone());
            }
            self.by_path.insert(to, id);
        }
        below
    }

    pub(super) fn forget(&mut self, id: u64, lookups: u64) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0
            && let Some(node) = self.nodes.remove(&id)
            && let Some(path) = node.path
            && self.by_path.get(&path) == Some(&id)
        {
            self.by_path.remove(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REG: u32 = 0o100_000;
    const DIR: u32 = 0o040_000;

    #[test]
    fn numbers_are_the_originals_where_free() {
        let mut inodes = Inodes::default();
        assert_eq!(inodes.look_up(b"/r/a", 77, REG, None, true), 77);
        assert_eq!(inodes.look_up(b"/r/a", 77, REG, None, true), 77);
        let second = inodes.look_up(b"/r/hard-link", 77, REG, None, true);
        assert_ne!(second, 77);
        assert_ne!(inodes.look_up(b"/r/root", 1, DIR, None, true), TOP);
        inodes.forget(77, 1);
        assert!(inodes.get(77).is_some());
        inodes.forget(77, 1);
        assert!(inodes.get(77).is_none() && inodes.of(b"/r/a").is_none());
    }

    #[test]
    fn a_replaced_file_is_another_inode() {
        let mut inodes = Inodes::default();
        let old = inodes.look_up(b"/r/a", 5, REG, None, true);
        let new = inodes.look_up(b"/r/a", 6, REG, None, true);
        assert_ne!(old, new);
        assert!(inodes.get(old).unwrap().path.is_none());
        inodes.forget(old, 1);
        assert_eq!(inodes.of(b"/r/a").unwrap().0, new);
    }

    #[test]
    fn a_link_to_elsewhere_is_another_inode() {
        const LNK: u32 = 0o120_000;
        let mut inodes = Inodes::default();
        let old = inodes.look_up(b"/r/l", 5, LNK, Some(b"a"), false);
        let new = inodes.look_up(b"/r/l", 5, LNK, Some(b"b"), false);
        assert_ne!(old, new);
        assert_eq!((inodes.target(old), inodes.target(new)), (Some(&b"a"[..]), Some(&b"b"[..])));
    }

    #[test]
    fn renaming_a_directory_moves_what_is_below() {
        let mut inodes = Inodes::default();
        inodes.look_up(b"/r/d", 5, DIR, None, true);
        let file = inodes.look_up(b"/r/d/f", 6, REG, None, true);
        inodes.look_up(b"/r/dd", 7, REG, None, true);
        assert_eq!(inodes.rename(b"/r/d", b"/r/e"), [b"/r/e/f".to_vec().into_boxed_slice()]);
        assert_eq!(inodes.of(b"/r/e/f").unwrap().0, file);
        assert!(inodes.of(b"/r/d").is_none() && inodes.of(b"/r/dd").is_some());
    }
}
