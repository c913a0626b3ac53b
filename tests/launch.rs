//! Programs started on hosts that are processes of this machine, and once through an agent command: exit codes, environment,
//! streams, signals, placement, and what happens when it cannot be done.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Role, Run, exec, nothing_left, role, sh, until};
use nix::sys::signal::{Signal, kill};

/// Three hosts of this machine.
const ABC: &str = "--hosts a,b,c --agent local -q";
/// An agent command that stays on this machine but goes the way of ssh: shell, copy of the binary, pipes or TCP.
const COMMAND: &str = "env AGENT_OF={host}";

#[test]
fn one_program_as_without_hpcrt() {
    let done = exec("").program(&["echo", "hello"]).end().code(0);
    assert_eq!((done.text().as_str(), done.err.as_str()), ("hello\n", ""));
}

#[test]
fn exit_codes() {
    sh(ABC, "exit 0").end().code(0);
    sh(&format!("{ABC} -n 6"), "[ $HPCRT_RANK = 3 ] && exit 7; exec sleep 100").end().code(7).says("first rank 3 on b");
    sh(&format!("{ABC} -n 6"), "[ $HPCRT_RANK = 4 ] && kill -SEGV $$; exec sleep 100").end().code(128 + 11);
    sh(&format!("{ABC} --keep-going"), "sleep 0.$HPCRT_RANK; exit $((9 - HPCRT_RANK))").end().code(9);
    sh(&format!("{ABC} --keep-going -n 6"), "exit $((HPCRT_RANK * 3))").end().code(15);
    // A rank that did not become the program never counts as a success, whichever it is.
    sh("--frobnicate", "exit 0").end().code(2).says("--frobnicate");
    exec("").end().code(2).says("no program is named");
    exec(ABC).program(&["no-such-program-anywhere"]).end().code(2).says("no such program in PATH");
    exec(ABC).program(&["/nonexistent/program"]).end().code(125).says("No such file");
    exec(ABC).program(&["/etc/passwd"]).end().code(2).says("not executable");
    exec(ABC).program(&["/usr"]).end().code(2).says("it is a directory");
    exec("--hosts a,b,c:x").program(&["true"]).end().code(2);
}

#[test]
fn a_program_that_the_kernel_refuses() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("program");
    fs::write(&file, "#!/nonexistent/interpreter\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    let done = exec(&format!("{ABC} -n 6")).program(&[&file]).end().code(125);
    assert_eq!(done.err.matches("cannot execute").count(), 1, "once for all hosts: {}", done.err);
    // The first to fail ends the job, perhaps before the others have told.
    let told = |line: &str| line.starts_with("hpcrt: ") && line.contains("cannot execute") && line.contains("program");
    assert!(done.err.lines().any(told), "{}", done.err);
}

/// Of what the hosts do not share, a tree is captured only when it is named.
#[test]
fn a_tree_of_this_host() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("program.sh");
    fs::write(&file, "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    let flags = "--hosts a,b,c --agent local";
    let plain = exec(flags).program(&[&file]).end().code(0).says("no file was captured");
    let named =
        exec(flags).arg("--prefix").arg(place.path()).program(&[&file]).end().code(0).says("hpcrt: 1 file, 19 B read");
    assert_eq!((plain.text(), named.text()), ("ran\n".repeat(3), "ran\n".repeat(3)));
}

/// The bootstrapper and what stands in for it do the same.
#[test]
fn with_the_bootstrapper_and_without() {
    let place = tempfile::tempdir().unwrap();
    let home = place.path().canonicalize().unwrap();
    // Limits and descriptors.
    const OPEN: &str = "ulimit -n; ls /proc/self/fd";
    let plain = Command::new("sh").args(["-c", OPEN]).stdin(Stdio::null()).output().unwrap();
    for without in ["", "memfd"] {
        let abc = |flags: &str, script: &str| {
            sh(&format!("{ABC} {flags}"), script).env("HPCRT_WITHOUT", without).env("HOME", &home).cwd(&home)
        };
        let done = abc("-n 6 -x GREETING=a=b --label", "echo $HPCRT_RANK/$HPCRT_LOCAL_RANK $GREETING $(pwd -P)").end();
        let lines = (0..6).map(|rank| format!("[{rank}] {rank}/{} a=b {}", rank % 2, home.display()));
        assert_eq!(done.code(0).lines(), lines.collect::<Vec<_>>());
        let done = sh("-q --stdin none", OPEN).env("HPCRT_WITHOUT", without).end().code(0);
        // One more: the way to the agent.
        let open: String = done.text().split_inclusive('\n').filter(|fd| *fd != "8\n").collect();
        assert_eq!(open, String::from_utf8(plain.stdout.clone()).unwrap());
        abc("-n 6", "[ $HPCRT_RANK = 3 ] && exit 7; exec sleep 100").end().code(7).says("first rank 3 on b");
        abc("--cwd /nonexistent/directory", "pwd").end().code(125).says("working directory");
        let nothing = exec(ABC).program(&["/nonexistent/program"]).env("HPCRT_WITHOUT", without).end();
        nothing.code(125).says("No such file");
        let bound = sh("-n 2 -q --bind compact --label", "grep Cpus_allowed_list /proc/self/status");
        let bound = bound.env("HPCRT_WITHOUT", without).end();
        if hpcrt::launch::allocation::usable_cpus().len() > 1 {
            let sets = bound.code(0).lines();
            assert_ne!(sets[0].split_whitespace().last(), sets[1].split_whitespace().last(), "{sets:?}");
        }
    }
}

/// Where the agents' program is, and their environment, while a job runs.
fn agents(run: Run) -> Vec<(String, String)> {
    let run = run.program(&["sleep", "100"]).start();
    let sleeps = |pid: &nix::unistd::Pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c == "sleep\n");
    let ranks = || role(&run.mark, Role::Rank).iter().filter(|pid| sleeps(pid)).count();
    let agents = until(|| (ranks() == 2).then(|| role(&run.mark, Role::Agent)));
    let look = |pid: &nix::unistd::Pid| {
        let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap().to_string_lossy().into_owned();
        (exe, String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/environ")).unwrap()).into_owned())
    };
    let seen = agents.iter().map(look).collect();
    run.signal(Signal::SIGTERM);
    run.end().gone();
    seen
}

#[test]
fn agents_run_what_is_installed_and_get_a_copy_elsewhere() {
    let ours = env!("CARGO_BIN_EXE_hpcrt");
    let flags = ["exec", "--hosts", "a,b", "--agent", "env -u HPCRT_WITHOUT AGENT_OF={host}", "-q"];
    let run = |program: &std::path::Path| {
        let mut command = Command::new(program);
        command.args(flags);
        Run::new(command).env("HPCRT_WITHOUT", "fuse,uffd")
    };
    for (exe, environment) in agents(run(ours.as_ref())) {
        assert_eq!(exe, fs::canonicalize(ours).unwrap().to_string_lossy());
        assert!(environment.contains("HPCRT_WITHOUT=fuse,uffd"), "{environment}");
    }
    // Others could write to it.
    let own = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(own.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let binary = own.path().join("hpcrt");
    fs::copy(ours, &binary).unwrap();
    let is_run = |program: &std::path::Path| {
        let agents = agents(run(program));
        agents.iter().filter(|(exe, _)| !exe.ends_with(" (deleted)")).count()
    };
    let trusted = is_run(&binary);
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o775)).unwrap();
    assert_eq!(is_run(&binary), 0);
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!((trusted, is_run(&binary)), (2, 2));
    // No shell can be told of this path.
    let place = tempfile::tempdir().unwrap();
    let copy = place.path().join("hpcrt's");
    fs::copy(ours, &copy).unwrap();
    for (exe, _) in agents(run(&copy)) {
        assert!(exe.ends_with(" (deleted)"), "{exe}");
    }
}

#[test]
fn environment() {
    let done = sh(
        &format!("{ABC} -n 4 -x GREETING=a=b --label"),
        "echo $HPCRT_RANK/$HPCRT_SIZE/$HPCRT_LOCAL_RANK/$HPCRT_LOCAL_SIZE $GREETING",
    )
    .end()
    .code(0);
    assert_eq!(done.lines(), ["[0] 0/4/0/2 a=b", "[1] 1/4/1/2 a=b", "[2] 2/4/0/1 a=b", "[3] 3/4/0/1 a=b"]);
    sh("-x NOT_SET_ANYWHERE", "true").end().code(2).says("NOT_SET_ANYWHERE");
    let show = "echo ${SSH_CONNECTION-none} ${PASSED-none} ${AGENT_OF-none}";
    let run = |flags: &str| {
        sh("--hosts a", show).env("SSH_CONNECTION", "x").env("PASSED", "y").arg("unused").end();
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["exec", "--hosts", "a", "--agent", COMMAND]).args(flags.split_whitespace());
        Run::new(command)
            .env("SSH_CONNECTION", "x")
            .env("PASSED", "y")
            .program(&["sh", "-c", show])
            .end()
            .code(0)
            .text()
    };
    assert_eq!(run(""), "none y none\n");
    assert_eq!(run("-x SSH_CONNECTION"), "x y none\n");
}

/// Which process of another launcher this one is means nothing to ranks of a job of its own.
#[test]
fn the_variables_by_which_a_launcher_tells_its_processes_apart() {
    let show = "echo ${SLURM_PROCID-none} ${OMPI_COMM_WORLD_RANK-none} ${PMIX_RANK-none} ${PMIX_MCA_gds-none} ${SLURM_JOB_ID-none}";
    let run = |flags: &str| {
        let variables = ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMIX_MCA_gds", "SLURM_JOB_ID"];
        let run = variables.into_iter().fold(sh(flags, show), |run, name| run.env(name, "5"));
        run.end().code(0).lines()
    };
    assert_eq!(run(ABC), ["none none none 5 5"; 3]);
    assert_eq!(run("-q -n 2"), ["none none none 5 5"; 2]);
    assert_eq!(run("-q -n 2 -x SLURM_PROCID=7"), ["7 none none 5 5"; 2]);
    assert_eq!(run("-q"), ["5 5 5 5 5"], "it takes the place of this process");
}

/// Agents start with whatever the log-in gives them.
#[test]
fn files_of_ranks_have_the_users_mode() {
    for agent in ["local", "umask 022; env AGENT_OF={host}"] {
        let mut command = Command::new("sh");
        command.args(["-c", "umask 0057; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_hpcrt")]);
        command.args(["exec", "-q", "--hosts", "a,b", "--agent", agent]);
        let done = Run::new(command).program(&["sh", "-c", "umask"]).end().code(0);
        assert_eq!(done.lines(), ["0057"; 2], "{agent}");
    }
}

#[test]
fn processes_of_a_launcher_that_cannot_find_each_other() {
    for name in ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"] {
        let refused = exec("").env(name, "2").program(&["true"]).end().code(2).says("started 2 of it");
        refused.says("hpcrt exec -- srun ... (mpirun ...)");
        exec("-q").env(name, "1").program(&["true"]).end().code(0);
    }
}

#[test]
fn a_job_within_a_job_has_its_own_ranks() {
    let inner = format!(
        "{} exec -q --hosts x,y --agent local -- sh -c 'env | grep -c ^HPCRT_RANK=; echo $HPCRT_RANK/$HPCRT_SIZE'",
        env!("CARGO_BIN_EXE_hpcrt")
    );
    let done = sh("-n 3 --stdin none -q --keep-going", &format!("[ $HPCRT_RANK = 2 ] && {inner}; true")).end().code(0);
    assert_eq!(done.lines(), ["0/2", "1", "1", "1/2"]);
    // What ranks are told for Open MPI is no allocation of Flux.
    let inner = format!("{} exec -q -n 2 -- sh -c 'echo $HPCRT_RANK/$HPCRT_SIZE'", env!("CARGO_BIN_EXE_hpcrt"));
    let done = sh("-n 2 --stdin none -q", &format!("[ $HPCRT_RANK = 1 ] || {inner}")).end().code(0);
    assert_eq!(done.lines(), ["0/2", "1/2"]);
    // A descriptor under the number that flock(1) suggests.
    let program = format!("exec 200</dev/null; {} exec -q -- echo done", env!("CARGO_BIN_EXE_hpcrt"));
    assert_eq!(exec("-q").program(&["bash", "-c", &program]).end().code(0).text(), "done\n");
}

#[test]
fn working_directory() {
    let place = tempfile::tempdir().unwrap();
    let here = place.path().canonicalize().unwrap();
    let done = sh(ABC, "pwd -P").cwd(&here).end().code(0);
    assert_eq!(done.text(), format!("{}\n", here.display()).repeat(3));
    // One that is not there: whoever named it wants it, else HOME will do.
    sh(&format!("{ABC} --cwd /nonexistent/directory"), "pwd")
        .env("HOME", &here)
        .end()
        .code(125)
        .says("working directory");
    for (home, code) in [(&*here, 0), ("/nonexistent".as_ref(), 125)] {
        let away = tempfile::tempdir().unwrap().keep();
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        let agent = format!("rmdir {}; cd /; AGENT_OF={{host}} env", away.display());
        command.args(["exec", "-q", "--hosts", "a", "--agent", &agent]).env("HOME", home);
        let done = Run::new(command).cwd(&away).program(&["sh", "-c", "pwd -P"]).end().code(code);
        if code == 0 {
            assert_eq!(done.text(), format!("{}\n", here.display()));
            assert_eq!(done.err.matches(&format!("a: no directory {}", away.display())).count(), 1, "{}", done.err);
        } else {
            done.says("working directory");
        }
    }
}

fn numbers(bytes: usize) -> Vec<u8> {
    (0u32..).flat_map(u32::to_le_bytes).take(bytes).collect()
}

#[test]
fn standard_input() {
    let input = numbers(10 << 20);
    let done = exec(ABC).program(&["cat"]).input(input.clone()).end().code(0);
    assert!(done.out == input, "rank 0 alone reads: {} bytes", done.out.len());
    let done = sh(&format!("{ABC} --stdin all -n 6 --label"), "md5sum").input(input.clone()).end().code(0);
    let sums: std::collections::BTreeSet<_> = done.lines().iter().map(|l| l[4..].to_owned()).collect();
    assert_eq!((done.lines().len(), sums.len()), (6, 1), "{:?}", done.lines());
    let done = sh(&format!("{ABC} --stdin none"), "wc -c").input(input.clone()).end().code(0);
    assert_eq!(done.lines(), ["0", "0", "0"]);
    // In small pieces, beside another program of which no rank reads and which ends at once.
    let sums: std::collections::BTreeSet<_> = (0..10)
        .map(|_| {
            let run = exec("-q -n 1").program(&["sh", "-c", "sleep 0.1; dd bs=100 | md5sum", ":", "-n", "1", "true"]);
            run.input(&input[..8 << 20]).end().code(0).text()
        })
        .collect();
    let whole = sh("-q", "md5sum").input(&input[..8 << 20]).end().code(0).text();
    assert_eq!(Vec::from_iter(sums), [whole]);
    // A reader that is slower than the writer, and one that goes away.
    let done =
        sh(ABC, "sleep 0.5; dd bs=1M count=3 iflag=fullblock 2>/dev/null | wc -c").input(input.clone()).end().code(0);
    assert_eq!(done.lines(), ["0", "0", "3145728"]);
    let done = sh(
        &format!("{ABC} --stdin all -n 6"),
        "[ $((HPCRT_RANK % 2)) = 0 ] && exec 0<&-; [ $((HPCRT_RANK % 2)) = 0 ] || wc -c",
    )
    .input(input)
    .end()
    .code(0);
    assert_eq!(done.lines(), ["10485760", "10485760", "10485760"]);
}

#[test]
fn output_arrives_whole() {
    const EACH: usize = 9 << 20;
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("numbers");
    fs::write(&file, (0..).flat_map(|n: u32| format!("{n}\n").into_bytes()).take(EACH).collect::<Vec<u8>>()).unwrap();
    let one = fs::read(&file).unwrap();
    let done = exec(&format!("{ABC} -n 6 --label")).arg("--").arg("cat").arg(&file).end().code(0);
    let mut streams: [Vec<u8>; 6] = std::array::from_fn(|_| Vec::with_capacity(EACH));
    for line in done.out.split_inclusive(|b| *b == b'\n') {
        let rank = usize::from(line[1] - b'0');
        assert_eq!((line[0], &line[2..4]), (b'[', &b"] "[..]));
        streams[rank].extend_from_slice(&line[4..]);
    }
    for (rank, stream) in streams.into_iter().enumerate() {
        // The last line is unfinished: the label adds a newline.
        assert!(stream.strip_suffix(b"\n") == Some(&one) || stream == one, "rank {rank}: {} bytes", stream.len());
    }
    let kept = place.path().join("kept");
    exec(&format!("{ABC} -n 6")).arg("--output").arg(&kept).arg("--").arg("cat").arg(&file).end().code(0);
    for rank in 0..6 {
        assert!(fs::read(kept.join(format!("rank.{rank}.out"))).unwrap() == one);
    }
}

#[test]
fn gathered_output() {
    let done = sh(&format!("{ABC} -n 6 --gather"), "echo all; echo $((HPCRT_RANK / 5)) >&2").end().code(0);
    assert_eq!(done.text().matches("all").count(), 1, "{}", done.text());
    assert!(done.text().contains("0-5") && done.text().contains("a,b,c"), "{}", done.text());
    assert!(done.err.contains("0-4"), "{}", done.err);
}

#[test]
fn a_closed_output_ends_the_job_quietly() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    command.args(["exec", "--hosts", "a,b", "--agent", "local", "-q", "--", "yes"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 100]).unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(128 + 13), ""));
}

#[test]
fn a_closed_standard_error_ends_the_job_too() {
    let mut command = Command::new("sh");
    let run = "exec --hosts a,b --agent local -q -- sh -c 'exec yes >&2'";
    let line = format!("{{ {} {run}; echo $?; }} 2>&1 >&3 | head -1 >/dev/null", env!("CARGO_BIN_EXE_hpcrt"));
    command.args(["-c", &format!("exec 3>&1; {line}")]);
    assert_eq!(Run::new(command).within(Duration::from_secs(10)).end().code(0).text(), "141\n");
}

#[test]
fn a_closed_standard_error_is_no_panic() {
    let mut command = Command::new("sh");
    let line = format!(
        "{{ {} exec --hosts a,b --agent local -- sh -c 'exit 3'; echo $?; }} 2>&1 >&3 | true",
        env!("CARGO_BIN_EXE_hpcrt")
    );
    command.args(["-c", &format!("exec 3>&1; {line}")]);
    assert_eq!(Run::new(command).end().code(0).text(), "3\n");
}

#[test]
fn a_blocked_output_does_not_block_signals() {
    for flags in ["", "--timeout 1"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["exec", "--hosts", "a,b", "--agent", "local"]).args(flags.split_whitespace()).args(["--", "yes"]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(700));
        let begun = Instant::now();
        let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
        if flags.is_empty() {
            kill(pid, Signal::SIGTERM).unwrap();
            thread::sleep(Duration::from_millis(100));
            kill(pid, Signal::SIGTERM).unwrap();
        }
        while child.try_wait().unwrap().is_none() {
            if begun.elapsed() > Duration::from_secs(10) {
                child.kill().unwrap();
                panic!("it did not end {flags}");
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn time_limit() {
    let done = sh(&format!("{ABC} --timeout 0.5"), "exec sleep 100").end().code(125).says("0.5 s");
    assert!(done.took < Duration::from_secs(3), "{:?}", done.took);
    let done = sh(&format!("{ABC} --timeout 0.5"), "trap '' TERM; while :; do sleep 1; done").end().code(125);
    assert!(done.took < Duration::from_secs(6), "{:?}", done.took);
}

#[test]
fn signals_are_passed_on() {
    for (signal, code) in [(Signal::SIGINT, 128 + 2), (Signal::SIGTERM, 128 + 15), (Signal::SIGUSR1, 128 + 10)] {
        let run = exec(&format!("{ABC} -n 6")).program(&["sleep", "100"]).start();
        until(|| (role(&run.mark, Role::Rank).len() == 6).then_some(()));
        thread::sleep(Duration::from_millis(100));
        run.signal(signal);
        run.end().code(code);
    }
    let run = sh(ABC, "trap 'echo got; exit 0' USR2; echo up; while :; do sleep 0.05; done").start();
    run.printed(3);
    run.signal(Signal::SIGUSR2);
    assert_eq!(run.end().code(0).lines(), ["got", "got", "got", "up", "up", "up"]);
}

#[test]
fn a_second_interrupt_kills() {
    let run = sh(ABC, "trap '' INT TERM; while :; do sleep 1; done").start();
    until(|| (role(&run.mark, Role::Rank).len() >= 6).then_some(()));
    thread::sleep(Duration::from_millis(200));
    run.signal(Signal::SIGINT);
    thread::sleep(Duration::from_millis(300));
    let since = Instant::now();
    run.signal(Signal::SIGINT);
    run.end().code(125).says("second SIGINT");
    assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
}

#[test]
fn an_interrupt_while_agents_start() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    command.args(["exec", "--hosts", "a,b", "--agent", "sleep 1000; env", "--", "true"]);
    let run = Run::new(command).start();
    thread::sleep(Duration::from_millis(400));
    let since = Instant::now();
    run.signal(Signal::SIGTERM);
    run.end().code(125).says("ended by SIGTERM");
    assert!(since.elapsed() < Duration::from_secs(3), "{:?}", since.elapsed());
}

#[test]
fn ignored_signals_stay_ignored() {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("trap '' HUP; {} exec --hosts a,b --agent local -q -- sh -c 'sleep 1; echo done' & sleep 0.5; kill -HUP $!; wait $!", env!("CARGO_BIN_EXE_hpcrt"))]);
    assert_eq!(Run::new(command).end().code(0).lines(), ["done", "done"]);
}

/// Some daemons start their children so; `wait(2)` then tells nothing.
#[test]
fn an_inherited_disposition_of_sigchld_does_no_harm() {
    let mut command = Command::new("env");
    command.args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_hpcrt")]);
    command.args(["exec", "--hosts", "a,b", "--agent", "local", "--", "sh", "-c", "exit 3"]);
    Run::new(command).end().code(3);
}

#[test]
fn stop_and_continue() {
    let run = sh(ABC, "sleep 10; echo done").start();
    until(|| (role(&run.mark, Role::Rank).len() >= 6).then_some(()));
    thread::sleep(Duration::from_millis(200));
    run.signal(Signal::SIGTSTP);
    let pid = run.pid();
    let state = move |pid| {
        fs::read_to_string(format!("/proc/{pid}/stat"))
            .unwrap_or_default()
            .rsplit_once(") ")
            .is_some_and(|s| s.1.starts_with('T'))
    };
    until(|| state(pid).then_some(()));
    until(|| role(&run.mark, Role::Rank).iter().all(|p| state(*p)).then_some(()));
    // Longer than a silent peer is waited for.
    thread::sleep(Duration::from_secs(17));
    run.signal(Signal::SIGCONT);
    assert_eq!(run.end().code(0).lines(), ["done"; 3]);
}

#[test]
fn placement() {
    let who = "echo $HPCRT_NODE $HPCRT_RANK";
    let done = sh("--hosts a:2,b --agent local -q", who).end().code(0);
    assert_eq!(done.lines(), ["1 0", "1 1", "2 2"]);
    let done = sh("--hosts a,b --agent local -q --ppn 2", who).end().code(0);
    assert_eq!(done.lines(), ["1 0", "1 1", "2 2", "2 3"]);
    sh("--hosts a,b --agent local --ppn 2 -n 5", who).end().code(2).says("does not fit");
    let done = sh("--hosts a,b -n 4 --dry-run", who).end().code(0);
    assert!(
        done.text().contains("4 ranks on 2 hosts") && done.text().contains("this process starts a,b"),
        "{}",
        done.text()
    );
}

/// A front end that plans for so many hosts has its data in 64 MiB.
#[test]
fn ten_thousand_hosts_are_planned_in_little_memory() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -d 65536; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_hpcrt")]);
    command.args(["exec", "--hosts", "n[00001-10000]", "--ppn", "8", "--dry-run"]);
    let done = Run::new(command).program(&["true"]).end().code(0);
    assert!(done.text().contains("80000 ranks on 10000 hosts\n  n[00001-10000]: ranks 0-79999"), "{}", done.text());
}

#[test]
fn binding() {
    let usable: Vec<u32> = hpcrt::launch::allocation::usable_cpus();
    let show = "sed -n 's/^Cpus_allowed_list:.//p' /proc/self/status";
    let masks = |flags: &str| sh(&format!("{flags} -q --label"), show).end().code(0).lines();
    let all = sh("-q", show).end().code(0).text();
    assert!(masks("-n 2").iter().all(|l| l[4..] == *all.trim()));
    let compact = masks(&format!("-n {} --bind compact", usable.len() + 1));
    for (rank, line) in compact.iter().enumerate().take(10) {
        assert_eq!(*line, format!("[{rank}] {}", usable[rank % usable.len()]));
    }
    let spread = masks(&format!("-n {} --bind spread", usable.len()));
    assert_eq!(spread[0], format!("[0] {}", usable[0]));
    assert_eq!(masks("-n 1 --bind spread")[0], format!("[0] {}", all.trim()));
}

#[test]
fn hosts_that_cannot_be_reached() {
    let agent = "case {host} in b) echo no route to b >&2; exit 255;; esac; env";
    let run_on = |hosts: &str, flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
        command.args(["exec", "--hosts", hosts, "--agent", agent]).args(flags).args([
            "--",
            "sh",
            "-c",
            "echo $HPCRT_NODE",
        ]);
        Run::new(command).end()
    };
    let run = |flags: &[&str]| run_on("a,b,c", flags);
    let done = run(&[]).code(125).says("no route to b");
    assert!(done.err.contains("--min-hosts") && done.took < Duration::from_secs(10), "{}", done.err);
    let done = run(&["--min-hosts", "2"]).code(0).says("going on without a host: b:");
    assert_eq!(done.lines(), ["1", "3"]);
    run(&["--min-hosts", "3"]).code(125);
    // In a tree, b is tried by its parent and then from here.
    let done = run(&["--min-hosts", "2", "--fan-out", "1"]).code(0).says("no route to b");
    assert_eq!(done.lines(), ["1", "3"]);
    // Those that b was to start are started from here.
    let done = run_on("b,a,c", &["--min-hosts", "2", "--fan-out", "1"]).code(0).says("going on without a host: b:");
    let done = done.says("a,c: other hosts could not start it (b: cannot start the agent: no route to b)");
    assert_eq!(done.lines(), ["2", "3"]);
    run_on("b,a,c", &["--fan-out", "1"]).code(125).says("1 of 3 hosts are missing: b:");
}

#[test]
fn a_start_that_says_nothing_ends() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    command.args(["exec", "--hosts", "a,b", "--agent", "sleep 1000; env", "--", "true"]);
    let done = Run::new(command).end().code(125).says("nothing was heard for 30 s");
    assert!(done.took < Duration::from_secs(35), "{:?}", done.took);
}

/// A batch system that does not answer holds up nobody who asks for the end.
#[test]
fn an_interrupt_while_slurm_says_nothing() {
    let place = tempfile::tempdir().unwrap();
    let (srun, asked) = (place.path().join("srun"), place.path().join("asked"));
    fs::write(&srun, format!("#!/bin/sh\ntouch {}\nexec sleep 1000\n", asked.display())).unwrap();
    fs::set_permissions(&srun, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", place.path().display(), std::env::var("PATH").unwrap());
    let run = exec("").env("PATH", path).env("SLURM_JOB_NODELIST", "n[1-2]").program(&["true"]).start();
    until(|| asked.exists().then_some(()));
    run.signal(Signal::SIGTERM);
    run.end().code(125).says("ended by SIGTERM");
}

/// What has no room for the binary is passed over.
#[test]
fn a_full_directory_for_the_agents_program() {
    if !Command::new("unshare").args(["-m", "true"]).status().is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: no mount namespaces can be made");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let (binary, agent, full) = (place.path().join("hpcrt's"), place.path().join("agent"), place.path().join("full"));
    // No shell can be told of this path, so it is sent.
    fs::copy(env!("CARGO_BIN_EXE_hpcrt"), &binary).unwrap();
    fs::create_dir(&full).unwrap();
    let lines = "shift\nmount -t tmpfs -o size=1m none @F && XDG_RUNTIME_DIR=@F exec \"$@\"\n";
    fs::write(&agent, lines.replace("@F", full.to_str().unwrap())).unwrap();
    let mut command = Command::new(&binary);
    command.args(["exec", "-q", "--hosts", "a", "--agent", &format!("unshare -m sh {} {{host}}", agent.display())]);
    let done = Run::new(command).program(&["echo", "ran"]).end().code(0);
    assert_eq!(done.text(), "ran\n", "{}", done.err);
}

#[test]
fn talkative_agents() {
    let noise = "head -c 100000 /dev/urandom; echo welcome; printf 'motd without an end'; echo chatter >&2; env AGENT_OF={host}";
    for agent in [COMMAND, noise] {
        for flags in ["", "--fan-out 1"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
            command.args(["exec", "--hosts", "a,b,c", "--agent", agent]).args(flags.split_whitespace());
            command.args(["--", "sh", "-c", "cat; echo $HPCRT_RANK"]);
            let run = Run::new(command).input("typed\n").start();
            let mark = run.mark.clone();
            assert_eq!(run.end().code(0).lines(), ["0", "1", "2", "typed"]);
            nothing_left(&mark);
        }
    }
}

#[test]
fn trees_of_hosts() {
    for fan_out in [1, 2, 32] {
        let done =
            sh(&format!("--hosts n[1-64] --agent local -q --fan-out {fan_out}"), "echo $HPCRT_NODE").end().code(0);
        let mut nodes: Vec<u32> = done.lines().iter().map(|l| l.parse().unwrap()).collect();
        nodes.sort_unstable();
        assert_eq!(nodes, (1..=64).collect::<Vec<u32>>());
    }
}

#[test]
fn a_thousand_ranks() {
    let done = sh("-n 1000 -q", "echo $HPCRT_RANK").end().code(0);
    assert_eq!(done.lines().len(), 1000);
    sh("-n 1000 -q", "[ $HPCRT_RANK != 777 ] || exit 3; exec sleep 100").end().code(3);
    let done = sh("-n 300 -q --stdin all", "cat").input("x\n".repeat(1000)).end().code(0);
    assert_eq!(done.out.len(), 600_000);
}

#[test]
fn few_descriptors() {
    for limit in [16, 40, 100, 256] {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &format!("ulimit -n {limit}; exec {} exec -q -n 200 -- sh -c 'ulimit -n'", env!("CARGO_BIN_EXE_hpcrt")),
        ]);
        Run::new(command).end().code(125).says("Too many open files");
    }
    let mut command = Command::new("sh");
    command.args([
        "-c",
        &format!("ulimit -Sn 100; exec {} exec -q -n 200 -- sh -c 'ulimit -n'", env!("CARGO_BIN_EXE_hpcrt")),
    ]);
    assert_eq!(Run::new(command).end().code(0).lines(), ["100"; 200]);
}

#[test]
fn daemons_end_with_the_job() {
    let script = r#"
        setsid sh -c '(sleep 1000 </dev/null >/dev/null 2>&1 &) ' </dev/null >/dev/null 2>&1 &
        sleep 1000 &
        sleep 0.2; echo done"#;
    let done = sh(ABC, script).end().code(0);
    assert_eq!(done.lines(), ["done"; 3]);
    assert!(done.took < Duration::from_secs(8), "{:?}", done.took);
}

#[test]
fn ranks_that_ignore_sigterm() {
    let done = sh(
        &format!("{ABC} -n 6"),
        "[ $HPCRT_RANK = 1 ] && { sleep 0.5; exit 4; }; trap '' TERM; while :; do sleep 1; done",
    )
    .end()
    .code(4);
    assert!(done.took < Duration::from_secs(5), "{:?}", done.took);
}

#[test]
fn many_in_a_row() {
    let begun = Instant::now();
    for _ in 0..300 {
        exec("").program(&["/bin/true"]).end().code(0);
    }
    eprintln!("300 runs: {:?}", begun.elapsed());
}

#[test]
#[ignore = "several minutes"]
fn ten_thousand_in_a_row() {
    for _ in 0..10_000 {
        exec("").program(&["/bin/true"]).within(Duration::from_secs(20)).end().code(0);
    }
}

#[test]
#[ignore = "10,000 processes at once"]
fn ten_thousand_ranks() {
    for hosts in ["", "--hosts a,b,c,d,e,f,g,h --agent local"] {
        let done = exec(&format!("-n 10000 {hosts}")).program(&["/bin/true"]).end().code(0);
        println!("{}", done.err.lines().find(|line| line.contains("exit code")).unwrap_or_default());
        let mut numbers: Vec<u32> = sh(&format!("-n 10000 -q {hosts}"), "echo $HPCRT_RANK")
            .end()
            .code(0)
            .lines()
            .iter()
            .map(|line| line.parse().unwrap())
            .collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..10_000).collect::<Vec<_>>());
        // All of them live at the same time.
        exec(&format!("-n 10000 -q {hosts} --timeout 30")).program(&["sleep", "1000"]).end().gone().code(125);
    }
}

#[test]
fn the_front_end_ends_with_its_own_code_when_killed() {
    let run = exec(ABC).program(&["sleep", "100"]).start();
    until(|| (role(&run.mark, Role::Rank).len() == 3).then_some(()));
    run.signal(Signal::SIGKILL);
    let done = run.end().gone();
    assert_eq!(done.status.signal(), Some(9));
}
