//! The network of a cluster's hosts.

use std::fs;
use std::thread;

use cluster::Cluster;
use nix::sched::{CloneFlags, setns};

/// `LISTEN` and `ESTABLISHED` in /proc/net/tcp.
pub const LISTEN: &str = "0A";
pub const ESTABLISHED: &str = "01";

/// Local address, remote address and state of a host's TCP sockets.
pub fn sockets(cluster: &Cluster, host: usize) -> Vec<(String, String, String)> {
    let table = fs::read_to_string(format!("/proc/{}/net/tcp", cluster.state().hosts[host].pid)).unwrap();
    let row = |line: &str| {
        let mut words = line.split_whitespace().skip(1).map(str::to_owned);
        Some((words.next()?, words.next()?, words.next()?))
    };
    table.lines().skip(1).filter_map(row).collect()
}

pub fn port(address: &str) -> u16 {
    u16::from_str_radix(address.rsplit_once(':').unwrap().1, 16).unwrap()
}

/// Runs in the network of a host.
pub fn in_network<T: Send>(cluster: &Cluster, host: usize, work: impl FnOnce() -> T + Send) -> T {
    let net = fs::File::open(format!("/proc/{}/ns/net", cluster.state().hosts[host].pid)).unwrap();
    let inside = || {
        setns(net, CloneFlags::CLONE_NEWNET).unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(inside).join().unwrap())
}
