//! How fast borrowed memory is beside its limits: what a rate-limited link carries, and what the kernel's own swap does. Needs root; says so and passes otherwise.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};

use super::common::{Run, network};
use super::network::{backing, change};
use super::{Done, Servers, Who};

/// MB of the program, and of what it keeps; and what a sort keeps.
const ALL: u32 = 300;
const HERE: u32 = 30;
const SORT_HERE: u32 = 75;
const LONG: Duration = Duration::from_secs(200);

/// What `benches/memory.c` prints last: the median, where it is one of several.
fn number(done: &Done) -> f64 {
    done.text().split_whitespace().last().unwrap().parse().unwrap()
}

fn build(place: &Path) -> PathBuf {
    let (source, program) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/memory.c"), place.join("bench"));
    let mut gcc = Command::new("gcc");
    assert!(gcc.args(["-O2", "-pthread", "-o"]).arg(&program).arg(source).status().unwrap().success());
    program
}

/// MB/s of one TCP connection from the second host to the first.
fn link(cluster: &Cluster) -> f64 {
    const BYTES: usize = 200_000_000;
    let door = network::in_network(cluster, 0, || TcpListener::bind("10.77.0.1:0").unwrap());
    let at = door.local_addr().unwrap();
    let send = move || TcpStream::connect(at).unwrap().write_all(&vec![7; BYTES]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| network::in_network(cluster, 1, send));
        let (mut from, mut buffer, mut got) = (door.accept().unwrap().0, vec![0; 1 << 20], 0);
        let begun = Instant::now();
        while let Some(len) = from.read(&mut buffer).ok().filter(|len| *len > 0) {
            got += len;
        }
        got as f64 / 1e6 / begun.elapsed().as_secs_f64()
    })
}

#[test]
#[ignore = "a minute"]
fn a_link_is_used_to_nine_tenths() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED: {obstacle}");
    }
    let Some(place) = backing() else { return };
    build(place.path());
    let spec =
        Spec { hosts: 2, rate: Some("1gbit".into()), backing: Some(place.path().into()), ..Spec::of("t-memory-rate") };
    let cluster = Cluster::up(spec).unwrap();
    // One burst is not a rate.
    change(&cluster, 1, "tc qdisc replace dev eth0 root tbf rate 1gbit burst 64kb latency 20ms");
    let (agent, here, all) = (cluster.agent_command(), HERE.to_string(), ALL.to_string());
    let mut words = vec!["/shared/hpcrt", "exec", "-q", "--hosts", "hpc1", "--agent", &agent];
    words.extend(["--memory", "hpc2:900M", "--local-mb", &here]);
    let run = Run::new(cluster.command("hpc1", 20001, &words)).cwd("/").within(LONG);
    let bare = link(&cluster);
    let done = run.program(&["/shared/bench", "triad", &all]).end().code(0);
    let rate = number(&done);
    println!("link {bare:.0} MB/s, triad {rate:.0} MB/s: {:.2} of it", rate / bare);
    assert!(rate > 0.9 * bare);
}

/// A swap area, in use while it lives.
struct Swap(PathBuf);

impl Swap {
    fn on(at: PathBuf) -> Option<Swap> {
        let run = |tool: &str| Command::new(tool).arg(&at).output().is_ok_and(|done| done.status.success());
        let done = run("mkswap") && run("swapon");
        done.then_some(Swap(at))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.0).status();
        if let Some(number) = self.0.to_str().and_then(|path| path.strip_prefix("/dev/zram")) {
            let _ = fs::write("/sys/class/zram-control/hot_remove", number);
        }
    }
}

/// Compressed memory.
fn zram() -> Option<Swap> {
    let number = fs::read_to_string("/sys/class/zram-control/hot_add").ok()?;
    let name = format!("zram{}", number.trim());
    fs::write(format!("/sys/block/{name}/disksize"), "1G").ok()?;
    Swap::on(Path::new("/dev").join(name))
}

/// A file of the disk.
fn file(place: &Path) -> Option<Swap> {
    let at = place.join("swap");
    let made =
        Command::new("dd").args(["if=/dev/zero", "bs=1M", "count=600"]).arg(format!("of={}", at.display())).output();
    made.ok().filter(|done| done.status.success())?;
    fs::set_permissions(&at, std::os::unix::fs::PermissionsExt::from_mode(0o600)).ok()?;
    Swap::on(at)
}

#[test]
#[ignore = "five minutes, and the machine swaps"]
fn the_kernels_swap_is_slower() {
    let group = Path::new("/sys/fs/cgroup/memory").join(format!("hpcrt-rates-{}", std::process::id()));
    if !rustix::process::geteuid().is_root() || fs::create_dir(&group).is_err() {
        return eprintln!("SKIPPED: needs root and a memory cgroup of version 1");
    }
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = build(place.path());
    let all = ALL.to_string();
    // What is measured, with how many MB here, over TCP or not, whether less is better, and how many times slower swap is at least.
    let cases = [
        ("triad", HERE, "shared", false, 3.0),
        ("ranks", SORT_HERE, "", true, 2.0),
        // No pager is as fast as the kernel is with single pages.
        ("updates", HERE, "", true, 0.0),
    ];
    let areas: [(&str, &dyn Fn() -> Option<Swap>); 2] = [("zram", &zram), ("a swap file", &|| file(place.path()))];
    for (mode, here, without, is_time, least) in cases {
        let servers = Servers::start(Who { uid: None, without }, &[900]);
        let words = [program.as_os_str(), mode.as_ref(), all.as_ref()];
        let ours = number(&servers.run_program(&words, here).within(LONG).end().code(0));
        println!("{mode}: with a server of this host {ours}");
        fs::write(group.join("memory.limit_in_bytes"), (u64::from(here) * 1_000_000 + (12 << 20)).to_string()).unwrap();
        for (name, area) in &areas {
            let Some(area) = area() else {
                eprintln!("SKIPPED: {name} cannot be used here");
                continue;
            };
            let run = || {
                let mut command = Command::new("sh");
                command.arg("-c").arg("echo $$ > \"$0/cgroup.procs\"; exec \"$@\"").arg(&group).arg(&program);
                Run::new(command).arg(mode).arg(&all).within(LONG).end()
            };
            // A group that swaps to a disk may be out of memory while that is written.
            let mut done = run();
            for _ in 0..3 {
                if done.status.signal() == Some(9) {
                    println!("{mode}: with {name} the kernel ran out of memory");
                    done = run();
                }
            }
            drop(area);
            let theirs = number(&done.code(0));
            let slower = if is_time { theirs / ours } else { ours / theirs };
            println!("{mode}: {name} {theirs}, {slower:.1} times slower");
            assert!(slower > least, "{mode}, {name}");
        }
    }
    fs::remove_dir(&group).unwrap();
}
