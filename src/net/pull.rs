//! One node's part in passing on what only those get who ask. No sockets and no clock: the caller moves questions and pieces.
//!
//! A question goes up the tree until it meets a node that has the piece; every node on the way asks once, in its own name, however many
//! below it ask, and keeps what comes. Who asks decides the pace: a node has [`WINDOW`] questions on their way at most, its own and those
//! it passes on, so no more than that many pieces wait for any link. An answer that does not come is asked for again.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::single_flight::{Asked, SingleFlight};
use super::wire::record::{FileId, PIECE, Piece};

/// Questions of one node on their way, at most.
pub const WINDOW: usize = 8;
/// A question without an answer is asked again after this time: it, or the answer, may have been lost with a node.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// The pieces of a file of `size` bytes.
pub fn pieces(file: FileId, size: u64) -> impl Iterator<Item = Piece> {
    let count = u32::try_from(size.div_ceil(PIECE)).unwrap_or(u32::MAX);
    (0..count).map(move |index| Piece { file, index })
}

/// See the module. `W`: who waits.
#[derive(Debug)]
pub struct Pull<W> {
    wanted: HashMap<Piece, Vec<W>>,
    /// To be asked for: what somebody waits for before what he may wait for later. May name pieces that have come meanwhile.
    queues: [VecDeque<Piece>; 2],
    asked: SingleFlight<Piece, ()>,
}

impl<W> Default for Pull<W> {
    fn default() -> Self {
        Pull { wanted: HashMap::new(), queues: Default::default(), asked: SingleFlight::new(ASK_AGAIN) }
    }
}

impl<W: PartialEq> Pull<W> {
    /// `who` needs a piece that is not here; `ahead`: not yet. Asking twice is asking once.
    pub fn handle_ask(&mut self, who: W, piece: Piece, ahead: bool) {
        let waiting = self.wanted.entry(piece).or_default();
        let is_new = waiting.is_empty();
        if !waiting.contains(&who) {
            waiting.push(who);
        }
        // What was to come later may be waited for now.
        if is_new || !ahead {
            self.queues[usize::from(ahead)].push_back(piece);
        }
    }

    /// A piece is here: who waits for it.
    pub fn handle_here(&mut self, piece: Piece) -> Vec<W> {
        self.asked.answer(&piece);
        self.wanted.remove(&piece).unwrap_or_default()
    }

    /// Whether somebody waits for a piece of a file.
    pub fn is_wanted(&self, file: FileId) -> bool {
        self.wanted.keys().any(|piece| piece.file == file)
    }

    /// A file will not come any more.
    pub fn handle_void(&mut self, file: FileId) {
        self.asked.answer_if(|piece| piece.file == file);
        self.wanted.retain(|piece, _| piece.file != file);
    }

    /// The next question to be sent upward. To be called after every input and at [`Pull::poll_timeout`].
    pub fn poll_ask(&mut self, now: Instant) -> Option<Piece> {
        while let Some((piece, _)) = self.asked.poll_expired(now) {
            self.queues[0].push_front(piece);
        }
        while self.asked.open().count() < WINDOW {
            let piece = self.queues.iter_mut().find_map(VecDeque::pop_front)?;
            if self.wanted.contains_key(&piece) && self.asked.ask(piece, (), now) == Asked::Forward {
                return Some(piece);
            }
        }
        None
    }

    /// When to call [`Pull::poll_ask`] at the latest.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.asked.poll_timeout()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_cut_into_pieces() {
        let count = |size| pieces(1, size).count();
        assert_eq!([0, 1, PIECE, PIECE + 1].map(count), [0, 1, 1, 2]);
    }

    #[test]
    fn each_piece_is_asked_for_once_and_few_at_a_time() {
        let (mut pull, now) = (Pull::default(), Instant::now());
        for who in [1, 2, 1] {
            pieces(7, PIECE * 20).for_each(|piece| pull.handle_ask(who, piece, false));
        }
        let mut asked: VecDeque<Piece> = std::iter::from_fn(|| pull.poll_ask(now)).collect();
        assert_eq!(asked.len(), WINDOW);
        let mut come = 0;
        while let Some(piece) = asked.pop_front() {
            assert_eq!((piece.index, pull.handle_here(piece)), (come, vec![1, 2]));
            asked.extend(pull.poll_ask(now));
            come += 1;
        }
        assert_eq!((come, pull.poll_ask(now), pull.poll_timeout()), (20, None, None));
    }

    #[test]
    fn what_is_waited_for_goes_before_what_may_be() {
        let (mut pull, now) = (Pull::default(), Instant::now());
        pieces(1, PIECE * 3).for_each(|piece| pull.handle_ask(0, piece, true));
        pieces(2, PIECE).for_each(|piece| pull.handle_ask(0, piece, false));
        pull.handle_ask(0, Piece { file: 1, index: 2 }, false);
        let order: Vec<_> = std::iter::from_fn(|| pull.poll_ask(now)).map(|piece| (piece.file, piece.index)).collect();
        assert_eq!(order, [(2, 0), (1, 2), (1, 0), (1, 1)]);
    }

    #[test]
    fn what_does_not_come_is_asked_for_again_unless_it_is_void() {
        let (mut pull, now) = (Pull::default(), Instant::now());
        let [lost, void] = [1, 2].map(|file| Piece { file, index: 0 });
        [lost, void].into_iter().for_each(|piece| pull.handle_ask((), piece, false));
        assert_eq!([pull.poll_ask(now), pull.poll_ask(now)], [Some(lost), Some(void)]);
        pull.handle_void(2);
        assert_eq!(pull.poll_timeout(), Some(now + ASK_AGAIN));
        assert_eq!([pull.poll_ask(now + ASK_AGAIN), pull.poll_ask(now + ASK_AGAIN)], [Some(lost), None]);
    }
}
