//! Standard input that others read, too, before and after: only while it is wanted and, if it is a terminal, ours, so that nothing is taken that is for somebody else, and nobody stops us for that.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{SigSet, Signal};
use rustix::io::Errno;

/// How soon it is noticed that nothing more is wanted, or whose the terminal is now; milliseconds.
pub const LOOK: u16 = 100;

/// See the module. For a thread that may wait; others may have made the descriptor non-blocking.
#[derive(Debug)]
pub struct Stdin {
    from: Arc<File>,
    may: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Stdin {
    /// `may`: not set while it is somebody else's and this process cannot see that. `over`: set when nothing more is wanted of it; it is at its
    /// end then.
    pub fn new(from: Arc<File>, may: Arc<AtomicBool>, over: Arc<AtomicBool>) -> Stdin {
        Stdin { from, may, over }
    }

    fn is_ours(&self) -> bool {
        self.may.load(Ordering::Relaxed) && !is_others(&self.from)
    }
}

/// Whether another process group has a terminal: the kernel stops who reads it then. False where it is none, or not this session's own.
pub fn is_others(terminal: impl AsFd) -> bool {
    rustix::termios::tcgetpgrp(terminal).is_ok_and(|group| group != rustix::process::getpgrp())
}

impl Read for Stdin {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        // Whoever loses the terminal between a look and the read gets an error then, and is not stopped.
        let _ = SigSet::from(Signal::SIGTTIN).thread_block();
        // No room is no end.
        while !bytes.is_empty() && !self.over.load(Ordering::Relaxed) {
            if !self.is_ours() {
                std::thread::sleep(Duration::from_millis(LOOK.into()));
                continue;
            }
            // Nobody could call a thread back that waits in the read. A file is always ready.
            let ready = match poll(&mut [PollFd::new(self.from.as_fd(), PollFlags::POLLIN)], LOOK) {
                Err(nix::Error::EINTR) => false,
                polled => polled? > 0,
            };
            if !ready || self.over.load(Ordering::Relaxed) || !self.is_ours() {
                continue;
            }
            match self.from.read(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) && is_others(&self.from) => {}
                read => {
                    // A terminal says only once that its end was typed; whoever fills a buffer asks again.
                    if matches!(read, Ok(0)) {
                        self.over.store(true, Ordering::Relaxed);
                    }
                    return read;
                }
            }
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc;
    use std::thread;

    use rustix::fs::{Mode, OFlags};
    use rustix::pipe::{PipeFlags, pipe_with};
    use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_written_afterwards_stays_there() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        later_readers_get_the_rest(reader.into(), writer.into());
    }

    /// And who types there.
    fn terminal() -> (File, File) {
        let typist = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        unlockpt(&typist).unwrap();
        let name = ptsname(&typist, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal = File::from(rustix::fs::open(name, flags, Mode::empty()).unwrap());
        (terminal, typist.into())
    }

    #[test]
    fn what_is_typed_afterwards_stays_there() {
        let (terminal, typist) = terminal();
        later_readers_get_the_rest(terminal, typist);
    }

    #[test]
    fn an_end_that_is_typed_is_the_end() {
        let (terminal, mut typist) = terminal();
        let mut stdin = Stdin::new(Arc::new(terminal), Arc::new(true.into()), Arc::default());
        typist.write_all(b"first\n\x04second\n").unwrap();
        assert_eq!([64, 0, 64, 64].map(|len| stdin.read(&mut [0; 64][..len]).unwrap()), [6, 0, 0, 0]);
    }

    fn later_readers_get_the_rest(from: File, mut typist: File) {
        let (from, over) = (Arc::new(from), Arc::new(AtomicBool::new(false)));
        let mut stdin = Stdin::new(Arc::clone(&from), Arc::new(true.into()), Arc::clone(&over));
        let (tell, told) = mpsc::channel();
        let reader = thread::spawn(move || {
            let mut bytes = [0; 64];
            for _ in 0..2 {
                tell.send(stdin.read(&mut bytes).unwrap()).unwrap();
            }
        });
        typist.write_all(b"first\n").unwrap();
        assert_eq!(told.recv_timeout(DEADLINE), Ok(6));
        over.store(true, Ordering::Relaxed);
        assert_eq!(told.recv_timeout(DEADLINE), Ok(0));
        reader.join().unwrap();
        typist.write_all(b"second\n").unwrap();
        let mut bytes = [0; 64];
        let len = { &*from }.read(&mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"second\n");
    }
}
