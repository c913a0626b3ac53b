//! What a Python program will ask for next, told from what it was told: imports are followed ahead of the interpreter, as its own finder
//! would follow them. Pure: what the reader found goes in, what it should look at comes out.
//!
//! It may be wrong in either direction: what it overlooks is asked for when it is needed, what it adds is bounded.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;

use super::catalog::{file_name, is_within, join, kind, parent};
use super::elf::Elf;
use super::imports::Import;
use crate::net::wire::control::Need;

/// Paths guessed in a session, at most.
const GUESSES_MAX: usize = 20_000;
/// Names followed in a session, at most: a bound for what strange modules can cost.
const NAMES_MAX: usize = 200_000;
/// What every interpreter imports before the program.
const STARTUP: [&str; 12] = [
    "encodings",
    "encodings.aliases",
    "encodings.utf_8",
    "codecs",
    "io",
    "abc",
    "site",
    "os",
    "stat",
    "posixpath",
    "genericpath",
    "_collections_abc",
];
/// What is inside the interpreter since version 3.11, and not read from its file.
const FROZEN: [&str; 15] = [
    "importlib.util",
    "importlib.machinery",
    "runpy",
    "codecs",
    "io",
    "abc",
    "site",
    "os",
    "stat",
    "posixpath",
    "genericpath",
    "ntpath",
    "_collections_abc",
    "_sitebuiltins",
    "zipimport",
];

/// Something to look at before anybody asks.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Guess {
    pub path: Vec<u8>,
    pub need: Need,
}

/// What waits for a directory's listing.
#[derive(Debug)]
enum Awaited {
    /// The search for a dotted name.
    Module(Vec<u8>),
    /// The search for the bytecode of `NAME.py` in the listed `__pycache__`.
    Bytecode(Vec<u8>),
    /// A library that an extension module needs.
    Library(Vec<u8>),
}

/// See the module.
#[derive(Debug, Default)]
pub struct Prefetch {
    /// Installations and environments, and whether their packages are on the import path.
    trees: Vec<(Vec<u8>, bool)>,
    /// Directories that are searched for modules.
    search: Vec<Vec<u8>>,
    /// Names in listed directories, with their `d_type`.
    listings: HashMap<Vec<u8>, BTreeMap<Vec<u8>, u8>>,
    /// Minor version of the interpreter.
    minor: Option<u32>,
    awaited: HashMap<Vec<u8>, Vec<Awaited>>,
    /// Names that were looked for below a directory; below an empty path: along the import path.
    sought: HashSet<(Vec<u8>, Vec<u8>)>,
    /// Those that no directory of the import path has so far.
    unfound: Vec<Vec<u8>>,
    guessed: HashSet<Guess>,
    guesses: Vec<Guess>,
}

impl Prefetch {
    /// A job runs this Python installation or environment. `packages`: it imports the packages installed there.
    pub fn add_tree(&mut self, tree: &[u8], packages: bool) {
        if self.trees.iter().all(|(known, _)| known != tree) {
            self.trees.push((tree.to_vec(), packages));
            for module in STARTUP {
                self.seek(module.as_bytes());
            }
            self.look_at(tree);
        }
    }

    /// A directory of the import path.
    pub fn add_search(&mut self, directory: &[u8]) {
        if !self.is_searched(directory) {
            self.search.push(directory.to_vec());
            self.look_at(directory);
        }
    }

    /// Whether a Python program is among the jobs.
    pub fn is_active(&self) -> bool {
        !self.trees.is_empty() || !self.search.is_empty()
    }

    /// What to look at, in the order in which the program is likely to come to it.
    pub fn poll_guesses(&mut self) -> Vec<Guess> {
        std::mem::take(&mut self.guesses)
    }

    /// A directory was listed.
    pub fn handle_listing(&mut self, directory: &[u8], names: impl Iterator<Item = (Vec<u8>, u8)>) {
        self.listings.insert(directory.to_vec(), names.collect());
        self.follow_listing(directory);
    }

    /// A module was read.
    pub fn handle_module(&mut self, path: &[u8], imports: Vec<Import>) {
        let Some(mut package) = parent(path) else { return };
        if file_name(package) == b"__pycache__" {
            package = parent(package).unwrap_or_default();
        }
        for Import { level, name } in imports {
            // One dot is the package itself.
            match level.checked_sub(1) {
                None => self.seek(&name),
                Some(up) => {
                    let base = std::iter::successors(Some(package), |at| parent(at)).nth(up);
                    if let Some(base) = base.filter(|base| self.covers(base)) {
                        self.find(base, &name);
                    }
                }
            }
        }
    }

    /// A library was read.
    pub fn handle_library(&mut self, path: &[u8], elf: &Elf) {
        let Some(origin) = parent(path) else { return };
        for list in [&elf.runpath, &elf.rpath].into_iter().flatten() {
            for entry in list.as_bytes().split(|b| *b == b':') {
                let Some(directory) = expand(entry, origin).filter(|d| self.covers(d)) else { continue };
                for needed in &elf.needed {
                    if self.is_news(&directory, needed.name.as_bytes()) {
                        self.await_listing(&directory, Awaited::Library(needed.name.as_bytes().to_vec()));
                    }
                }
            }
        }
    }

    /// Outside of trees and import path nothing is followed.
    fn covers(&self, path: &[u8]) -> bool {
        let trees = self.trees.iter().map(|(tree, _)| tree);
        trees.chain(&self.search).any(|tree| is_within(path, tree))
    }

    fn is_searched(&self, directory: &[u8]) -> bool {
        self.search.iter().any(|d| d == directory)
    }

    fn has(&self, directory: &[u8], name: &[u8]) -> bool {
        self.kind(directory, name).is_some()
    }

    fn has_directory(&self, directory: &[u8], name: &[u8]) -> bool {
        matches!(self.kind(directory, name), Some(kind::DIR | kind::UNKNOWN))
    }

    fn kind(&self, directory: &[u8], name: &[u8]) -> Option<u8> {
        self.listings.get(directory)?.get(name).copied()
    }

    fn guess(&mut self, path: Vec<u8>, need: Need) {
        let guess = Guess { path, need };
        if self.guessed.len() < GUESSES_MAX && self.guessed.insert(guess.clone()) {
            self.guesses.push(guess);
        }
    }

    /// A directory of interest from now on, which may have been listed before it was.
    fn look_at(&mut self, directory: &[u8]) {
        if self.listings.contains_key(directory) {
            self.follow_listing(directory);
        } else {
            self.guess(directory.to_vec(), Need::Attributes);
        }
    }

    fn follow_listing(&mut self, directory: &[u8]) {
        if !self.covers(directory) {
            return;
        }
        self.find_import_path(directory);
        if self.has(directory, b"__init__.py") {
            self.load(directory, b"__init__");
            // Somebody looked for this package: a directory that the program searches, and that was not known.
            if let Some(outer) = parent(directory).map(<[u8]>::to_vec)
                && self.listings.contains_key(&outer)
                && !self.has(&outer, b"__init__.py")
                && !self.is_searched(&outer)
            {
                self.search.insert(0, outer);
                self.seek_again();
            }
        }
        for awaited in self.awaited.remove(directory).unwrap_or_default() {
            self.resume(directory, awaited);
        }
        if self.is_searched(directory) {
            self.seek_again();
        }
    }

    /// The way from a tree to `lib/python3.N`, and to the packages in it.
    fn find_import_path(&mut self, directory: &[u8]) {
        let tree_at = |path: &[u8]| self.trees.iter().find(|(tree, _)| tree == path);
        let up = parent(directory).unwrap_or_default();
        if tree_at(directory).is_some() {
            for lib in [b"lib".as_slice(), b"lib64"] {
                if self.has_directory(directory, lib) {
                    self.look_at(&join(directory, lib));
                }
            }
        } else if tree_at(up).is_some() && matches!(file_name(directory), b"lib" | b"lib64") {
            let names = self.listings[directory].iter().filter(|(_, kind)| matches!(**kind, kind::DIR | kind::UNKNOWN));
            let versions: Vec<_> = names.filter_map(|(name, _)| Some((name.clone(), minor_of(name)?))).collect();
            for (name, minor) in versions {
                self.minor.get_or_insert(minor);
                self.add_search(&join(directory, &name));
            }
        } else if minor_of(file_name(directory)).is_some()
            && let Some((_, packages)) = parent(up).and_then(tree_at)
        {
            let packages = if *packages { b"site-packages".as_slice() } else { b"" };
            for name in [b"lib-dynload", packages] {
                if self.has_directory(directory, name) {
                    self.add_search(&join(directory, name));
                }
            }
        }
    }

    fn await_listing(&mut self, directory: &[u8], awaited: Awaited) {
        if self.listings.contains_key(directory) {
            return self.resume(directory, awaited);
        }
        self.guess(directory.to_vec(), Need::Attributes);
        self.awaited.entry(directory.to_vec()).or_default().push(awaited);
    }

    fn resume(&mut self, directory: &[u8], awaited: Awaited) {
        match awaited {
            Awaited::Module(name) => drop(self.find(directory, &name)),
            Awaited::Library(name) if self.has(directory, &name) => self.guess(join(directory, &name), Need::Content),
            Awaited::Library(_) => {}
            Awaited::Bytecode(module) => match self.bytecode(directory, &module) {
                Some(name) => self.guess(join(directory, &name), Need::Content),
                None => {
                    let source = [&module, b".py".as_slice()].concat();
                    self.guess(join(parent(directory).unwrap_or_default(), &source), Need::Content);
                }
            },
        }
    }

    /// The only `MODULE.TAG.pyc` (PEP 3147), or this interpreter's, but none that is optimised (PEP 488).
    fn bytecode(&self, cache: &[u8], module: &[u8]) -> Option<Vec<u8>> {
        let stem = [module, b"."].concat();
        let is_plain = |name: &&[u8]| name[stem.len()..].strip_suffix(b".pyc").is_some_and(|tag| !tag.contains(&b'.'));
        let mut found = self.beginning_with(cache, &stem).filter(is_plain);
        match (found.next(), found.next()) {
            (Some(one), None) => Some(one.to_vec()),
            (None, _) => None,
            _ => {
                let name = [&stem, format!("cpython-3{}.pyc", self.minor?).as_bytes()].concat();
                self.has(cache, &name).then_some(name)
            }
        }
    }

    fn beginning_with<'a>(&'a self, directory: &[u8], start: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let names = self.listings.get(directory).into_iter().flat_map(move |names| names.range(start.to_vec()..));
        names.map(|(name, _)| name.as_slice()).take_while(move |name| name.starts_with(start))
    }

    /// Whether a name is looked for below a directory for the first time. Notes it.
    fn is_news(&mut self, directory: &[u8], name: &[u8]) -> bool {
        self.sought.len() < NAMES_MAX && self.sought.insert((directory.to_vec(), name.to_vec()))
    }

    /// Looks for a dotted name along the import path.
    fn seek(&mut self, name: &[u8]) {
        if self.is_news(b"", name) && !self.is_on_path(name) {
            self.unfound.push(name.to_vec());
        }
    }

    fn seek_again(&mut self) {
        let mut unfound = std::mem::take(&mut self.unfound);
        unfound.retain(|name| !self.is_on_path(name));
        self.unfound.append(&mut unfound);
    }

    /// Whether a directory that is searched has it, where it is followed, or the interpreter itself.
    fn is_on_path(&mut self, name: &[u8]) -> bool {
        let is_frozen =
            |frozen: &&str| name.strip_prefix(frozen.as_bytes()).is_some_and(|rest| rest.is_empty() || rest[0] == b'.');
        if self.minor.is_some_and(|minor| minor >= 11) && FROZEN.iter().any(is_frozen) {
            return true;
        }
        let listed = self.search.iter().filter(|directory| self.listings.contains_key(*directory));
        let listed: Vec<_> = listed.cloned().collect();
        listed.iter().any(|directory| self.find(directory, name))
    }

    /// Whether the directory has, or may have, the first module of a dotted name. Follows it there.
    fn find(&mut self, directory: &[u8], name: &[u8]) -> bool {
        if !self.listings.contains_key(directory) {
            if self.is_news(directory, name) {
                self.await_listing(directory, Awaited::Module(name.to_vec()));
            }
            return true;
        }
        let dot = name.iter().position(|b| *b == b'.');
        let (first, rest) = dot.map_or((name, None), |dot| (&name[..dot], Some(&name[dot + 1..])));
        let stem = [first, b"."].concat();
        let extension = self.beginning_with(directory, &stem).find(|name| name.ends_with(b".so"));
        let extension = extension.map(|name| join(directory, name));
        if matches!(self.kind(directory, first), Some(kind::DIR | kind::LNK | kind::UNKNOWN)) {
            let package = join(directory, first);
            if self.has(&package, b"__init__.py") {
                self.load(&package, b"__init__");
            } else {
                // Its listing leads there.
                self.guess(package.clone(), Need::Attributes);
            }
            if let Some(rest) = rest {
                self.find(&package, rest);
            }
        } else if let Some(extension) = extension {
            self.guess(extension, Need::Content);
        } else if self.has(directory, &[first, b".py"].concat()) {
            self.load(directory, first);
        } else {
            return false;
        }
        true
    }

    /// A module that is there as source: Python looks at that, and loads the bytecode if there is any.
    fn load(&mut self, directory: &[u8], module: &[u8]) {
        let source = join(directory, &[module, b".py"].concat());
        let cache = join(directory, b"__pycache__");
        if !self.has(directory, b"__pycache__") {
            self.guess(source, Need::Content);
        } else if self.is_news(&cache, module) {
            self.guess(source, Need::Attributes);
            self.await_listing(&cache, Awaited::Bytecode(module.to_vec()));
        }
    }
}

/// `python3.11`: 11.
fn minor_of(name: &[u8]) -> Option<u32> {
    std::str::from_utf8(name.strip_prefix(b"python3.")?).ok()?.parse().ok()
}

/// An entry of a library search path without `.` and `..`; `None` with anything else than `$ORIGIN` to be replaced.
fn expand(entry: &[u8], origin: &[u8]) -> Option<Vec<u8>> {
    let path = match [b"$ORIGIN".as_slice(), b"${ORIGIN}"].iter().find_map(|token| entry.strip_prefix(*token)) {
        Some(rest) => [origin, rest].concat(),
        None => entry.to_vec(),
    };
    if path.contains(&b'$') || !path.starts_with(b"/") {
        return None;
    }
    let mut clean = Vec::<&[u8]>::new();
    for part in path.split(|b| *b == b'/').filter(|part| !part.is_empty() && *part != b".") {
        match part {
            b".." => drop(clean.pop()),
            part => clean.push(part),
        }
    }
    Some([b"/".as_slice(), &clean.join(&b'/')].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::imports;

    fn list(prefetch: &mut Prefetch, directory: &str, names: &[&str]) {
        let entry = |name: &&str| {
            let kind = if name.contains('.') && !name.starts_with("python3") { kind::REG } else { kind::DIR };
            (name.as_bytes().to_vec(), kind)
        };
        prefetch.handle_listing(directory.as_bytes(), names.iter().map(entry));
    }

    fn read(prefetch: &mut Prefetch, path: &str, source: &str) {
        prefetch.handle_module(path.as_bytes(), imports::of_module(path.as_bytes(), source.as_bytes()));
    }

    /// Content has a mark.
    fn guesses(prefetch: &mut Prefetch) -> Vec<String> {
        let mark = |need| if need == Need::Content { "+" } else { "" };
        let shown = |g: Guess| format!("{}{}", String::from_utf8(g.path).unwrap(), mark(g.need));
        prefetch.poll_guesses().into_iter().map(shown).collect()
    }

    /// An environment with the directories above the modules listed, whose program lies in `/p`.
    fn environment() -> Prefetch {
        let mut prefetch = Prefetch::default();
        prefetch.add_search(b"/p");
        prefetch.add_tree(b"/e", true);
        list(&mut prefetch, "/p", &["app.py", "near.py"]);
        list(&mut prefetch, "/e", &["bin", "lib", "more"]);
        list(&mut prefetch, "/e/lib", &["python3.11", "libx.so"]);
        list(&mut prefetch, "/e/lib/python3.11", &["os.py", "json", "re.py", "__pycache__", "lib-dynload"]);
        list(
            &mut prefetch,
            "/e/lib/python3.11/__pycache__",
            &["os.cpython-311.pyc", "re.cpython-311.pyc", "re.cpython-311.opt-1.pyc"],
        );
        prefetch
    }

    #[test]
    fn an_installation_is_listed_before_anything_is_asked() {
        let guesses = guesses(&mut environment());
        assert_eq!(
            guesses,
            ["/p", "/e", "/e/lib", "/e/lib/python3.11", "/e/lib/python3.11/lib-dynload"],
            "os is frozen"
        );
    }

    #[test]
    fn imports_lead_to_bytecode_packages_and_extensions() {
        let mut prefetch = environment();
        let _ = guesses(&mut prefetch);
        read(&mut prefetch, "/p/app.py", "import re, json.decoder, near\n");
        assert_eq!(
            guesses(&mut prefetch),
            [
                "/e/lib/python3.11/re.py",
                "/e/lib/python3.11/__pycache__/re.cpython-311.pyc+",
                "/e/lib/python3.11/json",
                "/p/near.py+"
            ]
        );
        list(&mut prefetch, "/e/lib/python3.11/json", &["__init__.py", "decoder.py", "_fast.cpython-311-x.so", "test"]);
        assert_eq!(
            guesses(&mut prefetch),
            ["/e/lib/python3.11/json/__init__.py+", "/e/lib/python3.11/json/decoder.py+"],
            "nothing is compiled there"
        );
        read(&mut prefetch, "/e/lib/python3.11/json/decoder.py", "from . import _fast, nothing\nimport re\n");
        assert_eq!(guesses(&mut prefetch), ["/e/lib/python3.11/json/_fast.cpython-311-x.so+"]);
        read(&mut prefetch, "/e/lib/python3.11/json/decoder.py", "from ........ import x\n");
        assert!(guesses(&mut prefetch).is_empty(), "above everything");
    }

    #[test]
    fn what_the_program_searches_is_searched() {
        let mut prefetch = environment();
        read(&mut prefetch, "/p/app.py", "import late, other\n");
        list(&mut prefetch, "/e/more", &["late", "other.py"]);
        let _ = guesses(&mut prefetch);
        list(&mut prefetch, "/e/more/late", &["__init__.py"]);
        assert_eq!(guesses(&mut prefetch), ["/e/more/late/__init__.py+", "/e/more/other.py+"]);
        list(&mut prefetch, "/elsewhere/pkg", &["__init__.py"]);
        assert!(guesses(&mut prefetch).is_empty(), "not of this program");
    }

    #[test]
    fn bytecode_of_several_releases_is_told_apart() {
        let mut prefetch = environment();
        let names = ["m.cpython-39.pyc", "m.cpython-311.pyc", "m.cpython-311.opt-2.pyc", "n.pypy39.pyc"];
        list(&mut prefetch, "/e/__pycache__", &names);
        let found = |module: &[u8]| prefetch.bytecode(b"/e/__pycache__", module).map(|n| String::from_utf8(n).unwrap());
        assert_eq!(found(b"m").as_deref(), Some("m.cpython-311.pyc"));
        assert_eq!(found(b"n").as_deref(), Some("n.pypy39.pyc"));
        assert_eq!(found(b"o"), None);
    }

    #[test]
    fn what_was_listed_before_is_known() {
        let mut prefetch = Prefetch::default();
        list(&mut prefetch, "/e/lib", &["python3.11", "libx.so"]);
        list(&mut prefetch, "/e", &["lib"]);
        assert!(guesses(&mut prefetch).is_empty());
        prefetch.add_tree(b"/e", true);
        assert_eq!(guesses(&mut prefetch), ["/e/lib/python3.11"]);
    }

    #[test]
    fn an_environment_hides_the_packages_of_its_installation() {
        let mut prefetch = Prefetch::default();
        prefetch.add_tree(b"/base", false);
        prefetch.add_tree(b"/e", true);
        for tree in ["/base", "/e"] {
            list(&mut prefetch, tree, &["lib"]);
            list(&mut prefetch, &format!("{tree}/lib"), &["python3.11"]);
            list(&mut prefetch, &format!("{tree}/lib/python3.11"), &["site-packages"]);
        }
        assert_eq!(guesses(&mut prefetch).last().unwrap(), "/e/lib/python3.11/site-packages");
        assert!(!prefetch.is_searched(b"/base/lib/python3.11/site-packages"));
    }

    #[test]
    fn search_paths_of_libraries() {
        assert_eq!(expand(b"$ORIGIN/../../x.libs", b"/e/p/q").unwrap(), b"/e/x.libs");
        assert_eq!(expand(b"/opt/./lib/", b"/e").unwrap(), b"/opt/lib");
        assert_eq!(expand(b"$LIB/x", b"/e"), None);
    }
}
