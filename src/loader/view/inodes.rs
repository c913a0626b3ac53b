//! The inodes a kernel knows: node number <-> path.
//!
//! A node's number is what programs see as `st_ino`, so it is the original's where that is free, else one that no file system uses: for the
//! second path of a hard-linked file, and for equal numbers from two file systems.

use std::collections::HashMap;
use std::sync::Arc;

use crate::loader::catalog::is_below;

/// The directory whose children are the roots of the view.
pub(super) const TOP: u64 = 1;

const OWN_NUMBERS: u64 = 1 << 62;

#[derive(Debug)]
pub(super) struct Node {
    /// `None` once the name is gone, while the kernel still has the inode.
    pub(super) path: Option<Arc<[u8]>>,
    original: u64,
    /// `st_mode & S_IFMT`.
    kind: u32,
    lookups: u64,
    /// The kernel may hold its name without limit.
    pub(super) stable: bool,
}

impl Node {
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
    pub(super) fn look_up(&mut self, path: &[u8], original: u64, mode: u32, stable: bool) -> u64 {
        let kind = mode & super::attributes::S_IFMT;
        if let Some(&id) = self.by_path.get(path)
            && let Some(node) = self.nodes.get_mut(&id)
        {
            if (node.original, node.kind) == (original, kind) {
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
        self.nodes.insert(id, Node { path: Some(path), original, kind, lookups: 1, stable });
        id
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(super) fn get(&self, id: u64) -> Option<&Node> {
        self.nodes.get(&id)
    }

    /// The kernel is given this inode's attributes without limit.
    pub(super) fn mark_stable(&mut self, id: u64) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.stable = true;
        }
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

    /// `old` (and what is below it) got the name `new`. Returns the new paths of what is below.
    pub(super) fn rename(&mut self, old: &[u8], new: &[u8]) -> Vec<Box<[u8]>> {
        self.detach(new);
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
        assert_eq!(inodes.look_up(b"/r/a", 77, REG, true), 77);
        assert_eq!(inodes.look_up(b"/r/a", 77, REG, true), 77);
        let second = inodes.look_up(b"/r/hard-link", 77, REG, true);
        assert_ne!(second, 77);
        assert_ne!(inodes.look_up(b"/r/root", 1, DIR, true), TOP);
        inodes.forget(77, 1);
        assert!(inodes.get(77).is_some());
        inodes.forget(77, 1);
        assert!(inodes.get(77).is_none() && inodes.of(b"/r/a").is_none());
    }

    #[test]
    fn a_replaced_file_is_another_inode() {
        let mut inodes = Inodes::default();
        let old = inodes.look_up(b"/r/a", 5, REG, true);
        let new = inodes.look_up(b"/r/a", 6, REG, true);
        assert_ne!(old, new);
        assert!(inodes.get(old).unwrap().path.is_none());
        inodes.forget(old, 1);
        assert_eq!(inodes.of(b"/r/a").unwrap().0, new);
    }

    #[test]
    fn renaming_a_directory_moves_what_is_below() {
        let mut inodes = Inodes::default();
        inodes.look_up(b"/r/d", 5, DIR, true);
        let file = inodes.look_up(b"/r/d/f", 6, REG, true);
        inodes.look_up(b"/r/dd", 7, REG, true);
        assert_eq!(inodes.rename(b"/r/d", b"/r/e"), [b"/r/e/f".to_vec().into_boxed_slice()]);
        assert_eq!(inodes.of(b"/r/e/f").unwrap().0, file);
        assert!(inodes.of(b"/r/d").is_none() && inodes.of(b"/r/dd").is_some());
    }
}
