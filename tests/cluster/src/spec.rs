//! What a cluster is made of.

use std::hash::{Hash, Hasher};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// The wanted cluster; `Spec::default()` is 4 hosts `hpc1`..`hpc4` on unlimited links with a slow shared file system.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Spec {
    /// Clusters of different names live beside each other. Lower-case letters, digits, `-`.
    pub name: String,
    /// 1 to 250.
    pub hosts: usize,
    /// Host `i`, counted from 1, is called `{prefix}{i}` and has the address 10.77.0.i.
    pub prefix: String,
    /// Of every link, each way, as "1gbit" or "100mbit"; `None`: as fast as it goes.
    pub rate: Option<String>,
    /// Hosts, counted from 0, whose link has another rate where the others' have one.
    #[serde(default)]
    pub slower: Vec<(usize, String)>,
    /// Adds the ordinary user [`USER`] to the hosts' password file.
    pub users: bool,
    /// The first so many hosts run a real sshd.
    pub sshd: usize,
    /// Where the shared file system is mounted on every host.
    pub shared: PathBuf,
    /// The directory behind it; `None`: an empty one, removed with the cluster.
    pub backing: Option<PathBuf>,
    pub service: Service,
    /// How long a host believes what it was told of names and attributes.
    pub trust: Duration,
    /// How long it believes that a name is absent, whatever other hosts create meanwhile.
    #[serde(default)]
    pub trust_absent: Duration,
    /// Whether hosts tell the file server of every close. A file whose name ends with `.late` takes what is written, and then closing it fails, once.
    #[serde(default)]
    pub flushes: bool,
}

/// The model of the file server: one queue for all hosts, and a distance to it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Service {
    /// Time an operation keeps the server busy.
    pub per_op: Duration,
    /// Nanoseconds that each byte read or written keeps the server busy.
    pub ns_per_byte: f64,
    /// Nanoseconds that each byte keeps the host busy that reads or writes it.
    #[serde(default)]
    pub host_ns_per_byte: f64,
    /// Added to every operation; operations overlap in it.
    pub latency: Duration,
}

/// Name, uid and gid of the ordinary user on the hosts.
pub const USER: (&str, u32) = ("hpcuser", 20001);

impl Default for Spec {
    fn default() -> Self {
        Spec {
            name: "default".into(),
            hosts: 4,
            prefix: "hpc".into(),
            rate: None,
            slower: Vec::new(),
            users: true,
            sshd: 0,
            shared: "/shared".into(),
            backing: None,
            service: Service {
                per_op: Duration::from_micros(50),
                ns_per_byte: 1.0,
                host_ns_per_byte: 0.0,
                latency: Duration::from_micros(200),
            },
            trust: Duration::from_secs(5),
            trust_absent: Duration::ZERO,
            flushes: false,
        }
    }
}

impl Spec {
    /// The default for a test, by a name that is the same in every run from one checkout: a run replaces what a killed one left, and no
    /// other's.
    #[must_use]
    pub fn of(test: &str) -> Spec {
        let mut hasher = std::hash::DefaultHasher::new();
        env!("CARGO_MANIFEST_DIR").hash(&mut hasher);
        Spec { name: format!("{test}-{:08x}", hasher.finish() >> 32), ..Spec::default() }
    }

    /// The name of host `index`, counted from 1.
    #[must_use]
    pub fn host(&self, index: usize) -> String {
        format!("{}{index}", self.prefix)
    }

    /// All host names in order.
    #[must_use]
    pub fn host_names(&self) -> Vec<String> {
        (1..=self.hosts).map(|i| self.host(i)).collect()
    }

    /// Rejects what cannot be built or would escape its directory.
    pub fn check(&self) -> Result<()> {
        check_name(&self.name)?;
        check_name(&self.prefix)?;
        if !(1..=250).contains(&self.hosts) {
            bail!("--hosts {}: between 1 and 250 are possible", self.hosts);
        }
        if let Some(rate) = &self.rate {
            let unit = rate.trim_start_matches(|c: char| c.is_ascii_digit());
            if unit == rate || !["bit", "kbit", "mbit", "gbit"].contains(&unit) {
                bail!("--rate {rate}: a whole number and bit, kbit, mbit or gbit are possible");
            }
        }
        if !self.shared.is_absolute() || self.backing.as_ref().is_some_and(|b| !b.is_absolute()) {
            bail!("the shared file system's mount point and backing directory must be absolute paths");
        }
        Ok(())
    }
}

/// The address of host `index`, counted from 1.
#[must_use]
pub fn address(index: usize) -> String {
    format!("10.77.0.{index}")
}

/// Names become path components of root's directories: nothing but letters, digits and dashes.
pub fn check_name(name: &str) -> Result<()> {
    let fine = !name.is_empty()
        && name.len() <= 32
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if !fine {
        bail!("{name:?} is no usable name: 1 to 32 lower-case letters, digits and dashes");
    }
    Ok(())
}
