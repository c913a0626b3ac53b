//! Calls on files while nobody on the node keeps anything, so that nothing can be missed: a few instructions around them, where there is anything to be done at
//! all. Number in rax, the stub's own call in rcx, as everywhere behind [`quick::entry`](super::quick::entry).
//!
//! Hazards. Between the look and the call somebody may begin to keep a file: as if the call had come before. An open file that may be kept later, and was not
//! looked at yet, has a count of the calls that are under way: as long as there are any, it is not.

use core::arch::naked_asm;
use core::mem::{offset_of, size_of};
use core::sync::atomic::{AtomicU8, Ordering};

use sys::extents::Head;
use sys::resident::files;

use super::ahead::{COPYING, SLOW};
use super::cost::{LARGE, PRICE, SUSPECT, TICKS};
use super::kernel::{GATE, nr};
use super::sites::{DIRTY, OFF};
use super::stubs::{look_closer, saving, straight};
use super::table::{self, File, Unlooked};
use super::{inside, keep, process, worker};
use crate::{dispatch, settings};

/// Not 0: every file is kept from the first write on, so writes are looked at.
#[unsafe(link_section = ".data.hot")]
static EAGER: AtomicU8 = AtomicU8::new(0);
/// Small reads, and writes at an offset that lose nothing; every eighth is looked at.
#[unsafe(link_section = ".data.hot")]
static CALLS: AtomicU8 = AtomicU8::new(0);
const EIGHTH: u8 = 7;
/// A larger one always.
const SMALL: usize = 16 << 10;

pub(super) fn begin() {
    let eager = settings::get().files & (files::ALWAYS | files::ELSEWHERE) != 0;
    EAGER.store(eager.into(), Ordering::Relaxed);
}

// Goes on, or there, where the layer has stepped aside, something is pending, or a child borrows our memory.
macro_rules! ours {
    ($closer:literal) => {
        concat!(
            "cmp byte ptr [rip + {off}], 0\n jne ",
            $closer,
            "\n cmp byte ptr [rip + {dirty}], 0\n jne ",
            $closer,
            "\n cmp qword ptr [rip + {borrowers}], 0\n jne ",
            $closer,
            "\n mov r11, [rip + {head}]\n test r11, r11\n"
        )
    };
}

// Or others of the job keep something.
macro_rules! unless_kept {
    ($closer:literal) => {
        concat!(
            "cmp dword ptr [r11 + {owned}], 0\n jne ",
            $closer,
            "\n cmp dword ptr [r11 + {lost}], 0\n jne ",
            $closer,
            "\n"
        )
    };
}

pub(super) use unless_kept;

// Both; or nobody has told us of them yet.
macro_rules! quiet {
    () => {
        concat!(ours!("{look_closer}"), "jz {look_closer}\n", unless_kept!("{look_closer}"))
    };
}

// Makes the call: here, unless it would be stopped. Returning from elsewhere takes longer after a system call.
macro_rules! make {
    () => {
        "cmp dword ptr [rip + {dispatched}], 0\n jne 51f\n syscall\n jmp 52f\n 51: call qword ptr [rip + {gate}]\n 52:"
    };
}

// What a descriptor is, in r11; closer, if that is not known.
macro_rules! slot {
    () => {
        "cmp rdi, {descriptors}\n jae {look_closer}\n lea r11, [rip + {descriptor}]\n movzx r11d, word ptr [r11 + rdi * 2]\n test r11d, r11d\n jz {look_closer}\n"
    };
}

// Its [`File`], in r11, of what was looked at.
macro_rules! file {
    () => {
        "dec r11d\n imul r11, r11, {file_bytes}\n lea rsp, [rsp - 128]\n push rcx\n lea rcx, [rip + {files}]\n add r11, rcx\n pop rcx\n lea rsp, [rsp + 128]\n"
    };
}

/// Of a descriptor: read, write, pread, pwrite, fstat, lseek, ioctl, and those that are looked at anyway.
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
pub(super) extern "C" fn on_file() {
    naked_asm!(
        quiet!(),
        slot!(),
        "cmp r11d, {opened}",
        "jae 2f",
        // Never kept: reads may be in sequence, all others are as they are.
        file!(),
        "cmp byte ptr [r11 + {state}], {direct}",
        "jne {look_closer}",
        "cmp byte ptr [r11 + {slow}], 0",
        "jne {look_closer}",
        "1: cmp eax, {read}",
        "je 3f",
        "cmp eax, {pread}",
        "je 3f",
        "cmp eax, {write}",
        "je {straight}",
        "cmp eax, {pwrite}",
        "je {straight}",
        "cmp eax, {fstat}",
        "je {straight}",
        "cmp eax, {ioctl}",
        "je {straight}",
        "cmp eax, {lseek}",
        "je {straight}",
        "jmp {look_closer}",
        "3: cmp rdx, {small}",
        "jae {look_closer}",
        "inc byte ptr [rip + {calls}]",
        "test byte ptr [rip + {calls}], {eighth}",
        "jz {look_closer}",
        "jmp {straight}",
        // Not looked at yet.
        "2: test r11d, {may}",
        "jz 1b",
        "cmp eax, {read}",
        "je {timed}",
        "cmp eax, {pread}",
        "je 5f",
        "cmp byte ptr [rip + {eager}], 0",
        "jne {look_closer}",
        "cmp eax, {write}",
        "je 4f",
        "cmp eax, {pwrite}",
        "je 4f",
        "cmp eax, {fstat}",
        "je {straight}",
        "jmp {look_closer}",
        "4: cmp rdx, {large}",
        "jae {look_closer}",
        "lea r11, [rip + {unlooked}]",
        "cmp dword ptr [r11 + rdi * 8 + {spent}], {suspect}",
        "jae {look_closer}",
        "cmp eax, {write}",
        "je {timed}",
        // No offset is moved; and the last one that was timed lost nothing.
        "cmp dword ptr [r11 + rdi * 8 + {spent}], 0",
        "jne {timed}",
        "5: cmp rdx, {small}",
        "jae {timed}",
        "inc byte ptr [rip + {calls}]",
        "test byte ptr [rip + {calls}], {eighth}",
        "jz {timed}",
        "jmp {straight}",
        off = sym OFF,
        dirty = sym DIRTY,
        borrowers = sym process::COUNT,
        head = sym worker::AT,
        owned = const offset_of!(Head, owned),
        lost = const offset_of!(Head, lost),
        descriptors = const table::DESCRIPTORS,
        descriptor = sym table::DESCRIPTOR,
        opened = const table::OPENED,
        may = const table::MAY,
        files = sym table::FILE,
        file_bytes = const size_of::<File>(),
        state = const offset_of!(File, state),
        slow = const offset_of!(File, reading),
        direct = const table::DIRECT,
        read = const nr::READ,
        pread = const nr::PREAD64,
        write = const nr::WRITE,
        pwrite = const nr::PWRITE64,
        fstat = const nr::FSTAT,
        ioctl = const nr::IOCTL,
        lseek = const nr::LSEEK,
        small = const SMALL,
        calls = sym CALLS,
        eighth = const EIGHTH,
        eager = sym EAGER,
        large = const LARGE,
        unlooked = sym table::UNLOOKED,
        spent = const offset_of!(Unlooked, spent),
        suspect = const SUSPECT,
        timed = sym timed,
        look_closer = sym look_closer,
        straight = sym straight,
    )
}

/// A read or write of what was opened to be written, and not looked at yet: made here, and its time told where that matters.
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
extern "C" fn timed() {
    naked_asm!(
        "lea rsp, [rsp - 128]",
        "push rcx",
        "push rbx",
        "push r12",
        "push r13",
        "push rdx",
        "mov r13, rax",
        "lea rbx, [rip + {unlooked}]",
        "lea rbx, [rbx + rdi * 8 + {under_way}]",
        "cmp byte ptr [rip + {several}], 0",
        "jne 8f",
        "inc dword ptr [rbx]",
        "1:",
        "lea r11, [rip + {descriptor}]",
        "cmp word ptr [r11 + rdi * 2], {opened}",
        "jb 9f",
        "rdtsc",
        "shl rdx, 32",
        "or rax, rdx",
        "mov r12, rax",
        "mov rdx, [rsp]",
        "mov rax, r13",
        make!(),
        "mov rcx, rax",
        "rdtsc",
        "shl rdx, 32",
        "or rax, rdx",
        "sub rax, r12",
        "mov r12, rax",
        "cmp byte ptr [rip + {several}], 0",
        "jne 81f",
        "dec dword ptr [rbx]",
        "11:",
        "mov rdx, [rsp]",
        "test rcx, rcx",
        "js 7f",
        "cmp r13d, {read}",
        "je 2f",
        "cmp r13d, {pread}",
        "je 2f",
        // What is allowed for so many bytes is not lost.
        "imul r11, rdx, {allowed}",
        "shr r11, 10",
        "sub rax, r11",
        "mov r11d, {suspect} + 1",
        "cmp rax, r11",
        "cmovg rax, r11",
        "lea r11, [rip + {unlooked}]",
        "mov r11d, [r11 + rdi * 8 + {spent}]",
        "xor ebx, ebx",
        "add rax, r11",
        "cmovs rax, rbx",
        "cmp rax, {price}",
        "jae 3f",
        "lea r11, [rip + {unlooked}]",
        "mov [r11 + rdi * 8 + {spent}], eax",
        "jmp 7f",
        "2: lea r11, [rcx * {copying} + {slow}]",
        "cmp rax, r11",
        "jb 7f",
        "3:",
        saving!("mov r8, [rbp - 32]", "mov r9, [rbp - 40]", "mov rdi, r13", "mov rsi, [rbp - 16]", "mov rdx, [rbp - 8]", "mov rcx, r12", "call {late}"),
        "7: mov rax, rcx",
        "pop rdx",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rcx",
        "lea rsp, [rsp + 128]",
        "add rcx, 2",
        "jmp rcx",
        "8: lock inc dword ptr [rbx]",
        "jmp 1b",
        "81: lock dec dword ptr [rbx]",
        "jmp 11b",
        "9: lock dec dword ptr [rbx]",
        "mov rax, r13",
        "pop rdx",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rcx",
        "lea rsp, [rsp + 128]",
        "jmp {look_closer}",
        several = sym inside::SEVERAL,
        dispatched = sym dispatch::STATE,
        unlooked = sym table::UNLOOKED,
        under_way = const offset_of!(Unlooked, under_way),
        descriptor = sym table::DESCRIPTOR,
        opened = const table::OPENED as i16,
        gate = sym GATE,
        read = const nr::READ,
        pread = const nr::PREAD64,
        allowed = const sys::extents::SLOW as u64 * TICKS,
        suspect = const SUSPECT,
        spent = const offset_of!(Unlooked, spent),
        price = const PRICE,
        copying = const COPYING,
        slow = const SLOW,
        late = sym keep::timed,
        look_closer = sym look_closer,
    )
}

/// open, openat, close, fcntl, and calls that wait, with other signals blocked or without.
#[unsafe(naked)]
#[unsafe(link_section = ".text.hot")]
pub(super) extern "C" fn others() {
    naked_asm!(
        "cmp eax, {close}",
        "je 3f",
        "cmp eax, {openat}",
        "je 1f",
        "cmp eax, {fcntl}",
        "je 6f",
        "cmp eax, {pselect}",
        "je 7f",
        "cmp eax, {ppoll}",
        "je 8f",
        "cmp eax, {open}",
        "jne {look_closer}",
        // What is emptied may be somebody's.
        "mov r11d, esi",
        "jmp 2f",
        "1: mov r11d, edx",
        "2: test r11d, {truncate}",
        "jnz {look_closer}",
        "lea rsp, [rsp - 128]",
        "push rcx",
        "push rbx",
        "mov ebx, r11d",
        ours!("5f"),
        "jnz 25f",
        // Then what is new is known to be empty.
        "test ebx, {exclusive}",
        "jnz 5f",
        "jmp 26f",
        "25:",
        unless_kept!("5f"),
        "26:",
        make!(),
        "cmp rax, {descriptors}",
        "jae 4f",
        // As `table::opened` has it.
        "mov ecx, {opened}",
        "test ebx, {append}",
        "jz 21f",
        "or ecx, {appends}",
        "21: test ebx, {writes}",
        "jz 22f",
        "test ebx, {not_kept}",
        "jnz 22f",
        "or ecx, {may}",
        "22: lea r11, [rip + {unlooked}]",
        "mov dword ptr [r11 + rax * 8 + {spent}], {unknown}",
        "lea r11, [rip + {descriptor}]",
        "mov [r11 + rax * 2], cx",
        "4: pop rbx",
        "pop rcx",
        "lea rsp, [rsp + 128]",
        "add rcx, 2",
        "jmp rcx",
        "5: pop rbx",
        "pop rcx",
        "lea rsp, [rsp + 128]",
        "jmp {look_closer}",
        // Nothing of it is anybody's.
        "3:",
        ours!("{look_closer}"),
        "jz 35f",
        unless_kept!("{look_closer}"),
        "35:",
        "cmp rdi, {descriptors}",
        "jae {straight}",
        "lea r11, [rip + {descriptor}]",
        "lea r11, [r11 + rdi * 2]",
        "movzx eax, word ptr [r11]",
        "test eax, eax",
        "jz 31f",
        "cmp eax, {opened}",
        "jb 32f",
        "lea rsp, [rsp - 128]",
        "push rcx",
        "xor ecx, ecx",
        "lock cmpxchg [r11], cx",
        "pop rcx",
        "lea rsp, [rsp + 128]",
        "jne 32f",
        "31: mov eax, {close}",
        "jmp {straight}",
        "32: mov eax, {close}",
        "jmp {look_closer}",
        // Flags of the descriptor, and asking for the open file's; locks of what is never kept, as others know.
        "6: cmp esi, {getfl}",
        "ja 61f",
        "test esi, esi",
        "jnz {straight}",
        "jmp {look_closer}",
        "61: cmp esi, {getlk}",
        "jb {look_closer}",
        "cmp esi, {setlkw}",
        "ja {look_closer}",
        quiet!(),
        slot!(),
        "cmp r11d, {opened}",
        "jae {look_closer}",
        file!(),
        "cmp byte ptr [r11 + {state}], {direct}",
        "jne {look_closer}",
        "cmp byte ptr [r11 + {marked}], 0",
        "jne {straight}",
        "jmp {look_closer}",
        // No set of signals.
        "7: test r9, r9",
        "jz {straight}",
        "cmp qword ptr [r9], 0",
        "je {straight}",
        "jmp {look_closer}",
        "8: test r10, r10",
        "jz {straight}",
        "jmp {look_closer}",
        close = const nr::CLOSE,
        open = const nr::OPEN,
        openat = const nr::OPENAT,
        fcntl = const nr::FCNTL,
        pselect = const nr::PSELECT6,
        ppoll = const nr::PPOLL,
        truncate = const table::TRUNCATE,
        exclusive = const table::EXCLUSIVE,
        append = const table::APPEND,
        writes = const table::WRITES,
        not_kept = const table::NOT_KEPT,
        appends = const table::APPENDS,
        may = const table::MAY,
        getfl = const 3,
        getlk = const 5,
        setlkw = const 7,
        off = sym OFF,
        dirty = sym DIRTY,
        borrowers = sym process::COUNT,
        head = sym worker::AT,
        owned = const offset_of!(Head, owned),
        lost = const offset_of!(Head, lost),
        dispatched = sym dispatch::STATE,
        gate = sym GATE,
        descriptors = const table::DESCRIPTORS,
        descriptor = sym table::DESCRIPTOR,
        unlooked = sym table::UNLOOKED,
        spent = const offset_of!(Unlooked, spent),
        unknown = const table::UNTIMED,
        opened = const table::OPENED,
        files = sym table::FILE,
        file_bytes = const size_of::<File>(),
        state = const offset_of!(File, state),
        marked = const offset_of!(File, marked),
        direct = const table::DIRECT,
        look_closer = sym look_closer,
        straight = sym straight,
    )
}
