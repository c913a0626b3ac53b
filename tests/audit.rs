//! Programs on hosts without user namespaces: their libraries come from the store through their dynamic linkers, the output is that of a
//! plain run, and what cannot be shown so is refused or run plainly, with the reason.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "common/site.rs"]
mod site;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cluster::generate::libraries::Libraries;
use cluster::{Cluster, Spec};
use site::{HOSTS, RANKS, Run, Shown, Site, build, tool};

const AUDIT: [&str; 2] = ["--view", "audit"];
/// root, and one without a name or a home.
const USERS: [u32; 2] = [0, 65534];

/// One test: the cluster is made once.
#[test]
fn audited_programs() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED audited programs: {obstacle}");
    }
    if !["gcc", "g++"].into_iter().all(tool) {
        return;
    }
    let site = Site::up("audit");
    build(&site);
    for uid in USERS {
        // The kernel opens the program, for each rank.
        let shown = Shown { site: &site, uid, flags: &AUDIT, opens: 1 };
        shown.linked(&["rpath", "runpath", "origin", "tls", "catcher", "dynamic"]);
        shown.opened();
        shown.same(&[], &[], &["/shared/app/bin/script", "x"]);
        not_audited(&site, uid);
        chosen(&site, uid);
        children(&shown);
        python(&shown);
        shown.writing(1);
        replaced(&site, uid);
    }
    session(&site, 65534);
    exchanged(&site, 65534);
    killed(&site, 65534);
    // The sockets of sessions and of front ends that were killed; their user's next one reuses the place.
    site.cluster.exec("hpc1", 0, &["rm", "-rf", "/tmp/hpcrt-65534"]).unwrap();
    assert_eq!(stores(&site), Vec::<String>::new());
    assert_eq!(site.cluster.leftovers().unwrap().len(), 0, "{:?}", site.cluster.leftovers().unwrap());
}

/// A library that is staged and opened once more by a path that begins in the working directory.
#[test]
fn a_relative_path_leads_to_what_is_loaded() {
    if !tool("gcc") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let library = "int next(void) { static int count; return ++count; }";
    let program = "#include <dlfcn.h>\n#include <stdio.h>\nint next(void); typedef int (*counter)(void);\n\
        int main(void) { next(); ((counter)dlsym(dlopen(\"./lib/libx.so\", RTLD_NOW), \"next\"))(); \
        printf(\"%d\\n\", ((counter)dlsym(dlopen(\"lib/../lib/libx.so\", RTLD_NOW), \"next\"))()); }";
    fs::write(place.path().join("x.c"), library).unwrap();
    fs::write(place.path().join("p.c"), program).unwrap();
    let script = "cd $2; mkdir lib; gcc -shared -fPIC -o lib/libx.so x.c; gcc -o p p.c -Llib -lx -Wl,-rpath,'$ORIGIN/lib' -ldl; \
                  ./p; $1 exec -q --hosts localhost --agent local --view audit --prefix $2 -- ./p";
    let output =
        Command::new("sh").args(["-ec", script, "sh", env!("CARGO_BIN_EXE_hpcrt")]).arg(place.path()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "3\n3\n", "{}", String::from_utf8_lossy(&output.stderr));
}

/// What a program was found to need does not outlast that.
#[test]
fn programs_that_are_linked_anew() {
    if !tool("gcc") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let mut script = Command::new("bash");
    script.arg(site::source("relinked.sh")).arg(env!("CARGO_BIN_EXE_hpcrt")).current_dir(&place);
    let output = script.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(said, "1\n2\n1 2\n1 2 1\n1\n2\n1 2\n2\n1\n1 2\n", "{}", String::from_utf8_lossy(&output.stderr));
}

/// What sessions without namespaces have in their hosts' memory.
fn stores(site: &Site) -> Vec<String> {
    let find = ["find", "/dev/shm", "-maxdepth", "1", "-name", "hpcrt-store.*"];
    let on = |host| String::from_utf8(site.cluster.exec(host, 0, &find).unwrap().stdout).unwrap();
    HOSTS.split(',').flat_map(|host| on(host).lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

/// The second job of a session finds its libraries there.
fn session(site: &Site, uid: u32) {
    let hpcrt = site.hpcrt.to_str().unwrap();
    let run = |words: &[&str]| {
        let words: Vec<&str> = [hpcrt, "session"].iter().chain(words).copied().collect();
        let output = site.cluster.exec("hpc1", uid, &words).unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let agent = site.cluster.agent_command();
    let name = run(&["start", "--hosts", HOSTS, "--agent", &agent, "--view", "audit"]);
    for _ in 0..2 {
        site.cluster.reset_ops().unwrap();
        assert_eq!(run(&["run", name.trim(), "-q", "--", "/shared/app/bin/tls"]).lines().count(), 2);
    }
    assert_eq!(site.cluster.ops().unwrap().read_bytes, 0, "everything is where it is needed");
    run(&["stop", name.trim()]);
}

/// Whoever is killed, the libraries do not stay in memory: the others remove them, or the next session does.
fn killed(site: &Site, uid: u32) {
    use common::Role;
    for (nth, victims) in
        [&[Role::FrontEnd][..], &[Role::Agent], &[Role::Keeper], &[Role::JobKeeper], &[Role::Keeper, Role::Agent]]
            .into_iter()
            .enumerate()
    {
        let mark = format!("audit{nth}-{}", std::process::id());
        let flags = ["--view", "audit", "--prefix", "/shared/app"];
        let mut start = site.start(uid, HOSTS, &flags, &["sh", "-c", "/shared/app/bin/dynamic x; exec sleep 50"]);
        let mut child = start.env("HPCRT_TEST_MARK", &mark).spawn().unwrap();
        common::until(|| (common::role(&mark, Role::Rank).len() >= 2 && stores(site).len() == 2).then_some(()));
        std::thread::sleep(Duration::from_millis(300));
        let doomed: Vec<_> = victims.iter().flat_map(|role| common::role(&mark, *role)).collect();
        assert!(!doomed.is_empty(), "{victims:?}");
        for pid in doomed {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
        let since = Instant::now();
        let left = |expected: bool| stores(site).is_empty() == expected && common::marked(&mark).is_empty();
        while !left(victims.len() == 1) {
            assert!(since.elapsed() < common::GONE, "{victims:?} were killed: {:?}", stores(site));
            std::thread::sleep(Duration::from_millis(20));
        }
        child.wait().unwrap();
    }
    site.run(uid, HOSTS, &["-q", "--view", "audit"], &["/shared/app/bin/dynamic", "x"]).code(0);
}

/// A program whose linker cannot be told anything: refused where the view was asked for, else it runs plainly, and why is said once.
fn not_audited(site: &Site, uid: u32) {
    for (program, why) in [("static", "statically linked"), ("musl", "musl's"), ("muslstatic", "statically linked")] {
        let program = format!("/shared/app/bin/{program}");
        if !site.backing(program.strip_prefix("/shared/").unwrap()).exists() {
            continue;
        }
        let refused = site.run(uid, HOSTS, &AUDIT, &[&program]).code(125);
        refused.says(&[why, "--view none"]);
        let plain = without_namespaces(site, uid, &["-q", "--label"], &[&program, "x"]).code(0);
        assert_eq!(plain.rank(0), plain.rank(1));
        assert_eq!(plain.err().matches("reads the shared file system itself").count(), 1, "{}", plain.err());
        plain.says(&[why]);
    }
}

/// On hosts that forbid namespaces, without a word on the command line.
fn without_namespaces(site: &Site, uid: u32, flags: &[&str], program: &[&str]) -> Run {
    let begun = Instant::now();
    let output = site.start(uid, HOSTS, flags, program).env("HPCRT_WITHOUT", "userns").output().unwrap();
    Run { output, took: begun.elapsed() }
}

/// Where namespaces are forbidden the audit view is chosen, and the reason is said once for all hosts.
fn chosen(site: &Site, uid: u32) {
    let run = without_namespaces(site, uid, &["--label"], &["/shared/app/bin/origin", "x"]).code(0);
    assert_eq!(run.rank(0), "lib /shared/app/bin/origin /shared/app/bin/origin x\n");
    assert_eq!(run.rank(1), run.rank(0));
    assert_eq!(run.err().matches("HPCRT_WITHOUT forbids it").count(), 1, "{}", run.err());
    run.says(&["hpc[2-3]: ", "dynamic linkers"]);
    // A host whose RAM disk is not for programs.
    let remount =
        |how| assert!(site.cluster.exec("hpc2", 0, &["mount", "-o", how, "/dev/shm"]).unwrap().status.success());
    remount("remount,noexec");
    let flags = ["-q", "--view", "audit", "--prefix", "/shared/app"];
    let moved = site.run(uid, "hpc2", &flags, &["sh", "-c", "echo $LD_AUDIT; /shared/app/bin/tls"]).code(0);
    assert!(moved.out().starts_with("/tmp/hpcrt-store."), "{}", moved.out());
    remount("remount,exec");
    // Namespaces that are really not to be had, for an ordinary user.
    if uid != 0 {
        let script = "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --ambient-caps=-all \
                      --bounding-set=-all \"$@\"";
        let own = ["unshare", "-U", "--map-current-user", "--keep-caps", "sh", "-c", script, "sh"];
        let program =
            [site.hpcrt.to_str().unwrap(), "exec", "--agent", "local", "--hosts", "a,b", "--", "/shared/app/bin/tls"];
        let words: Vec<&str> = own.into_iter().chain(program).collect();
        let output = site.cluster.exec("hpc3", uid, &words).unwrap();
        Run { output, took: Duration::ZERO }.code(0).says(&["a,b: cannot make a user namespace: ", "dynamic linkers"]);
    }
    let namespace = without_namespaces(site, uid, &["--view", "namespace"], &["/shared/app/bin/origin"]).code(0);
    namespace.says(&["read the shared file system themselves"]);
}

/// Python's modules: found and read through the agent, and what the job makes or changes is seen.
fn python(shown: &Shown<'_>) {
    shown.same(&[], &[], &["/shared/app/bin/pool.py", "a", "b"]);
    let Shown { site, uid, .. } = *shown;
    site.place(uid, &format!("p{uid}"), &["modules.py"]);
    let (script, modules) = (format!("/shared/p{uid}/modules.py"), format!("/shared/p{uid}/modules"));
    // Where the tree was changed last: other hosts may see it as it was for a while.
    let plain = |words: &[&str]| {
        let output = site.cluster.exec("hpc2", uid, words).unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let expected = plain(&[&script, &modules]);
    assert!(expected.contains("changed, and longer"), "{expected}");
    let prefix = format!("/shared/p{uid}");
    let flags = ["-q", "--view", "audit", "--prefix", &prefix];
    let first = site.run(uid, "hpc2", &flags, &[&script, &modules]).code(0);
    assert_eq!(first.out(), expected, "{}", first.err());
    // One that the front end's host has not seen before, and with a sitecustomize of the user's.
    let modules = format!("/shared/p{uid}/again");
    plain(&[&script, &modules]);
    let own = site.backing(&format!("p{uid}/own"));
    fs::create_dir(&own).unwrap();
    fs::write(own.join("sitecustomize.py"), "print('the user\\'s own')\n").unwrap();
    let path = format!("PYTHONPATH=/shared/p{uid}/own");
    let expected = plain(&["env", &path, &script, &modules, "second"]);
    assert!(expected.starts_with("the user's own"), "{expected}");
    site.cluster.reset_ops().unwrap();
    let flags: Vec<&str> = flags.into_iter().chain(["-x", &path]).collect();
    let second = site.run(uid, "hpc3", &flags, &[&script, &modules, "second"]).code(0);
    assert_eq!(second.out(), expected, "{}", second.err());
    let ops = site.cluster.host_ops().unwrap().into_iter().find(|host| host.host == "hpc3").unwrap().ops;
    // The script, for the kernel and for Python; what the program itself lists and reads.
    assert!(ops.open <= 5, "{ops:?}");
}

fn children(shown: &Shown<'_>) {
    // Its child needs more thread-local storage than what it needs itself.
    let tree = ["--prefix", "/shared/app"];
    shown.same(&tree, &[], &["sh", "-c", "/shared/app/bin/tls; /shared/app/bin/origin"]);
    for host in shown.site.cluster.host_ops().unwrap() {
        // The second program is started again, with more room, before it loads anything.
        assert!(!["hpc2", "hpc3"].contains(&host.host.as_str()) || host.ops.open <= 3, "{host:?}");
    }
    shown.children(&tree);
}

/// A library that the job replaces: new processes, on its host and on others, get the new one. One that an outsider replaces stays as it was.
fn replaced(site: &Site, uid: u32) {
    let place = site.place(uid, &format!("r{uid}"), &["replaced.py"]);
    let line = |rank| {
        format!(
            "p=/shared/r{uid}/bin/origin; $p; if [ {rank} = 1 ]; then sleep 0.5; mv /shared/r{uid}/new.so /shared/r{uid}/lib/libpart.so; fi; \
             sleep 1.5; $p"
        )
    };
    for directory in ["bin", "lib"] {
        fs::create_dir(place.join(directory)).unwrap();
        std::os::unix::fs::chown(place.join(directory), Some(uid), Some(uid)).unwrap();
    }
    for (from, to) in
        [("bin/origin", "bin/origin"), ("lib/libpart.so", "lib/libpart.so"), ("other/libpart.so", "new.so")]
    {
        fs::copy(site.backing("app").join(from), place.join(to)).unwrap();
        std::os::unix::fs::chown(place.join(to), Some(uid), Some(uid)).unwrap();
    }
    let prefix = format!("/shared/r{uid}");
    let flags = ["-q", "--label", "--prefix", &prefix, "--view", "audit"];
    let run = site.run(uid, HOSTS, &flags, &["sh", "-c", &line("$HPCRT_RANK")]).code(0);
    let path = format!("/shared/r{uid}/bin/origin");
    for rank in RANKS {
        assert_eq!(
            run.rank(rank),
            format!("lib {path} {path}\nother {path} {path}\n"),
            "{rank} as {uid}: {}",
            run.err()
        );
    }
}

/// Milliseconds from the start of a process to its main, over many starts: least, median.
fn starts(err: &[u8]) -> (f64, f64) {
    let text = String::from_utf8_lossy(err);
    let times = text.lines().filter_map(|line| line.strip_prefix("main_at ")?.rsplit_once(' ')?.1.parse::<f64>().ok());
    let mut times: Vec<f64> = times.map(|seconds| seconds * 1e3).collect();
    times.sort_by(f64::total_cmp);
    assert!(times.len() > 2, "{text}");
    // The first one of all fetches the libraries.
    times.pop();
    (times[0], times[times.len() / 2])
}

/// Figures for a program of 495 libraries, warm: beside a plain run of the same files in the host's page cache, and what its processes ask
/// of the shared file system. `cargo xtask proofs audit`.
#[test]
#[ignore = "long: two minutes, 257 MB generated"]
fn warm_start() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED warm start: {obstacle}");
    }
    let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = Libraries { at: Some("/shared/program".into()), ..Libraries::default() };
    program.generate(&backing.path().join("program")).unwrap();
    let spec = Spec { hosts: 2, backing: Some(backing.path().to_owned()), ..Spec::of("t-warm") };
    let cluster = Cluster::up(spec).unwrap();
    let many = |count: u32| {
        format!("for i in $(seq {count}); do GEN_T0=$(date +%s.%N) HPCRT_RANK=0 /shared/program/driver; done")
    };
    let source = backing.path().join("program");
    let local = format!("mount --bind {} /shared/program && {}", source.display(), many(21));
    let plain = cluster.exec("hpc2", 0, &["unshare", "-m", "sh", "-c", &local]).unwrap();
    assert!(plain.status.success(), "{plain:?}");
    let (agent, binary) = (cluster.agent_command(), env!("CARGO_BIN_EXE_hpcrt"));
    let audited = |count: u32| {
        cluster.reset_ops().unwrap();
        let words = [
            binary,
            "exec",
            "-q",
            "--view",
            "audit",
            "--prefix",
            "/shared/program",
            "--hosts",
            "hpc2",
            "--agent",
            &agent,
        ];
        let script = many(count);
        let words: Vec<&str> = words.into_iter().chain(["--", "sh", "-c", &script]).collect();
        let done = cluster.exec("hpc1", 65534, &words).unwrap();
        assert!(done.status.success(), "{done:?}");
        let ops = cluster.host_ops().unwrap().into_iter().find(|host| host.host == "hpc2").unwrap().ops;
        (done, ops)
    };
    let ((_, few), (done, lots)) = (audited(3), audited(23));
    let ((plain, median), (least, audited)) = (starts(&plain.stderr), starts(&done.stderr));
    println!("milliseconds to main, least and median: plain {plain:.1} {median:.1}, audited {least:.1} {audited:.1}");
    println!("operations of the host at the shared file system: 3 processes {few:?}");
    println!("operations of the host at the shared file system: 23 processes {lots:?}");
    let more = |a: u64, b: u64| b.saturating_sub(a);
    assert!(more(few.open, lots.open) <= 20, "a process opens nothing there but its program");
    assert_eq!((more(few.absent, lots.absent), more(few.read_bytes, lots.read_bytes)), (0, 0));
    assert!(least - plain < 20.0, "at most 20 ms over plain");
}

/// A Debian of its own, with a compiler; kept, since it takes a minute. `None`, and why is said: it cannot be had here.
fn debian(suite: &str) -> Option<PathBuf> {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("debian-{suite}"));
    let whole = place.join("whole");
    if !whole.exists() {
        let _ = fs::remove_dir_all(&place);
        let mut command = Command::new("debootstrap");
        command.args(["--variant=minbase", "--include=gcc,libc6-dev", suite]).arg(&place);
        match command.arg("http://deb.debian.org/debian").output() {
            Ok(done) if done.status.success() => fs::write(&whole, "").unwrap(),
            failed => {
                eprintln!("SKIPPED the glibc of {suite}: debootstrap (as root, with a network) is needed: {failed:?}");
                return None;
            }
        }
    }
    Some(place)
}

/// Programs of older and newer versions of glibc, which lie beside them on the shared file system: their libraries are staged, and calls
/// cost what they cost plainly. `cargo xtask proofs glibc`.
#[test]
#[ignore = "long: installs two Debians"]
fn other_versions_of_glibc() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED other versions of glibc: {obstacle}");
    }
    let site = Site::up("glibc");
    let shown = Shown { site: &site, uid: 65534, flags: &AUDIT, opens: 1 };
    for (suite, version) in [("bullseye", "2.31"), ("trixie", "2.41")] {
        let Some(debian) = debian(suite) else { continue };
        let place = site.backing(suite);
        fs::create_dir(&place).unwrap();
        fs::create_dir_all(debian.join("build")).unwrap();
        fs::copy(site::source("calls.c"), debian.join("build/calls.c")).unwrap();
        fs::copy(site::source("open.c"), debian.join("build/open.c")).unwrap();
        let at = format!("/shared/{suite}");
        let link = format!("-Wl,-z,lazy,-rpath,{at},--dynamic-linker={at}/ld.so");
        let script = format!(
            "cd /build && gcc -O1 -fPIC -shared -DLIBRARY calls.c -o libnext.so \
             && gcc -O1 -fPIC -shared -DPLUGIN calls.c -o plugin.so -L. -lnext {link} \
             && gcc -O1 calls.c -o calls -L. -lnext -ldl {link} && gcc open.c -o open -ldl {link} \
             && cp /lib64/ld-linux-x86-64.so.2 ld.so && cp /lib/x86_64-linux-gnu/libc.so.6 . \
             && cp /lib/x86_64-linux-gnu/libdl.so.2 . && ldd --version"
        );
        let built = Command::new("chroot").arg(&debian).args(["sh", "-c", &script]).output().unwrap();
        assert!(String::from_utf8_lossy(&built.stdout).contains(version), "{built:?}");
        for file in ["libnext.so", "plugin.so", "calls", "open", "ld.so", "libc.so.6", "libdl.so.2"] {
            fs::copy(debian.join("build").join(file), place.join(file)).unwrap();
        }
        let (open, plugin) = (format!("{at}/open"), format!("{at}/plugin.so"));
        shown.same(&[], &[], &[&open, "libnext.so", &plugin]);
        let opened = site.cluster.host_ops().unwrap().into_iter().find(|host| host.host == "hpc2").unwrap().ops.open;
        assert_eq!(opened, 2, "the kernel opens the program and its dynamic linker");
        let calls = format!("{at}/calls");
        let costs = |text: String| -> Vec<f64> { text.split_whitespace().map(|n| n.parse().unwrap()).collect() };
        let plain = site.cluster.exec("hpc2", 65534, &[&calls, &plugin]).unwrap();
        let plain = costs(String::from_utf8_lossy(&plain.stdout).into_owned());
        let audited = costs(site.run(65534, "hpc2", &["-q", "--view", "audit"], &[&calls, &plugin]).code(0).out());
        println!(
            "glibc {version}, ns a call from the program and from what it opened: plain {plain:?}, audited {audited:?}"
        );
        for (plain, audited) in plain.iter().zip(&audited) {
            // Through the linker it would be five times as much.
            assert!(*audited < plain * 2.0 + 0.5, "{plain} and {audited} ns");
        }
    }
}

/// A directory that another host put in the place of one between two jobs of a session: what a rank then replaces in it is seen.
fn exchanged(site: &Site, uid: u32) {
    let place = site.place(uid, &format!("x{uid}"), &[]);
    for directory in ["bin", "lib"] {
        fs::create_dir(place.join(directory)).unwrap();
    }
    let app = site.backing("app");
    for (from, to) in
        [("bin/origin", "bin/origin"), ("lib/libpart.so", "lib/libpart.so"), ("other/libpart.so", "new.so")]
    {
        fs::copy(app.join(from), place.join(to)).unwrap();
    }
    let there = format!("/shared/x{uid}");
    let own = format!("chown -R {uid}:{uid} {there}");
    let exchange = format!("cd {there} && mv lib old && cp -r old lib");
    let run = |host: &str, uid: u32, words: &[&str]| {
        let output = site.cluster.exec(host, uid, words).unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    run("hpc1", 0, &["sh", "-c", &own]);
    let (hpcrt, agent) = (site.hpcrt.to_str().unwrap(), site.cluster.agent_command());
    let start = [hpcrt, "session", "start", "--hosts", HOSTS, "--agent", &agent, "--view", "audit"];
    let name = run("hpc1", uid, &start).trim().to_owned();
    let job = |script: &str| {
        let words = [hpcrt, "session", "run", &name, "-q", "--label", "--prefix", &there, "--", "sh", "-c", script];
        let out = run("hpc1", uid, &words);
        let mut lines: Vec<String> = out.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let program = format!("{there}/bin/origin");
    let says = |version: &str| RANKS.map(|rank| format!("[{rank}] {version} {program} {program}"));
    assert_eq!(job(&program), says("lib"));
    run("hpc1", uid, &["sh", "-c", &exchange]);
    // Until then hosts see what they saw.
    let wait = || std::thread::sleep(Spec::of("").trust + Duration::from_secs(1));
    wait();
    assert_eq!(job(&program), says("lib"));
    wait();
    // As soon as the other has run it; what changes within a job is seen some milliseconds later.
    site.place(uid, &format!("ran{uid}"), &[]);
    let replace = format!(
        "if [ $HPCRT_RANK = 0 ]; then touch /shared/ran{uid}/once; else until [ -e /shared/ran{uid}/once ]; do sleep 0.1; done; \
         mv {there}/new.so {there}/lib/libpart.so; fi"
    );
    let soon = format!("n=0; until {program} | grep -q ^other || [ $n = 20 ]; do n=$((n + 1)); sleep 0.1; done");
    let lines = job(&format!("{program}; {replace}; {soon}; {program}"));
    let mut expected = [says("lib"), says("other")].concat();
    expected.sort();
    assert_eq!(lines, expected, "as {uid}");
    run("hpc1", uid, &[hpcrt, "session", "stop", &name]);
}
