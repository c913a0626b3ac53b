//! Writes the table that every auditor of a node reads; the layout is the auditor's own.

use std::collections::BTreeMap;

use crate::sys::audit_table::{BUCKET, HEAD, MAGIC, hash, kind};

/// What the table says, by key: its parts, joined by NUL.
#[derive(Debug, Default, Clone)]
pub struct Entries(BTreeMap<Vec<u8>, Vec<u8>>);

impl Entries {
    /// Sets the value of a key. What holds a NUL, in a part of the key or in the value, cannot be said in a table and is left out.
    pub fn set(&mut self, parts: &[&[u8]], value: &[u8]) {
        if !parts.iter().chain([&value]).any(|text| text.contains(&0)) {
            self.0.insert(parts.join(&0), value.to_vec());
        }
    }

    /// Whether there is a value.
    pub fn has(&self, parts: &[&[u8]]) -> bool {
        self.0.contains_key(&parts.join(&0))
    }

    /// Forgets what is to be opened instead of paths where that is this one.
    pub fn forget_path(&mut self, staged: &[u8]) {
        self.0.retain(|key, value| !(value == staged && is_of(key, kind::PATH)));
    }

    /// Forgets all programs, and the names that they ask for.
    pub fn forget_programs(&mut self) {
        self.0.retain(|key, _| is_of(key, kind::PATH));
    }

    /// The table; `root` is the path of the directory of staged files. `None`: it would exceed 4 GiB.
    pub fn table(&self, root: &[u8], shared: &[Vec<u8>]) -> Option<Vec<u8>> {
        let offset = |len: usize| u32::try_from(len).ok();
        let mut block = vec![0; HEAD];
        let root_at = offset(block.len())?;
        block.extend_from_slice(root);
        block.push(0);
        let shared_at = offset(block.len())?;
        shared.iter().for_each(|directory| {
            block.extend_from_slice(directory);
            block.push(0);
        });
        block.push(0);
        // Half empty at least: searches stay short, and end.
        let count = (self.0.len() * 2).next_power_of_two();
        let mut buckets = vec![[0_u32; BUCKET / 4]; count];
        for (key, value) in &self.0 {
            let hash = hash(&[key]);
            let key_at = offset(block.len())?;
            block.extend_from_slice(key);
            let value_at = offset(block.len())?;
            block.extend_from_slice(value);
            block.push(0);
            let mut at = hash as usize & (count - 1);
            while buckets[at][1] != 0 {
                at = (at + 1) & (count - 1);
            }
            buckets[at] = [hash, key_at, offset(key.len())?, value_at];
        }
        let buckets_at = offset(block.len())?;
        block.extend(buckets.iter().flatten().flat_map(|word| word.to_ne_bytes()));
        let len = offset(block.len())?;
        let head = [len, root_at, shared_at, buckets_at, offset(count)?, 0];
        block[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        block[8..HEAD].copy_from_slice(&head.map(u32::to_ne_bytes).concat());
        Some(block)
    }
}

fn is_of(key: &[u8], kind: &[u8]) -> bool {
    key.split(|byte| *byte == 0).next() == Some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::audit_table::Table;
    use proptest::prelude::*;

    fn entries() -> Entries {
        let mut entries = Entries::default();
        entries.set(&[kind::PATH, b"/s/libx.so"], b"/store/root/s/libx.so");
        entries.set(&[kind::PROGRAM, b"/s/app", b""], b"7 1536");
        entries.set(&[kind::NAME, b"7", b"", b"libx.so"], b"/store/root/s/libx.so");
        entries.set(&[kind::NAME, b"7", b"/s/libx.so", b"libc.so.6"], b"/lib/libc.so.6");
        entries.set(&[kind::PATH, b"/s/\0x"], b"not to be said");
        entries
    }

    #[test]
    fn the_auditor_finds_what_was_written() {
        let bytes = entries().table(b"/store/root", &[b"/s".to_vec(), b"/t".to_vec()]).unwrap();
        let table = Table::new(&bytes).unwrap();
        assert_eq!(table.root(), b"/store/root");
        assert_eq!(table.get(&[kind::PATH, b"/s/libx.so"]), Some(&b"/store/root/s/libx.so"[..]));
        assert_eq!(table.get(&[kind::PROGRAM, b"/s/app", b""]), Some(&b"7 1536"[..]));
        assert_eq!(table.get(&[kind::PROGRAM, b"/s/app", b"/t"]), None);
        assert_eq!(table.get(&[kind::NAME, b"7", b"/s/libx.so", b"libc.so.6"]), Some(&b"/lib/libc.so.6"[..]));
        assert_eq!(table.get(&[kind::NAME, b"7", b"/s/libx.so\0libc.so.6"]), Some(&b"/lib/libc.so.6"[..]), "one key");
        assert_eq!(table.get(&[kind::NAME, b"7", b"", b"liby.so"]), None);
        assert!(table.is_shared(b"/s/a") && table.is_shared(b"/t/b/c"));
        assert!(!table.is_shared(b"/s") && !table.is_shared(b"/sa") && !table.is_shared(b"/u/s/a"));
    }

    #[test]
    fn what_changed_is_not_answered() {
        let mut entries = entries();
        let found = |entries: &Entries, key: &[&[u8]]| {
            let bytes = entries.table(b"/store/root", &[]).unwrap();
            Table::new(&bytes).unwrap().get(key).is_some()
        };
        let (path, name): (&[&[u8]], &[&[u8]]) = (&[kind::PATH, b"/s/libx.so"], &[kind::NAME, b"7", b"", b"libx.so"]);
        entries.forget_programs();
        assert!(found(&entries, path) && !found(&entries, name));
        entries.forget_path(b"/store/root/s/libx.so");
        assert!(!found(&entries, path));
    }

    /// The bytes of a small table: what a running program has mapped must not change its meaning.
    #[test]
    #[cfg(target_endian = "little")]
    fn the_layout_is_this() {
        let mut entries = Entries::default();
        entries.set(&[kind::PATH, b"/x"], b"/r/x");
        let bytes = entries.table(b"/r", &[b"/".to_vec()]).unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "48504352544154314f00000020000000230000002f00000002000000000000002f72002f000066002f782f722f78006cfaf3a326000000040000\
             002a00000000000000000000000000000000000000"
        );
    }

    #[test]
    fn thousands_are_found_again() {
        let mut entries = Entries::default();
        let path = |n: u32| format!("/shared/lib/lib{n}.so").into_bytes();
        (0..5_000).for_each(|n| entries.set(&[kind::PATH, &path(n)], &path(n)));
        let bytes = entries.table(b"/r", &[]).unwrap();
        let table = Table::new(&bytes).unwrap();
        assert!((0..5_000).all(|n| table.get(&[kind::PATH, &path(n)]) == Some(&path(n))));
        assert_eq!(table.get(&[kind::PATH, &path(5_000)]), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn no_bytes_make_the_reader_fail(
            damage in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![Just(0u8), Just(255), any::<u8>()]), 1..12),
            cut in any::<Option<prop::sample::Index>>(),
        ) {
            let mut bytes = entries().table(b"/store/root", &[b"/s".to_vec()]).unwrap();
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            read_all(&bytes);
        }
    }

    /// Whatever the bytes are, the reader returns.
    fn read_all(bytes: &[u8]) {
        let Some(table) = Table::new(bytes) else { return };
        table.root();
        table.is_shared(b"/s/libx.so");
        for key in [&[kind::PATH, b"/s/libx.so"][..], &[kind::NAME, b"7", b"", b"libx.so"], &[]] {
            table.get(key);
        }
    }
}
