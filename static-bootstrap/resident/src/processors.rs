//! Where threads run, and may.

use core::ffi::CStr;

pub(super) use sys::processors::Processors;
use sys::syscall::{nr, read_file, syscall};

/// Those that this thread may use.
pub(super) fn allowed() -> Processors {
    allowed_to(0)
}

/// Those that a thread of this process may use; 0 is this one.
pub(super) fn allowed_to(thread: u32) -> Processors {
    let mut words = Processors::NONE.0;
    let args = [thread as usize, size_of_val(&words), words.as_mut_ptr() as usize, 0, 0, 0];
    // SAFETY: room for as many bytes.
    let _ = unsafe { syscall(nr::SCHED_GETAFFINITY, args) };
    Processors(words)
}

/// Has this thread use these.
pub(super) fn use_by_this_thread(these: &Processors) {
    use_by(0, these);
}

/// Has a thread of this process use these.
pub(super) fn use_by(thread: u32, these: &Processors) {
    let args = [thread as usize, size_of_val(&these.0), these.0.as_ptr() as usize, 0, 0, 0];
    // SAFETY: a set of that size.
    let _ = unsafe { syscall(nr::SCHED_SETAFFINITY, args) };
}

/// All of these but one: of those that share the cache of the third level with it, as far as the kernel knows, if there are enough of them. What was written where that is not shared takes six times as
/// long to copy, as measured while a virtual machine's host had one of two processors elsewhere; with two there is nothing to choose.
pub(super) fn beside(these: Processors, processor: usize) -> Option<Processors> {
    let path = numbered(b"/sys/devices/system/cpu/cpu", processor, b"/cache/index3/shared_cpu_map");
    let mut text = [0u8; 512];
    let near = CStr::from_bytes_until_nul(&path).ok().and_then(|path| read_file(path, &mut text));
    these.beside(processor, near.map_or(Processors::NONE, Processors::of_map))
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
    let path = numbered(b"/proc/self/task/", thread as usize, b"/stat");
    let mut text = [0u8; 512];
    let text = read_file(CStr::from_bytes_until_nul(&path).ok()?, &mut text)?;
    let fields = text.get(text.iter().rposition(|byte| *byte == b')')? + 2..)?;
    let field = fields.split(|byte| *byte == b' ').nth(PLACE)?;
    field.iter().try_fold(0usize, |value, byte| byte.is_ascii_digit().then(|| value * 10 + usize::from(byte - b'0')))
}

/// A path with a number in it, which ends with 0.
fn numbered(before: &[u8], number: usize, after: &[u8]) -> [u8; 80] {
    let (mut path, mut digits) = ([0; 80], [0; 20]);
    let (mut at, mut left) = (digits.len(), number);
    while left > 0 || at == digits.len() {
        at -= 1;
        digits[at] = b'0' + (left % 10) as u8;
        left /= 10;
    }
    let name = before.iter().chain(&digits[at..]).chain(after);
    path[..79].iter_mut().zip(name).for_each(|(to, from)| *to = *from);
    path
}
