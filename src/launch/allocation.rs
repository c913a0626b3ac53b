//! The hosts of a job: what the user names, else what the batch system allocated, else this machine.
//!
//! First match wins: Slurm, PBS, LSF, SGE, Flux, Cobalt, localhost. An allocation that is announced but cannot be read
//! is an error, never a reason to go on with the next.

use std::fmt;
use std::io::Read;
use std::time::Duration;

use serde_json::Value;
use smol::future::FutureExt;

use super::hostfile;
use super::hostlist::{self, Host, MAX_SLOTS};
use super::pmi;
use crate::error::{Context, Error, Result};

/// What discovery asks of its surroundings, so that tests need neither root nor a cluster.
pub trait Surroundings {
    /// An environment variable; empty counts as unset.
    ///
    /// # Errors
    /// Its value is not UTF-8.
    fn var(&self, name: &'static str) -> Result<Option<String>>;
    /// The text of a file.
    ///
    /// # Errors
    /// It cannot be read or is not UTF-8.
    fn read(&self, path: &str) -> Result<String>;
    /// All of standard input.
    ///
    /// # Errors
    /// As [`Surroundings::read`].
    fn stdin(&self) -> Result<String>;
    /// The standard output of a command that ends well and soon.
    ///
    /// # Errors
    /// It cannot be started, fails or takes too long.
    fn run(&self, command: &[&str]) -> Result<String>;
    /// Number of CPUs this process may use (`sched_getaffinity(2)`), at least 1.
    fn cpus(&self) -> u32;
}

/// The process's own environment, files and children.
#[derive(Debug, Clone, Copy)]
pub struct Here;

/// How long a batch system's command may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of a hostfile, at most.
const FILE_MAX: u64 = 64 << 20;

fn read_text(mut from: impl Read, subject: &str) -> Result<String> {
    let mut text = String::new();
    from.by_ref()
        .take(FILE_MAX)
        .read_to_string(&mut text)
        .map_err(|error| Error::usage("read the hosts from", error).on(subject))?;
    if text.len() as u64 == FILE_MAX {
        return Err(Error::usage("read the hosts from", "it is larger than 64 MiB").on(subject));
    }
    Ok(text)
}

impl Surroundings for Here {
    fn var(&self, name: &'static str) -> Result<Option<String>> {
        let value = std::env::var_os(name).filter(|value| !value.is_empty());
        let text = value.map(|value| value.into_string().map_err(|_| "its value is not UTF-8")).transpose();
        text.op_on("read the environment variable", name)
    }

    fn read(&self, path: &str) -> Result<String> {
        read_text(
            std::fs::File::open(path).map_err(|error| Error::usage("open the file of hosts", error).on(path))?,
            path,
        )
    }

    fn stdin(&self) -> Result<String> {
        read_text(std::io::stdin().lock(), "standard input")
    }

    fn run(&self, command: &[&str]) -> Result<String> {
        smol::block_on(answer(command))
    }

    fn cpus(&self) -> u32 {
        usable_cpus().len().max(1) as u32
    }
}

/// The standard output of a command that ends well and within 10 s.
///
/// # Errors
/// As [`Surroundings::run`].
pub async fn answer(command: &[&str]) -> Result<String> {
    let (program, arguments) = command.split_first().ok_or_else(|| Error::new("run a command", "it has no name"))?;
    let line = command.join(" ");
    let mut child = smol::process::Command::new(program);
    child.args(arguments).stdin(smol::process::Stdio::null()).kill_on_drop(true);
    let late = async {
        smol::Timer::after(COMMAND_TIMEOUT).await;
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer within 10 s"))
    };
    let output = child.output().or(late).await.op_on("run", &line)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error::new("run", format!("{}: {}", output.status, said.trim())).on(line));
    }
    String::from_utf8(output.stdout).op_on("read the output of", line)
}

/// System numbers of the CPUs this process may use, ascending; empty when the kernel does not tell.
pub fn usable_cpus() -> Vec<u32> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    if let Ok(set) = sched_getaffinity(None) {
        return (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).map(|cpu| cpu as u32).collect();
    }
    // The set above holds 1,024 CPUs; the kernel refuses it on larger machines.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.and_then(|list| ids(list.trim()).ok()).unwrap_or_default()
}

/// Who named the hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    HostList,
    HostFile,
    Slurm,
    Pbs,
    Lsf,
    Sge,
    Flux,
    Cobalt,
    Localhost,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::HostList => "--hosts",
            Source::HostFile => "--hostfile",
            Source::Slurm => "the Slurm allocation",
            Source::Pbs => "the PBS allocation",
            Source::Lsf => "the LSF allocation",
            Source::Sge => "the Grid Engine allocation",
            Source::Flux => "the Flux allocation",
            Source::Cobalt => "the Cobalt allocation",
            Source::Localhost => "this machine",
        })
    }
}

/// Hosts (at least one) and where they come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocation {
    pub hosts: Vec<Host>,
    pub source: Source,
}

/// The hosts of `--hosts`, of `--hostfile` (`-`: standard input), or [`discover`]ed.
///
/// # Errors
/// Both options given, and as the parsers and [`Surroundings`] fail.
pub fn hosts(list: Option<&str>, file: Option<&str>, at: &dyn Surroundings) -> Result<Allocation> {
    let stdin = || hostfile::parse(&at.stdin()?, "standard input");
    let (hosts, source) = match (list, file) {
        (Some(_), Some(_)) => {
            let cause = "--hosts and --hostfile exclude each other";
            return Err(
                Error::usage("choose the hosts", cause).remedy("\"-\" in --hosts reads a hostfile from standard input")
            );
        }
        (Some(list), None) => (hostlist::parse(list, &mut { stdin })?, Source::HostList),
        (None, Some("-")) => (stdin()?, Source::HostFile),
        (None, Some(file)) => (hostfile::parse(&at.read(file)?, file)?, Source::HostFile),
        (None, None) => return discover(at),
    };
    Ok(Allocation { hosts, source })
}

/// The hosts of the batch job this process runs in, else this machine with a slot for each usable CPU.
///
/// # Errors
/// An allocation is there and cannot be understood.
pub fn discover(at: &dyn Surroundings) -> Result<Allocation> {
    let found = |source: Source, hosts: Result<Vec<Host>>| {
        let remedy = "name the hosts with --hosts or --hostfile";
        hosts
            .map(|hosts| Allocation { hosts, source })
            .map_err(|error| Error::new(format!("use {source}"), error).remedy(remedy))
    };
    if let Some(nodes) = at.var("SLURM_JOB_NODELIST")? {
        return found(Source::Slurm, slurm(&nodes, at));
    }
    if let Some(path) = at.var("PBS_NODEFILE")? {
        return found(Source::Pbs, at.read(&path).and_then(|text| hostfile::parse(&text, &path)));
    }
    if let Some(path) = at.var("LSB_DJOB_HOSTFILE")? {
        return found(Source::Lsf, at.read(&path).and_then(|text| hostfile::parse(&text, &path)));
    }
    if let Some(pairs) = at.var("LSB_MCPU_HOSTS")? {
        return found(Source::Lsf, lsf_pairs(&pairs));
    }
    if let Some(path) = at.var("PE_HOSTFILE")? {
        return found(Source::Sge, at.read(&path).and_then(|text| grid_engine(&text, &path)));
    }
    // Ranks of ours are told of a job that Flux does not know (`pmi::client_variables`).
    let ours = at.var("FLUX_PMI_LIBRARY_PATH")? == Some(pmi::aid_path());
    if let Some(job) = at.var("FLUX_JOB_ID")?.filter(|_| !ours) {
        return found(Source::Flux, at.run(&["flux", "job", "info", &job, "R"]).and_then(|r| flux_resources(&r)));
    }
    if at.var("FLUX_URI")?.is_some() {
        let hosts =
            at.run(&["flux", "getattr", "hostlist"]).and_then(|list| hostfile::parse(&list, "flux getattr hostlist"));
        return found(Source::Flux, hosts);
    }
    if let Some(path) = at.var("COBALT_NODEFILE")? {
        return found(Source::Cobalt, at.read(&path).and_then(|text| hostfile::parse(&text, &path)));
    }
    let slots = Some(at.cpus().clamp(1, MAX_SLOTS));
    Ok(Allocation { hosts: vec![Host { slots, ..Host::named("localhost") }], source: Source::Localhost })
}

/// The host list of a batch system, with a number of slots for each host.
fn with_slots(list: &str, slots: &[u32], variable: &str) -> Result<Vec<Host>> {
    let mut hosts = plain_list(list)?;
    if slots.len() != hosts.len() {
        let cause = format!("it tells {} hosts, the node list has {}", slots.len(), hosts.len());
        return Err(Error::new("read the slots from", cause).on(variable));
    }
    hosts.iter_mut().zip(slots).for_each(|(host, &slots)| host.slots = Some(slots));
    Ok(hosts)
}

fn plain_list(list: &str) -> Result<Vec<Host>> {
    hostlist::parse(list, &mut || Err(Error::usage("read the host list", "\"-\" is not a host here")))
}

/// `SLURM_JOB_NODELIST` with the tasks, else the CPUs, of each node.
fn slurm(nodes: &str, at: &dyn Surroundings) -> Result<Vec<Host>> {
    for variable in ["SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"] {
        let Some(counts) = at.var(variable)? else { continue };
        let slots = slurm_counts(&counts, variable)?;
        // Within a step the first is the step's, whose nodes may be fewer.
        let may_be_a_steps = variable == "SLURM_TASKS_PER_NODE" && at.var("SLURM_STEP_ID")?.is_some();
        if !may_be_a_steps || slots.len() == plain_list(nodes)?.len() {
            return with_slots(nodes, &slots, variable);
        }
    }
    plain_list(nodes)
}

/// `7,1(x3)` -> 7 1 1 1.
fn slurm_counts(text: &str, variable: &str) -> Result<Vec<u32>> {
    let mut counts = Vec::new();
    for item in text.split(',') {
        let (count, times) = match item.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')').and_then(|times| times.parse().ok())),
            None => (item, Some(1)),
        };
        let error = |cause| Error::new("read the slots from", cause).on(variable);
        let count = hostlist::parse_slots(count.trim()).map_err(error)?;
        let times = times.filter(|&times| counts.len() + times <= hostlist::MAX_HOSTS);
        let times = times.ok_or_else(|| error(format!("{item:?} is not of the form N(xTIMES)")))?;
        counts.resize(counts.len() + times, count);
    }
    Ok(counts)
}

/// `hostA 4 hostB 2`.
fn lsf_pairs(text: &str) -> Result<Vec<Host>> {
    let words: Vec<&str> = text.split_whitespace().collect();
    if words.len() % 2 == 1 {
        return Err(Error::new("read LSB_MCPU_HOSTS", "a host without a number"));
    }
    let lines: String = words.chunks_exact(2).map(|pair| format!("{} slots={}\n", pair[0], pair[1])).collect();
    hostfile::parse(&lines, "LSB_MCPU_HOSTS")
}

/// `host slots queue processors` on each line.
fn grid_engine(text: &str, path: &str) -> Result<Vec<Host>> {
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        words.next().map_or_else(String::new, |host| match words.next() {
            Some(slots) => format!("{host} slots={slots}\n"),
            None => format!("{host}\n"),
        })
    };
    hostfile::parse(&text.lines().map(line).collect::<String>(), path)
}

/// A Flux resource set (RFC 20, version 1): the nodes and the cores of each as slots.
fn flux_resources(text: &str) -> Result<Vec<Host>> {
    let error = |cause: &str| Error::new("read the Flux resource set", cause);
    let json: Value = serde_json::from_str(text).op("read the Flux resource set")?;
    let execution = &json["execution"];
    let lists = execution["nodelist"].as_array().ok_or_else(|| error("it has no node list"))?;
    let nodes = lists.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(",");
    let mut cores = Vec::new();
    for entry in execution["R_lite"].as_array().into_iter().flatten() {
        let ids = |value: &Value| value.as_str().map_or(Ok(0), |text| ids(text).map(|ids| ids.len() as u64));
        let (ranks, count) = (ids(&entry["rank"])?, ids(&entry["children"]["core"])?);
        if count == 0 || count > u64::from(MAX_SLOTS) || ranks + cores.len() as u64 > hostlist::MAX_HOSTS as u64 {
            return Err(error("its numbers of ranks or cores are out of range"));
        }
        cores.resize(cores.len() + ranks as usize, count as u32);
    }
    with_slots(&nodes, &cores, "R_lite")
}

/// The numbers in `0-3,7` or `[0-3,7]` (RFC 22, cpuset(7)).
fn ids(text: &str) -> Result<Vec<u32>> {
    let list = format!("[{}]", text.trim_start_matches('[').trim_end_matches(']'));
    hostlist::expand(&list)?.iter().map(|id| id.parse().op_on("read the number", id)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Variables, files, standard input (file `-`) and commands with what they answer.
    struct Fake(HashMap<String, String>);

    impl Fake {
        fn get(&self, key: &str) -> Result<String> {
            self.0.get(key).cloned().ok_or_else(|| Error::new("find", "not there").on(key))
        }
    }

    impl Surroundings for Fake {
        fn var(&self, name: &'static str) -> Result<Option<String>> {
            Ok(self.0.get(name).cloned())
        }
        fn read(&self, path: &str) -> Result<String> {
            self.get(path)
        }
        fn stdin(&self) -> Result<String> {
            self.get("-")
        }
        fn run(&self, command: &[&str]) -> Result<String> {
            self.get(&command.join(" "))
        }
        fn cpus(&self) -> u32 {
            6
        }
    }

    fn fake(pairs: &[(&str, &str)]) -> Fake {
        Fake(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    fn text(allocation: &Allocation) -> String {
        let host =
            |host: &Host| format!("{}:{}", host.name, host.slots.map_or("?".to_owned(), |slots| slots.to_string()));
        allocation.hosts.iter().map(host).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_batch_system() {
        let r = r#"{"version":1,"execution":{"R_lite":[{"rank":"0-1","children":{"core":"0-3"}},{"rank":"5","children":{"core":"0,2"}}],"nodelist":["f[1-2]","g"]}}"#;
        for (source, pairs, expected) in [
            (
                Source::Slurm,
                &[
                    ("SLURM_JOB_NODELIST", "n[1-4]"),
                    ("SLURM_TASKS_PER_NODE", "7,1(x3)"),
                    ("SLURM_JOB_CPUS_PER_NODE", "9(x4)"),
                ][..],
                "n1:7 n2:1 n3:1 n4:1",
            ),
            (
                Source::Slurm,
                &[("SLURM_JOB_NODELIST", "n[09-10],m"), ("SLURM_JOB_CPUS_PER_NODE", "72(x2),36")],
                "n09:72 n10:72 m:36",
            ),
            (Source::Slurm, &[("SLURM_JOB_NODELIST", "n1"), ("PBS_NODEFILE", "/x")], "n1:?"),
            (Source::Pbs, &[("PBS_NODEFILE", "/f"), ("/f", "a\na\nb\na\n")], "a:3 b:?"),
            (Source::Lsf, &[("LSB_DJOB_HOSTFILE", "/f"), ("LSB_MCPU_HOSTS", "z 1"), ("/f", "a\na\n")], "a:2"),
            (Source::Lsf, &[("LSB_MCPU_HOSTS", "a 4 b 2")], "a:4 b:2"),
            (Source::Sge, &[("PE_HOSTFILE", "/f"), ("/f", "a 4 all.q@a UNDEFINED\nb 2 all.q@b <NULL>\n")], "a:4 b:2"),
            (Source::Flux, &[("FLUX_JOB_ID", "1"), ("FLUX_URI", "u"), ("flux job info 1 R", r)], "f1:4 f2:4 g:2"),
            (Source::Flux, &[("FLUX_URI", "u"), ("flux getattr hostlist", "f[1-2]\n")], "f1:? f2:?"),
            (
                Source::Flux,
                &[("FLUX_JOB_ID", "1"), ("FLUX_PMI_LIBRARY_PATH", "/usr/lib/flux/libpmi.so"), ("flux job info 1 R", r)],
                "f1:4 f2:4 g:2",
            ),
            (Source::Cobalt, &[("COBALT_NODEFILE", "/f"), ("/f", "c1\nc2\n")], "c1:? c2:?"),
            (Source::Localhost, &[], "localhost:6"),
            (
                Source::Localhost,
                &[("FLUX_JOB_ID", "77"), ("FLUX_PMI_LIBRARY_PATH", "/proc/self/fd/200")],
                "localhost:6",
            ),
        ] {
            let allocation = hosts(None, None, &fake(pairs)).unwrap();
            assert_eq!((allocation.source, &*text(&allocation)), (source, expected));
        }
    }

    #[test]
    fn options_come_first() {
        let at = fake(&[("SLURM_JOB_NODELIST", "n1"), ("-", "s1 slots=2\ns2\n"), ("/h", "h:3")]);
        assert_eq!(text(&hosts(Some("a,-"), None, &at).unwrap()), "a:? s1:2 s2:?");
        assert_eq!(text(&hosts(None, Some("-"), &at).unwrap()), "s1:2 s2:?");
        assert_eq!(text(&hosts(None, Some("/h"), &at).unwrap()), "h:3");
        assert!(hosts(Some("a"), Some("/h"), &at).unwrap_err().to_string().contains("exclude each other"));
    }

    #[test]
    fn a_broken_allocation_is_an_error() {
        for (pairs, expected) in [
            (
                &[("SLURM_JOB_NODELIST", "n[1-2]"), ("SLURM_TASKS_PER_NODE", "1(x3)")][..],
                "it tells 3 hosts, the node list has 2",
            ),
            (&[("SLURM_JOB_NODELIST", "n[1-2]"), ("SLURM_TASKS_PER_NODE", "1(y3)")], "the number of slots must be"),
            (&[("SLURM_JOB_NODELIST", "n"), ("SLURM_TASKS_PER_NODE", "1(x99999999999)")], "N(xTIMES)"),
            (&[("SLURM_JOB_NODELIST", "n[1-")], "not closed"),
            (&[("PBS_NODEFILE", "/gone")], "not there"),
            (&[("LSB_MCPU_HOSTS", "a 4 b")], "a host without a number"),
            (&[("FLUX_JOB_ID", "1"), ("flux job info 1 R", "{}")], "no node list"),
            (&[("FLUX_URI", "u")], "not there"),
        ] {
            let error = discover(&fake(pairs)).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("--hostfile"), "{error}");
        }
    }

    #[test]
    fn the_real_surroundings() {
        assert_eq!(Here.run(&["echo", "a b"]).unwrap(), "a b\n");
        assert!(Here.run(&["sh", "-c", "echo why >&2; exit 3"]).unwrap_err().to_string().contains("why"));
        assert!(Here.run(&["/nonexistent"]).is_err());
        assert_eq!(Here.cpus() as usize, usable_cpus().len());
        assert!(Here.read("/nonexistent").unwrap_err().to_string().contains("/nonexistent"));
        assert_eq!(ids("0-2,7").unwrap(), [0, 1, 2, 7]);
        assert_eq!(Here.var("HPCRT_TEST_UNSET").unwrap(), None);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "[-n@:,!()x\\[\\]/%.0-9a= \n]{0,24}|\\PC*", json in "[\\[\\]{}\":,0-9a]{0,20}") {
            let _ = slurm_counts(&text, "V");
            let _ = lsf_pairs(&text);
            let _ = grid_engine(&text, "f");
            let _ = flux_resources(&json);
            let _ = flux_resources(&format!(r#"{{"execution":{{"R_lite":[{{"rank":{text:?},"children":{{"core":"0"}}}}],"nodelist":["a"]}}}}"#));
        }
    }
}
