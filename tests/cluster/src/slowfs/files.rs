//! Changing things in the backing directory: the calls behind the operations that are more than one system call.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirEntryExt, MetadataExt, PermissionsExt};
use std::time::{SystemTime, UNIX_EPOCH};

use fuser::{FileType, FopenFlags, TimeOrNow};
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, chownat, openat, utimensat,
};
use rustix::io::Errno;

use super::nodes::{kind, magic};

/// How a file is used that was opened so. As on a network file system what was read before stays valid while the file's times do not change; where
/// bytes come that are appended, the host does not know.
pub(crate) fn caching(flags: i32) -> FopenFlags {
    let appends = used(OFlags::from_bits_truncate(flags.cast_unsigned())).contains(OFlags::APPEND);
    if appends { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::FOPEN_KEEP_CACHE }
}

/// The flags that the file behind is opened with. What is appended by who cannot read goes where the file ends here, whatever a host believes;
/// else the host writes pages, at its offsets.
fn used(flags: OFlags) -> OFlags {
    let appends = flags & OFlags::ACCMODE == OFlags::WRONLY;
    flags & (OFlags::ACCMODE | OFlags::TRUNC | if appends { OFlags::APPEND } else { OFlags::empty() })
}

/// Who a new file belongs to.
#[derive(Clone, Copy)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Gives what was just made to the caller; in a set-gid directory the group is the directory's.
pub(crate) fn adopt(parent: &File, name: &OsStr, owner: Owner) -> io::Result<()> {
    let inherits = parent.metadata()?.mode() & 0o2000 != 0;
    let gid = (!inherits).then(|| Gid::from_raw(owner.gid));
    Ok(chownat(parent, name, Some(Uid::from_raw(owner.uid)), gid, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Opens an inode by its `O_PATH` descriptor.
pub(crate) fn open(node: &File, flags: i32) -> io::Result<File> {
    let flags = used(OFlags::from_bits_truncate(flags.cast_unsigned()));
    Ok(rustix::fs::open(magic(node), flags | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// Creates and opens `name`; without `O_EXCL` another host may have made it first.
pub(crate) fn create(parent: &File, name: &OsStr, mode: u32, flags: i32, owner: Owner) -> io::Result<File> {
    let wanted = OFlags::from_bits_truncate(flags.cast_unsigned());
    let base = used(wanted) | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match openat(parent, name, base | OFlags::CREATE | OFlags::EXCL, Mode::from_raw_mode(mode & 0o7777)) {
        Ok(fd) => {
            adopt(parent, name, owner)?;
            Ok(fd.into())
        }
        Err(Errno::EXIST) if !wanted.contains(OFlags::EXCL) => Ok(openat(parent, name, base, Mode::empty())?.into()),
        Err(e) => Err(e.into()),
    }
}

/// What `setattr` may change; `None` leaves a thing as it is.
pub(crate) struct Change {
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) size: Option<u64>,
    pub(crate) atime: Option<TimeOrNow>,
    pub(crate) mtime: Option<TimeOrNow>,
}

impl Change {
    pub(crate) fn apply(&self, node: &File) -> io::Result<()> {
        let path = magic(node);
        if self.uid.is_some() || self.gid.is_some() {
            let (uid, gid) = (self.uid.map(Uid::from_raw), self.gid.map(Gid::from_raw));
            chownat(node, "", uid, gid, AtFlags::EMPTY_PATH)?;
        }
        if let Some(mode) = self.mode {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode & 0o7777))?;
        }
        if let Some(size) = self.size {
            File::options().write(true).open(&path)?.set_len(size)?;
        }
        if self.atime.is_some() || self.mtime.is_some() {
            let times = Timestamps { last_access: timespec(self.atime), last_modification: timespec(self.mtime) };
            utimensat(CWD, &path, &times, AtFlags::empty())?;
        }
        Ok(())
    }
}

fn timespec(time: Option<TimeOrNow>) -> Timespec {
    match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeOrNow::SpecificTime(time)) => from_system(time),
    }
}

fn from_system(time: SystemTime) -> Timespec {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => Timespec {
            tv_sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: after.subsec_nanos().into(),
        },
        // Before 1970 whole seconds will do.
        Err(before) => {
            Timespec { tv_sec: i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |s| -s), tv_nsec: 0 }
        }
    }
}

/// Inode number, type and name.
pub(crate) type Entry = (u64, FileType, OsString);

/// A directory's names with inode number and type, `.` and `..` included.
pub(crate) fn list(node: &File) -> io::Result<Vec<Entry>> {
    let ino = node.metadata()?.ino();
    let mut names = vec![
        (ino, FileType::Directory, OsStr::new(".").to_owned()),
        (ino, FileType::Directory, OsStr::new("..").to_owned()),
    ];
    for entry in fs::read_dir(magic(node))? {
        let entry = entry?;
        names.push((entry.ino(), kind(entry.file_type()?), entry.file_name()));
    }
    Ok(names)
}
