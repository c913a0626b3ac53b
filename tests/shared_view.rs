//! Jobs of a session that are shown the same directories share a view on each node: what they see of each other, what one that is killed
//! does to the others, and what many leave behind. Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use cluster::spec::Service;
use cluster::{Cluster, Leftover, Spec};
use common::{Role, Run, Running, marked, role, until};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// root and the cluster's ordinary user.
const USERS: [u32; 2] = [0, 20001];

/// A session of one host.
struct Session<'a> {
    cluster: &'a Cluster,
    hpcrt: PathBuf,
    uid: u32,
    name: String,
    mark: String,
}

fn up(name: &str, files: usize, service: Service) -> Option<Cluster> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    let cluster = Cluster::up(Spec { hosts: 1, service, ..Spec::of(name) }).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_hpcrt"), cluster.state().file("hpcrt")).unwrap();
    for directory in ["one", "two"] {
        let place = cluster.backing().join(directory);
        fs::create_dir(&place).unwrap();
        for n in 0..files {
            let file = place.join(format!("m{n}.py"));
            fs::write(&file, format!("{directory} {n}\n")).unwrap();
            chown(&file, Some(USERS[1]), Some(USERS[1])).unwrap();
        }
        chown(&place, Some(USERS[1]), Some(USERS[1])).unwrap();
    }
    Some(cluster)
}

impl<'a> Session<'a> {
    fn start(cluster: &'a Cluster, uid: u32) -> Session<'a> {
        let hpcrt = cluster.state().file("hpcrt");
        let mut session = Session { cluster, hpcrt, uid, name: String::new(), mark: String::new() };
        let agent = cluster.agent_command();
        let done = session.command(&["start", "--hosts", "hpc1", "--agent", &agent, "--fresh", "60"]).end();
        assert!(done.status.success(), "{}", done.err);
        session.name = done.text().trim().to_owned();
        session.mark = done.mark().to_owned();
        session
    }

    fn command(&self, words: &[&str]) -> Run {
        let words: Vec<&str> = [self.hpcrt.to_str().unwrap(), "session"].iter().chain(words).copied().collect();
        Run::new(self.cluster.command("hpc1", self.uid, &words)).cwd("/")
    }

    /// A shell command in a job that is shown these directories.
    fn job(&self, roots: &[&str], script: &str) -> Run {
        let mut words = vec!["run", &self.name, "-q"];
        words.extend(roots.iter().flat_map(|root| ["--prefix", root]));
        words.extend(["--", "/bin/sh", "-c", script]);
        self.command(&words)
    }

    fn run(&self, roots: &[&str], script: &str) -> String {
        self.job(roots, script).end().code(0).text()
    }

    fn process(&self, which: Role) -> Pid {
        role(&self.mark, which)[0]
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let _ = self.command(&["stop", &self.name]).end();
    }
}

fn count(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

/// A number of KiB, or a count, in a process's status.
fn status(pid: Pid, field: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

const MOUNTS: &str = "cut -d' ' -f5 /proc/self/mountinfo | grep ^/shared/; true";

#[test]
fn jobs_see_their_own_directories() {
    let Some(cluster) = up("t-view-own", 50, Spec::default().service) else { return };
    for uid in USERS {
        let session = Session::start(&cluster, uid);
        assert_eq!(session.run(&["/shared/one"], "cat /shared/one/m7.py"), "one 7\n");
        // At once, with the same and with other directories.
        let wait = format!("{MOUNTS}; readlink /proc/self/ns/mnt >&2; sleep 0.5; cat /shared/???/m1.py");
        let jobs = [&["/shared/one"][..], &["/shared/one"], &["/shared/two"], &["/shared/one", "/shared/two"]];
        let jobs = jobs.map(|roots| (roots, session.job(roots, &wait).start()));
        let mut namespaces = Vec::new();
        for (roots, job) in jobs {
            let done = job.end().code(0);
            let text = done.text();
            let shown: Vec<&str> = text.lines().filter(|line| line.starts_with('/')).collect();
            // The first carries the file system and itself.
            assert!(shown.iter().all(|dir| roots.contains(dir)), "{roots:?}: {text}");
            assert!(roots.iter().all(|dir| shown.contains(dir)), "{roots:?}: {text}");
            assert!(text.ends_with("one 1\ntwo 1\n"), "{text}");
            namespaces.push(done.err);
        }
        namespaces.sort();
        namespaces.dedup();
        assert_eq!(namespaces.len(), 4, "each job has mounts of its own");
        // What one job writes, removes and replaces, the next sees, whichever view it has.
        session
            .run(&["/shared/one"], "cd /shared/one; echo new > made; ! cat none 2>/dev/null; rm m2.py; echo x > m3.py");
        let look = "cd /shared/one; cat made; test ! -e m2.py; cat m3.py";
        assert_eq!(session.run(&["/shared/one"], look), "new\nx\n");
        assert_eq!(session.run(&["/shared/one", "/shared/two"], look), "new\nx\n");
        session.run(&["/shared/one", "/shared/two"], "cd /shared/one; echo made > none; rm made");
        assert_eq!(session.run(&["/shared/one"], "cd /shared/one; test ! -e made; cat none; rm none"), "made\n");
        fs::write(cluster.backing().join("one/m2.py"), "one 2\n").unwrap();
        fs::write(cluster.backing().join("one/m3.py"), "one 3\n").unwrap();
    }
    // The sessions' sockets were in directories that stay.
    let left = cluster.leftovers().unwrap();
    let sockets = |left: &Leftover| matches!(left, Leftover::File { path, .. } if path.to_string_lossy().starts_with("/tmp/hpcrt-"));
    assert!(left.iter().all(sockets), "{left:?}");
}

/// A library that is built again between two jobs is bound over the old one.
#[test]
fn a_library_is_built_again() {
    let Some(cluster) = up("t-view-built", 1, Spec::default().service) else { return };
    // On the host, whose file system remembers what it has seen for a while.
    let cc = |source: &str, flags: &str, to: &str| {
        let script = format!("cd /shared/two; echo '{source}' | cc -x c - {flags} -o new && mv new {to}");
        let done = cluster.exec("hpc1", 0, &["sh", "-c", &script]).unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    let library = |n: i32| cc(&format!("int answer(void) {{ return {n}; }}"), "-shared -fPIC", "libanswer.so");
    library(0);
    let main = "int answer(void); int main(void) { return answer(); }";
    cc(main, "-L. -lanswer -Wl,-rpath,/shared/two", "answer");
    for uid in USERS {
        let session = Session::start(&cluster, uid);
        for n in 1..8 {
            library(n);
            let words = ["run", &session.name, "-q", "--", "/shared/two/answer"];
            let done = session.command(&words).end();
            assert_eq!(done.status.code(), Some(n), "{}", done.err);
        }
    }
}

/// The job that makes the view is killed over it; the one that waits for it goes on.
#[test]
fn a_job_is_killed_while_it_makes_the_view() {
    let Some(cluster) = up("t-view-made", 50, Spec::default().service) else { return };
    for after in (0..240).step_by(20) {
        let session = Session::start(&cluster, USERS[after as usize / 20 % 2]);
        let script = "cat /shared/one/m1.py /shared/one/m49.py";
        let first = session.job(&["/shared/one"], script).start();
        let second = session.job(&["/shared/one"], script).start();
        thread::sleep(Duration::from_millis(after));
        first.signal(Signal::SIGKILL);
        assert_eq!(second.end().code(0).text(), "one 1\none 49\n", "killed after {after} ms");
        drop(first.end());
    }
}

/// The next job gets another view when the kernel has given one up.
#[test]
fn a_view_that_ended_is_replaced() {
    let Some(cluster) = up("t-view-ended", 2, Spec::default().service) else { return };
    let session = Session::start(&cluster, USERS[1]);
    let script = "stat -c %Hd:%Ld /shared/one; cat /shared/one/m1.py";
    let first = session.run(&["/shared/one"], script);
    assert_eq!(session.run(&["/shared/one"], script), first);
    // The kernel's number of a FUSE connection is its minor device number.
    let connection = first.lines().next().unwrap().split_once(':').unwrap().1;
    let at = "/sys/fs/fuse/connections";
    let abort = format!("mount -t fusectl none {at} && echo 1 > {at}/{connection}/abort");
    if !Command::new("unshare").args(["-m", "sh", "-c", &abort]).status().unwrap().success() {
        return eprintln!("SKIPPED: no fusectl");
    }
    let second = session.run(&["/shared/one"], script);
    assert!(second != first && second.ends_with("one 1\n"), "{second}");
}

#[test]
fn many_jobs_leave_nothing() {
    let Some(cluster) = up("t-view-many", 50, Spec::default().service) else { return };
    let session = Session::start(&cluster, USERS[1]);
    let (agent, keeper) = (session.process(Role::Agent), session.process(Role::Keeper));
    let (one, both) = (&["/shared/one"][..], &["/shared/one", "/shared/two"][..]);
    let script = "cat /shared/one/*.py > /dev/null; wc -l < /proc/self/mountinfo";
    let look = || {
        let mounts = session.run(one, script);
        let fds = [agent, keeper].map(|pid| count(Path::new(&format!("/proc/{pid}/fd"))));
        (mounts, fds, status(agent, "Threads"))
    };
    for n in 0..20 {
        session.run(if n % 2 == 0 { one } else { both }, script);
    }
    let (before, memory) = (look(), [agent, keeper].map(|pid| status(pid, "VmRSS")));
    for n in 0..200 {
        session.run(if n % 2 == 0 { one } else { both }, script);
    }
    // The threads of the pool come and go.
    let after = look();
    assert_eq!((&before.0, before.1), (&after.0, after.1));
    assert!(after.2 <= before.2 + 8, "{} threads, then {}", before.2, after.2);
    for (pid, before) in [agent, keeper].into_iter().zip(memory) {
        let after = status(pid, "VmRSS");
        println!("{before} KiB, after 200 jobs {after}");
        assert!(after < before + 2048, "{before} KiB, then {after}");
    }
    // Views that were used once are given up.
    for n in 0..30 {
        let place = format!("d{n}");
        fs::create_dir(cluster.backing().join(&place)).unwrap();
        session.run(&[&format!("/shared/{place}")], "true");
    }
    let devices = || {
        let links = fs::read_dir(format!("/proc/{agent}/fd")).unwrap().flatten();
        links.filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.ends_with("fuse"))).count()
    };
    until(|| (devices() <= 9).then_some(()));
    assert_eq!(session.run(one, "cat /shared/one/m1.py"), "one 1\n");
}

/// The shared file system takes its time, so that a job can be killed while it waits for an answer.
#[test]
fn a_job_is_killed_while_it_asks() {
    let slow = Service { latency: Duration::from_secs(2), ..Spec::default().service };
    let Some(cluster) = up("t-view-kill", 5, slow) else { return };
    let session = Session::start(&cluster, USERS[1]);
    let roots = &["/shared/one"][..];
    // The way to the directory leads through the slow file system itself.
    let cat = |n: usize| session.job(roots, &format!("cd /shared/one && exec cat m{n}.py")).start();
    let asks = |job: &Running| {
        let name = |pid: Pid| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        until(|| marked(&job.mark).into_iter().any(|pid| name(pid).trim() == "cat").then_some(()));
        thread::sleep(Duration::from_millis(200));
    };
    session.run(roots, "true");
    let other = cat(1);
    asks(&other);
    let killed = cat(2);
    asks(&killed);
    let begun = Instant::now();
    killed.signal(Signal::SIGKILL);
    until(|| marked(&killed.mark).is_empty().then_some(()));
    let took = begun.elapsed();
    println!("gone after {took:?}");
    assert!(took < Duration::from_millis(1500), "{took:?}");
    assert_eq!(other.end().code(0).text(), "one 1\n");
    drop(killed.end());
}
