//! What programs on this node do to the originals of staged files. No request of theirs passes the agent, as it does where there is a view,
//! so the kernel is asked to tell (inotify(7); of a shared file system it tells what this host does).

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::FileType;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::error::{Context, Result};
use crate::loader::catalog::{as_path, join};

/// What has a name that changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Now {
    Gone,
    Directory,
    /// A new file, still empty or being written.
    Begun,
    File,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Watch {
    events: OwnedFd,
    /// By the kernel's numbers, which are those of inodes; and these, by path.
    directories: HashMap<i32, Vec<u8>>,
    numbers: HashMap<Vec<u8>, i32>,
}

impl Watch {
    pub(super) fn new() -> Result<Watch> {
        let events = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).op("watch files for changes")?;
        Ok(Watch { events, directories: HashMap::new(), numbers: HashMap::new() })
    }

    /// The descriptor that can be read when something changed.
    pub(super) fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.events.try_clone()
    }

    /// Watches what has this path (a canonical one of a directory) now, and not what had it before. Returns a number that another directory
    /// does not have. `None`: it cannot be watched.
    pub(super) fn add(&mut self, directory: &[u8]) -> Option<i32> {
        let flags = WatchFlags::CLOSE_WRITE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::ONLYDIR
            | WatchFlags::EXCL_UNLINK;
        match inotify::add_watch(&self.events, directory, flags) {
            Ok(number) => {
                self.directories.insert(number, directory.to_vec());
                let before = self.numbers.insert(directory.to_vec(), number).filter(|before| *before != number);
                // That one may have another path by now.
                if let Some(before) =
                    before.filter(|before| self.directories.get(before).is_some_and(|at| at == directory))
                {
                    self.directories.remove(&before);
                    // The kernel has, if it is gone.
                    let _ = inotify::remove_watch(&self.events, before);
                }
                return Some(number);
            }
            // It is gone: nothing in it is loaded.
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(error) => {
                let directory = as_path(directory).display();
                log::warn!("{directory} is not watched ({error}): what the job replaces there may be seen as it was");
            }
        }
        None
    }

    /// What changed since this was asked last. `None`: too much to tell.
    pub(super) fn changed(&self) -> Option<Vec<(Vec<u8>, Now)>> {
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut events = Reader::new(&self.events, &mut buffer);
        let mut changed = Vec::new();
        while let Ok(event) = events.next() {
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                return None;
            }
            if let (Some(directory), Some(name)) = (self.directories.get(&event.wd()), event.file_name()) {
                let path = join(directory, name.to_bytes());
                let is = |flags| event.events().intersects(flags);
                let now = match is(ReadFlags::ISDIR) {
                    _ if is(ReadFlags::MOVED_FROM | ReadFlags::DELETE) => Now::Gone,
                    true => Now::Directory,
                    false if is(ReadFlags::CREATE) && is_being_written(&path) => Now::Begun,
                    false => Now::File,
                };
                changed.push((path, now));
            }
        }
        Some(changed)
    }
}

/// Whether what was made is a file, of whose last byte we will be told. Nobody will be told of links.
fn is_being_written(path: &[u8]) -> bool {
    rustix::fs::lstat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_file() && stat.st_nlink == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn what_is_replaced_and_removed_is_told() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name).into_os_string().into_encoded_bytes();
        fs::write(place.path().join("a.so"), "a").unwrap();
        let mut watch = Watch::new().unwrap();
        let number = watch.add(place.path().as_os_str().as_bytes());
        assert!(number.is_some() && watch.add(place.path().as_os_str().as_bytes()) == number);
        assert_eq!(watch.add(&path("nowhere")), None);
        assert_eq!(watch.changed(), Some(vec![]));
        fs::write(place.path().join("new"), "b").unwrap();
        fs::rename(place.path().join("new"), place.path().join("a.so")).unwrap();
        fs::remove_file(place.path().join("a.so")).unwrap();
        let expected =
            [("new", Now::File), ("new", Now::File), ("new", Now::Gone), ("a.so", Now::File), ("a.so", Now::Gone)];
        assert_eq!(watch.changed(), Some(expected.map(|(name, now)| (path(name), now)).to_vec()));
        fs::write(place.path().join("b.so"), "b").unwrap();
        fs::create_dir(place.path().join("c")).unwrap();
        std::os::unix::fs::symlink("b.so", place.path().join("l.so")).unwrap();
        let expected = [("b.so", Now::Begun), ("b.so", Now::File), ("c", Now::Directory), ("l.so", Now::File)];
        assert_eq!(watch.changed(), Some(expected.map(|(name, now)| (path(name), now)).to_vec()));
    }
}
