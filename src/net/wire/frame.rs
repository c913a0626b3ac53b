//! The frame: what every pair of processes exchanges.
//!
//! ```text
//! prefix 16 bytes   magic u32 | version u16 | kind u16 | header length u32 | body length u32   (little endian)
//! header            an rkyv archive of the kind's type
//! tag 16 bytes      keyed BLAKE3 over counter, prefix and header          (authenticated links only)
//! body              raw bytes
//! body tag 16 bytes keyed BLAKE3 over counter and body                    (authenticated links; not for `Kind::Log`, whose
//!                                                                          header carries the hash of the body)
//! ```
//!
//! The lengths come from a stranger until the tag is verified, so they are capped before anything is allocated.

use rkyv::util::AlignedVec;

use super::record::CHUNK_MAX;
pub use crate::sys::page::VERSION;

/// First four bytes of every frame ("HPRT").
pub const MAGIC: u32 = u32::from_le_bytes(*b"HPRT");
/// Bytes in the prefix.
pub const PREFIX: usize = 16;
/// Bytes in a tag.
pub const TAG: usize = 16;
/// A header is at most this long: the largest are listings of very large directories and environments.
pub const HEADER_MAX: usize = 32 << 20;
/// A body is at most this long: a chunk, which compression may enlarge a little.
pub const BODY_MAX: usize = CHUNK_MAX + (CHUNK_MAX >> 4);
/// Before the peer has proved itself, a header is at most this long and a body empty.
pub const HELLO_MAX: usize = 1024;

/// Which conversation a frame belongs to, and so the type of its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// Handshake of a link: `wire::hello`.
    Hello = 1,
    /// Between a node and its parent in the control tree: `wire::control`.
    Control = 2,
    /// Replication of the root's log: `wire::log`.
    Log = 3,
    /// Between a node agent and its keeper: `wire::keeper`.
    Keeper = 4,
    /// Between a resident session and its commands: `wire::session`.
    Session = 5,
    /// Between a program's pager and a memory server: `wire::page`.
    Page = 6,
    /// Between a node agent and its I/O worker: `wire::files`.
    Files = 7,
    /// Between I/O workers: `wire::forward`.
    Forward = 8,
}

/// A frame's prefix, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    pub kind: Kind,
    pub header: usize,
    pub body: usize,
}

/// Why bytes are not a frame of ours.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    #[error("the peer does not speak hpcrt's protocol")]
    Magic,
    #[error("the peer speaks version {0} of the protocol, this hpcrt version {VERSION}; use one binary everywhere")]
    Version(u16),
    #[error("the peer sent a frame of unknown kind {0}")]
    Kind(u16),
    #[error("the peer announced {0} bytes, more than the protocol allows")]
    TooLong(usize),
    #[error("a frame's tag is wrong: the peer has another key, or the bytes were altered")]
    Tag,
    #[error("a frame's header is malformed")]
    Header,
}

impl Prefix {
    /// The bytes on the wire.
    pub fn encode(self) -> [u8; PREFIX] {
        let mut bytes = [0; PREFIX];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&(self.kind as u16).to_le_bytes());
        bytes[8..12].copy_from_slice(&u32::try_from(self.header).unwrap_or(u32::MAX).to_le_bytes());
        bytes[12..16].copy_from_slice(&u32::try_from(self.body).unwrap_or(u32::MAX).to_le_bytes());
        bytes
    }

    /// The one door for a prefix from outside; `limit` is (header, body) in bytes.
    ///
    /// # Errors
    /// See [`FrameError`].
    pub fn decode(bytes: &[u8; PREFIX], limit: (usize, usize)) -> Result<Prefix, FrameError> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if word(0) != MAGIC {
            return Err(FrameError::Magic);
        }
        if half(4) != VERSION {
            return Err(FrameError::Version(half(4)));
        }
        let kind = match half(6) {
            1 => Kind::Hello,
            2 => Kind::Control,
            3 => Kind::Log,
            4 => Kind::Keeper,
            5 => Kind::Session,
            6 => Kind::Page,
            7 => Kind::Files,
            8 => Kind::Forward,
            other => return Err(FrameError::Kind(other)),
        };
        let (header, body) = (word(8) as usize, word(12) as usize);
        if header > limit.0 || body > limit.1 {
            return Err(FrameError::TooLong(header.max(body)));
        }
        Ok(Prefix { kind, header, body })
    }
}

/// Types that stand in a frame's header.
pub trait Message:
    Sized
    + rkyv::Archive<
        Archived: for<'a> rkyv::bytecheck::CheckBytes<rkyv::api::high::HighValidator<'a, rkyv::rancor::Error>>
                      + rkyv::Deserialize<Self, rkyv::api::high::HighDeserializer<rkyv::rancor::Error>>,
    > + for<'a> rkyv::Serialize<
        rkyv::api::high::HighSerializer<AlignedVec, rkyv::ser::allocator::ArenaHandle<'a>, rkyv::rancor::Error>,
    >
{
    /// The conversation the type belongs to.
    const KIND: Kind;

    /// The header's bytes.
    fn encode(&self) -> AlignedVec {
        rkyv::to_bytes::<rkyv::rancor::Error>(self).expect("serialising to memory cannot fail")
    }

    /// The one door for a header from outside: validated (bounds, UTF-8, enum tags), then owned.
    ///
    /// # Errors
    /// [`FrameError::Header`].
    fn decode(bytes: &AlignedVec) -> Result<Self, FrameError> {
        rkyv::from_bytes::<Self, rkyv::rancor::Error>(bytes).map_err(|_| FrameError::Header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_survives_the_wire() {
        let prefix = Prefix { kind: Kind::Log, header: 77, body: CHUNK_MAX };
        assert_eq!(Prefix::decode(&prefix.encode(), (HEADER_MAX, BODY_MAX)), Ok(prefix));
    }

    #[test]
    fn lengths_are_capped_and_versions_named() {
        let mut bytes = Prefix { kind: Kind::Hello, header: HELLO_MAX + 1, body: 0 }.encode();
        assert_eq!(Prefix::decode(&bytes, (HELLO_MAX, 0)), Err(FrameError::TooLong(HELLO_MAX + 1)));
        bytes[4] = 9;
        assert_eq!(Prefix::decode(&bytes, (HELLO_MAX, 0)), Err(FrameError::Version(9)));
        assert_eq!(Prefix::decode(&[0; PREFIX], (HELLO_MAX, 0)), Err(FrameError::Magic));
    }
}
