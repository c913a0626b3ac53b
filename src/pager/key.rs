//! The key of long-lived servers: a file that only its owner can read, made when it is first needed.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Result};
use crate::net::auth::SessionKey;

/// Where it is unless it is named: `$XDG_CONFIG_HOME/hpcrt/key`, or `~/.config/hpcrt/key`.
///
/// # Errors
/// Neither variable is set.
pub fn place() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
    let config =
        config.ok_or_else(|| Error::usage("find the key", "HOME is not set").remedy("name its file with --key"));
    Ok(config?.join("hpcrt/key"))
}

/// Reads it: 32 bytes in hexadecimal.
///
/// # Errors
/// There is none, others can read it, or it holds something else.
pub fn read(path: &Path) -> Result<SessionKey> {
    let missing = |error| {
        let error = Error::usage("read the key", error).on(path);
        error.remedy("hpcrt memserver makes it where there is none; it must be the same on all hosts")
    };
    let mut file = fs::File::open(path).map_err(missing)?;
    let meta = file.metadata().op_on("read the key", path)?;
    if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o077 != 0 || !meta.is_file() {
        let error = Error::usage("use the key", "it is not a file that only you can read").on(path);
        return Err(error.remedy("chmod 600 makes it one"));
    }
    let mut text = String::new();
    Read::take(&mut file, 128).read_to_string(&mut text).op_on("read the key", path)?;
    let hash = blake3::Hash::from_hex(text.trim());
    let hash = hash.map_err(|_| Error::usage("use the key", "it is not 64 hexadecimal digits").on(path))?;
    Ok(SessionKey(*hash.as_bytes()))
}

/// [`read`]s it, or makes one where there is none.
///
/// # Errors
/// As [`read`]'s; and it cannot be written.
pub fn read_or_make(path: &Path) -> Result<SessionKey> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        _ => return read(path),
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(parent).op_on("make", parent)?;
    // Whole under its name or not there: several may make it at once, and one of them wins.
    let fresh = parent.join(format!(".key.{:016x}", fastrand::u64(..)));
    let make = || {
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        writeln!(file, "{}", blake3::Hash::from(SessionKey::random().0).to_hex())?;
        match fs::hard_link(&fresh, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    };
    let made = make().op_on("make the key", path);
    let _ = fs::remove_file(&fresh);
    made?;
    read(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn is_made_once_and_must_be_private() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a/b/key");
        assert!(read(&path).unwrap_err().to_string().contains("No such file"));
        let made: Vec<_> = std::thread::scope(|scope| {
            (0..8)
                .map(|_| scope.spawn(|| read_or_make(&path).unwrap().0))
                .collect::<Vec<_>>()
                .into_iter()
                .map(|t| t.join().unwrap())
                .collect()
        });
        assert!(made.iter().all(|key| *key == made[0]) && made[0] != [0; 32]);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read_or_make(&path).unwrap_err().to_string().contains("only you can read"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(&path, "xyz").unwrap();
        assert!(read_or_make(&path).unwrap_err().to_string().contains("64 hexadecimal digits"));
    }
}
