//! A SEQPACKET pair between a process and its fork: whole messages, with descriptors beside them. Trusted: the two ends are made
//! together and inherited, never named.
#![allow(unsafe_code, reason = "descriptors that arrive by SCM_RIGHTS are taken into ownership")]

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, socketpair,
};
use rkyv::util::AlignedVec;

use crate::net::wire::frame::Message;

/// Descriptors in one message, at most (the kernel's SCM_MAX_FD is 253).
pub const FDS_MAX: usize = 240;
/// Bytes in one message, at most; well below the default socket buffer.
pub const BYTES_MAX: usize = 64 << 10;

/// One end.
#[derive(Debug)]
pub struct Seqpacket(OwnedFd);

impl Seqpacket {
    /// Two connected ends, close-on-exec.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn pair() -> io::Result<(Seqpacket, Seqpacket)> {
        let (a, b) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
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
        let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[][..] } else { &rights[..] };
        loop {
            match sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(&bytes)], control, MsgFlags::MSG_NOSIGNAL, None) {
                Err(Errno::EINTR) => {}
                result => return Ok(result.map(drop)?),
            }
        }
    }

    /// The next message and its descriptors; `None` when the peer is gone.
    ///
    /// # Errors
    /// A message that is none of ours.
    pub fn receive<M: Message>(&self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        self.receive_with(MsgFlags::empty())
    }

    /// [`Seqpacket::receive`], but does not wait.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] when nothing is there.
    pub fn receive_now<M: Message>(&self) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        self.receive_with(MsgFlags::MSG_DONTWAIT)
    }

    fn receive_with<M: Message>(&self, flags: MsgFlags) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; BYTES_MAX];
        let mut space = nix::cmsg_space!([i32; FDS_MAX]);
        let mut slices = [IoSliceMut::new(&mut bytes)];
        let got = loop {
            match recvmsg::<()>(self.0.as_raw_fd(), &mut slices, Some(&mut space), flags | MsgFlags::MSG_CMSG_CLOEXEC) {
                // A peer that left without reading everything: said once, before what it sent and its end can be read.
                Err(Errno::EINTR | Errno::ECONNRESET) => {}
                result => break result?,
            }
        };
        let mut fds = Vec::new();
        for control in got.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = control {
                // SAFETY: the kernel made these descriptors for this message just now; nobody else owns them.
                fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        let len = got.bytes;
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
