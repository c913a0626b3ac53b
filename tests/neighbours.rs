//! Other users of the same hosts, and strangers on the network: they neither see nor disturb a user's jobs. Needs root; says so and passes
//! otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};
use common::network::{ESTABLISHED, LISTEN, in_network, port, sockets};
use common::{Done, Run, marked, nothing_left, until};
use hpcrt::net::wire::frame::VERSION;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Two ordinary users.
const USER: u32 = 20001;
const OTHER: u32 = 20002;
/// Bytes of the shared program beyond what it runs.
const BALLAST: usize = 32 << 20;

fn up(name: &str, hosts: usize) -> Option<Cluster> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    let cluster = Cluster::up(Spec { hosts, ..Spec::of(name) }).unwrap();
    let mut shell = fs::read("/bin/sh").unwrap();
    shell.resize(shell.len() + BALLAST, 7);
    let hpcrt = fs::read(env!("CARGO_BIN_EXE_hpcrt")).unwrap();
    for (name, bytes) in [("hpcrt", hpcrt), ("sh", shell)] {
        let path = cluster.backing().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    Some(cluster)
}

/// `hpcrt WORDS` on the first host.
fn hpcrt(cluster: &Cluster, uid: u32, words: &[&str]) -> Run {
    let words: Vec<_> = ["/shared/hpcrt"].iter().chain(words).copied().collect();
    let mut command = cluster.command("hpc1", uid, &words);
    command.env_remove("XDG_RUNTIME_DIR").current_dir("/");
    Run::new(command)
}

/// A user's session over the first `hosts` hosts: its name and the mark of its processes.
fn session(cluster: &Cluster, uid: u32, hosts: usize) -> (String, String) {
    let names = cluster.hosts()[..hosts].join(",");
    let agent = cluster.agent_command();
    let done = hpcrt(cluster, uid, &["session", "start", "--hosts", &names, "--agent", &agent]).end();
    assert!(done.status.success(), "{}", done.err);
    (done.text().trim().to_owned(), done.mark().to_owned())
}

/// A job of the shared program in a session.
fn run(cluster: &Cluster, uid: u32, session: &str, script: &str) -> Run {
    hpcrt(cluster, uid, &["session", "run", session, "-q"]).program(&["/shared/sh", "-c", script])
}

/// What a shell on a host says.
fn shell(cluster: &Cluster, host: &str, uid: u32, script: &str) -> String {
    let output = cluster.exec(host, uid, &["/bin/sh", "-c", script]).unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

fn stop(cluster: &Cluster, uid: u32, (name, mark): &(String, String)) {
    hpcrt(cluster, uid, &["session", "stop", name]).end().code(0);
    nothing_left(mark);
}

#[test]
fn two_users_on_the_same_hosts_do_not_see_each_other() {
    let Some(cluster) = up("t-users", 2) else { return };
    let (mine, theirs) = (session(&cluster, USER, 2), session(&cluster, OTHER, 2));
    let listed = |uid| hpcrt(&cluster, uid, &["session", "list"]).end().code(0).text();
    assert!(listed(USER).contains(&mine.0) && !listed(USER).contains(&theirs.0), "{}", listed(USER));
    assert!(listed(OTHER).contains(&theirs.0) && !listed(OTHER).contains(&mine.0), "{}", listed(OTHER));
    for verb in [&["session", "stop", &mine.0][..], &["session", "run", &mine.0, "--", "true"]] {
        let done = hpcrt(&cluster, OTHER, verb).end();
        assert!(!done.status.success() && done.err.contains("no such session"), "{}", done.err);
    }
    assert!(shell(&cluster, "hpc1", OTHER, "ls /tmp/hpcrt-20001").contains("Permission denied"));

    let long = run(&cluster, USER, &mine.0, "echo up; sleep 1000; echo done").start();
    // Until the checks are done, nothing of it comes or goes.
    let sleeping = || -> Vec<Pid> {
        let sleeps = |pid: &Pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n");
        marked(&long.mark).into_iter().filter(sleeps).collect()
    };
    until(|| (sleeping().len() == 2).then_some(()));
    let beside = run(&cluster, OTHER, &theirs.0, "id -u").end().code(0);
    assert_eq!(beside.lines(), ["20002", "20002"]);
    let pids: Vec<String> =
        [&mine.1, &long.mark].into_iter().flat_map(|mark| marked(mark)).map(|p| p.to_string()).collect();
    assert!(pids.len() >= 7, "a session, and on each host an agent, two keepers and a rank: {pids:?}");
    let open = "for p in PIDS; do [ -d /proc/$p ] || echo gone $p; for f in environ mem maps auxv syscall; do \
                head -c 1 /proc/$p/$f >/dev/null 2>&1 && echo $p/$f; done; for d in fd root/ cwd/ map_files; do \
                ls /proc/$p/$d >/dev/null 2>&1 && echo $p/$d; done; kill -0 $p 2>/dev/null && echo kill $p; done; true";
    let open = open.replace("PIDS", &pids.join(" "));
    for host in ["hpc1", "hpc2"] {
        assert_eq!(shell(&cluster, host, OTHER, &open), "", "another user reaches into the job on {host}");
    }
    assert!(!shell(&cluster, "hpc1", USER, &open).is_empty(), "the check finds what is open");
    // Neither their names in the file system nor the store's mount are there for others.
    let seen = shell(&cluster, "hpc2", OTHER, "cat /proc/mounts; ls -a /dev/shm /tmp; find /tmp /dev/shm -type f");
    assert!(!seen.contains("hpcrt"), "{seen}");
    sleeping().into_iter().for_each(|pid| kill(pid, Signal::SIGKILL).unwrap());
    assert_eq!(long.end().code(0).lines(), ["done", "done", "up", "up"]);
    stop(&cluster, USER, &mine);
    stop(&cluster, OTHER, &theirs);
}

/// Whatever lies at the place of the session sockets that is not the user's own directory is refused, and left as it is.
#[test]
fn a_place_taken_by_another_user_is_refused() {
    let Some(cluster) = up("t-squat", 1) else { return };
    let agent = cluster.agent_command();
    let start = || hpcrt(&cluster, USER, &["session", "start", "--hosts", "hpc1", "--agent", &agent]);
    let place = "/tmp/hpcrt-20001";
    let mine = "mkdir -m 700 /tmp/mine /tmp/open; chmod 777 /tmp/open";
    assert_eq!(shell(&cluster, "hpc1", USER, mine), "");
    for (uid, how) in [
        (OTHER, "mkdir -m 777 PLACE"),
        (OTHER, "ln -s /tmp/mine PLACE"),
        (OTHER, "ln -s /nonexistent PLACE"),
        (OTHER, "echo > PLACE"),
        (USER, "mkdir -m 770 PLACE; chmod 770 PLACE"),
        (USER, "ln -s /tmp/open PLACE"),
    ] {
        assert_eq!(shell(&cluster, "hpc1", uid, &how.replace("PLACE", place)), "");
        let before = shell(&cluster, "hpc1", 0, "ls -lan /tmp/hpcrt-20001 /tmp/mine");
        let done = start().end();
        assert!(!done.status.success(), "{how}");
        assert!(done.err.contains("not a directory that only you can reach"), "{how}: {}", done.err);
        assert_eq!(shell(&cluster, "hpc1", 0, "ls -lan /tmp/hpcrt-20001 /tmp/mine"), before, "{how}");
        nothing_left(done.mark());
        // A job of its own needs no such place.
        let words = ["exec", "-q", "--hosts", "hpc1", "--agent", &agent, "--", "/shared/sh", "-c", "echo fine"];
        assert_eq!(hpcrt(&cluster, USER, &words).end().code(0).text(), "fine\n");
        assert_eq!(shell(&cluster, "hpc1", 0, "rm -rf /tmp/hpcrt-20001"), "");
    }
    assert_eq!(shell(&cluster, "hpc1", OTHER, &format!("mkdir {place}")), "");
    let done = start().env("XDG_RUNTIME_DIR", "/tmp/mine").end();
    assert!(done.status.success(), "the remedy helps: {}", done.err);
    hpcrt(&cluster, USER, &["session", "stop", done.text().trim()]).env("XDG_RUNTIME_DIR", "/tmp/mine").end().code(0);
}

/// The front end runs from a directory whose name on another host belongs to somebody else: nothing of it is run there.
#[test]
fn programs_under_our_path_on_other_hosts_are_not_run() {
    let Some(cluster) = up("t-planted", 2) else { return };
    let agent = cluster.agent_command();
    let fill = "mkdir -p /tmp/d/e; cp /shared/hpcrt /tmp/d/e/hpcrt";
    assert_eq!(shell(&cluster, "hpc1", USER, fill), "");
    // A program of the user's own that he would not want to be run.
    let tool = "printf '#!/bin/sh\\necho ran $* >> /tmp/tool.ran\\n' > /tmp/tool; chmod 755 /tmp/tool";
    assert_eq!(shell(&cluster, "hpc2", USER, tool), "");
    for (owner, plant) in [
        (OTHER, "mkdir -p /tmp/d/e; ln -s /tmp/tool /tmp/d/e/hpcrt"),
        (OTHER, "mkdir -p /tmp/d/e; cp /tmp/tool /tmp/d/e/hpcrt"),
        (OTHER, "mkdir -p /tmp/d; chmod 777 /tmp/d; : the user made e there, and it can be moved away"),
        (USER, "mkdir -p /tmp/d/e; cp /tmp/tool /tmp/d/e/hpcrt; chmod 775 /tmp/d"),
        (OTHER, "ln -s /tmp/x /tmp/d; mkdir -p /tmp/x/e; cp /tmp/tool /tmp/x/e/hpcrt"),
    ] {
        assert_eq!(shell(&cluster, "hpc2", owner, plant), "");
        if plant.contains("the user made") {
            assert_eq!(shell(&cluster, "hpc2", USER, "mkdir /tmp/d/e; cp /tmp/tool /tmp/d/e/hpcrt"), "");
        }
        let words = ["exec", "-q", "--hosts", "hpc1,hpc2", "--agent", &agent, "--", "/bin/echo", "fine"];
        let words: Vec<_> = ["/tmp/d/e/hpcrt"].iter().chain(&words).copied().collect();
        let mut command = cluster.command("hpc1", USER, &words);
        command.current_dir("/");
        assert_eq!(Run::new(command).end().code(0).lines(), ["fine", "fine"]);
        assert_eq!(shell(&cluster, "hpc2", USER, "cat /tmp/tool.ran 2>/dev/null"), "", "{plant}");
        assert_eq!(shell(&cluster, "hpc2", 0, "rm -rf /tmp/d /tmp/x"), "");
    }
}

/// Bytes of memory of a process.
fn memory(pid: Pid) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:").map(str::to_owned));
    line.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Keeps 1,000 connections to `at` open until told to stop: most say nothing or one byte at a time, and come again when they are closed;
/// the others send garbage. Counts those opened.
fn flood(at: SocketAddr, opened: &AtomicUsize, over: &AtomicBool) {
    const CONNECTIONS: usize = 1000;
    let garbage: Vec<u8> = (0..10_000u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let open = || {
        opened.fetch_add(1, Ordering::Relaxed);
        TcpStream::connect_timeout(&at, Duration::from_secs(1)).inspect(|s| s.set_nonblocking(true).unwrap()).ok()
    };
    // The beginning of a frame of ours, slowly.
    let mut frame = *b"HPRT\0\0\x01\0\x40\0\0\0";
    frame[4..6].copy_from_slice(&VERSION.to_le_bytes());
    let mut held: Vec<Option<TcpStream>> = (0..CONNECTIONS).map(|_| open()).collect();
    for round in 0.. {
        for (nth, stream) in held.iter_mut().enumerate() {
            if over.load(Ordering::Relaxed) {
                return;
            }
            let word = [frame[round % 12]];
            let said = match stream {
                Some(stream) if nth % 10 == 0 => stream.write(&garbage).map(|_| ()),
                Some(stream) if nth % 2 == 0 => stream.write(&word).map(|_| ()),
                Some(stream) => stream.peek(&mut [0]).map(|_| ()),
                None => Err(std::io::ErrorKind::NotConnected.into()),
            };
            if said.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock) {
                *stream = open();
            }
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Ends the floods when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Strangers hold 1,000 connections to the front end and to every agent while these connect to each other: the job ends as without them, and
/// nobody needs memory for them.
fn flooded(name: &str, strangers_at: usize) {
    let Some(cluster) = up(name, 5) else { return };
    let ours = 4;
    let nofile = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: nofile.maximum, ..nofile };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();

    let job = |session: &(String, String)| -> Done { run(&cluster, USER, &session.0, "hostname").end().code(0) };
    let expected = &cluster.hosts()[..ours];
    let calm = session(&cluster, USER, ours);
    let usual = job(&calm).took;
    stop(&cluster, USER, &calm);

    // The nodes connect to each other for the log when a job first needs files.
    let attacked = session(&cluster, USER, ours);
    let doors: Vec<SocketAddr> = (0..ours)
        .flat_map(|host| {
            let address = cluster.state().hosts[host].address.clone();
            let listening = sockets(&cluster, host).into_iter().filter(|socket| socket.2 == LISTEN);
            listening.map(move |socket| format!("{address}:{}", port(&socket.0)).parse().unwrap()).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(doors.len(), ours + 1, "the agents and the front end");
    let processes = marked(&attacked.1);
    let before: Vec<u64> = processes.iter().map(|pid| memory(*pid)).collect();
    let (opened, over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (took, growth) = thread::scope(|scope| {
        // However this ends, the strangers have to.
        let _ending = Over(&over);
        for at in &doors {
            scope.spawn(|| in_network(&cluster, strangers_at, || flood(*at, &opened, &over)));
        }
        let since = Instant::now();
        while opened.load(Ordering::Relaxed) < doors.len() * 1000 && since.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(50));
        }
        let now = processes.iter().map(|pid| memory(*pid));
        let growth = now.zip(&before).map(|(now, before)| now.saturating_sub(*before)).max().unwrap_or(0);
        let done = job(&attacked);
        assert_eq!(done.lines(), expected);
        // The log came over the nodes' own connections, not as a last resort over those that were there before.
        for host in (1..ours).filter(|_| strangers_at == ours) {
            let own = sockets(&cluster, host).into_iter().filter(|s| s.2 == ESTABLISHED);
            let among_nodes = own.filter(|s| !s.1.starts_with("05004D0A")).count();
            assert!(among_nodes >= 2, "{among_nodes} connections of host {host}");
        }
        (done.took, growth)
    });
    let opened = opened.load(Ordering::Relaxed);
    println!("{opened} connections; {took:?} instead of {usual:?}; {} KiB more in one process at most", growth >> 10);
    assert!(opened >= doors.len() * 1000);
    assert!(took < usual + Duration::from_secs(5), "{took:?} instead of {usual:?}");
    assert!(growth < 4 << 20, "{growth} bytes for strangers");
    stop(&cluster, USER, &attacked);
}

#[test]
fn a_thousand_strangers_at_every_door() {
    flooded("t-flood", 4);
}

/// The nodes' connections come from the same address as theirs.
#[test]
fn a_thousand_strangers_on_our_own_host() {
    flooded("t-flood-own", 0);
}
