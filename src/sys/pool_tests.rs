//! Which slots are taken, and how many pages they keep.

use super::page::SPAN_PAGES;
use super::pool::{Pool, Slot};

#[test]
fn who_receives_gets_pages_that_are_there() {
    let mut pool = Pool::new([1, 2, 3, 4, 5, 6, 7, 8].into_iter());
    let taken = [(); 4].map(|()| pool.take_empty().unwrap());
    assert!(taken.iter().all(|slot| slot.there == 0));
    pool.give(Slot { at: taken[0].at, there: 30 });
    pool.give(Slot::full(taken[1].at));
    pool.give(Slot { at: taken[2].at, there: 60 });
    // As many as are wanted if there is such a part; else all; else what there is.
    assert_eq!(pool.take_some(50, false).unwrap().there, 60);
    assert_eq!(pool.take_some(50, false).unwrap().there, SPAN_PAGES);
    assert_eq!(pool.take_some(50, false).unwrap().there, 30);
    assert_eq!(pool.take_some(1, false), None);
    // Whoever needs all of them gets an empty one then.
    assert_eq!(pool.take_any().unwrap().there, 0);
}

#[test]
fn who_can_wait_leaves_some() {
    let mut pool = Pool::new([1, 2, 3, 4].into_iter());
    let taken = [(); 3].map(|()| pool.take_empty().unwrap());
    assert_eq!(pool.take_spare(0), None);
    taken.iter().take(2).for_each(|slot| pool.give(Slot::full(slot.at)));
    assert_eq!(pool.take_spare(0).unwrap().there, SPAN_PAGES);
    assert_eq!(pool.take_spare(0), None);
    assert_eq!(pool.take_any().unwrap().there, SPAN_PAGES);
}

#[test]
fn who_can_wait_takes_one_of_which_little_is_to_be_made() {
    let mut pool = Pool::new([1, 2, 3, 4, 5, 6].into_iter());
    let [few, most] = [(); 2].map(|()| pool.take_empty().unwrap().at);
    pool.give(Slot { at: few, there: SPAN_PAGES * 3 / 4 - 1 });
    assert_eq!(pool.take_spare(SPAN_PAGES), None);
    pool.give(Slot { at: most, there: SPAN_PAGES * 3 / 4 });
    assert_eq!(pool.take_spare(SPAN_PAGES / 4 - 1), None);
    assert_eq!(pool.take_spare(SPAN_PAGES / 4).unwrap().at, most);
}

/// Pages are kept while somebody asks for them, as many as a third of the slots, and go when nobody does any more.
#[test]
fn as_much_is_kept_as_is_asked_for() {
    let mut pool = Pool::new((1..17usize).collect::<Vec<_>>().into_iter());
    for kept in [1, 2, 3, 4, 5, 5] {
        while pool.is_short() {
            let slot = pool.take_empty().unwrap();
            pool.give(Slot::full(slot.at));
        }
        assert_eq!(pool.take_surplus(), None);
        let taken = core::iter::from_fn(|| pool.take_some(SPAN_PAGES, false)).collect::<Vec<_>>();
        assert_eq!(taken.len(), kept);
        assert!(pool.is_low());
        taken.iter().for_each(|slot| pool.give(Slot::empty(slot.at)));
    }
    while pool.is_short() {
        let slot = pool.take_empty().unwrap();
        pool.give(Slot::full(slot.at));
    }
    let given_up = (0..1000).filter_map(|_| pool.take_surplus()).collect::<Vec<_>>();
    assert!(given_up.len() == 5 && given_up.iter().all(|slot| slot.there == SPAN_PAGES), "{given_up:?}");
    assert!(!pool.is_short() && !pool.is_low());
}

/// One slot is kept for who asks, also after nobody did for long, and no more.
#[test]
fn a_narrow_pool_keeps_one() {
    let mut pool = Pool::new((1..17usize).collect::<Vec<_>>().into_iter());
    pool.narrow(Some(SPAN_PAGES));
    assert_eq!((0..100).filter_map(|_| pool.take_surplus()).count(), 0);
    assert!(!pool.is_short());
    for _ in 0..3 {
        assert_eq!(pool.take_some(SPAN_PAGES, false), None);
        assert!(pool.is_short());
    }
    let slot = pool.take_empty().unwrap();
    pool.give(Slot::full(slot.at));
    assert!(!pool.is_short());
    pool.narrow(None);
    assert_eq!(pool.take_some(SPAN_PAGES, false).unwrap().there, SPAN_PAGES);
    assert_eq!(pool.take_some(SPAN_PAGES, false), None);
    let slot = pool.take_empty().unwrap();
    pool.give(Slot::full(slot.at));
    assert!(pool.is_short());
}

/// Slots of few pages are made until there are as many pages as are wanted, and none of those is given up for the next: else more and more would be free, and slots short for ever.
#[test]
fn a_narrow_pool_does_not_give_up_parts() {
    let mut pool = Pool::new((1..12usize).collect::<Vec<_>>().into_iter());
    let _in_use = [(); 2].map(|()| pool.take_any().unwrap());
    pool.narrow(Some(SPAN_PAGES));
    assert_eq!(pool.take_some(1, false), None);
    for made in 0..8 {
        assert!(pool.is_short(), "{made}");
        let slot = pool.take_to_fill().unwrap();
        assert_eq!(slot.there, 0, "{made}");
        pool.give(Slot { at: slot.at, there: SPAN_PAGES / 8 });
    }
    assert!(!pool.is_short());
}

/// Who fetches a whole span ahead is not helped by parts.
#[test]
fn parts_do_not_count_as_full() {
    let mut pool = Pool::new((1..17usize).collect::<Vec<_>>().into_iter());
    // Asked for twice in vain: three are wanted.
    assert_eq!([(); 2].map(|()| pool.take_some(SPAN_PAGES, false)), [None; 2]);
    let slots = [(); 5].map(|()| pool.take_empty().unwrap().at);
    slots[..3].iter().for_each(|at| pool.give(Slot { at: *at, there: SPAN_PAGES / 2 }));
    pool.give(Slot::full(slots[3]));
    assert!(pool.is_low());
    pool.give(Slot::full(slots[4]));
    assert!(!pool.is_low());
}

/// Where one more slot could be spared, parts are left for who wants some pages; else all but one go before empty ones, if they are not as good as full.
#[test]
fn parts_are_given_up_where_slots_are_scarce() {
    let parts = [64, SPAN_PAGES, 192, 128];
    let order = |empty: usize| -> Vec<usize> {
        let mut pool = Pool::new((0..parts.len() + empty).collect::<Vec<_>>().into_iter());
        std::iter::from_fn(|| pool.take_empty()).for_each(drop);
        parts.into_iter().chain(std::iter::repeat_n(0, empty)).for_each(|there| pool.give(Slot { at: there, there }));
        std::iter::from_fn(|| pool.take_to_fill()).map(|slot| slot.there).take(empty + 2).collect()
    };
    // Of 11 five are left, of 9 four, beside the three parts: so many can be spared before two of those go. The last stays.
    assert_eq!(order(7), [0, 0, 0, 64, 128, 0, 0, 0, 0]);
    assert_eq!(order(5), [0, 0, 64, 128, 0, 0, 0]);
}
