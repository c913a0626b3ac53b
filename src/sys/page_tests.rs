//! Where pages of a span lie.

use super::page::{ALL, Layout, PAGE, range, with};

/// One after the other, whatever lies between them in their span; and in a whole span each in its own place.
#[test]
fn pages_lie_without_gaps() {
    let pages = with(range(3, 5), with(range(63, 66), range(255, 256)));
    let at = |place: usize| (1 << 30) + place * PAGE;
    let runs = |layout: Layout, pages| layout.runs(pages).collect::<Vec<_>>();
    assert_eq!(runs(Layout::new(at(0), pages), pages), [(3, at(0), 2), (63, at(2), 3), (255, at(5), 1)]);
    assert_eq!(runs(Layout::new(at(0), pages), range(64, 66)), [(64, at(3), 2)]);
    assert_eq!(runs(Layout::whole(at(0)), range(64, 66)), [(64, at(64), 2)]);
    assert_eq!(runs(Layout::whole(at(0)), ALL), [(0, at(0), 256)]);
}
