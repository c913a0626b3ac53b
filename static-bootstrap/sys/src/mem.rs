//! The memory functions that the compiler calls by itself; hidden, so that nothing outside this object can bind to them.
//!
//! Hazard: LLVM recognises loops as these very functions, so they are written in assembly.

use core::arch::global_asm;

#[cfg(target_arch = "x86_64")]
global_asm!(
    ".globl memcpy", ".hidden memcpy", ".type memcpy, @function",
    "memcpy:", "mov rax, rdi", "mov rcx, rdx", "rep movsb", "ret",
    ".globl memset", ".hidden memset", ".type memset, @function",
    "memset:", "mov r8, rdi", "mov eax, esi", "mov rcx, rdx", "rep stosb", "mov rax, r8", "ret",
    ".globl strlen", ".hidden strlen", ".type strlen, @function",
    "strlen:", "xor eax, eax", "2: cmp byte ptr [rdi + rax], 0", "je 3f", "inc rax", "jmp 2b", "3: ret",
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".globl memcpy", ".hidden memcpy", ".type memcpy, %function",
    "memcpy:", "mov x3, x0", "2: cbz x2, 3f", "ldrb w4, [x1], #1", "strb w4, [x3], #1", "sub x2, x2, #1", "b 2b", "3: ret",
    ".globl memset", ".hidden memset", ".type memset, %function",
    "memset:", "mov x3, x0", "2: cbz x2, 3f", "strb w1, [x3], #1", "sub x2, x2, #1", "b 2b", "3: ret",
    ".globl strlen", ".hidden strlen", ".type strlen, %function",
    "strlen:", "mov x1, x0", "2: ldrb w2, [x1], #1", "cbnz w2, 2b", "sub x0, x1, x0", "sub x0, x0, #1", "ret",
);
