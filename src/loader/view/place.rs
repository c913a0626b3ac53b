//! Where originals are. Paths are canonical up to their last component, as the front end saw them; what lies above a view's roots may be
//! a link on this host, and what is in them somebody may have exchanged since.
//!
//! Ranks of root's job may have become other users, and then the kernel has checked their rights along the path that it believes: so for
//! root the way from a root of the view is walked without following any link, and what is done is done in the directory that was reached.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, Result};

use super::skeleton::View;
use super::{Identity, original};
use crate::loader::catalog::{Change, as_path, file_name, is_within, kind, parent};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A name in a directory, or, if that is none, from the top.
#[derive(Debug)]
pub(super) struct Place<'a> {
    directory: Option<OwnedFd>,
    pub(super) name: &'a [u8],
}

impl Place<'_> {
    /// What [`Place::name`] is to be taken from.
    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_ref().map_or(CWD, AsFd::as_fd)
    }
}

/// A root of the view, and its path on this host without links.
#[derive(Debug)]
pub(super) struct Tree {
    root: Box<[u8]>,
    real: Vec<u8>,
}

impl Tree {
    /// To be called before any rank of the job can reach the view.
    pub(super) fn new(root: &[u8]) -> Self {
        let real =
            std::fs::canonicalize(as_path(root)).map_or(root.to_vec(), |p| p.into_os_string().into_encoded_bytes());
        Tree { root: root.into(), real }
    }
}

impl View {
    /// `lstat(2)` of an original.
    pub(super) fn stat(&self, path: &[u8]) -> Result<Stat> {
        original::stat(&self.place(path)?)
    }

    /// The place of an original. Where a link stands in the way, somebody put it there and the log has not said so: it is noted, and by
    /// ESTALE the kernel looks again and follows it with the rights of who asks.
    pub(super) fn place<'a>(&self, path: &'a [u8]) -> Result<Place<'a>> {
        let tree = self.trees.get().and_then(|trees| trees.iter().find(|tree| is_within(path, &tree.root)));
        let (Identity::Exact, Some(tree)) = (&self.setup.identity, tree) else {
            return Ok(Place { directory: None, name: path });
        };
        let (directory, name) = match parent(path).filter(|_| *path != *tree.root) {
            Some(directory) => (directory, file_name(path)),
            None => (path, &b"."[..]),
        };
        match without_links(&[&tree.real, &directory[tree.root.len()..]].concat()) {
            Ok(directory) => Ok(Place { directory: Some(directory), name }),
            Err(Errno::LOOP) => {
                self.note_link(directory, tree);
                Err(Errno::STALE)
            }
            Err(e) => Err(e),
        }
    }

    /// Notes what leads elsewhere between a root and one of its directories.
    fn note_link(&self, directory: &[u8], tree: &Tree) {
        let below = directory.iter().enumerate().skip(tree.root.len() + 1).filter(|(_, byte)| **byte == b'/');
        let ends = below.map(|(end, _)| end).chain([directory.len()]);
        for path in ends.map(|end| &directory[..end]).filter(|path| path.len() > tree.root.len()) {
            // All before it are no links.
            match self.stat(path).map(|stat| kind::of_mode(stat.st_mode)) {
                Ok(kind::DIR) => {}
                Ok(kind) => return self.note(path, Change::Named(Some(kind))),
                Err(_) => return,
            }
        }
    }
}

/// Opens a directory, if no component of its path is a link.
fn without_links(path: &[u8]) -> Result<OwnedFd> {
    match rustix::fs::openat2(CWD, path, DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        // Before Linux 5.6, and where a filter does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => walk(path),
        result => result,
    }
}

fn walk(path: &[u8]) -> Result<OwnedFd> {
    let mut directory = rustix::fs::open("/", DIRECTORY, Mode::empty())?;
    for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
        directory = match rustix::fs::openat(&directory, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
            // With O_PATH and O_DIRECTORY a link is no directory.
            Err(Errno::NOTDIR) if is_link(&directory, name) => return Err(Errno::LOOP),
            result => result?,
        };
    }
    Ok(directory)
}

fn is_link(directory: &OwnedFd, name: &[u8]) -> bool {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_symlink())
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn links_are_not_followed_whoever_walks() {
        let top = tempfile::tempdir().unwrap();
        let top = top.path().canonicalize().unwrap();
        std::fs::create_dir_all(top.join("a/b")).unwrap();
        std::fs::write(top.join("file"), "").unwrap();
        std::os::unix::fs::symlink("a", top.join("l")).unwrap();
        for open in [without_links, walk] {
            let open = |path: &str| open(top.join(path).as_os_str().as_bytes()).map(drop);
            assert_eq!(open("a/b"), Ok(()));
            assert_eq!([open("l"), open("l/b")], [Err(Errno::LOOP); 2]);
            assert_eq!([open("file"), open("none")], [Err(Errno::NOTDIR), Err(Errno::NOENT)]);
        }
    }
}
