//! The tree over hosts that are network namespaces: through the agent command and over ssh, as root and as an ordinary user, with and
//! without a route back, with strangers at the ports and with a link that is cut. Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};
use common::network::{ESTABLISHED, LISTEN, in_network, port, sockets};
use common::{Done, GONE, Role, Run, role, until};
use hpcrt::net::auth::SessionKey;
use hpcrt::net::link;
use hpcrt::net::wire::hello::Purpose;

/// Uid of the ordinary user on the hosts.
const USER: u32 = 20001;
fn up(name: &str, hosts: usize, sshd: usize) -> Option<Cluster> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED: {obstacle}");
        return None;
    }
    let cluster = Cluster::up(Spec { hosts, sshd, ..Spec::of(name) }).unwrap();
    let binary = cluster.backing().join("hpcrt");
    fs::copy(env!("CARGO_BIN_EXE_hpcrt"), &binary).unwrap();
    fs::set_permissions(&binary, fs::Permissions::from_mode(0o755)).unwrap();
    Some(cluster)
}

/// `hpcrt exec` on a host (or, without one, on this machine, from where no host has a route back).
fn exec(cluster: &Cluster, from: Option<&str>, uid: u32, agent: &str, flags: &str) -> Run {
    let hosts = cluster.hosts().join(",");
    let words = ["exec", "-q", "--hosts", &hosts, "--agent", agent].into_iter().chain(flags.split_whitespace());
    let command = match from {
        Some(host) => cluster.command(host, uid, &["/shared/hpcrt"].into_iter().chain(words).collect::<Vec<_>>()),
        None => {
            let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
            command.args(words);
            command
        }
    };
    Run::new(command)
}

#[track_caller]
fn nothing_left(cluster: &Cluster) {
    let since = Instant::now();
    loop {
        let left = cluster.leftovers().unwrap();
        if left.is_empty() {
            return;
        }
        let left: Vec<String> = left.iter().map(ToString::to_string).collect();
        assert!(since.elapsed() < GONE, "left: {left:#?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Every rank saw its own host, the working directory is the front end's, and standard input went to rank 0.
#[track_caller]
fn hello(cluster: &Cluster, run: Run) {
    let run = run.arg("--label").program(&["sh", "-c", "hostname; id -u; [ $HPCRT_RANK != 0 ] || wc -c"]);
    let input = vec![b'x'; 3 << 20];
    let done = run.input(input).end().code(0);
    let names: Vec<String> = (0..).zip(cluster.hosts()).map(|(rank, host)| format!("[{rank}] {host}")).collect();
    for name in names {
        assert!(done.lines().contains(&name), "{name}: {}", done.text());
    }
    assert!(done.lines().contains(&"[0] 3145728".to_owned()), "{}", done.text());
    nothing_left(cluster);
}

#[test]
fn through_the_agent_command() {
    for (name, hosts) in [("t-launch-2", 2), ("t-launch-8", 8)] {
        let Some(cluster) = up(name, hosts, 0) else { return };
        let agent = cluster.agent_command();
        for (from, uid) in [(Some("hpc1"), 0), (Some("hpc1"), USER), (None, 0)] {
            for flags in ["", "--fan-out 1"] {
                hello(&cluster, exec(&cluster, from, uid, &agent, flags));
            }
        }
    }
}

#[test]
fn over_ssh() {
    let Some(cluster) = up("t-launch-ssh", 2, 2) else { return };
    let agent = format!("ssh -F {} {{host}}", cluster.ssh_config().display());
    for uid in [0, USER] {
        for flags in ["", "--fan-out 1"] {
            hello(&cluster, exec(&cluster, Some("hpc1"), uid, &agent, flags));
        }
    }
    let done = exec(&cluster, Some("hpc1"), USER, &agent, "").program(&["sh", "-c", "exit 6"]).end().code(6);
    assert!(done.took < Duration::from_secs(10), "{:?}", done.took);
    let done = exec(&cluster, Some("hpc1"), USER, &format!("{agent}x"), "").program(&["true"]).end().code(125);
    assert!(done.err.contains("hpc1x"), "{}", done.err);
    nothing_left(&cluster);
}

/// Starts a job that runs for `seconds` and waits until all its ranks do.
fn long_job(cluster: &Cluster, from: Option<&str>, seconds: u32) -> common::Running {
    // Hosts remember for seconds what a name meant: each job has its own.
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("ready-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let ready = cluster.backing().join(&name);
    fs::create_dir(&ready).unwrap();
    let script = format!("touch /shared/{name}/$HPCRT_RANK; echo started; sleep {seconds}; hostname");
    let run = exec(cluster, from, 0, &cluster.agent_command(), "").program(&["sh", "-c", &script]).start();
    until(|| (fs::read_dir(&ready).unwrap().count() == cluster.hosts().len()).then_some(()));
    run
}

#[test]
fn connections_go_back_over_tcp_where_there_is_a_route() {
    let Some(cluster) = up("t-launch-tcp", 3, 0) else { return };
    let connected = |host| sockets(&cluster, host).iter().filter(|s| s.2 == ESTABLISHED).count();
    let run = long_job(&cluster, Some("hpc1"), 1);
    assert_eq!((connected(1), connected(2)), (1, 1));
    run.end().code(0);
    nothing_left(&cluster);
    let run = long_job(&cluster, None, 1);
    assert_eq!((connected(1), connected(2)), (0, 0), "no route: the agents' pipes are the links");
    run.end().code(0);
    nothing_left(&cluster);
}

/// Addresses that the others cannot reach (of containers, virtual machines, a second network without a route) cost no job its start.
#[test]
fn interfaces_that_lead_nowhere() {
    let Some(cluster) = up("t-launch-iface", 3, 0) else { return };
    let line = "for i in docker0 virbr0 ib9; do n=$((n + 1)); \
        ip link add $i type veth peer name p$i && ip addr add 10.1$n.0.1/24 dev $i && ip link set $i up || exit 1; done";
    for host in ["hpc1", "hpc2"] {
        let made = cluster.exec(host, 0, &["sh", "-c", line]).unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
    for flags in ["", "--fan-out 1"] {
        let run = exec(&cluster, Some("hpc1"), USER, &cluster.agent_command(), flags);
        let done = run.program(&["hostname"]).end().code(0);
        assert_eq!(done.lines(), ["hpc1", "hpc2", "hpc3"], "{}", done.err);
        assert!(done.took < Duration::from_secs(15), "{:?}", done.took);
    }
    nothing_left(&cluster);
}

/// Packets from host to host are dropped without a word, as by firewalls, or are not any more: `ip neigh` does that.
fn neighbours(cluster: &Cluster, change: &str) {
    let addresses: Vec<String> = cluster.state().hosts.iter().map(|host| host.address.clone()).collect();
    for (host, name) in cluster.hosts().iter().enumerate() {
        let others = addresses.iter().enumerate().filter(|(other, _)| *other != host);
        let line = others.map(|(_, address)| format!("ip neigh {} dev eth0;", change.replace("ADDRESS", address)));
        let done = cluster.exec(name, 0, &["sh", "-c", &line.collect::<String>()]).unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
}

const DROP: &str = "replace ADDRESS lladdr 02:00:00:00:00:fe nud permanent";

/// Only the command that starts agents leads from one host to the other, and the program's files take its way before anybody gives up.
#[test]
fn a_network_that_drops_everything() {
    let Some(cluster) = up("t-launch-drop", 14, 0) else { return };
    neighbours(&cluster, DROP);
    let run = exec(&cluster, Some("hpc1"), USER, &cluster.agent_command(), "").program(&["/shared/hostlocal"]);
    let done = run.end().code(0);
    eprintln!("{:?}", done.took);
    assert_eq!(done.lines().len(), 14, "{}", done.err);
    nothing_left(&cluster);
}

/// Who is fed over a connection again is not fed over the pipe as well.
#[test]
fn a_network_that_comes_back() {
    const BYTES: usize = 32 << 20;
    let Some(cluster) = up("t-launch-back", 2, 0) else { return };
    neighbours(&cluster, DROP);
    for name in ["first", "second"] {
        let (mut bytes, at) = (fs::read("/bin/true").unwrap(), cluster.backing().join(name));
        bytes.resize(BYTES, 1);
        fs::write(&at, bytes).unwrap();
        fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let session = |words: &[&str]| {
        let done = Run::new(cluster.command("hpc1", USER, &[&["/shared/hpcrt", "session"], words].concat())).end();
        assert!(done.status.success(), "{}", done.err);
        done
    };
    let (hosts, agent) = (cluster.hosts().join(","), cluster.agent_command());
    let started = session(&["start", "--compress", "never", "--hosts", &hosts, "--agent", &agent]);
    let (id, there) = (started.text().trim().to_owned(), cluster.state().hosts[1].pid);
    let network = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    let agents = role(started.mark(), Role::Agent);
    let agent = agents.into_iter().find(|pid| network(pid.as_raw()) == network(there)).unwrap();
    // Bytes read out of pipes and files: of connections they are received.
    let read = || {
        let counts = fs::read_to_string(format!("/proc/{agent}/io")).unwrap();
        counts.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse::<usize>().unwrap()
    };
    session(&["run", &id, "--", "/shared/first"]);
    assert!(read() > BYTES, "there is no other way");
    neighbours(&cluster, "del ADDRESS");
    until(|| sockets(&cluster, 1).iter().any(|socket| socket.2 == ESTABLISHED).then_some(()));
    let before = read();
    session(&["run", &id, "--", "/shared/second"]);
    let twice = read() - before;
    eprintln!("{twice} bytes came over the pipe as well");
    assert!(twice < BYTES / 2);
    session(&["stop", &id]);
    nothing_left(&cluster);
}

const SILENT: &str = "says nothing";

/// What a stranger may do with a connection.
fn strangers(cluster: &Cluster, at: SocketAddr) -> Vec<(&'static str, Duration)> {
    let closed = |what: &'static str, bytes: &[u8]| {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let since = Instant::now();
        let _ = stream.write_all(bytes);
        let mut heard = Vec::new();
        if let Err(error) = stream.read_to_end(&mut heard) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{what}");
        }
        assert!(heard.len() < 200, "{what} heard {} bytes", heard.len());
        (what, since.elapsed())
    };
    let key = SessionKey::random();
    let wrong_key = smol::block_on(async {
        let stream = smol::net::TcpStream::connect(at).await.unwrap();
        link::connect(stream, &key, 2, Purpose::Control).await
    });
    assert!(wrong_key.is_err(), "another key must be refused");
    let garbage: Vec<u8> = (0..100_000u32).flat_map(|n| (n.wrapping_mul(2_654_435_761)).to_le_bytes()).collect();
    thread::scope(|scope| {
        let silent = scope.spawn(|| in_network(cluster, 2, || closed(SILENT, b"")));
        let mut all = vec![
            closed("garbage", &garbage),
            closed("an oversized length", &[0xff; 64]),
            closed("http", b"GET / HTTP/1.0\r\n\r\n"),
        ];
        all.push(silent.join().unwrap());
        all
    })
}

#[test]
fn strangers_are_refused_and_the_job_goes_on() {
    let Some(cluster) = up("t-launch-strange", 3, 0) else { return };
    let run = long_job(&cluster, Some("hpc1"), 14);
    // The front end and an agent share the first host; an agent is alone on the second.
    let listening = |host: usize| {
        let address = &cluster.state().hosts[host].address;
        let ports = sockets(&cluster, host).into_iter().filter(|s| s.2 == LISTEN).map(|s| port(&s.0));
        ports.map(|port| format!("{address}:{port}").parse().unwrap()).collect::<Vec<SocketAddr>>()
    };
    let places = [listening(0), listening(1)];
    assert_eq!((places[0].len(), places[1].len()), (2, 1));
    let refused: Vec<_> = thread::scope(|scope| {
        let visit = |at: &SocketAddr| {
            let at = *at;
            let cluster = &cluster;
            scope.spawn(move || in_network(cluster, 2, || strangers(cluster, at)))
        };
        let visits: Vec<_> = places.iter().flatten().map(visit).collect();
        visits.into_iter().flat_map(|v| v.join().unwrap()).collect()
    });
    for (what, after) in refused {
        let limit = if what == SILENT { link::HANDSHAKE } else { Duration::ZERO } + Duration::from_secs(3);
        assert!(after < limit, "{what}: closed after {after:?}");
    }
    let mut expected = cluster.hosts();
    expected.extend(["started"; 3].map(str::to_owned));
    assert_eq!(run.end().code(0).lines(), expected);
    nothing_left(&cluster);
}

#[track_caller]
fn lost(done: Done, host: &str, since: Instant, within: Duration) {
    let took = since.elapsed();
    let done = done.code(125).says(host);
    assert!(took < within, "{took:?}: {}", done.err);
}

#[test]
fn a_cut_link_is_an_error_that_names_the_host() {
    let Some(cluster) = up("t-launch-cut", 4, 0) else { return };
    let run = long_job(&cluster, Some("hpc1"), 100);
    let device =
        cluster.exec("hpc3", 0, &["sh", "-c", "ip -o link | grep -v ' lo:' | cut -d: -f2 | cut -d@ -f1"]).unwrap();
    let device = String::from_utf8_lossy(&device.stdout).trim().to_owned();
    let since = Instant::now();
    assert!(cluster.exec("hpc3", 0, &["ip", "link", "set", &device, "down"]).unwrap().status.success());
    // Silence for 15 s, then the end of the job on the others, then waiting for the one that does not answer.
    lost(run.end(), "hpc3: cannot reach the agent", since, Duration::from_secs(30));
    nothing_left(&cluster);
}

#[test]
fn directories_that_cannot_hold_programs() {
    let Some(cluster) = up("t-launch-noexec", 2, 0) else { return };
    let mount = |place: &str, how: &str| {
        let options = format!("remount,{how}");
        assert!(cluster.exec("hpc2", 0, &["mount", "-o", &options, place]).unwrap().status.success(), "{place}");
    };
    let agent = cluster.agent_command();
    mount("/dev/shm", "noexec");
    hello(&cluster, exec(&cluster, Some("hpc1"), 0, &agent, ""));
    mount("/tmp", "noexec");
    let done = exec(&cluster, Some("hpc1"), 0, &agent, "").program(&["true"]).end().code(125);
    assert!(done.err.contains("hpc2: cannot start the agent: no directory there can hold a program"), "{}", done.err);
    mount("/tmp", "exec");
    hello(&cluster, exec(&cluster, Some("hpc1"), USER, &agent, ""));
}

#[test]
fn a_program_that_only_the_nodes_have_or_lack() {
    let Some(cluster) = up("t-launch-where", 2, 0) else { return };
    let agent = cluster.agent_command();
    for host in ["hpc1", "hpc2"] {
        assert!(cluster.exec(host, 0, &["cp", "/bin/true", "/tmp/only-there"]).unwrap().status.success());
    }
    exec(&cluster, None, 0, &agent, "").program(&["/tmp/only-there"]).end().code(0);
    assert!(cluster.exec("hpc2", 0, &["rm", "/tmp/only-there"]).unwrap().status.success());
    let done = exec(&cluster, Some("hpc1"), 0, &agent, "").program(&["/tmp/only-there"]).end().code(125);
    assert!(done.err.contains("hpc2: cannot execute \"/tmp/only-there\": No such file"), "{}", done.err);
    assert!(cluster.exec("hpc1", 0, &["rm", "/tmp/only-there"]).unwrap().status.success());
    nothing_left(&cluster);
}

#[test]
fn a_killed_front_end_leaves_nothing_on_the_hosts() {
    let Some(cluster) = up("t-launch-kill", 4, 0) else { return };
    for from in [Some("hpc1"), None] {
        let run = long_job(&cluster, from, 1000);
        run.signal(nix::sys::signal::Signal::SIGKILL);
        run.end();
        nothing_left(&cluster);
    }
}
