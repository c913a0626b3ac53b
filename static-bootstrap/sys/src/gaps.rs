//! What lies among an object's code and in no function that its table tells of: code that was written without telling, tables of data, and what an old linker put
//! beside code. Bytes there that look like a system call are none where all of it can be read as instructions and these are others, or where nothing that leads there
//! leads to one.

use core::ops::Range;

use super::instruction::{Instruction, Kind, Then};
use super::object::{Functions, Object};
use super::sites::instructions;

/// Places that are led to, and instructions behind them: with more it cannot be told.
const PLACES: usize = 256;
const INSTRUCTIONS: usize = 1 << 16;
/// Bytes that the shortest jumps lead over, and their own.
const NEAR: usize = 130;

/// Of an object.
#[derive(Debug)]
pub(super) struct Gaps<'a> {
    object: Object<'a>,
    functions: &'a Functions<'a>,
    /// The last one that was looked at, and whether it is harmless.
    last: (Range<usize>, bool),
}

impl<'a> Gaps<'a> {
    pub(super) fn new(object: Object<'a>, functions: &'a Functions<'a>) -> Gaps<'a> {
        Gaps { object, functions, last: (0..0, false) }
    }

    /// Whether nothing enters the kernel in the one that has an address; `false`: it cannot be told.
    pub(super) fn are_harmless(&mut self, address: usize) -> bool {
        if !self.last.0.contains(&address) {
            self.last = self.look(address).unwrap_or((address..address + 1, false));
        }
        self.last.1
    }

    fn look(&self, address: usize) -> Option<(Range<usize>, bool)> {
        let (part, is_code) = self.object.section(address)?;
        if !is_code {
            return Some((part, true));
        }
        let gap = self.functions.between(address)?;
        let gap = gap.start.max(part.start)..gap.end.min(part.end);
        let harmless = self.is_plain_code(gap.clone()) || self.leads_nowhere(&gap).is_some();
        Some((gap, harmless))
    }

    /// Whether it is instructions from the first byte to the last, and none enters the kernel.
    fn is_plain_code(&self, gap: Range<usize>) -> bool {
        let end = gap.end;
        let mut reached = gap.start;
        for (at, instruction) in instructions(self.object, gap) {
            if matches!(instruction.kind, Kind::Call | Kind::Enters) {
                return false;
            }
            reached = at + instruction.len;
        }
        reached >= end
    }

    /// Follows all that leads into it; `None`: to what enters the kernel, or it cannot be told.
    fn leads_nowhere(&self, gap: &Range<usize>) -> Option<()> {
        // Others have addresses in their instructions, too.
        if !self.object.is_anywhere() {
            return None;
        }
        let mut places = Places { gap, all: [(0, false); PLACES], count: 0 };
        places.add(gap.start, false)?;
        for word in self.object.words() {
            places.add(word, false)?;
        }
        for (segment, code) in self.object.code() {
            for (at, leads) in leading(code, segment.address, gap).filter(|(at, _)| !gap.contains(at)) {
                self.add_by(&mut places, at, leads)?;
            }
            let near = gap.start.saturating_sub(NEAR)..gap.start;
            for at in near.chain(gap.end..gap.end.saturating_add(NEAR)) {
                let byte = code.get(at.wrapping_sub(segment.address)).copied();
                let leads = byte.map(|byte| (at + 1).wrapping_add_signed(byte.cast_signed().into()));
                if let Some(leads) = leads.filter(|leads| gap.contains(leads)) {
                    self.add_by(&mut places, at, leads)?;
                }
            }
        }
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

    /// Adds where the distance at an address leads to, if an instruction has it there; where that cannot be told, anyway.
    fn add_by(&self, places: &mut Places<'_>, at: usize, leads: usize) -> Option<()> {
        let of = |function| instructions(self.object, function).find(|(here, instruction)| here + instruction.len > at);
        match self.functions.holding(at).and_then(of) {
            Some((here, instruction)) => places.add_from(self.object, (here, true), instruction),
            None => places.add(leads, false),
        }
    }
}

/// Whether 32 bits behind this can be the distance of a jump or call, or of an address that is taken (`lea`).
fn can_lead(before: &[u8]) -> bool {
    match before {
        [.., 0xe8 | 0xe9] | [.., 0x0f, 0x80..=0x8f] => true,
        [.., 0x8d, operand] => operand & 0xc7 == 5,
        _ => false,
    }
}

/// Where in code, which begins at an address, 32 bits are the distance from their end to somewhere in the gap, and to where.
fn leading<'a>(code: &'a [u8], address: usize, gap: &Range<usize>) -> impl Iterator<Item = (usize, usize)> + use<'a> {
    /// Looked at without an exit, so that the compiler looks at many at once.
    const BLOCK: usize = 64;
    let (from, len) = (gap.start.wrapping_sub(address + 4) as u32, gap.len() as u32);
    let phases = (0..4).filter_map(move |phase| Some((phase, code.get(phase..)?.as_chunks::<4>().0)));
    phases.flat_map(move |(phase, words)| {
        let is = move |nth: usize, word: &[u8; 4]| {
            let leads = (phase + nth * 4) as u32;
            leads.wrapping_add(u32::from_le_bytes(*word)).wrapping_sub(from) < len
        };
        let blocks = words.chunks(BLOCK).enumerate().filter(move |(nth, block)| {
            block.iter().zip(nth * BLOCK..).fold(false, |any, (word, nth)| any | is(nth, word))
        });
        let found = blocks.flat_map(move |(nth, block)| block.iter().zip(nth * BLOCK..));
        let leads = move |(word, nth): &(&[u8; 4], usize)| is(*nth, word) && can_lead(&code[..phase + nth * 4]);
        found.filter(leads).map(move |(word, nth)| {
            let at = address + phase + nth * 4;
            (at, (at + 4).wrapping_add_signed(i32::from_le_bytes(*word) as isize))
        })
    })
}

/// What is led to in a gap, and whether by a jump or call: to be executed.
struct Places<'a> {
    gap: &'a Range<usize>,
    all: [(usize, bool); PLACES],
    count: usize,
}

impl Places<'_> {
    /// `None`: there are too many.
    fn add(&mut self, address: usize, is_code: bool) -> Option<()> {
        if !self.gap.contains(&address) || self.all[..self.count].contains(&(address, is_code)) {
            return Some(());
        }
        *self.all.get_mut(self.count)? = (address, is_code);
        self.count += 1;
        Some(())
    }

    /// What an instruction leads to, if `is_code` it is one.
    fn add_from(&mut self, object: Object<'_>, (at, is_code): (usize, bool), instruction: Instruction) -> Option<()> {
        const CALL: u8 = 0xe8;
        let code = object.at(at).and_then(|code| code.get(..instruction.len))?;
        let (distance, executes) = match instruction.kind {
            Kind::Near { operand } => (i32::from_le_bytes(*code.get(operand..)?.first_chunk()?), false),
            Kind::Jump { distance } | Kind::Branch { distance, .. } | Kind::Loop { distance } => (distance, true),
            Kind::Fixed => match code.last_chunk::<5>() {
                Some([CALL, called @ ..]) => (i32::from_le_bytes(*called), true),
                _ => return Some(()),
            },
            _ => return Some(()),
        };
        self.add((at + code.len()).wrapping_add_signed(distance as isize), is_code && executes)
    }
}
