//! Replication of the root's log from a node to those it feeds.

use rkyv::{Archive, Deserialize, Serialize};

use super::frame::{Kind, Message};
use super::record::Record;

/// Frames of a log link.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum LogFrame {
    /// From the one fed: send this stripe from this sequence number on.
    Attach { stripe: u32, from: u64 },
    /// From the feeder: the next entry of the stripe. `hash` is the BLAKE3 of the body as sent (all zero without a body).
    Entry { seq: u64, record: Record, hash: [u8; 32] },
    /// From the feeder: you take far less of this stripe than others do, so those that you feed there had better be fed by others.
    Slow { stripe: u32 },
    /// From the feeder: I do not feed you in this stripe any more, go to your next ancestor. From the one fed: send nothing of it any more, over a
    /// link that stays for other things.
    Leave { stripe: u32 },
    /// From the feeder: nothing to send; keeps the link's watchdog content.
    Ping,
}

impl Message for LogFrame {
    const KIND: Kind = Kind::Log;
}
