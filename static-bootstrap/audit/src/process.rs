//! What this process is: its program, and the environment that it was started with.

use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::slice;

use sys::syscall::{nr, read_file, syscall};

const AT_FDCWD: usize = -100_isize as usize;
const SIGKILL: usize = 9;
const PATH_MAX: usize = 4096;
const PROT_READ_WRITE: usize = 3;
const MAP_PRIVATE_ANONYMOUS: usize = 0x22;
/// The fields of /proc/PID/stat (proc(5)), counted from the one after the name.
const ARGUMENTS: usize = 48 - 3;
const TUNABLES: &[u8] = b"GLIBC_TUNABLES=";
/// How every setting in it begins.
const TUNABLE: &[u8] = b"glibc.";
const STATIC_TLS: &[u8] = b"glibc.rtld.optional_static_tls=";

struct Place(UnsafeCell<[u8; PATH_MAX]>);

// SAFETY: written before any thread of the program exists, or under the linker's lock.
unsafe impl Sync for Place {}

static PROGRAM: Place = Place(UnsafeCell::new([0; PATH_MAX]));
static DIRECTORY: Place = Place(UnsafeCell::new([0; PATH_MAX]));

impl Place {
    /// Where one of the kernel's links leads.
    fn link(&'static self, link: &CStr) -> &'static [u8] {
        // SAFETY: a string, and a place of this length, of which one byte stays zero.
        let len = unsafe {
            let (link, place) = (link.as_ptr() as usize, self.0.get() as usize);
            syscall(nr::READLINKAT, [AT_FDCWD, link, place, PATH_MAX - 1, 0, 0])
        };
        // SAFETY: nobody writes there before what is returned here is done with.
        unsafe { &*self.0.get() }.get(..len.unwrap_or(0)).unwrap_or_default()
    }
}

/// The working directory; the next one overwrites it. Empty: not known.
pub(super) fn directory() -> &'static [u8] {
    DIRECTORY.link(c"/proc/self/cwd")
}

/// See the module.
pub(super) struct Process {
    /// Without symbolic links.
    program: &'static [u8],
    /// Strings, each ended by NUL, as the kernel put them there; `None`: not known.
    arguments: Option<&'static [u8]>,
    environment: Option<&'static [u8]>,
}

impl Process {
    pub(super) fn look() -> Process {
        let program = PROGRAM.link(c"/proc/self/exe");
        let (arguments, environment) = strings();
        Process { program, arguments, environment }
    }

    pub(super) fn program(&self) -> &'static [u8] {
        self.program
    }

    /// Whether its program is the file with this device and inode number (in decimal).
    pub(super) fn is(&self, device: &[u8], inode: &[u8]) -> bool {
        let mut stat = [0_u64; 18];
        // SAFETY: a string constant, and room for a `struct stat`, whose first words are these on all architectures here.
        let known = unsafe {
            let (exe, into) = (c"/proc/self/exe".as_ptr() as usize, stat.as_mut_ptr() as usize);
            syscall(nr::NEWFSTATAT, [AT_FDCWD, exe, into, 0, 0, 0])
        };
        known.is_ok()
            && stat.first().is_some_and(|is| *is == number(device) as u64)
            && stat.get(1).is_some_and(|is| *is == number(inode) as u64)
    }

    /// `LD_LIBRARY_PATH`, as the linker takes it; `None`: not known.
    pub(super) fn library_path(&self) -> Option<&'static [u8]> {
        self.environment.map(|environment| last(environment, b"LD_LIBRARY_PATH=").unwrap_or_default())
    }

    /// Starts the program again with room for `needed` bytes (in decimal) of static thread-local storage, unless it was given that much. The
    /// linker lays that room out before it looks for libraries, so what a parent did not foresee can only be had so.
    pub(super) fn make_room(&self, needed: &'static [u8]) {
        let (Some(arguments), Some(environment)) = (self.arguments, self.environment) else { return };
        let given = tunables(environment).filter_map(|part| part.strip_prefix(STATIC_TLS)).last();
        if number(given.unwrap_or_default()) >= number(needed) {
            return;
        }
        let count = |strings: &[u8]| strings.iter().filter(|byte| **byte == 0).count();
        let room = count(arguments) + count(environment) + 3;
        let others: usize = tunables(environment).map(|part| part.len() + 1).sum();
        let text = TUNABLES.len() + others + STATIC_TLS.len() + needed.len() + 1;
        let size = room * size_of::<usize>() + text;
        // SAFETY: a new mapping; the pointers and the text below fit in it; every string ends with NUL and stays where it is.
        unsafe {
            let flags = [0, size, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, usize::MAX, 0];
            let Ok(start) = syscall(nr::MMAP, flags) else { return };
            let mut text = (start as *mut usize).add(room).cast::<u8>();
            let own = text as usize;
            let mut append = |part: &[u8]| {
                text.copy_from_nonoverlapping(part.as_ptr(), part.len());
                text = text.add(part.len());
            };
            append(TUNABLES);
            for part in tunables(environment) {
                append(part);
                append(b":");
            }
            append(STATIC_TLS);
            append(needed);
            let mut at = start as *mut usize;
            let mut put = |pointer: usize| {
                *at = pointer;
                at = at.add(1);
            };
            each(arguments).for_each(|text| put(text.as_ptr() as usize));
            put(0);
            let rest = each(environment).filter(|text| !text.starts_with(TUNABLES) && !text.starts_with(TUNABLE));
            rest.for_each(|text| put(text.as_ptr() as usize));
            put(own);
            let environment = (start as *const usize).add(count(arguments) + 1) as usize;
            // Comes back only when it fails; then the linker will say what is missing.
            let _ = syscall(nr::EXECVE, [self.program.as_ptr() as usize, start, environment, 0, 0, 0]);
            let _ = syscall(nr::MUNMAP, [start, size, 0, 0, 0, 0]);
        }
    }
}

/// The settings of `GLIBC_TUNABLES`. Linkers before glibc 2.38 cut that string up where it stands: what follows its first setting looks
/// like variables of their own.
fn tunables(environment: &'static [u8]) -> impl Iterator<Item = &'static [u8]> {
    let settings = |text: &'static [u8]| text.strip_prefix(TUNABLES).or(text.starts_with(TUNABLE).then_some(text));
    let parts = each(environment).filter_map(settings).flat_map(|text| text.split(|byte| *byte == b':'));
    parts.filter(|part| !part.is_empty())
}

/// The strings of a block, without their ends.
fn each(block: &'static [u8]) -> impl Iterator<Item = &'static [u8]> {
    block.split_inclusive(|byte| *byte == 0).filter_map(|text| text.strip_suffix(&[0]))
}

/// The last value of a variable: that one counts for the linker.
fn last(environment: &'static [u8], name: &[u8]) -> Option<&'static [u8]> {
    each(environment).filter_map(|text| text.strip_prefix(name)).last()
}

fn number(digits: &[u8]) -> usize {
    digits
        .iter()
        .take_while(|b| b.is_ascii_digit())
        .fold(0, |n: usize, b| n.saturating_mul(10).saturating_add((b - b'0').into()))
}

/// The blocks of arguments and environment on this process's stack.
fn strings() -> (Option<&'static [u8]>, Option<&'static [u8]>) {
    let mut buffer = [0; 1024];
    let Some(text) = read_file(c"/proc/self/stat", &mut buffer) else { return (None, None) };
    // The name may hold anything, but no more closing brackets follow it.
    let Some(end) = text.iter().rposition(|byte| *byte == b')') else { return (None, None) };
    let mut fields = text.get(end + 2..).unwrap_or_default().split(|byte| *byte == b' ').skip(ARGUMENTS).map(number);
    let mut block = || {
        let (start, end) = (fields.next()?, fields.next()?);
        // SAFETY: the kernel's own account of its stack, which lives as long as the process.
        (start != 0 && start < end).then(|| unsafe { slice::from_raw_parts(start as *const u8, end - start) })
    };
    (block(), block())
}

/// Ends the process, as libc's abort would; for a proven impossibility.
pub(super) fn abort() -> ! {
    loop {
        // SAFETY: integer arguments only.
        unsafe {
            let process = syscall(nr::GETPID, [0; 6]).unwrap_or(0);
            let _ = syscall(nr::KILL, [process, SIGKILL, 0, 0, 0, 0]);
        }
    }
}
