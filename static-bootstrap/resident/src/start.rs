//! Where a statically linked program begins: hpcrt has put this object beside it (`sys/inject.rs`) and has it begin here, with the address of its own first
//! instruction in rax. There is no dynamic linker: we relocate ourselves.

use core::arch::global_asm;

use sys::resident::{PLACE, cause, step};

use super::{calls, fatal, objects, segments, window};

unsafe extern "C" {
    fn hpcrt_start();
}

// All registers but rsp are zero where a program begins (System V ABI); what the file has no bytes for, up to the end of its page, is not.
global_asm!(
    ".hidden hpcrt_start",
    ".globl hpcrt_start",
    "hpcrt_start:",
    "mov rbx, rsp",
    "mov r12, rax",
    "lea rdi, [rip + __bss_start]",
    "lea rcx, [rdi + 4095]",
    "and rcx, -4096",
    "sub rcx, rdi",
    "xor eax, eax",
    "rep stosb",
    "and rsp, -64",
    "lea rdi, [rip + __ehdr_start]",
    "mov rsi, rbx",
    "call {begin}",
    "mov rsp, rbx",
    "mov rcx, r12",
    "xor eax, eax",
    "xor ebx, ebx",
    "xor edx, edx",
    "xor esi, esi",
    "xor edi, edi",
    "xor ebp, ebp",
    "xor r8d, r8d",
    "xor r9d, r9d",
    "xor r12d, r12d",
    "jmp rcx",
    begin = sym begin,
);

/// Has the linker keep it.
#[used]
static START: unsafe extern "C" fn() = hpcrt_start;

/// `stack` is what the kernel left: argc, the argv pointers and NULL, those of the environment and NULL, the auxiliary vector.
extern "C" fn begin(base: usize, stack: *const usize) {
    relocate(base);
    const AT_PHDR: usize = 3;
    const AT_PHNUM: usize = 5;
    // SAFETY: see above.
    unsafe {
        let words = (0..).map(|nth| stack.add(nth));
        let mut ends = words.skip(1).filter(|at| **at == 0);
        let auxiliary = ends.nth(1).unwrap_or(stack).add(1).cast::<[usize; 2]>();
        let all = (0..).map(|nth| *auxiliary.add(nth)).take_while(|[kind, _]| *kind != 0);
        let find = |wanted| all.clone().find(|[kind, _]| *kind == wanted).map_or(0, |[_, value]| value);
        objects::learn(find(AT_PHDR), find(AT_PHNUM));
    }
    let failed = |step, errno: u32| -> ! { fatal::say(cause::KERNEL, 0, [step, errno.into()]) };
    window::reserve(Some(objects::thread_local())).unwrap_or_else(|errno| failed(step::WINDOW, errno));
    if !calls::begin(PLACE as usize) {
        failed(step::DISPATCH, super::call::EINVAL);
    }
    segments::take();
}

/// Adds the address of this object where it is to be added. Nothing else of it that has an address in it may be used before.
fn relocate(base: usize) {
    const RELATIVE: usize = 8;
    const DYNAMIC: u32 = 2;
    const RELA: usize = 7;
    const RELASZ: usize = 8;
    // SAFETY: the header of this ELF file, and what it says of itself (elf(5)).
    unsafe {
        let (first, count) = (base + *((base + 32) as *const usize), *((base + 56) as *const u16));
        for header in (0..usize::from(count)).map(|nth| first + nth * 56) {
            if *(header as *const u32) != DYNAMIC {
                continue;
            }
            let mut entry = (base + *((header + 16) as *const usize)) as *const [usize; 2];
            let (mut at, mut len) = (0, 0);
            while (*entry)[0] != 0 {
                match *entry {
                    [RELA, value] => at = base + value,
                    [RELASZ, value] => len = value,
                    _ => {}
                }
                entry = entry.add(1);
            }
            for relocation in (at..at + len).step_by(24) {
                let [place, kind, value] = *(relocation as *const [usize; 3]);
                if kind == RELATIVE {
                    *((base + place) as *mut usize) = base + value;
                }
            }
        }
    }
}
