//! How much slower a program is with a part of its memory here and the rest with a memory server: `cargo xtask slowdown -- PROGRAM`.

mod paper;
mod plot;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::binary;
use crate::run::{cargo, run};

/// Less is refused by hpcrt, in MB.
const LEAST: u64 = 16;

/// What was asked for.
struct Wish {
    ratios: Vec<f64>,
    rounds: usize,
    /// The program prints its seconds after this; else its whole run counts.
    after: Option<String>,
    memory: Option<String>,
    svg: Option<PathBuf>,
    paper: Option<&'static paper::Curve>,
    program: Vec<String>,
}

impl Wish {
    fn parse(words: &[String]) -> Result<Wish> {
        let Some(end) = words.iter().position(|word| word == "--") else { bail!("`-- PROGRAM` is missing") };
        let program = words[end + 1..].to_vec();
        ensure!(!program.is_empty(), "`-- PROGRAM` is missing");
        let (svg, after, memory, paper) = Default::default();
        let mut wish = Wish { ratios: vec![50.0, 25.0, 10.0, 4.0], rounds: 2, after, memory, svg, paper, program };
        let mut flags = words[..end].iter();
        while let Some(flag) = flags.next() {
            let value = flags.next().with_context(|| format!("{flag} needs a value"))?;
            match &**flag {
                "--ratios" => wish.ratios = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--rounds" => wish.rounds = value.parse()?,
                "--after" => wish.after = Some(value.clone()),
                "--memory" => wish.memory = Some(value.clone()),
                "--svg" => wish.svg = Some(value.into()),
                "--paper" => wish.paper = Some(paper::find(value)?),
                _ => bail!("there is no {flag}"),
            }
        }
        ensure!(wish.rounds > 0 && wish.ratios.iter().all(|ratio| (0.1..100.0).contains(ratio)), "nothing to measure");
        Ok(wish)
    }

    /// The program as a drawing shows it to others: without where it lies here.
    fn title(&self) -> String {
        let mut words = self.program.clone();
        words[0] = words[0].rsplit('/').next().unwrap_or_default().to_owned();
        words.join(" ")
    }

    /// Seconds of a run: the best of all rounds.
    fn time(&self, hpcrt: &[String]) -> Result<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..self.rounds {
            best = best.min(self.time_once(hpcrt)?);
        }
        Ok(best)
    }

    fn time_once(&self, hpcrt: &[String]) -> Result<f64> {
        let words = [hpcrt, &self.program].concat();
        let begun = Instant::now();
        let done = Command::new(&words[0]).args(&words[1..]).stderr(Stdio::inherit()).output()?;
        let took = begun.elapsed().as_secs_f64();
        ensure!(done.status.success(), "`{}` ended with {}", words.join(" "), done.status);
        let Some(after) = &self.after else { return Ok(took) };
        let text = String::from_utf8_lossy(&done.stdout);
        let (_, rest) = text.split_once(after.as_str()).with_context(|| format!("it does not print {after:?}"))?;
        let number = rest.trim_start_matches(|c: char| !c.is_ascii_digit());
        let end = number.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(number.len());
        Ok(number[..end].parse()?)
    }
}

/// A memory server on this host, unless others are named.
struct Server(Option<Child>, String);

impl Server {
    fn start(hpcrt: &Path, mb: u64) -> Result<Server> {
        let mut server = Command::new(hpcrt);
        server.args(["memserver", "--listen", "127.0.0.1:0", "--mb", &mb.to_string()]).process_group(0);
        let mut server = server.stdout(Stdio::piped()).spawn()?;
        let mut address = String::new();
        BufReader::new(server.stdout.take().context("piped")?).read_line(&mut address)?;
        Ok(Server(Some(server), address.trim().to_owned()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(server) = &mut self.0 {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// Measures, prints a table, and draws it.
pub(crate) fn slowdown(words: &[String]) -> Result<()> {
    let wish = Wish::parse(words)?;
    run(&mut cargo(&["build", "--release", "--package", "hpcrt"]))?;
    let hpcrt = binary::built();
    let alone = wish.time(&[])?;
    let megabytes = most_resident(&wish.program)?;
    let server = match &wish.memory {
        Some(list) => Server(None, list.clone()),
        None => Server::start(&hpcrt, 2 * megabytes)?,
    };
    let with = |local: u64| -> Result<f64> {
        let flags = ["exec", "-q", "--memory", &server.1, "--local-mb", &local.to_string(), "--"];
        let words: Vec<String> =
            [&*hpcrt.to_string_lossy()].iter().chain(&flags).map(|word| (*word).to_owned()).collect();
        wish.time(&words)
    };
    println!("{} has {megabytes} MB; alone it takes {alone:.2} s", wish.program.join(" "));
    println!("{:>8} {:>9} {:>9} {:>9}", "here, %", "MB", "seconds", "slowdown");
    let mut points = Vec::new();
    let all = (100.0, 2 * megabytes);
    let part = |ratio: &f64| (*ratio, ((megabytes as f64 * ratio / 100.0) as u64).max(LEAST));
    for (ratio, local) in [all].into_iter().chain(wish.ratios.iter().map(part)) {
        let took = with(local)?;
        let (shown, slower) = (local.min(megabytes), took / alone);
        println!("{ratio:>8} {shown:>9} {took:>9.2} {slower:>9.2}");
        points.push((100.0 * shown as f64 / megabytes as f64, slower));
    }
    if let Some(file) = &wish.svg {
        std::fs::write(file, plot::draw(&wish.title(), &points, wish.paper))?;
    }
    Ok(())
}

/// MB of memory of its own that a program has at most.
fn most_resident(program: &[String]) -> Result<u64> {
    let mut child = Command::new(&program[0]).args(&program[1..]).stdout(Stdio::null()).spawn()?;
    let (status, mut most) = (format!("/proc/{}/status", child.id()), 0);
    while child.try_wait()?.is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        most = most.max(kib.unwrap_or(0));
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    ensure!(most > 0, "the program ended before it could be looked at");
    Ok(most * 1024 / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_are_understood() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let wish = Wish::parse(&words("--ratios 30,5 --paper mg --after Time -- ./a b")).unwrap();
        assert_eq!(wish.title(), "a b");
        assert_eq!((wish.ratios, wish.program), (vec![30.0, 5.0], words("./a b")));
        assert_eq!(wish.paper.map(|curve| curve.points.len()), Some(3));
        for bad in ["--ratios 30", "--ratios 0 -- a", "--what 1 -- a", "--paper no -- a", "--ratios -- a"] {
            assert!(Wish::parse(&words(bad)).is_err(), "{bad}");
        }
        let seconds =
            Wish { after: Some("took".to_owned()), ..Wish::parse(&words("-- echo it took = 2.50 s")).unwrap() };
        assert!((seconds.time(&[]).unwrap() - 2.5).abs() < 1e-9);
    }
}
