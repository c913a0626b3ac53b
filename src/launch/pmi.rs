//! Version 1 of the Process Management Interface (PMI-1): what a node answers at once, and the environment by which a client finds it.
//! What members do together (barriers with the keys that were put) is `net/collective`.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;

use crate::net::collective::text::Pmi;
use crate::net::wire::control::Aid;

/// The answer to a put.
pub const PUT: &[u8] = b"cmd=put_result rc=0 msg=success\n";

/// Longest name of a key space, key and value that clients are told.
const MAXIMA: (usize, usize, usize) = (256, 64, 1024);

/// The key under which Open MPI's and MPICH's clients ask which ranks share a node.
const MAPPING: &[u8] = b"PMI_process_mapping";
/// The key under which our own client asks who it is: its rank, the ranks in all, and those of its node.
const MYSELF: &[u8] = b"hpcrt_self";

/// What ranks are given for their MPI library: a client of PMI-1 (`static-bootstrap/pmi`), what lets UCX go on (`static-bootstrap/progress`).
static CLIENT: &[u8] = include_bytes!(env!("HPCRT_PMI"));
static PROGRESS: &[u8] = include_bytes!(env!("HPCRT_PROGRESS"));

/// Where such a rank finds it.
pub const AID_FD: i32 = 200;

/// What a node knows of a job.
#[derive(Debug)]
pub struct Facts {
    /// Ranks of the job.
    pub size: u32,
    /// Name of its key space.
    pub space: String,
    /// See [`mapping`].
    pub mapping: String,
    /// Ranks of this node, separated by commas.
    pub clique: String,
}

impl Facts {
    /// A key that nobody has to put.
    pub fn key(&self, key: &[u8], rank: u32) -> Option<Vec<u8>> {
        match key {
            MAPPING if !self.mapping.is_empty() => Some(self.mapping.clone().into_bytes()),
            MYSELF => Some(format!("{rank},{},{}", self.size, self.clique).into_bytes()),
            _ => None,
        }
    }

    /// The answer to what needs nobody else; `None`: there is none, or it comes later. `app`: the number of the asking program.
    pub fn reply(&self, request: &Pmi<'_>, app: u32) -> Option<Vec<u8>> {
        let reply = match request {
            Pmi::Init { version: b"1" } => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0".to_owned(),
            Pmi::Init { .. } => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=-1".to_owned(),
            Pmi::MaximalLengths => {
                let (space, key, value) = MAXIMA;
                format!("cmd=maxes kvsname_max={space} keylen_max={key} vallen_max={value} rc=0")
            }
            Pmi::AppNumber => format!("cmd=appnum appnum={app} rc=0"),
            Pmi::KeySpace => format!("cmd=my_kvsname kvsname={} rc=0", self.space),
            Pmi::UniverseSize => format!("cmd=universe_size size={} rc=0", self.size),
            Pmi::Finalize => "cmd=finalize_ack rc=0".to_owned(),
            Pmi::Spawn { last: true } => "cmd=spawn_result rc=-1 msg=hpcrt_starts_no_processes_later".to_owned(),
            _ => return None,
        };
        Some((reply + "\n").into_bytes())
    }
}

/// What ranks are given as a descriptor that can be loaded, close-on-exec; `None`: nothing.
///
/// # Errors
/// The kernel refuses files in memory.
pub fn object(aid: Aid) -> io::Result<Option<OwnedFd>> {
    let (name, bytes) = match aid {
        Aid::None => return Ok(None),
        Aid::Client => ("hpcrt-pmi", CLIENT),
        Aid::Progress => ("hpcrt-progress", PROGRESS),
    };
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
    File::from(fd.try_clone()?).write_all(bytes)?;
    Ok(Some(fd))
}

/// The variables by which Open MPI up to version 4 finds it: those of Flux. It names its shared memory by the number of the job.
pub fn client_variables(session: &str, job: u32) -> [String; 2] {
    // It keeps the number in two halves, and uses the upper bit of each for itself.
    const USABLE: u32 = 0x3fff_7fff;
    let hash = blake3::hash(format!("{session} {job}").as_bytes());
    let number = hash.as_bytes().iter().take(4).fold(0u32, |number, byte| number << 8 | u32::from(*byte)) & USABLE | 1;
    [format!("FLUX_JOB_ID={number}"), format!("FLUX_PMI_LIBRARY_PATH={}", aid_path())]
}

/// The name of what is at [`AID_FD`], for a dynamic linker.
pub fn aid_path() -> String {
    format!("/proc/self/fd/{AID_FD}")
}

/// The answer to a get.
pub fn got(key: &[u8], value: Option<&[u8]>) -> Vec<u8> {
    match value {
        Some(value) => [b"cmd=get_result rc=0 msg=success value=", value, b"\n"].concat(),
        None => [b"cmd=get_result rc=-1 msg=key_", key, b"_not_found value=unknown\n"].concat(),
    }
}

/// The answer to a barrier that is over, or failed for this reason.
pub fn barrier(failed: Option<&str>) -> Vec<u8> {
    match failed {
        None => b"cmd=barrier_out rc=0\n".to_vec(),
        Some(why) => format!("cmd=barrier_out rc=-1 msg={}\n", why.replace([' ', '\n'], "_")).into_bytes(),
    }
}

/// The answer to a question to the table of names.
pub fn named(kind: &'static str, port: Result<&[u8], &str>) -> Vec<u8> {
    match port {
        Ok([]) => format!("cmd={kind}_result rc=0 msg=success\n").into_bytes(),
        Ok(port) => [format!("cmd={kind}_result rc=0 msg=success port=").as_bytes(), port, b"\n"].concat(),
        Err(why) => format!("cmd={kind}_result rc=-1 msg={}\n", why.replace(' ', "_")).into_bytes(),
    }
}

/// Which ranks share a node, as `PMI_process_mapping` says it; empty when it would be longer than a value may be. `nodes`: of each node
/// its runs of consecutive ranks, so that all runs together are all ranks.
pub fn mapping(runs: &[(u32, u32)]) -> String {
    // Blocks of (first node, nodes, ranks of each).
    let mut blocks: Vec<(u32, u32, u32)> = Vec::new();
    for &(node, ranks) in runs {
        match blocks.last_mut() {
            Some((first, nodes, each)) if *each == ranks && *first + *nodes == node => *nodes += 1,
            _ => blocks.push((node, 1, ranks)),
        }
    }
    let blocks: Vec<String> =
        blocks.into_iter().map(|(first, nodes, each)| format!("({first},{nodes},{each})")).collect();
    let text = format!("(vector,{})", blocks.join(","));
    if text.len() < MAXIMA.2 { text } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mapping_is_short_where_nodes_are_alike() {
        assert_eq!(mapping(&[(0, 2)]), "(vector,(0,1,2))");
        assert_eq!(mapping(&[(0, 2), (1, 2), (2, 2), (3, 1)]), "(vector,(0,3,2),(3,1,1))");
        assert_eq!(mapping(&[(0, 1), (1, 1), (0, 1), (1, 1)]), "(vector,(0,2,1),(0,2,1))");
        let irregular: Vec<_> = (0..400).map(|node| (node, 1 + node % 2)).collect();
        assert_eq!(mapping(&irregular), "");
    }

    #[test]
    fn answers_are_lines() {
        let facts = Facts { size: 4, space: "s".into(), mapping: "(m)".into(), clique: "0,1".into() };
        let reply = |request, app| facts.reply(&request, app).map(|reply| String::from_utf8(reply).unwrap());
        assert_eq!(reply(Pmi::AppNumber, 3).as_deref(), Some("cmd=appnum appnum=3 rc=0\n"));
        assert!(reply(Pmi::Init { version: b"2" }, 0).unwrap().ends_with("rc=-1\n"));
        assert_eq!(reply(Pmi::Spawn { last: false }, 0), None);
        assert_eq!(facts.key(b"PMI_process_mapping", 1).as_deref(), Some(&b"(m)"[..]));
        assert_eq!(facts.key(b"hpcrt_self", 1).as_deref(), Some(&b"1,4,0,1"[..]));
        assert_eq!(
            got(b"k", facts.key(b"k", 1).as_deref()),
            b"cmd=get_result rc=-1 msg=key_k_not_found value=unknown\n"
        );
        assert_eq!(barrier(Some("a b\n")), b"cmd=barrier_out rc=-1 msg=a_b_\n");
        assert_eq!(named("lookup", Ok(b"p")), b"cmd=lookup_result rc=0 msg=success port=p\n");
    }
}
