//! A cluster with a program whose ranks write files on several hosts.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test crate uses its part")]

use std::fs;
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use cluster::{Cluster, Spec};
use nix::unistd::Pid;

use crate::common::{Run, Running, marked};
use crate::site;

/// root and the cluster's ordinary user.
pub const USERS: [u32; 2] = [0, 20001];
pub const PORT: &str = "7100";
/// Two ranks on each of two hosts.
pub const TWO: (&str, &str) = ("hpc1:2,hpc2:2", "hpc1 hpc1 hpc2 hpc2");

/// A cluster with a program for it.
pub struct Nodes {
    pub cluster: Cluster,
    pub hpcrt: PathBuf,
    pub program: PathBuf,
}

/// Somebody's directory on the shared file system: here, and as the hosts see it.
pub struct Place {
    pub uid: u32,
    pub here: PathBuf,
    pub there: String,
}

impl Place {
    /// How many records of each rank everybody was told of last, by `nodes forever {}/f {}/told`.
    pub fn told(&self) -> Option<u64> {
        fs::read(self.here.join("told")).ok()?.try_into().ok().map(u64::from_le_bytes)
    }

    /// What everybody was told of is there, and of each of the four ranks the beginning of what it wrote.
    #[track_caller]
    pub fn holds_what_was_told(&self) {
        let told = self.told().unwrap();
        for rank in 0..4 {
            let bytes = fs::read(self.here.join(format!("f.{rank}"))).unwrap();
            let (numbers, rest) = bytes.as_chunks::<8>();
            assert!(rest.is_empty());
            assert!((0u64..).zip(numbers).all(|(nth, number)| u64::from_le_bytes(*number) == nth), "of rank {rank}");
            assert!(numbers.len() as u64 >= told, "{told} were told of, {} of rank {rank} are there", numbers.len());
        }
    }
}

impl Nodes {
    pub fn up(name: &str) -> Option<Nodes> {
        let obstacle = Cluster::obstacle();
        let gcc = Command::new("gcc").arg("--version").output().is_ok();
        if let Some(obstacle) = obstacle.or((!gcc).then_some("gcc is not installed")) {
            eprintln!("SKIPPED nodes: {obstacle}");
            return None;
        }
        // What hosts believe of files is asked anew every time: nothing that is seen late is the file system's.
        let spec = Spec { trust: Duration::ZERO, ..Spec::of(&format!("t-{name}")) };
        let cluster = Cluster::up(spec).unwrap();
        let file = |name| cluster.state().file(name);
        let (hpcrt, program) = (file("hpcrt"), file("nodes"));
        fs::copy(env!("CARGO_BIN_EXE_hpcrt"), &hpcrt).unwrap();
        let sdk = concat!(env!("CARGO_MANIFEST_DIR"), "/sdk");
        let mut gcc = Command::new("gcc");
        gcc.args(["-O2", "-I", sdk, "-o"]).arg(&program).arg(site::source("nodes.c")).arg(format!("{sdk}/libi.c"));
        assert!(gcc.status().unwrap().success());
        Some(Nodes { cluster, hpcrt, program })
    }

    pub fn place(&self, uid: u32, name: &str) -> Place {
        let name = format!("{name}{uid}");
        let here = self.cluster.backing().join(&name);
        fs::create_dir(&here).unwrap();
        chown(&here, Some(uid), Some(uid)).unwrap();
        Place { uid, here, there: format!("/shared/{name}") }
    }

    /// `hpcrt exec FLAGS --hosts HOSTS -- nodes WORDS`; `{}` in a word is the directory.
    pub fn start(&self, at: &Place, hosts: &str, flags: &str, words: &str) -> Running {
        let agent = self.cluster.agent_command();
        let [hpcrt, program] = [&self.hpcrt, &self.program].map(|path| path.to_str().unwrap());
        // Whether it pays is another question.
        let mut line = vec!["env", "HPCRT_WITHOUT=pace", hpcrt, "exec", "-q", "--hosts", hosts, "--agent", &agent];
        line.extend(flags.split_whitespace());
        let words = words.replace("{}", &at.there);
        line.extend(["--", program].into_iter().chain(words.split(' ')));
        Run::new(self.cluster.command("hpc1", at.uid, &line)).start()
    }

    #[track_caller]
    pub fn right(&self, at: &Place, hosts: &str, flags: &str, words: &str) -> Duration {
        let done = self.start(at, hosts, flags, words).end().code(0);
        assert_eq!(done.text(), "right\n", "{words}: {}", done.err);
        done.took
    }

    /// Processes of a run with this word in their command line, on one host or on all.
    pub fn named(&self, run: &Running, word: &str, host: Option<usize>) -> Vec<Pid> {
        let network = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let there = host.map(|host| network(self.cluster.state().hosts[host].pid));
        let has = |line: Vec<u8>| word.is_empty() || line.split(|byte| *byte == 0).any(|part| part == word.as_bytes());
        let is = |pid: &Pid| {
            fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(has)
                && there.as_ref().is_none_or(|there| network(pid.as_raw()) == *there)
        };
        marked(&run.mark).into_iter().filter(is).collect()
    }
}
