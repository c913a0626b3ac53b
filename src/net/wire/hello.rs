//! The handshake of a link between two hosts; see `net::auth` for the order and the proofs.

use rkyv::{Archive, Deserialize, Serialize};

use super::frame::{Kind, Message};

/// What the connecting side wants.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Be the control link of this node to its parent.
    Control,
    /// Receive the log.
    Log,
    /// Borrow memory.
    Memory,
    /// Borrow memory within one host: nothing that is sent carries a tag. Only over the loopback interface.
    MemoryHere,
    /// Have files written.
    Files,
}

/// The steps of the handshake.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Hello {
    /// Listener's first word: a nonce. A stranger learns this and nothing else.
    Challenge { nonce: [u8; 32] },
    /// The connecting side names itself and proves that it has the session key.
    Proof { node: u32, purpose: Purpose, nonce: [u8; 32], proof: [u8; 32] },
    /// The listener's own proof.
    Welcome { proof: [u8; 32] },
}

impl Message for Hello {
    const KIND: Kind = Kind::Hello;
}
