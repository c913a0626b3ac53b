//! `--output DIR`: a file per rank and stream that wrote anything.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::output::file_name;
use crate::net::wire::control::Stream;
use crate::{Error, Result, error::Context};

/// See the module. Files are made when the first byte comes.
#[derive(Debug)]
pub struct OutputFiles {
    directory: PathBuf,
    ranks: u32,
    files: HashMap<(u32, Stream), File>,
    /// The first failure; said once, at the end.
    failed: Option<Error>,
}

impl OutputFiles {
    /// # Errors
    /// The directory cannot be made.
    pub fn create(directory: &Path, ranks: u32) -> Result<OutputFiles> {
        fs::create_dir_all(directory).op_on("make the output directory", directory)?;
        Ok(OutputFiles { directory: directory.to_owned(), ranks, files: HashMap::new(), failed: None })
    }

    /// Appends what a rank wrote; a failure is kept for [`OutputFiles::finish`].
    pub fn write(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        if bytes.is_empty() || self.failed.is_some() {
            return;
        }
        let path = self.directory.join(file_name(rank, self.ranks, stream));
        let file = match self.files.entry((rank, stream)) {
            std::collections::hash_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::hash_map::Entry::Vacant(entry) => File::create(&path).map(|file| entry.insert(file)),
        };
        if let Err(error) = file.and_then(|file| file.write_all(bytes)) {
            self.failed = Some(Error::new("write a rank's output", error).on(path));
        }
    }

    /// # Errors
    /// Whatever could not be written.
    pub fn finish(self) -> Result<()> {
        self.failed.map_or(Ok(()), Err)
    }
}
