//! Real sshd on some hosts, with keys of their own that work for root and for the ordinary user.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::processes::MARK;
use crate::spec::USER;
use crate::state::State;
use crate::up::wait_until;

/// Name of the client configuration in the cluster's directory.
pub(crate) const CONFIG: &str = "ssh/config";

/// Starts the daemons and waits until they listen.
pub(crate) fn start(state: &State) -> Result<()> {
    let dir = state.file("ssh");
    let at = dir.display();
    fs::create_dir_all(&dir).context("make the ssh directory")?;
    for key in ["host_key", "id_root"] {
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "test", "-f"])
            .arg(dir.join(key))
            .env(MARK, &state.spec.name)
            .status();
        if !made.context("start ssh-keygen (package openssh-client)")?.success() {
            bail!("ssh-keygen failed");
        }
    }
    // A private key must belong to its user: the same key twice.
    let (user, uid) = USER;
    let own = dir.join(format!("id_{user}"));
    fs::copy(dir.join("id_root"), &own).and_then(|_| chown(&own, Some(uid), Some(uid))).context("copy the key")?;
    fs::set_permissions(&own, Permissions::from_mode(0o600)).context("chmod the key")?;
    fs::copy(dir.join("id_root.pub"), dir.join("authorized_keys")).context("copy the public key")?;
    let server = format!(
        "HostKey {at}/host_key\nAuthorizedKeysFile {at}/authorized_keys\nPidFile none\nPermitRootLogin prohibit-password\n\
         PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nUseDNS no\nMaxStartups 200\nMaxSessions 200\n"
    );
    fs::write(dir.join("sshd_config"), server).context("write sshd_config")?;
    let names: Vec<String> = state.spec.host_names();
    let client = format!(
        "Host {}\n  IdentityFile {at}/id_%u\n  IdentitiesOnly yes\n  BatchMode yes\n  StrictHostKeyChecking no\n\
         \x20 UserKnownHostsFile /dev/null\n  GlobalKnownHostsFile /dev/null\n  LogLevel ERROR\n  ConnectTimeout 10\n",
        names.join(" ")
    );
    fs::write(state.file(CONFIG), client).context("write the client's configuration")?;
    for host in state.hosts.iter().take(state.spec.sshd) {
        daemon(state, &host.name, &dir)?;
        // Asking the kernel: a connection would leave a session behind for some milliseconds.
        let table = format!("/proc/{}/net/tcp", host.pid);
        wait_until(Duration::from_secs(10), &format!("the start of sshd on {}", host.name), || {
            fs::read_to_string(&table).is_ok_and(|t| t.contains(":0016 00000000:0000 0A"))
        })?;
    }
    Ok(())
}

fn daemon(state: &State, host: &str, dir: &Path) -> Result<()> {
    // `exec` needs the state file, which is written last: enter the host by its holder's namespaces.
    let pid = state.host(host)?.pid;
    let status = Command::new("nsenter")
        .args(["--net", "--uts", "--ipc", "--mount", "--target", &pid.to_string()])
        .args(["/usr/sbin/sshd", "-f"])
        .arg(dir.join("sshd_config"))
        .arg("-E")
        .arg(dir.join(format!("{host}.log")))
        .env(MARK, &state.spec.name)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .context("start nsenter (package util-linux)")?;
    if !status.success() {
        bail!(
            "sshd does not start on {host} (package openssh-server): {}",
            fs::read_to_string(dir.join(format!("{host}.log"))).unwrap_or_default()
        );
    }
    Ok(())
}
