//! `cluster up`: from nothing to running hosts.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::host::{HOST_LOCAL, home};
use crate::leftovers::mount_points;
use crate::processes::{MARK, start_time};
use crate::spec::{Spec, USER, address};
use crate::state::{Host, State, directory};
use crate::{down, network, ssh};

/// Builds the cluster, after removing one of the same name. A failure removes what was built.
pub(crate) fn up(spec: &Spec) -> Result<State> {
    spec.check()?;
    let begin = Instant::now();
    let _alone = down::lock(&spec.name)?;
    down::remove(&spec.name)?;
    build(spec, begin).inspect_err(|_| {
        // The first failure is the one to report.
        let _ = down::remove(&spec.name);
    })
}

fn build(spec: &Spec, begin: Instant) -> Result<State> {
    let own = directory(&spec.name)?;
    fs::create_dir_all(&own).with_context(|| format!("make {}", own.display()))?;
    let backing = match &spec.backing {
        Some(given) => given.clone(),
        None => down::own_backing(&spec.name),
    };
    fs::create_dir_all(&backing).with_context(|| format!("make {}", backing.display()))?;
    for place in [spec.shared.as_path(), Path::new(HOST_LOCAL)] {
        down::make_place(&own, place)?;
    }
    if spec.users {
        down::make_place(&own, &home())?;
    }
    if spec.sshd > 0 {
        down::make_place(&own, Path::new("/run/sshd"))?;
    }
    host_local(spec, &own, &backing)?;
    accounts(spec, &own)?;
    set_uid_copy(&own)?;
    let spec_file = own.join("spec.json");
    fs::write(&spec_file, serde_json::to_vec(spec)?).context("write spec.json")?;

    let names = spec.host_names();
    let mut holders = vec![spawn(spec, &own, "switch", &["hold".into(), spec.name.clone()])?];
    for name in &names {
        holders.push(spawn(spec, &own, name, &["hold".into(), spec.name.clone(), name.clone()])?);
    }
    let mut pids = Vec::new();
    for holder in &mut holders {
        pids.push(ready(holder, &own)?);
    }
    let mut arguments = vec!["serve".into(), spec.name.clone(), backing.display().to_string()];
    arguments.extend(pids[1..].iter().map(ToString::to_string));
    let mut server = spawn(spec, &own, "slowfs", &arguments)?;
    let links = network::build(pids[0], &pids[1..], spec.rate.as_deref(), &spec.slower)?;
    ready(&mut server, &own)?;

    let mut hosts = Vec::new();
    for (i, (name, &pid)) in (1..).zip(names.iter().zip(&pids[1..])) {
        let started = start_time(pid).with_context(|| format!("the holder of {name} ended"))?;
        hosts.push(Host { name: name.clone(), address: address(i), pid, started, mounts: mount_points(pid)? });
    }
    let mut state = State { spec: spec.clone(), hosts, links, backing, up_ms: 0 };
    if spec.sshd > 0 {
        ssh::start(&state)?;
    }
    state.up_ms = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
    state.save()?;
    Ok(state)
}

/// Starts this program again as a long-lived member; its errors go to `NAME.log`.
fn spawn(spec: &Spec, own: &Path, log: &str, arguments: &[String]) -> Result<Child> {
    let log = fs::File::create(own.join(format!("{log}.log"))).context("make a log file")?;
    Command::new("/proc/self/exe")
        .args(arguments)
        .env(MARK, &spec.name)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("start a member of the cluster")
}

/// Waits for "ready"; a member that fails ends and closes its output, so this does not hang.
fn ready(child: &mut Child, own: &Path) -> Result<i32> {
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("stdout")?).read_line(&mut line).context("listen to a member")?;
    if line != "ready\n" {
        let mut logs = String::new();
        for entry in fs::read_dir(own)?.flatten().filter(|e| e.path().extension().is_some_and(|x| x == "log")) {
            logs += &fs::read_to_string(entry.path()).unwrap_or_default();
        }
        bail!("a member of the cluster did not start: {}", logs.trim());
    }
    i32::try_from(child.id()).context("pid")
}

/// `libhostlocal.so` in two kinds, and `hostlocal` on the shared file system that prints which one its host has.
fn host_local(spec: &Spec, own: &Path, backing: &Path) -> Result<()> {
    let cc = |input: &str, arguments: &[&str], output: &Path| -> Result<()> {
        let source = own.join("hostlocal.c");
        fs::write(&source, input).context("write a C file")?;
        let mut cc = Command::new("cc");
        cc.env(MARK, &spec.name).args(["-O1", "-o"]).arg(output).arg(&source).args(arguments);
        if !cc.status().context("start cc (package gcc)")?.success() {
            bail!("cc failed on {}", source.display());
        }
        Ok(())
    };
    for kind in ["common", "last"] {
        let place = own.join("hostlocal").join(kind);
        fs::create_dir_all(&place).context("make a host's library directory")?;
        let source = format!("const char *hostlocal(void) {{ return \"{kind}\"; }}\n");
        cc(&source, &["-shared", "-fPIC", "-Wl,-soname,libhostlocal.so"], &place.join("libhostlocal.so"))?;
    }
    let program = backing.join("hostlocal");
    if !program.exists() {
        let library = own.join("hostlocal/common/libhostlocal.so");
        let runpath = format!("-Wl,-rpath,{HOST_LOCAL}");
        let source =
            "int puts(const char *);\nconst char *hostlocal(void);\nint main(void) { return puts(hostlocal()) < 0; }\n";
        cc(source, &[&library.display().to_string(), &runpath], &program)?;
    }
    Ok(())
}

/// The files that are bound over those of /etc.
fn accounts(spec: &Spec, own: &Path) -> Result<()> {
    let etc = own.join("etc");
    fs::create_dir_all(&etc).context("make etc")?;
    let mut hosts = String::from("127.0.0.1 localhost\n");
    for i in 1..=spec.hosts {
        hosts += &format!("{} {}\n", address(i), spec.host(i));
    }
    fs::write(etc.join("hosts"), hosts).context("write etc/hosts")?;
    if !spec.users {
        return Ok(());
    }
    let (user, id) = USER;
    for (file, line, mode) in [
        ("passwd", format!("{user}:x:{id}:{id}::{}:/bin/sh\n", home().display()), 0o644),
        ("group", format!("{user}:x:{id}:\n"), 0o644),
        ("shadow", format!("{user}:*:19000:0:99999:7:::\n"), 0o600),
    ] {
        let mut text = fs::read_to_string(Path::new("/etc").join(file)).unwrap_or_default();
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        let path = etc.join(file);
        fs::write(&path, text + &line)
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(mode)))
            .with_context(|| format!("write {}", path.display()))?;
    }
    let home = own.join("home");
    fs::create_dir_all(&home).and_then(|()| chown(&home, Some(id), Some(id))).context("make the user's home")
}

/// Ordinary users enter hosts through this copy (see [`crate::enter`]).
fn set_uid_copy(own: &Path) -> Result<PathBuf> {
    let copy = own.join("cluster");
    fs::copy("/proc/self/exe", &copy).context("copy this program")?;
    fs::set_permissions(&copy, Permissions::from_mode(0o4755)).context("make the copy set-uid")?;
    Ok(copy)
}

/// Waits until `done` says so, at most `limit`.
pub(crate) fn wait_until(limit: Duration, what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !done() {
        if Instant::now() > deadline {
            bail!("{what} did not happen within {} s", limit.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
