//! Unix sockets as the kernel's ABI has them (unix(7), socket(7), send(2), recv(2)).

pub const AF_UNIX: u16 = 1;
pub const SEQPACKET_CLOEXEC: usize = 5 | 0o2_000_000;
pub const SOL_SOCKET: usize = 1;
/// Time-outs, of receiving and sending.
pub const TIMEOUTS: [usize; 2] = [20, 21];
pub const MSG_NOSIGNAL: usize = 0x4000;
pub const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;

/// `struct sockaddr_un`.
#[repr(C)]
pub struct Address {
    family: u16,
    path: [u8; 108],
}

impl Address {
    /// Of a socket in a directory; `None`: its path is too long.
    pub fn new(directory: &[u8], name: &str) -> Option<Address> {
        let mut address = Address { family: AF_UNIX, path: [0; 108] };
        let path = directory.iter().chain(b"/").chain(name.as_bytes());
        // What follows stays NUL.
        let room = address.path.len() - 1;
        if directory.len() + 1 + name.len() > room {
            return None;
        }
        address.path.iter_mut().zip(path).for_each(|(to, from)| *to = *from);
        Some(address)
    }
}
