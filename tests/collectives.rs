//! What ranks do together through their agents: the text protocol, programs beside each other, failures.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::process::Command;
use std::time::Duration;

use common::{exec, sh};

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
                    .is_some_and(|lost| lost.split(',').any(|rank| rank == "4"))
            };
            assert_eq!(done.err.lines().filter(told).count(), 5, "{}", done.err);
        }
    };
    lost("exit 0");
    lost("kill -9 $$");
    let lines = "call() { printf '%s 0 0.3\\n' $1 >&8; read -r line <&8; echo \"$line\"; }
        case $HPCRT_RANK in 1|4) sleep 2;; *) call barrier;; esac";
    let done = bash("-n 6", lines).end().code(0);
    assert_eq!(done.lines(), vec!["late 1,4 they did not call it in time"; 4]);
}

#[test]
fn who_contradicts_the_others_is_told() {
    let done = bash("-n 4", "if ((HPCRT_RANK == 3)); then call gather x; else call barrier; fi; :").end().code(0);
    assert!(done.err.contains("some members called"), "{}", done.err);
    bash("-n 2", "call gather").end().says("calls gather with 0 items; 1 are wanted");
    bash("-n 2", "call dance 1; call put key; call send x")
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
    let abort = "((HPCRT_RANK == 1)) && echo 'cmd=abort exitcode=9 message=it is over' >&$PMI_FD; exec sleep 100";
    let done = bash("-n 3", abort).within(Duration::from_secs(10)).end().code(9);
    done.says("rank 1 on b aborted the job with code 9: it is over");
}

#[test]
fn jobs_that_do_nothing_together_end_as_they_did() {
    sh(&format!("{ABC} -n 6"), "exit 0").end().code(0);
    bash("-n 6", "call barrier; exit $((HPCRT_RANK == 5 ? 3 : 0))").end().code(3);
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
    run(Command::new(env!("CARGO_BIN_EXE_hpcrt")).args(["sdk", "."]));
    for (program, compiler) in [("frontend", "gcc"), ("member", "gcc")] {
        let flags = ["-Wall", "-Wextra", "-Werror", "-o", program, "libi.c"];
        run(Command::new(compiler).args(flags).arg(format!("{program}.c")));
    }
    let exec = format!("{} exec --agent local --timeout 30", env!("CARGO_BIN_EXE_hpcrt"));
    let out = run(Command::new("./frontend").args(["./member", "a", "b", "c", "d"]).env("HPCRT_EXEC", exec));
    let expected = "6 members, sum 65, it's, -\na b a a b b\n4 members, sum 22, back end, of a session\nc c d d\n";
    assert_eq!(out, expected);
    let mut command = Command::new("./frontend");
    command.args(["./member", "a", "b"]).current_dir(place.path()).env("HPCRT_EXEC", "false");
    let output = command.output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr)), (Some(1), "launch: 5\n".into()));
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
    // Each ends with its own code, and they talk to each other.
    let both = |code: u32| {
        format!("{}; exit $((HPCRT_PART * {code}))", script("call allgather $HPCRT_PART; echo ${reply[*]}"))
    };
    let words = ["-n", "2", "bash", "-c", &both(0), ":", "-n", "2", "bash", "-c", &both(4)];
    let done = exec("--hosts a,b --agent local -q").program(&words).end().code(4);
    assert_eq!(done.lines(), ["0 0 1 1"; 4]);
}
