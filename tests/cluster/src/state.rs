//! What a running cluster left under `/run/hpcrt-cluster/NAME`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};

use crate::spec::{Spec, check_name};

/// Every cluster of this machine has a directory here.
pub const ROOT: &str = "/run/hpcrt-cluster";

/// A complete cluster, as `state.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct State {
    pub spec: Spec,
    pub hosts: Vec<Host>,
    /// The qdisc that limits the links, or why none does.
    pub links: Links,
    /// The directory behind the shared file system.
    pub backing: PathBuf,
    /// How long `up` took, in milliseconds.
    pub up_ms: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Host {
    pub name: String,
    pub address: String,
    /// The process that keeps the host's namespaces.
    pub pid: i32,
    /// Its start time in clock ticks since boot, so that a reused pid is noticed.
    pub started: u64,
    /// Mount points (sorted) of the finished host, to tell later ones from.
    pub mounts: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Links {
    Limited {
        qdisc: String,
        rate: String,
    },
    Unlimited,
    /// A rate was asked for, but the kernel has none of the qdiscs.
    Refused {
        rate: String,
        cause: String,
    },
}

/// The directory of the cluster `name`.
pub fn directory(name: &str) -> Result<PathBuf> {
    check_name(name)?;
    Ok(Path::new(ROOT).join(name))
}

impl State {
    /// Reads the state of a running cluster.
    pub fn load(name: &str) -> Result<State> {
        let path = directory(name)?.join("state.json");
        let text = fs::read(&path)
            .map_err(|e| anyhow!("no cluster {name:?} is up ({}: {e}); start one with `cluster up`", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("parse {}", path.display()))
    }

    /// Written last by `up`: a cluster with a state file is complete.
    pub fn save(&self) -> Result<()> {
        let path = self.file("state.json");
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec_pretty(self)?)
            .and_then(|()| fs::rename(&new, &path))
            .with_context(|| format!("write {}", path.display()))
    }

    /// A file of the cluster's own directory.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        Path::new(ROOT).join(&self.spec.name).join(name)
    }

    pub fn host(&self, name: &str) -> Result<&Host> {
        self.hosts.iter().find(|h| h.name == name || h.address == name).ok_or_else(|| {
            anyhow!("no host {name:?} in cluster {:?}; it has {}", self.spec.name, self.spec.host_names().join(" "))
        })
    }
}
