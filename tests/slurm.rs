//! In the allocations of a real Slurm (and under Hydra): agents started by a step, one job of the processes of a step, and Slurm's own
//! launcher with only its loading taken over.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

#[path = "common/secret.rs"]
mod secret;
#[path = "common/site.rs"]
mod site;
#[path = "common/slurm.rs"]
mod slurm;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use cluster::Cluster;
use hpcrt::launch::invitation::Invitation;
use secret::Secret;
use site::Site;
use slurm::Slurm;

/// As whom the jobs run: an ordinary user.
const USER: u32 = 20001;
/// What MPICH must know of these hosts' network.
const UCX: &str = "export UCX_TLS=tcp,self UCX_NET_DEVICES=eth0";

fn obstacle() -> Option<&'static str> {
    Cluster::obstacle().or_else(Slurm::obstacle)
}

/// A directory of the user's on the shared file system with a program in it that tells how many mounts of ours it sees.
fn place(site: &Site) {
    site.place(USER, "job", &[]);
    for name in ["grep", "sh"] {
        let file = site.backing("job").join(name);
        fs::copy(Path::new("/bin").join(name), &file).unwrap();
        site::mode(&file, 0o755);
    }
}

/// Lines of the output that hold this.
fn count(output: &str, words: &str) -> usize {
    output.lines().filter(|line| line.contains(words)).count()
}

/// Nothing of ours is left on any host: no process of the user's, no file of ours.
#[track_caller]
fn nothing_left(site: &Site) {
    let begun = Instant::now();
    loop {
        let left = site.cluster.leftovers().unwrap();
        let ours: Vec<String> = left
            .iter()
            .map(|left| format!("{left:?}"))
            .filter(|left| left.contains("hpcrt") && !left.contains("slurm"))
            .collect();
        let invited = fs::read_dir(site.backing("job"))
            .unwrap()
            .flatten()
            .any(|e| e.file_name().to_string_lossy().contains("join"));
        if ours.is_empty() && !invited {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(12), "{ours:#?} {invited}");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn all_three_ways() {
    if let Some(obstacle) = obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return;
    }
    let site = Site::up("slurm");
    let slurm = Slurm::up(&site);
    place(&site);
    let hpcrt = site.hpcrt.display();
    agents_by_a_step(&slurm, &format!("{hpcrt}"));
    the_key(&slurm, &format!("{hpcrt}"));
    signals_and_losses(&slurm, &format!("{hpcrt}"));
    slurms_own_launcher(&slurm, &format!("{hpcrt}"));
    processes_of_a_step(&slurm, &format!("{hpcrt}"));
    what_is_started_hears_signals(&slurm, &format!("{hpcrt}"));
    if site::tool("mpicc.mpich") {
        mpi(&slurm, &format!("{hpcrt}"));
    }
    nothing_left(&site);
}

/// `hpcrt exec` in an allocation: agents are one step, beside which the program's own step fits; every host has its ranks and processors.
fn agents_by_a_step(slurm: &Slurm<'_>, hpcrt: &str) {
    let script = format!(
        "{hpcrt} exec -q --label -- sh -c 'echo at $(hostname); ./grep -c hpcrt /proc/self/mountinfo; nproc'\n\
         echo code $?\n\
         {hpcrt} exec -q -- sh -c 'test $HPCRT_RANK = 0 && srun -n 4 hostname; true'\necho code $?\n\
         {hpcrt} exec -q -n 4 -- sh -c 'exit $((HPCRT_RANK + 3))'\necho code $?\nls -a /tmp | grep hpcrt\ntrue"
    );
    let (code, output) = slurm.batch(USER, [4, 8], "/shared/job", &script);
    assert_eq!(code, 0, "{output}");
    for rank in 0..8 {
        assert_eq!(count(&output, &format!("[{rank}] ")), 3, "{output}");
    }
    for host in ["hpc1", "hpc2", "hpc3", "hpc4"] {
        assert!(count(&output, &format!("at {host}")) >= 1, "{output}");
    }
    let own_step = output.lines().filter(|line| line.starts_with("hpc")).count();
    assert_eq!(own_step, 4, "the program's own step ran beside ours: {output}");
    assert_eq!(count(&output, "code 0"), 2, "{output}");
    assert_eq!(output.lines().filter(|l| ["code 3", "code 4", "code 5", "code 6"].contains(l)).count(), 1, "{output}");
    assert_eq!(count(&output, ".hpcrt-step"), 0, "{output}");
    let (code, output) = slurm.batch(USER, [2, 2], "/tmp", &format!("HOME=/tmp {hpcrt} exec -q -- true"));
    assert_eq!(code, 125, "{output}");
    assert!(output.contains("is shared by the hosts") && output.contains("--agent ssh"), "{output}");
}

/// The session's key is in a file for its user only, until the agents are there, and nowhere else.
fn the_key(slurm: &Slurm<'_>, hpcrt: &str) {
    let place = slurm.site.backing("job");
    let script = format!(
        "HPCRT_LOG=debug exec {hpcrt} exec -v --stats /shared/job/stats -- sh -c 'echo begun; env; \
         while [ ! -e /shared/job/go ]; do sleep 0.1; done'"
    );
    let job = slurm.submit(USER, [4, 4], "/shared/job", &script);
    let posted = || {
        let names = fs::read_dir(&place).unwrap().flatten().map(|entry| entry.path());
        let path = names.into_iter().find(|path| path.to_string_lossy().contains(".hpcrt-join-"))?;
        let (meta, text) = (fs::metadata(&path).ok()?, fs::read_to_string(&path).ok()?);
        Some((path, meta, Secret::new(&Invitation::parse(&text)?.key.0)))
    };
    let begun = Instant::now();
    let (path, meta, secret) = loop {
        if let Some(posted) = posted() {
            break posted;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "no invitation: {}", slurm.output(&job));
    };
    assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o600, USER));
    running(slurm, &job);
    assert!(!path.exists(), "it is gone as soon as the agents are there");
    assert_eq!(secret.shown_by(), [""; 0]);
    fs::write(place.join("go"), "").unwrap();
    let (code, output) = slurm.end(USER, &job);
    assert!(code == 0 && output.contains("HPCRT_RANK=3") && output.contains(" DEBUG] "), "{output}");
    assert!(!secret.is_in(output.as_bytes()) && !secret.is_in(&fs::read(place.join("stats")).unwrap()));
    let logs = slurm.files();
    assert!(
        logs.len() > 5 && logs.iter().all(|log| fs::read(log).is_ok_and(|bytes| !secret.is_in(&bytes))),
        "{logs:?}"
    );
    nothing_left(slurm.site);
}

/// Waits until four ranks of a job have said that they began.
fn running(slurm: &Slurm<'_>, job: &str) {
    let begun = Instant::now();
    while count(&slurm.output(job), "begun") < 4 {
        assert!(begun.elapsed() < Duration::from_secs(30), "{}", slurm.output(job));
        thread::sleep(Duration::from_millis(50));
    }
}

/// scancel, the time limit of `--timeout`, a killed front end and a lost node leave nothing.
fn signals_and_losses(slurm: &Slurm<'_>, hpcrt: &str) {
    let script = format!("exec {hpcrt} exec -q -- sh -c 'echo begun; exec sleep 1000'");
    let job = slurm.submit(USER, [4, 4], "/shared/job", &script);
    running(slurm, &job);
    assert!(slurm.on("hpc1", USER, &["scancel", &job]).status().unwrap().success());
    slurm.end(USER, &job);
    nothing_left(slurm.site);

    let (code, output) =
        slurm.batch(USER, [4, 4], "/shared/job", &format!("{hpcrt} exec -q --timeout 1 -- sleep 1000"));
    assert_eq!(code, 125, "{output}");
    assert!(output.contains("did not end within its 1 s"), "{output}");

    let script =
        format!("{hpcrt} exec -q -- sh -c 'echo begun; exec sleep 1000' &\necho front $!\nwait $!\necho code $?");
    let job = slurm.submit(USER, [4, 4], "/shared/job", &script);
    running(slurm, &job);
    let output = slurm.output(&job);
    let front = output.lines().find_map(|line| line.strip_prefix("front ")).unwrap().to_owned();
    let kill = Command::new("kill").args(["-9", &front]).status();
    assert!(kill.unwrap().success());
    let (_, output) = slurm.end(USER, &job);
    assert!(output.contains("code 137"), "{output}");
    nothing_left(slurm.site);

    let job = slurm.submit(
        USER,
        [4, 4],
        "/shared/job",
        &format!("{hpcrt} exec -q -- sh -c 'echo begun; exec sleep 1000'\necho code $?"),
    );
    running(slurm, &job);
    assert!(kill_agents(slurm.site, 2) > 0);
    let (_, output) = slurm.end(USER, &job);
    assert!(output.contains("code 125") && output.contains("hpc3"), "{output}");
    nothing_left(slurm.site);
}

/// Kills the agents (and keepers) on a host; how many processes that were.
fn kill_agents(site: &Site, host: usize) -> usize {
    let network = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let wanted = network(&site.cluster.state().hosts[host].pid.to_string());
    let all = fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().into_string().ok());
    let is_agent = |pid: &String| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains("serve\0--join") && network(pid) == wanted
    };
    let agents: Vec<String> = all.filter(is_agent).collect();
    agents.iter().filter(|pid| Command::new("kill").args(["-9", pid]).status().is_ok_and(|s| s.success())).count()
}

/// `hpcrt exec -- srun ./app`: its labels, its exit code, our files.
fn slurms_own_launcher(slurm: &Slurm<'_>, hpcrt: &str) {
    slurm.site.cluster.reset_ops().unwrap();
    let script = format!(
        "{hpcrt} exec -q -- srun -l ./grep -c hpcrt /proc/self/mountinfo\necho code $?\n\
         {hpcrt} exec -q -- srun -n 4 sh -c 'exit $((SLURM_PROCID + 2))' 2>/dev/null\necho code $?\n\
         {hpcrt} exec -q -- srun -n 4 ./grep nothing /dev/null 2>/dev/null\necho code $?\n\
         HPCRT_WITHOUT=userns {hpcrt} exec -q -- srun -n 4 ./sh -c 'echo audited by $LD_AUDIT' 2>/dev/null\n\
         {hpcrt} exec -q --label -- srun ./grep x\necho code $?\n{hpcrt} exec -q -- srun --no-such-option ./grep x\necho code $?\n\
         ls /tmp | grep hpcrt\ntrue"
    );
    let (code, output) = slurm.batch(USER, [4, 8], "/shared/job", &script);
    assert_eq!(code, 0, "{output}");
    for rank in 0..8 {
        let line = output.lines().find(|line| line.starts_with(&format!("{rank}: "))).unwrap();
        assert!(!line.ends_with(": 0"), "no mount of ours: {output}");
    }
    for expected in ["code 0", "code 5", "code 1", "code 2", "use its own option", "hpcrt does not know this option"] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
    assert_eq!(count(&output, "audited by /"), 4, "without namespaces its linker is told: {output}");
    assert_eq!(count(&output, "hpcrt-guests"), 0, "{output}");
    let script = format!("{hpcrt} exec -q --stats /shared/job/guests -- srun -n 4 ./sh -c 'sleep 0.5'");
    let (code, output) = slurm.batch(USER, [4, 4], "/shared/job", &script);
    assert_eq!(code, 0, "{output}");
    let stats: serde_json::Value =
        serde_json::from_slice(&fs::read(slurm.site.backing("job/guests")).unwrap()).unwrap();
    let run = stats["phases"].as_array().unwrap().iter().find(|phase| phase["phase"] == "run");
    let least = run.and_then(|run| run["min"].as_f64()).unwrap_or_default();
    assert!((0.4..30.0).contains(&least), "from the first that came until the last has ended: {stats:#}");
    // In a session, also two at once.
    let script = format!(
        "id=$({hpcrt} session start)\n\
         {hpcrt} session run $id -q -- srun --overlap -l -n 4 ./grep -c hpcrt /proc/self/mountinfo &\n\
         {hpcrt} session run $id -q -- srun --overlap -n 4 ./sh -c 'sleep 1; exit $((SLURM_PROCID + 2))' 2>/dev/null\n\
         echo code $?\nwait $!\necho other $?\n\
         {hpcrt} session run $id -q -n 2 -- srun ./grep x\necho code $?\n{hpcrt} session stop $id\n\
         ls /tmp | grep hpcrt-guests\ntrue"
    );
    let (code, output) = slurm.batch(USER, [4, 8], "/shared/job", &script);
    assert_eq!(code, 0, "{output}");
    for rank in 0..4 {
        let line = output.lines().find(|line| line.starts_with(&format!("{rank}: "))).unwrap();
        assert!(!line.ends_with(": 0"), "no mount of ours: {output}");
    }
    for expected in ["code 5", "other 0", "code 2", "use its own option"] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
    assert_eq!(count(&output, "hpcrt-guests"), 0, "{output}");
    // A job that is cancelled takes its guests along.
    let script = format!("exec {hpcrt} exec -q -- srun ./sh -c 'echo begun; exec sleep 1000'");
    let job = slurm.submit(USER, [4, 4], "/shared/job", &script);
    running(slurm, &job);
    assert!(slurm.on("hpc1", USER, &["scancel", &job]).status().unwrap().success());
    slurm.end(USER, &job);
    nothing_left(slurm.site);
}

/// `srun hpcrt exec -- ./app`: one job, one front end; streams and exit codes are those of the tasks.
fn processes_of_a_step(slurm: &Slurm<'_>, hpcrt: &str) {
    slurm.site.cluster.reset_ops().unwrap();
    let script = format!(
        "srun -l -n 8 {hpcrt} exec -- ./grep -c hpcrt /proc/self/mountinfo\necho code $?\n\
         srun -n 4 {hpcrt} exec -q -- ./grep nothing /dev/null 2>/dev/null\necho code $?\n\
         srun -n 4 {hpcrt} exec -q -- sh -c 'exit $((SLURM_PROCID + 2))' 2>/dev/null\necho code $?\n\
         srun -n 2 --mpi=none {hpcrt} exec -q -- ./grep x 2>&1\n\
         srun -n 2 {hpcrt} exec -q -n 2 -- ./grep x 2>&1\nls /tmp | grep hpcrt\ntrue"
    );
    let (code, output) = slurm.batch(USER, [4, 8], "/shared/job", &script);
    assert_eq!(code, 0, "{output}");
    for rank in 0..8 {
        let line =
            output.lines().find(|line| line.starts_with(&format!("{rank}: ")) && !line.contains("hpcrt:")).unwrap();
        assert!(!line.ends_with(": 0"), "no mount of ours: {output}");
    }
    assert_eq!(count(&output, "ranks of another launcher on 4 hosts"), 1, "one job: {output}");
    for expected in ["code 0", "code 1", "code 5", "srun --mpi=pmi2", "leave hosts, ranks and streams to it"] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
    assert_eq!(count(&output, "hpcrt-guests"), 0, "{output}");
    let opens: u64 = slurm
        .site
        .cluster
        .host_ops()
        .unwrap()
        .iter()
        .filter(|host| host.host != "hpc1")
        .map(|host| host.ops.open)
        .sum();
    assert_eq!(opens, 0, "only the front end's host opened files");
}

/// What `exec` blocks to read it is blocked in no other launcher, not in one that it becomes either, and in no task of one.
fn what_is_started_hears_signals(slurm: &Slurm<'_>, hpcrt: &str) {
    // A shell would unblock all by itself.
    let program = "#!/usr/bin/python3\nimport resource, signal\n\
         print(*signal.pthread_sigmask(0, []), resource.getrlimit(resource.RLIMIT_NOFILE)[0], 'blocked')\n";
    let path = slurm.site.backing("job/mpiexec");
    fs::write(&path, program).unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    let script = format!(
        "ulimit -Sn 77\n{hpcrt} exec -q -- ./mpiexec -n 1 ./grep x\n\
         {hpcrt} exec -q -- ./mpiexec -n 1 /bin/true\nsrun -n 2 {hpcrt} exec -q -- ./mpiexec",
    );
    let (code, output) = slurm.batch(USER, [2, 2], "/shared/job", &script);
    assert_eq!((code, output.as_str()), (0, "77 blocked\n".repeat(4).as_str()));
}

/// An MPI program: its own launcher's PMI stays its own. UCX of this MPICH hangs now and then in `MPI_Finalize` over these links, without
/// hpcrt, too: with two ranks seldom, and then another try ends.
fn mpi(slurm: &Slurm<'_>, hpcrt: &str) {
    let source = slurm.site.backing("job/mpi.c");
    fs::write(
        &source,
        "#include <mpi.h>\n#include <stdio.h>\nint main(int c, char **v) { int r, n, s = 0; MPI_Init(&c, &v); \
        MPI_Comm_rank(MPI_COMM_WORLD, &r); MPI_Comm_size(MPI_COMM_WORLD, &n); r++; \
        MPI_Allreduce(&r, &s, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD); \
        printf(\"rank %d of %d, sum %d\\n\", r - 1, n, s); MPI_Finalize(); return 0; }",
    )
    .unwrap();
    let built = Command::new("mpicc.mpich").arg(&source).arg("-o").arg(slurm.site.backing("job/mpi")).status();
    assert!(built.unwrap().success());
    let ways = [
        format!("{hpcrt} exec -q -- srun -N 2 -n 2 ./mpi"),
        format!("srun -N 2 -n 2 {hpcrt} exec -q -- ./mpi"),
        format!("{hpcrt} exec -q -- mpiexec.hydra -ppn 1 -n 2 ./mpi"),
        format!("mpiexec.hydra -ppn 1 -n 2 {hpcrt} exec -q -- ./mpi"),
    ];
    let tries = "tries() { for i in 1 2 3; do timeout 12 \"$@\" && return; echo again: $*; done; exit 1; }";
    let ways: Vec<_> = ways.iter().map(|way| format!("tries {way}")).collect();
    let (code, output) = slurm.batch(USER, [2, 2], "/shared/job", &format!("{UCX}\n{tries}\n{}", ways.join("\n")));
    assert_eq!(code, 0, "{output}");
    let runs = ways.len() + count(&output, "again: ");
    for rank in 0..2 {
        assert_eq!(count(&output, &format!("rank {rank} of 2, sum 3")), runs, "{output}");
    }
}
