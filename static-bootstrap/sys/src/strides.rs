//! Faults at a constant distance, as through the columns of a matrix: decided from their addresses alone, which need not be whole pages apart.

use core::ops::Range;

use super::page::{Bits, PAGE, SPAN_PAGES};

/// Streams that are followed, and faults of no stream that are remembered.
const STREAMS: usize = 16;
const LONE: usize = 8;
/// Faults in order, but for two, after which a stream is believed; and faults without one of it after which it has ended.
const CONFIDENT: u8 = 3;
const ENDED: u64 = 64;
/// Records that are fetched at once, at first and at most; and pages of them. There has to be room in a span for all, and for some of what lies between.
const FIRST: i64 = 2;
const MOST: i64 = 48;
const MOST_PAGES: i64 = 192;
/// Records among which those are looked for.
const REACH: i64 = 100;
/// Records that a stream may leave out before it is believed and then; and those that it may pass then, of which no more are not here.
const LEFT_OUT: [i64; 2] = [1, 8];
const PASSED: i64 = 256;
/// Bytes of a step: with less it is a run; and with less what lies between is not much more.
const LEAST: i64 = 2 * BYTES;
const DENSE: i64 = 8 * BYTES;
/// A record's faults are less than so many bytes from where it is expected, and less than an eighth of a step.
const NEAR: i64 = BYTES + 1;
/// Of a page.
const BYTES: i64 = (PAGE as u64).cast_signed();

#[derive(Debug, Clone, Copy)]
struct Stream {
    /// Address of the first record that was not fetched, and bytes from one to the next; 0: there is no such stream.
    next: i64,
    step: i64,
    /// Where the faults of a record were, from its address.
    below: i64,
    above: i64,
    /// Faults in order.
    hits: u8,
    /// Records that are to come together, and those before `next` that did.
    depth: i64,
    came: i64,
    used: u64,
}

const NO_STREAM: Stream = Stream { next: 0, step: 0, below: 0, above: 0, hits: 0, depth: 0, came: 0, used: 0 };

impl Stream {
    fn is_believed(&self) -> bool {
        self.hits >= CONFIDENT
    }

    /// Which record this fault is of, counted from `next`, and where in it.
    fn find(&self, at: i64, mut here: impl FnMut(u64) -> bool) -> Option<(i64, i64)> {
        let (ahead, size) = ((at - self.next) * self.step.signum(), self.step.abs());
        let nth = (ahead + size / 2).div_euclid(size);
        let offset = at - self.next - nth * self.step;
        if nth < -self.came.max(1) || offset.abs() >= near(self.step) {
            return None;
        }
        let is_left_out = |nth: &i64| !here(((self.next + nth * self.step) / BYTES).cast_unsigned());
        let most = LEFT_OUT[usize::from(self.is_believed())];
        let mut left_out = (0..nth).filter(is_left_out);
        let reached = nth <= most || self.is_believed() && nth <= PASSED && left_out.nth(most as usize).is_none();
        reached.then_some((nth, offset))
    }

    /// It goes on with this record: what is to be fetched.
    fn go_on(&mut self, nth: i64, offset: i64, here: impl FnMut(u64) -> bool) -> Option<Steps> {
        let known = (self.below..=self.above).contains(&offset);
        (self.below, self.above) = (self.below.min(offset), self.above.max(offset));
        if nth < 0 && known && self.came > 0 {
            // What comes, or was here, does not stay until it is used.
            (self.hits, self.depth) = (self.hits.saturating_sub(1), self.depth / 2);
            if self.depth < FIRST {
                (self.hits, self.depth) = (0, 0);
            }
        }
        let first = self.next + nth * self.step + self.below;
        let (step, len) = (self.step, self.above - self.below);
        let mut steps = Steps { first, step, len, of_runs: false, records: 0, wanted: 0 };
        if nth >= 0 {
            self.hits = self.hits.saturating_add(1);
            self.depth = if self.is_believed() { (2 * self.depth).clamp(FIRST, MOST) } else { 0 };
            (steps.records, steps.wanted) = steps.reach(self.depth, here);
            self.came = steps.records;
            self.next += (nth + self.came.max(1)) * self.step;
        } else {
            steps.records = steps.most(-nth);
            steps.wanted = (1 << steps.records) - 1;
        }
        self.is_believed().then_some(steps)
    }
}

/// Records that are wanted: addresses of the first, the bytes from one to the next, and the last byte of each. Of runs beside each other each is what is to come to one;
/// or there is one that is some pages of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    first: i64,
    step: i64,
    len: i64,
    of_runs: bool,
    records: i64,
    /// Of those, what was not here: a bit each.
    wanted: u128,
}

impl Steps {
    /// All of these pages, which are of one run.
    pub(super) fn of_run(pages: Range<u64>) -> Steps {
        let (first, end) = (pages.start.cast_signed() * BYTES, pages.end.cast_signed() * BYTES);
        Steps { first, step: 0, len: end - 1 - first, of_runs: true, records: 1, wanted: 1 }
    }

    /// How many records come.
    pub fn count(&self) -> u64 {
        self.wanted.count_ones().into()
    }

    /// What is to come to runs beside each other, so many bytes apart, where one is missed and there are so many before it: to that one up to `end`, and as far to as many of the others as may
    /// come at once, in order, if `wanted` says so of their pages.
    pub(super) fn of_runs(
        at: u64,
        apart: i64,
        before: i64,
        end: u64,
        mut wanted: impl FnMut(Range<u64>) -> bool,
    ) -> Steps {
        let (first, len) = (at.cast_signed() - before * apart, (end * PAGE as u64 - 1 - at).cast_signed());
        let mut steps = Steps { first, step: apart, len, of_runs: true, records: REACH, wanted: 1 << before };
        let most = steps.most(MOST).cast_unsigned();
        let page = |at: i64| at.div_euclid(BYTES).cast_unsigned();
        for nth in (0..REACH).filter(|nth| *nth != before) {
            let at = first + nth * apart;
            if at >= 0 && steps.count() < most && wanted(page(at)..page(at + len) + 1) {
                steps.wanted |= 1 << nth;
            }
        }
        steps
    }

    /// Bytes from one to the next, if they are as far apart as runs beside each other with such units.
    pub(super) fn apart(&self, order: u8) -> Option<i64> {
        Some(self.step).filter(|step| step.abs() >= BYTES << (order + 2))
    }

    /// Whether there is little between them.
    pub(super) fn are_dense(&self) -> bool {
        self.step.abs() < DENSE
    }

    /// Whether each is of a run.
    pub fn are_of_runs(&self) -> bool {
        self.of_runs
    }

    /// Records up to the last of so many that are not here, and which of them are not. The first is missed.
    fn reach(&self, depth: i64, mut here: impl FnMut(u64) -> bool) -> (i64, u128) {
        let mut lacks = |at: i64| !here((at / BYTES).cast_unsigned());
        let missing = (0..REACH).filter(|nth| {
            let at = self.first + nth * self.step;
            // The end of one may be missed where its beginning was used for columns before.
            *nth == 0 || lacks(at) || lacks(at + self.len)
        });
        let most = usize::try_from(self.most(depth)).unwrap_or(0);
        missing.take(most).fold((0, 0), |(_, wanted), nth| (nth + 1, wanted | 1 << nth))
    }

    /// So many records, or as many as may come at once.
    fn most(&self, records: i64) -> i64 {
        records.min((MOST_PAGES / (1 + (self.len + BYTES - 1) / BYTES)).max(1))
    }

    /// Their pages, by spans, in order.
    pub fn spans(self) -> impl Iterator<Item = (usize, Bits)> {
        let page = |at: i64| at.div_euclid(BYTES);
        let wanted = (0..self.records).filter(move |nth| !self.are_of_runs() || self.wanted >> nth & 1 == 1);
        let starts = wanted.map(move |nth| self.first + nth * self.step);
        let pages = starts.flat_map(move |start| page(start)..=page(start + self.len));
        let mut pages = pages.filter_map(|page| usize::try_from(page).ok()).peekable();
        core::iter::from_fn(move || {
            let (span, mut bits) = (pages.peek()? / SPAN_PAGES, [0; SPAN_PAGES / 64]);
            while let Some(page) = pages.next_if(|page| page / SPAN_PAGES == span) {
                bits[page % SPAN_PAGES / 64] |= 1 << (page % 64);
            }
            Some((span, bits))
        })
    }
}

/// See the module.
#[derive(Debug)]
pub struct Strides {
    streams: [Stream; STREAMS],
    /// The last one is before `oldest`.
    lone: [i64; LONE],
    oldest: usize,
    now: u64,
}

impl Strides {
    pub const NEW: Strides = Strides { streams: [NO_STREAM; STREAMS], lone: [0; LONE], oldest: 0, now: 0 };

    /// A fault at this address, in bytes, with which a stream may begin. `here`: whether a page need not be fetched. Returns what is to come with it.
    pub fn handle_fault(&mut self, at: u64, begins: bool, mut here: impl FnMut(u64) -> bool) -> Option<Steps> {
        self.now += 1;
        let at = at.cast_signed();
        let live = self.streams.iter_mut().filter(|stream| stream.step != 0 && self.now - stream.used < ENDED);
        let found = live.filter_map(|stream| stream.find(at, &mut here).map(|found| (stream, found)));
        // Others may have passed here before.
        if let Some((stream, (nth, offset))) = found.min_by_key(|(_, (_, offset))| offset.abs()) {
            stream.used = self.now;
            return stream.go_on(nth, offset, here);
        }
        if !begins {
            return None;
        }
        let begun = self.begin(at);
        self.lone[self.oldest] = at;
        self.oldest = (self.oldest + 1) % LONE;
        let mut stream = begun?;
        let steps = stream.go_on(0, 0, here);
        stream.used = self.now;
        let is_of_use = |other: &Stream| other.is_believed() && self.now - other.used < ENDED;
        if let Some(place) = self.streams.iter_mut().min_by_key(|other| (is_of_use(other), other.used)) {
            *place = stream;
        }
        steps
    }

    /// A stream with this fault as its next: it is as far from another as that is from a third, or as a stream's records are from each other.
    fn begin(&self, at: i64) -> Option<Stream> {
        let lone = |back: usize| self.lone[(self.oldest + LONE - back) % LONE];
        // The nearest first: streams beside each other may be any multiples of steps apart.
        (1..=LONE).filter(|back| lone(*back) != 0).find_map(|back| {
            let step = at - lone(back);
            if self.streams.iter().any(|stream| stream.is_believed() && stream.step == step) {
                return Some(Stream { next: at, hits: CONFIDENT - 2, step, ..NO_STREAM });
            }
            let is_as_far = |third: &i64| *third != 0 && (lone(back) - third - step).abs() <= near(step);
            let third = (back + 1..=LONE).map(lone).find(is_as_far).filter(|_| step.abs() >= LEAST)?;
            Some(Stream { next: at, step: (at - third) / 2, hits: 1, ..NO_STREAM })
        })
    }
}

fn near(step: i64) -> i64 {
    NEAR.min(step.abs() / 8)
}
