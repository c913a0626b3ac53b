//! The staged files of a node: one file per [`FileId`], named by its decimal number, in a directory that is known by a descriptor only
//! (it may lie in a mount namespace that this process is not in).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::buffer::spare_capacity;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use rustix::io::Errno;

use crate::error::{Context, Error, Result};
use crate::net::wire::record::{Attr, FileId};

const ROOMIER: &str = "choose a larger place with --store DIR";

/// The store. All methods may be called from any thread; who writes a chunk must not write it twice at once.
#[derive(Debug)]
pub struct Store {
    directory: OwnedFd,
    sealed: bool,
    unfinished: Mutex<HashMap<FileId, Unfinished>>,
}

/// What `finish` will set; kept out of the inode because writing changes both.
#[derive(Debug)]
struct Unfinished {
    attr: Option<Attr>,
    size: u64,
}

impl Store {
    /// `sealed`: programs reach its files through read-only mounts alone.
    pub fn new(directory: OwnedFd, sealed: bool) -> Self {
        Store { directory, sealed, unfinished: Mutex::default() }
    }

    /// The descriptor given to [`Store::new`].
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Fails now rather than in the middle when `bytes`, what is here included, do not fit.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let stat = rustix::fs::fstatvfs(&self.directory).op("measure the node's store")?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize).saturating_add(self.used());
        if bytes > free {
            let cause = format!("{} MiB are needed and {} MiB are free", bytes.div_ceil(1 << 20), free >> 20);
            return Err(Error::new("stage the program's files in the node's store", cause).remedy(ROOMIER));
        }
        Ok(())
    }

    /// Bytes that its files occupy.
    pub fn used(&self) -> u64 {
        let entries = rustix::fs::Dir::read_from(&self.directory).into_iter().flatten().flatten();
        let blocks = entries
            .filter(|e| e.file_type() == rustix::fs::FileType::RegularFile)
            .filter_map(|e| rustix::fs::statat(&self.directory, e.file_name(), AtFlags::SYMLINK_NOFOLLOW).ok())
            .map(|stat| u64::try_from(stat.st_blocks).unwrap_or(0));
        blocks.sum::<u64>() << 9
    }

    /// Begins file `id`, if it is not, for content that comes before its [`Store::create`].
    pub fn begin(&self, id: FileId) -> Result<()> {
        if let Entry::Vacant(place) = self.lock().entry(id) {
            let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
            let made = rustix::fs::openat(&self.directory, name(id), flags, Mode::RUSR | Mode::WUSR);
            made.op_on("create in the store", name(id))?;
            place.insert(Unfinished { attr: None, size: u64::MAX });
        }
        Ok(())
    }

    /// File `id` has the size of its original, of which [`Store::finish`] gives it more.
    pub fn create(&self, id: FileId, attr: &Attr) -> Result<()> {
        self.begin(id)?;
        let set = || rustix::fs::ftruncate(self.open_with(id, OFlags::WRONLY)?, attr.size);
        set().op_on("create in the store", name(id))?;
        self.lock().insert(id, Unfinished { attr: Some(*attr), size: attr.size });
        Ok(())
    }

    /// Puts raw bytes at `offset` of an unfinished file. Bytes beyond its size are refused.
    pub fn write_chunk(&self, id: FileId, offset: u64, bytes: &[u8]) -> Result<()> {
        let size = self.lock().get(&id).map(|u| u.size);
        let end = offset.checked_add(bytes.len() as u64);
        if !matches!((size, end), (Some(size), Some(end)) if end <= size) {
            return Err(Error::new("write into the store", "a chunk outside its file").on(name(id)));
        }
        let file = self.open_with(id, OFlags::WRONLY).op_on("write into the store", name(id))?;
        let mut rest = bytes;
        while !rest.is_empty() {
            match rustix::io::pwrite(&file, rest, offset + (bytes.len() - rest.len()) as u64) {
                Ok(0) => return Err(Error::new("write into the store", "no progress").on(name(id))),
                Ok(n) => rest = &rest[n..],
                Err(Errno::INTR) => {}
                // Something else has filled the place meanwhile.
                Err(Errno::NOSPC) => {
                    let stat = rustix::fs::fstatvfs(&self.directory).op("measure the node's store")?;
                    let total = stat.f_blocks.saturating_mul(stat.f_frsize) >> 20;
                    let cause = format!("{} KiB are needed and its {total} MiB are full", rest.len().div_ceil(1 << 10));
                    return Err(Error::new("write into the node's store", cause).remedy(ROOMIER));
                }
                Err(e) => return Err(Error::new("write into the store", e).on(name(id))),
            }
        }
        Ok(())
    }

    /// Ends file `id`: the original's mode (readable for its owner; writable for nobody, unless the store is sealed), its modification time
    /// and, where root has sealed it, its owner.
    pub fn finish(&self, id: FileId) -> Result<()> {
        let Some(Unfinished { attr: Some(Attr { mode, uid, gid, mtime, .. }), .. }) = self.lock().remove(&id) else {
            return Err(Error::new("finish in the store", "it was not begun").on(name(id)));
        };
        let time = Timespec { tv_sec: mtime.0, tv_nsec: i64::from(mtime.1) };
        let set = || {
            let file = self.open_with(id, OFlags::RDONLY)?;
            rustix::fs::futimens(&file, &Timestamps { last_access: time, last_modification: time })?;
            if self.sealed && rustix::process::geteuid().is_root() {
                // A disk may know no owners, and a container not all.
                let _ = rustix::fs::fchown(&file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
            }
            let kept = if self.sealed { 0o777 } else { 0o555 };
            rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & kept | 0o400))
        };
        set().op_on("finish in the store", name(id))
    }

    /// Reads at `offset` into `buffer` until it is full or the file ends; returns the count.
    pub fn read_at(&self, id: FileId, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let mut read = || read_at(self.open(id)?, offset, buffer);
        read().op_on("read from the store", name(id))
    }

    /// Opens for reading.
    pub fn open(&self, id: FileId) -> rustix::io::Result<OwnedFd> {
        self.open_with(id, OFlags::RDONLY)
    }

    /// Removes a file, begun or finished. Who has it open keeps it.
    pub fn remove(&self, id: FileId) -> Result<()> {
        self.lock().remove(&id);
        rustix::fs::unlinkat(&self.directory, name(id), AtFlags::empty()).op_on("remove from the store", name(id))
    }

    fn open_with(&self, id: FileId, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        rustix::fs::openat(&self.directory, name(id), flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<FileId, Unfinished>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of a file in the store's directory.
pub fn name(id: FileId) -> String {
    id.to_string()
}

/// `len` bytes at `offset`, fewer where the file ends.
pub fn read_vec(file: impl AsFd, offset: u64, len: usize) -> rustix::io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let at = offset + bytes.len() as u64;
        match rustix::io::pread(&file, spare_capacity(&mut bytes), at) {
            Ok(0) => break,
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    bytes.truncate(len);
    Ok(bytes)
}

/// Reads at `offset` until `buffer` is full or the file ends; returns the count.
pub fn read_at(file: impl AsFd, offset: u64, buffer: &mut [u8]) -> rustix::io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match rustix::io::pread(&file, &mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store(sealed: bool) -> (tempfile::TempDir, Store) {
        let directory = tempfile::tempdir().unwrap();
        let fd = rustix::fs::open(directory.path(), OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty()).unwrap();
        (directory, Store::new(fd, sealed))
    }

    fn attr(size: u64, mode: u32, mtime: (i64, u32)) -> Attr {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        Attr { mode, uid, gid, nlink: 1, ino: 9, size, mtime, ctime: mtime }
    }

    #[test]
    fn chunks_in_any_order_make_the_original() {
        let (directory, store) = store(false);
        assert!(store.write_chunk(3, 3, b"def").is_err());
        store.begin(3).unwrap();
        store.write_chunk(3, 3, b"def").unwrap();
        store.create(3, &attr(6, 0o100_755, (1_000, 5))).unwrap();
        store.write_chunk(3, 0, b"abc").unwrap();
        assert!(store.write_chunk(3, 4, b"xyz").is_err());
        assert!(store.write_chunk(3, u64::MAX, b"xyz").is_err());
        store.finish(3).unwrap();
        let stat = rustix::fs::stat(directory.path().join("3")).unwrap();
        assert_eq!((stat.st_mode & 0o7777, stat.st_mtime, stat.st_mtime_nsec), (0o555, 1_000, 5));
        let mut buffer = [0; 9];
        assert_eq!(store.read_at(3, 1, &mut buffer).unwrap(), 5);
        assert_eq!(&buffer[..5], b"bcdef");
        assert_eq!(read_vec(store.open(3).unwrap(), 1, 3).unwrap(), b"bcd");
        assert_eq!(read_vec(store.open(3).unwrap(), 4, 9).unwrap(), b"ef");
        assert!(store.write_chunk(3, 0, b"a").is_err(), "a finished file does not change");
        store.remove(3).unwrap();
        assert_eq!(store.open(3).unwrap_err(), Errno::NOENT);
    }

    #[test]
    fn its_owner_can_read_whatever_the_mode() {
        let (directory, store) = store(false);
        store.create(0, &attr(0, 0o100_070, (0, 0))).unwrap();
        store.finish(0).unwrap();
        assert_eq!(rustix::fs::stat(directory.path().join("0")).unwrap().st_mode & 0o7777, 0o450);
        assert!(store.finish(0).is_err());
    }

    #[test]
    fn what_is_sealed_is_as_its_original() {
        let (directory, store) = store(true);
        let root = rustix::process::geteuid().is_root();
        let mut attr = attr(0, 0o104_750, (0, 0));
        if root {
            (attr.uid, attr.gid) = (65534, 65533);
        }
        store.create(0, &attr).unwrap();
        store.finish(0).unwrap();
        let stat = rustix::fs::stat(directory.path().join("0")).unwrap();
        assert_eq!((stat.st_mode & 0o7777, stat.st_uid, stat.st_gid), (0o750, attr.uid, attr.gid));
    }

    #[test]
    fn lack_of_space_is_told_before_with_a_remedy() {
        let (_directory, store) = store(false);
        store.reserve(1).unwrap();
        assert!(store.reserve(1 << 60).unwrap_err().to_string().contains("--store"));
    }
}
