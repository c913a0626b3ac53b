//! The auditor (rtld-audit(7)): glibc's dynamic linker asks it where libraries are, before it searches. It answers out of a table in
//! memory that the node's agent made; what is not there and may be the agent's, it asks the agent for, once.
//!
//! No libc, no thread-local storage, no allocator: the linker gives every auditor a namespace of its own, and a libc in there would be a
//! second one. The linker calls from one thread at a time (it holds its own lock); only [`la_symbind64`] may come from several.
//!
//! What is opened instead of a file lies at the store's root followed by the path that the program would have opened. As soon as it
//! is mapped that root is cut off from its name, in place, so that the program, its debugger and `$ORIGIN` see the path that they expect.
#![no_std]

mod door;
mod got;
mod process;

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char};
use core::hint::black_box;

use sys::syscall::map_file;
use sys::table::{ASK_FILE, ASK_PROGRAM, FILE, MARK, STORE_MAX, SUPERSEDED, Table, kind};

use self::door::Door;
use self::process::Process;

/// `LA_SER_ORIG`, `LA_ACT_CONSISTENT`, `LA_FLG_BINDTO | LA_FLG_BINDFROM` (link.h).
const ORIGINAL_NAME: u32 = 1;
const CONSISTENT: u32 = 0;
const BINDINGS: u32 = 3;
/// The first version of the interface that does not send every call through the linker when there is an auditor (glibc 2.35).
const DIRECT_CALLS: u32 = 2;

/// The head of the linker's own structure, which is public (link.h).
#[repr(C)]
pub struct LinkMap {
    addr: usize,
    name: *mut c_char,
    dynamic: *const [usize; 2],
    next: *const LinkMap,
    previous: *const LinkMap,
}

/// The path of the store, put here by the agent when it writes this file.
#[used]
static STORE: [u8; MARK.len() + STORE_MAX] = {
    let mut bytes = [0; MARK.len() + STORE_MAX];
    let mut at = 0;
    while at < MARK.len() {
        bytes[at] = MARK[at];
        at += 1;
    }
    bytes
};

struct Auditor {
    /// The path of the store.
    store: &'static [u8],
    table: Table<'static>,
    /// Not 0 when there is a newer table.
    superseded: *const u32,
    door: Door,
    process: Process,
    /// Number of the program in the table; none: its names are not known.
    program: Option<&'static [u8]>,
    /// Calls go through the linker unless the tables that they go through are repaired.
    repairs: bool,
}

struct Cell(UnsafeCell<Option<Auditor>>);

// SAFETY: written by la_version only, which the linker calls once, before any thread of the program exists.
unsafe impl Sync for Cell {}

static AUDITOR: Cell = Cell(UnsafeCell::new(None));

fn auditor() -> Option<&'static mut Auditor> {
    // SAFETY: the linker's lock is held whenever a function that comes here is called; see the module.
    unsafe { (*AUDITOR.0.get()).as_mut() }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    process::abort()
}

/// The interface that both sides speak; 0: the linker goes on without us.
#[unsafe(no_mangle)]
pub extern "C" fn la_version(version: u32) -> u32 {
    let store = black_box(&STORE).get(MARK.len()..).unwrap_or_default();
    let Some(path) = store.split(|byte| *byte == 0).next().filter(|path| !path.is_empty()) else { return 0 };
    let Some((table, superseded)) = load(path) else { return 0 };
    let mut auditor = Auditor {
        store: path,
        table,
        superseded,
        door: Door::new(path),
        process: Process::look(),
        program: None,
        repairs: version < DIRECT_CALLS,
    };
    auditor.find_program();
    // SAFETY: the linker calls this once, before everything else here.
    unsafe { *AUDITOR.0.get() = Some(auditor) };
    version
}

/// The newest table, and the word that says when it is no longer.
fn load(store: &[u8]) -> Option<(Table<'static>, *const u32)> {
    let bytes = map_file(door::path(store, FILE)?)?;
    // The table has checked that its head is there.
    Some((Table::new(bytes)?, bytes.as_ptr().wrapping_add(SUPERSEDED).cast()))
}

impl Auditor {
    /// Goes over to a newer table, if there is one.
    fn refresh(&mut self) {
        // SAFETY: a word of a mapping that stays.
        if unsafe { self.superseded.read_volatile() } != 0
            && let Some(newer) = load(self.store)
        {
            (self.table, self.superseded) = newer;
        }
    }

    /// Finds the program in the table; one that lies where the agent can know it is asked for.
    fn find_program(&mut self) {
        let (program, paths) = (self.process.program(), self.process.library_path());
        let Some(paths) = paths else { return };
        let mut found = self.table.get(&[kind::PROGRAM, program, paths]);
        if found.is_none() && self.table.is_shared(program) && self.door.ask(ASK_PROGRAM, &[program, paths]).is_some() {
            self.refresh();
            found = self.table.get(&[kind::PROGRAM, program, paths]);
        }
        let Some(found) = found else { return };
        let mut words = found.split(|byte| *byte == b' ');
        let (program, needed) = (words.next(), words.next());
        // Under the same path, as in a container's image, may be another one.
        if let (Some(device), Some(number)) = (words.next(), words.next())
            && !self.process.is(device, number)
        {
            return;
        }
        self.program = program;
        if let Some(needed) = needed {
            self.process.make_room(needed);
        }
    }

    /// What to open instead of an absolute path; without an answer, the path itself. It may begin with the store's root. `one_of`: other
    /// paths are tried after it, and the linker names none of them should it find nothing.
    fn path(&mut self, path: &'static CStr, one_of: bool) -> *const c_char {
        let original = self.original(path);
        match self.staged(original.to_bytes(), one_of) {
            Some(staged) => staged,
            None => original.as_ptr(),
        }
    }

    fn staged(&mut self, path: &[u8], one_of: bool) -> Option<*const c_char> {
        if let Some(staged) = self.table.get(&[kind::PATH, path]) {
            return Some(staged.as_ptr().cast());
        }
        if !self.table.is_shared(path) {
            return None;
        }
        let answer = self.door.ask(ASK_FILE, &[path])?;
        let is_there = answer.to_bytes().starts_with(self.table.root());
        (is_there || one_of && !answer.is_empty()).then_some(answer.as_ptr().cast())
    }

    /// The path without the store's root.
    fn original(&self, path: &'static CStr) -> &'static CStr {
        let root = self.table.root();
        match path.to_bytes_with_nul().strip_prefix(root) {
            Some(rest) if rest.first() == Some(&b'/') => CStr::from_bytes_with_nul(rest).unwrap_or(path),
            _ => path,
        }
    }

    /// `$ORIGIN` at the beginning of a name, put into words: the linker would take the place in the store for it.
    fn beside(&mut self, name: &CStr, loader: &[u8]) -> Option<*const c_char> {
        let name = name.to_bytes();
        let rest = name.strip_prefix(b"$ORIGIN").or_else(|| name.strip_prefix(b"${ORIGIN}"))?;
        let directory = loader.get(..loader.iter().rposition(|byte| *byte == b'/')?)?;
        if rest.first() != Some(&b'/') || rest.contains(&b'$') || directory.is_empty() {
            return None;
        }
        let path = door::join(&[directory, rest])?;
        let path: &'static CStr = path;
        self.staged(path.to_bytes(), false).or(Some(path.as_ptr()))
    }

    /// What to open instead of a path that begins in the working directory: else the original would be loaded beside what is staged of it.
    fn below(&mut self, name: &[u8]) -> Option<*const c_char> {
        let mut rest = name;
        while let Some(shorter) = rest.strip_prefix(b"./") {
            rest = shorter;
        }
        let directory = process::directory();
        let path: &'static CStr = door::join(&[Some(directory).filter(|path| !path.is_empty())?, b"/", rest])?;
        self.staged(path.to_bytes(), false)
    }
}

/// A name is looked for. Returns it, or what to look for instead.
///
/// # Safety
/// Called by the linker: `name` is a string that lives until it goes on, `cookie` is what [`la_objopen`] was given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_objsearch(name: *const c_char, cookie: *const *const LinkMap, flag: u32) -> *const c_char {
    let Some(auditor) = auditor() else { return name };
    auditor.refresh();
    // SAFETY: see above; 'static because it lives longer than this call, and nothing keeps it.
    let text: &'static CStr = unsafe { CStr::from_ptr(name) };
    let bytes = text.to_bytes();
    if bytes.first() == Some(&b'/') && !(flag == ORIGINAL_NAME && bytes.contains(&b'$')) {
        return auditor.path(text, flag != ORIGINAL_NAME);
    }
    if flag != ORIGINAL_NAME {
        return name;
    }
    // SAFETY: a cookie is the object's own structure until an auditor changes it, which we do not.
    let loader = unsafe { cookie.as_ref().and_then(|map| map.as_ref()).map(|map| map.name()) };
    let loader = loader.unwrap_or_default();
    if let Some(program) = auditor.program
        && let Some(path) = auditor.table.get(&[kind::NAME, program, loader, bytes])
    {
        return path.as_ptr().cast();
    }
    if bytes.first() == Some(&b'$') {
        let loader = if loader.is_empty() { auditor.process.program() } else { loader };
        return auditor.beside(text, loader).unwrap_or(name);
    }
    if bytes.contains(&b'/') && !bytes.contains(&b'$') {
        return auditor.below(bytes).unwrap_or(name);
    }
    name
}

impl LinkMap {
    /// Its path; nothing for the program.
    fn name(&self) -> &'static [u8] {
        if self.name.is_null() {
            return &[];
        }
        // SAFETY: the linker's string, which lives as long as the object; our callers do not keep it.
        unsafe { CStr::from_ptr(self.name) }.to_bytes()
    }
}

/// An object was mapped.
///
/// # Safety
/// Called by the linker: `map` is the object's structure, and nobody else looks at it now.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_objopen(map: *mut LinkMap, _namespace: isize, _cookie: *mut usize) -> u32 {
    let (Some(auditor), false) = (auditor(), map.is_null()) else { return 0 };
    // SAFETY: see above.
    let name = unsafe { (*map).name };
    if !name.is_null() {
        let root = auditor.table.root();
        // SAFETY: a string of the linker's own heap; it gets shorter.
        unsafe {
            let text = CStr::from_ptr(name).to_bytes_with_nul();
            if text.strip_prefix(root).is_some_and(|rest| rest.first() == Some(&b'/')) {
                core::ptr::copy(name.add(root.len()), name, text.len() - root.len());
            }
        }
    }
    if auditor.repairs { BINDINGS } else { 0 }
}

/// Objects were added or removed.
///
/// # Safety
/// Called by the linker: the cookie of the first object of a namespace.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_activity(cookie: *const *const LinkMap, flag: u32) {
    if flag == CONSISTENT && auditor().is_some_and(|auditor| auditor.repairs) {
        // SAFETY: see above; the linker's list is at rest.
        unsafe {
            let mut map = cookie.as_ref().and_then(|map| map.as_ref());
            while let Some(object) = map {
                got::repair(object);
                map = object.next.as_ref();
            }
        }
    }
}

/// A name was bound for the first time, in an object that was not repaired yet (one that the program opened itself): by versions before
/// [`DIRECT_CALLS`] only, since the others are not told to.
///
/// # Safety
/// Called by the linker: `symbol` is the definition, the cookies are those of the two objects.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_symbind64(
    symbol: *const Symbol,
    _index: u32,
    user: *const *const LinkMap,
    _definer: *const *const LinkMap,
    _flags: *mut u32,
    _name: *const c_char,
) -> usize {
    // SAFETY: see above.
    unsafe {
        if let Some(object) = user.as_ref().and_then(|map| map.as_ref()) {
            got::repair(object);
        }
        (*symbol).value
    }
}

/// `Elf64_Sym` (gABI, chapter 4); its value is the address here.
#[repr(C)]
pub struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}
