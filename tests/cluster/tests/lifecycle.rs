//! Coming up and going down, also when interrupted.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use cluster::{Cluster, Spec};

const BINARY: &str = env!("CARGO_BIN_EXE_cluster");

fn skip() -> bool {
    Cluster::obstacle().inspect(|o| eprintln!("{o}")).is_some()
}

fn run(arguments: &[&str]) -> String {
    let output = Command::new(BINARY).args(arguments).output().expect("start");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Processes of the cluster, by the arguments of its holders and server.
fn members(name: &str) -> usize {
    let of_cluster = |line: &[u8]| {
        let words: Vec<&[u8]> = line.split(|&b| b == 0).collect();
        words.len() > 2 && (words[1] == b"hold" || words[1] == b"serve") && words[2] == name.as_bytes()
    };
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    processes.filter(|p| fs::read(p.path().join("cmdline")).is_ok_and(|l| of_cluster(&l))).count()
}

#[test]
fn up_twice_replaces_and_down_removes() {
    if skip() {
        return;
    }
    let name = &Spec::of("t-twice").name;
    for _ in 0..2 {
        let shown = run(&["up", "--name", name, "--hosts", "3", "--rate", "100mbit"]);
        assert!(shown.contains("hpc3 10.77.0.3"), "{shown}");
        assert_eq!(members(name), 5, "three hosts, the switch, the file server");
    }
    run(&["exec", "--name", name, "hpc3", "--", "sh", "-c", "setsid sleep 100 >/dev/null 2>&1 &"]);
    run(&["down", "--name", name]);
    assert_eq!(members(name), 0);
    assert!(!Path::new("/run/hpcrt-cluster").join(name).exists());
    assert!(!Path::new("/var/tmp/hpcrt-cluster").join(name).exists());
}

#[test]
fn clusters_of_different_names_coexist() {
    if skip() {
        return;
    }
    let spec = |name: &str| Spec { hosts: 1, ..Spec::of(name) };
    let first = Cluster::up(spec("t-one")).expect("up");
    let second = Cluster::up(spec("t-two")).expect("up");
    fs::write(second.backing().join("only-here"), "x").expect("write");
    drop(first);
    let output = second.exec("hpc1", 0, &["ls", "/shared"]).expect("exec");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hostlocal\nonly-here\n");
}

#[test]
fn down_cleans_up_after_a_killed_up() {
    if skip() {
        return;
    }
    let name = &Spec::of("t-killed").name;
    for milliseconds in [10, 30, 50, 70, 90] {
        let mut up = Command::new(BINARY).args(["up", "--name", name, "--hosts", "8"]).spawn().expect("start");
        std::thread::sleep(Duration::from_millis(milliseconds));
        up.kill().expect("kill");
        up.wait().expect("wait");
        run(&["down", "--name", name]);
        assert_eq!(members(name), 0, "killed after {milliseconds} ms");
        assert!(!Path::new("/run/hpcrt-cluster").join(name).exists());
    }
}

#[test]
fn ordinary_users_are_told_and_skip() {
    if skip() {
        return;
    }
    // Where everybody may read it. By another process: a child of this one could have it open for writing when it is to be executed.
    let copy = Path::new("/var/tmp").join(Spec::of("cluster-for-users").name);
    assert!(Command::new("cp").arg(BINARY).arg(&copy).status().expect("start").success());
    let output = Command::new(&copy).arg("up").uid(65534).gid(65534).output().expect("start");
    fs::remove_file(copy).expect("remove");
    assert_eq!(output.status.code(), Some(77));
    assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
}

#[test]
fn a_kernel_without_the_qdiscs_is_reported() {
    if skip() {
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let tools = std::env::temp_dir().join(format!("cluster-no-tc-{}", std::process::id()));
    fs::create_dir(&tools).expect("mkdir");
    fs::write(tools.join("tc"), "#!/bin/sh\necho no such qdisc >&2\nexit 2\n").expect("write");
    fs::set_permissions(tools.join("tc"), fs::Permissions::from_mode(0o755)).expect("chmod");
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").expect("PATH"));
    let name = &Spec::of("t-slack").name;
    let arguments = ["up", "--name", name, "--hosts", "1", "--sshd", "0", "--rate", "1gbit"];
    let output = Command::new(BINARY).args(arguments).env("PATH", path).output().expect("start");
    run(&["down", "--name", name]);
    fs::remove_dir_all(&tools).expect("remove");
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("links    UNLIMITED: --rate 1gbit was asked for"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("WARNING"));
}
