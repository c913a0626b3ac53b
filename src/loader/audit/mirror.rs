//! The staged files under their original paths, below one directory of the store: whatever spelling of a path leads to a file there leads to
//! the staged one here. The auditor's answers are such paths, and the dynamic linker's names are what follows that directory's.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use super::walk::Step;
use crate::error::{Context, Result};
use crate::loader::store;
use crate::net::wire::record::FileId;
use crate::sys::audit_table::ROOT;

/// See the module.
#[derive(Debug)]
pub(super) struct Mirror {
    /// Its path.
    pub(super) root: Vec<u8>,
    directory: OwnedFd,
    /// The target of what is a link, by place.
    made: HashMap<Vec<u8>, Option<Vec<u8>>>,
    files: HashMap<Vec<u8>, FileId>,
}

impl Mirror {
    /// Makes it, in the store that lies at `place`.
    pub(super) fn create(store: BorrowedFd<'_>, place: &[u8]) -> Result<Mirror> {
        rustix::fs::mkdirat(store, ROOT, Mode::RWXU).op_on("make in the store", ROOT)?;
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let directory = rustix::fs::openat(store, ROOT, flags, Mode::empty()).op_on("open in the store", ROOT)?;
        let root = [place, b"/", ROOT.as_bytes()].concat();
        Ok(Mirror { root, directory, made: HashMap::new(), files: HashMap::new() })
    }

    /// The path here of what has this path there.
    pub(super) fn place(&self, path: &[u8]) -> Vec<u8> {
        [&self.root, path].concat()
    }

    /// Puts a file of the store here, and everything on the way to it.
    ///
    /// # Errors
    /// The store is full.
    pub(super) fn add(
        &mut self,
        store: BorrowedFd<'_>,
        steps: Vec<Step>,
        canonical: &[u8],
        id: FileId,
    ) -> rustix::io::Result<()> {
        for step in steps {
            let (at, target) = match step {
                Step::Dir(path) => (path, None),
                Step::Link { at, target } => (at, Some(target)),
            };
            let before = self.made.get(&at);
            if before == Some(&target) {
                continue;
            }
            match &target {
                None => {
                    if let Some(Some(_)) = before {
                        rustix::fs::unlinkat(&self.directory, relative(&at), AtFlags::empty())?;
                    }
                    match rustix::fs::mkdirat(&self.directory, relative(&at), Mode::RWXU) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(error),
                    }
                }
                Some(target) => {
                    let target = if target.starts_with(b"/") { self.place(target) } else { target.clone() };
                    self.replace(&at, |name| rustix::fs::symlinkat(&*target, &self.directory, name))?;
                }
            }
            self.made.insert(at, target);
        }
        if self.files.get(canonical) != Some(&id) {
            let link =
                |name: &[u8]| rustix::fs::linkat(store, store::name(id), &self.directory, name, AtFlags::empty());
            self.replace(canonical, link)?;
            self.files.insert(canonical.to_vec(), id);
        }
        Ok(())
    }

    /// Whoever comes by this path is led to the original, if it led to this file of the store.
    ///
    /// # Errors
    /// The store is full.
    pub(super) fn give_up(&mut self, canonical: &[u8], id: FileId) -> rustix::io::Result<()> {
        if self.files.get(canonical) == Some(&id) {
            self.replace(canonical, |name| rustix::fs::symlinkat(canonical, &self.directory, name))?;
            self.files.remove(canonical);
        }
        Ok(())
    }

    /// Makes a name, also in the place of an older one: never is there none.
    fn replace(&self, path: &[u8], make: impl Fn(&[u8]) -> rustix::io::Result<()>) -> rustix::io::Result<()> {
        const FRESH: &[u8] = b".fresh";
        match make(relative(path)) {
            Err(Errno::EXIST) => {
                // Of one that could not take its place.
                let _ = rustix::fs::unlinkat(&self.directory, FRESH, AtFlags::empty());
                make(FRESH)?;
                rustix::fs::renameat(&self.directory, FRESH, &self.directory, relative(path))
            }
            made => made,
        }
    }
}

fn relative(path: &[u8]) -> &[u8] {
    path.strip_prefix(b"/").unwrap_or(path)
}

/// The directory trees from which a program may open what this node knows of: the file systems on which the roots lie. A path that leads
/// to a root through a link is below them, too.
pub(super) fn file_systems(roots: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let device = |path: &[u8]| rustix::fs::statat(CWD, path, AtFlags::empty()).map(|stat| stat.st_dev).ok();
    let mut found: Vec<Vec<u8>> = Vec::new();
    for root in roots {
        let (own, mut top) = (device(root), &root[..]);
        while let Some(parent) = crate::loader::catalog::parent(top).filter(|parent| device(parent) == own) {
            top = parent;
        }
        // Where the whole system is shared, what is asked about stays within bounds.
        let top = if top == b"/" { root } else { top };
        if !found.iter().any(|known| known == top) {
            found.push(top.to_vec());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::MetadataExt;
    use std::path::Path;

    #[test]
    fn every_spelling_leads_to_the_staged_file() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().to_str().unwrap().as_bytes();
        let store = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty()).unwrap();
        let mut mirror = Mirror::create(store.as_fd(), path).unwrap();
        fs::write(place.path().join("3"), "old").unwrap();
        fs::write(place.path().join("4"), "new").unwrap();
        let steps = || {
            let dir = |path: &str| Step::Dir(path.as_bytes().to_vec());
            let link = |at: &str, target: &str| Step::Link { at: at.into(), target: target.into() };
            vec![dir("/s"), link("/s/l", "app"), link("/s/m", "/s/l"), dir("/s/app"), dir("/s/app/lib")]
        };
        mirror.add(store.as_fd(), steps(), b"/s/app/lib/x.so", 3).unwrap();
        let read = |spelled: &str| {
            let at = mirror.place(spelled.as_bytes());
            fs::read_to_string(std::str::from_utf8(&at).unwrap()).unwrap()
        };
        for spelled in ["/s/app/lib/x.so", "/s/l/lib/x.so", "/s/m/../app/lib//x.so"] {
            assert_eq!(read(spelled), "old");
        }
        mirror.add(store.as_fd(), steps(), b"/s/app/lib/x.so", 4).unwrap();
        let at = mirror.place(b"/s/l/lib/x.so");
        assert_eq!(fs::read_to_string(std::str::from_utf8(&at).unwrap()).unwrap(), "new");
    }

    #[test]
    fn what_was_given_up_is_the_original_and_takes_no_place() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().to_str().unwrap();
        let store = rustix::fs::open(path, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty()).unwrap();
        let mut mirror = Mirror::create(store.as_fd(), path.as_bytes()).unwrap();
        let (original, staged) = (format!("{path}/x.so"), place.path().join("3"));
        fs::write(&original, "original").unwrap();
        fs::write(&staged, "staged").unwrap();
        let steps = || {
            let above = Path::new(&original).ancestors().skip(1).filter(|above| above.parent().is_some());
            let mut steps: Vec<_> = above.map(|above| Step::Dir(above.as_os_str().as_bytes().to_vec())).collect();
            steps.reverse();
            steps
        };
        let there = String::from_utf8(mirror.place(original.as_bytes())).unwrap();
        mirror.add(store.as_fd(), steps(), original.as_bytes(), 3).unwrap();
        mirror.give_up(original.as_bytes(), 2).unwrap();
        assert_eq!(fs::read_to_string(&there).unwrap(), "staged", "another version");
        mirror.give_up(original.as_bytes(), 3).unwrap();
        assert_eq!(
            (fs::read_to_string(&there).unwrap(), fs::metadata(&staged).unwrap().nlink()),
            ("original".into(), 1)
        );
        mirror.add(store.as_fd(), steps(), original.as_bytes(), 3).unwrap();
        assert_eq!(fs::read_to_string(&there).unwrap(), "staged");
    }
}
