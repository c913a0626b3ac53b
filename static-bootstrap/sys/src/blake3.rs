//! Keyed BLAKE3 for the tags of frames, without a library: the hash tree one chunk at a time, and as many chunks at once as the processor can
//! where they lie one after the other.
#![allow(unsafe_code, reason = "vector instructions")]
#![allow(clippy::cast_possible_wrap, clippy::ptr_as_ptr, reason = "vectors are of signed words")]

#[cfg(target_arch = "x86_64")]
use super::width::{Width, width};

const BLOCK: usize = 64;
const CHUNK: usize = 1024;
/// Chunks at once, at most.
const WIDE: usize = 16;
/// Of a tree of 2^64 bytes, and one more.
const DEPTH: usize = 55;

const CHUNK_START: u32 = 1;
const CHUNK_END: u32 = 2;
const PARENT: u32 = 4;
const ROOT: u32 = 8;
const KEYED: u32 = 16;

type Words = [u32; 8];

const IV: [u32; 4] = [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a];
/// Which word of the block each step of each round takes.
const SCHEDULE: [[usize; 16]; 7] = {
    const PERMUTATION: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
    let mut all = [[0; 16]; 7];
    let (mut round, mut at) = (0, 0);
    while at < 16 {
        all[0][at] = at;
        at += 1;
    }
    while round < 6 {
        at = 0;
        while at < 16 {
            all[round + 1][at] = all[round][PERMUTATION[at]];
            at += 1;
        }
        round += 1;
    }
    all
};
/// The seven rounds of the compression function, without a loop, so that the state stays in registers. Each mixes four words of it in eight steps.
macro_rules! rounds {
    ($state:ident, $message:ident, $add:ident, $xor:ident, $rotate:ident) => {
        rounds!(@each $state, $message, $add, $xor, $rotate, 0 1 2 3 4 5 6);
    };
    (@each $state:ident, $message:ident, $add:ident, $xor:ident, $rotate:ident, $($round:literal)*) => {
        $(rounds!(@one $state, $message, $add, $xor, $rotate, $round,
            0 0 4 8 12, 1 1 5 9 13, 2 2 6 10 14, 3 3 7 11 15, 4 0 5 10 15, 5 1 6 11 12, 6 2 7 8 13, 7 3 4 9 14);)*
    };
    (@one $state:ident, $message:ident, $add:ident, $xor:ident, $rotate:ident, $round:literal,
        $($step:literal $a:literal $b:literal $c:literal $d:literal),*) => {
        $(
            $state[$a] = $add($add($state[$a], $state[$b]), $message[SCHEDULE[$round][$step * 2]]);
            $state[$d] = $rotate::<16, 16>($xor($state[$d], $state[$a]));
            $state[$c] = $add($state[$c], $state[$d]);
            $state[$b] = $rotate::<12, 20>($xor($state[$b], $state[$c]));
            $state[$a] = $add($add($state[$a], $state[$b]), $message[SCHEDULE[$round][$step * 2 + 1]]);
            $state[$d] = $rotate::<8, 24>($xor($state[$d], $state[$a]));
            $state[$c] = $add($state[$c], $state[$d]);
            $state[$b] = $rotate::<7, 25>($xor($state[$b], $state[$c]));
        )*
    };
}

fn add(one: u32, other: u32) -> u32 {
    one.wrapping_add(other)
}

fn xor(one: u32, other: u32) -> u32 {
    one ^ other
}

fn rotate<const N: u32, const LEFT: u32>(word: u32) -> u32 {
    word.rotate_right(N)
}

/// The compression function, of which only the first half of the result is ever needed.
fn compress(value: &Words, block: &[u8; BLOCK], len: u32, counter: u64, flags: u32) -> Words {
    let message: [u32; 16] = core::array::from_fn(|at| {
        u32::from_le_bytes([block[at * 4], block[at * 4 + 1], block[at * 4 + 2], block[at * 4 + 3]])
    });
    let mut state = [0; 16];
    state[..8].copy_from_slice(value);
    state[8..12].copy_from_slice(&IV);
    state[12..].copy_from_slice(&[counter as u32, (counter >> 32) as u32, len, flags]);
    rounds!(state, message, add, xor, rotate);
    core::array::from_fn(|at| state[at] ^ state[at + 8])
}

/// Chunks that lie one after the other; parents, too, each of which is a block.
#[cfg(target_arch = "x86_64")]
mod wide {
    use core::arch::x86_64::*;

    use super::{BLOCK, CHUNK_END, CHUNK_START, IV, KEYED, PARENT, SCHEDULE, WIDE, Words};

    #[target_feature(enable = "avx512f")]
    fn rotate16<const N: i32, const LEFT: i32>(word: __m512i) -> __m512i {
        _mm512_ror_epi32::<N>(word)
    }

    #[target_feature(enable = "avx2")]
    fn rotate8<const N: i32, const LEFT: i32>(word: __m256i) -> __m256i {
        _mm256_or_si256(_mm256_srli_epi32::<N>(word), _mm256_slli_epi32::<LEFT>(word))
    }

    /// The words of a block of each of sixteen chunks, which begin so many bytes from each other: the first ones of all, the second ones, and so on.
    ///
    /// # Safety
    /// From there on there are so many chunks, but for the blocks before.
    #[target_feature(enable = "avx512f")]
    unsafe fn words16<const STRIDE: usize>(from: *const u8) -> [__m512i; 16] {
        // SAFETY: the caller vouches for it.
        let rows: [__m512i; 16] =
            core::array::from_fn(|row| unsafe { _mm512_loadu_si512(from.add(row * STRIDE).cast()) });
        let pairs: [__m512i; 16] = core::array::from_fn(|at| match at % 2 {
            0 => _mm512_unpacklo_epi32(rows[at], rows[at + 1]),
            _ => _mm512_unpackhi_epi32(rows[at - 1], rows[at]),
        });
        // Of four rows each; four words of each row lie apart by the width of a part.
        let fours: [__m512i; 16] = core::array::from_fn(|at| {
            let (first, third) = (pairs[at / 4 * 4 + at % 4 / 2], pairs[at / 4 * 4 + at % 4 / 2 + 2]);
            if at % 2 == 0 { _mm512_unpacklo_epi64(first, third) } else { _mm512_unpackhi_epi64(first, third) }
        });
        core::array::from_fn(|word| {
            let (column, odd) = (word % 4, word / 4 % 2 == 1);
            let half = |at: usize| match odd {
                false => _mm512_shuffle_i32x4::<0x88>(fours[at], fours[at + 4]),
                true => _mm512_shuffle_i32x4::<0xdd>(fours[at], fours[at + 4]),
            };
            let (low, high) = (half(column), half(column + 8));
            match word / 8 {
                0 => _mm512_shuffle_i32x4::<0x88>(low, high),
                _ => _mm512_shuffle_i32x4::<0xdd>(low, high),
            }
        })
    }

    /// The same of eight chunks.
    ///
    /// # Safety
    /// As [`words16`]'s.
    #[target_feature(enable = "avx2")]
    unsafe fn words8<const STRIDE: usize>(from: *const u8) -> [__m256i; 16] {
        // SAFETY: the caller vouches for it. The first eight words of each, then the others.
        let rows: [__m256i; 16] =
            core::array::from_fn(|at| unsafe { _mm256_loadu_si256(from.add(at % 8 * STRIDE + at / 8 * 32).cast()) });
        let pairs: [__m256i; 16] = core::array::from_fn(|at| match at % 2 {
            0 => _mm256_unpacklo_epi32(rows[at], rows[at + 1]),
            _ => _mm256_unpackhi_epi32(rows[at - 1], rows[at]),
        });
        let fours: [__m256i; 16] = core::array::from_fn(|at| {
            let (first, third) = (pairs[at / 4 * 4 + at % 4 / 2], pairs[at / 4 * 4 + at % 4 / 2 + 2]);
            if at % 2 == 0 { _mm256_unpacklo_epi64(first, third) } else { _mm256_unpackhi_epi64(first, third) }
        });
        core::array::from_fn(|word| {
            let at = word / 8 * 8 + word % 4;
            match word / 4 % 2 {
                0 => _mm256_permute2x128_si256::<0x20>(fours[at], fours[at + 4]),
                _ => _mm256_permute2x128_si256::<0x31>(fours[at], fours[at + 4]),
            }
        })
    }

    macro_rules! wide {
        ($name:ident, $feature:literal, $lanes:literal, $type:ty, $set:ident, $add:ident, $xor:ident, $words:ident, $rotate:ident) => {
            /// What begins every `STRIDE` bytes: chunks; or, if these are those of a block, parents.
            ///
            /// # Safety
            /// There are so many, and the processor has these instructions.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name<const STRIDE: usize>(
                key: &Words,
                chunks: *const u8,
                counter: u64,
                values: &mut [Words; WIDE],
            ) {
                let parents = STRIDE == BLOCK;
                let vector = |words: [i32; $lanes]| {
                    // SAFETY: as many words as a vector has.
                    unsafe { core::mem::transmute::<[i32; $lanes], $type>(words) }
                };
                let of = |at: usize| if parents { 0 } else { counter + at as u64 };
                let lanes = |shift: u32| core::array::from_fn(|at| (of(at) >> shift) as i32);
                let (low, high) = (vector(lanes(0)), vector(lanes(32)));
                let mut value = [low; 8];
                for (vector, word) in value.iter_mut().zip(key) {
                    *vector = $set(word.cast_signed());
                }
                for block in 0..STRIDE / BLOCK {
                    let start = if block == 0 { CHUNK_START } else { 0 };
                    let end = if block == STRIDE / BLOCK - 1 { CHUNK_END } else { 0 };
                    let flags = KEYED | if parents { PARENT } else { start | end };
                    // SAFETY: within the chunks.
                    let message = unsafe { $words::<STRIDE>(chunks.add(block * BLOCK)) };
                    let mut state = [low; 16];
                    state[..8].copy_from_slice(&value);
                    for (vector, word) in state[8..12].iter_mut().zip(IV) {
                        *vector = $set(word.cast_signed());
                    }
                    state[13] = high;
                    state[14] = $set(BLOCK as i32);
                    state[15] = $set(flags.cast_signed());
                    rounds!(state, message, $add, $xor, $rotate);
                    for at in 0..8 {
                        value[at] = $xor(state[at], state[at + 8]);
                    }
                }
                for (word, vector) in value.into_iter().enumerate() {
                    // SAFETY: as above.
                    let lanes = unsafe { core::mem::transmute::<$type, [u32; $lanes]>(vector) };
                    lanes.iter().zip(values.iter_mut()).for_each(|(lane, value)| value[word] = *lane);
                }
            }
        };
    }
    wide!(eight, "avx2", 8, __m256i, _mm256_set1_epi32, _mm256_add_epi32, _mm256_xor_si256, words8, rotate8);
    wide!(sixteen, "avx512f", 16, __m512i, _mm512_set1_epi32, _mm512_add_epi32, _mm512_xor_si512, words16, rotate16);
}

/// A hash under way.
#[derive(Debug, Clone)]
pub struct Hasher {
    key: Words,
    /// The last chunk, which is only finished when more follows.
    chunk: [u8; CHUNK],
    len: usize,
    /// Chunks before it.
    chunks: u64,
    /// Values of the trees that they make, largest first; two of a size, of which one is complete, are made one when more follows.
    stack: [Words; DEPTH],
    depth: usize,
    #[cfg(target_arch = "x86_64")]
    width: Width,
}

impl Hasher {
    /// With a key of 32 bytes.
    pub fn new(key: &[u8; 32]) -> Hasher {
        let word = |at: usize| u32::from_le_bytes([key[at], key[at + 1], key[at + 2], key[at + 3]]);
        Hasher {
            key: core::array::from_fn(|at| word(at * 4)),
            chunk: [0; CHUNK],
            len: 0,
            chunks: 0,
            stack: [[0; 8]; DEPTH],
            depth: 0,
            #[cfg(target_arch = "x86_64")]
            width: width(),
        }
    }

    /// One for each way in which this processor can do it.
    #[cfg(all(test, target_arch = "x86_64"))]
    pub fn every_way(key: &[u8; 32]) -> impl Iterator<Item = Hasher> {
        let can = |other: &Width| *other <= width();
        let all = [Width::One, Width::Eight, Width::Sixteen].into_iter().filter(can);
        all.map(|width| Hasher { width, ..Hasher::new(key) })
    }

    /// Goes on with these bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.len == CHUNK {
                let (chunk, count) = (self.chunk, self.chunks);
                let (value, block, len, flags) = last_block(&self.key, &chunk, count);
                self.push(compress(&value, &block, len, count, flags), 1);
                self.len = 0;
            }
            if self.len == 0 {
                bytes = self.many(bytes);
                if !bytes.is_empty() {
                    self.merge();
                }
            }
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK - self.len));
            self.chunk[self.len..self.len + now.len()].copy_from_slice(now);
            self.len += now.len();
            bytes = later;
        }
    }

    /// Takes as many chunks as can be taken at once.
    #[cfg(target_arch = "x86_64")]
    fn many<'a>(&mut self, mut bytes: &'a [u8]) -> &'a [u8] {
        let lanes = match self.width {
            Width::One => return bytes,
            Width::Eight => 8,
            Width::Sixteen => 16,
        };
        let (mut values, mut parents) = ([[0; 8]; WIDE], [[0; 8]; WIDE]);
        while bytes.len() >= lanes * CHUNK {
            // SAFETY: so many chunks are there, and the processor was asked.
            unsafe {
                match self.width {
                    Width::Sixteen => wide::sixteen::<CHUNK>(&self.key, bytes.as_ptr(), self.chunks, &mut values),
                    _ => wide::eight::<CHUNK>(&self.key, bytes.as_ptr(), self.chunks, &mut values),
                }
            }
            if lanes == WIDE && self.chunks.is_multiple_of(2) {
                // SAFETY: two values are a block.
                unsafe { wide::eight::<BLOCK>(&self.key, values.as_ptr().cast(), 0, &mut parents) };
                parents[..WIDE / 2].iter().for_each(|value| self.push(*value, 2));
            } else {
                values[..lanes].iter().for_each(|value| self.push(*value, 1));
            }
            bytes = &bytes[lanes * CHUNK..];
        }
        bytes
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn many<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        bytes
    }

    /// One more tree: of a chunk, or of two, of which the first is an even one.
    fn push(&mut self, value: Words, chunks: u64) {
        self.merge();
        self.stack[self.depth] = value;
        self.depth += 1;
        self.chunks += chunks;
    }

    /// More follows: the trees that the last chunk completed become one.
    fn merge(&mut self) {
        while self.depth > self.chunks.count_ones() as usize {
            self.depth -= 1;
            let (block, flags) = parent(&self.stack[self.depth - 1], &self.stack[self.depth]);
            self.stack[self.depth - 1] = compress(&self.key, &block, BLOCK as u32, 0, flags);
        }
    }

    /// The first 16 bytes of the hash.
    pub fn tag(&self) -> [u8; 16] {
        let (mut depth, mut counter) = (self.depth, self.chunks);
        let (mut value, mut block, mut len, mut flags) = match depth {
            // Several chunks were taken at once, and nothing followed.
            2.. if self.len == 0 => {
                (depth, counter) = (depth - 2, 0);
                let (block, flags) = parent(&self.stack[depth], &self.stack[depth + 1]);
                (self.key, block, BLOCK as u32, flags)
            }
            _ => last_block(&self.key, &self.chunk[..self.len], counter),
        };
        for left in self.stack[..depth].iter().rev() {
            let right = compress(&value, &block, len, counter, flags);
            (block, flags) = parent(left, &right);
            (value, len, counter) = (self.key, BLOCK as u32, 0);
        }
        let root = compress(&value, &block, len, 0, flags | ROOT);
        let mut tag = [0; 16];
        tag.chunks_exact_mut(4).zip(root).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        tag
    }
}

/// A chunk up to its last block: what is left to compress.
fn last_block(key: &Words, chunk: &[u8], counter: u64) -> (Words, [u8; BLOCK], u32, u32) {
    let (mut value, mut rest, mut flags) = (*key, chunk, KEYED | CHUNK_START);
    while let Some((block, more)) = rest.split_first_chunk::<BLOCK>().filter(|(_, more)| !more.is_empty()) {
        value = compress(&value, block, BLOCK as u32, counter, flags);
        (rest, flags) = (more, KEYED);
    }
    let mut block = [0; BLOCK];
    block[..rest.len()].copy_from_slice(rest);
    (value, block, rest.len() as u32, flags | CHUNK_END)
}

fn parent(left: &Words, right: &Words) -> ([u8; BLOCK], u32) {
    let mut block = [0; BLOCK];
    let words = left.iter().chain(right);
    block.chunks_exact_mut(4).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
    (block, KEYED | PARENT)
}
