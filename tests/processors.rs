//! What no Rust compiler checks without a standard library for the other processor: the numbers of system calls and the constants that
//! the bootstrapper and the auditor have of their own, against the C library's headers, and their assembly, against an assembler.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::path::Path;
use std::process::Command;

const PROCESSORS: [(&str, &str); 2] = [("x86_64", "x86_64-linux-gnu-gcc"), ("aarch64", "aarch64-linux-gnu-gcc")];

/// Names of a C header with a value each that holds on every processor.
const SAME: [(&str, &str); 14] = [
    ("O_CLOEXEC", "02000000"),
    ("SEEK_END", "2"),
    ("PROT_READ | PROT_WRITE", "3"),
    ("MAP_SHARED", "1"),
    ("MAP_PRIVATE | MAP_ANONYMOUS", "0x22"),
    ("AF_UNIX", "1"),
    ("SOCK_SEQPACKET | SOCK_CLOEXEC", "02000005"),
    ("SOL_SOCKET", "1"),
    ("SO_RCVTIMEO", "20"),
    ("SO_SNDTIMEO", "21"),
    ("MSG_NOSIGNAL", "0x4000"),
    ("RLIMIT_NOFILE", "7"),
    ("PTRACE_TRACEME", "0"),
    ("offsetof(struct link_map, l_name) + offsetof(struct link_map, l_ld)", "24"),
];

const HEADERS: &str = "#define _GNU_SOURCE
#include <fcntl.h>
#include <link.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
";

fn source(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("static-bootstrap").join(name)).unwrap()
}

/// What stands behind this line of a source, up to an end.
fn part<'s>(source: &'s str, line: &str, end: &str) -> &'s str {
    source.split_once(line).unwrap().1.split(end).next().unwrap()
}

fn compiles(compiler: &str, name: &str, text: &str) {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join(name);
    fs::write(&file, text).unwrap();
    let done = Command::new(compiler).arg("-c").arg(&file).arg("-o").arg(place.path().join("out")).output().unwrap();
    assert!(done.status.success(), "{compiler}: {}\n{text}", String::from_utf8_lossy(&done.stderr));
}

fn is_here(compiler: &str) -> bool {
    let found = Command::new(compiler).arg("--version").output().is_ok_and(|done| done.status.success());
    if !found {
        eprintln!("SKIPPED what needs {compiler} (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)");
    }
    found
}

#[test]
fn numbers_are_those_of_the_headers() {
    let calls = source("sys/src/syscall.rs");
    for (processor, compiler) in PROCESSORS.into_iter().filter(|(_, compiler)| is_here(compiler)) {
        let numbers = part(&calls, &format!("#[cfg(target_arch = \"{processor}\")]\npub mod nr {{\n"), "\n}");
        let numbers = numbers.lines().map(|line| {
            let (name, number) = line.trim().strip_prefix("pub const ").unwrap().split_once(": usize = ").unwrap();
            (format!("SYS_{}", name.to_lowercase()), number.trim_end_matches(';').to_owned())
        });
        let same = SAME.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let all: Vec<(String, String)> = numbers.chain(same).collect();
        assert!(all.len() > SAME.len() + 20, "{all:?}");
        let asserts = all.iter().map(|(name, value)| format!("_Static_assert(({name}) == {value}, \"{name}\");\n"));
        compiles(compiler, "numbers.c", &(HEADERS.to_owned() + &asserts.collect::<String>()));
    }
}

#[test]
fn assembly_for_the_other_processor_is_understood() {
    let (processor, compiler) = PROCESSORS[1];
    if !is_here(compiler) {
        return;
    }
    for (file, end) in [("sys/src/mem.rs", ");"), ("boot/src/main.rs", "\n}"), ("audit/src/got.rs", ");")] {
        let text = source(file);
        let body = part(&text, &format!("#[cfg(target_arch = \"{processor}\")]\n"), end);
        let strings = body.split_once("asm!(").unwrap().1.split('"').skip(1).step_by(2);
        let lines: String = strings.map(|line| line.replace("{main}", "main") + "\n").collect();
        assert!(lines.lines().count() > 1, "{file}");
        compiles(compiler, "part.s", &lines);
    }
}
