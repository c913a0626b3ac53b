//! What the flags of `exec` and `session run` have in common: where to run, and what.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::cli::Part;
use crate::error::say;
use crate::launch::allocation::{self, Source};
use crate::launch::donors::{self, Donor};
use crate::launch::foreign::Foreign;
use crate::launch::hostlist::{self, Host};
use crate::launch::start_tree::StartCost;
use crate::loader::catalog::as_path;
use crate::net::auth::SessionKey;
use crate::net::wire::control::{AgentKind, View};
use crate::net::wire::files::{Forward, IoHost};
use crate::net::wire::session::{Block, JobSpec};
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

/// Variables, or beginnings of them, by which a launcher tells its processes apart.
const TELLS_APART: [&str; 8] = [
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
    "SLURMD_NODENAME",
    "OMPI_COMM_WORLD_",
    "PMIX_",
];

/// What of this process's environment is passed on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Passed {
    /// What names this host: whoever gets it runs here.
    pub(super) host: bool,
    /// What tells which process of its launcher this is: whoever gets it takes its place.
    pub(super) rank: bool,
}

impl Passed {
    fn has(self, name: &OsStr) -> bool {
        let name = name.as_bytes();
        let of_host = NOT_PASSED.iter().any(|known| known.as_bytes() == name);
        // What begins so is the user's wish.
        let begins = |known: &&str| name.starts_with(known.as_bytes()) && !name.starts_with(b"PMIX_MCA_");
        (self.host || !of_host) && (self.rank || !TELLS_APART.iter().any(begins))
    }
}

/// The hosts, and how agents get there.
pub(super) struct Where {
    pub(super) hosts: Vec<Host>,
    /// The last so many of them only lend memory or write files.
    pub(super) lenders: usize,
    pub(super) agent: AgentKind,
    /// Nobody named hosts: this machine.
    pub(super) here: bool,
}

/// Finds the hosts. `lenders`: hosts that have to be there, too.
pub(super) fn place(
    list: Option<&str>,
    file: Option<&Path>,
    agent: Option<AgentKind>,
    lenders: Vec<Host>,
) -> Result<Where> {
    let text = |path: &Path| match path.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(Error::usage("read the hostfile", "its name is not UTF-8").on(path)),
    };
    let found = allocation::hosts(list, file.map(text).transpose()?.as_deref(), &allocation::Here)?;
    let here = found.source == Source::Localhost;
    let mut hosts = found.hosts;
    let others: Vec<Host> = lenders.into_iter().filter(|one| hosts.iter().all(|host| host.name != one.name)).collect();
    let lenders = others.len();
    hosts.extend(others);
    let agent = agent.unwrap_or_else(|| match found.source {
        Source::Localhost if lenders == 0 => AgentKind::Local,
        // Neither a step nor a login is needed to get where we are.
        Source::Slurm if matches!(&hosts[..], [host] if is_this(&host.name)) => AgentKind::Local,
        Source::Slurm => AgentKind::Srun,
        _ => AgentKind::Ssh,
    });
    Ok(Where { hosts, lenders, agent, here })
}

/// Whether a host of an allocation is the one that this process runs on.
fn is_this(host: &str) -> bool {
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    let name = rustix::system::uname();
    name.nodename().to_str().is_ok_and(|name| short(name) == short(host))
}

/// What it costs to start an agent: as `HPCRT_START_COST` says, else as ssh usually does.
pub(super) fn start_cost(fan_out: NonZeroU32) -> Result<StartCost> {
    match env::var("HPCRT_START_COST") {
        Ok(text) => StartCost::parse(&text, fan_out),
        Err(_) => Ok(StartCost::of_ssh(fan_out)),
    }
}

/// The value of `--min-hosts`, of so many that are named.
pub(super) fn min_hosts(least: Option<u32>, hosts: usize) -> Result<Option<u32>> {
    match least {
        Some(least) if least as usize > hosts => {
            Err(Error::usage("use --min-hosts", format!("{hosts} are named")).on(least.to_string()))
        }
        Some(0) => Err(Error::usage("use --min-hosts", "no job runs on none").on("0")),
        least => Ok(least),
    }
}

/// How a session is set up, from flags of `exec` or `session start`. The last `$lenders` hosts run no ranks.
macro_rules! setup {
    ($flags:expr, $hosts:expr, $lenders:expr, $agent:expr) => {
        $crate::launch::root::Setup {
            hosts: $hosts.iter().map($crate::launch::hostlist::Host::login).collect(),
            lenders: $lenders,
            first_here: false,
            agent: $agent,
            start: $crate::modes::job::start_cost($flags.fan_out)?,
            min_hosts: $crate::modes::job::min_hosts($flags.min_hosts, $hosts.len() - $lenders)?,
            view: $flags.view,
            roots: $flags.roots.get(),
            fresh: $flags.fresh,
            store: $flags.store.as_ref().map(|d| $crate::modes::job::bytes(d)),
            meeting: None,
        }
    };
}
pub(super) use setup;

/// What to run, from flags of `exec` or `session run`. `$passed`: what of this process's environment.
macro_rules! spec {
    ($flags:expr, $parts:expr, $passed:expr) => {
        (|| {
            use $crate::modes::job;
            let here = job::Here::find($flags.cwd.as_deref())?;
            Ok::<_, $crate::Error>($crate::net::wire::session::JobSpec {
                blocks: job::blocks(&here, $parts, &$flags.env, $flags.cwd.is_some(), $passed)?,
                stdin: $flags.stdin,
                binding: $flags.bind,
                label: $flags.label,
                gather: $flags.gather,
                output: $flags.output.as_ref().map(|d| job::bytes(&here.own.join(d))),
                timeout_ms: $flags.timeout.map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
                keep_going: $flags.keep_going,
                view: $flags.view,
                prefixes: job::prefixes(&here, &$flags.prefix, $flags.view)?,
                excludes: job::excludes(&here, $flags.exclude.as_deref(), $flags.view)?,
                report: $flags.report.as_ref().map(|d| job::bytes(&here.own.join(d))),
                stats: $flags.stats.as_ref().map(|d| job::bytes(&here.own.join(d))),
                files: job::files(&here, $flags.async_io, $flags.io_roots.as_deref(), $flags.memory.is_some())?,
                forward: job::forward($flags.async_io, $flags.io_forward.as_deref())?,
                memory: $crate::modes::borrow::memory(
                    $flags.memory.as_deref(),
                    $flags.local_mb,
                    $flags.mirror,
                    $flags.key.as_deref(),
                )?,
                quiet: $flags.quiet,
                verbose: job::verbose($flags.verbose, $flags.quiet)?,
            })
        })()
    };
}
pub(super) use spec;

/// A flag that is for ranks that hpcrt starts itself, if one is given.
macro_rules! not_ours {
    ($flags:expr) => {{
        use $crate::net::wire::control::{Binding, StdinTo};
        let given = [
            ("-n", $flags.ranks.is_some()),
            ("--ppn", $flags.ppn.is_some()),
            ("--stdin", $flags.stdin != StdinTo::First),
            ("--bind", $flags.bind != Binding::None),
            ("--label", $flags.label),
            ("--gather", $flags.gather),
            ("--output", $flags.output.is_some()),
            ("--timeout", $flags.timeout.is_some()),
            ("--keep-going", $flags.keep_going),
            ("--front", $flags.front.is_some()),
        ];
        given.iter().find_map(|(flag, given)| given.then_some(*flag))
    }};
}
pub(super) use not_ours;

/// The descriptor of `--front`; before anything is opened.
pub(super) fn front(number: Option<u32>) -> Result<Option<OwnedFd>> {
    let Some(number) = number else { return Ok(None) };
    let refused =
        |cause: &dyn std::fmt::Display| Error::usage("use the descriptor of --front", cause).on(number.to_string());
    let front = process::inherited(number).map_err(|error| refused(&error))?;
    match rustix::net::sockopt::socket_type(&front) {
        Ok(rustix::net::SocketType::STREAM) => Ok(Some(front)),
        _ => {
            // It may be the one that this is said on.
            std::mem::forget(front);
            Err(refused(&"it is not a stream socket"))
        }
    }
}

/// The trees of `--prefix`.
pub(super) fn prefixes(here: &Here, trees: &[PathBuf], view: View) -> Result<Vec<Vec<u8>>> {
    match trees {
        [tree, ..] if view == View::None => {
            Err(Error::usage("use --prefix", "with --view none nothing is captured").on(tree))
        }
        trees => Ok(trees.iter().map(|tree| bytes(here.own.join(tree))).collect()),
    }
}

/// The words of `--exclude`: names as they are, paths absolute.
pub(super) fn excludes(here: &Here, list: Option<&str>, view: View) -> Result<Vec<Vec<u8>>> {
    if let Some(list) = list.filter(|_| view == View::None) {
        return Err(Error::usage("use --exclude", "with --view none nothing is captured").on(list));
    }
    let words = list.into_iter().flat_map(|list| list.split(',')).map(str::trim).filter(|word| !word.is_empty());
    let whole = |word: &str| if word.contains('/') { bytes(here.own.join(word)) } else { word.into() };
    Ok(words.map(whole).collect())
}

/// The value of `--verbose`.
pub(super) fn verbose(verbose: bool, quiet: bool) -> Result<bool> {
    if verbose && quiet { Err(Error::usage("use --verbose", "--quiet says the opposite")) } else { Ok(verbose) }
}

/// A flag of what only a job with agents of its own can do, if one is given.
pub(super) fn for_agents(spec: &JobSpec) -> Option<&'static str> {
    let given = [
        ("--memory", spec.memory.is_some()),
        ("--async-io", spec.files.is_some()),
        ("--stats", spec.stats.is_some()),
        ("--report", spec.report.is_some()),
    ];
    given.iter().find_map(|(flag, given)| given.then_some(*flag))
}

/// Makes the files of `--stats` and `--report`, so that it is known before the job whether they can be written; what is there stays so far.
pub(super) fn make_papers(spec: &JobSpec) -> Result<()> {
    for (flag, path) in [("write --stats to", &spec.stats), ("write --report to", &spec.report)] {
        let Some(path) = path.as_deref().map(as_path) else { continue };
        let mut options = fs::File::options();
        options
            .write(true)
            .create(true)
            .truncate(false)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
        match options.open(path) {
            // A pipe that nobody reads so far.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {}
            opened => drop(opened.map_err(|error| Error::usage(flag, error).on(path))?),
        }
    }
    Ok(())
}

/// The launcher that is to start the ranks, if the words are one's; its program takes their place. `not_ours`: a flag that it makes
/// impossible.
pub(super) fn launcher(parts: &mut [Part], view: View, not_ours: Option<&'static str>) -> Result<Option<Foreign>> {
    // Without views there is nothing to take over.
    let launcher = match &parts[..] {
        [Part { words, .. }] if view != View::None => Foreign::of(words)?,
        _ => None,
    };
    if let Some(launcher) = &launcher {
        if let Some(word) = not_ours {
            let error = Error::usage("run a launcher's job", "streams and ranks are the launcher's").on(word);
            return Err(error.remedy("use its own option"));
        }
        parts[0].words = launcher.program().to_vec();
    }
    Ok(launcher)
}

/// Becomes the launcher of a program that lies on no shared file system.
pub(super) fn alone(launcher: &Foreign, spec: &JobSpec) -> Result<u8> {
    if let Some(flag) = for_agents(spec) {
        let cause = "the program lies on no shared file system, so the launcher runs it without hpcrt";
        return Err(Error::usage("use it", cause).on(flag).remedy("--prefix DIR has a directory captured"));
    }
    if !spec.quiet {
        let program = launcher.program()[0].display();
        say(format_args!("{program} lies on no shared file system: nothing is taken over"));
    }
    launcher.alone(spec)
}

/// The programs of a job. The flags `-n` and `--ppn` before the first are its own, if it has none; `--hosts` are, if others have some.
pub(super) fn parts(
    parts: &[Part],
    ranks: Option<NonZeroU32>,
    ppn: Option<NonZeroU32>,
    hosts: Option<&str>,
) -> Vec<Part> {
    let several = parts.iter().any(|part| part.flags.hosts.is_some());
    let mut parts = parts.to_vec();
    if let Some(Part { flags, .. }) = parts.first_mut() {
        if flags.ranks.is_none() && flags.ppn.is_none() {
            (flags.ranks, flags.ppn) = (ranks, ppn);
        }
        if several && flags.hosts.is_none() {
            flags.hosts = hosts.map(str::to_owned);
        }
    }
    parts
}

/// The hosts of all programs, where they name any.
pub(super) fn hosts_of(parts: &[Part], hosts: Option<&str>) -> Option<String> {
    let named = parts.iter().filter_map(|part| part.flags.hosts.as_deref());
    let all: Vec<&str> = hosts.into_iter().chain(named.filter(|own| Some(*own) != hosts)).collect();
    (!all.is_empty()).then(|| all.join(","))
}

/// What is asked of the session of each program. `env`: variables for all.
/// `cwd`: the directory of all was named.
pub(super) fn blocks(here: &Here, parts: &[Part], env: &[String], cwd: bool, passed: Passed) -> Result<Vec<Block>> {
    let block = |Part { flags, words }: &Part| {
        Ok(Block {
            ranks: flags.ranks.map(u32::from),
            per_host: flags.ppn.map(u32::from),
            hosts: flags.hosts.clone(),
            program: here.program(&words[0])?,
            argv: words.iter().map(bytes).collect(),
            env: environment(&[env, &flags.env].concat(), passed)?,
            cwd: bytes(flags.cwd.as_ref().map_or_else(|| here.job.clone(), |own| here.job.join(own))),
            cwd_named: cwd || flags.cwd.is_some(),
            umask: process::umask(),
        })
    };
    parts.iter().map(block).collect()
}

/// The directories that relative paths start from.
pub(super) struct Here {
    /// This process's.
    pub(super) own: PathBuf,
    /// The ranks'.
    pub(super) job: PathBuf,
}

impl Here {
    pub(super) fn find(cwd: Option<&Path>) -> Result<Here> {
        let own = env::current_dir().op("find the working directory")?;
        let job = cwd.map_or_else(|| own.clone(), |d| own.join(d));
        Ok(Here { own, job })
    }

    /// The program as an absolute path, found as a shell would. A path that does not exist here may exist on the nodes.
    pub(super) fn program(&self, word: &OsStr) -> Result<Vec<u8>> {
        if word.as_bytes().contains(&b'/') {
            let path = self.own.join(word);
            let problem = match fs::metadata(&path) {
                Ok(meta) if meta.is_dir() => "it is a directory",
                Ok(meta) if meta.permissions().mode() & 0o111 == 0 => "it is not executable",
                _ => return Ok(bytes(path)),
            };
            return Err(Error::usage("run", problem).on(path));
        }
        let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
        let mut candidates = env::split_paths(&path).map(|dir| self.own.join(dir).join(word));
        let executable =
            |path: &PathBuf| fs::metadata(path).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0);
        match candidates.find(executable) {
            Some(path) => Ok(bytes(path)),
            None => Err(Error::usage("run", "there is no such program in PATH").on(word)),
        }
    }
}

/// The environment of the ranks: what of this one is passed on, and what `-x` says.
fn environment(set: &[String], passed: Passed) -> Result<Vec<Vec<u8>>> {
    let mut vars: Vec<(OsString, OsString)> = env::vars_os().filter(|(name, _)| passed.has(name)).collect();
    for (name, value) in variables(set)? {
        vars.retain(|(n, _)| *n != *name);
        vars.push((name.into(), value));
    }
    let line = |(name, value): (OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
    Ok(vars.into_iter().map(line).collect())
}

/// The variables of `-x`.
pub(super) fn variables(set: &[String]) -> Result<Vec<(&str, OsString)>> {
    fn variable(word: &str) -> Result<(&str, OsString)> {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, OsString::from(value)),
            None => match env::var_os(word) {
                Some(value) => (word, value),
                None => return Err(Error::usage("pass on a variable", "it is not set here").on(word)),
            },
        };
        if name.is_empty() {
            return Err(Error::usage("set a variable", "its name is empty").on(word));
        }
        Ok((name, value))
    }
    set.iter().map(|word| variable(word)).collect()
}

/// The hosts on which the job is to start memory servers or I/O workers.
pub(super) fn lenders(memory: Option<&str>, forward: Option<&str>) -> Result<Vec<Host>> {
    let donors = memory.map_or_else(|| Ok(Vec::new()), donors::parse)?;
    let started = |donor| match donor {
        Donor::Started { host, .. } => Some(host),
        Donor::Running { .. } => None,
    };
    let mut hosts: Vec<Host> = donors.into_iter().filter_map(started).collect();
    hosts.extend(forward.map_or_else(|| Ok(Vec::new()), io_hosts)?);
    Ok(hosts)
}

fn io_hosts(list: &str) -> Result<Vec<Host>> {
    let refused = |cause: &str| Error::usage("use --io-forward", cause).on(list);
    let hosts = hostlist::parse(list, &mut || Err(refused("the hosts cannot be read from standard input")))?;
    if hosts.is_empty() { Err(refused("it names no host")) } else { Ok(hosts) }
}

/// The hosts that write what programs wrote.
pub(super) fn forward(wanted: bool, list: Option<&str>) -> Result<Option<Forward>> {
    let Some(list) = list else { return Ok(None) };
    if !wanted {
        return Err(Error::usage("use --io-forward", "files are written asynchronously only with --async-io"));
    }
    let host = |host: &Host| IoHost { name: host.login(), addresses: Vec::new() };
    let hosts = io_hosts(list)?.iter().map(host).collect();
    Ok(Some(Forward { hosts, key: SessionKey::random().0, nonce: [0; 32] }))
}

/// The directories below which programs write asynchronously; none: wherever hosts share a file system.
pub(super) fn files(here: &Here, wanted: bool, list: Option<&str>, memory: bool) -> Result<Option<Vec<Vec<u8>>>> {
    if !wanted {
        let error = Error::usage("use --io-roots", "files are written asynchronously only with --async-io");
        return if list.is_some() { Err(error) } else { Ok(None) };
    }
    if memory {
        return Err(Error::usage("use --async-io", "it cannot be used together with --memory"));
    }
    let words = list.into_iter().flat_map(|list| list.split(',')).map(str::trim).filter(|word| !word.is_empty());
    let real = |word: &str| {
        let path = here.own.join(word);
        // What the kernel calls an open file by.
        fs::canonicalize(&path).map(bytes).map_err(|error| Error::usage("use --io-roots", error).on(path))
    };
    let roots: Vec<_> = words.map(real).collect::<Result<_>>()?;
    match list {
        Some(list) if roots.is_empty() => Err(Error::usage("use --io-roots", "it names no directory").on(list)),
        _ => Ok(Some(roots)),
    }
}

pub(super) fn bytes(text: impl AsRef<OsStr>) -> Vec<u8> {
    text.as_ref().to_owned().into_vec()
}
