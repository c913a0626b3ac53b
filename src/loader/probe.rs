//! How the resolver touches the file system. On a shared file system every operation is a request to its server, so a directory is
//! listed once and answers every later question about its names, and a library is opened once.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, Stat};

use super::elf::ReadAt;

/// The names in a directory with their `d_type` (`DT_*`), without `.` and `..`.
pub type Names = BTreeMap<OsString, u8>;

/// Device and inode number: the identity of an open file.
pub type Inode = (u64, u64);

/// An open file or directory.
#[derive(Debug)]
pub struct Opened<F> {
    pub file: F,
    /// Its path without symbolic links.
    pub canonical: PathBuf,
    /// As `fstat(2)` told.
    pub stat: Stat,
}

impl<F> Opened<F> {
    /// See [`Inode`].
    pub fn inode(&self) -> Inode {
        (self.stat.st_dev, self.stat.st_ino)
    }

    /// Refuses root what lies behind links, where `path` was said to have none: who has put one there since is not to be shown what he may
    /// not reach himself.
    pub(super) fn reached_by(self, path: &Path) -> io::Result<Self> {
        if self.canonical == path || !rustix::process::geteuid().is_root() {
            return Ok(self);
        }
        Err(io::ErrorKind::PermissionDenied.into())
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        u64::try_from(self.stat.st_size).unwrap_or(0)
    }
}

/// The operations that reach the file system. Paths are absolute.
pub trait Probe: Sync {
    type File: ReadAt + Send;
    type Dir;

    /// Opens a file for reading without waiting for a writer.
    fn open(&self, path: &Path) -> io::Result<Opened<Self::File>>;
    /// Opens a directory.
    fn open_dir(&self, path: &Path) -> io::Result<Opened<Self::Dir>>;
    /// Reads all names of an open directory.
    fn names(&self, dir: &Self::Dir) -> io::Result<Names>;
}

/// The file system as this process sees it.
#[derive(Debug, Clone, Copy)]
pub struct FileSystem;

impl FileSystem {
    /// Opens a file by a path without links; see [`Opened::reached_by`].
    pub(super) fn open_canonical(self, path: &Path) -> io::Result<Opened<File>> {
        self.open(path)?.reached_by(path)
    }

    fn open_with(path: &Path, flags: OFlags) -> io::Result<Opened<OwnedFd>> {
        let file = rustix::fs::open(path, flags | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        // The kernel knows the path it walked: asking it costs the file system nothing, unlike resolving the links again.
        let canonical = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        Ok(Opened { file, canonical, stat })
    }
}

impl Probe for FileSystem {
    type File = File;
    type Dir = OwnedFd;

    fn open(&self, path: &Path) -> io::Result<Opened<File>> {
        let Opened { file, canonical, stat } = FileSystem::open_with(path, OFlags::NONBLOCK | OFlags::NOCTTY)?;
        Ok(Opened { file: file.into(), canonical, stat })
    }

    fn open_dir(&self, path: &Path) -> io::Result<Opened<OwnedFd>> {
        FileSystem::open_with(path, OFlags::DIRECTORY)
    }

    fn names(&self, dir: &OwnedFd) -> io::Result<Names> {
        let mut names = Names::new();
        let mut buffer = Vec::with_capacity(64 << 10);
        let mut entries = rustix::fs::RawDir::new(dir.as_fd(), buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.insert(OsString::from_vec(name.to_vec()), d_type(entry.file_type()));
            }
        }
        Ok(names)
    }
}

fn d_type(kind: rustix::fs::FileType) -> u8 {
    // DT_* are the file type bits of st_mode, shifted down (see IFTODT in dirent.h); DT_UNKNOWN is 0.
    if kind == rustix::fs::FileType::Unknown { 0 } else { (kind.as_raw_mode() >> 12) as u8 }
}

/// A directory that was listed.
#[derive(Debug)]
pub struct Listing {
    pub canonical: PathBuf,
    pub stat: Stat,
    pub names: Names,
}

/// What is known about a directory of the search path.
#[derive(Debug, Clone)]
pub enum Directory {
    Absent,
    /// Present but not readable: any name may exist in it.
    Opaque,
    Listed(Arc<Listing>),
}

impl Directory {
    /// Whether opening `name` in it can succeed.
    pub fn may_have(&self, name: &OsStr) -> bool {
        match self {
            Directory::Absent => false,
            Directory::Opaque => true,
            Directory::Listed(listing) => listing.names.contains_key(name),
        }
    }
}

/// The directories that were looked into, each listed once under however many spellings it is reached.
#[derive(Debug)]
pub struct Directories<'a, P> {
    probe: &'a P,
    cwd: &'a Path,
    by_path: HashMap<Vec<u8>, Directory>,
    by_inode: HashMap<Inode, Directory>,
    /// In the order they were first asked for.
    pub listed: Vec<Arc<Listing>>,
    /// Some were relative.
    pub depends_on_cwd: bool,
}

impl<'a, P: Probe> Directories<'a, P> {
    /// Relative paths are taken from `cwd`.
    pub fn new(probe: &'a P, cwd: &'a Path) -> Self {
        Directories {
            probe,
            cwd,
            by_path: HashMap::new(),
            by_inode: HashMap::new(),
            listed: Vec::new(),
            depends_on_cwd: false,
        }
    }

    /// Looks into `path`, at most once.
    pub fn get(&mut self, path: &[u8]) -> Directory {
        if let Some(known) = self.by_path.get(path) {
            return known.clone();
        }
        self.depends_on_cwd |= !path.starts_with(b"/");
        let directory = self.look(&self.cwd.join(OsStr::from_bytes(path)));
        self.by_path.insert(path.to_vec(), directory.clone());
        directory
    }

    fn look(&mut self, path: &Path) -> Directory {
        let opened = match self.probe.open_dir(path) {
            Ok(opened) => opened,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Directory::Absent;
            }
            Err(_) => return Directory::Opaque,
        };
        if let Some(known) = self.by_inode.get(&opened.inode()) {
            return known.clone();
        }
        let inode = opened.inode();
        let directory = match self.probe.names(&opened.file) {
            Ok(names) => {
                let listing = Arc::new(Listing { canonical: opened.canonical, stat: opened.stat, names });
                self.listed.push(listing.clone());
                Directory::Listed(listing)
            }
            Err(_) => Directory::Opaque,
        };
        self.by_inode.insert(inode, directory.clone());
        directory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_listing_under_all_spellings() {
        let top = tempfile::tempdir().unwrap();
        std::fs::create_dir(top.path().join("d")).unwrap();
        std::fs::write(top.path().join("d/file"), "").unwrap();
        std::os::unix::fs::symlink("d", top.path().join("link")).unwrap();
        let mut directories = Directories::new(&FileSystem, top.path());
        for path in ["d/", "link", "d/../link/"] {
            assert!(directories.get(path.as_bytes()).may_have(OsStr::new("file")), "{path}");
            assert!(!directories.get(path.as_bytes()).may_have(OsStr::new("other")), "{path}");
        }
        assert!(!directories.get(b"none").may_have(OsStr::new("file")));
        assert_eq!(directories.listed.len(), 1);
        assert_eq!(directories.listed[0].canonical, top.path().canonicalize().unwrap().join("d"));
        assert_eq!(directories.listed[0].names.values().copied().collect::<Vec<_>>(), [8]);
    }
}
