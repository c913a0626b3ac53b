//! What a Python module imports when it is itself imported: found in its source or its compiled form, without running anything.
//!
//! Any bytes may arrive here: what is not understood yields nothing, and what is found is bounded. Imports inside functions are left out,
//! as most of them never run. What is overlooked is asked for when it is needed.

use std::rc::Rc;

/// Values inside values, at most.
const DEPTH_MAX: u32 = 200;
/// Names from one module, at most.
const NAMES_MAX: usize = 4096;
/// Bytes of a dotted name, at most.
const NAME_MAX: usize = 255;

/// Something that a module may import.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Import {
    /// Dots before the name: 0 is a search along the import path, 1 the module's own package, 2 the one around it.
    pub level: usize,
    /// Dotted, no part empty, no `/` in it. The last part may be an attribute of a module instead of a module.
    pub name: Vec<u8>,
}

/// Whether a file of this name is a Python module, compiled or not.
pub fn is_module(path: &[u8]) -> bool {
    path.ends_with(b".py") || path.ends_with(b".pyc")
}

/// The imports of a module's file: in bytecode if its name ends in `.pyc`, else in source text.
pub fn of_module(path: &[u8], content: &[u8]) -> Vec<Import> {
    let mut found = Found::default();
    if path.ends_with(b".pyc") {
        of_bytecode(content, &mut found);
    } else {
        of_source(content, &mut found);
    }
    found.0
}

#[derive(Debug, Default)]
struct Found(Vec<Import>);

impl Found {
    /// `import MODULE`, or `from MODULE import NAMES` with so many dots before the module.
    fn add<'a>(&mut self, level: usize, module: &[u8], names: impl Iterator<Item = &'a [u8]>) {
        self.push(level, module.to_vec());
        for name in names {
            self.push(level, if module.is_empty() { name.to_vec() } else { [module, name].join(&b'.') });
            if self.0.len() >= NAMES_MAX {
                return;
            }
        }
    }

    fn push(&mut self, level: usize, name: Vec<u8>) {
        if self.0.len() < NAMES_MAX && is_name(&name) {
            self.0.push(Import { level, name });
        }
    }
}

fn is_name(text: &[u8]) -> bool {
    let is_part =
        |part: &[u8]| !part.is_empty() && part.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_' || !b.is_ascii());
    text.len() <= NAME_MAX && text.split(|b| *b == b'.').all(is_part)
}

fn of_source(text: &[u8], found: &mut Found) {
    // Indentation of the function that we are in, and the quotes of the string.
    let (mut function, mut quotes) = (None, None);
    let mut lines = text.split(|b| *b == b'\n');
    while let Some(line) = lines.next() {
        let begun_in_string = quotes.is_some();
        toggle(line, &mut quotes);
        let code = without_comment(line).trim_ascii_end();
        let statement = code.trim_ascii_start();
        let indentation = code.len() - statement.len();
        if begun_in_string || statement.is_empty() || function.is_some_and(|outer| indentation > outer) {
            continue;
        }
        function = (statement.starts_with(b"def ") || statement.starts_with(b"async def ")).then_some(indentation);
        if !statement.starts_with(b"import ") && !statement.starts_with(b"from ") {
            continue;
        }
        let mut whole = statement.to_vec();
        let mut open = statement.contains(&b'(') && !statement.contains(&b')');
        while open || whole.ends_with(b"\\") {
            let Some(more) = lines.next() else { break };
            let more = without_comment(more).trim_ascii();
            open &= !more.contains(&b')');
            if whole.ends_with(b"\\") {
                whole.pop();
            }
            whole.push(b' ');
            whole.extend_from_slice(more);
        }
        for part in whole.split(|b| *b == b';') {
            of_statement(part.trim_ascii(), found);
        }
    }
}

fn without_comment(line: &[u8]) -> &[u8] {
    line.split(|b| *b == b'#').next().unwrap_or_default()
}

/// Follows strings over several lines: `quotes` is what ends the one that we are in.
fn toggle(line: &[u8], quotes: &mut Option<u8>) {
    let mut at = 0;
    while let Some(&[a, b, c]) = line.get(at..at + 3) {
        let mark = (a == b && b == c && matches!(a, b'"' | b'\'')).then_some(a);
        if mark.is_some() && (quotes.is_none() || *quotes == mark) {
            *quotes = if quotes.is_some() { None } else { mark };
            at += 2;
        }
        at += 1;
    }
}

fn of_statement(statement: &[u8], found: &mut Found) {
    let list = |text: &'_ [u8]| -> Vec<Vec<u8>> {
        let bare: Vec<u8> = text.iter().copied().filter(|b| !matches!(b, b'(' | b')')).collect();
        let first_word = |item: &[u8]| item.trim_ascii().split(u8::is_ascii_whitespace).next().map(<[u8]>::to_vec);
        bare.split(|b| *b == b',').filter_map(first_word).collect()
    };
    if let Some(modules) = statement.strip_prefix(b"import ") {
        list(modules).into_iter().for_each(|module| found.push(0, module));
    } else if let Some(rest) = statement.strip_prefix(b"from ")
        && let Some(at) = memchr::memmem::find(rest, b" import")
    {
        let from = rest[..at].trim_ascii();
        let level = from.iter().take_while(|b| **b == b'.').count();
        let names = list(&rest[at + b" import".len()..]);
        found.add(level, from[level..].trim_ascii(), names.iter().map(Vec::as_slice));
    }
}

/// Numbers of a release's bytecode instructions, and whether code objects are written as since Python 3.11.
#[derive(Debug, Clone, Copy)]
struct Dialect {
    import_name: u8,
    load_const: u8,
    extended_arg: u8,
    new_code: bool,
}

/// By the number at the beginning of a `.pyc` file (`importlib/_bootstrap_external.py` and `opcode.py` of these releases).
fn dialect(magic: u16) -> Option<Dialect> {
    let old = Dialect { import_name: 108, load_const: 100, extended_arg: 144, new_code: false };
    match magic {
        // 3.8, 3.9, 3.10
        3413 | 3425 | 3439 => Some(old),
        // 3.11, 3.12
        3495 | 3531 => Some(Dialect { new_code: true, ..old }),
        // 3.13
        3571 => Some(Dialect { import_name: 75, load_const: 83, extended_arg: 71, new_code: true }),
        _ => None,
    }
}

/// The content of a `.pyc` file (PEP 552): 16 bytes, and a code object.
fn of_bytecode(pyc: &[u8], found: &mut Found) {
    let Some((head, body)) = pyc.split_first_chunk::<16>() else { return };
    let Some(dialect) = dialect(u16::from_le_bytes([head[0], head[1]])) else { return };
    let mut reader = Reader { rest: body, seen: Vec::new(), new_code: dialect.new_code };
    if let Some(Value::Code(code)) = reader.value(0) {
        of_code(&code, dialect, found);
    }
}

/// Looks for a level, a list of names and the import of a module right after each other.
fn of_code(code: &Code<'_>, dialect: Dialect, found: &mut Found) {
    let [Value::Bytes(instructions), Value::Tuple(constants), Value::Tuple(names)] = code else { return };
    let (mut extended, mut loaded) = (0_usize, [None; 2]);
    for instruction in instructions.chunks_exact(2) {
        let argument = extended << 8 | usize::from(instruction[1]);
        extended = 0;
        match instruction[0] {
            op if op == dialect.extended_arg => extended = argument & 0xFF_FFFF,
            op if op == dialect.load_const => loaded = [loaded[1], constants.get(argument)],
            op if op == dialect.import_name => {
                let (Some(Value::Bytes(module)), [Some(Value::Int(level)), Some(list)]) = (names.get(argument), loaded)
                else {
                    continue;
                };
                let list: &[Value<'_>] = if let Value::Tuple(list) = list { list } else { &[] };
                let list =
                    list.iter().filter_map(|name| if let Value::Bytes(text) = name { Some(*text) } else { None });
                found.add(usize::try_from(*level).unwrap_or(0), module, list);
            }
            _ => loaded = [None; 2],
        }
        // What follows `if __name__ == "__main__"` is not for those who import the module.
        if found.0.len() >= NAMES_MAX || matches!(loaded[1], Some(Value::Bytes(b"__main__"))) {
            return;
        }
    }
}

#[derive(Debug, Clone)]
enum Value<'a> {
    Int(i32),
    /// Also text.
    Bytes(&'a [u8]),
    Tuple(Rc<[Value<'a>]>),
    Code(Rc<Code<'a>>),
    Other,
}

/// Instructions, constants, names.
type Code<'a> = [Value<'a>; 3];

/// Python's `marshal` format (version 4, `Python/marshal.c`): a tag, whose upper bit says that the value is referred to later, and what
/// belongs to it. Every value takes a byte at least and is read once, so what is kept is in proportion to the input.
struct Reader<'a> {
    rest: &'a [u8],
    seen: Vec<Value<'a>>,
    new_code: bool,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }

    fn int(&mut self) -> Option<i32> {
        self.take(4)?.try_into().ok().map(i32::from_le_bytes)
    }

    fn length(&mut self) -> Option<usize> {
        usize::try_from(self.int()?).ok()
    }

    fn value(&mut self, depth: u32) -> Option<Value<'a>> {
        if depth > DEPTH_MAX {
            return None;
        }
        let tag = self.byte()?;
        let place = (tag & 0x80 != 0).then(|| {
            self.seen.push(Value::Other);
            self.seen.len() - 1
        });
        let value = match tag & 0x7F {
            b'0' | b'N' | b'F' | b'T' | b'S' | b'.' => Value::Other,
            b'i' => Value::Int(self.int()?),
            // A long integer: digits of 15 bits, the sign in their number.
            b'l' => {
                let digits = self.int()?.unsigned_abs() as usize;
                self.take(digits.checked_mul(2)?).map(|_| Value::Other)?
            }
            b'g' => self.take(8).map(|_| Value::Other)?,
            b'y' => self.take(16).map(|_| Value::Other)?,
            b's' | b't' | b'u' | b'a' | b'A' => {
                let length = self.length()?;
                Value::Bytes(self.take(length)?)
            }
            b'z' | b'Z' => {
                let length = self.byte()?;
                Value::Bytes(self.take(length.into())?)
            }
            b')' => {
                let count = self.byte()?;
                self.tuple(count.into(), depth)?
            }
            b'(' | b'[' | b'<' | b'>' => {
                let count = self.length()?;
                self.tuple(count, depth)?
            }
            b'{' => {
                while self.rest.first()? != &b'0' {
                    self.value(depth + 1)?;
                }
                self.take(1).map(|_| Value::Other)?
            }
            b'r' => {
                let index = self.length()?;
                self.seen.get(index)?.clone()
            }
            b'c' => self.code(depth)?,
            _ => return None,
        };
        if let Some(place) = place {
            self.seen[place] = value.clone();
        }
        Some(value)
    }

    fn tuple(&mut self, count: usize, depth: u32) -> Option<Value<'a>> {
        // A count beyond what is left fails before it costs memory.
        let values: Option<Vec<_>> = (0..count).map(|_| self.value(depth + 1)).collect();
        Some(Value::Tuple(values?.into()))
    }

    fn code(&mut self, depth: u32) -> Option<Value<'a>> {
        let (numbers, before, after) = if self.new_code { (5, 5, 2) } else { (6, 5, 1) };
        self.take(numbers * 4)?;
        let code = [self.value(depth + 1)?, self.value(depth + 1)?, self.value(depth + 1)?];
        // Names of variables, their kinds, the file, the code's own names; then its first line, and tables.
        for _ in 0..before {
            self.value(depth + 1)?;
        }
        self.int()?;
        for _ in 0..after {
            self.value(depth + 1)?;
        }
        Some(Value::Code(Rc::new(code)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SOURCE: &str = "\
'''A text
import nothing
'''
import os, a.b as c  # and so on
from . import (x,
    y as z)
from ..up.on import one
try:
    from fast import *
except ImportError:
    import slow; import slower
def f():
    import never

    import never2
class C:
    import always
from sys import \\
    argv
";

    fn shown(path: &str, content: &[u8]) -> Vec<String> {
        let show = |i: Import| format!("{}{}", ".".repeat(i.level), String::from_utf8(i.name).unwrap());
        of_module(path.as_bytes(), content).into_iter().map(show).collect()
    }

    const EXPECTED: [&str; 11] =
        ["os", "a.b", ".x", ".y", "..up.on", "..up.on.one", "fast", "slow", "slower", "sys", "sys.argv"];

    #[test]
    fn imports_of_source() {
        let mut expected = EXPECTED.to_vec();
        expected.insert(9, "always");
        assert_eq!(shown("m.py", SOURCE.as_bytes()), expected);
    }

    #[test]
    fn imports_of_what_python_compiled() {
        let directory = tempfile::tempdir().unwrap();
        let [source, compiled] = ["m.py", "m.pyc"].map(|name| directory.path().join(name));
        std::fs::write(&source, SOURCE).unwrap();
        let script = "import py_compile, sys; py_compile.compile(sys.argv[1], cfile=sys.argv[2])";
        let mut python = std::process::Command::new("python3");
        match python.args(["-c", script]).args([&source, &compiled]).status() {
            Ok(status) if status.success() => {}
            other => return eprintln!("SKIPPED: no python3 ({other:?})"),
        }
        let pyc = std::fs::read(&compiled).unwrap();
        if dialect(u16::from_le_bytes([pyc[0], pyc[1]])).is_none() {
            return eprintln!("SKIPPED: python3 is of another version");
        }
        assert_eq!(shown("m.pyc", &pyc), EXPECTED, "class bodies are code of their own");
        for end in 0..pyc.len() {
            assert!(shown("m.pyc", &pyc[..end]).is_empty());
        }
    }

    fn short(text: &str) -> Vec<u8> {
        [&[b'z', u8::try_from(text.len()).unwrap()][..], text.as_bytes()].concat()
    }

    /// `from .m import a` as a release writes it.
    fn compiled(magic: u16) -> Vec<u8> {
        let dialect = dialect(magic).unwrap();
        let (numbers, after) = if dialect.new_code { (5, 2) } else { (6, 1) };
        let instructions = [dialect.load_const, 0, dialect.load_const, 1, dialect.import_name, 0];
        let empty = [b')', 0];
        [
            &magic.to_le_bytes()[..],
            &[0; 14],
            b"\xe3",
            &vec![0; 4 * numbers],
            &[&b"s\x06\0\0\0"[..], &instructions].concat(),
            &[b")\x02i\x01\0\0\0)\x01".as_slice(), &short("a")].concat(),
            &[b")\x01".as_slice(), &short("m")].concat(),
            &empty.repeat(5),
            &[0; 4],
            &empty.repeat(after),
        ]
        .concat()
    }

    const MAGICS: [u16; 6] = [3413, 3425, 3439, 3495, 3531, 3571];

    #[test]
    fn imports_of_every_release() {
        for magic in MAGICS {
            assert_eq!(shown("m.pyc", &compiled(magic)), [".m", ".m.a"], "{magic}");
        }
        let mut unknown = compiled(3571);
        unknown[0] += 1;
        assert!(shown("m.pyc", &unknown).is_empty());
    }

    #[test]
    fn hostile_input_is_bounded() {
        // One list of names that a hundred thousand imports refer to.
        let mut many = compiled(3571);
        let at = many.windows(5).position(|w| w == b"s\x06\0\0\0").unwrap();
        let code = many[at + 5..at + 11].repeat(100_000);
        let head = [&b"s"[..], &u32::try_from(code.len()).unwrap().to_le_bytes()].concat();
        many.splice(at..at + 11, head.into_iter().chain(code));
        assert_eq!(shown("m.pyc", &many).len(), NAMES_MAX);
        let text = [&b"from m import ("[..], &b"a,\n".repeat(100_000)].concat();
        assert_eq!(shown("m.py", &text).len(), NAMES_MAX);
        assert!(shown("m.py", &b"'''".repeat(100_001)).is_empty());
        assert!(shown("m.py", b"import ../../etc/passwd, .., a..b\nfrom / import x").is_empty());
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_much(bytes: Vec<u8>, text: String, magic in 0..6_usize, at: usize, byte: u8) {
            let mut pyc = compiled(MAGICS[magic]);
            let len = pyc.len();
            pyc[at % len] = byte;
            let _ = of_module(b"m.pyc", &pyc);
            pyc.splice(17.., bytes);
            for import in of_module(b"m.pyc", &pyc).into_iter().chain(of_module(b"m.py", text.as_bytes())) {
                prop_assert!(is_name(&import.name));
            }
        }
    }
}
