//! `--output DIR`: a file per rank and stream that wrote anything. They are written where that may take its time.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use smol::Task;

use super::output::file_name;
use crate::net::wire::control::Stream;
use crate::{Error, Result};

/// What a rank wrote.
type Chunk = (u32, Stream, Vec<u8>);

/// See the module. Files are made when the first byte comes.
#[derive(Debug)]
pub struct OutputFiles {
    waiting: Vec<Chunk>,
    /// Bytes in `waiting`, and of what is being written.
    bytes: usize,
    under_way: usize,
    /// One of the two is there.
    files: Option<Files>,
    writing: Option<Task<(Files, Result<()>)>>,
}

/// The files that were made; `None`: this one has failed.
#[derive(Debug)]
struct Files {
    directory: PathBuf,
    ranks: u32,
    open: HashMap<(u32, Stream), Option<File>>,
}

impl OutputFiles {
    /// Makes the directory, and removes what an earlier job left there under the names of ranks: it could be taken for this one's.
    ///
    /// # Errors
    /// The directory cannot be made or cleared.
    pub async fn create(directory: &Path, ranks: u32) -> Result<OutputFiles> {
        let at = directory.to_owned();
        let cleared = smol::unblock(move || clear(&at)).await;
        cleared.map_err(|error| Error::usage("use the output directory", error).on(directory))?;
        let files = Some(Files { directory: directory.to_owned(), ranks, open: HashMap::new() });
        Ok(OutputFiles { waiting: Vec::new(), bytes: 0, under_way: 0, files, writing: None })
    }

    /// A rank wrote this.
    pub fn handle_bytes(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.bytes += bytes.len();
            self.waiting.push((rank, stream, bytes.to_vec()));
        }
    }

    /// Bytes that are not written yet.
    pub fn backlog(&self) -> usize {
        self.bytes + self.under_way
    }

    /// Appends what waits to its files. Safe to cancel: another call goes on.
    ///
    /// # Errors
    /// The first failure of a file; the others are written, and so is what follows.
    pub async fn write(&mut self) -> Result<()> {
        if let Some(mut files) = self.files.take() {
            let chunks = std::mem::take(&mut self.waiting);
            self.under_way = std::mem::take(&mut self.bytes);
            self.writing = Some(smol::unblock(move || {
                let mut written = Ok(());
                for chunk in &chunks {
                    let appended = files.append(chunk);
                    written = written.and(appended);
                }
                (files, written)
            }));
        }
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let (files, written) = writing.await;
        (self.files, self.writing, self.under_way) = (Some(files), None, 0);
        written
    }
}

impl Files {
    fn append(&mut self, (rank, stream, bytes): &Chunk) -> Result<()> {
        let path = self.directory.join(file_name(*rank, self.ranks, *stream));
        let mut written = Ok(());
        let file = self.open.entry((*rank, *stream)).or_insert_with(|| match File::create(&path) {
            Ok(file) => Some(file),
            Err(error) => {
                written = Err(error);
                None
            }
        });
        if let Some(open) = file {
            written = open.write_all(bytes);
        }
        written.map_err(|error| {
            *file = None;
            Error::new("write a rank's output", error).on(path)
        })
    }
}

fn clear(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(is_rank) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Whether [`file_name`] may have made this name.
fn is_rank(name: &str) -> bool {
    let rank = name.strip_prefix("rank.").and_then(|rest| rest.strip_suffix(".out").or(rest.strip_suffix(".err")));
    rank.is_some_and(|rank| !rank.is_empty() && rank.bytes().all(|digit| digit.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_earlier_job_left_is_removed() {
        let place = tempfile::tempdir().unwrap();
        for name in ["rank.7.out", "rank.007.err", "rank.x.out", "rank..out", "notes"] {
            fs::write(place.path().join(name), "old").unwrap();
        }
        smol::block_on(OutputFiles::create(place.path(), 2)).unwrap();
        let left = fs::read_dir(place.path()).unwrap().flatten();
        let mut left: Vec<_> = left.map(|entry| entry.file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, ["notes", "rank..out", "rank.x.out"]);
    }
}
