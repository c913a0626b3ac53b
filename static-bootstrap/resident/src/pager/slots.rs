//! The memory of slots ([`sys::pool`]). Moving a span of pages in or out of the program makes an empty slot of a full one, and the other way round; nothing is allocated, zeroed
//! or copied. Whoever can do without a full one does when there is none: pages that are made for one are cleared first.

use core::sync::atomic::{AtomicI64, Ordering};

use sys::page::{PAGE, SPAN, SPAN_PAGES};
use sys::pool::{Pool, Slot};

use super::{Engine, FREE, ROOM};
use crate::uffd::Uffd;
use crate::{call, settings};

/// Pages of slots that are of the budget.
static STAGED: AtomicI64 = AtomicI64::new(0);

/// Slots of this program. Where pages are copied, they are memory like any other, and always there.
pub(super) fn number(uffd: &Uffd) -> usize {
    let spans = settings::get().local as usize / SPAN;
    // Some are left for who cannot wait, and empty ones cost nothing.
    if uffd.moves { (spans / 5).clamp(8, 32) + 3 } else { (spans / 7).clamp(4, 32) }
}

/// Makes them. A child of the program does not find them.
pub(super) fn make(uffd: &Uffd) -> Result<Pool, u32> {
    let count = number(uffd);
    let start = call::map(0, (count + 1) * SPAN, call::READ_WRITE, 0)?.next_multiple_of(SPAN);
    if uffd.moves {
        uffd.register(start, count * SPAN)?;
    }
    // SAFETY: what is in there stays.
    unsafe { call::advise(start, count * SPAN, call::DONTFORK) }?;
    // Of a child: those of its parent.
    count_more(-STAGED.load(Ordering::Relaxed));
    Ok(Pool::new((0..count).map(|nth| start + nth * SPAN)))
}

/// So many pages more are there in slots, or fewer.
pub(super) fn count_more(pages: i64) {
    STAGED.fetch_add(pages, Ordering::Relaxed);
    FREE.fetch_sub(pages, Ordering::AcqRel);
    if pages < 0 {
        ROOM.tell();
    }
}

/// Pages that are there in slots.
pub(super) fn staged() -> usize {
    usize::try_from(STAGED.load(Ordering::Relaxed)).unwrap_or(0)
}

/// Pages of a slot, so many, have become the program's: of the budget they are as before.
pub(super) fn pass(pages: usize) {
    STAGED.fetch_sub(pages as i64, Ordering::Relaxed);
}

/// Has all pages of a slot be there, each with a frame of its own: who wrote to those that the kernel shares would interrupt all processors for each.
pub(super) fn fill(slot: Slot, engine: &Engine) -> Result<usize, u32> {
    if engine.uffd.moves && slot.there < SPAN_PAGES {
        count_more((SPAN_PAGES - slot.there) as i64);
        fill_up(slot, SPAN_PAGES, engine)?;
    }
    Ok(slot.at)
}

/// Makes a slot, or one with more pages, of so many that are free, and are not any more.
pub(super) fn make_of_free(slot: Slot, pages: usize, engine: &Engine) -> Result<Slot, u32> {
    STAGED.fetch_add(pages as i64, Ordering::Relaxed);
    fill_up(slot, slot.there + pages, engine)
}

fn fill_up(slot: Slot, pages: usize, engine: &Engine) -> Result<Slot, u32> {
    let there = slot.there * PAGE;
    engine.uffd.copy(slot.at + there, engine.zeros, pages * PAGE - there, true)?;
    Ok(Slot { there: pages, ..slot })
}

/// Has pages of a slot that are there be zero.
pub(super) fn clear(at: usize, pages: usize) {
    // SAFETY: what is in a slot of the caller's does not matter.
    unsafe { (at as *mut u8).write_bytes(0, pages * PAGE) };
}

/// Frees pages of a slot that are not counted any more.
pub(super) fn let_go(at: usize, pages: usize) {
    // SAFETY: what is in a slot of the caller's does not matter.
    let _ = unsafe { call::advise(at, pages * PAGE, call::DONTNEED) };
}

/// Has no page of a slot be there, if pages are to be moved to it.
pub(super) fn empty(slot: Slot, uffd: &Uffd) -> usize {
    if uffd.moves && slot.there > 0 {
        free(slot.at, slot.there);
    }
    slot.at
}

/// Frees what is there of a slot; so many of those pages are counted.
pub(super) fn free(at: usize, counted: usize) {
    let_go(at, SPAN_PAGES);
    count_more(-(counted as i64));
}
