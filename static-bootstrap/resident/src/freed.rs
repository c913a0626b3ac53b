//! Spans of the window behind the program's break that were given back, to be given again: a bit for each, guarded by the table's lock.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use sys::page::SPAN;

use super::window;

const BITS: usize = u64::BITS as usize;
const WORDS: usize = (window::SIZE - window::HEAP) / SPAN / BITS;

static FREE: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
/// Words before this one have none, and none has any from `END` on.
static FIRST: AtomicUsize = AtomicUsize::new(WORDS);
static END: AtomicUsize = AtomicUsize::new(0);

/// Whether a span is one of them.
pub(super) fn has(nth: usize) -> bool {
    word(nth / BITS) >> (nth % BITS) & 1 != 0
}

/// Gives a span back.
pub(super) fn put(nth: usize) {
    let Some(bits) = FREE.get(nth / BITS) else { return };
    bits.fetch_or(1 << (nth % BITS), Ordering::Relaxed);
    FIRST.fetch_min(nth / BITS, Ordering::Relaxed);
    END.fetch_max(nth / BITS + 1, Ordering::Relaxed);
}

/// The first of so many that follow each other, which are nobody's any more.
pub(super) fn take(count: usize) -> Option<usize> {
    let (mut run, mut first) = (0, None);
    for at in FIRST.load(Ordering::Relaxed)..END.load(Ordering::Relaxed) {
        let (bits, mut bit) = (word(at), 0);
        if bits != 0 && first.is_none() {
            first = Some(at);
            FIRST.store(at, Ordering::Relaxed);
        }
        while bit < BITS {
            let left = bits >> bit;
            let [zeros, ones] = [left.trailing_zeros(), left.trailing_ones()].map(|some| some as usize);
            if ones == 0 {
                (run, bit) = (0, bit + zeros.min(BITS));
                continue;
            }
            if run + ones >= count {
                let from = at * BITS + bit - run;
                (from..from + count).for_each(clear);
                return Some(from);
            }
            (run, bit) = (run + ones, bit + ones);
        }
    }
    None
}

fn word(at: usize) -> u64 {
    FREE.get(at).map_or(0, |bits| bits.load(Ordering::Relaxed))
}

fn clear(nth: usize) {
    if let Some(bits) = FREE.get(nth / BITS) {
        bits.fetch_and(!(1 << (nth % BITS)), Ordering::Relaxed);
    }
}
