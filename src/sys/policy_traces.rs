//! The pager's decisions on traces of accesses: what is missed, and what is fetched.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use super::page::{PAGE, SPAN_PAGES, runs};
use super::policy::{Hint, Policy};

/// A program with so many pages here, first in, first out; of what is foreseen one span of each group comes when it is missed, and the others at once.
pub(super) struct Machine {
    pub(super) policy: Policy,
    here: HashSet<u64>,
    order: VecDeque<u64>,
    room: usize,
    group: u64,
    foreseen: HashMap<u64, Option<u64>>,
    /// Faults for which the program waits a round trip, and pages that came.
    pub(super) waits: u64,
    pub(super) fetched: u64,
}

/// Spans fetched ahead of a run.
const DEPTH: usize = 3;

impl Machine {
    pub(super) fn new(room: usize) -> Machine {
        Machine::with_groups(room, 1, DEPTH)
    }

    fn with_groups(room: usize, group: usize, depth: usize) -> Machine {
        let (here, order, foreseen) = Default::default();
        let mut policy = Policy::NEW;
        policy.fit(group, depth, [room; 2]);
        Machine { policy, here, order, room, group: group as u64, foreseen, waits: 0, fetched: 0 }
    }

    fn access(&mut self, page: u64) {
        self.access_byte(page * PAGE as u64);
    }

    pub(super) fn access_byte(&mut self, at: u64) {
        let page = at / PAGE as u64;
        if self.here.contains(&page) {
            return;
        }
        let (span, pages) = (page / SPAN_PAGES as u64, SPAN_PAGES as u64);
        let here = |page| self.here.contains(&page);
        let waiting = self.foreseen.get(&span).copied().filter(|hole| *hole != Some(page));
        let (choice, first, count, hole) = if let Some(hole) = waiting {
            self.foreseen.remove(&span);
            (self.policy.handle_foreseen(page, span * pages..(span + 1) * pages, here), span * pages, pages, hole)
        } else {
            self.waits += 1;
            let choice = self.policy.handle_fault(at, true, here);
            (choice, page >> choice.order << choice.order, 1 << choice.order, choice.hole)
        };
        if let Some(steps) = choice.steps {
            let pages = steps.spans().flat_map(|(span, bits)| runs(bits).map(move |run| (span, run)));
            let pages =
                pages.flat_map(|(span, (first, count))| (0..count).map(move |nth| span * SPAN_PAGES + first + nth));
            pages.map(|page| page as u64).filter(|page| Some(*page) != hole).for_each(|page| self.bring(page));
            assert!(self.here.contains(&page), "{page} {hole:?} {steps:?}");
            return;
        }
        self.bring_all(first..first + count, hole);
        if let Some(next) = choice.ahead.filter(|_| choice.order >= 6) {
            let mut left = next.spans;
            for span in next.numbers() {
                if left == 0 {
                    break;
                }
                let absent = (span * pages..(span + 1) * pages).filter(|page| !self.here.contains(page)).count();
                left -= u64::from(absent > SPAN_PAGES / 2);
                if !self.foreseen.contains_key(&span) && absent >= SPAN_PAGES / 2 {
                    let hole = next.probe.filter(|page| page / pages == span && !self.here.contains(page));
                    hole.into_iter().for_each(|page| self.policy.left_out(page));
                    if span.is_multiple_of(self.group) {
                        self.foreseen.insert(span, hole);
                    } else {
                        self.bring_all(span * pages..(span + 1) * pages, hole);
                    }
                }
            }
        }
    }

    fn bring_all(&mut self, pages: Range<u64>, hole: Option<u64>) {
        pages.filter(|page| Some(*page) != hole).for_each(|page| self.bring(page));
    }

    /// A page comes, and what came first goes.
    fn bring(&mut self, page: u64) {
        if self.here.insert(page) {
            self.order.push_back(page);
            self.fetched += 1;
        }
        while self.order.len() > self.room {
            let gone = self.order.pop_front().unwrap();
            self.here.remove(&gone);
        }
    }
}

/// Three arrays, read and written in step, larger than what may be here.
#[test]
fn interleaved_runs_are_foreseen() {
    let (pages, mut machine) = (100_000, Machine::new(8_000));
    for page in 0..pages {
        (0..3).for_each(|array| machine.access(array * 1_000_000 + page));
    }
    assert!(machine.waits < 120, "{} waits", machine.waits);
    assert!(machine.fetched < 3 * pages * 11 / 10, "{} pages", machine.fetched);
}

/// Spans that stay lie in the way of a run, upwards and downwards: it goes on behind them.
#[test]
fn runs_go_on_behind_what_stays() {
    let (pages, span, mut machine) = (100_000, SPAN_PAGES as u64, Machine::new(8_000));
    machine.here.extend((0..pages).filter(|page| page / span % 5 < 2));
    (0..pages).for_each(|page| machine.access(page));
    assert!(machine.waits < 15, "{} waits", machine.waits);
    (0..pages).rev().for_each(|page| machine.access(page));
    assert!(machine.waits < 30, "{} waits", machine.waits);
    assert!(machine.fetched < 2 * pages * 6 / 10 * 11 / 10, "{} pages", machine.fetched);
}

/// The same where some of what is foreseen comes before it is missed, and lies before and behind what stays.
#[test]
fn runs_go_on_behind_what_came_ahead_and_what_stays() {
    for stays in 2..12 {
        let (pages, span, mut machine) = (100_000, SPAN_PAGES as u64, Machine::with_groups(8_000, 2, 2));
        machine.here.extend((0..pages).filter(|page| page / span % stays == 1));
        (0..pages).for_each(|page| machine.access(page));
        let upwards = machine.waits;
        (0..pages).rev().for_each(|page| machine.access(page));
        let waits = [upwards, machine.waits - upwards];
        assert!(waits.iter().all(|waits| *waits < 15), "one of {stays} stays: {waits:?} waits");
        let absent = pages - pages / stays;
        assert!(machine.fetched < 2 * absent * 11 / 10, "one of {stays} stays: {} of {absent} twice", machine.fetched);
    }
}

/// The same from the end to the beginning, and beside each other.
#[test]
fn runs_downwards_are_foreseen() {
    let (pages, mut machine) = (100_000, Machine::new(8_000));
    for page in 0..pages {
        (0..3).for_each(|array| machine.access(array * 1_000_000 + pages - 1 - page));
        machine.access(4_000_000 + page);
    }
    assert!(machine.waits < 160, "{} waits", machine.waits);
    assert!(machine.fetched < 4 * pages * 11 / 10, "{} pages", machine.fetched);
}

/// Scattered accesses beside a run, in the same part of memory: neither gets the other's unit.
#[test]
fn a_run_is_foreseen_among_scattered_accesses() {
    let (mut machine, mut rng) = (Machine::new(2_000), fastrand::Rng::with_seed(9));
    let mut scattered = 0;
    for page in 0..6_000 {
        machine.access(page);
        let before = machine.fetched;
        machine.access(8_000 + rng.u64(..8_000));
        scattered += machine.fetched - before;
    }
    assert!(scattered < 12_000, "{scattered}");
    assert!(machine.waits < 6_000, "{}", machine.waits);
}

#[test]
fn scattered_accesses_fetch_little() {
    let (pages, accesses, mut machine) = (100_000, 50_000, Machine::new(10_000));
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..accesses {
        machine.access(rng.u64(..pages));
    }
    assert!(machine.fetched < accesses * 13 / 10, "{} pages for {accesses} accesses", machine.fetched);
}

/// Blocks that are read whole, each at a random place: mostly one wait for each, and nothing else comes; then pages of which each says nothing of others.
#[test]
fn scattered_blocks_are_units() {
    for size in [2, 8, 16, 64, 256] {
        let (pages, blocks, mut machine) = (256_000, 256_000 / size, Machine::new(20_000));
        let mut rng = fastrand::Rng::with_seed(6);
        let mut read = |machine: &mut Machine| {
            let first = rng.u64(..pages / size) * size;
            (first..first + size).for_each(|page| machine.access(page));
        };
        (0..blocks).for_each(|_| read(&mut machine));
        let (fetched, waits) = (machine.fetched, machine.waits);
        (0..blocks).for_each(|_| read(&mut machine));
        let (fetched, waits) = (machine.fetched - fetched, machine.waits - waits);
        println!("{size}: {fetched} pages, {waits} waits for {blocks} blocks");
        assert!(waits < blocks * 5 / 4 && fetched < blocks * size * 7 / 4, "{size}: {fetched} pages, {waits} waits");
        let fetched = machine.fetched;
        (0..pages / 4).for_each(|_| machine.access(rng.u64(..pages)));
        // Of few faults for each part of memory units become smaller slowly.
        let most = if size > 16 { pages } else { pages / 4 * 13 / 10 };
        assert!(machine.fetched - fetched < most, "{size}: {} pages", machine.fetched - fetched);
    }
}

/// A run, then scattered accesses in the same memory, then a run again: neither is held back by the other for long.
#[test]
fn units_follow_the_program() {
    let mut machine = Machine::new(4_000);
    (0..20_000).for_each(|page| machine.access(page));
    let (waits, fetched) = (machine.waits, machine.fetched);
    assert!(waits < 30, "{waits}");
    let mut rng = fastrand::Rng::with_seed(8);
    (0..20_000).for_each(|_| machine.access(rng.u64(..20_000)));
    assert!(machine.fetched - fetched < 30_000, "{}", machine.fetched - fetched);
    let waits = machine.waits;
    (30_000..50_000).for_each(|page| machine.access(page));
    assert!(machine.waits - waits < 30, "{}", machine.waits - waits);
}

/// What the program says counts from the first fault on, where it says so and until it takes it back.
#[test]
fn hints_are_heeded() {
    let (first, end) = (1000 * SPAN_PAGES as u64, 1100 * SPAN_PAGES as u64);
    let mut machine = Machine::new(100_000);
    machine.policy.hint(first, end, Hint::Sequential);
    (first..end).for_each(|page| machine.access(page));
    assert_eq!(machine.waits, 1);
    let mut machine = Machine::new(100_000);
    machine.policy.hint(first, end, Hint::Random);
    // Neighbours make no run.
    (first..first + 1000).for_each(|page| machine.access(page));
    assert_eq!((machine.waits, machine.fetched), (1000, 1000));
    machine.policy.hint(first + 2000, first + 3000, Hint::Nothing);
    let (waits, fetched) = (machine.waits, machine.fetched);
    (first + 2000..first + 3000).for_each(|page| machine.access(page));
    assert!(machine.waits - waits < 100, "{}", machine.waits - waits);
    assert!(machine.fetched - fetched <= 1300, "{}", machine.fetched - fetched);
    // They tell nothing of what was left out elsewhere.
    let mut policy = Policy::NEW;
    policy.left_out(end);
    policy.hint(0, end, Hint::Random);
    for page in 0..end {
        policy.handle_fault(page * PAGE as u64, true, |_| false);
    }
    assert_eq!(policy.handle_fault(end * PAGE as u64, true, |_| false).order, 0);
    // More than are remembered, and each on both sides of another.
    let mut policy = Policy::NEW;
    (0..100).for_each(|nth| policy.hint(nth * 10, nth * 10 + 15, Hint::Random));
    assert_eq!(policy.handle_fault(991 * PAGE as u64, true, |_| false).order, 0);
    assert_eq!(policy.handle_fault(55 * PAGE as u64, true, |_| false).order, 4);
}

/// A matrix turned: each line of it is read from all rows, a page of each. What comes is what is used, but for what it took to find out: less than all once.
#[test]
fn steps_of_some_pages_fetch_what_they_use() {
    for step in [2, 3, 4, 5, 8, 11, 16, 32, 48, 64, 200, 256] {
        let (rows, lines) = (4_000, 40);
        let mut machine = Machine::new(rows as usize * 3 / 2);
        // As it was made.
        (0..rows * step).for_each(|page| machine.access(page));
        let (fetched, waits) = (machine.fetched, machine.waits);
        for line in 0..lines {
            for row in 0..rows {
                machine.access(row * step);
                machine.access(10_000_000 + (line * rows + row) / 512);
            }
        }
        let (fetched, waits) = (machine.fetched - fetched, machine.waits - waits);
        println!("{step}: {fetched} pages, {waits} waits");
        let most = (rows * step).min(rows * lines);
        // Of every other page probes say the same as of all, half of the time.
        let most = if step == 2 { 10 * most } else { 3 * most + rows * step / 2 };
        assert!(fetched < most, "{step}: {fetched} pages, {waits} waits");
    }
}

/// Many runs at once: each goes on a page at a time.
#[test]
fn many_runs_have_units_that_stay_until_they_are_used() {
    for (runs, room) in [(128, 2_000), (128, 20_000), (256, 4_000), (14, 2_000), (60, 3_000)] {
        let (mut machine, pages) = (Machine::new(room), 4_096);
        for page in 0..pages {
            (0..runs).for_each(|run| machine.access(run * 2 * pages + page));
        }
        let (all, most) = (runs * pages, (room as u64 / runs / 4).clamp(2, 128));
        println!("{runs} runs, {room}: {} pages of {all}, {} waits", machine.fetched, machine.waits);
        assert!(machine.fetched < all * 5 / 4, "{runs} runs, {room}: {} pages of {all}", machine.fetched);
        assert!(machine.waits < all / most * 3 / 2, "{runs} runs, {room}: {} waits", machine.waits);
    }
}

/// Pieces that stayed here from before: runs go on behind them.
#[test]
fn runs_pass_over_what_is_here() {
    let mut machine = Machine::new(40_000);
    for piece in 0..100 {
        machine.here.extend(piece * 500 + 100..piece * 500 + 150);
    }
    (0..50_000).for_each(|page| machine.access(page));
    assert!(machine.waits < 30, "{} waits", machine.waits);
}
