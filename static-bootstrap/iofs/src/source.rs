//! The file of an object, to be read.

use sys::object::{HEAD, Object, join};
use sys::syscall::{nr, syscall};

use crate::call;
use crate::objects::Loaded;

const AT_FDCWD: usize = -100_isize as usize;
const CLOEXEC: usize = 0o2_000_000;
const READ: usize = 1;
const PRIVATE: usize = 2;
/// What is larger is not read: it may come from afar.
const MOST: usize = 64 << 20;

/// A file in memory; as any object's it must not become shorter meanwhile.
pub(super) struct Source {
    at: usize,
    len: usize,
    identity: u64,
}

impl Source {
    /// Of an object in memory, if that is what its path leads to.
    pub(super) fn of(loaded: &Loaded) -> Option<Source> {
        // SAFETY: the linker gives a string.
        let path =
            if unsafe { *loaded.name } == 0 { c"/proc/self/exe".as_ptr() as usize } else { loaded.name as usize };
        // SAFETY: as above.
        let file = unsafe { syscall(nr::OPENAT, [AT_FDCWD, path, CLOEXEC, 0, 0, 0]) }.ok()?;
        let source = Source::of_file(file);
        call::close(file as i32);
        source.filter(|source| source.bytes().starts_with(loaded.begins()))
    }

    /// Of an open file.
    pub(super) fn of_file(file: usize) -> Option<Source> {
        // Words of a `struct stat`.
        const DEVICE: usize = 0;
        const NUMBER: usize = 1;
        const SIZE: usize = 6;
        const SECONDS: usize = 11;
        const NANOSECONDS: usize = 12;
        let mut stat = [0usize; 18];
        // SAFETY: room for a `struct stat`; a new mapping.
        unsafe {
            syscall(nr::FSTAT, [file, stat.as_mut_ptr() as usize, 0, 0, 0, 0]).ok()?;
            let len = Some(stat[SIZE]).filter(|len| (HEAD..=MOST).contains(len))?;
            let at = syscall(nr::MMAP, [0, len, READ, PRIVATE, file, 0]).ok()?;
            // File system, number, and when it was last written.
            let identity = [DEVICE, NUMBER, SECONDS, NANOSECONDS]
                .into_iter()
                .fold(len as u64, |all, word| join(all, stat[word] as u64));
            Some(Source { at, len, identity })
        }
    }

    /// Tells it from others as long as nobody writes it.
    pub(super) fn identity(&self) -> u64 {
        self.identity
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as this lives.
        unsafe { core::slice::from_raw_parts(self.at as *const u8, self.len) }
    }

    pub(super) fn object(&self) -> Option<Object<'_>> {
        Object::new(self.bytes())
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // SAFETY: ours.
        let _ = unsafe { syscall(nr::MUNMAP, [self.at, self.len, 0, 0, 0, 0]) };
    }
}
