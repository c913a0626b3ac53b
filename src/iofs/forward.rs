//! Pieces that I/O hosts write in this worker's stead: what a queue has sent them, and what they have answered. A log is let go of as far as it was
//! answered, so whatever ends, everything else is sent again. What no I/O host can write, this worker does.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use super::queue::Due;
use super::same;
use super::worker::Worker;
use crate::net::auth::SessionKey;
use crate::net::direct::{Direct, connect_for};
use crate::net::link::LinkError;
use crate::net::wire::control::NodeId;
use crate::net::wire::files::{Forward, Worked};
use crate::net::wire::forward::{CREDITS, Got, HEADER, Name, Put};
use crate::net::wire::frame::FrameError;
use crate::net::wire::hello::Purpose;
use crate::sys::extents::{APPEND, Log, NONE, Piece, inode};
use crate::sys::extents_map;

/// A file that others write meanwhile is looked at so often, at these intervals, until both hosts see the same.
const TRIES: u32 = 40;
const PAUSE: Duration = Duration::from_millis(2);

const EIO: i32 = 5;
const ENAMETOOLONG: i32 = 36;
/// It is another file there.
pub(super) const ESTALE: i32 = 116;

/// Where a job's files go.
#[derive(Debug)]
pub(super) struct Hosts {
    node: NodeId,
    wish: Forward,
    /// Files are written here from now on, whatever was wished.
    off: AtomicBool,
    /// The user has been told of a file that is written here.
    said: AtomicBool,
}

/// The hosts as one queue has them.
#[derive(Debug)]
pub(super) struct Away {
    hosts: Arc<Hosts>,
    device: u64,
    links: Vec<Link>,
    /// Run and position up to which logs have been sent, if something is unanswered.
    sent: BTreeMap<u32, (u64, u64)>,
    /// Who writes an open file, and its file's place in the table.
    open: BTreeMap<Name, (Option<usize>, usize)>,
    /// Of what was to be appended by a host that is gone: position and length.
    again: BTreeMap<u32, (u64, u64)>,
    /// Files of which a write failed: the next one comes when the program has been told.
    failed: BTreeSet<Name>,
    synced: Option<u32>,
}

#[derive(Debug, Default)]
struct Link {
    direct: Option<Direct>,
    gone: bool,
    unanswered: VecDeque<Sent>,
}

/// A request whose answer is to come.
#[derive(Debug)]
struct Sent {
    segment: u32,
    file: u32,
    place: usize,
    offset: u64,
    /// Position and length of each piece.
    pieces: Vec<(u64, u64)>,
    /// Sent before it was known that one before it failed: not written, and told with that.
    doomed: bool,
}

impl Hosts {
    pub(super) fn new(node: NodeId, wish: Forward) -> Hosts {
        Hosts { node, wish, off: AtomicBool::new(false), said: AtomicBool::new(false) }
    }

    async fn connect(&self, host: usize) -> Result<Direct, LinkError> {
        connect(self.node, &self.wish, host).await
    }
}

/// Connects to an I/O host, over the first of its addresses that answers.
///
/// # Errors
/// What the last address said.
pub async fn connect(node: NodeId, wish: &Forward, host: usize) -> Result<Direct, LinkError> {
    let (key, mut last) = (SessionKey(wish.key), LinkError::Closed);
    for address in wish.hosts.get(host).iter().flat_map(|host| &host.addresses) {
        let Ok(address) = address.parse::<SocketAddr>() else { continue };
        match connect_for(address, &key, node, Purpose::Files).await {
            Ok(direct) => return Ok(direct),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Whether nobody is there any more who could still write: his sockets close behind his last write.
fn is_gone(error: &LinkError) -> bool {
    match error {
        LinkError::Closed => true,
        LinkError::Io(error) => {
            matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionAborted)
        }
        _ => false,
    }
}

/// Of which host a file is: the larger, the sooner.
fn weight(number: u64, host: usize) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..].copy_from_slice(&(host as u64).to_le_bytes());
    let hash = *blake3::hash(&bytes).as_bytes();
    hash[..8].iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

impl Away {
    pub(super) fn new(hosts: &Arc<Hosts>, device: u64) -> Away {
        let links = hosts.wish.hosts.iter().map(|_| Link::default()).collect();
        let (sent, open, again, failed) = Default::default();
        Away { hosts: Arc::clone(hosts), device, links, sent, open, again, failed, synced: None }
    }

    /// From where on a log is to be sent: run and position.
    pub(super) fn from(&self, segment: u32, log: &Log<'_>) -> (u64, u64) {
        let done = || (log.segment.run.load(Ordering::Relaxed), log.segment.upto.load(Ordering::Relaxed));
        self.sent.get(&segment).copied().unwrap_or_else(done)
    }

    /// Has pieces that go on where the one before ends written by whoever is to. Returns the bytes that this has brought nearer to it.
    pub(super) fn write(&mut self, worker: &Worker, pieces: &mut [Due]) -> u64 {
        let Some((segment, piece)) = pieces.first().copied() else { return 0 };
        let Some(log) = &worker.extents.log(segment) else { return 0 };
        let (name, fd) = ((segment, piece.file), worker.file((segment, piece.file)));
        let failed = log.segment.files.get(piece.file as usize).is_none_or(|f| f.error.load(Ordering::SeqCst) != 0);
        // What this host's kernel would write later must not come over it. Of what it cannot write the program's own fsync does not hear any more.
        if let Some(Err(error)) = fd.as_ref().filter(|_| !failed).map(|fd| extents_map::written(fd, 0, 0)) {
            worker.fail((segment, piece.file), piece.inode as usize, error.raw_os_error().unwrap_or(EIO));
            return 0;
        }
        let host = fd.as_ref().filter(|_| !failed).and_then(|fd| self.host(worker, name, &piece, fd));
        let elsewhere = |(nth, link): (usize, &Link)| {
            Some(nth) != host && link.unanswered.iter().any(|sent| sent.segment == segment)
        };
        if host.is_none() || piece.offset == APPEND || self.links.iter().enumerate().any(elsewhere) {
            self.drain(worker);
        }
        while let Some(host) = host.filter(|host| self.links[*host].unanswered.len() >= CREDITS) {
            self.answer(worker, host);
        }
        // Somebody may be gone, or have said that it is done.
        let (mut run, position) = self.from(segment, log);
        if !log.after(&mut run, position).is_ok_and(|next| next.is_some_and(|next| next.position == piece.position)) {
            return 0;
        }
        if let (APPEND, Some(fd), [due]) = (piece.offset, &fd, &mut *pieces) {
            let done = self.appended(worker, log, due, fd);
            if done > 0 {
                return done;
            }
        }
        let (Some(host), Some(fd)) = (host.filter(|host| self.links[*host].direct.is_some()), fd) else {
            return if host.is_none() { worker.write(pieces) } else { 0 };
        };
        if piece.offset == APPEND {
            let size = same::seen(&fd).map_or(0, |(_, seen)| seen.size);
            // Its offset says nothing: another host's moves.
            log.note_append(piece.position, size, NONE);
        }
        self.send(worker, host, log, pieces)
    }

    fn send(&mut self, worker: &Worker, host: usize, log: &Log<'_>, pieces: &[Due]) -> u64 {
        let Some((&(segment, first), (_, last))) = pieces.first().zip(pieces.last()) else { return 0 };
        let (name, epoch) = ((segment, first.file), log.segment.epoch.load(Ordering::SeqCst));
        let (position, anew) = (last.position + last.len, self.failed.remove(&name));
        let put = Put::Write { name, epoch, position, offset: first.offset, anew };
        let bytes = worker.extents.gathered(pieces);
        let Some(direct) = &mut self.links[host].direct else { return 0 };
        if let Err(error) = direct.send(&put, &[&bytes]) {
            self.lose(worker, host, &error);
            return 0;
        }
        let mut run = self.from(segment, log).0;
        // The run in which it ends.
        for (_, piece) in pieces {
            let _ = log.after(&mut run, piece.position);
        }
        self.sent.insert(segment, (run, position));
        self.again.remove(&segment);
        let (offset, place) = (first.offset, first.inode as usize);
        let pieces = pieces.iter().map(|(_, piece)| (piece.position, piece.len)).collect();
        self.links[host].unanswered.push_back(Sent { segment, file: first.file, place, offset, pieces, doomed: false });
        bytes.len() as u64
    }

    /// How much of a piece that is to be appended a host that is gone has; what that was given is looked for, and has not grown since.
    fn appended(&self, worker: &Worker, log: &Log<'_>, due: &mut Due, fd: &OwnedFd) -> u64 {
        let (segment, piece) = (due.0, &mut due.1);
        if let Some((_, len)) = self.again.get(&segment).filter(|(position, _)| *position == piece.position) {
            piece.len = piece.len.min(*len);
        }
        let state = log.segment;
        if state.appends.load(Ordering::SeqCst) != piece.position + 1 || !self.links.iter().any(|link| link.gone) {
            return 0;
        }
        let size = same::seen(fd).map_or(0, |(_, seen)| seen.size);
        let (file, position) = (piece.file, piece.position);
        let done = worker.appended(&[*due], fd, state.append_size.load(Ordering::SeqCst), size);
        if done > 0 {
            move_to(worker, (segment, file), size);
            log.advance(position, done);
            worker.done();
        }
        done
    }

    /// Which of the hosts writes this open file; `None`: this one does.
    fn host(&mut self, worker: &Worker, name: Name, piece: &Piece, fd: &Arc<OwnedFd>) -> Option<usize> {
        if let Some((host, _)) = self.open.get(&name) {
            return *host;
        }
        let place = piece.inode as usize;
        let number = worker.extents.head().inodes.get(place)?.number.load(Ordering::SeqCst);
        let found = loop {
            let usable = |host: &usize| !self.links[*host].gone && !self.hosts.off.load(Ordering::SeqCst);
            let Some(host) = (0..self.links.len()).filter(usable).max_by_key(|host| weight(number, *host)) else {
                break None;
            };
            match self.reach(worker, host).and_then(|()| self.open(worker, host, name, fd)) {
                Ok(0) => break Some(host),
                Ok(errno) => {
                    if !self.hosts.said.swap(true, Ordering::SeqCst) {
                        let host = self.hosts.wish.hosts[host].name.clone();
                        worker.tell(&Worked::Here { segment: name.0, file: name.1, host, errno });
                    }
                    break None;
                }
                Err(error) => self.lose(worker, host, &error),
            }
        };
        self.open.insert(name, (found, place));
        found
    }

    /// Connects to a host, if that is not done, and hears what it has of this queue's.
    fn reach(&mut self, worker: &Worker, host: usize) -> Result<(), LinkError> {
        if self.links[host].direct.is_some() {
            return Ok(());
        }
        let mut direct = smol::block_on(self.hosts.connect(host))?;
        direct.send(&Put::Begin { queue: self.device }, &[])?;
        let Some((Got::Begun { logs }, 0)) = direct.receive_within((HEADER, 0))? else { return Err(LinkError::Closed) };
        self.links[host].direct = Some(direct);
        for (segment, epoch, position) in logs {
            let log = worker.extents.log(segment).filter(|_| !self.sent.contains_key(&segment));
            let log = log.filter(|log| log.segment.device.load(Ordering::SeqCst) == self.device);
            if let Some(log) = log.filter(|log| log.segment.epoch.load(Ordering::SeqCst) == epoch) {
                Self::skip(worker, segment, &log, position);
            }
        }
        Ok(())
    }

    /// What an earlier worker had sent is written up to a position.
    fn skip(worker: &Worker, segment: u32, log: &Log<'_>, position: u64) {
        while let Ok(Some(piece)) = log.next()
            && piece.position < position
        {
            refresh(worker, (segment, piece.file), 0, 0);
            log.advance(piece.position, piece.len.min(position - piece.position));
            worker.done();
        }
    }

    /// Asks a host to open a file; an errno, or 0.
    fn open(&mut self, worker: &Worker, host: usize, name: Name, fd: &OwnedFd) -> Result<i32, LinkError> {
        self.collect(worker, host);
        let refused = |error: io::Error| error.raw_os_error().unwrap_or(EIO);
        for nth in 1.. {
            let seen = || Ok((fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?, same::seen(fd)?));
            let (path, (device, seen)) = match seen() {
                Ok(found) => found,
                Err(error) => return Ok(refused(error)),
            };
            let path = path.into_os_string().into_vec();
            let put = Put::Open { name, path, device, seen };
            if put.check(0).is_err() {
                return Ok(ENAMETOOLONG);
            }
            match self.ask(host, &put)? {
                ESTALE if nth < TRIES => thread::sleep(PAUSE),
                errno => return Ok(errno),
            }
        }
        Ok(ESTALE)
    }

    /// Asks what is answered at once; nothing is unanswered there.
    fn ask(&mut self, host: usize, put: &Put) -> Result<i32, LinkError> {
        let direct = self.links[host].direct.as_mut().ok_or(LinkError::Closed)?;
        direct.send(put, &[])?;
        answered(direct).map(|(errno, _)| errno)
    }

    /// Hears everything that is unanswered.
    pub(super) fn drain(&mut self, worker: &Worker) {
        (0..self.links.len()).for_each(|host| self.collect(worker, host));
    }

    fn collect(&mut self, worker: &Worker, host: usize) {
        while !self.links[host].unanswered.is_empty() {
            self.answer(worker, host);
        }
    }

    /// Hears one answer.
    fn answer(&mut self, worker: &Worker, host: usize) {
        let Link { direct: Some(direct), unanswered, .. } = &mut self.links[host] else { return };
        let (errno, end) = match answered(direct) {
            Ok(answer) => answer,
            Err(error) => return self.lose(worker, host, &error),
        };
        let Some(sent) = unanswered.pop_front() else { return };
        let Some(log) = worker.extents.log(sent.segment) else { return };
        if errno == 0 {
            let state = &worker.extents.head().inodes[sent.place].elsewhere;
            let _ = state.compare_exchange(inode::IDLE, inode::WRITTEN, Ordering::SeqCst, Ordering::SeqCst);
            let len = sent.pieces.iter().map(|piece| piece.1).sum();
            refresh(worker, (sent.segment, sent.file), sent.offset, len);
            if sent.offset == APPEND {
                move_to(worker, (sent.segment, sent.file), end);
            }
        } else if !sent.doomed {
            let same = |other: &&mut Sent| (other.segment, other.file) == (sent.segment, sent.file);
            unanswered.iter_mut().filter(same).for_each(|other| other.doomed = true);
            self.failed.insert((sent.segment, sent.file));
            worker.fail((sent.segment, sent.file), sent.place, errno);
        }
        log.segment.pieces.fetch_add(1, Ordering::Relaxed);
        // Who finds nothing pending any more finds that something was done.
        worker.extents.head().done.fetch_add(1, Ordering::SeqCst);
        for (position, len) in sent.pieces {
            if log.next().is_ok_and(|next| next.is_some_and(|next| next.position == position)) {
                log.advance(position, len);
            }
        }
        worker.done();
        if !self.links.iter().any(|link| link.unanswered.iter().any(|other| other.segment == sent.segment)) {
            self.sent.remove(&sent.segment);
        }
    }

    /// A host is not to be asked any more; what it has not answered goes elsewhere.
    fn lose(&mut self, worker: &Worker, host: usize, error: &LinkError) {
        let link = &mut self.links[host];
        link.direct = None;
        let unanswered = std::mem::take(&mut link.unanswered);
        if !std::mem::replace(&mut link.gone, true) {
            let name = self.hosts.wish.hosts[host].name.clone();
            if is_gone(error) {
                let others = self.links.iter().any(|link| !link.gone);
                worker.tell(&Worked::Gone { host: name, others });
            } else if !self.hosts.off.swap(true, Ordering::SeqCst) {
                // It may still write: nobody else may write what is newer.
                worker.tell(&Worked::Silent { host: name, error: error.to_string() });
            }
        }
        for sent in unanswered {
            self.sent.remove(&sent.segment);
            if let (APPEND, [piece]) = (sent.offset, &sent.pieces[..]) {
                self.again.insert(sent.segment, *piece);
            }
        }
        let off = self.hosts.off.load(Ordering::SeqCst);
        self.open.retain(|_, (to, _)| *to != Some(host) && !(off && to.is_some()));
    }

    /// Has what programs wait for, beside writes: files that are to be synced, and to be forgotten. Nothing is unanswered.
    pub(super) fn attend(&mut self, worker: &Worker) {
        let head = worker.extents.head();
        let asked = head.syncs.load(Ordering::SeqCst);
        if self.synced.replace(asked) != Some(asked) {
            let wanted = |(place, inode): (usize, &crate::sys::extents::Inode)| {
                let ours = inode.device.load(Ordering::SeqCst) == self.device;
                (ours && inode.elsewhere.load(Ordering::SeqCst) == inode::SYNC).then_some(place)
            };
            let places: BTreeSet<_> = head.inodes.iter().enumerate().filter_map(wanted).collect();
            for place in places {
                self.sync(worker, place);
                let state = &head.inodes[place].elsewhere;
                let _ = state.compare_exchange(inode::SYNC, inode::IDLE, Ordering::SeqCst, Ordering::SeqCst);
                worker.done();
            }
        }
        for name in worker.dropped(self.device) {
            self.close(worker, name);
            worker.forget(name);
        }
    }

    /// Files of which a program's other names are known, too, are synced once a host.
    fn sync(&mut self, worker: &Worker, place: usize) {
        let is_it = |(name, (host, of)): (&Name, &(Option<usize>, usize))| {
            host.filter(|_| *of == place).map(|host| (host, *name))
        };
        let all: BTreeMap<usize, Name> = self.open.iter().filter_map(is_it).collect();
        for (host, name) in all {
            match self.ask(host, &Put::Sync { name }) {
                Ok(0) => {}
                Ok(errno) => worker.fail(name, place, errno),
                Err(error) => self.lose(worker, host, &error),
            }
        }
    }

    /// A program's open file is closed everywhere.
    pub(super) fn close(&mut self, worker: &Worker, name: Name) {
        let Some((Some(host), place)) = self.open.remove(&name) else { return };
        self.collect(worker, host);
        match self.ask(host, &Put::Close { name }) {
            Ok(0) => {}
            Ok(errno) => worker.fail(name, place, errno),
            Err(error) => self.lose(worker, host, &error),
        }
    }

    /// A program has ended.
    pub(super) fn end(&mut self, worker: &Worker, segment: u32) {
        let names: Vec<_> = self.open.range((segment, 0)..=(segment, u32::MAX)).map(|(name, _)| *name).collect();
        names.into_iter().for_each(|name| self.close(worker, name));
    }
}

fn answered(direct: &mut Direct) -> Result<(i32, u64), LinkError> {
    match direct.receive_within((HEADER, 0))? {
        Some((Got::Done { errno, end }, 0)) => Ok((errno, end)),
        Some(_) => Err(FrameError::Header.into()),
        None => Err(LinkError::Closed),
    }
}

/// This host's kernel does not believe to know what another one has changed.
fn refresh(worker: &Worker, name: Name, offset: u64, len: u64) {
    let Some(fd) = worker.file(name) else { return };
    let (offset, len) = if offset == APPEND { (0, 0) } else { (offset, len) };
    let _ = same::seen(&fd);
    let _ = rustix::fs::fadvise(&fd, offset, std::num::NonZeroU64::new(len), rustix::fs::Advice::DontNeed);
}

/// A program's open file is where its own append would have left it.
fn move_to(worker: &Worker, name: Name, end: u64) {
    if let Some(fd) = worker.file(name) {
        let _ = rustix::fs::seek(&fd, rustix::fs::SeekFrom::Start(end));
    }
}
