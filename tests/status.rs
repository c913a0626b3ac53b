//! What can be asked about running jobs and sessions, what is written about them afterwards, and what a debugger finds.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use cluster::generate::libraries::Libraries;
use cluster::{Cluster, Spec};
use common::{Done, Role, Run, Running, role, until};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;

/// A socket directory of its own.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), fs::Permissions::from_mode(0o700)).unwrap();
        Place(place)
    }

    fn run(&self, words: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(words).env("XDG_RUNTIME_DIR", self.0.path());
        Run::new(command)
    }

    /// Three hosts of this machine, in a tree of two levels.
    fn exec(&self, flags: &str, program: &[&str]) -> Running {
        let words = ["exec", "--hosts", "a,b,c", "--agent", "local", "--fan-out", "2", "-q"];
        self.run(&words.into_iter().chain(flags.split_whitespace()).collect::<Vec<_>>()).program(program).start()
    }

    fn status(&self, words: &[&str]) -> Done {
        self.run(&[&["status"], words].concat()).end()
    }

    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_slice(&self.status(&[words, &["--json"]].concat()).code(0).out).unwrap()
    }

    fn sockets(&self) -> Vec<PathBuf> {
        fs::read_dir(self.0.path().join("hpcrt")).into_iter().flatten().map(|e| e.unwrap().path()).collect()
    }

    /// The name of the only job, once all of its ranks run.
    fn job(&self, run: &Running, ranks: usize) -> String {
        until(|| (role(&run.mark, Role::Rank).len() >= ranks).then_some(()));
        let jobs = self.json(&[]);
        assert_eq!(jobs.as_array().unwrap().len(), 1, "{jobs}");
        jobs[0]["id"].as_str().unwrap().to_owned()
    }
}

/// Names of all fields.
fn keys(value: &Value) -> std::collections::BTreeSet<String> {
    match value {
        Value::Object(map) => {
            map.iter().flat_map(|(key, value)| keys(value).into_iter().chain([key.clone()])).collect()
        }
        Value::Array(items) => items.iter().flat_map(keys).collect(),
        _ => Default::default(),
    }
}

fn end(run: Running) {
    run.signal(Signal::SIGTERM);
    run.end().gone();
}

#[test]
fn a_job_is_shown_while_it_runs() {
    let place = Place::new();
    let run = place.exec("-n 6", &["sleep", "1000"]);
    let id = place.job(&run, 6);
    let listed = place.status(&[]).code(0);
    assert!(listed.text().contains(&id) && listed.text().contains("3 of 3") && listed.text().contains("sleep"));

    let status = place.json(&[&id, "--pids"]);
    assert_eq!((&status["kind"], &status["phase"]), (&"job".into(), &"running".into()));
    assert_eq!(status["pid"], run.child.id());
    let job = &status["jobs"][0];
    assert_eq!(
        (&job["ranks"]["all"], &job["ranks"]["ended"], &job["program"]),
        (&6.into(), &0.into(), &"sleep".into())
    );
    let nodes = status["nodes"].as_array().unwrap();
    let tree: Vec<(&str, u64)> =
        nodes.iter().map(|n| (n["host"].as_str().unwrap(), n["parent"].as_u64().unwrap())).collect();
    assert_eq!(tree.len(), 3);
    assert!(tree.iter().any(|(_, parent)| *parent > 0), "a tree of two levels: {tree:?}");
    assert!(nodes.iter().all(|n| n["jobs"][0]["running"] == 2 && n["jobs"][0]["seconds"]["started"].is_f64()));
    let mut shown: Vec<i64> = job["processes"].as_array().unwrap().iter().map(|p| p["pid"].as_i64().unwrap()).collect();
    let mut real: Vec<i64> = role(&run.mark, Role::Rank).into_iter().map(|pid| pid.as_raw().into()).collect();
    shown.sort_unstable();
    real.sort_unstable();
    assert_eq!(shown, real);

    let document = include_str!("../docs/STATS.md").split("\n## ").last().unwrap();
    for key in keys(&status) {
        let named =
            [format!("`{key}`"), format!(".{key}`"), format!("{key}[]`"), format!("`{key}."), format!("].{key}.")];
        let known = named.iter().any(|name| document.contains(name)) || document.contains(&format!("`{key}[]."));
        assert!(known || ["schema", "hpcrt"].contains(&&*key), "docs/STATS.md does not describe {key:?}");
    }

    let text = place.status(&[&id]).code(0).text();
    for part in ["3 of 3 hosts up", "2 levels", "0 of 6 ranks ended", "slowest hosts"] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    // It is no session.
    place.run(&["session", "stop", &id]).end().code(2).says("that is a job, not a session");
    assert!(place.run(&["session", "list"]).end().code(0).text().is_empty());

    let watch = place.run(&["status", "--watch", "--json", &id]).start();
    watch.printed(2);
    end(run);
    let looks = watch.end().code(0).text();
    assert!(looks.lines().count() >= 2 && looks.lines().all(|l| serde_json::from_str::<Value>(l).is_ok()), "{looks}");
    assert!(place.sockets().is_empty(), "no socket is left");
    place.status(&[&id]).code(2).says("there is no such");
    assert_eq!(place.status(&[]).code(0).text(), "");
}

#[test]
fn sessions_and_their_jobs_are_shown() {
    let place = Place::new();
    let started = place.run(&["session", "start", "--hosts", "a,b", "--agent", "local"]).end();
    let id = started.text().trim().to_owned();
    let job = place.run(&["session", "run", &id, "-q", "--", "sleep", "1000"]).start();
    until(|| (place.json(&[])[0]["jobs"][0]["phase"] == "running").then_some(()));
    let status = place.json(&[&id]);
    assert_eq!(
        (&status["kind"], &status["phase"], &status["program"]),
        (&"session".into(), &"up".into(), &Value::Null)
    );
    assert_eq!(status["jobs"][0]["program"], "sleep");
    assert!(place.status(&[]).code(0).text().contains("session"));
    end(job);
    assert_eq!(place.json(&[&id])["jobs"], Value::Array(Vec::new()));
    place.run(&["session", "stop", &id]).end().code(0);
    assert!(place.sockets().is_empty());
}

#[test]
fn what_a_killed_front_end_leaves_is_swept() {
    let place = Place::new();
    let run = place.exec("", &["sleep", "1000"]);
    place.job(&run, 3);
    run.signal(Signal::SIGKILL);
    run.end().gone();
    assert!(fs::read_dir(place.0.path()).unwrap().next().is_none(), "nothing is left");
    for sweep in [&["status"][..], &["exec", "-q", "--", "true"]] {
        let run = place.exec("", &["sleep", "1000"]);
        let id = place.job(&run, 3);
        // Whoever removes the socket otherwise, first.
        kill(role(&run.mark, Role::Porter)[0], Signal::SIGKILL).unwrap();
        run.signal(Signal::SIGKILL);
        run.end().gone();
        assert_eq!(place.sockets().len(), 1);
        place.run(sweep).end().code(0);
        assert!(place.sockets().is_empty(), "after {sweep:?}");
        place.status(&[&id]).code(2);
    }
}

#[test]
fn a_stopped_front_end_does_not_hold_up_who_asks() {
    let place = Place::new();
    let run = place.exec("", &["sleep", "1000"]);
    let id = place.job(&run, 3);
    run.signal(Signal::SIGSTOP);
    let (one, all) = (place.run(&["status", &id]).start(), place.run(&["status"]).start());
    for (asked, code) in [(one, 125), (all, 1)] {
        let done = asked.end().code(code).says("is stopped").says("kill -CONT");
        assert!(done.took < Duration::from_secs(9), "{:?}", done.took);
    }
    // Nor do others that ask: the queue of the socket is full.
    let waiting: Vec<_> = (0..200).map_while(|_| knock(&place.sockets()[0])).collect();
    assert!(waiting.len() < 200);
    let done = place.status(&[&id]).code(125).says("has not answered others");
    assert!(done.took < Duration::from_secs(2));
    drop(waiting);
    run.signal(Signal::SIGCONT);
    // It lets those in first that waited before.
    until(|| (place.status(&[&id]).status.code() == Some(0)).then_some(()));
    assert_eq!(place.json(&[&id])["hosts"]["up"], 3);
    end(run);
}

/// A connection to a socket, unless it would have to wait.
fn knock(path: &Path) -> Option<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let fd = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::NONBLOCK, None).unwrap();
    connect(&fd, &SocketAddrUnix::new(path).unwrap()).ok().map(|()| fd)
}

#[test]
fn silent_and_lost_hosts_are_named() {
    let place = Place::new();
    let run = place.exec("--keep-going", &["sleep", "1000"]);
    let id = place.job(&run, 3);
    let agents = role(&run.mark, Role::Agent);
    kill(agents[0], Signal::SIGSTOP).unwrap();
    let begun = Instant::now();
    let status = place.json(&[&id]);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    // The hosts below it are silent, too.
    assert!(status["hosts"]["silent"].as_u64().unwrap() >= 1, "{status:#}");
    assert!(place.status(&[&id]).code(0).text().contains("did not answer"));
    kill(agents[0], Signal::SIGKILL).unwrap();
    let lost = || place.json(&[&id])["hosts"]["lost"].as_u64().filter(|lost| *lost > 0);
    assert!(until(lost) >= 1);
    end(run);
}

#[test]
fn strangers_are_kept_out() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: only root can become a stranger");
        return;
    }
    let place = Place::new();
    let run = place.exec("", &["sleep", "1000"]);
    let id = place.job(&run, 3);
    let socket = place.sockets().remove(0);
    let connect = "import socket, sys\n\
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
        s.settimeout(20)\n\
        try:\n    s.connect(sys.argv[1])\n    print('told', len(s.recv(9)))\n\
        except OSError as e:\n    print(type(e).__name__)";
    let stranger = || {
        let mut python = Command::new("python3");
        python.args(["-c", connect]).arg(&socket).uid(65534).gid(65534);
        python.output().map(|output| String::from_utf8(output.stdout).unwrap())
    };
    match stranger() {
        Ok(said) => assert_eq!(said.trim(), "PermissionError"),
        Err(error) => return eprintln!("SKIPPED: python3: {error}"),
    }
    // Where somebody has opened all doors by hand, it still hears nothing.
    for path in [place.0.path(), socket.parent().unwrap(), &socket] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    }
    assert_eq!(stranger().unwrap().trim(), "told 0");
    place.status(&[&id]).code(125).says("only you can reach");
    end(run);
}

#[test]
fn a_report_is_drawn() {
    let place = Place::new();
    let target = tempfile::tempdir().unwrap();
    // The end of a run that takes longer than three times as long as the start would be left out.
    let started_late = ["exec", "--hosts", "a,b,c", "--agent", "sleep 0.5; env AGENT_OF={host}", "-q", "-n", "6"];
    for (name, begins) in [("r.svg", "<svg "), ("r.html", "<!DOCTYPE html>")] {
        let file = target.path().join(name);
        let words = [&started_late[..], &["--report", file.to_str().unwrap()]].concat();
        place.run(&words).program(&["echo", "hi"]).end().code(0);
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with(begins), "{text}");
        for part in ["echo: 6 ranks on 3 hosts", ">a</text>", ">c</text>", "ranks run", "clean up", "first output"] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(!text.contains("href") && !text.contains("<script"), "it stands alone");
    }
    place.exec("--report x.png", &["true"]).end().code(2).says("ends neither in .svg nor in .html");
}

#[test]
fn what_hit_the_shared_file_system_is_told() {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return;
    }
    let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = backing.path().join("program");
    Libraries { count: 20, megabytes: 10, at: Some("/shared/program".into()), ..Libraries::default() }
        .generate(&program)
        .unwrap();
    const DATA: u64 = 5 << 20;
    fs::write(program.join("data.bin"), vec![1; DATA as usize]).unwrap();
    // A script beside the program, so that the whole directory is captured; data files are not.
    let script = "#!/bin/sh\n/shared/program/driver || exit\ncat /shared/program/data.bin | wc -c\n\
        while [ ! -e /shared/go-$(id -u) ]; do sleep 0.1; done\n";
    fs::write(program.join("job.sh"), script).unwrap();
    fs::set_permissions(program.join("job.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(backing.path().join("out")).unwrap();
    fs::set_permissions(backing.path().join("out"), fs::Permissions::from_mode(0o777)).unwrap();
    let spec = Spec { hosts: 3, backing: Some(backing.path().to_owned()), ..Spec::of("t-status") };
    let cluster = Cluster::up(spec).unwrap();
    for uid in [0, 20001] {
        let hosts = cluster.hosts().join(",");
        let (binary, agent) = (env!("CARGO_BIN_EXE_hpcrt"), cluster.agent_command());
        let words = [binary, "exec", "-q", "--hosts", &hosts, "--agent", &agent, "--ppn", "2"];
        let file = format!("out/{uid}.json");
        let shared = format!("/shared/{file}");
        let words = [&words[..], &["--stats", &shared, "--", "/shared/program/job.sh"]].concat();
        let run = Run::new(cluster.command("hpc1", uid, &words)).start();
        let status = |words: &[&str]| {
            let words = [&[binary, "status", "--json"], words].concat();
            let done = cluster.exec("hpc1", uid, &words).unwrap();
            serde_json::from_slice::<Value>(&done.stdout).unwrap_or_default()
        };
        let read = |job: &Value| job["bytes"]["original"].as_u64().is_some_and(|bytes| bytes == 3 * DATA);
        let status = until(|| {
            let id = status(&[])[0]["id"].as_str()?.to_owned();
            Some(status(&[&id])).filter(|status| read(&status["jobs"][0]))
        });
        assert_eq!(status["jobs"][0]["originals"][0]["path"], "/shared/program/data.bin", "{status:#}");
        let node = &status["nodes"][0];
        assert!(node["stored"].as_u64().unwrap() > 9_000_000, "{node:#}");
        assert!(node["jobs"][0]["seconds"]["loaded"].is_f64(), "{node:#}");
        // Who asks first asks for all.
        let misses = |node: &Value| node["misses"].as_u64().unwrap();
        assert!(status["nodes"].as_array().unwrap().iter().map(misses).sum::<u64>() > 0, "{status:#}");
        let paths = |status: &Value| status["paths"].as_array().unwrap().clone();
        assert_eq!(paths(&status).len(), 10);

        fs::write(backing.path().join(format!("go-{uid}")), "").unwrap();
        run.end().code(0);
        let stats: Value = serde_json::from_slice(&fs::read(backing.path().join(file)).unwrap()).unwrap();
        assert_eq!(stats["originals"][0]["path"], "/shared/program/data.bin");
        assert_eq!(stats["bytes"]["original"], 3 * DATA);
        assert!(stats["clock_error"].as_f64().unwrap() < 1.0);
        let phases: Vec<&str> =
            stats["phases"].as_array().unwrap().iter().map(|p| p["phase"].as_str().unwrap()).collect();
        assert_eq!(phases, ["connect", "prepare", "wait", "mount", "load", "start", "run", "cleanup"]);
        for path in paths(&stats) {
            let by: u64 = path["by"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
            assert_eq!(path["operations"], by, "{path}");
            assert!(path["path"].as_str().unwrap().starts_with("/shared/"));
        }
    }
}

/// The dialogue that every debugger that knows MPIR has with a starter.
#[test]
fn a_debugger_finds_the_ranks() {
    if Command::new("gdb").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no gdb on this machine");
        return;
    }
    let place = Place::new();
    let script = place.0.path().join("script");
    let lines = "set pagination off\nset confirm off\nset breakpoint pending off\nstarti\n\
        set var *(int*)&MPIR_being_debugged = 1\nbreak MPIR_Breakpoint\ncontinue\n\
        printf \"state %d size %d\\n\", *(int*)&MPIR_debug_state, *(int*)&MPIR_proctable_size\n\
        set $t = *(char***)&MPIR_proctable\n\
        printf \"rank %s %s %d\\n\", $t[0], $t[1], *(int*)($t+2)\n\
        printf \"rank %s %s %d\\n\", $t[3], $t[4], *(int*)($t+5)\n\
        printf \"rank %s %s %d\\n\", $t[6], $t[7], *(int*)($t+8)\n\
        python\n\
        import os\n\
        for i in range(3):\n\
        \x20 pid = int(gdb.parse_and_eval('*(int*)($t+%d)' % (3 * i + 2)))\n\
        \x20 state = open('/proc/%d/stat' % pid).read().rsplit(')')[1].split()[0]\n\
        \x20 print('held', state, os.readlink('/proc/%d/exe' % pid).split('/')[-1])\n\
        end\n\
        continue\n";
    fs::write(&script, lines).unwrap();
    let debug = |program: &[&str], without: &str| {
        let mut gdb = Command::new("gdb");
        gdb.args(["-batch", "-nx", "-x"]).arg(&script).arg("--args").arg(env!("CARGO_BIN_EXE_hpcrt"));
        gdb.args(["exec", "--hosts", "a,b", "--agent", "local", "-n", "3", "-q", "--"]).args(program);
        gdb.env("XDG_RUNTIME_DIR", place.0.path()).env("HPCRT_WITHOUT", without);
        Run::new(gdb).end().code(0).text()
    };
    // With the bootstrapper and without.
    for without in ["", "memfd"] {
        let text = debug(&["env"], without);
        if text.contains("ptrace: Operation not permitted") {
            eprintln!("SKIPPED: this machine does not let gdb trace");
            return;
        }
        assert!(text.contains("state 1 size 3"), "{text}");
        for (host, count) in [("a", 2), ("b", 1)] {
            let of_host = |line: &&str| line.starts_with(&format!("rank {host} /")) && line.contains("/env ");
            assert_eq!(text.lines().filter(of_host).count(), count, "{text}");
        }
        assert_eq!(text.lines().filter(|line| *line == "held T env").count(), 3, "{text}");
        // They were let go.
        assert_eq!(text.lines().filter(|line| line.starts_with("HPCRT_RANK=")).count(), 3, "{text}");
    }

    let lines = "set pagination off\nset confirm off\nstarti\nset var *(int*)&MPIR_being_debugged = 1\n\
        break MPIR_Breakpoint\ncontinue\ncontinue\n\
        printf \"state %d\\n%s\\n\", *(int*)&MPIR_debug_state, *(char**)&MPIR_debug_abort_string\ncontinue\n";
    fs::write(&script, lines).unwrap();
    let text = debug(&["sh", "-c", "[ $HPCRT_RANK = 1 ] || exec sleep 1000; exit 3"], "");
    assert!(text.contains("state 2\na rank failed") && text.contains("exited with code 03"), "{text}");
}
