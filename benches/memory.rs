//! What a program feels of memory that is with a server on this host, which shares it or sends it over TCP, beside the least that a pager takes over TCP (one
//! thread that answers faults with what comes over loopback) and beside memory of its own: `cargo bench --bench memory`. Needs cc; only prints.

use std::hint::black_box;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};

const HPCRT: &str = env!("CARGO_BIN_EXE_hpcrt");

fn main() {
    // Cargo passes --bench.
    // Hosts of the test cluster have a /tmp of their own.
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-memory-{}", std::process::id()));
    std::fs::create_dir_all(&place).expect("a directory for the program");
    let (program, key) = (place.join("memory"), place.join("config"));
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-pthread", "-o"]).arg(&program);
    let built = cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/memory.c")).status();
    let Ok(built) = built else { return eprintln!("SKIPPED: needs a C compiler") };
    assert!(built.success(), "it is compiled");
    let mut server = Command::new(HPCRT);
    server.args(["memserver", "--listen", "127.0.0.1:0", "--mb", "2500"]).env("XDG_CONFIG_HOME", &key);
    let mut server = server.stdout(Stdio::piped()).spawn().expect("the server starts");
    let mut address = String::new();
    BufReader::new(server.stdout.take().expect("piped")).read_line(&mut address).expect("it says where it is");
    let program = program.to_str().expect("a path of ASCII");
    let run = |command: &[&str]| {
        let output = Command::new(command[0]).args(&command[1..]).env("XDG_CONFIG_HOME", &key).output();
        let output = output.expect("it starts");
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    // As on this host, and over TCP as from another one.
    let ways = ["", "HPCRT_WITHOUT=shared"];
    let away = |way: &str, local: &str, what: &[&str]| {
        let hpcrt = [HPCRT, "exec", "-q", "--memory", address.trim(), "--local-mb", local, "--", program];
        let set = ["env", way];
        run(&[if way.is_empty() { &set[..1] } else { &set[..] }, &hpcrt, what].concat())
    };
    println!(
        "microseconds to read a block at a random place, median and 99th percentile: the least over TCP | hpcrt, a tenth here | without sharing"
    );
    for kib in ["4", "64", "1024"] {
        let ours = ways.map(|way| away(way, "40", &["blocks", "400", kib]));
        println!("{kib:>5} KiB  {:>18} | {:>18} | {:>18}", run(&[program, "bare", "400", kib]), ours[0], ours[1]);
    }
    println!(
        "all here | a quarter here | a tenth here | 4 % here, of 1 GiB (columns: of 256 MiB); the same without sharing. Of updates the median of those that miss, and the mean of all"
    );
    // What the ranks are counted in is as large as 4 % of the memory: there every key is a fault.
    for (name, what, all, parts) in [
        ("triad, MB/s", "triad", "1024", &["256", "103", "41"][..]),
        ("an update, us", "updates", "1024", &["256", "103", "41"]),
        ("columns, us", "columns", "256", &["64", "26"]),
        ("ranks, s", "ranks", "1024", &["256", "103"]),
    ] {
        let here = run(&[program, what, all]);
        let each = |way| parts.iter().map(|local| away(way, local, &[what, all])).collect::<Vec<_>>().join(" | ");
        println!("{name:14} {here:>14} | {}", ways.map(each).join("; "));
    }
    let _ = server.kill();
    let _ = server.wait();
    between_hosts(program);
    let _ = std::fs::remove_dir_all(&place);
}

/// The same blocks where the server is another host of the test cluster, as far as two networks of one machine are two hosts: every frame carries
/// its tag, which is made and checked, and which the least over TCP has not. By turns, the median of three medians.
fn between_hosts(program: &str) {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED: blocks between hosts: {obstacle}");
    }
    let cluster = Cluster::up(Spec { hosts: 2, ..Spec::of("bench-memory") }).expect("a cluster");
    let (address, agent) = ("10.77.0.2", cluster.agent_command());
    let first = |words: &[&str]| {
        let output = cluster.exec("hpc1", 0, words).expect("it starts");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        said.split_whitespace().next().and_then(|word| word.parse::<f64>().ok()).expect("a median")
    };
    let middle = |mut times: [f64; 3]| {
        times.sort_by(f64::total_cmp);
        times[1]
    };
    println!(
        "microseconds to read a block from another host: the least over TCP | two tags | hpcrt, a tenth here | its ratio to both"
    );
    for kib in ["4", "64", "256", "1024"] {
        let (mut bare, mut ours) = ([0.0; 3], [0.0; 3]);
        for turn in 0..3 {
            let mut giver = cluster.command("hpc2", 0, &[program, "give", "400", kib]).spawn().expect("it starts");
            std::thread::sleep(Duration::from_millis(300));
            bare[turn] = first(&[program, "bare", "400", kib, address]);
            let _ = giver.wait();
            let exec = [HPCRT, "exec", "-q", "--hosts", "hpc1", "--agent", &agent, "--memory", "hpc2:900M"];
            ours[turn] = first(&[&exec[..], &["--local-mb", "40", "--", program, "blocks", "400", kib]].concat());
        }
        let (bare, tags, ours) = (middle(bare), 2.0 * tag(kib.parse::<usize>().expect("a number") << 10), middle(ours));
        println!("{kib:>5} KiB  {bare:>8.1} | {tags:>6.1} | {ours:>8.1} | {:.2}", ours / (bare + tags));
    }
}

/// Microseconds for a tag of so many bytes, which lie in no cache.
fn tag(bytes: usize) -> f64 {
    let all = vec![1; 256 << 20];
    let (blocks, begin) = (all.chunks_exact(bytes), Instant::now());
    let count = blocks.len();
    blocks.for_each(|block| _ = black_box(blake3::keyed_hash(&[7; 32], block)));
    begin.elapsed().as_secs_f64() * 1e6 / count as f64
}
