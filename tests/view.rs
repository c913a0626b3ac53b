//! The view end to end: an agent (this process), its keepers (this program again, `keeper`) and jobs in their mount namespaces.
//! Runs as root and as an ordinary user; says loudly what it skips where the machine does not allow it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test")]

use std::fmt::Write as _;
use std::fs;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hpcrt::loader::catalog::{Catalog, Known, is_code};
use hpcrt::loader::store::Store;
use hpcrt::loader::view::namespace::{Base, Lacks, Mounts, Place};
use hpcrt::loader::view::{Identity, Need, Setup, Siblings, Skeleton, Upcall};
use hpcrt::net::wire::record::{Attr, CHUNK_MAX, Codec, FileId, Name, Record, Supply};
use hpcrt::sys::without::Without;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

const NOBODY: &str = "65534";
/// How long a question waits here.
const DEADLINE: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("keeper") => keeper(),
        Some("scenario") => scenario(Path::new(&arguments[2])),
        // As cargo-nextest asks it; there are no ignored ones.
        Some("--list") if arguments.iter().any(|a| a == "--ignored") => {}
        Some("--list") => println!("view: test"),
        _ => return everyone(),
    }
    ExitCode::SUCCESS
}

// ---- who runs it ----

fn everyone() -> ExitCode {
    let program = std::env::current_exe().unwrap();
    let place = tempfile::Builder::new().prefix("hpcrt-view-").tempdir_in("/tmp").unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let shared = place.path().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(shared.join("readme"), "from root\n").unwrap();
    let mut good = true;
    let mut run = |who: &str, command: &mut Command| {
        println!("--- view as {who}");
        let status = command.status().unwrap();
        good &= status.success();
        println!("--- view as {who}: {status}");
    };
    if !rustix::process::geteuid().is_root() {
        run("this user", Command::new(&program).arg("scenario").arg(place.path().join("own")));
        println!("SKIPPED: view as root (not root)");
    } else {
        run("root", Command::new(&program).arg("scenario").arg(place.path().join("root")));
        let copy = place.path().join("program");
        fs::copy(&program, &copy).unwrap();
        let mut user = Command::new("setpriv");
        user.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--"]).arg(&copy).arg("scenario");
        run("an ordinary user who may not open /dev/fuse", user.arg(place.path().join("plain")));
        // A device that anybody may open, as distributions ship it, in a mount namespace of its own.
        let script = "mknod -m 666 \"$1/fuse\" c 10 229 && mount --bind \"$1/fuse\" /dev/fuse && exec setpriv --reuid $2 --regid $2 \
                      --clear-groups -- \"$1/program\" scenario \"$1/user\"";
        run(
            "an ordinary user",
            Command::new("unshare").args(["-m", "sh", "-c", script, "sh"]).arg(place.path()).arg(NOBODY),
        );
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

// ---- descriptors over a socket ----

fn send(socket: &UnixStream, text: &str, fds: &[&OwnedFd]) {
    let borrowed: Vec<_> = fds.iter().map(|f| f.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    }
    let length = u32::try_from(text.len()).unwrap().to_le_bytes();
    rustix::net::sendmsg(socket, &[IoSlice::new(&length)], &mut control, SendFlags::empty()).unwrap();
    (&*socket).write_all(text.as_bytes()).unwrap();
}

fn receive(socket: &UnixStream) -> Option<(String, Vec<OwnedFd>)> {
    let mut length = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut length)], &mut control, RecvFlags::CMSG_CLOEXEC);
    if got.unwrap().bytes == 0 {
        return None;
    }
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    (&*socket).read_exact(&mut text).unwrap();
    Some((String::from_utf8(text).unwrap(), fds))
}

// ---- the keeper ----

fn keeper() {
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut view = None;
    let mut sealed = None;
    while let Some((command, fds)) = receive(&socket) {
        let (verb, rest) = command.split_once(' ').unwrap_or((&command, ""));
        match verb {
            "create" => match Base::create(
                rest.parse().map_or(Place::Directory(Path::new(rest)), Place::Memory),
                &Without::default(),
            ) {
                Ok(base) => {
                    let mut all = vec![&base.store, &base.sealed, &base.mount];
                    all.extend(&base.user);
                    send(&socket, "ok", &all);
                    sealed = Some(base.sealed);
                }
                Err(f) => send(&socket, &format!("{:?} {}", f.lacks, f.error), &[]),
            },
            "join" => {
                let base = base_of(fds);
                base.join().map_err(|f| f.error).unwrap();
                sealed = Some(base.sealed);
                send(&socket, "ok", &[]);
            }
            "view" => {
                let roots = roots_of(rest);
                let mut made = Mounts::create(sealed.as_ref().unwrap().as_fd(), roots).map_err(|f| f.error).unwrap();
                match made.mount_fuse() {
                    Ok((fuse, [a, b, c])) => send(&socket, "ok", &[&fuse, &a, &b, &c]),
                    Err(f) => send(&socket, &format!("{:?} {}", f.lacks, f.error), &[]),
                }
                view = Some(made);
            }
            "enter" => {
                let joined = Mounts::join(fds.try_into().unwrap(), roots_of(rest));
                view = Some(joined.map_err(|f| f.error).unwrap());
                send(&socket, "ok", &[]);
            }
            "leave" => {
                view.take().unwrap().leave().map_err(|f| f.error).unwrap();
                send(&socket, "ok", &[]);
            }
            "roots" => {
                view.as_ref().unwrap().bind_roots().map_err(|f| f.error).unwrap();
                send(&socket, "ok", &[]);
            }
            "files" => {
                let files = rest
                    .lines()
                    .map(|l| l.split_once(' ').unwrap())
                    .map(|(id, path)| (path.as_bytes(), id.parse().unwrap()));
                send(&socket, &view.as_ref().unwrap().bind_files(files).to_string(), &[]);
            }
            "run" => {
                let out =
                    Command::new("sh").args(["-c", rest]).stdin(Stdio::null()).stderr(Stdio::piped()).output().unwrap();
                let text = [out.stdout, out.stderr].concat();
                send(&socket, &format!("{} {}", out.status.code().unwrap_or(-1), String::from_utf8_lossy(&text)), &[]);
            }
            other => panic!("unknown order {other}"),
        }
    }
}

fn roots_of(words: &str) -> Vec<Vec<u8>> {
    words.split(' ').map(|r| r.as_bytes().to_vec()).collect()
}

fn base_of(mut fds: Vec<OwnedFd>) -> Base {
    let user = (fds.len() == 4).then(|| fds.pop().unwrap());
    let mount = fds.pop().unwrap();
    let sealed = fds.pop().unwrap();
    Base { user, mount, sealed, store: fds.pop().unwrap(), directory: None, spilled: None }
}

struct Keeper {
    child: Child,
    socket: UnixStream,
}

impl Keeper {
    fn start() -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let child =
            Command::new(std::env::current_exe().unwrap()).arg("keeper").stdin(OwnedFd::from(theirs)).spawn().unwrap();
        Keeper { child, socket: ours }
    }

    fn order(&self, text: &str, fds: &[&OwnedFd]) -> (String, Vec<OwnedFd>) {
        send(&self.socket, text, fds);
        receive(&self.socket).expect("the keeper lives")
    }

    /// Output of a shell command inside the job, which must succeed.
    fn run(&self, script: &str) -> String {
        let (status, text) = self.try_run(script);
        assert_eq!(status, 0, "{script}: {text}");
        text
    }

    fn try_run(&self, script: &str) -> (i32, String) {
        let answer = self.order(&format!("run {script}"), &[]).0;
        let (status, text) = answer.split_once(' ').unwrap();
        (status.parse().unwrap(), text.into())
    }

    fn end(mut self) {
        drop(self.socket);
        assert!(self.child.wait().unwrap().success());
    }
}

// ---- the tree above the agent: a root that answers from the original ----

enum Order {
    Want(Vec<u8>, Need),
    Changed(Vec<u8>, Option<u8>),
}

struct Tree {
    orders: Mutex<Sender<Order>>,
    wants: AtomicUsize,
    changes: AtomicUsize,
}

impl Upcall for Tree {
    fn want(&self, path: &[u8], need: Need) {
        self.wants.fetch_add(1, Ordering::Relaxed);
        let _ = self.orders.lock().unwrap().send(Order::Want(path.to_vec(), need));
    }

    fn fetch(&self, _: FileId) {
        unreachable!("this root holds nothing")
    }

    fn changed(&self, path: &[u8], exists: Option<u8>) {
        self.changes.fetch_add(1, Ordering::Relaxed);
        let _ = self.orders.lock().unwrap().send(Order::Changed(path.to_vec(), exists));
    }
}

struct Log {
    catalog: Arc<RwLock<Catalog>>,
    store: Arc<Store>,
    skeletons: Mutex<Vec<Arc<Skeleton>>>,
    files: AtomicUsize,
    stop: OnceLock<()>,
}

impl Log {
    fn append(&self, record: &Record) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let now = (now.as_secs().cast_signed(), now.subsec_nanos());
        let effects = self.catalog.write().unwrap().apply(record, now);
        let skeletons = self.skeletons.lock().unwrap().clone();
        for skeleton in skeletons {
            skeleton.applied(&effects);
        }
    }

    /// What a root does with a path: reads it once and says what it is.
    fn look(&self, path: &Path, need: Need) {
        let key = path.as_os_str().as_bytes().to_vec();
        let Ok(meta) = path.symlink_metadata() else { return self.append(&Record::Absent { path: key, errno: 2 }) };
        let attr = attr_of(&meta);
        if meta.is_dir() {
            let names = fs::read_dir(path).unwrap().map(|e| e.unwrap()).map(|e| {
                let kind = attr_of(&e.metadata().unwrap()).mode >> 12;
                Name { name: e.file_name().as_bytes().to_vec(), kind: u8::try_from(kind).unwrap() }
            });
            self.append(&Record::Dir { path: key, attr, names: names.collect() });
        } else if meta.is_symlink() {
            let target = fs::read_link(path).unwrap().as_os_str().as_bytes().to_vec();
            self.append(&Record::Link { path: key, attr, target });
        } else if !is_code(path.file_name().unwrap().as_bytes()) && meta.mode() & 0o111 == 0 {
            self.append(&Record::File { path: key, attr, content: Supply::Original });
        } else if need == Need::Content {
            let id = FileId::try_from(self.files.fetch_add(1, Ordering::Relaxed)).unwrap();
            self.store.create(id, &attr).unwrap();
            self.append(&Record::File { path: key, attr, content: Supply::Log(id) });
            if path.ends_with("void.py") {
                return self.append(&Record::Void { file: id, errno: 5 });
            }
            if path.ends_with("late.py") {
                thread::sleep(Duration::from_millis(300));
            }
            let bytes = fs::read(path).unwrap();
            for (i, chunk) in bytes.chunks(CHUNK_MAX).enumerate() {
                let offset = (i * CHUNK_MAX) as u64;
                self.store.write_chunk(id, offset, chunk).unwrap();
                self.append(&Record::Chunk {
                    file: id,
                    offset,
                    len: u32::try_from(chunk.len()).unwrap(),
                    codec: Codec::Raw,
                });
            }
            self.store.finish(id).unwrap();
            self.append(&Record::Complete { file: id });
        } else {
            self.append(&Record::File { path: key, attr, content: Supply::OnOpen });
        }
    }

    fn id_of(&self, path: &Path) -> FileId {
        match self.catalog.read().unwrap().lookup(path.as_os_str().as_bytes()) {
            Known::File { content: Supply::Log(id), .. } => id,
            other => panic!("{path:?}: {other:?}"),
        }
    }
}

fn attr_of(meta: &fs::Metadata) -> Attr {
    Attr {
        mode: meta.mode(),
        uid: meta.uid(),
        gid: meta.gid(),
        nlink: u32::try_from(meta.nlink()).unwrap(),
        ino: meta.ino(),
        size: meta.size(),
        mtime: (meta.mtime(), u32::try_from(meta.mtime_nsec()).unwrap()),
        ctime: (meta.ctime(), u32::try_from(meta.ctime_nsec()).unwrap()),
    }
}

// ---- the scenario ----

fn wait_for(what: &str, limit: Duration, mut done: impl FnMut() -> bool) -> Duration {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < limit, "{what} took longer than {limit:?}");
        thread::sleep(Duration::from_millis(2));
    }
    begin.elapsed()
}

fn compile(source: &str, arguments: &[&str], output: &Path) {
    let mut gcc = Command::new("gcc")
        .args(["-x", "c", "-", "-o"])
        .arg(output)
        .args(arguments)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    gcc.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    assert!(gcc.wait().unwrap().success());
}

const SMALL_FILES: usize = 1000;

fn make_tree(tree: &Path) {
    for directory in ["app/pkg", "app/lib", "app/out", "app/small", "app/swap", "data"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
    }
    let app = tree.join("app");
    compile("int answer(void) { return 42; }", &["-shared", "-fPIC"], &app.join("lib/liba.so"));
    compile(
        "int answer(void); int main(void) { return answer(); }",
        &["-L", app.join("lib").to_str().unwrap(), "-la", "-Wl,-rpath,$ORIGIN/lib"],
        &app.join("prog"),
    );
    fs::write(app.join("pkg/__init__.py"), "from . import mod\n").unwrap();
    fs::write(app.join("pkg/mod.py"), "VALUE = 7\n").unwrap();
    fs::write(app.join("pkg/late.py"), "VALUE = 8\n".repeat(1000)).unwrap();
    fs::write(app.join("pkg/once.py"), "ONCE = 1\n").unwrap();
    fs::write(app.join("notes.txt"), "plain text\n").unwrap();
    fs::set_permissions(app.join("notes.txt"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("notes.txt", app.join("link")).unwrap();
    symlink("nowhere", app.join("dangling")).unwrap();
    fs::write(tree.join("data/table"), vec![7; 3 << 20]).unwrap();
    for i in 0..SMALL_FILES {
        fs::write(app.join(format!("small/m{i}.py")), "x = 1\n".repeat(300)).unwrap();
    }
}

#[allow(clippy::too_many_lines, reason = "one story, told in its order")]
fn scenario(tree: &Path) {
    fs::create_dir(tree).unwrap();
    let tree = tree.canonicalize().unwrap();
    make_tree(&tree);
    let (app, data) = (tree.join("app"), tree.join("data"));
    let shared = tree.parent().unwrap().join("shared");
    let mounts_before = fs::read_to_string("/proc/self/mountinfo").unwrap();

    let keeper = Keeper::start();
    // The store: a RAM disk, or for one of the users a directory.
    let in_memory = !tree.ends_with("plain");
    let place = if in_memory { (256 << 20).to_string() } else { tree.join("store").display().to_string() };
    fs::create_dir(tree.join("store")).unwrap();
    let (answer, fds) = keeper.order(&format!("create {place}"), &[]);
    if answer != "ok" {
        assert!(answer.contains(&format!("{:?}", Lacks::Namespaces)), "{answer}");
        println!("SKIPPED: {answer}");
        return keeper.end();
    }
    let base = base_of(fds);
    let userns = base.user.is_some();
    let store = Arc::new(Store::new(base.store.try_clone().unwrap(), true));
    store.reserve(1 << 20).unwrap();
    assert!(!in_memory || store.reserve(257 << 20).unwrap_err().to_string().contains("--store"));

    let roots = || [&app, &data, &shared].map(|p| p.as_os_str().as_bytes().to_vec());
    let log = Arc::new(Log {
        catalog: Arc::new(RwLock::new(Catalog::new(roots()))),
        store: store.clone(),
        skeletons: Mutex::default(),
        files: AtomicUsize::new(0),
        stop: OnceLock::new(),
    });
    let (sender, orders) = channel();
    let upcall =
        Arc::new(Tree { orders: Mutex::new(sender), wants: AtomicUsize::new(0), changes: AtomicUsize::new(0) });
    let root = log.clone();
    let root = thread::spawn(move || {
        for order in orders {
            if root.stop.get().is_some() {
                return;
            }
            match order {
                Order::Want(path, _) if path.ends_with(b"silent.py") => {}
                Order::Want(path, need) => root.look(Path::new(std::ffi::OsStr::from_bytes(&path)), need),
                Order::Changed(path, exists) => root.append(&Record::Changed { path, exists }),
            }
        }
    });

    // The preload: everything but one package is known beforehand.
    for path in [
        &app,
        &data,
        &app.join("lib"),
        &app.join("small"),
        &app.join("link"),
        &app.join("dangling"),
        &app.join("notes.txt"),
    ] {
        log.look(path, Need::Attributes);
    }
    for path in [app.join("prog"), app.join("lib/liba.so")] {
        log.look(&path, Need::Content);
    }

    let trees = format!("{} {} {}", app.display(), data.display(), shared.display());
    let (answer, mut fds) = keeper.order(&format!("view {trees}"), &[]);
    if answer != "ok" {
        assert!(answer.contains(&format!("{:?}", Lacks::Fuse)), "{answer}");
        // Staged files are bound onto the originals then.
        let list = format!("files {} {}", log.id_of(&app.join("lib/liba.so")), app.join("lib/liba.so").display());
        fs::remove_file(app.join("lib/liba.so")).unwrap();
        fs::write(app.join("lib/liba.so"), "").unwrap();
        assert_eq!(keeper.order("roots", &[]).0, "ok");
        assert_eq!(keeper.order(&list, &[]).0, "1");
        assert_eq!(keeper.try_run(&format!("{}/prog", app.display())).0, 42);
        assert_ne!(keeper.try_run(&format!("echo x >> {}/lib/liba.so", app.display())).0, 0, "the store is sealed");
        println!("without FUSE: {answer}");
        return keeper.end();
    }
    let setup = Setup {
        catalog: log.catalog.clone(),
        store,
        upcall: upcall.clone(),
        identity: Identity::current(userns),
        deadline: DEADLINE,
        siblings: Siblings::default(),
    };
    let skeleton = Arc::new(Skeleton::new(setup.clone(), roots()));
    log.skeletons.lock().unwrap().push(skeleton.clone());
    let serving = skeleton.serve(fds.remove(0), 2).unwrap();
    assert_eq!(keeper.order("roots", &[]).0, "ok");
    let bind = |paths: &[PathBuf]| {
        let mut list = String::new();
        for path in paths {
            writeln!(list, "{} {}", log.id_of(path), path.display()).unwrap();
        }
        let bound = keeper.order(&format!("files {}", list.trim_end()), &[]).0;
        assert_eq!(bound, paths.len().to_string());
    };
    bind(&[app.join("prog"), app.join("lib/liba.so")]);
    let inside = |script: &str| keeper.run(&format!("cd {} && {script}", app.display()));

    // Attributes and names are the original's.
    let asked = upcall.wants.load(Ordering::Relaxed);
    let format = "%f %u %g %s %Y %Z %h %i %N";
    let names = "notes.txt link dangling . lib small ../data";
    let outside = |script: &str| {
        let out = Command::new("sh").args(["-c", &format!("cd {} && {script}", app.display())]).output().unwrap();
        String::from_utf8(out.stdout).unwrap()
    };
    let stat = format!("stat -c '{format}' {names}");
    assert_eq!(inside(&stat), outside(&stat));
    assert_eq!(inside("ls -aU1 . | sort; ls -aU1 small | sort"), outside("ls -aU1 . | sort; ls -aU1 small | sort"));
    assert_eq!(inside("cat link"), "plain text\n");
    assert_eq!(upcall.wants.load(Ordering::Relaxed), asked, "all of this was known");
    let types = "find . -maxdepth 1 -printf '%f %y\\n' | sort";
    assert_eq!(inside(types), outside(types));
    let asked = upcall.wants.load(Ordering::Relaxed);

    // What the listing lacks does not exist, whatever the original says; and neither the root nor the original is asked.
    fs::write(app.join("lib/later.txt"), "made by an outsider").unwrap();
    assert_eq!(keeper.try_run(&format!("cat {}/lib/later.txt", app.display())).0, 1);
    assert_eq!(upcall.wants.load(Ordering::Relaxed), asked);
    log.append(&Record::Changed { path: app.join("lib/later.txt").as_os_str().as_bytes().to_vec(), exists: Some(8) });
    let seen = wait_for("the new file", Duration::from_secs(1), || {
        keeper.try_run(&format!("cat {}/lib/later.txt", app.display())).0 == 0
    });
    println!("a new file was visible after {seen:?}");

    // Bound files: executed and loaded from the store, and as their originals to who asks.
    let modes = "stat -c '%n %a %u %g' prog lib/liba.so";
    assert_eq!(inside(modes), outside(modes));
    assert_eq!(keeper.try_run(&format!("{}/prog", app.display())).0, 42);
    assert!(inside("findmnt -no SOURCE -T lib/liba.so || cat /proc/self/mountinfo").contains("hpcrt-store"));
    assert_ne!(keeper.try_run(&format!("echo x >> {}/lib/liba.so", app.display())).0, 0, "the store is sealed");

    if !userns {
        exchanged(&log, &keeper, &app, &tree.join("hidden"));
    }

    // Python asks for what is not known yet; the second time nobody is asked.
    let import = "/usr/bin/python3 -B -c 'import pkg, pkg.late; print(pkg.mod.VALUE, pkg.late.VALUE)'";
    assert_eq!(inside(import), "7 8\n");
    let asked = upcall.wants.load(Ordering::Relaxed);
    assert!(asked > 3, "{asked}");
    assert_eq!(inside(import), "7 8\n");
    assert_eq!(upcall.wants.load(Ordering::Relaxed), asked);

    // Changes reach the original, and are seen here at once.
    inside(
        "echo hello > out/a && cat out/a && mkdir out/d && mv out/a out/d/b && ln out/d/b out/c && ln -s c out/s && cat out/s",
    );
    assert_eq!(fs::read_to_string(app.join("out/d/b")).unwrap(), "hello\n");
    assert_eq!(fs::metadata(app.join("out/c")).unwrap().nlink(), 2);
    inside(
        "echo more >> out/c && test $(wc -c < out/d/b) = 11 && rm out/s && test ! -e out/s && truncate -s 2 out/c && chmod 600 out/c",
    );
    assert_eq!(fs::read(app.join("out/c")).unwrap(), b"he");
    assert_eq!(fs::metadata(app.join("out/c")).unwrap().mode() & 0o777, 0o600);
    inside("rm out/c out/d/b && rmdir out/d && mkfifo out/p && rm out/p");
    assert_eq!(outside("ls -l out"), "total 0\n");
    inside(
        "(umask 002; mkdir w; cd w; sleep 0.3; pwd; test \"$(/bin/pwd)\" = \"$(pwd)\" && : > f && test $(stat -c %a f) = 664)",
    );
    let script = "import os,mmap,tempfile
f=tempfile.TemporaryFile(dir='w'); f.write(b'abc'); f.flush(); assert os.fstat(f.fileno()).st_size==3
g=open('w/m','w+b'); g.truncate(8192); m=mmap.mmap(g.fileno(),8192); m[5000:5003]=b'xyz'; m.flush(); m.close(); g.close()
assert open('w/m','rb').read()[5000:5003]==b'xyz'
fd=os.open('w/log',os.O_WRONLY|os.O_APPEND|os.O_CREAT,0o644); os.write(fd,b'1'); os.write(fd,b'2'); os.close(fd)
os.replace('w/log','w/m'); assert open('w/m').read()=='12'
os.rename('w','v'); assert open('v/m').read()=='12'
try: os.listxattr('v')
except OSError as e: assert e.errno==95,e";
    fs::write(tree.join("check.py"), script).unwrap();
    inside("/usr/bin/python3 ../check.py");
    assert_eq!(fs::read(app.join("v/m")).unwrap(), b"12");

    // What has lost its name is reached through who has it open.
    assert_eq!(inside("echo kept > out/t; exec 3< out/t; rm out/t; cat /dev/fd/3"), "kept\n");
    assert_eq!(inside("cat pkg/once.py > /dev/null; exec 3< pkg/once.py; rm pkg/once.py; cat /dev/fd/3"), "ONCE = 1\n");

    // A captured file that a job writes is read from the original from then on.
    inside("cat pkg/mod.py > /dev/null; echo 'VALUE = 9' > pkg/mod.py; cat pkg/mod.py; rm -rf pkg/__pycache__");
    assert_eq!(inside(import), "9 8\n");
    // And one that is replaced behind a bound file appears in its place.
    compile("int answer(void) { return 43; }", &["-shared", "-fPIC"], &tree.join("new.so"));
    fs::rename(tree.join("new.so"), app.join("lib/liba.so")).unwrap();
    log.append(&Record::Changed { path: app.join("lib/liba.so").as_os_str().as_bytes().to_vec(), exists: Some(8) });
    let _ = skeleton.forgotten().recv_blocking();
    assert_eq!(keeper.try_run(&format!("{}/prog", app.display())).0, 43);

    // Nor does one stay that was bound after the kernel had forgotten the name, by who had not heard yet that it was replaced.
    let tool = app.join("tool");
    let replace = |text: &str| {
        let path = tree.join("new");
        fs::write(&path, format!("#!/bin/sh\necho {text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(&path, &tool).unwrap();
        log.append(&Record::Changed { path: tool.as_os_str().as_bytes().to_vec(), exists: Some(8) });
    };
    replace("older");
    log.look(&tool, Need::Content);
    let list = format!("files {} {}", log.id_of(&tool), tool.display());
    replace("newer");
    let _ = skeleton.forgotten().recv_blocking();
    assert_eq!(keeper.order(&list, &[]).0, "1");
    assert_eq!(inside("./tool"), "older\n");
    let _ = skeleton.uncover(vec![tool.as_os_str().as_bytes().into()]).recv_blocking();
    assert_eq!(inside("./tool"), "newer\n");

    // A changed directory is listed again; what the root finds new in a directory appears.
    assert_eq!(inside("chmod 750 lib && stat -c %a lib && ls lib"), "750\nlater.txt\nliba.so\n");
    fs::write(app.join("lib/found"), "").unwrap();
    log.look(&app.join("lib"), Need::Attributes);
    wait_for("the new listing", Duration::from_secs(1), || {
        keeper.try_run(&format!("ls {}/lib/found", app.display())).0 == 0
    });
    // A file whose capture fails is read from the original.
    fs::write(app.join("void.py"), "VOID = 1\n").unwrap();
    log.append(&Record::Changed { path: app.join("void.py").as_os_str().as_bytes().to_vec(), exists: Some(8) });
    assert_eq!(inside("cat void.py"), "VOID = 1\n");
    // A question that nobody answers fails at its deadline, and others go on meanwhile.
    let path = app.join("silent.py");
    fs::write(&path, "").unwrap();
    log.append(&Record::Changed { path: path.as_os_str().as_bytes().to_vec(), exists: Some(8) });
    let slow = inside("{ cat silent.py 2>/dev/null & cat notes.txt; wait $! || echo refused; }");
    assert_eq!(slow, "plain text\nrefused\n");
    // Somebody else's directory in which everybody may write.
    if userns {
        assert_eq!(
            inside("cat ../../shared/readme; echo mine > ../../shared/mine; cat ../../shared/mine"),
            "from root\nmine\n"
        );
        let foreign = fs::metadata(shared.join("readme")).unwrap().uid() != rustix::process::geteuid().as_raw();
        let denied = keeper.try_run(&format!("echo x >> {}/readme", shared.display())).0 != 0;
        assert_eq!(foreign, denied);
    }

    // Many at once in one directory, while the log echoes each change: no deadlock, nothing lost.
    let storm = "import os,threading
def work(n):
  for i in range(150):
    a,b='out/a%d.%d'%(n,i),'out/b%d.%d'%(n,i)
    open(a,'w').write(a); os.rename(a,b); assert open(b).read()==a and not os.path.exists(a)
    os.listdir('out')
    if i%3: os.unlink(b)
t=[threading.Thread(target=work,args=(n,)) for n in range(4)]
[x.start() for x in t]; [x.join() for x in t]
print(len(os.listdir('out')))";
    fs::write(tree.join("storm.py"), storm).unwrap();
    assert_eq!(inside("/usr/bin/python3 ../storm.py"), "200\n");
    assert_eq!(fs::read_dir(app.join("out")).unwrap().count(), 200);
    let asked = upcall.changes.load(Ordering::Relaxed);
    inside("mkdir out/mine && touch out/mine/1");
    let told = upcall.changes.load(Ordering::Relaxed);
    inside(
        "for i in 1 2 3 4 5 6 7 8 9; do echo $i > out/mine/$i; mv out/mine/$i out/mine/x$i; done; rm -r out/mine/x1",
    );
    assert!(
        told > asked && upcall.changes.load(Ordering::Relaxed) == told,
        "a directory that a job made is nobody's news"
    );

    measure(&log, &keeper, &app, &data, bind);

    let joined = || {
        let keeper = Keeper::start();
        let mut fds = vec![&base.store, &base.sealed, &base.mount];
        fds.extend(&base.user);
        assert_eq!(keeper.order("join", &fds).0, "ok");
        keeper
    };
    // Another job of the session with the same view, in a copy of its mounts.
    let same = joined();
    assert_eq!(same.order(&format!("enter {trees}"), &fds.iter().collect::<Vec<_>>()).0, "ok");
    assert_eq!(same.order("leave", &[]).0, "ok");
    let mounts = |keeper: &Keeper| keeper.run("cut -d' ' -f4- /proc/self/mountinfo | sort");
    assert_eq!(mounts(&same), mounts(&keeper));
    assert_ne!(same.run("readlink /proc/self/ns/mnt"), keeper.run("readlink /proc/self/ns/mnt"));
    killed_while_asking(&log, &app, &skeleton, &keeper, &same);
    same.end();

    // A job with another view.
    let second = joined();
    let (answer, mut shared) = second.order(&format!("view {}", app.display()), &[]);
    assert_eq!(answer, "ok");
    let other = Arc::new(Skeleton::new(setup, [roots()[0].clone()]));
    log.skeletons.lock().unwrap().push(other.clone());
    let also_serving = other.serve(shared.remove(0), 1).unwrap();
    drop(shared);
    assert_eq!(second.order("roots", &[]).0, "ok");
    assert_eq!(
        second.order(&format!("files {} {}", log.id_of(&app.join("prog")), app.join("prog").display()), &[]).0,
        "1"
    );
    assert_eq!(second.try_run(&format!("{}/prog", app.display())).0, 43);
    assert!(second.run(&format!("ls {}", data.display())).contains("table"), "not a root of the second job");
    assert!(!mounts(&second).contains(data.to_str().unwrap()), "nor shown to it");
    // What one of them makes is no longer absent in the other.
    assert_eq!(keeper.try_run(&format!("cat {}/out/news", app.display())).0, 1);
    second.run(&format!("echo news > {}/out/news", app.display()));
    wait_for("the other view's file", Duration::from_secs(1), || {
        keeper.try_run(&format!("cat {}/out/news", app.display())).0 == 0
    });
    // Nor is what one of them found there before the log told of it.
    let directory = app.join("out/directory");
    assert_ne!(keeper.try_run(&format!("test -d {}", directory.display())).0, 0);
    fs::create_dir(&directory).unwrap();
    assert_ne!(second.try_run(&format!("mkdir {}", directory.display())).0, 0);
    log.append(&Record::Changed { path: directory.as_os_str().as_bytes().to_vec(), exists: Some(4) });
    wait_for("the directory that the other view found", Duration::from_secs(1), || {
        keeper.try_run(&format!("test -d {}", directory.display())).0 == 0
    });

    // Nothing remains.
    second.end();
    assert!(also_serving.wait_end(Duration::from_secs(3)), "the second view ends with its job");
    keeper.end();
    assert!(!serving.wait_end(Duration::from_millis(100)), "the first is still held");
    drop(fds);
    assert!(serving.wait_end(Duration::from_secs(3)), "the view ends with what holds it");
    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), mounts_before);
    log.stop.set(()).unwrap();
    upcall.changed(b"", None);
    root.join().unwrap();
}

/// Root's ranks may become another user: a link that he puts in a directory's place leads him nowhere where he may not go himself.
fn exchanged(log: &Log, keeper: &Keeper, app: &Path, hidden: &Path) {
    let other = |script: &str| {
        let user = format!("setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups");
        keeper.try_run(&format!("cd {} && {user} sh -c '{script}'", app.display())).0
    };
    fs::create_dir(hidden).unwrap();
    fs::set_permissions(hidden, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(hidden.join("secret"), "").unwrap();
    let open = app.join("swap");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let attempts = ["echo > {}/made", "mkdir {}/made", "mkfifo {}/made", "ln -s x {}/made", "mv mine {}/made"];
    for (nth, attempt) in attempts.into_iter().enumerate() {
        let (name, directory) = (nth.to_string(), open.join(nth.to_string()));
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        [&open, &directory].into_iter().for_each(|path| log.look(path, Need::Attributes));
        let try_in = |script: &str| other(&format!("cd swap; {}", script.replace("{}", &name)));
        assert_eq!(try_in("touch {}/file && chmod 600 {}/file && rm {}/file && touch mine"), 0);
        fs::rename(&directory, directory.with_extension("was")).unwrap();
        symlink(hidden, &directory).unwrap();
        assert_ne!(try_in(attempt), 0, "{attempt}");
        assert_eq!(fs::read_dir(hidden).unwrap().count(), 1, "{attempt}");
    }
    keeper.run(&format!("echo > {}/swap/0/made", app.display()));
    assert!(hidden.join("made").exists(), "root may");
}

/// Two jobs with one view wait for the log; one of them is killed.
fn killed_while_asking(log: &Log, app: &Path, skeleton: &Skeleton, first: &Keeper, second: &Keeper) {
    for name in ["1silent.py", "2silent.py"] {
        fs::write(app.join(name), "found\n").unwrap();
        let path = app.join(name).as_os_str().as_bytes().to_vec();
        log.append(&Record::Changed { path, exists: Some(8) });
    }
    // The kernel forgets a name with its directory locked: behind a question about one name it would wait, and new questions behind it.
    let _ = skeleton.forgotten().recv_blocking();
    let cat = |name: &str| format!("cd {}; cat {name} & p=$!; echo $p > ../pid; wait $p; echo ended $?", app.display());
    let pid = app.join("../pid");
    // Asks, and is killed while the answer does not come: by somebody alone, or together with its job.
    let killed = |name: &str, job: bool| {
        let _ = fs::remove_file(&pid);
        thread::scope(|scope| {
            let asks = scope.spawn(|| second.run(&cat(name)));
            wait_for("the question", Duration::from_secs(5), || fs::read(&pid).is_ok_and(|p| p.ends_with(b"\n")));
            thread::sleep(Duration::from_millis(300));
            let begin = Instant::now();
            let closing = job.then(|| skeleton.close(second.child.id()));
            let victim = fs::read_to_string(&pid).unwrap();
            assert!(Command::new("kill").args(["-9", victim.trim()]).status().unwrap().success());
            let said = asks.join().unwrap();
            assert!(said.contains("ended 137"), "{said}");
            drop(closing);
            begin.elapsed()
        })
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| first.run(&format!("cat {}/1silent.py", app.display())));
        thread::sleep(Duration::from_millis(300));
        let alone = killed("2silent.py", false);
        // A busy machine is late now and then.
        let together = (0..3).map(|_| killed("2silent.py", true)).find(|took| *took < Duration::from_millis(300));
        println!("killed while asking: alone {alone:?}, with its job {together:?}");
        assert!(alone < Duration::from_millis(1500) && together.is_some(), "{alone:?} {together:?}");
        assert!(!other.is_finished(), "the other job's question waits on");
        // This name the other job has asked about: the killed process waits for that question.
        let behind = killed("1silent.py", true);
        println!("killed behind another's question: {behind:?}");
        assert!(behind < Duration::from_millis(1500), "{behind:?}");
        log.look(&app.join("1silent.py"), Need::Content);
        assert_eq!(other.join().unwrap(), "found\n");
    });
}

/// Costs, printed; nothing is asserted about them.
fn measure(log: &Log, keeper: &Keeper, app: &Path, data: &Path, bind: impl Fn(&[PathBuf])) {
    let small: Vec<PathBuf> = (0..SMALL_FILES).map(|i| app.join(format!("small/m{i}.py"))).collect();
    for path in &small {
        log.look(path, Need::Content);
    }
    let script = format!(
        "import os,time
def once(d):
  t=time.perf_counter()
  for i in range({SMALL_FILES}):
    f=os.open(d+'/m%d.py'%i,os.O_RDONLY); os.fstat(f); os.read(f,65536); os.close(f)
  return (time.perf_counter()-t)/{SMALL_FILES}*1e6
def miss(d):
  t=time.perf_counter()
  for i in range({SMALL_FILES}):
    try: os.stat(d+'/none%d'%i)
    except OSError: pass
  return (time.perf_counter()-t)/{SMALL_FILES}*1e6
def big(f):
  t=time.perf_counter(); n=len(open(f,'rb').read()); return n/(time.perf_counter()-t)/1e6
import sys
d,b=sys.argv[1:]
print('small file open+fstat+read+close us: first %.1f second %.1f; stat of an absent name us: first %.1f second %.2f; 3 MB passed through MB/s: %.0f'%(once(d),once(d),miss(d),miss(d),big(b)))"
    );
    let file = app.parent().unwrap().join("measure.py");
    fs::write(&file, script).unwrap();
    let command =
        format!("/usr/bin/python3 {} {} {}", file.display(), app.join("small").display(), data.join("table").display());
    print!("view:     {}", keeper.run(&command));
    let out = Command::new("sh").args(["-c", &command]).output().unwrap();
    print!("original: {}", String::from_utf8(out.stdout).unwrap());
    let begin = Instant::now();
    bind(&small);
    println!("{SMALL_FILES} binds: {:.1} us each", begin.elapsed().as_secs_f64() * 1e6 / SMALL_FILES as f64);
}
