//! Where the two families of dynamic linkers look for a library, and what they make of a file that cannot be opened or loaded.
//! glibc: `elf/dl-load.c`; musl: `ldso/dynlink.c`. Nothing here touches the file system.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::arch::{Arch, Cpu};
use super::closure::How;
use super::elf::{Elf, Needed, Unusable};
use super::ldcache::LdCache;
use super::ldso::Ldso;
use super::search::{Dirs, Tokens, musl_dirs, musl_rpath};

/// The dynamic linker that a program names.
#[derive(Debug)]
pub enum Linker {
    Glibc(Box<Glibc>),
    Musl(Musl),
}

/// See [`Linker`].
#[derive(Debug)]
pub struct Glibc {
    pub ldso: Ldso,
    pub cpu: Cpu,
    pub cache: Option<LdCache>,
    /// See [`Ldso::subdirectories`].
    pub subdirectories: Vec<String>,
    library_path: Dirs,
    system: Dirs,
}

/// See [`Linker`].
#[derive(Debug)]
pub struct Musl {
    library_path: Dirs,
    system: Dirs,
}

/// An object as the search sees it.
#[derive(Debug, Default)]
pub struct Linked {
    /// Index of the object that asked for it first.
    pub loader: Option<usize>,
    pub needed: Vec<Needed>,
    has_runpath: bool,
    no_default_libs: bool,
    /// The directory of the object, for names with tokens.
    origin: Vec<u8>,
    rpath: Dirs,
    runpath: Dirs,
}

/// One part of a search.
#[derive(Debug, Clone)]
pub enum Step {
    Directories(How, Dirs),
    Cache,
}

/// What follows from a candidate that did not become an object.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The next candidate.
    Next,
    /// The next step of the search.
    NextStep,
    /// The program does not start.
    End,
}

/// Why a candidate did not become an object.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("{0}")]
    Open(#[from] io::Error),
    #[error("{0}")]
    Content(#[from] Unusable),
}

impl Linker {
    /// The linker whose bytes are `interpreter`, for a program in directory `origin`.
    pub fn glibc(interpreter: &[u8], arch: &'static Arch, origin: &[u8], library_path: Option<&OsStr>) -> Linker {
        let mut cpu = Cpu::detect(arch);
        let ldso = Ldso::scan(interpreter, &cpu);
        if !ldso.hwcaps {
            cpu.hwcaps.clear();
        }
        if !ldso.legacy {
            cpu.legacy.clear();
        }
        let mut glibc = Glibc {
            cache: None,
            subdirectories: ldso.subdirectories(&cpu),
            library_path: Dirs::default(),
            system: ldso.system_dirs.clone().into(),
            ldso,
            cpu,
        };
        glibc.library_path = glibc.tokens(origin).dirs(library_path.unwrap_or_default().as_bytes(), b":;");
        Linker::Glibc(Box::new(glibc))
    }

    /// The linker of musl, whose default directories are the content of its path file, if there is one.
    pub fn musl(path_file: Option<&[u8]>, library_path: Option<&OsStr>) -> Linker {
        let system = musl_dirs(path_file.unwrap_or(b"/lib:/usr/local/lib:/usr/lib"));
        Linker::Musl(Musl { library_path: musl_dirs(library_path.unwrap_or_default().as_bytes()), system })
    }

    /// Whether the interpreter at `path` is musl's, by its name.
    pub fn is_musl(path: &Path) -> bool {
        path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld-musl-"))
    }

    /// The path file of musl for an interpreter at `path`: below the prefix it is installed in.
    pub fn musl_path_file(path: &Path, arch: &Arch) -> std::path::PathBuf {
        let prefix = path.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
        prefix.join(format!("etc/ld-musl-{}.path", arch.musl_name))
    }

    /// Prepares the search paths of an object that lies in directory `origin` and was first asked for by `loader`.
    pub fn link(&self, elf: &Elf, origin: Vec<u8>, loader: Option<usize>) -> Linked {
        let rpath = elf.rpath.as_deref().map(OsStr::as_bytes);
        let runpath = elf.runpath.as_deref().map(OsStr::as_bytes);
        let (rpath_dirs, runpath_dirs) = match self {
            Linker::Glibc(glibc) => {
                let tokens = glibc.tokens(&origin);
                (tokens.dirs(rpath.unwrap_or_default(), b":"), tokens.dirs(runpath.unwrap_or_default(), b":"))
            }
            Linker::Musl(_) => (musl_rpath(runpath.or(rpath).unwrap_or_default(), &origin), Dirs::default()),
        };
        Linked {
            loader,
            needed: elf.needed.clone(),
            has_runpath: runpath.is_some(),
            no_default_libs: elf.no_default_libs,
            origin,
            rpath: rpath_dirs,
            runpath: runpath_dirs,
        }
    }

    /// The steps of a search for a name without a slash, on behalf of object `loader`; `main` is the program's index.
    pub fn plan(&self, linked: &[Linked], loader: Option<usize>, main: usize) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut push = |how, dirs: &Dirs| {
            if !dirs.is_empty() {
                steps.push(Step::Directories(how, dirs.clone()));
            }
        };
        let chain = std::iter::successors(loader, |&index| linked[index].loader);
        let asker = loader.map(|index| &linked[index]);
        match self {
            Linker::Glibc(glibc) => {
                if !asker.is_some_and(|asker| asker.has_runpath) {
                    let mut met_main = false;
                    for index in chain {
                        push(How::RPath, &linked[index].rpath);
                        met_main |= index == main;
                    }
                    if !met_main {
                        push(How::RPath, &linked[main].rpath);
                    }
                }
                push(How::LibraryPath, &glibc.library_path);
                if let Some(asker) = asker {
                    push(How::RunPath, &asker.runpath);
                }
                steps.push(Step::Cache);
                if !asker.is_some_and(|asker| asker.no_default_libs) {
                    steps.push(Step::Directories(How::Default, glibc.system.clone()));
                }
            }
            Linker::Musl(musl) => {
                push(How::LibraryPath, &musl.library_path);
                for index in chain {
                    push(How::RPath, &linked[index].rpath);
                }
                push(How::Default, &musl.system);
            }
        }
        steps
    }

    /// The path that the cache has for `name`, unless `asker` refuses what lies in the default directories.
    pub fn cached(&self, name: &OsStr, asker: &Linked) -> Option<Vec<u8>> {
        let Linker::Glibc(glibc) = self else { return None };
        let path = glibc.cache.as_ref()?.lookup(name, &glibc.cpu)?.as_bytes().to_vec();
        let refused = asker.no_default_libs && glibc.system.iter().any(|dir| path.starts_with(dir));
        (!refused).then_some(path)
    }

    /// Replaces the tokens in a name that `asker` asks for.
    pub fn expand(&self, name: &[u8], asker: &Linked) -> Vec<u8> {
        match self {
            Linker::Glibc(glibc) => glibc.tokens(&asker.origin).expand(name),
            Linker::Musl(_) => name.to_vec(),
        }
    }

    /// Whether `name` is the linker itself, whatever its path: musl's is also its libc.
    pub fn is_itself(&self, name: &[u8]) -> bool {
        let libc = ["c.", "pthread.", "rt.", "m.", "dl.", "util.", "xnet."];
        matches!(self, Linker::Musl(_))
            && name.strip_prefix(b"lib").is_some_and(|rest| libc.iter().any(|part| rest.starts_with(part.as_bytes())))
    }

    /// How the linker goes on after `refusal`.
    pub fn judge(&self, refusal: &Refusal) -> Verdict {
        use rustix::io::Errno;
        let errno = |error: &io::Error| error.raw_os_error().map(Errno::from_raw_os_error);
        match (self, refusal) {
            (Linker::Glibc(_), Refusal::Open(error)) => match errno(error) {
                Some(Errno::NOENT | Errno::ACCESS) => Verdict::Next,
                _ => Verdict::NextStep,
            },
            (Linker::Glibc(_), Refusal::Content(Unusable::OtherAbi)) => Verdict::Next,
            (Linker::Musl(_), Refusal::Open(error)) => match errno(error) {
                Some(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::NAMETOOLONG) => Verdict::Next,
                _ => Verdict::End,
            },
            (_, Refusal::Content(_)) => Verdict::End,
        }
    }
}

impl Glibc {
    fn tokens<'a>(&'a self, origin: &'a [u8]) -> Tokens<'a> {
        let platform = self.cpu.platform.as_deref().unwrap_or_default().as_bytes();
        Tokens { origin, lib: &self.ldso.lib, platform }
    }
}
