//! How agents that a batch system starts learn where to go: a file that only the user can read, in a directory that the hosts share. It
//! exists while the agents are being started.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::loader::{capture, hints};
use crate::net::auth::{self, SessionKey};
use crate::{Error, Result, error::Context};

/// First line of the file.
const MAGIC: &str = concat!("hpcrt ", env!("CARGO_PKG_VERSION"));
/// Bytes of a file, at most.
const MAX: u64 = 64 << 20;

/// What an agent needs to join.
#[derive(Debug, Clone)]
pub struct Invitation {
    pub key: SessionKey,
    /// Where the front end listens.
    pub addresses: Vec<String>,
    /// The hosts, from node 1 on.
    pub hosts: Vec<String>,
}

/// The file, which is removed with this.
#[derive(Debug)]
pub struct Posted(PathBuf);

impl Posted {
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Posted {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Invitation {
    /// Writes it where the hosts can read it: below the user's cache directory or in the working directory, whichever is shared.
    ///
    /// # Errors
    /// Neither is, or the file cannot be written.
    pub fn post(&self) -> Result<Posted> {
        let name = format!(".hpcrt-join-{}", auth::random_name(16));
        let path = directory()?.join(name);
        let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(&path).op_on("make", &path)?;
        let posted = Posted(path);
        // The hosts read it as soon as they are told its name.
        file.write_all(self.text().as_bytes()).and_then(|()| file.sync_all()).op_on("write", posted.path())?;
        Ok(posted)
    }

    /// As it is written.
    pub fn text(&self) -> String {
        let [addresses, hosts] = [&self.addresses, &self.hosts].map(|list| list.join(" "));
        format!("{MAGIC}\n{}\n{addresses}\n{hosts}\n", blake3::Hash::from_bytes(self.key.0).to_hex())
    }

    /// Reads one that this user posted.
    ///
    /// # Errors
    /// The file is somebody else's, open to others, or none of this version's.
    pub fn read(path: &Path) -> Result<Invitation> {
        let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
        let file = fs::File::options().read(true).custom_flags(flags).open(path).op_on("open", path)?;
        let meta = file.metadata().op_on("inspect", path)?;
        if meta.uid() != rustix::process::geteuid().as_raw() || meta.mode() & 0o077 != 0 {
            return Err(Error::new("join by", "it is not this user's alone").on(path));
        }
        let mut text = String::new();
        file.take(MAX).read_to_string(&mut text).op_on("read", path)?;
        Invitation::parse(&text).ok_or_else(|| Error::new("join by", "it is not from this version of hpcrt").on(path))
    }

    /// The reverse of [`Invitation::text`]; `None`: it is not from this version.
    pub fn parse(text: &str) -> Option<Invitation> {
        let mut lines = text.lines();
        lines.next().filter(|magic| *magic == MAGIC)?;
        let key = SessionKey(*blake3::Hash::from_hex(lines.next()?).ok()?.as_bytes());
        let mut list = || Some(lines.next()?.split(' ').map(str::to_owned).collect());
        Some(Invitation { key, addresses: list()?, hosts: list()? })
    }
}

/// A directory that the hosts share and the user can write to.
fn directory() -> Result<PathBuf> {
    if let Some(cache) = hints::cache()
        && cache.ancestors().find(|above| above.exists()).is_some_and(capture::is_shared)
        && fs::DirBuilder::new().recursive(true).mode(0o700).create(&cache).is_ok()
    {
        return Ok(cache);
    }
    let here = std::env::current_dir().op("find the working directory")?;
    if capture::is_shared(&here) {
        return Ok(here);
    }
    let error =
        Error::new("hand the agents their key", "neither your home nor the working directory is shared by the hosts");
    Err(error.remedy("start it from a directory on the shared file system, or use --agent ssh"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let text = format!("{MAGIC}\n{}\n10.0.0.1:7 10.0.1.1:7\nn1 n2\n", "ab".repeat(32));
        let read = Invitation::parse(&text).unwrap();
        assert_eq!((read.key.0, read.addresses.len()), ([0xab; 32], 2));
        assert_eq!(read.hosts, ["n1", "n2"]);
        for wrong in ["", "hpcrt 0.0\n", &text[..40], &text.replace("ab", "xy")] {
            assert!(Invitation::parse(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn others_files_are_refused() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("join");
        fs::write(&path, "x").unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        let error = Invitation::read(&path).unwrap_err().to_string();
        assert!(error.contains("not this user's alone"), "{error}");
        let link = place.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Invitation::read(&link).is_err());
    }
}
