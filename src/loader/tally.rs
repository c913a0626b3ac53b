//! What was done at the shared file system, by path and reason, in bounded memory.

use std::collections::HashMap;

/// Operations that reading takes: network file systems fetch 128 KiB with one request.
pub fn requests(bytes: u64) -> u64 {
    bytes.div_ceil(128 << 10)
}

/// Why a path was touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Why {
    /// A program needs it to start, or the user named it.
    Closure,
    /// Listed while libraries were searched for.
    Search,
    /// An earlier run of the program loaded it.
    Hint,
    /// A Python program will probably import it.
    Guess,
    /// Somebody on a node asked what it is.
    Attributes,
    /// Somebody on a node opened it.
    Content,
    /// A look for what others changed.
    Changes,
    /// Read again for a node that fell behind.
    Again,
    /// A rank's own access, past the store.
    Rank,
}

const REASONS: usize = Why::Rank as usize + 1;

impl Why {
    /// All reasons, in the order of their numbers.
    pub const ALL: [Why; REASONS] = [
        Why::Closure,
        Why::Search,
        Why::Hint,
        Why::Guess,
        Why::Attributes,
        Why::Content,
        Why::Changes,
        Why::Again,
        Why::Rank,
    ];

    /// The reason's name in JSON; docs/STATS.md says what it means.
    pub fn name(self) -> &'static str {
        match self {
            Why::Closure => "closure",
            Why::Search => "search",
            Why::Hint => "hint",
            Why::Guess => "guess",
            Why::Attributes => "attributes",
            Why::Content => "content",
            Why::Changes => "changes",
            Why::Again => "again",
            Why::Rank => "rank",
        }
    }
}

/// What a path cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// In all, and by the number of their reason.
    pub operations: u64,
    pub by: [u64; REASONS],
    /// Bytes of content.
    pub bytes: u64,
}

/// See the module. When there are more paths than it holds, those that cost least are forgotten: what it says of a path is then a lower
/// bound, wrong by what a forgotten path cost at most.
#[derive(Debug, Clone)]
pub struct Tally {
    paths: HashMap<Box<[u8]>, Cost>,
    /// Paths that survive forgetting; up to twice as many are held.
    keep: usize,
}

impl Tally {
    /// Holds `keep` paths or more, never more than twice as many.
    pub fn new(keep: usize) -> Tally {
        Tally { paths: HashMap::new(), keep: keep.max(1) }
    }

    /// Notes that `path` was touched.
    pub fn add(&mut self, path: &[u8], why: Why, operations: u64, bytes: u64) {
        let cost = match self.paths.get_mut(path) {
            Some(cost) => cost,
            None => {
                if self.paths.len() >= 2 * self.keep {
                    self.forget();
                }
                self.paths.entry(path.into()).or_default()
            }
        };
        cost.operations += operations;
        cost.by[why as usize] += operations;
        cost.bytes += bytes;
    }

    fn forget(&mut self) {
        let mut all: Vec<_> = self.paths.drain().collect();
        all.select_nth_unstable_by_key(self.keep, |(_, cost)| std::cmp::Reverse((cost.operations, cost.bytes)));
        all.truncate(self.keep);
        self.paths.extend(all);
    }

    /// The `count` paths that cost most operations, and among equals most bytes; the most expensive first.
    pub fn top(&self, count: usize) -> Vec<(&[u8], Cost)> {
        let mut all: Vec<(&[u8], Cost)> = self.paths.iter().map(|(path, cost)| (&**path, *cost)).collect();
        all.sort_unstable_by_key(|(path, cost)| (std::cmp::Reverse((cost.operations, cost.bytes)), *path));
        all.truncate(count);
        all
    }

    /// What was noted since `before` was copied from this.
    pub fn since(mut self, before: &Tally) -> Tally {
        for (path, old) in &before.paths {
            if let Some(cost) = self.paths.get_mut(path) {
                cost.operations = cost.operations.saturating_sub(old.operations);
                cost.bytes = cost.bytes.saturating_sub(old.bytes);
                cost.by.iter_mut().zip(old.by).for_each(|(new, old)| *new = new.saturating_sub(old));
            }
        }
        self.paths.retain(|_, cost| cost.operations > 0 || cost.bytes > 0);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_expensive_come_first() {
        let mut tally = Tally::new(100);
        tally.add(b"/a", Why::Closure, 1, 100);
        tally.add(b"/b", Why::Attributes, 1, 0);
        tally.add(b"/b", Why::Content, 4, 1 << 20);
        tally.add(b"/c", Why::Closure, 1, 200);
        let top: Vec<&[u8]> = tally.top(2).into_iter().map(|(path, _)| path).collect();
        assert_eq!(top, [b"/b", b"/c"]);
        let b = tally.top(1)[0].1;
        assert_eq!((b.operations, b.bytes), (5, 1 << 20));
        assert_eq!((b.by[Why::Attributes as usize], b.by[Why::Content as usize]), (1, 4));

        let before = tally.clone();
        tally.add(b"/c", Why::Changes, 1, 0);
        tally.add(b"/d", Why::Guess, 1, 7);
        let since = tally.since(&before);
        let top: Vec<_> = since.top(10).into_iter().map(|(path, cost)| (path, cost.operations, cost.bytes)).collect();
        assert_eq!(top, [(&b"/d"[..], 1, 7), (&b"/c"[..], 1, 0)]);
    }

    #[test]
    fn memory_is_bounded_and_the_expensive_are_kept() {
        let mut tally = Tally::new(64);
        for n in 0..10_000u32 {
            tally.add(format!("/cheap/{n}").as_bytes(), Why::Closure, 1, 0);
            tally.add(format!("/dear/{}", n % 10).as_bytes(), Why::Closure, 1, 0);
            assert!(tally.paths.len() <= 128);
        }
        let top = tally.top(10);
        assert!(top.iter().all(|(path, cost)| path.starts_with(b"/dear/") && cost.operations == 1000), "{top:?}");
    }
}
