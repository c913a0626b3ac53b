//! What ranks do together through their agents: the text protocol, programs beside each other, failures.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;
#[path = "common/site.rs"]
mod site;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cluster::Cluster;
use common::{exec, sh};
use site::Site;

/// An ordinary user of the hosts.
const USER: u32 = 20001;

const ABC: &str = "--hosts a,b,c --agent local --fan-out 2 -q";

fn example(name: &str) -> String {
    format!("{}/examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Lines for a shell that has the example's `call`.
fn script(lines: &str) -> String {
    format!(". <(sed -n '/^call()/,/^}}/p' {})\nLC_ALL=C\n{lines}", example("collectives.sh"))
}

fn bash(flags: &str, lines: &str) -> common::Run {
    exec(&format!("{ABC} {flags}")).program(&["bash", "-c", &script(lines)])
}

#[test]
fn examples_run() {
    let done = exec(&format!("{ABC} -n 5")).program(&["bash", &example("collectives.sh")]).end().code(0);
    for rank in 0..5 {
        let line = format!("{rank}: a word from rank 0, value of {}", (rank + 1) % 5);
        assert!(done.lines().contains(&line), "{line}: {}", done.text());
    }
    assert!(
        done.text().contains("rank 0 on a\nrank 1 on a\nrank 2 on b\nrank 3 on b\nrank 4 on c\n"),
        "{}",
        done.text()
    );
    let done = exec(&format!("{ABC} -n 5")).program(&["python3", &example("collectives.py")]).end().code(0);
    for rank in 0..5 {
        let line = format!("{rank}: a word from rank 0, part {rank}, [0, 1, 2, 3, 4], value of {}", (rank + 1) % 5);
        assert!(done.lines().contains(&line), "{line}: {}", done.text());
    }
}

#[test]
fn large_items_and_many_rounds() {
    let program = "
import sys; sys.argv = ['x']; exec(open('EXAMPLE').read().split('(word,)')[0])
big = bytes(range(256)) * 12288
assert call('broadcast', *([big] if rank == 0 else [])) == [big]
all = call('gather', big[: len(big) - rank])
assert [len(one) for one in all] == ([len(big) - other for other in range(size)] if rank == 0 else [])
assert call('scatter', *([big[to:] for to in range(size)] if rank == 0 else [])) == [big[rank:]]
assert call('allgather', big[rank:]) == [big[other:] for other in range(size)]
for round in range(200):
    assert call('allgather', b'%d-%d' % (round, rank)) == [b'%d-%d' % (round, other) for other in range(size)]
    assert call('gather', b'%d' % round) == ([b'%d' % round] * size if rank == 0 else [])
    assert call('scatter', *([b'%d' % (to + round) for to in range(size)] if rank == 0 else [])) == [b'%d' % (rank + round)]
";
    let program = program.replace("EXAMPLE", &example("collectives.py"));
    exec(&format!("{ABC} -n 7")).program(&["python3", "-c", &program]).end().code(0);
}

/// Whether rank 4 is among these, as `0,3-5`.
fn names_four(ranks: &str) -> bool {
    ranks.split(',').any(|run| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        (first.parse().unwrap_or(9)..=last.parse().unwrap_or(0)).contains(&4)
    })
}

/// Survivors are told who is missing, whether a rank left, was killed, or does not come.
#[test]
fn who_is_missing_is_named() {
    let lost = |end: &str| {
        let lines = format!(
            "call barrier; [ $HPCRT_RANK = 4 ] && {end}; call barrier; echo $HPCRT_RANK $?; call gather x; exit $?"
        );
        let done = bash("-n 6 --keep-going", &lines).end();
        assert_eq!(done.lines(), [0, 1, 2, 3, 5].map(|rank| format!("{rank} 1")), "{}", done.err);
        // Who is first may have ended, too, before the last one asks.
        for call in ["barrier: lost ", "gather: lost "] {
            let told = |line: &&str| {
                line.strip_prefix(call)
                    .and_then(|rest| rest.strip_suffix(" they ended, or their hosts were lost"))
                    .is_some_and(names_four)
            };
            assert_eq!(done.err.lines().filter(told).count(), 5, "{}", done.err);
        }
    };
    lost("exit 0");
    lost("kill -9 $$");
    // Who calls first sets the time, in which the others have to: all begin together.
    let lines = "call barrier; call() { printf '%s 0 1\\n' $1 >&8; read -r line <&8; echo \"$line\"; }
        case $HPCRT_RANK in 1|4) sleep 4;; *) call barrier;; esac";
    let done = bash("-n 6", lines).end().code(0);
    assert_eq!(done.lines(), vec!["late 1,4 they did not call it in time"; 4]);
}

#[test]
fn who_contradicts_the_others_is_told() {
    let done = bash("-n 4", "if ((HPCRT_RANK == 3)); then call gather x; else call barrier; fi; :").end().code(0);
    assert!(done.err.contains("some members called"), "{}", done.err);
    bash("-n 2", "call gather").end().says("calls gather with 0 items; 1 are wanted");
    bash("-n 2", "call dance 1; call put key; call send x; :")
        .end()
        .says("dance with 1 items is no request")
        .says("--front");
    let done = bash("-n 2", "((HPCRT_RANK)) && printf 'gather 1\\n-1\\n' >&8 && cat <&8; :").end().code(0);
    assert_eq!(done.text(), "error the length of an item is none\n");
}

/// PMI-1 as a client that knows only that sees it.
#[test]
fn pmi_without_a_library() {
    let lines = r#"ask() { echo "$1" >&$PMI_FD; read -r reply <&$PMI_FD; }
        ask 'cmd=init pmi_version=1 pmi_subversion=1'; echo "$reply"
        ask 'cmd=get_my_kvsname'; space=${reply#*kvsname=}; space=${space% rc=0}
        ask "cmd=put kvsname=$space key=k$PMI_RANK value=of $PMI_RANK -"
        ask 'cmd=barrier_in'; echo "$reply"
        ask "cmd=get kvsname=$space key=k$(((PMI_RANK + 1) % PMI_SIZE))"; echo "$PMI_RANK $reply."
        ask "cmd=get kvsname=$space key=none"; echo "$reply"
        ((PMI_RANK)) || { ask 'cmd=publish_name service=s port=a port'; }
        ask 'cmd=barrier_in'; ask 'cmd=lookup_name service=s'; echo "$reply"
        printf 'mcmd=spawn\nnprocs=1\nexecname=x\ntotspawns=1\nspawnssofar=1\nendcmd\n' >&$PMI_FD; read -r reply <&$PMI_FD; echo "$reply"
        ask 'cmd=finalize'; echo "$reply""#;
    let done = bash("-n 3", lines).end().code(0);
    for rank in 0..3 {
        let line = format!("{rank} cmd=get_result rc=0 msg=success value=of {} -.", (rank + 1) % 3);
        assert!(done.lines().contains(&line), "{line}: {}", done.text());
    }
    for line in [
        "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
        "cmd=barrier_out rc=0",
        "cmd=get_result rc=-1 msg=key_none_not_found value=unknown",
        "cmd=lookup_result rc=0 msg=success port=a port",
        "cmd=spawn_result rc=-1 msg=hpcrt_starts_no_processes_later",
        "cmd=finalize_ack rc=0",
    ] {
        assert_eq!(done.lines().iter().filter(|l| *l == line).count(), 3, "{line}: {}", done.text());
    }
    let other = "ask() { echo \"$1\" >&$PMI_FD; read -r reply <&$PMI_FD; }; ask 'cmd=init pmi_version=2 pmi_subversion=0'; sleep 100";
    let done = bash("-n 3", other).within(Duration::from_secs(10)).end().code(125);
    done.says("its library speaks version 2 of PMI").says("srun --mpi=pmi2");
    let abort = "((HPCRT_RANK == 1)) && echo 'cmd=abort exitcode=9 message=it is over' >&$PMI_FD; exec sleep 100";
    let done = bash("-n 3", abort).within(Duration::from_secs(10)).end().code(9);
    done.says("rank 1 on b aborted the job with code 9: it is over");
}

#[test]
fn jobs_that_do_nothing_together_end_as_they_did() {
    sh(&format!("{ABC} -n 6"), "exit 0").end().code(0);
    bash("-n 6", "call barrier; exit $((HPCRT_RANK == 5 ? 3 : 0))").end().code(3);
}

/// What the binary brings along for C, built: a front end and two programs of members.
fn sdk(place: &Path) {
    let run = |command: &mut Command| {
        let output = command.current_dir(place).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    run(Command::new(env!("CARGO_BIN_EXE_hpcrt")).args(["sdk", "."]));
    let kinds = [("frontend", "frontend.c", ""), ("middle", "member.c", "'m'"), ("back", "member.c", "'b'")];
    for (program, source, kind) in kinds {
        let kind = format!("-DKIND={kind}");
        run(Command::new("gcc").args(["-Wall", "-Wextra", "-Werror", &kind, "-o", program, "libi.c", source]));
    }
}

/// What the front end prints when all is well.
fn libi_says([a, b, c, d]: [&str; 4]) -> String {
    format!(
        "6 members (mmbbbb), sum 65, it's, -\n{a} {b} {a} {a} {b} {b}\n\
         4 members (bbbb), sum 22, back end, of a session\n{c} {c} {d} {d}\n"
    )
}

/// LIBI, bash and Python on four hosts, as an ordinary user.
#[test]
fn four_hosts() {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return;
    }
    let site = Site::up("collectives");
    let place = site.place(USER, "job", &[]);
    sdk(&place);
    let exec = format!("{} exec --timeout 60 --agent '{}'", site.hpcrt.display(), site.cluster.agent_command());
    let variable = format!("HPCRT_EXEC={exec}");
    let hosts = ["hpc1", "hpc2", "hpc3", "hpc4"];
    let words =
        [&["env", &variable, "/shared/job/frontend", "/shared/job/middle", "/shared/job/back"], &hosts[..]].concat();
    let done = site.cluster.exec("hpc1", USER, &words).unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), libi_says(hosts), "{}", String::from_utf8_lossy(&done.stderr));
    for (interpreter, script, says) in [
        ("bash", "/shared/job/collectives.sh", "5: a word from rank 0, value of 6"),
        (
            "python3",
            "/shared/job/collectives.py",
            "5: a word from rank 0, part 5, [0, 1, 2, 3, 4, 5, 6, 7], value of 6",
        ),
    ] {
        let run = site.run(USER, "hpc[1-4]", &["-q", "--ppn", "2"], &[interpreter, script]).code(0);
        assert!(run.out().contains("rank 6 on hpc4\nrank 7 on hpc4\n") && run.out().contains(says), "{}", run.out());
    }
}

/// A program written against LIBI's C interface, built with what the binary brings along.
#[test]
fn a_program_for_libi() {
    let place = tempfile::tempdir().unwrap();
    let run = |command: &mut Command| {
        let output = command.current_dir(place.path()).output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    sdk(place.path());
    let hpcrt = env!("CARGO_BIN_EXE_hpcrt");
    let exec = format!("{hpcrt} exec --agent local --timeout 30");
    let words = ["./middle", "./back", "a", "b", "c", "d"];
    let expected = libi_says(["a", "b", "c", "d"]);
    assert_eq!(run(Command::new("./frontend").args(words).env("HPCRT_EXEC", exec)), expected);
    // The same on hosts that are up already.
    let start = run(Command::new(hpcrt).args(["session", "start", "--agent", "local", "--hosts", "a,b,c,d"]));
    let session = format!("{hpcrt} session run {} --timeout 30", start.trim());
    assert_eq!(run(Command::new("./frontend").args(words).env("HPCRT_EXEC", session)), expected);
    run(Command::new(hpcrt).args(["session", "stop", start.trim()]));
    let mut command = Command::new("./frontend");
    command.args(words).current_dir(place.path()).env("HPCRT_EXEC", "false");
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr)), (Some(1), "launch: 5\n".into()));
}

/// Who listens at the front end gets what the master sent, also when the job has ended meanwhile.
#[test]
fn last_words() {
    let front = "
import os, socket, subprocess, sys, time
ours, theirs = socket.socketpair()
command = [sys.argv[1], 'exec', '-q', '-n', '2', '--agent', 'local', '--front', str(theirs.fileno()), '--', 'bash', '-c', sys.argv[2]]
job = subprocess.Popen(command, pass_fds=[theirs.fileno()])
theirs.close()
time.sleep(2)
ours.sendall(b'receive 0\\n')
print(ours.makefile().readline(), job.wait(20))";
    let member = script("((HPCRT_RANK)) || call send 'last words'");
    let mut python = Command::new("python3");
    let done = python.args(["-c", front, env!("CARGO_BIN_EXE_hpcrt"), &member]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout), "ok 1\n 0\n", "{}", String::from_utf8_lossy(&done.stderr));
}

/// Members that share memory with their agents: operations of all sizes, beside scripts, and when some are lost.
#[test]
fn members_of_libi() {
    let place = tempfile::tempdir().unwrap();
    let (program, sdk) = (place.path().join("libi"), format!("{}/sdk", env!("CARGO_MANIFEST_DIR")));
    let mut gcc = Command::new("gcc");
    gcc.args(["-Wall", "-Wextra", "-Werror", "-O2", "-I", &sdk, "-o"]).arg(&program);
    assert!(gcc.arg(site::source("libi.c")).arg(format!("{sdk}/libi.c")).status().unwrap().success());
    let program = program.to_str().unwrap();
    for flags in ["--hosts a --agent local -q -n 9", "--hosts a,b,c --agent local --fan-out 1 -q -n 7"] {
        exec(flags).program(&[program, "rounds", "300"]).end().code(0);
        exec(flags).program(&[program, "leave"]).within(Duration::from_secs(10)).end().code(0);
    }
    for how in ["exit", "kill"] {
        let done =
            exec(&format!("{ABC} -n 6 --keep-going")).program(&[program, how]).within(Duration::from_secs(10)).end();
        let told = done.lines().into_iter().filter(|line| {
            // Who is first may have ended, too, before the last one asks.
            let mut words = line.split(' ').skip(1);
            words.next() == Some("10") && words.next().is_some_and(names_four)
        });
        assert_eq!(told.count(), 10, "{how}: {}{}", done.text(), done.err);
    }
    let lines = script("call barrier; call broadcast; echo $HPCRT_RANK ${reply[0]}");
    let words = ["-n", "3", program, "mixed", ":", "-n", "3", "bash", "-c", &lines];
    let done = exec("--hosts a,b --agent local -q").program(&words).within(Duration::from_secs(10)).end().code(0);
    let mut said = done.lines();
    said.sort();
    assert_eq!(said, (0..6).map(|rank| format!("{rank} a word")).collect::<Vec<_>>());
}

#[test]
fn several_programs_in_one_job() {
    let say = "echo $HPCRT_RANK/$HPCRT_SIZE $HPCRT_PART $HPCRT_LOCAL_RANK/$HPCRT_LOCAL_SIZE $HPCRT_HOST $X";
    let done = exec("--hosts a:2,b:2 --agent local -q -x X=0")
        .program(&["-n", "3", "sh", "-c", say, ":", "-n", "1", "-x", "X=1", "sh", "-c", say]);
    assert_eq!(done.end().code(0).lines(), ["0/4 0 0/2 a 0", "1/4 0 1/2 a 0", "2/4 0 0/2 b 0", "3/4 1 1/2 b 1"]);
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("programs");
    std::fs::write(&file, format!("# two\n--hosts a,b sh -c '{say}' :\n\n--hosts b:2,c sh -c '{say}'\n")).unwrap();
    let done = exec("--agent local -q --configfile").arg(&file).end().code(0);
    assert_eq!(done.lines(), ["0/5 0 0/1 a", "1/5 0 0/3 b", "2/5 1 1/3 b", "3/5 1 2/3 b", "4/5 1 0/1 c"]);
    std::fs::write(&file, "-n 1 echo a host: \n-n 1 echo :: :\n").unwrap();
    let done = exec("--hosts a:2 --agent local -q --configfile").arg(&file).end().code(0);
    assert_eq!(done.lines(), ["::", "a host:"]);
    // Each ends with its own code, and they talk to each other.
    let both = |code: u32| {
        format!("{}; exit $((HPCRT_PART * {code}))", script("call allgather $HPCRT_PART; echo ${reply[*]}"))
    };
    let words = ["-n", "2", "bash", "-c", &both(0), ":", "-n", "2", "bash", "-c", &both(4)];
    let done = exec("--hosts a,b --agent local -q --keep-going").program(&words).end().code(4);
    assert_eq!(done.lines(), ["0 0 1 1"; 4]);
}
