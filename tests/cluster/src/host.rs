//! The holder of one host: makes the host's namespaces and mounts, says "ready", and sleeps until it is killed.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::processes::HOLDER;
use crate::spec::{Spec, USER};
use crate::state::directory;

/// Directory of node-local libraries, whose content differs on the last host.
pub(crate) const HOST_LOCAL: &str = "/opt/hostlocal";

/// What a host has for itself, by the names in `/proc/PID/ns`; the mounts last, as entering them changes the meaning of paths.
pub(crate) const NAMESPACES: [(&str, CloneFlags); 4] = [
    ("net", CloneFlags::CLONE_NEWNET),
    ("uts", CloneFlags::CLONE_NEWUTS),
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("mnt", CloneFlags::CLONE_NEWNS),
];

/// Becomes the holder of host `name`, or of the switch between the hosts when there is no name.
pub(crate) fn hold(spec: &Spec, name: Option<&str>) -> Result<()> {
    nix::unistd::setsid().context("setsid")?;
    match name {
        None => unshare(CloneFlags::CLONE_NEWNET).context("make a network namespace")?,
        Some(name) => {
            let kinds = NAMESPACES.iter().fold(CloneFlags::empty(), |all, (_, kind)| all | *kind);
            unshare(kinds).context("make the namespaces of a host")?;
            nix::unistd::sethostname(name).context("sethostname")?;
            mounts(spec, name)?;
        }
    }
    nix::sys::prctl::set_name(&std::ffi::CString::new(HOLDER)?).context("set the process name")?;
    let mut out = std::io::stdout();
    out.write_all(b"ready\n").and_then(|()| out.flush()).context("report")?;
    loop {
        nix::unistd::pause();
    }
}

fn mounts(spec: &Spec, name: &str) -> Result<()> {
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).context("make mounts private")?;
    for at in ["/tmp", "/dev/shm"] {
        mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::MS_NOSUID, Some("mode=1777"))
            .with_context(|| format!("mount a tmpfs on {at}"))?;
    }
    // The machine's own /dev/fuse may be root's only; a cluster node's is everybody's. The bind keeps the unlinked node alive.
    let fuse = Path::new("/tmp/.fuse");
    mknod(fuse, SFlag::S_IFCHR, Mode::empty(), makedev(10, 229)).context("make a /dev/fuse")?;
    fs::set_permissions(fuse, fs::Permissions::from_mode(0o666)).context("chmod /dev/fuse")?;
    bind(fuse, Path::new("/dev/fuse"))?;
    fs::remove_file(fuse).context("remove /tmp/.fuse")?;

    let own = directory(&spec.name)?;
    bind(&own.join("etc/hosts"), Path::new("/etc/hosts"))?;
    if spec.users {
        for file in ["passwd", "group", "shadow"] {
            bind(&own.join("etc").join(file), &Path::new("/etc").join(file))?;
        }
        bind(&own.join("home"), &home())?;
    }
    let flavour = if name == spec.host(spec.hosts) { "last" } else { "common" };
    bind(&own.join("hostlocal").join(flavour), Path::new(HOST_LOCAL))
}

/// Home directory of the ordinary user, the same on all hosts.
pub(crate) fn home() -> std::path::PathBuf {
    Path::new("/home").join(USER.0)
}

fn bind(from: &Path, to: &Path) -> Result<()> {
    let none: Option<&str> = None;
    mount(Some(from), to, none, MsFlags::MS_BIND, none)
        .with_context(|| format!("bind {} on {}", from.display(), to.display()))
}
