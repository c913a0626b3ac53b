//! What programs see of files that change while they are open: through a view what they see plainly, on one host and on two.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "common/site.rs"]
mod site;

use std::fs;
use std::os::unix::fs::{lchown, symlink};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};
use rustix::fs::{CWD, FileType, Mode};
use site::{Run, Site, mode};

/// root and the cluster's ordinary user.
const USERS: [u32; 2] = [0, 20001];

fn up(name: &str) -> Option<Site> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED coherent: {obstacle}");
        return None;
    }
    // What is stale is the view's then, and not the file system's.
    let cluster = Cluster::up(Spec { trust: Duration::ZERO, ..Spec::of(&format!("t-{name}")) }).unwrap();
    let hpcrt = cluster.state().file("hpcrt");
    fs::copy(env!("CARGO_BIN_EXE_hpcrt"), &hpcrt).unwrap();
    Some(Site { cluster, hpcrt })
}

/// A directory of the user's, with what the program changes.
fn place(site: &Site, uid: u32, name: &str) -> String {
    let place = site.place(uid, name, &["coherent.py"]);
    let text: String = (0..20_000 / 10).map(|_| "0123456789").collect();
    for directory in ["emptied", "listed", "exonly"] {
        fs::create_dir(place.join(directory)).unwrap();
    }
    let files = ["in-place.py", "written.py", "gone.py", "other", "open.py", "rewritten.py", "one.py"];
    let files = files.into_iter().chain(["emptied/x", "listed/a", "listed/b", "exonly/file"]);
    for file in files {
        fs::write(place.join(file), &text[..if file.contains('/') { 10 } else { text.len() }]).unwrap();
    }
    fs::hard_link(place.join("one.py"), place.join("two.py")).unwrap();
    own(&place, uid);
    mode(&place.join("exonly"), 0o711);
    lchown(place.join("exonly"), Some(0), Some(0)).unwrap();
    format!("/shared/{name}")
}

fn own(path: &Path, uid: u32) {
    lchown(path, Some(uid), Some(uid)).unwrap();
    if path.is_dir() && !path.is_symlink() {
        fs::read_dir(path).unwrap().flatten().for_each(|entry| own(&entry.path(), uid));
    }
}

#[test]
fn what_changes_is_seen_as_plainly() {
    let Some(site) = up("alone") else { return };
    for uid in USERS {
        let (plain, shown) = (place(&site, uid, &format!("plain{uid}")), place(&site, uid, &format!("shown{uid}")));
        let command = |place: &str| [format!("{place}/coherent.py"), "alone".into(), place.into()];
        let [program, how, at] = &command(&plain);
        let done = site.cluster.exec("hpc1", uid, &[program, how, at]).unwrap();
        assert!(done.status.success(), "{done:?}");
        let expected = String::from_utf8_lossy(&done.stdout);
        let [program, how, at] = &command(&shown);
        let run = site.run(uid, "hpc2", &["-q", "--prefix", &shown], &[program, how, at]).code(0);
        assert_eq!(run.out(), expected, "as {uid}: {}", run.err());
        for file in ["in-place.py", "append", "gone.py", "one.py"] {
            let [plain, shown] =
                [&plain, &shown].map(|at| fs::read(site.backing(&at["/shared/".len()..]).join(file)).unwrap());
            assert!(plain == shown, "{file} as {uid}");
        }
    }
}

#[test]
fn what_another_host_changes_is_seen() {
    let Some(site) = up("pair") else { return };
    for uid in USERS {
        let (at, sync) = (place(&site, uid, &format!("pair{uid}")), format!("sync{uid}"));
        site.place(uid, &sync, &[]);
        let program = format!("{at}/coherent.py");
        let words = [&program, "pair", &at, &format!("/shared/{sync}")];
        let run = site.run(uid, "hpc2,hpc3", &["-q", "--prefix", &at], &words).code(0);
        assert_eq!(run.out(), "checked\n", "as {uid}: {}", run.err());
    }
}

#[test]
fn what_somebody_outside_changes_is_seen() {
    let Some(site) = up("outside") else { return };
    let (at, sync) = (site.place(USERS[1], "job", &["coherent.py"]), site.place(USERS[1], "sync", &[]));
    let text = "0123456789".repeat(2000);
    for name in ["status.json", "in-place.json", "opened.json", "becomes", "fifo"] {
        fs::write(at.join(name), &text).unwrap();
    }
    symlink("v1", at.join("current")).unwrap();
    own(&at, USERS[1]);
    let words = ["/shared/job/coherent.py", "outside", "/shared/job", "/shared/sync"];
    let job = site.start(USERS[1], "hpc2", &["-q", "--fresh", "1"], &words).spawn().unwrap();
    let begun = Instant::now();
    while !sync.join("ready").exists() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not begin");
        thread::sleep(Duration::from_millis(10));
    }
    fs::write(at.join("fresh"), "new").unwrap();
    fs::rename(at.join("fresh"), at.join("status.json")).unwrap();
    for name in ["in-place.json", "opened.json"] {
        fs::write(at.join(name), text.repeat(2)).unwrap();
    }
    symlink("v2", at.join("fresh")).unwrap();
    fs::rename(at.join("fresh"), at.join("current")).unwrap();
    for name in ["becomes", "fifo"] {
        fs::remove_file(at.join(name)).unwrap();
    }
    fs::create_dir(at.join("becomes")).unwrap();
    fs::write(at.join("becomes/inside"), "").unwrap();
    rustix::fs::mknodat(CWD, at.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
    own(&at, USERS[1]);
    fs::write(sync.join("done"), "").unwrap();
    let output = job.wait_with_output().unwrap();
    let run = Run { output, took: begun.elapsed() }.code(0);
    let expected = "[] 20000\n(40000, 2100000, b'0123', b'6789') True\nnot seen: []\n";
    assert_eq!(run.out(), expected, "{}", run.err());
}

/// A script far from its interpreter's environment.
#[test]
fn the_environment_of_a_script_is_captured() {
    let Some(site) = up("environment") else { return };
    let (run, project) = (site.place(0, "run", &[]), site.place(0, "proj", &[]));
    let made =
        Command::new("python3").args(["-m", "venv", "--without-pip"]).arg(project.join("venv")).output().unwrap();
    if !made.status.success() {
        return eprintln!("SKIPPED the environment of a script: {}", String::from_utf8_lossy(&made.stderr));
    }
    let library = fs::read_dir(project.join("venv/lib")).unwrap().next().unwrap().unwrap().path();
    fs::write(library.join("site-packages/mine.py"), "answer = 42\n").unwrap();
    fs::write(run.join("run.py"), "#!/shared/proj/venv/bin/python3 -B\nimport mine\nprint(mine.answer)\n").unwrap();
    mode(&run.join("run.py"), 0o755);
    site.cluster.reset_ops().unwrap();
    let done = site.run(0, "hpc2", &["-q"], &["/shared/run/run.py"]).code(0);
    assert_eq!(done.out(), "42\n");
    let host = site.cluster.host_ops().unwrap().into_iter().find(|host| host.host == "hpc2").unwrap();
    assert_eq!((host.ops.open, host.ops.read), (0, 0), "{:?}", host.ops);
}

/// A shell's output; nothing when it fails.
fn shell(script: &str, words: &[&str]) -> Option<String> {
    let done =
        Command::new("sh").args(["-ec", script, "sh", env!("CARGO_BIN_EXE_hpcrt")]).args(words).output().unwrap();
    done.status.success().then(|| String::from_utf8(done.stdout).unwrap())
}

/// A file system whose listings tell no types.
#[test]
fn names_of_unknown_type_are_shown_as_what_they_are() {
    let place = tempfile::tempdir().unwrap();
    let at = place.path().to_str().unwrap();
    let make = "cd $2; truncate -s 8M image; mkfs.ext4 -q -O ^filetype image; mkdir on; mount -o loop image on; \
                mkdir -p on/a/b/c; touch on/a/b/c/f; ln -s f on/a/l";
    if shell(make, &[at]).is_none() {
        return eprintln!("SKIPPED names of unknown type: no ext4 without them can be mounted");
    }
    let look = "$1 exec -q --hosts localhost --agent local --prefix $2/on -- sh -c \"cd $2/on; mkdir -p new/d; find a new | sort\"";
    let found = shell(look, &[at]);
    shell("umount $2/on", &[at]).unwrap();
    assert_eq!(found.unwrap(), "a\na/b\na/b/c\na/b/c/f\na/l\nnew\nnew/d\n");
}

/// The link on the way to a library is turned between the jobs of a session without views.
#[test]
fn a_library_behind_a_link_that_is_turned() {
    let place = tempfile::tempdir().unwrap();
    let script = "cd $2; for v in 1 2; do mkdir v$v; echo \"int v(void) { return $v; }\" | cc -x c - -shared -fPIC -o v$v/libx.so; done; \
                  echo \"import ctypes; print(ctypes.CDLL('$2/current/libx.so').v())\" > run.py; \
                  s=$($1 session start --hosts localhost --agent local --view audit | tail -1); \
                  for v in 1 2 1 2; do ln -s v$v n; mv -T n current; $1 session run $s -q --prefix $2 -- python3 run.py; done; \
                  $1 session stop $s";
    assert_eq!(shell(script, &[place.path().to_str().unwrap()]).unwrap(), "1\n2\n1\n2\n");
}
