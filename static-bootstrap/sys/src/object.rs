//! Objects of x86-64 as files (elf(5)): where their code is, and what their tables for unwinding tell of functions (Linux Standard Base Core, `.eh_frame_hdr`).

use core::ops::Range;

use super::page::PAGE;

const LOAD: u32 = 1;
const NOTE: u32 = 4;
const FRAMES: u32 = 0x6474_e550;
const STACK: u32 = 0x6474_e551;
const EXECUTE: u32 = 1;
/// Bytes of a header of a segment, and of a section.
const HEADER: usize = 56;
const SECTION: usize = 64;
/// From an object's beginning on: its headers, and what says which it is, if it does.
pub const HEAD: usize = 2048;
/// Code may go on so far behind a function's end: what ends a thread or process is left out of the tables.
const BEHIND: usize = 16;

/// The bytes of a file.
#[derive(Debug, Clone, Copy)]
pub struct Object<'a>(&'a [u8]);

/// A segment: what of the file is at which address.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    pub kind: u32,
    pub flags: u32,
    pub offset: usize,
    pub address: usize,
    pub bytes: usize,
}

impl Segment {
    pub fn is_code(&self) -> bool {
        self.kind == LOAD && self.flags & EXECUTE != 0
    }

    /// Whether a byte of the file is in its pages.
    pub fn holds(&self, offset: usize) -> bool {
        (self.offset & !(PAGE - 1)..self.offset.saturating_add(self.bytes)).contains(&offset)
    }
}

/// A number of `N` bytes.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut all = [0; 8];
    all[..N].copy_from_slice(bytes.get(at..at.checked_add(N)?)?);
    Some(u64::from_le_bytes(all))
}

/// A distance of 32 bits.
fn distance(bytes: &[u8], at: usize) -> Option<isize> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    Some(i32::from_le_bytes(*bytes) as isize)
}

impl<'a> Object<'a> {
    /// `None`: it is none, or of another machine.
    pub fn new(file: &'a [u8]) -> Option<Object<'a>> {
        const IDENTITY: &[u8] = b"\x7fELF\x02\x01\x01";
        const X86_64: u64 = 62;
        (file.starts_with(IDENTITY) && number::<2>(file, 18)? == X86_64 && number::<2>(file, 54)? == HEADER as u64)
            .then_some(Object(file))
    }

    pub fn segments(self) -> impl Iterator<Item = Segment> + Clone + use<'a> {
        let first = number::<8>(self.0, 32).unwrap_or(0) as usize;
        let count = number::<2>(self.0, 56).unwrap_or(0) as usize;
        (0..count).map_while(move |nth| {
            let word = |at: usize| number::<8>(self.0, first.checked_add(nth * HEADER + at)?).map(|word| word as usize);
            let kind = word(0)?;
            Some(Segment {
                kind: kind as u32,
                flags: (kind >> 32) as u32,
                offset: word(8)?,
                address: word(16)?,
                bytes: word(32)?,
            })
        })
    }

    /// Tells objects apart, for which [`HEAD`] bytes do: `None` if it does not say which it is.
    pub fn key(self) -> Option<u64> {
        const BUILD_ID: u64 = 3;
        let notes = self.segments().filter(|segment| segment.kind == NOTE);
        let mut notes = notes.filter_map(|notes| self.bytes(notes));
        let says = |notes: &&[u8]| {
            (0..notes.len().saturating_sub(16))
                .step_by(4)
                .any(|at| number::<4>(notes, at + 8) == Some(BUILD_ID) && notes[at + 12..].starts_with(b"GNU\0"))
        };
        let id = notes.find(says)?;
        let first = number::<8>(self.0, 32)? as usize;
        let count = number::<2>(self.0, 56)? as usize;
        let headers = self.0.get(first..first + count * HEADER)?;
        Some(join(hash(id), hash(headers)))
    }

    /// A segment's; `None`: the file ends before.
    fn bytes(self, Segment { offset, bytes, .. }: Segment) -> Option<&'a [u8]> {
        self.0.get(offset..offset.checked_add(bytes)?)
    }

    /// Segments that can be executed, with their bytes.
    pub fn code(self) -> impl Iterator<Item = (Segment, &'a [u8])> + Clone {
        let code = self.segments().filter(Segment::is_code);
        code.filter_map(move |segment| Some((segment, self.bytes(segment)?)))
    }

    /// Where an address is, as the linker named its parts: the part, and whether that is code; `None`: no part has it, or they are not told.
    pub fn section(self, address: usize) -> Option<(Range<usize>, bool)> {
        const IN_MEMORY: u64 = 2;
        const CODE: u64 = 4;
        const NO_BYTES: u32 = 8;
        let first = number::<8>(self.0, 40)? as usize;
        let count = number::<2>(self.0, 60)? as usize;
        (0..count).find_map(|nth| {
            let word = |at: usize| number::<8>(self.0, first.checked_add(nth * SECTION + at)?);
            let (kind, flags, from) = ((word(0)? >> 32) as u32, word(8)?, word(16)? as usize);
            let range = from..from.checked_add(word(32)? as usize)?;
            let has = kind != NO_BYTES && flags & IN_MEMORY != 0 && range.contains(&address);
            has.then_some((range, flags & CODE != 0))
        })
    }

    /// Whether it may be at any address, so that its instructions have no addresses in them.
    pub fn is_anywhere(self) -> bool {
        const SHARED: u64 = 3;
        number::<2>(self.0, 16) == Some(SHARED)
    }

    /// What of it is in memory.
    pub fn loaded(self) -> impl Iterator<Item = &'a [u8]> {
        self.segments().filter(|segment| segment.kind == LOAD).filter_map(move |segment| self.bytes(segment))
    }

    /// Whether the file ends before what is in memory does.
    pub fn is_cut(self) -> bool {
        self.segments().filter(|segment| segment.kind == LOAD).count() != self.loaded().count()
    }

    /// Whether it asks for a stack that can be executed, or does not say.
    pub fn has_executable_stack(self) -> bool {
        self.segments().find(|segment| segment.kind == STACK).is_none_or(|stack| stack.flags & EXECUTE != 0)
    }

    /// What is at an address, up to the end of its segment.
    pub fn at(self, address: usize) -> Option<&'a [u8]> {
        let holds = |segment: &Segment| {
            segment.kind == LOAD && (segment.address..segment.address.saturating_add(segment.bytes)).contains(&address)
        };
        let segment = self.segments().find(holds)?;
        self.0.get(segment.offset + address - segment.address..segment.offset.checked_add(segment.bytes)?)
    }

    /// `None`: no table tells them, or one of an unusual form.
    pub fn functions(self) -> Option<Functions<'a>> {
        // Version; how addresses are written: 32 bits, from where they stand, and from the table.
        const FORM: &[u8] = &[1, 0x1b, 0x03, 0x3b];
        let at = self.segments().find(|segment| segment.kind == FRAMES)?.address;
        let table = self.at(at)?;
        let count = number::<4>(table, 8)? as usize;
        let entries = table.get(12..12 + count.checked_mul(8)?)?;
        table.starts_with(FORM).then_some(Functions { object: self, at, entries })
    }
}

/// Functions of an object, by address.
#[derive(Debug)]
pub struct Functions<'a> {
    object: Object<'a>,
    at: usize,
    entries: &'a [u8],
}

impl Functions<'_> {
    pub fn count(&self) -> usize {
        self.entries.len() / 8
    }

    fn entry(&self, nth: usize) -> Option<(usize, usize)> {
        let from = |at| Some(self.at.wrapping_add_signed(distance(self.entries, at)?));
        Some((from(nth * 8)?, from(nth * 8 + 4)?))
    }

    /// What the table says of one: from where on to where it has instructions; `None`: it contradicts itself.
    pub fn told(&self, nth: usize) -> Option<Range<usize>> {
        let (begin, frame) = self.entry(nth)?;
        let told = self.object.at(frame)?;
        let from = (frame + 8).wrapping_add_signed(distance(told, 8)?);
        let end = begin.checked_add(number::<4>(told, 12)? as usize)?;
        (from == begin).then_some(begin..end)
    }

    /// The same with what may be left out.
    pub fn get(&self, nth: usize) -> Option<Range<usize>> {
        let Range { start, end } = self.told(nth)?;
        let end = end.checked_add(BEHIND)?;
        let next = self.entry(nth + 1).map_or(end, |(next, _)| next);
        (next >= start).then(|| start..end.min(next))
    }

    /// How many begin at an address or before.
    fn before(&self, address: usize) -> Option<usize> {
        let (mut low, mut high) = (0, self.count());
        while low < high {
            let middle = low.midpoint(high);
            if self.entry(middle)?.0 <= address { low = middle + 1 } else { high = middle }
        }
        Some(low)
    }

    /// The one that has an address, or ends just before it.
    pub fn holding(&self, address: usize) -> Option<Range<usize>> {
        self.get(self.before(address)?.checked_sub(1)?).filter(|range| range.contains(&address))
    }

    /// What lies between two, with an address that none is told to have.
    pub fn between(&self, address: usize) -> Option<Range<usize>> {
        let next = self.before(address)?;
        let from = next.checked_sub(1).map_or(Some(0), |last| Some(self.told(last)?.end))?;
        let to = if next < self.count() { self.entry(next)?.0 } else { usize::MAX };
        (from..to).contains(&address).then_some(from..to)
    }
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |all, byte| (all ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Of two keys, one.
pub fn join(one: u64, other: u64) -> u64 {
    hash(&(one.rotate_left(32) ^ other).to_le_bytes())
}
