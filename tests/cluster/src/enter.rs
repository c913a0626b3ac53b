//! `cluster exec`: the calling process enters a host and becomes the command.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use nix::sched::setns;
use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid};

use crate::host::NAMESPACES;
use crate::processes::{MARK, start_time};
use crate::state::State;

/// Replaces this process; returns only on failure.
///
/// An ordinary user gets here through the set-uid copy of the binary in the cluster's directory, and stays that user.
pub(crate) fn exec(state: &State, host: &str, user: Option<u32>, command: &[OsString]) -> Result<()> {
    let caller = Uid::current();
    let uid = match user {
        Some(uid) if !caller.is_root() && uid != caller.as_raw() => bail!("only root may become uid {uid} on a host"),
        Some(uid) => uid,
        None => caller.as_raw(),
    };
    let host = state.host(host)?;
    if start_time(host.pid) != Some(host.started) {
        bail!("host {} is gone (its holder {} ended); run `cluster up` again", host.name, host.pid);
    }
    let directory = std::env::current_dir();
    for (kind, flag) in NAMESPACES {
        let path = format!("/proc/{}/ns/{kind}", host.pid);
        let ns = File::open(&path).with_context(|| format!("open {path}"))?;
        setns(ns, flag).with_context(|| format!("enter {path}; only root can enter a host"))?;
    }
    let account = Account::of(uid);
    let (gid, uid) = (Gid::from_raw(account.gid), Uid::from_raw(uid));
    let (program, arguments) = match command {
        [] => bail!("no command given for host {}", host.name),
        // As ssh does: one word is a line for the shell. A plain word needs none.
        [line] if line.as_bytes().iter().any(|b| b" \t\n;&|<>()$`\"'*?[#~".contains(b)) => {
            (OsStr::new("/bin/sh"), vec![OsString::from("-c"), line.clone()])
        }
        [program, arguments @ ..] => (program.as_os_str(), arguments.to_vec()),
    };
    setgroups(&[gid]).context("setgroups")?;
    setresgid(gid, gid, gid).context("setgid")?;
    setresuid(uid, uid, uid).context("setuid")?;
    // Entering the mount namespace went to its root. A directory that the host does not have leaves us at home.
    if directory.and_then(std::env::set_current_dir).is_err() && std::env::set_current_dir(&account.home).is_err() {
        std::env::set_current_dir("/").context("chdir /")?;
    }
    let error = Command::new(program)
        .args(arguments)
        .env("HOME", &account.home)
        .env("USER", &account.name)
        .env("LOGNAME", &account.name)
        .env("HOSTNAME", &host.name)
        .env("HPCRT_CLUSTER", &state.spec.name)
        .env(MARK, &state.spec.name)
        .exec();
    Err(error).with_context(|| format!("run {program:?} on {}", host.name))
}

struct Account {
    name: String,
    gid: u32,
    home: PathBuf,
}

impl Account {
    /// From the host's password file; an unknown uid has the group of the same number and lives in /tmp.
    fn of(uid: u32) -> Account {
        let file = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let known = file.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let &[name, _, id, gid, _, home, _] = fields.as_slice() else { return None };
            let account = Account { name: name.into(), gid: gid.parse().ok()?, home: home.into() };
            (id.parse() == Ok(uid)).then_some(account)
        });
        known.unwrap_or_else(|| Account { name: format!("uid{uid}"), gid: uid, home: "/tmp".into() })
    }
}
