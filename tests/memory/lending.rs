//! Memory servers that the job starts, what is told of borrowed memory, and servers that are lost.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use serde_json::Value;

use super::common::{Done, Role, Run, Running, marked, role, until};
use super::{Servers, Who, everybody, kept, place, right};

const LONG: Duration = Duration::from_secs(100);

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
    until(|| {
        role(&running.mark, Role::Lender)
            .iter()
            .any(|pid| kept(pid.as_raw().unsigned_abs()) > Some(40 << 10))
            .then_some(())
    });
    running
}

/// What `hpcrt status` tells as JSON.
fn status(runtime: &Path, words: &[&str]) -> Option<Value> {
    let mut command = Command::new(place()?.join("hpcrt"));
    let out = command.arg("status").args(words).env("XDG_RUNTIME_DIR", runtime).output().unwrap();
    serde_json::from_slice(&out.stdout).ok()
}

/// Waits for the end of a run, and of every process of it. (Its directory may be taken for another test's.)
fn ended(run: Running) {
    let mark = run.mark.clone();
    run.end();
    until(|| marked(&mark).is_empty().then_some(()));
}

/// The object of a job that was told to write it.
fn stats(done: &Done, file: &Path) -> Value {
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
    done.says("far").says("of the program's memory with it");
}

/// Programs that last about as long as each other, with the MB that they have.
const LOSERS: [[&str; 2]; 4] = [["triad", "300"], ["sort", "60"], ["heap", "60"], ["threads", "300"]];

/// A job with two servers of its own, which share files with the program or do not.
fn with_two(program: [&str; 2], mirror: bool, shared: bool) -> Run {
    let flags = format!("-q --memory far[1-2]:800M --local-mb 20{}", if mirror { " --mirror" } else { "" });
    exec(&flags, program).env("HPCRT_WITHOUT", if shared { "" } else { "shared" })
}

/// Kills one of two servers at a random moment of so long a run, with copies or without. Whether it was still needed.
fn lose_one(nth: usize, mirror: bool, lasts: Duration) -> bool {
    let (program, shared) = (LOSERS[nth % 4], (nth / 4).is_multiple_of(2));
    let run = with_two(program, mirror, shared).start();
    // Before the program is there they may still be starting, and are not anybody's.
    until(|| role(&run.mark, Role::Rank).first().copied());
    let lenders = until(|| Some(role(&run.mark, Role::Lender)).filter(|lenders| lenders.len() == 2));
    std::thread::sleep(lasts.mul_f64(fastrand::f64()));
    // It may have ended before.
    let killed = kill(lenders[fastrand::usize(..2)], Signal::SIGKILL).is_ok();
    let since = Instant::now();
    let done = run.end();
    let (took, err) = (since.elapsed(), done.err.trim_end().to_owned());
    println!("{nth}: {program:?}, shared: {shared}, killed: {killed}, copies: {mirror}, {:?}: {err}", done.took);
    if mirror || done.text().ends_with("right\n") {
        right(done, 20);
    } else {
        assert!(killed && took < Duration::from_secs(5), "{took:?}");
        // Before the program began to borrow nothing was there.
        let lost = done.code(125).says("far");
        assert!(["of the program's memory with it", "borrow memory from"].iter().any(|words| lost.err.contains(words)));
    }
    !err.is_empty()
}

/// In a hundred runs (or `EVENTS`), at moments of which most are while servers are needed.
fn lose_a_hundred(mirror: bool) {
    if place().is_none() {
        return;
    }
    let runs = std::env::var("EVENTS").ok().and_then(|number| number.parse().ok()).unwrap_or(100);
    let lasts: Vec<Duration> = LOSERS.iter().map(|program| with_two(*program, mirror, false).end().took).collect();
    let needed = (0..runs).filter(|nth| lose_one(*nth, mirror, lasts[nth % 4])).count();
    println!("{needed} of {runs} were needed");
    assert!(needed > runs / 3);
}

#[test]
fn with_copies_the_loss_of_a_server_is_survived() {
    if place().is_some() {
        for nth in [0, 3, 6] {
            lose_one(nth, true, Duration::from_secs(1));
        }
    }
}

#[test]
#[ignore = "five minutes"]
fn a_hundred_losses_with_copies() {
    lose_a_hundred(true);
}

#[test]
#[ignore = "five minutes"]
fn a_hundred_losses_without_copies() {
    lose_a_hundred(false);
}

/// Started with servers that run, and some of it is away; what its status says of memory.
fn watched(
    servers: &Servers,
    runtime: &Path,
    program: [&str; 2],
    local: u32,
) -> (Running, impl Fn() -> Option<Value> + use<>) {
    let run = exec(&format!("-q --memory {} --mirror --local-mb {local}", servers.list()), program).within(LONG);
    let run = run.env("XDG_CONFIG_HOME", servers.config.path()).env("XDG_RUNTIME_DIR", runtime).start();
    let runtime = runtime.to_owned();
    let id = until(|| {
        let all = status(&runtime, &["--json"])?;
        Some(all.as_array()?.iter().find(|one| one["kind"] == "job")?["id"].as_str()?.to_owned())
    });
    let memory = move || Some(status(&runtime, &["--json", &id])?["jobs"][0]["memory"].clone());
    until(|| memory()?["most_away"].as_u64().filter(|most| *most > 60 << 20));
    (run, memory)
}

/// It was right until it was ended, though so many servers were lost.
fn went_on(run: Running, lost: usize) {
    run.signal(Signal::SIGTERM);
    let done = run.end();
    assert!(!done.err.contains("wrong") && done.err.matches("goes on with the copy").count() == lost, "{}", done.err);
}

#[test]
fn a_server_that_returns_takes_copies_again() {
    if place().is_none() {
        return;
    }
    // With more of it here what they share is mapped.
    for (without, megabytes, local) in [("", "90", 20), ("shared", "90", 20), ("", "180", 80)] {
        let runtime = tempfile::tempdir().unwrap();
        let mut servers = Servers::start(Who { uid: None, without }, &[300, 300]);
        let (run, memory) = watched(&servers, runtime.path(), ["laps", megabytes], local);
        let bare = || memory()?["without_copy"].as_f64();
        // Each of the two, and the first once more: what was copied is what is used.
        for nth in [0, 1, 0] {
            servers.all[nth].0.kill().unwrap();
            until(|| bare().filter(|part| *part == 1.0));
            servers.restart(nth);
            until(|| bare().filter(|part| *part == 0.0));
            until(|| memory()?["away"][nth]["bytes"].as_u64().filter(|bytes| *bytes > 40 << 20));
        }
        went_on(run, 3);
    }
}

/// A copy that one server became full of is begun anew on another.
#[test]
fn a_copy_that_has_no_room_is_made_elsewhere() {
    if place().is_none() {
        return;
    }
    for without in ["", "shared"] {
        let runtime = tempfile::tempdir().unwrap();
        let mut servers = Servers::start(Who { uid: None, without }, &[300, 300, 60]);
        let (run, memory) = watched(&servers, runtime.path(), ["looks", "90"], 20);
        let bare = || memory()?["without_copy"].as_f64();
        servers.all[1].0.kill().unwrap();
        // The small one has taken what it can.
        until(|| bare().filter(|part| *part > 0.0));
        let rests = |part: &f64| {
            std::thread::sleep(Duration::from_secs(1));
            bare() == Some(*part)
        };
        until(|| bare().filter(rests));
        assert!(bare().is_some_and(|part| part > 0.0 && part < 1.0), "{:?}", bare());
        servers.restart(1);
        until(|| bare().filter(|part| *part == 0.0));
        servers.all[0].0.kill().unwrap();
        until(|| bare().filter(|part| *part > 0.0));
        std::thread::sleep(Duration::from_secs(2));
        went_on(run, 2);
    }
}

/// Two of one's names, which are not of one address.
#[test]
fn one_server_under_two_addresses_is_refused() {
    if place().is_none() {
        return;
    }
    let servers = Servers::start_at(Who { uid: None, without: "" }, &[100], "0.0.0.0");
    let port = servers.all[0].1.rsplit_once(':').unwrap().1.to_owned();
    let other = super::address();
    let flags = format!("-q --memory 127.0.0.1:{port},{other}:{port} --local-mb 20 --mirror");
    let done = exec(&flags, ["triad", "40"]).env("XDG_CONFIG_HOME", servers.config.path()).end();
    // This host may have no other address than that one.
    let code = if other == "127.0.0.1" { 2 } else { 125 };
    done.code(code).says("it is the same server as");
}

#[test]
fn with_copies_a_full_server_is_done_without() {
    if place().is_none() {
        return;
    }
    for without in ["", "shared"] {
        let who = Who { uid: None, without };
        let run = |megabytes: &[u32]| {
            let servers = Servers::start(who, megabytes);
            let flags = format!("-q --memory {} --mirror --local-mb 20", servers.list());
            let done = exec(&flags, ["triad", "150"]).env("XDG_CONFIG_HOME", servers.config.path()).end();
            (done, servers.all[1].1.clone())
        };
        let (done, small) = run(&[300, 80]);
        right(done.says(&small).says("it is full; the program goes on with the copy"), 20);
        // Both.
        run(&[100, 80]).0.code(125).says("it is full: ").says("name more servers");
    }
}

#[test]
fn a_lost_copy_is_made_anew_elsewhere() {
    if place().is_none() {
        return;
    }
    let runtime = tempfile::tempdir().unwrap();
    let run = exec("-q --memory far[1-3]:600M --mirror --local-mb 20", ["sort", "150"]).within(LONG);
    let run = borrowing(run.env("XDG_RUNTIME_DIR", runtime.path()));
    let id = until(|| Some(status(runtime.path(), &["--json"])?[0]["id"].as_str()?.to_owned()));
    let memory = || Some(status(runtime.path(), &["--json", &id])?["jobs"][0]["memory"].clone());
    let bare = || memory()?["without_copy"].as_f64();
    assert_eq!(bare(), Some(0.0));
    let lenders = role(&run.mark, Role::Lender);
    kill(lenders[0], Signal::SIGKILL).unwrap();
    until(|| memory()?["away"].as_array()?.iter().any(|server| server["bytes"] == 0).then_some(()));
    until(|| bare().filter(|part| *part == 0.0));
    kill(lenders[1], Signal::SIGKILL).unwrap();
    right(run.end().says("goes on with the copy"), 20);
}

#[test]
fn a_silent_server_is_given_up() {
    if place().is_none() {
        return;
    }
    let run = borrowing(exec("-q --memory far[1-2]:300M --mirror --local-mb 20", ["triad", "90"]));
    let lenders = role(&run.mark, Role::Lender);
    kill(lenders[0], Signal::SIGSTOP).unwrap();
    right(run.end().says("does not answer; the program goes on"), 20);
    let run = borrowing(exec("-q --memory far[1-2]:300M --local-mb 20", ["triad", "90"]));
    role(&run.mark, Role::Lender).iter().for_each(|pid| kill(*pid, Signal::SIGSTOP).unwrap());
    run.end().code(125).says("does not answer, and has");
    let bare = exec("-q --memory far:300M --mirror --local-mb 20", ["triad", "30"]);
    bare.end().code(2).says("copies take two memory servers");
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
fn the_sample_of_the_papers_runs() {
    let Some(directory) = place() else { return };
    let sdk = tempfile::tempdir().unwrap();
    let run = |command: &mut Command| assert!(command.current_dir(sdk.path()).status().unwrap().success());
    run(Command::new(directory.join("hpcrt")).args(["sdk", "."]));
    run(Command::new("gcc").args(["-O2", "-Wall", "-Werror", "-o", "matvec", "matvec.c"]));
    let n = 2500f64;
    let program = sdk.path().join("matvec");
    let mut command = Command::new(directory.join("hpcrt"));
    command.args("exec -q --agent local --memory far[1-2]:60M --local-mb 16".split_whitespace());
    let done = Run::new(command).program(&[program.as_os_str(), "2500".as_ref()]).end().code(0);
    let sum = n * (n - 1.0) / 2.0;
    assert_eq!(done.text().trim().parse::<f64>().unwrap(), sum * sum);
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
fn programs_keep_less_when_the_limit_shrinks() {
    if place().is_none() {
        return;
    }
    let group = Path::new("/sys/fs/cgroup/memory").join(format!("hpcrt-test-{}", std::process::id()));
    if std::fs::create_dir(&group).is_err() || !group.join("memory.limit_in_bytes").exists() {
        let _ = std::fs::remove_dir(&group);
        return eprintln!("SKIPPED: no memory cgroup of version 1 can be made here");
    }
    let runtime = tempfile::tempdir().unwrap();
    let servers = Servers::start(everybody()[0], &[400]);
    let flags = format!("-q --memory {} --local-mb 200", servers.list());
    let directory = place().unwrap();
    let mut command = Command::new("sh");
    command.arg("-c").arg("echo $$ > \"$0/cgroup.procs\"; exec \"$@\"").arg(&group).arg(directory.join("hpcrt"));
    command.args(["exec", "--agent", "local"]).args(flags.split_whitespace());
    command.env("XDG_CONFIG_HOME", servers.config.path()).env("XDG_RUNTIME_DIR", runtime.path());
    let program = directory.join("memory");
    let run = Run::new(command).program(&[program.as_os_str(), "laps".as_ref(), "300".as_ref()]).start();
    let memory = || {
        Some(status(runtime.path(), &["--json"])?[0]["id"].as_str()?.to_owned())
            .and_then(|id| Some(status(runtime.path(), &["--json", &id])?["jobs"][0]["memory"].clone()))
    };
    until(|| memory()?["resident"].as_u64().filter(|resident| *resident > 150_000_000));
    // Not faster than the program can make room.
    for limit in [265_000_000u64, 250_000_000, 240_000_000] {
        std::fs::write(group.join("memory.limit_in_bytes"), limit.to_string()).unwrap();
        let kept = until(|| {
            let memory = memory()?;
            let (budget, resident) = (memory["budget"].as_u64()?, memory["resident"].as_u64()?);
            (budget <= limit / 4 * 3 && resident <= budget).then_some((budget, resident))
        });
        println!("{limit}: {kept:?}");
    }
    run.signal(Signal::SIGTERM);
    ended(run);
    until(|| std::fs::remove_dir(&group).ok());
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
    let run = exec("-q --memory far:300M --local-mb 20", ["laps", "250"]).env("XDG_RUNTIME_DIR", runtime.path());
    let run = borrowing(run);
    let all: Value = serde_json::from_str(&ask(&["--json"])).unwrap();
    let id = all[0]["id"].as_str().unwrap().to_owned();
    // The server may have room in huge pages before there are pages in it.
    let memory = until(|| {
        let memory = status(runtime.path(), &["--json", &id])?["jobs"][0]["memory"].clone();
        memory["away"][0]["bytes"].as_u64().filter(|away| *away > 30 << 20).map(|_| memory)
    });
    let resident = memory["resident"].as_u64().unwrap();
    assert!(memory["away"][0]["server"] == "far" && resident > 5 << 20 && resident < 21 << 20, "{memory}");
    let text = ask(&[&id]);
    assert!(text.contains("  memory    1 program borrow") && text.contains(" with far"), "{text}");
    run.signal(Signal::SIGTERM);
    ended(run);
    // A server of its own, and who uses it.
    let server = Servers::start_in(everybody()[0], &[300], "127.0.0.1", Some(runtime.path()));
    let run = server.run("laps", 250, 20).start();
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
