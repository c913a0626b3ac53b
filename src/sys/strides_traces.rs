//! The pager's decisions on traces of steps that are no runs: what is waited for, and what comes.

use super::page::{PAGE, SPAN_PAGES, count};
use super::policy::Policy;
use super::policy_traces::Machine;
use super::strides::{Steps, Strides};

const BYTES: u64 = PAGE as u64;

/// Pages of what is to come.
fn pages(steps: Steps) -> usize {
    steps.spans().map(|(_, pages)| count(&pages)).sum()
}

/// Through the rows of a matrix whose length is no whole number of pages, forwards or backwards, of each a cell that may lie in two pages.
fn walk(machine: &mut Machine, from: u64, rows: u64, row: u64, cell: u64, down: bool) {
    for nth in 0..rows {
        let at = from + if down { rows - 1 - nth } else { nth } * row;
        machine.access_byte(at);
        machine.access_byte(at + cell - 1);
    }
}

/// Each plane of a large array, and beside it a small one, as NAS BT does: more than fits, and all that is used of each page is in few planes.
#[test]
fn columns_come_by_many_pages() {
    for (row, cell, down) in [(39_000, 600, false), (39_000, 600, true), (13_000, 200, false), (300_008, 1_000, false)]
    {
        let (rows, from, mut machine) = (4_000, 1 << 32, Machine::new(4_000));
        let planes = |machine: &mut Machine, planes: core::ops::Range<u64>| {
            let (waits, fetched) = (machine.waits, machine.fetched);
            planes.for_each(|plane| walk(machine, from + plane * cell, rows, row, cell, down));
            (machine.waits - waits, machine.fetched - fetched)
        };
        planes(&mut machine, 0..2);
        let (waits, fetched) = planes(&mut machine, 2..12);
        println!("{row} {down}: {waits} waits, {fetched} pages");
        let most = rows * 10 + rows * 10 * cell / BYTES;
        assert!(
            waits < most / 12 && fetched < most * 21 / 20,
            "{row} {down}: {waits} waits, {fetched} pages of {most}"
        );
    }
}

/// As above, but all that is used of a plane fits: of the next, one of seven pages is missed, and many of those come at once.
#[test]
fn what_is_missed_between_what_is_here_comes_by_many_pages() {
    let (rows, row, cell, mut machine) = (4_000, 39_000, 600, Machine::new(9_000));
    for plane in 0..14 {
        if plane == 2 {
            (machine.waits, machine.fetched) = (0, 0);
        }
        walk(&mut machine, (1 << 32) + plane * cell, rows, row, cell, false);
    }
    let most = 12 * rows * cell / BYTES;
    println!("{} waits, {} pages of {most}", machine.waits, machine.fetched);
    assert!(
        machine.waits < most / 11 && machine.fetched < most * 11 / 10,
        "{} waits, {} pages of {most}",
        machine.waits,
        machine.fetched
    );
}

/// Several at once, of which no two go on one after the other.
#[test]
fn steps_beside_each_other_are_told_apart() {
    let (rows, mut machine) = (4_000, Machine::new(4_000));
    machine.policy = small_units();
    for nth in 0..rows {
        for (way, row) in [39_000, 50_000, 24_576].into_iter().enumerate() {
            machine.access_byte(((way as u64 + 1) << 33) + nth * row);
        }
        machine.access_byte((5 << 33) - nth * 39_000);
    }
    assert!(machine.waits < 4 * rows / 8, "{} waits", machine.waits);
    assert!(machine.fetched < 4 * rows * 21 / 20, "{} pages", machine.fetched);
}

/// Where the kernel tells pages only, steps alternate between two lengths; and a program may begin with another byte of each row.
#[test]
fn steps_need_not_be_of_one_length() {
    let mut rng = fastrand::Rng::with_seed(10);
    for jitter in [1, 64, 512] {
        for whole in [false, true] {
            let (rows, mut strides, mut here) = (4_000, Strides::NEW, std::collections::HashSet::new());
            let (mut waits, mut fetched) = (0, 0);
            for nth in 0..rows {
                let at = (1 << 32) + nth * 39_000 + rng.u64(..jitter);
                let told = if whole { at / BYTES * BYTES } else { at };
                if here.insert(at / BYTES) {
                    waits += 1;
                    let steps = strides.handle_fault(told, true, |page| here.contains(&page));
                    let spans = steps.into_iter().flat_map(Steps::spans);
                    for (span, bits) in spans {
                        let first = (span * SPAN_PAGES) as u64;
                        here.extend(
                            (0..SPAN_PAGES)
                                .filter(|page| bits[page / 64] >> (page % 64) & 1 == 1)
                                .map(|page| first + page as u64),
                        );
                    }
                    fetched += steps.map_or(1, pages);
                }
            }
            println!("{jitter} {whole}: {waits} waits, {fetched} pages");
            assert!(
                waits < rows / 4 && fetched < rows as usize * 11 / 4,
                "{jitter} {whole}: {waits} waits, {fetched} pages"
            );
        }
    }
}

/// What is used at random, of little memory, too, and of places that are far fewer than bytes, looks like steps now and then; hardly anything comes for that.
#[test]
fn nothing_comes_of_random_accesses() {
    let mut rng = fastrand::Rng::with_seed(11);
    for (words, word) in [(1 << 27, 8), (1 << 23, 8), (1 << 14, 4096), (1 << 12, 32_768)] {
        let (faults, mut strides, mut came) = (100_000, Strides::NEW, 0);
        for _ in 0..faults {
            let steps = strides.handle_fault((1 << 32) + rng.u64(..words) * word, true, |_| false);
            came += steps.map_or(0, |steps| pages(steps) - 1);
        }
        println!("{words} of {word} bytes: {came} pages");
        assert!(came < faults / 200, "{words} of {word} bytes: {came} pages");
    }
}

/// A run is no steps, though it begins a page at a time.
#[test]
fn runs_have_no_steps() {
    let mut machine = Machine::new(4_000);
    machine.policy = small_units();
    (0..20_000).for_each(|page| machine.access_byte(page * BYTES));
    assert!(machine.waits < 30 && machine.fetched < 21_000, "{} waits, {} pages", machine.waits, machine.fetched);
}

/// Of which faults were scattered before.
fn small_units() -> Policy {
    let (mut policy, mut rng) = (Policy::NEW, fastrand::Rng::with_seed(12));
    policy.fit(1, 3, [4_000; 2]);
    for _ in 0..200_000 {
        policy.handle_fault(rng.u64(..8 << 33), true, |_| false);
    }
    policy
}
