//! Small writes: nanoseconds that one takes, plainly and with `--async-io`, on the test cluster's slow file system and on the file system of the
//! build, by turns.

use std::path::Path;
use std::process::Command;

use cluster::{Cluster, Spec};

const HPCRT: &str = env!("CARGO_BIN_EXE_hpcrt");

/// What the program says of a piece with closing the file, in ns.
fn piece(output: &str) -> f64 {
    let words: Vec<&str> = output.split_whitespace().collect();
    words.get(4).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("it says {output:?}"))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-files-{}", std::process::id()));
    let backing = place.join("backing");
    std::fs::create_dir_all(&backing).expect("a place");
    let program = place.join("files");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-pthread", "-o"]).arg(&program);
    let built = cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/files.c")).status();
    let obstacle = Cluster::obstacle().or((!built.is_ok_and(|s| s.success())).then_some("needs a C compiler"));
    if let Some(obstacle) = obstacle {
        eprintln!("SKIPPED: {obstacle}");
        let _ = std::fs::remove_dir_all(&place);
        return;
    }
    let name = format!("bench-files-{}", std::process::id());
    let spec = Spec { name, hosts: 1, backing: Some(backing), ..Spec::default() };
    let cluster = Cluster::up(spec).expect("a cluster");
    let program = program.to_str().expect("a path of ASCII");
    let run = |words: &[&str], host: bool| {
        let output = match host {
            true => cluster.exec("hpc1", 0, words).expect("it runs"),
            false => Command::new(words[0]).args(&words[1..]).output().expect("it starts"),
        };
        piece(&String::from_utf8_lossy(&output.stdout))
    };
    println!("a write with its part of close, ns, medians of 5: plain | --async-io | ratio");
    let fast = place.join("there");
    let fast = fast.to_str().expect("a path of ASCII");
    for (what, file, count) in [("slow", "/shared/there", "5000"), ("local", fast, "1000000")] {
        for size in ["8", "64"] {
            let program = [program, "pieces", file, count, size];
            let ours = [HPCRT, "exec", "-q", "--async-io", "--io-roots", file.trim_end_matches("/there"), "--"];
            let ours = [&ours[..], &program].concat();
            // With more pieces, what is done once does not count.
            let many = [&ours[..ours.len() - 2], &["1000000", size]].concat();
            let host = what == "slow";
            let (plain, kept): (Vec<f64>, Vec<f64>) = (0..5).map(|_| (run(&program, host), run(&many, host))).unzip();
            let (plain, kept) = (median(plain), median(kept));
            println!("{what:6} {size:>3} B  {plain:>10.0} | {kept:>8.1} | {:.0}", plain / kept);
        }
    }
    drop(cluster);
    let _ = std::fs::remove_dir_all(&place);
}
