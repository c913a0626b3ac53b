//! Where x86-64 instructions end, and where they lead (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, chapter 2 and appendix A): what it
//! takes to tell a system call from bytes that look like one, and to move instructions elsewhere.

/// An instruction, at the beginning of the bytes that were given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// Bytes, at most 15.
    pub len: usize,
    pub kind: Kind,
    pub then: Then,
}

/// What is executed after an instruction, if it does not say itself how far away that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    Next,
    /// What a return or a pointer leads to, or nothing.
    Elsewhere,
    /// What a register says, or memory that a register tells.
    Unknown,
}

/// What an instruction does, as far as it matters to who moves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The same anywhere, and the next one follows, or none.
    Anywhere,
    /// Has, at this byte, 32 bits that are the distance of an operand from its end.
    Near {
        operand: usize,
    },
    /// `syscall`.
    Call,
    /// Enters the kernel in another way: `sysenter`, `int 0x80`.
    Enters,
    /// Goes on so far from its end: always, on a condition (the lowest bits of the opcode), or in a way that has no longer form.
    Jump {
        distance: i32,
    },
    Branch {
        condition: u8,
        distance: i32,
    },
    Loop {
        distance: i32,
    },
    /// Leaves its address behind, or a distance as above in addresses of 32 bits: it is where it is.
    Fixed,
}

/// Maps of opcodes behind VEX and EVEX, and behind XOP, beside the usual.
const VECTOR: u8 = 0x20;
const XOP: u8 = 0x40;

/// What follows an opcode: a ModRM byte, and bytes of an immediate.
#[derive(Clone, Copy)]
struct Form {
    operands: bool,
    immediate: usize,
}

const NONE: Form = Form { operands: false, immediate: 0 };
const OPERANDS: Form = Form { operands: true, immediate: 0 };

const fn plain(immediate: usize) -> Option<Form> {
    Some(Form { immediate, ..NONE })
}

const fn operands(immediate: usize) -> Option<Form> {
    Some(Form { immediate, ..OPERANDS })
}

/// Reads the instruction at the beginning of `code`; `None`: there is none that is whole, or known.
pub fn decode(code: &[u8]) -> Option<Instruction> {
    let mut at = 0;
    let (mut short, mut repeated, mut addresses) = (false, false, false);
    loop {
        match code.get(at)? {
            0x66 => short = true,
            0x67 => addresses = true,
            0xf2 | 0xf3 => repeated = true,
            0xf0 | 0x26 | 0x2e | 0x36 | 0x3e | 0x64 | 0x65 => {}
            _ => break,
        }
        at += 1;
    }
    let rex = Some(*code.get(at)?).filter(|byte| byte & 0xf0 == 0x40);
    let wide = rex.is_some_and(|rex| rex & 8 != 0);
    at += usize::from(rex.is_some());
    let leading = *code.get(at)?;
    let next = *code.get(at + 1).unwrap_or(&0);
    // What an operand of the full size has at once.
    let full = if short && !wide { 2 } else { 4 };
    let (map, bytes) = match leading {
        0x0f if next == 0x38 => (2, 3),
        0x0f if next == 0x3a => (3, 3),
        0x0f => (1, 2),
        0xc5 => (VECTOR | 1, 3),
        0xc4 => (VECTOR | next & 0x1f, 4),
        0x62 => (VECTOR | next & 7, 5),
        // Where it is not `pop`.
        0x8f if next & 0x1f >= 8 => (XOP | next & 0x1f, 4),
        _ => (0, 1),
    };
    at += bytes;
    let opcode = *code.get(at - 1)?;
    let form = match map {
        0 => first(opcode, next, full, wide, addresses),
        1 => second(opcode, short || repeated),
        2 => operands(0),
        3 => operands(1),
        XOP.. => operands(*[1, 0, 4].get(usize::from(map & 0x1f) - 8)?),
        _ => vector(map & 0x1f, opcode),
    }?;
    let mut near = None;
    if form.operands {
        let (bytes, is_near) = addressed(code.get(at..)?)?;
        near = is_near.then_some(at + 1);
        at += bytes;
    }
    let len = at + form.immediate;
    if len > 15 || len > code.len() {
        return None;
    }
    let distance = || match form.immediate {
        1 => i32::from(code[at].cast_signed()),
        _ => i32::from_le_bytes([code[at], code[at + 1], code[at + 2], code[at + 3]]),
    };
    let kind = match (map, opcode) {
        (1, 0x05) => Kind::Call,
        (1, 0x34) => Kind::Enters,
        (0, 0xcd) if code[at] == 0x80 => Kind::Enters,
        // Two processors, two lengths.
        (0, 0x70..=0x7f | 0xe0..=0xe3 | 0xe8 | 0xe9 | 0xeb) | (1, 0x80..=0x8f) if short && !wide => return None,
        (0, 0xe8) => Kind::Fixed,
        (0, 0xff) if matches!(next >> 3 & 7, 2 | 3) => Kind::Fixed,
        (0, 0xe9 | 0xeb) => Kind::Jump { distance: distance() },
        (0, 0x70..=0x7f) | (1, 0x80..=0x8f) => Kind::Branch { condition: opcode & 15, distance: distance() },
        (0, 0xe0..=0xe3) => Kind::Loop { distance: distance() },
        // `xbegin` says where it goes on.
        (0, 0xc7) if next == 0xf8 => Kind::Fixed,
        _ => match near {
            Some(_) if addresses => Kind::Fixed,
            Some(operand) => Kind::Near { operand },
            None => Kind::Anywhere,
        },
    };
    let then = match (map, opcode) {
        (0, 0xc2 | 0xc3 | 0xca | 0xcb | 0xcf | 0xf4) | (1, 0x0b) => Then::Elsewhere,
        (0, 0xff) if next == 0x15 => Then::Next,
        (0, 0xff) if next == 0x25 => Then::Elsewhere,
        (0, 0xff) if matches!(next >> 3 & 7, 2..=5) => Then::Unknown,
        _ => Then::Next,
    };
    Some(Instruction { len, kind, then })
}

/// Bytes of ModRM, SIB and displacement; whether the displacement is a distance from the instruction's end.
fn addressed(code: &[u8]) -> Option<(usize, bool)> {
    let modrm = *code.first()?;
    let (mode, register) = (modrm >> 6, modrm & 7);
    if mode == 3 {
        return Some((1, false));
    }
    let index = register == 4;
    let base = if index { *code.get(1)? & 7 } else { register };
    let displacement = match mode {
        0 if base == 5 => 4,
        0 => 0,
        1 => 1,
        _ => 4,
    };
    Some((1 + usize::from(index) + displacement, mode == 0 && register == 5))
}

fn first(opcode: u8, next: u8, full: usize, wide: bool, addresses: bool) -> Option<Form> {
    match opcode {
        0x00..=0x3f => match opcode & 7 {
            0..=3 => operands(0),
            4 => plain(1),
            5 => plain(full),
            _ => None,
        },
        0x50..=0x5f | 0x6c..=0x6f | 0x90..=0x99 | 0x9b..=0x9f | 0xa4..=0xa7 | 0xaa..=0xaf => plain(0),
        0x63 | 0x84..=0x8f | 0xd0..=0xd3 | 0xd8..=0xdf | 0xfe | 0xff => operands(0),
        0x68 | 0xa9 => plain(full),
        0x69 | 0x81 | 0xc7 => operands(full),
        0x6a | 0xa8 | 0xb0..=0xb7 | 0xcd | 0xe0..=0xe7 | 0xeb | 0x70..=0x7f => plain(1),
        0x6b | 0x80 | 0x83 | 0xc0 | 0xc1 | 0xc6 => operands(1),
        0xa0..=0xa3 => plain(if addresses { 4 } else { 8 }),
        0xb8..=0xbf => plain(if wide { 8 } else { full }),
        0xc2 | 0xca => plain(2),
        0xc8 => plain(3),
        0xc3 | 0xc9 | 0xcb | 0xcc | 0xcf | 0xd7 | 0xec..=0xef | 0xf1 | 0xf4 | 0xf5 | 0xf8..=0xfd => plain(0),
        0xe8 | 0xe9 => plain(4),
        0xf6 => operands(if next >> 3 & 7 < 2 { 1 } else { 0 }),
        0xf7 => operands(if next >> 3 & 7 < 2 { full } else { 0 }),
        _ => None,
    }
}

/// After 0f; `changed`: by a prefix.
fn second(opcode: u8, changed: bool) -> Option<Form> {
    match opcode {
        0x05..=0x09 | 0x0b | 0x0e | 0x30..=0x35 | 0x37 | 0x77 | 0xa0..=0xa2 | 0xa8..=0xaa | 0xc8..=0xcf => plain(0),
        0x0f | 0x70..=0x73 | 0xa4 | 0xac | 0xba | 0xc2 | 0xc4..=0xc6 => operands(1),
        0x78 if changed => None,
        0x00..=0x03 | 0x0d | 0x10..=0x1f | 0x28..=0x2f | 0x40..=0x6f | 0x74..=0x76 | 0x78 | 0x79 | 0x7c..=0x7f => {
            operands(0)
        }
        0x80..=0x8f => plain(4),
        0x90..=0x9f
        | 0xa3
        | 0xa5..=0xa7
        | 0xab
        | 0xad..=0xaf
        | 0xb0..=0xb9
        | 0xbb..=0xc1
        | 0xc3
        | 0xc7
        | 0xd0..=0xff => operands(0),
        _ => None,
    }
}

/// VEX and EVEX.
fn vector(map: u8, opcode: u8) -> Option<Form> {
    match map {
        1 if opcode == 0x77 => plain(0),
        1 if matches!(opcode, 0x70..=0x73 | 0xc2 | 0xc4..=0xc6) => operands(1),
        1 | 2 | 5 | 6 => operands(0),
        3 => operands(1),
        _ => None,
    }
}
