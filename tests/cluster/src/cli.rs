//! The command line: the only place that knows flags.

use std::ffi::OsString;
use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use argh::FromArgs;
use nix::unistd::Uid;

use crate::generate::environment;
use crate::generate::libraries::Libraries;
use crate::generate::modules::Modules;
use crate::leftovers::leftovers;
use crate::slowfs::ops::{HostOps, table};
use crate::slowfs::{self, ask};
use crate::spec::Spec;
use crate::state::{Links, State, directory};
use crate::{down, enter, host, ssh, up};

/// What everybody but root is told.
pub const NEED_ROOT: &str = "test clusters need root, for network namespaces and mounts: skipped";
/// Exit code for "skipped", as test harnesses know it.
const SKIPPED: u8 = 77;

/// Test hosts on one machine: network namespaces with rate-limited links, and a counting, delaying shared file system.
#[derive(FromArgs)]
struct Arguments {
    #[argh(subcommand)]
    command: Subcommand,
}

#[derive(FromArgs)]
#[argh(subcommand)]
enum Subcommand {
    Up(Up),
    Down(Down),
    Exec(Exec),
    Status(Status),
    Ops(OpsOf),
    Leftovers(LeftoversOf),
    SshConfig(SshConfig),
    Gen500(Gen500),
    Pyenv(Pyenv),
}

/// Build a cluster; one of the same name is removed first.
#[derive(FromArgs)]
#[argh(subcommand, name = "up")]
struct Up {
    /// name of the cluster (default: "default")
    #[argh(option, default = "default_name()")]
    name: String,
    /// number of hosts (default: 4)
    #[argh(option, default = "4")]
    hosts: usize,
    /// what host names begin with (default: hpc)
    #[argh(option, default = "String::from(\"hpc\")")]
    prefix: String,
    /// limit of each link, both ways: 1gbit, 100mbit (default: none)
    #[argh(option)]
    rate: Option<String>,
    /// add the ordinary user hpcuser (uid 20001) to the hosts
    #[argh(switch)]
    users: bool,
    /// hosts that run sshd, counted from the first (default: 2)
    #[argh(option, default = "2")]
    sshd: usize,
    /// where the shared file system is mounted on the hosts (default: /shared)
    #[argh(option, default = "PathBuf::from(\"/shared\")")]
    shared: PathBuf,
    /// directory behind it, kept by `down` (default: an empty one, removed by `down`)
    #[argh(option)]
    backing: Option<PathBuf>,
    /// microseconds that an operation keeps the file server busy (default: 50)
    #[argh(option, default = "50.0")]
    service_us: f64,
    /// nanoseconds that a byte keeps the file server busy (default: 1)
    #[argh(option, default = "1.0")]
    ns_per_byte: f64,
    /// nanoseconds per byte that each host's own way to the file server takes (default: 0)
    #[argh(option, default = "0.0")]
    host_ns_per_byte: f64,
    /// microseconds added to each operation, in which operations overlap (default: 200)
    #[argh(option, default = "200.0")]
    latency_us: f64,
}

/// Remove a cluster and everything it left.
#[derive(FromArgs)]
#[argh(subcommand, name = "down")]
struct Down {
    /// name of the cluster
    #[argh(option, default = "default_name()")]
    name: String,
}

/// Run a command on a host: exec [--name NAME] HOST [--user UID] -- COMMAND...; a single word with blanks or shell characters is a line for /bin/sh.
#[derive(FromArgs)]
#[argh(subcommand, name = "exec")]
struct Exec {
    /// name of the cluster
    #[argh(option, default = "default_name()")]
    name: String,
    /// numeric user id (default: the caller's)
    #[argh(option)]
    user: Option<u32>,
    /// name or address of the host
    #[argh(positional)]
    host: String,
}

/// Show what is running.
#[derive(FromArgs)]
#[argh(subcommand, name = "status")]
struct Status {
    /// name of the cluster
    #[argh(option, default = "default_name()")]
    name: String,
    /// as JSON
    #[argh(switch)]
    json: bool,
}

/// Show what reached the shared file system's server.
#[derive(FromArgs)]
#[argh(subcommand, name = "ops")]
struct OpsOf {
    /// name of the cluster
    #[argh(option, default = "default_name()")]
    name: String,
    /// as JSON
    #[argh(switch)]
    json: bool,
    /// set all counters to zero after showing them
    #[argh(switch)]
    reset: bool,
    /// also show so many of the paths with most operations
    #[argh(option, default = "0")]
    paths: usize,
}

/// List processes, mounts and files on the hosts that were not there at `up`; exit code 1 if there are any.
#[derive(FromArgs)]
#[argh(subcommand, name = "leftovers")]
struct LeftoversOf {
    /// name of the cluster
    #[argh(option, default = "default_name()")]
    name: String,
}

/// Print the path of a configuration for `ssh -F`, to be used on a host.
#[derive(FromArgs)]
#[argh(subcommand, name = "ssh-config")]
struct SshConfig {
    /// name of the cluster
    #[argh(option, default = "default_name()")]
    name: String,
}

/// Generate a C program on many shared libraries, or with --python a Python program on many modules. Skipped if already there.
#[derive(FromArgs)]
#[argh(subcommand, name = "gen500")]
struct Gen500 {
    /// directory to fill: driver, d0.., or driver.py and modules
    #[argh(positional)]
    dir: PathBuf,
    /// number of libraries (default: 495)
    #[argh(option, default = "495")]
    libs: usize,
    /// number of RUNPATH directories (default: 10)
    #[argh(option, default = "10")]
    dirs: usize,
    /// size of all libraries or extension modules together (default: 259)
    #[argh(option, default = "259")]
    size_mb: usize,
    /// path of DIR on the hosts, where it differs
    #[argh(option)]
    at: Option<PathBuf>,
    /// instead of libraries, so many Python extension modules and as many .py files (280 are like Pynamic)
    #[argh(option)]
    python: Option<usize>,
}

/// Copy a Python interpreter to DIR and install numpy and scipy there, with a script job.py. Skipped if already there.
#[derive(FromArgs)]
#[argh(subcommand, name = "pyenv")]
struct Pyenv {
    /// directory to fill
    #[argh(positional)]
    dir: PathBuf,
}

/// On the hosts the cluster's own name is in the environment.
fn default_name() -> String {
    std::env::var("HPCRT_CLUSTER").unwrap_or_else(|_| "default".into())
}

/// Runs the program with the arguments `argv`, its own name first.
pub fn run(argv: Vec<OsString>) -> ExitCode {
    let words = argv.get(1..).unwrap_or_default();
    match dispatch(words) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("cluster: {e:#}");
            let error = e.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
            match words.first().and_then(|w| w.to_str()) {
                // As shells have it.
                Some("exec") if error == Some(std::io::ErrorKind::NotFound) => ExitCode::from(127),
                Some("exec") => ExitCode::from(126),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn dispatch(words: &[OsString]) -> Result<ExitCode> {
    let first = words.first().and_then(|w| w.to_str());
    // Started by `up` and by the library; the real user id counts, as everybody may run the set-uid copy.
    if let (Some(internal @ ("hold" | "serve" | "up-from")), true) = (first, Uid::current().is_root()) {
        let Some(words) = words[1..].iter().map(|w| w.to_str()).collect::<Option<Vec<&str>>>() else {
            bail!("{internal}: not UTF-8");
        };
        return member(internal, &words);
    }
    let (own, command) = match words.iter().position(|w| w == "--") {
        Some(cut) if first == Some("exec") => (&words[..cut], &words[cut + 1..]),
        _ => (words, &[][..]),
    };
    let Some(own) = own.iter().map(|w| w.to_str()).collect::<Option<Vec<&str>>>() else {
        bail!("arguments of `cluster` itself must be UTF-8");
    };
    let command_line = match Arguments::from_args(&["cluster"], &own) {
        Ok(arguments) => arguments.command,
        Err(exit) => {
            if exit.status.is_ok() {
                say(exit.output);
                return Ok(ExitCode::SUCCESS);
            }
            eprintln!("{}", exit.output);
            return Ok(ExitCode::from(2));
        }
    };
    let command_line = match command_line {
        Subcommand::Gen500(arguments) => return generated(&arguments.dir, gen500(&arguments)),
        Subcommand::Pyenv(Pyenv { dir }) => return generated(&dir, environment::generate(&std::path::absolute(&dir)?)),
        other => other,
    };
    if !Uid::effective().is_root() {
        eprintln!("{NEED_ROOT}");
        return Ok(ExitCode::from(SKIPPED));
    }
    if !Uid::current().is_root() && !matches!(command_line, Subcommand::Exec(_)) {
        bail!("only root may do that; ordinary users may only run `exec`");
    }
    match command_line {
        Subcommand::Up(arguments) => print_status(&up::up(&spec(arguments))?),
        Subcommand::Down(Down { name }) => {
            let _alone = down::lock(&name)?;
            down::remove(&name)?;
        }
        Subcommand::Exec(Exec { name, user, host }) => enter::exec(&State::load(&name)?, &host, user, command)?,
        Subcommand::Status(Status { name, json: false }) => print_status(&State::load(&name)?),
        Subcommand::Status(Status { name, json: true }) => {
            say(serde_json::to_string_pretty(&State::load(&name)?)?);
        }
        Subcommand::Ops(arguments) => ops(&arguments)?,
        Subcommand::Leftovers(LeftoversOf { name }) => {
            let found = leftovers(&State::load(&name)?)?;
            for leftover in &found {
                say(leftover);
            }
            return Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Subcommand::Gen500(_) | Subcommand::Pyenv(_) => {}
        Subcommand::SshConfig(SshConfig { name }) => {
            let state = State::load(&name)?;
            if state.spec.sshd == 0 {
                bail!("cluster {name:?} was made with --sshd 0");
            }
            say(state.file(ssh::CONFIG).display());
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn gen500(arguments: &Gen500) -> Result<bool> {
    let dir = std::path::absolute(&arguments.dir)?;
    let &Gen500 { libs, dirs, size_mb: megabytes, ref at, python, .. } = arguments;
    match python {
        _ if libs == 0 || dirs == 0 || python == Some(0) => bail!("nothing to generate"),
        Some(count) => Modules { count, megabytes }.generate(&dir),
        None => Libraries { count: libs, dirs, megabytes, at: at.clone() }.generate(&dir),
    }
}

fn generated(dir: &Path, made: Result<bool>) -> Result<ExitCode> {
    say(format_args!("{} {}", if made? { "made" } else { "up to date:" }, dir.display()));
    Ok(ExitCode::SUCCESS)
}

fn member(role: &str, words: &[&str]) -> Result<ExitCode> {
    let read = |path: PathBuf| -> Result<Spec> {
        let text = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(serde_json::from_slice(&text)?)
    };
    match (role, words) {
        ("up-from", [file]) => {
            up::up(&read(file.into())?)?;
        }
        ("hold", [name, host @ ..]) => {
            let spec = read(directory(name)?.join("spec.json"))?;
            host::hold(&spec, host.first().copied())?;
        }
        ("serve", [name, backing, pids @ ..]) => {
            let own = directory(name)?;
            let pids = pids.iter().map(|p| p.parse()).collect::<Result<Vec<i32>, _>>()?;
            slowfs::serve(&read(own.join("spec.json"))?, backing.as_ref(), &own, &pids)?;
        }
        _ => bail!("{role} is not for users"),
    }
    Ok(ExitCode::SUCCESS)
}

fn spec(up: Up) -> Spec {
    let micros = |us: f64| Duration::from_nanos((us.max(0.0) * 1000.0) as u64);
    Spec {
        name: up.name,
        hosts: up.hosts,
        prefix: up.prefix,
        rate: up.rate,
        slower: Vec::new(),
        users: up.users,
        sshd: up.sshd.min(up.hosts),
        shared: up.shared,
        backing: up.backing,
        service: crate::spec::Service {
            per_op: micros(up.service_us),
            ns_per_byte: up.ns_per_byte.max(0.0),
            host_ns_per_byte: up.host_ns_per_byte.max(0.0),
            latency: micros(up.latency_us),
        },
        ..Spec::default()
    }
}

/// Prints; a reader that has gone is no failure.
fn say(text: impl Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn print_status(state: &State) {
    let spec = &state.spec;
    let mut lines = vec![format!("cluster  {} up in {} ms", spec.name, state.up_ms)];
    lines.extend(state.hosts.iter().map(|h| format!("host     {} {} holder {}", h.name, h.address, h.pid)));
    lines.push(match &state.links {
        Links::Limited { qdisc, rate } => format!("links    {rate} each way by {qdisc}"),
        Links::Unlimited => "links    unlimited".into(),
        Links::Refused { rate, cause } => {
            eprintln!(
                "cluster: WARNING: the links are not limited to {rate}, this kernel has no usable qdisc: {cause}"
            );
            format!("links    UNLIMITED: --rate {rate} was asked for")
        }
    });
    let service = spec.service;
    lines.push(format!(
        "shared   {} = {}, {} us + {} ns/byte per operation, latency {} us",
        spec.shared.display(),
        state.backing.display(),
        service.per_op.as_micros(),
        service.ns_per_byte,
        service.latency.as_micros()
    ));
    lines.push(format!("agent    {} exec --name {} {{host}} --", state.file("cluster").display(), spec.name));
    say(lines.join("\n"));
}

fn ops(arguments: &OpsOf) -> Result<()> {
    let own = State::load(&arguments.name)?.file("");
    let hosts: Vec<HostOps> = ask(&own, "ops")?;
    let mut paths: Vec<(String, u64)> = if arguments.paths > 0 { ask(&own, "paths")? } else { Vec::new() };
    paths.truncate(arguments.paths);
    if arguments.reset {
        ask::<()>(&own, "reset")?;
    }
    if arguments.json {
        say(serde_json::json!({ "hosts": hosts, "paths": paths }));
    } else {
        say(table(&hosts));
        for (path, count) in paths {
            say(format_args!("{count:>8} {path}"));
        }
    }
    Ok(())
}
