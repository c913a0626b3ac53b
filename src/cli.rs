//! The only file that knows flags: argv -> validated [`Options`].
//!
//! argh reads the flags; in front of it we accept `--flag=value`, cut the program's own arguments off (they may be any bytes)
//! and name the nearest option when one is misspelt. Unusable command lines exit with 2.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use argh::{ArgsInfo, CommandInfoWithArgs, FlagInfo, FlagInfoKind, FromArgs};

use crate::launch::foreign::is_launcher;
use crate::launch::progress::When;
use crate::loader::source::Compression;
use crate::net::wire::control::{AgentKind, Binding, StdinTo, View};
use crate::{Error, Result};

/// Runs unmodified programs on clusters: starts them on many hosts, with their libraries and Python files read once and
/// sent down a tree instead of being read by every process.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(
    note = "Try it here: hpcrt exec --hosts a,b,c --agent local -n 6 --label -- hostname",
    error_code(2, "the command line or an input file cannot be used"),
    error_code(125, "hpcrt itself failed, a host was lost, or the time of --timeout was over")
)]
struct Command {
    /// print the version
    #[argh(switch, short = 'V')]
    version: bool,
    #[argh(subcommand)]
    mode: Option<Mode>,
}

#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one, and it is taken apart at once")]
enum Mode {
    Exec(Exec),
    Session(SessionCommand),
    Status(Status),
    Memserver(Memserver),
    Serve(Serve),
    Ioworker(Ioworker),
    Enter(Enter),
    Doctor(Doctor),
    Ldd(Ldd),
    Sdk(Sdk),
    Completions(Completions),
}

/// A mode's flags, made of those that say where to run (`start`), those that say what (`job`), and its own. argh has no such thing.
macro_rules! flags {
    ($(#[$attribute:meta])* $name:ident [start $($more:ident)?] { $($own:tt)* }) => {
        flags! { $(#[$attribute])* $name [$($more)?] { $($own)*
    /// hosts, as n[01-04,7]:2,login1 (":2" slots); - reads them from stdin (default: the allocation's, else this machine)
    #[argh(option)]
    pub hosts: Option<String>,
    /// file of hosts, written as for MPICH, Open MPI, PBS or GNU parallel
    #[argh(option)]
    pub hostfile: Option<PathBuf>,
    /// how to start agents: ssh (default with hosts), srun (default in Slurm), local (all on this machine) or a command with {host}
    #[argh(option)]
    pub agent: Option<AgentKind>,
    /// children of a node in the control tree, at most (default 32)
    #[argh(option, default = "NonZeroU32::MIN.saturating_add(31)")]
    pub fan_out: NonZeroU32,
    /// put each node's store into this directory instead of a private RAM disk
    #[argh(option)]
    pub store: Option<PathBuf>,
    /// seconds after which names that others make on the shared file system are seen (default 5)
    #[argh(option, default = "Duration::from_secs(5)", from_str_fn(seconds))]
    pub fresh: Duration,
    /// start with at least this many hosts when others cannot be reached (default: all)
    #[argh(option)]
    pub min_hosts: Option<u32>,
    /// hosts that read from the shared file system at the same time, the front end's included (default 1)
    #[argh(option, default = "NonZeroU32::MIN")]
    pub roots: NonZeroU32,
    /// send what ranks load late only to the hosts that ask for it, not to all
    #[argh(switch)]
    pub pull: bool,
    /// compress what the nodes send each other: auto (default), always or never
    #[argh(option, default = "Compression::Auto")]
    pub compress: Compression,
    /// progress line: auto (default: on a terminal), always or never
    #[argh(option, default = "When::Auto")]
    pub progress: When,
        } }
    };
    ($(#[$attribute:meta])* $name:ident [job] { $($own:tt)* }) => {
        flags! { $(#[$attribute])* $name [] { $($own)*
    /// ranks in all (default: one per slot)
    #[argh(option, short = 'n')]
    pub ranks: Option<NonZeroU32>,
    /// ranks per host (default: as many as it has slots)
    #[argh(option)]
    pub ppn: Option<NonZeroU32>,
    /// how the program sees its captured files: auto (default), namespace, audit or none
    #[argh(option, default = "View::Auto")]
    pub view: View,
    /// capture this directory tree too (repeatable)
    #[argh(option)]
    pub prefix: Vec<PathBuf>,
    /// never capture these, separated by commas: file names (gcc) or paths with all below them
    #[argh(option)]
    pub exclude: Option<String>,
    /// take the programs from this file, one a line: [-n N] [--ppn N] [--hosts LIST] [-x VAR=VALUE] [--cwd DIR] PROGRAM [ARGS]
    #[argh(option)]
    pub configfile: Option<PathBuf>,
    /// set or pass on an environment variable: VAR=VALUE or VAR (repeatable)
    #[argh(option, short = 'x')]
    pub env: Vec<String>,
    /// working directory of the ranks (default: this one)
    #[argh(option)]
    pub cwd: Option<PathBuf>,
    /// who reads hpcrt's standard input: 0 (rank 0, default), all or none
    #[argh(option, default = "StdinTo::First")]
    pub stdin: StdinTo,
    /// pin ranks to processors: none (default), compact or spread
    #[argh(option, default = "Binding::None")]
    pub bind: Binding,
    /// prefix every line with its rank
    #[argh(switch)]
    pub label: bool,
    /// collect output and show equal output once, with the set of ranks
    #[argh(switch)]
    pub gather: bool,
    /// write each rank's output to files in this directory
    #[argh(option)]
    pub output: Option<PathBuf>,
    /// end the job after this many seconds (default: never)
    #[argh(option, from_str_fn(seconds))]
    pub timeout: Option<Duration>,
    /// let the other ranks go on when one fails
    #[argh(switch)]
    pub keep_going: bool,
    /// memory of other hosts, HOST:20G,... (n[2-5]:20G), or of servers that run there, HOST[:PORT]: takes what exceeds --local-mb
    #[argh(option)]
    pub memory: Option<String>,
    /// memory that each program may keep on its own node, in MB (with --memory; default: its share of what cgroup or Slurm allow)
    #[argh(option)]
    pub local_mb: Option<u32>,
    /// keep everything with two of the memory servers: when one is lost the program goes on (with --memory)
    #[argh(switch)]
    pub mirror: bool,
    /// file with the key of memory servers that run (with --memory; default: ~/.config/hpcrt/key)
    #[argh(option)]
    pub key: Option<PathBuf>,
    /// gather the small writes of programs and write them in large pieces, from a process of their own (docs/ASYNC-IO.md)
    #[argh(switch)]
    pub async_io: bool,
    /// where, directories separated by commas (with --async-io; default: on network file systems and FUSE)
    #[argh(option, arg_name = "list")]
    pub io_roots: Option<String>,
    /// hosts that do it in the place of those that run ranks (with --async-io)
    #[argh(option, arg_name = "hosts")]
    pub io_forward: Option<String>,
    /// talk to the job's rank 0 over this connected stream socket (docs/COLLECTIVES.md)
    #[argh(option, arg_name = "fd")]
    pub front: Option<u32>,
    /// write a JSON object of what was done, in seconds, bytes and operations
    #[argh(option)]
    pub stats: Option<PathBuf>,
    /// draw when each host did what, from its agent's start to its last rank's end; FILE ends in .svg or .html
    #[argh(option, from_str_fn(drawing))]
    pub report: Option<PathBuf>,
    /// no summary and no progress
    #[argh(switch, short = 'q')]
    pub quiet: bool,
    /// the summary for the smallest jobs, too
    #[argh(switch, short = 'v')]
    pub verbose: bool,
    /// the program and its arguments (cut off before argh sees them: they may be any bytes)
    #[argh(positional, greedy, arg_name = "-- program")]
    #[allow(dead_code, reason = "stands in the usage line")]
    words: Vec<String>,
        } }
    };
    ($(#[$attribute:meta])* $name:ident [] { $($fields:tt)* }) => {
        $(#[$attribute])*
        pub struct $name { $($fields)* }
    };
}

flags! {
/// Run a program on many hosts, or here.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(
    subcommand,
    name = "exec",
    example = "Four ranks on each of eight hosts, over ssh:\n  {command_name} --hosts 'n[01-08]' --ppn 4 -- ./app input.dat",
    example = "Try it on this machine; every name is a host of its own:\n  {command_name} --hosts a,b,c --agent local -n 6 --label -- hostname",
    example = "See where ranks would run, without running them:\n  {command_name} --hosts 'n[01-08]' --ppn 4 --dry-run -- ./app",
    example = "Two programs as one job, the second on what the first leaves free:\n  {command_name} --hosts 'n[01-08]:4' -- -n 31 ./solver : -n 1 ./monitor",
    example = "Inside an allocation (Slurm, PBS, LSF, SGE, Flux) the hosts are found:\n  {command_name} -- python3 job.py",
    note = "Without hosts and without an allocation the program runs on this machine.\nAn argument of a program that is \":\" itself stands in a --configfile, in quotes.\nExit code: that of the first rank that failed by itself (128+signal for a killed one); the highest with --keep-going."
)]
Exec [start job] {
    /// print the map of ranks and the tree, and run nothing
    #[argh(switch)]
    pub dry_run: bool,
}}

/// Flags of one of several programs.
#[derive(FromArgs, ArgsInfo, Debug, Clone, Default)]
pub struct PartFlags {
    /// ranks of this program
    #[argh(option, short = 'n')]
    pub ranks: Option<NonZeroU32>,
    /// ranks per host
    #[argh(option)]
    pub ppn: Option<NonZeroU32>,
    /// hosts of this program
    #[argh(option)]
    pub hosts: Option<String>,
    /// a variable for this program
    #[argh(option, short = 'x')]
    pub env: Vec<String>,
    /// its working directory
    #[argh(option)]
    pub cwd: Option<PathBuf>,
}

/// One program of a job: its own flags, and argv.
#[derive(Debug, Clone)]
pub struct Part {
    pub flags: PartFlags,
    pub words: Vec<OsString>,
}

/// Keep hosts and files warm between jobs.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(
    subcommand,
    name = "session",
    example = "Bring hosts up once, and run many jobs on them at once or one after the other:\n  id=$({command_name} start --hosts 'n[01-08]')\n  {command_name} run $id -- ./app\n  {command_name} stop $id"
)]
pub struct SessionCommand {
    #[argh(subcommand)]
    act: SessionAct,
}

#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one, and it is taken apart at once")]
enum SessionAct {
    Start(SessionStart),
    Run(SessionRun),
    List(SessionList),
    Stop(SessionStop),
}

flags! {
/// Bring hosts up and leave them so; prints the session's name.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "start")]
SessionStart [start] {
    /// end the session when nothing ran in it for this many seconds (default: never)
    #[argh(option, from_str_fn(seconds))]
    pub idle: Option<Duration>,
    /// how programs will see their captured files: auto (default), namespace or audit
    #[argh(option, default = "View::Auto")]
    pub view: View,
}}

flags! {
/// Run a program on a session's hosts; the session's name comes first.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "run")]
SessionRun [job] {
    /// the session
    #[argh(positional)]
    pub session: String,
}}

/// Show this user's sessions on this host.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "list")]
pub struct SessionList {}

/// End a session, and the jobs that run in it.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "stop")]
pub struct SessionStop {
    /// the session
    #[argh(positional)]
    pub session: String,
}

/// Show what runs: all of this user's jobs and sessions on this host, or everything about one.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(
    subcommand,
    name = "status",
    example = "What runs, and one of them every second:\n  {command_name}\n  {command_name} --watch x1f0c8a2b",
    note = "With an ID every host is asked; those that do not answer within two seconds are named."
)]
pub struct Status {
    /// print JSON
    #[argh(switch)]
    pub json: bool,
    /// with an ID: also the process of every rank
    #[argh(switch)]
    pub pids: bool,
    /// show it again every second until it is over
    #[argh(switch)]
    pub watch: bool,
    /// a job or session
    #[argh(positional)]
    pub id: Option<String>,
}

/// Lend this node's memory to programs on other nodes, until it is ended.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(
    subcommand,
    name = "memserver",
    example = "Lend 20 GB; programs that use them are started with --memory HOST:20000:\n  {command_name} --mb 20000",
    note = "Prints the addresses at which it can be reached. Pages that are zero take nothing of what is lent."
)]
pub struct Memserver {
    /// memory to lend, in MB
    #[argh(option)]
    pub mb: NonZeroU32,
    /// address and port (default: 0.0.0.0:20000; port 0: any that is free)
    #[argh(option, default = "SocketAddr::from(([0, 0, 0, 0], 20000))")]
    pub listen: SocketAddr,
    /// file with the key that clients must have (default: ~/.config/hpcrt/key, made where it is missing)
    #[argh(option)]
    pub key: Option<PathBuf>,
}

/// Write what the programs of a job on this host left in shared memory; started by its agent.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "ioworker")]
pub struct Ioworker {
    /// write what workers of other hosts send
    #[argh(switch)]
    pub forward: bool,
}

/// Be a node's agent (started by exec).
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "serve")]
pub struct Serve {
    /// be nothing: only say, by exit code 0, that this binary has this hash
    #[argh(option, arg_name = "hash")]
    pub same: Option<String>,
    /// go to the front end that wrote this file; -: it is told on standard input
    #[argh(option, arg_name = "file")]
    pub join: Option<PathBuf>,
    /// lend memory as the agent says that started this
    #[argh(switch)]
    pub lend: bool,
}

/// Become a program of a job (put in front of it by exec where another launcher starts it).
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "enter")]
pub struct Enter {
    /// the job, as exec names it
    #[argh(positional)]
    pub job: String,
    /// the program and its arguments (cut off before argh sees them)
    #[argh(positional, greedy, arg_name = "-- program")]
    #[allow(dead_code, reason = "stands in the usage line")]
    words: Vec<String>,
}

/// Show what this node allows: how programs will see their files, limits, addresses, and a remedy for every problem.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(
    subcommand,
    name = "doctor",
    note = "HPCRT_WITHOUT=userns,fuse,memfd,exec,ram,tcp,ssh,uffd,uffd-kernel,uffd-move,shared,pace takes abilities away, to try a fallback or to work around a fault."
)]
pub struct Doctor {
    /// print JSON
    #[argh(switch)]
    pub json: bool,
}

/// Show what a program loads: paths, why there, bytes, thread-local storage, what is missing.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "ldd")]
pub struct Ldd {
    /// print JSON
    #[argh(switch)]
    pub json: bool,
    /// the program
    #[argh(positional)]
    pub program: PathBuf,
}

/// Write what programs that talk through hpcrt are written with: LIBI and DLM for C, examples for C, shells and Python.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "sdk")]
pub struct Sdk {
    /// where to; made if it is not there
    #[argh(positional)]
    pub directory: PathBuf,
}

/// Print a completion script for a shell: bash, zsh, fish or nushell.
#[derive(FromArgs, ArgsInfo, Debug)]
#[argh(subcommand, name = "completions")]
pub struct Completions {
    /// the shell
    #[argh(positional)]
    pub shell: String,
}

/// A command line understood.
#[derive(Debug)]
pub enum Options {
    /// Run programs: the flags of all, and each with its own.
    Exec(Box<Exec>, Vec<Part>),
    SessionStart(SessionStart),
    /// Run programs in a session: the flags of all, and each with its own.
    SessionRun(Box<SessionRun>, Vec<Part>),
    SessionList,
    /// The session to stop.
    SessionStop(String),
    Status(Status),
    Memserver(Memserver),
    Serve(Serve),
    Ioworker(Ioworker),
    /// The job, and argv.
    Enter(String, Vec<OsString>),
    Doctor(Doctor),
    Ldd(Ldd),
    /// Write the files for programs into this directory.
    Sdk(PathBuf),
    /// The completion script, ready to print.
    Completions(String),
    /// Help was asked for, or the version.
    Help(String),
}

macro_rules! words {
    ($type:ident: $($word:literal => $variant:ident),+) => {
        impl std::str::FromStr for $type {
            type Err = String;
            fn from_str(text: &str) -> std::result::Result<Self, String> {
                match text {
                    $($word => Ok($type::$variant),)+
                    _ => Err(format!("{text:?} is none of {}", [$($word),+].join(", "))),
                }
            }
        }
    };
}
words!(View: "auto" => Auto, "namespace" => Namespace, "audit" => Audit, "none" => None);
words!(StdinTo: "0" => First, "all" => All, "none" => None);
words!(Binding: "none" => None, "compact" => Compact, "spread" => Spread);
words!(Compression: "auto" => Auto, "always" => Always, "never" => Never);
words!(When: "auto" => Auto, "always" => Always, "never" => Never);

impl std::str::FromStr for AgentKind {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text.trim() {
            "" => Err("the command is empty".to_owned()),
            "local" => Ok(AgentKind::Local),
            "ssh" => Ok(AgentKind::Ssh),
            "srun" => Ok(AgentKind::Srun),
            command => Ok(AgentKind::Command(command.to_owned())),
        }
    }
}

fn drawing(text: &str) -> std::result::Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(|e| e.to_str()) {
        Some("svg" | "html") => Ok(path),
        _ => Err(format!("{text:?} ends neither in .svg nor in .html")),
    }
}

fn seconds(text: &str) -> std::result::Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|s: f64| Duration::try_from_secs_f64(s).ok())
        .ok_or(format!("{text:?} is not a number of seconds"))
}

/// Reads a command line (without the program name).
///
/// # Errors
/// What cannot be understood, with the nearest option where one is close.
pub fn parse(mut args: Vec<OsString>) -> Result<Options> {
    let is = |at: usize, word: &str| args.get(at).is_some_and(|a| a == word);
    let program = if is(0, "exec") {
        cut_program(&mut args, 1, 0, &Exec::get_args_info())
    } else if is(0, "session") && is(1, "run") {
        cut_program(&mut args, 2, 1, &SessionRun::get_args_info())
    } else if is(0, "enter") {
        cut_program(&mut args, 1, 1, &Enter::get_args_info())
    } else {
        Vec::new()
    };
    let words = flags_of(args)?;
    let (known, _) = mode_of(&words);
    let is_switch = |flag: &str| known.iter().any(|f| f.long == flag && matches!(f.kind, FlagInfoKind::Switch));
    if let Some(word) = words.iter().find(|word| word.split_once('=').is_some_and(|(flag, _)| is_switch(flag))) {
        let error = Error::usage("understand the command line", "this flag takes no value").on(word);
        return Err(error.remedy("leave it out to leave it off"));
    }
    let words = cut_values(words);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mode = match Command::from_args(&["hpcrt"], &words) {
        Ok(Command { version: true, .. }) => {
            return Ok(Options::Help(concat!("hpcrt ", env!("CARGO_PKG_VERSION"), "\n").to_owned()));
        }
        Ok(Command { mode: Some(mode), .. }) => mode,
        Ok(Command { mode: None, .. }) => return Err(misunderstood(&words, "no mode is named")),
        Err(exit) if exit.status.is_ok() => return Ok(Options::Help(exit.output)),
        Err(exit) => return Err(misunderstood(&words, &exit.output)),
    };
    match mode {
        Mode::Session(SessionCommand { act }) => Ok(match act {
            SessionAct::Start(flags) => Options::SessionStart(flags),
            SessionAct::Run(flags) => {
                let parts =
                    parts(program, flags.configfile.as_deref(), "hpcrt session run ID [FLAGS] -- PROGRAM [ARGS]")?;
                Options::SessionRun(Box::new(flags), parts)
            }
            SessionAct::List(SessionList {}) => Options::SessionList,
            SessionAct::Stop(flags) => Options::SessionStop(flags.session),
        }),
        Mode::Exec(flags) => {
            let parts = parts(program, flags.configfile.as_deref(), "hpcrt exec [FLAGS] -- PROGRAM [ARGS]")?;
            Ok(Options::Exec(Box::new(flags), parts))
        }
        Mode::Status(Status { pids: true, id: None, .. }) => {
            Err(Error::usage("show processes", "--pids is for one job").remedy("hpcrt status --pids ID"))
        }
        Mode::Status(flags) => Ok(Options::Status(flags)),
        Mode::Memserver(flags) => Ok(Options::Memserver(flags)),
        Mode::Serve(flags) => Ok(Options::Serve(flags)),
        Mode::Ioworker(flags) => Ok(Options::Ioworker(flags)),
        Mode::Enter(_) if program.is_empty() => Err(Error::usage("enter a session", "no program is named")),
        Mode::Enter(flags) => Ok(Options::Enter(flags.job, program)),
        Mode::Doctor(doctor) => Ok(Options::Doctor(doctor)),
        Mode::Ldd(ldd) => Ok(Options::Ldd(ldd)),
        Mode::Sdk(sdk) => Ok(Options::Sdk(sdk.directory)),
        Mode::Completions(completions) => script(&completions.shell).map(Options::Completions),
    }
}

/// The words of a command line, without the program's.
fn flags_of(words: Vec<OsString>) -> Result<Vec<String>> {
    let text = |word: OsString| {
        word.into_string().map_err(|word| Error::usage("read the command line", format!("{word:?} is not UTF-8")))
    };
    words.into_iter().map(text).collect()
}

/// `--flag=value` as two words.
fn cut_values(words: Vec<String>) -> Vec<String> {
    let cut = |word: String| match word.split_once('=') {
        Some((flag, value)) if flag.starts_with("--") => vec![flag.to_owned(), value.to_owned()],
        _ => vec![word],
    };
    words.into_iter().flat_map(cut).collect()
}

/// The flags of the mode that these words choose, and its name as it is typed.
fn mode_of(words: &[impl AsRef<str>]) -> (&'static [FlagInfo<'static>], String) {
    let (mut flags, mut commands, mut name): (&[_], _, _) =
        (&[], Command::get_args_info().commands, "hpcrt".to_owned());
    for word in words {
        let Some(at) = commands.iter().position(|command| command.name == word.as_ref()) else { break };
        let chosen = commands.swap_remove(at);
        name = format!("{name} {}", chosen.name);
        (flags, commands) = (chosen.command.flags, chosen.command.commands);
    }
    (flags, name)
}

/// The programs: the words after `--`, cut at `:`, or the lines of a file.
fn parts(words: Vec<OsString>, file: Option<&Path>, usage: &'static str) -> Result<Vec<Part>> {
    let nothing = || Err(Error::usage("run", "no program is named").remedy(usage));
    match file {
        Some(_) if !words.is_empty() => {
            Err(Error::usage("run", "programs are named on the command line and in --configfile")
                .remedy("leave one out"))
        }
        Some(file) => {
            let text = std::fs::read_to_string(file);
            let text = text.map_err(|error| Error::usage("read --configfile", error).on(file))?;
            // A `:` of its own may end a line.
            let is_own = |before: &&str| before.is_empty() || before.ends_with([' ', '\t']);
            let lines = text.lines().map(str::trim);
            let lines = lines.map(|line| line.strip_suffix(':').filter(is_own).map_or(line, str::trim_end));
            let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
            let parts: Vec<Part> = lines.map(|line| part(split_line(line)?, true)).collect::<Result<_>>()?;
            if parts.is_empty() { nothing() } else { Ok(parts) }
        }
        None if words.is_empty() => nothing(),
        None => {
            // A launcher's own programs are its business.
            let several = !is_launcher(&words[0]) && words.iter().any(|word| word == ":");
            if !several {
                return Ok(vec![part(words, false)?]);
            }
            words.split(|word| word == ":").map(|words| part(words.to_vec(), true)).collect()
        }
    }
}

/// One program. `flags`: it may have some of its own; who has a single program has given them before.
fn part(mut words: Vec<OsString>, flags: bool) -> Result<Part> {
    let line = || words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let given = line();
    let program =
        if flags { cut_program(&mut words, 0, 0, &PartFlags::get_args_info()) } else { std::mem::take(&mut words) };
    if program.is_empty() {
        return Err(Error::usage("run", "one of several programs is missing").on(given));
    }
    let words = cut_values(flags_of(words)?);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let flags = PartFlags::from_args(&["hpcrt"], &words).map_err(|exit| {
        let cause = exit.output.lines().next().unwrap_or_default().to_owned();
        Error::usage("understand the flags of a program", cause).on(given)
    })?;
    Ok(Part { flags, words: program })
}

/// The words of a line; quotes hold blanks together.
fn split_line(line: &str) -> Result<Vec<OsString>> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    for c in line.chars() {
        match (c, quote) {
            (_, Some(open)) if c == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (' ' | '\t', None) => words.extend(word.take().map(OsString::from)),
            _ => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err(Error::usage("read --configfile", "a quotation mark is not closed").on(line));
    }
    words.extend(word.map(OsString::from));
    Ok(words)
}

/// Takes the program and its arguments off the end: after `--`, or from the first word that is neither a flag, nor a flag's value, nor
/// one of the `own` words that come first.
fn cut_program(args: &mut Vec<OsString>, mut at: usize, mut own: usize, mode: &CommandInfoWithArgs) -> Vec<OsString> {
    let takes_value = |word: &[u8]| {
        mode.flags.iter().any(|f| {
            matches!(f.kind, FlagInfoKind::Option { .. })
                && (f.long.as_bytes() == word || f.short.is_some_and(|c| word == format!("-{c}").as_bytes()))
        })
    };
    while at < args.len() {
        let word = args[at].as_bytes();
        match word {
            b"--" => {
                let program = args.split_off(at + 1);
                args.truncate(at);
                return program;
            }
            b"help" => return Vec::new(),
            _ if word.starts_with(b"-") => at += 1 + usize::from(takes_value(word)),
            _ if own > 0 => (at, own) = (at + 1, own - 1),
            _ => return args.split_off(at),
        }
    }
    Vec::new()
}

/// argh's complaint as one sentence, with the nearest option when a flag is unknown.
fn misunderstood(words: &[&str], output: &str) -> Error {
    let said = output.lines().filter(|line| !line.starts_with("Run ")).flat_map(str::split_whitespace);
    let error = Error::usage("understand the command line", said.collect::<Vec<_>>().join(" "));
    let (flags, name) = mode_of(words);
    if flags.is_empty() {
        return error.remedy(if name == "hpcrt" { "hpcrt --help lists the modes".into() } else { name + " --help" });
    }
    let near = words.iter().filter(|w| w.starts_with("--")).find_map(|word| {
        let flags = flags.iter().filter(|f| !f.hidden);
        let best = flags.map(|f| (distance(f.long, word), f.long)).min()?;
        (1..=2).contains(&best.0).then_some(best.1)
    });
    match near {
        Some(flag) => error.remedy(format!("did you mean {flag}?")),
        None => error.remedy(name + " --help"),
    }
}

/// Edits (insert, delete, replace) between two words.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let next = (diagonal + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], next);
        }
    }
    row[b.len()]
}

fn script(shell: &str) -> Result<String> {
    use argh_complete::{Generator, bash::Bash, fish::Fish, nushell::Nushell, zsh::Zsh};
    let info = Command::get_args_info();
    Ok(match shell {
        "bash" => Bash::generate("hpcrt", &info),
        "zsh" => Zsh::generate("hpcrt", &info),
        "fish" => Fish::generate("hpcrt", &info),
        "nushell" => Nushell::generate("hpcrt", &info),
        other => return Err(Error::usage("complete for", format!("{other:?} is none of bash, zsh, fish, nushell"))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &[&str]) -> Result<Options> {
        parse(line.iter().map(OsString::from).collect())
    }

    #[test]
    fn the_program_keeps_its_own_flags() {
        for line in [
            &["exec", "-n", "3", "--label", "--", "./app", "-v", "--", "x"][..],
            &["exec", "-n", "3", "--label", "./app", "-v", "--", "x"],
        ] {
            let Ok(Options::Exec(flags, program)) = parsed(line) else { panic!("{line:?}") };
            assert_eq!(flags.ranks.map(NonZeroU32::get), Some(3));
            assert!(flags.label && !flags.verbose);
            assert_eq!(program[0].words, ["./app", "-v", "--", "x"]);
        }
    }

    #[test]
    fn equals_signs_and_any_bytes() {
        use std::os::unix::ffi::OsStringExt;
        let bytes = OsString::from_vec(vec![0xff, b'=', 0xfe]);
        let args = vec!["exec".into(), "--hosts=n[1-2]".into(), "--".into(), "app".into(), bytes.clone()];
        let Ok(Options::Exec(flags, program)) = parse(args) else { panic!() };
        assert_eq!(flags.hosts.as_deref(), Some("n[1-2]"));
        assert_eq!(program[0].words[1], bytes);
    }

    #[test]
    fn programs_beside_each_other_have_their_own_flags() {
        let line =
            ["exec", "--label", "--", "-n", "2", "./a", "-n", ":", "--hosts", "n1", "-x", "A=b", "--", "./b", "c"];
        let Ok(Options::Exec(flags, parts)) = parsed(&line) else { panic!() };
        assert!(flags.label && flags.ranks.is_none());
        let of = |at: usize| (parts[at].flags.ranks.map(NonZeroU32::get), parts[at].flags.hosts.as_deref());
        assert_eq!((of(0), of(1)), ((Some(2), None), (None, Some("n1"))));
        assert_eq!(
            (&parts[0].words[..], &parts[1].words[..]),
            (&["./a", "-n"].map(OsString::from)[..], &["./b", "c"].map(OsString::from)[..])
        );
        assert_eq!(split_line("-n 1 'a b'\"c\"  ''").unwrap(), ["-n", "1", "a bc", ""]);
        assert!(split_line("'a").is_err());
        for line in
            [&["exec", "--", "a", ":"][..], &["exec", "--", "a", ":", "-n", "0", "b"], &["exec", "--", ":", "b"]]
        {
            assert_eq!(parsed(line).expect_err("must fail").exit_code(), 2, "{line:?}");
        }
    }

    #[test]
    fn a_launcher_cuts_its_own_programs() {
        let line = ["exec", "--", "mpiexec", "-n", "1", "./a", ":", "-n", "2", "./b"];
        let Ok(Options::Exec(_, parts)) = parsed(&line) else { panic!() };
        assert_eq!(parts.len(), 1);
        assert_eq!(parts[0].words, line[2..]);
    }

    #[test]
    fn a_flag_that_is_no_text_is_refused() {
        use std::os::unix::ffi::OsStringExt;
        let part = ["exec", "--", "a", ":", "-x"].map(OsString::from).into_iter();
        let line = part.chain([OsString::from_vec(b"A=\xff".to_vec()), "b".into()]).collect();
        assert!(parse(line).expect_err("must fail").to_string().contains("UTF-8"));
    }

    #[test]
    fn mistakes_are_named_and_exit_with_2() {
        for (line, says) in [
            (&["exec", "--label=no", "--", "x"][..], "takes no value"),
            (&["session", "run", "id", "--keep-going=false", "--", "x"], "takes no value"),
            (&["session", "start", "--idel", "3"], "did you mean --idle?"),
            (&["session", "run", "id", "--bogusflag", "--", "x"], "hpcrt session run --help"),
            (&["session", "begin"], "hpcrt session --help"),
            (&["exec", "--configfile", "/nonexistent/file"], "--configfile"),
            (&["exec", "--laybel", "--", "x"], "did you mean --label?"),
            (&["exec", "-n", "0", "--", "x"], "-n"),
            (&["exec"], "no program is named"),
            (&[], "no mode is named"),
            (&["status", "--pids"], "--pids ID"),
            (&["exec", "--fan-out", "0", "--", "x"], "--fan-out"),
            (&["exce"], "hpcrt --help lists the modes"),
            (&["exec", "--view", "x", "--", "y"], "none of auto, namespace, audit, none"),
        ] {
            let error = parsed(line).expect_err("must fail");
            assert!(error.to_string().contains(says), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
    }
}
