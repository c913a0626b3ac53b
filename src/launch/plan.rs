//! Writes the launch plan that every rank's bootstrapper reads; the layout is the bootstrapper's own.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;

use crate::sys::boot_plan;

/// What the ranks of one node become.
#[derive(Debug, Default)]
pub struct PlanSpec {
    pub program: Vec<u8>,
    pub cwd: Vec<u8>,
    /// Directory to fall back on.
    pub home: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    /// Per rank: further environment, and the bytes of a processor set (empty: any).
    pub ranks: Vec<(Vec<Vec<u8>>, Vec<u8>)>,
    /// Soft and hard RLIMIT_NOFILE.
    pub nofile: (u64, u64),
    /// Stop each rank before its program's first instruction.
    pub hold: bool,
}

/// Bytes from the start of the block to the keeper's pid, which only the keeper knows.
pub const KEEPER_AT: u64 = 12;

impl PlanSpec {
    /// The plan as a descriptor; the keeper still writes its pid at [`KEEPER_AT`].
    ///
    /// # Errors
    /// The plan is larger than 4 GiB, or memory is short.
    pub fn write(&self) -> io::Result<OwnedFd> {
        let bytes = self.block().ok_or_else(|| io::Error::other("arguments and environment exceed 4 GiB"))?;
        let fd = rustix::fs::memfd_create("hpcrt-plan", MemfdFlags::CLOEXEC)?;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let written = rustix::io::write(&fd, rest)?;
            rest = &rest[written..];
        }
        Ok(fd)
    }

    fn block(&self) -> Option<Vec<u8>> {
        let mut block = Block(vec![0; size_of::<boot_plan::Plan>()]);
        let [program, cwd, home] = [&self.program, &self.cwd, &self.home].map(|text| block.string(text));
        let (argc, argv) = block.strings(&self.argv)?;
        let (envc, envp) = block.strings(&self.env)?;
        let mut table = Vec::new();
        for (env, mask) in &self.ranks {
            let (envc, envp) = block.strings(env)?;
            let mask_at = block.align(8)?;
            block.0.extend_from_slice(mask);
            table.push([envc, envp, u32::try_from(mask.len()).ok()?, mask_at]);
        }
        let rank_table = block.align(8)?;
        table.iter().flatten().for_each(|word| block.0.extend_from_slice(&word.to_ne_bytes()));
        let len = block.align(8)?;

        let mut head = Vec::with_capacity(size_of::<boot_plan::Plan>());
        head.extend_from_slice(&boot_plan::MAGIC.to_ne_bytes());
        [len, 0].iter().for_each(|word| head.extend_from_slice(&word.to_ne_bytes()));
        [self.nofile.0, self.nofile.1].iter().for_each(|word| head.extend_from_slice(&word.to_ne_bytes()));
        let ranks = u32::try_from(table.len()).ok()?;
        for word in [program?, cwd?, home?, argc, argv, envc, envp, ranks, rank_table, u32::from(self.hold)] {
            head.extend_from_slice(&word.to_ne_bytes());
        }
        block.0[..head.len()].copy_from_slice(&head);
        Some(block.0)
    }
}

/// The block while it grows; offsets that do not fit 32 bits are `None`.
struct Block(Vec<u8>);

impl Block {
    fn align(&mut self, to: usize) -> Option<u32> {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
        u32::try_from(self.0.len()).ok()
    }

    fn string(&mut self, text: &[u8]) -> Option<u32> {
        let at = u32::try_from(self.0.len()).ok();
        self.0.extend_from_slice(text);
        self.0.push(0);
        at
    }

    fn strings(&mut self, texts: &[Vec<u8>]) -> Option<(u32, u32)> {
        let offsets: Option<Vec<u32>> = texts.iter().map(|text| self.string(text)).collect();
        let at = self.align(4)?;
        offsets?.iter().for_each(|offset| self.0.extend_from_slice(&offset.to_ne_bytes()));
        Some((u32::try_from(texts.len()).ok()?, at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_is_what_the_bootstrapper_reads() {
        let spec = PlanSpec {
            program: b"/bin/x".to_vec(),
            cwd: b"/".to_vec(),
            home: b"/root".to_vec(),
            argv: vec![b"x".to_vec(), b"y z".to_vec()],
            env: vec![b"A=1".to_vec()],
            ranks: vec![(vec![b"R=0".to_vec()], vec![3, 0, 0, 0, 0, 0, 0, 0]), (vec![b"R=1".to_vec()], vec![])],
            nofile: (1024, 4096),
            hold: true,
        };
        let bytes = spec.block().unwrap();
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let text = |at: usize| bytes[at..].split(|b| *b == 0).next().unwrap();
        use std::mem::offset_of;
        assert_eq!(offset_of!(boot_plan::Plan, keeper) as u64, KEEPER_AT);
        assert_eq!((word(offset_of!(boot_plan::Plan, len)), word(offset_of!(boot_plan::Plan, hold))), (bytes.len(), 1));
        assert_eq!(text(word(offset_of!(boot_plan::Plan, program))), b"/bin/x");
        let argv = word(offset_of!(boot_plan::Plan, argv));
        assert_eq!((word(offset_of!(boot_plan::Plan, argc)), text(word(argv + 4))), (2, &b"y z"[..]));
        let table = word(offset_of!(boot_plan::Plan, rank_table));
        assert_eq!(word(offset_of!(boot_plan::Plan, ranks)), 2);
        let second = table + size_of::<boot_plan::Rank>();
        assert_eq!(text(word(word(second + offset_of!(boot_plan::Rank, envp)))), b"R=1");
        assert_eq!(
            (word(table + offset_of!(boot_plan::Rank, mask_len)), word(second + offset_of!(boot_plan::Rank, mask_len))),
            (8, 0)
        );
        assert_eq!(bytes[word(table + offset_of!(boot_plan::Rank, mask))], 3);
    }
}
