//! What a Python program is likely to import next, told from the names in what it imported: a guess that costs at most a few operations
//! when wrong, and saves a round trip through the tree for each module when right. Pure: no I/O.
//!
//! Names of imported modules stand in a compiled module as short ASCII strings (`TYPE_SHORT_ASCII*`, `Python/marshal.c`), in the format
//! of every release so far; in source text they stand on lines with `import`. A name means something only where a directory has it.

use std::collections::{HashMap, HashSet};

use super::catalog::{file_name, join, parent};

/// Modules that every interpreter imports before its program, by names that stand nowhere.
const START: [&str; 3] = ["encodings.aliases", "encodings.utf_8", "encodings.latin_1"];
/// Names taken from one module, at most.
const NAMES_MAX: usize = 4096;
/// Modules that are guessed, at most: a bound for what a strange tree can cost.
const GUESSES_MAX: usize = 20_000;

/// What to look at ahead of the question.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Guess {
    /// A directory's listing or a file's attributes.
    Attributes(Vec<u8>),
    /// A file's content.
    Content(Vec<u8>),
}

/// The guesses about one session's programs.
#[derive(Debug, Default)]
pub struct Imports {
    /// Names in directories that were listed.
    listed: HashMap<Vec<u8>, HashSet<Vec<u8>>>,
    /// Directories that top-level modules are imported from.
    search: Vec<Vec<u8>>,
    /// What waits for a listing: dotted names to be found below a directory.
    waiting: HashMap<Vec<u8>, HashSet<Vec<u8>>>,
    /// Top-level names seen, for search directories that are found later.
    names: HashSet<Vec<u8>>,
    guessed: HashSet<Guess>,
}

impl Imports {
    /// A directory was listed.
    pub fn handle_listing<'a>(&mut self, path: &[u8], names: impl Iterator<Item = &'a [u8]>) -> Vec<Guess> {
        let names: HashSet<Vec<u8>> = names.map(<[u8]>::to_vec).collect();
        let mut guesses = Vec::new();
        for below in [&b"site-packages"[..], b"dist-packages", b"lib-dynload"] {
            if names.contains(below) {
                self.guess(Guess::Attributes(join(path, below)), &mut guesses);
            }
        }
        let kind = file_name(path);
        let packages = matches!(kind, b"site-packages" | b"dist-packages" | b"lib-dynload");
        let library = names.contains(&b"encodings"[..]) && names.contains(&b"os.py"[..]);
        let newly = !self.listed.contains_key(path);
        self.listed.insert(path.to_vec(), names);
        if newly && (packages || library) {
            if library {
                self.names.extend(START.iter().map(|name| name.as_bytes().to_vec()));
            }
            self.search(path, &mut guesses);
        }
        // A package's own listing, or that of its bytecode: either may have been what was lacking.
        let directory = if kind == b"__pycache__" { parent(path).unwrap_or_default() } else { path };
        for name in self.waiting.remove(directory).unwrap_or_default() {
            self.find(directory, &name, &mut guesses);
        }
        guesses
    }

    /// The content of a module (bytecode or source text) or of the program's script begins like this.
    pub fn handle_module(&mut self, path: &[u8], content: &[u8]) -> Vec<Guess> {
        let mut guesses = Vec::new();
        let Some(mut directory) = parent(path) else { return guesses };
        let names = if path.ends_with(b".pyc") { names_in_bytecode(content) } else { names_in_source(content) };
        if file_name(directory) == b"__pycache__" {
            directory = parent(directory).unwrap_or_default();
        } else if !self.listed.get(directory).is_some_and(|names| names.contains(&b"__init__.py"[..])) {
            self.search(directory, &mut guesses);
        }
        let mut bases = vec![directory.to_vec()];
        while self.is_package(directory) {
            directory = parent(directory).unwrap_or_default();
            if !self.search.iter().any(|s| s == directory) {
                bases.push(directory.to_vec());
            }
        }
        for name in names.into_iter().take(NAMES_MAX) {
            for base in bases.iter().chain(&self.search.clone()) {
                self.find(base, &name, &mut guesses);
            }
            self.names.insert(name);
        }
        guesses
    }

    fn is_package(&self, directory: &[u8]) -> bool {
        self.listed.get(directory).is_some_and(|names| names.contains(&b"__init__.py"[..]))
    }

    fn search(&mut self, directory: &[u8], guesses: &mut Vec<Guess>) {
        if self.search.iter().any(|s| s == directory) {
            return;
        }
        self.search.push(directory.to_vec());
        for name in self.names.clone() {
            self.find(directory, &name, guesses);
        }
    }

    /// The dotted `name`, if there is such a module or package in `directory`.
    fn find(&mut self, directory: &[u8], name: &[u8], guesses: &mut Vec<Guess>) {
        let Some(names) = self.listed.get(directory) else {
            self.wait(directory, name);
            return;
        };
        let (first, rest) = match name.iter().position(|b| *b == b'.') {
            Some(dot) => (&name[..dot], Some(&name[dot + 1..])),
            None => (name, None),
        };
        let source = [first, b".py"].concat();
        if names.contains(&source) {
            return self.module(directory, &source, guesses);
        }
        if !names.contains(first) {
            return;
        }
        let package = join(directory, first);
        match self.listed.get(&package) {
            None => {
                self.wait(&package, b"__init__");
                if let Some(rest) = rest {
                    self.wait(&package, rest);
                }
                self.guess(Guess::Attributes(package), guesses);
            }
            Some(inside) if inside.contains(&b"__init__.py"[..]) => {
                self.module(&package, b"__init__.py", guesses);
                if let Some(rest) = rest {
                    self.find(&package, rest, guesses);
                }
            }
            Some(_) => {}
        }
    }

    fn wait(&mut self, directory: &[u8], name: &[u8]) {
        self.waiting.entry(directory.to_vec()).or_default().insert(name.to_vec());
    }

    /// Python looks at the source and loads the bytecode, if there is any.
    fn module(&mut self, directory: &[u8], source: &[u8], guesses: &mut Vec<Guess>) {
        let cached = self.listed.get(directory).is_some_and(|names| names.contains(&b"__pycache__"[..]));
        let cache = join(directory, b"__pycache__");
        let path = join(directory, source);
        if !cached {
            return self.guess(Guess::Content(path), guesses);
        }
        let stem = &source[..source.len() - ".py".len()];
        match self.listed.get(&cache) {
            None => {
                self.wait(directory, stem);
                self.guess(Guess::Attributes(cache), guesses);
            }
            Some(names) => {
                let mut made = names.iter().filter(|name| is_bytecode_of(name, stem));
                // Those of several releases: which one it will be is not known here.
                if let (Some(one), None) = (made.next(), made.next()) {
                    let bytecode = join(&cache, one);
                    self.guess(Guess::Content(bytecode), guesses);
                }
                self.guess(Guess::Attributes(path), guesses);
            }
        }
    }

    fn guess(&mut self, guess: Guess, guesses: &mut Vec<Guess>) {
        if self.guessed.len() < GUESSES_MAX && self.guessed.insert(guess.clone()) {
            guesses.push(guess);
        }
    }
}

/// Whether `name` is `STEM.IMPLEMENTATION-VERSION.pyc` (PEP 3147), not optimised (PEP 488).
fn is_bytecode_of(name: &[u8], stem: &[u8]) -> bool {
    let tag = name.strip_prefix(stem).and_then(|n| n.strip_prefix(b".")).and_then(|n| n.strip_suffix(b".pyc"));
    tag.is_some_and(|tag| !tag.contains(&b'.'))
}

fn is_name(text: &[u8]) -> bool {
    let start = |b: &u8| b.is_ascii_alphabetic() || *b == b'_';
    text.split(|b| *b == b'.')
        .all(|part| part.first().is_some_and(start) && part.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_'))
}

/// Every short string of a compiled module that could be a module's name.
fn names_in_bytecode(bytes: &[u8]) -> HashSet<Vec<u8>> {
    // The flag says that the string may be referred to later.
    const FLAG_REF: u8 = 0x80;
    let mut names = HashSet::new();
    for (at, pair) in bytes.windows(2).enumerate() {
        if matches!(pair[0] & !FLAG_REF, b'z' | b'Z')
            && let Some(text) = bytes.get(at + 2..at + 2 + usize::from(pair[1]))
            && is_name(text)
        {
            names.insert(text.to_vec());
        }
    }
    names
}

/// Every name on a line that begins with `import` or `from`, or goes on with such a line's parentheses.
fn names_in_source(text: &[u8]) -> HashSet<Vec<u8>> {
    let mut names = HashSet::new();
    let mut open = false;
    for line in text.split(|b| *b == b'\n').map(<[u8]>::trim_ascii) {
        if !(open || line.starts_with(b"import ") || line.starts_with(b"from ")) {
            continue;
        }
        open = (open || line.contains(&b'(')) && !line.contains(&b')');
        let words = line.split(|b| !(b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.')));
        names.extend(words.map(|w| w.trim_ascii_start()).filter(|w| is_name(w)).map(<[u8]>::to_vec));
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(imports: &mut Imports, path: &str, names: &[&str]) -> Vec<Guess> {
        imports.handle_listing(path.as_bytes(), names.iter().map(|n| n.as_bytes()))
    }

    fn attributes(path: &str) -> Guess {
        Guess::Attributes(path.into())
    }

    fn content(path: &str) -> Guess {
        Guess::Content(path.into())
    }

    #[test]
    fn a_script_leads_to_its_modules() {
        let mut imports = Imports::default();
        assert_eq!(imports.handle_module(b"/s/job.py", b"import a.b as c\nx = 1\nfrom m import (y,\n z)\n"), []);
        assert_eq!(
            listing(&mut imports, "/s", &["job.py", "a", "m.py", "z.txt"]),
            [content("/s/m.py"), attributes("/s/a")].to_vec()
        );
    }

    #[test]
    fn bytecode_is_loaded_and_source_looked_at() {
        let mut imports = Imports::default();
        listing(&mut imports, "/s", &["job.py", "a"]);
        assert_eq!(imports.handle_module(b"/s/job.py", b"import a.b"), [attributes("/s/a")]);
        let names = ["__init__.py", "b.py", "c.py", "tests", "__pycache__"];
        assert_eq!(listing(&mut imports, "/s/a", &names), [attributes("/s/a/__pycache__")]);
        let found = ["__init__.cpython-311.pyc", "b.cpython-311.pyc", "b.cpython-311.opt-1.pyc", "c.cpython-311.pyc"];
        let guesses: HashSet<Guess> = listing(&mut imports, "/s/a/__pycache__", &found).into_iter().collect();
        let init = [content("/s/a/__pycache__/__init__.cpython-311.pyc"), attributes("/s/a/__init__.py")];
        let b = [content("/s/a/__pycache__/b.cpython-311.pyc"), attributes("/s/a/b.py")];
        assert_eq!(guesses, init.into_iter().chain(b).collect::<HashSet<Guess>>());
        let code = b"\xda\x01cz\x05tests\xda\x04none";
        let guesses = imports.handle_module(b"/s/a/__pycache__/b.cpython-311.pyc", code);
        assert!(guesses.contains(&content("/s/a/__pycache__/c.cpython-311.pyc")));
        assert!(guesses.contains(&attributes("/s/a/tests")) && guesses.len() == 3, "{guesses:?}");
        assert_eq!(listing(&mut imports, "/s/a/tests", &["data.txt"]), [], "not a package");
    }

    #[test]
    fn nothing_is_guessed_of_several_releases() {
        let mut imports = Imports::default();
        listing(&mut imports, "/s", &["m.py", "__pycache__"]);
        listing(&mut imports, "/s/__pycache__", &["m.cpython-311.pyc", "m.cpython-312.pyc"]);
        assert_eq!(imports.handle_module(b"/s/job.py", b"import m"), [attributes("/s/m.py")]);
    }
}
