//! A connection to a memory server: questions, and pages.

use sys::page::{Bits, HEAD, Head, PAGE, PREFIX, SPAN, count, op, prefix, runs};
use sys::resident::cause;
use sys::syscall::{nr, syscall};

use super::{call, door, fatal};

const MSG_NOSIGNAL: usize = 0x4000;
const MSG_WAITALL: usize = 0x100;
/// A server that does not answer for so many seconds is lost.
const PATIENCE: u64 = 4;
/// Prefix and header, and every other page by itself.
const VECTOR: usize = 2 + 128;

#[derive(Clone, Copy)]
pub(super) struct Link {
    fd: i32,
    server: u32,
    sequence: u32,
}

/// What is sent before pages, in one piece.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Opening {
    prefix: [u8; PREFIX],
    head: Head,
}

/// Buffers of a scattered read or write, as the kernel takes them.
struct Vector {
    parts: [[usize; 2]; VECTOR],
    len: usize,
}

impl Vector {
    fn new(opening: &mut Opening) -> Vector {
        let mut vector = Vector { parts: [[0; 2]; VECTOR], len: 0 };
        vector.push(&raw mut *opening as usize, PREFIX + HEAD);
        vector
    }

    fn push(&mut self, at: usize, len: usize) {
        if let Some(part) = self.parts.get_mut(self.len) {
            *part = [at, len];
            self.len += 1;
        }
    }

    /// The pages of a span that lies at `base`.
    fn pages(&mut self, base: usize, pages: Bits) {
        runs(pages).for_each(|(first, count)| self.push(base + first * PAGE, count * PAGE));
    }

    fn bytes(&self) -> usize {
        self.parts[..self.len].iter().map(|part| part[1]).sum()
    }
}

impl Link {
    pub(super) fn new(fd: i32, server: u32) -> Link {
        door::set_patience(fd, PATIENCE);
        Link { fd, server, sequence: 0 }
    }

    pub(super) fn fd(&self) -> i32 {
        self.fd
    }

    /// Asks for pages of a span; they come to their places in the span at `base`.
    pub(super) fn get(&mut self, span: u64, pages: Bits, base: usize) {
        self.ask(op::GET, span, pages, [0; 4], 0);
        let mut opening = Opening::default();
        let mut vector = Vector::new(&mut opening);
        vector.pages(base, pages);
        self.transfer(nr::RECVMSG, &vector, MSG_WAITALL);
        // What was kept there must be there.
        self.check(&opening, count(&pages));
        if opening.head.op != op::GOT || opening.head.data != pages {
            self.altered();
        }
    }

    /// Gives pages away; answered with [`Link::given`].
    pub(super) fn give(&mut self, span: u64, data: Bits, zero: Bits, base: usize) {
        self.ask(op::PUT, span, data, zero, base);
    }

    /// Waits for the answer to the oldest gift that was not answered.
    pub(super) fn given(&mut self, open: u32) {
        let mut opening = Opening::default();
        let vector = Vector::new(&mut opening);
        self.transfer(nr::RECVMSG, &vector, MSG_WAITALL);
        let last = self.sequence;
        self.sequence = last.wrapping_sub(open - 1);
        self.check(&opening, 0);
        self.sequence = last;
        match opening.head {
            Head { op: op::DONE, .. } => {}
            Head { op: op::FULL, data, .. } => fatal::say(cause::FULL, self.server, [data[0], data[1]]),
            _ => self.altered(),
        }
    }

    fn ask(&mut self, op: u32, span: u64, data: Bits, zero: Bits, base: usize) {
        self.sequence = self.sequence.wrapping_add(1);
        let body = if base == 0 { [0; 4] } else { data };
        let head = Head { op, sequence: self.sequence, span, data, zero };
        let mut opening = Opening { prefix: prefix(count(&body) * PAGE), head };
        let mut vector = Vector::new(&mut opening);
        vector.pages(base, body);
        self.transfer(nr::SENDMSG, &vector, MSG_NOSIGNAL);
    }

    fn check(&self, opening: &Opening, pages: usize) {
        if opening.prefix != prefix(pages * PAGE) || opening.head.sequence != self.sequence {
            self.altered();
        }
    }

    fn altered(&self) -> ! {
        fatal::say(cause::ALTERED, self.server, [0; 2])
    }

    fn lost(&self, errno: u32) -> ! {
        let cause = if errno == call::EAGAIN { cause::SILENT } else { cause::LOST };
        fatal::say(cause, self.server, [errno.into(), super::pager::remote_pages(self.server)])
    }

    /// Sends or receives all of it.
    fn transfer(&self, number: usize, vector: &Vector, flags: usize) {
        let (mut parts, len) = (vector.parts, vector.len);
        let (mut first, mut left) = (0, vector.bytes());
        while left > 0 {
            let message = door::Message {
                name: 0,
                name_len: 0,
                vector: parts[first..].as_ptr() as usize,
                count: len - first,
                control: 0,
                control_len: 0,
                flags: 0,
            };
            // SAFETY: buffers that are there for as long as the call takes, for the kernel to read or to write.
            let moved = unsafe { syscall(number, [self.fd as usize, &raw const message as usize, flags, 0, 0, 0]) };
            let mut moved = match moved {
                Ok(0) => self.lost(0),
                Ok(moved) => moved,
                Err(call::EINTR) => continue,
                Err(errno) => self.lost(errno),
            };
            left -= moved.min(left);
            while let Some(part) = parts.get_mut(first).filter(|part| part[1] <= moved && part[1] > 0) {
                moved -= part[1];
                first += 1;
            }
            if let Some(part) = parts.get_mut(first) {
                (part[0], part[1]) = (part[0] + moved, part[1].wrapping_sub(moved));
            }
        }
    }
}

const _: () = assert!(SPAN / PAGE == 256 && VECTOR == 130);
