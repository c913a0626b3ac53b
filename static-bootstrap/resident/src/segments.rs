//! Static arrays: what is large among the writable segments of the program and of the libraries that it starts with. They stay at their addresses, which are
//! in the code; what is known of their pages is kept under addresses of the window, at which nothing is then.
//!
//! Libraries that are opened later stay where they are: they may be closed, of which nobody would tell us.

use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use sys::page::{PAGE, SPAN};
use sys::resident::{cause, step};
use sys::syscall::{nr, syscall};

use super::uffd::Uffd;
use super::{call, entry, fatal, filter, objects, pager, window};

/// What has fewer bytes stays where it is.
const LEAST: usize = SPAN;
/// Segments of one process, at most.
pub(super) const MOST: usize = 32;

/// Written once, before other threads exist.
struct Segment {
    start: AtomicUsize,
    end: AtomicUsize,
    /// Up to here the file says what is in it at first, and from `free` on it is nobody's file.
    filled: AtomicUsize,
    free: AtomicUsize,
    /// Addresses of the window: of the span in which it starts, and behind that in which it ends.
    first: AtomicUsize,
    last: AtomicUsize,
}

static SEGMENTS: [Segment; MOST] = [const {
    Segment {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        filled: AtomicUsize::new(0),
        free: AtomicUsize::new(0),
        first: AtomicUsize::new(0),
        last: AtomicUsize::new(0),
    }
}; MOST];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// No segment has an address of the window from here on.
static LIMIT: AtomicUsize = AtomicUsize::new(0);

fn get(word: &AtomicUsize) -> usize {
    word.load(Ordering::Relaxed)
}

fn all() -> &'static [Segment] {
    &SEGMENTS[..get(&COUNT)]
}

impl Segment {
    fn holds(&self, at: usize) -> bool {
        (get(&self.start)..get(&self.end)).contains(&at)
    }

    /// What is added to its addresses to have those of the window.
    fn shift(&self) -> usize {
        get(&self.first).wrapping_sub(get(&self.start) & !(SPAN - 1))
    }
}

/// Addresses and bytes of what is nobody's file.
pub(super) fn ranges() -> impl Iterator<Item = (usize, usize)> {
    all().iter().map(|segment| (get(&segment.free), get(&segment.end) - get(&segment.free))).filter(|(_, len)| *len > 0)
}

/// The segment's first byte and its end.
pub(super) fn bounds() -> impl Iterator<Item = Range<usize>> + Clone {
    all().iter().map(|segment| get(&segment.start)..get(&segment.end))
}

pub(super) fn contains(at: usize) -> bool {
    all().iter().any(|segment| segment.holds(at))
}

/// Whether all of a range is in one of them.
pub(super) fn holds_all(at: usize, len: usize) -> bool {
    all().iter().any(|segment| segment.holds(at) && len <= get(&segment.end) - at)
}

/// Whether all of a range is in one of them, and was zero at first.
pub(super) fn was_zero(at: usize, len: usize) -> bool {
    let zero = |segment: &Segment| at >= get(&segment.filled) && len <= get(&segment.end).saturating_sub(at);
    all().iter().any(|segment| segment.holds(at) && zero(segment))
}

/// The address of the window that stands for this one; others are what they are.
pub(super) fn to_window(at: usize) -> usize {
    all().iter().find(|segment| segment.holds(at)).map_or(at, |segment| at.wrapping_add(segment.shift()))
}

/// The address for which this one of the window stands; others are what they are.
pub(super) fn from_window(at: usize) -> usize {
    if at >= get(&LIMIT) {
        return at;
    }
    let stands = |segment: &&Segment| (get(&segment.first)..get(&segment.last)).contains(&at);
    all().iter().find(stands).map_or(at, |segment| at.wrapping_sub(segment.shift()))
}

/// Takes those that are large, before any other code of the program runs.
pub(super) fn take() {
    objects::writable(|bytes| {
        let (start, filled, end) = (bytes.start, bytes.filled, bytes.end);
        // Little that the file fills stays what it is to the kernel: the file's. But no array may be in both parts.
        let start = if filled - start < LEAST { start.max(filled - PAGE) } else { start };
        if end.saturating_sub(start) >= LEAST {
            add(start, filled, end);
        }
    });
    let filled: usize = all().iter().map(|segment| get(&segment.filled) - get(&segment.start)).sum();
    if get(&COUNT) > 0 {
        filter::learn();
        entry::enter(move || pager::before_growth(filled));
        // If that has not begun.
        free_of_file(None);
    }
}

fn add(start: usize, filled: usize, end: usize) {
    let nth = get(&COUNT);
    let Some(segment) = SEGMENTS.get(nth) else { return };
    // With one more, so that nothing else follows it.
    let Ok(first) = window::reserve_for(start % SPAN + (end - start) + SPAN) else { return };
    for (word, value) in [
        (&segment.start, start),
        (&segment.end, end),
        (&segment.filled, filled),
        (&segment.free, filled),
        (&segment.first, first),
        (&segment.last, (first + start % SPAN + (end - start)).next_multiple_of(SPAN)),
    ] {
        word.store(value, Ordering::Relaxed);
    }
    LIMIT.store(get(&segment.last), Ordering::Relaxed);
    COUNT.store(nth + 1, Ordering::Relaxed);
    window::capture(filled, end - filled);
}

/// Puts memory that is nobody's file in the place of what the file fills, a bit at a time, since all of it may be more than is to be here. Where missing
/// pages are told, this one is told of these, too. For one thread, while no other of the program exists.
pub(super) fn free_of_file(uffd: Option<&Uffd>) {
    let failed = |errno: u32| -> ! { fatal::say(cause::KERNEL, 0, [step::MEMORY, errno.into()]) };
    let before = call::block_signals();
    for segment in all() {
        let (mut at, filled) = (get(&segment.start), get(&segment.filled));
        if get(&segment.free) == at {
            continue;
        }
        let copy = call::map(0, SPAN, call::READ_WRITE, 0).unwrap_or_else(|errno| failed(errno));
        while at < filled {
            let len = (filled - at).min(SPAN);
            // SAFETY: the segment's bytes, which nobody changes meanwhile, and as much memory of ours.
            unsafe { core::ptr::copy_nonoverlapping(at as *const u8, copy as *mut u8, len) };
            call::map(at, len, call::READ_WRITE, call::FIXED).unwrap_or_else(|errno| failed(errno));
            if let Some(uffd) = uffd {
                uffd.register(at, len).unwrap_or_else(|errno| failed(errno));
            }
            window::capture(at, len);
            // SAFETY: as above; the other way.
            unsafe { core::ptr::copy_nonoverlapping(copy as *const u8, at as *mut u8, len) };
            at += len;
        }
        segment.free.store(get(&segment.start), Ordering::Relaxed);
        // SAFETY: ours, from above.
        let _ = unsafe { syscall(nr::MUNMAP, [copy, SPAN, 0, 0, 0, 0]) };
    }
    call::restore_signals(before);
}
