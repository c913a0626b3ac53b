//! `hpcrt exec`: runs a program on many hosts.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smol::{Async, LocalExecutor};

use crate::cli::{Exec, View};
use crate::error::say;
use crate::launch::allocation::{self, Here, Source};
use crate::launch::hostlist::Host;
use crate::launch::loading::{self, Needs, Wishes};
use crate::launch::placement::Placement;
use crate::launch::progress::{Counters, Progress, When};
use crate::launch::root::{Root, Setup};
use crate::launch::run::{self, Job, Outcome};
use crate::launch::stats::{Phases, Stats};
use crate::loader::capture;
use crate::loader::closure::Environment;
use crate::loader::source::Source as Reader;
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
    process::keep_freed_memory();
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
    let job_cwd = flags.cwd.as_ref().map_or(cwd.clone(), |d| cwd.join(d));
    let job = Job {
        ranks,
        per_host,
        program: find(&program[0], &cwd)?,
        argv: program.iter().map(|word| word.as_bytes().to_vec()).collect(),
        env: environment(&flags.env, agent == AgentKind::Local)?,
        cwd: job_cwd.clone().into_os_string().into_vec(),
        stdin: flags.stdin,
        binding: flags.bind,
        label: flags.label,
        gather: flags.gather,
        output: flags.output.clone(),
        timeout: flags.timeout,
        keep_going: flags.keep_going,
        hosts,
    };
    let arguments = program[1..].iter().map(|word| Path::new(&job_cwd).join(word)).collect();
    let wishes = Wishes { prefixes: flags.prefix.clone(), arguments };
    let setup = Setup {
        hosts: job.hosts.iter().map(Host::login).collect(),
        agent,
        fan_out: flags.fan_out,
        min_hosts: flags.min_hosts,
        view: flags.view != View::None && may_share(&job, &wishes),
        store: flags.store.as_ref().map(|d| d.as_os_str().as_bytes().to_vec()),
    };
    let signals = Async::new(signals).op("watch signals")?;
    let tasks = Rc::new(LocalExecutor::new());
    let (source, found) = Reader::start(flags.compress == When::Always)?;
    let env = closure_environment(&job)?;
    let (outcome, phases) = smol::block_on(tasks.run(async {
        let mut phases = Phases { discover: begun.elapsed(), ..Phases::default() };
        let mut progress = Progress::new(if flags.quiet { When::Never } else { flags.progress });
        let counters = Counters { hosts: u32::try_from(setup.hosts.len()).unwrap_or(u32::MAX), ..Counters::default() };
        let starting = Instant::now();
        let show = |up| progress.update(&Counters { hosts_up: up, ..counters }, Instant::now());
        let interrupted = async {
            let signal = run::ended_by(&signals).await;
            Error::new("start the agents", format!("ended by {}", signal.as_str()))
        };
        // The closure is found and read while the agents start, and sent on as soon as they are up.
        let resolving = tasks.spawn(resolve(Arc::clone(&source), &job, flags.view, env, wishes));
        let root = Root::start(Rc::clone(&tasks), &setup, show, interrupted).await?;
        phases.start_agents = starting.elapsed();
        drop(progress);
        let log = tasks.spawn({
            let (root, source) = (Rc::clone(&root), Arc::clone(&source));
            async move {
                source.begun().await;
                root.start_log(source, found).await;
            }
        });
        let outcome = match resolving.await {
            Ok((needs, took)) => {
                phases.resolve = took;
                if !needs.roots.is_empty() {
                    source.begin_log();
                    log.await;
                }
                run::run(&root, &job, needs, &signals).await
            }
            Err(error) => Err(error),
        };
        let leaving = Instant::now();
        root.stop().await;
        phases.cleanup = leaving.elapsed();
        outcome.map(|outcome| {
            phases.load = outcome.loading;
            phases.run = outcome.ran;
            phases.cleanup += outcome.cleanup;
            let sent = outcome.relayed + root.loading().map_or(0, |l| l.sent());
            ((outcome, sent), phases)
        })
    }))?;
    let (outcome, sent) = outcome;
    for warning in source.warnings() {
        eprintln!("hpcrt: {warning}");
    }
    let counted = |counter: &std::sync::atomic::AtomicU64| counter.load(std::sync::atomic::Ordering::Relaxed);
    let stats = Stats {
        hosts: u32::try_from(outcome.placement.shares.len()).unwrap_or(u32::MAX),
        ranks: outcome.placement.ranks(),
        phases,
        files: counted(&source.counters.files),
        bytes_read: counted(&source.counters.bytes),
        bytes_sent: sent,
        cache_hits: counted(&source.counters.hits),
        operations_done: counted(&source.counters.operations),
        exit_code: outcome.code,
        failures: outcome.ends.to_json(&outcome.placement),
        ..Stats::default()
    };
    finish(flags, &outcome, &stats)?;
    Ok(outcome.code)
}

/// The closure on a thread of its own, and how long that took.
fn resolve(
    source: Arc<Reader>,
    job: &Job,
    view: View,
    env: Environment,
    wishes: Wishes,
) -> impl Future<Output = Result<(Needs, Duration)>> + use<> {
    let program = PathBuf::from(OsString::from_vec(job.program.clone()));
    smol::unblock(move || {
        if view == View::None {
            return Ok((Needs::default(), Duration::ZERO));
        }
        let begun = Instant::now();
        let needs = loading::resolve(&source, &source.preload(), &program, &env, &wishes)?;
        Ok((needs, begun.elapsed()))
    })
}

/// Whether the job may load anything from a file system that the hosts share: then the agents prepare for it while they start.
fn may_share(job: &Job, wishes: &Wishes) -> bool {
    let program = Path::new(OsStr::from_bytes(&job.program));
    let listed = ["LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"].into_iter().filter_map(env::var_os);
    let listed: Vec<PathBuf> = listed.flat_map(|list| env::split_paths(&list).collect::<Vec<_>>()).collect();
    let all = std::iter::once(program)
        .chain(wishes.prefixes.iter().chain(&wishes.arguments).chain(&listed).map(PathBuf::as_path));
    all.into_iter().any(capture::is_shared)
}

/// What steers the dynamic linker of the ranks.
fn closure_environment(job: &Job) -> Result<Environment> {
    let var = |name: &str| {
        let found = job.env.iter().find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
        found.map(|value| OsString::from_vec(value.to_vec()))
    };
    Ok(Environment {
        cwd: PathBuf::from(OsString::from_vec(job.cwd.clone())),
        library_path: var("LD_LIBRARY_PATH"),
        preload: var("LD_PRELOAD"),
        path: var("PATH"),
    })
}

fn finish(flags: &Exec, outcome: &Outcome, stats: &Stats) -> Result<()> {
    let _ = write!(io::stderr(), "{}", outcome.ends.table(&outcome.placement));
    let worth_it = stats.hosts > 1 || stats.ranks > 1 || stats.files > 0;
    if !flags.quiet && (worth_it || flags.verbose) {
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
