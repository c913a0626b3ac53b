//! The walk that [`closure::resolve`](super::closure::resolve) makes: scripts to the program, then its libraries breadth-first.
//!
//! The order of loading decides which of two files wins a name, so one thread decides. Since every file on a shared file system
//! costs round trips, the first candidates of a batch of names are opened and read by several threads beforehand; what they opened
//! is exactly what the deciding thread then asks for, unless two objects of one batch answer to one name.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use super::arch;
use super::closure::{Closure, Environment, How, Missing, Object};
use super::elf::{Abi, Elf, Needed, Unusable, read_up_to};
use super::ldcache::{CACHE_MAX, LdCache};
use super::ldso::LDSO_MAX;
use super::linker::{Linked, Linker, Refusal, Step, Verdict};
use super::probe::{Directories, Directory, Inode, Opened, Probe};
use super::script::{DEPTH_MAX, HEAD, Shebang, which};
use crate::error::{Context, Error, Result};

/// Names looked up ahead of their turn; also bounds the descriptors held.
const BATCH: usize = 64;
/// Threads that open files.
const READERS: usize = 8;
/// Bytes of `/etc/ld.so.preload` and of musl's path file, at most.
const LIST_MAX: usize = 64 << 10;

type Fetched<P> = std::result::Result<(Opened<<P as Probe>::File>, Elf), Refusal>;

/// See the module.
pub struct Resolver<'a, P: Probe, F> {
    probe: &'a P,
    environment: &'a Environment,
    on_object: F,
    closure: Closure,
    /// For each object of the closure.
    linked: Vec<Linked>,
    names: HashMap<Vec<u8>, usize>,
    inodes: HashMap<Inode, usize>,
    directories: Directories<'a, P>,
    /// Search directories with their existing subdirectories, in order of preference.
    places: HashMap<Vec<u8>, Rc<[Place]>>,
    fetched: HashMap<Vec<u8>, Fetched<P>>,
}

/// The program whose libraries are loaded, and by what.
struct Main {
    linker: Linker,
    abi: Abi,
    /// Index of the program.
    index: usize,
    /// Index of its dynamic linker.
    interpreter: usize,
}

impl Main {
    fn is_glibc(&self) -> bool {
        matches!(self.linker, Linker::Glibc(_))
    }
}

/// A directory in which a file would be opened.
struct Place {
    prefix: Vec<u8>,
    directory: Directory,
}

/// Where a search stands.
#[derive(Default, Clone, Copy)]
struct Cursor {
    step: usize,
    dir: usize,
    place: usize,
}

/// A name that an object asks for.
struct Request {
    /// `None` for the preloads of musl, which no object asks for.
    loader: Option<usize>,
    needed: Needed,
    preload: bool,
}

impl<P: Probe, F> std::fmt::Debug for Resolver<'_, P, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolver").field("closure", &self.closure).finish_non_exhaustive()
    }
}

impl<'a, P: Probe, F: FnMut(&Object, P::File)> Resolver<'a, P, F> {
    /// See [`closure::resolve`](super::closure::resolve).
    pub fn new(probe: &'a P, environment: &'a Environment, on_object: F) -> Self {
        Resolver {
            probe,
            environment,
            on_object,
            closure: Closure::default(),
            linked: Vec::new(),
            names: HashMap::new(),
            inodes: HashMap::new(),
            directories: Directories::new(probe, &environment.cwd),
            places: HashMap::new(),
            fetched: HashMap::new(),
        }
    }

    /// Walks from `program` to its last library.
    pub fn run(mut self, program: &Path) -> Result<Closure> {
        let (path, opened, elf) = self.follow_scripts(program)?;
        let Some(interpreter) = elf.interpreter.clone() else {
            self.closure.program = self.add((path, How::Program), self.last(), opened, Some(&elf), Linked::default());
            return Ok(self.closure);
        };
        let abi = elf.abi;
        let Some(arch) = arch::of(abi.machine, abi.is_64) else {
            let cause = format!("its machine (ELF number {}) is not supported", abi.machine);
            return Err(Error::usage("resolve the libraries of", cause).on(path));
        };
        let interpreter = PathBuf::from(interpreter);
        let (loader_file, loader_elf) = fetch(self.probe, &self.environment.cwd.join(&interpreter), Some(abi))
            .map_err(|cause| {
                let cause = format!("its dynamic linker {} cannot be used: {cause}", interpreter.display());
                Error::usage("start", cause).on(&path)
            })?;

        let library_path = self.environment.library_path.as_deref();
        let origin = parent(opened.canonical.as_os_str().as_bytes());
        let is_musl = Linker::is_musl(&interpreter);
        let mut linker = if is_musl {
            let list = self.read_list(&Linker::musl_path_file(&interpreter, arch), LIST_MAX);
            Linker::musl(list.as_deref(), library_path)
        } else {
            let bytes = read_up_to(&loader_file.file, 0, loader_file.size().min(LDSO_MAX as u64) as usize)
                .op_on("read", &interpreter)?;
            Linker::glibc(&bytes, arch, &origin, library_path)
        };
        if let Linker::Glibc(glibc) = &mut linker {
            glibc.cache = self.read_list(Path::new(&glibc.ldso.cache), CACHE_MAX).and_then(LdCache::parse);
        }

        let linked = linker.link(&elf, origin, None);
        let main = self.add((path, How::Program), self.last(), opened, Some(&elf), linked);
        let itself = (interpreter.clone(), How::Interpreter);
        let own = self.add(itself, Some(main), loader_file, Some(&loader_elf), Linked::default());
        (self.closure.program, self.closure.interpreter) = (main, Some(own));
        self.names.insert(interpreter.into_os_string().into_vec(), own);
        if !is_musl {
            let sonames = [(elf.soname, main), (loader_elf.soname, own)];
            for (name, index) in sonames.into_iter().filter_map(|(name, index)| Some((name?, index))) {
                self.names.insert(name.into_vec(), index);
            }
        }
        self.load_libraries(&Main { linker, abi, index: main, interpreter: own })?;
        self.closure.directories = self.directories.listed;
        self.closure.depends_on_cwd = self.directories.depends_on_cwd;
        Ok(self.closure)
    }

    /// Index of the object before the one that is about to be added.
    fn last(&self) -> Option<usize> {
        self.closure.objects.len().checked_sub(1)
    }

    /// Opens `program` and, while it is a script, its interpreter.
    fn follow_scripts(&mut self, program: &Path) -> Result<(PathBuf, Opened<P::File>, Elf)> {
        let mut path = program.to_path_buf();
        for _ in 0..=DEPTH_MAX {
            let opened = self.probe.open(&self.environment.cwd.join(&path)).map_err(|cause| {
                let error = Error::usage("open", cause).on(&path);
                match self.closure.objects.last() {
                    Some(script) => error.remedy(format!("it is the interpreter of {}", script.path.display())),
                    None => error,
                }
            })?;
            if !is_regular(&opened) {
                return Err(Error::usage("resolve", "not a regular file").on(path));
            }
            let head = read_up_to(&opened.file, 0, HEAD).op_on("read", &path)?;
            let Some(shebang) = Shebang::parse(&head) else {
                let elf = Elf::read(&opened.file, None).map_err(|cause| Error::usage("resolve", cause).on(&path))?;
                return Ok((path, opened, elf));
            };
            let script = path.clone();
            self.add((path, How::Script), self.last(), opened, None, Linked::default());
            path = PathBuf::from(&shebang.interpreter);
            if let Some(target) = shebang.env_target() {
                let Environment { cwd, path: dirs, .. } = self.environment;
                let found = which(self.probe, cwd, dirs.as_deref(), target).ok_or_else(|| {
                    let cause = format!("{} is not in PATH", target.display());
                    Error::usage("find the interpreter of", cause).on(&script)
                })?;
                let env = self.probe.open(&cwd.join(&path)).op_on("open", &path)?;
                let env_path = std::mem::replace(&mut path, found);
                self.add((env_path, How::Env), self.last(), env, None, Linked::default());
            }
        }
        Err(Error::usage("start", "too many interpreters, each a script for the next").on(program))
    }

    fn add(
        &mut self,
        (path, how): (PathBuf, How),
        needed_by: Option<usize>,
        opened: Opened<P::File>,
        elf: Option<&Elf>,
        linked: Linked,
    ) -> usize {
        let (size, inode, canonical) = (opened.size(), opened.inode(), opened.canonical);
        let (soname, tls) = (elf.and_then(|elf| elf.soname.clone()), elf.and_then(|elf| elf.tls));
        let object = Object { path, canonical, soname, needed_by, how, size, inode, tls, needs: Vec::new() };
        (self.on_object)(&object, opened.file);
        self.closure.objects.push(object);
        self.linked.push(linked);
        self.closure.objects.len() - 1
    }

    /// A small file of the system, if it is there.
    fn read_list(&self, path: &Path, max: usize) -> Option<Vec<u8>> {
        let opened = self.probe.open(&self.environment.cwd.join(path)).ok().filter(is_regular)?;
        read_up_to(&opened.file, 0, opened.size().min(max as u64) as usize).ok()
    }

    fn load_libraries(&mut self, main: &Main) -> Result<()> {
        let mut queue: VecDeque<Request> = VecDeque::new();
        let system = if main.is_glibc() { self.read_list(Path::new("/etc/ld.so.preload"), LIST_MAX) } else { None };
        let system = system.unwrap_or_default();
        let uncommented =
            system.split(|&byte| byte == b'\n').filter_map(|line| line.split(|&byte| byte == b'#').next());
        let user = self.environment.preload.as_deref().unwrap_or_default().as_bytes();
        let names = std::iter::once(user).chain(uncommented).flat_map(|list| list.split(|byte| b" \t:".contains(byte)));
        queue.extend(names.filter(|name| !name.is_empty()).map(|name| Request {
            loader: main.is_glibc().then_some(main.index),
            needed: Needed { name: OsStr::from_bytes(name).into(), optional: true },
            preload: true,
        }));
        queue.extend(requests(&mut self.linked, main.index));
        while !queue.is_empty() {
            let batch: Vec<_> = queue.drain(..queue.len().min(BATCH)).collect();
            self.fetch_ahead(main, &batch);
            for request in batch {
                let before = self.closure.objects.len();
                let target = self.load(main, &request)?;
                if !request.preload {
                    let loader = request.loader.unwrap_or(main.index);
                    self.closure.objects[loader].needs.push((request.needed.name, target));
                }
                for index in before..self.closure.objects.len() {
                    queue.extend(requests(&mut self.linked, index));
                }
            }
        }
        Ok(())
    }

    /// Opens the files that the batch will most likely ask for, in parallel.
    fn fetch_ahead(&mut self, main: &Main, batch: &[Request]) {
        let mut names = HashSet::new();
        let mut paths = Vec::new();
        for request in batch {
            let name = request.needed.name.as_bytes();
            if self.names.contains_key(name) || main.linker.is_itself(name) || !names.insert(name) {
                continue;
            }
            let asker = &self.linked[request.loader.unwrap_or(main.index)];
            if name.contains(&b'/') {
                paths.push(main.linker.expand(name, asker));
            } else {
                let plan = main.linker.plan(&self.linked, request.loader, main.index);
                paths.extend(self.next(main, request, &plan, &mut Cursor::default()).map(|(_, path)| path));
            }
        }
        paths.retain(|path| !self.fetched.contains_key(path));
        if paths.len() < 2 {
            return;
        }
        let (probe, cwd, abi) = (self.probe, &self.environment.cwd, main.abi);
        let (turn, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(paths.len())));
        std::thread::scope(|scope| {
            for _ in 0..READERS.min(paths.len()) {
                // Without a thread the deciding one opens the files itself.
                let _ = std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, || {
                    while let Some(path) = paths.get(turn.fetch_add(1, Ordering::Relaxed)) {
                        let result = fetch(probe, &cwd.join(OsStr::from_bytes(path)), Some(abi));
                        done.lock().expect("no holder of this lock can panic").push((path.clone(), result));
                    }
                });
            }
        });
        self.fetched.extend(done.into_inner().expect("no holder of this lock can panic"));
    }

    /// The next file that the linker would try for a name without a slash, as far as the listings do not rule it out.
    fn next(&mut self, main: &Main, request: &Request, plan: &[Step], at: &mut Cursor) -> Option<(How, Vec<u8>)> {
        let name = &request.needed.name;
        while let Some(step) = plan.get(at.step) {
            match step {
                Step::Cache => {
                    let asker = &self.linked[request.loader.unwrap_or(main.index)];
                    if at.dir == 0
                        && let Some(path) = main.linker.cached(name, asker)
                    {
                        at.dir = 1;
                        return Some((How::Cache, path));
                    }
                }
                Step::Directories(how, dirs) => {
                    while let Some(dir) = dirs.get(at.dir) {
                        let places = self.places(&main.linker, dir);
                        while let Some(place) = places.get(at.place) {
                            at.place += 1;
                            if place.directory.may_have(name) {
                                return Some((*how, [&place.prefix, name.as_bytes()].concat()));
                            }
                        }
                        (at.dir, at.place) = (at.dir + 1, 0);
                    }
                }
            }
            *at = Cursor { step: at.step + 1, ..Cursor::default() };
        }
        None
    }

    /// The existing subdirectories of a search directory, best first, and itself.
    fn places(&mut self, linker: &Linker, dir: &[u8]) -> Rc<[Place]> {
        if let Some(places) = self.places.get(dir) {
            return places.clone();
        }
        let plain = [String::new()];
        let subdirectories = match linker {
            Linker::Glibc(glibc) => &glibc.subdirectories[..],
            Linker::Musl(_) => &plain,
        };
        let mut places = Vec::new();
        for subdirectory in subdirectories {
            let mut prefix = dir.to_vec();
            let mut directory = self.directories.get(dir);
            for part in subdirectory.split_terminator('/') {
                if !directory.may_have(OsStr::new(part)) {
                    directory = Directory::Absent;
                    break;
                }
                prefix.extend_from_slice(part.as_bytes());
                prefix.push(b'/');
                directory = self.directories.get(&prefix);
            }
            if !matches!(directory, Directory::Absent) {
                places.push(Place { prefix, directory });
            }
        }
        let places: Rc<[Place]> = places.into();
        self.places.insert(dir.to_vec(), places.clone());
        places
    }

    /// Finds the object for one request: loaded already, or loaded now. `None`: missing, which is noted.
    fn load(&mut self, main: &Main, request: &Request) -> Result<Option<usize>> {
        let name = request.needed.name.as_bytes();
        if main.linker.is_itself(name) {
            return Ok(Some(main.interpreter));
        }
        let asker = &self.linked[request.loader.unwrap_or(main.index)];
        let direct = name.contains(&b'/').then(|| main.linker.expand(name, asker));
        let known = direct.as_deref().unwrap_or(name);
        if let Some(&index) = self.names.get(known) {
            return Ok(Some(index));
        }
        let mut direct = direct.map(|path| (How::Path, path));
        let is_direct = direct.is_some();
        let plan = if is_direct { Vec::new() } else { main.linker.plan(&self.linked, request.loader, main.index) };
        let mut cursor = Cursor::default();
        let mut reason = None;
        while let Some((how, path)) = direct.take().or_else(|| self.next(main, request, &plan, &mut cursor)) {
            let refusal = match self.fetch_once(&path, main.abi) {
                Ok(file) => {
                    let how = if request.preload { How::Preload } else { how };
                    return Ok(Some(self.adopt(main, request, (how, path), file)));
                }
                Err(refusal) => refusal,
            };
            if let Refusal::Open(error) = &refusal
                && let Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) =
                    error.raw_os_error().map(Errno::from_raw_os_error)
            {
                let error = Error::new("open", error).on(OsStr::from_bytes(&path));
                return Err(error.remedy("raise the limit of open files, ulimit -n"));
            }
            let verdict = main.linker.judge(&refusal);
            if verdict == Verdict::End || is_direct || matches!(refusal, Refusal::Open(_)) {
                reason = Some(format!("{}: {refusal}", OsStr::from_bytes(&path).display()));
            }
            // A refused candidate is refused for the next object that asks, too: only its reason is kept.
            self.fetched.insert(path, Err(refusal));
            match verdict {
                Verdict::Next => {}
                Verdict::NextStep => cursor = Cursor { step: cursor.step + 1, ..Cursor::default() },
                Verdict::End => break,
            }
        }
        let searched = plan.iter().flat_map(|step| match (step, &main.linker) {
            (Step::Directories(_, dirs), _) => {
                dirs.iter().map(|dir| OsStr::from_bytes(if dir.is_empty() { b"." } else { dir }).into()).collect()
            }
            (Step::Cache, Linker::Glibc(glibc)) => vec![PathBuf::from(&glibc.ldso.cache)],
            (Step::Cache, Linker::Musl(_)) => Vec::new(),
        });
        self.closure.missing.push(Missing {
            name: request.needed.name.clone(),
            needed_by: request.loader.unwrap_or(main.index),
            optional: request.needed.optional,
            searched: searched.collect(),
            reason,
        });
        Ok(None)
    }

    fn fetch_once(&mut self, path: &[u8], abi: Abi) -> Fetched<P> {
        let path_of = || self.environment.cwd.join(OsStr::from_bytes(path));
        self.fetched.remove(path).unwrap_or_else(|| fetch(self.probe, &path_of(), Some(abi)))
    }

    /// Makes an opened file an object, unless it is one under another name.
    fn adopt(
        &mut self,
        main: &Main,
        request: &Request,
        (how, path): (How, Vec<u8>),
        (opened, elf): (Opened<P::File>, Elf),
    ) -> usize {
        let is_glibc = main.is_glibc();
        let inode = opened.inode();
        let index = self.inodes.get(&inode).copied().unwrap_or_else(|| {
            let absolute = self.environment.cwd.join(OsStr::from_bytes(&path));
            let origin = parent(if is_glibc { absolute.as_os_str().as_bytes() } else { &path });
            let linked = main.linker.link(&elf, origin, request.loader);
            let place = (PathBuf::from(OsStr::from_bytes(&path)), how);
            let index = self.add(place, Some(request.loader.unwrap_or(main.index)), opened, Some(&elf), linked);
            self.inodes.insert(inode, index);
            if is_glibc {
                for name in [Some(path), elf.soname.map(OsString::into_vec)].into_iter().flatten() {
                    self.names.entry(name).or_insert(index);
                }
            }
            index
        });
        let name = request.needed.name.as_bytes();
        if is_glibc || !name.contains(&b'/') {
            self.names.entry(name.to_vec()).or_insert(index);
        }
        index
    }
}

/// What object `index` asks for.
fn requests(linked: &mut [Linked], index: usize) -> impl Iterator<Item = Request> {
    let needed = std::mem::take(&mut linked[index].needed);
    needed.into_iter().map(move |needed| Request { loader: Some(index), needed, preload: false })
}

/// Opens and reads one candidate.
fn fetch<P: Probe>(probe: &P, path: &Path, abi: Option<Abi>) -> Fetched<P> {
    let opened = probe.open(path)?;
    if !is_regular(&opened) {
        return Err(Unusable::Malformed("not a regular file").into());
    }
    let elf = Elf::read(&opened.file, abi)?;
    Ok((opened, elf))
}

fn is_regular<T>(opened: &Opened<T>) -> bool {
    rustix::fs::FileType::from_raw_mode(opened.stat.st_mode).is_file()
}

/// The directory part of a path, without a slash at its end; "." where there is none.
fn parent(path: &[u8]) -> Vec<u8> {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(0) => b"/".to_vec(),
        Some(slash) => path[..slash].to_vec(),
        None => b".".to_vec(),
    }
}
