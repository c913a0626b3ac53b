//! Which programs can be audited, and what they need in their environment for it.

use std::ffi::OsStr;

use super::walk::Walker;
use crate::loader::closure::Closure;
use crate::loader::elf::{Elf, read_up_to};
use crate::loader::linker::Linker;
use crate::loader::probe::Probe;
use crate::sys::node;

/// The oldest glibc with which this was tried; before 2.35 the auditor repairs calls that would take a detour through the linker.
pub const OLDEST: (u32, u32) = (2, 31);
/// The first with a say about its static thread-local storage.
const ROOM: (u32, u32) = (2, 33);
/// Bytes of it that older ones set aside for libraries, and that glibc keeps for libraries opened at run time.
const ROOM_BEFORE: u64 = 1664 - 640;
const ROOM_OPENED: u64 = 512;
/// To this many bytes it is rounded up, so that most programs need the same.
const ROOM_STEP: u64 = 1024;
/// A `libc.so.6` is not larger.
const LIBC_MAX: u64 = 32 << 20;

const AUDIT: &[u8] = b"LD_AUDIT=";
const PYTHON: &[u8] = b"PYTHONPATH=";
const TUNABLES: &[u8] = b"GLIBC_TUNABLES=";
const STATIC_TLS: &str = "glibc.rtld.optional_static_tls=";

/// Whether a program's dynamic linker takes an auditor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Audited {
    /// `static_tls`: bytes of static thread-local storage to ask for: with an auditor the linker lays it out before it looks for
    /// libraries. 0: its linker cannot be asked.
    Yes { static_tls: u64 },
    /// And why not.
    No(String),
}

/// Looks at what a program loads.
pub(super) fn audited(walker: &Walker, closure: &Closure) -> Audited {
    let no = |reason: &str| Audited::No(reason.to_owned());
    let Some(interpreter) = closure.interpreter else { return no("it is statically linked") };
    if Linker::is_musl(&closure.objects[interpreter].path) {
        return no("its dynamic linker is musl's");
    }
    let abi = walker.open(&closure.objects[interpreter].canonical).ok().and_then(|o| Elf::read(&o.file, None).ok());
    let own = Elf::read(&super::AUDITOR.to_vec(), None).ok().map(|elf| elf.abi);
    if abi.map(|elf| elf.abi) != own {
        return no("it is made for another machine or word size");
    }
    let libc = closure.objects.iter().find(|o| o.soname.as_deref() == Some(OsStr::new("libc.so.6")));
    let libc = libc.and_then(|libc| walker.open(&libc.canonical).ok()).and_then(|opened| {
        let len = opened.size().min(LIBC_MAX);
        node::glibc_version(&read_up_to(&opened.file, 0, usize::try_from(len).ok()?).ok()?)
    });
    let Some(version) = libc else { return no("it has no glibc") };
    let tls = closure.objects.iter().skip(closure.program + 1).filter_map(|o| o.tls);
    let size = tls.map(|tls| tls.size.saturating_add(tls.align)).fold(0, u64::saturating_add);
    judge(&version, size)
}

fn judge(version: &str, tls: u64) -> Audited {
    let number = numbers(version);
    if number < OLDEST {
        return Audited::No(format!("its glibc is {version}; {}.{} is the oldest tried", OLDEST.0, OLDEST.1));
    }
    if number >= ROOM {
        return Audited::Yes { static_tls: ROOM_OPENED + tls.next_multiple_of(ROOM_STEP) };
    }
    if tls > ROOM_BEFORE {
        return Audited::No(format!(
            "its libraries have {tls} bytes of thread-local storage, too many for glibc {version}"
        ));
    }
    Audited::Yes { static_tls: 0 }
}

fn numbers(version: &str) -> (u32, u32) {
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Whether programs of a glibc of this version can be audited.
pub fn is_new_enough(version: &str) -> bool {
    numbers(version) >= OLDEST
}

/// Adds the auditor, first of all there are, the finder of Python's modules likewise, and the request for thread-local storage to what the user has set.
pub(super) fn environment(variables: &[Vec<u8>], auditor: &[u8], python: &[u8], static_tls: u64) -> Vec<Vec<u8>> {
    let value = |name: &[u8]| variables.iter().rev().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let mut result: Vec<Vec<u8>> = variables
        .iter()
        .filter(|line| ![AUDIT, TUNABLES, PYTHON].iter().any(|name| line.starts_with(name)))
        .cloned()
        .collect();
    // An outer job's auditor knows nothing of these files.
    let others = value(AUDIT).split(|byte| *byte == b':').filter(|path| !path.is_empty() && !is_ours(path));
    let auditors: Vec<&[u8]> = std::iter::once(auditor).chain(others).collect();
    result.push([AUDIT, &auditors.join(&b':')].concat());
    // Here an empty path is the working directory; but without any, none is meant.
    let set = Some(value(PYTHON)).filter(|paths| !paths.is_empty());
    let others = set.into_iter().flat_map(|paths| paths.split(|byte| *byte == b':')).filter(|path| !is_ours(path));
    let modules: Vec<&[u8]> = std::iter::once(python).chain(others).collect();
    result.push([PYTHON, &modules.join(&b':')].concat());
    let tunables = value(TUNABLES);
    let mut given = tunables.split(|byte| *byte == b':').filter_map(|part| part.strip_prefix(STATIC_TLS.as_bytes()));
    let given: u64 = given.next_back().and_then(|text| std::str::from_utf8(text).ok()?.parse().ok()).unwrap_or(0);
    let wanted = (static_tls > given).then(|| format!("{STATIC_TLS}{static_tls}").into_bytes());
    let parts: Vec<&[u8]> =
        [Some(tunables), wanted.as_deref()].into_iter().flatten().filter(|p| !p.is_empty()).collect();
    if !parts.is_empty() {
        result.push([TUNABLES, &parts.join(&b':')].concat());
    }
    result
}

fn is_ours(path: &[u8]) -> bool {
    memchr::memmem::find(path, b"/hpcrt-store.").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_and_storage_decide() {
        assert_eq!(judge("2.36", 8300), Audited::Yes { static_tls: 512 + 9216 });
        assert_eq!(judge("2.31", 200), Audited::Yes { static_tls: 0 });
        let Audited::No(reason) = judge("2.31", 8300) else { panic!() };
        assert!(reason.contains("8300 bytes") && reason.contains("2.31"), "{reason}");
        let Audited::No(reason) = judge("2.17", 0) else { panic!() };
        assert!(reason.contains("2.31 is the oldest"), "{reason}");
        assert!(is_new_enough("2.35") && !is_new_enough("2.4"));
    }

    #[test]
    fn what_the_user_set_stays() {
        let line = |text: &str| text.as_bytes().to_vec();
        let own = [
            line("A=1"),
            line("PYTHONPATH=/own"),
            line("LD_AUDIT=/tool.so:/dev/shm/hpcrt-store.00/audit.so"),
            line("GLIBC_TUNABLES=glibc.malloc.check=3:glibc.rtld.optional_static_tls=700"),
        ];
        let expected = [
            line("A=1"),
            line("LD_AUDIT=/s/audit.so:/tool.so"),
            line("PYTHONPATH=/s/python:/own"),
            line(
                "GLIBC_TUNABLES=glibc.malloc.check=3:glibc.rtld.optional_static_tls=700:glibc.rtld.optional_static_tls=1536",
            ),
        ];
        assert_eq!(environment(&own, b"/s/audit.so", b"/s/python", 1536), expected);
        let ours = [line("LD_AUDIT=/s/audit.so"), line("PYTHONPATH=/s/python")];
        let unchanged = environment(&own[3..], b"/s/audit.so", b"/s/python", 600);
        assert_eq!(unchanged, [&ours[..], &own[3..]].concat());
        assert_eq!(environment(&[], b"/s/audit.so", b"/s/python", 0), ours);
        let here = environment(&[line("PYTHONPATH=:/own")], b"/s/audit.so", b"/s/python", 0);
        assert_eq!(here, [line("LD_AUDIT=/s/audit.so"), line("PYTHONPATH=/s/python::/own")]);
    }
}
