//! What the ranks write, made readable: whole lines, labelled or not, or gathered by equal content.
//!
//! Sans-IO: [`Output::handle_bytes`] in, [`Output::poll_output`] and [`Output::consume`] out, the time a parameter.
//! The caller stops reading from the ranks while [`Output::backlog`] is high.
//!
//! * [`Style::Plain`]: bytes as they are, but lines of different ranks never mix. An unfinished line is held back until
//!   it ends, the rank ends, it reaches [`LINE_MAX`], or (when `prompt` is set) for so long; then it is shown, and the
//!   rank's further bytes follow at once. If another rank writes first, a newline is put between them: the only byte
//!   ever added. A job of one rank passes through untouched and at once.
//! * [`Style::Labelled`]: `[rank] ` before each line. A line is shown when it ends, when the rank ends, or in pieces of
//!   about [`LINE_MAX`], each a line of its own.
//! * [`Style::Gathered`]: nothing until the end, then each different output once under the ranks and hosts that wrote
//!   it. When more than `memory` bytes would have to be kept, a notice, what there is so far, and from then on
//!   [`Style::Labelled`].

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memchr::{memchr_iter, memrchr};

use super::fold::{fold, fold_ranks};
use super::gather::Gather;
use super::placement::Placement;
use crate::net::wire::control::Stream;

/// Bytes of an unfinished line that are held back, at most.
pub const LINE_MAX: usize = 64 << 10;
/// How long an unfinished line is held back when standard output is a terminal: prompts appear.
pub const PROMPT_DELAY: Duration = Duration::from_millis(50);

/// How output is presented; see the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// `prompt`: show an unfinished line after this long ([`PROMPT_DELAY`] on a terminal, `None` else).
    Plain {
        prompt: Option<Duration>,
    },
    Labelled,
    /// `memory`: bytes to keep, at most.
    Gathered {
        memory: usize,
    },
}

/// Bytes waiting to be written.
#[derive(Debug, Default)]
struct Pending {
    bytes: Vec<u8>,
    written: usize,
}

impl Pending {
    fn consume(&mut self, count: usize) {
        self.written = (self.written + count).min(self.bytes.len());
        if self.written == self.bytes.len() {
            self.bytes.clear();
            self.written = 0;
        } else if self.written > 1 << 20 && self.written > self.bytes.len() / 2 {
            self.bytes.drain(..self.written);
            self.written = 0;
        }
    }
}

/// The unfinished line of a rank on a stream.
#[derive(Debug, Default)]
struct Unfinished {
    line: Vec<u8>,
    /// When its first byte came; `None` while the line is empty.
    since: Option<Instant>,
    /// Whether [`Output::waiting`] has an entry for it.
    waiting: bool,
}

/// The output of a job's ranks on its way to our standard output and error.
#[derive(Debug)]
pub struct Output {
    style: Style,
    placement: Arc<Placement>,
    /// Both streams end at the same terminal: an unfinished line on one is unfinished on the other.
    same_terminal: bool,
    pending: [Pending; 2],
    /// The rank whose unfinished line was shown last on a stream.
    open: [Option<u32>; 2],
    /// Streams of ranks: index `rank * 2 + stream`.
    unfinished: Vec<Unfinished>,
    /// Unfinished lines to show, about in the order of their time: (when, index).
    waiting: VecDeque<(Instant, usize)>,
    /// Only while [`Style::Gathered`].
    gathered: Option<[Gather; 2]>,
}

impl Output {
    /// `same_terminal`: our standard output and error are one terminal.
    pub fn new(style: Style, placement: Arc<Placement>, same_terminal: bool) -> Self {
        let ranks = placement.ranks();
        let gathered = matches!(style, Style::Gathered { .. }).then(|| [Gather::new(ranks), Gather::new(ranks)]);
        let mut unfinished = Vec::new();
        unfinished.resize_with(ranks as usize * 2, Unfinished::default);
        let (pending, open, waiting) = Default::default();
        Output { style, placement, same_terminal, pending, open, unfinished, waiting, gathered }
    }

    /// `rank` wrote `bytes`. A rank that the job does not have is ignored.
    pub fn handle_bytes(&mut self, rank: u32, stream: Stream, bytes: &[u8], now: Instant) {
        if bytes.is_empty() || rank >= self.placement.ranks() {
            return;
        }
        match self.style {
            Style::Plain { .. } => self.plain(rank, stream, bytes, now),
            Style::Labelled => self.labelled(rank, stream, bytes),
            Style::Gathered { memory } => self.gather(rank, stream, bytes, memory),
        }
    }

    /// `rank` will write no more: what it left unfinished is shown.
    pub fn handle_end(&mut self, rank: u32) {
        if rank < self.placement.ranks() {
            self.show_unfinished(rank, Stream::Out);
            self.show_unfinished(rank, Stream::Err);
        }
    }

    /// All ranks have ended or are lost: everything held back is shown.
    pub fn handle_finish(&mut self) {
        (0..self.placement.ranks()).for_each(|rank| self.handle_end(rank));
        self.show_gathered();
    }

    /// When [`Output::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.waiting.front().map(|(when, _)| *when)
    }

    /// Shows the unfinished lines whose time has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        let Style::Plain { prompt: Some(delay) } = self.style else { return };
        while self.waiting.front().is_some_and(|(when, _)| *when <= now)
            && let Some((_, index)) = self.waiting.pop_front()
        {
            self.unfinished[index].waiting = false;
            match self.unfinished[index].since {
                Some(since) if since + delay <= now => {
                    let stream = if index % 2 == 0 { Stream::Out } else { Stream::Err };
                    self.show_unfinished((index / 2) as u32, stream);
                }
                Some(since) => {
                    self.unfinished[index].waiting = true;
                    self.waiting.push_back((since + delay, index));
                }
                None => {}
            }
        }
    }

    /// Bytes to write to our `stream` next.
    pub fn poll_output(&self, stream: Stream) -> &[u8] {
        let pending = &self.pending[stream as usize];
        &pending.bytes[pending.written..]
    }

    /// The first `count` bytes of [`Output::poll_output`] have been written.
    pub fn consume(&mut self, stream: Stream, count: usize) {
        self.pending[stream as usize].consume(count);
    }

    /// Bytes waiting to be written, both streams together.
    pub fn backlog(&self) -> usize {
        self.pending.iter().map(|pending| pending.bytes.len() - pending.written).sum()
    }

    /// The line state that `stream` shares.
    fn screen(&self, stream: Stream) -> usize {
        if self.same_terminal { 0 } else { stream as usize }
    }

    /// Appends bytes of `rank` to what is written, keeping lines of ranks apart.
    fn show(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        let Some(&last) = bytes.last() else { return };
        let screen = self.screen(stream);
        let pending = &mut self.pending[stream as usize].bytes;
        if self.open[screen].is_some_and(|owner| owner != rank) {
            pending.push(b'\n');
        }
        pending.extend_from_slice(bytes);
        self.open[screen] = (last != b'\n').then_some(rank);
    }

    fn plain(&mut self, rank: u32, stream: Stream, bytes: &[u8], now: Instant) {
        let owner = self.open[self.screen(stream)] == Some(rank) || self.placement.ranks() == 1;
        let whole = if owner { bytes.len() } else { memrchr(b'\n', bytes).map_or(0, |at| at + 1) };
        let (lines, rest) = bytes.split_at(whole);
        let index = rank as usize * 2 + stream as usize;
        if !lines.is_empty() {
            self.show_unfinished(rank, stream);
            self.show(rank, stream, lines);
        }
        let unfinished = &mut self.unfinished[index];
        unfinished.line.extend_from_slice(rest);
        if unfinished.line.len() >= LINE_MAX {
            self.show_unfinished(rank, stream);
        } else if !rest.is_empty() && unfinished.since.is_none() {
            unfinished.since = Some(now);
            if let Style::Plain { prompt: Some(delay) } = self.style
                && !unfinished.waiting
            {
                unfinished.waiting = true;
                self.waiting.push_back((now + delay, index));
            }
        }
    }

    fn labelled(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        let unfinished = &mut self.unfinished[rank as usize * 2 + stream as usize].line;
        let pending = &mut self.pending[stream as usize].bytes;
        let mut label = [0; 16];
        let label = label_of(rank, &mut label);
        let mut start = 0;
        for newline in memchr_iter(b'\n', bytes) {
            pending.extend_from_slice(label);
            if start == 0 {
                pending.append(unfinished);
            }
            pending.extend_from_slice(&bytes[start..=newline]);
            start = newline + 1;
        }
        unfinished.extend_from_slice(&bytes[start..]);
        if unfinished.len() >= LINE_MAX {
            self.show_unfinished(rank, stream);
        }
    }

    /// Shows what `rank` has begun on `stream`, if anything.
    fn show_unfinished(&mut self, rank: u32, stream: Stream) {
        let unfinished = &mut self.unfinished[rank as usize * 2 + stream as usize];
        unfinished.since = None;
        if unfinished.line.is_empty() {
            return;
        }
        let mut line = std::mem::take(&mut unfinished.line);
        if let Style::Plain { .. } = self.style {
            self.show(rank, stream, &line);
        } else {
            let pending = &mut self.pending[stream as usize].bytes;
            pending.extend_from_slice(label_of(rank, &mut [0; 16]));
            pending.extend_from_slice(&line);
            pending.push(b'\n');
        }
        // The buffer goes back: no allocation for each line.
        line.clear();
        self.unfinished[rank as usize * 2 + stream as usize].line = line;
    }

    fn gather(&mut self, rank: u32, stream: Stream, bytes: &[u8], memory: usize) {
        let Some(gathered) = &mut self.gathered else { return };
        gathered[stream as usize].add(rank, bytes);
        if gathered.iter().map(Gather::stored).sum::<usize>() > memory {
            let notice = format!(
                "hpcrt: more than {memory} bytes of different output: --gather shows what there is and labels the rest\n"
            );
            self.pending[Stream::Err as usize].bytes.extend_from_slice(notice.as_bytes());
            self.show_gathered();
            self.style = Style::Labelled;
        }
    }

    fn show_gathered(&mut self) {
        for (gather, pending) in self.gathered.take().iter().flatten().zip(&mut self.pending) {
            for (ranks, text) in gather.groups() {
                let mut hosts: Vec<&str> = ranks.iter().map(|&rank| self.placement.host_name(rank)).collect();
                hosts.dedup();
                let rule = "-".repeat(16);
                let title = format!("{rule}\n{} ({})\n{rule}\n", fold_ranks(&ranks), fold(&hosts));
                pending.bytes.extend_from_slice(title.as_bytes());
                pending.bytes.extend_from_slice(text);
                if !text.ends_with(b"\n") {
                    pending.bytes.push(b'\n');
                }
            }
        }
    }
}

/// `[12] `, written into `buffer`.
fn label_of(rank: u32, buffer: &mut [u8; 16]) -> &[u8] {
    let mut rest = &mut buffer[..];
    write!(rest, "[{rank}] ").expect("10 digits and 3 characters fit");
    let unused = rest.len();
    &buffer[..16 - unused]
}

/// Name of the file for one rank's stream under `--output DIR`: `rank.007.out` in a job of 1,000 ranks.
pub fn file_name(rank: u32, ranks: u32, stream: Stream) -> String {
    let width = ranks.saturating_sub(1).checked_ilog10().unwrap_or(0) as usize + 1;
    let suffix = match stream {
        Stream::Out => "out",
        Stream::Err => "err",
    };
    format!("rank.{rank:0width$}.{suffix}")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::hostlist::Host;
    use super::Stream::{Err, Out};
    use super::*;

    const PROMPT: Style = Style::Plain { prompt: Some(PROMPT_DELAY) };
    const PLAIN: Style = Style::Plain { prompt: None };

    fn output(style: Style, ranks: u32, same_terminal: bool) -> Output {
        let hosts = (1..=ranks.div_ceil(2)).map(|i| Host::named(format!("n{i}"))).collect();
        Output::new(style, Arc::new(Placement::new(hosts, Some(ranks), None).unwrap()), same_terminal)
    }

    fn take(output: &mut Output, stream: Stream) -> String {
        let text = String::from_utf8_lossy(output.poll_output(stream)).into_owned();
        output.consume(stream, text.len());
        text
    }

    #[test]
    fn labels_stand_before_whole_lines() {
        let mut out = output(Style::Labelled, 16, false);
        let now = Instant::now();
        out.handle_bytes(12, Out, b"ab", now);
        out.handle_bytes(3, Out, b"x\n\ny", now);
        out.handle_bytes(12, Out, b"c\nd\n", now);
        out.handle_bytes(12, Err, b"oops", now);
        assert_eq!(take(&mut out, Out), "[3] x\n[3] \n[12] abc\n[12] d\n");
        assert_eq!((out.poll_timeout(), out.backlog()), (None, 0));
        out.handle_end(3);
        out.handle_finish();
        assert_eq!(take(&mut out, Out), "[3] y\n");
        assert_eq!(take(&mut out, Err), "[12] oops\n");
        out.handle_bytes(99, Out, b"nobody\n", now);
        assert_eq!(out.backlog(), 0);
    }

    #[test]
    fn long_lines_are_cut() {
        let now = Instant::now();
        for (style, expected) in [(Style::Labelled, LINE_MAX + 5), (PLAIN, LINE_MAX)] {
            let mut out = output(style, 2, false);
            out.handle_bytes(0, Out, &vec![b'x'; LINE_MAX - 1], now);
            assert_eq!(out.backlog(), 0);
            out.handle_bytes(0, Out, b"x", now);
            assert_eq!(out.backlog(), expected);
        }
    }

    #[test]
    fn plain_lines_do_not_mix() {
        let mut out = output(PLAIN, 2, false);
        let now = Instant::now();
        out.handle_bytes(0, Out, b"one ", now);
        out.handle_bytes(1, Out, b"other\n", now);
        out.handle_bytes(0, Out, b"line\nlast", now);
        assert_eq!(out.poll_timeout(), None);
        out.handle_end(0);
        out.handle_bytes(1, Out, b"end\n", now);
        assert_eq!(take(&mut out, Out), "other\none line\nlast\nend\n");
    }

    #[test]
    fn prompts_appear_in_time() {
        let mut out = output(PROMPT, 2, true);
        let start = Instant::now();
        out.handle_bytes(0, Out, b"name? ", start);
        assert_eq!(out.poll_timeout(), Some(start + PROMPT_DELAY));
        out.handle_timeout(start + PROMPT_DELAY / 2);
        assert_eq!(out.backlog(), 0);
        out.handle_timeout(start + PROMPT_DELAY);
        assert_eq!(take(&mut out, Out), "name? ");
        assert_eq!(out.poll_timeout(), None);
        // The owner of the line goes on at once, even on the other stream of the same terminal.
        out.handle_bytes(0, Out, b"ok", start);
        out.handle_bytes(0, Err, b"!", start);
        assert_eq!((take(&mut out, Out), take(&mut out, Err)), ("ok".to_owned(), "!".to_owned()));
        // Another rank gets a line of its own.
        out.handle_bytes(1, Err, b"hm\n", start);
        assert_eq!(take(&mut out, Err), "\nhm\n");
    }

    #[test]
    fn a_newer_line_waits_its_own_time() {
        let mut out = output(PROMPT, 2, false);
        let start = Instant::now();
        out.handle_bytes(0, Out, b"a", start);
        out.handle_bytes(0, Out, b"\nb", start + PROMPT_DELAY / 2);
        out.handle_timeout(start + PROMPT_DELAY);
        assert_eq!(take(&mut out, Out), "a\n");
        assert_eq!(out.poll_timeout(), Some(start + PROMPT_DELAY / 2 + PROMPT_DELAY));
        out.handle_timeout(start + PROMPT_DELAY * 2);
        assert_eq!(take(&mut out, Out), "b");
    }

    #[test]
    fn one_rank_passes_through() {
        let mut out = output(PLAIN, 1, false);
        out.handle_bytes(0, Out, b"\0\xffno newline", Instant::now());
        assert_eq!(out.poll_output(Out), b"\0\xffno newline");
    }

    #[test]
    fn equal_output_is_shown_once() {
        let mut out = output(Style::Gathered { memory: 100 }, 6, false);
        let now = Instant::now();
        for rank in 0..6 {
            out.handle_bytes(rank, Out, if rank == 3 { b"odd" } else { b"same\n" }, now);
        }
        assert_eq!(out.backlog(), 0);
        out.handle_finish();
        let rule = "-".repeat(16);
        let expected = format!("{rule}\n0-2,4-5 (n[1-3])\n{rule}\nsame\n{rule}\n3 (n2)\n{rule}\nodd\n");
        assert_eq!(take(&mut out, Out), expected);
    }

    #[test]
    fn too_much_to_gather_is_labelled() {
        let mut out = output(Style::Gathered { memory: 10 }, 2, false);
        let now = Instant::now();
        out.handle_bytes(0, Out, b"0123456789", now);
        out.handle_bytes(1, Out, b"x\n", now);
        assert!(take(&mut out, Err).contains("labels the rest"));
        assert!(take(&mut out, Out).ends_with("\nx\n"));
        out.handle_bytes(1, Out, b"y\n", now);
        out.handle_finish();
        assert_eq!(take(&mut out, Out), "[1] y\n");
    }

    #[test]
    fn file_names() {
        assert_eq!(file_name(7, 1000, Out), "rank.007.out");
        assert_eq!(file_name(7, 1001, Err), "rank.0007.err");
        assert_eq!(file_name(0, 1, Out), "rank.0.out");
    }

    proptest! {
        /// Whatever the chunks and their order, each rank's lines come out whole and in order.
        #[test]
        fn nothing_is_lost_or_mixed(
            chunks in prop::collection::vec((0u32..3, "[a-c\n]{0,6}", any::<bool>()), 0..80),
            labelled in any::<bool>(),
        ) {
            let mut out = output(if labelled { Style::Labelled } else { PLAIN }, 3, false);
            let mut written = vec![String::new(); 3];
            let mut shown = String::new();
            for (rank, text, flush) in &chunks {
                // A letter of its own makes the rank of a line visible without labels.
                let text = text.replace('a', &rank.to_string());
                written[*rank as usize] += &text;
                out.handle_bytes(*rank, Out, text.as_bytes(), Instant::now());
                if *flush {
                    let part = out.backlog() / 2;
                    shown.push_str(std::str::from_utf8(&out.poll_output(Out)[..part]).unwrap());
                    out.consume(Out, part);
                }
            }
            out.handle_finish();
            shown += &take(&mut out, Out);
            let mut expected: Vec<String> = Vec::new();
            for (rank, text) in written.iter().enumerate() {
                let line = |line: &str| if labelled { format!("[{rank}] {line}") } else { line.to_owned() };
                let lines: Vec<String> = text.lines().map(line).collect();
                if labelled {
                    let label = format!("[{rank}]");
                    let mine: Vec<&str> = shown.lines().filter(|line| line.starts_with(&label)).collect();
                    prop_assert_eq!(&mine, &lines);
                }
                expected.extend(lines);
            }
            let mut lines: Vec<&str> = shown.lines().collect();
            lines.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(lines, expected);
        }
    }
}
