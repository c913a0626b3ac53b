//! Files of a job that workers on other hosts write: they are what they are without, whoever is killed, and nobody else writes. Needs root; says so and
//! passes otherwise.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;
#[path = "common/nodes.rs"]
mod hosts;
#[path = "common/site.rs"]
mod site;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Run, Running, until};
use hosts::{Nodes, PORT, Place, TWO, USERS};
use nix::sys::signal::{Signal, kill};

const ONE_HOST: &str = "--async-io --io-forward hpc3";
const TWO_HOSTS: &str = "--async-io --io-forward hpc[3-4]";

/// Requests to write that the file server got from each host.
fn writes(nodes: &Nodes) -> Vec<u64> {
    nodes.cluster.host_ops().unwrap().iter().map(|host| host.ops.write).collect()
}

/// The test program of one process, from where no operation is counted.
fn files(nodes: &Nodes) -> String {
    let program = nodes.cluster.state().file("files");
    if !program.exists() {
        let mut gcc = Command::new("gcc");
        gcc.args(["-O2", "-pthread", "-o"]).arg(&program).arg(site::source("files.c"));
        assert!(gcc.status().unwrap().success());
    }
    program.to_str().unwrap().to_owned()
}

/// Runs any program on the first host.
fn one(nodes: &Nodes, at: &Place, flags: &str, words: &str) -> Run {
    let agent = nodes.cluster.agent_command();
    let mut line = vec![nodes.hpcrt.to_str().unwrap(), "exec", "-q", "--agent", &agent];
    line.extend(flags.split_whitespace());
    let words = words.replace("{}", &at.there);
    line.push("--");
    line.extend(words.split(' '));
    Run::new(nodes.cluster.command("hpc1", at.uid, &line))
}

#[test]
fn only_io_hosts_write() {
    let Some(nodes) = Nodes::up("forward") else { return };
    for (uid, flags) in [(USERS[0], ONE_HOST), (USERS[1], TWO_HOSTS), (USERS[1], ONE_HOST)] {
        let at = nodes.place(uid, if flags == ONE_HOST { "one" } else { "two" });
        let words = |name: &str| format!("all {{}}/{name} 320 {PORT} {}", TWO.1);
        let plain = nodes.right(&at, TWO.0, "", &words("plain"));
        nodes.cluster.reset_ops().unwrap();
        let ours = nodes.right(&at, TWO.0, flags, &words("kept"));
        let writes = writes(&nodes);
        println!("{flags} as {uid}: plain {plain:.2?}, ours {ours:.2?}, requests to write {writes:?}");
        assert_eq!(writes[..2], [0, 0]);
        assert!(writes[2] + writes[3] > 0 && (flags == TWO_HOSTS || writes[3] == 0));
        for file in [".interleaved", ".solver", ".tcp"] {
            let [plain, ours] = ["plain", "kept"].map(|name| fs::read(at.here.join(format!("{name}{file}"))).unwrap());
            assert!(plain == ours && !plain.is_empty(), "{file}");
        }
        fs::remove_dir_all(&at.here).unwrap();
    }
}

/// Which host writes a file is its number's chance: of forty files either host gets some, but for once in 2^39 times.
#[test]
fn io_hosts_share_the_files() {
    let Some(nodes) = Nodes::up("forwardshare") else { return };
    let at = nodes.place(USERS[1], "s");
    nodes.cluster.reset_ops().unwrap();
    let flags = format!("--hosts hpc1 {TWO_HOSTS}");
    one(&nodes, &at, &flags, "sh -c").arg("for n in $(seq 40); do echo $n > $0/$n; done").arg(&at.there).end().code(0);
    let writes = writes(&nodes);
    assert_eq!((&writes[..2], writes[2] + writes[3]), (&[0, 0][..], 40), "{writes:?}");
    assert!(writes[2] > 0 && writes[3] > 0, "{writes:?}");
    for number in 1..=40 {
        assert_eq!(fs::read_to_string(at.here.join(number.to_string())).unwrap(), format!("{number}\n"));
    }
}

#[test]
fn programs_are_right() {
    let Some(nodes) = Nodes::up("forwardone") else { return };
    let program = files(&nodes);
    for uid in USERS {
        let at = nodes.place(uid, "p");
        // The I/O host runs ranks, or not.
        for flags in
            ["--hosts hpc1 --async-io --io-forward hpc2", "--hosts hpc1,hpc2 -n 1 --async-io --io-forward hpc[1-2]"]
        {
            for words in [
                "pieces {}/p 100000 64",
                "two {}/2",
                "special {}/x",
                "random {}/r 1 300",
                "bulk {}/b 1 12",
                "records {}/a 2 3",
            ] {
                let done = one(&nodes, &at, flags, &format!("{program} {words}")).end().code(0);
                println!("{flags} {words} as {uid}: {:.2?}", done.took);
                assert!(done.text().ends_with("right\n"), "{flags} {words}: {}{}", done.text(), done.err);
            }
            let done = one(&nodes, &at, flags, &format!("{program} many {{}}/m 1 1000 3 2")).end().code(0);
            assert!(done.text().ends_with("right\n"), "{flags} {}{}", done.text(), done.err);
        }
        let flags = "--hosts hpc1 --async-io --io-forward hpc2";
        // What is to survive is synced by whoever has written it.
        nodes.cluster.reset_ops().unwrap();
        one(&nodes, &at, flags, "dd if=/dev/zero of={}/d bs=64 count=2000 conv=fsync status=none").end().code(0);
        let [here, there] = [0, 1].map(|host| nodes.cluster.host_ops().unwrap()[host].ops);
        assert_eq!((here.write, there.other), (0, 1), "{here:?} {there:?}");
        assert_eq!(fs::metadata(at.here.join("d")).unwrap().len(), 128_000);
        // What another host may not open its own one writes.
        let script = "umask 333; cd $0; for n in 1 2; do for k in $(seq 300); do echo $n $k; done > f$n; done; cat f1 f2 | md5sum; for n in 1 2; do for k in $(seq 300); do echo $n $k; done; done | md5sum";
        let mut done = one(&nodes, &at, flags, "sh -c").arg(script).arg(&at.there).end().code(0);
        let sums = done.lines();
        assert!(sums.len() == 2 && sums[0] == sums[1], "{sums:?}");
        if uid != 0 {
            done = done.says("written by this host itself").says("Permission denied");
            assert_eq!(done.err.matches("itself").count(), 1, "{}", done.err);
        }
        // Beside the program, in the directories that hpcrt shows.
        fs::copy(&program, at.here.join("files")).unwrap();
        nodes.cluster.reset_ops().unwrap();
        let done = one(&nodes, &at, flags, "{}/files pieces {}/v 20000 64").end().code(0);
        // Of those directories the kernel tells an ordinary user's worker nothing.
        println!("beside the program as {uid}: requests to write {:?}, {}", writes(&nodes), done.err);

        assert_eq!(fs::metadata(at.here.join("v")).unwrap().len(), 20_000 * 64);
        for flags in ["--hosts hpc1 --async-io", flags] {
            let done = one(&nodes, &at, flags, "{}/files special {}/x2").end().code(0);
            assert!(done.text().ends_with("right\n"), "{flags} {}{}", done.text(), done.err);
        }
        // What fails is told once.
        for (name, errno, said) in [("f.eio", "5", "Input/output error"), ("f.edquot", "122", "quota exceeded")] {
            let done = one(&nodes, &at, flags, &format!("{program} full {{}}/{name} {errno}")).end().code(0);
            assert_eq!(done.says(name).says(said).text(), "told once\nright\n");
            assert_eq!(fs::metadata(at.here.join(name)).unwrap().len(), 100);
        }
    }
}

/// Kills what runs the I/O worker on a host: that, or its agent. The job may have ended.
fn kill_io_host(nodes: &Nodes, run: &Running, host: usize, word: &str) {
    for pid in nodes.named(run, word, Some(host)) {
        let _ = kill(pid, Signal::SIGKILL);
    }
}

#[test]
fn who_is_killed_loses_nothing() {
    let Some(nodes) = Nodes::up("forwardkill") else { return };
    for uid in USERS {
        let at = nodes.place(uid, "k");
        for (mode, count) in [("appending", 4000), ("interleaved", 40000), ("solver", 1000)] {
            // Of the two hosts one, then the other.
            let run = nodes.start(&at, TWO.0, TWO_HOSTS, &format!("{mode} {{}}/{mode} {count}"));
            until(|| at.here.join(mode).metadata().ok().filter(|file| file.len() > 0));
            kill_io_host(&nodes, &run, 2, "ioworker");
            std::thread::sleep(Duration::from_millis(fastrand::u64(0..300)));
            // An agent's end ends its worker.
            kill_io_host(&nodes, &run, 3, if mode == "solver" { "" } else { "ioworker" });
            let done = run.end();
            println!("{mode} as {uid}: {:.2?} {}", done.took, done.err);
            let done = done.code(0).says("hpc3");
            assert_eq!(done.text(), "right\n", "{mode}: {}", done.err);
        }
        // Workers of the compute hosts.
        let mut run = nodes.start(&at, TWO.0, TWO_HOSTS, "appending {}/a 8000");
        let mut kills = 0;
        while run.child.try_wait().unwrap().is_none() {
            let workers: Vec<_> =
                [0, 1].into_iter().flat_map(|host| nodes.named(&run, "ioworker", Some(host))).collect();
            if !workers.is_empty() {
                kills += u32::from(kill(workers[fastrand::usize(0..workers.len())], Signal::SIGKILL).is_ok());
            }
            std::thread::sleep(Duration::from_millis(100 + fastrand::u64(0..50)));
        }
        let done = run.end().code(0);
        println!("{kills} workers were killed");
        assert_eq!(done.text(), "right\n", "{}", done.err);
    }
}

/// All of a program, or of a compute host, is killed.
#[test]
fn what_was_told_is_there() {
    let Some(nodes) = Nodes::up("forwardtold") else { return };
    for (uid, host) in USERS.into_iter().zip([1, 0]) {
        let at = nodes.place(uid, "h");
        let run = nodes.start(&at, TWO.0, TWO_HOSTS, "forever {}/f {}/told");
        until(|| at.told().filter(|number| *number >= 2000));
        let victims = nodes.named(&run, if host == 1 { "" } else { "forever" }, Some(host));
        let begun = Instant::now();
        victims.into_iter().for_each(|pid| _ = kill(pid, Signal::SIGKILL));
        run.end().gone();
        assert!(begun.elapsed() < Duration::from_secs(20));
        at.holds_what_was_told();
    }
}

/// Whether it still writes nobody knows.
#[test]
fn a_silent_io_host_ends_the_job() {
    let Some(nodes) = Nodes::up("forwardcut") else { return };
    let at = nodes.place(USERS[1], "c");
    let run = nodes.start(&at, TWO.0, ONE_HOST, "forever {}/f {}/told");
    until(|| at.told().filter(|number| *number >= 2000));
    let names = ["sh", "-c", "ip -o link | grep -v ' lo:' | cut -d: -f2 | cut -d@ -f1"];
    let found = nodes.cluster.exec("hpc3", 0, &names).unwrap();
    let device = String::from_utf8_lossy(&found.stdout).trim().to_owned();
    let begun = Instant::now();
    assert!(nodes.cluster.exec("hpc3", 0, &["ip", "link", "set", &device, "down"]).unwrap().status.success());
    let done = run.end();
    println!("{:.1?} after it fell silent: {}", begun.elapsed(), done.err);
    done.code(125).says("have hpc3 write files");
    at.holds_what_was_told();
}

#[test]
fn what_cannot_be_is_refused() {
    common::exec("--io-forward node1").program(&["true"]).end().code(2).says("only with --async-io");
    let Some(nodes) = Nodes::up("forwardno") else { return };
    let at = nodes.place(USERS[1], "n");
    one(&nodes, &at, "--hosts hpc1 --async-io --io-forward hpc9", "true").end().code(125).says("hpc9");
}

/// Jobs of a session have hosts of the session write.
#[test]
fn sessions_forward() {
    let Some(nodes) = Nodes::up("forwardsession") else { return };
    let program = files(&nodes);
    let at = nodes.place(USERS[1], "s");
    // What a session leaves running is not for `Run` to judge.
    let session = |words: &[&str]| {
        let line = [&[nodes.hpcrt.to_str().unwrap(), "session"], words].concat();
        let done = nodes.cluster.exec("hpc1", at.uid, &line).unwrap();
        let [out, err] = [done.stdout, done.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (done.status.code().unwrap(), out, err)
    };
    let agent = nodes.cluster.agent_command();
    let (code, id, err) = session(&["start", "--hosts", "hpc[1-3]", "--agent", &agent]);
    assert_eq!(code, 0, "{err}");
    let run = |list: &str, words: &[&str]| {
        session(&[&["run", "-q", id.trim(), "-n", "1", "--async-io", "--io-forward", list, "--"], words].concat())
    };
    nodes.cluster.reset_ops().unwrap();
    let place = format!("{}/p", at.there);
    for host in ["hpc2", "hpc3"] {
        let (code, out, err) = run(host, &[&program, "pieces", &place, "100000", "64"]);
        assert!(code == 0 && out.ends_with("right\n"), "{host}: {out}{err}");
    }
    let writes = writes(&nodes);
    let (code, _, err) = run("hpc4", &["true"]);
    assert_eq!(session(&["stop", id.trim()]).0, 0);
    assert!(writes[0] == 0 && writes[1] > 0 && writes[2] > 0, "{writes:?}");
    assert!(code == 2 && err.contains("hpc4") && err.contains("name hosts of the session"), "{code} {err}");
}

/// The rate of small writes with forwarding beside without, and plainly.
#[test]
#[ignore = "a measurement"]
fn rate_of_small_writes() {
    let Some(nodes) = Nodes::up("forwardrate") else { return };
    let (program, at) = (files(&nodes), nodes.place(USERS[1], "r"));
    const COUNT: u64 = 2_000_000;
    for flags in ["", "--async-io", "--async-io --io-forward hpc2", "--async-io --io-forward hpc[2-3]"] {
        let count = if flags.is_empty() { COUNT / 200 } else { COUNT };
        let took: Vec<f64> = (0..3)
            .map(|nth| {
                let words = format!("{program} pieces {{}}/f{nth} {count} 64");
                let none = one(&nodes, &at, &format!("--hosts hpc1 {flags}"), "true").end().code(0).took;
                let done = one(&nodes, &at, &format!("--hosts hpc1 {flags}"), &words).end().code(0);
                (count * 64) as f64 / 1e6 / done.took.saturating_sub(none).as_secs_f64()
            })
            .collect();
        println!("{flags:?}: {took:.1?} MB/s");
    }
}
