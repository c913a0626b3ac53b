//! Tests of `static-bootstrap/sys/src/processors.rs`.

use super::processors::Processors;

fn of(list: &[usize]) -> Processors {
    let mut words = Processors::NONE.0;
    list.iter().for_each(|processor| words[processor / 64] |= 1 << (processor % 64));
    Processors(words)
}

#[test]
fn maps_of_the_kernel_are_read() {
    assert_eq!(Processors::of_map(b"3\n"), of(&[0, 1]));
    assert_eq!(Processors::of_map(b"00000001,00000000,80000002\n"), of(&[1, 31, 64]));
    assert_eq!(Processors::of_map(b""), Processors::NONE);
    assert_eq!(Processors::of_map(&[b'f'; 4096]).0, [u64::MAX; 16], "more than there can be");
}

#[test]
fn those_that_share_a_cache_are_beside() {
    let (all, near) = (of(&[0, 1, 2, 3, 64, 65]), of(&[0, 1, 64, 70]));
    assert_eq!(all.beside(0, near), Some(of(&[1, 64])));
    assert_eq!(of(&[0, 2, 3]).beside(0, near), Some(of(&[2, 3])), "none that is near may be used");
    assert_eq!(of(&[0, 2, 3, 64]).beside(0, near), Some(of(&[2, 3, 64])), "one that is near may be the same core");
    assert_eq!(all.beside(0, Processors::NONE), Some(of(&[1, 2, 3, 64, 65])), "nothing is known");
    assert_eq!(of(&[5]).beside(5, of(&[5])), None);
    assert_eq!(Processors::one(65), of(&[65]));
    assert_eq!(Processors::one(4096), Processors::NONE);
}
