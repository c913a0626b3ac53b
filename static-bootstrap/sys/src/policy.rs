//! How much to fetch when a page is missing, and what to fetch before it is missed: decided from the places of the faults alone.

use core::ops::Range;

use super::page::{PAGE, SPAN_PAGES};
use super::strides::{Steps, Strides};

/// Pages of the part of memory that has a unit of its own: 64 MiB.
const REGION: u64 = 16 << 10;
/// Units are remembered for this many regions; others share.
const REGIONS: usize = 512;
/// Logarithms of units in pages: of what a region begins with; of a span.
const BEGINS: u8 = 4;
const ORDER_MAX: u8 = SPAN_PAGES.trailing_zeros() as u8;
/// A unit doubles when a run goes on, and halves when so many faults belong to none; twice as many each time that one went on at once soon after that, up to
/// so many times.
const SCATTERED: u8 = 4;
const PATIENCE: u8 = 4;
/// A region's unit doubles only if a run went on by one page in so many of it: one that comes past the end of a unit which was near says nothing of larger ones.
const GONE_ON_EVERY: u64 = 4;
/// Runs of faults that are followed: so many of those that go on in one span, of so many spans.
const WAYS: usize = 4;
const SETS: usize = 1024;
/// Faults in order after which a run is believed.
const CONFIDENT: u8 = 2;
/// Steps of some pages are looked for in faults with units up to this one.
const SHORT: u8 = 2;
/// And in those of so many runs beside each other, with units up to the other one.
const BESIDE: u64 = 8;
const WIDE: u8 = 5;
/// Of each so many pages come together at most, logarithm: more runs are better than larger units. Those that are looked for before the one that is missed; and on both sides of it, to tell
/// which of so many last distances it is that they are at.
const TOGETHER: u8 = 3;
const BEFORE: i64 = 48;
const NEIGHBOURS: i64 = 8;
const APARTS: usize = 4;
/// How many those are is told from the last so many pages that runs went on by.
const FLOWS: u64 = 256;
/// Runs are crowded where one page in so many that come is of those whose units could be larger, up to [`WIDE`], if less were kept; and until so many are not.
const CROWDED_EVERY: [u64; 2] = [6, 12];
/// A run may leave out a few pages; and twice as many where it returns to them.
const NEAR: u64 = 8;
/// What a run skipped is returned to at once, if it is here before so many pages have come.
const SOON: u64 = 2 * PAGES;
/// Of so many units of a run, or foreseen spans that were missed, one is probed.
const PROBE_EVERY: u8 = 16;
/// Probes in a row that are missed until a run is believed to use all that comes: of one that began, and of one that left out pages.
const BEGINNING: u8 = 2;
const DOUBTED: u8 = 5;
/// Runs in a region that are believed then.
const TRUST: u8 = 16;
/// So often at most what runs beside each other skip is taken for what comes next, once it was.
const RETURNS: u64 = 64;
/// Probes that were not decided, of all runs.
const PROBES: usize = 512;
const PAGES: u64 = SPAN_PAGES as u64;
/// Of so many spans that are here a run goes on behind them.
const LEAP: u64 = 8;
/// Where a run downwards is to go on that is through, from the other end.
const NOWHERE: u64 = 1 << 40;
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
    /// Beside how many it seemed to go on when it did the last time.
    beside: u16,
    /// Units since one was probed.
    unprobed: u8,
    /// The probe that was not decided.
    probe: Option<u64>,
    /// Where it was missed last, and what had come to all then.
    at: u64,
    came: u64,
}

const NO_RUN: Run =
    Run { next: 0, hits: 0, order: 0, doubt: 0, late: false, beside: 0, unprobed: 0, probe: None, at: 0, came: 0 };

impl Run {
    /// It goes on, after so much has come to all since it did the last time; what comes goes after `passing`.
    fn step(&mut self, used: Used, flow: u64, passing: u64, sequential: bool) {
        let gap = used == Used::Some;
        if sequential {
            (self.order, self.doubt) = (ORDER_MAX, 0);
        } else if gap {
            (self.order, self.doubt) = (self.order.saturating_sub(2), DOUBTED);
        } else if flow > passing {
            // Much more may say only that the program was elsewhere.
            self.order = self.order.saturating_sub(u8::from(self.late || flow <= 2 * passing));
        } else if (self.doubt == 0 || used == Used::All) && 2 * flow <= passing {
            self.order = (self.order + 1).min(ORDER_MAX);
        }
        self.late = flow > passing;
        self.doubt = if self.order == 0 { 0 } else { self.doubt.saturating_sub(u8::from(used == Used::All)) };
        self.hits = if gap { 0 } else { self.hits.saturating_add(1) };
    }

    /// Whether a page is to be left out of what comes to it now.
    fn is_to_be_probed(&mut self) -> bool {
        let probes = self.doubt > 0 || self.unprobed >= PROBE_EVERY;
        self.unprobed = if probes { 0 } else { self.unprobed.saturating_add(1) };
        probes && self.probe.is_none()
    }
}

/// Of what came to a run last, as far as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Used {
    All,
    Some,
    Unknown,
}

/// What is known of a part of memory.
#[derive(Debug, Clone, Copy)]
struct Region {
    /// Logarithm of the unit with which a run begins, less [`BEGINS`]: a policy is zero at first, and takes nothing of a file.
    raised: u8,
    /// Runs that may begin without doubt, since others used all that came.
    trust: u8,
    /// Faults that belonged to no run since it halved.
    scattered: u8,
    /// It has halved, and nothing else since.
    halved: bool,
    /// The one that was halved in vain, and how often: soon a run went on at once.
    proven: u8,
    patience: u8,
    /// So often what was left out is taken for what comes next: others missed it soon after.
    returns: u8,
}

const NO_REGION: Region =
    Region { raised: 0, trust: 0, scattered: 0, halved: false, proven: 0, patience: 0, returns: 0 };

impl Region {
    fn order(&self) -> u8 {
        self.raised.wrapping_add(BEGINS)
    }

    /// Where a run begins: the logarithm of its unit, and whether it is in doubt.
    fn begin(&mut self) -> (u8, u8) {
        self.scattered += 1;
        let patience = if self.order() == self.proven { self.patience } else { 0 };
        if self.scattered >= SCATTERED << patience {
            self.patience = if self.halved { 0 } else { self.patience };
            // Those that went on beside each other may be through.
            self.returns = self.returns.min(TRUST);
            self.halve();
        }
        let doubt = if self.order() == 0 || self.trust > 0 { 0 } else { BEGINNING };
        self.trust = self.trust.saturating_sub(1);
        (self.order(), doubt)
    }

    /// Whether the program will return to what it left out, before that goes.
    fn will_return(&mut self) -> bool {
        let will = self.returns > 0;
        self.returns = self.returns.saturating_sub(1);
        will
    }

    fn halve(&mut self) {
        (self.scattered, self.halved) = (0, self.order() > 0);
        self.raised = self.order().saturating_sub(1).wrapping_sub(BEGINS);
    }

    /// A run goes on in it, by so many pages since it was missed last, and used what came to it so; `at_once`: it had just begun.
    fn learn(&mut self, run: &Run, used: Used, gone_on: u64, at_once: bool) {
        if used == Used::All {
            self.trust = TRUST;
        }
        if used == Used::Some {
            self.trust = 0;
            self.halve();
        } else if (run.doubt == 0 || used == Used::All) && GONE_ON_EVERY * gone_on >= 1 << self.order() {
            self.double(run, at_once);
        }
    }

    /// A run goes on with such a unit.
    fn double(&mut self, run: &Run, at_once: bool) {
        if self.order() >= run.order {
            return;
        }
        self.raised = self.raised.wrapping_add(1);
        if self.halved && at_once && self.scattered < SCATTERED {
            let before = if self.proven == self.order() { self.patience } else { 0 };
            (self.proven, self.patience) = (self.order(), (before + 1).min(PATIENCE));
        }
        self.halved = false;
    }
}

/// A page that was left out of what came to a run. If it is not missed before the run is past it, the run leaves out pages.
#[derive(Debug, Clone, Copy)]
struct Probe {
    page: u64,
    missed: bool,
    /// What had come to all when it was left out.
    came: u64,
}

/// What to do about a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Fetch this page and those around it, aligned: 2^order pages.
    pub order: u8,
    /// But for this one.
    pub hole: Option<u64>,
    /// It is part of a run that is believed, and not alone.
    pub of_run: bool,
    /// The run goes on from this page: it is worth fetching more.
    pub ahead: Option<Ahead>,
    /// These in place of all others.
    pub steps: Option<Steps>,
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

impl Ahead {
    /// The numbers of the spans from there on, in order: those that are to come are among them, behind what is here.
    pub fn numbers(&self) -> impl Iterator<Item = u64> {
        let (first, down) = (self.page / PAGES, self.down);
        (0..self.spans + LEAP).map_while(move |far| along(first, far, down))
    }
}

/// See the module.
#[derive(Debug)]
pub struct Policy {
    /// In the set of the span where each goes on; and where that is, apart from all else: of most sets nothing more is looked at.
    runs: [[Run; WAYS]; SETS],
    nexts: [[u64; WAYS]; SETS],
    strides: Strides,
    /// Bytes from one to the next of runs beside each other; 0: none. What was so last is at the end.
    aparts: [i64; APARTS],
    probes: [Probe; PROBES],
    regions: [Region; REGIONS],
    /// First pages and those after the last; empty: none. The places of all that there have been are before `hinted`; and where the next is put when there are too many.
    hints: [(u64, u64, Hint); HINTS],
    hinted: usize,
    oldest: usize,
    /// The last page that was missed between two that were here.
    between: u64,
    /// The pages that a run skipped last, but for those that came with its next; and what had come then.
    skipped: (Range<u64>, u64),
    came: u64,
    /// Pages of whole spans that come to a run by themselves, before one that is missed again; and spans that are fetched ahead.
    reach: u64,
    depth: u64,
    /// Pages that come until one goes that is not kept: usually, and while runs are crowded.
    passing: [u64; 2],
    crowded: bool,
    /// What had come when that was decided, and what has come since to runs that are.
    decided: u64,
    held: u64,
    /// What came to all while runs went on lately, each counted, and by how many pages they did.
    flows: (u64, u64),
}

impl Policy {
    pub const NEW: Policy = Policy {
        runs: [[NO_RUN; WAYS]; SETS],
        nexts: [[NO_RUN.next; WAYS]; SETS],
        strides: Strides::NEW,
        aparts: [0; APARTS],
        probes: [Probe { page: 0, missed: false, came: 0 }; PROBES],
        regions: [NO_REGION; REGIONS],
        hints: [(0, 0, Hint::Nothing); HINTS],
        hinted: 0,
        oldest: 0,
        between: 0,
        skipped: (0..0, 0),
        came: 0,
        reach: 0,
        depth: 0,
        passing: [0; 2],
        crowded: false,
        decided: 0,
        held: 0,
        flows: (0, 0),
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
            self.hinted = self.hinted.max(place + 1);
            self.hints[place] = (first, end, hint);
        }
    }

    /// What is at this address, in bytes, is missed. `away`: it is elsewhere, and not new. `here`: whether a page is not missed.
    pub fn handle_fault(&mut self, at: u64, away: bool, here: impl FnMut(u64) -> bool) -> Choice {
        self.handle(at, away, None, here)
    }

    /// A page is missed that was foreseen; with it come all of these, or as many of them as were missing.
    pub fn handle_foreseen(&mut self, page: u64, comes: Range<u64>, here: impl FnMut(u64) -> bool) -> Choice {
        self.handle(page * PAGE as u64, true, Some(comes), here)
    }

    /// This page was left out of what is fetched ahead of a run, as it was wanted.
    pub fn left_out(&mut self, page: u64) {
        self.probes[probe(page)] = Probe { page, missed: false, came: self.came };
    }

    /// Of so many spans of a run one is missed, so many are fetched ahead, and what comes goes after so many pages: usually, and while runs are crowded.
    pub fn fit(&mut self, group: usize, depth: usize, passing: [usize; 2]) {
        (self.reach, self.depth) = ((group as u64 - 1) * PAGES, depth as u64);
        self.passing = passing.map(|pages| pages as u64);
    }

    /// So many runs go on beside each other that their units are small, but would not be if less were kept.
    pub fn is_crowded(&self) -> bool {
        self.crowded
    }

    /// How many runs go on beside each other, about. What each misses says little: of ten pages that it uses at a time eight come when the others had theirs, and at once the rest.
    fn beside(&self) -> u64 {
        self.flows.0.checked_div(self.flows.1).unwrap_or(0)
    }

    fn passing(&self) -> u64 {
        self.passing[usize::from(self.crowded)]
    }

    /// The largest unit of which there is room for all runs that go on beside each other, if half of what they come to is here, but no more than is room while they are crowded. A larger one
    /// that ends where the next of them begins would seem to be gone on with. To one that is faster than others, which may have larger units for that, `seem` to be fewer: half as many, at least.
    fn share(&self, seem: u64) -> u8 {
        let beside = self.beside();
        let pages = (2 * self.passing()).min(self.passing[1]).checked_div(seem.clamp(beside / 2, beside));
        pages.map_or(ORDER_MAX, |pages| pages.max(1).ilog2() as u8)
    }

    /// Decides now and then whether runs are crowded.
    fn judge(&mut self) {
        let came = self.came - self.decided;
        if came > self.passing[0] {
            self.crowded = CROWDED_EVERY[usize::from(self.crowded)] * self.held >= came;
            (self.decided, self.held) = (self.came, 0);
        }
    }

    fn handle(&mut self, at: u64, away: bool, comes: Option<Range<u64>>, mut here: impl FnMut(u64) -> bool) -> Choice {
        let page = at / PAGE as u64;
        let hint = self.hints[..self.hinted].iter().find(|(from, to, _)| (*from..*to).contains(&page));
        let hint = hint.map_or(Hint::Nothing, |(_, _, hint)| *hint);
        if self.was_left_out(page) || hint == Hint::Random {
            return Choice { order: 0, hole: None, of_run: false, ahead: None, steps: None };
        }
        // Every other page came, and is still here when the others are missed.
        let mut are_here = |apart: u64| here(page.saturating_sub(apart)) && here(page + apart);
        if away && are_here(1) && !are_here(2) {
            if page.abs_diff(self.between) < NEAR {
                self.region(page).returns = TRUST;
            }
            self.between = page;
        }
        let sequential = hint == Hint::Sequential;
        let guesses = away && !sequential && comes.is_none();
        let upwards = self.follow(page, false, &mut here).map(|found| (found, false));
        let found = upwards.or_else(|| self.follow(page, true, &mut here).map(|found| (found, true)));
        let Some(((mut run, used, gap), down)) = found else {
            let choice = self.begin(page, comes, sequential);
            let steps = if guesses { self.step(at, choice.order, true, here) } else { None };
            self.judge();
            return Choice { steps, ..choice };
        };
        // What comes to it has to be here until it is used.
        let flow = self.came - run.came;
        // As many go on beside each other as come to all while one comes to it.
        let place = if down { mirror(page) } else { page };
        let gone_on = place - run.at;
        let runs = flow / gone_on.max(1);
        if run.hits >= CONFIDENT {
            // One that pages among others were taken for does not decide.
            let (came, by) = (self.flows.0 + flow.min((2 * self.beside() + 2) * gone_on), self.flows.1 + gone_on);
            self.flows = if by > FLOWS { (came / 2, by / 2) } else { (came, by) };
        }
        let beside = self.beside();
        let all = if beside < BESIDE { runs } else { runs.max(beside) };
        let spans = (self.passing() / (all * PAGES).max(1)).min(self.depth);
        run.step(used, flow, self.passing(), sequential);
        if !sequential {
            // What it misses at once, as it was not all that it was to use, does not make it faster.
            run.order = run.order.min(self.share(runs.max(run.beside.into())));
        }
        run.beside = runs.min(u16::MAX.into()) as u16;
        self.region(page).learn(&run, used, gone_on, run.hits == 1 && flow == 0);
        // What goes by until it is missed again is more than is left beside what is kept, but could be left: its unit is small since too much is kept. What goes too early comes again meanwhile.
        let room = self.passing[0] / 2..2 * self.passing[1];
        let held = run.hits >= CONFIDENT && run.order < WIDE && room.contains(&flow);
        let (foreseen, before) = (comes.is_some(), self.came);
        // What it skips and will return to comes with a small unit, as in rows from the last to the first, each gone through upwards.
        let returns = gap.clone().filter(|_| used == Used::All && !foreseen && run.order <= WIDE);
        let is_beside = guesses && !down && runs >= BESIDE && used != Used::Some && (1..=WIDE).contains(&run.order);
        // Less may have come with its own last unit, together: that is no turn yet.
        let is_turn = flow > self.passing[0] / 3;
        let apart = if is_beside && is_turn && returns.is_none() { self.apart(at, run.order, &mut here) } else { None };
        let comes = comes.unwrap_or(match apart {
            // No further than its span: what is left out for a probe is of that.
            Some(_) => page..(page + (1 << run.order.min(TOGETHER))).min((page / PAGES + 1) * PAGES),
            None => unit(page, run.order),
        });
        let all = returns.map_or(comes.clone(), |gap| gap.start.min(comes.start)..gap.end.max(comes.end));
        let Range { start, end } = all;
        let more = Some(all).filter(|all| *all != comes);
        if let Some(gap) = gap {
            let rest = if down { gap.start.max(end)..gap.end } else { gap.start..gap.end.min(start) };
            self.skipped = (rest, self.came);
        }
        self.came += end - start + if foreseen { self.reach } else { 0 };
        (run.at, run.came) = (place, self.came);
        let from = if down { start.checked_sub(1) } else { Some(end) };
        let from =
            from.map(|page| if run.order == ORDER_MAX || foreseen { beyond(page, down, &mut here) } else { page });
        run.next = from.map_or(NOWHERE, |page| if down { mirror(page) } else { page });
        let from = from.filter(|_| run.hits >= CONFIDENT && spans > 0);
        let (mut hole, mut left) = (None, None);
        if run.is_to_be_probed() && !sequential {
            let rest = if down { start..page } else { page + 1..end };
            hole = Some(self.within(&rest)).filter(|hole| !foreseen && rest.contains(hole) && !here(*hole));
            hole.into_iter().for_each(|hole| self.left_out(hole));
            let span = from.filter(|_| foreseen).map(|page| page / PAGES);
            let far = spans.max(1) - 1;
            let span = span.and_then(|span| along(span, far, down));
            left = span.map(|span| self.within(&(span * PAGES..(span + 1) * PAGES)));
            run.probe = hole.or(left);
        }
        let together = apart.map(|apart| self.go_on_together(at, apart, end, &run, flow, &mut here));
        self.put(run);
        let ahead = from.map(|page| Ahead { page, down, spans, probe: left });
        // What comes to a run that leaves out nothing stays until it is used: no need for more.
        let begins = used == Used::Some || flow > self.passing();
        let steps = match guesses {
            true if more.is_some() => more.map(Steps::of_run),
            true if is_beside => together,
            // Of runs that are crowded, pages that come one by one would be taken for columns.
            true if !self.crowded => self.step(at, run.order, begins, here),
            _ => None,
        };
        self.held += if held { self.came - before } else { 0 };
        self.judge();
        Choice { order: run.order, hole, of_run: run.hits >= CONFIDENT && run.order > 0, ahead, steps }
    }

    /// What is to come to a run that is missed, up to `end`, and to others that go on beside it, as through the planes of an array: to each up to the same place in its own. So they are
    /// missed at nearly the same time again, wherever their pages begin, and all that is to come to them comes together. But not to those to which less than half of a turn, of `flow`, has come
    /// since they were missed: where rows are gone through one after the other, they are done with theirs, and it would go before it is used.
    fn go_on_together(
        &mut self,
        at: u64,
        apart: i64,
        end: u64,
        run: &Run,
        flow: u64,
        mut here: impl FnMut(u64) -> bool,
    ) -> Steps {
        let before = (1..=BEFORE).take_while(|nth| self.find(page_at(at, -nth * apart)).is_some()).last();
        Steps::of_runs(at, apart, before.unwrap_or(0), end, |mut pages| {
            let Range { start, end } = pages;
            let Some(page) = pages.find(|page| !here(*page)) else { return false };
            let found = self.find(start).filter(|(set, way)| self.nexts[*set][*way] <= page);
            let Some((set, way)) = found else { return false };
            let other = self.runs[set][way];
            if run.came.saturating_sub(other.came) < flow.div_ceil(2) {
                return false;
            }
            self.nexts[set][way] = NO_RUN.next;
            self.came += end - page;
            let (order, doubt, hits) = (run.order, run.doubt, other.hits.max(run.hits));
            self.put(Run { next: end, hits, order, doubt, at: page, came: self.came, ..other });
            true
        })
    }

    /// How far apart runs are that go on beside one that is missed here, with such a unit: as far as others were lately, if some are there; or as its faults and theirs say.
    fn apart(&mut self, at: u64, order: u8, here: impl FnMut(u64) -> bool) -> Option<i64> {
        let goes_on = |far: i64| self.find(page_at(at, far)).is_some();
        let found = |apart: i64| (-NEIGHBOURS..=NEIGHBOURS).filter(|nth| *nth != 0 && goes_on(nth * apart)).count();
        // As far as [`Steps::apart`] wants them.
        let is_far = |apart: &&i64| apart.unsigned_abs() >= (PAGE as u64) << (order + 2);
        let known = self.aparts.iter().filter(is_far).map(|apart| (found(*apart), *apart));
        let apart = match known.max_by_key(|(found, _)| *found) {
            Some((2.., apart)) => apart,
            _ => self.strides.handle_fault(at, true, here)?.apart(order)?,
        };
        let place = self.aparts.iter().position(|other| *other == apart).unwrap_or(0);
        self.aparts[place] = apart;
        self.aparts[place..].rotate_left(1);
        Some(apart)
    }

    /// Where the run is to which this page came last, or comes next: not long ago, and with a unit that runs beside each other may have.
    fn find(&self, page: u64) -> Option<(usize, usize)> {
        const MOST: u64 = 1 << WIDE;
        (page / PAGES..=(page + MOST) / PAGES).find_map(|span| {
            let set = set(span);
            let is_at = |run: &Run| run.at <= page && self.came - run.came < 2 * self.passing[1];
            let is_there = |way: &usize| (page..=page + MOST).contains(&self.nexts[set][*way]);
            Some((set, (0..WAYS).find(|way| is_there(way) && is_at(&self.runs[set][*way]))?))
        })
    }

    /// What is to come in place of such a unit.
    fn step(&mut self, at: u64, order: u8, begins: bool, here: impl FnMut(u64) -> bool) -> Option<Steps> {
        let steps = if order > SHORT { None } else { self.strides.handle_fault(at, begins, here) };
        let steps = steps.filter(|steps| !steps.are_dense() || !self.region(at / PAGE as u64).will_return());
        self.came += steps.map_or(0, |steps| steps.count());
        steps
    }

    /// Whether this page was left out of what came to a run, which uses it, as is known now.
    fn was_left_out(&mut self, page: u64) -> bool {
        let probed = &mut self.probes[probe(page)];
        let was = probed.page == page && !probed.missed;
        if was {
            probed.missed = true;
            // Whoever is at it now may have used nothing of it else; but not if nothing came since.
            if probed.came == self.came {
                self.region(page).trust = TRUST;
            }
        }
        was
    }

    /// Any page of a range.
    fn within(&self, range: &Range<u64>) -> u64 {
        range.start + hash(self.came) as u64 % (range.end - range.start).max(1)
    }

    fn region(&mut self, page: u64) -> &mut Region {
        &mut self.regions[region(page)]
    }

    /// A page that belongs to no run: one may begin there, either way.
    fn begin(&mut self, page: u64, comes: Option<Range<u64>>, sequential: bool) -> Choice {
        let (order, doubt) = self.region(page).begin();
        let (order, hits) = if sequential { (ORDER_MAX, CONFIDENT) } else { (order.min(self.share(u64::MAX)), 0) };
        let Range { start, end } = comes.unwrap_or(unit(page, order));
        self.came += end - start;
        let run = Run { next: end, hits, order, doubt, at: page, came: self.came, ..NO_RUN };
        self.put(run);
        self.put(Run { next: mirror(start) + 1, at: mirror(page), ..run });
        let ahead = sequential.then_some(Ahead { page: end, down: false, spans: self.depth, probe: None });
        Choice { order, hole: None, of_run: false, ahead, steps: None }
    }

    /// The run that goes on with this page, taken out; what it used of what it was given; and what it skips now, if any of that is not here.
    fn follow(
        &mut self,
        page: u64,
        down: bool,
        here: &mut impl FnMut(u64) -> bool,
    ) -> Option<(Run, Used, Option<Range<u64>>)> {
        let turned = |page| if down { mirror(page) } else { page };
        let mut here = |page| here(turned(page));
        let (page, most, back) = (turned(page), self.reach + NEAR, LEAP.max(1 + self.reach / PAGES));
        let near = if self.regions[region(turned(page))].returns > 0 { 2 * NEAR } else { NEAR };
        let mut goes_on = |run: &Run| {
            let above = page.wrapping_sub(run.next);
            let is_confident = run.hits >= CONFIDENT;
            let leaps = is_confident && above < most && page % PAGES < NEAR;
            // What was fetched ahead lies behind what is kept, and before it.
            let far = if is_confident && run.order == ORDER_MAX { LEAP * PAGES } else { PAGES };
            above < near || leaps || above < far && here(run.next) && (run.next..page).rev().all(&mut here)
        };
        let span = page / PAGES;
        let found = (span.saturating_sub(back)..=span).rev().find_map(|span| {
            let set = set(span);
            let mut goes_on = |way: usize| self.nexts[set][way] / PAGES == span && goes_on(&self.runs[set][way]);
            Some((set, (0..WAYS).find(|way| self.nexts[set][*way] != NO_RUN.next && goes_on(*way))?))
        });
        let (set, way) = found?;
        self.nexts[set][way] = NO_RUN.next;
        let mut run = core::mem::replace(&mut self.runs[set][way], NO_RUN);
        let from = if page - run.next < near { run.next } else { page - page % PAGES };
        let gap = (from.max(run.next)..page).any(|page| !here(page));
        let in_time = self.came - run.came <= self.passing();
        let (Range { start, end }, then) = self.skipped.clone();
        // All that was skipped last has been missed since: the program returns to it as soon as it is past it.
        let place = region(turned(page));
        let soon = start < end && region(start) == place && self.came - then <= SOON;
        if gap && in_time && soon && (start..end).all(|page| here(turned(page))) {
            // And so it does to what each of those skips that go on beside it.
            self.regions[place].returns = self.beside().clamp(TRUST.into(), RETURNS) as u8;
        }
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
        if used == Used::Some && self.regions[place].will_return() {
            used = Used::All;
        }
        let [one, other] = [from.max(run.next), page].map(turned);
        let skips = if down { other + 1..one + 1 } else { one..other };
        Some((run, used, Some(skips).filter(|_| gap && (in_time || used == Used::All))))
    }

    fn put(&mut self, run: Run) {
        let set = set(run.next / PAGES);
        let places = self.runs[set].iter_mut().zip(&mut self.nexts[set]);
        let oldest = places.min_by_key(|(other, next)| (**next != NO_RUN.next && **next != run.next, other.came));
        if let Some((place, next)) = oldest {
            (*place, *next) = (run, run.next);
        }
    }
}

fn region(page: u64) -> usize {
    (page / REGION) as usize % REGIONS
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

/// The first page from this one on that is not here, unless all of the next spans are.
fn beyond(page: u64, down: bool, mut here: impl FnMut(u64) -> bool) -> u64 {
    let mut next = (0..LEAP * PAGES).map_while(|far| along(page, far, down));
    next.find(|page| !here(*page)).unwrap_or(page)
}

/// What is so far from this one in a run's direction.
fn along(from: u64, far: u64, down: bool) -> Option<u64> {
    if down { from.checked_sub(far) } else { Some(from + far) }
}

/// The page of an address that is so many bytes from this one.
fn page_at(at: u64, far: i64) -> u64 {
    at.wrapping_add_signed(far) / PAGE as u64
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
