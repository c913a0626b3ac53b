//! Python's modules without a view: a finder of our own in every interpreter asks the agent for names, times and bytecode.

use std::sync::Arc;

use rustix::fs::{AtFlags, Mode};

use super::Audit;
use super::walk::Found;
use crate::error::{Context, Result};
use crate::loader::catalog::kind;

/// Its directory in the store, which goes in front of `PYTHONPATH`, and what lies there.
const PLACE: &str = "python";
const SITE: &[u8] = include_bytes!("python/sitecustomize.py");
const FINDER: &[u8] = include_bytes!("python/hpcrt_finder.py");

/// The path of the directory.
pub(super) fn place(store: &[u8]) -> Vec<u8> {
    [store, &b"/"[..], PLACE.as_bytes()].concat()
}

/// Puts the finder into the store.
pub(super) fn install(audit: &Audit) -> Result<()> {
    rustix::fs::mkdirat(audit.walker.store.directory(), PLACE, Mode::RWXU).op_on("make in the store", PLACE)?;
    audit.put("python/hpcrt_finder.py", FINDER, Mode::RUSR)?;
    audit.put("python/sitecustomize.py", SITE, Mode::RUSR)?;
    share(audit, &[])
}

/// Tells the finder below which directories it is to ask.
pub(super) fn share(audit: &Audit, directories: &[Vec<u8>]) -> Result<()> {
    audit.put("python/shared", &directories.join(&0), Mode::RUSR).map(drop)
}

impl Audit {
    /// A file with a directory's time and names; each name after a letter: a file, a directory, or to be looked at.
    pub(super) fn names(&self, path: &[u8]) -> Option<Vec<u8>> {
        let Found::Dir { canonical, attr, listing } = self.walker.find(path, false, |_| {}) else { return None };
        // Locked until it is written: of many that ask at once one writes it.
        let mut state = self.state();
        let known = state.listed.get(&canonical).filter(|(known, _)| Arc::ptr_eq(known, &listing));
        let file = match known {
            Some((_, file)) => file.clone(),
            None => {
                let file = format!("names-{:016x}", fastrand::u64(..));
                self.put(&file, &written(attr.mtime, &listing), Mode::RUSR).ok()?;
                if let Some((_, older)) = state.listed.insert(canonical, (listing, file.clone())) {
                    // Who was told of it and has not read it yet looks into the directory itself.
                    let _ = rustix::fs::unlinkat(self.walker.store.directory(), older, AtFlags::empty());
                }
                file
            }
        };
        Some([&self.place, &b"/"[..], file.as_bytes()].concat())
    }

    /// The time and size of a module's source, and where to read its bytecode.
    pub(super) fn module(&self, source: &[u8], bytecode: &[u8]) -> Option<Vec<u8>> {
        let Found::File { canonical, attr, .. } = self.walker.find(source, false, |_| {}) else { return None };
        if self.state().is_changed(&canonical) {
            return None;
        }
        // Where it may be there, it is looked for.
        let original = || if self.is_absent(bytecode) { Vec::new() } else { bytecode.to_vec() };
        let compiled = self.stage(bytecode).unwrap_or_else(original);
        Some([format!("{} {}\0", attr.mtime.0, attr.size).as_bytes(), &compiled].concat())
    }
}

fn written(mtime: (i64, u32), listing: &[(Box<[u8]>, u8)]) -> Vec<u8> {
    let mut text = (i128::from(mtime.0) * 1_000_000_000 + i128::from(mtime.1)).to_string().into_bytes();
    for (name, kind) in listing {
        let letter = match *kind {
            kind::REG => b'f',
            kind::DIR => b'd',
            kind::LNK | kind::UNKNOWN => b'?',
            _ => continue,
        };
        text.extend_from_slice(&[0, letter]);
        text.extend_from_slice(name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::created;
    use super::*;
    use crate::loader::catalog::as_path;
    use crate::loader::version::{self, now};
    use crate::net::wire::record::{Name, Record};

    #[test]
    fn names_are_written_for_the_finder() {
        let listing = [(&b"a.py"[..], kind::REG), (b"b", kind::DIR), (b"c", kind::LNK), (b"d", kind::SOCK)];
        let listing = listing.map(|(name, kind)| (Box::from(name), kind));
        assert_eq!(written((3, 5), &listing), b"3000000005\0fa.py\0db\0?c");
    }

    #[test]
    fn names_that_changed_take_the_place_of_those_before() {
        let store = tempfile::tempdir().unwrap();
        let (audit, catalog, _) = created(store.path());
        let attr = version::attr(&rustix::fs::stat("/").unwrap());
        audit.add_roots(&[b"/r".to_vec()]);
        let list = |name: &[u8]| {
            let names = vec![Name { name: name.to_vec(), kind: kind::REG }];
            let _ = catalog.write().unwrap().apply(&Record::Dir { path: b"/r".to_vec(), attr, names }, now());
            audit.names(b"/r").unwrap()
        };
        let first = list(b"a.py");
        assert_eq!(audit.names(b"/r").unwrap(), first, "they are written once");
        let second = list(b"b.py");
        assert!(std::fs::read(as_path(&second)).unwrap().ends_with(b"b.py") && !as_path(&first).exists());
    }
}
