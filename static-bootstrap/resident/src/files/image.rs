//! libc's text as [`sites`](super::sites) rewrites it, and the stubs it jumps to, in a file beside the resident's own: one for each libc of a job on a
//! host, made by the first program that has that libc. All others map it over theirs: none looks for calls, and none has pages of its own.
//!
//! Nothing in it is an address. It is made of libc's file, not of what a debugger may have written into a program's memory.

use sys::page::PAGE;
use sys::resident::PLACE_MAX;
use sys::syscall::{nr, syscall};

use super::sites::AREA;
use crate::{call, settings};

const AT_FDCWD: usize = -100_isize as usize;
const CLOEXEC: usize = 0o2_000_000;
const CREATE: usize = 0o2_000_302;
const PRIVATE: usize = 0x2;
const READ_EXECUTE: usize = 5;
/// Bytes of a build ID.
const ID: usize = 20;
const NAME: usize = PLACE_MAX + 2 * ID + 24;

/// Text of libc in memory.
pub(super) struct Text {
    pub(super) begin: usize,
    pub(super) end: usize,
    /// Of its object, and of the text in its file.
    pub(super) base: usize,
    pub(super) offset: usize,
    /// Where the object says which it is.
    pub(super) notes: (usize, usize),
}

impl Text {
    pub(super) fn first(&self) -> usize {
        self.begin & !(PAGE - 1)
    }

    pub(super) fn len(&self) -> usize {
        self.end.next_multiple_of(PAGE) - self.first()
    }

    /// Which libc it is; `None`: it does not say.
    fn id(&self) -> Option<[u8; ID]> {
        const GNU_BUILD_ID: u32 = 3;
        let (mut at, end) = self.notes;
        while at + 16 + ID <= end {
            // SAFETY: notes of a mapped object (elf(5)).
            let [name, bytes, kind, owner] = unsafe { *(at as *const [u32; 4]) };
            if (name, bytes, kind, owner) == (4, ID as u32, GNU_BUILD_ID, u32::from_ne_bytes(*b"GNU\0")) {
                // SAFETY: as above.
                return Some(unsafe { *((at + 16) as *const [u8; ID]) });
            }
            at += 12 + name.next_multiple_of(4) as usize + bytes.next_multiple_of(4) as usize;
        }
        None
    }
}

/// A path in the resident's directory.
struct Path([u8; NAME], usize);

impl Path {
    fn put(mut self, bytes: &[u8]) -> Path {
        if let Some(room) = self.0.get_mut(self.1..self.1 + bytes.len()) {
            room.copy_from_slice(bytes);
            self.1 += bytes.len();
        }
        self
    }

    fn hex(self, bytes: &[u8]) -> Path {
        let digit = |value: u8| b"0123456789abcdef"[usize::from(value & 15)];
        bytes.iter().fold(self, |path, byte| path.put(&[digit(byte >> 4), digit(*byte)]))
    }

    fn at(&self) -> usize {
        self.0.as_ptr() as usize
    }
}

/// The file of a libc, ended by NUL, whose stubs are the `nth` place away from it.
fn path(id: &[u8; ID], nth: u8) -> Path {
    let place = &settings::get().place;
    let len = place.iter().position(|byte| *byte == 0).unwrap_or(PLACE_MAX);
    Path([0; NAME], 0).put(&place[..len]).put(b"/libc.").hex(id).put(b".").hex(&[nth])
}

/// Maps it, with the stubs at `base`, which is the `nth` place: their first page is this program's, and can be written. False: there is none, or it
/// cannot be had.
pub(super) fn take(text: &Text, base: usize, nth: u8) -> bool {
    let Some(id) = text.id() else { return false };
    // SAFETY: a string; new mappings, the second over libc's own text, which it has all of.
    unsafe {
        let Ok(file) = syscall(nr::OPENAT, [AT_FDCWD, path(&id, nth).at(), CLOEXEC, 0, 0, 0]) else { return false };
        let flags = PRIVATE | call::FIXED_NOREPLACE;
        let stubs = syscall(nr::MMAP, [base, AREA, call::READ_WRITE, flags, file, text.len()]);
        let over = stubs == Ok(base) && {
            let args = [text.first(), text.len(), READ_EXECUTE, PRIVATE | call::FIXED, file, 0];
            let over = syscall(nr::MMAP, args).is_ok();
            if !over {
                let _ = syscall(nr::MUNMAP, [base, AREA, 0, 0, 0, 0]);
            }
            over
        };
        call::close(file as i32);
        over
    }
}

/// Makes it with what `rewrite` makes of a copy of the text, at the first address, and of stubs at the second.
pub(super) fn make(text: &Text, base: usize, nth: u8, rewrite: impl FnOnce(usize, usize) -> bool) -> Option<()> {
    let id = text.id()?;
    let source = source(text)?;
    // As far apart as in the program; what is between is never touched.
    let (low, high) = (text.first().min(base), (text.first() + text.len()).max(base + AREA));
    let copy = call::map(0, high - low, call::READ_WRITE, 0);
    let made = copy.ok().filter(|copy| {
        let (first, stubs) = (copy + text.first() - low, copy + base - low);
        let notes = (text.notes.0 - text.base, text.notes.1 - text.notes.0);
        // The notes come first where the text will be.
        read(source, first, notes.1, notes.0)
            && Text { notes: (first, first + notes.1), ..*text }.id() == Some(id)
            && read(source, copy + text.begin - low, text.end - text.begin, text.offset)
            && rewrite(first, stubs)
            && write(&id, nth, [(first, text.len()), (stubs, AREA)])
    });
    if let Ok(copy) = copy {
        // SAFETY: ours.
        let _ = unsafe { syscall(nr::MUNMAP, [copy, high - low, 0, 0, 0, 0]) };
    }
    call::close(source);
    made.map(drop)
}

/// The file that the text is mapped from.
fn source(text: &Text) -> Option<i32> {
    const MOST: usize = 1 << 20;
    let lines = call::map(0, MOST, call::READ_WRITE, 0).ok()?;
    // SAFETY: strings, and room that is ours; what is read into is initialized.
    unsafe {
        let maps = syscall(nr::OPENAT, [AT_FDCWD, c"/proc/self/maps".as_ptr() as usize, CLOEXEC, 0, 0, 0]);
        let mut len = 0;
        if let Ok(maps) = maps {
            while let Ok(more) = syscall(nr::READ, [maps, lines + len, MOST - 1 - len, 0, 0, 0])
                && more > 0
            {
                len += more;
            }
            call::close(maps as i32);
        }
        let all = core::slice::from_raw_parts_mut(lines as *mut u8, len);
        let begins = |line: &[u8]| {
            let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit());
            let value = |byte: u8| usize::from(if byte > b'9' { byte - b'a' + 10 } else { byte - b'0' });
            digits.fold(0usize, |all, byte| all << 4 | value(*byte)) == text.first()
        };
        let line = all.split_mut(|byte| *byte == b'\n').find(|line| begins(line));
        let name = line.and_then(|line| line.iter().position(|byte| *byte == b'/').map(|at| &line[at..]));
        // What follows it is zero, or made so: the line's end.
        let file = name.and_then(|name| {
            let end = name.as_ptr() as usize + name.len();
            (end as *mut u8).write(0);
            syscall(nr::OPENAT, [AT_FDCWD, name.as_ptr() as usize, CLOEXEC, 0, 0, 0]).ok()
        });
        let _ = syscall(nr::MUNMAP, [lines, MOST, 0, 0, 0, 0]);
        file.map(|file| file as i32)
    }
}

/// All of it.
fn read(file: i32, into: usize, len: usize, offset: usize) -> bool {
    // SAFETY: room that the caller has.
    unsafe { syscall(nr::PREAD64, [file as usize, into, len, offset, 0, 0]) == Ok(len) }
}

/// Whoever finds it finds all of it.
fn write(id: &[u8; ID], nth: u8, parts: [(usize, usize); 2]) -> bool {
    const RENAME: usize = 82;
    const UNLINK: usize = 87;
    let whole = path(id, nth);
    // SAFETY: strings, integers, and memory that the caller has.
    unsafe {
        let own = syscall(nr::GETPID, [0; 6]).unwrap_or(0).to_be_bytes();
        let begun = path(id, nth).put(b".").hex(&own);
        let Ok(file) = syscall(nr::OPENAT, [AT_FDCWD, begun.at(), CREATE, 0o600, 0, 0]) else { return false };
        let mut at = 0;
        let written = parts.iter().all(|(from, len)| {
            let written = syscall(nr::PWRITE64, [file, *from, *len, at, 0, 0]) == Ok(*len);
            at += len;
            written
        });
        call::close(file as i32);
        let done = written && syscall(RENAME, [begun.at(), whole.at(), 0, 0, 0, 0]).is_ok();
        if !done {
            let _ = syscall(UNLINK, [begun.at(), 0, 0, 0, 0, 0]);
        }
        done
    }
}
