//! Whether a page is still what a server has of it: 64 bits made of all of its content with a key that nobody knows. Unlike write protection it costs the
//! program nothing, needs no help of the kernel, and cannot miss a write that happens while a page is being taken.
//!
//! In each of eight columns two sums of products of halves of words to which keys were added: NH of UMAC (Black and others, 1999; RFC 4418). Of two pages that differ each sum of a column is the
//! same for one key of 2^32, and both are for one of 2^64, since they have keys of their own.
#![allow(unsafe_code, reason = "vector instructions")]

use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use super::page::PAGE;
use super::width::{Width, width};

const COLUMNS: usize = 8;
const ROWS: usize = PAGE / 8 / COLUMNS;
/// Bytes that are on their way from memory.
const AHEAD: usize = 2048;

/// Bytes that the processor fetches from memory at once.
pub const LINE: usize = 64;

/// Words of a page.
pub type Words = [u64; PAGE / 8];

/// To be drawn at random. A row's keys are the ones of the row before but for the first, and one more.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    pub sums: [[u64; ROWS + COLUMNS]; 2],
    pub last: [[u64; COLUMNS]; 2],
}

/// Has the processor fetch this, which may be anywhere.
pub fn fetch(at: *const u8) {
    // SAFETY: this only helps, whatever is there.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

impl Key {
    pub const NONE: Key = Key { sums: [[0; ROWS + COLUMNS]; 2], last: [[0; COLUMNS]; 2] };

    /// Of a page.
    pub fn digest(&self, page: &Words) -> u64 {
        if width() < Width::Eight {
            return self.plainly(page);
        }
        // SAFETY: the processor has these instructions.
        unsafe { self.widely(page) }
    }

    #[target_feature(enable = "avx2")]
    fn widely(&self, page: &Words) -> u64 {
        self.plainly(page)
    }

    /// Compiled for whoever calls it.
    #[inline(always)]
    pub(super) fn plainly(&self, page: &Words) -> u64 {
        let mut sums = [[0u64; COLUMNS]; 2];
        for (nth, words) in page.as_chunks::<COLUMNS>().0.iter().enumerate() {
            // Processors do not look ahead beyond the end of a page; what follows one is mostly the next that is asked for.
            fetch(words.as_ptr().wrapping_byte_add(AHEAD).cast());
            for (sums, keys) in sums.iter_mut().zip(&self.sums) {
                for ((sum, word), key) in sums.iter_mut().zip(words).zip(&keys[nth..nth + COLUMNS]) {
                    let both = word.wrapping_add(*key);
                    *sum = sum.wrapping_add((both & u64::from(u32::MAX)) * (both >> 32));
                }
            }
        }
        let keyed = |which: usize, column: usize| u128::from(sums[which][column] ^ self.last[which][column]);
        let products = (0..COLUMNS).map(|column| keyed(0, column) * keyed(1, column));
        products.fold(0, |digest, product| digest.wrapping_add(product as u64 ^ (product >> 64) as u64))
    }
}
