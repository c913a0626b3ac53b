//! What a job is told of memory servers.

use rkyv::{Archive, Deserialize, Serialize};

/// Memory of other nodes for the programs of a job.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Borrow {
    pub servers: Vec<Lender>,
    /// Bytes that each program keeps on its own node; `None`: its share of what the node allows.
    pub local: Option<u64>,
    /// Everything is kept by two of them.
    pub mirror: bool,
    /// The servers' key; on its way between hosts hidden under the session's and `nonce`.
    pub key: [u8; 32],
    pub nonce: [u8; 32],
}

/// A memory server.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Lender {
    /// As the user named it; the host, where the job starts it.
    pub name: String,
    /// Where it is ("address:port"), best first; empty while it has to be started.
    pub addresses: Vec<String>,
    /// Bytes that it is to lend, where the job starts it; 0: it runs already.
    pub lend: u64,
}
