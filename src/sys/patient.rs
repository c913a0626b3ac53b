//! A descriptor to write to that others hold, too, and may have made non-blocking: it is waited for all the same.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// See the module. For threads that may wait.
#[derive(Debug)]
pub struct Patient(pub File);

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let _ = poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLOUT)], PollTimeout::NONE);
                }
                done => return done,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;
    use crate::sys::stdin::Stdin;

    #[test]
    fn a_non_blocking_pipe_is_waited_for() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let all: Vec<u8> = (0..1 << 20).map(|at| at as u8).collect();
        let written = all.clone();
        let write = thread::spawn(move || {
            thread::sleep(Duration::from_millis(20));
            Patient(writer.into()).write_all(&written).unwrap();
        });
        let mut read = Vec::new();
        Stdin::new(Arc::new(reader.into()), Arc::new(true.into()), Arc::default()).read_to_end(&mut read).unwrap();
        write.join().unwrap();
        assert!(read == all);
    }
}
