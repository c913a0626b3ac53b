//! `/etc/ld.so.cache`, the table that `ldconfig` makes of the system's libraries: format "glibc-ld.so.cache1.1" of glibc 2.2 and later,
//! alone or behind the older table it may be embedded in.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::arch::Cpu;

/// Bytes of a cache, at most; one of 10,000 libraries has under 1 MiB.
pub const CACHE_MAX: usize = 16 << 20;

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
const EXTENSION_HWCAPS: u32 = 1;
/// Upper word of the hwcap field when the lower one is an index into the table of named subdirectories; the low ten bits are a level.
const NAMED: u32 = 1 << 30;
const NAMED_LEVEL: u32 = (1 << 10) - 1;
const STRING_MAX: usize = 4096;

/// A parsed cache.
#[derive(Debug, Default)]
pub struct LdCache {
    bytes: Vec<u8>,
    /// Sorted by name; entries of one name stay in file order, which is the order of preference.
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    name: Range<usize>,
    path: Range<usize>,
    flags: u32,
    hwcap: Hwcap,
}

#[derive(Debug, PartialEq)]
enum Hwcap {
    /// For the processors that have these bits of the old scheme; 0: for all.
    Legacy(u64),
    /// From this subdirectory of `glibc-hwcaps`.
    Named(Range<usize>),
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn string(bytes: &[u8], at: usize) -> Option<Range<usize>> {
    let rest = bytes.get(at..)?;
    let end = rest.iter().take(STRING_MAX).position(|&byte| byte == 0)?;
    Some(at..at + end)
}

impl LdCache {
    /// Returns `None` for bytes that are not a cache in this machine's byte order. Entries that point nowhere are left out.
    pub fn parse(mut bytes: Vec<u8>) -> Option<LdCache> {
        if bytes.starts_with(OLD_MAGIC) {
            let entries = (word(&bytes, 12)? as usize).checked_mul(12)?;
            let start = entries.checked_add(16)?.checked_next_multiple_of(8)?;
            bytes.drain(..start.min(bytes.len()));
        }
        if bytes.len() > CACHE_MAX || !bytes.starts_with(MAGIC) {
            return None;
        }
        let order = bytes.get(28)? & 3;
        let native = if cfg!(target_endian = "little") { 2 } else { 3 };
        let count = word(&bytes, 20)? as usize;
        if (order != 0 && order != native) || count > (bytes.len().checked_sub(HEADER)?) / ENTRY {
            return None;
        }
        let named = named_hwcaps(&bytes).unwrap_or_default();
        let mut entries: Vec<_> =
            (0..count).filter_map(|index| Entry::parse(&bytes, HEADER + index * ENTRY, &named)).collect();
        entries.sort_by(|a, b| bytes[a.name.clone()].cmp(&bytes[b.name.clone()]));
        Some(LdCache { bytes, entries })
    }

    /// The path that the dynamic linker would take for `name` on `cpu`; it does not say that the file exists.
    pub fn lookup(&self, name: &OsStr, cpu: &Cpu) -> Option<OsString> {
        let text = |range: &Range<usize>| &self.bytes[range.clone()];
        let start = self.entries.partition_point(|entry| text(&entry.name) < name.as_bytes());
        let same = self.entries[start..].iter().take_while(|entry| text(&entry.name) == name.as_bytes());
        let fitting = same.filter(|entry| cpu.arch.cache_flags.contains(&entry.flags));
        let rank = |entry: &Entry| match &entry.hwcap {
            Hwcap::Named(name) => cpu.hwcaps.iter().position(|have| have.as_bytes() == text(name)),
            Hwcap::Legacy(0) => Some(usize::MAX),
            Hwcap::Legacy(bits) => cpu.has_legacy_bits(*bits).then_some(usize::MAX),
        };
        let best = fitting.filter_map(|entry| Some((rank(entry)?, entry))).min_by_key(|(rank, _)| *rank)?.1;
        Some(OsString::from_vec(text(&best.path).to_vec()))
    }
}

impl Entry {
    fn parse(bytes: &[u8], at: usize, named: &[Range<usize>]) -> Option<Entry> {
        let field = |offset| word(bytes, at + offset);
        let high = u64::from_ne_bytes(bytes.get(at + 16..at + 24)?.try_into().ok()?);
        let (upper, lower) = ((high >> 32) as u32, high as u32);
        let hwcap = if upper & !NAMED_LEVEL == NAMED {
            Hwcap::Named(named.get(lower as usize)?.clone())
        } else {
            Hwcap::Legacy(high)
        };
        let (name, path) = (string(bytes, field(4)? as usize)?, string(bytes, field(8)? as usize)?);
        Some(Entry { name, path, flags: field(0)?, hwcap })
    }
}

/// The table of subdirectories in the extension behind the strings.
fn named_hwcaps(bytes: &[u8]) -> Option<Vec<Range<usize>>> {
    let start = word(bytes, 32)? as usize;
    if start == 0 || word(bytes, start)? != EXTENSION_MAGIC {
        return None;
    }
    let sections = (word(bytes, start + 4)? as usize).min(64);
    let section =
        (0..sections).map(|index| start + 8 + index * 16).find(|&at| word(bytes, at) == Some(EXTENSION_HWCAPS))?;
    let (offset, size) = (word(bytes, section + 8)? as usize, word(bytes, section + 12)? as usize);
    let table = bytes.get(offset..offset.checked_add(size)?)?;
    table.chunks_exact(4).map(|entry| string(bytes, word(entry, 0)? as usize)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::arch;
    use proptest::prelude::*;

    /// A cache with three versions of libx.so.1, as ldconfig of glibc 2.33 and later writes it.
    fn cache(flags: u32) -> Vec<u8> {
        let strings = b"libx.so.1\0/v3/libx.so.1\0/libx.so.1\0/v9/libx.so.1\0x86-64-v3\0x86-64-v9\0";
        let base = HEADER + 3 * ENTRY;
        let at = |text: &[u8]| (base + strings.windows(text.len()).position(|window| window == text).unwrap()) as u32;
        let mut bytes = MAGIC.to_vec();
        let extension = (base + strings.len()) as u32;
        for value in
            [3, strings.len() as u32, if cfg!(target_endian = "little") { 2 } else { 3 << 24 }, extension, 0, 0, 0]
        {
            bytes.extend(value.to_ne_bytes());
        }
        for (path, hwcap) in [
            (&b"/v9/libx"[..], (u64::from(NAMED) << 32) | 1),
            (b"/v3/libx", u64::from(NAMED) << 32),
            (b"/libx.so.1\0/v9", 0),
        ] {
            for value in [flags, at(b"libx"), at(path), 0] {
                bytes.extend(value.to_ne_bytes());
            }
            bytes.extend(hwcap.to_ne_bytes());
        }
        bytes.extend(strings);
        for value in [EXTENSION_MAGIC, 1, EXTENSION_HWCAPS, 0, extension + 24, 8, at(b"x86-64-v3"), at(b"x86-64-v9")] {
            bytes.extend(value.to_ne_bytes());
        }
        bytes
    }

    fn cpu(hwcaps: &[&str]) -> Cpu {
        let hwcaps = hwcaps.iter().map(|&name| name.into()).collect();
        Cpu { arch: arch::of(62, true).unwrap(), hwcaps, platform: None, legacy: Vec::new() }
    }

    #[test]
    fn prefers_the_best_supported_subdirectory() {
        let parsed = LdCache::parse(cache(0x303)).unwrap();
        let lookup = |cpu: &Cpu| parsed.lookup("libx.so.1".as_ref(), cpu).unwrap();
        assert_eq!(lookup(&cpu(&["x86-64-v3", "x86-64-v2"])), "/v3/libx.so.1");
        assert_eq!(lookup(&cpu(&["x86-64-v2"])), "/libx.so.1");
        assert_eq!(parsed.lookup("libx.so".as_ref(), &cpu(&[])), None);
        assert_eq!(LdCache::parse(cache(0x3)).unwrap().lookup("libx.so.1".as_ref(), &cpu(&[])), None);
    }

    #[test]
    fn finds_the_table_behind_the_old_one() {
        let mut bytes = OLD_MAGIC.to_vec();
        bytes.push(0);
        bytes.extend(1u32.to_ne_bytes());
        bytes.extend([0; 12 + 4]);
        bytes.extend(cache(0x303));
        let parsed = LdCache::parse(bytes).unwrap();
        assert_eq!(parsed.lookup("libx.so.1".as_ref(), &cpu(&[])).unwrap(), "/libx.so.1");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn no_bytes_make_it_panic(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..10), cut in any::<prop::sample::Index>()) {
            let mut bytes = cache(0x303);
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            for bytes in [bytes.clone(), bytes[..cut.index(bytes.len())].to_vec()] {
                if let Some(parsed) = LdCache::parse(bytes) {
                    let _ = parsed.lookup("libx.so.1".as_ref(), &cpu(&["x86-64-v3"]));
                }
            }
        }
    }
}
