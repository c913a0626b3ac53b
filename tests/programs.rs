//! Unmodified programs on hosts of this machine, with their files from the stores of their nodes, as root and as ordinary users: the
//! output is that of a plain run, and the hosts of the ranks do not read the shared file system.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};

/// root, the cluster's ordinary user, and one without a name or a home.
const USERS: [u32; 3] = [0, 20001, 65534];
/// The front end runs on the first host, the ranks on these; the last has a local library of its own.
const HOSTS: &str = "hpc2,hpc3";
const RANKS: [usize; 2] = [0, 1];

struct Site {
    cluster: Cluster,
    hpcrt: PathBuf,
}

struct Run {
    output: Output,
    took: Duration,
}

impl Run {
    fn out(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    fn err(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// What a rank of a labelled run printed.
    fn rank(&self, rank: usize) -> String {
        let label = format!("[{rank}] ");
        self.out().lines().filter_map(|l| l.strip_prefix(&label)).map(|l| format!("{l}\n")).collect()
    }

    #[track_caller]
    fn code(self, expected: i32) -> Run {
        assert_eq!(self.output.status.code(), Some(expected), "{:?} {}{}", self.output.status, self.out(), self.err());
        self
    }

    #[track_caller]
    fn says(self, words: &[&str]) -> Run {
        for word in words {
            assert!(self.err().contains(word), "{word:?} is not in: {}", self.err());
        }
        self
    }
}

impl Site {
    fn up() -> Site {
        let cluster = Cluster::up(Spec { name: name(), ..Spec::default() }).unwrap();
        // Where every user of every host can execute it, and no operation is counted.
        let hpcrt = cluster.state().file("hpcrt");
        fs::copy(env!("CARGO_BIN_EXE_hpcrt"), &hpcrt).unwrap();
        Site { cluster, hpcrt }
    }

    fn start(&self, uid: u32, hosts: &str, flags: &[&str], program: &[&str]) -> Command {
        let agent = self.cluster.agent_command();
        let mut words =
            vec![self.hpcrt.to_str().unwrap(), "exec", "--timeout", "60", "--hosts", hosts, "--agent", &agent];
        words.extend(flags);
        words.push("--");
        words.extend(program);
        let mut command = self.cluster.command("hpc1", uid, &words);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, uid: u32, hosts: &str, flags: &[&str], program: &[&str]) -> Run {
        let begun = Instant::now();
        let output = self.start(uid, hosts, flags, program).output().unwrap();
        Run { output, took: begun.elapsed() }
    }

    /// Runs a program plainly and through hpcrt, and compares; returns the hpcrt run. `plain`: flags as words for `env`.
    #[track_caller]
    fn same(&self, uid: u32, flags: &[&str], plain: &[&str], program: &[&str]) -> Run {
        let command: Vec<&str> = ["env"].iter().chain(plain).chain(program).copied().collect();
        // Not where ranks run: what the kernel still reads ahead for it would be counted as theirs.
        let expected = self.cluster.exec("hpc1", uid, &command).unwrap();
        assert!(expected.status.success(), "{program:?} plainly: {expected:?}");
        let flags: Vec<&str> = ["--label", "-q"].iter().chain(flags).copied().collect();
        self.cluster.reset_ops().unwrap();
        let run = self.run(uid, HOSTS, &flags, program).code(0);
        for rank in RANKS {
            assert_eq!(
                run.rank(rank),
                String::from_utf8_lossy(&expected.stdout),
                "{program:?} as {uid}: {}",
                run.err()
            );
        }
        run
    }

    /// [`Site::same`], and no rank's host read a file from the shared file system.
    #[track_caller]
    fn staged(&self, uid: u32, flags: &[&str], plain: &[&str], program: &[&str]) {
        self.same(uid, flags, plain, program);
        for host in self.cluster.host_ops().unwrap() {
            if ["hpc2", "hpc3"].contains(&host.host.as_str()) {
                assert_eq!(
                    (host.ops.open, host.ops.read),
                    (0, 0),
                    "{program:?} as {uid} on {}: {:?}",
                    host.host,
                    host.ops
                );
            }
        }
    }

    fn backing(&self, name: &str) -> PathBuf {
        self.cluster.backing().join(name)
    }

    /// A fresh directory of the user's, with copies of scripts.
    fn place(&self, uid: u32, name: &str, scripts: &[&str]) -> PathBuf {
        let place = self.backing(name);
        fs::create_dir(&place).unwrap();
        for script in scripts {
            fs::copy(source(script), place.join(script)).unwrap();
            mode(&place.join(script), 0o755);
        }
        std::os::unix::fs::chown(&place, Some(uid), Some(uid)).unwrap();
        place
    }
}

/// Of the cluster: the same in every run from one checkout, so that a run replaces what a killed one left, and no other's.
fn name() -> String {
    let mut hasher = std::hash::DefaultHasher::new();
    env!("CARGO_MANIFEST_DIR").hash(&mut hasher);
    format!("t-programs-{:08x}", hasher.finish() >> 32)
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name)
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn tool(name: &str) -> bool {
    let found = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        eprintln!("SKIPPED what needs {name}: it is not here");
    }
    found
}

/// The programs, in `/shared/app` as the hosts see it.
fn build(site: &Site) {
    let app = site.backing("app");
    for directory in ["bin", "lib", "run", "other"] {
        fs::create_dir_all(app.join(directory)).unwrap();
    }
    let line = |line: &str| {
        let words = line.split_whitespace().map(|w| match w.strip_prefix('@') {
            Some(name) => source(name).into_os_string(),
            None => w.into(),
        });
        let words: Vec<_> = words.collect();
        let done = Command::new(&words[0]).args(&words[1..]).current_dir(&app).output().unwrap();
        assert!(done.status.success(), "{line}: {:?} {}", done.status, String::from_utf8_lossy(&done.stderr));
    };
    for who in ["lib", "run", "other"] {
        line(&format!("gcc -g -shared -fPIC -DWHO=\"{who}\" @part.c -o {who}/libpart.so -Wl,-soname,libpart.so"));
    }
    let app_c = "gcc -g @app.c -Llib -lpart";
    line(&format!("{app_c} -o bin/rpath -Wl,--disable-new-dtags,-rpath,/shared/app/lib"));
    line(&format!("{app_c} -o bin/runpath -Wl,--enable-new-dtags,-rpath,/shared/app/run"));
    line(&format!("{app_c} -o bin/origin -Wl,--enable-new-dtags,-rpath,$ORIGIN/../lib"));
    line(&format!("{app_c} -o bin/nopath"));
    line("gcc @open.c -o bin/open -ldl -Wl,-rpath,/shared/app/lib");
    line("gcc -shared -fPIC -DBYTES=8192 @tls.c -o lib/libtls.so -lpthread");
    line("gcc @tlsmain.c -o bin/tls -Llib -ltls -Wl,-rpath,$ORIGIN/../lib");
    line("g++ -shared -fPIC @thrower.cc -o lib/libthrower.so");
    line("g++ @catcher.cc -o bin/catcher -Llib -lthrower -Wl,-rpath,$ORIGIN/../lib -lpthread");
    line("gcc @plain.c -o bin/dynamic");
    line("gcc -static @plain.c -o bin/static");
    if tool("musl-gcc") {
        line("musl-gcc @plain.c -o bin/musl");
        line("musl-gcc -static @plain.c -o bin/muslstatic");
    }
    for name in ["pool.py", "helper.py", "children.sh"] {
        fs::copy(source(name), app.join("bin").join(name)).unwrap();
        mode(&app.join("bin").join(name), 0o755);
    }
    fs::write(app.join("bin/script"), "#!/shared/app/bin/dynamic one argument\n").unwrap();
    mode(&app.join("bin/script"), 0o755);
    for (name, bits) in [("xonly", 0o711), ("setuid", 0o4755)] {
        fs::copy(app.join("bin/static"), app.join("bin").join(name)).unwrap();
        mode(&app.join("bin").join(name), bits);
    }
    std::os::unix::fs::symlink("app", site.backing("link")).unwrap();
}

/// One test: the cluster is made once.
#[test]
fn programs() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED programs: {obstacle}");
    }
    if !["gcc", "g++"].into_iter().all(tool) {
        return;
    }
    let site = Site::up();
    build(&site);
    for uid in USERS {
        let begun = Instant::now();
        linked_and_loaded(&site, uid);
        paths(&site, uid);
        python(&site, uid);
        children(&site, uid);
        writing(&site, uid);
        rights(&site, uid);
        replaced(&site, uid);
        stores(&site, uid);
        eprintln!("as {uid}: {:?}", begun.elapsed());
    }
    ssh_configuration(&site);
    without_fuse(&site);
    assert_eq!(site.cluster.leftovers().unwrap().len(), 0, "{:?}", site.cluster.leftovers().unwrap());
}

fn linked_and_loaded(site: &Site, uid: u32) {
    for program in ["rpath", "runpath", "origin", "tls", "catcher", "dynamic", "static", "musl", "muslstatic"] {
        if site.backing("app/bin").join(program).exists() {
            site.staged(uid, &[], &[], &[&format!("/shared/app/bin/{program}"), "an argument"]);
        }
    }
    let names = [
        "libpart.so",
        "/shared/app/run/libpart.so",
        "/shared/link/other/libpart.so",
        "/shared/app/bin/../lib/libtls.so",
    ];
    let open: Vec<&str> = ["/shared/app/bin/open"].into_iter().chain(names).collect();
    site.staged(uid, &["--prefix", "/shared/app"], &[], &open);
    let path = "LD_LIBRARY_PATH=/shared/app/other";
    site.staged(uid, &["-x", path], &[path], &["/shared/app/bin/nopath"]);
    site.staged(uid, &["-x", path], &[path], &["/shared/app/bin/rpath"]);
    let preload = "LD_PRELOAD=/shared/app/other/libpart.so";
    site.staged(uid, &["-x", preload], &[preload], &["/shared/app/bin/runpath"]);
    // A library that only one host has in another version.
    let local = site.run(uid, "hpc3,hpc4", &["-q", "--label"], &["/shared/hostlocal"]).code(0);
    assert_eq!((local.rank(0), local.rank(1)), ("common\n".into(), "last\n".into()));
}

fn paths(site: &Site, uid: u32) {
    site.staged(uid, &[], &[], &["/shared/link/bin/origin"]);
    site.staged(uid, &[], &[], &["/shared/app/lib/../bin/rpath"]);
    site.staged(uid, &[], &[], &["/shared/app/bin/script", "x"]);
    for (directory, program) in
        [("/shared/app/lib", "../bin/origin"), ("/shared/app/bin", "./rpath"), ("/shared/link", "./bin/rpath")]
    {
        let run = site.run(uid, HOSTS, &["-q", "--cwd", directory], &["sh", "-c", "pwd; exec $0", program]).code(0);
        assert_eq!(run.out().lines().filter(|l| *l == directory.replace("link", "app")).count(), 2, "{}", run.out());
        assert_eq!(run.out().matches(program).count(), 2, "{}", run.out());
    }
    // Found here, in the directory where this stands and along PATH.
    let agent = site.cluster.agent_command();
    let line = format!(
        "cd /shared/app/lib && PATH=/shared/link/bin:$PATH && for p in ../bin/origin origin; do {} exec --hosts {HOSTS} \
         --agent '{agent}' -q -- $p; done",
        site.hpcrt.display()
    );
    let done = site.cluster.exec("hpc1", uid, &["sh", "-c", &line]).unwrap();
    let out = String::from_utf8_lossy(&done.stdout);
    assert_eq!(out.matches("lib /shared/app/bin/origin").count(), 4, "{out}{}", String::from_utf8_lossy(&done.stderr));
    let missing = site.run(uid, HOSTS, &["-q"], &["/shared/app/bin/missing"]).code(125);
    assert!(missing.err().contains("/shared/app/bin/missing"), "{}", missing.err());
}

fn python(site: &Site, uid: u32) {
    site.same(uid, &[], &[], &["/shared/app/bin/pool.py", "a", "b"]);
}

fn children(site: &Site, uid: u32) {
    if ["git", "rsync", "ssh"].into_iter().all(tool) {
        let home = ["HOME=/tmp"];
        site.same(uid, &["-x", home[0]], &home, &["/shared/app/bin/children.sh"]);
    }
    if tool("gdb") {
        let gdb =
            ["gdb", "-batch", "-nx", "-ex", "break who", "-ex", "run", "-ex", "backtrace", "-ex", "info sharedlibrary"];
        let words: Vec<&str> = gdb.into_iter().chain(["/shared/app/bin/rpath"]).collect();
        let run = site.run(uid, HOSTS, &["-q", "--label", "--prefix", "/shared/app"], &words).code(0);
        for rank in RANKS {
            let said = run.rank(rank);
            for name in ["/shared/app/lib/libpart.so", "part.c:", "in main"] {
                assert!(said.contains(name), "{name} is not in {said}{}", run.err());
            }
        }
    }
}

fn writing(site: &Site, uid: u32) {
    let name = format!("w{uid}");
    let place = site.place(uid, &name, &["writer.py", "together.py"]);
    let writer = format!("/shared/{name}/writer.py");
    let expected = site.cluster.exec("hpc4", uid, &[&writer, "plain"]).unwrap();
    let expected = String::from_utf8_lossy(&expected.stdout).replace("_of_plain", "_of_X");
    assert!(expected.contains("compiled"), "{expected}");
    for rank in RANKS {
        let own = format!("own{rank}");
        let run = site.run(uid, ["hpc2", "hpc3"][rank], &["-q"], &[&writer, &own]).code(0);
        assert_eq!(run.out().replace(&format!("_of_{own}"), "_of_X"), expected, "as {uid}: {}", run.err());
        assert_eq!(fs::read_to_string(place.join(format!("out.{own}/renamed"))).unwrap(), "ONE");
    }
    for n in 0..3 {
        let script = format!("/shared/{name}/together.py");
        let run = site.run(uid, "hpc2:2,hpc3,hpc4", &["-q"], &[&script, &format!("t{n}")]).code(0);
        assert_eq!(run.out(), "together\n".repeat(4));
    }
}

/// What may be executed but not read runs; what would change the user is named.
fn rights(site: &Site, uid: u32) {
    site.same(uid, &[], &[], &["/shared/app/bin/xonly"]);
    let run = site.run(uid, HOSTS, &["--label"], &["/shared/app/bin/setuid"]).code(0);
    if uid != 0 {
        run.says(&["/shared/app/bin/setuid is set-user-ID"]);
        let begun = Instant::now();
        let refused = site.run(uid, HOSTS, &["-q", "--prefix", "/shared/app"], &["sh", "-c", "/shared/app/bin/xonly"]);
        refused.code(126).says(&["ermission denied"]);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

/// A library that an outsider replaces during the job: new processes see one version, the old one.
fn replaced(site: &Site, uid: u32) {
    let place = site.place(uid, &format!("r{uid}"), &["replaced.py"]);
    for (from, to) in [("bin/origin", "origin"), ("lib/libpart.so", "old.so"), ("other/libpart.so", "new.so")] {
        fs::copy(site.backing("app").join(from), place.join(to)).unwrap();
    }
    // $ORIGIN/../lib
    let library = site.backing("lib");
    fs::create_dir_all(&library).unwrap();
    fs::copy(place.join("old.so"), library.join("libpart.so")).unwrap();
    let script = format!("/shared/r{uid}/replaced.py");
    // Not in a captured directory: there an outsider's new name is not seen.
    let flag = format!("/shared/now{uid}");
    let child = site.start(uid, HOSTS, &["-q", "--prefix", "/shared/lib"], &[&script, &flag]).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    fs::copy(place.join("new.so"), library.join("new")).unwrap();
    fs::rename(library.join("new"), library.join("libpart.so")).unwrap();
    fs::write(site.backing(&format!("now{uid}")), "").unwrap();
    let output = child.wait_with_output().unwrap();
    let run = Run { output, took: Duration::ZERO }.code(0);
    assert_eq!(run.out(), "lib\n".repeat(4), "{}", run.err());
}

/// Stores that are too small are named at once, with the remedy; those in a directory leave nothing there.
fn stores(site: &Site, uid: u32) {
    let prepare = "rm -rf /tmp/st; umount /tmp/tiny 2>/dev/null; mkdir -p /tmp/tiny && mount -t tmpfs -o size=1m,mode=1777 none /tmp/tiny \
                   && mkdir -m 1777 /tmp/st";
    for host in ["hpc2", "hpc3"] {
        assert!(site.cluster.exec(host, 0, &["sh", "-c", prepare]).unwrap().status.success());
    }
    let app = site.place(uid, &format!("s{uid}"), &[]);
    fs::copy(site.backing("app/bin/dynamic"), app.join("large")).unwrap();
    let noise: Vec<u8> = (0..28_000_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    fs::write(app.join("noise"), noise).unwrap();
    let large = app.join("large");
    let section = format!(".noise={}", app.join("noise").display());
    assert!(Command::new("objcopy").arg("--add-section").arg(section).arg(&large).status().unwrap().success());
    let program = format!("/shared/s{uid}/large");
    for _ in 0..2 {
        let full = site.run(uid, HOSTS, &["--store", "/tmp/tiny"], &[&program]).code(125);
        assert!(full.took < Duration::from_secs(10), "{:?}", full.took);
        full.says(&["hpcrt: hpc", "107 MiB are needed and ", " MiB are free", "--store"]);
        site.run(uid, HOSTS, &["--store", "/tmp/st"], &[&program]).code(0);
    }
    for host in ["hpc2", "hpc3"] {
        let left = site.cluster.exec(host, 0, &["find", "/tmp/tiny", "/tmp/st", "-mindepth", "1"]).unwrap();
        assert_eq!(String::from_utf8_lossy(&left.stdout), "", "{host}");
        assert!(
            site.cluster
                .exec(host, 0, &["sh", "-c", "umount /tmp/tiny; rm -r /tmp/tiny /tmp/st"])
                .unwrap()
                .status
                .success()
        );
    }
    small_memory(site, uid, &program);
}

/// The default store in a memory cgroup (version 1) that is too small for the program.
fn small_memory(site: &Site, uid: u32, program: &str) {
    let group = Path::new("/sys/fs/cgroup/memory").join(name());
    let _ = fs::remove_dir(&group);
    if fs::create_dir(&group).is_err() || fs::write(group.join("memory.limit_in_bytes"), "204M").is_err() {
        return eprintln!("SKIPPED the small memory cgroup: no version 1 memory controller to write to");
    }
    mode(&group.join("cgroup.procs"), 0o666);
    let agent = format!("echo $$ > {}/cgroup.procs; exec {}", group.display(), site.cluster.agent_command());
    let hpcrt = site.hpcrt.to_str().unwrap();
    let words = [hpcrt, "exec", "--hosts", "hpc2", "--agent", &agent, "--", program];
    let output = site.cluster.exec("hpc1", uid, &words).unwrap();
    for _ in 0..100 {
        if fs::remove_dir(&group).is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Run { output, took: Duration::ZERO }.code(125).says(&["hpc2: ", "107 MiB are needed and ", "--store"]);
}

/// In a user namespace root's files are nobody's, which ssh does not accept of its configuration.
fn ssh_configuration(site: &Site) {
    let line = "mkdir /tmp/d && echo 'Host *' > /tmp/d/x.conf && mount --bind /tmp/d /etc/ssh/ssh_config.d";
    if !tool("ssh") || !site.cluster.exec("hpc2", 0, &["sh", "-c", line]).unwrap().status.success() {
        return eprintln!("SKIPPED ssh's configuration: there is no /etc/ssh/ssh_config.d");
    }
    let run = site.run(20001, "hpc2", &["-q", "--prefix", "/shared/app"], &["ssh", "-G", "localhost"]).code(0);
    assert!(run.out().starts_with("host localhost"), "{}{}", run.out(), run.err());
    site.cluster.exec("hpc2", 0, &["sh", "-c", "umount /etc/ssh/ssh_config.d; rm -r /tmp/d"]).unwrap();
}

/// A host whose /dev/fuse is not for everybody: one warning, and the contents still come from the store.
fn without_fuse(site: &Site) {
    site.cluster.exec("hpc3", 0, &["chmod", "0", "/dev/fuse"]).unwrap();
    let run = site.run(20001, HOSTS, &["--label"], &["/shared/app/bin/origin"]).code(0);
    assert_eq!(run.rank(0), run.rank(1));
    assert_eq!(run.err().matches("no FUSE").count(), 1, "{}", run.err());
    run.says(&["hpc3: no FUSE"]);
    site.cluster.exec("hpc3", 0, &["chmod", "666", "/dev/fuse"]).unwrap();
}
