//! What the dynamic linker has loaded: whom to ask, and where it is itself.

use core::arch::global_asm;

// Addresses, or zero.
global_asm!(
    ".weak dl_iterate_phdr, __tls_get_addr",
    ".pushsection .data.rel.ro, \"aw\"",
    ".balign 8",
    ".hidden hpcrt_linker",
    ".globl hpcrt_linker",
    "hpcrt_linker: .quad dl_iterate_phdr, __tls_get_addr",
    ".popsection",
);

unsafe extern "C" {
    #[link_name = "hpcrt_linker"]
    static LINKER: [usize; 2];
}

fn addresses() -> [usize; 2] {
    // SAFETY: written by the dynamic linker, before this code runs.
    unsafe { core::ptr::addr_of!(LINKER).read_volatile() }
}

/// Where libc's dl_iterate_phdr is, or 0.
pub(super) fn walker() -> usize {
    addresses()[0]
}

/// A place in the linker.
pub(super) fn inside() -> usize {
    addresses()[1]
}
