//! Unmodified programs on hosts of this machine, with their files from the stores of their nodes, as root and as ordinary users: the
//! output is that of a plain run, and the hosts of the ranks do not read the shared file system.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "common/site.rs"]
mod site;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};
use site::{HOSTS, RANKS, Run, Shown, Site, build, mode, tool};

/// root, the cluster's ordinary user, and one without a name or a home.
const USERS: [u32; 3] = [0, 20001, 65534];
/// One test: the cluster is made once.
#[test]
fn programs() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED programs: {obstacle}");
    }
    if !["gcc", "g++"].into_iter().all(tool) {
        return;
    }
    let site = Site::up("programs");
    build(&site);
    for uid in USERS {
        let begun = Instant::now();
        let shown = Shown { site: &site, uid, flags: &[], opens: 0 };
        shown.linked(&["rpath", "runpath", "origin", "tls", "catcher", "dynamic", "static", "musl", "muslstatic"]);
        shown.opened();
        paths(&shown);
        shown.same(&[], &[], &["/shared/app/bin/pool.py", "a", "b"]);
        shown.children(&[]);
        shown.writing(3);
        rights(&shown);
        owners(&shown);
        replaced(&site, uid);
        mounts_within(&site, uid);
        stores(&site, uid);
        eprintln!("as {uid}: {:?}", begun.elapsed());
    }
    ssh_configuration(&site);
    without_fuse(&site);
    assert_eq!(site.cluster.leftovers().unwrap().len(), 0, "{:?}", site.cluster.leftovers().unwrap());
}

/// Every way to name the program.
fn paths(shown: &Shown<'_>) {
    shown.staged(&[], &[], &["/shared/app/bin/script", "x"]);
    let Shown { site, uid, .. } = *shown;
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

/// What may be executed but not read runs; what would change the user is named.
fn rights(shown: &Shown<'_>) {
    shown.same(&[], &[], &["/shared/app/bin/xonly"]);
    let Shown { site, uid, .. } = *shown;
    let run = site.run(uid, HOSTS, &["--label"], &["/shared/app/bin/setuid"]).code(0);
    if uid != 0 {
        run.says(&["/shared/app/bin/setuid is set-user-ID"]);
        let begun = Instant::now();
        let refused = site.run(uid, HOSTS, &["-q", "--prefix", "/shared/app"], &["sh", "-c", "/shared/app/bin/xonly"]);
        refused.code(126).says(&["ermission denied"]);
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }
}

/// What others own can be removed and renamed in the user's own directory, and not written.
fn owners(shown: &Shown<'_>) {
    let Shown { site, uid, .. } = *shown;
    let place = site.place(uid, &format!("o{uid}"), &[]);
    for name in ["removed", "renamed"] {
        fs::write(place.join(name), "root's\n").unwrap();
    }
    let prefix = format!("/shared/o{uid}");
    let writes = if uid == 0 { "true" } else { "! sh -c 'echo x >> other' 2>/dev/null" };
    let script =
        format!("cd {prefix} && ls >/dev/null && rm -f removed && mv -f renamed other && {writes} && cat other");
    let run = site.run(uid, "hpc2", &["-q", "--prefix", &prefix], &["sh", "-c", &script]).code(0);
    assert_eq!((run.out(), run.err()), ("root's\n".into(), String::new()));
    let left: Vec<_> = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["other"]);
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
    let mut child = site.start(uid, HOSTS, &["-q", "--prefix", "/shared/lib"], &[&script, &flag]).spawn().unwrap();
    let (mut said, mut out) = (String::new(), BufReader::new(child.stdout.take().unwrap()));
    // Each has run it once.
    for _ in RANKS {
        out.read_line(&mut said).unwrap();
    }
    fs::copy(place.join("new.so"), library.join("new")).unwrap();
    fs::rename(library.join("new"), library.join("libpart.so")).unwrap();
    fs::write(site.backing(&format!("now{uid}")), "").unwrap();
    out.read_to_string(&mut said).unwrap();
    let run = Run { output: child.wait_with_output().unwrap(), took: Duration::ZERO }.code(0);
    assert_eq!(said, "lib\n".repeat(4), "{}", run.err());
}

/// What a host has mounted within a captured directory is its own: a directory, and a module that is read before anybody asks for it.
fn mounts_within(site: &Site, uid: u32) {
    let place = format!("/shared/mw{uid}");
    let app = site.place(uid, &format!("mw{uid}"), &[]);
    fs::create_dir(app.join("own")).unwrap();
    fs::write(app.join("app.sh"), "#!/bin/sh\ncat $(dirname $0)/own/which; ls $(dirname $0)/own\n").unwrap();
    mode(&app.join("app.sh"), 0o755);
    fs::write(app.join("app.py"), "import module\nprint(module.name)\n").unwrap();
    fs::write(app.join("module.py"), "name = 'nobody'\n").unwrap();
    for host in ["hpc1", "hpc2", "hpc3"] {
        let mount = format!(
            "cd {place} && mount -t tmpfs none own && echo {host} > own/which && touch own/{host} && mount -t tmpfs none /mnt && \
             echo \"name = '{host}'\" > /mnt/module.py && mount --bind /mnt/module.py module.py"
        );
        assert!(site.cluster.exec(host, 0, &["sh", "-c", &mount]).unwrap().status.success());
    }
    let run = site.run(uid, HOSTS, &["--label"], &[&format!("{place}/app.sh")]).code(0);
    for (rank, host) in RANKS.into_iter().zip(["hpc2", "hpc3"]) {
        assert_eq!(run.rank(rank), format!("{host}\n{host}\nwhich\n"), "{}", run.err());
    }
    let run = site.run(uid, HOSTS, &["--label"], &["python3", "-B", &format!("{place}/app.py")]).code(0);
    for (rank, host) in RANKS.into_iter().zip(["hpc2", "hpc3"]) {
        assert_eq!(run.rank(rank), format!("{host}\n"), "{}", run.err());
    }
    for host in ["hpc1", "hpc2", "hpc3"] {
        for mounted in [&format!("{place}/own"), &format!("{place}/module.py"), "/mnt"] {
            assert!(site.cluster.exec(host, 0, &["umount", mounted]).unwrap().status.success());
        }
    }
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
    // What cannot be used is said, and the ranks of all hosts run.
    for place in ["/tmp/missing", "/root"].into_iter().take(if uid == 0 { 1 } else { 2 }) {
        site.run(uid, HOSTS, &["--store", place], &[&program]).code(0).says(&[place, "read the shared file system"]);
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

/// A memory cgroup (version 1) too small for the program: its files go to a disk, and without one the lack is named.
fn small_memory(site: &Site, uid: u32, program: &str) {
    let group = Path::new("/sys/fs/cgroup/memory").join(Spec::of("t-programs").name);
    let _ = fs::remove_dir(&group);
    if fs::create_dir(&group).is_err() || fs::write(group.join("memory.limit_in_bytes"), "204M").is_err() {
        return eprintln!("SKIPPED the small memory cgroup: no version 1 memory controller to write to");
    }
    mode(&group.join("cgroup.procs"), 0o666);
    let agent = format!("echo $$ > {}/cgroup.procs; exec {}", group.display(), site.cluster.agent_command());
    let hpcrt = site.hpcrt.to_str().unwrap();
    let words = [hpcrt, "exec", "--hosts", "hpc2", "--agent", &agent, "--", program];
    let run = || Run { output: site.cluster.exec("hpc1", uid, &words).unwrap(), took: Duration::ZERO };
    let shell = |line: &str| assert!(site.cluster.exec("hpc2", 0, &["sh", "-c", line]).unwrap().status.success());
    run().code(0).says(&["hpc2: its memory has room for ", "its store is in /var/tmp"]);
    shell("mount -t tmpfs -o mode=1777 none /var/tmp");
    run().code(125).says(&["hpc2: ", "107 MiB are needed and ", "--store"]);
    shell("umount /var/tmp");
    for _ in 0..100 {
        if fs::remove_dir(&group).is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
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
