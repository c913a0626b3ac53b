//! Between the I/O worker of a compute host, which asks, and that of an I/O host, which writes. What is asked on a connection is done and answered in
//! order; bodies are what is to be written.

use rkyv::{Archive, Deserialize, Serialize};

use super::control::Seen;
use super::frame::{FrameError, Kind, Message};
use crate::sys::extents::{APPEND, OFFSETS, RUN};

/// An open file of a program: its log, and its number there.
pub type Name = (u32, u32);

/// Requests that may be unanswered: so many bodies the I/O host keeps.
pub const CREDITS: usize = 4;
/// Bytes of a request's header, at most.
pub const HEADER: usize = 8 << 10;
const PATH_MAX: usize = 4096;

/// What is asked.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Put {
    /// The first word: which of the host's queues this is.
    Begin {
        queue: u64,
    },
    /// Open the file at this path, if it is this one on the compute host's file system `device`, as it was seen there just now.
    Open {
        name: Name,
        path: Vec<u8>,
        device: u64,
        seen: Seen,
    },
    /// Write the body. `position`: of its first byte in the log, which has begun `epoch` times. `anew`: an error was told, there may be more.
    Write {
        name: Name,
        epoch: u64,
        position: u64,
        offset: u64,
        anew: bool,
    },
    /// What was written has to survive.
    Sync {
        name: Name,
    },
    Close {
        name: Name,
    },
}

/// What is answered.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Got {
    /// Of logs that this queue has sent before: epoch, and the position up to which everything is done.
    Begun { logs: Vec<(u32, u64, u64)> },
    /// An errno, or 0; where something was appended ends.
    Done { errno: i32, end: u64 },
}

impl Put {
    /// The one door for a request: what does not mean anything, or comes with another body than it says, is refused.
    ///
    /// # Errors
    /// [`FrameError::Header`].
    pub fn check(&self, body: usize) -> Result<(), FrameError> {
        let fits = match self {
            Put::Write { offset, position, .. } => {
                let within = *offset == APPEND || *offset <= OFFSETS + RUN;
                return if (1..=RUN as usize).contains(&body) && within && position.checked_add(RUN).is_some() {
                    Ok(())
                } else {
                    Err(FrameError::Header)
                };
            }
            Put::Open { path, .. } => path.first() == Some(&b'/') && path.len() <= PATH_MAX && !path.contains(&0),
            Put::Begin { .. } | Put::Sync { .. } | Put::Close { .. } => true,
        };
        if fits && body == 0 { Ok(()) } else { Err(FrameError::Header) }
    }
}

impl Message for Put {
    const KIND: Kind = Kind::Forward;
}

impl Message for Got {
    const KIND: Kind = Kind::Forward;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_must_mean_something() {
        let seen = Seen { ino: 1, size: 2, mtime: (3, 4), ctime: (5, 6) };
        let open = |path: &[u8]| Put::Open { name: (1, 2), path: path.to_vec(), device: 7, seen };
        assert_eq!(open(b"/a").check(0), Ok(()));
        let long = [b'/'; PATH_MAX + 1];
        assert!([&b""[..], b"a", b"/a\0b", &long].into_iter().all(|path| open(path).check(0).is_err()));
        let write = |offset, position| Put::Write { name: (1, 2), epoch: 1, position, offset, anew: false };
        let run = RUN as usize;
        assert_eq!((write(APPEND, 0).check(1), write(OFFSETS, 0).check(run)), (Ok(()), Ok(())));
        assert!(write(0, 0).check(0).is_err() && write(0, 0).check(run + 1).is_err());
        assert!(write(APPEND - 1, 0).check(1).is_err() && write(0, u64::MAX).check(1).is_err());
        assert!(Put::Sync { name: (0, 0) }.check(1).is_err());
    }
}
