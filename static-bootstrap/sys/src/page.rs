//! What a program's pager and a memory server say to each other, as bytes: a prefix, a header of one fixed shape, and pages beside it.
//! hpcrt's own types for the same bytes are in its `net/wire/page.rs` and `net/wire/frame.rs`; a test there compares them.

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages of a span: what one request is about, at most. Spans begin at multiples of their length.
pub const SPAN_PAGES: usize = 256;
/// Bytes of a span.
pub const SPAN: usize = SPAN_PAGES * PAGE;
/// Bytes of a body that leave, or are read, at once where tags are made: one piece's is made while others are under way.
pub const PIECE: usize = 64 << 10;
/// Bytes of a frame's prefix, of a header, and of a tag.
pub const PREFIX: usize = 16;
pub const HEAD: usize = size_of::<Head>();
pub const TAG: usize = 16;

/// One bit for each page of a span.
pub type Bits = [u64; SPAN_PAGES / 64];
/// All of them.
pub const ALL: Bits = [u64::MAX; SPAN_PAGES / 64];
pub const NONE: Bits = [0; SPAN_PAGES / 64];

/// What is asked, and what is answered. Answers come in the order of their questions.
pub mod op {
    /// Be this client (`data[..2]`: its name, which it chose at random; `zero`: what people are shown of it); answered by OPENED.
    pub const OPEN: u32 = 1;
    /// Give the pages in `data`; answered by GOT.
    pub const GET: u32 = 2;
    /// Keep the pages in `data`, whose contents follow in order; those in `zero` are zero from now on. Answered by DONE or FULL.
    pub const PUT: u32 = 3;
    /// Everything is zero in `data[0]` spans from this one on; answered by DONE.
    pub const DROP: u32 = 4;
    /// Begin with what client `data[..2]` keeps now of this span and those after it; only who keeps nothing there may ask. Answered by COPIED, DONE or FULL.
    pub const COPY: u32 = 5;
    /// Keep everything in a file that this client, of the same host, reads and writes itself; only who keeps nothing may ask. Answered by SHARED.
    pub const SHARE: u32 = 6;
    /// As PUT, of a file that is shared, but the client writes the pages in `data` there itself, when this is answered.
    pub const TAKE: u32 = 7;
    /// `data`: pages lent in all, and to whom else they are not lent; and a name that no other server has.
    pub const OPENED: u32 = 16;
    /// The contents of the pages in `data` follow in order; those in `zero` were asked for, too, and are zero.
    pub const GOT: u32 = 17;
    pub const DONE: u32 = 18;
    /// `data[..2]`: pages lent in all, and pages in use. Nothing was changed.
    pub const FULL: u32 = 19;
    /// Not all was copied yet: ask again from span `data[0]` on.
    pub const COPIED: u32 = 21;
    /// `data`: process and descriptor that the file is open as, and the 16 bytes at its end; all zero: there is none.
    pub const SHARED: u32 = 20;
}

/// The header.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Head {
    /// One of [`op`].
    pub op: u32,
    /// The asker's own; the answer has the same.
    pub sequence: u32,
    /// Number of the span: address / [`SPAN`].
    pub span: u64,
    pub data: Bits,
    pub zero: Bits,
}

/// Version of the protocol; two hpcrt that differ refuse each other by name.
pub const VERSION: u16 = 3;

/// A frame's prefix (`net/wire/frame.rs`): magic, version, kind 6, lengths.
pub fn prefix(body: usize) -> [u8; PREFIX] {
    let mut bytes = *b"HPRT\0\0\x06\0\0\0\0\0\0\0\0\0";
    bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..12].copy_from_slice(&(HEAD as u32).to_le_bytes());
    bytes[12..].copy_from_slice(&(body as u32).to_le_bytes());
    bytes
}

pub fn with(a: Bits, b: Bits) -> Bits {
    core::array::from_fn(|at| a[at] | b[at])
}

pub fn without(a: Bits, b: Bits) -> Bits {
    core::array::from_fn(|at| a[at] & !b[at])
}

pub fn both(a: Bits, b: Bits) -> Bits {
    core::array::from_fn(|at| a[at] & b[at])
}

/// Bytes of so many pages.
pub const fn bytes(pages: u64) -> u64 {
    pages.saturating_mul(PAGE as u64)
}

/// How many pages.
pub fn count(bits: &Bits) -> usize {
    bits.iter().map(|word| word.count_ones() as usize).sum()
}

/// Whether a page is among them.
pub fn has(bits: &Bits, page: usize) -> bool {
    bits[page / 64] >> (page % 64) & 1 == 1
}

/// The pages from one up to another.
pub fn range(from: usize, to: usize) -> Bits {
    let below = |end: usize| -> Bits {
        core::array::from_fn(|at| match end.saturating_sub(at * 64) {
            0 => 0,
            n if n >= 64 => u64::MAX,
            n => (1 << n) - 1,
        })
    };
    without(below(to), below(from))
}

/// The first of these pages of a span, and the one after the last.
pub fn bounds(pages: Bits) -> (usize, usize) {
    let [first, last] = [pages.iter().position(|word| *word != 0), pages.iter().rposition(|word| *word != 0)];
    let first = first.map_or(0, |at| at * 64 + pages[at].trailing_zeros() as usize);
    (first, last.map_or(0, |at| (at + 1) * 64 - pages[at].leading_zeros() as usize))
}

/// Where pages of a span lie: these one after the other, from here on.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    at: usize,
    pages: Bits,
}

impl Layout {
    pub const NOWHERE: Layout = Layout { at: 0, pages: NONE };

    pub const fn new(at: usize, pages: Bits) -> Layout {
        Layout { at, pages }
    }

    /// Each in its place in a whole span.
    pub const fn whole(at: usize) -> Layout {
        Layout::new(at, ALL)
    }

    /// How many have a place.
    pub fn places(&self) -> usize {
        count(&self.pages)
    }

    /// The address of one of them.
    pub fn of(&self, page: usize) -> usize {
        self.at.wrapping_add(count(&both(self.pages, range(0, page))) * PAGE)
    }

    /// Pages in a row among these, which all have a place here and so lie in a row, too: the first, its address, and how many.
    pub fn runs(&self, pages: Bits) -> impl Iterator<Item = (usize, usize, usize)> {
        let layout = *self;
        runs(pages).map(move |(first, count)| (first, layout.of(first), count))
    }
}

/// Consecutive pages among them, as (first, how many), in order.
pub fn runs(bits: Bits) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    core::iter::from_fn(move || {
        let first = next(&bits, at, true);
        at = next(&bits, first, false);
        (first < at).then_some((first, at - first))
    })
}

/// The first page from `at` on that is among them, or is not; [`SPAN_PAGES`]: there is none.
fn next(bits: &Bits, mut at: usize, among: bool) -> usize {
    while at < SPAN_PAGES {
        let word = if among { bits[at / 64] } else { !bits[at / 64] };
        let skipped = (word >> (at % 64)).trailing_zeros() as usize;
        if skipped < 64 {
            return at + skipped;
        }
        at = (at / 64 + 1) * 64;
    }
    at
}

/// So many of them at a time, in order.
pub fn pieces(mut pages: Bits, most: usize) -> impl Iterator<Item = Bits> {
    core::iter::from_fn(move || {
        let (mut piece, mut left) = (NONE, most);
        while let Some(word) = pages.iter().position(|word| *word != 0).filter(|_| left > 0) {
            let page = pages[word] & pages[word].wrapping_neg();
            pages[word] ^= page;
            piece[word] |= page;
            left -= 1;
        }
        (piece != NONE).then_some(piece)
    })
}
