//! The output streams of a job's ranks on this node. All are in one epoll set and read into one buffer: a stream costs a pipe and a
//! place in the set, and no work while it is silent.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use async_channel::Receiver;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rustix::pipe::PipeFlags;
use smol::Async;
use smol::future::FutureExt;

use crate::launch::window::Credit;
use crate::net::wire::control::Stream;

/// Bytes of output in one frame, at most.
const OUTPUT: usize = 64 << 10;

/// See the module.
pub(super) struct Streams {
    set: Epoll,
    /// The set itself, readable while one of the streams is.
    ready: Async<OwnedFd>,
    /// The streams that are not at their end, by [`key`].
    open: RefCell<HashMap<u64, File>>,
}

fn key(rank: u32, stream: Stream) -> u64 {
    u64::from(rank) << 1 | u64::from(stream == Stream::Err)
}

impl Streams {
    /// No streams.
    ///
    /// # Errors
    /// No descriptor is free.
    pub(super) fn new() -> io::Result<Streams> {
        let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let ready = Async::new_nonblocking(set.0.try_clone()?)?;
        Ok(Streams { set, ready, open: RefCell::default() })
    }

    /// A stream of a rank: the end to write to.
    ///
    /// # Errors
    /// No descriptor is free.
    pub(super) fn add(&self, rank: u32, stream: Stream) -> io::Result<OwnedFd> {
        // Blocking: one is only read when something is there, and only here.
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let key = key(rank, stream);
        self.set.add(&reader, EpollEvent::new(EpollFlags::EPOLLIN, key))?;
        self.open.borrow_mut().insert(key, File::from(reader));
        Ok(writer)
    }

    /// Gives what comes to `pass`, as far as there is credit, until no more streams will be added (`complete` is closed) and all are at their end.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub(super) async fn relay(
        &self,
        complete: &Receiver<()>,
        credit: &Credit,
        pass: impl AsyncFn(u32, Stream, Vec<u8>),
    ) -> io::Result<()> {
        let mut bytes = vec![0; OUTPUT];
        loop {
            let mut events = [EpollEvent::empty(); 64];
            let count = self.set.wait(&mut events, EpollTimeout::ZERO)?;
            for event in &events[..count] {
                let room = credit.room(OUTPUT).await;
                if let Some(got) = self.read(event, &mut bytes[..room]) {
                    credit.spend(got);
                    let stream = if event.data() & 1 == 0 { Stream::Out } else { Stream::Err };
                    pass((event.data() >> 1) as u32, stream, bytes[..got].to_vec()).await;
                }
            }
            if count > 0 {
                continue;
            }
            if complete.is_closed() && self.open.borrow().is_empty() {
                return Ok(());
            }
            let completed = async {
                // Nothing is ever sent. Once it is closed, only streams are waited for.
                if complete.is_closed() {
                    smol::future::pending::<()>().await;
                }
                let _ = complete.recv().await;
                Ok(())
            };
            self.ready.readable().or(completed).await?;
        }
    }

    /// What a stream that is ready has; `None` at its end, which closes it.
    fn read(&self, event: &EpollEvent, bytes: &mut [u8]) -> Option<usize> {
        let mut open = self.open.borrow_mut();
        let mut reader = open.get(&event.data())?;
        if event.events().contains(EpollFlags::EPOLLIN)
            && let Ok(got @ 1..) = reader.read(bytes)
        {
            return Some(got);
        }
        // Closed, it would linger in the set for as long as a child that is about to exec has a copy.
        let _ = self.set.delete(reader);
        open.remove(&event.data());
        None
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use async_channel::bounded;

    use super::*;

    #[test]
    fn everything_is_passed_on_until_all_streams_have_ended() {
        let streams = Streams::new().unwrap();
        let (complete, completed) = bounded::<()>(1);
        let mut writers: Vec<File> = Vec::new();
        for (rank, stream) in [(0, Stream::Out), (0, Stream::Err), (7, Stream::Out)] {
            writers.push(streams.add(rank, stream).unwrap().into());
        }
        let heard = RefCell::new(Vec::new());
        let pass =
            async |rank, stream, bytes| heard.borrow_mut().push((rank, stream, String::from_utf8(bytes).unwrap()));
        let write = async {
            writers[2].write_all(b"seven").unwrap();
            while heard.borrow().is_empty() {
                smol::future::yield_now().await;
            }
            writers[0].write_all(b"out").unwrap();
            writers[1].write_all(b"err").unwrap();
            writers.clear();
            complete.close();
        };
        let (relayed, ()) =
            smol::block_on(smol::future::zip(streams.relay(&completed, &Credit::new(1 << 20), pass), write));
        relayed.unwrap();
        let mut heard = heard.take();
        assert_eq!(heard.remove(0), (7, Stream::Out, "seven".to_owned()));
        heard.sort_by_key(|(_, stream, _)| *stream as u32);
        assert_eq!(heard, [(0, Stream::Out, "out".to_owned()), (0, Stream::Err, "err".to_owned())]);
    }

    #[test]
    fn no_streams_end_when_no_more_will_come() {
        let (complete, completed) = bounded::<()>(1);
        let streams = Streams::new().unwrap();
        let close = async {
            smol::future::yield_now().await;
            complete.close();
        };
        let none = async |_, _, _| panic!("nothing was written");
        smol::block_on(smol::future::zip(streams.relay(&completed, &Credit::new(0), none), close)).0.unwrap();
    }
}
