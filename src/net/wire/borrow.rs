//! What a job is told of memory servers.

use rkyv::{Archive, Deserialize, Serialize};

/// Memory of other nodes for the programs of a job.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Borrow {
    /// As the user named them, and where they are ("address:port").
    pub servers: Vec<(String, String)>,
    /// Bytes that each program keeps on its own node.
    pub local: u64,
    /// The servers' key; on its way between hosts hidden under the session's and `nonce`.
    pub key: [u8; 32],
    pub nonce: [u8; 32],
}
