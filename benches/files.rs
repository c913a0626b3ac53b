//! Small writes: nanoseconds that one takes, plainly and with `--async-io`, on the test cluster's slow file system and on the file system of the
//! build, by turns. Large ones on the slow file system: what a program waits for them; and how long one takes that reads, computes and writes, beside
//! the longer of its I/O and its computation.

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
    // Not on a disk, which would be the slower one.
    let backing = Path::new("/dev/shm").join(format!("bench-files-{}", std::process::id()));
    for directory in [&place, &backing] {
        std::fs::create_dir_all(directory).expect("a place");
    }
    let program = place.join("files");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-pthread", "-o"]).arg(&program);
    let built = cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/files.c")).status();
    let obstacle = Cluster::obstacle().or(built.is_err().then_some("needs a C compiler"));
    if let Some(obstacle) = obstacle {
        eprintln!("SKIPPED: {obstacle}");
        [&place, &backing].map(std::fs::remove_dir_all).into_iter().for_each(drop);
        return;
    }
    assert!(built.is_ok_and(|status| status.success()), "it is compiled");
    let name = format!("bench-files-{}", std::process::id());
    let spec = Spec { name, hosts: 1, backing: Some(backing.clone()), ..Spec::default() };
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
    let say = |words: &[&str], ours: bool| {
        let hpcrt: &[&str] = if ours { &[HPCRT, "exec", "-q", "--async-io", "--"] } else { &[] };
        let output = cluster.exec("hpc1", 0, &[hpcrt, &[program], words].concat()).expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    println!("a large write, ms: plain | --async-io into fresh memory | again | ratio of the last");
    for mebibytes in ["16", "64", "256"] {
        // The first is to a log that holds another still, the second to one that holds nothing, as what checkpoints find.
        let times = |ours: bool| {
            let said = say(&["large", "/shared/large", "2", mebibytes], ours);
            let time = |line: &str| line.split_whitespace().nth(1).and_then(|word| word.parse::<f64>().ok());
            let times: Vec<f64> = said.lines().filter_map(time).collect();
            (times[0], times[1])
        };
        let (plain, kept): (Vec<_>, Vec<_>) = (0..3).map(|_| (times(false), times(true))).unzip();
        let [plain, fresh, again] = [
            plain.iter().map(|times| times.1).collect(),
            kept.iter().map(|times| times.0).collect(),
            kept.iter().map(|times| times.1).collect(),
        ]
        .map(median);
        println!("{mebibytes:>4} MiB {plain:>8.1} | {fresh:>8.1} | {again:>6.1} | {:.0}", plain / again);
    }
    println!(
        "128 MiB read, computed and written, s: I/O plainly | computation | plain | --async-io | ratio to the longer"
    );
    for (count, microseconds, size) in
        [(128, 8000, 1 << 20), (32, 32000, 4 << 20), (2048, 500, 64 << 10), (128, 2000, 1 << 20)]
    {
        let run = |computing: i32, ours: bool| {
            // The kernel has nothing of a file that was not there before.
            let file = backing.join("in");
            let _ = std::fs::remove_file(&file);
            std::fs::write(&file, vec![7; 128 << 20]).expect("a file");
            let words = [count, computing, size].map(|number: i32| number.to_string());
            let said = say(&[&["pipeline", "/shared/in"], &words.each_ref().map(String::as_str)[..]].concat(), ours);
            said.split_whitespace().next().and_then(|word| word.parse::<f64>().ok()).expect("a time")
        };
        let times = |computing, ours| median((0..3).map(|_| run(computing, ours)).collect());
        let (io, plain, kept) = (times(0, false), times(microseconds, false), times(microseconds, true));
        let computed = f64::from(count) * f64::from(microseconds) * 1e-6;
        let ratio = kept / io.max(computed);
        println!("{:>5} KiB {io:>6.2} | {computed:.2} | {plain:.2} | {kept:.2} | {ratio:.2}", size >> 10);
    }
    drop(cluster);
    [&place, &backing].map(std::fs::remove_dir_all).into_iter().for_each(drop);
}
