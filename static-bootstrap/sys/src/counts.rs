//! What the pager in a program counts: words in memory that it shares with the agent of its node. Each is written by the pager alone, without a
//! lock, and read by the agent at any moment; but for the budget, which the agent writes.

use core::sync::atomic::AtomicU64;

use super::page::SPAN_PAGES;
use super::resident::SERVERS;

/// How a fault was answered.
pub mod kind {
    /// A server was asked, and the program waited.
    pub const FETCHED: usize = 0;
    /// It had been fetched before it was missed.
    pub const FORESEEN: usize = 1;
    /// The page was never written.
    pub const FRESH: usize = 2;
    /// It was on its way, either way.
    pub const AWAITED: usize = 3;
    /// How many there are.
    pub const ALL: usize = 4;
}

/// Units of 2^0 to 2^8 pages.
pub const UNITS: usize = SPAN_PAGES.trailing_zeros() as usize + 1;
/// Parts of a power of two in [`time_bucket`].
const PARTS_BITS: u32 = 3;
/// Buckets of times: up to 2^32 ticks.
pub const TIMES: usize = 32 << PARTS_BITS;
/// Parts of memory whose units are told apart; others share.
pub const REGIONS: usize = 512;
/// Pages of one.
pub const REGION_PAGES: u64 = 16 << 10;

/// See the module. Pages are of 4096 bytes, times in ticks of the processor's counter.
#[repr(C)]
#[derive(Debug)]
pub struct Counts {
    /// Bytes that may be kept here: the agent's word.
    pub budget: AtomicU64,
    /// The first and the latest look at two clocks: ticks, nanoseconds.
    pub clocks: [[AtomicU64; 2]; 2],
    /// Pages that are here and may be evicted.
    pub resident: AtomicU64,
    /// Pages that each server has now, and most that all had together.
    pub away: [AtomicU64; SERVERS],
    pub most_away: AtomicU64,
    /// Parts of memory ([`PLACES`](super::places::PLACES) in all) of which there is to be a copy and is none.
    pub bare: AtomicU64,
    /// By [`kind`].
    pub faults: [AtomicU64; kind::ALL],
    /// Faults that the pager answered at once, by [`time_bucket`]: from when it heard of one until the program could go on.
    pub times: [AtomicU64; TIMES],
    /// Fetches that a fault caused, by the logarithm of their pages.
    pub units: [AtomicU64; UNITS],
    /// Pages fetched ahead, and of these, those that the program missed later, and those let go of.
    pub ahead: [AtomicU64; 3],
    /// Bytes of pages from and to each server.
    pub bytes: [[AtomicU64; 2]; SERVERS],
    /// Pages evicted; of these, those that the server had already, and those that were zero.
    pub evicted: [AtomicU64; 3],
    /// Times in which the pager waited for room, and ticks in all.
    pub stalls: [AtomicU64; 2],
    /// Of each region: fetches, and in the uppermost byte the logarithm of the last one's pages.
    pub regions: [AtomicU64; REGIONS],
}

/// Bit of a region's word from which on it holds the unit.
pub const UNIT_SHIFT: u32 = 56;

/// The bucket of a time: eight for each power of two.
pub fn time_bucket(time: u64) -> usize {
    let time = time.max(1 << PARTS_BITS);
    let power = 63 - time.leading_zeros();
    let part = time >> (power - PARTS_BITS) & ((1 << PARTS_BITS) - 1);
    (((power as u64) << PARTS_BITS | part) as usize).min(TIMES - 1)
}

/// The least time in a bucket.
pub fn time_of(bucket: usize) -> u64 {
    let (power, part) = (bucket >> PARTS_BITS, bucket as u64 & ((1 << PARTS_BITS) - 1));
    ((1 << PARTS_BITS) | part) << power >> PARTS_BITS
}
