//! One question to the node's agent, over a socket in the store.

use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::mem::size_of;

use sys::socket::{AF_UNIX, Address, MSG_NOSIGNAL, SEQPACKET_CLOEXEC, SOL_SOCKET, TIMEOUTS};
use sys::syscall::{nr, syscall};
use sys::table::{DOOR, MESSAGE_MAX};

const EINTR: u32 = 4;
/// After this time without an answer nobody is asked any more; the agent gives up before.
static PATIENCE: [u64; 2] = [90, 0];
/// `PATH_MAX`.
const PATH_MAX: usize = 4096;

/// A place for one text, which the next one overwrites.
struct Buffer<const N: usize>(UnsafeCell<[u8; N]>);

// SAFETY: used under the linker's lock only, by one thread at a time.
unsafe impl<const N: usize> Sync for Buffer<N> {}

static PATH: Buffer<PATH_MAX> = Buffer(UnsafeCell::new([0; PATH_MAX]));
static QUESTION: Buffer<MESSAGE_MAX> = Buffer(UnsafeCell::new([0; MESSAGE_MAX]));
static ANSWER: Buffer<MESSAGE_MAX> = Buffer(UnsafeCell::new([0; MESSAGE_MAX]));

impl<const N: usize> Buffer<N> {
    /// The parts one after the other; `None` when they do not fit.
    fn fill(&'static self, parts: &[&[u8]]) -> Option<&'static [u8]> {
        // SAFETY: see above; what was in here before is no longer looked at.
        let buffer = unsafe { &mut *self.0.get() };
        let mut len = 0;
        for part in parts {
            buffer.get_mut(len..)?.get_mut(..part.len())?.copy_from_slice(part);
            len += part.len();
        }
        buffer.get(..len)
    }
}

/// A path made of these parts; the next one overwrites it.
pub(super) fn join(parts: &[&[u8]]) -> Option<&'static CStr> {
    let (a, b, c) =
        (parts.first()?, parts.get(1).copied().unwrap_or_default(), parts.get(2).copied().unwrap_or_default());
    CStr::from_bytes_until_nul(PATH.fill(&[a, b, c, &[0]])?).ok()
}

/// The path of a file in a directory; the next one overwrites it.
pub(super) fn path(directory: &[u8], file: &str) -> Option<&'static CStr> {
    join(&[directory, b"/", file.as_bytes()])
}

/// The way to the agent.
pub(super) struct Door {
    /// `None`: it has none, or did not answer once and is not asked again.
    address: Option<Address>,
}

impl Door {
    pub(super) fn new(store: &[u8]) -> Door {
        Door { address: Address::new(store, DOOR) }
    }

    /// Asks; parts are separated by NUL. `None`: the agent is gone, or does not answer.
    pub(super) fn ask(&mut self, kind: u8, parts: &[&[u8]]) -> Option<&'static CStr> {
        let address = self.address.as_ref()?;
        let (first, second) = (parts.first()?, parts.get(1).copied());
        let (separator, second): (&[u8], &[u8]) = second.map_or((&[], &[]), |part| (&[0], part));
        let question = QUESTION.fill(&[&[kind], first, separator, second])?;
        // SAFETY: integer arguments only.
        let socket = unsafe { syscall(nr::SOCKET, [AF_UNIX.into(), SEQPACKET_CLOEXEC, 0, 0, 0, 0]) }.ok()?;
        let answer = exchange(address, socket, question);
        // SAFETY: ours, and not used any more.
        let _ = unsafe { syscall(nr::CLOSE, [socket, 0, 0, 0, 0, 0]) };
        if answer.is_none() {
            self.address = None;
        }
        answer
    }
}

fn exchange(address: &Address, socket: usize, question: &[u8]) -> Option<&'static CStr> {
    let call = |number, args| loop {
        // SAFETY: what is pointed to below lives across the calls and is as long as said.
        match unsafe { syscall(number, args) } {
            Err(EINTR) => {}
            result => break result.ok(),
        }
    };
    for option in TIMEOUTS {
        let time = &raw const PATIENCE as usize;
        call(nr::SETSOCKOPT, [socket, SOL_SOCKET, option, time, size_of::<[u64; 2]>(), 0])?;
    }
    call(nr::CONNECT, [socket, &raw const *address as usize, size_of::<Address>(), 0, 0, 0])?;
    call(nr::SENDTO, [socket, question.as_ptr() as usize, question.len(), MSG_NOSIGNAL, 0, 0])?;
    let place = ANSWER.0.get() as usize;
    let len = call(nr::RECVFROM, [socket, place, MESSAGE_MAX, 0, 0, 0])?;
    // SAFETY: the buffer, under the linker's lock; the kernel filled `len` bytes of it.
    let answer = unsafe { &*ANSWER.0.get() }.get(..len)?;
    CStr::from_bytes_until_nul(answer).ok()
}
