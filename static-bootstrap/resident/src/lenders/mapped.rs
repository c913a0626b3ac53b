//! What a server of this host shares, mapped: copied from huge pages and to them without a system call, which goes about it page by page (`pwrite` of a MiB takes two to three times as long).
//!
//! What is touched of a mapping counts as the program's resident set (RssShmem), though it is the server's memory. So few huge pages are mapped at a time: the one that was mapped first goes for
//! the next, with an interrupt of the processors that the program is on. Where little may be here none are: runs beside each other would take them from one another. Nor are small pages, each of
//! which has to be mapped by itself.
//!
//! What is touched is there, or the server has made room for it; and it never makes the file shorter, nor can (F_SEAL_SHRINK, which the agent has looked for): that would be a signal. Only who still
//! reads while a server comes back may touch a few pages of its new file, which nobody counts, and forgets what was there.

use core::arch::x86_64::{__m128i, _mm_load_si128, _mm_sfence, _mm_stream_si128};
use core::sync::atomic::{AtomicUsize, Ordering, fence};

use sys::page::{Bits, Layout, PAGE, SPAN, bounds, count};
use sys::resident::SERVERS;
use sys::syscall::{nr, syscall};

use crate::{call, window};

const HUGE: usize = 2 * SPAN;
/// Of what may be here, one in so many bytes may be mapped besides; huge pages at most, and at least.
const SHARE: usize = 8;
const MOST: usize = 8;
const LEAST: usize = 4;
/// For fewer pages nothing is mapped.
const WORTH: usize = 64;
/// So many parts are not mapped after one that lay in small pages.
const PAUSE: usize = 256;

/// No address.
const NOTHING: usize = 1;

/// Where each server's file is mapped, [`NOTHING`] where one was, or 0.
static FILES: [AtomicUsize; SERVERS] = [const { AtomicUsize::new(0) }; SERVERS];
/// Huge pages that may be mapped, and those that are.
static ROOM: AtomicUsize = AtomicUsize::new(0);
static MAPPED: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];
static NEXT: AtomicUsize = AtomicUsize::new(0);
static PAUSED: AtomicUsize = AtomicUsize::new(0);

/// So many bytes may be here.
pub(crate) fn fit(bytes: usize) {
    let most = (bytes / SHARE / HUGE).min(MOST);
    let most = if most < LEAST { 0 } else { most };
    ROOM.store(most, Ordering::Relaxed);
    MAPPED[most..].iter().for_each(|mapped| let_go(mapped.swap(0, Ordering::AcqRel)));
}

/// Maps a server's file, or nothing (-1), where the one that it had before was: who still reads there will see that the server came back. What cannot be mapped is read and written by system calls.
pub(super) fn open(server: usize, file: i32) {
    const DONTDUMP: usize = 16;
    let at = window::BASE + window::SIZE * (1 + server);
    let place = if FILES[server].swap(0, Ordering::AcqRel) == 0 { call::FIXED_NOREPLACE } else { call::FIXED };
    MAPPED.iter().for_each(|mapped| let_go(mapped.swap(0, Ordering::AcqRel)));
    PAUSED.store(0, Ordering::Relaxed);
    let made = match usize::try_from(file) {
        // SAFETY: addresses that nobody has, or where the file was that nobody wants any more.
        Ok(file) => unsafe {
            call::gated(nr::MMAP, [at, window::SIZE, call::READ_WRITE, call::SHARED | place, file, 0])
        },
        Err(_) if place == call::FIXED => call::map(at, window::SIZE, call::READ_WRITE, place),
        Err(_) => return,
    };
    // A child has files of its own; and who dumps a program's memory would bring all of it.
    // SAFETY: what is mapped stays.
    let advise = |advice| unsafe { call::advise(at, window::SIZE, advice) };
    // Kernels that do not know FIXED_NOREPLACE take the address for a wish.
    if made == Ok(at) && advise(call::DONTFORK).and_then(|()| advise(DONTDUMP)).is_ok() {
        FILES[server].store(if file < 0 { NOTHING } else { at }, Ordering::Release);
    }
}

/// Where a span can be reached, if these pages of it are in a huge page that is mapped, or may be now.
pub(super) fn place(server: usize, number: usize, pages: Bits) -> Option<usize> {
    let (file, room) = (FILES[server].load(Ordering::Acquire), ROOM.load(Ordering::Relaxed));
    if file <= NOTHING || room == 0 {
        return None;
    }
    let at = file + number * SPAN;
    let huge = at / HUGE * HUGE;
    if is_mapped(huge) {
        return Some(at);
    }
    let less = |left: usize| left.checked_sub(1);
    if count(&pages) < WORTH || PAUSED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok() {
        return None;
    }
    let (first, end) = bounds(pages);
    if lie_apart(at + first * PAGE, at + (end - 1) * PAGE) {
        PAUSED.store(PAUSE, Ordering::Relaxed);
        let_go(huge);
        return None;
    }
    let_go(MAPPED[NEXT.fetch_add(1, Ordering::Relaxed) % room].swap(huge, Ordering::AcqRel));
    Some(at)
}

fn is_mapped(huge: usize) -> bool {
    MAPPED.iter().any(|mapped| mapped.load(Ordering::Acquire) == huge)
}

/// Somebody has copied from there or to there: if it went meanwhile it was mapped once more, and is not counted.
fn leave(at: usize) {
    let huge = at / HUGE * HUGE;
    if !is_mapped(huge) {
        let_go(huge);
    }
}

/// Whether two pages of a file are in small ones: then both are missed. The kernel maps sixteen of those at once, which are nearer to each other than these.
fn lie_apart(first: usize, last: usize) -> bool {
    // SAFETY: pages of a file that is mapped.
    let touch = |at: usize| _ = unsafe { (at as *const u8).read_volatile() };
    touch(first);
    let before = faults();
    touch(last);
    before.is_none() || faults() != before
}

/// Page faults of this thread so far that took no device.
fn faults() -> Option<u64> {
    /// `struct rusage`: `ru_minflt` among its words.
    const WORDS: usize = 18;
    const MINOR: usize = 8;
    const THREAD: usize = 1;
    let mut words = [0u64; WORDS];
    // SAFETY: room for the structure.
    let known = unsafe { syscall(nr::GETRUSAGE, [THREAD, words.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    known.ok().map(|_| words[MINOR])
}

/// A huge page, or none (0).
fn let_go(huge: usize) {
    if huge != 0 {
        // SAFETY: a part of a file, which is mapped again where it is touched.
        let _ = unsafe { call::advise(huge, HUGE, call::DONTNEED) };
    }
}

/// Copies pages of a span from where it can be reached.
pub(super) fn read(at: usize, pages: Bits, base: Layout) {
    for (first, to, count) in base.runs(pages) {
        let from = at + first * PAGE;
        // SAFETY: pages of a file that is mapped, and of a slot that is ours now, and all there.
        unsafe { core::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, count * PAGE) };
    }
    // Whether the server was lost meanwhile is looked at after that.
    fence(Ordering::Acquire);
    leave(at);
}

/// Copies pages of a span to where it can be reached: past the caches, since nobody wants them soon.
pub(super) fn write(at: usize, pages: Bits, base: Layout) {
    const LINE: usize = 4;
    for (first, from, count) in base.runs(pages) {
        let from = from as *const __m128i;
        let to = (at + first * PAGE) as *mut __m128i;
        for line in (0..count * PAGE / size_of::<__m128i>()).step_by(LINE) {
            // SAFETY: as above, the other way round; both begin with a page.
            unsafe {
                let words: [__m128i; LINE] = core::array::from_fn(|nth| _mm_load_si128(from.add(line + nth)));
                words.iter().enumerate().for_each(|(nth, word)| _mm_stream_si128(to.add(line + nth), *word));
            }
        }
    }
    // SAFETY: every x86-64 processor has it: who is told of these pages now finds them.
    unsafe { _mm_sfence() };
    leave(at);
}
