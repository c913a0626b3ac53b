//! `--report`: when each host did what, drawn as one SVG, alone or in an HTML page. Nothing in it refers to another file.
//!
//! Up to [`NAMED`] hosts have a line each. With more, all are drawn as thin lines in the order in which they were ready, and only the
//! slowest, the median and the fastest have a line with their name.

use std::fmt::Write;

use serde_json::Value;

use super::timeline::{Line, Moment, Phase, Spread, spreads};

/// Hosts with a line of their own each.
const NAMED: usize = 40;
/// With more hosts than that: the slowest that have one.
const SLOWEST: usize = 20;
/// Thin lines, at most; of more hosts as many are taken evenly, the slowest among them.
const THIN: usize = 400;

/// Widths and heights in pixels.
const LEFT: f64 = 190.0;
const WIDTH: f64 = 860.0;
const RIGHT: f64 = 70.0;
const ROW: f64 = 18.0;
const BAR: f64 = 12.0;

/// What is drawn.
#[derive(Debug)]
pub struct Report<'a> {
    /// Program, ranks, hosts.
    pub title: &'a str,
    /// Further lines of text.
    pub summary: &'a str,
    /// What the front end did: what, from when, until when.
    pub front_end: &'a [(&'a str, Moment, Moment)],
    pub lines: &'a [Line],
    /// `paths` and `originals` of the statistics.
    pub paths: &'a Value,
    pub originals: &'a Value,
}

/// Colours that people see apart who confuse some (after Okabe and Ito).
fn colour(phase: Phase) -> &'static str {
    match phase {
        Phase::Connect => "#56b4e9",
        Phase::Prepare => "#0072b2",
        Phase::Wait => "#c8c8c8",
        Phase::Mount => "#f0e442",
        Phase::Load => "#e69f00",
        Phase::Start => "#d55e00",
        Phase::Run => "#009e73",
        Phase::Cleanup => "#cc79a7",
    }
}

fn meaning(phase: Phase) -> &'static str {
    match phase {
        Phase::Connect => "agent connects",
        Phase::Prepare => "makes namespaces and store",
        Phase::Wait => "waits for other hosts and the front end",
        Phase::Mount => "mounts the view",
        Phase::Load => "waits for files",
        Phase::Start => "binds files, starts ranks",
        Phase::Run => "ranks run",
        Phase::Cleanup => "cleans up",
    }
}

/// Text as XML takes it; control characters, which it does not, become question marks.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c if c.is_control() => safe.push('?'),
            c => safe.push(c),
        }
    }
    safe
}

/// The end of `text` where it is too long: of paths that says most.
fn ending(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        text.to_owned()
    } else {
        format!("...{}", text.chars().skip(count - most + 3).collect::<String>())
    }
}

/// Time along the page.
#[derive(Clone, Copy)]
struct Axis {
    from: Moment,
    to: Moment,
}

impl Axis {
    /// The start of the job and, where that is not many times as long, its run.
    fn of(report: &Report<'_>) -> Axis {
        let lines = report.lines;
        let begins = report.front_end.iter().map(|(_, from, _)| *from).min();
        let from = begins.or(lines.iter().map(|line| line.begun).min()).unwrap_or(0);
        let ends = lines.iter().flat_map(|line| line.ends.last()).map(|(_, at)| *at);
        let end = ends.chain(report.front_end.iter().map(|(_, _, to)| *to)).max().unwrap_or(from);
        let ready = lines.iter().map(Line::ready).max().unwrap_or(end);
        let started = (ready - from).max(1000);
        let to = if end - from <= 3 * started { end } else { from + started + started / 4 };
        Axis { from, to: to.max(from + 1) }
    }

    fn x(self, at: Moment) -> f64 {
        let share = (at - self.from) as f64 / (self.to - self.from) as f64;
        LEFT + WIDTH * share.clamp(0.0, 1.0)
    }

    /// A round number of seconds between two marks, of which there are about ten.
    fn step(self) -> f64 {
        let whole = (self.to - self.from) as f64 / 1e6;
        let unit = 10f64.powf((whole / 10.0).log10().floor());
        [1.0, 2.0, 5.0, 10.0].map(|n| n * unit).into_iter().find(|step| whole / step <= 10.0).unwrap_or(unit * 10.0)
    }
}

fn seconds(time: i64) -> String {
    format!("{:.3} s", time as f64 / 1e6)
}

/// The picture while it grows downward.
struct Page {
    body: String,
    y: f64,
    axis: Axis,
}

impl Page {
    fn text(&mut self, x: f64, class: &str, text: &str) {
        let y = self.y;
        writeln!(self.body, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>", escaped(text))
            .expect("a String takes all");
    }

    fn rect(&mut self, (x, width): (f64, f64), (y, height): (f64, f64), fill: &str, title: &str) {
        writeln!(
            self.body,
            "<rect x=\"{x:.2}\" y=\"{y:.1}\" width=\"{width:.2}\" height=\"{height:.1}\" fill=\"{fill}\"><title>{}</title></rect>",
            escaped(title)
        )
        .expect("a String takes all");
    }

    /// A bar from `from` to `to`, at least a hair wide; nothing where it lies outside of the axis.
    fn bar(&mut self, from: Moment, to: Moment, fill: &str, title: &str) {
        if from < self.axis.to && to >= self.axis.from {
            let (x, end) = (self.axis.x(from), self.axis.x(to));
            self.rect((x, (end - x).max(0.3)), (self.y - BAR + 2.0, BAR), fill, title);
        }
    }

    /// Marks of the time, from here down over `height`.
    fn grid(&mut self, height: f64) {
        let (step, top) = (self.axis.step(), self.y);
        let digits = usize::try_from((-step.log10()).ceil() as i64).unwrap_or(0);
        let mut at = 0.0;
        while at <= (self.axis.to - self.axis.from) as f64 / 1e6 * 1.0001 {
            let x = self.axis.x(self.axis.from + (at * 1e6) as i64);
            writeln!(
                self.body,
                "<line x1=\"{x:.1}\" y1=\"{top:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" class=\"grid\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" class=\"tick\">{at:.digits$} s</text>",
                top + height,
                top - 4.0
            )
            .expect("a String takes all");
            at += step;
        }
    }

    fn host(&mut self, line: &Line) {
        self.text(LEFT - 8.0, "host", &ending(&line.host, 26));
        for (phase, from, to) in line.spans() {
            let what = format!("{}: {} {}", line.host, meaning(phase), seconds(to - from));
            self.bar(from, to, colour(phase), &what);
        }
        let y = self.y;
        for (at, what, mark) in [(line.fed, "first bytes of files", "fed"), (line.output, "first output", "output")] {
            if let Some(at) = at.filter(|at| (self.axis.from..=self.axis.to).contains(at)) {
                let (x, title) =
                    (self.axis.x(at), format!("{}: {what} at {}", line.host, seconds(at - self.axis.from)));
                let (top, low) = (y - BAR + 2.0, y + 2.0);
                writeln!(
                    self.body,
                    "<line x1=\"{x:.1}\" y1=\"{top:.1}\" x2=\"{x:.1}\" y2=\"{low:.1}\" class=\"{mark}\"><title>{}</title></line>",
                    escaped(&title)
                )
                .expect("a String takes all");
            }
        }
        self.text(LEFT + WIDTH + 6.0, "small", &seconds(line.ready() - self.axis.from));
        self.y += ROW;
    }

    /// All hosts as thin lines, `height` each.
    fn crowd(&mut self, lines: &[&Line], height: f64) {
        for phase in Phase::ALL {
            let mut path = String::new();
            for (at, line) in lines.iter().enumerate() {
                let y = self.y + at as f64 * height;
                for (_, from, to) in
                    line.spans().filter(|(p, from, to)| *p == phase && *from < self.axis.to && *to >= self.axis.from)
                {
                    let (x, width) = (self.axis.x(from), (self.axis.x(to) - self.axis.x(from)).max(0.3));
                    write!(path, "M{x:.1} {y:.1}h{width:.1}v{height:.2}h-{width:.1}z").expect("a String takes all");
                }
            }
            if !path.is_empty() {
                writeln!(self.body, "<path d=\"{path}\" fill=\"{}\"/>", colour(phase)).expect("a String takes all");
            }
        }
        self.y += lines.len() as f64 * height;
    }

    fn table(&mut self, spreads: &[Spread]) {
        let columns = [10.0, 250.0, 350.0, 450.0, 550.0, 650.0];
        for (x, word) in
            columns.into_iter().zip(["what hosts do", "least", "median", "9 in 10 within", "most", "slowest host"])
        {
            self.text(x, "head", word);
        }
        self.y += ROW;
        for spread in spreads {
            self.rect((10.0, 12.0), (self.y - 10.0, 12.0), colour(spread.phase), spread.phase.name());
            let times = [spread.least, spread.median, spread.p90, spread.most].map(|time| format!("{time:.3} s"));
            self.text(26.0, "small", meaning(spread.phase));
            for (x, time) in columns[1..].iter().zip(times) {
                self.text(*x, "small", &time);
            }
            self.text(columns[5], "small", &ending(&spread.slowest, 60));
            self.y += ROW - 2.0;
        }
        self.text(10.0, "small", "before its line a host's agent is being started; thin black line: first bytes of files; thick one: first output of a rank");
        self.y += ROW;
    }

    fn paths(&mut self, title: &str, paths: &Value) {
        let paths = paths.as_array().map_or(&[][..], Vec::as_slice);
        if paths.is_empty() {
            return;
        }
        let columns = [10.0, 110.0, 200.0, 860.0];
        for (x, word) in columns.into_iter().zip(["operations", "MiB", title, "why"]) {
            self.text(x, "head", word);
        }
        self.y += ROW;
        for path in paths {
            let number = |field: &str| path[field].as_u64().unwrap_or(0);
            let by: Vec<&str> = path["by"].as_object().into_iter().flatten().map(|(why, _)| why.as_str()).collect();
            self.text(columns[0], "small", &number("operations").to_string());
            self.text(columns[1], "small", &format!("{:.1}", number("bytes") as f64 / f64::from(1 << 20)));
            self.text(columns[2], "small", &ending(path["path"].as_str().unwrap_or_default(), 100));
            self.text(columns[3], "small", &by.join(", "));
            self.y += ROW - 2.0;
        }
        self.y += ROW;
    }
}

const STYLE: &str = "text{font-family:sans-serif;font-size:12px;fill:#222}.title{font-size:17px;font-weight:bold}\
.small,.tick{font-size:11px}.head{font-size:11px;font-weight:bold}.host{font-size:11px;text-anchor:end}\
.light{font-size:11px;fill:#fff}.tick{text-anchor:middle;fill:#666}.grid{stroke:#ddd;stroke-width:1}.fed{stroke:#000;stroke-width:.7}\
.output{stroke:#000;stroke-width:2}";

/// The report as one SVG image.
pub fn svg(report: &Report<'_>) -> String {
    let axis = Axis::of(report);
    let mut page = Page { body: String::new(), y: 26.0, axis };
    page.text(10.0, "title", &ending(report.title, 110));
    page.y += 6.0;
    for line in report.summary.lines() {
        page.y += ROW - 2.0;
        page.text(10.0, "small", line);
    }
    let error = report.lines.iter().map(|line| line.error).max().unwrap_or(0);
    page.y += ROW - 2.0;
    let error = format!(
        "Hosts have clocks of their own: between lines, times may be wrong by {:.1} ms; within a line they are right.",
        error as f64 / 1e3
    );
    page.text(10.0, "small", &error);
    page.y += ROW + 6.0;
    page.table(&spreads(report.lines));

    let mut sorted: Vec<&Line> = report.lines.iter().collect();
    sorted.sort_by_key(|line| line.ready());
    let mut named = sorted.clone();
    let mut crowd = Vec::new();
    if sorted.len() > NAMED {
        let last = sorted.len() - 1;
        named = sorted[sorted.len() - SLOWEST..].iter().rev().copied().collect();
        named.extend([sorted[last / 2], sorted[0]]);
        let shown = sorted.len().min(THIN);
        crowd = (0..shown).map(|at| sorted[last - (shown - 1 - at) * last / (shown - 1)]).collect();
    }
    page.y += 14.0;
    let thin = (400.0 / crowd.len().max(1) as f64).clamp(1.0, 6.0);
    let crowd_height = if crowd.is_empty() { 0.0 } else { crowd.len() as f64 * thin + 2.0 * ROW };
    page.grid(ROW * (named.len() + 1) as f64 + crowd_height + 6.0);
    page.y -= 4.0;
    page.text(LEFT + WIDTH + 6.0, "head", "ready at");
    page.y += ROW + 2.0;
    page.text(LEFT - 8.0, "host", "front end");
    for (at, (what, from, to)) in report.front_end.iter().enumerate() {
        let fill = if at % 2 == 0 { "#555555" } else { "#888888" };
        page.bar(*from, *to, fill, &format!("front end: {what} {}", seconds(to - from)));
        let (x, end) = (axis.x(*from), axis.x(*to));
        if end - x > what.len() as f64 * 6.5 + 6.0 {
            page.text(x + 3.0, "light", what);
        }
    }
    page.y += ROW;
    if !crowd.is_empty() {
        let of = if crowd.len() < sorted.len() { format!("{} of ", crowd.len()) } else { String::new() };
        page.text(LEFT - 8.0, "host", &format!("{of}{} hosts,", sorted.len()));
        page.y += ROW - 4.0;
        page.text(LEFT - 8.0, "host", "those ready first on top");
        page.y -= ROW - 4.0 + BAR - 2.0;
        page.crowd(&crowd, thin);
        page.y += 1.5 * ROW;
        page.text(LEFT - 8.0, "host", "slowest, median, fastest:");
        page.y += ROW / 2.0 + 6.0;
    }
    named.into_iter().for_each(|line| page.host(line));
    page.y += ROW;
    page.paths("read from the shared file system", report.paths);
    page.paths("what ranks took from it themselves", report.originals);
    let (width, height) = (LEFT + WIDTH + RIGHT, page.y);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\">\n\
         <style>{STYLE}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{}</svg>\n",
        page.body
    )
}

/// The report as an HTML page.
pub fn html(report: &Report<'_>) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{}</title></head>\n<body>\n{}</body></html>\n",
        escaped(report.title),
        svg(report)
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn line(n: usize) -> Line {
        let at = |ms: usize| i64::try_from(ms * 1000).unwrap();
        let load = 400 + 900 * (n % 7) / 7 + if n == 3 { 2500 } else { 0 };
        Line {
            host: format!("n{n:03}"),
            begun: at(120 + n % 50),
            ends: vec![
                (Phase::Connect, at(180 + n % 50)),
                (Phase::Prepare, at(210 + n % 50)),
                (Phase::Wait, at(300)),
                (Phase::Mount, at(320)),
                (Phase::Load, at(320 + load)),
                (Phase::Start, at(340 + load)),
                (Phase::Run, at(4000)),
                (Phase::Cleanup, at(4010 + n % 9)),
            ],
            fed: Some(at(250)),
            output: Some(at(400 + load)),
            error: 900,
        }
    }

    fn drawn(hosts: usize) -> String {
        let lines: Vec<Line> = (1..=hosts).map(line).collect();
        let title = format!("./app <&> on {hosts} hosts");
        let paths = json!([{ "path": "/shared/lib/libbig.so", "operations": 813, "bytes": 106_000_000, "by": { "closure": 813 } }]);
        let front_end = [("start agents", 0, 260_000), ("resolve", 260_000, 300_000), ("load", 300_000, 3_700_000)];
        svg(&Report {
            title: &title,
            summary: "one\ntwo",
            front_end: &front_end,
            lines: &lines,
            paths: &paths,
            originals: &json!([]),
        })
    }

    #[test]
    fn it_is_one_small_well_formed_file() {
        for hosts in [0, 1, 8, 40, 41, 500, 10_000] {
            let text = drawn(hosts);
            if let Some(directory) = std::env::var_os("HPCRT_DRAWINGS") {
                std::fs::write(std::path::Path::new(&directory).join(format!("{hosts}.svg")), &text).unwrap();
            }
            assert!(text.contains("./app &lt;&amp;&gt;"), "{hosts}");
            assert!(text.len() < 400 << 10, "{hosts}: {} bytes", text.len());
            // Every element that is opened is closed: counted, since the order is that of one function for each.
            let opened = ["svg", "style", "text", "title", "rect", "line", "path"]
                .map(|tag| text.matches(&format!("<{tag} ")).count() + text.matches(&format!("<{tag}>")).count());
            assert_eq!(
                opened.iter().sum::<usize>(),
                text.matches("</").count() + text.matches("/>").count(),
                "{hosts}"
            );
            assert!(!text.contains("NaN") && !text.contains("inf"), "{hosts}");
            // The slowest host is named, however many there are.
            assert!(hosts < 3 || text.contains(">n003</text>"), "{hosts}");
        }
    }

    #[test]
    fn a_long_run_does_not_squeeze_the_start() {
        let mut lines = vec![line(1)];
        lines[0].ends[6].1 = 3_600_000_000;
        lines[0].ends[7].1 = 3_600_100_000;
        let report = Report {
            title: "",
            summary: "",
            front_end: &[("load", 0, 1)],
            lines: &lines,
            paths: &json!([]),
            originals: &json!([]),
        };
        let axis = Axis::of(&report);
        assert!(axis.to < 2_000_000 && axis.to > lines[0].ready());
        assert!(svg(&report).contains("ranks run"));
    }
}
