//! How much slower the programs of the DLM paper run when most of their memory is away: the NAS benchmarks in C, Himeno and STREAM, unmodified, each by the time that
//! it measures itself, beside what the paper has. `cargo bench --bench nas [-- PROGRAM ...]`, `is.A` and so on; only prints, but ends with an error where a program
//! finds its own results wrong. STREAM takes 5 GB of this host's memory, the server's among them.
//!
//! Of short runs the median of three. A virtual machine's host may move its processors to where they share no cache, for seconds at a time: then what one has written takes
//! the other six times as long to copy. So a word is sent from one to the other and back before and after each run, and runs with processors apart are a column of their own.
//!
//! Sources are downloaded once into the cache directory; `HPCRT_NAS=DIR` names one that has them instead.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

const HPCRT: &str = env!("CARGO_BIN_EXE_hpcrt");
/// What is downloaded, and its name in the directory.
const SOURCES: [(&str, &str); 4] = [
    (
        "https://github.com/benchmark-subsetting/NPB3.0-omp-C/archive/5d565d916cad47bf09a2fa7432bf8e5fa95446ec.tar.gz",
        "NPB3.0-omp-C",
    ),
    (
        "https://github.com/mbdevpl/nas-parallel-benchmarks/archive/6f8ec75d6951629d2eb7e3001433295d407230aa.tar.gz",
        "nas-parallel-benchmarks",
    ),
    (
        "https://raw.githubusercontent.com/jeffhammond/STREAM/6703f7504a38a8da96b353cadafa64d3c2d7a2d3/stream.c",
        "stream.c",
    ),
    (
        "https://raw.githubusercontent.com/nitadori/Himeno.cpp/9f41888b0945ea7e91977674b8d184be7aa80a44/himenoBMTxpa.c",
        "himenoBMTxpa.c",
    ),
];
/// `hpcrt exec` takes no less, in MB.
const LEAST: u64 = 16;
/// What takes no longer is run three times, and up to nine times until three were with processors that share a cache.
const SHORT: Duration = Duration::from_secs(120);
const TIMES: usize = 3;
const MOST: usize = 9;
/// Nanoseconds for a word to another processor and back above which they share none.
const APART: u128 = 150;

/// A program, and of the ratios that are tried what the paper has: how many times slower.
struct Case {
    name: &'static str,
    ratios: &'static [(u64, &'static str)],
}

const CASES: [Case; 10] = [
    Case { name: "is.A", ratios: &[(50, "1.0"), (25, "1.45"), (10, "1.45"), (4, "1.45")] },
    Case { name: "cg.A", ratios: &[(50, "1.1"), (25, "3-4"), (10, "3-4"), (4, "3-4")] },
    Case { name: "mg.A", ratios: &[(50, "below 3.6"), (25, "below 3.6"), (10, "3.6-3.8"), (4, "3.6-3.8")] },
    Case { name: "ft.A", ratios: &[(50, "below 1.9"), (25, "1.7-1.9"), (10, "54-71"), (4, "54-71")] },
    Case { name: "bt.A", ratios: &[(50, "31-47 (A: 220-518)"), (25, "31-47"), (10, "31-47"), (4, "31-47")] },
    Case { name: "is.B", ratios: &[(25, "1.45"), (10, "1.45")] },
    Case { name: "mg.B", ratios: &[(25, "below 3.6"), (10, "3.6-3.8")] },
    Case { name: "ft.B", ratios: &[(25, "1.7-1.9"), (10, "54-71")] },
    Case { name: "himeno", ratios: &[(50, "below 2-3"), (25, "below 2-3"), (10, "2-3"), (7, "2-3")] },
    // The triad of the paper's second table: of 2.4 and 24 GB at 4 %, of 96 and 144 GB at the others.
    Case { name: "stream", ratios: &[(50, "-"), (25, "5.8 at 27 %"), (10, "5.2 at 15 %"), (4, "4.5-5.7")] },
];

fn main() -> ExitCode {
    // Cargo passes --bench.
    let named: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let chosen = CASES.iter().filter(|case| named.is_empty() || named.iter().any(|name| name == case.name));
    let place = match prepare() {
        Ok(place) => place,
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            return ExitCode::SUCCESS;
        }
    };
    println!(
        "{:8} {:>5} {:>8} {:>8} {:>8} {:>20} {:>9} {:>9} {:>8} {:>8} {:>13}",
        "", "here", "MB", "seconds", "slower", "paper", "fetched", "foreseen", "p50, us", "GB in", "slower, apart"
    );
    let mut wrong = false;
    for case in chosen {
        let program = match build(&place, case.name) {
            Ok(program) => program,
            Err(why) => {
                eprintln!("SKIPPED: {}: {why}", case.name);
                continue;
            }
        };
        let native = || measure(Command::new(&program).args(arguments(case.name)), case.name);
        let alone = match repeat(native) {
            Ok((done, _)) => done,
            Err(why) => {
                eprintln!("FAILED: {}: {why}", case.name);
                wrong = true;
                continue;
            }
        };
        println!("{:8} {:>5} {:>8} {:>8.2}", case.name, "all", alone.footprint / 1_000_000, alone.seconds);
        for (ratio, paper) in case.ratios {
            let local = (alone.footprint * ratio / 100 / 1_000_000).max(LEAST);
            match repeat(|| away(&place, &program, case.name, local, &alone)) {
                Ok((done, apart)) => println!(
                    "{:8} {ratio:>4}% {local:>8} {:>8.2} {:>8.2} {paper:>20} {} {:>13}",
                    case.name,
                    done.seconds,
                    alone.rate / done.rate,
                    done.faults,
                    apart.map_or(String::new(), |apart| format!("{:.2}", alone.rate / apart.rate))
                ),
                Err(why) => {
                    eprintln!("FAILED: {} with {local} MB: {why}", case.name);
                    wrong = true;
                }
            }
        }
    }
    if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// A directory with all sources.
fn prepare() -> Result<PathBuf, String> {
    let place = match (std::env::var_os("HPCRT_NAS"), std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME")) {
        (Some(place), ..) => PathBuf::from(place),
        (None, Some(cache), _) => PathBuf::from(cache).join("hpcrt-nas"),
        (None, None, home) => PathBuf::from(home.unwrap_or_default()).join(".cache/hpcrt-nas"),
    };
    for (url, name) in SOURCES {
        let to = place.join(name);
        if to.exists() {
            continue;
        }
        fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
        let (fetched, is_tree) = (place.join("fetched"), url.ends_with(".gz"));
        let mut curl = Command::new("curl");
        curl.args(["-fsSL", "--max-time", "60", "-o"]).arg(&fetched).arg(url);
        let done = curl.status().is_ok_and(|status| status.success())
            && if is_tree {
                let mut tar = Command::new("tar");
                fs::create_dir_all(&to).is_ok()
                    && tar
                        .args(["-xz", "--strip-components=1", "-C"])
                        .arg(&to)
                        .arg("-f")
                        .arg(&fetched)
                        .status()
                        .is_ok_and(|status| status.success())
            } else {
                fs::rename(&fetched, &to).is_ok()
            };
        let _ = fs::remove_file(&fetched);
        if !done {
            let _ = fs::remove_dir(&to);
            return Err(format!("cannot fetch {url}; put it into a directory as {name} and name that with HPCRT_NAS"));
        }
    }
    Ok(place)
}

fn runs(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Compiles one as it is published.
fn build(place: &Path, name: &str) -> Result<PathBuf, String> {
    let bin = place.join("bin");
    fs::create_dir_all(&bin).map_err(|error| error.to_string())?;
    let to = bin.join(name);
    let file = |name: &str| place.join(name);
    match name {
        // 2.4 GB, as in the paper.
        "stream" => runs(
            Command::new("cc")
                .args(["-O2", "-mcmodel=medium", "-DSTREAM_ARRAY_SIZE=100000000", "-w", "-o"])
                .arg(&to)
                .arg(file("stream.c")),
        )?,
        "himeno" => {
            runs(Command::new("cc").args(["-O3", "-w", "-o"]).arg(&to).arg(file("himenoBMTxpa.c")).arg("-lm"))?;
        }
        _ => {
            let (program, class) = name.split_once('.').ok_or("no class")?;
            // The paper's integer sort is the serial one: its 174,000 swaps of class D are ten times through one array and what is counted there.
            // The one for threads copies the array first.
            let tree = place.join(if program == "is" { "nas-parallel-benchmarks/NPB3.0-SER" } else { "NPB3.0-omp-C" });
            let template = tree.join("config/make.def.template");
            fs::copy(&template, tree.join("config/make.def")).map_err(|error| error.to_string())?;
            let _ = fs::create_dir(tree.join("bin"));
            // Objects of another class would be taken for this one's.
            runs(Command::new("make").arg("clean").current_dir(&tree))?;
            let mut make = Command::new("make");
            make.args([program, &format!("CLASS={class}"), "CFLAGS=-O3 -mcmodel=medium -fcommon -w"]);
            make.args(["CLINKFLAGS=-mcmodel=medium", "C_LIB=-lm"]);
            runs(make.current_dir(&tree))?;
            fs::copy(tree.join("bin").join(name), &to).map_err(|error| error.to_string())?;
        }
    }
    Ok(to)
}

fn arguments(name: &str) -> &'static [&'static str] {
    if name == "himeno" { &["M"] } else { &[] }
}

/// The median of some runs, the slower one of two, and of those for which the processors were apart, if any were; of these alone if all were.
fn repeat(mut run: impl FnMut() -> Result<Done, String>) -> Result<(Done, Option<Done>), String> {
    let (mut near, mut apart) = (Vec::new(), Vec::new());
    let mut before = round_trip();
    while near.len() < TIMES && near.len() + apart.len() < MOST {
        let begun = Instant::now();
        let done = run()?;
        let is_long = begun.elapsed() > SHORT;
        let after = round_trip();
        if before.max(after) > APART { &mut apart } else { &mut near }.push(done);
        before = after;
        if is_long {
            break;
        }
    }
    let middle = |mut runs: Vec<Done>| {
        runs.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        let middle = runs.len().saturating_sub(1) / 2;
        runs.into_iter().nth(middle)
    };
    match (middle(near), middle(apart)) {
        (Some(near), apart) => Ok((near, apart)),
        (None, Some(apart)) => Ok((apart.clone(), Some(apart))),
        (None, None) => Err("it was not run".to_owned()),
    }
}

/// Nanoseconds that a word takes from the first processor that may be used to the second and back, the least of some rounds; 0 where there is one.
fn round_trip() -> u128 {
    const TURNS: usize = 20;
    const ROUNDS: u128 = 5_000;
    let own = sched_getaffinity(None).unwrap_or_default();
    let mut may = (0..CpuSet::MAX_CPU).filter(|&processor| own.is_set(processor));
    let (Some(first), Some(second)) = (may.next(), may.next()) else { return 0 };
    let (word, both, stayed) = (AtomicUsize::new(0), Barrier::new(2), AtomicBool::new(true));
    // The time of each turn; on one processor each round would take two turns of its scheduler.
    let rounds = |processor, from: usize| {
        let mut set = CpuSet::new();
        set.set(processor);
        stayed.fetch_and(sched_setaffinity(None, &set).is_ok(), Ordering::SeqCst);
        both.wait();
        let turns = if stayed.load(Ordering::SeqCst) { TURNS } else { 0 };
        let turn = |_| {
            let begun = Instant::now();
            for _ in 0..ROUNDS {
                while word.load(Ordering::Acquire) != from {
                    std::hint::spin_loop();
                }
                word.store(1 - from, Ordering::Release);
            }
            begun.elapsed().as_nanos() / ROUNDS
        };
        (0..turns).map(turn).min().unwrap_or(0)
    };
    std::thread::scope(|scope| {
        scope.spawn(|| rounds(second, 1));
        scope.spawn(|| rounds(first, 0)).join().unwrap_or(0)
    })
}

/// What one says of itself.
#[derive(Clone)]
struct Done {
    /// That its core took, or the inverse of its rate; in hundredths, of some.
    seconds: f64,
    rate: f64,
    /// The most memory that it had, used or not, in bytes.
    footprint: u64,
    /// What has to be the same each time, where it does not check itself.
    result: Option<String>,
    /// Of what was away.
    faults: String,
}

/// Runs one to its end.
fn measure(command: &mut Command, name: &str) -> Result<Done, String> {
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| format!("{command:?}: {error}"))?;
    let out = child.stdout.take().ok_or("no output")?;
    let lines = std::thread::spawn(move || BufReader::new(out).lines().map_while(Result::ok).collect::<Vec<_>>());
    let mut most = 0;
    let status = loop {
        let text = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        // Also arrays of which it uses a part: the paper's ratios are of all data.
        let sizes = text.lines().filter_map(|line| line.strip_prefix("VmHWM:").or(line.strip_prefix("VmData:")));
        let sizes = sizes.filter_map(|size| size.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        most = sizes.fold(most, u64::max);
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let lines = lines.join().map_err(|_| "its output cannot be read")?;
    let after = |what: &str| {
        let line = lines.iter().find_map(|line| line.split_once(what))?.1;
        line.split_whitespace().find_map(|word| word.parse::<f64>().ok())
    };
    let (rate, good) = match name {
        "stream" => (after("Triad:"), "Solution Validates"),
        "himeno" => (lines.iter().rev().find_map(|line| rate(line)), "Gosa"),
        _ => (after("Mop/s total     ="), "SUCCESSFUL"),
    };
    if !status.success() || !lines.iter().any(|line| line.to_lowercase().contains(&good.to_lowercase())) {
        return Err(format!("{status}; it does not say {good}:\n{}", lines.join("\n")));
    }
    let rate = rate.filter(|rate| *rate > 0.0).ok_or_else(|| format!("it says no rate:\n{}", lines.join("\n")))?;
    let seconds = after("Time in seconds =").unwrap_or(1e3 / rate);
    let result = lines.iter().find(|line| line.contains("gosa hex")).cloned();
    Ok(Done { seconds, rate, footprint: most * 1024, result, faults: String::new() })
}

/// What Himeno says of its speed.
fn rate(line: &str) -> Option<f64> {
    line.strip_prefix(" MFLOPS measured :")
        .or_else(|| line.strip_prefix("MFLOPS measured :"))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// A server on this host; ends with this.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The same with so many MB here and the rest with a server on this host.
fn away(place: &Path, program: &Path, name: &str, local: u64, alone: &Done) -> Result<Done, String> {
    let (key, stats) = (place.join("config"), place.join("stats.json"));
    let mut server = Command::new(HPCRT);
    let lent = (alone.footprint / 1_000_000 + 200).to_string();
    server.args(["memserver", "--listen", "127.0.0.1:0", "--mb", &lent]).env("XDG_CONFIG_HOME", &key);
    let mut server = Server(server.stdout(Stdio::piped()).spawn().map_err(|error| error.to_string())?);
    let mut address = String::new();
    let out = server.0.stdout.take().ok_or("no output")?;
    BufReader::new(out).read_line(&mut address).map_err(|error| error.to_string())?;
    let mut exec = Command::new(HPCRT);
    exec.args(["exec", "-q", "--memory", address.trim(), "--local-mb", &local.to_string(), "--stats"]).arg(&stats);
    exec.arg("--").arg(program).args(arguments(name)).env("XDG_CONFIG_HOME", &key);
    let done = measure(&mut exec, name)?;
    if done.result != alone.result {
        return Err(format!("{:?} in place of {:?}", done.result, alone.result));
    }
    let text = fs::read_to_string(&stats).map_err(|error| error.to_string())?;
    let all: serde_json::Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let number = |path: &str| all.pointer(path).and_then(serde_json::Value::as_f64).unwrap_or(0.0);
    let faults = format!(
        "{:>9} {:>9} {:>8.0} {:>8.1}",
        number("/memory/faults/fetched"),
        number("/memory/faults/foreseen"),
        number("/memory/fault_seconds/p50") * 1e6,
        number("/memory/bytes/received") / 1e9
    );
    Ok(Done { faults, ..done })
}
