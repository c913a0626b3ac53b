//! What earlier runs of a program loaded, so that the next one has it before it asks.
//!
//! One small file per program in the user's cache directory, written by the front end at the end of a job: a line with the format's name,
//! a line with the number of runs that built on it, then a kind byte, an absolute path and a NUL for each entry. It is a hint: whatever is
//! wrong with it, the program runs as it would without it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};
use crate::net::wire::control::Need;

const FORMAT: &str = "hpcrt hints 1";
/// Entries in a file, at most.
const ENTRIES: usize = 50_000;
/// Bytes of a file, at most.
const BYTES: u64 = 16 << 20;
/// After this many runs that built on it a program is watched anew: what it does not load any more, and what was wrongly guessed of its
/// imports, is forgotten.
const RUNS: u32 = 32;

/// A path that a program will ask for, and what about it.
pub type Hint = (Vec<u8>, Need);

/// The hints of one program.
#[derive(Debug)]
pub struct Hints {
    file: PathBuf,
    runs: u32,
    entries: Vec<Hint>,
}

/// Where what can be found again is kept, of this user: below `XDG_CACHE_HOME` or the home directory, if there is one.
pub fn cache() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
    Some(cache.join("hpcrt"))
}

impl Hints {
    /// The hints for a program, told apart by its canonical path and the words that say what it runs (a script, `-m` and a module). None
    /// without a home directory.
    pub fn of(program: &Path, words: &[Vec<u8>]) -> Option<Hints> {
        let cache = cache()?;
        let mut key = blake3::Hasher::new();
        for word in std::iter::once(program.as_os_str().as_bytes()).chain(words.iter().map(Vec::as_slice)) {
            key.update(word).update(b"\0");
        }
        let file = cache.join(format!("hints-{}", &key.finalize().to_hex()[..32]));
        let (runs, entries) = read(&file).filter(|(runs, _)| *runs < RUNS).unwrap_or_default();
        Some(Hints { file, runs, entries })
    }

    /// What is known; empty the first time.
    pub fn entries(&self) -> &[Hint] {
        &self.entries
    }

    /// Keeps what this run asked for besides.
    ///
    /// # Errors
    /// The file cannot be written: the next run starts without it.
    pub fn keep(&self, mut asked: Vec<Hint>) -> Result<()> {
        asked.sort_unstable();
        asked.dedup_by(|later, first| {
            later.0 == first.0 && {
                first.1 = first.1.max(later.1);
                true
            }
        });
        asked.truncate(ENTRIES);
        if asked.is_empty() {
            return Ok(());
        }
        self.write(&asked).op_on("keep what the program loaded for its next run", &self.file)
    }

    fn write(&self, entries: &[Hint]) -> std::io::Result<()> {
        let mut text = format!("{FORMAT}\n{}\n", self.runs + 1).into_bytes();
        for (path, need) in entries {
            text.push(kind(*need));
            text.extend_from_slice(path);
            text.push(0);
        }
        let directory = self.file.parent().unwrap_or(Path::new("/"));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        // Another job of the same program may be writing, too: the last one wins, and nobody reads half a file.
        let new = self.file.with_extension(std::process::id().to_string());
        let written =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new).and_then(|mut file| {
                file.write_all(&text)?;
                fs::rename(&new, &self.file)
            });
        if written.is_err() {
            let _ = fs::remove_file(&new);
        }
        written
    }
}

fn kind(need: Need) -> u8 {
    match need {
        Need::Attributes => b'a',
        Need::Content => b'c',
    }
}

/// Only the user's own file: another's would make hpcrt read what he wants.
fn read(path: &Path) -> Option<(u32, Vec<Hint>)> {
    let file = File::open(path).ok()?;
    if file.metadata().ok()?.uid() != rustix::process::geteuid().as_raw() {
        return None;
    }
    let mut text = Vec::new();
    file.take(BYTES).read_to_end(&mut text).ok()?;
    parse(&text)
}

/// The number of runs and the entries of a hint file; none if it is not one of ours.
pub fn parse(text: &[u8]) -> Option<(u32, Vec<Hint>)> {
    let text = text.strip_prefix(FORMAT.as_bytes())?.strip_prefix(b"\n")?;
    let end = text.iter().position(|byte| *byte == b'\n')?;
    let runs = std::str::from_utf8(&text[..end]).ok()?.parse().ok()?;
    let entries = text[end + 1..].split(|byte| *byte == 0).filter_map(|entry| match entry {
        [b'a', path @ ..] if path.starts_with(b"/") => Some((path.to_vec(), Need::Attributes)),
        [b'c', path @ ..] if path.starts_with(b"/") => Some((path.to_vec(), Need::Content)),
        _ => None,
    });
    Some((runs, entries.take(ENTRIES).collect()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hints(file: PathBuf) -> Hints {
        let (runs, entries) = read(&file).unwrap_or_default();
        Hints { file, runs, entries }
    }

    #[test]
    fn what_was_asked_for_is_known_the_next_time() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("deep/hints");
        assert_eq!(hints(file.clone()).entries(), []);
        let asked = |list: &[(&str, Need)]| list.iter().map(|(path, need)| (path.as_bytes().to_vec(), *need)).collect();
        let twice = [("/s/b", Need::Attributes), ("/s/a\n", Need::Content), ("/s/b", Need::Content)];
        hints(file.clone()).keep(asked(&twice)).unwrap();
        let known = hints(file.clone());
        assert_eq!(known.entries(), asked(&[("/s/a\n", Need::Content), ("/s/b", Need::Content)]) as Vec<Hint>);
        assert_eq!(known.runs, 1);
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&file, Some(1), None).unwrap();
            assert_eq!(hints(file.clone()).entries(), [], "another user's");
            std::os::unix::fs::chown(&file, Some(0), None).unwrap();
        }
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(text in prop::collection::vec(any::<u8>(), 0..300), ours: bool) {
            let text = if ours { [FORMAT.as_bytes(), b"\n3\n", &text].concat() } else { text };
            let parsed = parse(&text);
            prop_assert!(!ours || parsed.is_some());
            prop_assert!(parsed.is_none_or(|(_, entries)| entries.iter().all(|(path, _)| path[0] == b'/')));
        }
    }
}
