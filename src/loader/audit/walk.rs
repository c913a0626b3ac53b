//! Follows a path over what a node knows of the shared file system, as the kernel would over the file system itself; what is not known yet
//! is asked for and waited for. And [`Probe`]: the node resolves programs with it, without touching the shared file system.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rustix::fs::Stat;
use rustix::io::Errno;

use crate::loader::catalog::{Catalog, Known, Listing, join, parent};
use crate::loader::probe::{FileSystem, Names, Opened, Probe};
use crate::loader::store::Store;
use crate::loader::view::{DEADLINE, Need, Upcall};
use crate::net::wire::record::{Attr, FileId, Supply};

/// Symbolic links in one path, at most (as the kernel's).
const LINKS_MAX: usize = 40;
/// A question is repeated after this time; an answer may have been lost with a node.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// What lies at the end of a path.
#[derive(Debug, Clone)]
pub(super) enum Found {
    /// A file; with its number if it is whole in the store.
    File {
        canonical: Vec<u8>,
        attr: Attr,
        id: Option<FileId>,
    },
    Dir {
        canonical: Vec<u8>,
        attr: Attr,
        listing: Arc<Listing>,
    },
    /// There is nothing at `canonical`; `listed`: its directory's attributes, where the log's listing of that says so.
    Absent {
        errno: Errno,
        canonical: Vec<u8>,
        listed: Option<Attr>,
    },
    /// Not the log's business: whoever wants it goes to the file system.
    Original,
}

/// What was passed on the way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Step {
    Dir(Vec<u8>),
    Link { at: Vec<u8>, target: Vec<u8> },
}

/// See the module. For threads that may wait.
pub(super) struct Walker {
    pub(super) catalog: Arc<RwLock<Catalog>>,
    pub(super) store: Arc<Store>,
    upcall: Arc<dyn Upcall>,
    /// Counts what was learnt.
    learnt: Mutex<u64>,
    more: Condvar,
}

impl std::fmt::Debug for Walker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Walker").field("store", &self.store).finish_non_exhaustive()
    }
}

/// One look at a path.
enum Look {
    Dir(Attr, Arc<Listing>),
    Link(Vec<u8>),
    File(Attr, Option<FileId>),
    Absent(Errno),
    Original,
    /// Not below a root, and no link.
    Outside,
    /// The answer has been asked for, or is to be.
    Wait {
        ask: bool,
    },
}

impl Walker {
    pub(super) fn new(catalog: Arc<RwLock<Catalog>>, store: Arc<Store>, upcall: Arc<dyn Upcall>) -> Walker {
        Walker { catalog, store, upcall, learnt: Mutex::default(), more: Condvar::default() }
    }

    /// The catalog knows more: whoever waits looks again.
    pub(super) fn learnt(&self) {
        *self.learnt.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.more.notify_all();
    }

    /// Follows an absolute path to its end; `content`: a file's content is wanted, too. `pass` hears of every directory and link on the way.
    pub(super) fn find(&self, path: &[u8], content: bool, mut pass: impl FnMut(Step)) -> Found {
        let deadline = Instant::now() + DEADLINE;
        let mut rest: VecDeque<Vec<u8>> = components(path).collect();
        let (mut at, mut links) = (b"/".to_vec(), 0);
        let mut listing = None;
        while let Some(name) = rest.pop_front() {
            if name == b".." {
                at = parent(&at).unwrap_or(b"/").to_vec();
                listing = None;
                continue;
            }
            let here = join(&at, &name);
            match self.look(&here, content && rest.is_empty(), deadline) {
                Look::Dir(attr, names) => {
                    pass(Step::Dir(here.clone()));
                    (at, listing) = (here, Some((attr, names)));
                }
                Look::Link(target) => {
                    links += 1;
                    if links > LINKS_MAX {
                        return Found::Absent { errno: Errno::LOOP, canonical: here, listed: None };
                    }
                    if target.starts_with(b"/") {
                        at = b"/".to_vec();
                    }
                    components(&target).rev().for_each(|part| rest.push_front(part));
                    listing = None;
                    pass(Step::Link { at: here, target });
                }
                Look::Outside if rest.is_empty() => return Found::Original,
                Look::Outside => {
                    pass(Step::Dir(here.clone()));
                    (at, listing) = (here, None);
                }
                Look::File(attr, id) if rest.is_empty() => return Found::File { canonical: here, attr, id },
                Look::File(..) => return Found::Absent { errno: Errno::NOTDIR, canonical: here, listed: None },
                Look::Absent(errno) => {
                    let listed = listing.map(|(attr, _)| attr);
                    return Found::Absent { errno, canonical: here, listed };
                }
                Look::Original => return Found::Original,
                Look::Wait { .. } => {
                    log::warn!("{}: no answer in time; the original is used", String::from_utf8_lossy(&here));
                    return Found::Original;
                }
            }
        }
        listing.map_or(Found::Original, |(attr, listing)| Found::Dir { canonical: at, attr, listing })
    }

    /// Looks until there is an answer, or the time is over.
    fn look(&self, path: &[u8], content: bool, deadline: Instant) -> Look {
        let mut asked: Option<Instant> = None;
        loop {
            let before = *self.learnt.lock().unwrap_or_else(PoisonError::into_inner);
            let ask = match self.look_once(path, content) {
                Look::Wait { ask } => ask,
                look => return look,
            };
            let now = Instant::now();
            if now >= deadline {
                return Look::Wait { ask };
            }
            if ask && asked.is_none_or(|asked| now >= asked + ASK_AGAIN) {
                asked = Some(now);
                self.upcall.want(path, if content { Need::Content } else { Need::Attributes });
            }
            let until = asked.map_or(deadline, |asked| deadline.min(asked + ASK_AGAIN));
            let learnt = self.learnt.lock().unwrap_or_else(PoisonError::into_inner);
            let waited =
                self.more.wait_timeout_while(learnt, until.saturating_duration_since(now), |learnt| *learnt == before);
            drop(waited);
        }
    }

    fn look_once(&self, path: &[u8], content: bool) -> Look {
        let catalog = self.catalog.read().unwrap_or_else(PoisonError::into_inner);
        match catalog.lookup(path) {
            Known::Dir { attr, listing } => return Look::Dir(*attr, Arc::clone(listing)),
            Known::Link { target, .. } => return Look::Link(target.to_vec()),
            Known::File { content: Supply::Original, .. } | Known::Volatile => return Look::Original,
            Known::File { attr, content: Supply::Log(id) } if catalog.is_complete(id) => {
                return Look::File(*attr, Some(id));
            }
            Known::File { attr, content: Supply::Log(_) | Supply::Held(_) } if !content => {
                return Look::File(*attr, None);
            }
            Known::File { content: Supply::Log(_), .. } => return Look::Wait { ask: false },
            Known::File { content: Supply::Held(id), .. } => {
                self.upcall.fetch(id);
                return Look::Wait { ask: false };
            }
            Known::File { content: Supply::OnOpen, .. } if content => return Look::Wait { ask: true },
            Known::File { attr, content: Supply::OnOpen } => return Look::File(*attr, None),
            Known::Absent(errno) => return Look::Absent(errno),
            Known::Listed(_) | Known::Unknown => return Look::Wait { ask: true },
            Known::Outside => {}
        }
        // Not with the lock: this asks the file system.
        drop(catalog);
        match rustix::fs::readlink(path, Vec::new()) {
            Ok(target) => Look::Link(target.into_bytes()),
            Err(Errno::INVAL) => Look::Outside,
            Err(errno) => Look::Absent(errno),
        }
    }
}

fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = Vec<u8>> {
    path.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").map(<[u8]>::to_vec)
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

fn path_buf(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes))
}

/// A directory of the log, or one of the node's own.
#[derive(Debug)]
pub(super) enum Directory {
    Known(Arc<Listing>),
    Own(<FileSystem as Probe>::Dir),
}

impl Walker {
    /// The attributes that the resolver asks for: which file it is (by a number that no other path has), and that it is what it is.
    fn stat(&self, of: impl AsFd, canonical: &[u8]) -> io::Result<Stat> {
        let mut stat = rustix::fs::fstat(of)?;
        let hash = blake3::hash(canonical);
        let (number, _) = hash.as_bytes().split_first_chunk().unwrap_or((&[0; 8], &[]));
        (stat.st_dev, stat.st_ino) = (0, u64::from_ne_bytes(*number));
        Ok(stat)
    }
}

impl Probe for Walker {
    type File = File;
    type Dir = Directory;

    fn open(&self, path: &Path) -> io::Result<Opened<File>> {
        match self.find(bytes(path), true, |_| {}) {
            Found::File { canonical, id: Some(id), .. } => match self.store.open(id) {
                Ok(file) => {
                    let stat = self.stat(&file, &canonical)?;
                    Ok(Opened { file: file.into(), canonical: path_buf(canonical), stat })
                }
                // It was superseded meanwhile.
                Err(Errno::NOENT) => FileSystem.open(path),
                Err(error) => Err(error.into()),
            },
            Found::Absent { errno, .. } => Err(errno.into()),
            Found::File { .. } | Found::Dir { .. } | Found::Original => FileSystem.open(path),
        }
    }

    fn open_dir(&self, path: &Path) -> io::Result<Opened<Directory>> {
        match self.find(bytes(path), false, |_| {}) {
            Found::Dir { canonical, listing, .. } => {
                let stat = self.stat(self.store.directory(), &canonical)?;
                Ok(Opened { file: Directory::Known(listing), canonical: path_buf(canonical), stat })
            }
            Found::Absent { errno, .. } => Err(errno.into()),
            Found::File { .. } => Err(Errno::NOTDIR.into()),
            Found::Original => {
                let Opened { file, canonical, stat } = FileSystem.open_dir(path)?;
                Ok(Opened { file: Directory::Own(file), canonical, stat })
            }
        }
    }

    fn names(&self, dir: &Directory) -> io::Result<Names> {
        match dir {
            Directory::Own(own) => FileSystem.names(own),
            Directory::Known(listing) => {
                let name = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
                Ok(listing.iter().map(|(bytes, kind)| (name(bytes), *kind)).collect())
            }
        }
    }
}
