//! What a write costs the program that makes it at once, and so what keeping it would spare.
//!
//! A clock alone does not tell: on a busy host a write to memory takes as long as one to a distant file system, since others have the processor meanwhile. Who
//! waits for a file system gives the processor away himself, and the kernel counts that.

use core::arch::x86_64::_rdtsc;

use sys::extents::SLOW;

use super::kernel::raw;

/// Ticks that keeping a file costs: two questions to the agent. It is kept when writing directly has lost as much ([`lost`]).
pub(super) const PRICE: u64 = 400_000;
/// Ticks of a nanosecond, about: what is compared differs by more.
pub(super) const TICKS: u64 = 3;
/// Ticks for the system call that moves an offset that other processes have, too, and for the longer way there.
pub(super) const MOVING: i64 = 6_000;
/// From so many bytes on a write takes so long that asking the kernel does not count; others are asked about when one has taken long.
pub(super) const LARGE: usize = 256 << 10;
pub(super) const SUSPECT: u64 = PRICE / 3;
/// Ticks beyond what a write may take that may be the program's own.
const BUSY: u64 = 60_000;

/// A write that is made at once.
pub(super) struct Watch {
    begun: u64,
    /// How often the thread had waited.
    waits: Option<u64>,
}

/// What one took.
#[derive(Clone, Copy)]
pub(super) struct Took {
    pub(super) ticks: u64,
    /// Waiting is told from what others did meanwhile.
    pub(super) is_certain: bool,
}

impl Watch {
    /// Of so many bytes, where writes have lost so much so far.
    pub(super) fn begin(total: usize, lost: u64) -> Watch {
        let waits = (total >= LARGE || lost >= SUSPECT).then(waits);
        // SAFETY: reads a register.
        Watch { waits, begun: unsafe { _rdtsc() } }
    }

    pub(super) fn end(self, total: usize) -> Took {
        // SAFETY: as above.
        let ticks = unsafe { _rdtsc() }.saturating_sub(self.begun);
        let own = || ticks > allowed(total) + BUSY && self.waits.is_some_and(|before| waits() == before);
        Took { ticks: if own() { allowed(total) } else { ticks }, is_certain: self.waits.is_some() }
    }
}

/// How often this thread has given the processor away.
fn waits() -> u64 {
    const GETRUSAGE: usize = 98;
    const THREAD: usize = 1;
    const VOLUNTARY: usize = 16;
    let mut usage = [0u64; 18];
    // SAFETY: room for a `struct rusage`.
    unsafe { raw(GETRUSAGE, [THREAD, usage.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    usage[VOLUNTARY]
}

/// Ticks in which nothing is lost.
fn allowed(total: usize) -> u64 {
    total as u64 * u64::from(SLOW) * TICKS / 1024
}

/// Nanoseconds for a KiB.
pub(super) fn pace(total: usize, ticks: u64) -> u32 {
    (ticks / TICKS / (total as u64 >> 10).max(1)).min(u32::MAX.into()) as u32
}

/// What a write of so many bytes took in vain, or less than it might; a single one does not say that all will.
pub(super) fn lost(total: usize, ticks: u64) -> i64 {
    (ticks as i64).saturating_sub(allowed(total) as i64).min(SUSPECT as i64 + 1)
}
