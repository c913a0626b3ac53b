//! Tests of `static-bootstrap/sys/src/places.rs`.

use proptest::prelude::*;

use super::places::{NOBODY, PLACES, Place, deal, gap};

fn loads(places: &[Place; PLACES], servers: usize) -> Vec<usize> {
    (0..servers).map(|server| places.iter().filter(|place| place.has(server as u8)).count()).collect()
}

#[test]
fn each_keeps_by_what_it_lends() {
    assert_eq!(loads(&deal(&[5], false), 1), [256]);
    assert_eq!(loads(&deal(&[2, 1, 1], false), 3), [128, 64, 64]);
    assert_eq!(loads(&deal(&[2, 0, 2], true), 3), [256, 0, 256]);
    assert_eq!(loads(&deal(&[2, 1, 1], true), 3), [256, 128, 128]);
    assert_eq!(loads(&deal(&[9, 1, 1], true), 3)[0], 256, "who lends more than all others has one of each");
    let places = deal(&[1, 1], true);
    let first = places.iter().filter(|place| place.first == 0).count();
    assert_eq!(first, 128, "both are asked");
    let alone = deal(&[7], true);
    assert!(alone.iter().all(|place| place.first == 0 && place.second == NOBODY && place.whole == 0));
    // Consecutive spans go to different servers.
    assert!(deal(&[1, 1, 1], false).windows(2).all(|two| two[0].first != two[1].first));
}

proptest! {
    /// Servers are lost and come in any order; copies are made one place at a time: what two have is never lost, and in the end there are two of all.
    #[test]
    fn one_loss_at_a_time_loses_nothing(
        weights in prop::collection::vec(1..1000u64, 2..8),
        losses in prop::collection::vec((0..8usize, 0..600usize), 0..5),
    ) {
        let mut places = deal(&weights, true);
        let mut alive: u32 = (1 << weights.len()) - 1;
        for (server, healed) in losses {
            let server = server % weights.len();
            if alive >> server & 1 == 1 && alive.count_ones() > 1 {
                alive &= !(1 << server);
                for place in &mut places {
                    match place.without(server as u8) {
                        Some(next) => *place = next,
                        // Only what had no whole copy.
                        None => {
                            prop_assert!(usize::from(place.first) == server && place.whole == 0);
                            *place = Place { first: alive.trailing_zeros() as u8, second: NOBODY, whole: 0, reserved: 0 };
                        }
                    }
                }
            }
            for _ in 0..healed {
                let Some((nth, chosen)) = gap(&places, &weights, alive) else { break };
                prop_assert!(alive >> chosen & 1 == 1 && places[nth].first != chosen);
                places[nth] = Place { second: chosen, whole: 1, ..places[nth] };
            }
            prop_assert!(places.iter().all(|place| alive >> place.first & 1 == 1 && place.first != place.second));
        }
        while let Some((nth, chosen)) = gap(&places, &weights, alive) {
            places[nth] = Place { second: chosen, whole: 1, ..places[nth] };
        }
        prop_assert_eq!(places.iter().all(|place| place.whole == 1), alive.count_ones() > 1);
    }
}
