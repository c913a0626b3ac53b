//! `hpcrt doctor`: what this node allows, which tier each feature gets, and one remedy per problem.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;

use indicatif::HumanBytes;
use rustix::process::{Resource, getrlimit};
use serde_json::{Value, json};

use crate::error::{Context, Result};
use crate::loader::view::probe::{Capabilities, Obstacle, Tier};
use crate::net::listen;
use crate::sys::memory;
use crate::sys::node::{self, number};
use crate::sys::without::{Ability, VARIABLE, Without};

/// Open files below which a node with many ranks runs out: every rank has two pipes in its agent.
const NOFILE_ENOUGH: u64 = 4096;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Ok,
    /// Jobs run, but something is slower, smaller or missing.
    Limited,
    /// Only some features use it.
    Note,
}

#[derive(Debug)]
struct Check {
    /// Stable: scripts look for it.
    name: &'static str,
    state: State,
    detail: String,
    remedy: Option<String>,
}

impl Check {
    fn new(name: &'static str, state: State, detail: impl Into<String>) -> Check {
        Check { name, state, detail: detail.into(), remedy: None }
    }

    fn or(mut self, remedy: impl Into<String>) -> Check {
        self.remedy = Some(remedy.into());
        self
    }

    /// A probe's verdict; `state` is what its absence means.
    fn probed(name: &'static str, verdict: Result<String, &Obstacle>, state: State) -> Check {
        match verdict {
            Ok(detail) => Check::new(name, State::Ok, detail),
            Err(obstacle) => Check::new(name, state, &obstacle.cause).or(&obstacle.remedy),
        }
    }
}

/// Prints the report.
///
/// # Errors
/// Nothing can be tried because no process can be made, or `HPCRT_WITHOUT` holds an unknown name.
pub(super) fn run(json: bool) -> Result<()> {
    let without = Without::from_env()?;
    // First: it must not have threads beside it.
    let capabilities = Capabilities::probe(&without)?;
    let mut checks = probed(&capabilities, &without);
    checks.extend(directories());
    checks.extend(limits());
    checks.extend(network(&without));
    let tier = capabilities.tier();
    let report = if json { format!("{:#}\n", as_json(&checks, tier)) } else { as_text(&checks, tier) };
    match std::io::stdout().lock().write_all(report.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {}
        written => written.op("write the report")?,
    }
    Ok(())
}

fn probed(found: &Capabilities, without: &Without) -> Vec<Check> {
    let owner = if rustix::process::geteuid().is_root() { "made as root" } else { "made as an ordinary user" };
    let namespaces = found.namespaces.as_ref().map(|()| owner.to_owned());
    let fuse = found.fuse.as_ref().map(|version| format!("mounted in a namespace, protocol {version}"));
    let memfd = found.memfd.as_ref().map(|()| "programs can be executed from memory".to_owned());
    let store = found.store.as_ref().map(|size| format!("a RAM disk for the files of programs, of at most {size}"));
    vec![
        Check::probed("namespaces", namespaces, State::Limited),
        Check::probed("fuse", fuse, State::Limited),
        Check::probed("store", store, State::Limited),
        Check::probed("audit", found.audit.as_ref().cloned(), State::Note),
        Check::probed("memfd", memfd, State::Limited),
        userfaultfd(without),
    ]
}

/// How memory of other nodes (`--memory`) is watched.
fn userfaultfd(without: &Without) -> Check {
    let check = |detail: &str| Check::new("userfaultfd", State::Note, format!("{detail}, for memory of other nodes"));
    if let Some(cause) = without.denies(Ability::Userfaultfd) {
        return check(&format!("not used ({cause})")).or(format!("take uffd out of {VARIABLE}"));
    }
    let found = match node::userfaultfd() {
        Ok(found) => found,
        Err(error) => {
            return check(&format!("cannot be used ({error})"))
                .or("it takes Linux 5.11 with CONFIG_USERFAULTFD, and a container that allows the system call");
        }
    };
    let moves = found.moves && !without.has(Ability::Move);
    let pages = if moves { "pages are moved" } else { "pages are copied, more slowly than Linux 6.8 moves them" };
    if moves && found.of_kernel && !without.has(Ability::KernelFaults) {
        return check(&format!("all faults are told, {pages}"));
    }
    let check = check(&format!("system calls on memory that is away take longer, {pages}"));
    if found.of_kernel {
        check
    } else {
        check.or("sysctl vm.unprivileged_userfaultfd=1 has the kernel tell its faults")
    }
}

fn directories() -> Vec<Check> {
    let runtime = std::env::var("XDG_RUNTIME_DIR").unwrap_or_default();
    let places = [("dev-shm", "/dev/shm"), ("runtime-dir", &*runtime), ("tmp", "/tmp")];
    let check = |(name, path): (&'static str, &str)| {
        if path.is_empty() {
            return Check::new(name, State::Note, "XDG_RUNTIME_DIR is not set");
        }
        match node::directory(Path::new(path)) {
            Err(error) => Check::new(name, State::Note, format!("{path}: {error}")),
            Ok(found) => {
                let kind = if found.memory { "in memory" } else { "on a disk" };
                let exec = if found.exec { "" } else { ", but programs cannot be executed there (noexec)" };
                let detail = format!("{path}: {} free, {kind}{exec}", HumanBytes(found.free));
                Check::new(name, if found.exec { State::Ok } else { State::Note }, detail)
            }
        }
    };
    places.into_iter().map(check).collect()
}

fn limits() -> Vec<Check> {
    let memory = match memory::limit() {
        Some(bytes) => format!("{} by its control group; staged files count", HumanBytes(bytes)),
        None => "no limit below the machine's memory".to_owned(),
    };
    let nofile = getrlimit(Resource::Nofile);
    let most = nofile.maximum.unwrap_or(u64::MAX);
    let open_files =
        format!("{} open files, may be raised to {}", unlimited(nofile.current), unlimited(nofile.maximum));
    let open_files = if most < NOFILE_ENOUGH {
        Check::new("open-files", State::Limited, open_files)
            .or(format!("ask the administrator for a hard limit of {NOFILE_ENOUGH} or more (limits.conf, nofile)"))
    } else {
        Check::new("open-files", State::Ok, open_files)
    };
    let processes = unlimited(getrlimit(Resource::Nproc).current);
    let mounts = number("/proc/sys/fs/mount-max");
    let mounts = mounts.map_or("fs.mount-max is not known here".to_owned(), |n| format!("{n} per namespace"));
    vec![
        Check::new("memory", State::Ok, memory),
        open_files,
        Check::new("processes", State::Ok, format!("{processes} of this user")),
        Check::new("mounts", State::Ok, mounts),
    ]
}

fn unlimited(limit: Option<u64>) -> String {
    limit.map_or("unlimited".to_owned(), |n| n.to_string())
}

fn network(without: &Without) -> Vec<Check> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let ssh = std::env::split_paths(&path).map(|dir| dir.join("ssh")).find(|ssh| ssh.is_file());
    let ssh = match (without.denies(Ability::Ssh), ssh) {
        (Some(cause), _) => {
            Check::new("ssh", State::Limited, format!("{cause} between hosts: the front end starts every agent itself"))
                .or(format!("unset {VARIABLE}"))
        }
        (None, Some(ssh)) => Check::new("ssh", State::Ok, ssh.display().to_string()),
        (None, None) => Check::new("ssh", State::Limited, "there is no ssh in PATH")
            .or("install an ssh client, or start agents with --agent 'CMD {host}'"),
    };
    let listener = listen::listen(false, without);
    let found: Vec<String> = listener.iter().flatten().flat_map(listen::addresses).collect();
    let found: Vec<String> = found
        .iter()
        .map(|a| a.parse().map_or_else(|_| a.clone(), |address: SocketAddr| address.ip().to_string()))
        .collect();
    const PIPES: &str = "other hosts are reached through the launcher's pipes only";
    let addresses = match (&listener, without.denies(Ability::Tcp)) {
        (_, Some(cause)) => {
            Check::new("addresses", State::Limited, format!("{cause}: {PIPES}")).or(format!("unset {VARIABLE}"))
        }
        (Err(error), None) => Check::new("addresses", State::Limited, error.to_string()).or(PIPES),
        (Ok(_), None) if found.is_empty() => {
            Check::new("addresses", State::Limited, "none but the loopback interface's")
                .or("bring up a network interface, or use --agent local")
        }
        (Ok(_), None) => Check::new("addresses", State::Ok, found.join(" ")),
    };
    vec![ssh, addresses]
}

fn word(tier: Tier) -> &'static str {
    match tier {
        Tier::NamespaceFuse => "namespace-fuse",
        Tier::NamespaceBinds => "namespace-binds",
        Tier::Audit => "audit",
        Tier::Plain => "none",
    }
}

fn title() -> (String, String) {
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy().into_owned();
    (host, format!("{} {}", system.sysname().to_string_lossy(), system.release().to_string_lossy()))
}

fn as_text(checks: &[Check], tier: Tier) -> String {
    let (host, kernel) = title();
    let glibc = node::glibc().map_or("no glibc".to_owned(), |version| format!("glibc {version}"));
    let mut out = format!("{host}: {kernel}, {}, {glibc}\n\n", std::env::consts::ARCH);
    for check in checks {
        let mark = match check.state {
            State::Ok => "ok",
            State::Limited => "LIMITED",
            State::Note => "-",
        };
        _ = writeln!(out, "{mark:>8}  {:<12} {}", check.name, check.detail);
        if let Some(remedy) = &check.remedy {
            _ = writeln!(out, "{:>24}remedy: {remedy}", "");
        }
    }
    let means = match tier {
        Tier::NamespaceFuse => "ranks can see captured files under their own paths, names answered by this node (best)",
        Tier::NamespaceBinds => "ranks can see captured files under their own paths, names looked up in the original",
        Tier::Audit => "dynamic linkers are given libraries from this node; everything else is read from where it is",
        Tier::Plain => "ranks read every file from where it is",
    };
    _ = writeln!(out, "\nview: {} - {means}", word(tier));
    out
}

fn as_json(checks: &[Check], tier: Tier) -> Value {
    let (host, kernel) = title();
    let check = |check: &Check| {
        let state = match check.state {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Note => "note",
        };
        json!({"name": check.name, "state": state, "detail": check.detail, "remedy": check.remedy})
    };
    json!({
        "hpcrt": env!("CARGO_PKG_VERSION"),
        "host": host,
        "kernel": kernel,
        "arch": std::env::consts::ARCH,
        "glibc": node::glibc(),
        "view": word(tier),
        "checks": checks.iter().map(check).collect::<Vec<_>>(),
    })
}
