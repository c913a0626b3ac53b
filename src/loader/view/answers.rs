//! Answering the kernel's questions from the catalog, the store or the original.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fuser::{Errno, FileAttr, FileHandle, FopenFlags, Generation, INodeNo, OpenAccMode, OpenFlags, ReplyOpen};

use rustix::fs::Stat;

use super::content::FRESH;
use super::handles::{Directory, Handle, Original};
use super::inodes::TOP;
use super::parked::{Asked, Key, Question, Waiting};
use super::skeleton::{Need, View};
use super::{attributes, original};
use crate::loader::catalog::{Known, Listing, join, kind};
use crate::loader::version;
use crate::net::wire::record::{Attr, Supply};

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
            Question::Getattr { ino: TOP, reply, .. } => reply.attr(&STABLE, &attributes::top()),
            Question::Getattr { ino, .. } | Question::Opendir { ino, .. } => match self.path(ino) {
                Some(path) => self.answer_about(&path, question, asked),
                None => self.answer_nameless(ino, question),
            },
            Question::Open { ino, flags, reply } => match self.path(ino) {
                Some(path) if flags.acc_mode() != OpenAccMode::O_RDONLY => {
                    self.open_original(ino, &path, flags, None, reply);
                }
                Some(path) => self.answer_about(&path, Question::Open { ino, flags, reply }, asked),
                None => self.open_nameless(ino, flags, reply),
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

    /// An inode that has lost its name is known by what has it open.
    fn answer_nameless(&self, ino: u64, question: Question) {
        let Question::Getattr { reply, .. } = question else { return question.refuse(Errno::ESTALE) };
        let handles = self.handles.of_inode(ino);
        let Some(handle) = handles.first() else { return reply.error(Errno::ESTALE) };
        let identity = &self.setup.identity;
        let attr = match (handle.original(), handle.attr_unlinked()) {
            (Some(file), _) => rustix::fs::fstat(file).map(|stat| attributes::of_stat(&stat, ino, identity, || None)),
            (None, Some(attr)) => Ok(attributes::of_record(&attr, ino, identity, || None)),
            (None, None) => Err(rustix::io::Errno::STALE),
        };
        match attr {
            Ok(attr) => reply.attr(&VOLATILE, &attr),
            Err(e) => reply.error(errno(e)),
        }
    }

    /// Opens once more what is open and has lost its name to a program here, as through `/dev/fd`. Of what others took it from, the name
    /// may lead elsewhere: the kernel looks again.
    fn open_nameless(&self, ino: u64, flags: OpenFlags, reply: ReplyOpen) {
        let handles = match self.inodes().get(ino) {
            Some(node) if node.unlinked => self.handles.of_inode(ino),
            _ => Vec::new(),
        };
        let reads = flags.acc_mode() == OpenAccMode::O_RDONLY;
        let again = handles.iter().find_map(|handle| match (&**handle, handle.original()) {
            (_, Some(file)) => {
                let file = original::open_again(file, original::flags_again(flags.0));
                Some(file.map(|file| Handle::Original(Original::new(ino, file, flags.0))))
            }
            (Handle::Staged(staged), None) if reads => Some(Ok(Handle::Staged(staged.again()))),
            _ => None,
        });
        match again {
            Some(Ok(handle)) => reply.opened(FileHandle(self.handles.add(handle)), FopenFlags::empty()),
            Some(Err(e)) => reply.error(errno(e)),
            None => reply.error(Errno::ESTALE),
        }
    }

    /// Whether the kernel means by an inode what its path leads to by now. If not, the inode has lost its name.
    pub(super) fn leads_to(&self, path: &[u8], ino: u64) -> bool {
        use rustix::io::Errno;
        let is = match self.stat(path) {
            Ok(stat) => self.inodes().is(ino, stat.st_ino, stat.st_mode),
            Err(e) => !matches!(e, Errno::NOENT | Errno::NOTDIR | Errno::LOOP),
        };
        if !is {
            self.inodes().lose_name(ino);
        }
        is
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
    pub(super) fn park(&self, key: Key, question: Question, asked: Asked) -> Option<bool> {
        if self.is_doomed(asked.by) {
            question.refuse(Errno::EIO);
            return None;
        }
        Some(self.parked().park(key, Waiting { question, asked, wanted: Instant::now() }))
    }

    fn answer_about(&self, path: &[u8], question: Question, asked: Asked) {
        let Some((mut facts, question)) = self.facts(path, question, asked) else { return };
        if let (Question::Getattr { ino, .. }, Facts::File(attr, Supply::Original)) = (&question, &facts) {
            self.compare(*ino, path, attr);
            if !self.catalog().has_file(path) {
                facts = Facts::Volatile;
            }
        }
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
        let is_original = matches!(facts, Facts::File(_, Supply::Original));
        match (question, facts) {
            (Question::Lookup { reply, .. }, Facts::Link(attr, target)) => {
                let id = self.inodes().look_up(path, attr.ino, attr.mode, Some(&*target), true);
                let attr = attributes::of_record(&attr, id, &self.setup.identity, || self.directory_of(path));
                reply.entry(&STABLE, &attr, Generation(0));
            }
            (Question::Lookup { reply, .. }, Facts::File(attr, Supply::Original)) => {
                let id = self.inodes().look_up(path, attr.ino, attr.mode, None, true);
                let attr = attributes::of_record(&attr, id, &self.setup.identity, || self.directory_of(path));
                reply.entry_with_ttls(&FRESH, &STABLE, &attr, Generation(0));
            }
            (Question::Lookup { reply, .. }, Facts::Dir(attr, _) | Facts::File(attr, _)) => {
                let id = self.inodes().look_up(path, attr.ino, attr.mode, None, true);
                let attr = attributes::of_record(&attr, id, &self.setup.identity, || self.directory_of(path));
                reply.entry(&STABLE, &attr, Generation(0));
            }
            (Question::Lookup { reply, .. }, Facts::Absent(Errno::ENOENT)) => {
                // What had this name may be in use: a new owner is to be told of, and that one no more.
                self.inodes().detach(path);
                // Node 0: the kernel remembers that there is none.
                let none = FileAttr { ino: INodeNo(0), ..attributes::top() };
                let limit = if self.absent().note(path) { STABLE } else { FRESH };
                reply.entry(&limit, &none, Generation(0));
            }
            (question @ Question::Lookup { .. }, Facts::Volatile) => {
                self.refresh(path);
                self.answer_from_original(path, question, self.stat(path));
            }
            (
                Question::Getattr { ino, reply, .. },
                Facts::Dir(attr, _) | Facts::Link(attr, _) | Facts::File(attr, _),
            ) if self.inodes().is(ino, attr.ino, attr.mode) => {
                self.inodes().mark_stable(ino);
                reply.attr(
                    if is_original { &FRESH } else { &STABLE },
                    &attributes::of_record(&attr, ino, &self.setup.identity, || self.directory_of(path)),
                );
            }
            (Question::Getattr { ino, fh, reply }, Facts::Volatile) => {
                let handle = fh.and_then(|fh| self.handles.get(fh));
                let stat = match handle.as_deref().and_then(Handle::original) {
                    Some(file) => rustix::fs::fstat(file).map(Some),
                    None => {
                        self.stat(path).map(|stat| self.inodes().is(ino, stat.st_ino, stat.st_mode).then_some(stat))
                    }
                };
                match stat {
                    Ok(Some(stat)) => {
                        let directory = || self.directory_of(path);
                        reply.attr(&VOLATILE, &attributes::of_stat(&stat, ino, &self.setup.identity, directory));
                    }
                    Ok(None) | Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => {
                        self.inodes().lose_name(ino);
                        self.answer_nameless(ino, Question::Getattr { ino, fh, reply });
                    }
                    Err(e) => reply.error(errno(e)),
                }
            }
            (question @ Question::Getattr { ino, .. }, _) => {
                self.inodes().lose_name(ino);
                self.answer_nameless(ino, question);
            }
            (Question::Opendir { ino, reply }, Facts::Dir(attr, listing)) => {
                let fh = self.handles.add(Handle::Directory(Directory::new(ino, attr, listing)));
                reply.opened(FileHandle(fh), FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE);
            }
            (Question::Opendir { ino, reply }, Facts::Volatile) => {
                match self.place(path).and_then(|place| original::list(&place)) {
                    Ok((stat, names)) => {
                        let (attr, listing) = (version::attr(&stat), Arc::new(names));
                        let fh = self.handles.add(Handle::Directory(Directory::new(ino, attr, listing)));
                        reply.opened(FileHandle(fh), FopenFlags::empty());
                    }
                    Err(e) => reply.error(errno(e)),
                }
            }
            (Question::Open { ino, flags, reply }, Facts::File(attr, Supply::Log(id))) => {
                self.open_staged(ino, path, (id, attr), flags, reply);
            }
            (Question::Open { ino, flags, reply }, Facts::File(attr, _)) => {
                self.open_original(ino, path, flags, Some(&attr), reply);
            }
            (Question::Open { ino, flags, reply }, Facts::Volatile) => {
                self.open_original(ino, path, flags, None, reply);
            }
            (question, Facts::Absent(e)) => question.refuse(e),
            // The name means something else than when the kernel looked it up.
            (question, _) => question.refuse(Errno::ESTALE),
        }
    }

    /// Answers a look-up with what the original is now; the kernel remembers nothing of it.
    pub(super) fn answer_from_original(&self, path: &[u8], question: Question, original: rustix::io::Result<Stat>) {
        let Question::Lookup { reply, .. } = question else { return question.refuse(Errno::EIO) };
        match original.and_then(|stat| self.known_as(path, &stat)) {
            Ok(attr) => reply.entry(&VOLATILE, &attr, Generation(0)),
            Err(e) => reply.error(errno(e)),
        }
    }

    pub(super) fn avoid(&self) {
        self.avoided.fetch_add(1, Ordering::Relaxed);
    }

    /// Entries of an opened directory from `offset` on: `.`, `..`, then its names.
    pub(super) fn read_dir(&self, fh: u64, ino: u64, offset: u64, mut reply: fuser::ReplyDirectory) {
        let handle = self.handles.get(fh);
        let Some(Handle::Directory(opened)) = handle.as_deref() else { return reply.error(Errno::EBADF) };
        let directory = self.path(ino);
        let listing = match self.listing(opened, directory.as_deref(), offset) {
            Ok(listing) => listing,
            Err(e) => return reply.error(errno(e)),
        };
        for position in offset.. {
            let next = position + 1;
            let full = match position {
                0 => reply.add(INodeNo(ino), next, fuser::FileType::Directory, "."),
                1 => reply.add(UNKNOWN_INO, next, fuser::FileType::Directory, ".."),
                _ => {
                    let Some((name, kind)) = usize::try_from(position - 2).ok().and_then(|i| listing.get(i)) else {
                        break;
                    };
                    let path = directory.as_ref().map(|d| join(d, name));
                    let known =
                        path.as_ref().and_then(|path| self.inodes().of(path).map(|(id, node)| (id, node.d_type())));
                    let id = known.map_or(UNKNOWN_INO, |(id, _)| INodeNo(id));
                    let kind = match (*kind, path) {
                        (kind::UNKNOWN, Some(path)) => self.kind_at(&path, known.map(|(_, kind)| kind)),
                        (kind, _) => kind,
                    };
                    reply.add(id, next, attributes::dirent_type(kind), std::ffi::OsStr::from_bytes(name))
                }
            };
            if full {
                break;
            }
        }
        reply.ok();
    }

    /// What an opened directory holds; who begins anew is told what it holds now.
    fn listing(&self, opened: &Directory, path: Option<&[u8]>, offset: u64) -> rustix::io::Result<Arc<Listing>> {
        if offset > 0 || opened.unread.swap(false, Ordering::Relaxed) {
            return Ok(opened.listing());
        }
        let known = |path: &[u8]| match self.catalog().lookup(path) {
            Known::Dir { listing, .. } => Some(Arc::clone(listing)),
            _ => None,
        };
        let now = match path {
            // It was removed.
            None => Arc::default(),
            Some(path) => match known(path) {
                Some(listing) => listing,
                None => {
                    self.passed.add(path, 1, 0);
                    Arc::new(original::list(&self.place(path)?)?.1)
                }
            },
        };
        opened.set_listing(Arc::clone(&now));
        Ok(now)
    }

    /// The type of a name of which a listing told none. FUSE has no word for that.
    fn kind_at(&self, path: &[u8], node: Option<u8>) -> u8 {
        let known = match self.catalog().lookup(path) {
            Known::Dir { .. } => Some(kind::DIR),
            Known::Link { .. } => Some(kind::LNK),
            Known::File { .. } => Some(kind::REG),
            Known::Listed(kind) if kind != kind::UNKNOWN => Some(kind),
            _ => None,
        };
        known.or(node).or_else(|| self.stat(path).ok().map(|s| kind::of_mode(s.st_mode))).unwrap_or(kind::UNKNOWN)
    }
}
