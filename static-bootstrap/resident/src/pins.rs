//! Memory that something uses behind the program's back: a device that it is pinned for, or input and output that goes on when the call that asked for it has
//! returned. Pages that can only be copied would be copied all the same, and what comes into the old ones be lost.

use sys::syscall::{nr, syscall};

use super::call;

const CURRENT: usize = -100_isize as usize;
const CLOSE_ON_EXEC: usize = 0o2_000_000;

/// What the kernel tells of this process: `/proc/self/status`.
pub(super) struct Pins(i32);

impl Pins {
    /// `None`: not for who does not copy.
    pub(super) fn new(copies: bool) -> Option<Pins> {
        copies.then(|| Pins(open(c"/proc/self/status")))
    }

    /// Whether anything is pinned, wherever it is: of pages that nobody can write to now, none will be.
    pub(super) fn any(&self) -> bool {
        const NAME: &[u8] = b"VmPin:";
        is_in(self.0, |text| {
            let at = text.windows(NAME.len()).position(|part| part == NAME)?;
            let rest = &text[at + NAME.len()..];
            let end = rest.iter().position(|byte| *byte == b'\n')?;
            Some(rest[..end].iter().any(|byte| (b'1'..=b'9').contains(byte)))
        })
    }
}

/// Whether the program has io_uring or libaio ready: each has a mapping of the kernel's.
pub(super) fn is_asynchronous() -> bool {
    const NAMES: [&[u8]; 2] = [b"/[aio]", b"anon_inode:[io_uring]"];
    let maps = open(c"/proc/self/maps");
    let has = |text: &[u8], name: &[u8]| text.windows(name.len()).any(|part| part == name);
    let found = is_in(maps, |text| NAMES.iter().any(|name| has(text, name)).then_some(true));
    call::close(maps);
    found
}

/// What `look` says of a file, which it is shown piece by piece, with the end of the one before; false if it says nothing.
fn is_in(file: i32, look: impl Fn(&[u8]) -> Option<bool>) -> bool {
    const KEPT: usize = 64;
    let (mut text, mut kept, mut at) = ([0u8; 4096], 0, 0);
    loop {
        let room = &mut text[kept..];
        let args = [file as usize, room.as_mut_ptr() as usize, room.len(), at, 0, 0];
        // SAFETY: room for so many bytes.
        let Ok(more @ 1..) = (unsafe { syscall(nr::PREAD64, args) }) else { return false };
        let len = kept + more.min(room.len());
        if let Some(found) = look(&text[..len]) {
            return found;
        }
        at += more;
        kept = len.min(KEPT);
        text.copy_within(len - kept..len, 0);
    }
}

fn open(path: &core::ffi::CStr) -> i32 {
    // SAFETY: a path.
    let file = unsafe { syscall(nr::OPENAT, [CURRENT, path.as_ptr() as usize, CLOSE_ON_EXEC, 0, 0, 0]) };
    file.map_or(-1, |file| file as i32)
}
