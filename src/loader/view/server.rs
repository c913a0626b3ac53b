//! The FUSE operations. Questions go to [`super::answers`]; changes are made to the original, then noted.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};

use super::answers::errno;
use super::handles::{Handle, Original};
use super::original::{self, Wish};
use super::parked::Question;
use super::place::Place;
use super::skeleton::View;
use super::{Identity, attributes, inodes};
use crate::loader::catalog::{Change, join, kind};
use crate::loader::tally::requests;

/// Bytes of one write request, at most.
const WRITE_MAX: u32 = 1 << 20;
const O_EXCL: i32 = OFlags::EXCL.bits().cast_signed();
const O_APPEND: i32 = OFlags::APPEND.bits().cast_signed();

pub(super) struct Server(pub(super) Arc<View>);

impl Server {
    fn child(&self, parent: INodeNo, name: &OsStr) -> rustix::io::Result<Vec<u8>> {
        if parent.0 == inodes::TOP {
            return Err(rustix::io::Errno::PERM);
        }
        let directory = self.0.path(parent.0).ok_or(rustix::io::Errno::STALE)?;
        Ok(join(&directory, name.as_bytes()))
    }

    /// Whether who asks is somebody else than the agent: a rank of root's that changed its user.
    fn is_other(&self, request: &Request) -> bool {
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        matches!(self.0.setup.identity, Identity::Exact) && (request.uid(), request.gid()) != own
    }

    /// What others make is theirs; `file`: a file, by whatever name it goes by now.
    fn give(&self, request: &Request, place: &Place<'_>, file: Option<&OwnedFd>) {
        use rustix::fs::{Gid, Uid};
        if !self.is_other(request) {
            return;
        }
        let directory = rustix::fs::fstat(place.directory());
        // Such a directory gives its group.
        let inherits = directory.is_ok_and(|stat| Mode::from_raw_mode(stat.st_mode).contains(Mode::SGID));
        let gid = (!inherits).then(|| Gid::from_raw(request.gid()));
        let uid = Some(Uid::from_raw(request.uid()));
        let given = match file {
            Some(file) => rustix::fs::fchown(file, uid, gid),
            None => rustix::fs::chownat(place.directory(), place.name, uid, gid, AtFlags::SYMLINK_NOFOLLOW),
        };
        if let Err(e) = given {
            log::debug!("{:?} is not given to who made it: {e}", OsStr::from_bytes(place.name));
        }
    }

    /// Makes `name` by `make`, and tells the kernel and the tree of it.
    fn make(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        make: impl FnOnce(&Place<'_>) -> rustix::io::Result<()>,
    ) -> rustix::io::Result<FileAttr> {
        let path = self.child(parent, name)?;
        let place = self.0.place(&path)?;
        make(&place).map_err(|e| self.unexpected(&path, e))?;
        self.give(request, &place, None);
        self.made(&path)
    }

    /// Where something exists that the kernel was told does not, ESTALE makes it look again: else a program that was refused because
    /// of it would not find it.
    fn unexpected(&self, path: &[u8], error: rustix::io::Errno) -> rustix::io::Errno {
        match error {
            rustix::io::Errno::EXIST if self.0.found(path) => rustix::io::Errno::STALE,
            error => error,
        }
    }

    fn made(&self, path: &[u8]) -> rustix::io::Result<FileAttr> {
        // The node before the note: what the log says about our own change must find it, and find it volatile.
        let attr = self.0.look_up_original(path);
        let kind = attr.as_ref().map_or(kind::UNKNOWN, |a| attributes::dirent_kind_of(a.kind));
        self.0.note(path, Change::Named(Some(kind)));
        attr
    }

    fn remove(&self, parent: INodeNo, name: &OsStr, flags: AtFlags, reply: ReplyEmpty) {
        let remove = || {
            let path = self.child(parent, name)?;
            let place = self.0.place(&path)?;
            rustix::fs::unlinkat(place.directory(), place.name, flags)?;
            self.0.inodes().unlink(&path);
            self.0.note(&path, Change::Named(None));
            Ok(())
        };
        finish(remove(), reply);
    }
}

fn finish(result: rustix::io::Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(errno(e)),
    }
}

fn entry(result: rustix::io::Result<FileAttr>, reply: ReplyEntry) {
    match result {
        Ok(attr) => reply.entry(&Duration::ZERO, &attr, Generation(0)),
        Err(e) => reply.error(errno(e)),
    }
}

impl Filesystem for Server {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // Lookups in one directory must not wait for each other: one of them may wait for the log.
        for wish in [InitFlags::FUSE_PARALLEL_DIROPS, InitFlags::FUSE_CACHE_SYMLINKS, InitFlags::FUSE_AUTO_INVAL_DATA] {
            if config.add_capabilities(wish).is_err() {
                log::debug!("this kernel's FUSE lacks {wish:?}");
            }
        }
        let _ = config.set_max_write(WRITE_MAX);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.0.ask(request.pid(), Question::Lookup { parent: parent.0, name: name.to_owned(), reply });
    }

    fn forget(&self, _: &Request, ino: INodeNo, nlookup: u64) {
        self.0.inodes().forget(ino.0, nlookup);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        self.0.ask(request.pid(), Question::Getattr { ino: ino.0, fh: fh.map(|fh| fh.0), reply });
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.0.inodes().target(ino.0) {
            Some(target) => reply.data(target),
            None => reply.error(Errno::ESTALE),
        }
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.0.ask(request.pid(), Question::Opendir { ino: ino.0, reply });
    }

    fn readdir(&self, _: &Request, ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.0.read_dir(fh.0, ino.0, offset, reply);
    }

    fn releasedir(&self, _: &Request, _: INodeNo, fh: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.0.handles.remove(fh.0);
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let sync = || {
            let path = self.0.path(ino.0).ok_or(rustix::io::Errno::STALE)?;
            rustix::fs::fsync(original::open(&self.0.place(&path)?, 0)?.0)
        };
        finish(sync(), reply);
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.0.ask(request.pid(), Question::Open { ino: ino.0, flags, reply });
    }

    fn read(
        &self,
        request: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.0.ask(request.pid(), Question::Read { fh: fh.0, offset, size, reply });
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        how: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let handle = self.0.handles.get(fh.0);
        let Some(Handle::Original(original)) = handle.as_deref() else { return reply.error(Errno::EBADF) };
        self.0.note_write(ino.0);
        // What comes out of the page cache has its place.
        let appends = flags.0 & O_APPEND != 0 && !how.contains(WriteFlags::FUSE_WRITE_CACHE);
        match original.writer(appends).and_then(|file| original::write_at(file, offset, data)) {
            Ok(n) => reply.written(u32::try_from(n).expect("no more than was asked for")),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, fh: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        let handle = self.0.handles.get(fh.0);
        let Some(Handle::Original(Original { file, writes: true, .. })) = handle.as_deref() else { return reply.ok() };
        // A network file system reports at close what it could not write; closing a duplicate makes it say so now.
        match nix::unistd::dup(file).and_then(nix::unistd::close) {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(Errno::from_i32(e as i32)),
        }
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(Handle::Original(Original { file, writes, read, .. })) = self.0.handles.remove(fh.0).as_deref()
            && let Some(path) = self.0.path(ino.0)
        {
            match read.load(Ordering::Relaxed) {
                0 => {}
                bytes => self.0.passed.add(&path, requests(bytes), bytes),
            }
            if *writes && let Ok(stat) = rustix::fs::fstat(file) {
                // It may have been captured again while it was being written.
                self.0.note_written(&path, &stat);
            }
        }
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        match self.0.handles.get(fh.0).as_deref() {
            Some(Handle::Original(Original { file, .. })) => {
                let sync = if datasync { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) };
                finish(sync, reply);
            }
            _ => reply.ok(),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let create = || {
            let path = self.child(parent, name)?;
            let place = self.0.place(&path)?;
            let file = match original::create(&place, flags | O_EXCL, mode) {
                Ok(file) => {
                    self.give(request, &place, Some(&file));
                    file
                }
                // Another host was faster. Who is somebody else may perhaps not open that one: the kernel is to look again.
                Err(rustix::io::Errno::EXIST) if flags & O_EXCL == 0 && self.is_other(request) => {
                    self.0.found(&path);
                    return Err(rustix::io::Errno::STALE);
                }
                Err(rustix::io::Errno::EXIST) if flags & O_EXCL == 0 => original::create(&place, flags, mode)?,
                Err(e) => return Err(self.unexpected(&path, e)),
            };
            let attr = self.made(&path)?;
            self.0.inodes().fill(attr.ino.0, inodes::Pages::Volatile);
            let fh = self.0.handles.add(Handle::Original(Original::new(attr.ino.0, file, flags)));
            Ok((attr, fh))
        };
        match create() {
            Ok((attr, fh)) => reply.created(&Duration::ZERO, &attr, Generation(0), FileHandle(fh), FopenFlags::empty()),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn mknod(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, rdev: u32, reply: ReplyEntry) {
        let make = |place: &Place<'_>| {
            rustix::fs::mknodat(
                place.directory(),
                place.name,
                FileType::from_raw_mode(mode),
                Mode::from_raw_mode(mode & 0o7777),
                rdev.into(),
            )
        };
        entry(self.make(request, parent, name, make), reply);
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let make =
            |place: &Place<'_>| rustix::fs::mkdirat(place.directory(), place.name, Mode::from_raw_mode(mode & 0o7777));
        entry(self.make(request, parent, name, make), reply);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let make = |place: &Place<'_>| rustix::fs::symlinkat(target, place.directory(), place.name);
        entry(self.make(request, parent, name, make), reply);
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let link = || {
            let path = self.child(parent, name)?;
            let old = self.0.path(ino.0).ok_or(rustix::io::Errno::STALE)?;
            let (from, to) = (self.0.place(&old)?, self.0.place(&path)?);
            rustix::fs::linkat(from.directory(), from.name, to.directory(), to.name, AtFlags::empty())
                .map_err(|e| self.unexpected(&path, e))?;
            self.0.note_written(&old, &original::stat(&from)?);
            self.made(&path)
        };
        entry(link(), reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.remove(parent, name, AtFlags::empty(), reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.remove(parent, name, AtFlags::REMOVEDIR, reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if flags.contains(RenameFlags::RENAME_EXCHANGE) {
            return reply.error(Errno::EINVAL);
        }
        let rename = || {
            let (old, new) = (self.child(parent, name)?, self.child(newparent, newname)?);
            let (from, to) = (self.0.place(&old)?, self.0.place(&new)?);
            let stat = original::stat(&from)?;
            let kind = kind::of_mode(stat.st_mode);
            let is_same = |other: Stat| (other.st_dev, other.st_ino) == (stat.st_dev, stat.st_ino);
            if stat.st_nlink > 1 && kind != kind::DIR && flags.is_empty() && original::stat(&to).is_ok_and(is_same) {
                // Two names of one file stay; the kernel takes the old one for gone.
                self.0.invalidate(vec![old.into(), new.into()], false);
                return Ok(());
            }
            let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
            match flags.is_empty() {
                true => rustix::fs::renameat(from.directory(), from.name, to.directory(), to.name)?,
                false => rustix::fs::renameat_with(from.directory(), from.name, to.directory(), to.name, flags)?,
            }
            let mut below = self.0.inodes().rename(&old, &new);
            // What was not in there may be made under its new name, of which nothing is told.
            let absent = if kind == kind::DIR { self.0.absent().take_within(&old) } else { Vec::new() };
            below.extend(absent.iter().map(|name| [&new[..], &**name].concat().into()));
            self.0.note(&old, Change::Named(None));
            self.0.note(&new, Change::Named(Some(kind)));
            self.0.invalidate(below, false);
            Ok(())
        };
        finish(rename(), reply);
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        fh: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let wish = Wish { mode, uid, gid, size, atime, mtime };
        let set = || {
            let path = self.0.path(ino.0).filter(|path| self.0.leads_to(path, ino.0));
            let handle = fh.and_then(|fh| self.0.handles.get(fh.0)).or_else(|| match path {
                Some(_) => None,
                None => self.0.handles.of_inode(ino.0).into_iter().next(),
            });
            let place = path.as_deref().map(|path| self.0.place(path)).transpose()?;
            let is = |stat: &Stat| self.0.inodes().is(ino.0, stat.st_ino, stat.st_mode);
            original::set(place.as_ref(), is, handle.as_deref(), wish)?;
            match (path, handle.as_deref()) {
                (Some(path), _) => {
                    let stat = self.0.stat(&path)?;
                    self.0.note_written(&path, &stat);
                    Ok(stat)
                }
                (None, Some(Handle::Original(Original { file, .. }))) => rustix::fs::fstat(file),
                _ => Err(rustix::io::Errno::STALE),
            }
        };
        match set() {
            Ok(stat) => {
                let directory = || self.0.path(ino.0).and_then(|path| self.0.directory_of(&path));
                reply.attr(&Duration::ZERO, &attributes::of_stat(&stat, ino.0, &self.0.setup.identity, directory));
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    fn statfs(&self, _: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let path = self.0.path(ino.0).or_else(|| self.0.roots.first().map(|r| r.clone().into()));
        match rustix::fs::statvfs(path.as_deref().unwrap_or(b"/")) {
            Ok(s) => {
                let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
                let (bsize, frsize, name_max) = (small(s.f_bsize), small(s.f_frsize), small(s.f_namemax));
                reply.statfs(s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, bsize, name_max, frsize);
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    // Answered ENOSYS once, the kernel does not ask again.

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _: &Request, _: INodeNo, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }

    fn setxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn removexattr(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: fuser::ReplyLseek) {
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: fuser::IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: fuser::ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let handle = self.0.handles.get(fh.0);
        let Some(Handle::Original(Original { file, .. })) = handle.as_deref() else { return reply.error(Errno::EBADF) };
        self.0.note_write(ino.0);
        let flags = rustix::fs::FallocateFlags::from_bits_retain(mode.cast_unsigned());
        finish(rustix::fs::fallocate(file, flags, offset, length), reply);
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: fuser::CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        // The kernel copies through the page cache instead.
        reply.error(Errno::ENOSYS);
    }
}
