//! What a dynamic linker of glibc has compiled in, read out of its bytes: it is never run, since a program may name any file as its
//! interpreter, and the answer is the same for every version and every machine.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use super::arch::Cpu;

/// Bytes of a dynamic linker, at most.
pub const LDSO_MAX: usize = 16 << 20;

/// The constants of one dynamic linker that steer its search.
#[derive(Debug, PartialEq, Eq)]
pub struct Ldso {
    /// The default directories, in order, each with a slash at its end.
    pub system_dirs: Vec<Vec<u8>>,
    /// Its `ld.so.cache`, which is not in /etc when glibc was built for a prefix of its own.
    pub cache: OsString,
    /// `$LIB`.
    pub lib: Vec<u8>,
    /// Since glibc 2.33: searches `glibc-hwcaps`.
    pub hwcaps: bool,
    /// Until glibc 2.36: searches `tls`, platform and processor subdirectories.
    pub legacy: bool,
}

impl Ldso {
    /// Reads the constants out of the file's `bytes`; those that are not found are the customary ones of `cpu.arch`.
    pub fn scan(bytes: &[u8], cpu: &Cpu) -> Ldso {
        let mut system_dirs: Vec<Vec<u8>> = Vec::new();
        let mut complete = false;
        let (mut cache, mut hwcaps, mut legacy) = (None, false, false);
        for text in bytes.split(|&byte| byte == 0) {
            // The default directories are one array of strings that follow each other.
            if !complete && is_library_dir(text) {
                system_dirs.push(text.to_vec());
            } else {
                complete |= !system_dirs.is_empty();
            }
            if text.starts_with(b"/") && text.ends_with(b"/ld.so.cache") {
                cache.get_or_insert(text);
            }
            hwcaps |= text.starts_with(b"--glibc-hwcaps-");
            legacy |= text.starts_with(b"\nLegacy HWCAP subdirectories");
        }
        if system_dirs.is_empty() {
            system_dirs = cpu.arch.default_dirs.iter().map(|dir| format!("{dir}/").into_bytes()).collect();
        }
        let lib = lib_token(&system_dirs[0]);
        let cache = OsString::from_vec(cache.unwrap_or(b"/etc/ld.so.cache").to_vec());
        Ldso { system_dirs, cache, lib, hwcaps, legacy: legacy || !hwcaps }
    }

    /// The subdirectories tried in each search directory, best first, ending with the directory itself ("").
    pub fn subdirectories(&self, cpu: &Cpu) -> Vec<String> {
        let mut all = Vec::new();
        if self.hwcaps {
            all.extend(cpu.hwcaps.iter().map(|name| format!("glibc-hwcaps/{}/", name.display())));
        }
        if self.legacy {
            let mut parts = vec!["tls".to_owned()];
            parts.extend(cpu.platform.as_ref().map(|platform| platform.display().to_string()));
            parts.extend(cpu.legacy.iter().map(|&name| name.to_owned()));
            // Every subset of the parts, as binary numbers counted down from all.
            for chosen in (1..1u32 << parts.len()).rev() {
                let is_chosen = |index: &usize| chosen >> (parts.len() - 1 - index) & 1 == 1;
                let path = (0..parts.len()).filter(is_chosen).map(|index| parts[index].clone() + "/").collect();
                if !all.contains(&path) {
                    all.push(path);
                }
            }
        }
        all.push(String::new());
        all
    }
}

/// "/lib64/", "/usr/lib/x86_64-linux-gnu/", "/opt/glibc/lib/".
fn is_library_dir(text: &[u8]) -> bool {
    let Some(inner) = text.strip_prefix(b"/").and_then(|text| text.strip_suffix(b"/")) else { return false };
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._+-".contains(byte);
    inner.iter().all(plain) && inner.rsplit(|&byte| byte == b'/').take(2).any(|part| part.starts_with(b"lib"))
}

/// glibc takes the last component of its library directory; Debian's, with the machine's name behind it, takes both.
fn lib_token(system_dir: &[u8]) -> Vec<u8> {
    let mut parts = system_dir.rsplit(|&byte| byte == b'/').filter(|part| !part.is_empty());
    let (last, before) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    if last.starts_with(b"lib") { last.to_vec() } else { [before, b"/", last].concat() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::loader::arch;

    fn cpu() -> Cpu {
        let arch = arch::of(62, true).unwrap();
        Cpu { arch, hwcaps: vec!["x86-64-v2".into()], platform: Some("haswell".into()), legacy: vec!["x86_64"] }
    }

    #[test]
    fn scans_the_constants() {
        let bytes = b"x\0/lib64/\0/usr/lib64/\0y\0/opt/lib/\0/p/etc/ld.so.cache\0--glibc-hwcaps-mask\0";
        let ldso = Ldso::scan(bytes, &cpu());
        assert_eq!(ldso.system_dirs, [b"/lib64/".to_vec(), b"/usr/lib64/".to_vec()]);
        assert_eq!((ldso.cache.as_os_str(), &ldso.lib[..]), ("/p/etc/ld.so.cache".as_ref(), &b"lib64"[..]));
        assert!(ldso.hwcaps && !ldso.legacy);
        assert_eq!(ldso.subdirectories(&cpu()), ["glibc-hwcaps/x86-64-v2/", ""]);
    }

    #[test]
    fn old_ones_combine_subdirectories() {
        let ldso = Ldso::scan(b"nothing known", &cpu());
        assert_eq!(ldso.lib, b"lib/x86_64-linux-gnu");
        let expected = [
            "tls/haswell/x86_64/",
            "tls/haswell/",
            "tls/x86_64/",
            "tls/",
            "haswell/x86_64/",
            "haswell/",
            "x86_64/",
            "",
        ];
        assert_eq!(ldso.subdirectories(&cpu()), expected);
    }
}
