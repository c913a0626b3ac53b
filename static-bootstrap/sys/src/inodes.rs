//! The head of what programs with asynchronous I/O and their node's I/O worker share: who waits for whom, and the table of the files that they keep.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Logs of a job on one node that are written at the same time.
pub const SEGMENTS: usize = 256;
/// Files of a node that are, or were found unfit.
pub const INODES: usize = 4096;
/// In the place of a segment: of a program that has ended, or that keeps nothing.
pub const NOBODY: u32 = u32::MAX;
/// Places in the table of files in which one is looked for.
const REACH: usize = 64;
const WORDS: usize = SEGMENTS / 64;

/// At the beginning of the memory.
#[repr(C)]
#[derive(Debug)]
pub struct Head {
    /// Grows when the worker has to look; who rings wakes it.
    pub bell: AtomicU32,
    /// Grows when the worker has done something that is waited for.
    pub done: AtomicU32,
    /// Not 0: there is no worker any more, and none will come.
    pub broken: AtomicU32,
    /// Files that somebody keeps.
    pub owned: AtomicU32,
    /// Bytes that a log may hold.
    pub limit: AtomicU64,
    /// Ranks on this node, which share its memory.
    pub ranks: AtomicU32,
    /// The next run's.
    ticket: AtomicU64,
    /// Not 0, in jobs on several hosts: a program may tell programs elsewhere without being seen: who shares memory with others keeps nothing.
    pub unseen: AtomicU32,
    /// Not 0: something is missing in a file, or was.
    pub lost: AtomicU32,
    /// Grows when a file that another host writes is to be synced.
    pub syncs: AtomicU32,
    /// A bit for each segment whose program shares memory with others and may have something pending; in jobs on several hosts.
    sharing: [AtomicU64; WORDS],
    pub inodes: [Inode; INODES],
}

/// A file that programs keep, or must not.
#[repr(C)]
#[derive(Debug)]
pub struct Inode {
    /// One of [`inode`].
    pub state: AtomicU32,
    /// Segment of who wrote last.
    writer: AtomicU32,
    pub device: AtomicU64,
    pub number: AtomicU64,
    /// A bit for each segment whose program keeps it.
    writers: [AtomicU64; WORDS],
    /// Not 0: the errno because of which something is missing in it.
    pub failed: AtomicU32,
    /// Whether another host has written it: [`IDLE`](inode::IDLE) or what follows there.
    pub elsewhere: AtomicU32,
}

pub mod inode {
    pub const FREE: u32 = 0;
    /// Free, but others may be found behind it.
    pub const GONE: u32 = 1;
    /// Programs keep what they write to it.
    pub const KEPT: u32 = 2;
    /// Nobody does: it is locked or mapped.
    pub const DIRECT: u32 = 3;

    /// No other host has written it since it was synced there; one has; somebody waits for it to be synced.
    pub const IDLE: u32 = 0;
    pub const WRITTEN: u32 = 1;
    pub const SYNC: u32 = 2;
}

impl Inode {
    fn is(&self, device: u64, number: u64) -> bool {
        self.number.load(Ordering::Relaxed) == number && self.device.load(Ordering::Relaxed) == device
    }

    /// Segments whose programs keep it.
    pub fn writers(&self) -> impl Iterator<Item = u32> {
        members(&self.writers)
    }

    /// Whether this segment's program is the only one.
    #[inline]
    pub fn is_alone(&self, segment: u32) -> bool {
        let own = |word: usize| if word == segment as usize / 64 { 1 << (segment % 64) } else { 0u64 };
        self.writers.iter().enumerate().all(|(nth, word)| word.load(Ordering::SeqCst) & !own(nth) == 0)
    }

    /// For the agent: this segment's program keeps it, or does not any more; true: nobody does.
    pub fn set_writer(&self, segment: u32, keeps: bool) -> bool {
        if let Some(word) = self.writers.get(segment as usize / 64) {
            let bit = 1 << (segment % 64);
            _ = if keeps { word.fetch_or(bit, Ordering::SeqCst) } else { word.fetch_and(!bit, Ordering::SeqCst) };
        }
        self.writers.iter().all(|word| word.load(Ordering::SeqCst) == 0)
    }

    /// Whether a run of this segment's may grow.
    #[inline]
    pub fn is_last(&self, segment: u32) -> bool {
        self.writer.load(Ordering::SeqCst) == segment
    }
}

impl Head {
    /// The place of a file, if it has one.
    pub fn find(&self, device: u64, number: u64) -> Option<&Inode> {
        let first = first(device, number);
        for nth in 0..REACH {
            let inode = &self.inodes[(first + nth) % INODES];
            match inode.state.load(Ordering::SeqCst) {
                inode::FREE => return None,
                inode::GONE => {}
                _ if inode.is(device, number) => return Some(inode),
                _ => {}
            }
        }
        None
    }

    /// For the agent, which alone changes the table: the number of a file's place, made in this state if it has none. `None`: there is no room.
    pub fn claim(&self, device: u64, number: u64, state: u32) -> Option<usize> {
        let first = first(device, number);
        let places = || (0..REACH).map(|nth| (first + nth) % INODES);
        let is_free = |nth: &usize| self.inodes[*nth].state.load(Ordering::SeqCst) < inode::KEPT;
        if let Some(nth) = places().find(|nth| !is_free(nth) && self.inodes[*nth].is(device, number)) {
            return Some(nth);
        }
        let nth = places().find(is_free)?;
        let inode = &self.inodes[nth];
        inode.device.store(device, Ordering::SeqCst);
        inode.number.store(number, Ordering::SeqCst);
        inode.writer.store(NOBODY, Ordering::SeqCst);
        inode.failed.store(0, Ordering::SeqCst);
        inode.elsewhere.store(inode::IDLE, Ordering::SeqCst);
        inode.state.store(state, Ordering::SeqCst);
        Some(nth)
    }

    /// For the agent: the place is free.
    pub fn release(&self, nth: usize) {
        let state = |nth: usize| &self.inodes[nth % INODES].state;
        state(nth).store(inode::GONE, Ordering::SeqCst);
        // Who looks for another file need not look beyond the last.
        let mut last = nth;
        while state(last + 1).load(Ordering::SeqCst) == inode::FREE
            && state(last).compare_exchange(inode::GONE, inode::FREE, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            last += INODES - 1;
        }
    }

    /// Segments of programs that share memory with others and may have something pending.
    pub fn sharing(&self) -> impl Iterator<Item = u32> {
        members(&self.sharing)
    }

    /// This segment's program is one of them, or not any more.
    #[inline]
    pub fn set_sharing(&self, segment: u32, does: bool) {
        let Some(word) = self.sharing.get(segment as usize / 64) else { return };
        let bit = 1 << (segment % 64);
        if (word.load(Ordering::Relaxed) & bit != 0) != does {
            _ = if does { word.fetch_or(bit, Ordering::SeqCst) } else { word.fetch_and(!bit, Ordering::SeqCst) };
        }
    }

    /// Makes this segment's program the one that wrote last, and returns its run's ticket.
    pub fn turn(&self, inode: &Inode, segment: u32) -> u64 {
        loop {
            inode.writer.store(segment, Ordering::SeqCst);
            let ticket = self.ticket.fetch_add(1, Ordering::SeqCst);
            // Otherwise another one's ticket may be an earlier one, and his run grow.
            if inode.is_last(segment) {
                return ticket;
            }
        }
    }
}

/// The bits that are set.
fn members(words: &[AtomicU64; WORDS]) -> impl Iterator<Item = u32> {
    (0..)
        .zip(words.iter().map(|word| word.load(Ordering::SeqCst)))
        .flat_map(|(word, bits)| (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| word * 64 + bit))
}

fn first(device: u64, number: u64) -> usize {
    ((number ^ device.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % INODES
}
