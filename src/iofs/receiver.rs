//! The I/O worker of an I/O host: writes what those of compute hosts send, each of their queues' in its order. An answer says that the file server has
//! it. It ends with its agent.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::fs::OFlags;
use rustix::io::Errno;
use smol::{Async, LocalExecutor};

use super::forward::ESTALE;
use super::same;
use crate::error::{Context, Result};
use crate::net::auth::SessionKey;
use crate::net::direct::Direct;
use crate::net::link::LinkError;
use crate::net::welcome::{Arrival, welcome};
use crate::net::wire::control::{NodeId, Seen};
use crate::net::wire::forward::{CREDITS, Got, HEADER, Name, Put};
use crate::net::wire::frame::FrameError;
use crate::net::wire::hello::Purpose;
use crate::sys::extents::{APPEND, RUN};
use crate::sys::extents_map;

/// Connections at a time: each costs two threads and up to [`CREDITS`] bodies.
const CONNECTIONS: usize = 4096;
const STACK: usize = 256 << 10;
const EIO: i32 = 5;

/// How far the logs of each queue are done: epoch and position, by segment. Held by the connection that the queue has.
type Logs = BTreeMap<u32, (u64, u64)>;
type Queues = Mutex<BTreeMap<(NodeId, u64), Arc<Mutex<Logs>>>>;

/// Writes for whoever has the key, for ever.
///
/// # Errors
/// The kernel refuses what this needs.
pub fn serve(listener: Async<TcpListener>, key: SessionKey) -> Result<()> {
    let tasks = Rc::new(LocalExecutor::new());
    let queues: Arc<Queues> = Arc::default();
    let arrived = move |one: Arrival| {
        if one.purpose != Purpose::Files || Arc::strong_count(&queues) > CONNECTIONS {
            return log::warn!(
                "refused a connection of node {}: it asks for something else, or there are too many",
                one.node
            );
        }
        let (link, node, queues) =
            (Direct::new(&one.stream, one.reader, one.writer, true), one.node, Arc::clone(&queues));
        let begun = thread::Builder::new().name("forward".to_owned()).stack_size(STACK).spawn(move || {
            if let Err(error) = link.and_then(|link| connection(link, node, &queues)) {
                log::debug!("a connection ended: {error}");
            }
        });
        if let Err(error) = begun {
            log::warn!("refused a connection: {error}");
        }
    };
    smol::block_on(tasks.run(welcome(Rc::clone(&tasks), listener, key, arrived)));
    Err(Errno::CANCELED).op("listen")
}

/// Serves one connection. Its end comes behind its last write.
fn connection(link: Direct, node: NodeId, queues: &Queues) -> Result<(), LinkError> {
    let (mut receiving, sending) = link.split()?;
    let (requests, work) = sync_channel(CREDITS);
    thread::scope(move |scope| {
        let writing = thread::Builder::new().name("write".to_owned()).stack_size(STACK);
        writing.spawn_scoped(scope, move || answer(&work, sending, node, queues))?;
        while let Some((put, len)) = receiving.receive_within::<Put>((HEADER, RUN as usize))? {
            put.check(len)?;
            let mut body = vec![0; len];
            if len > 0 {
                receiving.body(vec![&mut body])?;
            }
            if requests.send((put, body)).is_err() {
                return Err(FrameError::Header.into());
            }
        }
        Ok(())
    })
}

fn answer(work: &Receiver<(Put, Vec<u8>)>, mut sending: Direct, node: NodeId, queues: &Queues) {
    let Ok((Put::Begin { queue }, _)) = work.recv() else { return };
    let logs = Arc::clone(queues.lock().unwrap_or_else(PoisonError::into_inner).entry((node, queue)).or_default());
    // What an earlier connection of this queue was sent is done first.
    let mut logs = logs.lock().unwrap_or_else(PoisonError::into_inner);
    let begun = logs.iter().map(|(segment, (epoch, position))| (*segment, *epoch, *position)).collect();
    let _ = sending.send(&Got::Begun { logs: begun }, &[]);
    let mut session = Session::new(&mut logs);
    for (put, body) in work {
        let (errno, end) = match session.handle(&put, &body) {
            Ok(end) => (0, end),
            Err(error) => (error.raw_os_error().unwrap_or(EIO), 0),
        };
        // Whoever has gone away has it written nevertheless.
        let _ = sending.send(&Got::Done { errno, end }, &[]);
    }
}

/// What one queue has open.
#[derive(Debug)]
pub struct Session<'a> {
    logs: &'a mut Logs,
    files: BTreeMap<Name, Open>,
    /// File systems that are known to be the same: there, and here.
    devices: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct Open {
    file: File,
    /// The same file, open to append to it.
    appending: Option<File>,
    /// Why a write has failed; nothing more is written until that has been told.
    failed: i32,
}

impl Session<'_> {
    /// Nothing is open.
    pub fn new(logs: &mut Logs) -> Session<'_> {
        Session { logs, files: BTreeMap::new(), devices: BTreeMap::new() }
    }

    /// Does what is asked, which has been checked; where something was appended ends.
    ///
    /// # Errors
    /// What the file system says.
    pub fn handle(&mut self, put: &Put, body: &[u8]) -> io::Result<u64> {
        match put {
            Put::Begin { .. } => Err(Errno::INVAL.into()),
            Put::Open { name, path, device, seen } => self.open(*name, path, (*device, seen)).map(|()| 0),
            Put::Write { name, epoch, position, offset, anew } => {
                let open = self.files.get_mut(name).ok_or(Errno::BADF)?;
                if *anew {
                    open.failed = 0;
                }
                if open.failed != 0 {
                    return Err(io::Error::from_raw_os_error(open.failed));
                }
                let written = open.write(*offset, body);
                match &written {
                    Ok(_) => _ = self.logs.insert(name.0, (*epoch, *position)),
                    Err(error) => open.failed = error.raw_os_error().unwrap_or(EIO),
                }
                written
            }
            Put::Sync { name } => self.files.get(name).map_or(Ok(0), |open| open.file.sync_all().map(|()| 0)),
            Put::Close { name } => self.files.remove(name).map_or(Ok(0), |open| open.close().map(|()| 0)),
        }
    }

    fn open(&mut self, name: Name, path: &[u8], (device, seen): (u64, &Seen)) -> io::Result<()> {
        let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY;
        let mut options = OpenOptions::new();
        let file = options.write(true).custom_flags(flags.bits().cast_signed()).open(OsStr::from_bytes(path))?;
        let (here, found) = same::seen(&file)?;
        let known = self.devices.get(&device) == Some(&here);
        if found.ino != seen.ino || !known && found != *seen {
            return Err(io::Error::from_raw_os_error(ESTALE));
        }
        self.devices.insert(device, here);
        self.files.insert(name, Open { file, appending: None, failed: 0 });
        Ok(())
    }
}

impl Open {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<u64> {
        if offset != APPEND {
            self.file.write_all_at(bytes, offset)?;
            extents_map::written(&self.file, offset, bytes.len() as u64)?;
            return Ok(0);
        }
        let file = match &mut self.appending {
            Some(file) => file,
            none => {
                let again = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                none.insert(OpenOptions::new().append(true).open(again)?)
            }
        };
        // FUSE would append where this host's kernel believes that the end is.
        same::seen(&*file)?;
        file.write_all(bytes)?;
        let end = file.stream_position()?;
        extents_map::written(file, 0, 0)?;
        Ok(end)
    }

    fn close(self) -> io::Result<()> {
        let all = [Some(self.file), self.appending].into_iter().flatten();
        all.map(|file| Ok(nix::unistd::close(file)?)).fold(Ok(()), io::Result::and)
    }
}
