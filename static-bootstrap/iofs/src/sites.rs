//! The system calls of objects, rewritten where they are made: each becomes a jump to a stub of its own ([`stubs`](super::stubs)). Where that cannot be done they come
//! by way of [`net`](super::net).

use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use sys::object::Object;
use sys::page::PAGE;
use sys::syscall::{nr as early, syscall};

use super::image::{self, Text};
use super::kernel::GATE;
use super::source::Source;
use super::stubs::{self, PASS, RESTORE};
use crate::objects::Loaded;
use crate::{call, dispatch};

/// Bytes of libc's stubs, from [`BEGIN`] on; of another object's.
pub(super) const AREA: usize = 32 << 10;
const OTHER: usize = 8 << 10;
/// Sites of a libc, at least: with fewer it is none that we know.
const FEW: usize = 300;

/// Something is pending, or an offset is kept here ([`super::others`]).
#[unsafe(link_section = ".data.hot")]
pub(super) static DIRTY: AtomicU8 = AtomicU8::new(0);
/// The layer has stepped aside.
#[unsafe(link_section = ".data.hot")]
pub(super) static OFF: AtomicU8 = AtomicU8::new(0);
/// The part that may make system calls.
pub(super) static BEGIN: AtomicUsize = AtomicUsize::new(0);

/// Places below a text that an area is looked for at, so far apart: so few that programs meet at the same.
const PLACES: u8 = 7;
const APART: usize = 256 << 20;

/// The text of an object; `None`: it has more than one, or shares a page with others.
fn text(loaded: &Loaded) -> Option<Text> {
    let object = Object::new(loaded.begins())?;
    let mut code = object.segments().filter(|segment| segment.is_code());
    let (only, None) = (code.next()?, code.next()) else { return None };
    let begin = loaded.base + only.address;
    let is_plain = loaded.base == loaded.head && begin.is_multiple_of(PAGE);
    is_plain.then_some(Text { begin, end: begin + only.bytes, bias: loaded.base, key: object.key() })
}

/// Rewrites libc; `may_make`: it can make a file of it. Whether all of its calls are rewritten.
///
/// # Errors
/// It is not as we know it; an errno.
pub(super) fn install_libc(libc: &Loaded, may_make: bool) -> Result<bool, u32> {
    let text = text(libc).ok_or(call::EINVAL)?;
    let (base, complete) = put(libc, &text, AREA, may_make, FEW)?;
    GATE.store(base + PASS, Ordering::Relaxed);
    dispatch::RESTORE.store(base + RESTORE, Ordering::Relaxed);
    BEGIN.store(base, Ordering::Relaxed);
    Ok(complete)
}

/// The same of another object; false: some of its calls are left.
pub(super) fn install(loaded: &Loaded) -> bool {
    text(loaded).is_some_and(|text| put(loaded, &text, OTHER, true, 0).is_ok_and(|(_, complete)| complete))
}

/// Where the stubs are, and whether they are all.
fn put(loaded: &Loaded, text: &Text, area: usize, may_make: bool, few: usize) -> Result<(usize, bool), u32> {
    let base = shared(loaded, text, area, may_make, few).map_or_else(|| alone(loaded, text, area, few), Ok)?;
    // SAFETY: the beginning of the area, which is ours.
    let complete = unsafe { stubs::point(base) };
    protect(base, area, 5)?;
    Ok((base, complete))
}

fn protect(at: usize, len: usize, protection: usize) -> Result<(), u32> {
    // SAFETY: an object's text, or the area; nobody relies on that it cannot be written meanwhile, and no other thread exists.
    unsafe { syscall(early::MPROTECT, [at, len, protection, 0, 0, 0]) }.map(drop)
}

/// The same as others: where the area is, which can be written.
fn shared(loaded: &Loaded, text: &Text, area: usize, may_make: bool, few: usize) -> Option<usize> {
    let first = text.first();
    let places = (1..=PLACES).map(|nth| (nth, first.wrapping_sub(usize::from(nth) * APART)));
    places.clone().find_map(|(nth, base)| image::take(text, (base, area), nth).then_some(base)).or_else(|| {
        let (nth, base) = places.clone().find(|(_, base)| may_make && is_free(*base, area))?;
        let source = Source::of(loaded)?;
        image::make(text, (base, area), nth, source.object()?, few)?;
        image::take(text, (base, area), nth).then_some(base)
    })
}

/// In this program's memory alone.
fn alone(loaded: &Loaded, text: &Text, area: usize, few: usize) -> Result<usize, u32> {
    let source = Source::of(loaded).ok_or(call::EINVAL)?;
    let object = source.object().ok_or(call::EINVAL)?;
    let base = near(text.begin, text.end, area)?;
    protect(text.first(), text.len(), 7)?;
    // SAFETY: the program's text and fresh memory; nobody executes either meanwhile.
    let count = unsafe { image::rewrite(object, text.bias, (base, area)) };
    protect(text.first(), text.len(), 5)?;
    count.filter(|count| *count >= few).map(|_| base).ok_or(call::EINVAL)
}

/// Without rewriting anything: a place from which calls can be made.
pub(super) fn gate_only() {
    static INSTRUCTIONS: [u8; 3] = [0x0f, 0x05, 0xc3];
    if GATE.load(Ordering::Relaxed) == 0
        && let Ok(at) = map(0, PAGE)
    {
        // SAFETY: fresh memory.
        unsafe {
            (at as *mut [u8; 3]).write(INSTRUCTIONS);
            let _ = syscall(early::MPROTECT, [at, PAGE, 5, 0, 0, 0]);
        }
        GATE.store(at, Ordering::Relaxed);
    }
}

/// Memory from which a text can be reached by a jump.
fn near(begin: usize, end: usize, area: usize) -> Result<usize, u32> {
    const STEP: usize = 1 << 20;
    let near = (1..1024).flat_map(|nth| [(end & !(STEP - 1)) + nth * STEP, (begin & !(STEP - 1)) - nth * STEP]);
    for at in near {
        if map(at, area) == Ok(at) {
            return Ok(at);
        }
    }
    Err(call::ENOMEM)
}

/// Whether there is room for an area.
fn is_free(base: usize, area: usize) -> bool {
    // SAFETY: ours, if it came to be.
    map(base, area) == Ok(base) && unsafe { syscall(early::MUNMAP, [base, area, 0, 0, 0, 0]) }.is_ok()
}

/// Fresh memory there, if nothing is.
fn map(at: usize, len: usize) -> Result<usize, u32> {
    const PRIVATE_ANONYMOUS: usize = 0x22;
    let flags = PRIVATE_ANONYMOUS | if at == 0 { 0 } else { call::FIXED_NOREPLACE };
    // SAFETY: a new mapping.
    unsafe { syscall(early::MMAP, [at, len, call::READ_WRITE, flags, usize::MAX, 0]) }
}
