//! The product is one small static file.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use goblin::elf::Elf;
use goblin::elf::header::ET_DYN;
use goblin::elf::program_header::{PT_DYNAMIC, PT_INTERP};

use crate::run::{cargo, run};

/// Bytes of the product, below.
const SIZE_MAX: usize = 8 << 20;

/// Builds the release and looks at it.
pub(crate) fn check() -> Result<()> {
    run(&mut cargo(&["build", "--release", "--package", "hpcrt"]))?;
    let path = built();
    let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
    let elf = Elf::parse(&bytes).context("the product is not an ELF file")?;
    let has = |kind| elf.program_headers.iter().any(|header| header.p_type == kind);
    ensure!(!has(PT_INTERP), "the product names a dynamic linker");
    ensure!(elf.libraries.is_empty(), "the product needs {:?}", elf.libraries);
    ensure!(elf.header.e_type == ET_DYN && has(PT_DYNAMIC), "the product is not position-independent");
    let symbols: Vec<&str> = elf.dynsyms.iter().filter_map(|symbol| elf.dynstrtab.get_at(symbol.st_name)).collect();
    for name in ["MPIR_Breakpoint", "MPIR_being_debugged", "MPIR_proctable", "MPIR_proctable_size", "MPIR_debug_state"]
    {
        ensure!(symbols.contains(&name), "debuggers do not find {name} in the product");
    }
    ensure!(bytes.len() < SIZE_MAX, "the product has {} bytes, {SIZE_MAX} or more", bytes.len());
    eprintln!("xtask: {}: static-pie, {} bytes", path.display(), bytes.len());
    Ok(())
}

/// Where cargo puts the product: below the triple, as `build.target` is set.
pub(crate) fn built() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    target.join(format!("{}-unknown-linux-gnu/release/hpcrt", std::env::consts::ARCH))
}
