//! Whether every system call of the program is known: where all of its code makes none, or is rewritten ([`sites`]), nothing has to stop any. What is mapped to be
//! executed later is looked at as it is mapped; with what cannot be told, dispatch is put in force ([`net`]) before it can run.

use sys::object::{HEAD, Object, join};
use sys::sites::{Verdict, verdict};
use sys::syscall::syscall;

use super::kernel::{failed, nr, raw};
use super::net;
use super::sites::install;
use super::source::Source;
use super::verdicts::Verdicts;
use crate::call::{ANONYMOUS, EXECUTE, SHARED};
use crate::objects;

/// Memory that can be read can be executed, too (personality(2)).
const READ_IMPLIES_EXECUTE: usize = 0x40_0000;
const ASK: usize = 0xffff_ffff;

/// Looks at what the program starts with, but libc, in which `libc` is. Whether all of it is known.
pub(super) fn judge(libc: usize) -> bool {
    // SAFETY: asks.
    let personality = unsafe { syscall(nr::PERSONALITY, [ASK, 0, 0, 0, 0, 0]) };
    if personality.is_ok_and(|personality| personality & READ_IMPLIES_EXECUTE != 0) {
        return false;
    }
    let verdicts = Verdicts::open();
    let others = |take: &mut dyn FnMut(&objects::Loaded, Option<Object<'static>>, bool)| {
        objects::loaded(|loaded| {
            if !loaded.range.contains(&libc) {
                take(loaded, Object::new(loaded.begins()), loaded.is_linker);
            }
        });
    };
    // Together they are told by one key.
    let (mut set, mut known) = (Some(0), true);
    others(&mut |loaded, object, is_linker| {
        if is_linker {
            known &= install(loaded);
        } else {
            known &= object.is_some_and(|object| !object.has_executable_stack());
            set = set.zip(object.and_then(Object::key)).map(|(set, key)| join(set, key));
        }
    });
    if known && set.and_then(|set| verdicts.get(set)) == Some(Verdict::Clean) {
        return true;
    }
    let mut clean = true;
    others(&mut |loaded, object, is_linker| {
        if known && !is_linker {
            let verdict = of(&verdicts, object.and_then(Object::key), || Source::of(loaded));
            clean &= verdict == Verdict::Clean;
            known = verdict == Verdict::Clean || verdict == Verdict::Calls && install(loaded);
        }
    });
    if let Some(set) = set.filter(|_| known && clean) {
        verdicts.put(set, Verdict::Clean);
    }
    known
}

/// What is known of an object, or found now. One that does not say which it is, is known by its file.
fn of(verdicts: &Verdicts, key: Option<u64>, source: impl FnOnce() -> Option<Source>) -> Verdict {
    if let Some(known) = key.and_then(|key| verdicts.get(key)) {
        return known;
    }
    let Some(source) = source() else { return Verdict::Unknown };
    let key = key.unwrap_or(source.identity());
    verdicts.get(key).unwrap_or_else(|| {
        let found = source.object().map_or(Verdict::Unknown, verdict);
        verdicts.put(key, found);
        found
    })
}

/// The program has mapped memory that can be executed, with these arguments.
pub(super) fn mapped(args: [usize; 6]) {
    if net::is_in_force() {
        return;
    }
    let [_, _, _, flags, file, offset] = args;
    if flags & (ANONYMOUS | SHARED) != 0 || !is_clean(file, offset) {
        net::spread();
    }
}

/// Whether here begins the code of an object that makes no system calls. What the linker maps with it, it maps others over.
fn is_clean(file: usize, offset: usize) -> bool {
    let mut head = [0; HEAD];
    // SAFETY: room for them.
    let read = unsafe { raw(nr::PREAD64, [file, head.as_mut_ptr() as usize, HEAD, 0, 0, 0]) };
    let Some(object) = Object::new(&head).filter(|_| !failed(read)) else { return false };
    let mut code = object.segments().filter(|segment| segment.is_code());
    let is_code = code.any(|segment| segment.holds(offset));
    is_code && of(&Verdicts::open(), object.key(), || Source::of_file(file)) == Verdict::Clean
}

/// The program is about to make memory executable.
pub(super) fn protect(protection: usize) {
    if protection & EXECUTE != 0 {
        net::spread();
    }
}

/// Or about to say how its memory is to be seen.
pub(super) fn personality(wanted: usize) {
    if wanted & READ_IMPLIES_EXECUTE != 0 && wanted & ASK != ASK {
        net::spread();
    }
}
