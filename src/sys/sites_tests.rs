//! Tests of `static-bootstrap/sys/src/object.rs` and `sites.rs` on the objects of this machine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{env, fs};

use iced_x86::{Code, Decoder, DecoderOptions};

use super::object::{HEAD, Object};
use super::sites::{JUMP, Site, Targets, Verdict, survey, verdict};

/// Of a file, with the sites in it, and whether these are all.
fn sites(object: Object<'_>) -> (Vec<Site>, bool) {
    let mut found = Vec::new();
    let mut bits = vec![0; Targets::room(object)];
    let complete = survey(object, &mut bits, |site| found.push(site));
    (found, complete)
}

/// Addresses of system calls, and of what jumps lead to, as another decoder has it.
fn decoded(object: Object<'_>) -> (BTreeSet<usize>, BTreeSet<usize>) {
    let (mut calls, mut targets) = (BTreeSet::new(), BTreeSet::new());
    let functions = object.functions().expect("it has a table");
    for range in (0..functions.count()).filter_map(|nth| functions.get(nth)) {
        let code = object.at(range.start).expect("in the file");
        let code = &code[..code.len().min(range.len() + 15)];
        let mut decoder = Decoder::with_ip(64, code, range.start as u64, DecoderOptions::NONE);
        while decoder.ip() < range.end as u64 && decoder.can_decode() {
            let instruction = decoder.decode();
            if instruction.is_invalid() {
                break;
            }
            if instruction.code() == Code::Syscall {
                calls.insert(instruction.ip() as usize);
            }
            targets.insert(instruction.near_branch_target() as usize);
        }
    }
    (calls, targets)
}

/// Libraries and programs of the machine.
fn objects() -> Vec<PathBuf> {
    let directories = ["/usr/lib/x86_64-linux-gnu", "/usr/bin", "/usr/lib64"];
    let entries = directories.iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten().flatten();
    let mut all: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    all.sort();
    all
}

fn libc() -> Vec<u8> {
    fs::read("/usr/lib/x86_64-linux-gnu/libc.so.6").expect("glibc")
}

#[test]
fn every_call_of_libc_and_its_linker_can_be_replaced() {
    for (name, least) in [("libc.so.6", 450), ("ld-linux-x86-64.so.2", 30)] {
        let bytes = fs::read(Path::new("/usr/lib/x86_64-linux-gnu").join(name)).expect("glibc");
        let object = Object::new(&bytes).expect("an object");
        assert_eq!(verdict(object), Verdict::Calls);
        let (found, complete) = sites(object);
        assert!(complete, "{name}");
        assert!(found.len() >= least, "{name}: {}", found.len());
        let (calls, targets) = decoded(object);
        let ours: BTreeSet<usize> = found.iter().map(|site| site.call).collect();
        let left: Vec<_> = calls.difference(&ours).collect();
        assert!(left.len() <= 1, "what handlers return to alone is left in {name}: {left:x?}");
        assert!(ours.is_subset(&calls));
        for Site { first, call, end, number } in found {
            assert!(first <= call && call + 2 <= end && end - first >= JUMP, "{first:x} {call:x} {end:x}");
            assert!(!targets.iter().any(|target| (first + 1..end).contains(target)), "{first:x} is jumped into");
            assert!(number.is_none() || first + JUMP == call);
        }
    }
}

#[test]
fn calls_are_told_from_what_looks_like_them() {
    let (mut clean, mut calls) = (0, 0);
    let libc = PathBuf::from("/usr/lib/x86_64-linux-gnu/libc.so.6");
    for path in objects().iter().take(400).chain([&libc]) {
        let bytes = fs::read(path).unwrap_or_default();
        let Some(object) = Object::new(&bytes) else { continue };
        match verdict(object) {
            Verdict::Clean if object.functions().is_some() => {
                let (found, _) = decoded(object);
                assert!(found.is_empty(), "{}: {found:x?}", path.display());
                clean += 1;
            }
            Verdict::Calls => {
                assert!(!decoded(object).0.is_empty(), "{}", path.display());
                calls += 1;
            }
            _ => {}
        }
    }
    assert!(clean > 50 && calls > 0, "{clean} {calls}");
}

#[test]
fn nonsense_is_no_object_and_ends() {
    let bytes = libc();
    let mut random = 1_u64;
    for _ in 0..300 {
        let mut spoiled = bytes[..200_000].to_vec();
        for _ in 0..20 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Mostly in the headers.
            let at = (random >> 33) as usize % if random & 1 == 0 { 1024 } else { spoiled.len() };
            spoiled[at] = (random >> 20) as u8;
        }
        if let Some(object) = Object::new(&spoiled) {
            let _ = (verdict(object), object.key(), object.has_executable_stack());
        }
    }
}

#[test]
fn keys_tell_objects_apart_by_their_beginning() {
    let mut keys = BTreeSet::new();
    let mut count = 0;
    for path in objects().iter().take(300).filter(|path| !path.is_symlink()) {
        let bytes = fs::read(path).unwrap_or_default();
        let Some(key) = Object::new(&bytes).and_then(Object::key) else { continue };
        let head = &bytes[..HEAD.min(bytes.len())];
        assert_eq!(Object::new(head).and_then(Object::key), Some(key), "{}", path.display());
        count += usize::from(keys.insert(key));
    }
    assert!(count > 50, "{count}");
    let own = fs::read(env::current_exe().expect("a path")).expect("its file");
    assert!(Object::new(&own).is_some());
}
