//! The socket through which a front end is talked to: in a directory that only its owner can enter. Jobs have one while they run, their
//! names begin with [`JOB`]; resident sessions have one for good, and so have memory servers, whose names begin with [`MEMORY`].

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::unistd::Pid;

use crate::net::auth;
use crate::net::seqpacket::{Listener, Seqpacket};
use crate::sys::process;
use crate::{Error, Result, error::Context};

/// First letter of the name of a job that is no session's; a session's name is hexadecimal.
pub const JOB: char = 'x';

/// That of a memory server's.
pub const MEMORY: char = 'm';

/// A socket that is being made has a name with this in front.
const UNFINISHED: char = '.';

fn place() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|d| d.is_dir());
    runtime.map_or_else(|| format!("/tmp/hpcrt-{}", rustix::process::getuid().as_raw()).into(), |d| d.join("hpcrt"))
}

/// The directory of this user's sockets, if there is one.
///
/// # Errors
/// Others can reach into it.
fn directory() -> Result<Option<PathBuf>> {
    let (path, user) = (place(), rustix::process::getuid());
    let meta = match fs::symlink_metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        meta => meta.op_on("inspect", &path)?,
    };
    if !meta.is_dir() || meta.uid() != user.as_raw() || meta.mode() & 0o077 != 0 {
        let remedy = "remove it, or set XDG_RUNTIME_DIR to a directory that only you can reach";
        return Err(Error::new("use", "it is not a directory that only you can reach").on(path).remedy(remedy));
    }
    Ok(Some(path))
}

/// [`directory`], made where it is missing.
fn made_directory() -> Result<PathBuf> {
    let path = place();
    match fs::DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error).op_on("make", &path),
        _ => {}
    }
    directory()?.ok_or_else(|| Error::new("make", "somebody removes it").on(path))
}

fn check(name: &str) -> Result<()> {
    if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric()) {
        return Err(Error::usage("find it", "that is no name of a session, a job or a memory server").on(name));
    }
    Ok(())
}

/// Connects to a session or job of this user on this host. A socket that nobody serves any more is removed.
///
/// # Errors
/// There is none of that name, or so many wait for it that it must hang.
pub fn connect(name: &str) -> Result<Seqpacket> {
    check(name)?;
    let none = || {
        let no = Error::usage("find it", "there is no such session, job or memory server on this host").on(name);
        Err(no.remedy("hpcrt status shows yours"))
    };
    let Some(path) = directory()?.map(|directory| directory.join(name)) else { return none() };
    match Seqpacket::connect(&path) {
        Ok(connection) => Ok(connection),
        Err(rustix::io::Errno::AGAIN) => Err(Error::new("reach it", "it has not answered others for long").on(name)),
        Err(error) => {
            if error == rustix::io::Errno::CONNREFUSED {
                let _ = fs::remove_file(path);
            }
            none()
        }
    }
}

/// Names of the sockets in [`directory`].
///
/// # Errors
/// The directory cannot be used.
pub fn names() -> Result<Vec<String>> {
    let Some(path) = directory()? else { return Ok(Vec::new()) };
    let entries = fs::read_dir(&path).op_on("list", &path)?;
    let names = entries.flatten().filter_map(|e| e.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with(UNFINISHED)).collect();
    names.sort_unstable();
    Ok(names)
}

/// Removes the sockets of processes that were killed.
fn sweep(directory: &Path) {
    /// Making a socket takes no longer.
    const UNFINISHED_FOR: Duration = Duration::from_secs(60);
    for name in names().unwrap_or_default() {
        let _ = connect(&name);
    }
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let made = entry.metadata().and_then(|meta| meta.modified());
        let old = made.is_ok_and(|made| SystemTime::now().duration_since(made).is_ok_and(|age| age > UNFINISHED_FOR));
        if old && entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A fresh name for a session.
pub fn session_name() -> String {
    auth::random_name(8)
}

/// A fresh name for a job of its own.
pub fn job_name() -> String {
    format!("{JOB}{}", session_name())
}

/// A fresh name for a memory server.
pub fn lender_name() -> String {
    format!("{MEMORY}{}", session_name())
}

/// A process that removes the socket when the front end is gone, however it ended.
#[derive(Debug)]
pub struct Porter {
    /// It acts at the end of this pipe.
    told: Option<File>,
    pid: Pid,
}

impl Porter {
    /// Forks it; this process must not have threads yet.
    ///
    /// # Errors
    /// `fork(2)`'s, and no descriptor is free.
    pub fn start() -> Result<Porter> {
        let begin = || {
            let (hear, told) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
            if let Some(pid) = process::fork()? {
                return Ok(Porter { told: Some(told.into()), pid });
            }
            drop(told);
            let watched = Porter::watch(hear.into());
            process::leave(i32::from(watched.is_err()))
        };
        begin().map_err(|error: io::Error| Error::new("start who removes the socket", error))
    }

    fn watch(mut hear: File) -> io::Result<()> {
        // Who kills the front end's process group does not mean it, and who reads our output does not wait for it.
        let _ = rustix::process::setsid();
        rustix::thread::set_name(c"hpcrt-porter")?;
        process::let_go_of_streams()?;
        let mut path = Vec::new();
        hear.read_to_end(&mut path)?;
        if !path.is_empty() {
            remove(Path::new(OsStr::from_bytes(&path)));
        }
        Ok(())
    }
}

impl Drop for Porter {
    fn drop(&mut self) {
        self.told.take();
        process::await_end(self.pid, Duration::from_secs(1));
    }
}

/// Removes a socket, and their directory with the last of them.
fn remove(path: &Path) {
    let _ = fs::remove_file(path);
    let _ = fs::remove_file(unfinished(path));
    if let Some(directory) = path.parent() {
        let _ = fs::remove_dir(directory);
    }
}

/// The name of a socket while it is being made.
fn unfinished(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{UNFINISHED}{name}"))
}

/// A listening socket; its name disappears with this.
#[derive(Debug)]
pub struct Door {
    listener: Listener,
    path: PathBuf,
    _porter: Porter,
}

impl Drop for Door {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

impl Door {
    /// Opens the socket called `name`, and removes those that nobody serves any more.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(name: &str, mut porter: Porter) -> Result<Door> {
        check(name)?;
        // Before anybody is told to remove something: what is not ours alone is left as it is.
        directory()?;
        let path = place().join(name);
        if let Some(told) = &mut porter.told {
            told.write_all(path.as_os_str().as_bytes()).op("tell who removes the socket")?;
        }
        let unfinished = unfinished(&path);
        let bind = || made_directory().and_then(|_| Listener::bind(&unfinished, 64));
        // The owner of the last socket may have removed the directory meanwhile.
        let listener = bind().or_else(|_| bind())?;
        sweep(&place());
        // Only now under its name: who found it before would take it for one that nobody serves.
        fs::rename(&unfinished, &path).op_on("make the socket", &path)?;
        Ok(Door { listener, path, _porter: porter })
    }

    /// The next command of this user that connects.
    pub async fn accept(&self) -> Seqpacket {
        self.listener.accept().await
    }
}
