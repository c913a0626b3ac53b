//! Where an object makes system calls of its own: found by their bytes, and told from what only looks like it by reading its functions from their beginning.

use core::ops::Range;

use super::gaps::Gaps;
use super::instruction::{Instruction, Kind, decode};
use super::object::{Functions, Object};

/// What an object's code does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Makes no system calls.
    Clean = 1,
    /// Makes some, and nothing else is found in it.
    Calls = 2,
    /// Cannot be told.
    Unknown = 3,
}

/// A system call that can be replaced by a jump, as its instructions are: addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// The first that is replaced; the call; the first that is not, five bytes from the first on or more.
    pub first: usize,
    pub call: usize,
    pub end: usize,
    /// Which call it is, where `mov eax, NUMBER` stands before it. Only that is replaced then: the call stays behind it.
    pub number: Option<u32>,
}

/// Bytes of a jump.
pub const JUMP: usize = 5;
const MOV_EAX: u8 = 0xb8;
/// Instructions before a call and behind it that may be replaced with it.
const BEFORE: usize = 3;
const AFTER: usize = 3;

/// Calls `visit` with the address of what looks like an instruction that enters the kernel, as long as it returns true.
fn each(object: Object<'_>, mut visit: impl FnMut(usize) -> bool) -> bool {
    object.code().all(|(segment, code)| pairs(code, |at| visit(segment.address + at)))
}

/// The same in bytes. Blocks are looked at without an exit, so that the compiler looks at many bytes at once.
fn pairs(code: &[u8], mut visit: impl FnMut(usize) -> bool) -> bool {
    const BLOCK: usize = 64;
    let is = |one: u8, two: u8| (one == 0x0f) & ((two == 0x05) | (two == 0x34)) | (one == 0xcd) & (two == 0x80);
    (0..code.len()).step_by(BLOCK).all(|at| {
        let any = match code.get(at..at + BLOCK + 1) {
            Some(block) => (0..BLOCK).fold(false, |any, nth| any | is(block[nth], block[nth + 1])),
            None => true,
        };
        let block = &code[at..code.len().min(at + BLOCK + 1)];
        !any || block.windows(2).enumerate().filter(|(_, pair)| is(pair[0], pair[1])).all(|(nth, _)| visit(at + nth))
    })
}

/// Instructions of a function, with their addresses, up to what is none.
pub(super) fn instructions<'a>(
    object: Object<'a>,
    range: Range<usize>,
) -> impl Iterator<Item = (usize, Instruction)> + use<'a> {
    let mut at = range.start;
    let code = object.at(at).unwrap_or_default();
    core::iter::from_fn(move || {
        let instruction = decode(code.get(at - range.start..)?).filter(|_| at < range.end)?;
        let here = at;
        at += instruction.len;
        Some((here, instruction))
    })
}

/// Whether these bytes are an instruction; `None`: it cannot be told.
fn is_call(gaps: &mut Gaps<'_>, at: usize) -> Option<bool> {
    let told = gaps.instruction(at).map(|(here, instruction)| (here == at, instruction.kind));
    if told == Some((true, Kind::Call)) {
        return Some(true);
    }
    // Behind a function's end anything may be.
    match (gaps.are_harmless(at), told) {
        (Some(harmless), _) => harmless.then_some(false),
        // In a way that is never replaced; or with prefixes.
        (None, None | Some((_, Kind::Call | Kind::Enters))) => None,
        (None, Some(_)) => Some(false),
    }
}

/// What its code does.
pub fn verdict(object: Object<'_>) -> Verdict {
    if object.is_cut() {
        return Verdict::Unknown;
    }
    let functions = object.functions();
    let mut gaps = functions.as_ref().map(|functions| Gaps::new(object, functions));
    let mut calls = false;
    let told = each(object, |at| {
        let is = gaps.as_mut().and_then(|gaps| is_call(gaps, at));
        calls |= is == Some(true);
        is.is_some()
    });
    match (told, calls) {
        (false, _) => Verdict::Unknown,
        (true, true) => Verdict::Calls,
        (true, false) => Verdict::Clean,
    }
}

/// Addresses that jumps lead to, a bit each.
#[derive(Debug)]
pub struct Targets<'a> {
    first: usize,
    bits: &'a mut [u8],
}

impl<'a> Targets<'a> {
    /// Bytes that are needed for an object.
    pub fn room(object: Object<'_>) -> usize {
        let span = Self::span(object);
        span.len().div_ceil(8)
    }

    fn span(object: Object<'_>) -> Range<usize> {
        let first = object.code().map(|(segment, _)| segment.address).min().unwrap_or(0);
        first..object.code().map(|(segment, code)| segment.address + code.len()).max().unwrap_or(first)
    }

    /// All of an object's, in zeros of that size.
    pub fn of(object: Object<'_>, functions: &Functions<'_>, bits: &'a mut [u8]) -> Targets<'a> {
        let mut targets = Targets { first: Self::span(object).start, bits };
        for range in (0..functions.count()).filter_map(|nth| functions.get(nth)) {
            for (at, Instruction { len, kind, .. }) in instructions(object, range) {
                if let Kind::Jump { distance } | Kind::Branch { distance, .. } | Kind::Loop { distance } = kind {
                    targets.add((at + len).wrapping_add_signed(distance as isize));
                }
            }
        }
        targets
    }

    fn add(&mut self, address: usize) {
        let nth = address.wrapping_sub(self.first);
        if let Some(byte) = self.bits.get_mut(nth / 8) {
            *byte |= 1 << (nth % 8);
        }
    }

    /// Whether one leads into the middle.
    fn inside(&self, range: Range<usize>) -> bool {
        (range.start + 1..range.end).any(|address| {
            let nth = address.wrapping_sub(self.first);
            self.bits.get(nth / 8).is_none_or(|byte| byte >> (nth % 8) & 1 != 0)
        })
    }
}

/// Shows every system call that can be replaced; returns whether these are all that a program makes.
pub fn survey(object: Object<'_>, bits: &mut [u8], mut visit: impl FnMut(Site)) -> bool {
    let Some(functions) = object.functions() else { return false };
    let targets = Targets::of(object, &functions, bits);
    let mut gaps = Gaps::new(object, &functions);
    let mut complete = true;
    each(object, |at| {
        match is_call(&mut gaps, at) {
            Some(false) => {}
            // What handlers return to: nobody calls it.
            Some(true) if returns_from_signal(object, at) => {}
            Some(true) => match functions.holding(at).and_then(|range| site(object, &targets, range, at)) {
                Some(site) => visit(site),
                None => complete = false,
            },
            None => complete = false,
        }
        true
    });
    complete
}

/// `mov rax, rt_sigreturn` before the call.
fn returns_from_signal(object: Object<'_>, call: usize) -> bool {
    const RETURN: &[u8] = &[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05];
    object.at(call - 7).is_some_and(|code| code.starts_with(RETURN))
}

/// The bytes of one that moves `value` to eax.
fn moved(object: Object<'_>, at: usize) -> Option<u32> {
    match object.at(at)?.get(..JUMP)? {
        [MOV_EAX, value @ ..] => Some(u32::from_le_bytes(value.try_into().ok()?)),
        _ => None,
    }
}

/// How the call can be replaced.
fn site(object: Object<'_>, targets: &Targets<'_>, range: Range<usize>, call: usize) -> Option<Site> {
    let can_move = |kind| {
        matches!(kind, Kind::Anywhere | Kind::Near { .. } | Kind::Jump { .. } | Kind::Branch { .. } | Kind::Call)
    };
    // Where the instructions before it begin, from the nearest; and where those behind it end.
    let mut before = [(call, Kind::Call); BEFORE + 1];
    let mut ends = [call; AFTER + 1];
    let mut count = 0;
    for (at, Instruction { len, kind, .. }) in instructions(object, range) {
        if at < call {
            before.copy_within(1..BEFORE, 2);
            before[1] = (at, kind);
        } else if count <= AFTER && (at == call || can_move(kind) && kind != Kind::Call) {
            ends[count] = at + len;
            count += 1;
        } else {
            break;
        }
    }
    let ends = &ends[..count];
    let free = |first, end| !targets.inside(first..end);
    let (nearest, _) = before[1];
    if nearest + JUMP == call
        && free(nearest, call + 2)
        && let Some(number) = moved(object, nearest)
    {
        return Some(Site { first: nearest, call, end: call + 2, number: Some(number) });
    }
    let before = before.iter().take_while(|(at, kind)| can_move(*kind) && (*at == call || *kind != Kind::Call));
    let windows = before.flat_map(|(first, _)| ends.iter().map(move |end| (*first, *end)));
    windows
        .filter(|(first, end)| end - first >= JUMP)
        .find(|(first, end)| free(*first, *end))
        .map(|(first, end)| Site { first, call, end, number: None })
}
