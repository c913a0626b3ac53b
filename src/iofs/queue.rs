//! All that goes to one file system: in which order it may be written, and what of it by one call. Each program's pieces are written in its order, and
//! the bytes of a file in that of all programs (tickets). Programs that write a file by turns, as ranks do whose records follow each other, are written
//! together where one goes on where the other ended.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::forward::Away;
use crate::sys::extents::{APPEND, Log, NONE, Piece, RUN};
use crate::sys::extents_map::Extents;

/// Pieces of a stretch.
const STRETCH: usize = 4096;
/// Pieces that one call writes, at most.
const TOGETHER: usize = 1 << 16;
/// In the place of a run and a position: everything is behind it.
const OVER: (u64, u64) = (0, u64::MAX);

/// A piece, and the segment of whose log it is.
pub(super) type Due = (u32, Piece);

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) device: u64,
    /// Since when something is pending, by segment.
    pub(super) waiting: BTreeMap<u32, Instant>,
    /// Since when a log's ring holds memory that nobody needs, with nothing pending; `None`: it holds none.
    pub(super) idle: BTreeMap<u32, Option<Instant>>,
    /// When it was asked how much memory is free.
    pub(super) asked: Instant,
    pub(super) away: Option<Away>,
    /// Whose piece others' have come before, its position, and the offset from which on more may.
    waits: (u32, u64, u64),
    /// Of logs of programs that write files of others.
    indices: BTreeMap<u32, Index>,
}

/// What a log holds of runs that grow no more: among millions of pieces those that cover some bytes are found by a look at a few.
#[derive(Debug, Default)]
struct Index {
    epoch: u64,
    stretches: VecDeque<Stretch>,
}

/// Pieces that follow each other in a log.
#[derive(Debug)]
struct Stretch {
    /// Run and position of its first and behind its last.
    from: (u64, u64),
    to: (u64, u64),
    pieces: usize,
    /// Place of their file in the table, if it is one.
    inode: Option<u32>,
    /// What they cover at most.
    low: u64,
    high: u64,
    /// The first one's, the least.
    ticket: u64,
}

impl Stretch {
    fn new(from: (u64, u64), piece: &Piece) -> Stretch {
        let (inode, ticket) = (Some(piece.inode), piece.ticket);
        Stretch { from, to: from, pieces: 0, inode, low: u64::MAX, high: 0, ticket }
    }

    fn add(&mut self, run: u64, piece: &Piece) {
        let (low, high) = piece.range();
        (self.low, self.high) = (self.low.min(low), self.high.max(high));
        self.inode = self.inode.filter(|inode| *inode == piece.inode);
        self.pieces += 1;
        self.to = (run, piece.position + piece.len);
    }

    fn may_cover(&self, piece: &Piece) -> bool {
        self.inode.is_none_or(|inode| inode == piece.inode) && piece.covers((self.low, self.high))
    }
}

impl Index {
    /// Goes on to where the log's last run begins; what is before `from` is written.
    fn update(&mut self, log: &Log<'_>, from: (u64, u64)) {
        let epoch = log.segment.epoch.load(Ordering::SeqCst);
        let known =
            |index: &Index| index.stretches.front().zip(index.stretches.back()).map(|(a, b)| (a.from.1, b.to.1));
        if self.epoch != epoch || known(self).is_some_and(|(first, last)| from.1 < first || last < from.1) {
            *self = Index { epoch, ..Index::default() };
        }
        while self.stretches.len() > 1 && self.stretches.front().is_some_and(|stretch| stretch.to.1 <= from.1) {
            self.stretches.pop_front();
        }
        // The last one may still grow.
        let last = Some(log.now().run).filter(|run| *run != NONE).unwrap_or(0);
        let mut way = Way::new(*log, self.stretches.back().map_or(from, |stretch| stretch.to));
        while way.run < last
            && let Some(piece) = way.next
        {
            let run = way.run;
            if self.stretches.back().is_none_or(|stretch| stretch.pieces == STRETCH) {
                self.stretches.push_back(Stretch::new((run, piece.position), &piece));
            }
            if let Some(stretch) = self.stretches.back_mut() {
                stretch.add(run, &piece);
            }
            way.next();
        }
    }

    /// Where pieces before a ticket that cover some of this one's bytes may be: behind what, and up to which position.
    fn places(&self, mut at: (u64, u64), piece: &Piece, ticket: u64) -> Vec<((u64, u64), u64)> {
        let (mut places, begin) = (Vec::new(), at.1);
        for stretch in self.stretches.iter().skip_while(|stretch| stretch.to.1 <= begin) {
            if stretch.ticket >= ticket {
                break;
            }
            if !stretch.may_cover(piece) {
                if at.1 < stretch.from.1 {
                    places.push((at, stretch.from.1));
                }
                at = stretch.to;
            }
        }
        places.push((at, u64::MAX));
        places
    }
}

/// The pieces of a log from a place on.
#[derive(Debug)]
struct Way<'a> {
    log: Log<'a>,
    /// The run of the next one, and the end of the last.
    run: u64,
    position: u64,
    next: Option<Piece>,
}

impl<'a> Way<'a> {
    fn new(log: Log<'a>, (mut run, position): (u64, u64)) -> Way<'a> {
        let next = log.after(&mut run, position).ok().flatten();
        Way { log, run, position, next }
    }

    /// The next one, if it is this file's and nothing is missing in that.
    fn fit(&self, inode: u32) -> Option<Piece> {
        let file = |next: &Piece| self.log.segment.files.get(next.file as usize);
        let is_whole = |next: &Piece| file(next).is_some_and(|file| file.error.load(Ordering::SeqCst) == 0);
        self.next.filter(|next| next.inode == inode && is_whole(next))
    }
}

impl Iterator for Way<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let piece = self.next?;
        self.position = piece.position + piece.len;
        self.next = self.log.after(&mut self.run, self.position).ok().flatten();
        Some(piece)
    }
}

impl Queue {
    pub(super) fn new(device: u64, away: Option<Away>) -> Queue {
        let (waiting, idle, indices) = Default::default();
        Queue { device, waiting, idle, asked: Instant::now(), away, waits: (0, u64::MAX, 0), indices }
    }

    /// From where on a log has to be written: run and position.
    pub(super) fn from(&self, segment: u32, log: &Log<'_>) -> (u64, u64) {
        let done = || (log.segment.run.load(Ordering::Relaxed), log.segment.upto.load(Ordering::Relaxed));
        self.away.as_ref().map_or_else(done, |away| away.from(segment, log))
    }

    /// Another piece that covers some of what this one does and comes before a ticket: whose, and its ticket, the earliest. What is before the places in
    /// `past` counts as written.
    fn earlier(
        &self,
        extents: &Extents,
        piece: &Piece,
        ticket: u64,
        past: &BTreeMap<u32, (u64, u64)>,
    ) -> Option<(u32, u64)> {
        let inode = &extents.head().inodes[piece.inode as usize];
        let others = inode.writers().filter_map(|other| {
            let log = extents.log(other)?;
            let epoch = log.segment.epoch.load(Ordering::SeqCst);
            let from = past.get(&other).copied().unwrap_or_else(|| self.from(other, &log));
            let index = self.indices.get(&other).filter(|index| index.epoch == epoch);
            let places = index.map_or_else(|| vec![(from, u64::MAX)], |index| index.places(from, piece, ticket));
            let within = |(from, upto)| Way::new(log, from).take_while(move |next| next.position < upto);
            let mut all = places.into_iter().flat_map(within).take_while(|next| next.ticket < ticket);
            all.find(|next| next.overlaps(piece)).map(|earlier| (other, earlier.ticket))
        });
        others.min_by_key(|(_, ticket)| *ticket)
    }

    /// What has to be written before a piece: all that another program wrote up to where it covers some of the same bytes earlier, and what that
    /// waits for; or the piece.
    pub(super) fn first(&self, extents: &Extents, (mut segment, mut piece): Due) -> Due {
        // What is before it in its own log is written.
        while let Some((other, _)) = self.earlier(extents, &piece, piece.ticket, &BTreeMap::from([(segment, OVER)])) {
            let next = extents.log(other).and_then(|log| Way::new(log, self.from(other, &log)).next);
            let Some(next) = next else { break };
            (segment, piece) = (other, next);
        }
        (segment, piece)
    }

    /// A piece that nothing has to be written before, and those behind it that go on where it ends, for which that is so, too: of its own log, and of
    /// those of programs that write the file, too.
    pub(super) fn gather(&mut self, extents: &Extents, (segment, piece): Due) -> Vec<Due> {
        let mut pieces = vec![(segment, piece)];
        let Some(log) = extents.log(segment) else { return pieces };
        let mut own = Way::new(log, self.from(segment, &log));
        // What has grown meanwhile comes later.
        if own.next != Some(piece) || piece.len >= RUN && piece.offset != APPEND {
            return pieces;
        }
        if piece.offset == APPEND {
            own.next();
            // What one write appends is appended by one.
            while self.away.is_none()
                && let Some(next) = own.next.filter(|next| next.ticket == piece.ticket && next.position > own.position)
            {
                pieces.push((segment, next));
                own.next();
            }
            return pieces;
        }
        let inode = &extents.head().inodes[piece.inode as usize];
        let (mut ways, mut turn) = (vec![(segment, own)], 0);
        if self.away.is_none() && !inode.is_alone(segment) {
            for other in inode.writers() {
                let Some(log) = extents.log(other) else { continue };
                let from = self.from(other, &log);
                self.indices.entry(other).or_default().update(&log, from);
                if other != segment {
                    ways.push((other, Way::new(log, from)));
                }
            }
            turn = self.lead(extents, &ways);
        }
        let Some(mut all) = ways[turn].1.next() else { return pieces };
        pieces = vec![(ways[turn].0, all)];
        while pieces.len() < TOGETHER {
            let end = all.offset.checked_add(all.len);
            let follows = |next: Piece| Some(next.offset) == end && all.len + next.len <= RUN;
            // After one's the next one's, most often.
            let mut turns = (turn + 1..=turn + ways.len()).map(|nth| nth % ways.len());
            let Some(nth) = turns.find(|nth| ways[*nth].1.fit(all.inode).is_some_and(follows)) else { break };
            let Some(next) = ways[nth].1.next() else { break };
            (all.len, all.ticket, turn) = (all.len + next.len, all.ticket.max(next.ticket), nth);
            pieces.push((ways[nth].0, next));
        }
        let past = ways.iter().map(|(segment, way)| (*segment, (way.run, way.position))).collect();
        if let Some((_, ticket)) = self.earlier(extents, &all, all.ticket, &past) {
            let known = pieces.iter().skip(1).take_while(|(_, piece)| piece.ticket < ticket).count();
            pieces.truncate(1 + known);
        }
        pieces
    }

    /// From which log on to begin rather than with the first one's next piece: from one that lags behind, if nothing has to be written before that. What
    /// comes so before the first one's goes upwards, so that it waits for no more than lies in a [`RUN`].
    fn lead(&mut self, extents: &Extents, ways: &[(u32, Way<'_>)]) -> usize {
        let (segment, way) = &ways[0];
        let Some(own) = way.next else { return 0 };
        if (self.waits.0, self.waits.1) != (*segment, own.position) {
            self.waits = (*segment, own.position, own.offset.saturating_sub(RUN));
        }
        let lags = |way: &Way<'_>| {
            way.fit(own.inode).filter(|next| (self.waits.2..own.offset).contains(&next.offset)).map(|next| next.offset)
        };
        let Some((nth, _)) =
            ways.iter().enumerate().filter_map(|(nth, way)| Some((nth, lags(&way.1)?))).min_by_key(|lag| lag.1)
        else {
            return 0;
        };
        let (segment, way) = &ways[nth];
        let past = BTreeMap::from([(*segment, OVER)]);
        let free = way.next.filter(|next| self.earlier(extents, next, next.ticket, &past).is_none());
        self.waits.2 = free.map_or(self.waits.2, |next| next.offset.saturating_add(next.len));
        if free.is_some() { nth } else { 0 }
    }

    /// A log is nobody's any more.
    pub(super) fn forget(&mut self, segment: u32) {
        self.indices.remove(&segment);
        self.waiting.remove(&segment);
        self.idle.remove(&segment);
    }
}

/// The file system has so many bytes of these pieces, each log's in its order.
pub(super) fn advance(extents: &Extents, pieces: &[Due], mut written: u64) {
    // Of each log the first one's position, the last one's, and how much of that.
    let mut done: BTreeMap<u32, [u64; 3]> = BTreeMap::new();
    for (segment, piece) in pieces {
        let len = piece.len.min(written);
        if len == 0 {
            break;
        }
        written -= len;
        let first = done.get(segment).map_or(piece.position, |of| of[0]);
        done.insert(*segment, [first, piece.position, len]);
    }
    for (segment, [first, last, len]) in done {
        let Some(log) = extents.log(segment) else { continue };
        if log.next().is_ok_and(|next| next.is_some_and(|next| next.position == first)) {
            log.advance_over(last, len);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::super::oracle::{append, content, file};
    use super::*;
    use crate::sys::extents::{RING_LEAST, Refused, inode};
    use crate::sys::extents_map::create_with;

    const RANKS: u32 = 3;

    /// Programs that write the same files, and what is there without a worker.
    struct Ranks {
        extents: Extents,
        queue: Queue,
        real: Vec<File>,
        oracle: Vec<File>,
        calls: usize,
    }

    impl Ranks {
        fn new(files: u32) -> Ranks {
            let extents = Extents::map(&create_with(RING_LEAST).unwrap()).unwrap();
            extents.head().limit.store(RING_LEAST, Ordering::Relaxed);
            (0..RANKS).for_each(|rank| extents.log(rank).unwrap().reset());
            for nth in 0..files {
                let place = extents.head().claim(1, u64::from(nth) + 1, inode::KEPT).unwrap();
                (0..RANKS).for_each(|rank| _ = extents.head().inodes[place].set_writer(rank, true));
            }
            let all = || (0..files).map(|_| file()).collect();
            Ranks { extents, queue: Queue::new(1, None), real: all(), oracle: all(), calls: 0 }
        }

        fn write(&mut self, rank: u32, file: u32, offset: u64, bytes: &[u8]) {
            loop {
                let log = self.extents.log(rank).unwrap();
                let part = [[bytes.as_ptr() as usize, bytes.len()]];
                match append(&self.extents, rank, &log.now(), file, offset, &part) {
                    Ok(_) => break,
                    Err(Refused::Full) => assert!(self.work(rank, u64::MAX, false)),
                    Err(Refused::Again) => unreachable!("nobody else writes"),
                }
            }
            self.oracle[file as usize].write_all_at(bytes, offset).unwrap();
        }

        /// One call for a rank, of which the file system takes so much; `killed`: before it is known that it was made.
        fn work(&mut self, rank: u32, most: u64, killed: bool) -> bool {
            let log = self.extents.log(rank).unwrap();
            let (mut run, position) = self.queue.from(rank, &log);
            let Some(piece) = log.after(&mut run, position).unwrap() else { return false };
            let first = self.queue.first(&self.extents, (rank, piece));
            let mut pieces = self.queue.gather(&self.extents, first);
            let mut left = most;
            for (_, piece) in &mut pieces {
                piece.len = piece.len.min(left);
                left -= piece.len;
            }
            let file = &self.real[first.1.file as usize];
            let written = self.extents.write_all(&pieces, file.as_fd()).unwrap();
            if !killed {
                advance(&self.extents, &pieces, written);
            }
            self.calls += 1;
            true
        }

        fn check(&mut self) {
            while (0..RANKS).any(|rank| self.work(rank, u64::MAX, false)) {}
            for (real, oracle) in self.real.iter().zip(&self.oracle) {
                assert!(content(real) == content(oracle));
            }
        }
    }

    #[test]
    fn what_ranks_write_by_turns_is_written_together() {
        let mut ranks = Ranks::new(1);
        // One is far ahead, as where it has a processor of its own.
        let record = |nth: u64| ((nth % u64::from(RANKS)) as u32, nth * 64, [nth as u8; 64]);
        for lag in [2, 1, 0] {
            for (rank, offset, bytes) in (0..60_000).map(record).filter(|(rank, ..)| *rank == lag) {
                ranks.write(rank, 0, offset, &bytes);
            }
        }
        ranks.check();
        assert!(ranks.calls < 60_000 * 64 / 700_000 + 4, "{} calls", ranks.calls);
    }

    /// Whoever began first, and gets no further alone.
    #[test]
    fn who_lags_catches_up() {
        let mut ranks = Ranks::new(1);
        (0..2_000).for_each(|nth| ranks.write(0, 0, nth * 192, &[1; 64]));
        (0..100).for_each(|_| _ = ranks.work(0, u64::MAX, false));
        for (rank, nth) in [1, 2].into_iter().flat_map(|rank| (0..2_000).map(move |nth| (rank, nth))) {
            ranks.write(rank, 0, nth * 192 + u64::from(rank) * 64, &[2; 64]);
        }
        while ranks.work(0, u64::MAX, false) {}
        assert!(ranks.calls < 210, "{} calls", ranks.calls);
        ranks.check();
    }

    #[test]
    fn nobody_waits_for_who_writes_the_same_bytes_again_and_again() {
        let mut ranks = Ranks::new(1);
        ranks.write(0, 0, 1_000, &[1; 64]);
        let log = ranks.extents.log(0).unwrap();
        let tail = log.now().tail;
        for _ in 0..5 {
            (0..4).for_each(|nth| ranks.write(1, 0, nth % 2 * 500, &[2; 64]));
            ranks.work(0, u64::MAX, false);
        }
        assert!(ranks.extents.log(0).unwrap().segment.upto.load(Ordering::SeqCst) >= tail);
        ranks.check();
    }

    #[test]
    fn bytes_are_whose_write_was_last() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut ranks = Ranks::new(2);
            let span = random.u64(10..20_000);
            for nth in 0..random.u32(1..3_000) {
                let (rank, file) = (random.u32(0..RANKS), u32::from(random.u8(0..8) == 0));
                // Where somebody's went on, or anywhere.
                let offset = if random.bool() { u64::from(nth) * 8 % span } else { random.u64(0..span) };
                ranks.write(rank, file, offset, &vec![(nth % 255) as u8 + 1; random.usize(1..40)]);
                if random.u8(0..20) == 0 {
                    let most = if random.bool() { u64::MAX } else { random.u64(1..100) };
                    ranks.work(random.u32(0..RANKS), most, random.u8(0..4) == 0);
                }
            }
            ranks.check();
        }
    }

    /// Also while one's log is looked at from the beginning again, and long stretches are in it.
    #[test]
    fn an_index_finds_what_a_look_at_each_finds() {
        let mut ranks = Ranks::new(2);
        let mut random = fastrand::Rng::with_seed(1);
        for nth in 0..40_000u64 {
            let offset = if random.u16(0..10_000) == 0 { random.u64(0..80_000) } else { nth * 2 };
            ranks.write(0, u32::from(nth / 10_000 == 2), offset * 8, &[nth as u8; 8]);
            if nth % 5_000 == 0 {
                let log = ranks.extents.log(0).unwrap();
                let from = ranks.queue.from(0, &log);
                ranks.queue.indices.entry(0).or_default().update(&log, from);
                ranks.work(0, u64::MAX, false);
            }
        }
        let log = ranks.extents.log(0).unwrap();
        let from = ranks.queue.from(0, &log);
        let place = Way::new(log, from).next.unwrap().inode;
        for _ in 0..2_000 {
            let (offset, ticket) = (random.u64(0..650_000), random.u64(0..41_000));
            let piece = Piece { file: 0, inode: place, offset, at: 0, len: random.u64(1..100), ticket, position: 0 };
            let found = ranks.queue.earlier(&ranks.extents, &piece, ticket, &BTreeMap::new());
            let each = Way::new(log, from).take_while(|next| next.ticket < ticket).find(|next| next.overlaps(&piece));
            assert_eq!(found, each.map(|each| (0, each.ticket)));
        }
        assert!(ranks.queue.indices[&0].stretches.len() > 3);
        ranks.check();
    }
}
