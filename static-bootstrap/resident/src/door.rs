//! The agent of this node: gives sockets on which memory servers answer, and hears why a program ends.

use sys::resident::{ASK, DESCRIPTORS, DOOR, Failure, Grant, PLACE_MAX, SERVERS};
use sys::syscall::{nr, syscall};

use super::{call, settings};

const AF_UNIX: u16 = 1;
const SEQPACKET_CLOEXEC: usize = 5 | 0o2_000_000;
const SOL_SOCKET: usize = 1;
const SO_RCVTIMEO: usize = 20;
const SO_SNDTIMEO: usize = 21;
const MSG_NOSIGNAL: usize = 0x4000;
const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
/// The agent connects to every server meanwhile.
const PATIENCE: u64 = 30;
const FDS: usize = SERVERS * DESCRIPTORS;

/// `struct sockaddr_un` (unix(7)).
#[repr(C)]
struct Address {
    family: u16,
    path: [u8; 108],
}

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

/// Gives up sending and receiving after so many seconds.
pub(super) fn set_patience(socket: i32, seconds: u64) {
    let time = [seconds, 0];
    for option in [SO_RCVTIMEO, SO_SNDTIMEO] {
        let args = [socket as usize, SOL_SOCKET, option, &raw const time as usize, size_of_val(&time), 0];
        // SAFETY: a `struct timeval` of that size.
        let _ = unsafe { syscall(nr::SETSOCKOPT, args) };
    }
}

fn connect() -> Result<i32, u32> {
    let place = &settings::get().place;
    let len = place.iter().position(|byte| *byte == 0).unwrap_or(PLACE_MAX);
    let mut address = Address { family: AF_UNIX, path: [0; 108] };
    let name = place[..len].iter().chain(b"/").chain(DOOR.as_bytes());
    address.path.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
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

/// Asks for the sockets.
pub(super) fn ask() -> Result<Granted, u32> {
    let door = connect()?;
    send(door, ASK.as_ptr() as usize, ASK.len())?;
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

/// Tells why this program ends: over a door that is open, or another.
pub(super) fn tell(door: i32, failure: &Failure) {
    let door = if door >= 0 { Ok(door) } else { connect() };
    if let Ok(door) = door {
        let _ = send(door, &raw const *failure as usize, size_of::<Failure>());
    }
}
