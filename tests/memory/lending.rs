//! Memory servers that the job starts, what is told of borrowed memory, and servers that are lost.

use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use super::common::{Done, Role, Run, Running, marked, role, until};
use super::{Servers, everybody, place, right};

/// `hpcrt exec FLAGS -- memory MODE MB`, every host on this machine.
fn exec(flags: &str, program: [&str; 2]) -> Run {
    let directory = place().unwrap();
    let mut command = Command::new(directory.join("hpcrt"));
    command.args(["exec", "--agent", "local"]).args(flags.split_whitespace());
    let memory = directory.join("memory");
    Run::new(command).program(&[memory.as_os_str(), program[0].as_ref(), program[1].as_ref()])
}

/// Started, and some of its memory is away: the address space of a memory server is not small any more.
fn borrowing(run: Run) -> Running {
    let running = run.start();
    let large = |pid: &nix::unistd::Pid| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()) > Some(40 << 10)
    };
    until(|| role(&running.mark, Role::Lender).iter().any(large).then_some(()));
    running
}

/// Waits for the end of a run, and of every process of it. (Its directory may be taken for another test's.)
fn ended(run: Running) {
    let mark = run.mark.clone();
    run.end();
    until(|| marked(&mark).is_empty().then_some(()));
}

/// The object of a job that was told to write it.
fn stats(done: &Done, file: &std::path::Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap_or_else(|error| panic!("{error}: {}", done.err))).unwrap()
}

#[test]
fn jobs_start_servers_and_end_them() {
    if place().is_none() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let file = scratch.path().join("stats");
    // Hosts of the job and another one; sizes that differ.
    let run = exec("-q --hosts a,b -n 2 --ppn 1 --memory b:200M,c:400M --local-mb 20", ["triad", "90"]);
    let done = run.end().code(0);
    assert_eq!(done.lines().iter().filter(|line| *line == "right").count(), 2);
    // No host is named: the program runs here.
    let flags = format!("-q --memory far[1-2]:100M --local-mb 20 --stats {}", file.display());
    let done = exec(&flags, ["triad", "60"]).end();
    let told = stats(&done, &file);
    right(done, 20);
    let memory = &told["memory"];
    let number = |value: &Value| value.as_u64().unwrap();
    assert_eq!((memory["programs"].as_u64(), memory["running"].as_u64()), (Some(1), Some(0)));
    assert!(number(&memory["bytes"]["sent"]) > 40 << 20 && number(&memory["bytes"]["received"]) > 40 << 20, "{memory}");
    assert!(number(&memory["most_away"]) > 30 << 20 && number(&memory["faults"]["fetched"]) > 0, "{memory}");
    assert!(number(&memory["ahead"]["used"]) > 0 && memory["fault_seconds"]["p50"].as_f64() > Some(0.0), "{memory}");
    assert_eq!(memory["away"][1]["server"], "far2");
}

#[test]
fn servers_of_a_job_end_with_it_whatever_is_killed() {
    if place().is_none() {
        return;
    }
    let flags = "-q --memory far:300M --local-mb 20";
    for who in [Role::FrontEnd, Role::Agent, Role::Keeper, Role::Rank] {
        let run = borrowing(exec(flags, ["triad", "250"]));
        for pid in role(&run.mark, who) {
            let _ = kill(pid, Signal::SIGKILL);
        }
        ended(run);
    }
    let run = borrowing(exec(flags, ["triad", "250"]));
    let killed = Instant::now();
    role(&run.mark, Role::Lender).iter().for_each(|pid| kill(*pid, Signal::SIGKILL).unwrap());
    let done = run.end().code(125);
    assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
    done.says("far").says("of the program's memory with it").says("signal: 9");
}

#[test]
fn what_cannot_be_lent_is_refused_where_it_is() {
    if place().is_none() {
        return;
    }
    let refused = |flags: &str, code| exec(flags, ["triad", "30"]).end().code(code);
    refused("-q --hosts a --memory b:900T --local-mb 20", 125).says("b: cannot").says("can be lent here");
    refused("-q --memory b:20X --local-mb 20", 2).says("neither a port nor a size");
    refused("-q --memory b:1G,b:2G --local-mb 20", 2).says("twice");
    let full = exec("-q --memory b:5M --local-mb 20", ["triad", "90"]).end().code(125);
    full.says("the memory server \"b\"").says("it is full");
}

#[test]
fn what_may_stay_here_follows_from_the_limits() {
    if place().is_none() {
        return;
    }
    let servers = Servers::start(everybody()[0], &[200]);
    let run = |mib| {
        let flags = format!("-q --memory {}", servers.list());
        exec(&flags, ["triad", "90"]).env("XDG_CONFIG_HOME", servers.config.path()).env("SLURM_MEM_PER_NODE", mib).end()
    };
    // Of what Slurm says three quarters.
    right(run("40"), 31);
    run("12").code(125).says("SLURM_MEM_PER_NODE is 12.00 MiB").says("--local-mb");
}

#[test]
fn status_tells_of_memory() {
    if place().is_none() {
        return;
    }
    let runtime = tempfile::tempdir().unwrap();
    let hpcrt = place().unwrap().join("hpcrt");
    let ask = |words: &[&str]| {
        let out =
            Command::new(&hpcrt).arg("status").args(words).env("XDG_RUNTIME_DIR", runtime.path()).output().unwrap();
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let run = exec("-q --memory far:300M --local-mb 20", ["triad", "250"]).env("XDG_RUNTIME_DIR", runtime.path());
    let run = borrowing(run);
    let all: Value = serde_json::from_str(&ask(&["--json"])).unwrap();
    let id = all[0]["id"].as_str().unwrap().to_owned();
    let one: Value = serde_json::from_str(&ask(&["--json", &id])).unwrap();
    let memory = &one["jobs"][0]["memory"];
    let away = memory["away"][0]["bytes"].as_u64().unwrap();
    let resident = memory["resident"].as_u64().unwrap();
    assert!(
        memory["away"][0]["server"] == "far" && away > 30 << 20 && resident > 5 << 20 && resident < 21 << 20,
        "{memory}"
    );
    let text = ask(&[&id]);
    assert!(text.contains("  memory    1 program borrow") && text.contains(" with far"), "{text}");
    run.signal(Signal::SIGTERM);
    ended(run);
    // A server of its own, and who uses it.
    let server = Servers::start_in(everybody()[0], &[300], "127.0.0.1", Some(runtime.path()));
    let run = server.run("triad", 250, 20).start();
    let text = until(|| {
        let all: Value = serde_json::from_str(&ask(&["--json"])).unwrap();
        let one = all.as_array()?.iter().find(|one| one["kind"] == "memserver")?;
        let text = ask(&[one["id"].as_str()?]);
        text.contains(" memory\n").then_some(text)
    });
    assert!(text.contains(&server.list()) && text.contains("of 286.10 MiB"), "{text}");
    assert!(ask(&[]).contains("MiB in use by 1 client"), "{}", ask(&[]));
    run.signal(Signal::SIGTERM);
    ended(run);
    drop(server);
    until(|| (ask(&["--json"]).trim() == "[]").then_some(()));
}
