//! What members give and get: entries of a rank and bytes, one after the other.
//!
//! ```text
//! entry   rank u32 | length u32 | bytes      (little endian)
//! ```

/// Appends an entry.
pub fn entry(to: &mut Vec<u8>, rank: u32, bytes: &[u8]) {
    to.extend_from_slice(&rank.to_le_bytes());
    to.extend_from_slice(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
    to.extend_from_slice(bytes);
}

/// The entries of a body; what is malformed ends them.
pub fn entries(mut body: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    std::iter::from_fn(move || {
        let (rank, rest) = body.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let (bytes, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        body = rest;
        Some((u32::from_le_bytes(*rank), bytes))
    })
}

/// Appends a key that this rank has put.
pub fn key_entry(to: &mut Vec<u8>, rank: u32, key: &[u8], value: &[u8]) {
    let pair = [&u32::try_from(key.len()).unwrap_or(u32::MAX).to_le_bytes()[..], key, value].concat();
    entry(to, rank, &pair);
}

/// The key and the value of such an entry's bytes.
pub fn key_of(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u32::from_le_bytes(*len) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_and_malformed_ones_end() {
        let mut body = Vec::new();
        entry(&mut body, 7, b"seven");
        entry(&mut body, 8, b"");
        key_entry(&mut body, 9, b"key", b"value");
        let all: Vec<_> = entries(&body).collect();
        assert_eq!(all[..2], [(7, &b"seven"[..]), (8, b"")]);
        assert_eq!(key_of(all[2].1), Some((&b"key"[..], &b"value"[..])));
        assert_eq!(entries(&body[..body.len() - 1]).count(), 2);
        assert_eq!(key_of(b"\xff\xff\xff\xffx"), None);
    }
}
