//! What this node allows, found by doing it: a forked child makes a session's namespaces, mounts a view and executes the
//! bootstrapper with the very functions that a job uses, and is gone when the answer is there.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::pipe::PipeFlags;

use super::directory;
use super::namespace::{Base, Lacks, Mounts, Place};
use crate::error::{Context, Result};
use crate::loader::audit::program;
use crate::sys::boot::{self, Stage, Starter};
use crate::sys::node::{self, number};
use crate::sys::program::Program;
use crate::sys::without::{Ability, VARIABLE, Without};
use crate::sys::{memory, process};

/// The child answers within this time, or what it has not said counts as missing.
const DEADLINE: Duration = Duration::from_secs(10);

/// Why something is not to be had, and what would change that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    pub cause: String,
    pub remedy: String,
}

/// The abilities of a node that decide how its ranks are started and see their files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Own namespaces with mounts in them.
    pub namespaces: Result<(), Obstacle>,
    /// FUSE in such a namespace; the version of the kernel's protocol.
    pub fuse: Result<String, Obstacle>,
    /// A RAM disk that programs can be executed from, large enough for most; in words.
    pub store: Result<String, Obstacle>,
    /// What the audit view needs: a glibc that it was tried with, and a place for libraries; both in words.
    pub audit: Result<String, Obstacle>,
    /// The bootstrapper runs out of memory; else ranks start without it.
    pub memfd: Result<(), Obstacle>,
}

/// How ranks see the captured files, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Directories from FUSE, staged files bound over them.
    NamespaceFuse,
    /// Staged files bound over the originals; names are looked up in the original directories.
    NamespaceBinds,
    /// Libraries from the store through the dynamic linker, everything else plainly.
    Audit,
    /// Plainly, from the shared file system.
    Plain,
}

impl Capabilities {
    /// Tries everything but what `without` forbids, in at most ten seconds. Leaves nothing behind.
    ///
    /// # Errors
    /// No child can be made, also because this process has threads: probe before the first one.
    pub fn probe(without: &Without) -> Result<Capabilities> {
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).op("make a pipe")?;
        let parent = nix::unistd::getpid();
        let Some(child) = process::fork().op("fork a process to try things in")? else {
            drop(reader);
            if process::die_with(parent) {
                attempt(without, &mut File::from(writer));
            }
            process::leave(0);
        };
        drop(writer);
        let answers = listen(reader, child);
        let verdict = |name, remedy: &dyn Fn() -> String| {
            answer(&answers, name).map_err(|cause| {
                let remedy = if cause.contains(VARIABLE) { format!("unset {VARIABLE}") } else { remedy() };
                Obstacle { cause, remedy }
            })
        };
        let namespaces = verdict("namespaces", &|| namespace_remedy(number)).map(drop);
        let fuse = verdict("fuse", &|| match &namespaces {
            Ok(()) => "ask the administrator to load the module fuse and to give /dev/fuse mode 0666".to_owned(),
            Err(_) => "namespaces come first".to_owned(),
        });
        let store = verdict("store", &|| match &namespaces {
            Ok(()) => "name another directory with --store DIR, or ask for more memory".to_owned(),
            Err(_) => "namespaces come first".to_owned(),
        });
        let memfd = verdict("memfd", &|| {
            "ask the administrator for vm.memfd_noexec below 2, and whether a security module forbids it".to_owned()
        });
        Ok(Capabilities { namespaces, fuse, store, audit: audit(without), memfd: memfd.map(drop) })
    }

    /// The view that these abilities allow.
    pub fn tier(&self) -> Tier {
        match (&self.namespaces, &self.fuse) {
            (Ok(()), Ok(_)) => Tier::NamespaceFuse,
            (Ok(()), Err(_)) => Tier::NamespaceBinds,
            (Err(_), _) if self.audit.is_ok() => Tier::Audit,
            (Err(_), _) => Tier::Plain,
        }
    }
}

/// What the audit view would work with.
fn audit(without: &Without) -> Result<String, Obstacle> {
    let place = directory::executable(without).map_err(|error| Obstacle {
        cause: error.bare().to_string(),
        remedy: "name a directory from which programs can be executed with --store DIR".to_owned(),
    })?;
    let version = node::glibc().unwrap_or_else(|| "none".to_owned());
    if program::is_new_enough(&version) {
        return Ok(format!("glibc {version}, libraries in {}", place.display()));
    }
    let (major, minor) = program::OLDEST;
    Err(Obstacle {
        cause: format!("glibc is {version}, and {major}.{minor} the oldest tried"),
        remedy: "programs with a glibc of their own can be audited".to_owned(),
    })
}

/// In the child: one line per ability, `NAME ok DETAIL` or `NAME no CAUSE`.
fn attempt(without: &Without, out: &mut File) {
    let memfd = without.denies(Ability::Memfd).map_or_else(|| try_memfd().map_err(|e| e.to_string()), Err);
    say(out, "memfd", memfd.map(|()| String::new()));
    let memory = memory::for_files();
    let base = match without.denies(Ability::Userns) {
        Some(cause) => Err(cause),
        None => Base::create(Place::Memory(memory), without).map_err(|failure| failure.error.bare().to_string()),
    };
    say(out, "namespaces", base.as_ref().map(|_| String::new()).map_err(Clone::clone));
    let store = match &base {
        Err(_) => Err("there is no namespace to make it in".to_owned()),
        Ok(base) => base.spilled.clone().map_or_else(|| Ok(format!("{} MiB", memory >> 20)), Err),
    };
    say(out, "store", store);
    let fuse = match (without.denies(Ability::Fuse), &base) {
        (Some(cause), _) => Err(cause),
        (None, Err(_)) => Err("there is no namespace to mount it in".to_owned()),
        (None, Ok(base)) => try_fuse(base),
    };
    if let Ok(base) = &base {
        base.remove_store();
    }
    say(out, "fuse", fuse);
}

fn say(out: &mut File, name: &str, result: Result<String, String>) {
    let (word, text) = match &result {
        Ok(detail) => ("ok", detail),
        Err(cause) => ("no", cause),
    };
    // One write: the reader may be gone, and then nobody asks any more.
    let _ = out.write_all(format!("{name} {word} {}\n", text.replace('\n', " ")).as_bytes());
}

/// Starts the bootstrapper as a rank that becomes nothing.
fn try_memfd() -> std::io::Result<()> {
    let plan = Program { ranks: 1, ..Program::default() }.write()?;
    let mut starter = Starter::new(plan, Some(boot::image()?))?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    waitpid(starter.start(0, [null.as_fd(); 4])?, None)?;
    match starter.failed(0).find(|(stage, _)| matches!(stage, Stage::Image | Stage::Boot)) {
        Some((_, errno)) => Err(std::io::Error::from_raw_os_error(errno)),
        None => Ok(()),
    }
}

/// Mounts a view that nobody serves; the kernel's first request tells the version of its protocol.
fn try_fuse(base: &Base) -> Result<String, String> {
    let mounted = Mounts::create(base.sealed.as_fd(), vec![b"/usr".to_vec()]).and_then(|mut view| view.mount_fuse());
    let (fuse, _) = mounted.map_err(|failure| {
        let what = if failure.lacks == Some(Lacks::Fuse) { "" } else { "the view: " };
        format!("{what}{}", failure.error.bare())
    })?;
    // linux/fuse.h: struct fuse_in_header is 40 bytes; struct fuse_init_in starts with major, minor.
    const HEADER: usize = 40;
    let mut request = vec![0; 64 << 10];
    let len = rustix::io::read(&fuse, &mut request).map_err(|e| format!("/dev/fuse: {e}"))?;
    let word = |at: usize| request[..len].get(at..at + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
    match (word(HEADER), word(HEADER + 4)) {
        (Some(major), Some(minor)) => Ok(format!("{major}.{minor}")),
        _ => Err("/dev/fuse: its first request is too short".to_owned()),
    }
}

/// Everything the child says until it ends or its time is over; then it is no more.
fn listen(reader: OwnedFd, child: Pid) -> String {
    let end = Instant::now() + DEADLINE;
    let mut reader = File::from(reader);
    let mut heard = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let left = PollTimeout::try_from(end.saturating_duration_since(Instant::now())).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(reader.as_fd(), PollFlags::POLLIN)], left) {
            Err(nix::errno::Errno::EINTR) => continue,
            Ok(1..) => {}
            Ok(_) | Err(_) => break,
        }
        match reader.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(len) => heard.extend_from_slice(&buffer[..len]),
        }
    }
    let _ = kill(child, Signal::SIGKILL);
    // It may hang in the kernel; then init reaps it after us.
    while Instant::now() < end + Duration::from_secs(1) {
        match waitpid(child, Some(WaitPidFlag::WNOHANG)) {
            Ok(nix::sys::wait::WaitStatus::StillAlive) => std::thread::sleep(Duration::from_millis(1)),
            _ => break,
        }
    }
    String::from_utf8_lossy(&heard).into_owned()
}

fn answer(answers: &str, name: &str) -> Result<String, String> {
    let line = answers.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    match line.and_then(|line| line.split_once(' ')) {
        Some(("ok", detail)) => Ok(detail.to_owned()),
        Some((_, cause)) => Err(cause.to_owned()),
        None => Err(format!("trying it did not end within {} s, or ended badly", DEADLINE.as_secs())),
    }
}

/// Which setting stands in the way of namespaces; `setting` reads a file of /proc.
fn namespace_remedy(setting: impl Fn(&'static str) -> Option<u64>) -> String {
    let culprits = [
        ("/proc/sys/user/max_user_namespaces", 0, "user.max_user_namespaces=10000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", 0, "kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            1,
            "kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile with `userns,` for hpcrt",
        ),
    ];
    let found = culprits.iter().find(|(path, bad, _)| setting(path) == Some(*bad));
    match found {
        Some((_, _, remedy)) => format!("ask the administrator for {remedy}"),
        None => {
            "ask the administrator for user namespaces (in a container: for the right to unshare and mount)".to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_in_the_way_is_named() {
        let only = |which: &'static str, value| move |path: &'static str| path.ends_with(which).then_some(value);
        assert!(namespace_remedy(only("max_user_namespaces", 0)).ends_with("user.max_user_namespaces=10000"));
        assert!(namespace_remedy(only("restrict_unprivileged_userns", 1)).contains("AppArmor"));
        assert!(namespace_remedy(only("max_user_namespaces", 96_365)).contains("container"));
    }

    #[test]
    fn answers_that_do_not_come_are_obstacles() {
        let answers = "uffd ok \nnamespaces no cannot x: y\n";
        assert_eq!(answer(answers, "uffd"), Ok(String::new()));
        assert_eq!(answer(answers, "namespaces"), Err("cannot x: y".to_owned()));
        assert!(answer(answers, "fuse").unwrap_err().contains("10 s"));
    }

    #[test]
    fn the_best_tier_that_is_there() {
        let no = || Obstacle { cause: String::new(), remedy: String::new() };
        let ok = || Ok(String::new());
        let mut found =
            Capabilities { namespaces: Ok(()), fuse: Ok("7.40".into()), store: ok(), audit: ok(), memfd: Ok(()) };
        assert_eq!(found.tier(), Tier::NamespaceFuse);
        found.fuse = Err(no());
        assert_eq!(found.tier(), Tier::NamespaceBinds);
        found.namespaces = Err(no());
        assert_eq!(found.tier(), Tier::Audit);
        found.audit = Err(no());
        assert_eq!(found.tier(), Tier::Plain);
    }
}
