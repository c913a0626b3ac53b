//! Hosts: names, links, users, commands, ssh, and what jobs leave.

use std::process::Output;

use cluster::{Cluster, Leftover, Spec};

const USER: u32 = 20001;

fn up(name: &str, spec: Spec) -> Option<Cluster> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED {name}: {obstacle}");
        return None;
    }
    Some(Cluster::up(Spec { name: Spec::of(name).name, ..spec }).expect("cluster up"))
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)).trim().to_owned()
}

#[test]
fn a_host_has_its_own_name_files_and_network() {
    let Some(c) = up("t-hosts", Spec { hosts: 3, ..Spec::default() }) else { return };
    let sh = |host: &str, uid, line: &str| text(&c.exec(host, uid, &["sh", "-c", line]).expect("exec"));
    assert_eq!(sh("hpc2", 0, "hostname; id -u; echo $HOME"), "hpc2\n0\n/root");
    assert_eq!(sh("hpc2", USER, "id -un; id -G; echo $HOME; cd; pwd"), "hpcuser\n20001\n/home/hpcuser\n/home/hpcuser");
    assert_eq!(sh("hpc3", 0, "getent hosts hpc1"), "10.77.0.1       hpc1");
    for (host, flavour) in [("hpc1", "common"), ("hpc2", "common"), ("hpc3", "last")] {
        assert_eq!(sh(host, USER, "/shared/hostlocal"), flavour);
    }
    assert_eq!(sh("hpc1", USER, "test -w /dev/fuse && test -r /dev/fuse && echo open to all"), "open to all");
    assert_eq!(sh("hpc1", USER, "echo 1 >/dev/shm/own; echo 2 >/tmp/own; cat /dev/shm/own /tmp/own"), "1\n2");
    assert_eq!(sh("hpc2", 0, "ls /tmp /dev/shm"), "/dev/shm:\n\n/tmp:");
    let code = |argv: &[&str]| c.exec("hpc1", 0, argv).expect("exec").status.code();
    assert_eq!(code(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(code(&["/nowhere/at/all"]), Some(127));
    assert_eq!(c.exec("hpc9", 0, &["true"]).expect("exec").status.code(), Some(126));
}

#[test]
fn the_child_process_is_the_command() {
    use std::os::unix::process::ExitStatusExt;
    let Some(c) = up("t-signal", Spec { hosts: 1, ..Spec::default() }) else { return };
    let mut child = c.command("hpc1", USER, &["sleep", "100"]).spawn().expect("start");
    let cmdline = format!("/proc/{}/cmdline", child.id());
    while std::fs::read(&cmdline).expect("the child lives") != b"sleep\x00100\x00" {
        std::thread::yield_now();
    }
    child.kill().expect("kill");
    assert_eq!(child.wait().expect("wait").signal(), Some(9));
}

#[test]
fn hosts_reach_each_other_by_tcp() {
    let Some(c) = up("t-net", Spec { hosts: 2, rate: Some("1gbit".into()), ..Spec::default() }) else { return };
    let server = "import socket\ns = socket.create_server(('', 5001))\nprint('up', flush=True)\nprint(s.accept()[0].recv(9).decode())";
    let mut command = c.command("hpc1", 0, &["/usr/bin/python3", "-c", server]);
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().expect("start");
    let mut out = std::io::BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    std::io::BufRead::read_line(&mut out, &mut line).expect("read");
    let client = "import socket; socket.create_connection(('hpc1', 5001), 5).sendall(b'hello')";
    assert!(c.exec("hpc2", USER, &["/usr/bin/python3", "-c", client]).expect("exec").status.success());
    std::io::BufRead::read_line(&mut out, &mut line).expect("read");
    assert_eq!(line, "up\nhello\n");
    assert!(child.wait().expect("wait").success());
}

#[test]
fn the_agent_command_works_for_everybody_everywhere() {
    let Some(c) = up("t-agent", Spec { hosts: 2, ..Spec::default() }) else { return };
    let (agent, name) = (c.agent_command(), &c.state().spec.name);
    let mut words: Vec<&str> = agent.split(' ').map(|w| if w == "{host}" { "hpc2" } else { w }).collect();
    words.push("hostname; id -u; echo \"$HPCRT_CLUSTER\"");
    for uid in [0, USER] {
        let output = c.exec("hpc1", uid, &words).expect("exec");
        assert_eq!(text(&output), format!("hpc2\n{uid}\n{name}"));
    }
    for more in ["exec --name NAME hpc2 --user 0 -- id", "up", "down --name NAME", "up-from /tmp/x", "hold NAME"] {
        let more = more.replace("NAME", name);
        let refused: Vec<&str> = std::iter::once(words[0]).chain(more.split(' ')).collect();
        let output = c.exec("hpc1", USER, &refused).expect("exec");
        assert!(!output.status.success(), "the set-uid copy must not do this for a user: {more}");
    }
}

#[test]
fn ssh_works_for_root_and_user() {
    let Some(c) = up("t-ssh", Spec { hosts: 3, sshd: 2, ..Spec::default() }) else { return };
    let config = c.ssh_config().display().to_string();
    for (uid, host) in [(0, "hpc1"), (USER, "hpc2")] {
        let output = c.exec("hpc3", uid, &["ssh", "-F", &config, host, "hostname; id -u"]).expect("exec");
        assert_eq!(text(&output), format!("{host}\n{uid}"));
    }
}

#[test]
fn leftovers_are_found() {
    let Some(c) = up("t-left", Spec { hosts: 2, ..Spec::default() }) else { return };
    assert_eq!(c.leftovers().expect("leftovers"), []);
    let litter = "touch /tmp/litter; setsid env -i sleep 100 >/dev/null 2>&1 &";
    assert!(c.exec("hpc2", USER, &["sh", "-c", litter]).expect("exec").status.success());
    let expected = |l: &Leftover| match l {
        Leftover::Process { host, command, .. } => host == "hpc2" && command.ends_with("sleep 100"),
        Leftover::File { host, path } => host == "hpc2" && path.as_os_str() == "/tmp/litter",
        Leftover::Mount { .. } => false,
    };
    // Until env has become sleep.
    let found = (0..200).map(|_| c.leftovers().expect("leftovers")).find(|l| l.len() == 2 && l.iter().all(expected));
    assert!(found.is_some(), "{:?}", c.leftovers());
    assert!(c.exec("hpc1", 0, &["mount", "-t", "tmpfs", "none", "/mnt"]).expect("exec").status.success());
    let mount = Leftover::Mount { host: "hpc1".into(), point: "/mnt".into() };
    assert!(c.leftovers().expect("leftovers").contains(&mount));
}
