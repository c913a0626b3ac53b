//! Memory that programs with asynchronous I/O share with the I/O worker of their node: what they wrote and the file system does not have yet.
//!
//! Every program has a segment with one log, a ring of runs in program order. A run is a header and the bytes that follow each other in one file;
//! the last one may still grow. The program changes its log by one store, so that what a kill leaves is a prefix of what it wrote. The worker
//! alone moves [`Segment::run`] and [`Segment::upto`].
#![allow(unsafe_code, reason = "a ring that two processes use")]

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};

/// Programs of a job on one node that write asynchronously at the same time.
pub const SEGMENTS: usize = 256;
/// Bytes of a program's log, and of one run.
pub const RING: u64 = 4 << 20;
pub const RUN: u64 = 1 << 20;
/// What is larger is not kept: it gains nothing.
pub const SMALL: usize = 64 << 10;
/// Open files of a program that are written asynchronously at the same time.
pub const FILES: usize = 512;
/// Files of a node that are, or were found unfit.
pub const INODES: usize = 4096;
/// The file offsets that are kept, at most.
pub const OFFSETS: u64 = 1 << 42;
const HEADER: u64 = 16;
const SPINS: u32 = 10_000;
/// One counts; the others are for a program's thread and for signal handlers that interrupt each other.
const STAGES: usize = 8;
/// In the place of a file: the rest of the ring is unused.
const SKIP: u32 = u32::MAX;
/// In the place of a segment: of a program that has ended, or that keeps nothing.
pub const NOBODY: u32 = u32::MAX;
/// No run, no file.
pub const NONE: u64 = u64::MAX;

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
    /// Files that have an owner.
    pub owned: AtomicU32,
    pub inodes: [Inode; INODES],
}

/// Who writes a file.
#[repr(C)]
#[derive(Debug)]
pub struct Inode {
    /// One of [`inode`].
    pub state: AtomicU32,
    /// Number of the segment.
    pub owner: AtomicU32,
    pub device: AtomicU64,
    pub number: AtomicU64,
}

pub mod inode {
    pub const FREE: u32 = 0;
    /// Its names are being written.
    pub const TAKEN: u32 = 1;
    /// One program keeps what it writes.
    pub const OWNED: u32 = 2;
    /// Nobody does: several write it, or it is locked or mapped.
    pub const DIRECT: u32 = 3;
}

/// What one program has.
#[repr(C)]
#[derive(Debug)]
pub struct Segment {
    /// Which of the stages counts, in the lowest bits, and how often that changed.
    sequence: AtomicU64,
    stages: [Stage; STAGES],
    /// A bit for each stage that is being written: by who was interrupted, too.
    staging: AtomicU32,
    /// Not 0: something is being appended, or a position looked up for it. Who comes in between must not.
    pub busy: AtomicU32,
    /// Position up to which somebody waits.
    pub wanted: AtomicU64,
    /// Header of the run from which the worker goes on, and the position up to which the file system has all.
    pub run: AtomicU64,
    pub upto: AtomicU64,
    pub files: [File; FILES],
}

/// An open file as the worker knows it.
#[repr(C)]
#[derive(Debug)]
pub struct File {
    /// Not 0: the worker has its descriptor.
    pub known: AtomicU32,
    /// The first errno that was not told yet; nothing is written until it is.
    pub error: AtomicU32,
}

#[repr(C)]
#[derive(Debug)]
struct Stage {
    /// Bytes ever put into the ring.
    tail: AtomicU64,
    /// Position of the header of the run that may grow.
    run: AtomicU64,
    file: AtomicU64,
    /// Offset in the file at which it would go on.
    next: AtomicU64,
    /// The open file whose offset is kept here, and that.
    holder: AtomicU64,
    offset: AtomicU64,
}

/// A copy of what counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    sequence: u64,
    pub tail: u64,
    pub run: u64,
    file: u64,
    next: u64,
    pub holder: u64,
    pub offset: u64,
}

/// Why nothing was appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The worker has to make room first.
    Full,
    /// A signal handler did something meanwhile.
    Again,
}

/// Something for the worker to write: `at` and `len` are bytes of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub file: u32,
    pub offset: u64,
    pub at: u64,
    pub len: u64,
}

/// The log holds what no program writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// Where a segment begins, and its ring behind it.
pub const fn segment_at(nth: usize) -> usize {
    HEAD_BYTES + nth * SEGMENT_BYTES
}
const HEAD_BYTES: usize = size_of::<Head>().next_multiple_of(4096);
pub const RING_AT: usize = size_of::<Segment>().next_multiple_of(4096);
pub const SEGMENT_BYTES: usize = RING_AT + RING as usize;
/// All of it.
pub const BYTES: usize = segment_at(SEGMENTS);

impl Inode {
    /// Whether it is this file's.
    fn is(&self, device: u64, number: u64) -> bool {
        self.number.load(Ordering::Relaxed) == number && self.device.load(Ordering::Relaxed) == device
    }
}

impl Head {
    /// The place of a file, if it has one.
    pub fn find(&self, device: u64, number: u64) -> Option<&Inode> {
        let first = first(device, number);
        for nth in 0..INODES {
            let inode = &self.inodes[(first + nth) % INODES];
            match inode.state.load(Ordering::SeqCst) {
                inode::FREE => return None,
                inode::TAKEN => {}
                _ if inode.is(device, number) => return Some(inode),
                _ => {}
            }
        }
        None
    }

    /// The place of a file, made if it has none: with this state and owner then. `None`: there is no room, or somebody else is at it.
    pub fn claim(&self, device: u64, number: u64, state: u32, owner: u32) -> Option<&Inode> {
        let first = first(device, number);
        for nth in 0..INODES {
            let inode = &self.inodes[(first + nth) % INODES];
            // Who was killed at it leaves it so.
            (0..SPINS).take_while(|_| inode.state.load(Ordering::SeqCst) == inode::TAKEN).for_each(|_| spin_loop());
            let free = inode.state.compare_exchange(inode::FREE, inode::TAKEN, Ordering::SeqCst, Ordering::SeqCst);
            match free {
                Ok(_) => {
                    inode.device.store(device, Ordering::Relaxed);
                    inode.number.store(number, Ordering::Relaxed);
                    inode.owner.store(owner, Ordering::Relaxed);
                    inode.state.store(state, Ordering::SeqCst);
                    return Some(inode);
                }
                // It may be made for the same file: not to be known is safe for who asks, if he then does not keep anything.
                Err(inode::TAKEN) => return None,
                Err(_) if inode.is(device, number) => return Some(inode),
                Err(_) => {}
            }
        }
        None
    }
}

fn first(device: u64, number: u64) -> usize {
    ((number ^ device.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize % INODES
}

/// The ring of a segment, for who keeps it mapped.
#[derive(Clone, Copy, Debug)]
pub struct Log<'a> {
    pub segment: &'a Segment,
    ring: *mut u8,
}

impl<'a> Log<'a> {
    /// # Safety
    /// `ring` has [`RING`] bytes, aligned to 16, mapped for as long as the segment, and used through this type only.
    pub unsafe fn new(segment: &'a Segment, ring: *mut u8) -> Log<'a> {
        Log { segment, ring }
    }

    /// What counts now.
    pub fn now(&self) -> Now {
        loop {
            let sequence = self.segment.sequence.load(Ordering::SeqCst);
            let stage = &self.segment.stages[sequence as usize % STAGES];
            let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
            let now = Now {
                sequence,
                tail: get(&stage.tail),
                run: get(&stage.run),
                file: get(&stage.file),
                next: get(&stage.next),
                holder: get(&stage.holder),
                offset: get(&stage.offset),
            };
            fence(Ordering::Acquire);
            if self.segment.sequence.load(Ordering::Relaxed) == sequence {
                return now;
            }
        }
    }

    /// Begins an empty log. Nobody else knows of it.
    pub fn reset(&self) {
        self.segment.sequence.store(0, Ordering::Relaxed);
        let stage = &self.segment.stages[0];
        for (word, value) in [(&stage.tail, 0), (&stage.run, NONE), (&stage.file, NONE), (&stage.holder, NONE)] {
            word.store(value, Ordering::Relaxed);
        }
        for word in [&self.segment.staging, &self.segment.busy] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.segment.wanted, &self.segment.run, &self.segment.upto] {
            word.store(0, Ordering::Relaxed);
        }
        for file in &self.segment.files {
            file.known.store(0, Ordering::Relaxed);
            file.error.store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    /// Has `next` count in place of `now`; false: something else does meanwhile.
    fn change(&self, now: &Now, next: &Now) -> bool {
        let staging = &self.segment.staging;
        let taken = staging.load(Ordering::Relaxed) | 1 << (now.sequence as usize % STAGES);
        // None is free only where handlers never came back, and what they left does not count.
        let slot = match (!taken).trailing_zeros() as usize {
            free if free < STAGES => free,
            _ => (now.sequence as usize + 1) % STAGES,
        };
        staging.fetch_or(1 << slot, Ordering::Relaxed);
        // Before that a handler may have had its own change count, and there.
        if self.segment.sequence.load(Ordering::Relaxed) != now.sequence {
            staging.fetch_and(!(1 << slot), Ordering::Relaxed);
            return false;
        }
        let stage = &self.segment.stages[slot];
        for (word, value) in [
            (&stage.tail, next.tail),
            (&stage.run, next.run),
            (&stage.file, next.file),
            (&stage.next, next.next),
            (&stage.holder, next.holder),
            (&stage.offset, next.offset),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        let to = (now.sequence / STAGES as u64 + 1) * STAGES as u64 + slot as u64;
        let changed = self.segment.sequence.compare_exchange(now.sequence, to, Ordering::SeqCst, Ordering::Relaxed);
        staging.fetch_and(!(1 << slot), Ordering::Relaxed);
        changed.is_ok()
    }

    /// From here to [`Log::end`] nobody else appends: a signal handler that comes in between finds it so, and has to have [`Log::hold`] succeed
    /// before it does anything else to the file. False: this is such a handler.
    pub fn begin(&self) -> bool {
        if self.segment.busy.load(Ordering::Relaxed) != 0 {
            return false;
        }
        self.segment.busy.store(1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        true
    }

    /// See [`Log::begin`].
    pub fn end(&self) {
        compiler_fence(Ordering::SeqCst);
        self.segment.busy.store(0, Ordering::Relaxed);
    }

    /// Keeps this offset for this open file.
    pub fn hold(&self, now: &Now, holder: u64, offset: u64) -> bool {
        self.change(now, &Now { holder, offset, ..*now })
    }

    /// Appends bytes, given as addresses and lengths, at most [`SMALL`] of them, to be written at `offset` of a file.
    ///
    /// # Safety
    /// The addresses can be read. No other thread appends; [`Log::begin`] was true, and `now` is from after it.
    pub unsafe fn append(
        &self,
        now: &Now,
        file: u32,
        offset: u64,
        parts: &[[usize; 2]],
        held: (u64, u64),
    ) -> Result<(), Refused> {
        let len: u64 = parts.iter().map(|part| part[1] as u64).sum();
        let continues = now.file == u64::from(file)
            && now.next == offset
            && now.tail - now.run - HEADER + len <= RUN
            && (now.run + HEADER) % RING + (now.tail - now.run - HEADER) + len <= RING;
        let start = now.tail.next_multiple_of(HEADER);
        let room = RING - start % RING;
        let (run, at) = match (continues, room >= HEADER + len) {
            (true, _) => (now.run, now.tail),
            (false, true) => (start, start + HEADER),
            (false, false) => (start + room, start + room + HEADER),
        };
        if at + len - self.segment.run.load(Ordering::Acquire) > RING {
            return Err(Refused::Full);
        }
        if !continues {
            if now.run != NONE {
                let grown = (now.tail - now.run - HEADER) as u32;
                // SAFETY: the worker has not gone beyond the run that may grow, so this is its header.
                unsafe { self.ring.add((now.run % RING) as usize + 4).cast::<u32>().write_volatile(grown) };
            }
            if run != start {
                // SAFETY: behind the end, and free; there is room for a header wherever one may begin.
                unsafe { self.ring.add((start % RING) as usize).cast::<u32>().write_volatile(SKIP) };
            }
            // SAFETY: as above.
            unsafe {
                let header = self.ring.add((run % RING) as usize);
                header.cast::<[u32; 2]>().write_volatile([file, 0]);
                header.add(8).cast::<u64>().write_volatile(offset);
            }
        }
        let mut to = (at % RING) as usize;
        for [from, len] in parts {
            // SAFETY: behind the end, free, and not beyond the end of the ring; the caller vouches for what is read.
            unsafe { copy(*from as *const u8, self.ring.add(to), *len) };
            to += len;
        }
        let (holder, kept) = held;
        let next = Now { tail: at + len, run, file: file.into(), next: offset + len, holder, offset: kept, ..*now };
        if self.change(now, &next) { Ok(()) } else { Err(Refused::Again) }
    }

    fn header(&self, run: u64) -> (u32, u64, u64) {
        // SAFETY: headers are aligned to their size, as the ring's end is.
        let [words, offset] = unsafe { self.ring.add((run % RING) as usize).cast::<[u64; 2]>().read_volatile() };
        (words as u32, words >> 32, offset)
    }

    /// The next thing to be written, for the worker; `None`: the file system has everything.
    ///
    /// # Errors
    /// This is no log.
    pub fn next(&self) -> Result<Option<Piece>, Corrupt> {
        let now = self.now();
        let segment = self.segment;
        let (mut run, upto) = (segment.run.load(Ordering::Relaxed), segment.upto.load(Ordering::Relaxed));
        loop {
            if upto >= now.tail {
                return Ok(None);
            }
            if run >= now.tail || now.tail - run > RING || !run.is_multiple_of(HEADER) {
                return Err(Corrupt);
            }
            let (file, len, offset) = self.header(run);
            let mut after = (run + HEADER).next_multiple_of(RING);
            if file != SKIP {
                let begin = run + HEADER;
                let end = if run == now.run { now.tail } else { begin + len };
                let from = upto.max(begin);
                if end > now.tail || end < begin || end - begin > RUN || begin % RING + (end - begin) > RING {
                    return Err(Corrupt);
                }
                if from < end {
                    let offset = offset + (from - begin);
                    return Ok(Some(Piece { file, offset, at: from % RING, len: end - from }));
                }
                after = end.next_multiple_of(HEADER);
            } else if run.is_multiple_of(RING) {
                return Err(Corrupt);
            }
            run = after;
            segment.run.store(run, Ordering::Release);
        }
    }

    /// The file system has so much more.
    pub fn advance(&self, len: u64) {
        let segment = self.segment;
        let begin = segment.run.load(Ordering::Relaxed) + HEADER;
        let from = segment.upto.load(Ordering::Relaxed).max(begin);
        segment.upto.store(from + len, Ordering::SeqCst);
    }

    /// Bytes that wait, headers included.
    pub fn pending(&self) -> u64 {
        self.now().tail.saturating_sub(self.segment.upto.load(Ordering::SeqCst))
    }

    /// Address of a byte of the ring.
    pub fn address(&self, at: u64) -> *const u8 {
        // SAFETY: within the ring.
        unsafe { self.ring.add((at % RING) as usize) }
    }
}

/// # Safety
/// As `copy_nonoverlapping`.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller vouches for it.
    unsafe {
        if len == 8 {
            to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned());
        } else {
            core::ptr::copy_nonoverlapping(from, to, len);
        }
    }
}
