//! The records of the root's log: what every node is told about the shared file system, in the order the root found it.
//!
//! Paths are absolute and canonical up to their last component, as bytes; they are unique keys.

use rkyv::{Archive, Deserialize, Serialize};

/// Raw bytes of content in one chunk, at most; bounds a relay's buffers and the time a chunk occupies a link.
pub const CHUNK_MAX: usize = 1 << 20;

/// Number of a captured file version in the log, assigned by the root from 0 without gaps. A changed file gets a new number.
pub type FileId = u32;

/// Bytes of a [`Piece`] but the last of its file.
pub const PIECE: u64 = 256 << 10;

/// A part of a file that is passed on to those who ask ([`Supply::Held`]): [`PIECE`] bytes from `index` times that.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Piece {
    pub file: FileId,
    pub index: u32,
}

impl Piece {
    /// Its first byte's place in the file.
    pub fn offset(self) -> u64 {
        u64::from(self.index) * PIECE
    }

    /// Its length in a file of `size` bytes; `None` if it lies beyond.
    pub fn len(self, size: u64) -> Option<u32> {
        let len = size.saturating_sub(self.offset()).min(PIECE);
        u32::try_from(len).ok().filter(|len| *len > 0)
    }
}

/// Number of a load: what some job needs before it can start.
pub type LoadId = u32;

/// The attributes of an inode at the moment the root looked (`lstat(2)`).
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// Type and permission bits, as `st_mode`.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub ino: u64,
    /// Bytes.
    pub size: u64,
    /// Seconds and nanoseconds since the epoch.
    pub mtime: (i64, u32),
    /// Seconds and nanoseconds since the epoch.
    pub ctime: (i64, u32),
}

/// A name in a directory with its `d_type` (`DT_*`; `DT_UNKNOWN` where the file system does not tell).
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub struct Name {
    pub name: Vec<u8>,
    pub kind: u8,
}

/// How the body of a [`Record::Chunk`] is stored on the wire.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    Raw,
    Zstd,
}

/// Where the content of a regular file comes from.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Supply {
    /// Whoever needs it reads the original.
    Original,
    /// The root has not read it yet: whoever opens the file asks, and another record of it follows with one of the other two.
    OnOpen,
    /// Its chunks come under this number.
    Log(FileId),
    /// The root holds it, and its chunks come under this number to those who ask (`Report::Fetch`).
    Held(FileId),
}

/// One entry of the log.
#[derive(Archive, Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A directory and ALL names in it: a name that is not listed does not exist.
    Dir { path: Vec<u8>, attr: Attr, names: Vec<Name> },
    /// A symbolic link.
    Link { path: Vec<u8>, attr: Attr, target: Vec<u8> },
    /// A regular file.
    File { path: Vec<u8>, attr: Attr, content: Supply },
    /// Not to be had: the root's own attempt ended in this errno. Also ends a wait for a path that is neither file, directory nor link.
    Absent { path: Vec<u8>, errno: i32 },
    /// `len` raw bytes (1..=[`CHUNK_MAX`]) of file `file` at `offset`; the frame's body holds them, encoded by `codec`.
    Chunk { file: FileId, offset: u64, len: u32, codec: Codec },
    /// Every byte of this file has been sent (an empty file has no chunks).
    Complete { file: FileId },
    /// The content of this file changed while the root read it, or cannot be read (errno): its number is void.
    Void { file: FileId, errno: i32 },
    /// What was known about `path` (and below it) no longer holds: forget it and ask again when needed.
    /// When `path` is new or gone, its parent's listing is amended by `exists`.
    Changed { path: Vec<u8>, exists: Option<u8> },
    /// Who asked for the content of `file` asked for that of `next` after it. Both are [`Supply::Held`].
    Follows { file: FileId, next: FileId },
    /// Everything known to be needed by the jobs that wait for this load has been sent.
    Preloaded { load: LoadId },
}

impl Record {
    /// Whether its numbers mean something: what [`Message::decode`](super::frame::Message::decode) cannot know.
    pub fn is_sound(&self) -> bool {
        match self {
            Record::Chunk { offset, len, .. } => {
                let end = offset.checked_add((*len).into());
                (1..=CHUNK_MAX).contains(&(*len as usize)) && end.is_some_and(|end| i64::try_from(end).is_ok())
            }
            Record::File { attr, .. } => i64::try_from(attr.size).is_ok(),
            // What the kernel returns as an error, or 0.
            Record::Absent { errno, .. } | Record::Void { errno, .. } => (0..4096).contains(errno),
            _ => true,
        }
    }
}
