//! The agent of this node: gives sockets on which memory servers answer, and hears why a program ends.

use sys::resident::{AGAIN, ASK, Again, DESCRIPTORS, DOOR, Failure, Grant, SERVERS};
use sys::socket::{AF_UNIX, Address, MSG_CMSG_CLOEXEC, MSG_NOSIGNAL, SEQPACKET_CLOEXEC, SOL_SOCKET, TIMEOUTS};
use sys::syscall::{nr, syscall};

use super::{call, settings};

/// The agent connects to every server meanwhile. Milliseconds.
const PATIENCE: u64 = 30_000;
const FDS: usize = SERVERS * DESCRIPTORS;

/// `struct msghdr` (recvmsg(2)).
#[repr(C)]
pub(super) struct Message {
    pub(super) name: usize,
    pub(super) name_len: usize,
    pub(super) vector: usize,
    pub(super) count: usize,
    pub(super) control: usize,
    pub(super) control_len: usize,
    pub(super) flags: usize,
}

/// What the agent gave.
pub(super) struct Granted {
    pub(super) grant: Grant,
    pub(super) fds: [i32; FDS],
    /// A file for [`sys::counts::Counts`].
    pub(super) counts: i32,
    /// The door itself, to be told a failure at.
    pub(super) door: i32,
}

impl Granted {
    /// Closes all, in the caller's table of descriptors.
    pub(super) fn close(&self) {
        let all = (self.grant.servers as usize * DESCRIPTORS).min(FDS);
        self.fds[..all].iter().chain([&self.door, &self.counts]).for_each(|fd| call::close(*fd));
    }
}

/// Gives up sending and receiving after so many milliseconds.
pub(super) fn set_patience(socket: i32, milliseconds: u64) {
    let time = [milliseconds / 1000, milliseconds % 1000 * 1000];
    for option in TIMEOUTS {
        let args = [socket as usize, SOL_SOCKET, option, &raw const time as usize, size_of_val(&time), 0];
        // SAFETY: a `struct timeval` of that size.
        let _ = unsafe { syscall(nr::SETSOCKOPT, args) };
    }
}

/// Where it is.
pub(super) fn address() -> Option<Address> {
    Address::new(settings::get().place(), DOOR)
}

fn connect() -> Result<i32, u32> {
    let address = address().ok_or(call::EINVAL)?;
    // SAFETY: integers, then an address of that size.
    unsafe {
        let socket = syscall(nr::SOCKET, [AF_UNIX.into(), SEQPACKET_CLOEXEC, 0, 0, 0, 0])?;
        set_patience(socket as i32, PATIENCE);
        let connected = syscall(nr::CONNECT, [socket, &raw const address as usize, size_of::<Address>(), 0, 0, 0]);
        connected.inspect_err(|_| call::close(socket as i32))?;
        Ok(socket as i32)
    }
}

fn send(door: i32, bytes: usize, len: usize) -> Result<(), u32> {
    // SAFETY: the callers give what is there, of that length.
    unsafe { syscall(nr::SENDTO, [door as usize, bytes, len, MSG_NOSIGNAL, 0, 0]) }.map(drop)
}

/// Asks for the sockets; `question`: what for.
pub(super) fn ask(question: [u8; 8]) -> Result<Granted, u32> {
    let door = connect()?;
    send(door, question.as_ptr() as usize, question.len()).inspect_err(|_| call::close(door))?;
    answer(door)
}

/// Asks for those of servers that were lost (a bit each), through a door of its own, which has [`answer`] when it [`is_answered`].
pub(super) fn ask_again(lost: u32) -> Result<i32, u32> {
    let door = connect()?;
    let question = Again { asked: AGAIN, lost: lost.into() };
    send(door, &raw const question as usize, size_of::<Again>()).inspect_err(|_| call::close(door))?;
    Ok(door)
}

/// Whether something can be read there, if only the end.
pub(super) fn is_answered(door: i32) -> bool {
    is_answered_within(door, 0)
}

fn is_answered_within(door: i32, milliseconds: usize) -> bool {
    const POLLIN: u32 = 1;
    let mut polled = [door as u32, POLLIN];
    // SAFETY: one `struct pollfd`.
    let found = unsafe { syscall(nr::POLL, [polled.as_mut_ptr() as usize, 1, milliseconds, 0, 0, 0]) };
    found == Ok(1)
}

/// The sockets that were asked for.
pub(super) fn answer(door: i32) -> Result<Granted, u32> {
    receive(door).inspect_err(|_| call::close(door))
}

fn receive(door: i32) -> Result<Granted, u32> {
    // SAFETY: integers and arrays of them, for which zero is a value.
    let mut granted: Granted = unsafe { core::mem::zeroed() };
    granted.door = door;
    let vector = [&raw mut granted.grant as usize, size_of::<Grant>()];
    // `struct cmsghdr`: length, level and type in one word; then the descriptors.
    let mut control = [0u64; 2 + FDS / 2 + 1];
    let mut message = Message {
        name: 0,
        name_len: 0,
        vector: &raw const vector as usize,
        count: 1,
        control: control.as_mut_ptr() as usize,
        control_len: size_of_val(&control),
        flags: 0,
    };
    let args = [door as usize, &raw mut message as usize, MSG_CMSG_CLOEXEC, 0, 0, 0];
    // SAFETY: a message whose parts are there for as long as the call takes.
    let len = unsafe { syscall(nr::RECVMSG, args) }?;
    let servers = granted.grant.servers as usize;
    let expected = 16 + (servers * DESCRIPTORS + 1) * 4;
    if len != size_of::<Grant>()
        || granted.grant.asked != ASK
        || servers == 0
        || servers > SERVERS
        || control[0] as usize != expected
    {
        return Err(call::EINVAL);
    }
    let given = |nth: usize| (control[2 + nth / 2] >> (nth % 2 * 32)) as i32;
    for (nth, fd) in granted.fds.iter_mut().enumerate().take(servers * DESCRIPTORS) {
        *fd = given(nth);
    }
    granted.counts = given(servers * DESCRIPTORS);
    Ok(granted)
}

/// Tells a failure at a door that is open.
pub(super) fn tell(door: i32, failure: &Failure) -> Result<(), u32> {
    send(door, &raw const *failure as usize, size_of::<Failure>())
}

/// Tells why this program ends, over a door that is open or another, and waits until the agent has passed it on, which closes it then: who hears of the end first may not
/// listen any more.
pub(super) fn tell_last(door: i32, failure: &Failure) {
    const PATIENCE: usize = 3000;
    let door = if door >= 0 { Ok(door) } else { connect() };
    if let Ok(door) = door
        && tell(door, failure).is_ok()
    {
        is_answered_within(door, PATIENCE);
    }
}
