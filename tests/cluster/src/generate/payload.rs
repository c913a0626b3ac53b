//! Bytes that compress as libraries do.

/// A small generator of pseudo-random numbers (xorshift64*): the same seed gives the same bytes everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// `size` bytes, different for each `seed`, that zstd -1 shrinks to about a third.
///
/// Like code, it is a sequence over a small vocabulary of instructions, of which some carry an operand that does not compress.
#[must_use]
pub fn payload(seed: usize, size: usize) -> Vec<u8> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ ((seed as u64 + 1) << 20));
    let vocabulary: Vec<[u8; 8]> = (0..48).map(|_| random.next().to_le_bytes()).collect();
    let mut bytes = Vec::with_capacity(size + 16);
    while bytes.len() < size {
        let choice = random.next();
        bytes.extend_from_slice(&vocabulary[(choice % 48) as usize]);
        if (choice >> 32) % 100 < OPERANDS_PERCENT {
            bytes.extend_from_slice(&random.next().to_le_bytes()[..4]);
        }
    }
    bytes.truncate(size);
    bytes
}

/// Instructions with an operand, of 100.
const OPERANDS_PERCENT: u64 = 45;
