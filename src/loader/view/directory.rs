//! A session's own directory in `--store DIR`: locked as long as any process of the session lives, so that whoever comes next can tell what
//! a killed session left there, and removes it.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Context, Error, Result};
use crate::loader::capture::is_shared;
use crate::sys::node;
use crate::sys::without::{Ability, Without};

const PREFIX: &str = "hpcrt-store.";
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

#[derive(Debug)]
pub struct Directory {
    parent: OwnedFd,
    /// Its own path.
    pub path: PathBuf,
    name: String,
    pub own: OwnedFd,
}

/// Where this node's programs and libraries can be staged without a RAM disk of the session's own: a directory of the node itself from
/// which they can be executed, in memory if there is one.
///
/// # Errors
/// There is none.
pub fn executable(without: &Without) -> Result<PathBuf> {
    let in_memory = !without.has(Ability::Ram) && !without.has(Ability::Exec);
    let usable = usable().filter(|(found, _)| !found.memory || in_memory);
    let best = usable.min_by_key(|(found, _)| !found.memory).map(|(_, path)| path);
    best.ok_or_else(|| {
        let cause = "none of /dev/shm, XDG_RUNTIME_DIR, /tmp and /var/tmp can be written to and executed from";
        Error::new("find a place for the program's files", cause).remedy("name a directory with --store DIR")
    })
}

/// The same, but on a disk, with that many bytes free.
pub fn on_disk(bytes: u64) -> Option<PathBuf> {
    usable().find(|(found, _)| !found.memory && found.free >= bytes).map(|(_, path)| path)
}

fn usable() -> impl Iterator<Item = (node::Directory, PathBuf)> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let all = [Some("/dev/shm".into()), runtime, Some("/tmp".into()), Some("/var/tmp".into())].into_iter().flatten();
    let own = all.filter(|path: &PathBuf| !is_shared(path));
    own.filter_map(|path| node::directory(&path).ok().filter(|found| found.exec).map(|found| (found, path)))
}

impl Directory {
    /// Makes one in `place`, and removes what dead sessions left there.
    ///
    /// # Errors
    /// Nothing can be made there, or not be executed.
    pub fn create(place: &Path) -> Result<Directory> {
        if node::directory(place).is_ok_and(|found| !found.exec) {
            let error = Error::new("keep programs in", "they cannot be mapped for execution there").on(place);
            return Err(error.remedy("name a directory with --store DIR that is not mounted noexec"));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(place, flags, Mode::empty()).op_on("open the store", place)?;
        sweep(&parent, &if is_shared(place) { prefix() } else { PREFIX.to_owned() });
        let make = || {
            let name = format!("{}{:016x}", prefix(), fastrand::u64(..));
            rustix::fs::mkdirat(&parent, &name, Mode::RWXU)?;
            let own = rustix::fs::openat(&parent, &name, FLAGS, Mode::empty())?;
            rustix::fs::flock(&own, FlockOperation::NonBlockingLockExclusive)?;
            // Between the first two steps another session may have taken it for a dead one's.
            rustix::fs::statat(&parent, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            Ok::<_, Errno>((name, own))
        };
        let (name, own) = make()
            .or_else(|e| if matches!(e, Errno::NOENT | Errno::AGAIN) { make() } else { Err(e) })
            .map_err(|e| Error::new("make the store", e).on(place).remedy("choose a directory where you may write"))?;
        let made = Directory { parent, path: place.join(&name), name, own };
        // Not on a file system that knows no owners or modes; and somebody may have exchanged it where others can rename.
        if !is_private(&made.own) {
            let _ = rustix::fs::unlinkat(&made.parent, &made.name, AtFlags::REMOVEDIR);
            let error = Error::new("make the store", "what is made there can be reached by others").on(place);
            return Err(error.remedy("choose a directory on a file system with owners and modes"));
        }
        Ok(made)
    }

    /// Removes it with its files.
    pub fn remove(&self) {
        empty(&self.own);
        let _ = rustix::fs::unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR);
    }
}

/// Removes the session's directory `own` in `place`, for an agent whose keeper was killed. Without effect on a removed one.
pub fn remove(place: &Path, own: &OwnedFd) {
    empty(own);
    let inode = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let Ok(own) = rustix::fs::fstat(own).map(inode) else { return };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(parent) = rustix::fs::open(place, flags, Mode::empty()) else { return };
    let stat = |name: &CStr| rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW).map(inode);
    for name in names(&parent).into_iter().filter(|name| stat(name) == Ok(own)) {
        let _ = rustix::fs::unlinkat(&parent, &*name, AtFlags::REMOVEDIR);
    }
}

/// What names on this machine begin with: where others have the same directory, their locks may not be seen here. Until it is started again.
fn prefix() -> String {
    format!("{PREFIX}{:x}.", node::machine().unwrap_or_else(|| fastrand::u64(..)))
}

/// Removes what nobody has locked of what begins so.
fn sweep(parent: &OwnedFd, ours: &str) {
    for name in names(parent) {
        if name.to_bytes().starts_with(ours.as_bytes())
            && let Ok(old) = rustix::fs::openat(parent, &*name, FLAGS, Mode::empty())
            && is_private(&old)
            && rustix::fs::flock(&old, FlockOperation::NonBlockingLockExclusive).is_ok()
        {
            empty(&old);
            let _ = rustix::fs::unlinkat(parent, &*name, AtFlags::REMOVEDIR);
        }
    }
}

/// Nobody else's, and nobody else can reach into it: others may give any directory such a name where they can write.
fn is_private(directory: &OwnedFd) -> bool {
    let mine =
        |stat: &rustix::fs::Stat| stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o077 == 0;
    rustix::fs::fstat(directory).as_ref().is_ok_and(mine)
}

fn empty(directory: &OwnedFd) {
    for name in names(directory) {
        if rustix::fs::unlinkat(directory, &*name, AtFlags::empty()) == Err(Errno::ISDIR)
            && let Ok(inner) = rustix::fs::openat(directory, &*name, FLAGS, Mode::empty())
        {
            empty(&inner);
            let _ = rustix::fs::unlinkat(directory, &*name, AtFlags::REMOVEDIR);
        }
    }
}

fn names(directory: impl AsFd) -> Vec<std::ffi::CString> {
    let entries = Dir::read_from(directory).into_iter().flatten().flatten();
    entries.map(|e| e.file_name().to_owned()).filter(|n| n.to_bytes() != b"." && n.to_bytes() != b"..").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_session_left_is_removed_and_a_living_one_is_not() {
        let place = tempfile::tempdir().unwrap();
        let count = || std::fs::read_dir(place.path()).unwrap().count();
        let first = Directory::create(place.path()).unwrap();
        std::fs::write(place.path().join(&first.name).join("0"), "x").unwrap();
        let second = Directory::create(place.path()).unwrap();
        assert_eq!(count(), 2);
        drop(first);
        let make = |name: &str, mode| {
            let path = place.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        };
        make("hpcrt-store.0123", 0o755);
        let third = Directory::create(place.path()).unwrap();
        assert_eq!(count(), 3, "the first one's is gone, and what is not as we make them stays");
        std::fs::remove_dir(place.path().join("hpcrt-store.0123")).unwrap();
        // Of a directory that other machines have, too, only this one's.
        make("hpcrt-store.1.0123", 0o700);
        make(&format!("{}0123", prefix()), 0o700);
        sweep(&third.parent, &prefix());
        assert_eq!(count(), 3);
        std::fs::remove_dir(place.path().join("hpcrt-store.1.0123")).unwrap();
        second.remove();
        third.remove();
        assert_eq!(count(), 0);
        assert!(Directory::create(Path::new("/proc")).unwrap_err().to_string().contains("where you may write"));
    }
}
