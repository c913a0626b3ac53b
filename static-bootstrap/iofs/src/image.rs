//! The text of an object as [`sites`](super::sites) rewrites it, and the stubs it jumps to, in a file beside the resident's own: one for each libc and linker of a
//! job on a host, and what else makes system calls, made by the first program that has that object. All others map it over theirs: none looks for calls, and none
//! has pages of its own.
//!
//! Nothing in it is an address. It is made of the object's file, not of what a debugger may have written into a program's memory.

use sys::object::Object;
use sys::page::PAGE;
use sys::resident::PLACE_MAX;
use sys::sites::{Targets, survey};
use sys::syscall::{nr, syscall};

use super::stubs::Emitter;
use crate::{call, settings};

const AT_FDCWD: usize = -100_isize as usize;
const CLOEXEC: usize = 0o2_000_000;
const CREATE: usize = 0o2_000_302;
const PRIVATE: usize = 0x2;
const READ_EXECUTE: usize = 5;
/// Bytes of a file's name.
const NAME: usize = 40;

/// Text of an object in memory.
#[derive(Clone, Copy)]
pub(super) struct Text {
    pub(super) begin: usize,
    pub(super) end: usize,
    /// What is added to the object's addresses.
    pub(super) bias: usize,
    /// Tells objects apart; `None`: it does not say which it is.
    pub(super) key: Option<u64>,
}

impl Text {
    pub(super) fn first(&self) -> usize {
        self.begin & !(PAGE - 1)
    }

    pub(super) fn len(&self) -> usize {
        self.end.next_multiple_of(PAGE) - self.first()
    }
}

/// A path in the resident's directory.
pub(super) struct Path([u8; PLACE_MAX + NAME], usize);

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

    pub(super) fn at(&self) -> usize {
        self.0.as_ptr() as usize
    }
}

/// The path of a file in that directory, ended by NUL.
pub(super) fn beside(name: &[u8]) -> Path {
    Path([0; PLACE_MAX + NAME], 0).put(settings::get().place()).put(b"/").put(name)
}

/// That of an object whose stubs are the `nth` place away from it.
fn path(key: u64, nth: u8) -> Path {
    beside(b"text.").hex(&key.to_be_bytes()).put(b".").hex(&[nth])
}

/// Maps it, with stubs of `area` bytes at `base`, which is the `nth` place: their first page is this program's, and can be written. False: there is none, or it
/// cannot be had.
pub(super) fn take(text: &Text, (base, area): (usize, usize), nth: u8) -> bool {
    let Some(key) = text.key else { return false };
    // SAFETY: a string; new mappings, the second over the object's own text, which it has all of.
    unsafe {
        let Ok(file) = syscall(nr::OPENAT, [AT_FDCWD, path(key, nth).at(), CLOEXEC, 0, 0, 0]) else { return false };
        let flags = PRIVATE | call::FIXED_NOREPLACE;
        let stubs = syscall(nr::MMAP, [base, area, call::READ_WRITE, flags, file, text.len()]);
        let over = stubs == Ok(base) && {
            let args = [text.first(), text.len(), READ_EXECUTE, PRIVATE | call::FIXED, file, 0];
            let over = syscall(nr::MMAP, args).is_ok();
            if !over {
                let _ = syscall(nr::MUNMAP, [base, area, 0, 0, 0, 0]);
            }
            over
        };
        call::close(file as i32);
        over
    }
}

/// Makes it of the object's file.
pub(super) fn make(text: &Text, (base, area): (usize, usize), nth: u8, object: Object<'_>, few: usize) -> Option<()> {
    let key = text.key?;
    let bytes = object.at(text.begin - text.bias)?.get(..text.end - text.begin)?;
    // As far apart as in the program; what is between is never touched.
    let (low, high) = (text.first().min(base), (text.first() + text.len()).max(base + area));
    let copy = call::map(0, high - low, call::READ_WRITE, 0).ok()?;
    let there = |at: usize| copy + (at - low);
    // SAFETY: the copy is ours, and has room for both.
    let made = unsafe {
        core::ptr::copy_nonoverlapping(bytes.as_ptr(), there(text.begin) as *mut u8, bytes.len());
        let bias = there(text.begin).wrapping_sub(text.begin - text.bias);
        rewrite(object, bias, (there(base), area))
    };
    let made = made.is_some_and(|count| count >= few)
        && write(key, nth, [(there(text.first()), text.len()), (there(base), area)]);
    // SAFETY: ours.
    let _ = unsafe { syscall(nr::MUNMAP, [copy, high - low, 0, 0, 0, 0]) };
    made.then_some(())
}

/// Rewrites a text, with stubs in an area; returns how many calls have some.
///
/// # Safety
/// As for [`Emitter::new`].
pub(super) unsafe fn rewrite(object: Object<'_>, bias: usize, (base, area): (usize, usize)) -> Option<usize> {
    let room = Targets::room(object);
    let bits = call::map(0, room.max(1), call::READ_WRITE, 0).ok()?;
    // SAFETY: fresh memory, zero; and as the caller says.
    let (targets, mut code) =
        unsafe { (core::slice::from_raw_parts_mut(bits as *mut u8, room), Emitter::new(object, bias, base, area)) };
    let (mut count, mut all) = (0, true);
    let complete = survey(object, targets, |site| {
        let replaced = code.replace(&site);
        all &= replaced;
        count += usize::from(replaced);
    });
    code.end(complete && all);
    // SAFETY: ours.
    let _ = unsafe { syscall(nr::MUNMAP, [bits, room.max(1), 0, 0, 0, 0]) };
    Some(count)
}

/// Whoever finds it finds all of it.
fn write(key: u64, nth: u8, parts: [(usize, usize); 2]) -> bool {
    const RENAME: usize = 82;
    const UNLINK: usize = 87;
    let whole = path(key, nth);
    // SAFETY: strings, integers, and memory that the caller has.
    unsafe {
        let own = syscall(nr::GETPID, [0; 6]).unwrap_or(0).to_be_bytes();
        let begun = path(key, nth).put(b".").hex(&own);
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
