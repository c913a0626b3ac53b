//! What was found in objects ([`sys::sites`]), for all programs of the job on this host: a file beside the resident's own, made by the first.

use sys::sites::Verdict;
use sys::syscall::{nr, syscall};

use super::image::beside;
use crate::call;

const AT_FDCWD: usize = -100_isize as usize;
const READ_WRITE_CREATE_CLOEXEC: usize = 0o2_000_102;
/// Words in the file; and those beside each other, in one of which a key is.
const WORDS: usize = 8192;
const WAYS: usize = 4;
/// The lowest bits of a word are the verdict, the others of the key.
const VERDICT: u64 = 3;

/// The file; none: nothing is known.
pub(super) struct Verdicts(Option<usize>);

impl Verdicts {
    pub(super) fn open() -> Verdicts {
        let path = beside(b"verdicts");
        // SAFETY: a string, then integers.
        Verdicts(unsafe { syscall(nr::OPENAT, [AT_FDCWD, path.at(), READ_WRITE_CREATE_CLOEXEC, 0o600, 0, 0]) }.ok())
    }

    /// The words in one of which it is, and where they are.
    fn near(&self, key: u64) -> Option<(usize, [u64; WAYS], usize)> {
        let file = self.0?;
        let mut words = [0; WAYS];
        let at = (key as usize >> 2) % (WORDS / WAYS) * size_of_val(&words);
        let args = [file, words.as_mut_ptr() as usize, size_of_val(&words), at, 0, 0];
        // SAFETY: room for them. What is behind the file's end stays 0.
        unsafe { syscall(nr::PREAD64, args) }.ok().map(|_| (file, words, at))
    }

    pub(super) fn get(&self, key: u64) -> Option<Verdict> {
        let (_, words, _) = self.near(key)?;
        let word = words.into_iter().find(|word| word & VERDICT != 0 && word & !VERDICT == key & !VERDICT)?;
        [Verdict::Clean, Verdict::Calls, Verdict::Unknown].into_iter().find(|verdict| *verdict as u64 == word & VERDICT)
    }

    /// Where all words are taken, the key says which goes.
    pub(super) fn put(&self, key: u64, verdict: Verdict) {
        let Some((file, words, at)) = self.near(key) else { return };
        let nth = words.iter().position(|word| *word == 0).unwrap_or(key as usize >> 16 & (WAYS - 1));
        let word = key & !VERDICT | verdict as u64;
        // SAFETY: a word; the kernel writes it whole.
        let _ = unsafe {
            syscall(
                nr::PWRITE64,
                [file, &raw const word as usize, size_of_val(&word), at + nth * size_of_val(&word), 0, 0],
            )
        };
    }
}

impl Drop for Verdicts {
    fn drop(&mut self) {
        if let Some(file) = self.0 {
            call::close(file as i32);
        }
    }
}
