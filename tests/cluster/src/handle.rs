//! The cluster as integration tests use it.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};

use crate::leftovers::{Leftover, leftovers};
use crate::slowfs::ask;
use crate::slowfs::ops::{HostOps, Ops};
use crate::spec::Spec;
use crate::state::State;

/// A running cluster; dropping it takes it down.
#[derive(Debug)]
pub struct Cluster {
    state: State,
    binary: PathBuf,
}

impl Cluster {
    /// Why this process cannot make clusters: what a test that skips itself should print.
    #[must_use]
    pub fn obstacle() -> Option<&'static str> {
        (!nix::unistd::Uid::effective().is_root()).then_some(crate::cli::NEED_ROOT)
    }

    /// Builds a cluster, removing an older one of the same name: tests that run at the same time need different names.
    pub fn up(spec: Spec) -> Result<Cluster> {
        if let Some(obstacle) = Cluster::obstacle() {
            bail!("{obstacle}");
        }
        let binary = binary()?;
        // A process with threads cannot enter mount namespaces: the work is the binary's.
        let file = std::env::temp_dir().join(format!("cluster-{}-{}.json", spec.name, std::process::id()));
        std::fs::write(&file, serde_json::to_vec(&spec)?).context("write the specification")?;
        let output = Command::new(&binary).arg("up-from").arg(&file).stdin(Stdio::null()).output();
        let _ = std::fs::remove_file(&file);
        let output = output.with_context(|| format!("start {}", binary.display()))?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(Cluster { state: State::load(&spec.name)?, binary })
    }

    /// What was built: hosts, addresses, links.
    #[must_use]
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Host names in order.
    #[must_use]
    pub fn hosts(&self) -> Vec<String> {
        self.state.spec.host_names()
    }

    /// The shared file system's mount point on the hosts.
    #[must_use]
    pub fn shared(&self) -> &Path {
        &self.state.spec.shared
    }

    /// The directory behind it, to put files there without an operation being counted.
    #[must_use]
    pub fn backing(&self) -> &Path {
        &self.state.backing
    }

    /// A command line prefix that runs what follows on host `{host}`; works for root and ordinary users, on and off the hosts.
    #[must_use]
    pub fn agent_command(&self) -> String {
        format!("{} exec --name {} {{host}} --", self.state.file("cluster").display(), self.state.spec.name)
    }

    /// The client configuration for `ssh -F`, to be used on a host; only with `sshd` > 0.
    #[must_use]
    pub fn ssh_config(&self) -> PathBuf {
        self.state.file(crate::ssh::CONFIG)
    }

    /// A command on a host, not yet started: the child process will be the command itself.
    #[must_use]
    pub fn command<S: AsRef<OsStr>>(&self, host: &str, uid: u32, argv: &[S]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(["exec", "--name", &self.state.spec.name, "--user", &uid.to_string(), host, "--"]);
        command.args(argv);
        command
    }

    /// Runs a command on a host to its end.
    pub fn exec<S: AsRef<OsStr>>(&self, host: &str, uid: u32, argv: &[S]) -> Result<Output> {
        let words: Vec<OsString> = argv.iter().map(|a| a.as_ref().to_owned()).collect();
        let output = self.command(host, uid, argv).stdin(Stdio::null()).output();
        output.with_context(|| format!("run {words:?} on {host}"))
    }

    /// What reached the file server since the last reset, of all hosts together.
    pub fn ops(&self) -> Result<Ops> {
        let mut all = Ops::default();
        for host in self.host_ops()? {
            all += host.ops;
        }
        Ok(all)
    }

    /// The same for each host.
    pub fn host_ops(&self) -> Result<Vec<HostOps>> {
        ask(&self.state.file(""), "ops")
    }

    /// Paths below the mount point with their operations, most first.
    pub fn paths(&self) -> Result<Vec<(String, u64)>> {
        ask(&self.state.file(""), "paths")
    }

    /// Sets all counters to zero.
    pub fn reset_ops(&self) -> Result<()> {
        ask(&self.state.file(""), "reset")
    }

    /// What is on the hosts now and was not at the start.
    pub fn leftovers(&self) -> Result<Vec<Leftover>> {
        leftovers(&self.state)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let status = Command::new(&self.binary).args(["down", "--name", &self.state.spec.name]).status();
        if !status.is_ok_and(|s| s.success()) {
            eprintln!("cluster {:?} could not be taken down; try `cluster down --name {0}`", self.state.spec.name);
        }
    }
}

/// The `cluster` binary beside the running test. Cargo builds binaries only for tests of their own package, so this builds it.
fn binary() -> Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(binary) = &*built {
        return Ok(binary.clone());
    }
    let own = std::env::current_exe().context("find the running test")?;
    // target/TRIPLE/PROFILE/deps/test-hash
    let place = own.ancestors().find(|d| d.ends_with("deps")).and_then(Path::parent).or(own.parent());
    let place = place.context("find the target directory")?;
    if let Some(cargo) = std::env::var_os("CARGO") {
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package", "cluster", "--bin", "cluster"]);
        if place.ends_with("release") {
            build.arg("--release");
        }
        let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status();
        if !status.context("start cargo")?.success() {
            bail!("the cluster binary does not build");
        }
    }
    let binary = place.join("cluster");
    if !binary.is_file() {
        bail!("{} is missing; run `cargo build -p cluster`", binary.display());
    }
    Ok(built.insert(binary).clone())
}
