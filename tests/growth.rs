//! Many jobs in one session: neither the front end nor agents nor keepers grow in memory, descriptors, threads or mounts, nor the stores;
//! and an agent stays small while a program of many libraries is loaded through it.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster::generate::libraries::Libraries;
use cluster::{Cluster, Spec};
use common::{Done, Role, Run, marked, role, until};
use nix::unistd::Pid;

/// Anonymous memory of an agent, at most.
const AGENT_MAX: u64 = 24 << 20;
/// The ordinary user on the hosts.
const USER: u32 = 20001;
/// Directories with a program of their own: more than a node keeps views of without a job.
const OTHERS: u32 = 12;

/// What a process has.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    /// Bytes.
    anonymous: u64,
    descriptors: usize,
    threads: u64,
    mounts: usize,
}

fn size(pid: Pid) -> Option<Size> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some(Size {
        anonymous: number("RssAnon:")? << 10,
        descriptors: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count(),
        threads: number("Threads:")?,
        mounts: fs::read_to_string(format!("/proc/{pid}/mountinfo")).ok()?.lines().count(),
    })
}

/// Every process of the session by kind and number.
fn sizes(mark: &str) -> BTreeMap<(String, i32), Size> {
    let name = |pid: Pid| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
    let words = |pid: Pid| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    // Keepers and the porter have a name of their own.
    let kind = |pid: Pid| match words(pid) {
        line if line.windows(5).any(|word| word == b"serve") => Some(name(pid).replace("hpcrt-", "")),
        line if line.windows(5).any(|word| word == b"start") => Some("front end".to_owned()),
        _ => None,
    };
    let kind = |pid| kind(pid).map(|kind| if kind == "keeper" || kind == "front end" { kind } else { "agent".into() });
    marked(mark).into_iter().filter_map(|pid| Some(((kind(pid)?, pid.as_raw()), size(pid)?))).collect()
}

/// The same once no process of a job is left: its keeper ends a moment after the job.
fn settled(mark: &str) -> BTreeMap<(String, i32), Size> {
    until(|| role(mark, Role::JobKeeper).is_empty().then_some(()));
    sizes(mark)
}

struct Session {
    cluster: Cluster,
    name: String,
    mark: String,
}

impl Session {
    fn command(cluster: &Cluster, words: &[&str]) -> Run {
        let words: Vec<&str> = [env!("CARGO_BIN_EXE_hpcrt"), "session"].iter().chain(words).copied().collect();
        Run::new(cluster.command("hpc1", USER, &words)).within(Duration::from_secs(120))
    }

    fn start(cluster: Cluster) -> Session {
        let (hosts, agent) = (cluster.hosts().join(","), cluster.agent_command());
        let done = Session::command(&cluster, &["start", "--hosts", &hosts, "--agent", &agent]).end();
        assert_eq!(done.status.code(), Some(0), "{}", done.err);
        Session { name: done.text().trim().to_owned(), mark: done.mark().to_owned(), cluster }
    }

    fn run(&self, words: &[&str]) -> Done {
        let words: Vec<&str> = ["run", &self.name, "-q"].iter().chain(words).copied().collect();
        let done = Session::command(&self.cluster, &words).end();
        assert_eq!(done.status.code(), Some(0), "{words:?}: {}", done.err);
        done
    }

    /// A program of many libraries now and then, small ones of several directories else.
    fn job(&self, number: u32) {
        let other = format!("/shared/other{}/small", number % OTHERS);
        match number % 20 {
            0 => drop(self.run(&["--ppn", "8", "--", "/shared/program/driver"])),
            1..10 => drop(self.run(&["--", &other])),
            _ => drop(self.run(&["--", "/shared/other0/small"])),
        }
    }

    /// Bytes in all stores.
    fn stored(&self) -> u64 {
        let words = [env!("CARGO_BIN_EXE_hpcrt"), "status", "--json", &self.name];
        let output = self.cluster.exec("hpc1", USER, &words).unwrap();
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        status["nodes"].as_array().unwrap().iter().filter_map(|node| node["stored"].as_u64()).sum()
    }
}

/// `small`, in directories of their own.
fn programs(backing: &Path, libraries: usize) {
    let program = Libraries {
        count: libraries,
        megabytes: libraries / 2,
        at: Some("/shared/program".into()),
        ..Libraries::default()
    };
    program.generate(&backing.join("program")).unwrap();
    let source = backing.join("small.c");
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    for number in 0..OTHERS {
        let place = backing.join(format!("other{number}"));
        fs::create_dir(&place).unwrap();
        assert!(Command::new("cc").arg("-o").arg(place.join("small")).arg(&source).status().unwrap().success());
    }
}

/// Runs `jobs` jobs; what is there after the first `warm` is there at the end.
fn many(name: &str, libraries: usize, warm: u32, jobs: u32) {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED many jobs: {obstacle}");
    }
    let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    programs(backing.path(), libraries);
    let spec = Spec { hosts: 3, backing: Some(backing.path().to_owned()), ..Spec::of(name) };
    let session = Session::start(Cluster::up(spec).unwrap());
    // The largest agent while it all comes.
    let (most, over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for (_, size) in sizes(&session.mark).iter().filter(|((kind, _), _)| kind == "agent") {
                    most.fetch_max(size.anonymous, Ordering::Relaxed);
                }
                thread::sleep(Duration::from_millis(10));
            }
        });
        session.job(0);
        over.store(true, Ordering::Relaxed);
    });
    let most = most.into_inner();
    eprintln!("{libraries} libraries, 8 ranks a host: {:.1} MiB of anonymous memory at most", most as f64 / 1048576.0);
    assert!(most <= AGENT_MAX, "{most} bytes");

    let begun = Instant::now();
    (1..warm).for_each(|number| session.job(number));
    let (before, stored) = (settled(&session.mark), session.stored());
    let middle = warm.midpoint(jobs);
    (warm..middle).for_each(|number| session.job(number));
    let between = settled(&session.mark);
    (middle..jobs).for_each(|number| session.job(number));
    let (after, again) = (settled(&session.mark), session.stored());
    eprintln!("{jobs} jobs in {:.0} s; stores: {stored} bytes, then {again}", begun.elapsed().as_secs_f64());
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "the same processes");
    for (who, now) in &after {
        let (then, half) = (before[who], between.get(who).map_or(0, |size| size.anonymous));
        eprintln!("{who:?}: {then:?}, then {now:?}; {half} bytes in the middle");
        assert!(now.descriptors <= then.descriptors + 2, "{who:?}: {then:?}, then {now:?}");
        assert!(now.threads <= then.threads + 2 && now.mounts <= then.mounts, "{who:?}: {then:?}, then {now:?}");
        assert!(now.anonymous <= then.anonymous + then.anonymous / 4 + (1 << 20), "{who:?}: {then:?}, then {now:?}");
        assert!(who.0 != "agent" || now.anonymous <= AGENT_MAX, "{who:?}: {now:?}");
    }
    assert_eq!(stored, again, "the stores have what they had");
    let done = Session::command(&session.cluster, &["stop", &session.name]).end();
    assert_eq!(done.status.code(), Some(0), "{}", done.err);
    let since = Instant::now();
    while !session.cluster.leftovers().unwrap().iter().all(|left| left.to_string().contains("/tmp/hpcrt-")) {
        assert!(since.elapsed() < common::GONE, "{:?}", session.cluster.leftovers().unwrap());
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_session_does_not_grow() {
    many("t-growth", 20, 40, 70);
}

/// `cargo xtask proofs growth`.
#[test]
#[ignore = "long: five minutes, 259 MB generated"]
fn a_thousand_jobs_in_a_session() {
    many("t-thousand", 495, 100, 1_000);
}
