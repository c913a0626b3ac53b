//! Pages that are here in the order in which they came: from the front they go, and now and then one from between ([`Line::sample`]).

use super::page::{Bits, NONE, bounds, count, range};

/// Words whose memory is given back when all of them went; a power of two.
pub const PIECE: usize = 1 << 13;
/// Of a word that says number of the span, first page, pages less one; those that are not in a row have their bits behind it.
const SCATTERED: u64 = 1 << 16;
/// It was taken from between others.
const STRUCK: u64 = 1 << 63;
/// Entries that are passed over for a sample, at most: others wait for the line meanwhile.
const STEPS: usize = 1 << 12;

/// See the module. It may name what is not here any more, and the same more than once.
#[derive(Debug)]
pub struct Line {
    /// As many as a power of two, all around; and the places of the first and behind the last that are used, which grow.
    words: Option<&'static mut [u64]>,
    head: usize,
    tail: usize,
    /// Where the last sample was.
    sample: usize,
}

impl Line {
    pub const NEW: Line = Line { words: None, head: 0, tail: 0, sample: 0 };

    /// In as much memory as a power of two, more than twice [`PIECE`].
    pub fn new(words: &'static mut [u64]) -> Line {
        debug_assert!(words.len().is_power_of_two() && words.len() > 2 * PIECE, "{}", words.len());
        Line { words: Some(words), ..Line::NEW }
    }

    /// False: there is no room for more.
    #[must_use]
    pub fn push(&mut self, number: usize, pages: Bits) -> bool {
        let (first, end) = bounds(pages);
        if first == end {
            return true;
        }
        if self.len() + PIECE + NONE.len() >= self.room() {
            return false;
        }
        let scattered = count(&pages) < end - first;
        self.add((number << 17 | first << 8 | (end - first - 1)) as u64 | if scattered { SCATTERED } else { 0 });
        pages.into_iter().filter(|_| scattered).for_each(|word| self.add(word));
        true
    }

    fn add(&mut self, word: u64) {
        self.set(self.tail, word);
        self.tail += 1;
    }

    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Words that are used.
    pub fn len(&self) -> usize {
        self.tail - self.head
    }

    /// All memory is for `spent`, which may have it be zero.
    pub fn clear(&mut self, spent: impl FnOnce(&mut [u64])) {
        self.head = self.tail;
        if let Some(words) = self.words.as_deref_mut() {
            spent(words);
        }
    }

    fn room(&self) -> usize {
        self.words.as_ref().map_or(0, |words| words.len())
    }

    fn place(&self, at: usize) -> usize {
        at & self.room().wrapping_sub(1)
    }

    fn word(&self, at: usize) -> u64 {
        self.words.as_ref().and_then(|words| words.get(self.place(at)).copied()).unwrap_or(STRUCK)
    }

    fn set(&mut self, at: usize, word: u64) {
        let place = self.place(at);
        if let Some(place) = self.words.as_mut().and_then(|words| words.get_mut(place)) {
            *place = word;
        }
    }

    /// Of what begins at a place: pages from the first to the last, and the place after it.
    fn extent(&self, at: usize) -> (usize, usize) {
        let word = self.word(at);
        let words = if word & SCATTERED == 0 { 1 } else { 1 + NONE.len() };
        let pages = if word & STRUCK == 0 { (word as usize & 0xff) + 1 } else { 0 };
        (pages, at + words)
    }

    /// What begins at a place: number of the span, and pages.
    fn entry(&self, at: usize) -> (usize, Bits) {
        let word = self.word(at);
        let (number, first) = ((word & !STRUCK) as usize >> 17, word as usize >> 8 & 0xff);
        let is_row = word & (SCATTERED | STRUCK) != SCATTERED;
        let row = range(first, first + self.extent(at).0);
        (number, if is_row { row } else { core::array::from_fn(|nth| self.word(at + 1 + nth)) })
    }

    /// What is so many pages behind the last sample, if it does not take more than so many pages with what lies between; no pages if none were found. It is not named any
    /// more: else it would go as what came first when it has come back, and more samples would be of it than of others.
    pub fn sample(&mut self, behind: usize, most: usize) -> Option<(usize, Bits)> {
        if self.is_empty() {
            return None;
        }
        let (mut at, mut left) = (self.sample.max(self.head), behind);
        for steps in 0.. {
            at = if at < self.tail { at } else { self.head };
            let (len, next) = self.extent(at);
            if left < len || steps == STEPS {
                break;
            }
            (at, left) = (next, left - len);
        }
        let (len, next) = self.extent(at);
        if len > most {
            self.sample = at;
            return None;
        }
        self.sample = next;
        let entry = self.entry(at);
        self.set(at, self.word(at) | STRUCK);
        Some(entry)
    }

    /// What is first, if it does not take more than so many pages with what lies between; no pages if it was a sample. Memory of what went before is for `spent`, as in
    /// [`Self::clear`].
    pub fn pop(&mut self, most: usize, spent: impl FnOnce(&mut [u64])) -> Option<(usize, Bits)> {
        if self.is_empty() {
            return None;
        }
        let (len, next) = self.extent(self.head);
        if len > most {
            return None;
        }
        let entry = self.entry(self.head);
        let before = self.head / PIECE * PIECE;
        self.head = next;
        if self.head >= before + PIECE {
            let at = self.place(before);
            if let Some(words) = self.words.as_mut().and_then(|words| words.get_mut(at..at + PIECE)) {
                spent(words);
            }
        }
        Some(entry)
    }
}
