//! Between a process that another launcher started and the agent of its node: one question and one answer, each a datagram.

use rkyv::{Archive, Deserialize, Serialize};

use super::frame::{Kind, Message};

/// "This process is about to become the job's program."
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// "NAME=value": those of its variables that steer the dynamic linker, for [`Welcome::Linker`].
    pub env: Vec<Vec<u8>>,
}

/// How it comes to the job's files.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Welcome {
    /// It enters the namespaces behind the descriptors: that of the mounts and, unless root made it, that of the user.
    Namespaces,
    /// It sets these variables.
    Linker { env: Vec<Vec<u8>> },
    /// There is nothing to show, or no way to: it runs as it would without hpcrt.
    Plain,
}

impl Message for Guest {
    const KIND: Kind = Kind::Session;
}

impl Message for Welcome {
    const KIND: Kind = Kind::Session;
}
