//! Counts for who asks how the program gets on ([`sys::counts`]); and the one word that the agent writes there.

use core::arch::x86_64::_rdtsc;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

pub(super) use sys::counts::kind::{AWAITED, FETCHED, FORESEEN, FRESH};
use sys::counts::{Counts, REGION_PAGES, REGIONS, UNIT_SHIFT, time_bucket};
use sys::syscall::{nr, syscall};

use super::call;

const SHARED: usize = 1;
const CLOCK_MONOTONIC: usize = 1;
const CLOCK_PROCESS_CPUTIME_ID: usize = 2;

static COUNTS: AtomicPtr<Counts> = AtomicPtr::new(core::ptr::null_mut());

/// Maps what the agent gave; the descriptor is not needed any more.
pub(super) fn open(fd: i32) -> Result<(), u32> {
    let args = [0, size_of::<Counts>(), call::READ_WRITE, SHARED, fd as usize, 0];
    // SAFETY: a new mapping of a file that is as long.
    let at = unsafe { syscall(nr::MMAP, args) }?;
    COUNTS.store(at as *mut Counts, Ordering::Release);
    look(0);
    Ok(())
}

fn counts() -> Option<&'static Counts> {
    // SAFETY: null, or mapped for good; every field is atomic.
    unsafe { COUNTS.load(Ordering::Acquire).as_ref() }
}

fn add(word: &AtomicU64, more: usize) {
    word.fetch_add(more as u64, Ordering::Relaxed);
}

/// Ticks of the processor's counter.
pub(super) fn now() -> u64 {
    // SAFETY: every x86-64 processor has it.
    unsafe { _rdtsc() }
}

/// Nanoseconds since the machine was started.
pub(super) fn clock() -> u64 {
    nanoseconds(CLOCK_MONOTONIC)
}

/// Nanoseconds for which threads of this process had processors.
pub(super) fn used() -> u64 {
    nanoseconds(CLOCK_PROCESS_CPUTIME_ID)
}

fn nanoseconds(clock: usize) -> u64 {
    let mut time = [0u64; 2];
    // SAFETY: room for a `struct timespec`.
    let _ = unsafe { syscall(nr::CLOCK_GETTIME, [clock, time.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    time[0] * 1_000_000_000 + time[1]
}

fn look(which: usize) {
    let time = clock();
    if let Some(counts) = counts() {
        counts.clocks[which][0].store(now(), Ordering::Relaxed);
        counts.clocks[which][1].store(time, Ordering::Relaxed);
    }
}

/// A fault was answered; `begun`: when it was heard of, of those that were answered at once.
pub(super) fn fault(kind: usize, begun: Option<u64>) {
    let Some(counts) = counts() else { return };
    add(&counts.faults[kind], 1);
    if let Some(begun) = begun {
        add(&counts.times[time_bucket(now().saturating_sub(begun))], 1);
    }
}

/// A fault at this page (from the window's beginning) has so many fetched with it: 2^order.
pub(super) fn unit(page: usize, order: u8) {
    let Some(counts) = counts() else { return };
    add(&counts.units[usize::from(order).min(counts.units.len() - 1)], 1);
    let region = &counts.regions[(page as u64 / REGION_PAGES) as usize % REGIONS];
    let before = region.load(Ordering::Relaxed) & ((1 << UNIT_SHIFT) - 1);
    region.store(u64::from(order) << UNIT_SHIFT | (before + 1), Ordering::Relaxed);
}

/// So many pages are fetched ahead.
pub(super) fn ahead(pages: usize) {
    counts().into_iter().for_each(|counts| add(&counts.ahead[0], pages));
}

/// So many of those are wanted.
pub(super) fn foreseen(pages: usize) {
    counts().into_iter().for_each(|counts| add(&counts.ahead[1], pages));
}

/// So many of those are let go of.
pub(super) fn in_vain(pages: usize) {
    counts().into_iter().for_each(|counts| add(&counts.ahead[2], pages));
}

/// Pages came from a server.
pub(super) fn received(server: u32, pages: usize) {
    counts().into_iter().for_each(|counts| add(&counts.bytes[server as usize][0], pages * sys::page::PAGE));
}

/// Pages went to a server.
pub(super) fn sent(server: u32, pages: usize) {
    counts().into_iter().for_each(|counts| add(&counts.bytes[server as usize][1], pages * sys::page::PAGE));
}

/// Pages were evicted, of which some the server had already, and some were zero.
pub(super) fn evicted(all: usize, unchanged: usize, zero: usize) {
    let Some(counts) = counts() else { return };
    counts.evicted.iter().zip([all, unchanged, zero]).for_each(|(word, more)| add(word, more));
}

/// So many parts of memory have no copy, which should.
pub(super) fn bare(places: usize) {
    counts().into_iter().for_each(|counts| counts.bare.store(places as u64, Ordering::Relaxed));
}

/// The pager waited for room, since `begun`.
pub(super) fn stalled(begun: u64) {
    let Some(counts) = counts() else { return };
    add(&counts.stalls[0], 1);
    counts.stalls[1].fetch_add(now().saturating_sub(begun), Ordering::Relaxed);
}

/// How things are, from time to time: pages here, and with each server. Returns the bytes that may be kept here.
pub(super) fn keep(resident: i64, away: &[AtomicU64]) -> Option<u64> {
    let counts = counts()?;
    look(1);
    counts.resident.store(u64::try_from(resident).unwrap_or(0), Ordering::Relaxed);
    let mut all = 0;
    for (word, away) in counts.away.iter().zip(away) {
        let away = away.load(Ordering::Relaxed);
        word.store(away, Ordering::Relaxed);
        all += away;
    }
    counts.most_away.fetch_max(all, Ordering::Relaxed);
    Some(counts.budget.load(Ordering::Relaxed))
}
