//! The inodes that some host's kernel knows: an `O_PATH` descriptor each, which survives renames.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;

/// Inode numbers are those of the directory behind, so they are the same on every host; the root is 1.
pub(crate) struct Nodes {
    root: Arc<File>,
    device: u64,
    root_ino: u64,
    known: Mutex<HashMap<u64, Node>>,
    /// Held for writing until what is made has its owner: another host would remember the wrong one.
    pub(crate) making: RwLock<()>,
}

struct Node {
    file: Arc<File>,
    /// Lookups of all hosts that were not forgotten yet.
    lookups: u64,
}

const PATH: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Nodes {
    pub(crate) fn new(backing: &Path) -> io::Result<Nodes> {
        let root = File::from(rustix::fs::open(backing, PATH | OFlags::DIRECTORY, Mode::empty())?);
        let meta = root.metadata()?;
        Ok(Nodes {
            root: Arc::new(root),
            device: meta.dev(),
            root_ino: meta.ino(),
            known: Mutex::default(),
            making: RwLock::default(),
        })
    }

    pub(crate) fn get(&self, ino: INodeNo) -> io::Result<Arc<File>> {
        if ino == INodeNo::ROOT {
            return Ok(self.root.clone());
        }
        self.lock().get(&ino.0).map(|n| n.file.clone()).ok_or_else(|| Errno::STALE.into())
    }

    /// Finds `name` and counts the lookup that the kernel will forget one day.
    pub(crate) fn lookup(&self, parent: INodeNo, name: &OsStr) -> io::Result<FileAttr> {
        let file = File::from(openat(&*self.get(parent)?, name, PATH, Mode::empty())?);
        let meta = file.metadata()?;
        if meta.dev() != self.device {
            // Inode numbers would clash.
            return Err(Errno::XDEV.into());
        }
        let attr = self.attributes(&meta);
        if attr.ino != INodeNo::ROOT {
            self.lock().entry(attr.ino.0).or_insert_with(|| Node { file: Arc::new(file), lookups: 0 }).lookups += 1;
        }
        Ok(attr)
    }

    pub(crate) fn forget(&self, ino: INodeNo, lookups: u64) {
        let mut known = self.lock();
        if let Some(node) = known.get_mut(&ino.0) {
            node.lookups = node.lookups.saturating_sub(lookups);
            if node.lookups == 0 {
                known.remove(&ino.0);
            }
        }
    }

    pub(crate) fn getattr(&self, ino: INodeNo) -> io::Result<FileAttr> {
        Ok(self.attributes(&self.get(ino)?.metadata()?))
    }

    /// The path below the backing directory at present, if the inode is still known and linked.
    pub(crate) fn path(&self, ino: INodeNo) -> Option<PathBuf> {
        let root = std::fs::read_link(magic(&self.root)).ok()?;
        let node = self.get(ino).ok()?;
        let path = std::fs::read_link(magic(&node)).ok()?;
        path.strip_prefix(root).ok().map(Path::to_owned)
    }

    fn attributes(&self, meta: &Metadata) -> FileAttr {
        let ino = if meta.ino() == self.root_ino { INodeNo::ROOT } else { INodeNo(meta.ino()) };
        FileAttr {
            ino,
            size: meta.size(),
            blocks: meta.blocks(),
            atime: time(meta.atime(), meta.atime_nsec()),
            mtime: time(meta.mtime(), meta.mtime_nsec()),
            ctime: time(meta.ctime(), meta.ctime_nsec()),
            crtime: UNIX_EPOCH,
            kind: kind(meta.file_type()),
            perm: (meta.mode() & 0o7777) as u16,
            nlink: u32::try_from(meta.nlink()).unwrap_or(u32::MAX),
            uid: meta.uid(),
            gid: meta.gid(),
            rdev: u32::try_from(meta.rdev()).unwrap_or(0),
            blksize: 128 << 10,
            flags: 0,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Node>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name by which an `O_PATH` descriptor can be used where only paths are taken.
pub(crate) fn magic(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

pub(crate) fn kind(kind: std::fs::FileType) -> FileType {
    match kind {
        k if k.is_dir() => FileType::Directory,
        k if k.is_symlink() => FileType::Symlink,
        k if k.is_fifo() => FileType::NamedPipe,
        k if k.is_socket() => FileType::Socket,
        k if k.is_char_device() => FileType::CharDevice,
        k if k.is_block_device() => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn time(seconds: i64, nanoseconds: i64) -> SystemTime {
    let fraction = Duration::from_nanos(nanoseconds.unsigned_abs());
    let whole = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { UNIX_EPOCH - whole + fraction } else { UNIX_EPOCH + whole + fraction }
}
