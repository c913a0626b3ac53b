//! How wide vectors may be: what this processor and its kernel can do.
#![allow(unsafe_code, reason = "an instruction that not every processor has")]

use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use core::sync::atomic::{AtomicU8, Ordering};

/// Words of 32 bits at once; with eight of them AVX2, with sixteen AVX-512F.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(super) enum Width {
    One,
    Eight,
    Sixteen,
}

/// [`ask`], once: in a virtual machine every question goes to its host.
pub(super) fn width() -> Width {
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    let all = [Width::One, Width::Eight, Width::Sixteen];
    let known = KNOWN.load(Ordering::Relaxed);
    if let Some(width) = usize::from(known).checked_sub(1).and_then(|at| all.get(at)) {
        return *width;
    }
    let found = ask();
    let at = all.iter().position(|width| *width == found).unwrap_or(0);
    KNOWN.store(at as u8 + 1, Ordering::Relaxed);
    found
}

fn ask() -> Width {
    let found = __cpuid(0);
    let saves_vectors = found.eax >= 7 && __cpuid(1).ecx >> 27 & 1 == 1;
    if !saves_vectors {
        return Width::One;
    }
    // SAFETY: the processor has said that it has the instruction.
    let saved = unsafe { _xgetbv(0) };
    let features = __cpuid_count(7, 0).ebx;
    let (avx2, avx512) = (features >> 5 & 1 == 1 && saved & 6 == 6, features >> 16 & 1 == 1 && saved & 0xe6 == 0xe6);
    match (avx2, avx512) {
        (true, true) => Width::Sixteen,
        (true, false) => Width::Eight,
        _ => Width::One,
    }
}
