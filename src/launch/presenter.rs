//! Shows what ranks write: on our own streams, or in a file for each.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::Instant;

use smol::Unblock;
use smol::io::AsyncWriteExt;

use super::console::Console;
use super::output::{Output, PROMPT_DELAY, Style};
use super::output_files::OutputFiles;
use super::placement::Placement;
use crate::loader::catalog::as_path;
use crate::net::wire::control::Stream;
use crate::net::wire::session::JobSpec;
use crate::sys::patient::Patient;
use crate::{Result, error::Context};

/// Bytes of output that wait for our own streams before the ranks have to.
const BACKLOG: usize = 1 << 20;

/// See the module.
pub(super) struct Presenter {
    output: Output,
    out: Unblock<Patient>,
    err: Unblock<Patient>,
    /// Written, but perhaps only to the thread that writes to the stream.
    unflushed: bool,
    /// Nobody reads one of our streams any more.
    pub(super) closed: bool,
    files: Option<OutputFiles>,
}

impl Presenter {
    /// Of a job with these ranks.
    ///
    /// # Errors
    /// The directory for their output cannot be used.
    pub(super) async fn new(job: &JobSpec, placement: &Arc<Placement>, console: &Console) -> Result<Presenter> {
        const GATHERED: usize = 256 << 20;
        let copy = |file: &File| file.try_clone().op("use the standard streams");
        let (out, err) = (copy(&console.stdout)?, copy(&console.stderr)?);
        let style = match job {
            JobSpec { gather: true, .. } => Style::Gathered { memory: GATHERED },
            JobSpec { label: true, .. } => Style::Labelled,
            _ => Style::Plain { prompt: out.is_terminal().then_some(PROMPT_DELAY) },
        };
        let same = out.is_terminal() && err.is_terminal();
        let files = match &job.output {
            Some(directory) => Some(OutputFiles::create(as_path(directory), placement.ranks()).await?),
            None => None,
        };
        let output = Output::new(style, Arc::clone(placement), same);
        let (out, err) = (Unblock::new(Patient(out)), Unblock::new(Patient(err)));
        Ok(Presenter { output, out, err, unflushed: false, closed: false, files })
    }

    /// A rank wrote this.
    pub(super) fn bytes(&mut self, rank: u32, stream: Stream, bytes: &[u8]) {
        match &mut self.files {
            Some(files) => files.handle_bytes(rank, stream, bytes),
            None => self.output.handle_bytes(rank, stream, bytes, Instant::now()),
        }
    }

    /// When [`Presenter::tick`] is to be called.
    pub(super) fn wake(&self) -> Option<Instant> {
        self.output.poll_timeout()
    }

    /// Shows what was held back long enough.
    pub(super) fn tick(&mut self, now: Instant) {
        self.output.handle_timeout(now);
    }

    /// The ranks have to wait.
    pub(super) fn is_full(&self) -> bool {
        self.output.backlog() + self.files.as_ref().map_or(0, OutputFiles::backlog) > BACKLOG
    }

    /// Writes what there is to show; waits for ever when there is nothing. Safe to cancel.
    ///
    /// # Errors
    /// It cannot be written, and somebody could still read it.
    pub(super) async fn write(&mut self) -> Result<()> {
        if let Some(files) = self.files.as_mut().filter(|files| files.backlog() > 0) {
            return files.write().await;
        }
        if self.output.backlog() == 0 && !self.unflushed {
            return smol::future::pending().await;
        }
        self.write_all().await
    }

    async fn write_all(&mut self) -> Result<()> {
        loop {
            let (out, err) = (self.output.poll_output(Stream::Out), self.output.poll_output(Stream::Err));
            if !out.is_empty() && !self.closed {
                self.unflushed = true;
                match self.out.write(out).await {
                    // The thread that writes has met its failure, which was told once.
                    Ok(0) => self.closed = true,
                    Ok(count) => self.output.consume(Stream::Out, count),
                    Err(error) => self.broken(error)?,
                }
            } else if !out.is_empty() {
                let all = out.len();
                self.output.consume(Stream::Out, all);
            } else if !err.is_empty() {
                self.unflushed = true;
                // Nobody can be told that standard error does not take it.
                let count = self.err.write(err).await.unwrap_or(0);
                self.closed |= count == 0;
                let count = if count == 0 { err.len() } else { count };
                self.output.consume(Stream::Err, count);
            } else if self.unflushed {
                if let Err(error) = self.out.flush().await {
                    self.broken(error)?;
                }
                let _ = self.err.flush().await;
                self.unflushed = false;
            } else {
                return Ok(());
            }
        }
    }

    /// Who reads our output may leave before it ends, as `head` does; any other failure to write is an error.
    fn broken(&mut self, error: io::Error) -> Result<()> {
        self.closed = true;
        if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error).op("write standard output") }
    }

    /// All ranks have ended: writes what is left.
    ///
    /// # Errors
    /// As [`Presenter::write`]'s.
    pub(super) async fn finish(&mut self) -> Result<()> {
        self.output.handle_finish();
        let mut written = Ok(());
        while let Some(files) = self.files.as_mut().filter(|files| files.backlog() > 0) {
            written = written.and(files.write().await);
        }
        self.write_all().await.and(written)
    }
}
