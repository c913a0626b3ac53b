//! `hpcrt exec`: runs a program on many hosts.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use smol::{Async, LocalExecutor};

use crate::cli::Exec;
use crate::error::say;
use crate::launch::allocation::{self, Here, Source};
use crate::launch::hostlist::Host;
use crate::launch::placement::Placement;
use crate::launch::progress::{Counters, Progress, When};
use crate::launch::root::{Root, Setup};
use crate::launch::run::{self, Job, Outcome};
use crate::launch::stats::{Phases, Stats};
use crate::net::wire::control::AgentKind;
use crate::sys::process;
use crate::{Error, Result, error::Context};

/// Variables of this process that mean nothing, or something wrong, on another host or in another launcher's job.
const NOT_PASSED: [&str; 14] = [
    "HOSTNAME",
    "HOST",
    "SSH_CLIENT",
    "SSH_CONNECTION",
    "SSH_TTY",
    "SSH_AUTH_SOCK",
    "XDG_RUNTIME_DIR",
    "XDG_SESSION_ID",
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_FD",
    "PMI_PORT",
];

/// Runs the mode.
///
/// # Errors
/// Whatever keeps the job from running; see [`Outcome::code`] for how it went otherwise.
pub(super) fn run(flags: &Exec, program: &[OsString]) -> Result<u8> {
    let begun = Instant::now();
    let signals = run::catch_signals()?;
    process::raise_nofile();
    let found = allocation::hosts(flags.hosts.as_deref(), flags.hostfile.as_deref().map(text).transpose()?, &Here)?;
    let here = found.source == Source::Localhost;
    let agent = flags.agent.clone().unwrap_or(if here { AgentKind::Local } else { AgentKind::Ssh });
    let (hosts, ranks) = (found.hosts, flags.ranks.map(u32::from));
    let per_host = flags.ppn.map(u32::from);
    // Without hosts, without an allocation and without a number a program runs once, as it does without hpcrt.
    let ranks = if here && per_host.is_none() { ranks.or(Some(1)) } else { ranks };
    let placement = Placement::new(hosts.clone(), ranks, per_host)?;
    if flags.dry_run {
        let _ = write!(io::stdout(), "{}{}", placement.render(), tree(&hosts, flags.fan_out));
        return Ok(0);
    }
    if !flags.quiet {
        placement.notes.iter().for_each(say);
    }
    let cwd = env::current_dir().op("find the working directory")?;
    let job = Job {
        ranks,
        per_host,
        program: find(&program[0], &cwd)?,
        argv: program.iter().map(|word| word.as_bytes().to_vec()).collect(),
        env: environment(&flags.env, agent == AgentKind::Local)?,
        cwd: flags.cwd.as_ref().map_or(cwd.clone(), |d| cwd.join(d)).into_os_string().into_vec(),
        stdin: flags.stdin,
        binding: flags.bind,
        label: flags.label,
        gather: flags.gather,
        output: flags.output.clone(),
        timeout: flags.timeout,
        keep_going: flags.keep_going,
        hosts,
    };
    let setup = Setup {
        hosts: job.hosts.iter().map(Host::login).collect(),
        agent,
        fan_out: flags.fan_out,
        min_hosts: flags.min_hosts,
        store: flags.store.as_ref().map(|d| d.as_os_str().as_bytes().to_vec()),
    };
    let signals = Async::new(signals).op("watch signals")?;
    let tasks = Rc::new(LocalExecutor::new());
    let (outcome, mut phases) = smol::block_on(tasks.run(async {
        let mut phases = Phases { discover: begun.elapsed(), ..Phases::default() };
        let mut progress = Progress::new(if flags.quiet { When::Never } else { flags.progress });
        let counters = Counters { hosts: u32::try_from(setup.hosts.len()).unwrap_or(u32::MAX), ..Counters::default() };
        let starting = Instant::now();
        let show = |up| progress.update(&Counters { hosts_up: up, ..counters }, Instant::now());
        let interrupted = async {
            let signal = run::ended_by(&signals).await;
            Error::new("start the agents", format!("ended by {}", signal.as_str()))
        };
        let root = Root::start(Rc::clone(&tasks), &setup, show, interrupted).await;
        let root = root?;
        phases.start_agents = starting.elapsed();
        drop(progress);
        let outcome = run::run(&root, &job, &signals).await;
        let leaving = Instant::now();
        root.stop().await;
        phases.cleanup = leaving.elapsed();
        outcome.map(|outcome| (outcome, phases))
    }))?;
    phases.run = outcome.ran;
    phases.cleanup += outcome.cleanup;
    finish(flags, &setup, &outcome, phases)?;
    Ok(outcome.code)
}

fn finish(flags: &Exec, setup: &Setup, outcome: &Outcome, phases: Phases) -> Result<()> {
    let stats = Stats {
        hosts: u32::try_from(outcome.placement.shares.len()).unwrap_or(u32::MAX),
        ranks: outcome.placement.ranks(),
        phases,
        exit_code: outcome.code,
        failures: outcome.ends.to_json(&outcome.placement),
        ..Stats::default()
    };
    let _ = write!(io::stderr(), "{}", outcome.ends.table(&outcome.placement));
    let many = setup.hosts.len() > 1 || stats.ranks > 1;
    if !flags.quiet && (many || flags.verbose) {
        let _ = write!(io::stderr(), "{}", stats.summary());
    }
    match &flags.stats {
        Some(path) => fs::write(path, format!("{:#}\n", stats.to_json())).op_on("write the statistics", path),
        None => Ok(()),
    }
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().ok_or_else(|| Error::usage("read the hostfile", "its name is not UTF-8").on(path))
}

/// The program as an absolute path, found as a shell would. A path that does not exist here may exist on the nodes.
fn find(word: &OsStr, cwd: &Path) -> Result<Vec<u8>> {
    if word.as_bytes().contains(&b'/') {
        let path = cwd.join(word);
        let problem = match fs::metadata(&path) {
            Ok(meta) if meta.is_dir() => "it is a directory",
            Ok(meta) if meta.permissions().mode() & 0o111 == 0 => "it is not executable",
            _ => return Ok(path.into_os_string().into_vec()),
        };
        return Err(Error::usage("run", problem).on(path));
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let candidates = env::split_paths(&path).map(|dir| cwd.join(dir).join(word));
    let executable =
        |path: &PathBuf| fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
    match candidates.into_iter().find(executable) {
        Some(path) => Ok(path.into_os_string().into_vec()),
        None => Err(Error::usage("run", "there is no such program in PATH").on(word)),
    }
}

/// The environment of the ranks: this one, without what belongs to this host or to another launcher, and with what `-x` says.
fn environment(set: &[String], here: bool) -> Result<Vec<Vec<u8>>> {
    let passed = |name: &OsStr| here || !NOT_PASSED.iter().any(|n| name == *n);
    let mut vars: Vec<(OsString, OsString)> = env::vars_os().filter(|(name, _)| passed(name)).collect();
    for word in set {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, OsString::from(value)),
            None => match env::var_os(word) {
                Some(value) => (word.as_str(), value),
                None => return Err(Error::usage("pass on a variable", "it is not set here").on(word)),
            },
        };
        if name.is_empty() {
            return Err(Error::usage("set a variable", "its name is empty").on(word));
        }
        vars.retain(|(n, _)| n != name);
        vars.push((name.into(), value));
    }
    let line = |(name, value): (OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
    Ok(vars.into_iter().map(line).collect())
}

/// The control tree as `--dry-run` shows it.
fn tree(hosts: &[Host], fan_out: u32) -> String {
    let count = u32::try_from(hosts.len()).unwrap_or(u32::MAX);
    let mut children = std::collections::BTreeMap::<u32, Vec<u32>>::new();
    for (node, parent) in (1..).zip(crate::launch::root::parents(count, fan_out)) {
        children.entry(parent).or_default().push(node);
    }
    let name = |node: u32| hosts[node as usize - 1].name.as_str();
    let mut text = String::new();
    for (parent, nodes) in children {
        let from = if parent == 0 { "this process" } else { name(parent) };
        let names: Vec<&str> = nodes.into_iter().map(name).collect();
        text += &format!("{from} starts {}\n", crate::launch::fold::fold(&names));
    }
    text
}
