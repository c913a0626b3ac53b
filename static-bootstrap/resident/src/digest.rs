//! Whether a page is still what a server has of it: 64 bits made of all of its content with a key that nobody knows. Unlike write protection it costs the
//! program nothing, needs no help of the kernel, and cannot miss a write that happens while a page is being taken.

use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use core::sync::atomic::{AtomicU64, Ordering};

use sys::page::PAGE;
use sys::syscall::{nr, syscall};

const LANES: usize = 4;
/// Bytes that are on their way from memory.
const AHEAD: usize = 1024;
static KEY: [AtomicU64; 2 * LANES] = [const { AtomicU64::new(0) }; 2 * LANES];

/// Draws the key.
pub(super) fn draw() -> Result<(), u32> {
    let mut words = [0u64; 2 * LANES];
    // SAFETY: room for as many bytes.
    unsafe { syscall(nr::GETRANDOM, [words.as_mut_ptr() as usize, size_of_val(&words), 0, 0, 0, 0]) }?;
    KEY.iter().zip(words).for_each(|(key, word)| key.store(word, Ordering::Relaxed));
    Ok(())
}

fn mix(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// Of a page.
pub(super) fn of(page: &[u64; PAGE / 8]) -> u64 {
    let key: [u64; 2 * LANES] = core::array::from_fn(|at| KEY[at].load(Ordering::Relaxed));
    let mut lanes: [u64; LANES] = core::array::from_fn(|at| key[at]);
    for words in page.chunks_exact(2 * LANES) {
        // Processors do not look ahead beyond the end of a page; what follows one is mostly the next that is asked for.
        // SAFETY: this only helps, whatever is there.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().wrapping_byte_add(AHEAD).cast()) };
        for (at, lane) in lanes.iter_mut().enumerate() {
            // The number keeps the place of what is zero apart from that of what is not.
            *lane = mix(words[2 * at] ^ key[LANES + at], words[2 * at + 1] ^ *lane).wrapping_add(*lane << 1 | 1);
        }
    }
    lanes.iter().fold(key[0], |digest, lane| mix(digest ^ key[1], *lane ^ key[2]))
}
