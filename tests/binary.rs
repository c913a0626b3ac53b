//! What the binary is made of: static, without name service modules, and with a bootstrapper that needs no loader.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::fs;
use std::process::Command;

use goblin::elf::Elf;
use goblin::elf::dynamic::{DF_1_INITFIRST, DT_FLAGS_1, DT_NEEDED, DT_REL, DT_RELA, DT_RELASZ, DT_RELSZ};
use goblin::elf::program_header::{PT_INTERP, PT_TLS};
use goblin::elf::section_header::{SHT_REL, SHT_RELA};
use goblin::elf::sym::STB_WEAK;

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

#[test]
fn the_bootstrapper_has_no_relocations() {
    let bytes = image();
    // The only other one in here that is executed as it is: what is put into programs has an entry, too.
    let starts = memchr::memmem::find_iter(&bytes, b"\x7fELF").skip(1);
    let embedded: Vec<Elf<'_>> = starts
        .filter_map(|at| Elf::parse(&bytes[at..]).ok())
        .filter(|e| e.header.e_type == goblin::elf::header::ET_EXEC && !e.program_headers.is_empty())
        .collect();
    assert_eq!(embedded.len(), 1);
    let boot = &embedded[0];
    assert!(boot.dynamic.is_none() && boot.program_headers.iter().all(|p| p.p_type != PT_INTERP));
    assert!(boot.section_headers.iter().all(|s| s.sh_type != SHT_REL && s.sh_type != SHT_RELA));
    assert!(
        !boot.dynamic.iter().flat_map(|d| &d.dyns).any(|d| [DT_REL, DT_RELA, DT_RELSZ, DT_RELASZ].contains(&d.d_tag))
    );
}

/// The one object within these bytes that has a dynamic symbol of this name, and where it begins.
fn embedded<'a>(bytes: &'a [u8], symbol: &str) -> (usize, Elf<'a>) {
    let mut found: Vec<(usize, Elf<'a>)> = memchr::memmem::find_iter(bytes, b"\x7fELF")
        .filter_map(|at| Some((at, Elf::parse(&bytes[at..]).ok()?)))
        .filter(|(_, elf)| elf.dynsyms.iter().any(|s| elf.dynstrtab.get_at(s.st_name) == Some(symbol)))
        .collect();
    assert_eq!(found.len(), 1, "objects with {symbol}");
    found.remove(0)
}

/// A second libc, or thread-local storage, would come into every process with it; with `la_pltenter` every call would go through the linker.
#[test]
fn the_auditor_needs_nothing() {
    let bytes = image();
    let (at, auditor) = &embedded(&bytes, "la_version");
    assert!(auditor.libraries.is_empty(), "it needs {:?}", auditor.libraries);
    assert!(auditor.program_headers.iter().all(|p| p.p_type != PT_TLS), "it has thread-local storage");
    let names = |defined: bool| {
        let symbols = auditor.dynsyms.iter().filter(|s| s.st_name != 0 && s.is_import() != defined);
        let mut names: Vec<_> = symbols.filter_map(|s| auditor.dynstrtab.get_at(s.st_name)).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names(true), ["la_activity", "la_objopen", "la_objsearch", "la_symbind64", "la_version"]);
    // Weak, and never called: by it the linker's own entry is found.
    assert_eq!(names(false), ["hpcrt_nothing"]);
    assert!(auditor.dynsyms.iter().filter(|s| s.st_name != 0 && s.is_import()).all(|s| s.st_bind() == STB_WEAK));
    let image = &bytes[*at..][..32 << 10];
    assert_eq!(memchr::memmem::find_iter(image, b"hpcrt's store is").count(), 1);
}

/// The resident stands in front of every library of a program: it brings none along, defines nothing, and runs first.
#[test]
fn the_resident_needs_nothing_and_defines_nothing() {
    let bytes = image();
    let (at, resident) = &embedded(&bytes, "__curbrk");
    assert!(resident.libraries.is_empty(), "it needs {:?}", resident.libraries);
    assert!(resident.program_headers.iter().all(|p| p.p_type != PT_TLS), "it has thread-local storage");
    let named = resident.dynsyms.iter().filter(|s| s.st_name != 0);
    named.for_each(|s| assert!(s.is_import() && s.st_bind() == STB_WEAK, "{:?}", resident.dynstrtab.get_at(s.st_name)));
    let flags = resident.dynamic.iter().flat_map(|d| &d.dyns).find(|d| d.d_tag == DT_FLAGS_1).map(|d| d.d_val);
    assert!(flags.is_some_and(|flags| flags & DF_1_INITFIRST != 0), "{flags:?}");
    // Its section headers are the last of it.
    let header = &resident.header;
    let len = usize::try_from(header.e_shoff).unwrap() + usize::from(header.e_shnum) * usize::from(header.e_shentsize);
    assert_eq!(memchr::memmem::find_iter(&bytes[*at..][..len], b"hpcrt's memory =").count(), 1);
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
