//! What changes a page changes its digest.

use std::collections::HashSet;

use super::digest::{Key, Words};

/// Any, but the same in each run (splitmix64).
struct Source(u64);

impl Source {
    fn some<const N: usize>(&mut self) -> [u64; N] {
        std::array::from_fn(|_| {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let word = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            word ^ word >> 31
        })
    }

    fn key(&mut self) -> Key {
        Key { sums: [self.some(), self.some()], last: [self.some(), self.some()] }
    }
}

#[test]
fn every_word_and_its_place_count() {
    let mut any = Source(1);
    let (key, page): (Key, Words) = (any.key(), any.some());
    let mut seen = HashSet::from([key.digest(&page), key.digest(&[0; 512]), key.digest(&[u64::MAX; 512])]);
    let mut is_new = |page: &Words| seen.insert(key.digest(page));
    for at in 0..page.len() {
        for bit in [0, 31, 32, 63] {
            let mut changed = page;
            changed[at] ^= 1 << bit;
            assert!(is_new(&changed), "bit {bit} of word {at}");
        }
        let mut alone = [0; 512];
        alone[at] = 1;
        assert!(is_new(&alone), "1 as word {at}");
        // In its column, in the next, and with its key.
        for other in [at + 1, at + 7, at + 8, at + 64].into_iter().filter(|other| *other < page.len()) {
            let mut swapped = page;
            swapped.swap(at, other);
            assert!(is_new(&swapped), "words {at} and {other}");
        }
        // As much more in one as is less in another.
        let mut moved = page;
        moved[at] = moved[at].wrapping_add(1 << 40);
        moved[(at + 8) % 512] = moved[(at + 8) % 512].wrapping_sub(1 << 40);
        assert!(is_new(&moved), "from word {at}");
    }
}

#[test]
fn all_processors_agree_and_keys_do_not() {
    let mut any = Source(2);
    let (one, other, page): (Key, Key, Words) = (any.key(), any.key(), any.some());
    assert_eq!(one.digest(&page), one.plainly(&page));
    assert_ne!(one.digest(&page), other.digest(&page));
    assert_ne!(one.digest(&[0; 512]), other.digest(&[0; 512]));
}
