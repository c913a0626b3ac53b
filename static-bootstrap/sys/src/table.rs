//! The table of the audit view: what a node's agent knows about the names that programs ask their dynamic linker for. Written by the
//! agent into a file that only its user can reach, mapped by the auditor of every process.
//!
//! One flat block of native-endian words; every offset counts bytes from its start. The writer (hpcrt) and the reader (the auditor) are
//! built from this one file and embedded in one binary. The reader takes any bytes: nothing is indexed unchecked.

/// First word of every table ("HPCRTAT1").
pub const MAGIC: u64 = u64::from_le_bytes(*b"HPCRTAT1");
/// The name of the table in the store, and of the directory of the staged files: a staged file lies there under its original path.
pub const FILE: &str = "table";
pub const ROOT: &str = "root";
/// The socket in the store at which the agent answers.
pub const DOOR: &str = "door";
/// Bytes of the head: magic; length of the block; offsets of the path of [`ROOT`] and of the list of shared directories; offset of the
/// buckets and their number, a power of two; and the word at [`SUPERSEDED`].
pub const HEAD: usize = 32;
/// Offset of the only word that changes: not 0 as soon as there is a newer table of the same name.
pub const SUPERSEDED: usize = 28;
/// Bytes of a bucket: hash, offset and length of the key, offset of the value. No key: empty, and the end of a search.
pub const BUCKET: usize = 16;

/// Where the auditor finds the path of its store: after this mark in its own file, ended by NUL, in [`STORE_MAX`] bytes.
pub const MARK: [u8; 16] = *b"hpcrt's store is";
/// See [`MARK`]; a Unix socket's path is not longer either.
pub const STORE_MAX: usize = 88;

/// What a process asks at the door, first byte of its message: the rest is a path; the answer is a path below [`ROOT`] to open instead, or
/// nothing, or, where the agent knows that nothing is there, a path at which nothing is either.
pub const ASK_FILE: u8 = b'f';
/// The rest is a program and its `LD_LIBRARY_PATH`, separated by NUL; the answer comes when the table has what is known of it.
pub const ASK_PROGRAM: u8 = b'p';
/// The rest is a directory; the answer is a file in which its names are, or nothing. For Python, as the next one.
pub const ASK_LIST: u8 = b'l';
/// The rest is a module's source and its bytecode; the answer is the source's time and size in decimal, and a path to read the bytecode
/// from; or nothing.
pub const ASK_MODULE: u8 = b'm';
/// Bytes of a message, at most.
pub const MESSAGE_MAX: usize = 8 << 10;

/// First part of a key.
pub mod kind {
    /// An absolute path; the value is the path to open instead.
    pub const PATH: &[u8] = b"f";
    /// A program (without symbolic links) and its `LD_LIBRARY_PATH`; the value is its number, the bytes of static thread-local
    /// storage that its libraries take, and, if it is the host's own, its device and inode number: in decimal with blanks between.
    pub const PROGRAM: &[u8] = b"p";
    /// Number of a program, path of a library of it (of the program itself: nothing), and a name that it asks for; the value is the path to
    /// open.
    pub const NAME: &[u8] = b"n";
}

/// The hash of a key whose parts are joined by NUL (FNV-1a).
pub fn hash(parts: &[&[u8]]) -> u32 {
    let mut hash = 0x811c_9dc5_u32;
    for (nth, part) in parts.iter().enumerate() {
        if nth > 0 {
            hash = hash.wrapping_mul(0x0100_0193);
        }
        for byte in *part {
            hash = (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    }
    hash
}

/// A table in memory.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    bytes: &'a [u8],
    root: &'a [u8],
    shared: usize,
    buckets: &'a [u8],
}

impl<'a> Table<'a> {
    /// `None`: these bytes are no table.
    pub fn new(bytes: &'a [u8]) -> Option<Table<'a>> {
        let magic = bytes.first_chunk::<8>()?;
        let len = word(bytes, 8)? as usize;
        if u64::from_ne_bytes(*magic) != MAGIC || len < HEAD || len > bytes.len() {
            return None;
        }
        let bytes = bytes.get(..len)?;
        let (at, count) = (word(bytes, 20)? as usize, word(bytes, 24)? as usize);
        if !count.is_power_of_two() {
            return None;
        }
        let buckets = bytes.get(at..)?.get(..count.checked_mul(BUCKET)?)?;
        let root = string(bytes, word(bytes, 12)? as usize)?;
        Some(Table { bytes, root, shared: word(bytes, 16)? as usize, buckets })
    }

    /// The path of the directory of staged files.
    pub fn root(&self) -> &'a [u8] {
        self.root
    }

    /// The value of a key; a NUL follows it in memory.
    pub fn get(&self, parts: &[&[u8]]) -> Option<&'a [u8]> {
        let hash = hash(parts);
        let count = self.buckets.len() / BUCKET;
        let mut at = hash as usize & (count - 1);
        for _ in 0..count {
            let bucket = self.buckets.get(at * BUCKET..)?;
            let (key, len) = (word(bucket, 4)? as usize, word(bucket, 8)? as usize);
            if key == 0 {
                return None;
            }
            if word(bucket, 0)? == hash && self.bytes.get(key..)?.get(..len).is_some_and(|key| is_joined(key, parts)) {
                return string(self.bytes, word(bucket, 12)? as usize);
            }
            at = (at + 1) & (count - 1);
        }
        None
    }

    /// Whether the agent is to be asked about what lies at `path`.
    pub fn is_shared(&self, path: &[u8]) -> bool {
        let mut at = self.shared;
        while let Some(directory) = string(self.bytes, at).filter(|d| !d.is_empty()) {
            if path.strip_prefix(directory).is_some_and(|rest| rest.first() == Some(&b'/')) {
                return true;
            }
            at += directory.len() + 1;
        }
        false
    }
}

/// Whether `key` is these parts with NULs between them.
fn is_joined(key: &[u8], parts: &[&[u8]]) -> bool {
    let mut rest = Some(key);
    for (nth, part) in parts.iter().enumerate() {
        if nth > 0 {
            rest = rest.and_then(|r| r.strip_prefix(&[0]));
        }
        rest = rest.and_then(|r| r.strip_prefix(*part));
    }
    rest.is_some_and(<[u8]>::is_empty)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

fn string(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    rest.get(..end)
}
