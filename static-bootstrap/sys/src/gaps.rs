//! What lies among an object's code and in no function that its table tells of: code that was written without telling, tables of data, and what an old linker put
//! beside code. Bytes there that look like a system call are none
//!
//! * where the object's sections say that they are no code,
//! * where all between two functions can be read as instructions, none of which enters the kernel, and whatever is found to lead there leads to where one begins,
//! * or where not all can be read so, and nothing that is found to lead there leads to one.
//!
//! Found are jumps, calls and addresses taken (`lea`) by instructions, and pointers; not ways by a table of distances, by a symbol and a distance from it, and by the
//! addresses of the large code model: who wrote code by hand that enters the kernel, behind
//! bytes that are none, told nobody of it, and reaches it in one of these ways alone, has it taken for data.

use core::ops::Range;

use super::instruction::{Instruction, Kind, Then};
use super::object::{Functions, Object};
use super::sites::instructions;

/// Places that are led to, instructions behind them, and gaps: with more it cannot be told.
const PLACES: usize = 256;
const INSTRUCTIONS: usize = 1 << 16;
const GAPS: u32 = 64;
/// Bytes of a gap of which it is known where instructions begin.
const READ: usize = 64 << 10;
/// Bytes that the shortest jumps lead over, and their own.
const NEAR: usize = 130;

/// The gaps of an object.
#[derive(Debug)]
pub(super) struct Gaps<'a> {
    object: Object<'a>,
    functions: &'a Functions<'a>,
    /// The last one that was looked at, and whether it is harmless.
    last: (Range<usize>, bool),
    left: u32,
}

impl<'a> Gaps<'a> {
    pub(super) fn new(object: Object<'a>, functions: &'a Functions<'a>) -> Gaps<'a> {
        Gaps { object, functions, last: (0..0, false), left: GAPS }
    }

    /// Whether nothing enters the kernel in the one that has an address, `false`: it cannot be told; `None`: a function has it.
    pub(super) fn are_harmless(&mut self, address: usize) -> Option<bool> {
        let gap = self.functions.between(address)?;
        if !self.last.0.contains(&address) {
            self.last = self.look(address, gap).unwrap_or((address..address + 1, false));
        }
        Some(self.last.1)
    }

    fn look(&mut self, address: usize, gap: Range<usize>) -> Option<(Range<usize>, bool)> {
        let (part, is_code) = self.object.section(address)?;
        if !is_code {
            return Some((part, true));
        }
        self.left = self.left.checked_sub(1)?;
        let gap = gap.start.max(part.start)..gap.end.min(part.end);
        let harmless = match Reading::of(self.object, &gap) {
            Some(reading) if reading.enters => false,
            Some(reading) if self.agrees(&gap, &reading).is_some() => true,
            _ => self.leads_nowhere(&gap).is_some(),
        };
        Some((gap, harmless))
    }

    /// Whether all that leads into it leads to where an instruction begins; `None`: not all.
    fn agrees(&self, gap: &Range<usize>, reading: &Reading) -> Option<()> {
        self.each_lead(gap, |from, leads| {
            let of = |at| {
                let (here, instruction) = self.instruction(at)?;
                lead(self.object, here, instruction).filter(|(there, _)| *there == leads)
            };
            let agrees = reading.begins(leads - gap.start) || from.is_some_and(|at| of(at).is_none());
            agrees.then_some(())
        })
    }

    /// Follows what is found to lead into it; `None`: to what enters the kernel, or it cannot be told.
    fn leads_nowhere(&self, gap: &Range<usize>) -> Option<()> {
        // Others have addresses in their instructions, too.
        if !self.object.is_anywhere() {
            return None;
        }
        let mut places = Places { gap, all: [(0, false); PLACES], count: 0 };
        places.add(gap.start, false)?;
        self.each_lead(gap, |from, leads| {
            if places.has(leads, true) {
                return Some(());
            }
            match from.and_then(|at| self.instruction(at)) {
                Some((here, instruction)) => places.add_from(self.object, (here, true), instruction),
                None => places.add(leads, false),
            }
        })?;
        let (mut nth, mut budget) = (0, INSTRUCTIONS);
        while nth < places.count {
            let (from, is_code) = places.all[nth];
            let mut reached = from;
            for (at, instruction) in instructions(self.object, from..gap.end) {
                budget = budget.checked_sub(1)?;
                places.add_from(self.object, (at, is_code), instruction)?;
                reached = gap.end;
                match (instruction.kind, instruction.then) {
                    (Kind::Call | Kind::Enters, _) | (_, Then::Unknown) => return None,
                    (Kind::Jump { .. }, _) | (_, Then::Elsewhere) => break,
                    _ => reached = at + instruction.len,
                }
            }
            // What is no instruction is data; who jumps there has code there.
            if is_code && reached < gap.end {
                return None;
            }
            nth += 1;
        }
        Some(())
    }

    /// Shows where outside of it there are distances that could lead into it, and to where; and where pointers do. As long as `visit` does not return `None`.
    fn each_lead(&self, gap: &Range<usize>, mut visit: impl FnMut(Option<usize>, usize) -> Option<()>) -> Option<()> {
        // Pointers are aligned, in packed structures to four bytes.
        for words in self.object.loaded().flat_map(|bytes| [0, 4].map(|from| bytes.get(from..).unwrap_or_default())) {
            for leads in words.as_chunks().0.iter().map(|word| usize::from_le_bytes(*word)) {
                if gap.contains(&leads) {
                    visit(None, leads)?;
                }
            }
        }
        for (segment, code) in self.object.code() {
            for (at, leads) in leading(code, segment.address, gap).filter(|(at, _)| !gap.contains(at)) {
                visit(Some(at), leads)?;
            }
            let near = gap.start.saturating_sub(NEAR)..gap.start;
            for at in near.chain(gap.end..gap.end.saturating_add(NEAR)) {
                let nth = at.wrapping_sub(segment.address);
                if let Some([0x70..=0x7f | 0xe0..=0xe3 | 0xeb, distance]) = code.get(nth.wrapping_sub(1)..=nth)
                    && let leads = (at + 1).wrapping_add_signed(distance.cast_signed().into())
                    && gap.contains(&leads)
                {
                    visit(Some(at), leads)?;
                }
            }
        }
        Some(())
    }

    /// The instruction of a function that has this byte, and where it begins.
    pub(super) fn instruction(&self, at: usize) -> Option<(usize, Instruction)> {
        let mut all = instructions(self.object, self.functions.holding(at)?);
        all.find(|(here, instruction)| here + instruction.len > at)
    }
}

/// A gap that is instructions from the first byte to the last: where they begin, a bit each, and whether one enters the kernel.
struct Reading {
    begins: [u64; READ / 64],
    enters: bool,
}

impl Reading {
    fn of(object: Object<'_>, gap: &Range<usize>) -> Option<Reading> {
        let mut reading = Reading { begins: [0; READ / 64], enters: false };
        let mut reached = gap.start;
        for (at, instruction) in instructions(object, gap.clone()) {
            let nth = at - gap.start;
            *reading.begins.get_mut(nth / 64)? |= 1 << (nth % 64);
            reading.enters |= matches!(instruction.kind, Kind::Call | Kind::Enters);
            reached = at + instruction.len;
        }
        (reached >= gap.end).then_some(reading)
    }

    fn begins(&self, nth: usize) -> bool {
        self.begins.get(nth / 64).is_some_and(|word| word >> (nth % 64) & 1 != 0)
    }
}

/// Whether 32 bits behind this can be the distance of a jump or call, or of an address that is taken (`lea`).
fn can_lead(before: &[u8]) -> bool {
    match before {
        [.., 0xe8 | 0xe9] | [.., 0x0f, 0x80..=0x8f] => true,
        [.., 0x8d, operand] => operand & 0xc7 == 5,
        // `xbegin`
        [.., 0xc7, 0xf8] => true,
        _ => false,
    }
}

/// Where in code, which begins at an address, 32 bits are the distance from their end to somewhere in the gap, and to where.
fn leading<'a>(code: &'a [u8], address: usize, gap: &Range<usize>) -> impl Iterator<Item = (usize, usize)> + use<'a> {
    const BLOCK: usize = 256;
    let (from, len) = (gap.start.wrapping_sub(address).wrapping_sub(4) as u32, gap.len() as u32);
    let is = move |words: &[[u8; 4]], at: usize| any_leads(words, (at as u32).wrapping_sub(from), len);
    let blocks = (0..code.len()).step_by(BLOCK).flat_map(|block| [0, 1, 2, 3].map(|phase| block + phase));
    let words = blocks.filter_map(move |at| Some((at, code.get(at..code.len().min(at + BLOCK))?.as_chunks().0)));
    let each = words.filter(move |(at, words)| is(words, *at)).flat_map(|(at, words)| (at..).step_by(4).zip(words));
    each.filter(move |(at, word)| is(&[**word], *at) && can_lead(&code[..*at])).map(move |(at, word)| {
        let at = address.wrapping_add(at);
        (at, at.wrapping_add(4).wrapping_add_signed(i32::from_le_bytes(*word) as isize))
    })
}

/// Whether any of these distances, the first of which stands at `at`, leads to less than `len`. All are looked at, so that the compiler looks at many at once.
fn any_leads(words: &[[u8; 4]], mut at: u32, len: u32) -> bool {
    let mut any = false;
    for word in words {
        any |= at.wrapping_add(u32::from_le_bytes(*word)) < len;
        at = at.wrapping_add(4);
    }
    any
}

/// What an instruction leads to by a distance, and whether to execute it.
fn lead(object: Object<'_>, at: usize, instruction: Instruction) -> Option<(usize, bool)> {
    let code = object.at(at).and_then(|code| code.get(..instruction.len))?;
    let (distance, executes) = match instruction.kind {
        Kind::Near { operand } => (i32::from_le_bytes(*code.get(operand..)?.first_chunk()?), false),
        Kind::Jump { distance } | Kind::Branch { distance, .. } | Kind::Loop { distance } => (distance, true),
        Kind::Fixed => match *code {
            [.., 0x8d, operand, a, b, c, d] if operand & 0xc7 == 5 => (i32::from_le_bytes([a, b, c, d]), false),
            [.., 0xc7, 0xf8, a, b, c, d] | [.., 0xe8, a, b, c, d] => (i32::from_le_bytes([a, b, c, d]), true),
            _ => return None,
        },
        _ => return None,
    };
    Some(((at + code.len()).wrapping_add_signed(distance as isize), executes))
}

/// What is led to in a gap, and whether by a jump or call: to be executed.
struct Places<'a> {
    gap: &'a Range<usize>,
    all: [(usize, bool); PLACES],
    count: usize,
}

impl Places<'_> {
    fn has(&self, address: usize, is_code: bool) -> bool {
        self.all[..self.count].contains(&(address, is_code))
    }

    /// `None`: there are too many.
    fn add(&mut self, address: usize, is_code: bool) -> Option<()> {
        if !self.gap.contains(&address) || self.has(address, is_code) {
            return Some(());
        }
        *self.all.get_mut(self.count)? = (address, is_code);
        self.count += 1;
        Some(())
    }

    /// What an instruction leads to, if `is_code` it is one.
    fn add_from(&mut self, object: Object<'_>, (at, is_code): (usize, bool), instruction: Instruction) -> Option<()> {
        let Some((leads, executes)) = lead(object, at, instruction) else { return Some(()) };
        self.add(leads, is_code && executes)
    }
}
