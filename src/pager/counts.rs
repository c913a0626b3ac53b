//! The page of counts that a program's pager shares with its node's agent: made here, read at any moment, and added up.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use crate::net::memory_file;
use crate::net::wire::facts::{Paging, Part};
use crate::sys::counts::{Counts, REGION_PAGES, REGIONS, TIMES, UNIT_SHIFT, UNITS, time_bucket, time_of};
use crate::sys::page::bytes;
use crate::sys::resident::{SERVERS, WINDOW};

const WORDS: usize = size_of::<Counts>() / 8;
/// Regions that are told of, at most.
const PARTS: usize = 8;

/// See the module.
#[derive(Debug)]
pub struct Page(File);

impl Page {
    /// A fresh one for a program that may keep so many bytes here.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn new(budget: u64) -> io::Result<Page> {
        let page = Page(memory_file::write_bytes("hpcrt-counts", &[0; size_of::<Counts>()])?.into());
        page.set_budget(budget)?;
        Ok(page)
    }

    /// Has the program keep no more than so many bytes here from now on.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn set_budget(&self, bytes: u64) -> io::Result<()> {
        self.0.write_all_at(&bytes.to_ne_bytes(), offset_of!(Counts, budget) as u64)
    }

    /// The file, to be handed over.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// What stands there now.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn read(&self) -> io::Result<Paging> {
        let mut bytes = [0; size_of::<Counts>()];
        self.0.read_exact_at(&mut bytes, 0)?;
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Ok(understand(&words))
    }
}

impl From<Page> for OwnedFd {
    fn from(page: Page) -> OwnedFd {
        page.0.into()
    }
}

/// So many words from a field on.
macro_rules! field {
    ($words:expr, $name:ident, $len:expr) => {
        &$words[offset_of!(Counts, $name) / 8..][..$len]
    };
}

fn understand(words: &[u64; WORDS]) -> Paging {
    let clocks = field!(words, clocks, 4);
    let (ticks, nanoseconds) = (clocks[2].saturating_sub(clocks[0]), clocks[3].saturating_sub(clocks[1]));
    // Before the second look at the clocks: as of a processor of 2.5 GHz.
    let tick = if ticks > 0 && nanoseconds > 0 { nanoseconds as f64 / ticks as f64 } else { 0.4 };
    let mut times = vec![0; TIMES];
    for (bucket, count) in field!(words, times, TIMES).iter().enumerate() {
        // What falls into a bucket is taken to lie in its middle.
        let middle = (time_of(bucket) as f64 + time_of(bucket + 1) as f64) / 2.0;
        times[time_bucket((middle * tick) as u64)] += count;
    }
    let regions = field!(words, regions, REGIONS);
    let part = |(nth, word): (usize, &u64)| Part {
        begin: WINDOW + bytes(nth as u64 * REGION_PAGES),
        unit: bytes(1 << (word >> UNIT_SHIFT).min(UNITS as u64 - 1)),
        faults: word & ((1 << UNIT_SHIFT) - 1),
    };
    let mut parts: Vec<Part> = regions.iter().enumerate().map(part).filter(|part| part.faults > 0).collect();
    parts.sort_unstable_by_key(|part| std::cmp::Reverse(part.faults));
    parts.truncate(PARTS);
    let servers = |which: usize| words[offset_of!(Counts, bytes) / 8..].iter().skip(which).step_by(2);
    Paging {
        programs: 1,
        running: 1,
        budget: words[offset_of!(Counts, budget) / 8],
        resident: bytes(words[offset_of!(Counts, resident) / 8]),
        away: field!(words, away, SERVERS).iter().copied().map(bytes).collect(),
        most_away: bytes(words[offset_of!(Counts, most_away) / 8]),
        bare: words[offset_of!(Counts, bare) / 8],
        faults: field!(words, faults, 4).to_vec(),
        times,
        units: field!(words, units, UNITS).to_vec(),
        ahead: field!(words, ahead, 3).iter().copied().map(bytes).collect(),
        received: servers(0).take(SERVERS).sum(),
        sent: servers(1).take(SERVERS).sum(),
        evicted: field!(words, evicted, 3).iter().copied().map(bytes).collect(),
        stalls: (
            words[offset_of!(Counts, stalls) / 8],
            (words[offset_of!(Counts, stalls) / 8 + 1] as f64 * tick) as u64,
        ),
        parts,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::counts::kind;

    #[test]
    fn what_a_pager_writes_is_understood() {
        let page = Page::new(1 << 30).unwrap();
        let set = |at: usize, value: u64| page.0.write_all_at(&value.to_ne_bytes(), at as u64).unwrap();
        // 2 ticks a nanosecond.
        [1000u64, 7, 3000, 1007].iter().enumerate().for_each(|(nth, v)| set(offset_of!(Counts, clocks) + 8 * nth, *v));
        set(offset_of!(Counts, away) + 8, 3);
        set(offset_of!(Counts, most_away), 4);
        set(offset_of!(Counts, faults) + 8 * kind::FORESEEN, 9);
        set(offset_of!(Counts, times) + 8 * time_bucket(20_000), 5);
        set(offset_of!(Counts, times) + 8 * time_bucket(200_000), 1);
        set(offset_of!(Counts, units) + 8 * 4, 6);
        set(offset_of!(Counts, bytes), 4096);
        set(offset_of!(Counts, bytes) + 16, 4096);
        set(offset_of!(Counts, bytes) + 24, 8192);
        set(offset_of!(Counts, stalls) + 8, 2000);
        set(offset_of!(Counts, regions) + 8 * 3, 8 << UNIT_SHIFT | 7);
        let told = page.read().unwrap();
        assert_eq!((told.budget, told.away[1], told.most_away), (1 << 30, 3 * 4096, 4 * 4096));
        assert_eq!((told.faults[kind::FORESEEN], told.units[4], told.received, told.sent), (9, 6, 8192, 8192));
        assert_eq!(told.stalls.1, 1000);
        assert_eq!(told.parts, [Part { begin: WINDOW + 3 * (64 << 20), unit: 1 << 20, faults: 7 }]);
        let [half, most] = [0.5, 0.99].map(|part| told.percentile(part).unwrap());
        assert!((9e-6..11.5e-6).contains(&half) && (90e-6..115e-6).contains(&most), "{half} {most}");
        let mut sum = Paging::default();
        (0..2).for_each(|_| sum.add(&told));
        assert_eq!((sum.programs, sum.away[1], sum.stalls.1, sum.parts.len()), (2, 6 * 4096, 2000, 2));
    }

    #[test]
    fn buckets_hold_their_times() {
        for time in [8, 9, 15, 16, 1000, 1023, 1024, 123_456, u64::from(u32::MAX)] {
            let bucket = time_bucket(time);
            assert!(time_of(bucket) <= time && time < time_of(bucket + 1), "{time} {bucket}");
        }
        assert_eq!((time_bucket(0), time_bucket(u64::MAX)), (time_bucket(8), TIMES - 1));
    }
}
