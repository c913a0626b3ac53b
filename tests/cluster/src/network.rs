//! The links: one bridge in a namespace of its own, a veth pair per host, both ends limited.

use std::fs::File;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};

use crate::spec::address;
use crate::state::Links;

/// Joins the hosts (pids of their holders, in order) to the bridge held by `switch`. `slower`: see [`crate::spec::Spec::slower`].
///
/// Leaves the calling process in another network namespace: only for a process that ends soon.
pub(crate) fn build(switch: i32, hosts: &[i32], rate: Option<&str>, slower: &[(usize, String)]) -> Result<Links> {
    enter(switch)?;
    let mut batch =
        String::from("link add br0 type bridge stp_state 0 forward_delay 0\nlink set br0 up\nlink set lo up\n");
    for (i, pid) in (1..).zip(hosts) {
        batch += &format!("link add v{i} type veth peer name eth0 netns {pid}\nlink set v{i} master br0 up\n");
    }
    run("ip", &batch)?;
    let links = match rate {
        None => Links::Unlimited,
        Some(rate) => choose(rate, "v1")?,
    };
    let rate = |i: usize| slower.iter().find(|(host, _)| host + 1 == i).map(|(_, rate)| &**rate);
    limit(&links, (1..=hosts.len()).map(|i| (format!("v{i}"), rate(i))))?;
    for (i, &pid) in (1..).zip(hosts) {
        enter(pid)?;
        run("ip", &format!("link set lo up\naddr add {}/24 dev eth0\nlink set eth0 up\n", address(i)))?;
        limit(&links, [("eth0".into(), rate(i))])?;
    }
    Ok(links)
}

/// The first qdisc that this kernel has.
fn choose(rate: &str, device: &str) -> Result<Links> {
    let mut causes = Vec::new();
    for qdisc in ["tbf", "htb", "netem"] {
        match run("tc", &commands(qdisc, rate, device)) {
            Ok(()) => {
                run("tc", &format!("qdisc del dev {device} root\n"))?;
                return Ok(Links::Limited { qdisc: qdisc.into(), rate: rate.into() });
            }
            Err(e) => causes.push(format!("{qdisc}: {e}")),
        }
    }
    Ok(Links::Refused { rate: rate.into(), cause: causes.join("; ") })
}

/// Devices, with rates of their own.
fn limit<'a>(links: &Links, devices: impl IntoIterator<Item = (String, Option<&'a str>)>) -> Result<()> {
    let Links::Limited { qdisc, rate } = links else { return Ok(()) };
    let lines = devices.into_iter().map(|(device, own)| commands(qdisc, own.unwrap_or(rate), &device));
    run("tc", &lines.collect::<String>())
}

/// A burst of 256 KiB lets whole segmentation-offload packets through; the queue holds 20 ms.
fn commands(qdisc: &str, rate: &str, device: &str) -> String {
    match qdisc {
        "tbf" => format!("qdisc add dev {device} root tbf rate {rate} burst 256kb latency 20ms\n"),
        "htb" => format!(
            "qdisc add dev {device} root handle 1: htb default 1\n\
             class add dev {device} parent 1: classid 1:1 htb rate {rate} burst 256kb\n"
        ),
        _ => format!("qdisc add dev {device} root netem rate {rate}\n"),
    }
}

fn enter(pid: i32) -> Result<()> {
    let ns = File::open(format!("/proc/{pid}/ns/net")).context("open a network namespace")?;
    setns(ns, CloneFlags::CLONE_NEWNET).context("enter a network namespace")
}

/// One `ip` or `tc` for a whole batch: a process per command would cost most of `up`.
fn run(tool: &str, batch: &str) -> Result<()> {
    let mut child = Command::new(tool)
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {tool} (package iproute2)"))?;
    child.stdin.take().context("stdin")?.write_all(batch.as_bytes()).with_context(|| format!("talk to {tool}"))?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("{tool} refused: {}", String::from_utf8_lossy(&output.stderr).trim().replace('\n', " / "));
    }
    Ok(())
}
