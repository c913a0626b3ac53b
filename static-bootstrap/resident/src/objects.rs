//! The program and the libraries that it starts with, as the dynamic linker knows them; of a statically linked one what the kernel told it.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use sys::object::HEAD;
use sys::page::PAGE;

use super::linker;

/// See [`libraries`].
pub(super) const PARTS: usize = 4;
const LOAD: u32 = 1;
const RELRO: u32 = 0x6474_e552;
const EXECUTE: u32 = 1;
const WRITE: u32 = 2;

/// `struct dl_phdr_info`, as far as it concerns us.
#[repr(C)]
struct Object {
    base: usize,
    name: *const u8,
    headers: *const Header,
    count: u16,
}

/// `Elf64_Phdr`
#[repr(C)]
struct Header {
    kind: u32,
    flags: u32,
    offset: usize,
    address: usize,
    physical: usize,
    in_file: usize,
    in_memory: usize,
    align: usize,
}

/// Pages of a writable segment: those that the file fills lie before the others.
pub(super) struct Writable {
    pub(super) start: usize,
    pub(super) filled: usize,
    pub(super) end: usize,
}

impl Object {
    fn headers(&self) -> &[Header] {
        // SAFETY: the linker says that there are so many, and this is called before any is unloaded.
        unsafe { core::slice::from_raw_parts(self.headers, self.count.into()) }
    }

    fn loaded(&self) -> impl Iterator<Item = &Header> {
        self.headers().iter().filter(|header| header.kind == LOAD)
    }

    /// All that lies between its first byte and its last.
    fn range(&self) -> Range<usize> {
        let start = self.loaded().map(|header| self.base + header.address).min().unwrap_or(0);
        start..self.loaded().map(|header| self.base + header.address + header.in_memory).max().unwrap_or(0)
    }

    fn holds(&self, at: usize) -> bool {
        self.range().contains(&at)
    }
}

/// Program headers of a statically linked program: where, how many, and what is to be added to their addresses.
static HEADERS: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];

/// There is no dynamic linker, but these many headers at this address.
pub(super) fn learn(at: usize, count: usize) {
    const FIXED: u16 = 2;
    let file = at & !(PAGE - 1);
    // SAFETY: where its headers are, is a page of the program.
    let (mark, kind) = unsafe { (*(file as *const [u8; 4]), *((file + 16) as *const u16)) };
    // Else nothing is known of its arrays.
    if mark == *b"\x7fELF" {
        let base = if kind == FIXED { 0 } else { file };
        HEADERS.iter().zip([at, count, base]).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
    }
}

fn alone() -> Option<Object> {
    let [at, count, base] = HEADERS.each_ref().map(|word| word.load(Ordering::Relaxed));
    (at != 0).then_some(Object { base, name: core::ptr::null(), headers: at as *const Header, count: count as u16 })
}

/// Bytes of a statically linked program's thread-local storage.
pub(super) fn thread_local() -> usize {
    const TLS: u32 = 7;
    let find = |object: &Object| {
        let tls = object.headers().iter().find(|header| header.kind == TLS)?;
        Some(tls.in_memory + tls.align)
    };
    alone().as_ref().and_then(find).unwrap_or(0)
}

/// Shows each with its number, the program first.
fn each(look: &mut dyn FnMut(usize, &Object)) {
    extern "C" fn tell(object: &Object, _: usize, state: &mut (usize, &mut dyn FnMut(usize, &Object))) -> i32 {
        (state.1)(state.0, object);
        state.0 += 1;
        0
    }
    if let Some(object) = alone() {
        return look(0, &object);
    }
    type Tell = extern "C" fn(&Object, usize, &mut (usize, &mut dyn FnMut(usize, &Object))) -> i32;
    let at = linker::walker();
    if at != 0 {
        // SAFETY: libc's dl_iterate_phdr, which calls this with what it is given and what it knows.
        let walk = unsafe { core::mem::transmute::<usize, extern "C" fn(Tell, *mut ()) -> i32>(at) };
        let mut state = (0_usize, look);
        walk(tell, (&raw mut state).cast());
    }
}

/// Something of ours.
fn is_ours(object: &Object) -> bool {
    object.holds(each as *const () as usize)
}

/// An object as the dynamic linker has it.
pub(super) struct Loaded {
    /// What is added to its addresses, and where its file begins in memory.
    pub(super) base: usize,
    pub(super) head: usize,
    /// Where it lies.
    pub(super) range: Range<usize>,
    /// Its path, ended by NUL; empty: the program's.
    pub(super) name: *const u8,
    pub(super) is_linker: bool,
}

impl Loaded {
    /// Its headers, and what else is at its beginning.
    pub(super) fn begins(&self) -> &'static [u8; HEAD] {
        // SAFETY: the page that has them, of what stays.
        unsafe { &*(self.head as *const [u8; HEAD]) }
    }
}

/// Shows every object that the program starts with, but ourselves and the kernel's.
pub(super) fn loaded(mut take: impl FnMut(&Loaded)) {
    const KERNELS: &[u8; 10] = b"linux-vdso";
    each(&mut |_, object| {
        // SAFETY: the linker gives a string; it is looked at up to where it differs.
        let is_kernels = KERNELS.iter().enumerate().all(|(nth, byte)| unsafe { *object.name.add(nth) } == *byte);
        if !is_kernels && !is_ours(object) {
            let head = object.headers as usize & !(PAGE - 1);
            take(&Loaded {
                base: object.base,
                head,
                name: object.name,
                range: object.range(),
                is_linker: object.holds(linker::inside()),
            });
        }
    });
}

/// Shows the writable segments of all but ourselves, without what is made read-only after relocation.
pub(super) fn writable(mut take: impl FnMut(Writable)) {
    each(&mut |_, object| {
        if is_ours(object) {
            return;
        }
        let sealed = object.headers().iter().find(|header| header.kind == RELRO);
        let sealed =
            sealed.map_or(0, |header| (object.base + header.address + header.in_memory).next_multiple_of(PAGE));
        for header in object.loaded().filter(|header| header.flags & (WRITE | EXECUTE) == WRITE) {
            let at = object.base + header.address;
            let end = (at + header.in_memory).next_multiple_of(PAGE);
            let start = at & !(PAGE - 1);
            let start = if (start..=end).contains(&sealed) { sealed } else { start };
            take(Writable { start, filled: (at + header.in_file).next_multiple_of(PAGE).clamp(start, end), end });
        }
    });
}

/// The executable segment that an address is in.
pub(super) fn text(at: usize) -> Option<Range<usize>> {
    let mut found = None;
    each(&mut |_, object| {
        let segments = object.loaded().filter(|header| header.flags & EXECUTE != 0);
        let ranges = segments.map(|header| object.base + header.address..object.base + header.address + header.in_file);
        found = ranges.into_iter().find(|range| range.contains(&at)).or_else(|| found.take());
    });
    found
}

/// Parts of the address space in which libraries lie that the program starts with, but neither itself, nor the linker, nor we.
pub(super) fn libraries() -> [Range<usize>; PARTS] {
    let mut others = [const { 0..0 }; 3];
    let is_other = |nth: usize, object: &Object| [nth == 0, object.holds(linker::inside()), is_ours(object)];
    each(&mut |nth, object| {
        for (place, _) in others.iter_mut().zip(is_other(nth, object)).filter(|(_, is)| *is) {
            *place = object.range();
        }
    });
    let mut parts = [const { 0..0 }; PARTS];
    each(&mut |nth, object| {
        let range = object.range();
        if is_other(nth, object) != [false; 3] || range.is_empty() {
            return;
        }
        let with = |part: &Range<usize>| part.start.min(range.start)..part.end.max(range.end);
        let joins = |part: &&mut Range<usize>| {
            let both = with(part);
            part.start < part.end && others.iter().all(|other| other.end <= both.start || other.start >= both.end)
        };
        if let Some(part) = parts.iter_mut().find(joins) {
            *part = with(part);
        } else if let Some(part) = parts.iter_mut().find(|part| part.start == part.end) {
            *part = range;
        }
    });
    parts
}
