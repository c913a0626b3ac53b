//! The content of open files: from the store while the catalog says that it has what is there, else from the original.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fuser::{Errno, FileHandle, FopenFlags, OpenAccMode, OpenFlags, ReplyData, ReplyOpen};
use rustix::fs::{OFlags, Stat};

use super::answers::errno;
use super::handles::{Handle, Original, Staged};
use super::inodes::Pages;
use super::original;
use super::parked::{Asked, Key, Question};
use super::skeleton::View;
use crate::loader::catalog::{Change, kind};
use crate::loader::{store, version};
use crate::net::wire::record::{Attr, FileId};

/// How long the kernel believes attributes of a file that is not captured.
pub(super) const FRESH: Duration = Duration::from_secs(5);

/// Whether a file is what the log says.
fn is_still(known: &Attr, stat: &Stat) -> bool {
    let now = version::attr(stat);
    (now.size, now.mtime, now.ctime) == (known.size, known.mtime, known.ctime)
}

impl View {
    /// `known`: what the log says of it, if that is to be believed.
    pub(super) fn open_original(
        &self,
        ino: u64,
        path: &[u8],
        flags: OpenFlags,
        known: Option<&Attr>,
        reply: ReplyOpen,
    ) {
        use rustix::io::Errno;
        self.refresh(path);
        let (file, stat) = match self.place(path).and_then(|place| original::open(&place, flags.0)) {
            Ok(opened) => opened,
            // A FIFO without readers, or a socket.
            Err(Errno::NXIO) => return self.refuse_other(ino, path, kind::FIFO, reply),
            Err(e) => return reply.error(errno(e)),
        };
        if !self.inodes().is(ino, stat.st_ino, stat.st_mode) {
            return self.refuse_other(ino, path, kind::of_mode(stat.st_mode), reply);
        }
        if known.is_some_and(|known| !is_still(known, &stat)) {
            // Somebody outside changed it: the kernel has to ask for its size again.
            self.note_written(path, &stat);
            return reply.error(fuser::Errno::ESTALE);
        }
        let writes = flags.acc_mode() != OpenAccMode::O_RDONLY;
        let mut how = if writes { FopenFlags::empty() } else { FopenFlags::FOPEN_NOFLUSH };
        if self.inodes().fill(ino, known.copied().map_or(Pages::Volatile, Pages::Original)) {
            how |= FopenFlags::FOPEN_KEEP_CACHE;
        }
        if writes {
            self.note_written(path, &stat);
        }
        let handle = Handle::Original(Original::new(ino, file, flags.0));
        reply.opened(FileHandle(self.handles.add(handle)), how);
    }

    /// `path` leads to something else, a `d_type`, than to the inode that the kernel wants to open: it has to look again, and not to be
    /// told by the log what is known to be wrong.
    fn refuse_other(&self, ino: u64, path: &[u8], kind: u8, reply: ReplyOpen) {
        self.inodes().lose_name(ino);
        if self.catalog().has_file(path) {
            self.note(path, Change::Named(Some(kind)));
        }
        reply.error(Errno::ESTALE);
    }

    pub(super) fn open_staged(
        &self,
        ino: u64,
        path: &[u8],
        (id, attr): (FileId, Attr),
        flags: OpenFlags,
        reply: ReplyOpen,
    ) {
        let open = || {
            let file = self.handles.file(id, || self.setup.store.open(id))?;
            let size = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
            Ok::<_, rustix::io::Errno>((file, size))
        };
        match open() {
            Ok((file, size)) => {
                let same = self.inodes().fill(ino, Pages::Store(id));
                let keep = if same { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() };
                let staged = Staged { ino, id, path: path.into(), attr, file, size, original: OnceLock::new() };
                let fh = self.handles.add(Handle::Staged(staged));
                reply.opened(FileHandle(fh), keep | FopenFlags::FOPEN_NOFLUSH);
            }
            Err(e) => {
                log::warn!("staged file {id} cannot be opened: {e}; its original is read");
                self.open_original(ino, path, flags, None, reply);
            }
        }
    }

    pub(super) fn read(&self, fh: u64, offset: u64, size: u32, reply: ReplyData, asked: Asked) {
        let handle = self.handles.get(fh);
        let file = match handle.as_deref() {
            Some(Handle::Original(Original { file, .. })) => file,
            Some(Handle::Staged(staged)) => loop {
                let overtaken = staged.original.get();
                if let Some(Some(original)) = overtaken {
                    break original;
                }
                let catalog = self.catalog();
                if overtaken.is_none() && !catalog.has_at(&staged.path, staged.id) {
                    drop(catalog);
                    match self.overtake(staged) {
                        Ok(()) => continue,
                        Err(e) => return reply.error(errno(e)),
                    }
                }
                let to = offset.saturating_add(size.into()).min(staged.size);
                match catalog.has_content(staged.id, offset, to) {
                    Some(true) => break &*staged.file,
                    // With the catalog locked: what is applied afterwards wakes it.
                    Some(false) => {
                        self.park(Key::Content(staged.id), Question::Read { fh, offset, size, reply }, asked);
                        return;
                    }
                    None => return reply.error(Errno::ESTALE),
                }
            },
            _ => return reply.error(Errno::EBADF),
        };
        let mut buffer = vec![0; size as usize];
        match store::read_at(file, offset, &mut buffer) {
            Ok(n) => {
                match handle.as_deref() {
                    Some(Handle::Staged(Staged { path, original, .. })) => match original.get() {
                        Some(Some(_)) => self.passed.add(path, 1, n as u64),
                        _ => self.avoid(),
                    },
                    Some(Handle::Original(Original { read, .. })) => drop(read.fetch_add(n as u64, Ordering::Relaxed)),
                    _ => {}
                }
                reply.data(&buffer[..n]);
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    /// The catalog no longer says that the store has what is at the handle's path: from now on the handle reads the original, unless the
    /// name leads to another file. Then the store has what this one was.
    fn overtake(&self, staged: &Staged) -> rustix::io::Result<()> {
        use rustix::io::Errno;
        let is_void = self.catalog().has_content(staged.id, 0, 0).is_none();
        let original = match self.path(staged.ino) {
            Some(path) => match self.place(&path).and_then(|place| original::open(&place, 0)) {
                Ok((file, stat)) => (is_void || stat.st_ino == staged.attr.ino).then_some(file),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE) if !is_void => None,
                Err(e) => return Err(e),
            },
            None => {
                let handles = self.handles.of_inode(staged.ino);
                let original = handles.iter().find_map(|handle| match &**handle {
                    Handle::Original(Original { file, .. }) => Some(original::open_again(file, OFlags::RDONLY)),
                    _ => None,
                });
                original.transpose()?
            }
        };
        // Two threads may come here at once; either's will do.
        let _ = staged.original.set(original);
        Ok(())
    }

    /// Compares a file of which the log told nothing but attributes with its original, which somebody outside may change, if nobody here
    /// did lately. The kernel is to believe the attributes so long only.
    pub(super) fn compare(&self, ino: u64, path: &[u8], known: &Attr) {
        use rustix::io::Errno;
        if !self.inodes().is_due(ino, FRESH) {
            return;
        }
        self.passed.add(path, 1, 0);
        match self.stat(path) {
            Ok(stat) if !self.inodes().is(ino, stat.st_ino, stat.st_mode) => {
                self.note(path, Change::Named(Some(kind::of_mode(stat.st_mode))));
            }
            Ok(stat) if !is_still(known, &stat) => self.note_written(path, &stat),
            Err(Errno::NOENT) => self.note(path, Change::Named(None)),
            _ => {}
        }
    }

    /// [`View::overtake`] of all handles of an inode for which that is due. Those that cannot be overtaken now are when they are read.
    pub(super) fn overtake_all(&self, ino: u64) {
        for handle in self.handles.of_inode(ino) {
            if let Handle::Staged(staged) = &*handle
                && staged.original.get().is_none()
                && !self.catalog().has_at(&staged.path, staged.id)
                && let Err(e) = self.overtake(staged)
            {
                log::debug!("the original of staged file {} cannot be opened: {e}", staged.id);
            }
        }
    }

    /// An open file is about to change: the catalog must not say that the store has what is there, though it may have been captured since
    /// it was opened.
    pub(super) fn note_write(&self, ino: u64) {
        if let Some(path) = self.path(ino)
            && self.catalog().has_file(&path)
        {
            self.note(&path, Change::Written(kind::REG));
        }
    }
}
