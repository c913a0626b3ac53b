//! How much to fetch when a page is missing, and what to fetch before it is missed: decided from the places of the faults alone.

use core::ops::Range;

use super::page::SPAN_PAGES;

/// Pages of the part of memory that has a unit of its own: 64 MiB.
const REGION: u64 = 16 << 10;
/// Units are remembered for this many regions; others share.
const REGIONS: usize = 512;
/// Logarithms of units in pages: of what a region begins with, in [`STEPS`]; of a span.
const BEGINS: u8 = 4 * STEPS;
const ORDER_MAX: u8 = SPAN_PAGES.trailing_zeros() as u8;
/// A unit doubles when a run goes on, and halves when so many faults belong to none.
const STEPS: u8 = 4;
/// Runs of faults that are followed: so many of those that go on in one span, of so many spans.
const WAYS: usize = 4;
const SETS: usize = 1024;
/// Faults in order after which a run is believed.
const CONFIDENT: u8 = 2;
/// A run may leave out a few pages.
const NEAR: u64 = 8;
/// Of so many units of a run, or foreseen spans that were missed, one is probed.
const PROBE_EVERY: u8 = 16;
/// Probes in a row that are missed until a run is believed to use all that comes: of one that began, and of one that left out pages.
const BEGINNING: u8 = 2;
const DOUBTED: u8 = 5;
/// Runs in a region that are believed then.
const TRUST: u8 = 16;
/// Probes that were not decided, of all runs.
const PROBES: usize = 512;
const PAGES: u64 = SPAN_PAGES as u64;
/// Ranges of which the program has said something that are remembered.
const HINTS: usize = 32;

/// What the program says of a range (madvise(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    Nothing,
    /// One page says nothing of the others.
    Random,
    /// It will be run through.
    Sequential,
}

/// A run of faults. Downwards its pages are counted from the other end ([`mirror`]), so all go upwards.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// Missed next; 0: there is no such run.
    next: u64,
    hits: u8,
    /// Logarithm of its unit, which is not held back by scattered faults beside it.
    order: u8,
    /// Probes to be missed until it is believed that it uses all that comes; the unit grows with each.
    doubt: u8,
    /// So much had come that what came to it may have gone before it was used.
    late: bool,
    /// Units since one was probed.
    unprobed: u8,
    /// The probe that was not decided.
    probe: Option<u64>,
    /// Where it was missed last, and what had come to all then.
    at: u64,
    came: u64,
}

const NO_RUN: Run = Run { next: 0, hits: 0, order: 0, doubt: 0, late: false, unprobed: 0, probe: None, at: 0, came: 0 };

/// Of what came to a run last, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Used {
    All,
    Some,
    Unknown,
}

/// A page that was left out of what came to a run. If it is not missed before the run is past it, the run leaves out pages.
#[derive(Debug, Clone, Copy)]
struct Probe {
    page: u64,
    missed: bool,
}

/// What to do about a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Fetch this page and those around it, aligned: 2^order pages.
    pub order: u8,
    /// But for this one.
    pub hole: Option<u64>,
    /// The run goes on from this page: it is worth fetching more.
    pub ahead: Option<Ahead>,
}

/// Where a run goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead {
    pub page: u64,
    pub down: bool,
    /// Of so many spans, as far as there is room for them.
    pub spans: u64,
    /// To be left out, if its span is fetched now ([`Policy::left_out`]).
    pub probe: Option<u64>,
}

/// See the module.
#[derive(Debug)]
pub struct Policy {
    /// In the set of the span where each goes on.
    runs: [[Run; WAYS]; SETS],
    probes: [Probe; PROBES],
    /// Logarithms of units, in [`STEPS`], less that of what a region begins with: a policy is zero at first, and takes nothing of a file.
    raised: [u8; REGIONS],
    /// Runs that may begin there without doubt, since others used all that came.
    trust: [u8; REGIONS],
    /// First pages and those after the last; empty: none. And where the next is put when there are too many.
    hints: [(u64, u64, Hint); HINTS],
    oldest: usize,
    came: u64,
    /// Pages of whole spans that come to a run by themselves, before one that is missed again; and spans that are fetched ahead.
    reach: u64,
    depth: u64,
    /// Pages that come until one goes that is not kept.
    passing: u64,
}

impl Policy {
    pub const NEW: Policy = Policy {
        runs: [[NO_RUN; WAYS]; SETS],
        probes: [Probe { page: 0, missed: false }; PROBES],
        raised: [0; REGIONS],
        trust: [0; REGIONS],
        hints: [(0, 0, Hint::Nothing); HINTS],
        oldest: 0,
        came: 0,
        reach: 0,
        depth: 0,
        passing: 0,
    };

    /// The program says something of the pages from `first` up to `end`; it replaces what it said of them before.
    pub fn hint(&mut self, first: u64, end: u64, hint: Hint) {
        for (from, to, _) in self.hints.iter_mut().filter(|(from, to, _)| *from < end && *to > first) {
            // Of what lies on both sides only the one before is still known.
            if *from < first {
                *to = first;
            } else {
                *from = (*to).min(end);
            }
        }
        if hint != Hint::Nothing {
            let free = self.hints.iter().position(|(from, to, _)| from >= to);
            let place = free.unwrap_or(self.oldest);
            self.oldest = (place + 1) % HINTS;
            self.hints[place] = (first, end, hint);
        }
    }

    /// A page is missed. `here`: whether another is.
    pub fn handle_fault(&mut self, page: u64, here: impl FnMut(u64) -> bool) -> Choice {
        self.handle(page, None, here)
    }

    /// A page is missed that was foreseen; with it come all of these, or as many of them as were missing.
    pub fn handle_foreseen(&mut self, page: u64, comes: Range<u64>, here: impl FnMut(u64) -> bool) -> Choice {
        self.handle(page, Some(comes), here)
    }

    /// This page was left out of what is fetched ahead of a run, as it was wanted.
    pub fn left_out(&mut self, page: u64) {
        self.probes[probe(page)] = Probe { page, missed: false };
    }

    /// Of so many spans of a run one is missed, so many are fetched ahead, and what comes goes after so many pages.
    pub fn fit(&mut self, group: usize, depth: usize, passing: usize) {
        (self.reach, self.depth, self.passing) = ((group as u64 - 1) * PAGES, depth as u64, passing as u64);
    }

    fn handle(&mut self, page: u64, comes: Option<Range<u64>>, mut here: impl FnMut(u64) -> bool) -> Choice {
        let probed = &mut self.probes[probe(page)];
        let hint = self.hints.iter().find(|(from, to, _)| (*from..*to).contains(&page));
        let hint = hint.map_or(Hint::Nothing, |(_, _, hint)| *hint);
        if hint == Hint::Random || probed.page == page && !probed.missed {
            probed.missed = true;
            return Choice { order: 0, hole: None, ahead: None };
        }
        let sequential = hint == Hint::Sequential;
        let upwards = self.follow(page, false, &mut here).map(|found| (found, false));
        let found = upwards.or_else(|| self.follow(page, true, &mut here).map(|found| (found, true)));
        let Some(((mut run, used), down)) = found else { return self.begin(page, comes, sequential) };
        let place = (page / REGION) as usize % REGIONS;
        let trust = &mut self.trust[place];
        let region = self.raised[place].wrapping_add(BEGINS);
        let gap = used == Used::Some;
        // What comes to it has to be here until it is used.
        let flow = self.came - run.came;
        // As many go on beside each other as come to all while one comes to it.
        let at = if down { mirror(page) } else { page };
        let runs = flow / (at - run.at).max(1);
        let spans = (self.passing / (runs * PAGES).max(1)).min(self.depth);
        if sequential {
            (run.order, run.doubt) = (ORDER_MAX, 0);
        } else if gap {
            (run.order, run.doubt) = (run.order.saturating_sub(2), DOUBTED);
        } else if flow > self.passing {
            // Much more may say only that the program was elsewhere.
            run.order = run.order.saturating_sub(u8::from(run.late || flow <= 2 * self.passing));
        } else if (run.doubt == 0 || used == Used::All) && 2 * flow <= self.passing {
            run.order = (run.order + 1).min(ORDER_MAX);
        }
        run.late = flow > self.passing;
        run.doubt = if run.order == 0 { 0 } else { run.doubt.saturating_sub(u8::from(used == Used::All)) };
        run.hits = if gap { 0 } else { run.hits.saturating_add(1) };
        if used == Used::All {
            *trust = TRUST;
        }
        let region = if gap {
            *trust = 0;
            region.saturating_sub(STEPS)
        } else if run.doubt == 0 || used == Used::All {
            (region + STEPS).min((run.order * STEPS).max(region))
        } else {
            region
        };
        self.raised[place] = region.wrapping_sub(BEGINS);
        let foreseen = comes.is_some();
        let Range { start, end } = comes.unwrap_or(unit(page, run.order));
        self.came += end - start + if foreseen { self.reach } else { 0 };
        (run.at, run.came) = (at, self.came);
        run.next = if down { mirror(start) + 1 } else { end };
        let from = if down { start.checked_sub(1) } else { Some(end) };
        let from = from.filter(|_| run.hits >= CONFIDENT && spans > 0);
        let (mut hole, mut left) = (None, None);
        let probes = !sequential && (run.doubt > 0 || run.unprobed >= PROBE_EVERY);
        run.unprobed = if probes { 0 } else { run.unprobed.saturating_add(1) };
        if probes && run.probe.is_none() {
            let random = hash(self.came) as u64;
            let within = |range: Range<u64>| range.start + random % (range.end - range.start).max(1);
            let rest = if down { start..page } else { page + 1..end };
            hole = Some(within(rest.clone())).filter(|hole| !foreseen && rest.contains(hole) && !here(*hole));
            hole.into_iter().for_each(|hole| self.left_out(hole));
            let span = from.filter(|_| foreseen).map(|page| page / PAGES);
            let far = spans.max(1) - 1;
            let span = span.and_then(|span| if down { span.checked_sub(far) } else { Some(span + far) });
            left = span.map(|span| within(span * PAGES..(span + 1) * PAGES));
            run.probe = hole.or(left);
        }
        self.put(run);
        Choice { order: run.order, hole, ahead: from.map(|page| Ahead { page, down, spans, probe: left }) }
    }

    /// A page that belongs to no run: one may begin there, either way.
    fn begin(&mut self, page: u64, comes: Option<Range<u64>>, sequential: bool) -> Choice {
        let place = (page / REGION) as usize % REGIONS;
        let region = self.raised[place].wrapping_add(BEGINS).saturating_sub(1);
        self.raised[place] = region.wrapping_sub(BEGINS);
        let order = if sequential { ORDER_MAX } else { region.div_ceil(STEPS) };
        let Range { start, end } = comes.unwrap_or(unit(page, order));
        self.came += end - start;
        let hits = if sequential { CONFIDENT } else { 0 };
        let doubt = if order == 0 || self.trust[place] > 0 { 0 } else { BEGINNING };
        self.trust[place] = self.trust[place].saturating_sub(1);
        let run = Run { next: end, hits, order, doubt, at: page, came: self.came, ..NO_RUN };
        self.put(run);
        self.put(Run { next: mirror(start) + 1, at: mirror(page), ..run });
        let ahead = sequential.then_some(Ahead { page: end, down: false, spans: self.depth, probe: None });
        Choice { order, hole: None, ahead }
    }

    /// The run that goes on with this page, taken out, and what it used of what it was given.
    fn follow(&mut self, page: u64, down: bool, here: &mut impl FnMut(u64) -> bool) -> Option<(Run, Used)> {
        let turned = |page| if down { mirror(page) } else { page };
        let mut here = |page| here(turned(page));
        let (page, most) = (turned(page), self.reach + NEAR);
        let mut goes_on = |run: &Run| {
            let above = page.wrapping_sub(run.next);
            let leaps = run.hits >= CONFIDENT && above < most && page % PAGES < NEAR;
            above < NEAR || leaps || above < PAGES && (run.next..page).rev().all(&mut here)
        };
        let span = page / PAGES;
        let place = (span.saturating_sub(1 + self.reach / PAGES)..=span).rev().find_map(|span| {
            let set = set(span);
            let goes_on = |run: &Run| run.next != 0 && run.next / PAGES == span && goes_on(run);
            Some((set, self.runs[set].iter().position(goes_on)?))
        });
        let (set, way) = place?;
        let mut run = core::mem::replace(&mut self.runs[set][way], NO_RUN);
        let from = if page - run.next < NEAR { run.next } else { page - page % PAGES };
        let gap = (from.max(run.next)..page).any(|page| !here(page));
        let mut used = if gap { Used::Some } else { Used::Unknown };
        if let Some(left) = run.probe.filter(|left| turned(*left) < page) {
            run.probe = None;
            let probe = self.probes[probe(left)];
            if probe.page == left && !gap {
                let skipped = !probe.missed && !here(turned(left));
                used = if probe.missed {
                    Used::All
                } else if skipped {
                    Used::Some
                } else {
                    used
                };
            }
        }
        Some((run, used))
    }

    fn put(&mut self, run: Run) {
        let set = &mut self.runs[set(run.next / PAGES)];
        if let Some(oldest) = set.iter_mut().min_by_key(|other| (other.next != 0 && other.next != run.next, other.came))
        {
            *oldest = run;
        }
    }
}

fn set(span: u64) -> usize {
    hash(span) % SETS
}

fn probe(page: u64) -> usize {
    hash(page) % PROBES
}

fn hash(number: u64) -> usize {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize
}

/// A page counted from the other end.
fn mirror(page: u64) -> u64 {
    (1 << 40) - 1 - page
}

/// The pages of the unit that holds this one.
fn unit(page: u64, order: u8) -> Range<u64> {
    let start = page >> order << order;
    start..start + (1 << order)
}
