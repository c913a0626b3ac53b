//! The next write to the file that was written to last, without leaving the stub's registers: bytes are put behind the others, and one store says so.
//! What has to be true for that was found out by the write before ([`arm`]); the sequence of the log says whether it still is.
//!
//! Hazards. Whoever has changed anything about the file or its descriptor has settled before, or made another change, and the sequence is another
//! one. A program that shares memory in a job on several hosts has none. A signal handler finds [`Quick::busy`] and does not arm, so nothing is changed while it is used; with threads the lock is held.

use core::arch::naked_asm;
use core::sync::atomic::{AtomicU64, Ordering};

use sys::extents::{BUSY_AT, BYTES_AT, GROWN, GROWN_SHIFT, Growing, SEQUENCE_AT, SMALL, WRITES_AT, inode};

use super::kernel::nr;
use super::sites::DIRTY;
use super::stubs::{normal, saving};
use super::{inside, settle};

/// The descriptor, and what [`Growing`] says of its file.
#[repr(C)]
struct Quick {
    fd: AtomicU64,
    segment: AtomicU64,
    sequence: AtomicU64,
    bytes: AtomicU64,
    most: AtomicU64,
    offset: AtomicU64,
    inode: AtomicU64,
    fit: AtomicU64,
    error: AtomicU64,
    busy: AtomicU64,
}

/// No descriptor, no sequence.
const NONE: u64 = u64::MAX;

#[unsafe(link_section = ".data.hot")]
static QUICK: Quick = Quick {
    fd: AtomicU64::new(NONE),
    segment: AtomicU64::new(0),
    sequence: AtomicU64::new(NONE),
    bytes: AtomicU64::new(0),
    most: AtomicU64::new(0),
    offset: AtomicU64::new(0),
    inode: AtomicU64::new(0),
    fit: AtomicU64::new(0),
    error: AtomicU64::new(0),
    busy: AtomicU64::new(0),
};

/// The next write to this descriptor may be a quick one.
pub(super) fn arm(fd: usize, growing: &Growing) {
    if QUICK.busy.load(Ordering::Relaxed) != 0 {
        return;
    }
    // Whoever comes in between finds no such sequence; and whom he comes in between leaves his own, which is not the log's any more.
    QUICK.sequence.store(NONE, Ordering::SeqCst);
    for (word, value) in [
        (&QUICK.segment, growing.segment),
        (&QUICK.bytes, growing.bytes),
        (&QUICK.most, growing.most),
        (&QUICK.offset, growing.offset),
        (&QUICK.inode, growing.inode),
        (&QUICK.fit, growing.fit),
        (&QUICK.error, growing.error),
        (&QUICK.fd, fd as u64),
    ] {
        word.store(value, Ordering::Relaxed);
    }
    QUICK.sequence.store(growing.sequence, Ordering::Release);
}

/// The next write is to be looked at.
pub(super) fn forget() {
    QUICK.sequence.store(NONE, Ordering::SeqCst);
}

/// In a child: it has another log.
pub(super) fn disarm() {
    QUICK.sequence.store(NONE, Ordering::Relaxed);
    QUICK.fd.store(NONE, Ordering::Relaxed);
    QUICK.busy.store(0, Ordering::Relaxed);
}

// What [`entry`] has on the stack goes back to its registers.
macro_rules! restoring {
    () => {
        "add rsp, 16\n pop r10\n pop r9\n pop r8\n pop rsi\n pop rdi\n pop rcx\n lea rsp, [rsp + 128]"
    };
}

/// Where a stub goes whose call may be a quick one, or is not known: number in rax, its own call in rcx.
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
pub(super) extern "C" fn entry() {
    naked_asm!(
        "cmp rdi, [rip + {quick}]",
        "jne {normal}",
        "cmp eax, {write}",
        "jne {seek}",
        "lea r11, [rdx - 1]",
        "cmp r11, {small}",
        "jae {normal}",
        "lea rsp, [rsp - 128]",
        "push rcx",
        "push rdi",
        "push rsi",
        "push r8",
        "push r9",
        "push r10",
        "sub rsp, 16",
        "xor r10d, r10d",
        "cmp byte ptr [rip + {several}], 0",
        "jne 20f",
        "1: lea r9, [rip + {quick}]",
        "cmp qword ptr [r9 + 72], 0",
        "jne 35f",
        "mov qword ptr [r9 + 72], 1",
        "mov r11, [r9 + 8]",
        "cmp rdi, [r9]",
        "jne 32f",
        "cmp dword ptr [r11 + {busy_at}], 0",
        "jne 32f",
        "mov dword ptr [r11 + {busy_at}], 1",
        "mov rax, [r11 + {sequence_at}]",
        "mov ecx, eax",
        "and ecx, {grown}",
        "mov r8, rax",
        "sub r8, rcx",
        "cmp r8, [r9 + 16]",
        "jne 31f",
        "shr ecx, {shift}",
        "lea r8, [rcx + rdx]",
        "cmp r8, [r9 + 32]",
        "ja 31f",
        "mov r8, [r9 + 48]",
        "mov r8, [r8]",
        "cmp r8, [r9 + 56]",
        "jne 31f",
        "mov r8, [r9 + 64]",
        "cmp dword ptr [r8], 0",
        "jne 31f",
        "mov byte ptr [rip + {dirty}], 1",
        "mov rdi, [r9 + 24]",
        "add rdi, rcx",
        // Overlapping halves.
        "cmp rdx, 8",
        "jb 11f",
        "jne 12f",
        "mov r8, [rsi]",
        "mov [rdi], r8",
        // What is there now counts.
        "2: lea r8, [rax + rdx * {unit}]",
        "cmpxchg [r11 + {sequence_at}], r8",
        "jne 31f",
        "inc qword ptr [r11 + {writes_at}]",
        "add [r11 + {bytes_at}], rdx",
        "mov dword ptr [r11 + {busy_at}], 0",
        "lea r9, [rip + {quick}]",
        "mov r8, [r9 + 48]",
        "mov r8d, [r8]",
        "mov qword ptr [r9 + 72], 0",
        "test r10, r10",
        "jnz 21f",
        "3: cmp r8d, {kept}",
        "mov rax, rdx",
        "jne 34f",
        "4:",
        restoring!(),
        "add rcx, 2",
        "jmp rcx",
        // 4 to 7, 2 and 3, 1.
        "11: test dl, 4",
        "jz 13f",
        "mov r8d, [rsi]",
        "mov r9d, [rsi + rdx - 4]",
        "mov [rdi], r8d",
        "mov [rdi + rdx - 4], r9d",
        "jmp 2b",
        "13: test dl, 2",
        "jz 14f",
        "movzx r8d, word ptr [rsi]",
        "movzx r9d, word ptr [rsi + rdx - 2]",
        "mov [rdi], r8w",
        "mov [rdi + rdx - 2], r9w",
        "jmp 2b",
        "14: movzx r8d, byte ptr [rsi]",
        "mov [rdi], r8b",
        "jmp 2b",
        // 9 to 16, to 128, more.
        "12: cmp rdx, 16",
        "ja 15f",
        "mov r8, [rsi]",
        "mov r9, [rsi + rdx - 8]",
        "mov [rdi], r8",
        "mov [rdi + rdx - 8], r9",
        "jmp 2b",
        "15: mov rcx, rdx",
        "cmp rdx, 128",
        "ja 17f",
        "movups [rsp], xmm0",
        "16: movups xmm0, [rsi]",
        "movups [rdi], xmm0",
        "add rsi, 16",
        "add rdi, 16",
        "sub rcx, 16",
        "cmp rcx, 16",
        "ja 16b",
        "movups xmm0, [rsi + rcx - 16]",
        "movups [rdi + rcx - 16], xmm0",
        "movups xmm0, [rsp]",
        "jmp 2b",
        "17: rep movsb",
        "jmp 2b",
        // With threads.
        "20: mov r10, fs:[0]",
        "xor eax, eax",
        "lock cmpxchg [rip + {holder}], r10",
        "je 1b",
        "jmp 33f",
        "21: mov rax, r10",
        "xor ecx, ecx",
        "lock cmpxchg [rip + {holder}], rcx",
        "je 3b",
        // Somebody waits, or signals do.
        "call {leave}",
        "jmp 3b",
        // Not so: as any other.
        "31: mov dword ptr [r11 + {busy_at}], 0",
        "32: lea r9, [rip + {quick}]",
        "mov qword ptr [r9 + 72], 0",
        "35: test r10, r10",
        "jz 33f",
        "mov rax, r10",
        "xor ecx, ecx",
        "lock cmpxchg [rip + {holder}], rcx",
        "je 33f",
        "mov eax, {write}",
        "call {leave}",
        "33: mov eax, {write}",
        restoring!(),
        "jmp {normal}",
        "34: call {late}",
        "jmp 4b",
        quick = sym QUICK,
        normal = sym normal,
        seek = sym seek,
        write = const nr::WRITE,
        small = const SMALL,
        several = sym inside::SEVERAL,
        holder = sym inside::HOLDER,
        dirty = sym DIRTY,
        busy_at = const BUSY_AT,
        sequence_at = const SEQUENCE_AT,
        writes_at = const WRITES_AT,
        bytes_at = const BYTES_AT,
        grown = const GROWN,
        shift = const GROWN_SHIFT,
        unit = const 1 << GROWN_SHIFT,
        kept = const inode::KEPT,
        leave = sym leave,
        late = sym late,
    )
}

/// lseek to where the open file is already, and asking where that is.
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
extern "C" fn seek() {
    naked_asm!(
        "cmp eax, {lseek}",
        "jne {normal}",
        "lea rsp, [rsp - 128]",
        "push r8",
        "push r9",
        "push r10",
        "lea r9, [rip + {quick}]",
        "mov r10, [r9 + 16]",
        "mov r11, [r9 + 8]",
        "test r11, r11",
        "jz 9f",
        "mov rax, [r9 + 40]",
        "mov r8, [r11 + {sequence_at}]",
        "mov r11d, r8d",
        "and r11d, {grown}",
        "sub r8, r11",
        "shr r11d, {shift}",
        "add rax, r11",
        "cmp r8, r10",
        "jne 9f",
        // The same still, and this descriptor's.
        "cmp r10, [r9 + 16]",
        "jne 9f",
        "cmp rdi, [r9]",
        "jne 9f",
        "cmp rdx, 1",
        "ja 9f",
        "je 2f",
        "cmp rsi, rax",
        "jne 9f",
        "1: pop r10",
        "pop r9",
        "pop r8",
        "lea rsp, [rsp + 128]",
        "add rcx, 2",
        "jmp rcx",
        "2: test rsi, rsi",
        "jz 1b",
        "9: pop r10",
        "pop r9",
        "pop r8",
        "lea rsp, [rsp + 128]",
        "mov eax, {lseek}",
        "jmp {normal}",
        quick = sym QUICK,
        normal = sym normal,
        lseek = const nr::LSEEK,
        sequence_at = const SEQUENCE_AT,
        grown = const GROWN,
        shift = const GROWN_SHIFT,
    )
}

/// Lets others in; all registers but rcx and r11 stay.
#[unsafe(naked)]
extern "C" fn leave() {
    naked_asm!(saving!("call {leave}", "mov rax, [rbp - 64]"), "ret", leave = sym let_in)
}

/// The file is not to be kept any more: waits until nothing is pending. Likewise.
#[unsafe(naked)]
extern "C" fn late() {
    naked_asm!(saving!("call {settle}", "mov rax, [rbp - 64]"), "ret", settle = sym settle_late)
}

extern "C" fn let_in() {
    inside::leave();
}

extern "C" fn settle_late() {
    settle();
}
