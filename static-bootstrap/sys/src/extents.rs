//! Memory that programs with asynchronous I/O share with the I/O worker of their node: what they wrote and the file system does not have yet.
//!
//! A program has a segment with a log for every file system that it writes to, a ring of runs in program order. A run is a header and the bytes that
//! follow each other in one file; the last one may still grow. The program changes its log by one store, so that what a kill leaves is a prefix of what
//! it wrote. The worker alone moves [`Segment::run`] and [`Segment::upto`], the agent alone the table of files ([`Head::inodes`]).
//!
//! Where several programs write one file, tickets say in which order: whoever writes to it makes himself its [`Inode::writer`] and begins a run with
//! a ticket of its own; who finds somebody else there no longer lets his run grow. So what was written after another write had returned is in a run
//! with a later ticket, or in the same one behind it.
#![allow(unsafe_code, reason = "a ring that two processes use")]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence, fence};

pub use super::inodes::{Head, INODES, Inode, NOBODY, SEGMENTS, inode};

/// Bytes of a log, at least and at most: a power of two. Of its beginning, which suffices while the worker keeps up; and of one run.
pub const RING_LEAST: u64 = 16 << 20;
pub const RING_MOST: u64 = 1 << 30;
pub const HOT: u64 = 4 << 20;
pub const RUN: u64 = 1 << 20;
/// What is larger is kept only where writing it takes long.
pub const SMALL: usize = 64 << 10;
/// Nanoseconds for a KiB that writing may take and nothing is lost: copying and having another process write takes a quarter of it.
pub const SLOW: u32 = 1000;
/// Open files of a program that are written asynchronously at the same time.
pub const FILES: usize = 512;
/// So many times what waits has to be free for the ring to be begun again.
const AGAIN: u64 = 4;
/// The file offsets that are kept, at most.
pub const OFFSETS: u64 = 1 << 42;
/// In the place of an offset: at the file's end, wherever that is (O_APPEND).
pub const APPEND: u64 = u64::MAX;
const HEADER: u64 = 32;
/// One counts; the others are for a program's thread and for signal handlers that interrupt each other.
const STAGES: usize = 8;
/// Bits of [`Segment::sequence`]: which stage counts, and by how many bytes what it says has grown since. The rest counts changes.
const STAGE: u64 = STAGES as u64 - 1;
pub const GROWN_SHIFT: u32 = 3;
pub const GROWN: u64 = (2 * RUN - 1) << GROWN_SHIFT;
const CHANGE: u64 = GROWN + STAGE + 1;
/// In the place of a file: the rest of the ring is unused.
const SKIP: u32 = u32::MAX;
/// No run, no file.
pub const NONE: u64 = u64::MAX;

/// What one program has for one file system.
#[repr(C)]
#[derive(Debug)]
pub struct Segment {
    /// The file system; [`NONE`] until it is known.
    pub device: AtomicU64,
    /// Grows when the log begins anew: positions from before mean nothing.
    pub epoch: AtomicU64,
    /// Writes that were kept, their bytes, and the calls that the worker made for them.
    pub writes: AtomicU64,
    pub bytes: AtomicU64,
    pub pieces: AtomicU64,
    /// What appending the piece at this position, counted from 1, found as the file's size and as the open file's offset.
    pub appends: AtomicU64,
    pub append_size: AtomicU64,
    pub append_offset: AtomicU64,
    /// Nanoseconds that the file system takes for a KiB, lately; 0: unknown.
    pub pace: AtomicU32,
    /// Which of the stages counts, by how much its run has grown, its offset with it, and how often anything else changed.
    sequence: AtomicU64,
    stages: [Stage; STAGES],
    /// A bit for each stage that is being written: by who was interrupted, too.
    staging: AtomicU32,
    /// Not 0: something is being appended, or a position looked up for it. Who comes in between must not.
    pub busy: AtomicU32,
    /// Not 0: the worker gives memory of the ring back, and nobody appends.
    giving: AtomicU32,
    /// Not 0: an open file of which something is missing was closed by a call that cannot say so, or that nobody expects to.
    pub untold: AtomicU32,
    /// Position up to which somebody waits.
    pub wanted: AtomicU64,
    /// Header of the run from which the worker goes on, and the position up to which the file system has all.
    pub run: AtomicU64,
    pub upto: AtomicU64,
    pub files: [File; FILES],
}

/// The worker has the descriptor of an open file; it has no room for it.
pub const KNOWN: u32 = 1;
pub const NOT_TAKEN: u32 = 2;

/// An open file as the worker knows it.
#[repr(C)]
#[derive(Debug)]
pub struct File {
    /// [`KNOWN`], [`NOT_TAKEN`] or 0.
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
    /// The open file, and above it its file's place in the table.
    file: AtomicU64,
    /// Offset in the file at which it would go on.
    next: AtomicU64,
    /// The open file whose offset is kept here, and that.
    holder: AtomicU64,
    offset: AtomicU64,
    /// Position from which on the ring was left unused last, up to its end.
    skip: AtomicU64,
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
    skip: u64,
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
    /// Place of its file in the table.
    pub inode: u32,
    pub offset: u64,
    pub at: u64,
    pub len: u64,
    pub ticket: u64,
    /// Position of its first byte.
    pub position: u64,
}

/// Where something is appended to.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    pub head: &'a Head,
    /// Whose log it is.
    pub segment: u32,
    /// The open file, its file, and the place of that in the table.
    pub file: u32,
    pub inode: &'a Inode,
    pub place: u32,
    /// Bytes that may be pending, and those that one run may hold.
    pub limit: u64,
    pub run: u64,
}

/// How a run grows by one store: bytes are put behind its last, and [`GROWN`] of the sequence says how many.
#[derive(Clone, Copy, Debug)]
pub struct Growing {
    /// Address of the segment, and what its sequence is but for its growth.
    pub segment: u64,
    pub sequence: u64,
    /// Address of what comes behind the last byte, how many more there may be, and where in the file that is.
    pub bytes: u64,
    pub most: u64,
    pub offset: u64,
    /// Address of the file's place in the table, and what its first words are as long as the run may grow.
    pub inode: u64,
    pub fit: u64,
    /// Address of what is 0 as long as nothing was lost.
    pub error: u64,
}

/// Where words of a segment are that [`Growing`] leads to.
pub const SEQUENCE_AT: usize = core::mem::offset_of!(Segment, sequence);
pub const BUSY_AT: usize = core::mem::offset_of!(Segment, busy);
pub const WRITES_AT: usize = core::mem::offset_of!(Segment, writes);
pub const BYTES_AT: usize = core::mem::offset_of!(Segment, bytes);

/// The log holds what no program writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// Where a segment begins, and its ring behind all segments.
pub const fn segment_at(nth: usize) -> usize {
    HEAD_BYTES + nth * SEGMENT_BYTES
}
pub const fn ring_at(nth: usize, ring: u64) -> usize {
    CONTROL + nth * ring as usize
}
/// What may be pending in a ring.
pub const fn limit_of(ring: u64) -> u64 {
    ring - 2 * RUN
}
const HEAD_BYTES: usize = size_of::<Head>().next_multiple_of(4096);
const SEGMENT_BYTES: usize = size_of::<Segment>().next_multiple_of(4096);
/// What everybody maps.
pub const CONTROL: usize = segment_at(SEGMENTS);

impl Piece {
    /// What it covers of its file: what appends, everything.
    pub fn range(&self) -> (u64, u64) {
        if self.offset == APPEND { (0, u64::MAX) } else { (self.offset, self.offset.saturating_add(self.len)) }
    }

    /// Whether it writes to some bytes of this range of its file.
    pub fn covers(&self, (low, high): (u64, u64)) -> bool {
        let (from, to) = self.range();
        from < high && low < to
    }

    /// Whether both write to the same bytes of a file, or one to its end.
    pub fn overlaps(&self, other: &Piece) -> bool {
        self.inode == other.inode && self.covers(other.range())
    }
}

/// The ring of a segment, for who keeps it mapped.
#[derive(Clone, Copy, Debug)]
pub struct Log<'a> {
    pub segment: &'a Segment,
    ring: *mut u8,
    len: u64,
}

impl<'a> Log<'a> {
    /// # Safety
    /// `ring` has `len` bytes, a power of two from [`RING_LEAST`] on, aligned to a page, mapped for as long as the segment, and used through this
    /// type only; or it is null, and nothing is appended, taken or counted.
    pub unsafe fn new(segment: &'a Segment, ring: *mut u8, len: u64) -> Log<'a> {
        Log { segment, ring, len }
    }

    /// Where in the ring a position is.
    #[inline]
    fn place(&self, position: u64) -> u64 {
        position & self.len.wrapping_sub(1)
    }

    /// What counts now.
    #[inline]
    pub fn now(&self) -> Now {
        loop {
            let sequence = self.segment.sequence.load(Ordering::SeqCst);
            let stage = &self.segment.stages[sequence as usize % STAGES];
            let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
            let grown = (sequence & GROWN) >> GROWN_SHIFT;
            let now = Now {
                sequence,
                tail: get(&stage.tail) + grown,
                run: get(&stage.run),
                file: get(&stage.file),
                next: get(&stage.next).wrapping_add(grown),
                holder: get(&stage.holder),
                offset: get(&stage.offset).wrapping_add(grown),
                skip: get(&stage.skip),
            };
            fence(Ordering::Acquire);
            if self.segment.sequence.load(Ordering::Relaxed) == sequence {
                return now;
            }
        }
    }

    /// Begins an empty log. Nobody else knows of it.
    pub fn reset(&self) {
        self.segment.epoch.fetch_add(1, Ordering::SeqCst);
        self.segment.sequence.store(0, Ordering::Relaxed);
        let stage = &self.segment.stages[0];
        for (word, value) in
            [(&stage.tail, 0), (&stage.run, NONE), (&stage.file, NONE), (&stage.holder, NONE), (&stage.skip, 0)]
        {
            word.store(value, Ordering::Relaxed);
        }
        for word in [&self.segment.staging, &self.segment.busy, &self.segment.giving] {
            word.store(0, Ordering::Relaxed);
        }
        let segment = self.segment;
        for word in [&segment.wanted, &segment.run, &segment.upto, &segment.appends] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&segment.writes, &segment.bytes, &segment.pieces] {
            word.store(0, Ordering::Relaxed);
        }
        segment.pace.store(0, Ordering::Relaxed);
        for file in &segment.files {
            file.known.store(0, Ordering::Relaxed);
            file.error.store(0, Ordering::Relaxed);
        }
        // Who saw the epoch and a position from before together finds that it is over.
        self.segment.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Has `next` count in place of `now`; false: something else does meanwhile.
    #[inline]
    fn change(&self, now: &Now, next: &Now) -> bool {
        let staging = &self.segment.staging;
        let taken = staging.load(Ordering::Relaxed) | 1 << (now.sequence as usize % STAGES);
        // None is free only where handlers never came back, and what they left does not count.
        let slot = match (!taken).trailing_zeros() as usize {
            free if free < STAGES => free,
            _ => (now.sequence as usize + 1) % STAGES,
        };
        local::set(staging, 1 << slot);
        // Before that a handler may have had its own change count, and there.
        if self.segment.sequence.load(Ordering::Relaxed) != now.sequence {
            local::clear(staging, 1 << slot);
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
            (&stage.skip, next.skip),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        let to = (now.sequence & !(CHANGE - 1)).wrapping_add(CHANGE) + slot as u64;
        let changed = local::replace(&self.segment.sequence, now.sequence, to);
        local::clear(staging, 1 << slot);
        changed
    }

    /// From here to [`Log::end`] nobody else appends: a signal handler that comes in between finds it so, and has to have [`Log::hold`] succeed
    /// before it does anything else to the file. False: this is such a handler, or the worker gives memory
    /// back; nothing is kept then.
    #[inline]
    pub fn begin(&self) -> bool {
        if self.segment.busy.load(Ordering::Relaxed) != 0 {
            return false;
        }
        self.segment.busy.swap(1, Ordering::SeqCst);
        if self.segment.giving.load(Ordering::SeqCst) != 0 {
            self.end();
            return false;
        }
        true
    }

    /// See [`Log::begin`].
    #[inline]
    pub fn end(&self) {
        compiler_fence(Ordering::SeqCst);
        self.segment.busy.store(0, Ordering::Relaxed);
    }

    /// Keeps this offset for this open file.
    #[inline]
    pub fn hold(&self, now: &Now, holder: u64, offset: u64) -> bool {
        self.change(now, &Now { holder, offset, ..*now })
    }

    /// Appends bytes, given as addresses and lengths, to be written at `offset` of a file, or [`APPEND`]: in runs of at most [`RUN`], which become
    /// the worker's all at once. Returns what is pending then.
    ///
    /// # Safety
    /// The addresses can be read. No other thread appends; [`Log::begin`] was true, and `now` is from after it.
    #[inline]
    pub unsafe fn append(
        &self,
        now: &Now,
        to: &Target<'_>,
        offset: u64,
        parts: &[[usize; 2]],
        held: (u64, u64),
    ) -> Result<u64, Refused> {
        let len: u64 = parts.iter().map(|part| part[1] as u64).sum();
        let file = u64::from(to.file) | u64::from(to.place) << 32;
        let begin = now.run.wrapping_add(HEADER);
        let continues = now.file == file
            && now.next == offset
            && now.tail - begin + len <= to.run
            && self.place(begin) + (now.tail - begin) + len <= self.len
            && to.inode.is_last(to.segment);
        let upto = self.segment.upto.load(Ordering::Acquire);
        let first = self.segment.run.load(Ordering::Acquire);
        // What the worker has written is still in caches, or at least the log's memory: the ring is begun again where far more of its beginning is
        // free than waits.
        let (waits, free) = (now.tail.saturating_sub(upto), first.saturating_sub(now.tail - self.place(now.tail)));
        let mut again = self.place(now.tail.next_multiple_of(HEADER)) >= HOT && waits * AGAIN <= free;
        let ends = |again| match continues {
            true => (now.tail + len, now.skip),
            false => self.runs(now.tail, len, again).fold((now.tail, now.skip), |(_, skip), (start, run, bytes)| {
                (run + HEADER + bytes, if run == start { skip } else { start })
            }),
        };
        // The run that may grow stays where it is: much does not fit before it.
        again &= ends(again).0 - first <= self.len;
        let (end, skip) = ends(again);
        if end - first > self.len || upto < now.tail && self.waiting(skip, upto, end) > to.limit {
            return Err(Refused::Full);
        }
        let mut from = Parts { parts, within: 0 };
        let mut last = now.run;
        if continues {
            // SAFETY: behind the end, free, and not beyond the end of the ring; the caller vouches for what is read.
            unsafe { from.copy(self.ring.add(self.place(now.tail) as usize), len as usize) };
        } else {
            if now.run != NONE {
                let grown = (now.tail - begin) as u32;
                // SAFETY: the worker has not gone beyond the run that may grow, so this is its header.
                unsafe { self.ring.add(self.place(now.run) as usize + 4).cast::<u32>().write_volatile(grown) };
            }
            let ticket = to.head.turn(to.inode, to.segment);
            let mut at = offset;
            for (start, run, bytes) in self.runs(now.tail, len, again) {
                if run != start {
                    // SAFETY: behind the end, and free; there is room for a header wherever one may begin.
                    unsafe { self.ring.add(self.place(start) as usize).cast::<u32>().write_volatile(SKIP) };
                }
                // SAFETY: as above.
                unsafe {
                    let header = self.ring.add(self.place(run) as usize);
                    header.cast::<[u32; 2]>().write_volatile([to.file, bytes as u32]);
                    header.add(8).cast::<[u64; 3]>().write_volatile([at, ticket, to.place.into()]);
                    from.copy(header.add(HEADER as usize), bytes as usize);
                }
                at = if offset == APPEND { APPEND } else { at + bytes };
                last = run;
            }
        }
        let (holder, kept) = held;
        let after = if offset == APPEND { APPEND } else { offset + len };
        let next = Now { tail: end, run: last, file, next: after, holder, offset: kept, skip, ..*now };
        if self.change(now, &next) { Ok(self.waiting(skip, upto, end)) } else { Err(Refused::Again) }
    }

    /// Where so many bytes behind a position come, from the ring's beginning on if they are to: where each run could begin, where it does, and its
    /// length.
    #[inline]
    fn runs(&self, mut tail: u64, mut left: u64, mut again: bool) -> impl Iterator<Item = (u64, u64, u64)> {
        core::iter::from_fn(move || {
            let bytes = left.min(RUN);
            let start = tail.next_multiple_of(HEADER);
            let room = self.len - self.place(start);
            let run = if room >= HEADER + bytes && !again { start } else { start + room };
            (left, again, tail) = (left - bytes, false, run + HEADER + bytes);
            (bytes > 0).then_some((start, run, bytes))
        })
    }

    /// What has to be true, and is to be done, for the next bytes of the open file that was just written to at its offset to be put behind the last: `None`,
    /// if something else was written.
    #[inline]
    pub fn growing(&self, to: &Target<'_>) -> Option<Growing> {
        let now = self.now();
        let file = u64::from(to.file) | u64::from(to.place) << 32;
        let fits = now.file == file && now.holder == u64::from(to.file) && now.offset == now.next;
        let begin = now.run + HEADER;
        let grown = now.tail.checked_sub(begin).filter(|_| fits && now.sequence & GROWN == 0)?;
        let upto = self.segment.upto.load(Ordering::Acquire);
        let pending = self.waiting(now.skip, upto, now.tail);
        // When there is a run for the worker, it is told, once more when it has written one.
        let untold = if pending < RUN { RUN - pending } else { to.limit.saturating_sub(pending).min(RUN / 4) };
        // Nor over what the worker has not written, wherever in the ring that is.
        let free = (self.segment.run.load(Ordering::Acquire) + self.len).saturating_sub(now.tail);
        let most = [RUN - grown, self.len - (self.place(begin) + grown), untold, free];
        Some(Growing {
            segment: core::ptr::from_ref(self.segment) as u64,
            sequence: now.sequence,
            bytes: self.address(now.tail) as u64,
            most: most.into_iter().min().unwrap_or(0),
            offset: now.offset,
            inode: core::ptr::from_ref(to.inode) as u64,
            fit: u64::from(inode::KEPT) | u64::from(to.segment) << 32,
            error: self.segment.files[to.file as usize % FILES].error.as_ptr() as u64,
        })
    }

    /// File and length, offset, ticket, place of the inode.
    fn header(&self, run: u64) -> [u64; 4] {
        // SAFETY: headers are aligned to their size, as the ring's end is.
        unsafe { self.ring.add(self.place(run) as usize).cast::<[u64; 4]>().read_volatile() }
    }

    /// The next thing to be written, for the worker; `None`: the file system has everything.
    ///
    /// # Errors
    /// This is no log.
    pub fn next(&self) -> Result<Option<Piece>, Corrupt> {
        let (mut run, upto) = (self.segment.run.load(Ordering::Relaxed), self.segment.upto.load(Ordering::Relaxed));
        let next = self.after(&mut run, upto);
        let now = self.now();
        // As far as there may be room.
        if next == Ok(None) && now.run != NONE && upto >= now.tail {
            run = now.run;
        }
        self.segment.run.store(run, Ordering::Release);
        next
    }

    /// What comes after position `upto`, from the run `run` on, which becomes its run.
    ///
    /// # Errors
    /// This is no log.
    pub fn after(&self, run: &mut u64, upto: u64) -> Result<Option<Piece>, Corrupt> {
        let now = self.now();
        loop {
            if upto >= now.tail {
                return Ok(None);
            }
            if *run >= now.tail || now.tail - *run > self.len || !run.is_multiple_of(HEADER) {
                return Err(Corrupt);
            }
            let [words, offset, ticket, inode] = self.header(*run);
            let (file, len) = (words as u32, words >> 32);
            let mut after = (*run + HEADER).next_multiple_of(self.len);
            if file != SKIP {
                let begin = *run + HEADER;
                let end = if *run == now.run { now.tail } else { begin + len };
                let from = upto.max(begin);
                if end > now.tail || end < begin || end - begin > RUN || self.place(begin) + (end - begin) > self.len {
                    return Err(Corrupt);
                }
                if from < end {
                    let offset = if offset == APPEND { APPEND } else { offset.saturating_add(from - begin) };
                    let (at, inode) = (self.place(from), inode as u32 % INODES as u32);
                    return Ok(Some(Piece { file, inode, offset, at, len: end - from, ticket, position: from }));
                }
                after = end.next_multiple_of(HEADER);
            } else if self.place(*run) == 0 {
                return Err(Corrupt);
            }
            *run = after;
        }
    }

    /// What is at this position is about to be appended to a file that is so long, through an open file with this offset: by that whoever is next
    /// tells whether it was.
    pub fn note_append(&self, position: u64, size: u64, offset: u64) {
        self.segment.append_size.store(size, Ordering::SeqCst);
        self.segment.append_offset.store(offset, Ordering::SeqCst);
        // Last: who is killed before has not begun.
        self.segment.appends.store(position + 1, Ordering::SeqCst);
    }

    /// The file system has so much of the piece that is next, which begins at this position.
    pub fn advance(&self, position: u64, len: u64) {
        self.segment.upto.store(position + len, Ordering::SeqCst);
    }

    /// It has all before the piece at this position, and so much of that: all of it at once.
    pub fn advance_over(&self, position: u64, len: u64) {
        self.advance(position, len);
        // Who ends in between leaves a run before it, from which it is found, too.
        let mut run = self.segment.run.load(Ordering::Relaxed);
        if self.after(&mut run, position).is_ok() {
            self.segment.run.store(run, Ordering::Release);
        }
    }

    /// Bytes that wait, headers included.
    #[inline]
    pub fn pending(&self) -> u64 {
        self.pending_behind(self.segment.upto.load(Ordering::SeqCst))
    }

    /// Those of them that are behind a position.
    #[inline]
    pub fn pending_behind(&self, position: u64) -> u64 {
        let now = self.now();
        self.waiting(now.skip, position, now.tail)
    }

    /// Bytes between two positions, but for what was left unused from `skip` on. Of two such places the worker is beyond the first: more than a ring
    /// does not wait.
    #[inline]
    fn waiting(&self, skip: u64, from: u64, to: u64) -> u64 {
        to.saturating_sub(from).saturating_sub(if from <= skip { self.skipped(skip) } else { 0 })
    }

    #[inline]
    fn skipped(&self, skip: u64) -> u64 {
        if skip == 0 { 0 } else { self.len - self.place(skip) }
    }

    /// The position that the worker has to reach so that so many bytes can be appended, of which with all others no more than `limit` wait; `None`:
    /// they never can.
    pub fn room_for(&self, bytes: u64, limit: u64) -> Option<u64> {
        let left = limit.checked_sub(bytes.max(HOT))?;
        let now = self.now();
        let behind = now.tail.saturating_sub(left);
        let before = behind.saturating_sub(self.skipped(now.skip));
        let few = if before <= now.skip { before } else { behind };
        // What may lie before the run of a position, behind the last one, and unused at the ring's end.
        let fits = (now.tail + bytes + 3 * RUN).saturating_sub(self.len);
        Some(few.max(fits).min(now.tail))
    }

    /// Address of a byte of the ring.
    pub fn address(&self, at: u64) -> *const u8 {
        // SAFETY: within the ring.
        unsafe { self.ring.add(self.place(at) as usize) }
    }

    /// For the worker, if nothing is pending: gives parts of the ring back that hold nothing, by `give`, and beyond the beginning of the ring. False:
    /// something is, or is about to be.
    pub fn give_back(&self, mut give: impl FnMut(*mut u8, usize)) -> bool {
        const PAGE: u64 = 4096;
        // Who appends has said so before, or sees this.
        self.segment.giving.store(1, Ordering::SeqCst);
        let free = self.segment.busy.load(Ordering::SeqCst) == 0 && self.pending() == 0;
        if free {
            // The run that may grow stays, also where it may grow without being looked at.
            let (run, tail) = (self.segment.run.load(Ordering::SeqCst), self.now().tail);
            let first = self.place(run) / PAGE * PAGE;
            let behind = (self.place(run) + (tail - run).max(HEADER + RUN)).next_multiple_of(PAGE);
            for (from, to) in [(HOT, first), (behind.max(HOT), self.len)] {
                if from < to {
                    // SAFETY: within the ring.
                    give(unsafe { self.ring.add(from as usize) }, (to - from) as usize);
                }
            }
        }
        self.not_giving();
        free
    }

    /// Nobody gives memory back, nor will somebody who was killed.
    pub fn not_giving(&self) {
        self.segment.giving.store(0, Ordering::SeqCst);
    }
}

/// Bytes by addresses and lengths, and how many of the first were taken.
struct Parts<'a> {
    parts: &'a [[usize; 2]],
    within: usize,
}

impl Parts<'_> {
    /// # Safety
    /// There are so many, which can be read; there is room for them.
    #[inline]
    unsafe fn copy(&mut self, mut to: *mut u8, mut len: usize) {
        while let [[from, all], rest @ ..] = self.parts
            && len > 0
        {
            let bytes = (all - self.within).min(len);
            // SAFETY: the caller vouches for it.
            unsafe {
                copy((from + self.within) as *const u8, to, bytes);
                to = to.add(bytes);
            }
            (len, self.within) = (len - bytes, self.within + bytes);
            if self.within == *all {
                (self.parts, self.within) = (rest, 0);
            }
        }
    }
}

/// # Safety
/// As `copy_nonoverlapping`.
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller vouches for it; overlapping halves cover every length between.
    unsafe {
        match len {
            8 => to.cast::<u64>().write_unaligned(from.cast::<u64>().read_unaligned()),
            16..=32 => {
                let get = |at: usize| from.add(at).cast::<u128>().read_unaligned();
                let (first, last) = (get(0), get(len - 16));
                to.cast::<u128>().write_unaligned(first);
                to.add(len - 16).cast::<u128>().write_unaligned(last);
            }
            33..=64 => {
                let get = |at: usize| from.add(at).cast::<[u128; 2]>().read_unaligned();
                let (first, last) = (get(0), get(len - 32));
                to.cast::<[u128; 2]>().write_unaligned(first);
                to.add(len - 32).cast::<[u128; 2]>().write_unaligned(last);
            }
            _ => core::ptr::copy_nonoverlapping(from, to, len),
        }
    }
}

/// Read-modify-write that is one for the program's own signal handlers, which is all that may come in between.
#[cfg(target_arch = "x86_64")]
mod local {
    use core::arch::asm;
    use core::sync::atomic::{AtomicU32, AtomicU64};

    #[inline]
    pub(super) fn set(word: &AtomicU32, bits: u32) {
        // SAFETY: one instruction on a live word.
        unsafe { asm!("or dword ptr [{}], {:e}", in(reg) word.as_ptr(), in(reg) bits, options(nostack)) };
    }

    #[inline]
    pub(super) fn clear(word: &AtomicU32, bits: u32) {
        // SAFETY: as above.
        unsafe { asm!("and dword ptr [{}], {:e}", in(reg) word.as_ptr(), in(reg) !bits, options(nostack)) };
    }

    #[inline]
    pub(super) fn replace(word: &AtomicU64, old: u64, new: u64) -> bool {
        let found: u64;
        // SAFETY: as above; stores before it are seen before it on this architecture.
        unsafe {
            asm!("cmpxchg qword ptr [{}], {}", in(reg) word.as_ptr(), in(reg) new, inout("rax") old => found, options(nostack));
        }
        found == old
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod local {
    use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    pub(super) fn set(word: &AtomicU32, bits: u32) {
        word.fetch_or(bits, Ordering::Relaxed);
    }

    pub(super) fn clear(word: &AtomicU32, bits: u32) {
        word.fetch_and(!bits, Ordering::Relaxed);
    }

    pub(super) fn replace(word: &AtomicU64, old: u64, new: u64) -> bool {
        word.compare_exchange(old, new, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }
}
