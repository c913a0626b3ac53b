//! Runs the built program with a deadline, and finds what it may have left behind.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test crate uses its part")]

pub mod network;

use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};

/// Nothing may take longer, unless a test says so.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// What was killed or lost its front end is gone after this time.
pub const GONE: Duration = Duration::from_secs(12);
/// A program that was just written can be executed after this time.
const BUSY: Duration = Duration::from_secs(1);

/// A run to be started: its processes carry a mark in their environment, by which they are found.
pub struct Run {
    command: Command,
    mark: String,
    input: Vec<u8>,
    deadline: Duration,
}

/// How it ended.
pub struct Done {
    pub status: ExitStatus,
    pub out: Vec<u8>,
    pub err: String,
    pub took: Duration,
    mark: String,
}

/// A run under way.
pub struct Running {
    pub child: Child,
    pub mark: String,
    heard: Arc<Mutex<Vec<u8>>>,
    out: JoinHandle<()>,
    err: JoinHandle<Vec<u8>>,
    begun: Instant,
    deadline: Duration,
}

/// `hpcrt exec FLAGS`, split at blanks; `-- program` follows with [`Run::program`].
pub fn exec(flags: &str) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    command.arg("exec").args(flags.split_whitespace());
    Run::new(command)
}

/// `hpcrt exec FLAGS -- sh -c SCRIPT`.
pub fn sh(flags: &str, script: &str) -> Run {
    exec(flags).program(&["sh", "-c", script])
}

/// Runs a job in the background of a shell, at a terminal where "one" and "two" are typed. When it runs the shell reads a line, then puts it to the front,
/// where it reads one.
pub fn from_back_to_front(command: &[&str]) -> Done {
    let typist = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    unlockpt(&typist).unwrap();
    let terminal = ptsname(&typist, Vec::new()).unwrap().into_string().unwrap();
    let _open = rustix::fs::open(&terminal, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    rustix::io::write(&typist, b"one\ntwo\n").unwrap();
    let place = tempfile::tempdir().unwrap();
    // The first terminal that the leader of a session opens is its own.
    let shell = "exec < $0; set -m; \"$@\" & until [ -e $BEGUN ]; do sleep 0.1; done; sleep 0.3; read line; echo shell $line; fg > /dev/null";
    let mut setsid = Command::new("setsid");
    setsid.args(["--wait", "sh", "-c", shell, &terminal]).args(command).env("BEGUN", place.path().join("begun"));
    Run::new(setsid).program(&["sh", "-c", "> $BEGUN; read line; echo job $line"]).end()
}

/// A directory with `app/steps`, which opens libraries as its arguments say, and beside it libraries that hold these bytes.
pub fn openers(bytes: &[u8], libraries: &[&str]) -> tempfile::TempDir {
    let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let place = backing.path().join("app");
    fs::create_dir(&place).unwrap();
    let cc = |words: &str| {
        let words = words.split_whitespace();
        assert!(Command::new("cc").args(words).current_dir(&place).status().unwrap().success());
    };
    cc(&format!("-o steps {}/tests/programs/steps.c -ldl", env!("CARGO_MANIFEST_DIR")));
    fs::write(place.join("pad"), bytes).unwrap();
    fs::write(place.join("big.c"), "__asm__(\".section .rodata\\n.incbin \\\"pad\\\"\\n\");\n").unwrap();
    libraries.iter().for_each(|name| cc(&format!("-shared -o {name} big.c")));
    fs::remove_file(place.join("pad")).unwrap();
    backing
}

impl Run {
    pub fn new(mut command: Command) -> Run {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let mark = format!("t{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        // A group of its own: job control applies to it, and signals typed at the test do not.
        // No run knows what an earlier one loaded, unless a test wants it.
        command.env("HPCRT_TEST_MARK", &mark).env("XDG_CACHE_HOME", "/dev/null/none").process_group(0);
        Run { command, mark, input: Vec::new(), deadline: DEADLINE }
    }

    pub fn program<S: AsRef<OsStr>>(mut self, words: &[S]) -> Run {
        self.command.arg("--").args(words);
        self
    }

    pub fn arg(mut self, word: impl AsRef<OsStr>) -> Run {
        self.command.arg(word);
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Run {
        self.command.env(name, value);
        self
    }

    pub fn cwd(mut self, directory: impl AsRef<Path>) -> Run {
        self.command.current_dir(directory);
        self
    }

    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Run {
        self.input = bytes.into();
        self
    }

    pub fn within(mut self, deadline: Duration) -> Run {
        self.deadline = deadline;
        self
    }

    pub fn start(mut self) -> Running {
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let begun = Instant::now();
        let mut child = loop {
            match self.command.spawn() {
                // A child of another thread, not executed yet, has a copy of the program open that was just written.
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy && begun.elapsed() < BUSY => {
                    thread::sleep(Duration::from_millis(5));
                }
                child => break child.expect("the program starts"),
            }
        };
        let mut to = child.stdin.take().expect("piped");
        let input = self.input;
        // A program that does not read its input ends this with EPIPE.
        thread::spawn(move || to.write_all(&input));
        let (mut out, mut err) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let heard = Arc::<Mutex<Vec<u8>>>::default();
        let all = heard.clone();
        let out = thread::spawn(move || {
            let mut block = vec![0; 1 << 16];
            while let Ok(got @ 1..) = out.read(&mut block) {
                all.lock().unwrap().extend_from_slice(&block[..got]);
            }
        });
        let err = thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = err.read_to_end(&mut bytes);
            bytes
        });
        Running { child, mark: self.mark, heard, out, err, begun, deadline: self.deadline }
    }

    pub fn end(self) -> Done {
        self.start().end()
    }
}

impl Running {
    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Waits until so many lines of output have come, [`DEADLINE`] at most.
    #[track_caller]
    pub fn printed(&self, lines: usize) {
        let said = || self.heard.lock().unwrap().iter().filter(|byte| **byte == b'\n').count();
        until(|| (said() >= lines).then_some(()));
    }

    /// Waits for the end; a run past its deadline is killed and fails the test.
    pub fn end(mut self) -> Done {
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if self.begun.elapsed() > self.deadline {
                let left = describe(&marked(&self.mark));
                let _ = self.child.kill();
                clean(&self.mark);
                let err = self.err.join().unwrap();
                panic!("no end after {:?}: {}\nprocesses:\n{left}", self.deadline, String::from_utf8_lossy(&err));
            }
            thread::sleep(Duration::from_millis(2));
        };
        let took = self.begun.elapsed();
        let gone = thread::spawn(move || (self.out.join().unwrap(), self.err.join().unwrap()));
        let (mark, since) = (self.mark, Instant::now());
        while !gone.is_finished() {
            if since.elapsed() > GONE {
                let left = describe(&marked(&mark));
                clean(&mark);
                panic!("its streams stayed open after the end; processes:\n{left}");
            }
            thread::sleep(Duration::from_millis(2));
        }
        let ((), err) = gone.join().unwrap();
        let out = std::mem::take(&mut *self.heard.lock().unwrap());
        Done { status, out, err: String::from_utf8_lossy(&err).into_owned(), took, mark }
    }
}

impl Done {
    /// By which processes of the run are found.
    pub fn mark(&self) -> &str {
        &self.mark
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    /// Output lines, sorted.
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.text().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }

    /// Checks the exit code, and that at once no process of the run is left.
    #[track_caller]
    pub fn code(self, expected: i32) -> Done {
        assert_eq!(self.status.code(), Some(expected), "{:?}\n{}{}", self.status, self.text(), self.err);
        let left = describe(&marked(&self.mark));
        clean(&self.mark);
        assert_eq!(left, "", "processes are left");
        self
    }

    /// Checks that standard error names this.
    #[track_caller]
    pub fn says(self, words: &str) -> Done {
        assert!(self.err.contains(words), "{words:?} is not in: {}", self.err);
        self
    }

    /// Checks that nothing is left after [`GONE`], however the run ended.
    #[track_caller]
    pub fn gone(self) -> Done {
        assert!(self.status.code().is_some() || self.status.signal().is_some());
        nothing_left(&self.mark);
        self
    }
}

/// Checks that within [`GONE`] no process, file or mount of the run is left.
#[track_caller]
pub fn nothing_left(mark: &str) {
    let since = Instant::now();
    loop {
        let (processes, files) = (describe(&marked(mark)), files());
        if processes.is_empty() && files.is_empty() {
            return;
        }
        if since.elapsed() > GONE {
            clean(mark);
            panic!("left after {GONE:?}:\n{processes}{files:?}");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Processes whose environment holds the mark. Zombies have none and are their parents' business.
pub fn marked(mark: &str) -> Vec<Pid> {
    let wanted = format!("HPCRT_TEST_MARK={mark}");
    let has = |pid: i32| {
        fs::read(format!("/proc/{pid}/environ")).is_ok_and(|e| e.split(|b| *b == 0).any(|v| v == wanted.as_bytes()))
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|e| e.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| has(pid)).map(Pid::from_raw).collect()
}

/// What a marked process is: by its arguments and name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    FrontEnd,
    /// Removes the front end's socket.
    Porter,
    Agent,
    Keeper,
    JobKeeper,
    /// A memory server of the job.
    Lender,
    Rank,
}

/// Processes of a run in a role.
pub fn role(mark: &str, role: Role) -> Vec<Pid> {
    marked(mark).into_iter().filter(|pid| role_of(*pid) == Some(role)).collect()
}

fn role_of(pid: Pid) -> Option<Role> {
    let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<&[u8]> = words.split(|b| *b == 0).collect();
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    let exe = fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let ours = exe.to_string_lossy().contains("hpcrt");
    // A process that is being executed has no words yet.
    Some(match *words.get(1)? {
        _ if name.trim() == "hpcrt-porter" => Role::Porter,
        b"serve" if name.trim() == "hpcrt-keeper" => {
            match role_of(parent(pid)?) {
                Some(Role::Keeper) => Role::JobKeeper,
                // On its way to become the program.
                Some(Role::JobKeeper) => Role::Rank,
                _ => Role::Keeper,
            }
        }
        b"serve" if words.get(2) == Some(&&b"--lend"[..]) => Role::Lender,
        b"serve" => Role::Agent,
        b"exec" if ours => Role::FrontEnd,
        _ => Role::Rank,
    })
}

/// The parent of a process.
pub fn parent(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok().map(Pid::from_raw)
}

/// Waits until `what` gives something, [`DEADLINE`] at most.
#[track_caller]
pub fn until<T>(what: impl Fn() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(since.elapsed() < DEADLINE, "waited in vain");
        thread::sleep(Duration::from_millis(5));
    }
}

fn describe(pids: &[Pid]) -> String {
    let line = |pid: &Pid| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let wchan = fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        Some(format!(
            "{pid} {} {wchan} {}\n",
            stat.chars().take(60).collect::<String>(),
            String::from_utf8_lossy(&words)
        ))
    };
    pids.iter().filter_map(line).collect()
}

fn clean(mark: &str) {
    for pid in marked(mark) {
        let _ = kill(pid, Signal::SIGKILL);
    }
}

/// A place that every user can reach until this process ends, with hpcrt and programs that are made of one C file, each with flags of its
/// own; `None`: without gcc.
pub fn built(source: &str, programs: &[(&str, &[&str])]) -> Option<PathBuf> {
    if Command::new("gcc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: gcc is not installed");
        return None;
    }
    let made = tempfile::tempdir().unwrap().keep();
    remove_at_the_end(&made);
    fs::set_permissions(&made, fs::Permissions::from_mode(0o755)).unwrap();
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
    for (name, flags) in programs {
        let mut gcc = Command::new("gcc");
        gcc.args(["-O2", "-pthread"]).args(*flags).arg("-o").arg(made.join(name)).arg(&source);
        assert!(gcc.status().unwrap().success());
    }
    let (binary, here) = (env!("CARGO_BIN_EXE_hpcrt"), made.join("hpcrt"));
    fs::hard_link(binary, &here).or_else(|_| fs::copy(binary, &here).map(drop)).unwrap();
    Some(made)
}

/// Has a directory removed when this process has ended, however it ends: what is static is not dropped.
fn remove_at_the_end(directory: &Path) {
    let mut shell = Command::new("sh");
    shell.args(["-c", "cat; rm -rf \"$0\""]).arg(directory).process_group(0);
    let waiting = shell.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // Its input ends with this process.
    std::mem::forget(waiting);
}

/// Whether the store of a session that lives, perhaps another test's.
fn is_locked(store: &str) -> bool {
    let lock = |file: fs::File| flock(&file, FlockOperation::NonBlockingLockExclusive);
    fs::File::open(store).map_or(true, |file| lock(file) == Err(Errno::AGAIN))
}

/// Files of hpcrt in the directories where a copy of the binary may be put, and its mounts.
fn files() -> Vec<String> {
    let mut places = vec![PathBuf::from("/dev/shm"), PathBuf::from("/tmp")];
    places.extend(std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from));
    let entries = places.iter().filter_map(|d| fs::read_dir(d).ok()).flatten().flatten();
    let names = entries.map(|e| e.path().display().to_string());
    let ours = |name: &String| name.contains("/.hpcrt.") || name.contains("/hpcrt-store") && !is_locked(name);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mounts: Vec<String> = mounts.lines().filter(|l| l.contains("hpcrt-")).map(str::to_owned).collect();
    names.filter(ours).chain(mounts).collect()
}
