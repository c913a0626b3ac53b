//! A part of the address space in which nothing else ever is: what the program asks for is given to it here, in whole spans. By
//! its addresses alone the kernel (a filter of system calls) and we can tell this memory from all other, also in what the program executes.

use sys::page::{Bits, NONE, PAGE, SPAN, both, bounds, count, runs, with, without};
use sys::resident::WINDOW_BYTES;
use sys::syscall::nr;

use super::table::{TABLE, Table, address, spans};
use super::wishes::Wishes;
use super::{call, freed, pager, segments};

/// Above where programs and their heaps are, below where the kernel puts libraries and stacks; not where sanitizers have theirs.
pub(super) const BASE: usize = 0x6800_0000_0000;
pub(super) const SIZE: usize = WINDOW_BYTES as usize;
/// The first part belongs to the program's break.
pub(super) const HEAP: usize = 256 << 30;
pub(super) const NO_ACCESS: usize = 0;

/// What a libc puts beside its thread-local storage, at most.
const BESIDE: usize = 64 << 10;

/// Guarded by the table's lock.
pub(super) struct State {
    /// The break's first growth stays here, if it is no larger.
    first: usize,
    /// The program's break; and up to where its memory can be reached.
    end: usize,
    reachable: usize,
    /// Nothing from here on was ever given.
    fresh: usize,
    /// Pages that the program has.
    pub(super) pages: usize,
    wishes: Wishes,
}

impl State {
    pub(super) const NEW: State =
        State { first: 0, end: BASE, reachable: BASE, fresh: BASE + HEAP, pages: 0, wishes: Wishes::NONE };
}

/// Takes the window before anybody else does. `thread_local`: bytes that the first thread of a statically linked program has for itself. It asks for them with the
/// break's first growth, and the kernel writes there whenever it likes (rseq(2)), so they stay here.
pub(super) fn reserve(thread_local: Option<usize>) -> Result<(), u32> {
    call::make_gate()?;
    let at = call::map(BASE, SIZE, NO_ACCESS, call::FIXED_NOREPLACE)?;
    let mut table = TABLE.lock();
    table.make()?;
    table.window.first = thread_local.map_or(0, |bytes| bytes + BESIDE);
    // Kernels that do not know the flag take the address for a wish.
    if at == BASE { Ok(()) } else { Err(call::ENOMEM) }
}

/// Whether an address is captured: in the window, or in a large segment.
pub(super) fn contains(address: usize) -> bool {
    (BASE..BASE + SIZE).contains(&address) || segments::contains(address)
}

/// Whether some of a range is captured.
pub(super) fn touches(at: usize, len: usize) -> bool {
    let end = at.saturating_add(len);
    segments::bounds().chain(core::iter::once(BASE..BASE + SIZE)).any(|range| range.start < end && at < range.end)
}

/// The number of a captured page, from the window's beginning.
pub(super) fn page(address: usize) -> Option<usize> {
    contains(address).then(|| (segments::to_window(address) - BASE) / PAGE)
}

/// Visits all that is captured, or will be, in ranges of addresses and bytes; but not what else was put there ([`leave`]): the kernel may refuse that. Nobody puts
/// anything there meanwhile.
pub(super) fn visit(visit: impl Fn(usize, usize) -> Result<(), u32>) -> Result<(), u32> {
    let between = |from, to| if from < to { visit(from, to - from) } else { Ok(()) };
    let mut table = TABLE.lock();
    let (reachable, fresh) = (table.window.reachable, table.window.fresh);
    for (at, len) in segments::ranges().chain([(BASE, reachable - BASE), (BASE + HEAP, fresh - BASE - HEAP)]) {
        let mut from = at;
        for (number, pages) in spans(at, len) {
            let span = table.span(number);
            if span.foreign == 0 {
                continue;
            }
            let (first, end) = bounds(pages);
            let place = address(number, first);
            // In the window nothing is where addresses stand for those of a segment.
            if !(at..at + len).contains(&place) {
                continue;
            }
            between(from, place)?;
            for (first, count) in runs(both(pages, span.mapped)) {
                visit(address(number, first), count * PAGE)?;
            }
            from = place + (end - first) * PAGE;
        }
        between(from, at + len)?;
    }
    // Of the rest nothing was ever given.
    between(reachable, BASE + HEAP)?;
    between(fresh, BASE + SIZE)
}

/// The program has this part of a segment from now on, not from the window.
pub(super) fn capture(at: usize, len: usize) {
    TABLE.lock().mark(at, len);
}

/// Memory for the program, zero.
pub(super) fn allocate(len: usize) -> Result<usize, u32> {
    let at = reserve_for(len)?;
    // Whole spans: what is beside each other can be reached in the same way, and is one to the kernel.
    // SAFETY: a part of the window that nobody else has.
    unsafe { call::protect(at, len.next_multiple_of(SPAN), call::READ_WRITE) }.inspect_err(|_| release(at, len))?;
    TABLE.lock().mark(at, len);
    Ok(at)
}

/// Addresses for the program, at which nothing can be reached yet.
pub(super) fn reserve_for(len: usize) -> Result<usize, u32> {
    TABLE.lock().reserve(len)
}

/// The same for a program that may have a `wish` where they are, else 0; none where it is to get what it wishes.
pub(super) fn reserve_near(wish: usize, len: usize) -> Result<usize, u32> {
    let mut table = TABLE.lock();
    if table.window.wishes.are_granted(wish) {
        return Err(call::EEXIST);
    }
    table.reserve(len).inspect(|at| table.window.wishes.gave(*at, len, wish))
}

/// How the program may reach a range that it has, from now on.
pub(super) fn open(at: usize, len: usize, protection: usize) -> Result<(), u32> {
    let len = len.next_multiple_of(PAGE);
    if protection == NO_ACCESS {
        // Nobody reads it for us any more, then.
        spans(at, len).for_each(|(number, pages)| pager::undisturbed(number, pages).unmark_some(number, pages));
    }
    let mut table = TABLE.lock();
    // SAFETY: the program wants it so, and what is in there stays.
    let done = unsafe { call::protect(at, len, protection) };
    // Nobody sees it open who takes it for closed.
    if done.is_ok() != (protection == NO_ACCESS) {
        // Beside something else that was put there ([`leave`]) it stays as it is.
        for (number, pages) in spans(at, len) {
            if table.span(number).foreign == 0 {
                table.mark_some(number, pages);
            }
        }
    }
    done
}

/// Bytes of a range that the program could not reach so far.
pub(super) fn closed(at: usize, len: usize) -> usize {
    let mut table = TABLE.lock();
    spans(at, len).map(|(number, pages)| count(&without(pages, table.span(number).mapped)) * PAGE).sum()
}

/// Whether something else is in the range, or was ([`leave`]).
pub(super) fn is_left(at: usize, len: usize) -> bool {
    let mut table = TABLE.lock();
    spans(at, len).any(|(number, _)| table.span(number).foreign != 0)
}

/// Something else is put over a range: what it is does not concern us, but the place cannot be used again.
pub(super) fn leave(at: usize, len: usize) {
    forget(at, len, true);
    let mut table = TABLE.lock();
    spans(at, len).for_each(|(number, _)| table.span(number).foreign = 1);
}

/// Bytes that the program's break is to grow by, if it can be set there.
pub(super) fn growth(to: usize) -> usize {
    if (BASE..=BASE + HEAP).contains(&to) { to.saturating_sub(TABLE.lock().window.end) } else { 0 }
}

/// Sets the program's break; returns what it is then.
pub(super) fn set_end(to: usize) -> usize {
    let mut table = TABLE.lock();
    let before = table.window.end;
    if !(BASE..=BASE + HEAP).contains(&to) {
        return before;
    }
    let reach = to.next_multiple_of(SPAN);
    if reach > table.window.reachable {
        let from = table.window.reachable;
        // SAFETY: a part of the window that nobody has.
        if unsafe { call::protect(from, reach - from, call::READ_WRITE) }.is_err() {
            return before;
        }
        table.window.reachable = reach;
    }
    table.window.end = to;
    let (old, new) = (before.next_multiple_of(PAGE), to.next_multiple_of(PAGE));
    if before == BASE && to - BASE <= table.window.first {
        drop(table);
        // SAFETY: memory of the program that nobody uses yet. What is here, and was never the table's, stays.
        (old..new).step_by(PAGE).for_each(|page| unsafe { (page as *mut u8).write_volatile(0) });
    } else if new > old {
        table.mark(old, new - old);
    } else if new < old {
        drop(table);
        forget(new, old - new, true);
    }
    to
}

/// The program gives a range back. (It may have been given back before.)
pub(super) fn release(at: usize, len: usize) {
    forget(at, len, true);
    let mut table = TABLE.lock();
    table.window.wishes.take(at, len);
    // What lies behind was never given, and would be given twice.
    let fresh = table.window.fresh;
    for (number, pages) in spans(at, len) {
        let start = BASE + number * SPAN;
        let span = table.span(number);
        span.given = without(span.given, pages);
        if span.foreign != 0 {
            let _ = call::map(at.max(start), (at + len).min(start + SPAN) - at.max(start), NO_ACCESS, call::FIXED);
            continue;
        }
        let behind = start.checked_sub(BASE + HEAP).map(|bytes| bytes / SPAN);
        if let Some(nth) = behind.filter(|nth| start < fresh && span.given == NONE && !freed::has(*nth)) {
            // SAFETY: nobody has anything in this span any more.
            if unsafe { call::protect(start, SPAN, NO_ACCESS) }.is_ok() {
                freed::put(nth);
            }
        }
    }
}

/// What is in a range is zero from now on; `unmap`: and no longer the program's.
pub(super) fn forget(at: usize, len: usize, unmap: bool) {
    pager::forget(at, len, |at, len| {
        // SAFETY: the program said that it does not want it any more.
        if unsafe { call::advise(at, len, call::DONTNEED) }.is_err() {
            // It was locked by a call that nobody told us of; of what stays the next owner would find what this one left.
            let locked = [at, len, 0, 0, 0, 0];
            // SAFETY: as above.
            let _ = unsafe { call::gated(nr::MUNLOCK, locked).map(|_| call::advise(at, len, call::DONTNEED)) };
        }
    });
    if unmap {
        TABLE.lock().unmark(at, len);
    }
}

/// Whether a range can become longer where it is; if so it does.
pub(super) fn extend(at: usize, len: usize, new: usize) -> bool {
    let (end, more) = (at + len.next_multiple_of(PAGE), new.next_multiple_of(PAGE) - len.next_multiple_of(PAGE));
    let mut table = TABLE.lock();
    // Within its last span, where nothing else is.
    let is_free = |(number, pages)| {
        let span = table.span(number);
        span.foreign == 0 && both(span.given, pages) == NONE
    };
    if end % SPAN == 0 || end % SPAN + more > SPAN || !spans(end, more).all(is_free) {
        return false;
    }
    // SAFETY: a part of the window that nobody has. It was closed where the program reserved what lies before it.
    if unsafe { call::protect(end, more, call::READ_WRITE) }.is_err() {
        return false;
    }
    table.mark(end, more);
    true
}

impl State {
    /// The spans that were ever given to the program: of its break, and of the rest.
    pub(super) fn given(&self) -> [core::ops::Range<usize>; 2] {
        let number = |at: usize| (at - BASE) / SPAN;
        [0..number(self.reachable), number(BASE + HEAP)..number(self.fresh)]
    }
}

impl Table {
    fn reserve(&mut self, len: usize) -> Result<usize, u32> {
        let size = len.checked_next_multiple_of(SPAN).filter(|size| *size < SIZE).ok_or(call::ENOMEM)?;
        let state = &mut self.window;
        let at = match freed::take(size / SPAN) {
            Some(first) => BASE + HEAP + first * SPAN,
            None if state.fresh + size <= BASE + SIZE => {
                state.fresh += size;
                state.fresh - size
            }
            None => return Err(call::ENOMEM),
        };
        for (number, pages) in spans(at, len) {
            self.span(number).given = pages;
        }
        Ok(at)
    }

    fn unmark(&mut self, at: usize, len: usize) {
        spans(at, len).for_each(|(number, pages)| self.unmark_some(number, pages));
    }

    fn unmark_some(&mut self, number: usize, pages: Bits) {
        let span = self.span(number);
        let gone = count(&both(span.mapped, pages));
        span.mapped = without(span.mapped, pages);
        self.window.pages -= gone;
    }

    fn mark(&mut self, at: usize, len: usize) {
        spans(at, len).for_each(|(number, pages)| self.mark_some(number, pages));
    }

    fn mark_some(&mut self, number: usize, pages: Bits) {
        let span = self.span(number);
        span.given = with(span.given, pages);
        let before = count(&span.mapped);
        span.mapped = with(span.mapped, pages);
        let after = count(&span.mapped);
        self.window.pages += after - before;
    }
}

/// How many bytes from here on the program has, at most `len`.
pub(super) fn mapped(at: usize, len: usize) -> usize {
    if !contains(at) {
        return 0;
    }
    let len = len.min(BASE + SIZE - segments::to_window(at));
    let mut table = TABLE.lock();
    let mut good = 0;
    for (number, pages) in spans(at, len) {
        let missing = without(pages, table.span(number).mapped);
        match runs(missing).next() {
            None => good += count(&pages) * PAGE,
            Some((first, _)) => {
                let from = runs(pages).next().map_or(0, |(from, _)| from);
                good += (first - from) * PAGE;
                break;
            }
        }
    }
    good.saturating_sub(at % PAGE).min(len)
}
