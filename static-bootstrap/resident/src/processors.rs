//! Where threads run, and may.

use core::ffi::CStr;

use sys::syscall::{nr, read_file, syscall};

/// 1,024 processors.
const WORDS: usize = 16;

/// A set of processors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Processors([u64; WORDS]);

impl Processors {
    pub(super) const NONE: Processors = Processors([0; WORDS]);

    /// Those that this thread may use.
    pub(super) fn allowed() -> Processors {
        Processors::allowed_to(0)
    }

    /// Those that a thread of this process may use; 0 is this one.
    pub(super) fn allowed_to(thread: u32) -> Processors {
        let mut words = [0; WORDS];
        let args = [thread as usize, size_of_val(&words), words.as_mut_ptr() as usize, 0, 0, 0];
        // SAFETY: room for as many bytes.
        let _ = unsafe { syscall(nr::SCHED_GETAFFINITY, args) };
        Processors(words)
    }

    /// This one alone.
    pub(super) fn one(processor: usize) -> Processors {
        let mut words = [0; WORDS];
        if let Some(word) = words.get_mut(processor / 64) {
            *word = 1 << (processor % 64);
        }
        Processors(words)
    }

    /// All but one, if any is left.
    pub(super) fn without(mut self, processor: usize) -> Option<Processors> {
        if let Some(word) = self.0.get_mut(processor / 64) {
            *word &= !(1 << (processor % 64));
        }
        (self.0 != [0; WORDS]).then_some(self)
    }

    /// Has this thread use these.
    pub(super) fn use_by_this_thread(&self) {
        self.use_by(0);
    }

    /// Has a thread of this process use these.
    pub(super) fn use_by(&self, thread: u32) {
        let args = [thread as usize, size_of_val(&self.0), self.0.as_ptr() as usize, 0, 0, 0];
        // SAFETY: a set of that size.
        let _ = unsafe { syscall(nr::SCHED_SETAFFINITY, args) };
    }
}

/// Others that wait for this processor go first.
pub(super) fn give_way() {
    // SAFETY: no arguments.
    let _ = unsafe { syscall(nr::SCHED_YIELD, [0; 6]) };
}

/// The processor on which a thread of this process runs, or ran last.
pub(super) fn used_by(thread: u32) -> Option<usize> {
    /// The fields after the name, of which the first is the state (proc(5)).
    const PLACE: usize = 36;
    let mut path = *b"/proc/self/task/\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let mut digits = [0; 10];
    let (mut at, mut left) = (digits.len(), thread);
    while left > 0 && at > 0 {
        at -= 1;
        digits[at] = b'0' + (left % 10) as u8;
        left /= 10;
    }
    let name = digits[at..].iter().chain(b"/stat");
    path[16..].iter_mut().zip(name).for_each(|(to, from)| *to = *from);
    let mut text = [0u8; 512];
    let text = read_file(CStr::from_bytes_until_nul(&path).ok()?, &mut text)?;
    let fields = text.get(text.iter().rposition(|byte| *byte == b')')? + 2..)?;
    let field = fields.split(|byte| *byte == b' ').nth(PLACE)?;
    field.iter().try_fold(0usize, |value, byte| byte.is_ascii_digit().then(|| value * 10 + usize::from(byte - b'0')))
}
