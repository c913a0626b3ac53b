//! What the kernel knows of a TCP connection (`TCP_INFO` of tcp(7)).
#![allow(unsafe_code, reason = "getsockopt")]

use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use nix::libc::{self, tcp_info};

/// What was sent over a connection so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// Bytes that the peer's kernel has acknowledged.
    pub bytes: u64,
    /// Time in which the network was what the rest waited for: there was something to send, and room for it at the peer. In ticks of the
    /// kernel's clock, of 1 to 10 ms.
    pub carrying: Duration,
}

/// See [`Sent`]; `None` where it is no TCP connection.
pub fn sent(socket: impl AsFd) -> Option<Sent> {
    let info = info(socket)?;
    let carrying = Duration::from_micros(info.tcpi_busy_time.saturating_sub(info.tcpi_rwnd_limited));
    Some(Sent { bytes: info.tcpi_bytes_acked, carrying })
}

/// Whether the peer's kernel should have answered, and has said nothing for so long. Not that of a peer who only takes nothing, being stopped: it goes on saying
/// that there is no room. The kernel's own limit (TCP_USER_TIMEOUT) ends such a connection, too.
pub fn is_silent(socket: impl AsFd, patience: Duration) -> bool {
    /// Questions for room in a row that were not answered; the kernel asks more seldom each time.
    const UNANSWERED: u8 = 3;
    info(socket).is_some_and(|info| {
        let waits = info.tcpi_unacked > 0 || info.tcpi_probes >= UNANSWERED;
        waits && Duration::from_millis(info.tcpi_last_ack_recv.into()) >= patience
    })
}

fn info(socket: impl AsFd) -> Option<tcp_info> {
    let mut info = MaybeUninit::<tcp_info>::zeroed();
    let mut len = libc::socklen_t::try_from(size_of::<tcp_info>()).ok()?;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes, which are there.
    let done =
        unsafe { libc::getsockopt(socket, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len) };
    if done != 0 || (len as usize) < offset_of!(tcp_info, tcpi_sndbuf_limited) {
        return None;
    }
    // SAFETY: integers, all of them zero or written by the kernel.
    Some(unsafe { info.assume_init() })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_the_peer_has_is_counted() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut to = listener.accept().unwrap().0;
        let before = sent(&from).unwrap().bytes;
        from.write_all(&[0; 1000]).unwrap();
        to.read_exact(&mut [0; 1000]).unwrap();
        let begun = std::time::Instant::now();
        while sent(&from).unwrap().bytes < before + 1000 && begun.elapsed() < Duration::from_secs(5) {}
        assert_eq!(sent(&from).unwrap().bytes, before + 1000);
        assert_eq!(sent(UnixStream::pair().unwrap().0), None);
    }

    #[test]
    fn who_takes_nothing_is_not_silent() {
        let patience = Duration::from_millis(300);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut from = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _to = listener.accept().unwrap().0;
        from.set_write_timeout(Some(2 * patience)).unwrap();
        while from.write(&[0; 1 << 16]).is_ok() {}
        std::thread::sleep(4 * patience);
        assert!(!is_silent(&from, patience));
        assert!(!is_silent(UnixStream::pair().unwrap().0, Duration::ZERO));
    }
}
