//! What a line names, in which order, and what no more.

use super::line::{Line, PIECE};
use super::page::{Bits, NONE, range};

const ALL: usize = 1 << 30;

fn line() -> Line {
    Line::new(Box::leak(vec![0; 4 * PIECE].into_boxed_slice()))
}

fn pop(line: &mut Line) -> Option<(usize, Bits)> {
    line.pop(ALL, |_| {})
}

/// In a row or not, as they came; nothing of none.
#[test]
fn what_came_first_goes_first() {
    let mut line = line();
    let scattered = [1 << 7, 0, 1 << 63, 1];
    for (number, pages) in [(3, range(0, 256)), (1 << 20, scattered), (4, NONE), (0, range(255, 256))] {
        assert!(line.push(number, pages));
    }
    assert_eq!(line.pop(255, |_| {}), None, "it takes more");
    assert_eq!(pop(&mut line), Some((3, range(0, 256))));
    assert_eq!(line.pop(192 - 7, |_| {}), None, "with what lies between it takes more");
    assert_eq!(pop(&mut line), Some((1 << 20, scattered)));
    assert_eq!(pop(&mut line), Some((0, range(255, 256))));
    assert_eq!(pop(&mut line), None);
}

/// All around, and not named by what follows.
#[test]
fn samples_are_named_once() {
    let mut line = line();
    let scattered = [1, 0, 0, 1 << 63];
    assert!((0..4).all(|number| line.push(number, if number == 2 { scattered } else { range(0, 256) })));
    // Two spans behind the beginning, and more than one behind that, all around.
    assert_eq!(line.sample(512, ALL), Some((2, scattered)));
    assert_eq!(line.sample(300, ALL), Some((0, range(0, 256))));
    // It came back, and is the last.
    assert!(line.push(2, scattered));
    assert_eq!(line.sample(0, 100), None, "it takes more");
    assert_eq!(line.sample(0, ALL), Some((1, range(0, 256))));
    let left: Vec<_> = std::iter::from_fn(|| pop(&mut line)).filter(|(_, pages)| *pages != NONE).collect();
    assert_eq!(left, [(3, range(0, 256)), (2, scattered)]);
    assert_eq!(line.sample(0, ALL), None);
}

/// A line of samples only has no more, and says so.
#[test]
fn samples_of_nothing_come_to_an_end() {
    let mut line = line();
    (0..10).for_each(|number| assert!(line.push(number, range(0, 16))));
    let taken: Vec<_> = (0..20).filter_map(|_| line.sample(0, ALL)).filter(|(_, pages)| *pages != NONE).collect();
    assert_eq!(taken.len(), 10, "{taken:?}");
    assert_eq!(std::iter::from_fn(|| pop(&mut line)).filter(|(_, pages)| *pages != NONE).count(), 0);
}

/// Memory is given back piece by piece, and used again; more than there is is refused.
#[test]
fn a_line_goes_around() {
    let mut line = line();
    let mut spent = 0;
    for number in 0..10 * PIECE {
        assert!(line.push(number, range(0, 1)) && line.push(number, range(1, 2)));
        for page in 0..2 {
            let clear = |words: &mut [u64]| {
                spent += words.len();
                words.fill(0);
            };
            assert_eq!(line.pop(ALL, clear), Some((number, range(page, page + 1))));
        }
    }
    assert_eq!(spent, 20 * PIECE);
    let held = (0..4 * PIECE).take_while(|number| line.push(*number, range(0, 1))).count();
    assert!((2 * PIECE..3 * PIECE).contains(&held), "{held}");
    line.clear(|words| words.fill(0));
    assert!(line.is_empty() && line.push(7, range(0, 1)));
    assert_eq!(pop(&mut line), Some((7, range(0, 1))));
}
