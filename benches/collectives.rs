//! LIBI's micro-benchmark with 64, 256 and 1,024 members on this machine, beside bare processes over loopback TCP that do the same with the same
//! bytes: trees of the members themselves, a star, and processes in hpcrt's shape, where each host has one between its members and the root.
//! `cargo bench --bench collectives`. Needs cc; only prints, with each time of hpcrt's divided by the best tree's and by its own shape's.

use std::path::Path;
use std::process::{Command, Stdio};

fn main() {
    // Cargo passes --bench.
    let place = std::env::temp_dir().join(format!("hpcrt-collectives-{}", std::process::id()));
    std::fs::create_dir_all(&place).expect("a directory for the program");
    let program = place.join("collectives");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut cc = Command::new("cc");
    cc.arg("-O2").arg("-I").arg(root.join("sdk")).arg("-o").arg(&program);
    let built = cc.arg(root.join("benches/collectives.c")).arg(root.join("sdk/libi.c")).status();
    let Ok(built) = built else { return eprintln!("SKIPPED: needs a C compiler") };
    assert!(built.success(), "it is compiled");
    let program = program.to_str().expect("a path of ASCII");
    println!("microseconds, least of 60 rounds in the best of 3 runs: 128-byte broadcast + barrier | scatter + gather");
    for size in [64, 256, 1024u32] {
        let number = size.to_string();
        let bare = |fan_out: u32| best(&[program, "tree", &number, &fan_out.to_string()]);
        let print = |name: &str, times: [f64; 2], beside: &[[f64; 2]]| {
            let ratios =
                |nth: usize| beside.iter().map(|of| format!(" {:4.2}", times[nth] / of[nth])).collect::<String>();
            let [broadcast, scatter] = times;
            println!("{size:5}  {name:18} {broadcast:8.0}{:10} | {scatter:8.0}{:10}", ratios(0), ratios(1));
        };
        let mut tree = [f64::INFINITY; 2];
        for fan_out in [2, 8, 32] {
            let times = bare(fan_out);
            print(&format!("tree of {fan_out}"), times, &[]);
            tree = [tree[0].min(times[0]), tree[1].min(times[1])];
        }
        print("star", bare(size - 1), &[]);
        for agents in [1, 4, 16] {
            let (hosts, relays) = (format!("h[1-{agents}]"), best(&[program, "relays", &number, &agents.to_string()]));
            print(&format!("relays, hosts: {agents}"), relays, &[]);
            let hpcrt =
                [env!("CARGO_BIN_EXE_hpcrt"), "exec", "--agent", "local", "-q", "--hosts", &hosts, "-n", &number];
            let ours = best(&[&hpcrt[..], &["--", program, "member"]].concat());
            print(&format!("hpcrt, agents: {agents}"), ours, &[tree, relays]);
        }
    }
    let _ = std::fs::remove_dir_all(&place);
}

/// The two times that a command prints, the least of three runs.
fn best(command: &[&str]) -> [f64; 2] {
    let once = |least: [f64; 2], _| {
        let output = Command::new(command[0]).args(&command[1..]).stdin(Stdio::null()).output().expect("it starts");
        let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{command:?}: {text}{error}");
        let times: Vec<f64> = text.split_whitespace().map(|word| word.parse().expect("a number")).collect();
        [least[0].min(times[0]), least[1].min(times[1])]
    };
    (0..3).fold([f64::INFINITY; 2], once)
}
