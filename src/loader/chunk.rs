//! The bodies of chunks, compressed and not.

use std::borrow::Cow;

use crate::error::{Context, Error, Result};
use crate::net::wire::record::{CHUNK_MAX, Codec};

/// zstd's fast end: on real libraries it halves and more at hundreds of megabytes a second.
const LEVEL: i32 = 1;

/// A chunk's bytes compressed, if that can be done.
pub fn compress(raw: &[u8]) -> Option<Vec<u8>> {
    zstd::bulk::compress(raw, LEVEL).ok()
}

/// A chunk as it travels: compressed if that is asked for and worth every node's time. Takes the bytes.
pub fn encode(raw: &mut Vec<u8>, compressed: bool) -> (Codec, Vec<u8>) {
    let worth_it = |small: &Vec<u8>| small.len() < raw.len() - raw.len() / 8;
    match if compressed { compress(raw).filter(worth_it) } else { None } {
        Some(small) => (Codec::Zstd, small),
        None => (Codec::Raw, std::mem::take(raw)),
    }
}

/// The bytes of a chunk of `len` bytes that came so.
///
/// # Errors
/// It is not one.
pub fn decode(codec: Codec, body: &[u8], len: u32) -> Result<Cow<'_, [u8]>> {
    let raw = match codec {
        Codec::Raw => Cow::Borrowed(body),
        Codec::Zstd => Cow::Owned(decompress(body, len)?),
    };
    if raw.len() == len as usize {
        return Ok(raw);
    }
    Err(Error::new("take a chunk in", format!("it has {} bytes of {len}", raw.len())))
}

/// A compressed chunk of `len` bytes.
///
/// # Errors
/// It is not one, or longer, or `len` is more than a chunk may have.
pub fn decompress(body: &[u8], len: u32) -> Result<Vec<u8>> {
    if len as usize > CHUNK_MAX {
        return Err(Error::new("decompress a chunk", format!("it is said to have {len} bytes")));
    }
    zstd::bulk::decompress(body, len as usize).op("decompress a chunk")
}
