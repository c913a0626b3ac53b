//! The system calls of libc, rewritten where they are made: each becomes a jump to a stub of its own, which leaves for [`quick::entry`] or makes the
//! call at once. What is found in no known form is left, and comes by way of [`dispatch`].

use core::arch::naked_asm;
use core::arch::x86_64::{__m128i, _mm_and_si128, _mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_set1_epi8};
use core::mem::offset_of;
use core::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use sys::extents::Head;
use sys::page::PAGE;
use sys::syscall::{nr as early, syscall};

use super::image::{self, Text};
use super::kernel::{GATE, nr};
use super::{process, quick, table, worker};
use crate::{call, dispatch};

/// Bytes from [`BEGIN`] on.
pub(super) const AREA: usize = 128 << 10;
/// Sites of a libc, at least: with fewer it is none that we know.
const FEW: usize = 300;
pub(super) const CALLS: usize = 512;

/// Nothing to do; wait first for what is pending, if anything is; look closer.
const HARMLESS: u8 = 0;
const SETTLE: u8 = 1;
const LOOK: u8 = 2;
/// The first argument is a descriptor: look closer unless it is known not to concern us.
const FILE: u8 = 3;
/// Tells of a file: look closer unless nobody on the node keeps any, so that nothing is pending, and nothing is missing.
const TELLS: u8 = 4;

static CLASS: [u8; CALLS] = classes();

const fn classes() -> [u8; CALLS] {
    let mut all = [SETTLE; CALLS];
    // Memory, clocks, sleeping, numbers of processes; what waits or only hears: poll select access recvfrom recvmsg getcwd getdents
    // readlink epoll_wait ...
    let harmless = [
        7, 10, 11, 12, 21, 23, 24, 25, 27, 28, 35, 39, 41, 45, 47, 51, 52, 55, 63, 78, 79, 89, 95, 96, 98, 99, 100,
        102, 104, 107, 108, 110, 111, 115, 118, 120, 121, 124, 127, 131, 137, 138, 158, 186, 187, 202, 201, 203, 204,
        213, 217, 218, 221, 228, 229, 230, 232, 233, 267, 269, 273, 291, 309, 318, 324, 334, 439,
    ];
    let mut nth = 0;
    while nth < harmless.len() {
        all[harmless[nth]] = HARMLESS;
        nth += 1;
    }
    let file = [nr::READ, nr::WRITE, nr::FSTAT, nr::LSEEK, nr::IOCTL, nr::PREAD64, nr::PWRITE64, nr::READV, nr::WRITEV];
    nth = 0;
    while nth < file.len() {
        all[file[nth]] = FILE;
        nth += 1;
    }
    let tells = [nr::STAT, nr::LSTAT, nr::NEWFSTATAT, nr::STATX];
    nth = 0;
    while nth < tells.len() {
        all[tells[nth]] = TELLS;
        nth += 1;
    }
    let look = [
        nr::OPEN,
        nr::CLOSE,
        nr::MMAP,
        nr::SHMAT,
        nr::WAIT4,
        nr::WAITID,
        nr::RT_SIGACTION,
        nr::RT_SIGPROCMASK,
        nr::RT_SIGSUSPEND,
        nr::PPOLL,
        nr::PSELECT6,
        nr::EPOLL_PWAIT,
        nr::DUP,
        nr::DUP2,
        nr::SENDFILE,
        nr::SENDMSG,
        nr::CLONE,
        nr::FORK,
        nr::VFORK,
        nr::EXECVE,
        nr::FCNTL,
        nr::FLOCK,
        nr::FSYNC,
        nr::FDATASYNC,
        nr::TRUNCATE,
        nr::FTRUNCATE,
        nr::CREAT,
        nr::PRCTL,
        nr::SETRLIMIT,
        nr::IO_SETUP,
        nr::EXIT_GROUP,
        nr::OPENAT,
        nr::UNSHARE,
        nr::SPLICE,
        nr::SYNC,
        nr::SYNCFS,
        nr::SYNC_FILE_RANGE,
        nr::FALLOCATE,
        nr::DUP3,
        nr::PREADV,
        nr::PWRITEV,
        nr::PRLIMIT64,
        nr::SENDMMSG,
        nr::EXECVEAT,
        nr::COPY_FILE_RANGE,
        nr::PREADV2,
        nr::PWRITEV2,
        nr::IO_URING_SETUP,
        nr::CLONE3,
        nr::CLOSE_RANGE,
        nr::OPENAT2,
    ];
    nth = 0;
    while nth < look.len() {
        all[look[nth]] = LOOK;
        nth += 1;
    }
    all
}

/// Something is pending, or an offset is kept here ([`super::others`]).
pub(super) static DIRTY: AtomicU8 = AtomicU8::new(0);
/// The layer has stepped aside.
pub(super) static OFF: AtomicU8 = AtomicU8::new(0);
/// The part that may make system calls.
pub(super) static BEGIN: AtomicUsize = AtomicUsize::new(0);

/// What the stubs find at the beginning of the area.
const POINTERS: usize = 4;
const COMMON: usize = 0;
const CREATE: usize = 1;
const THREAD: usize = 2;
const AFTER: usize = 3;
/// Apart from each other: the ways on after a process or thread was made.
const WAY: usize = 32;

/// From the area's beginning: `syscall; ret`, and what a signal's handler returns to.
const PASS: usize = POINTERS * 8;
const RESTORE: usize = PASS + 3;
/// Places below libc's text that an area is looked for at, so far apart: so few that programs meet at the same.
const PLACES: u8 = 7;
const APART: usize = 256 << 20;

/// Writes instructions one after the other.
struct Emitter {
    base: usize,
    at: usize,
}

impl Emitter {
    fn put(&mut self, bytes: &[u8]) {
        // SAFETY: `install` looks at the room for every stub.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at as *mut u8, bytes.len()) };
        self.at += bytes.len();
    }

    /// An instruction that ends with the distance to `target`.
    fn relative(&mut self, code: &[u8], target: usize) {
        self.put(code);
        let distance = target.wrapping_sub(self.at + 4) as u32;
        self.put(&distance.to_le_bytes());
    }

    fn leave(&mut self, pointer: usize) {
        self.relative(&[0xff, 0x25], self.base + pointer * 8);
    }
}

/// A system call in libc.
struct Site {
    start: usize,
    /// Where it goes on.
    back: usize,
    number: Option<usize>,
    /// What follows the call and is replaced, too.
    rest: usize,
}

fn bytes<const N: usize>(at: usize) -> [u8; N] {
    // SAFETY: text of libc, not at its edge.
    unsafe { (at as *const [u8; N]).read() }
}

/// How the call whose instruction is at `at` can be replaced.
fn site(at: usize) -> Option<Site> {
    let number = u32::from_le_bytes(bytes(at - 4)) as usize;
    // The call itself stays: who jumps to it comes by way of [`dispatch`].
    if bytes::<1>(at - 5) == [0xb8] && number < CALLS {
        return Some(Site { start: at - 5, back: at + 2, number: Some(number), rest: 0 });
    }
    let rest = if matches!(bytes::<6>(at + 2), [0x48, 0x3d, 0 | 1, 0xf0, 0xff, 0xff]) {
        6
    } else if bytes::<5>(at + 2) == [0x3d, 0, 0xf0, 0xff, 0xff] {
        5
    } else {
        return None;
    };
    // Nobody may jump to the second of the two instructions. Jumps over longer distances within a function to such a place do not exist in what was looked at.
    let found = Site { start: at, back: at + 2 + rest, number: None, rest };
    (!is_target(at + 2)).then_some(found)
}

/// Whether what looks like a short jump leads there. Without an exit from the loop, so that 16 places are looked at at once.
fn is_target(second: usize) -> bool {
    let text: [u8; 257] = bytes(second - 129);
    (0..=u8::MAX).fold(false, |any, nth| {
        let [code, distance] = [text[usize::from(nth)], text[usize::from(nth) + 1]];
        any | (matches!(code, 0x70..=0x7f | 0xeb) & (distance == 127u8.wrapping_sub(nth)))
    })
}

/// The text of the object that has this function.
fn text(function: usize) -> Option<Text> {
    const LOAD: u32 = 1;
    const NOTE: u32 = 4;
    let mut base = function & !(PAGE - 1);
    // SAFETY: objects are mapped without gaps from their header to their text.
    while unsafe { (base as *const [u8; 4]).read() } != *b"\x7fELF" {
        base -= PAGE;
    }
    // SAFETY: the header of an ELF file, and what it says of its segments (elf(5)): kind and flags, offset, address, and bytes.
    let segments = unsafe {
        let offset = *((base + 32) as *const u64) as usize;
        let count = *((base + 56) as *const u16) as usize;
        (0..count).map(move |nth| {
            let at = base + offset + nth * 56;
            let [kind, flags] = *(at as *const [u32; 2]);
            let [offset, address, bytes] = [8, 16, 32].map(|word| *((at + word) as *const u64) as usize);
            (kind, flags, offset, base + address, base + address + bytes)
        })
    };
    // Aligned to 4 bytes; others are to 8.
    let id = segments.clone().rfind(|(kind, ..)| *kind == NOTE);
    let notes = id.map_or((0, 0), |(_, _, _, from, to)| (from, to));
    segments.clone().find_map(|(kind, flags, offset, begin, end)| {
        let is = kind == LOAD && flags & 1 != 0 && (begin..end).contains(&function);
        is.then_some(Text { begin, end, base, offset, notes })
    })
}

/// Calls `visit` with the address of every `syscall` instruction, and of what looks like one.
fn each(begin: usize, end: usize, mut visit: impl FnMut(usize)) {
    let mut at = begin + 256;
    while at + 256 < end {
        // SAFETY: within the text; SSE2 is part of x86-64.
        let mut found = unsafe {
            let load = |at: usize| _mm_loadu_si128(at as *const __m128i);
            let (first, second) = (_mm_set1_epi8(0x0f), _mm_set1_epi8(0x05));
            _mm_movemask_epi8(_mm_and_si128(_mm_cmpeq_epi8(load(at), first), _mm_cmpeq_epi8(load(at + 1), second)))
        };
        while found != 0 {
            visit(at + found.trailing_zeros() as usize);
            found &= found - 1;
        }
        at += 16;
    }
}

/// Rewrites libc, of which this is a function; `may_make`: it can make a file of it.
///
/// # Errors
/// It is not as we know it; an errno.
pub(super) fn install(function: usize, may_make: bool) -> Result<(), u32> {
    let text = text(function).ok_or(call::EINVAL)?;
    let base = shared(&text, may_make).map_or_else(|| alone(&text), Ok)?;
    let pointers: [usize; POINTERS] = [
        quick::entry as *const () as usize,
        create as *const () as usize,
        thread as *const () as usize,
        after as *const () as usize,
    ];
    // SAFETY: the beginning of the area, which is ours.
    unsafe { (base as *mut [usize; POINTERS]).write(pointers) };
    GATE.store(base + PASS, Ordering::Relaxed);
    dispatch::RESTORE.store(base + RESTORE, Ordering::Relaxed);
    BEGIN.store(base, Ordering::Relaxed);
    protect(base, AREA, 5)
}

fn protect(at: usize, len: usize, protection: usize) -> Result<(), u32> {
    // SAFETY: libc's text, or the area; nobody relies on that it cannot be written meanwhile, and no other thread exists.
    unsafe { syscall(early::MPROTECT, [at, len, protection, 0, 0, 0]) }.map(drop)
}

/// The same as others: where the area is, which can be written.
fn shared(text: &Text, may_make: bool) -> Option<usize> {
    let first = text.first();
    let places = (1..=PLACES).map(|nth| (nth, first.wrapping_sub(usize::from(nth) * APART)));
    places.clone().find_map(|(nth, base)| image::take(text, base, nth).then_some(base)).or_else(|| {
        let (nth, base) = places.clone().find(|(_, base)| may_make && is_free(*base))?;
        let end = text.end - text.first();
        let begin = text.begin - text.first();
        image::make(text, base, nth, |copy, area| rewrite(copy + begin, copy + end, area))?;
        image::take(text, base, nth).then_some(base)
    })
}

/// In this program's memory alone.
fn alone(text: &Text) -> Result<usize, u32> {
    let base = area(text.begin, text.end)?;
    protect(text.first(), text.len(), 7)?;
    let known = rewrite(text.begin, text.end, base);
    protect(text.first(), text.len(), 5)?;
    if known { Ok(base) } else { Err(call::EINVAL) }
}

/// Rewrites a text, with stubs at `base`; false: it is none that we know.
fn rewrite(begin: usize, end: usize, base: usize) -> bool {
    let mut code = Emitter { base, at: base + PASS };
    code.put(&[0x0f, 0x05, 0xc3]);
    // mov rax, rt_sigreturn; syscall: what unwinders and debuggers know by these bytes
    code.put(&[0x48, 0xc7, 0xc0, nr::RT_SIGRETURN as u8, 0, 0, 0, 0x0f, 0x05]);
    let mut count = 0;
    each(begin, end, |at| {
        if let Some(site) = site(at).filter(|_| code.at + 256 < base + AREA) {
            let stub = code.at;
            emit(&mut code, &site);
            let mut jump = Emitter { base, at: site.start };
            jump.relative(&[0xe9], stub);
            if site.number.is_none() {
                (jump.at..site.back).for_each(|_| jump.put(&[0xcc]));
            }
            count += 1;
        }
    });
    count >= FEW
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

/// Memory from which libc can be reached by a jump.
fn area(begin: usize, end: usize) -> Result<usize, u32> {
    const STEP: usize = 1 << 20;
    let near = (1..1024).flat_map(|nth| [(end & !(STEP - 1)) + nth * STEP, (begin & !(STEP - 1)) - nth * STEP]);
    for at in near {
        if map(at, AREA) == Ok(at) {
            return Ok(at);
        }
    }
    Err(call::ENOMEM)
}

/// Whether there is room for an area.
fn is_free(base: usize) -> bool {
    // SAFETY: ours, if it came to be.
    map(base, AREA) == Ok(base) && unsafe { syscall(early::MUNMAP, [base, AREA, 0, 0, 0, 0]) }.is_ok()
}

/// Fresh memory there, if nothing is.
fn map(at: usize, len: usize) -> Result<usize, u32> {
    const PRIVATE_ANONYMOUS: usize = 0x22;
    let flags = PRIVATE_ANONYMOUS | if at == 0 { 0 } else { call::FIXED_NOREPLACE };
    // SAFETY: a new mapping.
    unsafe { syscall(early::MMAP, [at, len, call::READ_WRITE, flags, usize::MAX, 0]) }
}

fn emit(code: &mut Emitter, site: &Site) {
    let back = site.back;
    let rest: [u8; 6] = bytes(site.start + 2);
    if let Some(number) = site.number {
        code.put(&[0xb8]);
        code.put(&(number as u32).to_le_bytes());
        if CLASS[number] == HARMLESS {
            code.put(&[0x0f, 0x05]);
            return code.relative(&[0xe9], back);
        }
        if matches!(number, nr::CLONE | nr::CLONE3 | nr::VFORK | nr::FORK) {
            return emit_creation(code, back);
        }
    }
    // lea rcx, the way on; jmp common
    code.relative(&[0x48, 0x8d, 0x0d], code.at + 7 + 6);
    code.leave(COMMON);
    code.put(&[0x0f, 0x05]);
    code.put(&rest[..site.rest]);
    code.relative(&[0xe9], back);
}

/// What is made goes on with a stack of its own: four ways on, of which [`create`] chooses one.
fn emit_creation(code: &mut Emitter, back: usize) {
    code.relative(&[0x48, 0x8d, 0x0d], code.at + 7 + 6);
    code.leave(CREATE);
    let first = code.at;
    let way = |code: &mut Emitter, nth: usize| {
        code.at = first + nth * WAY;
        code.put(&[0x0f, 0x05]);
    };
    way(code, process::PLAIN);
    code.relative(&[0xe9], back);
    // test rax, rax; jne back; lea rcx, back; jmp
    way(code, process::THREAD);
    code.put(&[0x48, 0x85, 0xc0]);
    code.relative(&[0x0f, 0x85], back);
    code.relative(&[0x48, 0x8d, 0x0d], back);
    code.leave(THREAD);
    // The parent, when the child has gone its own way.
    way(code, process::BORROWS);
    code.put(&[0x48, 0x85, 0xc0]);
    code.relative(&[0x0f, 0x84], back);
    code.relative(&[0x48, 0x8d, 0x0d], back);
    code.leave(AFTER);
    // Both.
    way(code, process::FORKS);
    code.relative(&[0x48, 0x8d, 0x0d], back);
    code.leave(AFTER);
    code.at = first + 4 * WAY;
}

// Saves what a system call keeps: all registers but rax, rcx and r11; and what lies below the stack. Upper halves of vector registers nobody
// here touches. Leaves at [rbp - 8 ..]: rcx, rdi, rsi, rdx, r10, r8, r9, rax.
macro_rules! saving {
    ($($between:literal),*) => {
        concat!(
            "lea rsp, [rsp - 128]\n push rbp\n mov rbp, rsp\n push rcx\n push rdi\n push rsi\n push rdx\n push r10\n push r8\n push r9\n push rax\n",
            "sub rsp, 264\n and rsp, -16\n",
            "movaps [rsp], xmm0\n movaps [rsp + 16], xmm1\n movaps [rsp + 32], xmm2\n movaps [rsp + 48], xmm3\n",
            "movaps [rsp + 64], xmm4\n movaps [rsp + 80], xmm5\n movaps [rsp + 96], xmm6\n movaps [rsp + 112], xmm7\n",
            "movaps [rsp + 128], xmm8\n movaps [rsp + 144], xmm9\n movaps [rsp + 160], xmm10\n movaps [rsp + 176], xmm11\n",
            "movaps [rsp + 192], xmm12\n movaps [rsp + 208], xmm13\n movaps [rsp + 224], xmm14\n movaps [rsp + 240], xmm15\n",
            $($between, "\n",)*
            "movaps xmm0, [rsp]\n movaps xmm1, [rsp + 16]\n movaps xmm2, [rsp + 32]\n movaps xmm3, [rsp + 48]\n",
            "movaps xmm4, [rsp + 64]\n movaps xmm5, [rsp + 80]\n movaps xmm6, [rsp + 96]\n movaps xmm7, [rsp + 112]\n",
            "movaps xmm8, [rsp + 128]\n movaps xmm9, [rsp + 144]\n movaps xmm10, [rsp + 160]\n movaps xmm11, [rsp + 176]\n",
            "movaps xmm12, [rsp + 192]\n movaps xmm13, [rsp + 208]\n movaps xmm14, [rsp + 224]\n movaps xmm15, [rsp + 240]\n",
            "mov rcx, [rbp - 8]\n mov rdi, [rbp - 16]\n mov rsi, [rbp - 24]\n mov rdx, [rbp - 32]\n mov r10, [rbp - 40]\n",
            "mov r8, [rbp - 48]\n mov r9, [rbp - 56]\n mov rsp, rbp\n pop rbp\n lea rsp, [rsp + 128]\n"
        )
    };
}

/// All calls but quick ones: number in rax, the stub's own call in rcx.
#[unsafe(naked)]
pub(super) extern "C" fn normal() {
    naked_asm!(
        "cmp rax, {calls}",
        "jae 9f",
        "lea r11, [rip + {class}]",
        "movzx r11d, byte ptr [r11 + rax]",
        "cmp r11d, {settle}",
        "jb 9f",
        "je 2f",
        "cmp r11d, {file}",
        "ja 4f",
        "jne 3f",
        "cmp rdi, {descriptors}",
        "jae 3f",
        "lea r11, [rip + {descriptor}]",
        "cmp word ptr [r11 + rdi * 2], {other}",
        "jne 3f",
        "2:",
        "cmp byte ptr [rip + {dirty}], 0",
        "je 9f",
        "3: cmp byte ptr [rip + {off}], 0",
        "jne 9f",
        saving!("mov rdi, rax", "lea rsi, [rbp - 64]", "call {dispatch}"),
        // Over its own call.
        "add rcx, 2",
        "9: jmp rcx",
        "4: mov r11, [rip + {head}]",
        "test r11, r11",
        "jz 3b",
        "cmp dword ptr [r11 + {owned}], 0",
        "jne 3b",
        "cmp dword ptr [r11 + {lost}], 0",
        "je 2b",
        "jmp 3b",
        calls = const CALLS,
        settle = const SETTLE,
        file = const FILE,
        descriptors = const table::DESCRIPTORS,
        descriptor = sym table::DESCRIPTOR,
        head = sym worker::AT,
        owned = const offset_of!(Head, owned),
        lost = const offset_of!(Head, lost),
        other = const table::OTHER as i16,
        class = sym CLASS,
        dirty = sym DIRTY,
        off = sym OFF,
        dispatch = sym dispatch,
    )
}

pub(super) use saving;

/// The same where something is made; the way on is chosen, and the call made there.
#[unsafe(naked)]
extern "C" fn create() {
    naked_asm!(
        saving!("mov rdi, rax", "lea rsi, [rbp - 64]", "call {before}", "mov r11, rax", "mov rax, [rbp - 64]"),
        "shl r11, {shift}",
        "add rcx, r11",
        "jmp rcx",
        shift = const WAY.trailing_zeros(),
        before = sym before,
    )
}

/// After it: the result in rax stays.
#[unsafe(naked)]
extern "C" fn after() {
    naked_asm!(
        saving!("mov rdi, rax", "call {after}", "mov rax, [rbp - 64]"),
        "jmp rcx",
        after = sym process::after,
    )
}

/// A new thread, on its stack.
#[unsafe(naked)]
extern "C" fn thread() {
    naked_asm!(saving!("call {begin}", "xor eax, eax"), "jmp rcx", begin = sym dispatch::begin_thread)
}

/// Registers as [`saving`] leaves them, from the last: rax, r9, r8, r10, rdx, rsi, rdi.
fn arguments(registers: *const [usize; 7]) -> [usize; 6] {
    // SAFETY: the callers' stack. One by one, as they were pushed: a wider read waits until the stores are done.
    core::array::from_fn(|nth| unsafe { registers.cast::<usize>().add(6 - nth).read_volatile() })
}

extern "C" fn dispatch(number: usize, registers: *const [usize; 7]) -> isize {
    super::dispatch(number, arguments(registers))
}

extern "C" fn before(number: usize, registers: *const [usize; 7]) -> usize {
    process::before(number, arguments(registers))
}
