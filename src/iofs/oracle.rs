//! The log of a program against a plain file: whatever is written, dropped, killed and begun again, in whatever order, the worker writes exactly
//! what the program wrote, in its order.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use crate::sys::extents::{
    APPEND, GROWN, GROWN_SHIFT, Growing, HOT, Log, NONE, RING_LEAST, RUN, Refused, SEQUENCE_AT, Target, inode,
};
use crate::sys::extents_map::{Extents, create_with};

pub(super) fn file() -> File {
    let file = rustix::fs::memfd_create("oracle", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(file)
}

pub(super) fn content(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// A program, its worker, and what files would hold without them.
struct World {
    extents: Extents,
    memory: OwnedFd,
    real: Vec<File>,
    oracle: Vec<File>,
    /// What was written, in order, and how much of it the worker is known to have done.
    written: Vec<(u32, u64, Vec<u8>)>,
}

impl World {
    fn new(files: usize) -> World {
        let memory = create_with(RING_LEAST).unwrap();
        let extents = Extents::map(&memory).unwrap();
        extents.log(3).unwrap().reset();
        extents.head().limit.store(RING_LEAST, Ordering::Relaxed);
        let all = || (0..files).map(|_| file()).collect();
        World { extents, memory, real: all(), oracle: all(), written: Vec::new() }
    }

    fn log(&self) -> Log<'_> {
        self.extents.log(3).unwrap()
    }

    /// One piece; `most`: the file system takes no more bytes at once; `killed`: before it is known that it was written.
    fn work(&self, most: u64, killed: bool) -> bool {
        let log = self.log();
        let Some(mut piece) = log.next().unwrap() else { return false };
        piece.len = piece.len.min(most);
        let written = self.extents.write(&log, &piece, self.real[piece.file as usize].as_fd()).unwrap();
        if !killed {
            log.advance(piece.position, written);
        }
        true
    }

    fn write(&mut self, file: u32, offset: u64, bytes: Vec<u8>) {
        let mut waited = false;
        loop {
            let log = self.log();
            let now = log.now();
            // In two parts, as writev gives them.
            let half = bytes.len() / 2;
            let parts = [&bytes[..half], &bytes[half..]].map(|part| [part.as_ptr() as usize, part.len()]);
            // SAFETY: the parts of a live vector; there is one thread.
            match append(&self.extents, 3, &now, file, offset, &parts) {
                Ok(_) => break,
                Err(Refused::Full) => {
                    assert!(!waited, "there was to be room");
                    let enough = log.room_for(bytes.len() as u64 + 2 * RUN, RING_LEAST).unwrap();
                    while self.log().segment.upto.load(Ordering::SeqCst) < enough {
                        assert!(self.work(u64::MAX, false));
                    }
                    waited = true;
                }
                Err(Refused::Again) => unreachable!("nobody else writes"),
            }
        }
        self.oracle[file as usize].write_all_at(&bytes, offset).unwrap();
        self.written.push((file, offset, bytes));
    }

    fn check(&self) {
        while self.work(u64::MAX, false) {}
        assert_eq!(self.log().pending(), 0);
        for (real, oracle) in self.real.iter().zip(&self.oracle) {
            assert!(content(real) == content(oracle));
        }
    }

    /// What is there now is what a prefix of the writes makes, but for a last one that is there in part.
    fn is_prefix(&self) -> bool {
        let real: Vec<_> = self.real.iter().map(content).collect();
        let mut files: Vec<Vec<u8>> = vec![Vec::new(); real.len()];
        if files == real {
            return true;
        }
        for (file, offset, bytes) in &self.written {
            let (held, offset) = (&mut files[*file as usize], *offset as usize);
            for (nth, byte) in bytes.iter().enumerate() {
                if held.len() <= offset + nth {
                    held.resize(offset + nth + 1, 0);
                }
                held[offset + nth] = *byte;
            }
            if files == real {
                return true;
            }
        }
        false
    }
}

#[allow(unsafe_code, reason = "the program's side")]
pub(super) fn append(
    extents: &Extents,
    segment: u32,
    now: &crate::sys::extents::Now,
    file: u32,
    offset: u64,
    parts: &[[usize; 2]],
) -> Result<u64, Refused> {
    let head = extents.head();
    let place = head.claim(1, u64::from(file) + 1, inode::KEPT).unwrap();
    let inode = &head.inodes[place];
    let to = Target { head, segment, file, inode, place: u32::try_from(place).unwrap(), limit: RING_LEAST, run: RUN };
    // SAFETY: the caller's live buffers; there is one thread.
    unsafe { extents.log(segment).unwrap().append(now, &to, offset, parts, (NONE, 0)) }
}

/// As the program's quick way does.
#[allow(unsafe_code, reason = "the program's side")]
fn grow(growing: &Growing, bytes: &[u8]) -> bool {
    use std::sync::atomic::{AtomicU64, Ordering};
    // SAFETY: the words that `Log::growing` found, in memory that lives as long as the test.
    unsafe {
        let sequence = AtomicU64::from_ptr((growing.segment as usize + SEQUENCE_AT) as *mut u64);
        let now = sequence.load(Ordering::SeqCst);
        let (grown, len) = ((now & GROWN) >> GROWN_SHIFT, bytes.len() as u64);
        if now & !GROWN != growing.sequence || grown + len > growing.most {
            return false;
        }
        let into = (growing.bytes + grown) as *mut u8;
        into.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        sequence.compare_exchange(now, now + (len << GROWN_SHIFT), Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

#[test]
#[allow(unsafe_code, reason = "the program's side")]
fn a_run_grows_by_one_store() {
    let world = World::new(2);
    let (log, head) = (world.log(), world.extents.head());
    let place = head.claim(1, 1, inode::KEPT).unwrap();
    let inode = &head.inodes[place];
    let to =
        Target { head, segment: 3, file: 0, inode, place: u32::try_from(place).unwrap(), limit: RING_LEAST, run: RUN };
    let first = b"first";
    let part = [[first.as_ptr() as usize, first.len()]];
    // SAFETY: a live buffer; there is one thread.
    unsafe { log.append(&log.now(), &to, 0, &part, (0, 5)) }.unwrap();
    let growing = log.growing(&to).unwrap();
    assert!(grow(&growing, b" second") && grow(&growing, b" third"));
    assert!(log.growing(&to).is_none() && log.pending() == 32 + 18 && log.now().offset == 18);
    assert!(!grow(&growing, &vec![0; RUN as usize]));
    // What is written otherwise comes behind it, and ends it.
    append(&world.extents, 3, &log.now(), 1, 0, &[[b"other".as_ptr() as usize, 5]]).unwrap();
    assert!(!grow(&growing, b"x"));
    while world.work(3, false) {}
    assert_eq!(content(&world.real[0]), b"first second third");
    assert_eq!(content(&world.real[1]), b"other");
    // Never beyond the end of a run, or of the ring.
    for _ in 0..2 * RING_LEAST / RUN {
        let at = log.now().offset;
        // SAFETY: as above.
        unsafe { log.append(&log.now(), &to, at, &part, (0, at + 5)) }.unwrap();
        let growing = log.growing(&to).unwrap();
        assert!(growing.most < RUN);
        assert!(grow(&growing, &vec![1; growing.most as usize]) && !grow(&growing, b"y"));
        while world.work(u64::MAX, false) {}
    }
    assert_eq!(world.real[0].metadata().unwrap().len(), log.now().offset);
}

/// Between runs is what nobody writes: what is written is told by where it lies.
#[test]
fn what_a_run_begins_with_is_not_counted() {
    let world = World::new(2);
    let log = world.log();
    let text = b"seventeen letters";
    for file in 0..2 {
        append(&world.extents, 3, &log.now(), file, 0, &[[text.as_ptr() as usize, text.len()]]).unwrap();
    }
    while let Some(piece) = log.after(&mut 0, log.segment.upto.load(Ordering::Relaxed)).unwrap() {
        assert_eq!(piece.len, text.len() as u64);
        log.advance(piece.position, piece.len);
    }
    assert_eq!(log.pending(), 0);
}

#[derive(Debug, Clone)]
enum Step {
    Write {
        file: u32,
        back: u64,
        len: usize,
    },
    Work {
        most: u64,
        killed: bool,
    },
    /// The worker writes everything, over and over from the same place.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![80 => 1..200usize, 20 => 1..65_537usize, 1 => 1..3_000_000usize];
    let step = prop_oneof![
        8 => (0..3u32, prop_oneof![3 => Just(0), 1 => 0..100_000u64], len)
            .prop_map(|(file, back, len)| Step::Write { file, back, len }),
        2 => (1..300_000u64, any::<bool>()).prop_map(|(most, killed)| Step::Work { most, killed }),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..400)
}

fn play(steps: Vec<Step>) {
    let mut world = World::new(3);
    let mut ends = [0u64; 3];
    for (nth, step) in steps.into_iter().enumerate() {
        match step {
            Step::Write { file, back, len } => {
                let offset = ends[file as usize].saturating_sub(back);
                let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + nth * 13 + 1) as u8).collect();
                world.write(file, offset, bytes);
                ends[file as usize] = offset + len as u64;
            }
            Step::Work { most, killed } => _ = world.work(most, killed),
            Step::Restart => {
                (0..3).for_each(|_| _ = world.work(u64::MAX, true));
            }
        }
    }
    world.check();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn a_file_is_what_was_written(steps in steps()) {
        play(steps);
    }
}

#[test]
fn what_the_worker_has_done_is_a_prefix_at_every_moment() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..20 {
        let mut world = World::new(2);
        for nth in 0..60u64 {
            // Every write ends where no other does, so that a prefix is known by what is there.
            let (file, len) = (random.u32(0..2), random.usize(1..300));
            let offset = random.u64(0..2_000);
            world.write(file, offset, vec![nth as u8 + 1; len]);
            if random.u8(0..4) == 0 {
                world.work(u64::MAX, random.bool());
                // Pieces are whole writes: several, if each went on where the one before ended.
                assert!(world.is_prefix());
            }
        }
        world.check();
    }
}

#[test]
fn runs_are_as_long_as_they_may_be() {
    let mut world = World::new(1);
    for nth in 0..3 * RUN / 64 {
        world.write(0, nth * 64, vec![nth as u8; 64]);
    }
    let log = world.log();
    assert!(log.pending() <= RING_LEAST);
    let mut pieces = 0;
    while world.work(u64::MAX, false) {
        pieces += 1;
    }
    assert_eq!(pieces, 3);
    world.check();
}

/// Memory that the kernel has cleared is used again as soon as may be, also where something waits at all times.
#[test]
fn what_waits_does_not_wander_through_the_ring() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut world = World::new(1);
    let (mut furthest, mut most) = (0, 0);
    for nth in 0..60u64 {
        world.write(0, nth % 7 * 1000, vec![nth as u8; random.usize(RUN as usize / 2..RUN as usize)]);
        let waits = world.log().pending();
        assert!(waits < 3 * RUN, "{waits} bytes wait");
        furthest = furthest.max(world.log().next().unwrap().unwrap().at);
        most = most.max(waits);
        while world.log().pending() > random.u64(1..2 * RUN) {
            world.work(u64::MAX, false);
        }
    }
    assert!(furthest > HOT && furthest < 10 * RUN && most > 2 * RUN, "{furthest} {most}");
    world.check();
}

/// What grows by single stores never reaches what the worker has not written, wherever the ring was begun again.
#[test]
#[allow(unsafe_code, reason = "the program's side")]
fn quick_writes_do_not_reach_what_waits() {
    for seed in 0..30 {
        let mut random = fastrand::Rng::with_seed(seed);
        let world = World::new(2);
        let (log, head) = (world.log(), world.extents.head());
        let places = [1, 2].map(|number| head.claim(1, number, inode::KEPT).unwrap());
        let mut oracle = [Vec::new(), Vec::new()];
        for _ in 0..600 {
            let file = usize::from(random.u8(..20) == 0);
            let (inode, place) = (&head.inodes[places[file]], u32::try_from(places[file]).unwrap());
            let number = u32::try_from(file).unwrap();
            let to = Target { head, segment: 3, file: number, inode, place, limit: RING_LEAST - 2 * RUN, run: RUN };
            let (at, bytes) = (oracle[file].len() as u64, vec![random.u8(..); random.usize(1..200_000)]);
            let part = [[bytes.as_ptr() as usize, bytes.len()]];
            // SAFETY: a live buffer; there is one thread.
            match unsafe { log.append(&log.now(), &to, at, &part, (number.into(), at + bytes.len() as u64)) } {
                Ok(_) => oracle[file].extend_from_slice(&bytes),
                Err(_) => assert!(world.work(u64::MAX, false)),
            }
            if let Some(growing) = log.growing(&to) {
                let more = vec![random.u8(..); growing.most as usize];
                if grow(&growing, &more) {
                    oracle[file].extend_from_slice(&more);
                }
            }
            // It stands still for long.
            if random.u8(..30) == 0 {
                (0..random.u8(..12)).for_each(|_| _ = world.work(u64::MAX, false));
            }
        }
        while world.work(u64::MAX, false) {}
        let same = |(real, oracle): (&File, &Vec<u8>)| content(real) == *oracle;
        assert!(world.real.iter().zip(&oracle).all(same), "seed {seed}");
    }
}

/// Who waits as long as he is told to finds room: [`World::write`] asserts it.
#[test]
fn there_is_room_for_who_has_waited() {
    for seed in 0..30 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut world = World::new(2);
        for nth in 0..60u64 {
            let most = random.u8(1..22);
            let len = random.usize(1..1 << most);
            world.write(random.u32(0..2), random.u64(0..1000), vec![nth as u8; len]);
            for _ in 0..random.u8(0..4) {
                world.work(u64::MAX, false);
            }
        }
        world.check();
    }
}

/// Also where the ring ends: what was behind it before is not there any more.
#[test]
fn what_one_write_appends_is_one() {
    let world = World::new(1);
    let log = world.log();
    let mut all = Vec::new();
    for nth in 0..40 {
        // Up to what does not fit before the run that was last.
        let bytes = vec![nth as u8 + 1; RUN as usize * (nth % 14) / 2 + 7];
        append(&world.extents, 3, &log.now(), 0, APPEND, &[[bytes.as_ptr() as usize, bytes.len()]]).unwrap();
        all.extend_from_slice(&bytes);
        let (mut run, mut position) = (log.segment.run.load(Ordering::SeqCst), log.segment.upto.load(Ordering::SeqCst));
        let mut pieces = Vec::new();
        while let Some(piece) = log.after(&mut run, position).unwrap() {
            position = piece.position + piece.len;
            pieces.push((3, piece));
        }
        assert_eq!(pieces.len(), bytes.len().div_ceil(RUN as usize));
        assert!(pieces.iter().all(|(_, piece)| piece.offset == APPEND && piece.ticket == pieces[0].1.ticket));
        let written = world.extents.append(&pieces, world.real[0].as_fd()).unwrap();
        assert_eq!(written, bytes.len() as u64);
        for (_, piece) in pieces {
            log.next().unwrap().unwrap();
            log.advance(piece.position, piece.len);
        }
        assert_eq!(log.next(), Ok(None));
    }
    assert!(content(&world.real[0]) == all);
}

#[test]
fn memory_is_given_back() {
    let mut world = World::new(1);
    let held = |world: &World| rustix::fs::fstat(&world.memory).unwrap().st_blocks as u64 * 512;
    let before = held(&world);
    for nth in 0..10 {
        world.write(0, nth * RUN, vec![nth as u8; RUN as usize]);
    }
    assert!(!world.extents.give_back(&world.log()) && held(&world) > before + 9 * RUN);
    while world.work(u64::MAX, false) {}
    // Nor while somebody is about to append.
    assert!(world.log().begin());
    assert!(!world.extents.give_back(&world.log()) && held(&world) > before + 9 * RUN);
    world.log().end();
    assert!(world.extents.give_back(&world.log()));
    assert!(held(&world) < before + HOT + 3 * RUN, "{}", held(&world));
    for nth in 10..30 {
        world.write(0, nth * RUN, vec![nth as u8; RUN as usize / 2]);
    }
    world.check();
}

#[test]
fn a_handler_that_comes_in_between_is_first() {
    let world = World::new(1);
    let log = world.log();
    let part = |bytes: &'static [u8]| [[bytes.as_ptr() as usize, bytes.len()]];
    assert!(log.begin());
    let before = log.now();
    // It finds that it must not append, makes its own write, and has whom it interrupted begin again.
    assert!(!log.begin());
    assert!(log.hold(&log.now(), NONE, 0));
    assert_eq!(append(&world.extents, 3, &before, 0, 0, &part(b"one.")), Err(Refused::Again));
    append(&world.extents, 3, &log.now(), 0, 4, &part(b"two.")).unwrap();
    log.end();
    assert!(log.begin());
    assert_eq!(log.now().tail, 36);
    while world.work(u64::MAX, false) {}
    assert_eq!(content(&world.real[0]).escape_ascii().to_string(), r"\x00\x00\x00\x00two.");
    // Handlers that never come back take no more than their stage.
    for offset in 0..40 {
        assert!(log.hold(&log.now(), 0, offset));
        assert_eq!(log.now().offset, offset);
    }
}

#[test]
fn no_log_is_refused() {
    let world = World::new(1);
    let log = world.log();
    append(&world.extents, 3, &log.now(), 0, 0, &[[b"x".as_ptr() as usize, 1]]).unwrap();
    for run in [8, 1 << 40] {
        log.segment.run.store(run, Ordering::Relaxed);
        assert!(log.next().is_err());
    }
}
