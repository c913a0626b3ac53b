//! Where the program forks: libc's system call itself is replaced, because what libc does in the child at once already uses the program's memory.

use core::arch::naked_asm;
use core::sync::atomic::{AtomicUsize, Ordering};

use sys::syscall::{nr, syscall};

use super::{entry, pager, patch};

/// mov edi, CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD
const FLAGS: [u8; 5] = [0xbf, 0x11, 0x00, 0x20, 0x01];
/// mov eax, SYS_clone; syscall
const CALL: [u8; 7] = [0xb8, 0x38, 0, 0, 0, 0x0f, 0x05];
/// Bytes of the function that are looked through, and that may lie between the two.
const REACH: usize = 512;
const APART: usize = 64;

/// Where it goes on.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Replaces the call in the function at `from`, if it is where compilers have put it so far; else a child of a program that uses other memory
/// has none of what is captured.
///
/// # Safety
/// A function of libc's in the middle of its text; no other thread exists.
pub(super) unsafe fn replace(from: usize) -> Result<(), u32> {
    // SAFETY: text, which can be read.
    let text = unsafe { core::slice::from_raw_parts(from as *const u8, REACH) };
    let find = |what: &[u8], text: &[u8]| text.windows(what.len()).position(|bytes| bytes == what);
    let Some(at) = find(&FLAGS, text).and_then(|flags| {
        find(&CALL, text.get(flags..(flags + FLAGS.len() + APART + CALL.len()).min(REACH))?).map(|call| flags + call)
    }) else {
        return Ok(());
    };
    let (site, to) = (from + at, instead as *const () as usize);
    let Some([a, b, c, d, e]) = patch::jump(site, to) else { return Ok(()) };
    // And what is never reached.
    let jump = [a, b, c, d, e, 0x0f, 0x0b];
    NEXT.store(site + CALL.len(), Ordering::Relaxed);
    // SAFETY: these instructions, which nobody jumps into.
    unsafe { patch::write(site, &jump) }
}

/// In the place of the system call: as with that, all registers but rax, rcx and r11 stay, and what lies below the stack, too.
#[unsafe(naked)]
unsafe extern "C" fn instead() {
    naked_asm!(
        "lea rsp, [rsp - 128]",
        "push rbp",
        "mov rbp, rsp",
        "push rdi",
        "push rsi",
        "push rdx",
        "push r8",
        "push r9",
        "push r10",
        "sub rsp, 512",
        "and rsp, -64",
        "fxsave64 [rsp]",
        "mov rcx, r10",
        "call {fork}",
        "fxrstor64 [rsp]",
        "mov rdi, [rbp - 8]",
        "mov rsi, [rbp - 16]",
        "mov rdx, [rbp - 24]",
        "mov r8, [rbp - 32]",
        "mov r9, [rbp - 40]",
        "mov r10, [rbp - 48]",
        "mov rsp, rbp",
        "pop rbp",
        "lea rsp, [rsp + 128]",
        "jmp qword ptr [rip + {next}]",
        fork = sym fork,
        next = sym NEXT,
    )
}

/// Returns as the kernel does, twice.
extern "C" fn fork(flags: usize, stack: usize, parent: usize, child: usize, tls: usize) -> usize {
    let result = entry::enter_elsewhere(move || {
        // SAFETY: libc's own call, with its arguments; the child has a copy of this stack.
        pager::fork(move || unsafe { syscall(nr::CLONE, [flags, stack, parent, child, tls, 0]) })
    });
    result.unwrap_or_else(|errno| (errno as usize).wrapping_neg())
}
