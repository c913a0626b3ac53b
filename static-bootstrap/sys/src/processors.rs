//! Sets of processors, as sched_setaffinity(2) takes them.

/// 1,024 processors.
const WORDS: usize = 16;
/// Fewer than so many near to one are no place for who works beside it: a single one may be the other half of the same core.
const WORTH: u32 = 2;

/// A set of processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processors(pub [u64; WORDS]);

impl Processors {
    pub const NONE: Processors = Processors([0; WORDS]);

    /// This one alone.
    pub fn one(processor: usize) -> Processors {
        let mut words = [0; WORDS];
        if let Some(word) = words.get_mut(processor / 64) {
            *word = 1 << (processor % 64);
        }
        Processors(words)
    }

    /// As the kernel writes one in /sys: digits of base 16, the last of which are the first processors, with commas between.
    pub fn of_map(text: &[u8]) -> Processors {
        let mut words = [0; WORDS];
        let digits = text.iter().rev().filter_map(|byte| char::from(*byte).to_digit(16));
        for (nth, digit) in digits.enumerate() {
            if let Some(word) = words.get_mut(nth / 16) {
                *word |= u64::from(digit) << (nth % 16 * 4);
            }
        }
        Processors(words)
    }

    /// All but one, if any is left.
    pub fn without(mut self, processor: usize) -> Option<Processors> {
        if let Some(word) = self.0.get_mut(processor / 64) {
            *word &= !(1 << (processor % 64));
        }
        (self != Processors::NONE).then_some(self)
    }

    /// All but one that are also among those `near` to it; or all but it, if those are fewer than [`WORTH`].
    pub fn beside(self, processor: usize, near: Processors) -> Option<Processors> {
        let both = Processors(core::array::from_fn(|nth| self.0[nth] & near.0[nth]));
        both.without(processor).filter(|both| both.count() >= WORTH).or_else(|| self.without(processor))
    }

    fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }
}
