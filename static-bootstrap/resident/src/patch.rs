//! Functions of libc replaced for all who call them, libc itself included: a jump is written over their first bytes. A symbol of our own would be seen
//! by other objects only, and a seccomp filter would stay with every program that this one executes.

use sys::page::PAGE;
use sys::sites::JUMP;
use sys::syscall::{nr, syscall};

const READ_EXECUTE: usize = 5;
const ALL: usize = 7;
const O_WRONLY_CLOEXEC: usize = 0o2_000_001;
const AT_FDCWD: usize = -100_isize as usize;

/// Has `from` continue at `to`. Functions are aligned to 16 bytes, and ones as small as what is written here do not exist among those
/// that are replaced.
///
/// # Safety
/// `from` is such a function, and `to` does for its callers what it did; no thread is in its first bytes.
pub(super) unsafe fn replace(from: usize, to: usize) -> Result<(), u32> {
    // movabs rax, to; jmp rax
    let mut jump = [0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0];
    jump[2..10].copy_from_slice(&to.to_le_bytes());
    // SAFETY: as the caller says.
    unsafe { write(from, &jump) }
}

/// A jump to be written at `at`, if `to` can be reached from there by one of five bytes.
pub(super) fn jump(at: usize, to: usize) -> Option<[u8; JUMP]> {
    let distance = i32::try_from(to.wrapping_sub(at + JUMP).cast_signed()).ok()?;
    let mut code = [0xe9, 0, 0, 0, 0];
    code[1..].copy_from_slice(&distance.to_le_bytes());
    Some(code)
}

/// Writes instructions over others.
///
/// # Safety
/// They do what those did, for whoever comes there; no thread is in them.
pub(super) unsafe fn write(at: usize, code: &[u8]) -> Result<(), u32> {
    let first = at & !(PAGE - 1);
    let len = (at + code.len()).next_multiple_of(PAGE) - first;
    // SAFETY: the pages of a mapped function; the caller vouches for it.
    unsafe {
        if syscall(nr::MPROTECT, [first, len, ALL, 0, 0, 0]).is_ok() {
            core::ptr::copy_nonoverlapping(code.as_ptr(), at as *mut u8, code.len());
            return syscall(nr::MPROTECT, [first, len, READ_EXECUTE, 0, 0, 0]).map(drop);
        }
        // Where text may not be made writable, a debugger's way.
        let path = c"/proc/self/mem".as_ptr() as usize;
        let memory = syscall(nr::OPENAT, [AT_FDCWD, path, O_WRONLY_CLOEXEC, 0, 0, 0])?;
        let written = syscall(nr::PWRITE64, [memory, code.as_ptr() as usize, code.len(), at, 0, 0]);
        let _ = syscall(nr::CLOSE, [memory, 0, 0, 0, 0, 0]);
        written.map(drop)
    }
}
