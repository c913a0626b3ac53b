//! What the ranks of one node become, written as the block that they read (`plan.rs`).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};

use super::plan::{MAGIC, Plan, Rank};

/// What the ranks of one node become. Strings must not contain NUL.
#[derive(Debug, Clone, Default)]
pub struct Program {
    pub path: Vec<u8>,
    /// Working directory, and the one to fall back on.
    pub cwd: Vec<u8>,
    pub home: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    /// Further variables: name, and the value of the rank with index 0; the next has one more.
    pub counted: Vec<(String, u32)>,
    pub ranks: u32,
    /// Processor set of each rank for `sched_setaffinity(2)`; none at all: any.
    pub masks: Vec<Vec<u8>>,
    /// Soft and hard RLIMIT_NOFILE.
    pub nofile: (u64, u64),
    /// Stop each rank before its program's first instruction.
    pub hold: bool,
    /// What is put into each before that if it is statically linked ([`super::inject`]); empty: nothing.
    pub resident: Vec<u8>,
}

impl Program {
    /// The plan as a file in memory, which keeps its length; its keeper is still to be written.
    ///
    /// # Errors
    /// A string contains NUL, all of it is larger than 4 GiB, or memory is short.
    pub fn write(&self) -> io::Result<OwnedFd> {
        let mut file =
            File::from(rustix::fs::memfd_create("hpcrt-plan", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.write_all(&self.block()?)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(file.into())
    }

    fn block(&self) -> io::Result<Vec<u8>> {
        let mut block = Block(vec![0; size_of::<Plan>()]);
        let (program, cwd, home) = (block.string(&self.path)?, block.string(&self.cwd)?, block.string(&self.home)?);
        let resident = if self.resident.is_empty() { 0 } else { block.string(&self.resident)? };
        let (argc, argv) = block.strings(&self.argv)?;
        let (envc, envp) = block.strings(&self.env)?;
        let mut table = Vec::new();
        for index in 0..self.ranks {
            let own: Vec<_> =
                self.counted.iter().map(|(name, first)| format!("{name}={}", first + index).into_bytes()).collect();
            let (envc, envp) = block.strings(&own)?;
            let mask = self.masks.get(index as usize).map_or(&[][..], |mask| mask);
            let mask_at = block.align(8)?;
            block.0.extend_from_slice(mask);
            table.push([envc, envp, offset(mask.len())?, mask_at]);
        }
        let rank_table = block.align(8)?;
        for words in table {
            words.iter().for_each(|word| block.0.extend_from_slice(&word.to_ne_bytes()));
            // No failures yet.
            block.0.resize(block.0.len() + size_of::<Rank>() - size_of_val(&words), 0);
        }
        let len = block.align(8)?;

        let mut head = Vec::with_capacity(size_of::<Plan>());
        head.extend_from_slice(&MAGIC.to_ne_bytes());
        [len, 0].iter().for_each(|word| head.extend_from_slice(&word.to_ne_bytes()));
        [self.nofile.0, self.nofile.1].iter().for_each(|word| head.extend_from_slice(&word.to_ne_bytes()));
        for word in [program, cwd, home, argc, argv, envc, envp, self.ranks, rank_table, u32::from(self.hold), resident]
        {
            head.extend_from_slice(&word.to_ne_bytes());
        }
        block.0[..head.len()].copy_from_slice(&head);
        Ok(block.0)
    }
}

fn offset(bytes: usize) -> io::Result<u32> {
    u32::try_from(bytes).map_err(|_| io::Error::other("arguments and environment exceed 4 GiB"))
}

/// The block while it grows.
struct Block(Vec<u8>);

impl Block {
    fn align(&mut self, to: usize) -> io::Result<u32> {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
        offset(self.0.len())
    }

    fn string(&mut self, text: &[u8]) -> io::Result<u32> {
        if text.contains(&0) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an argument or a variable contains NUL"));
        }
        let at = offset(self.0.len())?;
        self.0.extend_from_slice(text);
        self.0.push(0);
        Ok(at)
    }

    fn strings(&mut self, texts: &[Vec<u8>]) -> io::Result<(u32, u32)> {
        let offsets = texts.iter().map(|text| self.string(text)).collect::<io::Result<Vec<u32>>>()?;
        let at = self.align(4)?;
        offsets.iter().for_each(|offset| self.0.extend_from_slice(&offset.to_ne_bytes()));
        Ok((offset(texts.len())?, at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_is_what_ranks_read() {
        let program = Program {
            path: b"/bin/x".to_vec(),
            cwd: b"/".to_vec(),
            home: b"/r".to_vec(),
            argv: vec![b"x".to_vec(), b"y z".to_vec()],
            env: vec![b"A=1".to_vec()],
            counted: vec![("R".to_owned(), 7)],
            ranks: 2,
            masks: vec![vec![3, 0, 0, 0, 0, 0, 0, 0]],
            nofile: (1024, 4096),
            hold: true,
            resident: Vec::new(),
        };
        let mut golden = b"HPCRTPL2".to_vec();
        let words = |block: &mut Vec<u8>, words: &[u32]| {
            words.iter().for_each(|word| block.extend_from_slice(&word.to_ne_bytes()));
        };
        words(&mut golden, &[224, 0]);
        [1024u64, 4096].iter().for_each(|word| golden.extend_from_slice(&word.to_ne_bytes()));
        words(&mut golden, &[80, 87, 89, 2, 100, 1, 112, 2, 144, 1, 0, 0]);
        golden.extend_from_slice(b"/bin/x\0/\0/r\0x\0y z\0\0\0");
        words(&mut golden, &[92, 94]);
        golden.extend_from_slice(b"A=1\0");
        words(&mut golden, &[108]);
        golden.extend_from_slice(b"R=7\0");
        words(&mut golden, &[116, 0]);
        golden.extend_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0]);
        golden.extend_from_slice(b"R=8\0");
        words(&mut golden, &[136]);
        words(&mut golden, &[1, 120, 8, 128, 0, 0, 0, 0, 0, 0]);
        words(&mut golden, &[1, 140, 0, 144, 0, 0, 0, 0, 0, 0]);
        assert_eq!(program.block().unwrap(), golden);

        let file = File::from(program.write().unwrap());
        assert!(file.set_len(8).is_err() && file.set_len(4096).is_err(), "who maps it relies on its length");
        assert!(Program { argv: vec![b"a\0b".to_vec()], ..program }.write().is_err());
    }
}
