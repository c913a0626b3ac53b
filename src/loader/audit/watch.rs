//! What programs on this node do to the originals of staged files. No request of theirs passes the agent, as it does where there is a view,
//! so the kernel is asked to tell (inotify(7); of a shared file system it tells what this host does).

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use crate::error::{Context, Result};
use crate::loader::catalog::{as_path, join};

/// See the module.
#[derive(Debug)]
pub(super) struct Watch {
    events: OwnedFd,
    directories: HashMap<i32, Vec<u8>>,
}

impl Watch {
    pub(super) fn new() -> Result<Watch> {
        let events = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).op("watch files for changes")?;
        Ok(Watch { events, directories: HashMap::new() })
    }

    /// The descriptor that can be read when something changed.
    pub(super) fn descriptor(&self) -> std::io::Result<OwnedFd> {
        self.events.try_clone()
    }

    /// Watches a directory (a canonical path).
    pub(super) fn add(&mut self, directory: &[u8]) {
        let flags = WatchFlags::CLOSE_WRITE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE
            | WatchFlags::ONLYDIR
            | WatchFlags::EXCL_UNLINK;
        match inotify::add_watch(&self.events, directory, flags) {
            Ok(number) => drop(self.directories.insert(number, directory.to_vec())),
            // It is gone: nothing in it is loaded.
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(error) => {
                let directory = as_path(directory).display();
                log::warn!("{directory} is not watched ({error}): what the job replaces there may be seen as it was");
            }
        }
    }

    /// What changed since this was asked last: paths, and whether something has that name now. `None`: too much to tell.
    pub(super) fn changed(&self) -> Option<Vec<(Vec<u8>, bool)>> {
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut events = Reader::new(&self.events, &mut buffer);
        let mut changed = Vec::new();
        while let Ok(event) = events.next() {
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                return None;
            }
            if let (Some(directory), Some(name)) = (self.directories.get(&event.wd()), event.file_name()) {
                let gone = event.events().intersects(ReadFlags::MOVED_FROM | ReadFlags::DELETE);
                changed.push((join(directory, name.to_bytes()), !gone));
            }
        }
        Some(changed)
    }
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
        watch.add(place.path().as_os_str().as_bytes());
        watch.add(&path("nowhere"));
        assert_eq!(watch.changed(), Some(vec![]));
        fs::write(place.path().join("new"), "b").unwrap();
        fs::rename(place.path().join("new"), place.path().join("a.so")).unwrap();
        fs::remove_file(place.path().join("a.so")).unwrap();
        let expected = [("new", true), ("new", false), ("a.so", true), ("a.so", false)];
        assert_eq!(watch.changed(), Some(expected.map(|(name, exists)| (path(name), exists)).to_vec()));
    }
}
