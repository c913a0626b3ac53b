//! How programs see their captured libraries where no namespaces can be made: through their dynamic linker (rtld-audit(7)). An auditor in
//! every process answers it from a table in memory ([`table`]) with the places of staged files ([`mirror`]); what is not in there it asks
//! this node's agent for ([`Audit::answer`]), once.
//!
//! Names and everything that is not loaded by the dynamic linker come from the shared file system.

mod mirror;
pub mod program;
mod python;
pub mod table;
mod walk;
mod watch;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use rustix::fs::{Mode, OFlags};

use self::mirror::{Mirror, file_systems};
use self::program::Audited;
use self::table::Entries;
use self::walk::{Found, Step, Walker};
use self::watch::{Now, Watch};
use super::catalog::{
    Catalog, Change, Known, Listing, as_path, file_name, is_code, is_within, join, kind as name_kind, parent,
};
use super::closure::{self, Closure, Environment};
use super::probe::{FileSystem, Probe};
use super::store::Store;
use super::version::{self, now};
use super::view::Upcall;
use crate::error::{Context, Error, Result};
use crate::net::seqpacket::Listener;
use crate::net::wire::record::{FileId, Record};
use crate::sys::audit_table::{
    ASK_FILE, ASK_LIST, ASK_MODULE, ASK_PROGRAM, DOOR, FILE, MARK, STORE_MAX, SUPERSEDED, kind,
};

/// The auditor, as `build.rs` made it.
static AUDITOR: &[u8] = include_bytes!(env!("HPCRT_AUDIT"));
/// Its name in the store.
const NAME: &str = "audit.so";
/// Where nothing is in the store.
const ABSENT: &[u8] = b"/absent";

/// See the module. All methods may wait for the log, and may be called from any thread.
pub struct Audit {
    place: Vec<u8>,
    walker: Walker,
    upcall: Arc<dyn Upcall>,
    /// Before [`Audit::state`], where both are held.
    watch: Mutex<Watch>,
    state: Mutex<State>,
}

impl std::fmt::Debug for Audit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Audit").field("walker", &self.walker).field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    entries: Entries,
    shared: Vec<Vec<u8>>,
    mirror: Mirror,
    /// Directories of files that the log told of, which are watched: the inode that the log said each is, and the number of the watch.
    watched: HashMap<Vec<u8>, (Option<u64>, Option<i32>)>,
    /// Those that are still to be, or again: the log says that another has the place.
    unwatched: Vec<Vec<u8>>,
    /// Of these, those whose place the host sees as it was before; meanwhile it tells of that.
    late: HashSet<Vec<u8>>,
    /// Directories that were compared with the log's listings when they were watched already, and the numbers of the watches: what is made in
    /// them here is told, and what others make is in the log.
    followed: HashMap<Vec<u8>, i32>,
    /// The spellings under which a file was told, by its path and by those of the links on the way to it.
    spelled: HashMap<Vec<u8>, Vec<Vec<u8>>>,
    /// Files that were changed, under all their spellings: their originals are used until the next job begins. The root may see them as
    /// they were for as long as its host caches them, and who changed them must not.
    changed: HashSet<Vec<u8>>,
    /// Files of programs that are told, staged or not.
    needed: HashSet<Vec<u8>>,
    /// How often something was changed: what a program needs, and was found out before, is not to be told.
    changes: u64,
    programs: u32,
    /// Directories whose names were written into files, and those.
    listed: HashMap<Vec<u8>, (Arc<Listing>, String)>,
    /// The table that programs read now.
    written: Option<OwnedFd>,
    /// The table in the store says less than [`State::entries`].
    unwritten: bool,
}

impl Audit {
    /// Puts the auditor and an empty table into the store, which lies at `place`.
    ///
    /// # Errors
    /// The store is full, or its path too long.
    pub fn create(
        place: &[u8],
        catalog: Arc<RwLock<Catalog>>,
        store: Arc<Store>,
        upcall: Arc<dyn Upcall>,
    ) -> Result<Audit> {
        let mirror = Mirror::create(store.directory(), place)?;
        let walker = Walker::new(catalog, store, Arc::clone(&upcall));
        let watch = Mutex::new(Watch::new()?);
        let (entries, shared, spelled, changed, listed) = Default::default();
        let state = Mutex::new(State {
            entries,
            shared,
            mirror,
            watched: HashMap::new(),
            unwatched: Vec::new(),
            late: HashSet::new(),
            followed: HashMap::new(),
            spelled,
            changed,
            needed: HashSet::new(),
            changes: 0,
            programs: 0,
            listed,
            written: None,
            unwritten: true,
        });
        let audit = Audit { place: place.to_vec(), walker, upcall, watch, state };
        drop(audit.put(NAME, &auditor(place)?, Mode::RUSR | Mode::XUSR)?);
        python::install(&audit)?;
        audit.write()?;
        Ok(audit)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The socket that auditors ask at, listening.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn door(&self) -> Result<Listener> {
        Listener::bind(as_path(&[&self.place, &b"/"[..], DOOR.as_bytes()].concat()), 1024)
    }

    /// Adds the directory trees of one more job.
    pub fn add_roots(&self, roots: &[Vec<u8>]) {
        self.walker.catalog.write().unwrap_or_else(PoisonError::into_inner).add_roots(roots.to_vec());
        let found = file_systems(roots);
        let mut state = self.state();
        // The root has compared what it knows with the shared file system since. Who asks for a program is told anew.
        state.changed.clear();
        state.forget_programs();
        for top in found {
            if !state.shared.contains(&top) {
                state.shared.push(top);
                state.unwritten = true;
            }
        }
        let shared = state.shared.clone();
        drop(state);
        if let Err(error) = python::share(self, &shared) {
            log::warn!("{error}");
        }
    }

    /// The catalog has taken in a record. Returns whether [`Audit::refresh`] is due.
    pub fn applied(&self, record: &Record) -> bool {
        self.walker.learnt();
        let mut state = self.state();
        match record {
            Record::File { path, .. } | Record::Link { path, .. } => {
                let directory = parent(path).unwrap_or_default();
                let is_new = !state.watched.contains_key(directory);
                if is_new {
                    state.watched.insert(directory.to_vec(), (None, None));
                    state.unwatched.push(directory.to_vec());
                }
                is_new
            }
            Record::Dir { path, attr, .. } => {
                let is_another = state.watched.get(path).is_some_and(|(ino, _)| *ino != Some(attr.ino));
                if is_another {
                    state.unwatched.push(path.clone());
                }
                is_another
            }
            Record::Changed { path, .. } => {
                state.outdate(path);
                state.unwritten
            }
            _ => false,
        }
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Can be read when [`Audit::refresh`] is due.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn changes(&self) -> Result<OwnedFd> {
        self.watch().descriptor().op("watch files for changes")
    }

    /// [`Audit::look_for_changes`] and [`Audit::write`].
    ///
    /// # Errors
    /// The store is full.
    pub fn refresh(&self) -> Result<()> {
        self.look_for_changes();
        self.write()
    }

    /// Takes in what programs here did to files that the log told of, and tells the other nodes. [`Audit::write`] may be due then.
    pub fn look_for_changes(&self) {
        let mut watch = self.watch();
        let unwatched = std::mem::take(&mut self.state().unwatched);
        unwatched.into_iter().for_each(|directory| self.watch_as_listed(&mut watch, directory));
        let Some(changed) = watch.changed() else {
            log::warn!("too much was changed at once: all libraries are read from where they are");
            let mut state = self.state();
            state.followed.clear();
            let all: Vec<Vec<u8>> = state.watched.keys().cloned().collect();
            return all.iter().for_each(|directory| state.outdate(directory));
        };
        // With the lock: who finds that nothing is told any more finds it taken in, too.
        for (path, new) in changed {
            let mut catalog = self.walker.catalog.write().unwrap_or_else(PoisonError::into_inner);
            let kind = match catalog.lookup(&path) {
                Known::File { .. } | Known::Link { .. } => name_kind::REG,
                Known::Dir { .. } => name_kind::DIR,
                // Who looked for it may have been told that there is none.
                Known::Absent(_) if new == Now::Directory => name_kind::DIR,
                Known::Absent(_) if new != Now::Gone && is_code(file_name(&path)) => name_kind::UNKNOWN,
                Known::Listed(_) if new == Now::Gone => name_kind::UNKNOWN,
                _ => {
                    // The log says nothing of what was changed here before.
                    drop(catalog);
                    let mut state = self.state();
                    if state.needed.contains(&path) {
                        state.outdate(&path);
                    }
                    continue;
                }
            };
            if new == Now::Begun {
                // For those here: others are to hear of it when it is whole.
                drop(catalog);
                self.state().outdate(&path);
                continue;
            }
            let exists = (new != Now::Gone).then_some(kind);
            // Nobody else on this node holds anything: there are no views.
            let (tell, _) = catalog.changed_here(&path, Change::Named(exists), now());
            if tell {
                self.upcall.changed(&path, exists);
            }
            drop(catalog);
            self.state().outdate(&path);
        }
        self.walker.learnt();
    }

    /// Watches what has the path of a directory, and again later while the host sees another there than the log tells of.
    fn watch_as_listed(&self, watch: &mut Watch, directory: Vec<u8>) {
        let ino = match self.walker.catalog.read().unwrap_or_else(PoisonError::into_inner).lookup(&directory) {
            Known::Dir { attr, .. } => Some(attr.ino),
            _ => None,
        };
        let number = watch.add(&directory);
        let mut state = self.state();
        let (ino_before, before) = state.watched.get(&directory).copied().unwrap_or_default();
        if number.is_some() && number == before && ino.is_some() && ino_before.is_some() && ino != ino_before {
            state.late.insert(directory.clone());
            return state.unwatched.push(directory);
        }
        if state.followed.get(&directory).is_some_and(|followed| Some(*followed) != number) {
            state.followed.remove(&directory);
        }
        if state.late.remove(&directory) {
            // What ranks did there since the host sees it was not told.
            state.outdate(&directory);
        }
        state.watched.insert(directory, (ino, number));
    }

    /// Puts what is known into the table of programs that start from now on.
    ///
    /// # Errors
    /// The store is full.
    pub fn write(&self) -> Result<()> {
        let mut state = self.state();
        if !std::mem::replace(&mut state.unwritten, false) {
            return Ok(());
        }
        let table = state.entries.table(&state.mirror.root, &state.shared);
        let table = table.ok_or_else(|| Error::new("write the table of libraries", "it is too large"))?;
        // With the lock: of two that write, the one who knows more is the later.
        let newer = self.put(FILE, &table, Mode::RUSR)?;
        if let Some(older) = state.written.replace(newer) {
            rustix::io::pwrite(older, &1_u32.to_ne_bytes(), SUPERSEDED as u64).op("write into the store")?;
        }
        Ok(())
    }

    /// Puts a file into the store, at once and whole; returns it as it was written.
    fn put(&self, name: &str, bytes: &[u8], mode: Mode) -> Result<OwnedFd> {
        let (fresh, store) = (format!("{name}.fresh"), self.walker.store.directory());
        let put = || {
            let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::CLOEXEC;
            let file = rustix::fs::openat(store, &fresh, flags, Mode::RUSR | Mode::WUSR)?;
            std::io::Write::write_all(&mut std::fs::File::from(file.try_clone()?), bytes)?;
            rustix::fs::fchmod(&file, mode)?;
            rustix::fs::renameat(store, &fresh, store, name)?;
            std::io::Result::Ok(file)
        };
        put().op_on("write into the store", name)
    }

    /// Answers an auditor's message.
    pub fn answer(&self, message: &[u8]) -> Vec<u8> {
        // What the asker did before it asked.
        self.look_for_changes();
        let mut words = message.splitn(2, |byte| *byte == 0);
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let mut answer = match first.split_first() {
            Some((&ASK_FILE, path)) if path.starts_with(b"/") => {
                let nowhere = || self.is_absent(path).then(|| [&self.place, ABSENT].concat());
                self.stage(path).or_else(nowhere).unwrap_or_default()
            }
            Some((&ASK_PROGRAM, path)) if path.starts_with(b"/") => {
                let library_path = (!second.is_empty()).then(|| OsStr::from_bytes(second).to_owned());
                let environment = Environment { cwd: "/".into(), library_path, ..Environment::default() };
                if let Err(error) = self.tell(as_path(path), &environment) {
                    log::debug!("{error}");
                }
                Vec::new()
            }
            Some((&ASK_LIST, path)) if path.starts_with(b"/") => self.names(path).unwrap_or_default(),
            Some((&ASK_MODULE, path)) if path.starts_with(b"/") => self.module(path, second).unwrap_or_default(),
            _ => Vec::new(),
        };
        answer.push(0);
        answer
    }

    /// The place of a staged file; `None`: the original is to be used.
    fn stage(&self, path: &[u8]) -> Option<Vec<u8>> {
        if self.state().is_changed(path) {
            return None;
        }
        let mut steps = Vec::new();
        let found = self.walker.find(path, true, |step| steps.push(step));
        let Found::File { canonical, id: Some(id), .. } = found else { return None };
        let link = |step: &Step| match step {
            Step::Link { at, .. } => Some(at.clone()),
            Step::Dir(_) => None,
        };
        let passed: Vec<Vec<u8>> = steps.iter().filter_map(link).collect();
        let mut state = self.state();
        // With the lock: see [`Audit::give_up`].
        let is_superseded = !self.walker.catalog.read().unwrap_or_else(PoisonError::into_inner).names(&canonical, id);
        if is_superseded || state.is_changed(&canonical) {
            return None;
        }
        if let Err(error) = state.mirror.add(self.walker.store.directory(), steps, &canonical, id) {
            log::warn!("{}: {error}; the original is used", String::from_utf8_lossy(path));
            return None;
        }
        let staged = state.mirror.place(path);
        if !state.entries.has(&[kind::PATH, path]) {
            state.entries.set(&[kind::PATH, path], &staged);
            for passed in passed.into_iter().chain([canonical]) {
                state.spelled.entry(passed).or_default().push(path.to_vec());
            }
            state.unwritten = true;
        }
        Some(staged)
    }

    /// A file that the catalog does not name at `path` any more has left the store: who was told of it, now or by a table, is led to the
    /// original, until another is staged in its place.
    pub fn give_up(&self, path: &[u8], file: FileId) {
        if let Err(error) = self.state().mirror.give_up(path, file) {
            log::warn!("{}: {error}; a version that was replaced stays in the store", as_path(path).display());
        }
    }

    /// Whether nothing that could be loaded is there, also now.
    fn is_absent(&self, path: &[u8]) -> bool {
        let find = || self.walker.find(path, true, |_| {});
        let Some(Found::Absent { canonical, listed: Some(attr), .. }) = is_code(file_name(path)).then(find) else {
            return false;
        };
        let directory = parent(&canonical).unwrap_or_default();
        let state = self.state();
        if state.is_changed(&canonical) || state.followed.contains_key(directory) {
            return !state.is_changed(&canonical);
        }
        drop(state);
        // In this order: what is made after the comparison is told.
        let Some(number) = self.watch().add(directory) else { return false };
        let is_listed = || rustix::fs::lstat(directory).is_ok_and(|stat| version::attr(&stat).mtime == attr.mtime);
        if !is_listed() {
            version::refresh(directory);
            if !is_listed() && self.take_unlisted(directory).is_err() {
                return false;
            }
        }
        let mut state = self.state();
        state.followed.insert(directory.to_vec(), number);
        !state.is_changed(&canonical)
    }

    /// Names that came into a directory since it was listed, as other hosts' ranks may have made them, count as changed here.
    fn take_unlisted(&self, directory: &[u8]) -> std::io::Result<()> {
        let names = FileSystem.names(&FileSystem.open_dir(as_path(directory))?.file)?;
        let catalog = self.walker.catalog.read().unwrap_or_else(PoisonError::into_inner);
        let paths = names.keys().map(|name| join(directory, name.as_bytes()));
        let unlisted: Vec<_> = paths.filter(|path| matches!(catalog.lookup(path), Known::Absent(_))).collect();
        drop(catalog);
        let mut state = self.state();
        unlisted.iter().for_each(|path| state.outdate(path));
        Ok(())
    }

    /// Whether something is known that the table does not say yet.
    pub fn is_unwritten(&self) -> bool {
        self.state().unwritten
    }

    /// Finds out what a program will load, and puts it into the table.
    ///
    /// # Errors
    /// The program's closure cannot be resolved, or the store is full.
    pub fn tell(&self, program: &Path, environment: &Environment) -> Result<Audited> {
        /// Of a program whose files change all the time its linker finds out itself.
        const TRIES: usize = 5;
        let mut audited = Audited::No("its files change".to_owned());
        for _ in 0..TRIES {
            let changes = self.state().changes;
            let closure = closure::resolve(&self.walker, environment, program, |_, _| {})?;
            audited = program::audited(&self.walker, &closure);
            let Audited::Yes { static_tls } = audited else { break };
            if self.enter(&closure, environment, static_tls, changes) {
                break;
            }
        }
        self.write().map(|()| audited)
    }

    /// Whether nothing has changed since there had been so many changes; else nothing is told.
    fn enter(&self, closure: &Closure, environment: &Environment, static_tls: u64, changes: u64) -> bool {
        let library_path = environment.library_path.as_deref().unwrap_or_default().as_bytes();
        // What depends on more of a process than the table's key says is left to its linker.
        let is_known = !closure.depends_on_cwd && environment.preload.is_none();
        let places: Vec<Option<Vec<u8>>> = closure.objects.iter().map(|o| self.place_of(&o.path)).collect();
        let mut names = Vec::new();
        for (index, object) in closure.objects.iter().enumerate().skip(closure.program).filter(|_| is_known) {
            let loader = if index == closure.program { &[][..] } else { object.path.as_os_str().as_bytes() };
            for (name, target) in &object.needs {
                let target = target.filter(|t| Some(*t) != closure.interpreter && *t != closure.program);
                if let Some(place) = target.and_then(|target| places[target].as_ref()) {
                    names.push((loader.to_vec(), name.as_bytes().to_vec(), place.clone()));
                }
            }
        }
        let mut state = self.state();
        if state.changes != changes {
            return false;
        }
        state.programs += 1;
        let number = state.programs.to_string();
        state.needed.extend(closure.objects.iter().map(|o| o.canonical.as_os_str().as_bytes().to_vec()));
        for (loader, name, place) in names {
            state.entries.set(&[kind::NAME, number.as_bytes(), &loader, &name], &place);
        }
        let canonical = closure.objects[closure.program].canonical.as_os_str().as_bytes();
        let mut value = format!("{number} {static_tls}");
        if !state.shared.iter().any(|top| is_within(canonical, top))
            && let Ok(stat) = rustix::fs::stat(canonical)
        {
            value = format!("{value} {} {}", stat.st_dev, stat.st_ino);
        }
        state.entries.set(&[kind::PROGRAM, canonical, library_path], value.as_bytes());
        state.unwritten = true;
        true
    }

    /// What the linker is to open for an object of the closure; `None`: what it finds itself.
    fn place_of(&self, path: &Path) -> Option<Vec<u8>> {
        let path = path.as_os_str().as_bytes();
        path.starts_with(b"/").then(|| self.stage(path).unwrap_or_else(|| path.to_vec()))
    }

    /// The environment of a program that is to be audited; `static_tls`: [`Audited::Yes`].
    pub fn environment(&self, variables: &[Vec<u8>], static_tls: u64) -> Vec<Vec<u8>> {
        let auditor = [&self.place, &b"/"[..], NAME.as_bytes()].concat();
        program::environment(variables, &auditor, &python::place(&self.place), static_tls)
    }
}

impl State {
    /// Whether a file, or a directory above it, was changed.
    fn is_changed(&self, path: &[u8]) -> bool {
        std::iter::successors(Some(path), |path| parent(path)).any(|path| self.changed.contains(path))
    }

    fn forget_programs(&mut self) {
        self.entries.forget_programs();
        self.needed.clear();
    }

    /// What was staged of this file, or below this directory, is not told any more.
    fn outdate(&mut self, path: &[u8]) {
        self.changes += 1;
        let stale: Vec<Vec<u8>> = self.spelled.keys().filter(|staged| is_within(staged, path)).cloned().collect();
        // Also of what was not there: it may come before what was found.
        let is_needed = || self.needed.iter().any(|needed| is_within(needed, path));
        if !stale.is_empty() || is_code(file_name(path)) || is_needed() {
            self.forget_programs();
            self.unwritten = true;
        }
        for staged in stale {
            for spelled in self.spelled.remove(&staged).unwrap_or_default() {
                let staged = self.mirror.place(&spelled);
                self.entries.forget_path(&staged);
                self.changed.insert(spelled);
                self.unwritten = true;
            }
        }
        self.changed.insert(path.to_vec());
    }
}

/// The auditor with its store's path in it.
fn auditor(place: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = AUDITOR.to_vec();
    let at = memchr::memmem::find(&bytes, &MARK).map(|at| at + MARK.len());
    let room = at.and_then(|at| bytes.get_mut(at..at + STORE_MAX)).expect("tests look into the auditor that was built");
    // A NUL has to follow.
    match room.get_mut(..place.len()).filter(|_| place.len() < STORE_MAX) {
        Some(room) => room.copy_from_slice(place),
        None => {
            let cause = format!("its path has more than {} bytes", STORE_MAX - 1);
            return Err(Error::new("use the store", cause).remedy("choose a shorter one with --store DIR"));
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::view::Need;
    use super::*;
    use crate::net::wire::record::{Attr, Name, Supply};

    /// What the other nodes are told.
    #[derive(Default)]
    pub(super) struct Told(Mutex<Vec<Vec<u8>>>);

    impl Upcall for Told {
        fn want(&self, _: &[u8], _: Need) {}

        fn fetch(&self, _: FileId) {}

        fn changed(&self, path: &[u8], _: Option<u8>) {
            self.0.lock().unwrap().push(path.to_vec());
        }
    }

    /// An audit in a store that knows nothing, and what it tells the other nodes.
    pub(super) fn created(store: &Path) -> (Audit, Arc<RwLock<Catalog>>, Arc<Told>) {
        let own = rustix::fs::open(store, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty()).unwrap();
        let (catalog, told) = (Arc::<RwLock<Catalog>>::default(), Arc::<Told>::default());
        let (upcall, place) = (Arc::clone(&told) as Arc<dyn Upcall>, store.as_os_str().as_bytes());
        let audit = Audit::create(place, Arc::clone(&catalog), Arc::new(Store::new(own, false)), upcall).unwrap();
        (audit, catalog, told)
    }

    #[test]
    fn a_directory_that_took_the_place_of_another_is_watched() {
        let (store, tree) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let tree = tree.path().canonicalize().unwrap();
        let (audit, catalog, told) = created(store.path());
        let (app, library) = (tree.join("app"), tree.join("app/a.so"));
        let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
        let attr = |path: &Path| -> Attr { version::attr(&rustix::fs::lstat(path).unwrap()) };
        let learn = |record: Record| {
            let _ = catalog.write().unwrap().apply(&record, now());
            audit.applied(&record)
        };
        let names = || vec![Name { name: b"a.so".to_vec(), kind: name_kind::REG }];
        let list = |attr| learn(Record::Dir { path: bytes(&app), attr, names: names() });
        let replace = || {
            fs::write(tree.join("new"), "other").unwrap();
            fs::rename(tree.join("new"), &library).unwrap();
            audit.look_for_changes();
            std::mem::take(&mut *told.0.lock().unwrap())
        };
        fs::create_dir(&app).unwrap();
        fs::write(&library, "one").unwrap();
        audit.add_roots(&[bytes(&tree)]);
        list(attr(&app));
        let describe = || learn(Record::File { path: bytes(&library), attr: attr(&library), content: Supply::OnOpen });
        assert!(describe(), "to be watched");
        audit.look_for_changes();
        // As another host would, of whose doings this one is told nothing.
        let exchange = |old: &str| {
            fs::rename(&app, tree.join(old)).unwrap();
            fs::create_dir(&app).unwrap();
            fs::write(&library, "two").unwrap();
        };
        exchange("old");
        assert!(list(attr(&app)), "to be watched again");
        describe();
        audit.look_for_changes();
        fs::write(tree.join("old/a.so"), "three").unwrap();
        audit.look_for_changes();
        assert!(told.0.lock().unwrap().is_empty(), "what has the path no more is another");
        assert_eq!(replace(), [bytes(&library)]);
        learn(Record::Changed { path: bytes(&library), exists: Some(name_kind::REG) });
        assert!(!list(attr(&app)), "the same");
        // Where the host believes for a while that nothing happened.
        describe();
        audit.add_roots(&[bytes(&tree)]);
        assert!(list(Attr { ino: 7, ..attr(&app) }));
        audit.look_for_changes();
        assert!(!audit.state().is_changed(&bytes(&library)));
        exchange("older");
        audit.look_for_changes();
        assert!(audit.state().is_changed(&bytes(&library)), "what was done there meanwhile was not told");
        assert_eq!(replace(), [bytes(&library)]);
    }

    #[test]
    fn what_is_absent_is_told_of_a_directory_that_changed_since_it_was_listed() {
        let (store, tree) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let tree = tree.path().canonicalize().unwrap();
        let (audit, catalog, _) = created(store.path());
        let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
        audit.add_roots(&[bytes(&tree)]);
        let attr = version::attr(&rustix::fs::lstat(&tree).unwrap());
        let listed = Record::Dir { path: bytes(&tree), attr: Attr { mtime: (1, 0), ..attr }, names: vec![] };
        let _ = catalog.write().unwrap().apply(&listed, now());
        fs::write(tree.join("made.so"), "by a rank elsewhere").unwrap();
        fs::create_dir(tree.join("below")).unwrap();
        let is_absent = |name: &str| {
            audit.look_for_changes();
            audit.is_absent(&bytes(&tree.join(name)))
        };
        assert!(is_absent("nothing.so") && !is_absent("made.so") && !is_absent("below/deep.so"));
        assert!(audit.state().followed.contains_key(&bytes(&tree)), "it is looked at once");
        fs::write(tree.join("nothing.so"), "by a rank here").unwrap();
        assert!(!is_absent("nothing.so") && is_absent("neither.so"));
    }
}
