//! Times of the launch logic (best of five) and of whole local launches (medians, each beside its rivals in turn):
//! `cargo bench --bench launch`, on whatever machine this is. Only prints: a busy machine fails nobody.
#![allow(unsafe_code, reason = "the bare loop forks")]

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hpcrt::launch::fold::fold;
use hpcrt::launch::hostlist::{Host, expand};
use hpcrt::launch::output::{Output, Style};
use hpcrt::launch::placement::Placement;
use hpcrt::net::wire::control::Stream;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::wait::wait;
use nix::unistd::{ForkResult, execv, fork};

fn best<T>(mut work: impl FnMut() -> T) -> (Duration, T) {
    let once = |work: &mut dyn FnMut() -> T| {
        let start = Instant::now();
        let value = work();
        (start.elapsed(), value)
    };
    let first = once(&mut work);
    (0..4).fold(first, |best, _| {
        let next = once(&mut work);
        if next.0 < best.0 { next } else { best }
    })
}

/// What this program is told to be the bare loop; then the number of processes.
const LOOP: &str = "--bare-loop";

/// The least that starting processes costs: fork and exec, from a small process, without pipes, labels or anybody who cleans up.
fn bare_loop(count: u32) {
    for _ in 0..count {
        // SAFETY: this process has one thread, and the child only executes another program.
        if let Ok(ForkResult::Child) = unsafe { fork() } {
            let _ = execv(c"/bin/true", &[c"true"]);
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { nix::libc::_exit(1) }
        }
    }
    while wait().is_ok() {}
}

/// Wall time and processor time of a command with everything that it starts and waits for, in milliseconds.
fn run(command: &[&str]) -> (f64, f64) {
    let used = || {
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN).expect("it cannot fail");
        let (user, system) = (usage.user_time(), usage.system_time());
        (user.tv_sec() + system.tv_sec()) as f64 * 1e3 + (user.tv_usec() + system.tv_usec()) as f64 / 1e3
    };
    let (start, before) = (Instant::now(), used());
    let status =
        Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).status().expect("the command starts");
    assert!(status.success(), "{command:?}: {status}");
    (start.elapsed().as_secs_f64() * 1e3, used() - before)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Local launches of `/bin/true`, in turn with a bare fork and exec loop, without the bootstrapper, and with MPICH's launcher, where that
/// is installed.
fn launches(count: u32, repetitions: u32) {
    let this = std::env::current_exe().expect("it is running");
    let (this, ranks) = (this.to_string_lossy(), count.to_string());
    let hpcrt = ["env", "HPCRT_WITHOUT=", env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q", "-n", &ranks, "--", "/bin/true"];
    let mut direct = hpcrt.to_vec();
    direct[1] = "HPCRT_WITHOUT=memfd";
    let mut rivals = vec![hpcrt.to_vec(), vec![&this, LOOP, &ranks], direct];
    if Command::new("mpiexec.hydra").arg("--version").stdout(Stdio::null()).status().is_ok_and(|s| s.success()) {
        rivals.push(vec!["mpiexec.hydra", "-n", &ranks, "/bin/true"]);
    } else {
        eprintln!("SKIPPED: hydra (Debian package mpich)");
    }
    let mut times = vec![(Vec::new(), Vec::new()); rivals.len()];
    for _ in 0..repetitions {
        for (rival, (wall, cpu)) in rivals.iter().zip(&mut times) {
            let (took, used) = run(rival);
            wall.push(took);
            cpu.push(used);
        }
    }
    let medians: Vec<(f64, f64)> = times.into_iter().map(|(wall, cpu)| (median(wall), median(cpu))).collect();
    for (name, (wall, cpu)) in
        ["hpcrt", "bare fork and exec", "hpcrt without its bootstrapper", "hydra"].iter().zip(&medians)
    {
        println!("{count} x /bin/true, {name}: {wall:.1} ms, {cpu:.1} ms of processor time");
    }
    let (wall, cpu) = medians[0];
    println!("{count} x /bin/true, processor time of hpcrt / bare fork and exec: {:.2}", cpu / medians[1].1);
    // Of a single one nothing can be told: it drowns in what the rest varies.
    if count > 1 {
        let second = (cpu - medians[2].1) * 1e3 / f64::from(count);
        println!("{count} x /bin/true, processor time of the bootstrapper: {second:.0} us each");
    }
    if let Some(hydra) = medians.get(3) {
        println!("{count} x /bin/true, time of hpcrt / hydra: {:.2}", wall / hydra.0);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, count] = &arguments[..]
        && flag == LOOP
    {
        return bare_loop(count.parse().expect("a number"));
    }
    launches(1, 21);
    launches(64, 21);
    launches(1024, 5);
    for list in ["n[1-1000000]", "r[1-1000]c[001-999]", "n[1-1024]"] {
        let (time, names) = best(|| expand(list).expect("a valid list"));
        println!("expand {list}: {:.2} ms", time.as_secs_f64() * 1e3);
        let (time, folded) = best(|| fold(&names));
        assert_eq!(folded, list);
        println!("fold   {list}: {:.2} ms", time.as_secs_f64() * 1e3);
    }

    // 1,024 ranks, 64 chunks of 16 lines of 64 bytes each.
    const RANKS: u32 = 1024;
    let placement = Arc::new(Placement::new(vec![Host::named("n1")], Some(RANKS), None).expect("one host takes all"));
    let chunk_of = |rank: u32| format!("{rank:063}\n").repeat(16).into_bytes();
    let (same, different) = (vec![chunk_of(0); RANKS as usize], (0..RANKS).map(chunk_of).collect::<Vec<_>>());
    let styles = [
        ("plain", Style::Plain { prompt: None }, &same),
        ("labelled", Style::Labelled, &same),
        ("gathered, all equal", Style::Gathered { memory: 64 << 20 }, &same),
        ("gathered, all different", Style::Gathered { memory: 64 << 20 }, &different),
    ];
    for (name, style, chunks) in styles {
        let (time, ()) = best(|| {
            let mut output = Output::new(style, placement.clone(), false);
            let now = Instant::now();
            for rank in (0..64).flat_map(|_| 0..RANKS) {
                output.handle_bytes(rank, Stream::Out, &chunks[rank as usize], now);
                let written = output.poll_output(Stream::Out).len();
                output.consume(Stream::Out, written);
            }
            output.handle_finish();
        });
        let lines = f64::from(RANKS * 64 * 16);
        println!(
            "output {name}: {:.0} ns/line, {:.2} GB/s",
            time.as_nanos() as f64 / lines,
            lines * 64.0 / time.as_nanos() as f64
        );
    }
}
