//! Answering the kernel's questions from the catalog, the store or the original.

use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fuser::{
    Errno, FileAttr, FileHandle, FopenFlags, Generation, INodeNo, OpenAccMode, OpenFlags, ReplyData, ReplyOpen,
};

use rustix::fs::Stat;

use super::handles::Handle;
use super::inodes::TOP;
use super::parked::{Asked, Key, Question, Waiting};
use super::skeleton::{Need, View};
use super::{attributes, original};
use crate::loader::catalog::{Change, Known, Listing, join, kind};
use crate::loader::store;
use crate::net::wire::record::{Attr, FileId, Supply};

/// No limit: the log says when it is over.
const STABLE: Duration = Duration::from_secs(365 * 24 * 3600);
const VOLATILE: Duration = Duration::ZERO;
/// `d_ino` of a name of which only the listing is known (as libfuse does it).
const UNKNOWN_INO: INodeNo = INodeNo(0xffff_ffff);

/// A copy of what the catalog knows, taken so that nothing is locked during I/O.
enum Facts {
    Dir(Attr, Arc<Listing>),
    Link(Attr, Box<[u8]>),
    File(Attr, Supply),
    Absent(Errno),
    Volatile,
}

pub(super) fn errno(e: rustix::io::Errno) -> Errno {
    Errno::from_i32(e.raw_os_error())
}

impl View {
    /// Answers now, or when the log has said more, or refuses when the time is over.
    pub(super) fn answer(&self, question: Question, asked: Asked) {
        match question {
            Question::Lookup { parent: TOP, ref name, .. } => {
                let index = name.to_str().and_then(|n| n.parse::<usize>().ok());
                match index.and_then(|i| self.roots.get(i)) {
                    Some(root) => self.answer_about(root, question, asked),
                    None => question.refuse(Errno::ENOENT),
                }
            }
            Question::Lookup { parent, ref name, .. } => match self.path(parent) {
                Some(directory) => self.answer_about(&join(&directory, name.as_bytes()), question, asked),
                None => question.refuse(Errno::ESTALE),
            },
            Question::Getattr { ino: TOP, reply } => reply.attr(&STABLE, &attributes::top()),
            Question::Getattr { ino, .. } | Question::Readlink { ino, .. } | Question::Opendir { ino, .. } => {
                match self.path(ino) {
                    Some(path) => self.answer_about(&path, question, asked),
                    None => self.answer_nameless(ino, question),
                }
            }
            Question::Open { ino, flags, reply } => match self.path(ino) {
                Some(path) if flags.acc_mode() != OpenAccMode::O_RDONLY => {
                    self.open_original(ino, &path, flags, FopenFlags::empty(), reply);
                }
                Some(path) => self.answer_about(&path, Question::Open { ino, flags, reply }, asked),
                None => reply.error(Errno::ESTALE),
            },
            Question::Read { fh, offset, size, reply } => self.read(fh, offset, size, reply, asked),
        }
    }

    /// `by`: the number of the thread that asks.
    pub(super) fn ask(&self, by: u32, question: Question) {
        self.answer(question, Asked { by, until: Instant::now() + self.setup.deadline });
    }

    pub(super) fn path(&self, ino: u64) -> Option<Arc<[u8]>> {
        self.inodes().get(ino)?.path.clone()
    }

    fn answer_nameless(&self, ino: u64, question: Question) {
        match (question, self.handles.of_inode(ino).as_deref()) {
            (Question::Getattr { reply, .. }, Some(Handle::Original { file, .. })) => match rustix::fs::fstat(file) {
                Ok(stat) => reply.attr(&VOLATILE, &attributes::of_stat(&stat, ino, &self.setup.identity, || None)),
                Err(e) => reply.error(errno(e)),
            },
            (question, _) => question.refuse(Errno::ESTALE),
        }
    }

    /// What is known about `path`, or the question is parked. Parked with the catalog locked: what is applied afterwards wakes it.
    fn facts(&self, path: &[u8], question: Question, asked: Asked) -> Option<(Facts, Question)> {
        let catalog = self.catalog();
        let need = question.need();
        match catalog.lookup(path) {
            Known::Dir { attr, listing } => return Some((Facts::Dir(*attr, listing.clone()), question)),
            Known::Link { attr, target } => return Some((Facts::Link(*attr, target.into()), question)),
            Known::File { content: Supply::OnOpen, .. } if need == Need::Content => {}
            Known::File { attr, content: Supply::Held(id) } if need == Need::Content => {
                let attr = *attr;
                let begun = catalog.has_content(id, 0, 1) == Some(true);
                let answer = if begun {
                    Some((Facts::File(attr, Supply::Log(id)), question))
                } else {
                    self.park(Key::Content(id), question, asked)?;
                    None
                };
                drop(catalog);
                self.setup.upcall.fetch(id);
                return answer;
            }
            Known::File { attr, content } => return Some((Facts::File(*attr, content), question)),
            Known::Absent(e) => return Some((Facts::Absent(errno(e)), question)),
            Known::Volatile | Known::Outside => return Some((Facts::Volatile, question)),
            Known::Listed(_) | Known::Unknown => {}
        }
        let first = self.park(Key::Path(path.into()), question, asked)?;
        drop(catalog);
        if first {
            self.setup.upcall.want(path, need);
        }
        None
    }

    /// `None`: who asks is being killed, and was refused. Otherwise whether nobody else waits for `key`.
    fn park(&self, key: Key, question: Question, asked: Asked) -> Option<bool> {
        if self.is_doomed(asked.by) {
            question.refuse(Errno::EIO);
            return None;
        }
        Some(self.parked().park(key, Waiting { question, asked, wanted: Instant::now() }))
    }

    fn answer_about(&self, path: &[u8], question: Question, asked: Asked) {
        let Some((facts, question)) = self.facts(path, question, asked) else { return };
        let passed_on = match facts {
            Facts::Volatile => true,
            Facts::File(_, Supply::Original | Supply::OnOpen) => matches!(question, Question::Open { .. }),
            _ => false,
        };
        if passed_on {
            self.passed.add(path, 1, 0);
        } else {
            self.avoid();
        }
        match (question, facts) {
            (Question::Lookup { reply, .. }, Facts::Dir(attr, _) | Facts::Link(attr, _) | Facts::File(attr, _)) => {
                let id = self.inodes().look_up(path, attr.ino, attr.mode, true);
                let attr = attributes::of_record(&attr, id, &self.setup.identity, || self.directory_of(path));
                reply.entry(&STABLE, &attr, Generation(0));
            }
            (Question::Lookup { reply, .. }, Facts::Absent(Errno::ENOENT)) => {
                // Node 0: the kernel remembers that there is none.
                let none = FileAttr { ino: INodeNo(0), ..attributes::top() };
                reply.entry(&STABLE, &none, Generation(0));
            }
            (question @ Question::Lookup { .. }, Facts::Volatile) => {
                self.answer_from_original(path, question, original::stat(path));
            }
            (Question::Getattr { ino, reply }, Facts::Dir(attr, _) | Facts::Link(attr, _) | Facts::File(attr, _)) => {
                self.inodes().mark_stable(ino);
                reply.attr(
                    &STABLE,
                    &attributes::of_record(&attr, ino, &self.setup.identity, || self.directory_of(path)),
                );
            }
            (Question::Getattr { ino, reply }, Facts::Volatile) => match original::stat(path) {
                Ok(stat) => reply.attr(
                    &VOLATILE,
                    &attributes::of_stat(&stat, ino, &self.setup.identity, || self.directory_of(path)),
                ),
                Err(e) => reply.error(errno(e)),
            },
            (Question::Readlink { reply, .. }, Facts::Link(_, target)) => reply.data(&target),
            (Question::Readlink { reply, .. }, Facts::Volatile) => match rustix::fs::readlink(path, Vec::new()) {
                Ok(target) => reply.data(target.as_bytes()),
                Err(e) => reply.error(errno(e)),
            },
            (Question::Opendir { reply, .. }, Facts::Dir(_, listing)) => {
                let fh = self.handles.add(Handle::Directory(listing));
                reply.opened(FileHandle(fh), FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE);
            }
            (Question::Opendir { reply, .. }, Facts::Volatile) => match original::list(path) {
                Ok(names) => {
                    let fh = self.handles.add(Handle::Directory(Arc::new(names)));
                    reply.opened(FileHandle(fh), FopenFlags::empty());
                }
                Err(e) => reply.error(errno(e)),
            },
            (Question::Open { ino, flags, reply }, Facts::File(_, Supply::Log(id))) => {
                self.open_staged(ino, path, id, flags, reply);
            }
            (Question::Open { ino, flags, reply }, Facts::File(..)) => {
                self.open_original(ino, path, flags, FopenFlags::FOPEN_KEEP_CACHE, reply);
            }
            (Question::Open { ino, flags, reply }, Facts::Volatile) => {
                self.open_original(ino, path, flags, FopenFlags::empty(), reply);
            }
            (question, Facts::Absent(e)) => question.refuse(e),
            // The name means something else than when the kernel looked it up.
            (question, _) => question.refuse(Errno::ESTALE),
        }
    }

    /// Answers a look-up with what the original is now; the kernel remembers nothing of it.
    pub(super) fn answer_from_original(&self, path: &[u8], question: Question, original: rustix::io::Result<Stat>) {
        let Question::Lookup { reply, .. } = question else { return question.refuse(Errno::EIO) };
        match original {
            Ok(stat) => reply.entry(&VOLATILE, &self.known_as(path, &stat), Generation(0)),
            Err(e) => reply.error(errno(e)),
        }
    }

    fn avoid(&self) {
        self.avoided.fetch_add(1, Ordering::Relaxed);
    }

    fn open_original(&self, ino: u64, path: &[u8], flags: OpenFlags, how: FopenFlags, reply: ReplyOpen) {
        match original::open(path, flags.0) {
            Ok(file) => {
                let writes = flags.acc_mode() != OpenAccMode::O_RDONLY;
                let how = if writes { how } else { how | FopenFlags::FOPEN_NOFLUSH };
                if writes {
                    self.note(path, Change::Written(kind::REG));
                }
                let handle = Handle::Original { ino, file, writes, read: AtomicU64::new(0) };
                reply.opened(FileHandle(self.handles.add(handle)), how);
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    fn open_staged(&self, ino: u64, path: &[u8], id: FileId, flags: OpenFlags, reply: ReplyOpen) {
        let open = || {
            let file = self.setup.store.open(id)?;
            let size = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
            Ok::<_, rustix::io::Errno>((file, size))
        };
        match open() {
            Ok((file, size)) => {
                let (complete, fallback) = (AtomicBool::new(false), OnceLock::new());
                let fh = self.handles.add(Handle::Staged { id, file, size, complete, path: path.into(), fallback });
                reply.opened(FileHandle(fh), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
            }
            Err(e) => {
                log::warn!("staged file {id} cannot be opened: {e}; its original is read");
                self.open_original(ino, path, flags, FopenFlags::empty(), reply);
            }
        }
    }

    fn read(&self, fh: u64, offset: u64, size: u32, reply: ReplyData, asked: Asked) {
        let handle = self.handles.get(fh);
        let file = match handle.as_deref() {
            Some(Handle::Original { file, .. }) => file,
            Some(Handle::Staged { id, file, size: end, complete, path, fallback }) => {
                if complete.load(Ordering::Acquire) {
                    file
                } else {
                    let to = offset.saturating_add(size.into()).min(*end);
                    let catalog = self.catalog();
                    complete.store(catalog.is_complete(*id), Ordering::Release);
                    match catalog.has_content(*id, offset, to) {
                        Some(true) => file,
                        Some(false) => {
                            let question = Question::Read { fh, offset, size, reply };
                            self.park(Key::Content(*id), question, asked);
                            return;
                        }
                        None => {
                            drop(catalog);
                            match fallback.get() {
                                Some(file) => file,
                                None => match original::open(path, 0) {
                                    Ok(file) => fallback.get_or_init(|| file),
                                    Err(e) => return reply.error(errno(e)),
                                },
                            }
                        }
                    }
                }
            }
            _ => return reply.error(Errno::EBADF),
        };
        let mut buffer = vec![0; size as usize];
        match store::read_at(file, offset, &mut buffer) {
            Ok(n) => {
                match handle.as_deref() {
                    Some(Handle::Staged { fallback, .. }) if fallback.get().is_none() => self.avoid(),
                    Some(Handle::Staged { path, .. }) => self.passed.add(path, 1, n as u64),
                    Some(Handle::Original { read, .. }) => drop(read.fetch_add(n as u64, Ordering::Relaxed)),
                    _ => {}
                }
                reply.data(&buffer[..n]);
            }
            Err(e) => reply.error(errno(e)),
        }
    }

    /// Entries of an opened directory from `offset` on: `.`, `..`, then its names.
    pub(super) fn read_dir(&self, fh: u64, ino: u64, offset: u64, mut reply: fuser::ReplyDirectory) {
        let handle = self.handles.get(fh);
        let Some(Handle::Directory(listing)) = handle.as_deref() else { return reply.error(Errno::EBADF) };
        let directory = self.path(ino);
        let inodes = self.inodes();
        for position in offset.. {
            let next = position + 1;
            let full = match position {
                0 => reply.add(INodeNo(ino), next, fuser::FileType::Directory, "."),
                1 => reply.add(UNKNOWN_INO, next, fuser::FileType::Directory, ".."),
                _ => {
                    let Some((name, kind)) = usize::try_from(position - 2).ok().and_then(|i| listing.get(i)) else {
                        break;
                    };
                    let known = directory.as_ref().and_then(|d| inodes.of(&join(d, name)));
                    let id = known.map_or(UNKNOWN_INO, |(id, _)| INodeNo(id));
                    reply.add(id, next, attributes::dirent_type(*kind), std::ffi::OsStr::from_bytes(name))
                }
            };
            if full {
                break;
            }
        }
        drop(inodes);
        reply.ok();
    }
}
