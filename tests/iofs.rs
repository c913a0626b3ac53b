//! Programs whose small writes are kept in memory and written by a worker: their files are what they are without it, whoever is killed. As root and
//! as an ordinary user.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use common::{Run, Running, marked, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const NOBODY: u32 = 65534;

/// A place that every user can reach, with hpcrt and the program.
fn place() -> Option<&'static Path> {
    static PLACE: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    let made = PLACE.get_or_init(|| {
        if Command::new("gcc").arg("--version").output().is_err() {
            eprintln!("SKIPPED: gcc is not installed");
            return None;
        }
        let made = tempfile::tempdir().unwrap();
        fs::set_permissions(made.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/files.c");
        for (name, flags) in [("files", &["-pthread"][..]), ("static", &["-pthread", "-static"])] {
            let mut gcc = Command::new("gcc");
            gcc.arg("-O2").args(flags).arg("-o").arg(made.path().join(name)).arg(source);
            assert!(gcc.status().unwrap().success());
        }
        fs::copy(env!("CARGO_BIN_EXE_hpcrt"), made.path().join("hpcrt")).unwrap();
        Some(made)
    });
    made.as_ref().map(tempfile::TempDir::path)
}

/// Somebody with a directory of his own, in which files are kept.
struct Who {
    uid: Option<u32>,
    home: tempfile::TempDir,
}

fn everybody() -> Vec<Who> {
    let root = rustix::process::geteuid().is_root();
    let uids = if root { vec![None, Some(NOBODY)] } else { vec![None] };
    let who = |uid| {
        let home = tempfile::tempdir().unwrap();
        chown(home.path(), uid, uid).unwrap();
        Who { uid, home }
    };
    uids.into_iter().map(who).collect()
}

impl Who {
    fn file(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// `hpcrt exec --async-io FLAGS -- WORDS`; `{}` in a word is his directory.
    fn run(&self, flags: &str, words: &str) -> Run {
        let mut command = Command::new(place().unwrap().join("hpcrt"));
        command.current_dir("/").args(["exec", "-q", "--async-io", "--io-roots"]).arg(self.home.path());
        command.args(flags.split_whitespace());
        if let Some(uid) = self.uid {
            command.uid(uid).gid(uid);
        }
        let home = self.home.path().to_str().unwrap();
        let words: Vec<String> = words.split(' ').map(|word| word.replace("{}", home)).collect();
        Run::new(command).program(&words)
    }

    /// The test program.
    fn files(&self, words: &str) -> Run {
        self.run("", &format!("{}/files {words}", place().unwrap().display()))
    }
}

#[test]
fn programs_are_right() {
    if place().is_none() {
        return;
    }
    for who in everybody() {
        for words in ["pieces {}/p 200000 64", "signals {}/s 50000", "threads {}/t", "two {}/2", "special {}/x"] {
            let text = who.files(words).end().code(0).text();
            assert!(text.ends_with("right\n"), "{words}: {text}");
        }
        for seed in 1..6 {
            let done = who.files(&format!("random {{}}/r {seed} 1500")).end();
            println!("{:?} seed {seed}: {:?}", who.uid, done.took);
            assert_eq!(done.code(0).text(), "right\n");
        }
        let bytes = fs::read(who.file("p")).unwrap();
        assert_eq!(bytes.len(), 200_000 * 64);
        let number = |nth: usize| u64::from_le_bytes(bytes[nth * 64..][..8].try_into().unwrap());
        assert!((0..200_000).all(|nth| number(nth) == nth as u64));
    }
}

/// Numbers from 0 on, 8 bytes each: how many, where nothing else is in the file.
#[track_caller]
fn numbers(path: &Path) -> u64 {
    let bytes = fs::read(path).unwrap();
    let (numbers, rest) = bytes.as_chunks::<8>();
    assert!(rest.is_empty());
    assert!((0u64..).zip(numbers).all(|(nth, number)| u64::from_le_bytes(*number) == nth));
    numbers.len() as u64
}

/// Writes that have returned, as the program counted them in memory.
fn returned(path: &Path) -> u64 {
    let mut bytes = [0; 8];
    let read = fs::File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 0));
    read.map_or(0, |()| u64::from_le_bytes(bytes))
}

fn named(run: &Running, word: &str) -> Option<Pid> {
    let is = |pid: &Pid| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.split(|b| *b == 0).any(|w| w == word.as_bytes()))
    };
    marked(&run.mark).into_iter().find(is)
}

fn killed_programs(times: u32) {
    for who in everybody() {
        for nth in 0..times {
            let (file, count) = (who.file("k"), who.file("count"));
            let run = who.files(&format!("forever {{}}/k {} 0", count.display())).start();
            until(|| (returned(&count) > 10).then_some(()));
            std::thread::sleep(Duration::from_micros(fastrand::u64(0..40_000)));
            let program = marked(&run.mark)
                .into_iter()
                .find(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.ends_with("files")));
            kill(program.unwrap(), Signal::SIGKILL).unwrap();
            run.end().code(137);
            let (there, told) = (numbers(&file), returned(&count));
            // The one that was under way may be there.
            assert!(there == told || there == told + 1, "{nth}: {there} are there, {told} were written");
            fs::remove_file(count).unwrap();
        }
    }
}

#[test]
fn a_killed_program_leaves_what_it_wrote() {
    if place().is_some() {
        killed_programs(8);
    }
}

#[test]
#[ignore = "a thousand programs"]
fn a_thousand_killed_programs() {
    if place().is_some() {
        killed_programs(500);
    }
}

fn killed_workers(times: u32) {
    const ALL: u64 = 3_000_000;
    for who in everybody() {
        for _ in 0..times {
            let count = who.file("count");
            let run = who.files(&format!("forever {{}}/k {} {ALL}", count.display())).start();
            while returned(&count) < ALL && named(&run, "forever").is_some() {
                if let Some(worker) = named(&run, "ioworker") {
                    let _ = kill(worker, Signal::SIGKILL);
                }
                std::thread::sleep(Duration::from_millis(350 + fastrand::u64(0..30)));
            }
            run.end().code(0);
            assert_eq!(numbers(&who.file("k")), ALL);
            fs::remove_file(count).unwrap();
        }
    }
}

#[test]
fn a_killed_worker_is_replaced_and_nothing_lost() {
    if place().is_some() {
        killed_workers(2);
    }
}

#[test]
fn a_full_file_system_is_told_once() {
    if place().is_none() || !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: mounting needs root");
        return;
    }
    let who = &everybody()[0];
    let directory = who.file("small");
    fs::create_dir(&directory).unwrap();
    let mount =
        |words: &[&str]| assert!(Command::new(words[0]).args(&words[1..]).arg(&directory).status().unwrap().success());
    mount(&["mount", "-t", "tmpfs", "-o", "size=1m", "none"]);
    let done = who.files("full {}/small/f").end();
    let size = fs::metadata(directory.join("f")).unwrap().len();
    mount(&["umount"]);
    assert_eq!(done.code(0).says("small/f").says("No space left").text(), "told once\nright\n");
    assert_eq!(size, 100);
}

#[test]
fn scripts_and_python_are_right() {
    if place().is_none() {
        return;
    }
    let script = r#"cd "$0" && for n in 1 2 3; do echo $n; done > a && cat a a > b && (echo x; echo y >&2) > c 2>&1 && wc -c < b && cat c"#;
    let python = "import os,sys,subprocess\nos.chdir(sys.argv[1])\nf=open('p','wb',buffering=0)\nfor n in range(1000): f.write(b'%05d\\n'%n)\n\
                  g=os.dup(f.fileno())\nos.write(g,b'more\\n')\nassert f.tell()==6005\nprint(subprocess.check_output(['wc','-c','p']).split()[0].decode())\n\
                  if os.fork()==0:\n  f.write(b'child\\n')\n  os._exit(0)\nos.wait()\nf.write(b'parent\\n')\nf.close()\nprint(open('p').read()[-18:].split())\n";
    for who in everybody() {
        let home = who.home.path().to_str().unwrap();
        let command = |words: &[&str]| {
            let mut run = Command::new(place().unwrap().join("hpcrt"));
            run.current_dir("/").args(["exec", "-q", "--async-io", "--io-roots", home]);
            if let Some(uid) = who.uid {
                run.uid(uid).gid(uid);
            }
            Run::new(run).program(words).end().code(0).text()
        };
        assert_eq!(command(&["sh", "-c", script, home]), "12\nx\ny\n");
        assert_eq!(command(&["/usr/bin/env", "bash", "-c", script, home]), "12\nx\ny\n");
        if Command::new("/usr/bin/python3").arg("-V").output().is_ok() {
            assert_eq!(command(&["/usr/bin/python3", "-c", python, home]), "6005\n['more', 'child', 'parent']\n");
        }
    }
}

#[test]
fn what_is_not_built_is_refused() {
    if place().is_none() {
        return;
    }
    let who = &everybody()[0];
    let program = place().unwrap().join("static");
    who.run("", &format!("{} pieces {{}}/p 10 8", program.display())).end().code(125).says("statically linked");
    who.run("--hosts a,b --agent local", "true").end().code(2).says("one host so far");
    who.run("--memory 127.0.0.1:1", "true").end().code(2).says("together with --memory");
    common::exec("--io-roots /tmp").program(&["true"]).end().code(2).says("only with --async-io");
    common::exec("--async-io --io-roots /nowhere/at/all").program(&["true"]).end().code(125).says("/nowhere/at/all");
}
