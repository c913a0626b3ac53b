//! A descriptor that others hold, too, and may have made non-blocking: it is waited for all the same.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// See the module. For threads that may wait.
#[derive(Debug)]
pub struct Patient(pub File);

impl Patient {
    fn until<T>(&mut self, ready: PollFlags, mut act: impl FnMut(&mut File) -> io::Result<T>) -> io::Result<T> {
        loop {
            match act(&mut self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let _ = poll(&mut [PollFd::new(self.0.as_fd(), ready)], PollTimeout::NONE);
                }
                done => return done,
            }
        }
    }
}

impl Read for Patient {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.until(PollFlags::POLLIN, |file| file.read(bytes))
    }
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.until(PollFlags::POLLOUT, |file| file.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

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
        Patient(reader.into()).read_to_end(&mut read).unwrap();
        write.join().unwrap();
        assert!(read == all);
    }
}
