//! What the dynamic linker reads of an ELF file before it maps it (System V gABI, chapter 5; glibc's `DF_1_*` and GNU extensions).
//!
//! Any bytes may arrive here. Nothing is indexed unchecked, every length is capped before it is allocated, and only the headers, the
//! dynamic section and the strings it names are read: about three positioned reads per library, however large it is.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;

use goblin::container::{Container, Ctx};
use goblin::elf::dynamic::{self as tag, Dynamic};
use goblin::elf::header::{self, Header};
use goblin::elf::program_header::{PT_DYNAMIC, PT_INTERP, PT_TLS, ProgramHeader};

/// `DT_FILTER` and `DT_AUXILIARY` of the gABI's OS-specific range.
const DT_FILTER: u64 = 0x7fff_ffff;
const DT_AUXILIARY: u64 = 0x7fff_fffd;
/// Bytes fetched at once.
const BLOCK: u64 = 16 << 10;
/// Blocks of one file that are looked at, at most.
const BLOCKS_MAX: usize = 1024;
/// Bytes of the dynamic section, at most; the largest known have a few thousand entries of 16 bytes.
const DYNAMIC_MAX: u64 = 1 << 20;
/// Bytes of one string, at most: a search path may hold hundreds of directories.
const STRING_MAX: usize = 64 << 10;
/// Bytes of all strings of one file, at most.
const STRINGS_MAX: usize = 4 << 20;

/// A file that is read at positions, without a shared cursor.
pub trait ReadAt {
    /// As `pread(2)`: may return fewer bytes than asked for, 0 only at the end of the file.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.get(offset..)).unwrap_or_default();
        let n = rest.len().min(buffer.len());
        buffer[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }
}

/// Reads `len` bytes at `offset`, fewer only where the file ends.
pub fn read_up_to<R: ReadAt + ?Sized>(file: &R, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    while filled < len {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

/// What must agree between a program and its libraries; a library of another kind is passed over in the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abi {
    /// `e_machine`.
    pub machine: u16,
    /// `ELFCLASS64`, else `ELFCLASS32`.
    pub is_64: bool,
    pub little_endian: bool,
}

/// The initial image of thread-local storage (`PT_TLS`), in bytes per thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tls {
    pub size: u64,
    pub align: u64,
    /// `DF_STATIC_TLS`: must fit the static block, even when opened at run time.
    pub must_be_static: bool,
}

/// A library that an object asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needed {
    pub name: OsString,
    /// `DT_AUXILIARY`: its absence is no error.
    pub optional: bool,
}

/// The part of an executable or library that decides what else is loaded, and from where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    pub abi: Abi,
    /// `PT_INTERP`: the dynamic linker, which only dynamic programs name.
    pub interpreter: Option<OsString>,
    /// `DT_NEEDED`, `DT_FILTER` and `DT_AUXILIARY`, in file order.
    pub needed: Vec<Needed>,
    pub soname: Option<OsString>,
    /// `DT_RPATH`, absent where the object has a `DT_RUNPATH`, which overrides it.
    pub rpath: Option<OsString>,
    pub runpath: Option<OsString>,
    /// `DF_1_NODEFLIB`.
    pub no_default_libs: bool,
    pub tls: Option<Tls>,
}

/// Why a file cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("not an ELF file")]
    NotElf,
    #[error("file too short")]
    TooShort,
    #[error("made for another machine or word size")]
    OtherAbi,
    #[error("malformed ELF file: {0}")]
    Malformed(&'static str),
}

impl From<goblin::error::Error> for Unusable {
    fn from(_: goblin::error::Error) -> Self {
        Unusable::Malformed("headers")
    }
}

impl Elf {
    /// Reads `file`; with `wanted`, stops at the header of a file made for something else ([`Unusable::OtherAbi`]).
    pub fn read<R: ReadAt + ?Sized>(file: &R, wanted: Option<Abi>) -> Result<Elf, Unusable> {
        let mut blocks = Blocks { file, blocks: BTreeMap::new(), strings: 0 };
        let header = read_header(&mut blocks)?;
        let ctx = Ctx::new(header.container()?, header.endianness()?);
        let is_64 = matches!(ctx.container, Container::Big);
        let abi = Abi { machine: header.e_machine, is_64, little_endian: header.e_ident[header::EI_DATA] == 1 };
        if wanted.is_some_and(|wanted| wanted != abi) {
            return Err(Unusable::OtherAbi);
        }
        if !matches!(header.e_type, header::ET_DYN | header::ET_EXEC) {
            return Err(Unusable::Malformed("neither an executable nor a shared library"));
        }
        if usize::from(header.e_phentsize) != ProgramHeader::size(ctx) {
            return Err(Unusable::Malformed("size of a program header"));
        }
        let table = blocks.bytes(header.e_phoff, usize::from(header.e_phnum) * ProgramHeader::size(ctx))?;
        let headers = ProgramHeader::parse(&table, 0, header.e_phnum.into(), ctx)?;

        let mut elf = Elf {
            abi,
            interpreter: None,
            needed: Vec::new(),
            soname: None,
            rpath: None,
            runpath: None,
            no_default_libs: false,
            tls: None,
        };
        for header in &headers {
            match header.p_type {
                PT_INTERP => elf.interpreter = Some(blocks.string(header.p_offset)?),
                PT_TLS => elf.tls = Some(Tls { size: header.p_memsz, align: header.p_align, must_be_static: false }),
                _ => {}
            }
        }
        elf.read_dynamic(&mut blocks, headers, ctx)?;
        Ok(elf)
    }

    fn read_dynamic<R: ReadAt + ?Sized>(
        &mut self,
        blocks: &mut Blocks<'_, R>,
        mut headers: Vec<ProgramHeader>,
        ctx: Ctx,
    ) -> Result<(), Unusable> {
        let Some(segment) = headers.iter_mut().find(|header| header.p_type == PT_DYNAMIC) else { return Ok(()) };
        if segment.p_filesz > DYNAMIC_MAX {
            return Err(Unusable::Malformed("size of the dynamic section"));
        }
        let bytes = blocks.bytes(segment.p_offset, segment.p_filesz as usize)?;
        // goblin looks for the section at this offset of the bytes it is given: we hand it the section alone.
        segment.p_offset = 0;
        let Some(Dynamic { dyns, info }) = Dynamic::parse(&bytes, &headers, ctx)? else { return Ok(()) };
        let mut string = |offset: u64| {
            let at = (info.strtab as u64).checked_add(offset).ok_or(Unusable::Malformed("offset of a string"))?;
            blocks.string(at)
        };
        for entry in &dyns {
            match entry.d_tag {
                tag::DT_NEEDED | DT_FILTER => {
                    self.needed.push(Needed { name: string(entry.d_val)?, optional: false });
                }
                DT_AUXILIARY => self.needed.push(Needed { name: string(entry.d_val)?, optional: true }),
                tag::DT_SONAME => self.soname = Some(string(entry.d_val)?),
                tag::DT_RPATH => self.rpath = Some(string(entry.d_val)?),
                tag::DT_RUNPATH => self.runpath = Some(string(entry.d_val)?),
                _ => {}
            }
        }
        if self.runpath.is_some() {
            self.rpath = None;
        }
        self.no_default_libs = info.flags_1 & tag::DF_1_NODEFLIB != 0;
        if let Some(tls) = &mut self.tls {
            tls.must_be_static = info.flags & tag::DF_STATIC_TLS != 0;
        }
        Ok(())
    }
}

fn read_header<R: ReadAt + ?Sized>(blocks: &mut Blocks<'_, R>) -> Result<Header, Unusable> {
    let ident = blocks.bytes(0, header::SIZEOF_IDENT)?;
    if &ident[..header::SELFMAG] != header::ELFMAG {
        return Err(Unusable::NotElf);
    }
    let size = if ident[header::EI_CLASS] == header::ELFCLASS32 {
        header::header32::SIZEOF_EHDR
    } else {
        header::header64::SIZEOF_EHDR
    };
    Ok(goblin::elf::Elf::parse_header(&blocks.bytes(0, size)?)?)
}

/// The blocks of a file that were read so far.
struct Blocks<'a, R: ?Sized> {
    file: &'a R,
    blocks: BTreeMap<u64, Vec<u8>>,
    strings: usize,
}

impl<R: ReadAt + ?Sized> Blocks<'_, R> {
    /// The bytes from `offset` to the end of its block; none at the end of the file.
    fn rest_of_block(&mut self, offset: u64) -> Result<&[u8], Unusable> {
        let number = offset / BLOCK;
        if offset > i64::MAX as u64 || (self.blocks.len() == BLOCKS_MAX && !self.blocks.contains_key(&number)) {
            return Err(Unusable::Malformed("offset"));
        }
        let block = match self.blocks.entry(number) {
            std::collections::btree_map::Entry::Occupied(block) => block.into_mut(),
            std::collections::btree_map::Entry::Vacant(slot) => {
                slot.insert(read_up_to(self.file, number * BLOCK, BLOCK as usize)?)
            }
        };
        Ok(block.get((offset % BLOCK) as usize..).unwrap_or_default())
    }

    /// `len` bytes at `offset`. The caller bounds `len`.
    fn bytes(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Unusable> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let at = offset.checked_add(bytes.len() as u64).ok_or(Unusable::Malformed("offset"))?;
            let rest = self.rest_of_block(at)?;
            if rest.is_empty() {
                return Err(Unusable::TooShort);
            }
            bytes.extend_from_slice(&rest[..rest.len().min(len - bytes.len())]);
        }
        Ok(bytes)
    }

    /// The NUL-terminated string at `offset`.
    fn string(&mut self, offset: u64) -> Result<OsString, Unusable> {
        let mut string = Vec::new();
        loop {
            let at = offset.checked_add(string.len() as u64).ok_or(Unusable::Malformed("offset"))?;
            let rest = self.rest_of_block(at)?;
            if rest.is_empty() {
                return Err(Unusable::TooShort);
            }
            let end = rest.iter().position(|&byte| byte == 0);
            string.extend_from_slice(&rest[..end.unwrap_or(rest.len())]);
            if string.len() > STRING_MAX || self.strings + string.len() > STRINGS_MAX {
                return Err(Unusable::Malformed("length of a string"));
            }
            if end.is_some() {
                self.strings += string.len();
                return Ok(OsString::from_vec(string));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn own_executable() -> Vec<u8> {
        let mut bytes = std::fs::read("/proc/self/exe").unwrap();
        bytes.truncate(8 << 20);
        bytes
    }

    #[test]
    fn reads_itself() {
        let elf = Elf::read(&File::open("/proc/self/exe").unwrap(), None).unwrap();
        assert!(elf.abi.is_64);
        assert!(elf.tls.is_some());
        let other = Abi { machine: 0x1234, ..elf.abi };
        assert!(matches!(Elf::read(&own_executable(), Some(other)), Err(Unusable::OtherAbi)));
    }

    #[test]
    fn says_what_is_wrong() {
        assert!(matches!(Elf::read(&vec![], None), Err(Unusable::TooShort)));
        assert!(matches!(Elf::read(&b"#!/bin/sh -eu and more".to_vec(), None), Err(Unusable::NotElf)));
    }

    /// A minimal 64-bit library whose parts a test can damage: header, one PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_TLS, strings.
    fn library() -> Vec<u8> {
        let mut file = vec![0; 0x400];
        let put = |file: &mut Vec<u8>, at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(&mut file, 0, b"\x7fELF\x02\x01\x01");
        for (at, value) in [(16, 3u16), (18, 62), (52, 64), (54, 56), (56, 4)] {
            put(&mut file, at, &value.to_le_bytes());
        }
        put(&mut file, 20, &1u32.to_le_bytes());
        put(&mut file, 32, &64u64.to_le_bytes());
        for (index, (kind, offset, size)) in
            [(1u32, 0u64, 0x400u64), (2, 0x200, 0x80), (3, 0x3f0, 8), (7, 0x3f8, 24)].into_iter().enumerate()
        {
            let at = 64 + 56 * index;
            put(&mut file, at, &kind.to_le_bytes());
            for (field, value) in [(8, offset), (16, offset), (32, size), (40, size), (48, 8)] {
                put(&mut file, at + field, &value.to_le_bytes());
            }
        }
        for (index, (tag, value)) in
            [(5u64, 0x300u64), (1, 1), (14, 8), (15, 8), (29, 15), (0x6fff_fffb, 0x800), (30, 0x10)]
                .into_iter()
                .enumerate()
        {
            put(&mut file, 0x200 + 16 * index, &tag.to_le_bytes());
            put(&mut file, 0x208 + 16 * index, &value.to_le_bytes());
        }
        put(&mut file, 0x300, b"\0liba.1\0libb.1\0$ORIGIN\0");
        put(&mut file, 0x3f0, b"/ld.so\0");
        file
    }

    #[test]
    fn reads_every_field() {
        let elf = Elf::read(&library(), None).unwrap();
        assert_eq!(elf.needed, [Needed { name: "liba.1".into(), optional: false }]);
        assert_eq!(elf.soname.unwrap(), "libb.1");
        assert_eq!((elf.rpath, elf.runpath.unwrap()), (None, "$ORIGIN".into()));
        assert_eq!(elf.interpreter.unwrap(), "/ld.so");
        assert_eq!(elf.tls.unwrap(), Tls { size: 24, align: 8, must_be_static: true });
        assert!(elf.no_default_libs);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn no_bytes_make_it_panic(
            damage in prop::collection::vec((0usize..0x400, prop_oneof![Just(0u8), Just(255), any::<u8>()]), 1..12),
            length in 0usize..0x401,
            cut in any::<bool>(),
        ) {
            let mut file = library();
            for (at, byte) in damage {
                file[at] = byte;
            }
            if cut {
                file.truncate(length);
            }
            if let Ok(elf) = Elf::read(&file, None) {
                prop_assert!(elf.needed.len() <= 64);
            }
        }

        #[test]
        fn random_bytes_are_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..512), magic in any::<bool>()) {
            if magic && bytes.len() > 8 {
                bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
            }
            let _ = Elf::read(&bytes, None);
        }
    }
}
