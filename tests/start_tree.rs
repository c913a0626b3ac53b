//! What a tree gains where starting an agent keeps the starter busy: a fake login that takes 0.2 s, of which its starter can do one at a time.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use hpcrt::launch::start_tree::{StartCost, finish};

/// Shapes of the tree by what hpcrt is told of the cost (remote, sequential, in ms) and the fan-out.
const SHAPES: [(&str, [u64; 2], u32); 5] = [
    ("flat", [1_000_000, 1], 10_000),
    ("fan-out 2", [200, 0], 2),
    ("fan-out 8", [200, 0], 8),
    ("fan-out 32", [200, 0], 32),
    ("greedy", [200, 200], 10_000),
];

/// The fake login: who starts it (its parent, the shell that hpcrt runs having become it) is busy for 0.2 s.
fn fake(place: &Path) -> String {
    let (source, login) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/login.c"), place.join("login"));
    assert!(Command::new("gcc").arg("-O2").arg(source).arg("-o").arg(&login).status().unwrap().success());
    format!("exec {} {} {{host}}", login.display(), place.display())
}

/// A small copy of the program: the debug build's symbols would be hashed on every host.
fn small(place: &Path) -> String {
    let copy = place.join("hpcrt");
    let stripped = Command::new("strip").arg("-o").arg(&copy).arg(env!("CARGO_BIN_EXE_hpcrt")).status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(env!("CARGO_BIN_EXE_hpcrt"), &copy).unwrap();
    }
    copy.display().to_string()
}

/// Seconds until that many agents are in the tree.
fn start(hpcrt: &str, fake: &str, hosts: u32, [remote, sequential]: [u64; 2], fan_out: u32) -> f64 {
    let stats = Path::new(hpcrt).with_file_name("stats");
    let status = Command::new(hpcrt)
        .args([
            "exec",
            "-q",
            "-n",
            "1",
            "--hosts",
            &format!("n[1-{hosts}]"),
            "--agent",
            fake,
            "--fan-out",
            &fan_out.to_string(),
        ])
        .arg("--stats")
        .arg(&stats)
        .args(["--", "true"])
        .env("HPCRT_START_COST", format!("{remote},{sequential}"))
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    let stats: serde_json::Value = serde_json::from_slice(&fs::read(stats).unwrap()).unwrap();
    stats["seconds"]["start_agents"].as_f64().unwrap()
}

fn predicted(hosts: u32, [remote, sequential]: [u64; 2], cap: u32) -> f64 {
    let cost = StartCost { remote: Duration::from_millis(remote), sequential: Duration::from_millis(sequential), cap };
    finish(hosts, &cost).as_secs_f64()
}

#[test]
fn a_tree_beats_a_flat_start() {
    let place = tempfile::tempdir().unwrap();
    let (fake, hpcrt) = (fake(place.path()), small(place.path()));
    let [flat, greedy] = [&SHAPES[0], &SHAPES[4]].map(|(_, cost, fan_out)| start(&hpcrt, &fake, 12, *cost, *fan_out));
    assert!(flat >= 12.0 * 0.2, "one after the other: {flat}");
    // Four rounds of 0.2 s each, and whatever else this machine does.
    assert!(greedy >= predicted(12, [200, 200], 10_000) && greedy < flat, "{greedy}, flat {flat}");
}

#[test]
#[ignore = "three minutes of sleeping"]
fn up_to_two_hundred_and_fifty_six() {
    let place = tempfile::tempdir().unwrap();
    let (fake, hpcrt) = (fake(place.path()), small(place.path()));
    println!("| hosts | {} | greedy, predicted |", SHAPES.map(|(name, ..)| name).join(" | "));
    let rows = [4, 16, 64, 256].map(|hosts| {
        // In turn, the better of two: the hosts are one machine, which others use, too.
        let mut times = [f64::INFINITY; SHAPES.len()];
        for round in 0..2 {
            for (time, (_, cost, fan_out)) in times.iter_mut().zip(SHAPES) {
                if round == 0 || *time < 20.0 {
                    *time = time.min(start(&hpcrt, &fake, hosts, cost, fan_out));
                }
            }
        }
        let predicted = predicted(hosts, [200, 200], 10_000);
        println!("| {hosts} | {} | {predicted:.1} s |", times.map(|time| format!("{time:.1} s")).join(" | "));
        let [flat, rest @ ..] = times;
        assert!(hosts < 64 || rest.iter().all(|time| *time < flat), "every tree is faster than a flat start");
        (hosts, times, predicted)
    });
    if let Some(directory) = std::env::var_os("HPCRT_DRAWINGS") {
        fs::write(Path::new(&directory).join("starting.svg"), drawing(&rows)).unwrap();
    }
}

/// Time over hosts, both logarithmic.
fn drawing(rows: &[(u32, [f64; SHAPES.len()], f64)]) -> String {
    let x = |hosts: u32| 70.0 + 72.0 * (f64::from(hosts).log2() - 2.0);
    let y = |time: f64| 300.0 - 32.5 * (time / 0.25).log2();
    let mut text = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 660 360\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"660\" height=\"360\" fill=\"#fff\"/>\n",
    );
    let mut put = |line: String| text.push_str(&(line + "\n"));
    for time in [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0] {
        let y = y(time);
        put(format!(
            "<path d=\"M70 {y:.0}H502\" stroke=\"#ddd\"/><text x=\"62\" y=\"{:.0}\" text-anchor=\"end\">{time}</text>",
            y + 4.0
        ));
    }
    for (hosts, ..) in rows {
        put(format!("<text x=\"{:.0}\" y=\"322\" text-anchor=\"middle\">{hosts}</text>", x(*hosts)));
    }
    put("<text x=\"286\" y=\"345\" text-anchor=\"middle\">hosts</text>".to_owned());
    put("<text x=\"18\" y=\"170\" transform=\"rotate(-90 18 170)\" text-anchor=\"middle\">seconds until all agents are in the tree</text>".to_owned());
    let colours = ["#777", "#d95f02", "#7570b3", "#1b9e77", "#e7298a", "#e7298a"];
    let names = SHAPES.iter().map(|(name, ..)| *name).chain(["greedy, predicted"]);
    let mut ends = Vec::new();
    for (nth, (name, colour)) in names.zip(colours).enumerate() {
        let time = |row: &(u32, [f64; SHAPES.len()], f64)| row.1.get(nth).copied().unwrap_or(row.2);
        let points: Vec<String> = rows.iter().map(|row| format!("{:.0},{:.1}", x(row.0), y(time(row)))).collect();
        let dashed = if nth == SHAPES.len() { " stroke-dasharray=\"5 4\"" } else { "" };
        put(format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dashed}/>",
            points.join(" ")
        ));
        ends.extend(rows.last().map(|row| (y(time(row)), name, colour)));
    }
    // Names beside the ends of their lines, apart from each other.
    ends.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut last = 0.0;
    for (y, name, colour) in ends {
        last = f64::max(y + 4.0, last + 16.0);
        put(format!("<text x=\"510\" y=\"{last:.0}\" fill=\"{colour}\">{name}</text>"));
    }
    text + "</svg>\n"
}
