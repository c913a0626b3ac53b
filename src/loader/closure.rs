//! Everything that must be present for a program to start: the program, its interpreters and its libraries, found as the dynamic
//! linker of the program would find them, without running anything.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::elf::Tls;
use super::probe::{Inode, Listing, Probe};
use super::resolver::Resolver;
use crate::Result;

/// The part of the program's future environment that steers the search.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    /// Where relative paths start. Absolute.
    pub cwd: PathBuf,
    /// `LD_LIBRARY_PATH`.
    pub library_path: Option<OsString>,
    /// `LD_PRELOAD`.
    pub preload: Option<OsString>,
    /// `PATH`, for scripts that start their interpreter through `env`.
    pub path: Option<OsString>,
}

impl Environment {
    /// That of a process with these variables (`NAME=VALUE`, no name twice) and this working directory.
    pub fn of(variables: &[Vec<u8>], cwd: &[u8]) -> Environment {
        let var = |name| variable(variables, name);
        Environment {
            cwd: OsStr::from_bytes(cwd).into(),
            library_path: var("LD_LIBRARY_PATH"),
            preload: var("LD_PRELOAD"),
            path: var("PATH"),
        }
    }

    /// That of this process.
    pub fn current() -> std::io::Result<Environment> {
        let var = std::env::var_os;
        Ok(Environment {
            cwd: std::env::current_dir()?,
            library_path: var("LD_LIBRARY_PATH"),
            preload: var("LD_PRELOAD"),
            path: var("PATH"),
        })
    }
}

/// The value of a variable among `NAME=VALUE`.
pub fn variable(variables: &[Vec<u8>], name: &str) -> Option<OsString> {
    let found = variables.iter().find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b"="));
    found.map(|value| OsStr::from_bytes(value).to_owned())
}

/// Why an object is where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// A script, whose interpreter follows.
    Script,
    /// `env`, on the way from a script to its interpreter.
    Env,
    Program,
    /// The dynamic linker (`PT_INTERP`).
    Interpreter,
    /// `LD_PRELOAD` or `/etc/ld.so.preload`.
    Preload,
    /// Asked for by a path, not by a name.
    Path,
    /// `DT_RPATH` of the asking object or of one that led to it; with musl also `DT_RUNPATH`.
    RPath,
    /// `LD_LIBRARY_PATH`.
    LibraryPath,
    /// `DT_RUNPATH` of the asking object.
    RunPath,
    /// `ld.so.cache`.
    Cache,
    /// The directories built into the dynamic linker.
    Default,
}

impl How {
    /// A word or two for reports.
    pub fn as_str(self) -> &'static str {
        match self {
            How::Script => "script",
            How::Env => "env",
            How::Program => "program",
            How::Interpreter => "interpreter",
            How::Preload => "preload",
            How::Path => "path",
            How::RPath => "rpath",
            How::LibraryPath => "LD_LIBRARY_PATH",
            How::RunPath => "runpath",
            How::Cache => "ld.so.cache",
            How::Default => "default",
        }
    }
}

/// A file of the closure.
#[derive(Debug, Clone)]
pub struct Object {
    /// As the kernel or the dynamic linker opens it; may be relative to the working directory and pass symbolic links.
    pub path: PathBuf,
    /// Without symbolic links.
    pub canonical: PathBuf,
    /// `DT_SONAME`.
    pub soname: Option<OsString>,
    /// Index of the object that asked for it first. `None` only for the first.
    pub needed_by: Option<usize>,
    pub how: How,
    /// Bytes.
    pub size: u64,
    pub inode: Inode,
    pub tls: Option<Tls>,
    /// What it asks for, in order, with the index of the object that answers; `None`: missing.
    pub needs: Vec<(OsString, Option<usize>)>,
}

/// A library that the dynamic linker would not find, or could not load.
#[derive(Debug, Clone)]
pub struct Missing {
    pub name: OsString,
    /// Index of the object that asks for it.
    pub needed_by: usize,
    /// Without it the program starts all the same (a preload, a `DT_AUXILIARY`).
    pub optional: bool,
    /// The directories looked at, in order; `ld.so.cache` is among them where it was asked.
    pub searched: Vec<PathBuf>,
    /// Why the search ended early, if it did: the file found and what is wrong with it.
    pub reason: Option<String>,
}

/// What [`resolve`] found. The same files give the same closure.
#[derive(Debug, Default)]
pub struct Closure {
    /// In load order: scripts, program, interpreter, preloads, libraries breadth-first.
    pub objects: Vec<Object>,
    /// Index of the executable; all before it are scripts (and `env`).
    pub program: usize,
    /// Index of the dynamic linker; `None` for a static program.
    pub interpreter: Option<usize>,
    pub missing: Vec<Missing>,
    /// Every directory that was listed, once each: a snapshot of what it held.
    pub directories: Vec<Arc<Listing>>,
    /// Somewhere else another library may be found: a directory of a search is relative to the working directory.
    pub depends_on_cwd: bool,
}

/// Finds the closure of `program` (a path, relative ones from the working directory), handing every file over, still open, as it is
/// found: `on_object` is called once per object, in the order of [`Closure::objects`], with the file's own cursor untouched.
///
/// Missing libraries are part of the result. Errors: `program` or an interpreter of it cannot be used at all (a usage error), or
/// this process is out of descriptors or memory.
pub fn resolve<P: Probe>(
    probe: &P,
    environment: &Environment,
    program: &Path,
    on_object: impl FnMut(&Object, P::File),
) -> Result<Closure> {
    Resolver::new(probe, environment, on_object).run(program)
}
