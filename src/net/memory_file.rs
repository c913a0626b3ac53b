//! What is said in a file in memory, whose descriptor goes beside a datagram that could not carry it.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;

use rkyv::util::AlignedVec;
use rustix::fs::MemfdFlags;

use super::wire::frame::Message;

/// Writes bytes into a new file; `name` is what `/proc` shows.
///
/// # Errors
/// Memory is short.
pub fn write_bytes(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file.into())
}

/// The first `limit` bytes of a file.
///
/// # Errors
/// It cannot be read.
pub fn read_bytes(file: OwnedFd, limit: u64) -> io::Result<Vec<u8>> {
    let mut file = File::from(file);
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes a message into a new file; `name` is what `/proc` shows.
///
/// # Errors
/// Memory is short.
pub fn write(name: &str, message: &impl Message) -> io::Result<OwnedFd> {
    write_bytes(name, &message.encode())
}

/// The message in a file of at most `limit` bytes.
///
/// # Errors
/// The file is longer, or holds something else.
pub fn read<M: Message>(file: OwnedFd, limit: u64) -> io::Result<M> {
    let bytes = read_bytes(file, limit)?;
    let mut aligned = AlignedVec::with_capacity(bytes.len());
    aligned.extend_from_slice(&bytes);
    M::decode(&aligned).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}
