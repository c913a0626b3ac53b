//! Borrowed memory: what a program's pager asks a memory server, and what that answers. Bodies hold pages.
//!
//! One struct of fixed shape for both directions: the code inside programs reads and writes these bytes without rkyv
//! (`static-bootstrap/sys/src/page.rs`).

use rkyv::{Archive, Deserialize, Serialize};

use super::frame::{FrameError, Kind, Message};
use crate::sys::page::{Bits, PAGE, SPAN, count, op};

/// The header, not yet understood.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Page {
    pub op: u32,
    pub sequence: u32,
    pub span: u64,
    pub data: [u64; 4],
    pub zero: [u64; 4],
}

impl Message for Page {
    const KIND: Kind = Kind::Page;
}

/// What a client asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// Be this client.
    Open { client: Client, label: Bits },
    /// Give these pages.
    Get { span: u64, pages: Bits },
    /// Keep the pages of the body; those in `zero` are zero from now on.
    Put { span: u64, data: Bits, zero: Bits },
    /// Everything is zero in so many spans.
    Drop { span: u64, spans: u64 },
    /// Begin with what this client keeps now of spans from this one on.
    Copy { client: Client, from: u64 },
    /// Keep everything in a file that both reach.
    Share,
    /// As `Put`, but the client writes the pages in `data` into that file itself.
    Take { span: u64, data: Bits, zero: Bits },
}

/// A client's name, chosen by itself at random: who does not know it reaches nothing of it.
pub type Client = [u64; 2];

/// Bytes of a client's label.
pub const LABEL: usize = size_of::<Bits>();

/// A client's label as it can be shown.
pub fn label(bits: &Bits) -> String {
    let bytes: Vec<u8> = bits.iter().flat_map(|word| word.to_le_bytes()).take_while(|byte| *byte > 0).collect();
    bytes.iter().map(|byte| if byte.is_ascii_graphic() || *byte == b' ' { *byte as char } else { '?' }).collect()
}

/// Spans that an address space can have: 2^57 bytes.
const SPANS: u64 = (1 << 57) / SPAN as u64;

impl Page {
    /// The one door for a question: what does not mean anything, or comes with another body than it says, is refused.
    ///
    /// # Errors
    /// [`FrameError::Header`].
    pub fn ask(&self, body: usize) -> Result<Ask, FrameError> {
        let Page { span, data, zero, .. } = *self;
        let apart = data.iter().zip(&zero).all(|(data, zero)| data & zero == 0);
        let ask = match self.op {
            op::OPEN => Ask::Open { client: [data[0], data[1]], label: self.zero },
            op::GET => Ask::Get { span, pages: data },
            op::PUT if apart => Ask::Put { span, data, zero },
            op::TAKE if apart => Ask::Take { span, data, zero },
            op::SHARE => Ask::Share,
            op::COPY => Ask::Copy { client: [data[0], data[1]], from: span },
            op::DROP if data[0] <= SPANS => Ask::Drop { span, spans: data[0] },
            _ => return Err(FrameError::Header),
        };
        let expected = if let Ask::Put { data, .. } = &ask { count(data) * PAGE } else { 0 };
        if body == expected && span < SPANS { Ok(ask) } else { Err(FrameError::Header) }
    }

    /// The question with which a client begins; of its label the first [`LABEL`] bytes are taken.
    pub fn open(client: Client, label: &str) -> Page {
        let mut bytes = [0; LABEL];
        label.bytes().zip(&mut bytes).for_each(|(from, to)| *to = from);
        let mut zero = Bits::default();
        zero.iter_mut().zip(bytes.as_chunks().0).for_each(|(word, bytes)| *word = u64::from_le_bytes(*bytes));
        Page { op: op::OPEN, data: [client[0], client[1], 0, 0], zero, ..Page::default() }
    }

    /// The answer to this question.
    pub fn answer(&self, op: u32, data: Bits, zero: Bits) -> Page {
        Page { op, data, zero, ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::Prefix;
    use super::*;
    use crate::sys::page::{HEAD, Head, prefix};

    /// Golden bytes: both sides of the wire.
    #[test]
    fn programs_say_the_same_bytes() {
        let bits = [0x1122_3344_5566_7788, 2, 3, 4];
        let page = Page { op: op::PUT, sequence: 7, span: 0x6800_0000, data: bits, zero: [5, 6, 7, 8] };
        let mut golden = vec![3, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0x68, 0, 0, 0, 0];
        golden[8..12].copy_from_slice(&[0, 0, 0, 0x68]);
        golden.extend([0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        [2u64, 3, 4, 5, 6, 7, 8].iter().for_each(|word| golden.extend(word.to_le_bytes()));
        assert_eq!(page.encode().as_slice(), golden);
        let Page { op, sequence, span, data, zero } = page;
        let head = Head { op, sequence, span, data, zero };
        assert_eq!((size_of_val(&head), golden.len()), (HEAD, HEAD));
        let words = [head.op, head.sequence].map(u32::to_le_bytes).concat();
        let longs: Vec<u8> =
            [&[head.span][..], &head.data, &head.zero].concat().iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!([words, longs].concat(), golden);
        assert_eq!(prefix(5 * PAGE), Prefix { kind: Kind::Page, header: HEAD, body: 5 * PAGE }.encode());
    }

    #[test]
    fn questions_must_mean_something() {
        let put = Page { op: op::PUT, data: [0, 3, 0, 0], zero: [1, 0, 0, 0], ..Page::default() };
        assert_eq!(put.ask(2 * PAGE), Ok(Ask::Put { span: 0, data: put.data, zero: put.zero }));
        let open = Page::open([1, 2], "node1 7 a\u{e9} much too long for its place");
        let Ok(Ask::Open { client: [1, 2], label: shown }) = open.ask(0) else { panic!() };
        assert_eq!(label(&shown), "node1 7 a?? much too long for it");
        assert!(put.ask(PAGE).is_err() && Page { zero: [0, 1, 0, 0], ..put }.ask(2 * PAGE).is_err());
        assert!(Page { op: op::GET, ..put }.ask(1).is_err() && Page { op: 99, ..put }.ask(0).is_err());
        assert!(Page { op: op::GET, span: SPANS, ..put }.ask(0).is_err());
        assert!(Page { op: op::DROP, data: [u64::MAX, 0, 0, 0], ..put }.ask(0).is_err());
    }
}
