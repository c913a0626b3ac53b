//! Looks for a session's key where it must not be.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test crate uses its part")]

use std::fs;

use hpcrt::net::wire::control::{Down, Order};
use hpcrt::net::wire::frame::{BODY_MAX, HEADER_MAX, MAGIC, Message, PREFIX, Prefix};
use rkyv::util::AlignedVec;

/// The beginning of a secret as it may be written: as it is, and as hexadecimal digits.
pub struct Secret([Vec<u8>; 3]);

impl Secret {
    pub fn new(key: &[u8]) -> Secret {
        let start = &key[..12];
        let hex: String = start.iter().map(|byte| format!("{byte:02x}")).collect();
        Secret([start.to_vec(), hex.to_uppercase().into_bytes(), hex.into_bytes()])
    }

    /// The key that is handed to an agent on its standard input.
    pub fn on_its_way(input: &[u8]) -> Option<Secret> {
        let key = |at: usize| {
            let prefix = Prefix::decode(input.get(at..at + PREFIX)?.try_into().ok()?, (HEADER_MAX, BODY_MAX)).ok()?;
            let mut header = AlignedVec::new();
            header.extend_from_slice(input.get(at + PREFIX..)?.get(..prefix.header)?);
            match Down::decode(&header) {
                Ok(Down { order: Order::Enroll(enroll), .. }) => Some(enroll.key),
                _ => None,
            }
        };
        memchr::memmem::find_iter(input, &MAGIC.to_le_bytes()).find_map(key).map(|key| Secret::new(&key))
    }

    pub fn is_in(&self, bytes: &[u8]) -> bool {
        self.0.iter().any(|spelled| memchr::memmem::find(bytes, spelled).is_some())
    }

    /// The processes of this machine in whose arguments or environment it is.
    pub fn shown_by(&self) -> Vec<String> {
        let all = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
        let files = all.flat_map(|process| ["cmdline", "environ"].map(|file| process.join(file)));
        let shows = files.filter(|file| fs::read(file).is_ok_and(|bytes| self.is_in(&bytes)));
        shows.map(|file| file.display().to_string()).collect()
    }
}
