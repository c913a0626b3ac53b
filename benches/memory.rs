//! What a program feels of memory that is with a server on this host, which shares it or sends it over TCP, beside the least that a pager takes over TCP (one
//! thread that answers faults with what comes over loopback) and beside memory of its own: `cargo bench --bench memory`. Needs cc; only prints.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

const HPCRT: &str = env!("CARGO_BIN_EXE_hpcrt");

fn main() {
    // Cargo passes --bench.
    let place = std::env::temp_dir().join(format!("hpcrt-memory-{}", std::process::id()));
    std::fs::create_dir_all(&place).expect("a directory for the program");
    let (program, key) = (place.join("memory"), place.join("config"));
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-pthread", "-o"]).arg(&program);
    let built = cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/memory.c")).status();
    if !built.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: needs a C compiler");
        return;
    }
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
        "all here | a quarter here | a tenth here | 4 % here, of 1 GiB; the same without sharing. Of updates the median of those that miss, and the mean of all"
    );
    for (name, what) in [("triad, MB/s", "triad"), ("an update, us", "updates"), ("sort, s", "sort")] {
        let all = run(&[program, what, "1024"]);
        let parts = ways.map(|way| ["256", "103", "41"].map(|local| away(way, local, &[what, "1024"])).join(" | "));
        println!("{name:14} {all:>14} | {}", parts.join("; "));
    }
    let _ = server.kill();
    let _ = server.wait();
    let _ = std::fs::remove_dir_all(&place);
}
