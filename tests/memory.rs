//! Programs with more memory than they may keep: unmodified, their results right, within their budget, and ended with a word when a server is
//! lost. As root and as an ordinary user, told of the kernel's own faults and not.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "memory/alone.rs"]
mod alone;
mod common;
#[path = "memory/edges.rs"]
mod edges;
#[path = "memory/lending.rs"]
mod lending;
#[path = "memory/network.rs"]
mod network;
#[path = "memory/programs.rs"]
mod programs;
#[path = "memory/rates.rs"]
mod rates;
#[path = "memory/statics.rs"]
mod statics;

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use common::{Done, Run, until};
use hpcrt::sys::without::Without;
use socket2::{Domain, Socket, Type};

const NOBODY: u32 = 65534;
/// What may be resident beside the budget: the program itself, its stacks and libraries, in kB.
const BESIDE: u64 = 6 << 10;

/// A place that every user can reach, with hpcrt and the program.
fn place() -> Option<&'static Path> {
    static PLACE: OnceLock<Option<PathBuf>> = OnceLock::new();
    PLACE.get_or_init(|| common::built("memory.c", &[("memory", &[]), ("numbers", &["-static"])])).as_deref()
}

/// Where other hosts would reach this one.
fn address() -> String {
    let listener = hpcrt::net::listen::listen(false, &Without::default()).unwrap();
    let found = listener.as_ref().map(hpcrt::net::listen::addresses).unwrap_or_default();
    let Some(address) = found.first() else {
        eprintln!("SKIPPED: this host has no address but its own; frames carry no tags");
        return "127.0.0.1".to_owned();
    };
    address.rsplit_once(':').unwrap().0.to_owned()
}

/// Whose memory, and how the kernel may be used.
#[derive(Clone, Copy, Debug)]
struct Who {
    uid: Option<u32>,
    without: &'static str,
}

/// All that this machine allows.
fn everybody() -> Vec<Who> {
    let root = rustix::process::geteuid().is_root();
    let mut all = ["uffd-kernel,shared", "", "uffd-move"].map(|without| Who { uid: None, without }).to_vec();
    all.extend(root.then_some(Who { uid: Some(NOBODY), without: "" }));
    all
}

impl Who {
    fn command(self, config: &Path) -> Command {
        let mut command = Command::new(place().unwrap().join("hpcrt"));
        command.env("XDG_CONFIG_HOME", config).env("HPCRT_WITHOUT", self.without).current_dir("/");
        if let Some(uid) = self.uid {
            command.uid(uid).gid(uid);
        }
        command
    }
}

/// A server, and where it is.
fn lend(who: Who, config: &Path, mb: u32, listen: &str, runtime: Option<&Path>) -> (Child, String) {
    let mut command = who.command(config);
    command.args(["memserver", "--listen", listen, "--mb", &mb.to_string()]);
    command.envs(runtime.map(|directory| ("XDG_RUNTIME_DIR", directory)));
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().to_owned())
}

/// Running servers with a key of their own; killed when they go.
struct Servers {
    who: Who,
    config: tempfile::TempDir,
    all: Vec<(Child, String)>,
}

impl Servers {
    fn start(who: Who, megabytes: &[u32]) -> Servers {
        Servers::start_at(who, megabytes, "127.0.0.1")
    }

    fn start_at(who: Who, megabytes: &[u32], ip: &str) -> Servers {
        Servers::start_in(who, megabytes, ip, None)
    }

    /// `runtime`: where `hpcrt status` finds them.
    fn start_in(who: Who, megabytes: &[u32], ip: &str, runtime: Option<&Path>) -> Servers {
        let config = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(config.path(), who.uid, who.uid).unwrap();
        let listen = format!("{ip}:0");
        let all = megabytes.iter().map(|mb| lend(who, config.path(), *mb, &listen, runtime)).collect();
        Servers { who, config, all }
    }

    /// One that was killed, at its place, with 300 MB.
    fn restart(&mut self, nth: usize) {
        let (child, address) = &mut self.all[nth];
        child.wait().unwrap();
        *child = lend(self.who, self.config.path(), 300, address, None).0;
    }

    fn list(&self) -> String {
        self.all.iter().map(|(_, address)| &**address).collect::<Vec<_>>().join(",")
    }

    /// The program in this mode with so many MB, of which it may keep `local`.
    fn run(&self, mode: &str, megabytes: u32, local: u32) -> Run {
        let program: PathBuf = place().unwrap().join("memory");
        self.run_program(&[program.as_os_str(), mode.as_ref(), megabytes.to_string().as_ref()], local)
    }

    fn run_program(&self, words: &[&OsStr], local: u32) -> Run {
        let mut command = self.who.command(self.config.path());
        command.args(["exec", "-q", "--memory", &self.list(), "--local-mb", &local.to_string()]);
        Run::new(command).program(words)
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for (child, _) in &mut self.all {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// kB that a memory server has: its own memory, and files in memory that it shares.
fn kept(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let own = line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?;
    let files = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let shared = files.filter(|path| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("hpcrt-shared")));
    Some(own + shared.filter_map(|path| Some(fs::metadata(path).ok()?.blocks() / 2)).sum::<u64>())
}

#[track_caller]
fn right(done: Done, local: u32) {
    let done = done.code(0);
    let text = done.text();
    let resident = text.lines().find_map(|line| line.strip_prefix("resident ")).unwrap().parse::<u64>().unwrap();
    assert!(text.ends_with("right\n"), "{text}");
    assert!(resident <= u64::from(local) * 1000 + BESIDE, "{resident} kB are resident");
}

#[test]
fn programs_are_right_and_stay_within_their_budget() {
    if place().is_none() {
        return;
    }
    for who in everybody() {
        // What is within a host; what crosses a network, with tags, and is striped.
        let servers = [Servers::start(who, &[400]), Servers::start_at(who, &[200, 100, 200], &address())];
        let modes = [("triad", 60), ("sort", 30), ("scatter", 30), ("heap", 30), ("calls", 50), ("threads", 60)];
        for (nth, (mode, megabytes)) in modes
            .into_iter()
            .chain([("children", 60), ("forks", 40), ("reserve", 40), ("hints", 40), ("heirs", 60)])
            .enumerate()
        {
            let done = servers[nth % 2].run(mode, megabytes, 20).end();
            println!("{who:?} {mode}: {:?}", done.took);
            right(done, 20);
        }
        for servers in &servers {
            let done = servers.run("columns", 60, 20).end();
            println!("{who:?} columns: {:?}", done.took);
            right(done, 20);
        }
    }
}

/// From about 70 MB on a few huge pages of what a server of the same host shares are mapped, and are the program's as far as the kernel tells.
#[test]
fn programs_are_right_where_what_a_server_has_is_mapped() {
    const LOCAL: u32 = 80;
    if place().is_none() {
        return;
    }
    for who in everybody() {
        let servers = Servers::start(who, &[600]);
        for (mode, megabytes) in [("triad", 200), ("scatter", 100), ("threads", 150), ("children", 150), ("forks", 100)]
        {
            let done = servers.run(mode, megabytes, LOCAL).end();
            println!("{who:?} {mode}: {:?}", done.took);
            right(done, LOCAL + LOCAL / 8);
        }
    }
}

/// More than it copies before it answers.
#[test]
fn a_server_of_the_same_host_copies_a_fork_a_part_at_a_time() {
    if place().is_none() {
        return;
    }
    let who = Who { uid: None, without: "" };
    right(Servers::start(who, &[800]).run("forks", 150, 20).end(), 20);
}

#[test]
fn what_is_in_swap_is_not_lost() {
    if place().is_none() {
        return;
    }
    if fs::read_to_string("/proc/swaps").unwrap_or_default().lines().count() < 2 {
        return eprintln!("SKIPPED: this machine has no swap device");
    }
    let group = Path::new("/sys/fs/cgroup/memory").join(format!("hpcrt-test-swap-{}", std::process::id()));
    if fs::create_dir(&group).is_err() || !group.join("memory.limit_in_bytes").exists() {
        let _ = fs::remove_dir(&group);
        return eprintln!("SKIPPED: no memory cgroup of version 1 can be made here");
    }
    // Less than the program may keep.
    fs::write(group.join("memory.limit_in_bytes"), "12M").unwrap();
    // By moving pages, and by copying them.
    for who in [everybody()[0], everybody()[2]] {
        let servers = Servers::start(who, &[200]);
        let mut command = servers.who.command(servers.config.path());
        command.args(["exec", "-q", "--memory", &servers.list(), "--local-mb", "30", "--", "sh", "-c"]);
        command.arg("echo $$ > $0/cgroup.procs; exec \"$@\"").arg(&group).arg(place().unwrap().join("memory"));
        command.args(["swap", "60"]);
        right(Run::new(command).end(), 30);
    }
    until(|| fs::remove_dir(&group).ok());
}

#[test]
fn what_fits_needs_no_server() {
    if place().is_none() {
        return;
    }
    let mut servers = Servers::start(everybody()[0], &[100]);
    // Where nobody listens, as long as this is bound: the port of a server that was killed may be another test's by now.
    let bound = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    bound.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    servers.all[0].1 = bound.local_addr().unwrap().as_socket().unwrap().to_string();
    for mode in ["triad", "heap", "children"] {
        right(servers.run(mode, 20, 100).end(), 100);
    }
    let lost = servers.run("triad", 60, 20).end().code(125);
    lost.says("borrow memory from").says("Connection refused");
}

#[test]
fn a_lost_server_ends_the_program_with_its_name() {
    if place().is_none() {
        return;
    }
    for who in everybody() {
        let mut servers = Servers::start(who, &[300, 300]);
        let run = servers.run("triad", 400, 20).start();
        // It has a good part of the program's memory.
        until(|| kept(servers.all[1].0.id()).filter(|kb| *kb > 60 << 10));
        servers.all[1].0.kill().unwrap();
        let killed = std::time::Instant::now();
        let done = run.end();
        assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
        let name = servers.all[1].1.clone();
        done.code(125).says("without the memory server").says(&name).says("of the program's memory with it");
    }
}

#[test]
fn refusals_are_clear() {
    if place().is_none() {
        return;
    }
    let who = everybody()[0];
    let servers = Servers::start(who, &[20]);
    servers.run("triad", 100, 20).end().code(125).says("it is full").says(&servers.all[0].1);
    // Another key.
    let other = Servers::start(who, &[20]);
    let mut command = who.command(other.config.path());
    command.args(["exec", "-q", "--memory", &servers.list(), "--local-mb", "20"]);
    let program = place().unwrap().join("memory");
    let strange = Run::new(command).program(&[program.as_os_str(), "triad".as_ref(), "60".as_ref()]);
    strange.end().code(125).says("another key");
    // The dynamic linker would load the resident once more.
    let linker = "/lib64/ld-linux-x86-64.so.2";
    if Path::new(linker).exists() {
        let program = place().unwrap().join("memory");
        let done =
            servers.run_program(&[linker.as_ref(), program.as_os_str(), "triad".as_ref(), "60".as_ref()], 20).end();
        done.code(125).says("a dynamic linker").says("name the program itself");
    }
    for (flags, says) in [
        ("--local-mb 20", "no other memory"),
        ("--memory 127.0.0.1:1 --local-mb 3", "less than 16"),
        ("--memory no-such-host.invalid --local-mb 20", "name is not known"),
    ] {
        let mut command = who.command(servers.config.path());
        command.args(["exec", "-q"]).args(flags.split(' '));
        Run::new(command).program(&["true"]).end().code(2).says(says);
    }
}
