//! The progress line: on standard error while a job starts and loads, gone when it is finished.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::placement::plural;
use super::stats::counted;

/// `--progress`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum When {
    /// When standard error is a terminal.
    #[default]
    Auto,
    /// Without a terminal a plain line every second.
    Always,
    Never,
}

/// How far a job has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Agents in the tree, of `hosts`.
    pub hosts_up: u32,
    pub hosts: u32,
    /// Files read so far.
    pub files: u64,
    /// Bytes read so far.
    pub bytes: u64,
}

impl Counters {
    /// `12 of 16 hosts up, 1,234 files, 5.00 MiB, 1.20 MiB/s`; `rate` in bytes per second.
    pub fn line(&self, rate: u64) -> String {
        let Counters { hosts_up, hosts, files, bytes } = *self;
        let hosts = plural(hosts.into(), "host");
        format!("{hosts_up} of {hosts} up, {}, {}, {}/s", counted(files, "file"), HumanBytes(bytes), HumanBytes(rate))
    }
}

/// Shortest time between two drawings on a terminal.
const REDRAW: Duration = Duration::from_millis(100);
/// Time between two plain lines, and the span over which the rate is taken.
const SECOND: Duration = Duration::from_secs(1);

/// Where the line goes.
#[derive(Debug)]
enum Place {
    Nowhere,
    Terminal(ProgressBar),
    Plain,
}

/// The progress line of one job. Dropping it removes the line.
///
/// All other output to the terminal goes through [`Progress::suspend`].
#[derive(Debug)]
pub struct Progress {
    place: Place,
    drawn: Option<Instant>,
    /// Since when and from how many bytes the rate is taken.
    measured: Option<(Instant, u64)>,
    rate: u64,
}

impl Progress {
    /// A line on standard error, as `when` says.
    pub fn new(when: When) -> Self {
        let terminal = std::io::stderr().is_terminal();
        match (when, terminal) {
            (When::Never, _) | (When::Auto, false) => Progress::at(Place::Nowhere),
            (When::Always, false) => Progress::at(Place::Plain),
            (_, true) => Progress::on(ProgressDrawTarget::stderr()),
        }
    }

    fn at(place: Place) -> Self {
        Progress { place, drawn: None, measured: None, rate: 0 }
    }

    fn on(target: ProgressDrawTarget) -> Self {
        let style = ProgressStyle::with_template("{wide_msg}").expect("a constant template");
        Progress::at(Place::Terminal(ProgressBar::with_draw_target(None, target).with_style(style)))
    }

    /// New counts; drawn when the last drawing is old enough.
    pub fn update(&mut self, counters: &Counters, now: Instant) {
        self.measure(counters.bytes, now);
        let pause = match self.place {
            Place::Nowhere => return,
            Place::Terminal(_) => REDRAW,
            Place::Plain => SECOND,
        };
        if self.drawn.is_some_and(|drawn| now.saturating_duration_since(drawn) < pause) {
            return;
        }
        self.drawn = Some(now);
        let line = counters.line(self.rate);
        match &self.place {
            Place::Nowhere => {}
            Place::Terminal(bar) => bar.set_message(line),
            // Nobody can be told that standard error is gone.
            Place::Plain => drop(writeln!(std::io::stderr(), "hpcrt: {line}")),
        }
    }

    /// The rate of the last full second, from the start on while there is none.
    fn measure(&mut self, bytes: u64, now: Instant) {
        let (since, before) = *self.measured.get_or_insert((now, bytes));
        let span = now.saturating_duration_since(since);
        if span >= SECOND {
            self.rate = (bytes.saturating_sub(before) as f64 / span.as_secs_f64()) as u64;
            self.measured = Some((now, bytes));
        }
    }

    /// Runs `write` with the line out of the way.
    pub fn suspend<R>(&self, write: impl FnOnce() -> R) -> R {
        match &self.place {
            Place::Terminal(bar) => bar.suspend(write),
            _ => write(),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Place::Terminal(bar) = &self.place {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::io;
    use std::sync::{Arc, Mutex};

    use indicatif::TermLike;

    use super::*;

    /// A terminal of one line: what is on it, and all that ever was.
    #[derive(Debug, Default, Clone)]
    struct Screen(Arc<Mutex<(String, Vec<String>)>>);

    impl Screen {
        fn line(&self) -> String {
            self.0.lock().unwrap().0.trim_end().to_owned()
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            let mut screen = self.0.lock().unwrap();
            screen.0.push_str(text);
            let line = screen.0.clone();
            screen.1.push(line);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.0.lock().unwrap().0.clear();
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_line_says_how_far_it_is() {
        let counters = Counters { hosts_up: 12, hosts: 16, files: 1234, bytes: 5 << 20 };
        assert_eq!(counters.line(1 << 20), "12 of 16 hosts up, 1,234 files, 5.00 MiB, 1.00 MiB/s");
        assert_eq!(
            Counters { hosts: 1, files: 1, ..Counters::default() }.line(0),
            "0 of 1 host up, 1 file, 0 B, 0 B/s"
        );
    }

    #[test]
    fn it_makes_way_and_goes() {
        let screen = Screen::default();
        let mut progress = Progress::on(ProgressDrawTarget::term_like(Box::new(screen.clone())));
        let start = Instant::now();
        let counters = Counters { hosts_up: 1, hosts: 2, ..Counters::default() };
        progress.update(&counters, start);
        assert!(screen.line().starts_with("1 of 2 hosts up"), "{:?}", screen.line());
        progress.suspend(|| assert_eq!(screen.line(), ""));
        assert!(screen.line().starts_with("1 of 2 hosts up"));
        progress.update(&Counters { hosts_up: 2, ..counters }, start + REDRAW / 2);
        assert!(screen.line().starts_with("1 of 2"), "not yet time to draw again");
        drop(progress);
        assert_eq!(screen.line(), "");
    }

    #[test]
    fn the_rate_is_that_of_the_last_second() {
        let mut progress = Progress::at(Place::Nowhere);
        let start = Instant::now();
        for (millis, bytes, rate) in
            [(0, 100, 0), (500, 900, 0), (1000, 2100, 2000), (1500, 9000, 2000), (3000, 6100, 2000)]
        {
            progress.update(&Counters { bytes, ..Counters::default() }, start + Duration::from_millis(millis));
            assert_eq!(progress.rate, rate, "after {millis} ms");
        }
    }
}
