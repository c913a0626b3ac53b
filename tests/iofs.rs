//! Programs whose small writes are kept in memory and written by a worker: their files are what they are without it, whoever is killed. As root and
//! as an ordinary user.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "common/site.rs"]
mod site;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use cluster::{Cluster, Spec};
use common::{Run, Running, marked, until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::{FlockOperation, fcntl_lock, flock};

const NOBODY: u32 = 65534;

/// A place that every user can reach, with hpcrt and the program.
fn place() -> Option<&'static Path> {
    static PLACE: OnceLock<Option<PathBuf>> = OnceLock::new();
    PLACE.get_or_init(|| common::built("files.c", &[("files", &[]), ("static", &["-static"])])).as_deref()
}

/// The same with the program whose threads write.
fn crew() -> Option<&'static Path> {
    static PLACE: OnceLock<Option<PathBuf>> = OnceLock::new();
    PLACE.get_or_init(|| common::built("crew.c", &[("crew", &["-fopenmp"])])).as_deref()
}

/// A cluster, for the programs of [`place`].
fn site(name: &str) -> Option<site::Site> {
    site_of(Spec::of(&format!("t-{name}")))
}

fn site_of(spec: Spec) -> Option<site::Site> {
    place()?;
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    Some(site::Site::of(spec))
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
        // Whether it pays is another question.
        command.env("HPCRT_WITHOUT", "pace");
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
        for words in
            ["pieces {}/p 200000 64", "signals {}/s 50000", "threads {}/t", "two {}/2", "special {}/x", "crowd {}/y"]
        {
            let text = who.files(words).end().code(0).text();
            assert!(text.ends_with("right\n"), "{words}: {text}");
        }
        for seed in 1..6 {
            let done = who.files(&format!("random {{}}/r {seed} 1500")).end();
            println!("{:?} seed {seed}: {:?}", who.uid, done.took);
            assert_eq!(done.code(0).text(), "right\n");
        }
        for (seed, processes, threads) in [(1, 2, 1), (2, 3, 1), (3, 5, 1), (4, 1, 4), (5, 2, 3)] {
            let done = who.files(&format!("many {{}}/m {seed} 3000 {processes} {threads}")).end().code(0);
            assert!(done.text().ends_with("steps\nright\n"), "{}", done.text());
        }
        let bytes = fs::read(who.file("p")).unwrap();
        assert_eq!(bytes.len(), 200_000 * 64);
        let number = |nth: usize| u64::from_le_bytes(bytes[nth * 64..][..8].try_into().unwrap());
        assert!((0..200_000).all(|nth| number(nth) == nth as u64));
    }
}

/// Writes of mebibytes: what they leave, whoever makes them.
#[test]
fn large_writes_are_right() {
    if place().is_none() {
        return;
    }
    for who in everybody() {
        for words in ["bulk {}/b 1 60", "bulk {}/b 2 60", "records {}/r 3 12", "large {}/l 3 40"] {
            let done = who.files(words).end();
            println!("{:?} {words}: {:?}", who.uid, done.took);
            assert!(done.code(0).text().ends_with("right\n"), "{words}");
        }
    }
}

/// Writes that were kept, as `--stats` says.
fn kept(stats: &Path) -> u64 {
    counted(stats, "writes")
}

fn counted(stats: &Path, what: &str) -> u64 {
    let said: serde_json::Value = serde_json::from_slice(&fs::read(stats).unwrap()).unwrap();
    said["async_io"][what].as_u64().unwrap()
}

/// Many writes of each program are kept.
#[test]
fn threads_are_right() {
    let Some(crew) = crew() else { return };
    if place().is_none() {
        return;
    }
    for who in everybody() {
        let stats = who.file("stats");
        let flags = format!("--stats {}", stats.display());
        let program = format!("{}/crew", crew.display());
        for words in [
            "together {}/t 3000",
            "cancel {}/c 100",
            "execute {}/e",
            "parallel {}/p 20000",
            "once {}/o",
            "borrow {}/b 200",
        ] {
            let done = who.run(&flags, &format!("{program} {words}")).end().code(0);
            assert_eq!(done.text(), "right\n", "{words}");
            assert!(kept(&stats) > 1000, "{words}");
        }
        for words in ["alarmed {}/a 0", "alarmed {}/a 1"].repeat(5) {
            assert_eq!(who.run("", &format!("{program} {words}")).end().code(0).text(), "right\n", "{words}");
        }
    }
}

/// Numbers from 0 on, 8 bytes each: how many, where nothing else is in the file.
#[track_caller]
fn numbers(path: &Path) -> u64 {
    let bytes = fs::read(path).unwrap();
    let (numbers, rest) = bytes.as_chunks::<8>();
    assert!(rest.is_empty());
    let other = (0u64..).zip(numbers).find(|(nth, number)| u64::from_le_bytes(**number) != *nth);
    let other = other.map(|(nth, number)| (nth, u64::from_le_bytes(*number)));
    assert_eq!(other, None, "of {} in {}", numbers.len(), path.display());
    numbers.len() as u64
}

/// Writes that have returned, as the program counted them in memory.
fn returned(path: &Path) -> u64 {
    let mut bytes = [0; 8];
    let read = fs::File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 0));
    read.map_or(0, |()| u64::from_le_bytes(bytes))
}

/// Who gets a lock that a program had, or finds a socket closed, finds what it wrote before.
#[test]
fn what_was_written_is_there_when_a_lock_ends() {
    if place().is_none() {
        return;
    }
    for who in everybody() {
        for how in 0..3 {
            let [data, count, lock, socket] = ["l", "count", "l.lock", "l.socket"].map(|name| who.file(name));
            let lock = fs::File::create(lock).unwrap();
            let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
            listener.set_nonblocking(true).unwrap();
            for path in [who.file("l.lock"), socket.clone()] {
                chown(path, who.uid, who.uid).unwrap();
            }
            let told = || (returned(&count), fs::metadata(&data).map_or(0, |file| file.len() / 8));
            let mut run = who.files(&format!("locked {{}}/l {how} {}", count.display())).start();
            let mut looks = 0;
            while run.child.try_wait().unwrap().is_none() && returned(&count) < 200 {
                let (written, there) = match how {
                    0 | 1 => {
                        let all = |what: FlockOperation| match how {
                            0 => flock(&lock, what),
                            _ => fcntl_lock(&lock, what),
                        };
                        all(FlockOperation::LockExclusive).unwrap();
                        let told = told();
                        all(FlockOperation::Unlock).unwrap();
                        told
                    }
                    _ => {
                        let (mut program, _) = until(|| listener.accept().ok());
                        assert_eq!(program.read(&mut [0]).unwrap(), 0);
                        (looks + 1, told().1)
                    }
                };
                assert!(there >= written, "{how}: {there} of {written} are there");
                looks += u64::from(written > 0);
                std::thread::sleep(Duration::from_micros(200));
            }
            assert_eq!(run.end().code(0).text(), "right\n");
            println!("{how} as {:?}: looked {looks} times", who.uid);
            assert_eq!(numbers(&data), 200);
            for file in [data, count, socket] {
                fs::remove_file(file).unwrap();
            }
        }
    }
}

fn named(run: &Running, word: &str) -> Option<Pid> {
    all_named(run, word).into_iter().next()
}

fn all_named(run: &Running, word: &str) -> Vec<Pid> {
    let is = |pid: &Pid| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.split(|b| *b == 0).any(|w| w == word.as_bytes()))
    };
    marked(&run.mark).into_iter().filter(is).collect()
}

/// One worker keeps the order of what they write.
#[test]
fn programs_beside_each_other_have_one_worker() {
    if place().is_some() {
        let all = everybody();
        let run = all[0].run("", "sleep 5 : sleep 5").start();
        until(|| named(&run, "ioworker"));
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(all_named(&run, "ioworker").len(), 1);
        run.end().code(0);
    }
}

/// Each writes so many bytes at once.
fn killed_programs(times: u32, name: &str, len: u64) {
    for who in everybody() {
        for nth in 0..times {
            let (file, count) = (who.file(name), who.file("count"));
            let run = who.files(&format!("forever {{}}/{name} {} 0 {len}", count.display())).start();
            until(|| (returned(&count) > 10).then_some(()));
            std::thread::sleep(Duration::from_micros(fastrand::u64(0..40_000)));
            let program = marked(&run.mark)
                .into_iter()
                .find(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe.ends_with("files")));
            kill(program.unwrap(), Signal::SIGKILL).unwrap();
            run.end().code(137);
            let (there, told) = (numbers(&file), returned(&count));
            // The one that was under way may be there, or its beginning.
            assert!((told..=told + len / 8).contains(&there), "{nth}: {there} are there, {told} were written");
            fs::remove_file(count).unwrap();
        }
    }
}

#[test]
fn a_killed_program_leaves_what_it_wrote() {
    if place().is_some() {
        killed_programs(8, "k", 8);
        killed_programs(2, "k", 24 << 20);
        killed_programs(2, "k.append", 24 << 20);
    }
}

#[test]
#[ignore = "a thousand programs"]
fn a_thousand_killed_programs() {
    if place().is_some() {
        killed_programs(400, "k", 8);
        killed_programs(50, "k", 24 << 20);
        killed_programs(50, "k.append", 24 << 20);
    }
}

/// How many were.
fn killed_workers(times: u32) -> u32 {
    let mut kills = 0;
    for who in everybody() {
        for _ in 0..times {
            // At an offset, and appended, which must not happen twice.
            for (name, all, len) in [("k", 3, 8), ("k.append", 3, 8), ("k", 48, 24 << 20), ("k.append", 48, 24 << 20)] {
                let (count, all) = (who.file("count"), all << 20);
                let run = who.files(&format!("forever {{}}/{name} {} {all} {len}", count.display())).start();
                while returned(&count) < all && named(&run, "forever").is_some() {
                    if let Some(worker) = named(&run, "ioworker") {
                        kills += u32::from(kill(worker, Signal::SIGKILL).is_ok());
                    }
                    std::thread::sleep(Duration::from_millis(150 + fastrand::u64(0..30)));
                }
                run.end().code(0);
                assert_eq!(numbers(&who.file(name)), all);
                fs::remove_file(count).unwrap();
            }
        }
    }
    kills
}

#[test]
fn a_killed_worker_is_replaced_and_nothing_lost() {
    if place().is_some() {
        killed_workers(1);
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
    mount(&["mount", "-t", "tmpfs", "-o", "size=8m", "none"]);
    let done = who.files("full {}/small/f").end();
    let size = fs::metadata(directory.join("f")).unwrap().len();
    let large = who.files("full {}/small/f 0 3000000").end();
    let shown = who.files("shown {}/small/g").end();
    fs::remove_file(directory.join("f")).unwrap();
    fs::remove_file(directory.join("g")).unwrap();
    let mut rest = fs::File::create(directory.join("rest")).unwrap();
    while rest.write_all(&[0; 4096]).is_ok() {}
    let page = rest.metadata().unwrap().len() - 4096;
    rest.set_len(page).unwrap();
    drop(rest);
    let untold = ["0", "1", "2", "3"].map(|how| who.files(&format!("untold {{}}/small/f {how}")).end());
    mount(&["umount"]);
    for (done, code) in untold.into_iter().zip([125, 125, 125, 0]) {
        let done = done.code(code).says("small/f").says("No space left");
        assert_eq!(done.text(), "right\n");
        assert_eq!(code == 125, done.err.contains("ended without having been told"));
    }
    assert_eq!(large.code(0).says("small/f").says("No space left").text(), "told once\nright\n");
    assert_eq!(shown.code(0).says("small/g").says("No space left").text(), "shown\nright\n");
    assert_eq!(done.code(0).says("small/f").says("No space left").text(), "told once\nright\n");
    assert_eq!(size, 100);
}

#[test]
fn errors_of_a_shared_file_system_are_told_once() {
    let Some(site) = site("iofs") else { return };
    fs::copy(place().unwrap().join("files"), site.backing("files")).unwrap();
    for uid in [0, 20001] {
        let place = format!("of{uid}");
        site.place(uid, &place, &[]);
        for (name, errno, said) in [("f.eio", "5", "Input/output error"), ("f.edquot", "122", "quota exceeded")] {
            let file = format!("/shared/{place}/{name}");
            let run = site.run(uid, "hpc1", &["-q", "--async-io"], &["/shared/files", "full", &file, errno]).code(0);
            assert_eq!(run.out(), "told once\nright\n");
            run.says(&[name, said]);
            assert_eq!(fs::metadata(site.backing(&place).join(name)).unwrap().len(), 100);
        }
    }
}

/// The file system tells one of those who close a file: that is who wrote it, whichever host has.
#[test]
fn errors_of_closing_are_told_to_who_closes() {
    let spec = Spec { flushes: true, trust: Duration::ZERO, ..Spec::of("t-iofslate") };
    let Some(site) = site_of(spec) else { return };
    fs::copy(place().unwrap().join("files"), site.backing("files")).unwrap();
    for uid in [0, 20001] {
        let place = format!("of{uid}");
        let here = site.place(uid, &place, &[]);
        let stats = format!("/shared/{place}/stats");
        // One of two descriptors is closed; the program ends without a look at what it has written.
        for (how, code) in [("0", 0), ("1", 0), ("2", 0), ("3", 125)] {
            let plain = ["/shared/files", "late", &format!("/shared/{place}/plain{how}.late"), how];
            let plain = site.cluster.exec("hpc1", uid, &plain).unwrap();
            assert!(plain.stdout == b"right\n", "{how}: {plain:?}");
            // What another host has written its own descriptors' closing says nothing of.
            let ways = [&[][..], &["--io-forward", "hpc2"]];
            for forward in &ways[..if how == "2" { 1 } else { 2 }] {
                let file = format!("/shared/{place}/{how}of{}.late", forward.len());
                let program = ["/shared/files", "late", &file, how];
                let flags = [&["-q", "--async-io", "--stats", &stats], *forward].concat();
                let run = site.run(uid, "hpc1", &flags, &program);
                assert_eq!(run.out(), "right\n", "{how} {forward:?}: {}", run.err());
                let run = run.code(code);
                assert!(kept(&here.join("stats")) > 300, "{how} {forward:?}");
                run.says(if how == "2" { &[] } else { &["late", "quota exceeded"] });
            }
        }
    }
}

/// What is read ahead and written behind is what it is without.
#[test]
fn large_writes_to_a_shared_file_system_are_right() {
    let Some(site) = site("iofslarge") else { return };
    fs::copy(place().unwrap().join("files"), site.backing("files")).unwrap();
    let input: Vec<u8> = (0u32..6 << 20).flat_map(|nth| nth.wrapping_mul(0x9e37_79b1).to_le_bytes()).collect();
    for uid in [0, 20001] {
        let place = format!("of{uid}");
        let here = site.place(uid, &place, &[]);
        fs::write(here.join("in"), &input).unwrap();
        let many = ["bulk", "records", "pipeline", "pipeline"];
        let words =
            [["b", "3", "20", ""], ["r", "3", "4", ""], ["in", "24", "3000", "1048576"], ["in", "3", "9", "8388608"]];
        for (mode, [file, words @ ..]) in many.into_iter().zip(words) {
            let (file, stats) = (format!("/shared/{place}/{file}"), format!("/shared/{place}/stats"));
            let program = [&["/shared/files", mode, &file], &words[..]].concat();
            let run = site.run(uid, "hpc1", &["-q", "--async-io", "--stats", &stats], &program).code(0);
            println!("{mode} as {uid}: {:.2?} {}", run.took, run.out());
            assert!(run.out().ends_with("right\n"), "{mode}: {}{}", run.out(), run.err());
            assert!(kept(&here.join("stats")) > 3, "{mode}");
        }
        assert!(fs::read(here.join("in.out")).unwrap() == input);
        // What one write appends stays together, whoever appends meanwhile: where all of it is kept.
        let (file, stats) = (format!("/shared/{place}/k"), format!("/shared/{place}/stats"));
        let flags = ["-q", "--async-io", "--stats", &stats];
        let mut command = site.start(uid, "hpc1", &flags, &["/shared/files", "records", &file, "3", "40"]);
        let run = command.env("HPCRT_WITHOUT", "pace").output().unwrap();
        assert!(run.stdout == b"right\n", "{run:?}");
        println!("all of them as {uid}: {} writes", kept(&here.join("stats")));
        assert!(kept(&here.join("stats")) > 3);
    }
}

/// No write goes on where the one before of the same program ended.
#[test]
fn ranks_that_write_by_turns_are_written_together() {
    const RECORDS: u64 = 60_000;
    let Some(site) = site("iofsturns") else { return };
    fs::copy(place().unwrap().join("files"), site.backing("files")).unwrap();
    for (uid, ranks) in [(0, "2"), (20001, "5")] {
        let place = format!("of{uid}");
        let here = site.place(uid, &place, &[]);
        let (file, stats) = (format!("/shared/{place}/t"), format!("/shared/{place}/stats"));
        let program = ["/shared/files", "turns", &file, ranks, &RECORDS.to_string()];
        let run = site.run(uid, "hpc1", &["-q", "--async-io", "--stats", &stats], &program).code(0);
        assert_eq!(run.out(), "right\n");
        let [writes, pieces] = ["writes", "pieces"].map(|what| counted(&here.join("stats"), what));
        println!("{ranks} ranks: {:.2?}, {writes} writes in {pieces}", run.took);
        assert!(writes > RECORDS * 9 / 10 && pieces < RECORDS / 20, "{writes} writes in {pieces}");
    }
}

#[test]
fn mpi_programs_are_right() {
    let Some(site) = site("iofsmpi") else { return };
    for (compiler, flags) in [
        ("mpicc.mpich", ["UCX_TLS=self,sysv,posix", "UCX_WARN_UNUSED_ENV_VARS=n"]),
        ("mpicc.openmpi", ["OMPI_MCA_btl=vader,self", "OMPI_MCA_mpi_yield_when_idle=1"]),
    ] {
        if !site::tool(compiler) {
            continue;
        }
        let program = format!("/shared/{compiler}");
        let built =
            Command::new(compiler).arg(site::source("mpiwrites.c")).arg("-o").arg(site.backing(compiler)).status();
        assert!(built.unwrap().success());
        for uid in [0, 20001] {
            let place = format!("{compiler}.{uid}");
            let stats = site.place(uid, &place, &[]).join("stats");
            let (file, said) = (format!("/shared/{place}/f"), format!("/shared/{place}/stats"));
            let flags = ["-q", "-n", "2", "--async-io", "--stats", &said, "-x", flags[0], "-x", flags[1], "-x"];
            let flags = [&flags[..], &["OMPI_ALLOW_RUN_AS_ROOT=1"]].concat();
            let run = site.run(uid, "hpc1", &flags, &[&program, &file]).code(0);
            assert_eq!(run.out(), "right\n", "{}", run.err());
            // Of 3000 each to two files, by two.
            assert!(kept(&stats) > 8_000, "{}", kept(&stats));
        }
    }
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
    let threads = "import os,sys,threading,concurrent.futures\nos.chdir(sys.argv[1])\ndef one(n):\n  with open('t%d'%n,'w') as f:\n    for k in range(2000): f.write('%d %d\\n'%(n,k)); k%50 or f.flush()\n\
                   with concurrent.futures.ThreadPoolExecutor(6) as pool: list(pool.map(one,range(12)))\nall=os.open('all',os.O_RDWR|os.O_CREAT|os.O_APPEND)\n\
                   t=[threading.Thread(target=lambda n=n:[os.write(all,b'%d\\n'%n) for k in range(500)]) for n in range(5)]\n[x.start() for x in t]\n[x.join() for x in t]\n\
                   assert all and sorted(open('all').read().split())==sorted(str(n) for n in range(5) for k in range(500))\n\
                   assert [open('t%d'%n).read() for n in range(12)]==[''.join('%d %d\\n'%(n,k) for k in range(2000)) for n in range(12)]\nprint('right')\n";
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
            assert_eq!(command(&["/usr/bin/python3", "-c", threads, home]), "right\n");
        }
    }
}

#[test]
fn texts_are_rewritten_once() {
    if place().is_none() {
        return;
    }
    // Those of libc and its linker, and their stubs, of three programs that have the same; the second may write files of 512 bytes only, and keeps nothing.
    let script =
        "grep -c ' r-xp .*/text[.].*[.]0' /proc/self/maps; (ulimit -f 1; echo x); ls ${LD_PRELOAD%/*} | grep -c ^text";
    let home = tempfile::tempdir().unwrap();
    let (home, ulimit) = (home.path().to_str().unwrap(), "ulimit -f 1; exec sh -c \"$0\"");
    // Who keeps nothing leaves the linker alone.
    for (words, parts) in [(vec!["sh", "-c", script], 4), (vec!["sh", "-c", ulimit, script], 2)] {
        let mut run = Command::new(place().unwrap().join("hpcrt"));
        run.args(["exec", "-q", "--async-io", "--io-roots", home]);
        assert_eq!(Run::new(run).program(&words).end().code(0).text(), format!("{parts}\nx\n2\n"), "{words:?}");
    }
}

#[test]
fn calls_of_other_code_are_seen() {
    let place = common::built(
        "code.c",
        &[
            ("code", &["-O1", "-pthread"]),
            ("own", &["-O1", "-pthread", "-DOWN"]),
            ("untold", &["-O1", "-pthread", "-DOWN", "-fno-asynchronous-unwind-tables"]),
            ("late.so", &["-O1", "-shared", "-fPIC", "-DLIBRARY"]),
        ],
    );
    let Some(place) = place else { return };
    let library = place.join("late.so");
    for who in everybody() {
        let loading = ["loaded", "made", "threads", "late", "forked", "cloned"].map(|way| ("code", way));
        for (program, way) in [("own", "own"), ("untold", "own")].into_iter().chain(loading) {
            let name = format!("{program}.{way}");
            let mut command = Command::new(place.join("hpcrt"));
            command.env("HPCRT_WITHOUT", "pace");
            let stats = who.file(&format!("{name}.stats"));
            command.current_dir("/").args(["exec", "-q", "--async-io", "--stats"]).arg(&stats);
            command.arg("--io-roots").arg(who.home.path());
            if let Some(uid) = who.uid {
                command.uid(uid).gid(uid);
            }
            let (program, file) = (place.join(program), who.file(&name));
            let words = [&program, Path::new(way), &file, &library].map(|word| word.to_str().unwrap());
            let run = Run::new(command).program(&words).end().code(0);
            assert_eq!(run.text(), "right\n", "{name}: {}", run.err);
            assert!(kept(&stats) > 40, "{name}: {}", kept(&stats));
        }
    }
}

#[test]
fn nothing_is_preloaded_where_nothing_is_kept() {
    if fs::read_to_string("/proc/self/mountinfo")
        .is_ok_and(|mounts| mounts.contains(" - fuse") || mounts.contains(" - nfs"))
    {
        return eprintln!("SKIPPED: this host has a file system that would be kept");
    }
    let run = common::exec("--async-io").program(&["sh", "-c", "echo \"<$LD_PRELOAD>\""]).end().code(0);
    assert_eq!(run.text(), "<>\n");
}

/// A real program: what it is called, what it needs (programs; modules of Python), and what it does in an empty directory, which is the same every
/// time.
type Real = (&'static str, &'static [&'static str], &'static [&'static str], &'static str);

const TREE: &str =
    "mkdir -p tree/a/b && for n in $(seq 40); do seq $n $((n * 30)) > tree/a/b/$n; cp tree/a/b/$n tree/$n.txt; done";
const QUICK: [Real; 6] = [
    ("tar", &["tar"], &[], "tar cf t.tar --sort=name --mtime=@0 tree && mkdir out && tar xf t.tar -C out"),
    (
        "rsync",
        &["rsync"],
        &[],
        "rsync -rt tree/ copy && echo more >> tree/1.txt && rsync -rt --inplace --checksum tree/ copy",
    ),
    (
        "git",
        &["git"],
        &[],
        "git init -q one && cp -r tree one && cd one && git add . && git -c user.name=n -c user.email=e commit -qm first && cd .. && git clone -q one two \
         && cd two && echo x >> tree/2.txt && git -c user.name=n -c user.email=e commit -qam second && git -c pack.threads=1 repack -adq && git fsck --strict && git status --short",
    ),
    (
        "gcc",
        &["gcc", "ar"],
        &[],
        "for n in $(seq 6); do printf '#include <stdio.h>\nint f%d(int x) { return printf(\"%%d\", x * %d); }\n' $n $n > $n.c; gcc -O1 -g0 -c $n.c; done \
         && ar crD lib.a *.o && echo 'int f3(int); int main(void) { return f3(4) != 2; }' > main.c && gcc main.c lib.a -o main && ./main > out",
    ),
    (
        "sqlite3",
        &["sqlite3"],
        &[],
        "for n in $(seq 12); do echo \"insert into t values($n, 'text $n', zeroblob(9)); update t set b = b || 'x' where a % 3 = 0;\"; done > some.sql \
         && sqlite3 d.db 'create table t(a integer primary key, b text, c blob)' && sqlite3 d.db < some.sql && sqlite3 d.db 'pragma integrity_check; select * from t' > out",
    ),
    (
        "python",
        &["python3"],
        &["csv", "pickle"],
        "python3 -c \"import csv,pickle,json,zipfile,shelve,os\nw=csv.writer(open('c.csv','w',newline=''))\nfor n in range(3000): w.writerow([n,n*n,str(n)*3])\n\
         pickle.dump(list(range(20000)),open('p','wb'))\njson.dump({str(n):[n]*5 for n in range(900)},open('j','w'),indent=1)\n\
         f=open('seek','w+b',buffering=0)\nfor n in range(500): f.seek(n*37%4096); f.write(b'%04d'%n); f.seek(n%100); assert len(f.read(3))>=0\n\"",
    ),
];
const LONG: [Real; 5] = [
    (
        "numpy",
        &["python3"],
        &["numpy"],
        "python3 -c \"import numpy as n\na=n.arange(300000.).reshape(300,1000)\nn.save('a.npy',a)\nn.savez('a.npz',a=a,b=a.T)\nn.savetxt('a.txt',a[:40])\n\
         assert (n.load('a.npz')['b']==a.T).all()\nm=n.lib.format.open_memmap('m.npy','w+',a.dtype,a.shape)\nm[:]=a\nm.flush()\"",
    ),
    (
        "h5py",
        &["python3"],
        &["h5py", "numpy"],
        "HDF5_USE_FILE_LOCKING=${LOCKING:-TRUE} python3 -c \"import h5py,numpy as n\nf=h5py.File('h.h5','w')\nfor k in range(60): f.create_dataset('d%d'%k,data=n.arange(k*50.),chunks=(k*50,) if k else None)\n\
         g=f.create_dataset('grow',(0,),maxshape=(None,),chunks=(64,))\nfor k in range(200): g.resize((g.shape[0]+7,)); g[-7:]=k\nf.close()\nf=h5py.File('h.h5','r+')\nf['d3'][2]=9\nassert f['grow'][-1]==199\nf.close()\"",
    ),
    (
        "netCDF4",
        &["python3"],
        &["netCDF4"],
        "python3 -c \"import netCDF4,numpy as n\nfor kind in ('NETCDF4','NETCDF3_CLASSIC'): d=netCDF4.Dataset(kind+'.nc','w',format=kind);d.createDimension('t',None);\
         d.createDimension('x',50);v=d.createVariable('v','f8',('t','x'));[v.__setitem__((k,slice(None)),n.arange(50)*k) for k in range(100)];d.close()\n\"",
    ),
    (
        "LAMMPS",
        &["lmp"],
        &[],
        "printf 'units lj\\natom_style atomic\\nlattice fcc 0.8442\\nregion box block 0 8 0 8 0 8\\ncreate_box 1 box\\ncreate_atoms 1 box\\nmass 1 1.0\\n\
         velocity all create 3.0 87287\\npair_style lj/cut 2.5\\npair_coeff 1 1 1.0 1.0 2.5\\nfix 1 all nve\\ndump 1 all atom 5 dump.txt\\nrestart 20 r.*\\nrun 60\\n' > in && lmp -in in -log none > /dev/null",
    ),
    (
        "IOR",
        &["ior"],
        &[],
        "ior -a POSIX -w -W -r -R -G 7 -t 64 -b 64k -s 4 -k -o f > /dev/null && ior -a POSIX -w -W -r -R -G 7 -t 512 -b 256k -k -e -o g > /dev/null",
    ),
];

/// Everything below a directory but what tells times and inodes.
fn tree(top: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let mut all = std::collections::BTreeMap::new();
    let mut left = vec![top.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(top).unwrap().to_owned();
            if path.is_dir() && !path.is_symlink() {
                left.push(path);
            } else if !name.ends_with(".git/index") {
                all.insert(name, fs::read(&path).unwrap_or_default());
            }
        }
    }
    all
}

/// Runs them plainly in one directory and with `--async-io` in another, below `top`; `command` is hpcrt's up to the program.
fn same_files(programs: &[Real], top: &Path, command: &dyn Fn() -> Command) {
    let path = std::env::var("PATH").unwrap();
    let quietly =
        |words: &[&str]| Command::new(words[0]).args(&words[1..]).output().is_ok_and(|output| output.status.success());
    for (name, needs, modules, script) in programs {
        let python = modules.iter().all(|module| quietly(&["python3", "-c", &format!("import {module}")]));
        if !python || !needs.iter().all(|word| quietly(&["sh", "-c", &format!("command -v {word}")])) {
            eprintln!("SKIPPED: {name} is not there");
            continue;
        }
        // The same path, since some write it down.
        let place = top.join("work");
        let script = format!("set -e; cd {}; {TREE}; {script}", place.display());
        let ran = [false, true].map(|ours| {
            fs::create_dir(&place).unwrap();
            let mut run = if ours { command() } else { Command::new("/usr/bin/env") };
            run.env("PATH", &path).env("HOME", top).env("OMPI_ALLOW_RUN_AS_ROOT", "1");
            run.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
                .env("OMPI_MCA_btl", "self")
                .env("PYTHONDONTWRITEBYTECODE", "1");
            for date in ["GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"] {
                run.env(date, "2024-01-01T00:00:00Z");
            }
            let begun = std::time::Instant::now();
            let output = run.args(["sh", "-c", &script]).output().unwrap();
            let took = begun.elapsed();
            assert!(output.status.success(), "{name}, {ours}: {}", String::from_utf8_lossy(&output.stderr));
            let files = tree(&place);
            fs::remove_dir_all(&place).unwrap();
            (files, took)
        });
        let [(plain, before), (kept, after)] = ran;
        println!("{name}: {} files, plain {before:.2?}, kept {after:.2?}", plain.len());
        assert!(plain.len() > 80);
        for (path, bytes) in &plain {
            assert!(kept.get(path) == Some(bytes), "{name}: {} differs", path.display());
        }
        assert_eq!(plain.len(), kept.len(), "{name}");
    }
}

fn real_programs(programs: &[Real]) {
    if place().is_none() {
        return;
    }
    // Kept whether it pays or not, and as it is judged.
    for pace in ["pace", ""] {
        let home = tempfile::tempdir().unwrap();
        same_files(programs, home.path(), &|| {
            let mut command = Command::new(place().unwrap().join("hpcrt"));
            command.env("HPCRT_WITHOUT", pace).args(["exec", "-q", "--async-io", "--io-roots"]).arg(home.path());
            command.arg("--");
            command
        });
    }
}

#[test]
fn real_programs_leave_the_same_files() {
    real_programs(&QUICK);
}

#[test]
#[ignore = "programs that not every machine has"]
fn scientific_programs_leave_the_same_files() {
    real_programs(&LONG);
}

/// A tenth of a million each, as many times as there are seeds.
fn operations(seeds: std::ops::Range<u32>) {
    let mut done = 0;
    let who = &everybody()[0];
    for seed in seeds {
        let (processes, threads) = (1 + seed % 6, 1 + seed / 6 % 3);
        let text = who.files(&format!("many {{}}/m {seed} 20000 {processes} {threads}")).end().code(0).text();
        done += text.split(' ').next().and_then(|count| count.parse::<u64>().ok()).unwrap();
        assert!(text.ends_with("steps\nright\n"), "seed {seed}: {text}");
    }
    println!("{done} operations");
}

#[test]
#[ignore = "a million operations"]
fn a_million_operations() {
    if place().is_some() {
        operations(0..50);
    }
}

#[test]
#[ignore = "a hundred workers"]
fn a_hundred_killed_workers() {
    if place().is_some() {
        let mut kills = 0;
        while kills < 100 {
            kills += killed_workers(1);
        }
        println!("{kills} workers were killed");
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
    who.run("--memory 127.0.0.1:1", "true").end().code(2).says("together with --memory");
    common::exec("--io-roots /tmp").program(&["true"]).end().code(2).says("only with --async-io");
    common::exec("--async-io --io-roots /nowhere/at/all").program(&["true"]).end().code(2).says("/nowhere/at/all");
}
