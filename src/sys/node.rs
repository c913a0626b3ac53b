//! What this node is and which limits it sets, as far as a look is enough (what must be tried is in `loader::view::probe`).
#![allow(unsafe_code, reason = "userfaultfd(2) has no safe wrapper in the crates used, and mmap(2) cannot have one")]

use std::fs;
use std::io::{self, Error};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Access, Mode, OFlags, StatVfsMountFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A number in a file of /proc or /sys; `None` when it is absent or "max".
pub fn number(path: impl AsRef<Path>) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// A number that this machine has until it is started again: the same for all containers on it, and for nobody else.
pub fn machine() -> Option<u64> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    u64::from_str_radix(&boot.get(..18)?.replace('-', ""), 16).ok()
}

/// Processors that this process may use, as far as that can be found out; at least one.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// A directory in which files could be staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directory {
    /// Bytes free for this user.
    pub free: u64,
    /// Programs can be executed from it.
    pub exec: bool,
    /// It is in memory (tmpfs or ramfs).
    pub memory: bool,
}

/// Tries to make an executable file in `path`; nothing is left behind.
///
/// # Errors
/// The directory does not exist, or nothing can be made in it.
pub fn directory(path: &Path) -> io::Result<Directory> {
    let space = rustix::fs::statvfs(path)?;
    let exec = match nameless(path) {
        Ok(file) => map_as_program(&file).is_ok(),
        // No nameless files there (NFS): the mount's own word is all there is.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
            rustix::fs::access(path, Access::WRITE_OK)?;
            !space.f_flag.contains(StatVfsMountFlags::NOEXEC)
        }
        Err(error) => return Err(error.into()),
    };
    let kind = rustix::fs::statfs(path)?.f_type as u32;
    const TMPFS: u32 = 0x0102_1994;
    const RAMFS: u32 = 0x8584_58f6;
    Ok(Directory { free: space.f_bavail.saturating_mul(space.f_frsize), exec, memory: matches!(kind, TMPFS | RAMFS) })
}

/// Whether libraries and programs can be mapped from a directory: mounts and security modules may forbid it.
///
/// # Errors
/// They cannot, or nothing can be made there.
pub fn maps_programs(directory: impl AsRef<Path>) -> io::Result<()> {
    map_as_program(&nameless(directory.as_ref())?)
}

/// A file without a name, so that it cannot survive its descriptor.
fn nameless(directory: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(directory, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RWXU)
}

/// Does with a file what a dynamic linker does with a library.
fn map_as_program(file: &OwnedFd) -> io::Result<()> {
    const PAGE: usize = 4096;
    rustix::fs::ftruncate(file, PAGE as u64)?;
    let (protection, flags) = (ProtFlags::READ | ProtFlags::EXEC, MapFlags::PRIVATE);
    // SAFETY: a fresh mapping at a place of the kernel's choice, which nothing looks at before it is gone.
    unsafe {
        let mapped = rustix::mm::mmap(std::ptr::null_mut(), PAGE, protection, flags, file, 0)?;
        Ok(rustix::mm::munmap(mapped, PAGE)?)
    }
}

/// What userfaultfd(2) can do for this user.
#[derive(Debug, Clone, Copy)]
pub struct Userfaultfd {
    /// Faults of the kernel itself, in system calls, are told as well.
    pub of_kernel: bool,
    /// Pages can be moved (Linux 6.8), which copying takes longer than.
    pub moves: bool,
}

/// Tries it.
///
/// # Errors
/// userfaultfd(2)'s, and those of `UFFDIO_API`.
pub fn userfaultfd() -> io::Result<Userfaultfd> {
    /// linux/userfaultfd.h
    const USER_MODE_ONLY: i32 = 1;
    const API: nix::libc::Ioctl = 0xc018_aa3f_u32 as nix::libc::Ioctl;
    const MOVE: u64 = 1 << 16;
    let open = |flags: i32| {
        // SAFETY: integer arguments only.
        let fd = unsafe { nix::libc::syscall(nix::libc::SYS_userfaultfd, nix::libc::O_CLOEXEC | flags) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(Error::last_os_error)?;
        // SAFETY: the kernel made the descriptor just now; nobody else owns it.
        Ok::<_, Error>(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let full = open(0);
    let of_kernel = full.is_ok();
    let fd = full.or_else(|_| open(USER_MODE_ONLY))?;
    // `struct uffdio_api`: what is asked for, of which the kernel makes what it has.
    let mut api = [0xaa_u64, 0, 0];
    // SAFETY: the structure of this request, which lives until it returns.
    if unsafe { nix::libc::ioctl(fd.as_raw_fd(), API, &raw mut api) } < 0 {
        return Err(Error::last_os_error());
    }
    Ok(Userfaultfd { of_kernel, moves: api[1] & MOVE != 0 })
}

/// Version of the node's own glibc ("2.36"), read from its file; `None` when there is none in the usual places.
pub fn glibc() -> Option<String> {
    let multiarch = format!("/lib/{}-linux-gnu", std::env::consts::ARCH);
    [&*multiarch, "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
        .iter()
        .find_map(|dir| glibc_version(&fs::read(Path::new(dir).join("libc.so.6")).ok()?))
}

/// The version that a `libc.so.6` says it is.
pub fn glibc_version(bytes: &[u8]) -> Option<String> {
    let banner = bytes.get(memchr::memmem::find(bytes, b"GNU C Library")?..)?;
    let banner = String::from_utf8_lossy(banner.get(..200).unwrap_or(banner));
    let version = banner.split("release version ").nth(1)?;
    Some(version.split(|c: char| !c.is_ascii_digit() && c != '.').next()?.trim_end_matches('.').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_tried() {
        let dir = tempfile::tempdir().unwrap();
        let found = directory(dir.path()).unwrap();
        assert!(found.free > 0 && found.exec, "{found:?}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(directory(file.path()).unwrap_err().kind(), io::ErrorKind::NotADirectory);
        assert_eq!(directory(Path::new("/nonexistent")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn the_glibc_of_the_node_has_a_version() {
        let Some(version) = glibc() else { return };
        assert!(version.starts_with("2.") && version[2..].parse::<u32>().is_ok(), "{version:?}");
    }
}
