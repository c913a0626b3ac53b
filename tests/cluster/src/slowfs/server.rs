//! The server process: mounts on every host, operations on the backing directory, replies through the queue.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, Session, SessionACL,
    TimeOrNow, WriteFlags,
};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns};
use rustix::fs::{AtFlags, CWD, Mode, linkat, mkdirat, mknodat, readlinkat, renameat_with, symlinkat, unlinkat};

use super::control;
use super::files::{self, Change, Owner};
use super::nodes::{Nodes, magic};
use super::ops::{Counters, HostOps};
use super::queue::Queue;
use crate::spec::Spec;

/// Largest request, and how far the kernel reads ahead.
const REQUEST_MAX: u32 = 128 << 10;
/// Bytes of an entry in a listing with attributes, about.
const ENTRY: usize = 160;
/// Bytes that a file whose name ends with `.eio` or `.edquot` takes before writes to it fail so.
const FAILS_FROM: u64 = 64 << 10;
/// Threads sending replies: a reply of 128 KiB costs about 30 us of copying.
const REPLIERS: usize = 2;

/// What all mounts share.
pub(crate) struct Server {
    hosts: Vec<(String, Counters)>,
    nodes: Nodes,
    queue: Arc<Queue>,
    /// Name and attributes are believed by the hosts' kernels for so long.
    trust: Duration,
    trust_absent: Duration,
    flushes: bool,
    next_handle: AtomicU64,
    files: Mutex<HashMap<u64, Arc<File>>>,
    /// Open files of which whoever closes first is told that something is missing.
    late: Mutex<HashSet<u64>>,
    listings: Mutex<HashMap<u64, Vec<files::Entry>>>,
    /// Operations by inode, or by directory and absent name.
    hits: Mutex<HashMap<(u64, Option<OsString>), u64>>,
}

/// The file system as mounted on one host.
struct Mounted {
    host: usize,
    server: Arc<Server>,
}

/// Mounts on the hosts whose holders have these pids, says "ready" and serves until it is killed.
pub(crate) fn serve(spec: &Spec, backing: &Path, directory: &Path, pids: &[i32]) -> anyhow::Result<()> {
    nix::unistd::setsid().context("setsid")?;
    // Modes come from the hosts' kernels with the umask already applied.
    nix::sys::stat::umask(nix::sys::stat::Mode::empty());
    // An inode that any host knows costs a descriptor.
    let resource = nix::sys::resource::Resource::RLIMIT_NOFILE;
    let (_, most) = nix::sys::resource::getrlimit(resource).context("ask for the limit of open files")?;
    nix::sys::resource::setrlimit(resource, most, most).context("raise the limit of open files")?;

    let home = File::open("/proc/self/ns/mnt").context("open own mount namespace")?;
    let mut channels = Vec::new();
    for pid in pids {
        let device = File::options().read(true).write(true).open("/dev/fuse").context("open /dev/fuse")?;
        let ns = File::open(format!("/proc/{pid}/ns/mnt")).context("open a host's mount namespace")?;
        // Only a process of one thread may change its mount namespace: the threads start below.
        setns(ns, CloneFlags::CLONE_NEWNS).context("enter a host's mount namespace")?;
        let options =
            format!("fd={},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions", device.as_raw_fd());
        mount(
            Some("slowfs"),
            &spec.shared,
            Some("fuse.slowfs"),
            MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
            Some(options.as_str()),
        )
        .with_context(|| format!("mount on {}", spec.shared.display()))?;
        setns(&home, CloneFlags::CLONE_NEWNS).context("return to the own mount namespace")?;
        channels.push(OwnedFd::from(device));
    }
    let server = Arc::new(Server {
        hosts: spec.host_names().into_iter().map(|name| (name, Counters::default())).collect(),
        nodes: Nodes::new(backing).with_context(|| format!("open {}", backing.display()))?,
        queue: Queue::start(spec.service, REPLIERS),
        trust: spec.trust,
        trust_absent: spec.trust_absent,
        flushes: spec.flushes,
        next_handle: AtomicU64::new(1),
        files: Mutex::default(),
        late: Mutex::default(),
        listings: Mutex::default(),
        hits: Mutex::default(),
    });
    control::listen(directory, server.clone())?;
    let mut sessions = Vec::new();
    for (host, channel) in channels.into_iter().enumerate() {
        let mounted = Mounted { host, server: server.clone() };
        let session =
            Session::from_fd(mounted, channel, SessionACL::All, Config::default()).context("start a mount")?;
        sessions.push(std::thread::spawn(move || session.run()));
    }
    let mut out = io::stdout();
    out.write_all(b"ready\n").and_then(|()| out.flush()).context("report")?;
    for session in sessions {
        // A session ends when its host is gone.
        let _ = session.join();
    }
    Ok(())
}

impl Server {
    /// With what writes to a file fail, if they do.
    fn failing(&self, ino: INodeNo) -> Option<io::Error> {
        let path = self.nodes.path(ino)?;
        let errno = match path.extension()?.to_str()? {
            "eio" => rustix::io::Errno::IO,
            "edquot" => rustix::io::Errno::DQUOT,
            _ => return None,
        };
        Some(errno.into())
    }

    pub(crate) fn ops(&self) -> Vec<HostOps> {
        self.hosts.iter().map(|(host, counters)| HostOps { host: host.clone(), ops: counters.read() }).collect()
    }

    pub(crate) fn reset(&self) {
        for (_, counters) in &self.hosts {
            counters.reset();
        }
        lock(&self.hits).clear();
    }

    /// Paths below the mount point with their operations, most first; absent ones are marked.
    pub(crate) fn paths(&self) -> Vec<(String, u64)> {
        let hits: Vec<_> = lock(&self.hits).iter().map(|(k, v)| (k.clone(), *v)).collect();
        let mut paths: Vec<(String, u64)> = hits
            .into_iter()
            .map(|((ino, name), count)| {
                let path = self.nodes.path(INodeNo(ino));
                let path = path.map_or_else(|| format!("(inode {ino})"), |p| format!("/{}", p.display()));
                match name {
                    None => (path, count),
                    Some(name) => (format!("{}/{} (absent)", path.trim_end_matches('/'), name.display()), count),
                }
            })
            .collect();
        paths.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        paths
    }

    fn hit(&self, ino: INodeNo, absent: Option<&OsStr>) {
        *lock(&self.hits).entry((ino.0, absent.map(OsStr::to_owned))).or_insert(0) += 1;
    }

    fn remember(&self, file: File) -> FileHandle {
        let handle = self.next_handle.fetch_add(1, Relaxed);
        lock(&self.files).insert(handle, Arc::new(file));
        FileHandle(handle)
    }

    fn file(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        lock(&self.files).get(&handle.0).cloned().ok_or_else(|| rustix::io::Errno::BADF.into())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mounted {
    fn counters(&self) -> &Counters {
        &self.server.hosts[self.host].1
    }

    fn count(&self, counter: impl Fn(&Counters) -> &AtomicU64, ino: INodeNo) {
        counter(self.counters()).fetch_add(1, Relaxed);
        self.server.hit(ino, None);
    }

    fn later(&self, reply: impl FnOnce() + Send + 'static) {
        self.server.queue.submit(self.host, 0, reply);
    }

    /// Gives the entries of a directory from `offset` to `add`, with the offset that follows each, until it says that there is no more room.
    /// Returns how many it was given.
    fn list(
        &self,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        mut add: impl FnMut(u64, &files::Entry) -> bool,
    ) -> io::Result<usize> {
        self.count(|c| &c.readdir, ino);
        let mut listings = lock(&self.server.listings);
        // Reading from the start, again too, sees the directory as it is now.
        if offset == 0 || !listings.contains_key(&handle.0) {
            listings.insert(handle.0, files::list(&*self.server.nodes.get(ino)?)?);
        }
        let names = listings.get(&handle.0).map_or(&[][..], Vec::as_slice);
        let rest = (1..).zip(names).skip(usize::try_from(offset).unwrap_or(usize::MAX));
        Ok(rest.take_while(|(next, entry)| !add(*next, entry)).count())
    }

    /// For operations that answer nothing but success.
    fn done(&self, result: io::Result<()>, reply: ReplyEmpty) {
        self.later(move || match result {
            Ok(()) => reply.ok(),
            Err(e) => reply.error(e.into()),
        });
    }

    fn entry(&self, result: io::Result<FileAttr>, reply: ReplyEntry) {
        let trust = self.server.trust;
        self.later(move || match result {
            Ok(attr) => reply.entry(&trust, &attr, Generation(0)),
            Err(e) => reply.error(e.into()),
        });
    }

    /// For operations that make `name` in `parent`.
    fn make(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        reply: ReplyEntry,
        make: impl FnOnce(&File) -> rustix::io::Result<()>,
    ) {
        self.count(|c| &c.other, parent);
        let nodes = &self.server.nodes;
        let making = nodes.making.write().unwrap_or_else(PoisonError::into_inner);
        let result = nodes.get(parent).and_then(|dir| {
            make(&dir)?;
            files::adopt(&dir, name, owner(request))?;
            nodes.lookup(parent, name)
        });
        drop(making);
        self.entry(result, reply);
    }
}

fn owner(request: &Request) -> Owner {
    Owner { uid: request.uid(), gid: request.gid() }
}

/// What a name is said to be that hosts may believe to be absent for a while.
const ABSENT: FileAttr = FileAttr {
    ino: INodeNo(0),
    size: 0,
    blocks: 0,
    atime: SystemTime::UNIX_EPOCH,
    mtime: SystemTime::UNIX_EPOCH,
    ctime: SystemTime::UNIX_EPOCH,
    crtime: SystemTime::UNIX_EPOCH,
    kind: FileType::RegularFile,
    perm: 0,
    nlink: 0,
    uid: 0,
    gid: 0,
    rdev: 0,
    blksize: 0,
    flags: 0,
};

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_write(REQUEST_MAX);
        // A kernel that offers less than this keeps what it offers.
        let _ = config.set_max_readahead(REQUEST_MAX);
        for wanted in [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_AUTO_INVAL_DATA,
            // As clients of NFS ask: with attributes at a listing's begin, and further on if names of it were looked up meanwhile.
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
        ] {
            // Each only saves requests; without it the counts are higher, not wrong.
            let _ = config.add_capabilities(wanted);
        }
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let nodes = &self.server.nodes;
        let made = nodes.making.read().unwrap_or_else(PoisonError::into_inner);
        let result = nodes.lookup(parent, name);
        drop(made);
        match &result {
            Ok(attr) => self.count(|c| &c.lookup, attr.ino),
            Err(_) => {
                self.counters().absent.fetch_add(1, Relaxed);
                self.server.hit(parent, Some(name));
            }
        }
        let trust = self.server.trust_absent;
        match result {
            Err(e) if e.kind() == io::ErrorKind::NotFound && !trust.is_zero() => {
                self.later(move || reply.entry(&trust, &ABSENT, Generation(0)));
            }
            result => self.entry(result, reply),
        }
    }

    fn forget(&self, _: &Request, ino: INodeNo, lookups: u64) {
        self.server.nodes.forget(ino, lookups);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.count(|c| &c.getattr, ino);
        let (trust, result) = (self.server.trust, self.server.nodes.getattr(ino));
        self.later(move || match result {
            Ok(attr) => reply.attr(&trust, &attr),
            Err(e) => reply.error(e.into()),
        });
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
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.count(|c| &c.other, ino);
        let nodes = &self.server.nodes;
        let change = Change { mode, uid, gid, size, atime, mtime };
        let result = nodes.get(ino).and_then(|node| change.apply(&node)).and_then(|()| nodes.getattr(ino));
        let trust = self.server.trust;
        self.later(move || match result {
            Ok(attr) => reply.attr(&trust, &attr),
            Err(e) => reply.error(e.into()),
        });
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        self.count(|c| &c.other, ino);
        let result = self.server.nodes.get(ino).and_then(|node| Ok(readlinkat(&*node, "", Vec::new())?));
        self.later(move || match result {
            Ok(target) => reply.data(target.as_bytes()),
            Err(e) => reply.error(e.into()),
        });
    }

    fn mknod(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, rdev: u32, reply: ReplyEntry) {
        let kind = rustix::fs::FileType::from_raw_mode(mode);
        self.make(request, parent, name, reply, |dir| {
            mknodat(dir, name, kind, Mode::from_raw_mode(mode & 0o7777), rdev.into())
        });
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        self.make(request, parent, name, reply, |dir| mkdirat(dir, name, Mode::from_raw_mode(mode & 0o7777)));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        self.make(request, parent, name, reply, |dir| symlinkat(target, dir, name));
    }

    fn link(&self, _: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.count(|c| &c.other, parent);
        let nodes = &self.server.nodes;
        let result = nodes.get(ino).and_then(|node| {
            linkat(CWD, magic(&node), &*nodes.get(parent)?, name, AtFlags::SYMLINK_FOLLOW)?;
            nodes.lookup(parent, name)
        });
        self.entry(result, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.count(|c| &c.other, parent);
        let result = self.server.nodes.get(parent).and_then(|dir| Ok(unlinkat(&*dir, name, AtFlags::empty())?));
        self.done(result, reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.count(|c| &c.other, parent);
        let result = self.server.nodes.get(parent).and_then(|dir| Ok(unlinkat(&*dir, name, AtFlags::REMOVEDIR)?));
        self.done(result, reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.count(|c| &c.other, parent);
        let nodes = &self.server.nodes;
        let flags = rustix::fs::RenameFlags::from_bits_retain(flags.bits());
        let result = nodes
            .get(parent)
            .and_then(|from| Ok(renameat_with(&*from, name, &*nodes.get(new_parent)?, new_name, flags)?));
        self.done(result, reply);
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.count(|c| &c.open, ino);
        let opened = self.server.nodes.get(ino).and_then(|node| files::open(&node, flags.0));
        let result = opened.map(|file| self.server.remember(file));
        self.later(move || match result {
            Ok(handle) => reply.opened(handle, files::caching(flags.0)),
            Err(e) => reply.error(e.into()),
        });
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
        let nodes = &self.server.nodes;
        let making = nodes.making.write().unwrap_or_else(PoisonError::into_inner);
        let result = nodes.get(parent).and_then(|dir| {
            let file = files::create(&dir, name, mode, flags, owner(request))?;
            Ok((nodes.lookup(parent, name)?, self.server.remember(file)))
        });
        drop(making);
        self.count(|c| &c.open, parent);
        let trust = self.server.trust;
        self.later(move || match result {
            Ok((attr, handle)) => reply.created(&trust, &attr, Generation(0), handle, files::caching(flags)),
            Err(e) => reply.error(e.into()),
        });
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let result = self.server.file(handle).and_then(|file| read_full(&file, offset, size as usize));
        let bytes = result.as_ref().map_or(0, Vec::len);
        self.count(|c| &c.read, ino);
        self.counters().read_bytes.fetch_add(bytes as u64, Relaxed);
        self.server.queue.submit(self.host, bytes, move || match result {
            Ok(data) => reply.data(&data),
            Err(e) => reply.error(e.into()),
        });
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.count(|c| &c.write, ino);
        self.counters().write_bytes.fetch_add(data.len() as u64, Relaxed);
        let end = offset + data.len() as u64;
        let result = match self.server.failing(ino).filter(|_| end > FAILS_FROM) {
            Some(errno) => Err(errno),
            None => self.server.file(handle).and_then(|file| file.write_all_at(data, offset)),
        };
        if self.server.flushes
            && self.server.nodes.path(ino).is_some_and(|path| path.extension() == Some("late".as_ref()))
        {
            lock(&self.server.late).insert(handle.0);
        }
        let written = u32::try_from(data.len()).unwrap_or(u32::MAX);
        self.server.queue.submit(self.host, data.len(), move || match result {
            Ok(()) => reply.written(written),
            Err(e) => reply.error(e.into()),
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, handle: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        if !self.server.flushes {
            // Nothing is held back, so closing needs no request: the kernel stops asking after this.
            return reply.error(Errno::ENOSYS);
        }
        let is_late = lock(&self.server.late).remove(&handle.0);
        self.done(if is_late { Err(rustix::io::Errno::DQUOT.into()) } else { Ok(()) }, reply);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.server.files).remove(&handle.0);
        lock(&self.server.late).remove(&handle.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.count(|c| &c.other, ino);
        self.done(Ok(()), reply);
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.count(|c| &c.readdir, ino);
        let handle = self.server.next_handle.fetch_add(1, Relaxed);
        let result = self.server.nodes.get(ino).map(drop);
        self.later(move || match result {
            Ok(()) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(e) => reply.error(e.into()),
        });
    }

    fn readdir(&self, _: &Request, ino: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listed =
            self.list(ino, handle, offset, |next, (ino, kind, name)| reply.add(INodeNo(*ino), next, *kind, name));
        self.later(move || match listed {
            Ok(_) => reply.ok(),
            Err(e) => reply.error(e.into()),
        });
    }

    fn readdirplus(&self, _: &Request, dir: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let nodes = &self.server.nodes;
        let made = nodes.making.read().unwrap_or_else(PoisonError::into_inner);
        let listed = self.list(dir, handle, offset, |next, (_, _, name)| {
            // The kernel does not count these two as looked up.
            let dots = name == "." || name == "..";
            let found = if dots { nodes.getattr(dir) } else { nodes.lookup(dir, name) };
            // What is gone or cannot be shown is left out.
            let Ok(attr) = found else { return false };
            let full = reply.add(attr.ino, next, name, &self.server.trust, &attr, Generation(0));
            if full && !dots {
                nodes.forget(attr.ino, 1);
            }
            full
        });
        drop(made);
        let bytes = listed.as_ref().map_or(0, |entries| entries * ENTRY);
        self.server.queue.submit(self.host, bytes, move || match listed {
            Ok(_) => reply.ok(),
            Err(e) => reply.error(e.into()),
        });
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        lock(&self.server.listings).remove(&handle.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, ino: INodeNo, reply: ReplyStatfs) {
        self.count(|c| &c.other, ino);
        let result = self.server.nodes.get(ino).and_then(|node| Ok(rustix::fs::fstatvfs(&*node)?));
        self.later(move || match result {
            Ok(s) => reply.statfs(
                s.f_blocks,
                s.f_bfree,
                s.f_bavail,
                s.f_files,
                s.f_ffree,
                u32::try_from(s.f_bsize).unwrap_or(4096),
                u32::try_from(s.f_namemax).unwrap_or(255),
                u32::try_from(s.f_frsize).unwrap_or(4096),
            ),
            Err(e) => reply.error(e.into()),
        });
    }
}

/// Up to `size` bytes; fewer only at the end of the file, as FUSE requires.
fn read_full(file: &File, offset: u64, size: usize) -> io::Result<Vec<u8>> {
    let mut data = vec![0; size];
    let mut filled = 0;
    while filled < size {
        match file.read_at(&mut data[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    data.truncate(filled);
    Ok(data)
}
