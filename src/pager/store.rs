//! The memory that is lent: pages of many clients, each of which sees only its own.
//!
//! What is counted is pages that hold something, and [room](super::shared) of what does not; zero pages are not kept. Spans that are being sent are shared with the store, and one that
//! is to be changed meanwhile is copied first. So are spans of a client that began as a copy of another; they count once.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

use super::backoff::Backoff;
use super::shared::{Held, Shared, Spans};
use crate::net::auth::random_words;
use crate::net::wire::page::Client;
use crate::sys::page::{ALL, Bits, PAGE, SPAN_PAGES, both, count, runs, without};
use crate::sys::span::Span;

/// Spans kept to be filled next, at most: pages of fresh ones have to be zeroed by the kernel first.
const SPARE: usize = 32;

/// A span of which so many pages come to hold something gets [room](super::shared) for all, unless that would leave less than an eighth of what is lent.
const WORTH: usize = 32;
const LEFT: u64 = 8;

/// Spans that are copied at a time, and for how long: so long nobody hears from the server.
const COPIED: usize = 64;
const COPYING: Duration = Duration::from_millis(250);

/// How long a client that finds no room waits for some, with all that it sends meanwhile: that another is gone is learned a moment after its process has ended.
const PATIENCE: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub struct Store {
    /// Pages.
    capacity: u64,
    name: [u64; 2],
    used: AtomicU64,
    /// Of those used: room, which whoever needs it gets.
    room: AtomicU64,
    backoff: Mutex<Backoff>,
    patience: Duration,
    clients: Mutex<HashMap<Client, Known>>,
    spare: Mutex<Vec<Span>>,
}

/// A client's pages.
#[derive(Debug, Default)]
struct Pages {
    spans: Mutex<HashMap<u64, Kept>>,
    /// In its place, of a client of this host.
    shared: OnceLock<Shared>,
    label: Bits,
    /// Pages that hold something.
    count: AtomicU64,
    /// Since when there has been no room for more, and when that was found last.
    starved: Mutex<Option<[Instant; 2]>>,
}

/// A client, and how many leases of it there are.
#[derive(Debug)]
struct Known {
    pages: Arc<Pages>,
    leases: usize,
}

/// What a client takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// What it calls itself.
    pub label: Bits,
    pub pages: u64,
}

/// A span, and which of its pages hold something.
#[derive(Debug, Clone)]
struct Kept {
    span: Arc<Span>,
    data: Bits,
    /// One for each client that has it; while there are several, all have the same pages of it.
    owner: Arc<()>,
}

impl Kept {
    fn new(span: Span, data: Bits) -> Kept {
        Kept { span: Arc::new(span), data, owner: Arc::default() }
    }

    /// Pages that are free when this client does without it.
    fn let_go(self) -> u64 {
        Arc::into_inner(self.owner).map_or(0, |()| count(&self.data) as u64)
    }
}

/// There is no room for what is to be kept; nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    /// Pages.
    pub capacity: u64,
    pub used: u64,
}

/// Why nothing was copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotCopied {
    /// There is nothing to copy, or something of it was kept already.
    Unknown,
    Full(Full),
}

impl From<Full> for NotCopied {
    fn from(full: Full) -> NotCopied {
        NotCopied::Full(full)
    }
}

/// A connection's hold on a client. With the last one go the client's pages.
#[derive(Debug)]
pub struct Lease {
    store: Arc<Store>,
    client: Client,
    pages: Arc<Pages>,
}

impl Store {
    /// One that keeps at most so many bytes, rounded down to pages.
    pub fn new(bytes: u64) -> Arc<Store> {
        Store::with_patience(bytes, PATIENCE)
    }

    fn with_patience(bytes: u64, patience: Duration) -> Arc<Store> {
        let (used, room, clients, spare) = Default::default();
        let (name, backoff) = (random_words(), Mutex::new(Backoff::new(Instant::now())));
        Arc::new(Store { capacity: bytes / PAGE as u64, name, used, room, backoff, patience, clients, spare })
    }

    /// What no other store is called.
    pub fn name(&self) -> [u64; 2] {
        self.name
    }

    /// Pages that can be kept in all.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    fn full(&self) -> Full {
        Full { capacity: self.capacity, used: self.used.load(Ordering::Relaxed) }
    }

    /// Pages that hold something.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed).saturating_sub(self.room.load(Ordering::Relaxed))
    }

    /// Clients that have a lease.
    pub fn clients(&self) -> usize {
        lock(&self.clients).len()
    }

    /// What each client takes, in no order.
    pub fn uses(&self) -> Vec<Use> {
        let taken = |known: &Known| Use { label: known.pages.label, pages: known.pages.count.load(Ordering::Relaxed) };
        lock(&self.clients).values().map(taken).collect()
    }

    /// A client's lease; the first makes it known, under a label.
    pub fn open(self: &Arc<Store>, client: Client, label: Bits) -> Lease {
        let fresh = || Known { pages: Arc::new(Pages { label, ..Pages::default() }), leases: 0 };
        self.lease(client, lock(&self.clients).entry(client).or_insert_with(fresh))
    }

    /// One more lease of a client.
    fn lease(self: &Arc<Store>, client: Client, known: &mut Known) -> Lease {
        known.leases += 1;
        Lease { store: Arc::clone(self), client, pages: Arc::clone(&known.pages) }
    }

    /// A span to receive pages in; it may hold old ones.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn spare(&self) -> io::Result<Span> {
        let spare = lock(&self.spare).pop();
        spare.map_or_else(Span::new, Ok)
    }

    /// Takes a span back.
    pub fn recycle(&self, span: Span) {
        let mut spare = lock(&self.spare);
        if spare.len() < SPARE {
            spare.push(span);
        }
    }

    /// A client's span, and which of these pages are in it.
    fn get(&self, client: &Pages, number: u64, pages: Bits) -> Option<(Arc<Span>, Bits)> {
        if let Some(shared) = client.shared.get() {
            let data = both(pages, shared.spans().get(&number)?.data);
            let mut span = self.spare().ok()?;
            shared.read(number, data, &mut span).ok()?;
            return Some((Arc::new(span), data));
        }
        let spans = lock(&client.spans);
        let kept = spans.get(&number)?;
        Some((Arc::clone(&kept.span), both(pages, kept.data)))
    }

    /// Counts so many pages more, if so many of all remain.
    fn take_now(&self, more: u64, left: u64) -> Result<u64, u64> {
        let fits = |used: u64| used.checked_add(more).filter(|sum| sum.saturating_add(left) <= self.capacity);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
    }

    /// The same for a client, if there soon is.
    fn take(&self, client: &Pages, more: u64) -> Result<(), Full> {
        if more == 0 {
            return Ok(());
        }
        while let Err(used) = self.take_now(more, 0) {
            if self.squeeze(more) {
                continue;
            }
            let now = Instant::now();
            let since =
                lock(&client.starved).filter(|[_, last]| now - *last <= self.patience).map_or(now, |[since, _]| since);
            *lock(&client.starved) = Some([since, now]);
            if now - since >= self.patience {
                return Err(Full { capacity: self.capacity, used });
            }
            thread::sleep(Duration::from_millis(1));
        }
        *lock(&client.starved) = None;
        Ok(())
    }

    /// Counts so many pages less.
    fn give_back(&self, pages: u64) {
        self.used.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Gives back room of what holds nothing, so many pages if there are; false if there is none. No more, since it takes time in which nobody is answered.
    fn squeeze(&self, wanted: u64) -> bool {
        let all: Vec<_> = lock(&self.clients).values().map(|known| Arc::clone(&known.pages)).collect();
        let mut freed = 0;
        for shared in all.iter().filter_map(|pages| pages.shared.get()) {
            let pages = shared.squeeze(wanted.saturating_sub(freed));
            self.room.fetch_sub(pages, Ordering::Relaxed);
            self.give_back(pages);
            freed += pages;
        }
        freed > 0
    }
}

impl Pages {
    /// The first spans from this one on that hold something, in order, at most so many.
    fn numbers(&self, from: u64, most: usize) -> Vec<u64> {
        let Some(shared) = self.shared.get() else {
            let mut numbers: Vec<_> = lock(&self.spans).keys().copied().filter(|number| *number >= from).collect();
            numbers.sort_unstable();
            return numbers;
        };
        let spans = shared.spans();
        let full = spans.range(from..).filter(|(_, held)| !held.is_empty());
        full.map(|(number, _)| *number).take(most).collect()
    }
}

impl Lease {
    /// The store that it is a lease of.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Has everything kept in a file from now on: where that is, if this client keeps nothing and the kernel allows it.
    pub fn share(&self) -> Option<Bits> {
        if self.pages.shared.get().is_none() && lock(&self.pages.spans).is_empty() {
            let _ = self.pages.shared.set(Shared::new()?);
        }
        self.pages.shared.get().map(Shared::address)
    }

    /// A span, and which of these pages are in it; the others are zero.
    pub fn get(&self, number: u64, pages: Bits) -> Option<(Arc<Span>, Bits)> {
        self.store.get(&self.pages, number, pages)
    }

    /// Makes room in the file for the pages `data`, which the client writes, and forgets those in `zero`.
    ///
    /// # Errors
    /// There is no room, or no file.
    pub fn take(&self, number: u64, data: Bits, zero: Bits) -> Result<(), Full> {
        let shared = self.pages.shared.get().ok_or_else(|| self.store.full())?;
        let change = |spans: &Spans| {
            let before = spans.get(&number).copied().unwrap_or_default();
            let data = std::array::from_fn(|at| (before.data[at] | data[at]) & !zero[at]);
            (before, Held { data, ..before })
        };
        // Room that this span has is given back where no other is left, and then it needs more.
        let (mut spans, before, mut after, counted) = loop {
            let (before, after) = change(&shared.spans());
            let more = after.pages().saturating_sub(before.pages());
            self.store.take(&self.pages, more)?;
            let spans = shared.spans();
            let (before, after) = change(&spans);
            if after.pages() <= before.pages() + more {
                break (spans, before, after, more);
            }
            drop(spans);
            self.store.give_back(more);
        };
        let surplus = before.pages() + counted - after.pages();
        let fresh = if before.roomy { Bits::default() } else { without(data, before.data) };
        let grows = count(&before.data) < WORTH && count(&after.data) >= WORTH;
        if grows && !before.roomy && self.make_room(shared, &mut spans, number, &after) {
            after.roomy = true;
        } else if shared.reserve(number, fresh).is_err() {
            shared.forget(number, fresh);
            self.store.give_back(counted);
            return Err(self.store.full());
        }
        self.store.give_back(surplus);
        self.store.room.fetch_add(after.room().wrapping_sub(before.room()), Ordering::Relaxed);
        self.pages
            .count
            .fetch_add((count(&after.data) as u64).wrapping_sub(count(&before.data) as u64), Ordering::Relaxed);
        if !after.roomy {
            shared.forget(number, both(before.data, zero));
        }
        spans.insert(number, after);
        if after.is_empty() && spans.get(&(number ^ 1)).is_none_or(Held::is_empty) {
            shared.forget_pair(number & !1);
            let held = [number, number ^ 1].map(|number| spans.remove(&number).map_or(0, |held| held.room()));
            self.store.room.fetch_sub(held.iter().sum(), Ordering::Relaxed);
            self.store.give_back(held.iter().sum());
        } else if after.pages() == 0 {
            spans.remove(&number);
        }
        Ok(())
    }

    /// Makes room for all of a span and the one beside it, if that much is left and the kernel can; whether it was made.
    fn make_room(&self, shared: &Shared, spans: &mut Spans, number: u64, after: &Held) -> bool {
        let (pair, other) = (number & !1, spans.get(&(number ^ 1)).copied().unwrap_or_default());
        let more = (2 * SPAN_PAGES as u64).saturating_sub(after.pages() + other.pages());
        let is_over = lock(&self.store.backoff).is_over(Instant::now());
        if !is_over || self.store.take_now(more, self.store.capacity / LEFT).is_err() {
            return false;
        }
        let (begun, worked) = (Instant::now(), time_of_thread());
        let made = shared.gather(pair, spans);
        let waited = begun.elapsed().saturating_sub(time_of_thread().saturating_sub(worked));
        lock(&self.store.backoff).add(Instant::now(), waited);
        if made {
            let other = Held { roomy: true, ..other }.room() - other.room();
            self.store.room.fetch_add(other, Ordering::Relaxed);
            [pair, pair + 1].iter().for_each(|number| spans.entry(*number).or_default().roomy = true);
        } else {
            self.store.give_back(more);
        }
        made
    }

    /// Keeps the pages `data` of `fresh`, and forgets those in `zero`.
    ///
    /// # Errors
    /// There is no room.
    pub fn put(&self, number: u64, data: Bits, zero: Bits, mut fresh: Span) -> Result<(), Full> {
        if let Some(shared) = self.pages.shared.get() {
            self.take(number, data, zero)?;
            let written = shared.write(number, data, &fresh);
            self.store.recycle(fresh);
            return written.map_err(|_| self.store.full());
        }
        let mut spans = lock(&self.pages.spans);
        let before = spans.get(&number).map_or(Bits::default(), |kept| kept.data);
        let after = std::array::from_fn(|at| (before[at] | data[at]) & !zero[at]);
        let (less, more) = (count(&before) as u64, count(&after) as u64);
        let left = without(after, data);
        let taken = || self.pages.count.fetch_add(more.wrapping_sub(less), Ordering::Relaxed);
        if spans.get(&number).is_some_and(|kept| Arc::strong_count(&kept.owner) > 1) {
            self.store.take(&self.pages, more)?;
            taken();
            let Some(old) = spans.remove(&number) else { return Ok(()) };
            copy(&mut fresh, &old.span, left);
            fresh.forget(without(ALL, after));
            if more > 0 {
                spans.insert(number, Kept::new(fresh, after));
            }
            drop(spans);
            self.store.give_back(old.let_go());
            return Ok(());
        }
        self.store.take(&self.pages, more.saturating_sub(less))?;
        self.store.give_back(less.saturating_sub(more));
        taken();
        match spans.get_mut(&number) {
            _ if count(&after) == 0 => drop(spans.remove(&number)),
            // All that counts is in the fresh one, if what it held before is put right.
            Some(kept) if left == Bits::default() => {
                fresh.forget(without(ALL, data));
                let old = std::mem::replace(kept, Kept::new(fresh, after));
                drop(spans);
                Arc::try_unwrap(old.span).into_iter().for_each(|span| self.store.recycle(span));
                return Ok(());
            }
            Some(kept) => {
                if let Some(span) = Arc::get_mut(&mut kept.span) {
                    copy(span, &fresh, data);
                    span.forget(both(before, zero));
                } else {
                    // Somebody is being sent it.
                    copy(&mut fresh, &kept.span, left);
                    fresh.forget(without(ALL, after));
                    *kept = Kept::new(fresh, after);
                    return Ok(());
                }
                kept.data = after;
            }
            None => {
                fresh.forget(without(ALL, data));
                spans.insert(number, Kept::new(fresh, after));
                return Ok(());
            }
        }
        drop(spans);
        self.store.recycle(fresh);
        Ok(())
    }

    /// Forgets everything in so many spans.
    pub fn forget(&self, first: u64, spans: u64) {
        if let Some(shared) = self.pages.shared.get() {
            let meant = shared
                .spans()
                .range(first..first.saturating_add(spans))
                .map(|(at, held)| (*at, held.data))
                .collect::<Vec<_>>();
            for (number, data) in meant {
                let _ = self.take(number, Bits::default(), data);
            }
            return;
        }
        let mut kept = lock(&self.pages.spans);
        let before = kept.len();
        let (mut pages, mut freed) = (0, 0);
        let mut forget = |kept: Kept| {
            pages += count(&kept.data) as u64;
            freed += kept.let_go();
        };
        if spans < before as u64 {
            (first..first.saturating_add(spans)).filter_map(|number| kept.remove(&number)).for_each(&mut forget);
        } else {
            let last = first.saturating_add(spans);
            kept.extract_if(|number, _| (first..last).contains(number)).for_each(|(_, kept)| forget(kept));
        }
        self.store.give_back(freed);
        self.pages.count.fetch_sub(pages, Ordering::Relaxed);
    }

    /// Keeps from now on what another client keeps now of spans from this one on. What is in files is copied at once, as far as a question may take: then the span is returned
    /// with which to go on. Of what is not in files what differs later is copied.
    ///
    /// # Errors
    /// There is no such client, or this one keeps something there already; or there is no room for what is copied at once.
    pub fn copy(&self, client: Client, from: u64) -> Result<Option<u64>, NotCopied> {
        // Until this is done what that one keeps stays; others may come and go.
        let other = lock(&self.store.clients).get_mut(&client).map(|known| self.store.lease(client, known));
        let other = other.as_ref().map(|other| &other.pages).filter(|other| !Arc::ptr_eq(other, &self.pages));
        let other = other.ok_or(NotCopied::Unknown)?;
        if self.pages.shared.get().is_some() || other.shared.get().is_some() {
            if !self.pages.numbers(from, 1).is_empty() {
                return Err(NotCopied::Unknown);
            }
            let (numbers, begun) = (other.numbers(from, COPIED + 1), Instant::now());
            for number in numbers.iter().copied().take(COPIED) {
                if number > from && begun.elapsed() >= COPYING {
                    return Ok(Some(number));
                }
                let Some((span, data)) = self.store.get(other, number, ALL) else { return Err(NotCopied::Unknown) };
                let fresh = Arc::try_unwrap(span).or_else(|kept| {
                    let mut fresh = self.store.spare()?;
                    copy(&mut fresh, &kept, data);
                    io::Result::Ok(fresh)
                });
                let fresh = fresh.map_err(|_| self.store.full())?;
                self.put(number, data, Bits::default(), fresh)?;
            }
            return Ok(numbers.get(COPIED).copied());
        }
        let copied = lock(&other.spans).clone();
        let mut ours = lock(&self.pages.spans);
        if !ours.is_empty() {
            return Err(NotCopied::Unknown);
        }
        self.pages.count.fetch_add(other.count.load(Ordering::Relaxed), Ordering::Relaxed);
        *ours = copied;
        Ok(None)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut clients = lock(&self.store.clients);
        let Some(known) = clients.get_mut(&self.client) else { return };
        known.leases -= 1;
        if known.leases > 0 {
            return;
        }
        clients.remove(&self.client);
        drop(clients);
        let freed = lock(&self.pages.spans).drain().map(|(_, kept)| kept.let_go()).sum::<u64>();
        // Whoever gives back room meanwhile finds none here.
        let shared = self.pages.shared.get().map(|shared| std::mem::take(&mut *shared.spans())).unwrap_or_default();
        self.store.room.fetch_sub(shared.values().map(Held::room).sum(), Ordering::Relaxed);
        self.store.give_back(freed + shared.values().map(Held::pages).sum::<u64>());
    }
}

fn copy(to: &mut Span, from: &Span, pages: Bits) {
    for (first, count) in runs(pages) {
        let range = first * PAGE..(first + count) * PAGE;
        to.bytes_mut()[range.clone()].copy_from_slice(&from.bytes()[range]);
    }
}

/// That this thread has had a processor.
fn time_of_thread() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::page::{SPAN, has};
    use crate::sys::resident::WINDOW;
    use proptest::prelude::*;

    /// A store that says at once that it is full.
    fn hasty(bytes: u64) -> Arc<Store> {
        Store::with_patience(bytes, Duration::ZERO)
    }

    fn bits(pages: impl IntoIterator<Item = usize>) -> Bits {
        let mut bits = Bits::default();
        pages.into_iter().for_each(|page| bits[page / 64] |= 1 << (page % 64));
        bits
    }

    fn filled(store: &Store, data: Bits, value: u8) -> Span {
        let mut span = store.spare().unwrap();
        runs(data).for_each(|(first, count)| span.bytes_mut()[first * PAGE..][..count * PAGE].fill(value));
        span
    }

    fn put(lease: &Lease, span: u64, data: Bits, zero: Bits, value: u8) -> Result<(), Full> {
        lease.put(span, data, zero, filled(lease.store(), data, value))
    }

    /// First byte of each page.
    fn seen(lease: &Lease, span: u64) -> Vec<u8> {
        let got = lease.get(span, ALL);
        let page = |at: usize| {
            let (span, data) = got.as_ref()?;
            has(data, at).then(|| span.bytes()[at * PAGE])
        };
        (0..SPAN_PAGES).map(|at| page(at).unwrap_or(0)).collect()
    }

    #[test]
    fn clients_see_their_own_and_leave_nothing() {
        let store = hasty(10 << 20);
        let (one, two) = (store.open([1, 1], Bits::default()), store.open([1, 2], Bits::default()));
        put(&one, 5, bits(0..256), bits([]), 1).unwrap();
        put(&two, 5, bits([3]), bits([]), 2).unwrap();
        assert_eq!((seen(&one, 5)[3], seen(&two, 5)[3], seen(&two, 5)[4], store.used()), (1, 2, 0, 257));
        let again = store.open([1, 1], Bits::default());
        drop(one);
        assert_eq!((seen(&again, 5)[255], store.clients()), (1, 2), "another connection holds it");
        drop(again);
        assert_eq!((store.used(), store.clients()), (1, 1));
        assert_eq!(store.uses(), [Use { label: Bits::default(), pages: 1 }]);
        assert_eq!(seen(&store.open([1, 1], Bits::default()), 5), vec![0; 256], "who comes back finds nothing");
    }

    #[test]
    fn full_is_said_and_changes_nothing() {
        let store = hasty(4 * PAGE as u64);
        let lease = store.open([0, 0], Bits::default());
        put(&lease, 0, bits([0, 1, 2]), bits([]), 1).unwrap();
        assert_eq!(put(&lease, 0, bits([2, 3, 4]), bits([]), 2), Err(Full { capacity: 4, used: 3 }));
        assert_eq!(seen(&lease, 0)[..5], [1, 1, 1, 0, 0]);
        put(&lease, 0, bits([2, 3, 4]), bits([0]), 2).unwrap();
        assert_eq!((seen(&lease, 0)[..5].to_vec(), store.used()), (vec![0, 1, 2, 2, 2], 4));
        lease.forget(0, u64::MAX);
        assert_eq!(store.used(), 0);
    }

    #[test]
    fn who_finds_no_room_waits_for_those_who_leave() {
        let store = Store::with_patience(4 * PAGE as u64, Duration::from_secs(60));
        for round in 0..200 {
            let [one, again, two] = [1, 1, 2].map(|client| store.open([round, client], Bits::default()));
            put(&one, 0, bits([0, 1, 2]), bits([]), 1).unwrap();
            thread::scope(|scope| {
                let kept = scope.spawn(move || (put(&two, 1, bits([0, 1]), bits([]), 1), two));
                // Both at once: whoever is the last frees what was kept.
                scope.spawn(|| drop(one));
                scope.spawn(|| drop(again));
                assert_eq!(kept.join().unwrap().0, Ok(()));
            });
            assert_eq!((store.used(), store.clients()), (0, 0));
        }
    }

    #[test]
    fn who_found_no_room_hears_it_at_once_until_there_is_some() {
        let patience = Duration::from_secs(2);
        let store = Store::with_patience(4 * PAGE as u64, patience);
        let (lease, other) = (store.open([0, 0], Bits::default()), store.open([0, 1], Bits::default()));
        put(&other, 0, bits([0, 1, 2]), bits([]), 1).unwrap();
        let begun = Instant::now();
        for _ in 0..100 {
            put(&lease, 0, bits([0, 1]), bits([]), 1).unwrap_err();
        }
        assert!(begun.elapsed() < 50 * patience);
        put(&lease, 0, bits([0]), bits([]), 1).unwrap();
        thread::scope(|scope| {
            let kept = scope.spawn(|| put(&lease, 1, bits([0, 1]), bits([]), 1));
            drop(other);
            assert_eq!(kept.join().unwrap(), Ok(()));
        });
    }

    #[test]
    fn what_is_being_sent_does_not_change() {
        let store = hasty(10 << 20);
        let lease = store.open([0, 0], Bits::default());
        put(&lease, 0, bits([0, 1]), bits([]), 1).unwrap();
        let (sent, data) = lease.get(0, bits([0, 1])).unwrap();
        put(&lease, 0, bits([1]), bits([0]), 2).unwrap();
        assert_eq!((data, sent.bytes()[0], sent.bytes()[PAGE]), (bits([0, 1]), 1, 1));
        assert_eq!(seen(&lease, 0)[..2], [0, 2]);
    }

    #[test]
    fn a_copy_is_what_it_was_and_counts_what_differs() {
        let store = hasty(8 * PAGE as u64);
        let (one, two) = (store.open([1, 1], Bits::default()), store.open([1, 2], Bits::default()));
        put(&one, 5, bits([0, 1, 2]), bits([]), 1).unwrap();
        put(&one, 6, bits([0]), bits([]), 1).unwrap();
        let refused = Err(NotCopied::Unknown);
        let copied = [[9, 9], [1, 2], [1, 1], [1, 1]].map(|name| two.copy(name, 0));
        assert_eq!(copied, [refused, refused, Ok(None), refused]);
        assert_eq!((seen(&two, 5)[..4].to_vec(), store.used()), (vec![1, 1, 1, 0], 4));
        assert!(store.uses().iter().all(|one| one.pages == 4));
        put(&one, 5, bits([3]), bits([0]), 3).unwrap();
        assert_eq!((seen(&one, 5)[..4].to_vec(), seen(&two, 5)[..4].to_vec()), (vec![0, 1, 1, 3], vec![1, 1, 1, 0]));
        assert_eq!(store.used(), 7);
        put(&two, 5, bits([1]), bits([]), 2).unwrap();
        assert_eq!((seen(&two, 5)[..4].to_vec(), store.used()), (vec![1, 2, 1, 0], 7), "nobody else has it any more");
        put(&two, 6, bits([]), bits([0]), 0).unwrap();
        assert_eq!((seen(&one, 6)[0], store.used()), (1, 7));
        put(&one, 8, bits([0]), bits([]), 1).unwrap();
        let three = store.open([1, 3], Bits::default());
        assert_eq!(three.copy([1, 1], 0), Ok(None));
        assert_eq!(put(&three, 5, bits([0]), bits([]), 1), Err(Full { capacity: 8, used: 8 }));
        drop((one, two));
        assert_eq!((seen(&three, 5)[..4].to_vec(), store.used()), (vec![0, 1, 1, 3], 5));
        drop(three);
        assert_eq!(store.used(), 0);
    }

    /// Pages that count, with room.
    fn taken(store: &Store) -> u64 {
        store.used.load(Ordering::Relaxed)
    }

    #[test]
    fn room_counts_and_is_for_whoever_needs_it() {
        const NONE: Bits = [0; 4];
        const SOME: Bits = [u64::MAX, 0, 0, 0];
        let (store, first) = (hasty(6 * SPAN as u64), WINDOW / SPAN as u64);
        let [one, other] = [1, 2].map(|client| store.open([client; 2], NONE));
        if one.share().is_none() {
            return eprintln!("SKIPPED: the kernel has no files in memory here");
        }
        // However long the kernel waited for the huge pages before: what keeps from making more is not meant here.
        let take = |number, data, zero| {
            *lock(&store.backoff) = Backoff::new(Instant::now());
            one.take(number, data, zero)
        };
        take(first, bits(0..31), NONE).unwrap();
        assert_eq!(taken(&store), 31);
        take(first, bits(31..64), NONE).unwrap();
        if taken(&store) == 64 {
            return eprintln!("SKIPPED: the kernel makes no huge pages of files in memory");
        }
        assert_eq!(taken(&store), 512);
        take(first + 1, bits([7]), NONE).unwrap();
        take(first, bits([200]), bits(0..8)).unwrap();
        assert_eq!((taken(&store), store.used(), store.uses()[0].pages.max(store.uses()[1].pages)), (512, 58, 58));
        take(first + 2, ALL, NONE).unwrap();
        assert_eq!(taken(&store), 1024);
        take(first + 4, SOME, NONE).unwrap();
        assert_eq!(taken(&store), 1024 + 64, "an eighth is left for whoever needs it");
        other.put(7, ALL, NONE, store.spare().unwrap()).unwrap();
        assert_eq!(taken(&store), 1024 + 64 + 256);
        other.put(8, ALL, NONE, store.spare().unwrap()).unwrap();
        assert_eq!(
            (taken(&store), store.used()),
            (58 + 256 + 256 + 64 + 512, 58 + 256 + 64 + 512),
            "somebody needed as much"
        );
        // What this span had for what comes went to others.
        take(first, bits(0..8), NONE).unwrap();
        assert_eq!(taken(&store), 66 + 256 + 256 + 64 + 512);
        drop(other);
        take(first + 6, SOME, NONE).unwrap();
        assert_eq!(taken(&store), 66 + 256 + 256 + 64 + 512);
        take(first + 6, NONE, SOME).unwrap();
        assert_eq!(taken(&store), 66 + 256 + 256 + 64, "of a pair that holds nothing nothing stays");
        take(first + 6, ALL, NONE).unwrap();
        take(first + 7, SOME, NONE).unwrap();
        take(first + 6, NONE, ALL).unwrap();
        assert_eq!(taken(&store), 66 + 256 + 256 + 64 + 512);
        drop(one);
        assert_eq!((taken(&store), store.room.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn what_is_shared_is_copied_a_part_at_a_time() {
        const NONE: Bits = [0; 4];
        let (store, first) = (hasty(300 * PAGE as u64), WINDOW / SPAN as u64);
        let [one, two] = [1, 2].map(|client| store.open([client; 2], NONE));
        if one.share().is_none() {
            return eprintln!("SKIPPED: the kernel has no files in memory here");
        }
        let spans = (0..2 * COPIED as u64 + 5).map(|nth| first + 3 * nth);
        spans.clone().for_each(|span| put(&one, span, bits([1]), NONE, span as u8).unwrap());
        let (mut from, mut steps) = (0, 0);
        while let Some(next) = two.copy([1, 1], from).unwrap() {
            assert_eq!(two.copy([1, 1], from), Err(NotCopied::Unknown), "it has these already");
            (from, steps) = (next, steps + 1);
        }
        assert_eq!((steps, store.used()), (2, 2 * (2 * COPIED as u64 + 5)));
        assert!(spans.clone().all(|span| seen(&two, span)[1] == span as u8));
    }

    #[test]
    fn what_is_shared_is_read_and_written_by_the_client() {
        use std::os::unix::fs::FileExt;
        let store = hasty(6 * PAGE as u64);
        let (one, two) = (store.open([1, 1], Bits::default()), store.open([1, 2], Bits::default()));
        let span = WINDOW / SPAN as u64 + 3;
        let [process, fd, mark @ ..] = one.share().unwrap();
        assert_eq!((one.share(), u64::from(std::process::id())), (Some([process, fd, mark[0], mark[1]]), process));
        let file = std::fs::OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{fd}")).unwrap();
        let at = |page: usize| (3 * SPAN_PAGES + page) as u64 * PAGE as u64;
        one.take(span, bits([0, 1, 200]), bits([])).unwrap();
        file.write_all_at(&[7; PAGE], at(1)).unwrap();
        assert_eq!((seen(&one, span)[..3].to_vec(), store.used()), (vec![0, 7, 0], 3));
        put(&one, span, bits([2]), bits([200]), 9).unwrap();
        let mut page = [0; PAGE];
        file.read_exact_at(&mut page, at(2)).unwrap();
        assert_eq!(
            (page, store.used(), one.take(span, bits([3, 4, 5, 6]), bits([]))),
            ([9; PAGE], 3, Err(Full { capacity: 6, used: 3 }))
        );
        // What is copied at once, and to whom there is no file.
        assert_eq!((two.copy([1, 1], 0), store.used()), (Ok(None), 6));
        assert_eq!(two.copy([1, 1], 0), Err(NotCopied::Unknown));
        file.write_all_at(&[8; PAGE], at(1)).unwrap();
        assert_eq!((seen(&two, span)[..3].to_vec(), seen(&one, span)[1]), (vec![0, 7, 9], 8));
        let full = Full { capacity: 6, used: 6 };
        assert_eq!(store.open([1, 3], Bits::default()).copy([1, 1], 0), Err(NotCopied::Full(full)));
        assert!(two.share().is_none() && two.take(span, bits([0]), bits([])).is_err());
        one.forget(span, 1);
        assert_eq!((seen(&one, span)[1], store.used()), (0, 3));
        drop((one, two));
        assert_eq!(store.used(), 0);
        // Elsewhere than where captured memory is there is no place for it.
        let other = store.open([1, 4], Bits::default());
        other.share().unwrap();
        assert!(other.take(5, bits([0]), bits([])).is_err() && store.used() == 0);
    }

    proptest! {
        /// What is counted is what is kept and its room, whoever takes, gives back or finds no room.
        #[test]
        fn as_a_table_of_shared_pages(steps in prop::collection::vec((0..8u64, 0..256usize, 0..256usize, 0..5u8), 1..60)) {
            let (store, first) = (hasty(5 * SPAN as u64), WINDOW / SPAN as u64);
            let [one, two] = [1, 2].map(|client| store.open([client; 2], Bits::default()));
            if one.share().is_none() || two.share().is_none() {
                return Ok(());
            }
            let mut model = HashMap::<(bool, u64), Bits>::new();
            for (span, from, pages, what) in steps {
                let (lease, is_one) = if what % 2 == 0 { (&one, true) } else { (&two, false) };
                let (number, pages) = (first + span, bits(from..(from + pages).min(SPAN_PAGES)));
                let data = model.entry((is_one, span)).or_default();
                if what == 4 {
                    lease.take(number, Bits::default(), pages).unwrap();
                    *data = without(*data, pages);
                } else if lease.take(number, pages, Bits::default()).is_ok() {
                    *data = std::array::from_fn(|at| data[at] | pages[at]);
                }
                let kept: u64 = model.values().map(|data| count(data) as u64).sum();
                prop_assert_eq!(store.used(), kept);
                let held = [&one, &two].map(|lease| lease.pages.shared.get().unwrap().spans().clone());
                let sum = |pages: fn(&Held) -> u64| held.iter().flat_map(|spans| spans.values()).map(pages).sum::<u64>();
                prop_assert_eq!((taken(&store), sum(Held::room)), (sum(Held::pages), store.room.load(Ordering::Relaxed)));
                prop_assert!(taken(&store) <= store.capacity());
            }
            drop((one, two));
            prop_assert_eq!((taken(&store), store.used()), (0, 0));
        }

        /// Beside a plain table of pages.
        #[test]
        fn as_a_table_of_pages(steps in prop::collection::vec((0..3u64, prop::collection::vec(0..256usize, 0..40), 0..4u8, any::<bool>()), 1..40)) {
            let store = hasty(600 * PAGE as u64);
            let lease = store.open([7, 7], Bits::default());
            let mut model = HashMap::<(u64, usize), u8>::new();
            for (span, pages, value, hold) in steps {
                let held = hold.then(|| lease.get(span, ALL));
                let pages = bits(pages);
                let at = |page: &usize| has(&pages, *page);
                match value {
                    0 => put(&lease, span, bits([]), pages, 0).unwrap(),
                    3 => lease.forget(span, 1),
                    value if put(&lease, span, pages, bits([]), value).is_err() => continue,
                    _ => {}
                }
                for page in (0..SPAN_PAGES).filter(|page| value == 3 || at(page)) {
                    if value % 3 == 0 { model.remove(&(span, page)); } else { model.insert((span, page), value); }
                }
                drop(held);
                prop_assert_eq!(store.used(), model.len() as u64);
                for span in 0..3 {
                    let expected: Vec<u8> = (0..SPAN_PAGES).map(|page| model.get(&(span, page)).copied().unwrap_or(0)).collect();
                    prop_assert_eq!(seen(&lease, span), expected);
                }
            }
        }
    }
}
