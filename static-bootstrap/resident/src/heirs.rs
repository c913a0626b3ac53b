//! Where libc starts threads, processes and other programs, which inherit the processors that their thread may use, and where it says or changes which those are: the
//! program's thread gets its own ones back before ([`pager::part`]). Only the instruction is replaced that gives the call its number.

use core::arch::{global_asm, naked_asm};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use sys::syscall::nr;

use super::{call, calls, holds, hooks, objects, pager, patch, thread};

const CALLS: [usize; 6] =
    [nr::CLONE, nr::CLONE3, nr::VFORK, nr::EXECVEAT, nr::SCHED_SETAFFINITY, nr::SCHED_GETAFFINITY];
/// mov eax, NUMBER; and how far behind it the call begins, at most.
const MOV_EAX: u8 = 0xb8;
const LEN: usize = 5;
const APART: usize = 12;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// glibc 2.36 has 14.
const SITES: usize = 32;

/// Of each place which call it is, and where it goes on.
static NUMBERS: [AtomicU32; SITES] = [const { AtomicU32::new(0) }; SITES];
static NEXT: [AtomicUsize; SITES] = [const { AtomicUsize::new(0) }; SITES];

/// Whether who makes this call has to have his own processors.
pub(super) fn concerns(number: usize) -> bool {
    CALLS.contains(&number) || number == nr::FORK || number == nr::EXECVE
}

/// Puts thunks in place; false where that cannot be done: there are other threads, or it is another libc.
pub(super) fn watch() -> bool {
    if calls::are_ours() {
        return true;
    }
    if thread::count() != Some(1) {
        return false;
    }
    let Some(text) = objects::text(hooks::inside()) else { return false };
    let (first, len) = (text.start, text.len());
    // SAFETY: text of libc's, which can be read.
    let text = unsafe { core::slice::from_raw_parts(first as *const u8, len) };
    let (mut sites, mut found) = ([(0, 0); SITES], 0);
    for (at, bytes) in text.windows(APART + SYSCALL.len()).enumerate().filter(|(_, bytes)| bytes[0] == MOV_EAX) {
        let number = u32::from_le_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]) as usize;
        if CALLS.contains(&number) && bytes[LEN..].windows(SYSCALL.len()).any(|pair| pair == SYSCALL) {
            let Some(place) = sites.get_mut(found) else { return false };
            *place = (number, first + at);
            found += 1;
        }
    }
    let sites = &sites[..found];
    let has = |wanted| sites.iter().any(|(number, _)| *number == wanted);
    has(nr::CLONE) && has(nr::VFORK) && sites.iter().enumerate().all(|(nth, site)| replace(nth, *site).is_ok())
}

/// No other thread exists.
fn replace(nth: usize, (number, at): (usize, usize)) -> Result<(), u32> {
    let thunk = (&raw const THUNKS) as usize + nth * THUNK;
    let jump = patch::jump(at, thunk).ok_or(call::EINVAL)?;
    NUMBERS[nth].store(number as u32, Ordering::Relaxed);
    NEXT[nth].store(at + LEN, Ordering::Relaxed);
    // SAFETY: one instruction, for which the thunk does.
    unsafe { patch::write(at, &jump) }
}

// In the place of the instructions, 64 bytes each: all registers but rax stay, flags, and what lies below the stack, too.
global_asm!(
    ".balign 64",
    ".hidden hpcrt_thunks",
    ".globl hpcrt_thunks",
    "hpcrt_thunks:",
    ".set nth, 0",
    ".rept {sites}",
    "lea rsp, [rsp - 128]",
    "pushfq",
    "call {around}",
    "popfq",
    "lea rsp, [rsp + 128]",
    "mov eax, [rip + {numbers} + 4 * nth]",
    "jmp qword ptr [rip + {next} + 8 * nth]",
    ".balign 64",
    ".set nth, nth + 1",
    ".endr",
    sites = const SITES,
    around = sym around,
    numbers = sym NUMBERS,
    next = sym NEXT,
);

const THUNK: usize = 64;

unsafe extern "C" {
    #[link_name = "hpcrt_thunks"]
    static THUNKS: [u8; SITES * THUNK];
}

#[unsafe(naked)]
unsafe extern "C" fn around() {
    naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rcx",
        "push rdx",
        "push rsi",
        "push rdi",
        "push r8",
        "push r9",
        "push r10",
        "push r11",
        "sub rsp, 512",
        "and rsp, -64",
        "fxsave64 [rsp]",
        "mov rdi, rdx",
        "call {leave}",
        "fxrstor64 [rsp]",
        "mov rcx, [rbp - 8]",
        "mov rdx, [rbp - 16]",
        "mov rsi, [rbp - 24]",
        "mov rdi, [rbp - 32]",
        "mov r8, [rbp - 40]",
        "mov r9, [rbp - 48]",
        "mov r10, [rbp - 56]",
        "mov r11, [rbp - 64]",
        "mov rsp, rbp",
        "pop rbp",
        "ret",
        leave = sym leave,
    )
}

/// `third`: the call's third argument, which for sched_setaffinity(2) points to a set. libc makes that call with all signals blocked, too, so that it cannot be
/// stopped ([`crate::filter`]), and what it points to has to be here.
extern "C" fn leave(third: usize) {
    pager::part();
    holds::bring(third);
}
