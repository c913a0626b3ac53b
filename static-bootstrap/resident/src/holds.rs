//! Ranges of the program's memory that stay here while the kernel has their addresses.
//!
//! Whoever asks the kernel for something holds what that reads or writes, and lets go afterwards. He may not come to it: a handler jumps out of the call, or the thread is
//! cancelled there. So it is noted for each range who holds it and from where on his stack; when much is held, what cannot be any more is let go.

use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use sys::page::{Bits, NONE, PAGE, SPAN_PAGES, range, with};
use sys::syscall::{nr, syscall};
use sys::tasks::{self, Doing};

use super::table;
use super::{counts, entry, pager, settings, trap, window};

/// Ranges at once.
const MOST: usize = 1024;
/// The stack of a call that a range is held for is no further below its holder, in bytes.
const NEAR: usize = 1 << 20;
/// Nanoseconds after which it is looked again who still can hold something.
const AGAIN: u64 = 10_000_000;
const TRIES: usize = 12;

/// First page (from the window's beginning) and number of pages in one word; 0: nothing is held.
static RANGES: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
const COUNT_BITS: u32 = 24;
/// Whose each is: [`Holds::token`], or one of these.
static TOKENS: [AtomicU64; MOST] = [const { AtomicU64::new(FREE) }; MOST];
const FREE: u64 = 0;
const CHANGES: u64 = 1;
/// The thread that waits in the call, and [`Place`].
static THREADS: [AtomicU32; MOST] = [const { AtomicU32::new(0) }; MOST];
static PLACES: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];
/// One more than the number of the one before of the same holder.
static BEFORE: [AtomicU16; MOST] = [const { AtomicU16::new(0) }; MOST];
/// None from here on was ever used.
static END: AtomicUsize = AtomicUsize::new(0);
/// Pages of all ranges.
static PAGES: AtomicUsize = AtomicUsize::new(0);
static LAST: AtomicU64 = AtomicU64::new(CHANGES);
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// From where on its stack a thread holds something; or, with this bit, a digest of the call that it waits in and nobody held anything for before.
pub(super) type Place = usize;
const EARLIER: Place = 1 << 63;

/// Bytes of one call that are held at once.
pub(super) fn most() -> usize {
    (settings::get().local as usize / 8).max(PAGE * 16) & !(PAGE - 1)
}

/// Bytes that one more call holds at once, `least` if there is no choice: all together twice as much as one alone, and some more.
pub(super) fn share(least: usize) -> usize {
    let held = || PAGES.load(Ordering::Relaxed) * PAGE;
    if held() > most() {
        look(0, 0);
    }
    ((most() * 2).saturating_sub(held()) / 2).max(least) & !(PAGE - 1)
}

/// The pages of a span that stay here.
pub(super) fn held(span: usize) -> Bits {
    let mut pages = NONE;
    let all = &RANGES[..END.load(Ordering::SeqCst)];
    for word in all.iter().map(|range| range.load(Ordering::SeqCst)).filter(|word| *word != 0) {
        let (first, count) = unpack(word);
        let (start, end) = (span * SPAN_PAGES, (span + 1) * SPAN_PAGES);
        if first < end && first + count > start {
            pages = with(pages, range(first.max(start) - start, (first + count).min(end) - start));
        }
    }
    pages
}

fn unpack(word: u64) -> (usize, usize) {
    ((word >> COUNT_BITS) as usize, (word & ((1 << COUNT_BITS) - 1)) as usize)
}

/// Nothing has to stay here: for a child, which has none of the threads.
pub(super) fn let_go() {
    RANGES.iter().for_each(|range| range.store(0, Ordering::Relaxed));
    TOKENS.iter().for_each(|token| token.store(FREE, Ordering::Relaxed));
    END.store(0, Ordering::Relaxed);
    PAGES.store(0, Ordering::Relaxed);
}

/// Ranges that one holds; let go when this is dropped.
#[derive(Default)]
pub(super) struct Holds {
    /// Nobody else's, once there is a range.
    token: u64,
    thread: u32,
    /// See [`Place`]; 0: where this is.
    place: Place,
    /// One more than the number of the last range; 0: none.
    last: u16,
}

impl Holds {
    /// What a thread holds, which does not know, for the call that it waits in. Not to be dropped.
    pub(super) fn earlier(thread: u32, digest: usize) -> Holds {
        Holds { thread, place: EARLIER | digest, ..Holds::default() }
    }

    /// Brings a range here, as far as the program has it, and keeps it; false: there is no place to note that, and it may go at any time.
    pub(super) fn add(&mut self, at: usize, len: usize) -> bool {
        if window::page(at).is_none() || len == 0 {
            return true;
        }
        let is_held = self.claim(at, len);
        // Who makes room from now on sees it; who has begun may have something of it in his hands.
        let (len, in_hands) = entry::enter(move || {
            let len = window::mapped(at, len);
            (len, pager::is_in_hands(at, len))
        });
        let (at, len) = pages(at, len);
        touch(at, len);
        for _ in 0..TRIES {
            if !in_hands || entry::enter(move || pager::is_here(at, len)) {
                break;
            }
            touch(at, len);
        }
        is_held
    }

    /// Has nobody take a range of captured memory away who has not begun; false: there is no place to note that.
    pub(super) fn claim(&mut self, at: usize, len: usize) -> bool {
        let Some(first) = window::page(at) else { return false };
        let count = (pages(at, len).1 / PAGE).min((1 << COUNT_BITS) - 1);
        if self.token == FREE {
            self.token = LAST.fetch_add(1, Ordering::Relaxed) + 1;
            if self.thread == 0 {
                self.thread = own_thread();
            }
        }
        let place = if self.place == 0 { &raw const *self as usize } else { self.place };
        let Some(nth) = self.take().or_else(|| {
            look(self.token, place);
            self.take()
        }) else {
            return false;
        };
        THREADS[nth].store(self.thread, Ordering::Relaxed);
        PLACES[nth].store(place, Ordering::Relaxed);
        BEFORE[nth].store(self.last, Ordering::Relaxed);
        self.last = nth as u16 + 1;
        PAGES.fetch_add(count, Ordering::Relaxed);
        END.fetch_max(nth + 1, Ordering::SeqCst);
        RANGES[nth].store((first as u64) << COUNT_BITS | count as u64, Ordering::SeqCst);
        TOKENS[nth].store(self.token, Ordering::Release);
        true
    }

    fn take(&self) -> Option<usize> {
        let from = usize::from(self.last);
        let free = |nth: &usize| {
            let token = &TOKENS[*nth];
            token.load(Ordering::Relaxed) == FREE
                && token.compare_exchange(FREE, CHANGES, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        (from..MOST).chain(0..from).find(free)
    }
}

impl Drop for Holds {
    fn drop(&mut self) {
        while let Some(nth) = usize::from(self.last).checked_sub(1) {
            self.last = BEFORE[nth].load(Ordering::Relaxed);
            release(nth, self.token);
        }
    }
}

fn release(nth: usize, token: u64) {
    if TOKENS[nth].compare_exchange(token, CHANGES, Ordering::Acquire, Ordering::Relaxed).is_ok() {
        let (_, count) = unpack(RANGES[nth].swap(0, Ordering::SeqCst));
        PAGES.fetch_sub(count, Ordering::Relaxed);
        TOKENS[nth].store(FREE, Ordering::Release);
    }
}

/// Whether something is held for a thread.
pub(super) fn has(thread: u32) -> bool {
    live().any(|(nth, _)| THREADS[nth].load(Ordering::Relaxed) == thread)
}

/// All ranges that are held, and their tokens.
fn live() -> impl Iterator<Item = (usize, u64)> {
    let all = &TOKENS[..END.load(Ordering::SeqCst)];
    all.iter().map(|token| token.load(Ordering::Acquire)).enumerate().filter(|(_, token)| *token > CHANGES)
}

/// Brings here what is held for calls that had been made before anything could be held.
pub(super) fn bring_earlier() {
    for (nth, _) in live().filter(|(nth, _)| PLACES[*nth].load(Ordering::Relaxed) & EARLIER != 0) {
        let (first, count) = unpack(RANGES[nth].load(Ordering::Relaxed));
        touch(table::address(first / SPAN_PAGES, first % SPAN_PAGES), count * PAGE);
    }
}

/// Lets go what cannot be held any more. `token`, `place`: of this thread's own holder now, below which it has no others.
fn look(token: u64, place: Place) {
    let (now, before) = (counts::clock(), LOOKED.load(Ordering::Relaxed));
    if now.wrapping_sub(before) < AGAIN
        || LOOKED.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed).is_err()
    {
        return;
    }
    let own = own_thread();
    let here = if place == 0 { &raw const own as usize } else { place };
    let mut known = (own, None);
    for (nth, holder) in live() {
        let (thread, place) = (THREADS[nth].load(Ordering::Relaxed), PLACES[nth].load(Ordering::Relaxed));
        let holds = if thread == own {
            holder == token || place & EARLIER == 0 && !(here.saturating_sub(NEAR)..=here).contains(&place)
        } else {
            if known.0 != thread {
                known = (thread, Some(doing(thread)));
            }
            match known.1.flatten() {
                None => false,
                Some(Doing::Runs) => true,
                Some(Doing::Waits { call, .. }) if place & EARLIER != 0 => {
                    call.is_some_and(|call| place == EARLIER | digest(call))
                }
                Some(Doing::Waits { stack, .. }) => (stack..stack.saturating_add(NEAR)).contains(&place),
            }
        };
        if !holds {
            release(nth, holder);
        }
    }
}

/// What a thread does, as far as the kernel tells; `None`: it is no more.
pub(super) fn doing(thread: u32) -> Option<Doing> {
    let mut text = [0; 256];
    let told = tasks::read(ask, thread, b"syscall", &mut text).and_then(tasks::doing);
    // SAFETY: integers.
    let is_there = || unsafe {
        let process = syscall(nr::GETPID, [0; 6])?;
        syscall(nr::TGKILL, [process, thread as usize, 0, 0, 0, 0])
    };
    told.or_else(|| is_there().is_ok().then_some(Doing::Runs))
}

/// Of a call, its arguments, and what is where the thread that waits in it goes on.
pub(super) fn digest((number, args): (usize, [usize; 6])) -> usize {
    const PRIME: usize = 0x100_0000_01b3;
    args.iter().fold(number, |all, arg| (all ^ arg).wrapping_mul(PRIME).rotate_left(23)) & !EARLIER
}

/// System calls for [`tasks`].
pub(super) fn ask(number: usize, args: [usize; 6]) -> isize {
    // SAFETY: paths and buffers of its own, and integers.
    match unsafe { syscall(number, args) } {
        Ok(value) => value.cast_signed(),
        Err(errno) => -(errno as isize),
    }
}

pub(super) fn own_thread() -> u32 {
    // SAFETY: no arguments.
    unsafe { syscall(nr::GETTID, [0; 6]) }.unwrap_or(0) as u32
}

/// All pages of a range: its address, and bytes.
fn pages(at: usize, len: usize) -> (usize, usize) {
    let bytes = if len == 0 { 0 } else { (at % PAGE + len).next_multiple_of(PAGE) };
    (at & !(PAGE - 1), bytes)
}

/// Brings what lies at an address here, if calls are stopped and that is memory of the program's.
pub(super) fn bring(at: usize) {
    if trap::is_on() && window::contains(at) && entry::enter(move || window::mapped(at, 1)) > 0 {
        touch(at, 1);
    }
}

/// Brings a range of the program's memory here.
fn touch(at: usize, len: usize) {
    for page in (at..at + len).step_by(PAGE) {
        // SAFETY: the program's memory. This is where its thread waits for the page.
        unsafe { (page as *const u8).read_volatile() };
    }
}
