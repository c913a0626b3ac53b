//! Every fallback, forced by `HPCRT_WITHOUT`: programs run as they do plainly, files made on one host are seen on others, the shared file
//! system is spared as far as the tier promises, one line says what runs instead, and nothing is left.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "common/site.rs"]
mod site;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;
use std::time::Instant;

use cluster::Cluster;
use cluster::generate::libraries::Libraries;
use site::{Run, Site, build, tool};

/// The front end runs on the first host; with a fan-out of one, the second of these is started by the first, and so on.
const HOSTS: &str = "hpc2,hpc3,hpc4";

/// What ranks' hosts may do at the shared file system.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Promise {
    /// Nothing: names and contents come from the node.
    Nothing,
    /// Look up names; contents of what a program needs to start come from the node.
    Names,
    /// Look up names and open programs; their libraries come from the node.
    Programs,
}

/// What is taken away, what is promised still, and a word of each line that says so.
type Case = (&'static str, Promise, &'static [&'static str]);

const CASES: &[Case] = &[
    ("tcp,ssh", Promise::Nothing, &["no TCP", "could not start it"]),
    ("memfd,ram", Promise::Nothing, &["from memory", "no RAM disk"]),
    ("exec", Promise::Nothing, &["from a RAM disk"]),
    ("fuse", Promise::Names, &["no FUSE"]),
    (
        "userns,memfd,tcp,ssh,ram",
        Promise::Programs,
        &["dynamic linkers", "no TCP", "from memory", "could not start it"],
    ),
    (
        "fuse,exec,memfd,tcp,ssh",
        Promise::Names,
        &["no FUSE", "from a RAM disk", "no TCP", "from memory", "could not start it"],
    ),
    ("tcp", Promise::Nothing, &["no TCP connection"]),
    ("ssh", Promise::Nothing, &["other hosts could not start it"]),
    ("memfd", Promise::Nothing, &["executed from memory"]),
    ("ram", Promise::Nothing, &["no RAM disk"]),
    ("userns", Promise::Programs, &["dynamic linkers"]),
    ("uffd", Promise::Nothing, &[]),
    ("fuse,ram", Promise::Names, &["no FUSE", "no RAM disk"]),
    ("userns,exec", Promise::Programs, &["dynamic linkers"]),
    ("memfd,ram,tcp", Promise::Nothing, &["from memory", "no RAM disk", "no TCP"]),
];

/// Programs of every kind, one after the other.
const PROGRAMS: &str = "
b=/shared/app/bin
for p in rpath runpath origin tls catcher dynamic static musl muslstatic; do if [ -e $b/$p ]; then $b/$p x; fi; done
LD_LIBRARY_PATH=/shared/app/other $b/nopath
LD_PRELOAD=/shared/app/other/libpart.so $b/runpath
/shared/link/bin/origin
$b/script x
cd /shared/app/lib && ../bin/origin
$b/pool.py a b
";

/// Libraries that no closure names: by name, by path, through a link.
const LATE: [&str; 5] = [
    "/shared/app/bin/open",
    "libpart.so",
    "/shared/app/run/libpart.so",
    "/shared/link/other/libpart.so",
    "/shared/app/bin/../lib/libtls.so",
];

/// Directories on a disk, one as /var/tmp of each host, so that what is left there is theirs.
struct Disks(tempfile::TempDir);

impl Disks {
    fn mount(site: &Site) -> Disks {
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for host in site.cluster.hosts() {
            let own = place.path().join(&host);
            fs::create_dir(&own).unwrap();
            site::mode(&own, 0o1777);
            let done = site.cluster.exec(&host, 0, &["mount", "--bind", own.to_str().unwrap(), "/var/tmp"]).unwrap();
            assert!(done.status.success(), "{done:?}");
        }
        Disks(place)
    }

    /// Nothing is on any of them.
    #[track_caller]
    fn clean(&self, what: &str) {
        for host in fs::read_dir(self.0.path()).unwrap().flatten() {
            let left: Vec<_> = fs::read_dir(host.path()).unwrap().flatten().map(|entry| entry.path()).collect();
            assert!(left.is_empty(), "{what}: {left:?}");
        }
    }
}

/// `hpcrt exec` without these abilities.
fn run(site: &Site, uid: u32, without: &str, hosts: &str, flags: &[&str], program: &[&str]) -> Run {
    let flags: Vec<&str> = ["-q", "--label", "--fan-out", "1"].iter().chain(flags).copied().collect();
    site.cluster.reset_ops().unwrap();
    let begun = Instant::now();
    let mut command = site.start(uid, hosts, &flags, program);
    command.env("HPCRT_WITHOUT", without).env("XDG_CACHE_HOME", "/dev/null/none");
    let output: Output = command.output().unwrap();
    Run { output, took: begun.elapsed() }
}

/// Every rank printed what a plain run does.
#[track_caller]
fn same(run: &Run, ranks: usize, plain: &str, what: &str) {
    assert_eq!(run.output.status.code(), Some(0), "{what}: {}{}", run.out(), run.err());
    for rank in 0..ranks {
        assert_eq!(run.rank(rank), plain, "{what}: {}", run.err());
    }
}

fn plain(site: &Site, uid: u32, program: &[&str]) -> String {
    let done = site.cluster.exec("hpc1", uid, program).unwrap();
    assert!(done.status.success(), "{program:?} plainly: {done:?}");
    String::from_utf8(done.stdout).unwrap()
}

/// `processes`: programs that each rank's host starts from the shared file system.
#[track_caller]
fn spared(site: &Site, promise: Promise, processes: u64, what: &str) {
    for host in site.cluster.host_ops().unwrap().iter().filter(|host| host.host != "hpc1") {
        let most = if promise == Promise::Nothing { 0 } else { processes };
        match promise {
            Promise::Nothing => assert_eq!((host.ops.open, host.ops.read), (0, 0), "{what}: {host:?}"),
            // What is bound over a name is not opened at its original.
            Promise::Names => assert_eq!(host.ops.read_bytes, 0, "{what}: {host:?}"),
            Promise::Programs => assert!(host.ops.open <= most, "{what}: {host:?}"),
        }
    }
}

/// One line for each thing that is done without, and no other of the kind.
#[track_caller]
fn said(run: &Run, lines: &[&str], what: &str) {
    let err = run.err();
    let told: Vec<&str> = err.lines().filter(|line| line.starts_with("hpcrt: hpc")).collect();
    for words in lines {
        assert_eq!(told.iter().filter(|line| line.contains(words)).count(), 1, "{what}: {words:?}: {err}");
    }
    assert_eq!(told.len(), lines.len(), "{what}: {err}");
}

fn case(site: &Site, uid: u32, (without, promise, lines): &Case, whole: bool) {
    let (begun, what) = (Instant::now(), format!("without {without} as {uid}"));
    // A program of many libraries: spared whatever the number of ranks.
    let driver = ["/shared/program/driver"];
    let expected = plain(site, uid, &driver);
    let many = run(site, uid, without, HOSTS, &["--ppn", "2"], &driver);
    same(&many, 6, &expected, &what);
    spared(site, *promise, 2, &what);
    said(&many, lines, &what);
    // What is opened late is pushed to all; without FUSE nobody asks for it.
    let late = run(site, uid, without, HOSTS, &[], &LATE);
    same(&late, 3, &plain(site, uid, &LATE), &what);
    if *promise != Promise::Names {
        spared(site, *promise, 1, &what);
    }
    let programs = ["sh", "-c", PROGRAMS];
    same(
        &run(site, uid, without, HOSTS, &["--prefix", "/shared/app"], &programs),
        3,
        &plain(site, uid, &programs),
        &what,
    );
    // Host A makes a file, host B sees it.
    let name = format!("{}-{uid}", without.replace(',', "-"));
    let place = site.place(uid, &name, &["together.py", "writer.py"]);
    let together = format!("/shared/{name}/together.py");
    let run_it = |program: &[&str], hosts| run(site, uid, without, hosts, &[], program);
    same(&run_it(&[&together, "t"], "hpc2:2,hpc3,hpc4"), 4, "together\n", &what);
    if whole {
        let writer = format!("/shared/{name}/writer.py");
        let expected = plain(site, uid, &[&writer, "plain"]).replace("_of_plain", "_of_own");
        let own = run_it(&[&writer, "own"], "hpc3");
        assert_eq!(own.rank(0), expected, "{what}: {}", own.err());
        if ["git", "rsync", "ssh"].into_iter().all(tool) {
            let children = ["env", "HOME=/tmp", "/shared/app/bin/children.sh"];
            same(&run_it(&children, HOSTS), 3, &plain(site, uid, &children), &what);
        }
        if site.backing("pyenv/job.py").exists() {
            let job = ["/shared/pyenv/bin/python3", "/shared/pyenv/job.py"];
            same(&run_it(&job, HOSTS), 3, &plain(site, uid, &job), &what);
        }
    }
    fs::remove_dir_all(place).unwrap();
    eprintln!("{what}: {:.1} s", begun.elapsed().as_secs_f64());
}

fn fallbacks(name: &str, libraries: usize, cases: Vec<&Case>, users: &[u32], whole: bool) {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED fallbacks: {obstacle}");
    }
    if !["gcc", "g++"].into_iter().all(tool) {
        return;
    }
    let site = Site::up(name);
    build(&site);
    let program = Libraries {
        count: libraries,
        megabytes: libraries / 2,
        at: Some("/shared/program".into()),
        ..Libraries::default()
    };
    program.generate(&site.backing("program")).unwrap();
    if whole && let Err(error) = cluster::generate::environment::generate(&site.backing("pyenv")) {
        eprintln!("SKIPPED: no environment with numpy and scipy: {error:#}");
    }
    let disks = Disks::mount(&site);
    for (at, one) in cases.iter().enumerate() {
        for uid in users.iter().filter(|_| whole).chain(users.get(at % users.len()).filter(|_| !whole)) {
            case(&site, *uid, one, whole);
            disks.clean(one.0);
        }
    }
    for host in site.cluster.hosts() {
        assert!(site.cluster.exec(&host, 0, &["umount", "/var/tmp"]).unwrap().status.success());
    }
    // The directory of a user's sockets is for his next front end.
    site.cluster.exec("hpc1", 0, &["sh", "-c", "rm -rf /tmp/hpcrt-*"]).unwrap();
    assert_eq!(site.cluster.leftovers().unwrap().len(), 0, "{:?}", site.cluster.leftovers().unwrap());
}

/// Each at least once, as one user each.
#[test]
fn each_fallback_runs_programs_as_they_are() {
    fallbacks("fallbacks", 40, CASES[..6].iter().collect(), &[65534, 20001, 0], false);
}

/// `cargo xtask proofs fallbacks`; `WITHOUT='ram tcp,ssh'` takes these combinations only.
#[test]
#[ignore = "long: a minute for each combination, 259 MB generated"]
fn all_fallbacks_and_pairs_with_large_programs() {
    let chosen = std::env::var("WITHOUT").unwrap_or_default();
    let is_chosen = |case: &&Case| chosen.is_empty() || chosen.split(' ').any(|one| one == case.0);
    let cases: Vec<_> = CASES.iter().filter(is_chosen).collect();
    assert!(!cases.is_empty(), "WITHOUT is none of the combinations");
    fallbacks("fallwhole", 495, cases, &[65534, 0, 20001], true);
}
