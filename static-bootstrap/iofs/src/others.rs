//! Jobs on several hosts. Whoever is told something over the network reads on a host that knows nothing of what is pending here, so all that led to
//! the message is written first. A program's own writes are ([`super::settle`]); but others of this host may have told it of theirs by memory that
//! they share, which nobody sees. So whoever has mapped such memory is *sharing*, and waits for what all who share have pending.
//!
//! What tells programs elsewhere without a system call cannot be waited for: network adapters that are driven from user space, files that are
//! mapped on several hosts at once. Once a program has such a mapping, who shares memory keeps nothing.

use core::sync::atomic::{AtomicU8, Ordering};

use sys::extents::Head;
use sys::files::why;
use sys::resident::files;

use super::kernel::{nr, raw};
use super::sites::DIRTY;
use super::{Inside, place, quick, worker};
use crate::settings;

/// In [`DIRTY`]: something of ours is pending, or an offset is kept here; others may have something pending that we know of.
const PENDING: u8 = 1;
const SHARING: u8 = 2;
/// Not clean before it is over: who comes in between waits, too.
const SETTLING: u8 = 4;
pub(super) const OWN: u8 = PENDING | SETTLING;

/// [`SHARING`] or 0.
#[unsafe(link_section = ".data.hot")]
static BASE: AtomicU8 = AtomicU8::new(0);
/// The log that was written to last.
#[unsafe(link_section = ".data.hot")]
static LAST: AtomicU8 = AtomicU8::new(0);

/// Whether there are programs on other hosts.
#[inline]
pub(super) fn are() -> bool {
    settings::get().files & files::HOSTS != 0
}

#[inline]
pub(super) fn shares() -> bool {
    BASE.load(Ordering::Relaxed) != 0
}

/// Something of ours may be pending from now on.
#[inline]
pub(super) fn set_dirty() {
    DIRTY.store(BASE.load(Ordering::Relaxed) | PENDING, Ordering::Relaxed);
}

/// Nothing of ours is.
pub(super) fn set_clean() {
    DIRTY.store(BASE.load(Ordering::Relaxed), Ordering::SeqCst);
}

/// What is pending is about to be written, and has been, unless something else came in between.
pub(super) fn begin_settling() -> u8 {
    let settling = BASE.load(Ordering::Relaxed) | SETTLING;
    DIRTY.store(settling, Ordering::SeqCst);
    settling
}

pub(super) fn end_settling(settling: u8) {
    let _ = DIRTY.compare_exchange(settling, settling & !SETTLING, Ordering::SeqCst, Ordering::Relaxed);
}

/// Nobody who shares memory keeps anything.
#[inline]
pub(super) fn are_unseen(head: &Head) -> bool {
    shares() && head.unseen.load(Ordering::SeqCst) != 0
}

/// Before something is put into this log: others may learn of it without a system call of ours, and see the file systems in our order.
#[inline]
pub(super) fn before_write(head: &Head, nth: u8, segment: u32) {
    if !are() {
        return;
    }
    if shares() {
        head.set_sharing(segment, true);
    }
    if LAST.swap(nth, Ordering::Relaxed) != nth {
        quick::forget();
        worker::settle_but(nth.into());
    }
}

/// Waits for what those have pending who may have told us of it.
pub(super) fn settle() {
    if DIRTY.load(Ordering::Relaxed) & SHARING != 0 {
        worker::settle_sharing();
    }
}

/// The program is about to have memory that others may have, too.
pub(super) fn share() {
    if !are() || shares() {
        return;
    }
    super::settle();
    let _inside = Inside::enter();
    worker::settle();
    worker::attach();
    quick::forget();
    BASE.store(SHARING, Ordering::SeqCst);
    DIRTY.fetch_or(SHARING, Ordering::SeqCst);
}

/// The program may tell others what we do not see.
pub(super) fn be_unseen() {
    if are() && worker::attach() {
        worker::set_unseen();
    }
}

/// It is about to map an open file for itself and others.
pub(super) fn map(fd: usize) {
    if !are() {
        return;
    }
    share();
    if place::tells(fd) && worker::attach() {
        worker::set_unseen();
        worker::say(why::UNSEEN);
    }
}

/// What wait(2) found: if a program was killed, who waits for it may tell others, who do not know what it had written.
pub(super) fn waited(was_killed: bool) {
    if are() && was_killed && worker::attach() {
        worker::settle_all();
    }
}

/// Whether the file has not been changed for a minute: on other hosts somebody may be writing what would be read ahead, and is to be seen as
/// early as without us.
pub(super) fn is_old(fd: usize) -> bool {
    const MINUTE: u64 = 60;
    const REALTIME: usize = 0;
    let mut now = [0u64; 2];
    // SAFETY: room for a `struct timespec`.
    unsafe { raw(nr::CLOCK_GETTIME, [REALTIME, now.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    place::changed(fd).is_some_and(|at| now[0].saturating_sub(at) > MINUTE)
}
