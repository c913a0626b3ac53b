//! Copies of what has lost its own.

use core::sync::atomic::Ordering;

use sys::page::{Bits, Layout, NONE, count};
use sys::places::{NOBODY, PLACES, Place, gap};
use sys::resident::{SERVERS, cause};

use super::{
    BACK, BARE, CHANGE, CONNECTIONS, FULL, KEPT, LOST, MAP, WEIGHTS, epoch, get, lose, name, pack, servers, tell_bare,
    unpack, write,
};
use crate::link::Gone;
use crate::table::TABLE;

/// Makes copies of what has none, a span at a time.
pub(crate) struct Healer {
    place: usize,
    next: usize,
    /// Pages of that place that were copied.
    copied: usize,
}

/// A place that is to have a copy, and where; and whether nothing of it is there yet.
struct Wound {
    place: usize,
    target: u8,
    is_fresh: bool,
}

impl Healer {
    pub(crate) const fn new() -> Healer {
        Healer { place: PLACES, next: 0, copied: 0 }
    }

    /// The next span, through a buffer of one; only while no gift is open. False when there is nothing to do.
    pub(crate) fn step(&mut self, buffer: usize) -> bool {
        let Some(Wound { place: nth, target, is_fresh }) = Healer::find() else { return false };
        if nth != self.place || is_fresh {
            *self = Healer { place: nth, next: 0, copied: 0 };
        }
        let mut table = TABLE.lock();
        let [heap, rest] = table.window.given();
        let end = rest.end;
        let number =
            (self.next..end).find(|number| number % PLACES == nth && (heap.contains(number) || rest.contains(number)));
        let Some(number) = number else {
            drop(table);
            let _alone = CHANGE.lock();
            let now = unpack(MAP[nth].load(Ordering::Relaxed));
            if now.second == target {
                MAP[nth].store(pack(Place { whole: 1, ..now }), Ordering::Release);
                tell_bare();
            }
            return true;
        };
        self.next = number + 1;
        let pages = table.span(number).remote;
        drop(table);
        if pages == NONE {
            return true;
        }
        let buffer = Layout::whole(buffer);
        get(number, pages, buffer);
        let server = usize::from(target);
        match hand(server, number, pages, NONE, buffer) {
            Ok(()) => {
                self.copied += count(&pages);
                KEPT[server].fetch_add(count(&pages) as u64, Ordering::Relaxed);
            }
            Err(gone) if gone.cause == cause::FULL => {
                FULL.fetch_or(1 << server, Ordering::Relaxed);
                let alone = CHANGE.lock();
                let now = unpack(MAP[nth].load(Ordering::Relaxed));
                MAP[nth].store(pack(Place { second: NOBODY, whole: 0, ..now }), Ordering::Release);
                drop(alone);
                self.take_back(server);
            }
            Err(gone) => lose(server, epoch(), &gone),
        }
        true
    }

    /// What of this place a server has that became full of it is of no use: else the next that it is given would be too much, and it be lost for that.
    fn take_back(&self, server: usize) {
        let [heap, rest] = TABLE.lock().window.given();
        for number in heap.chain(rest).filter(|number| number % PLACES == self.place) {
            let pages = TABLE.lock().span(number).remote;
            let told = if pages == NONE { Ok(()) } else { hand(server, number, NONE, pages, Layout::NOWHERE) };
            if let Err(gone) = told {
                return lose(server, epoch(), &gone);
            }
        }
        let less = |kept: u64| Some(kept.saturating_sub(self.copied as u64));
        let _ = KEPT[server].fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Something has no copy, and somebody could take one.
    pub(crate) fn is_needed() -> bool {
        BARE.load(Ordering::Relaxed)
    }

    /// What is being copied, or is next.
    fn find() -> Option<Wound> {
        let _alone = CHANGE.lock();
        let places: [Place; PLACES] = core::array::from_fn(|nth| unpack(MAP[nth].load(Ordering::Relaxed)));
        if let Some(nth) = places.iter().position(|place| place.second != NOBODY && place.whole == 0) {
            return Some(Wound { place: nth, target: places[nth].second, is_fresh: false });
        }
        let weights: [u64; SERVERS] = core::array::from_fn(|server| WEIGHTS[server].load(Ordering::Relaxed));
        let able = !(LOST.load(Ordering::Relaxed) | FULL.load(Ordering::Relaxed));
        let Some((nth, server)) = gap(&places, &weights[..servers()], able) else {
            BARE.store(false, Ordering::Relaxed);
            return None;
        };
        // From now on it is given what is given to the first.
        MAP[nth].store(pack(Place { second: server, whole: 0, ..places[nth] }), Ordering::Release);
        Some(Wound { place: nth, target: server, is_fresh: true })
    }
}

/// Has a server keep pages of a span that lie there, and take others for zero; it has answered then.
fn hand(server: usize, number: usize, pages: Bits, zero: Bits, base: Layout) -> Result<(), Gone> {
    if write(server, number, pages, NONE, zero, base)? {
        return Ok(());
    }
    let mut link = CONNECTIONS[server][BACK].lock();
    link.give(name(number), pages, zero, base, false)?;
    link.given(1)
}
