//! A SEQPACKET pair between a process and its fork: whole messages, with descriptors beside them. Trusted: the two ends are made
//! together and inherited, never named.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rkyv::util::AlignedVec;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use super::wire::frame::Message;

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

    /// Sends a message of at most [`BYTES_MAX`] bytes with at most [`FDS_MAX`] descriptors; waits for room unless non-blocking.
    ///
    /// # Errors
    /// The peer is gone, or (non-blocking) there is no room.
    pub fn send(&self, message: &impl Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = message.encode();
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
        let len = loop {
            match recvmsg(&self.0, &mut slices, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
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
}
