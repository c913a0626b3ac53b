//! A link of one thread that waits: for pages, where a task's detour through epoll would cost as much as the network.
//!
//! The frames are those of [`super::link`]; both sides have proved themselves there.

use std::io::{self, IoSlice};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rkyv::util::AlignedVec;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use smol::future::FutureExt;
use smol::{Async, Timer};

use super::auth::{SessionKey, Tags};
use super::link::{self, LinkError, Reader, Writer, check};
use super::wire::frame::{FrameError, Message, PREFIX, Prefix, TAG};
use super::wire::hello::Purpose;
use super::wire::page::Page;
use crate::sys::page::{HEAD, PIECE, SPAN};
use crate::sys::tcp;

/// Bytes read ahead: many questions that came together are one call of the kernel.
const READ_AHEAD: usize = 16 << 10;
/// A host that does not answer is given up after this time.
const CONNECT: Duration = Duration::from_secs(3);
/// Who asked within this time after the last answer is waited for awake: to be woken takes longer than most answers.
const SOON: Duration = Duration::from_micros(100);
/// A peer whose host is gone is noticed after about this time.
const DEAD: Duration = Duration::from_secs(20);
/// Who waits for one looks this often whether it is.
const LOOK: Duration = Duration::from_secs(5);

/// See the module.
pub struct Direct {
    stream: TcpStream,
    /// Of what is sent, and of what is received.
    ours: Option<Tags>,
    theirs: Option<Tags>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    header: AlignedVec,
    /// The last question came within [`SOON`].
    soon: bool,
}

/// Connects to who lends memory. `tagged`: frames carry tags, as they must between hosts.
///
/// # Errors
/// Nobody answers there, or he has another key.
pub async fn connect(address: SocketAddr, key: &SessionKey, tagged: bool) -> Result<Direct, LinkError> {
    connect_for(address, key, 0, if tagged { Purpose::Memory } else { Purpose::MemoryHere }).await
}

/// Connects as a node for any purpose; frames carry tags unless that says otherwise.
///
/// # Errors
/// As [`connect`]'s.
pub async fn connect_for(
    address: SocketAddr,
    key: &SessionKey,
    node: u32,
    purpose: Purpose,
) -> Result<Direct, LinkError> {
    let late = async {
        Timer::after(CONNECT).await;
        Err(io::ErrorKind::TimedOut.into())
    };
    let stream = Async::<TcpStream>::connect(address).or(late).await?;
    stream.get_ref().set_nodelay(true)?;
    let stream = smol::net::TcpStream::from(stream);
    let (reader, writer) = link::connect(stream.clone(), key, node, purpose).await?;
    Direct::new(&stream, reader, writer, purpose != Purpose::MemoryHere)
}

impl Direct {
    /// Goes over from the link that both sides proved themselves on. `tagged`: frames go on to carry tags.
    ///
    /// # Errors
    /// The peer has said more than it was asked, or the kernel refuses.
    pub fn new(
        stream: &smol::net::TcpStream,
        reader: Reader,
        writer: Writer,
        tagged: bool,
    ) -> Result<Direct, LinkError> {
        let tags = link::into_tags(reader, writer)?;
        let stream = TcpStream::from(stream.as_fd().try_clone_to_owned()?);
        stream.set_nonblocking(false)?;
        let socket = socket2::SockRef::from(&stream);
        let probes = socket2::TcpKeepalive::new().with_time(DEAD / 2).with_interval(DEAD / 8).with_retries(4);
        socket.set_tcp_keepalive(&probes)?;
        stream.set_read_timeout(Some(LOOK))?;
        stream.set_write_timeout(Some(LOOK))?;
        let (buffer, header) = (vec![0; READ_AHEAD].into(), AlignedVec::with_capacity(HEAD));
        let (ours, theirs) = tags.filter(|_| tagged).unzip();
        Ok(Direct { stream, ours, theirs, buffer, start: 0, end: 0, header, soon: false })
    }

    /// One for receiving and one for sending, for two threads.
    ///
    /// # Errors
    /// The socket cannot be shared.
    pub fn split(mut self) -> io::Result<(Direct, Direct)> {
        let (stream, ours) = (self.stream.try_clone()?, self.ours.take());
        let (buffer, header) = (Box::default(), AlignedVec::new());
        let sending = Direct { stream, ours, theirs: None, buffer, start: 0, end: 0, header, soon: false };
        Ok((self, sending))
    }

    /// The socket, and the tags of what is sent and received; nothing may have been read ahead.
    pub fn into_parts(self) -> (OwnedFd, Option<(Tags, Tags)>) {
        debug_assert_eq!(self.start, self.end);
        (self.stream.into(), self.ours.zip(self.theirs))
    }

    /// The next frame, and how long its body is, which has to be read with [`Direct::body`]. `None`: the peer is gone.
    ///
    /// # Errors
    /// See [`LinkError`]; after one the link is unusable.
    pub fn receive(&mut self) -> Result<Option<(Page, usize)>, LinkError> {
        self.receive_within((HEAD, SPAN))
    }

    /// The same for any message, with at most so many bytes of header and body.
    ///
    /// # Errors
    /// As [`Direct::receive`]'s.
    pub fn receive_within<M: Message>(&mut self, limit: (usize, usize)) -> Result<Option<(M, usize)>, LinkError> {
        let mut prefix = [0; PREFIX];
        match self.read_exact(&mut prefix) {
            Err(LinkError::Closed) => return Ok(None),
            read => read?,
        }
        let Prefix { kind, header, body } = Prefix::decode(&prefix, limit)?;
        if kind != M::KIND {
            return Err(FrameError::Header.into());
        }
        let mut bytes = std::mem::take(&mut self.header);
        bytes.resize(header, 0);
        self.read_exact(&mut bytes)?;
        if self.theirs.is_some() {
            let tag = self.read_tag()?;
            let expected = self.theirs.as_mut().map(|theirs| theirs.header(&prefix, &bytes));
            check(expected, &tag)?;
        }
        let message = M::decode(&bytes);
        self.header = bytes;
        Ok(Some((message?, body)))
    }

    /// The body of the frame that was received last, into these parts, one after the other.
    ///
    /// # Errors
    /// See [`LinkError`]; what was read must not be used then.
    pub fn body(&mut self, mut parts: Vec<&mut [u8]>) -> Result<(), LinkError> {
        let mut expected = self.theirs.as_ref().map(Tags::body);
        // While a piece's tag is made the next one comes.
        for piece in parts.iter_mut().flat_map(|part| part.chunks_mut(PIECE)) {
            self.read_exact(piece)?;
            expected = expected.map(|tagging| tagging.with(piece));
        }
        match expected.filter(|_| !parts.is_empty()) {
            Some(tagging) => check(Some(tagging.finish()), &self.read_tag()?),
            None => Ok(()),
        }
    }

    /// Sends a frame whose body is these parts.
    ///
    /// # Errors
    /// See [`LinkError`]; after one the link is unusable.
    pub fn send<M: Message>(&mut self, message: &M, parts: &[&[u8]]) -> Result<(), LinkError> {
        let header = message.encode();
        let body = parts.iter().map(|part| part.len()).sum();
        let prefix = Prefix { kind: M::KIND, header: header.len(), body }.encode();
        // Another question is here: its answer follows at once.
        let more = if self.end - self.start >= PREFIX + HEAD { SendFlags::MORE } else { SendFlags::empty() };
        let Some(ours) = &mut self.ours else {
            let opening = [&prefix[..], &header];
            let mut slices: Vec<_> = opening.iter().chain(parts).map(|part| IoSlice::new(part)).collect();
            return self.send_all(&mut slices, more);
        };
        let (tag, mut tagging) = (ours.header(&prefix, &header), ours.body());
        let mut slices = vec![IoSlice::new(&prefix), IoSlice::new(&header), IoSlice::new(&tag)];
        let mut waits = 0;
        // A piece leaves while the next one's tag is made.
        for piece in parts.iter().flat_map(|part| part.chunks(PIECE)) {
            if waits + piece.len() > PIECE {
                self.send_all(&mut slices, SendFlags::MORE)?;
                slices.clear();
                waits = 0;
            }
            tagging = tagging.with(piece);
            slices.push(IoSlice::new(piece));
            waits += piece.len();
        }
        let tag = tagging.finish();
        slices.extend((body > 0).then(|| IoSlice::new(&tag)));
        self.send_all(&mut slices, more)
    }

    fn send_all(&self, mut left: &mut [IoSlice<'_>], more: SendFlags) -> Result<(), LinkError> {
        while !left.is_empty() {
            let flags = SendFlags::NOSIGNAL | more;
            match rustix::net::sendmsg(&self.stream, left, &mut SendAncillaryBuffer::default(), flags) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(sent) => IoSlice::advance_slices(&mut left, sent),
                Err(errno) => self.look(errno)?,
            }
        }
        Ok(())
    }

    /// A call of the kernel ended so: whether it is to be made again.
    fn look(&self, errno: Errno) -> Result<(), LinkError> {
        match errno {
            Errno::INTR => Ok(()),
            // A peer who is stopped, and takes nothing for as long, is not gone.
            Errno::AGAIN if !tcp::is_silent(&self.stream, DEAD) => Ok(()),
            Errno::AGAIN => Err(io::Error::from(Errno::TIMEDOUT).into()),
            errno => Err(io::Error::from(errno).into()),
        }
    }

    fn read_tag(&mut self) -> Result<[u8; TAG], LinkError> {
        let mut tag = [0; TAG];
        self.read_exact(&mut tag)?;
        Ok(tag)
    }

    /// In as few calls as can be.
    fn read_all(&self, mut to: &mut [u8]) -> Result<(), LinkError> {
        while !to.is_empty() {
            match rustix::net::recv(&self.stream, &mut *to, RecvFlags::WAITALL) {
                Ok((_, 0)) => return Err(LinkError::Closed),
                Ok((_, len)) => to = &mut to[len..],
                Err(errno) => self.look(errno)?,
            }
        }
        Ok(())
    }

    fn read_exact(&mut self, mut to: &mut [u8]) -> Result<(), LinkError> {
        loop {
            let ready = (self.end - self.start).min(to.len());
            let (now, later) = to.split_at_mut(ready);
            now.copy_from_slice(&self.buffer[self.start..self.start + ready]);
            self.start += ready;
            to = later;
            if to.is_empty() {
                return Ok(());
            }
            if to.len() >= READ_AHEAD {
                return self.read_all(to);
            }
            (self.start, self.end) = (0, 0);
            self.end = self.read_some()?;
        }
    }

    /// What is there, once there is something, into the buffer.
    fn read_some(&mut self) -> Result<usize, LinkError> {
        let begun = Instant::now();
        let came = loop {
            let awake = self.soon && begun.elapsed() < SOON;
            let flags = if awake { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
            match rustix::net::recv(&self.stream, &mut self.buffer[..], flags) {
                // Others go first.
                Err(Errno::AGAIN) if awake => rustix::thread::sched_yield(),
                Err(errno) => self.look(errno)?,
                Ok((_, 0)) => return Err(LinkError::Closed),
                Ok((_, len)) => break len,
            }
        };
        self.soon = begun.elapsed() < SOON;
        Ok(came)
    }
}

impl std::fmt::Debug for Direct {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Direct").field("ours", &self.ours).finish_non_exhaustive()
    }
}
