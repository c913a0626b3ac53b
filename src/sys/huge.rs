//! Files in memory that lie in huge pages.
#![allow(unsafe_code, reason = "a mapping for the kernel to look at")]

use std::fs::File;
use std::io;
use std::ptr::null_mut;

use nix::errno::Errno;
use nix::libc;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Bytes of a huge page.
pub const HUGE: usize = 2 << 20;

/// Has a file in memory lie in huge pages from now on, whatever is configured (MADV_COLLAPSE of madvise(2), Linux 6.1): who maps a part of it gets sixteen small pages
/// of it for a third of the time. Its length becomes a multiple of 2 MiB. Takes up to a tenth of a second.
///
/// # Errors
/// The kernel cannot; what is in the file stays as it was.
pub fn gather(file: &File) -> io::Result<()> {
    let len = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?.next_multiple_of(HUGE);
    file.set_len(len as u64)?;
    gather_part(file, 0, len)
}

/// The same of a part, which has to begin and end at a multiple of 2 MiB and to have a page in each: then all others are there afterwards, too.
///
/// # Errors
/// As above.
pub fn gather_part(file: &File, start: u64, len: usize) -> io::Result<()> {
    // SAFETY: everything is mapped where we reserved room, and nothing of it is touched or stays.
    unsafe {
        let room = mmap_anonymous(null_mut(), len + HUGE, ProtFlags::empty(), MapFlags::PRIVATE)?;
        let at = room.map_addr(|address| address.next_multiple_of(HUGE));
        let mapped = mmap(at, len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED, file, start);
        let done = mapped
            .map_err(io::Error::from)
            .and_then(|at| Ok(Errno::result(libc::madvise(at, len, libc::MADV_COLLAPSE)).map(drop)?));
        munmap(room, len + HUGE)?;
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn what_is_in_it_stays() {
        let file = File::from(rustix::fs::memfd_create("huge", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let bytes: Vec<u8> = (0..1_400_000_u32).map(|at| (at / 7) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        if let Err(error) = gather(&file) {
            eprintln!("SKIPPED: huge pages: {error}");
        }
        let mut after = vec![1; HUGE];
        file.read_exact_at(&mut after, 0).unwrap();
        assert!(after[..bytes.len()] == bytes && after[bytes.len()..].iter().all(|byte| *byte == 0));
    }
}
