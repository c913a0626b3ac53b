//! Threads that run already, told of what each has to ask of the kernel for itself: by SIGSYS, which nobody blocks.

use core::sync::atomic::{AtomicU32, Ordering};

use super::kernel::{failed, nr, raw, wait_briefly};
use crate::dispatch;

const SIGSYS: usize = 31;
const AT_FDCWD: usize = -100_isize as usize;
const DIRECTORY_CLOEXEC: usize = 0o2_200_000;
/// Bytes of the list that are read at a time.
const LIST: usize = 4096;

/// Shows the numbers of all threads of this process; false: the kernel does not tell them.
pub(super) fn each(mut visit: impl FnMut(u32)) -> bool {
    let mut list = [0u64; LIST / 8];
    // SAFETY: a string, room of that size, and an integer.
    unsafe {
        let tasks = raw(nr::OPENAT, [AT_FDCWD, c"/proc/self/task".as_ptr() as usize, DIRECTORY_CLOEXEC, 0, 0, 0]);
        if failed(tasks) {
            return false;
        }
        let told = loop {
            let len = raw(nr::GETDENTS64, [tasks as usize, list.as_mut_ptr() as usize, LIST, 0, 0, 0]);
            if failed(len) || len == 0 {
                break len == 0;
            }
            let bytes = core::slice::from_raw_parts(list.as_ptr().cast::<u8>(), len as usize);
            entries(bytes).for_each(&mut visit);
        };
        raw(nr::CLOSE, [tasks as usize, 0, 0, 0, 0, 0]);
        told
    }
}

/// Numbers among the names of a directory's entries (getdents64(2)): after 16 bytes their length, after 19 the name.
fn entries(mut bytes: &[u8]) -> impl Iterator<Item = u32> {
    core::iter::from_fn(move || {
        let len = u16::from_le_bytes([*bytes.get(16)?, *bytes.get(17)?]);
        let (entry, rest) = bytes.split_at_checked(len.into())?;
        bytes = rest;
        entry.get(19..)
    })
    .filter_map(|name| {
        let digits = name.iter().take_while(|byte| byte.is_ascii_digit());
        digits.fold(None, |all, digit| Some(all.unwrap_or(0) * 10 + u32::from(digit - b'0')))
    })
}

/// Has a thread ask the kernel, and waits until it has, or is no more.
pub(super) fn join(thread: u32) {
    // SAFETY: integers.
    let (process, own) = unsafe { (raw(nr::GETPID, [0; 6]) as usize, raw(nr::GETTID, [0; 6])) };
    if own == thread as isize {
        return;
    }
    let joined: &AtomicU32 = dispatch::wanted(thread);
    // SAFETY: integers.
    while unsafe { raw(nr::TGKILL, [process, thread as usize, SIGSYS, 0, 0, 0]) } == 0 {
        for _ in 0..100 {
            if joined.load(Ordering::SeqCst) != thread {
                return;
            }
            wait_briefly(joined, thread);
        }
        if has_ended(thread) {
            return;
        }
    }
}

/// A process's first thread that has ended stays in the list.
fn has_ended(thread: u32) -> bool {
    let mut path = *b"/proc/self/task/0000000000/stat\0";
    let mut left = thread;
    for digit in path[16..26].iter_mut().rev() {
        *digit = b'0' + (left % 10) as u8;
        left /= 10;
    }
    // The kernel takes no number that begins with 0.
    let zeros = path[16..25].iter().take_while(|digit| **digit == b'0').count();
    path.copy_within(16 + zeros.., 16);
    let mut stat = [0u8; 256];
    // SAFETY: a string, room, and integers.
    let len = unsafe {
        let file = raw(nr::OPENAT, [AT_FDCWD, path.as_ptr() as usize, 0o2_000_000, 0, 0, 0]);
        if failed(file) {
            return true;
        }
        let len = raw(nr::READ, [file as usize, stat.as_mut_ptr() as usize, stat.len(), 0, 0, 0]);
        raw(nr::CLOSE, [file as usize, 0, 0, 0, 0, 0]);
        len
    };
    // NUMBER (NAME) STATE ...
    let told = stat.get(..usize::try_from(len).unwrap_or(0)).unwrap_or_default();
    let behind = told.iter().rposition(|byte| *byte == b')');
    behind.and_then(|at| told.get(at + 2)).is_none_or(|state| matches!(state, b'Z' | b'X'))
}
