//! SEQPACKET sockets: whole messages, with descriptors beside them. Trusted: the two ends are a pair made together and inherited, or both
//! of processes of one user.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rkyv::util::AlignedVec;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recvmsg, sendmsg,
    socket_with, socketpair, sockopt,
};
use smol::{Async, Timer};

use super::wire::frame::Message;
use crate::{Result, error::Context};

/// Descriptors in one message, at most (the kernel's SCM_MAX_FD is 253).
pub const FDS_MAX: usize = 240;
/// Bytes in one message, at most; well below the default socket buffer.
pub const BYTES_MAX: usize = 64 << 10;

/// Bytes of ancillary data that [`FDS_MAX`] descriptors need.
const SPACE: usize = rustix::cmsg_space!(ScmRights(FDS_MAX));

/// One end.
#[derive(Debug)]
pub struct Seqpacket(OwnedFd);

impl Seqpacket {
    /// Two connected ends, close-on-exec.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn pair() -> io::Result<(Seqpacket, Seqpacket)> {
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Seqpacket(a), Seqpacket(b)))
    }

    /// The same end under another descriptor.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn try_clone(&self) -> io::Result<Seqpacket> {
        self.0.try_clone().map(Seqpacket)
    }

    /// Takes over a descriptor that is such an end.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Seqpacket(fd)
    }

    /// Connects to the socket of this name, without waiting, if a process of this user serves it: in a place like /tmp somebody else may have made it before.
    ///
    /// # Errors
    /// `CONNREFUSED` when nobody serves it any more, `AGAIN` when so many wait for it that it must hang, `PERM` when somebody else does.
    pub fn connect(path: &Path) -> rustix::io::Result<Seqpacket> {
        let fd = socket(SocketFlags::NONBLOCK)?;
        connect(&fd, &SocketAddrUnix::new(path)?)?;
        if sockopt::socket_peercred(&fd)?.uid != rustix::process::geteuid() {
            return Err(Errno::PERM);
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags - rustix::fs::OFlags::NONBLOCK)?;
        Ok(Seqpacket(fd))
    }

    /// The process at the other end, when it connected.
    pub fn peer(&self) -> Option<i32> {
        sockopt::socket_peercred(self).ok().map(|peer| peer.pid.as_raw_nonzero().get())
    }

    /// Sends a message of at most [`BYTES_MAX`] bytes with at most [`FDS_MAX`] descriptors; waits for room unless non-blocking.
    ///
    /// # Errors
    /// The peer is gone, or (non-blocking) there is no room.
    pub fn send(&self, message: &impl Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = message.encode();
        if bytes.len() > BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too long"));
        }
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors in one message"));
        }
        loop {
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                result => return Ok(result.map(drop)?),
            }
        }
    }

    /// The next message and its descriptors; `None` when the peer is gone.
    ///
    /// # Errors
    /// A message that is none of ours.
    pub fn receive<M: Message>(&self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        self.receive_with(RecvFlags::empty())
    }

    /// [`Seqpacket::receive`], but does not wait.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when nothing is there.
    pub fn receive_now<M: Message>(&self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        self.receive_with(RecvFlags::DONTWAIT)
    }

    fn receive_with<M: Message>(&self, flags: RecvFlags) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let mut left = false;
        let len = loop {
            match recvmsg(&self.0, &mut slices, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
                // The kernel looks for a message first and for the peer's end afterwards: between the two it may have sent one and left.
                Ok(end) if end.bytes == 0 && !left => left = true,
                // A peer that left without reading everything: said once, before what it sent and its end can be read.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                result => break result?.bytes,
            }
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if len == 0 {
            return Ok(None);
        }
        let mut aligned = AlignedVec::with_capacity(len);
        aligned.extend_from_slice(&bytes[..len]);
        let message = M::decode(&aligned).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        Ok(Some((message, fds)))
    }
}

fn socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)
}

/// A socket with a name.
#[derive(Debug)]
pub struct Listener(Async<OwnedFd>);

impl Listener {
    /// Makes it; up to `backlog` connections wait to be accepted.
    ///
    /// # Errors
    /// The path is too long, taken, or not to be written to.
    pub fn bind(path: &Path, backlog: i32) -> Result<Listener> {
        let fd = socket(SocketFlags::NONBLOCK).op("make a socket")?;
        bind(&fd, &SocketAddrUnix::new(path).op_on("name the socket", path)?).op_on("make the socket", path)?;
        listen(&fd, backlog).op_on("listen on", path)?;
        Ok(Listener(Async::new(fd).op("watch the socket")?))
    }

    /// The next connection of a process of this user; others see the end of theirs.
    pub async fn accept(&self) -> Seqpacket {
        /// When no descriptor is free: others may give some back.
        const PAUSE: Duration = Duration::from_millis(50);
        let user = rustix::process::geteuid();
        loop {
            match self.0.read_with(|fd| Ok(accept_with(fd, SocketFlags::CLOEXEC)?)).await {
                // The directory should keep others out already.
                Ok(fd) if sockopt::socket_peercred(&fd).is_ok_and(|peer| peer.uid == user) => return Seqpacket(fd),
                Ok(_) => {}
                Err(_) => drop(Timer::after(PAUSE).await),
            }
        }
    }
}

impl From<Seqpacket> for OwnedFd {
    fn from(socket: Seqpacket) -> OwnedFd {
        socket.0
    }
}

impl AsFd for Seqpacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::wire::keeper::Ask;

    #[test]
    fn messages_keep_their_bounds_and_descriptors() {
        let (a, b) = Seqpacket::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        let many = vec![writer.as_fd(); FDS_MAX];
        a.send(&Ask::Job { job: 7 }, &many).unwrap();
        a.send(&Ask::Go, &[]).unwrap();
        drop(writer);
        let (job, fds) = b.receive::<Ask>().unwrap().unwrap();
        assert_eq!((job, fds.len()), (Ask::Job { job: 7 }, FDS_MAX));
        io::Write::write_all(&mut io::PipeWriter::from(fds.into_iter().next().unwrap()), b"x").unwrap();
        assert_eq!(io::read_to_string(&mut reader).unwrap(), "x", "every copy is closed with its owner");
        let (go, fds) = b.receive_now::<Ask>().unwrap().unwrap();
        assert_eq!((go, fds.len()), (Ask::Go, 0));
        assert_eq!(b.receive_now::<Ask>().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(a);
        assert!(b.receive::<Ask>().unwrap().is_none());
    }

    #[test]
    fn the_last_words_of_a_peer_that_leaves_are_heard() {
        for round in 0..2_000 {
            let (a, b) = Seqpacket::pair().unwrap();
            let leaves = std::thread::spawn(move || a.send(&Ask::Go, &[]).unwrap());
            let heard = loop {
                match b.receive_now::<Ask>() {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    heard => break heard.unwrap(),
                }
            };
            assert!(matches!(heard, Some((Ask::Go, _))), "round {round}");
            leaves.join().unwrap();
        }
    }
}
