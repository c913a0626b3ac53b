//! Memory that something uses behind the program's back: a device that it is pinned for, or input and output that goes on when the call that asked for it has
//! returned. Pages that can only be copied would be copied all the same, and what comes into the old ones be lost.

use sys::syscall::{nr, syscall};

use super::call;

const CURRENT: usize = -100_isize as usize;
const CLOSE_ON_EXEC: usize = 0o2_000_000;

/// What the kernel tells of this process: `/proc/self/status`, or -1.
pub(super) struct Pins(i32);

impl Pins {
    pub(super) fn new() -> Pins {
        Pins(open(c"/proc/self/status"))
    }

    /// Whether anything is pinned, wherever it is: of pages that nobody can write to now, none will be.
    pub(super) fn any(&self) -> bool {
        const NAME: &[u8] = b"VmPin:";
        let mut text = [0u8; 4096];
        // SAFETY: room for so many bytes.
        let read = unsafe { syscall(nr::PREAD64, [self.0 as usize, text.as_mut_ptr() as usize, text.len(), 0, 0, 0]) };
        let text = &text[..read.unwrap_or(0).min(text.len())];
        let mut lines = text.split(|byte| *byte == b'\n');
        let line = lines.find_map(|line| line.strip_prefix(NAME));
        line.is_some_and(|line| line.iter().any(|byte| (b'1'..=b'9').contains(byte)))
    }
}

/// Whether the program has io_uring or libaio ready: each has a mapping of the kernel's.
pub(super) fn is_asynchronous() -> bool {
    const NAMES: [&[u8]; 2] = [b"/[aio]", b"anon_inode:[io_uring]"];
    const KEPT: usize = 32;
    let maps = open(c"/proc/self/maps");
    let (mut text, mut kept, mut found) = ([0u8; 2048], 0, false);
    loop {
        let room = &mut text[kept..];
        // SAFETY: room for so many bytes.
        let read = unsafe { syscall(nr::READ, [maps as usize, room.as_mut_ptr() as usize, room.len(), 0, 0, 0]) };
        let Ok(more @ 1..) = read else { break };
        let len = kept + more;
        found |= NAMES.iter().any(|name| text[..len].windows(name.len()).any(|part| part == *name));
        // A name may go on.
        kept = len.min(KEPT);
        text.copy_within(len - kept..len, 0);
    }
    call::close(maps);
    found
}

fn open(path: &core::ffi::CStr) -> i32 {
    // SAFETY: a path.
    let file = unsafe { syscall(nr::OPENAT, [CURRENT, path.as_ptr() as usize, CLOSE_ON_EXEC, 0, 0, 0]) };
    file.map_or(-1, |file| file as i32)
}
