//! The bodies of chunks, compressed and not.

use crate::error::{Context, Error, Result};
use crate::net::wire::record::CHUNK_MAX;

/// zstd's fast end: on real libraries it halves and more at hundreds of megabytes a second.
const LEVEL: i32 = 1;

/// A chunk's bytes compressed, if that can be done.
pub fn compress(raw: &[u8]) -> Option<Vec<u8>> {
    zstd::bulk::compress(raw, LEVEL).ok()
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
