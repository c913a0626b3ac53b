//! ssh inside a user namespace. It reads files that its configuration includes only if they are root's or the caller's, and root is
//! nobody there; so the caller is shown copies of his own.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};

use crate::error::{Context, Result};

/// Where relative names in the system's configuration start, and the file itself, which ssh does not check.
const DIRECTORY: &str = "/etc/ssh";
const SYSTEM: &str = "/etc/ssh/ssh_config";
/// No configuration is larger; nor are there more files of it.
const BYTES_MAX: u64 = 1 << 20;
const FILES_MAX: usize = 64;

/// Binds copies over the files that the system's configuration includes. `store` is written to, `sealed` is the same directory as a mount to
/// bind from. What cannot be read is left alone.
///
/// # Errors
/// A copy cannot be made or mounted.
pub(super) fn own_configuration(store: BorrowedFd<'_>, sealed: &impl AsFd) -> Result<()> {
    for (index, path) in included().into_iter().enumerate() {
        let Ok(content) = fs::read(&path) else { continue };
        let name = format!("ssh-{index}");
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::TRUNC | OFlags::CLOEXEC;
        let copy = rustix::fs::openat(store, &name, flags, Mode::from_raw_mode(0o644)).op_on("copy", &path)?;
        std::io::Write::write_all(&mut fs::File::from(copy), &content).op_on("copy", &path)?;
        let bound = rustix::mount::mount_bind(super::namespace::of(sealed, &name), &path);
        // The mount keeps it.
        rustix::fs::unlinkat(store, &name, AtFlags::empty()).op_on("remove from the store", &name)?;
        bound.op_on("show a copy of", &path)?;
    }
    Ok(())
}

/// Everything that is included, directly or not, and somebody else's.
fn included() -> BTreeSet<PathBuf> {
    let (mut found, mut open) = (BTreeSet::new(), vec![PathBuf::from(SYSTEM)]);
    while let Some(path) = open.pop() {
        let small = fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() <= BYTES_MAX);
        let text = if small { fs::read_to_string(&path).unwrap_or_default() } else { String::new() };
        for file in text.lines().flat_map(patterns).flat_map(|p| matches(&p)) {
            if found.len() < FILES_MAX && found.insert(file.clone()) {
                open.push(file);
            }
        }
    }
    found
}

/// The words of an `Include` line (ssh_config(5)).
fn patterns(line: &str) -> Vec<PathBuf> {
    let mut words = line.split([' ', '\t', '=', '"']).filter(|w| !w.is_empty());
    if !words.next().is_some_and(|keyword| keyword.eq_ignore_ascii_case("include")) {
        return Vec::new();
    }
    words.filter(|w| !w.starts_with('~')).map(|w| Path::new(DIRECTORY).join(w)).collect()
}

/// The files that a pattern with at most one `*`, in its last component, stands for.
fn matches(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().unwrap_or_default().to_string_lossy();
    let Some((head, tail)) = name.split_once('*') else { return vec![pattern.to_owned()] };
    let Ok(entries) = fs::read_dir(pattern.parent().unwrap_or(Path::new("/"))) else { return Vec::new() };
    let fits = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.len() >= head.len() + tail.len() && name.starts_with(head) && name.ends_with(tail)
    };
    entries.flatten().map(|e| e.path()).filter(fits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn include_lines_are_understood() {
        assert_eq!(patterns("Include /etc/ssh/ssh_config.d/*.conf"), [Path::new("/etc/ssh/ssh_config.d/*.conf")]);
        assert_eq!(patterns("\tinclude=\"more\" ~/own"), [Path::new("/etc/ssh/more")]);
        assert!(patterns("# Include x").is_empty() && patterns("Host include").is_empty() && patterns("").is_empty());
    }

    #[test]
    fn patterns_are_expanded() {
        let place = tempfile::tempdir().unwrap();
        for name in ["50-site.conf", "readme", ".conf"] {
            fs::write(place.path().join(name), "").unwrap();
        }
        let mut found = matches(&place.path().join("*.conf"));
        found.sort();
        assert_eq!(found, [place.path().join(".conf"), place.path().join("50-site.conf")]);
        assert_eq!(matches(Path::new("/etc/one")), [Path::new("/etc/one")]);
        assert!(matches(Path::new("/nonexistent/*")).is_empty());
    }
}
