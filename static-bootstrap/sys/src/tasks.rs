//! The threads of this process, as the kernel tells of them (proc(5)). Who asks has his own way to make system calls; each returns as the kernel does.

use crate::syscall::nr;

const AT_FDCWD: usize = -100_isize as usize;
const CLOSE_ON_EXEC: usize = 0o2_000_000;
const DIRECTORY: usize = 0o200_000;
/// Bytes of the list that are read at a time.
const LIST: usize = 4096;

/// Shows the numbers of all; false: the kernel does not tell them.
pub fn each(call: impl Fn(usize, [usize; 6]) -> isize, mut visit: impl FnMut(u32)) -> bool {
    let mut list = [0u64; LIST / 8];
    let path = c"/proc/self/task".as_ptr() as usize;
    let tasks = call(nr::OPENAT, [AT_FDCWD, path, CLOSE_ON_EXEC | DIRECTORY, 0, 0, 0]);
    if tasks < 0 {
        return false;
    }
    let told = loop {
        let len = call(nr::GETDENTS64, [tasks as usize, list.as_mut_ptr() as usize, LIST, 0, 0, 0]);
        if len <= 0 {
            break len == 0;
        }
        // SAFETY: plain bytes, of which the kernel wrote so many.
        let bytes = unsafe { core::slice::from_raw_parts(list.as_ptr().cast::<u8>(), (len as usize).min(LIST)) };
        entries(bytes).for_each(&mut visit);
    };
    call(nr::CLOSE, [tasks as usize, 0, 0, 0, 0, 0]);
    told
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

/// Reads the beginning of what the file `name` says of a thread; `None`: there is no such thread, or the kernel does not tell.
pub fn read<'a>(
    call: impl Fn(usize, [usize; 6]) -> isize,
    thread: u32,
    name: &[u8],
    buffer: &'a mut [u8],
) -> Option<&'a [u8]> {
    let mut path = [0; 64];
    let mut digits = [0; 10];
    let (mut left, mut first) = (thread, digits.len());
    while left > 0 && first > 0 {
        first -= 1;
        digits[first] = b'0' + (left % 10) as u8;
        left /= 10;
    }
    let words = [&b"/proc/self/task/"[..], &digits[first..], b"/", name];
    // The last byte stays zero.
    let places = path[..63].iter_mut().zip(words.into_iter().flatten());
    places.for_each(|(place, byte)| *place = *byte);
    let file = call(nr::OPENAT, [AT_FDCWD, path.as_ptr() as usize, CLOSE_ON_EXEC, 0, 0, 0]);
    if file < 0 {
        return None;
    }
    let len = call(nr::READ, [file as usize, buffer.as_mut_ptr() as usize, buffer.len(), 0, 0, 0]);
    call(nr::CLOSE, [file as usize, 0, 0, 0, 0, 0]);
    usize::try_from(len).ok().filter(|len| *len > 0).and_then(|len| buffer.get(..len))
}

/// What a thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    Runs,
    /// Waits in the kernel: for what it asked, if it did (number and arguments), with this stack pointer, to go on there.
    Waits {
        call: Option<(usize, [usize; 6])>,
        stack: usize,
        next: usize,
    },
}

/// From the file `syscall`; `None` if it is none.
pub fn doing(text: &[u8]) -> Option<Doing> {
    let text = text.trim_ascii_end();
    if text == b"running" {
        return Some(Doing::Runs);
    }
    let mut words = text.split(|byte| *byte == b' ');
    let number = words.next()?;
    let mut word = || {
        let digits = words.next()?.strip_prefix(b"0x")?;
        let digit = |digit: &u8| char::from(*digit).to_digit(16);
        digits.iter().try_fold(0, |all: usize, next| Some(all << 4 | digit(next)? as usize))
    };
    let call = if number == b"-1" {
        None
    } else {
        let number = core::str::from_utf8(number).ok()?.parse().ok()?;
        let mut args = [0; 6];
        for arg in &mut args {
            *arg = word()?;
        }
        Some((number, args))
    };
    Some(Doing::Waits { call, stack: word()?, next: word()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_does() {
        assert_eq!(doing(b"running\n"), Some(Doing::Runs));
        let waits = Doing::Waits { call: None, stack: 0x7ffc_12a0, next: 0x55ff };
        assert_eq!(doing(b"-1 0x7ffc12a0 0x55ff\n"), Some(waits));
        let call = Some((232, [4, 0x6840_0000_0010, 0x40, 0xffff_ffff, 0, 8]));
        let waits = Doing::Waits { call, stack: 0x7f00, next: 0x7f11 };
        assert_eq!(doing(b"232 0x4 0x684000000010 0x40 0xffffffff 0x0 0x8 0x7f00 0x7f11\n"), Some(waits));
        for wrong in [&b""[..], b"7", b"7 0x1", b"-1 0x0", b"x 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0"] {
            assert_eq!(doing(wrong), None);
        }
    }

    #[test]
    fn names_that_are_numbers() {
        let entry = |name: &[u8]| {
            let mut entry = [0; 32];
            entry[16] = 32;
            entry[19..19 + name.len()].copy_from_slice(name);
            entry
        };
        let all = [entry(b"."), entry(b".."), entry(b"17"), entry(b"4194303")];
        assert!(entries(all.as_flattened()).eq([17, 4_194_303]));
        assert!(entries(&all.as_flattened()[..40]).eq([]));
    }
}
