//! Reading ahead: of a file that is read in sequence and slowly the kernel is asked for what comes next, twice as much as was read so far, so that
//! the file system works while the program computes. It stays the kernel's cache: nobody sees anything old.

use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::kernel::{nr, raw};
use super::{others, table, worker};

/// Ticks from which on a read was the file system's and not the cache's, which takes as long for it and so long for a byte at most.
pub(super) const SLOW: u64 = 60_000;
pub(super) const COPYING: u64 = 2;
/// Reads in sequence before anything is asked for; of large ones, or from the file's beginning on, fewer.
const FEW: u8 = 3;
const LARGE: u64 = 1 << 20;
/// Bytes that are asked for at a time (a kernel takes no more), and how far ahead at most.
const STEP: u64 = 128 << 10;
/// A large read may be followed by another.
const MOST: u64 = 8 << 20;

/// Whether a read of so many bytes was the file system's.
pub(super) fn is_slow(len: u64, ticks: u64) -> bool {
    ticks >= SLOW + COPYING * len
}

/// How an open file is read; [`idle`](super::idle) looks at the first.
#[repr(C)]
pub(super) struct Reading {
    /// It has been slow, and so many reads were in sequence; 0: its offset was moved.
    slow: AtomicU8,
    streak: AtomicU8,
    /// Offsets: where the sequence began, where it goes on, and up to where was asked for.
    begun: AtomicU64,
    next: AtomicU64,
    asked: AtomicU64,
}

impl Reading {
    pub(super) const fn new() -> Reading {
        let zero = AtomicU64::new;
        Reading { slow: AtomicU8::new(0), streak: AtomicU8::new(0), begun: zero(0), next: zero(0), asked: zero(0) }
    }

    /// Another open file.
    pub(super) fn reset(&self) {
        self.slow.store(0, Ordering::Relaxed);
        self.moved();
    }

    /// The offset was moved.
    pub(super) fn moved(&self) {
        self.streak.store(0, Ordering::Relaxed);
    }

    /// So many bytes were read in so many ticks: at an offset, or at the open file's.
    pub(super) fn seen(&self, fd: usize, at: Option<u64>, len: u64, ticks: u64) {
        if is_slow(len, ticks) {
            self.slow.store(1, Ordering::Relaxed);
        } else if self.slow.load(Ordering::Relaxed) == 0 {
            return;
        }
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let streak = self.streak.load(Ordering::Relaxed);
        let from = match at {
            Some(at) => Some(at),
            None if streak > 0 => Some(get(&self.next)),
            None => table::kernel_offset(fd).and_then(|end| end.checked_sub(len)),
        };
        let Some(from) = from else { return };
        let next = from + len;
        let few = if len < LARGE { FEW } else { u8::from(from > 0) };
        let (streak, follows) = if streak > 0 && from == get(&self.next) { (streak, true) } else { (0, false) };
        if !follows {
            self.streak.store(1, Ordering::Relaxed);
            [&self.begun, &self.asked]
                .iter()
                .zip([from, next])
                .for_each(|(word, at)| word.store(at, Ordering::Relaxed));
        } else {
            self.streak.store(streak.saturating_add(1), Ordering::Relaxed);
        }
        self.next.store(next, Ordering::Relaxed);
        if streak < few {
            return;
        }
        if streak <= FEW && others::are() && !others::is_old(fd) {
            return self.moved();
        }
        let most = len.clamp(MOST, worker::limit().max(MOST));
        let window = (2 * next.saturating_sub(get(&self.begun))).clamp(2 * STEP, most);
        let mut asked = get(&self.asked).max(next);
        if asked - next > window / 2 {
            return;
        }
        const WILL_NEED: usize = 3;
        while asked < next + window {
            // SAFETY: integers.
            let _ = unsafe { raw(nr::FADVISE64, [fd, asked as usize, STEP as usize, WILL_NEED, 0, 0]) };
            asked += STEP;
        }
        self.asked.store(asked, Ordering::Relaxed);
    }
}
