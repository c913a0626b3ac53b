//! What the binary is made of: static, and without name service modules.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::process::Command;

use goblin::elf::Elf;
use goblin::elf::dynamic::DT_NEEDED;
use goblin::elf::program_header::PT_INTERP;

fn image() -> Vec<u8> {
    fs::read(env!("CARGO_BIN_EXE_hpcrt")).unwrap()
}

#[test]
fn static_without_interpreter_or_libraries() {
    let bytes = image();
    let elf = Elf::parse(&bytes).unwrap();
    assert!(!elf.program_headers.iter().any(|p| p.p_type == PT_INTERP), "it needs an interpreter");
    assert!(!elf.dynamic.iter().flat_map(|d| &d.dyns).any(|d| d.d_tag == DT_NEEDED), "it needs {:?}", elf.libraries);
}

/// A static glibc would load modules of the machine it runs on to look up names.
#[test]
fn no_name_service() {
    let bytes = image();
    let elf = Elf::parse(&bytes).unwrap();
    let names: Vec<&str> = elf.syms.iter().filter_map(|s| elf.strtab.get_at(s.st_name)).collect();
    assert!(names.len() > 1000, "the symbols were stripped; this test needs them");
    // The modules themselves stay linked, for the memory they would free at the end; these are the ways in.
    const LOOK_UP: [&str; 9] = [
        "getaddrinfo",
        "gethostbyname",
        "gethostbyname2",
        "gethostbyaddr",
        "getservbyname",
        "getpwnam",
        "getpwuid",
        "getgrnam",
        "getgrgid",
    ];
    let plain = |name: &str| name.strip_suffix("_r").unwrap_or(name).trim_start_matches('_').to_owned();
    let found: Vec<&str> = names.into_iter().filter(|name| LOOK_UP.contains(&plain(name).as_str())).collect();
    assert!(found.is_empty(), "{found:?}");
}

/// `build.rs` decides before anything else is compiled: run its compiled form with the environment that cargo would give it.
#[test]
fn a_release_build_that_would_be_dynamic_is_refused() {
    let target = tempfile::tempdir().unwrap();
    let script = target.path().join("build-script");
    let built = Command::new("rustc")
        .args(["--edition=2024", "-o"])
        .arg(&script)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/build.rs"))
        .status();
    assert!(built.unwrap().success());
    let run =
        Command::new(&script).env("PROFILE", "release").env("CARGO_CFG_TARGET_FEATURE", "fxsr,sse").output().unwrap();
    assert_eq!(run.status.code(), Some(1));
    let said = String::from_utf8_lossy(&run.stderr);
    assert!(said.contains("must be one static binary") && said.contains("+crt-static"), "{said}");
}
