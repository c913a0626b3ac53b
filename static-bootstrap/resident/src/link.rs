//! A connection to a memory server: questions, and pages.

use sys::blake3::Hasher;
use sys::page::{Bits, HEAD, Head, Layout, PAGE, PIECE, PREFIX, TAG, count, op, pieces, prefix};
use sys::resident::{Link as Granted, cause};
use sys::socket::MSG_NOSIGNAL;
use sys::syscall::{nr, syscall};

use super::{call, counts, door, processors};

const MSG_WAITALL: usize = 0x100;
const MSG_MORE: usize = 0x8000;
const MSG_DONTWAIT: usize = 0x40;
/// So often an answer is looked for before its receiver sleeps: to be woken takes longer than most answers.
const LOOKS: usize = 100;
/// A server from which nothing comes, and to which nothing goes, for so many milliseconds at a time is looked at; it is lost after so many such times, which must have
/// been so many nanoseconds: on a busy machine each takes longer, and who was stopped himself has not waited.
const PATIENCE: u64 = 250;
const IDLE: usize = 8;
const SILENT: u64 = 3_250_000_000;
/// Prefix and header, every other page by itself, two tags.
const VECTOR: usize = 1 + 128 + 2;

/// Why a server cannot be used any more: a [`cause`], and its detail.
pub(super) struct Gone {
    pub(super) cause: u32,
    pub(super) detail: [u64; 2],
}

const ALTERED: Gone = Gone { cause: cause::ALTERED, detail: [0; 2] };

#[derive(Clone, Copy)]
pub(super) struct Link {
    fd: i32,
    server: u32,
    sequence: u32,
    /// Keys and counters of what is sent and received, between hosts.
    tags: Option<[Tags; 2]>,
}

/// One direction's tags, as `net/auth.rs` makes them.
#[derive(Clone, Copy)]
struct Tags {
    key: [u8; 32],
    counter: u64,
}

impl Tags {
    /// Of the next frame.
    fn header(&mut self, opening: &Opening) -> [u8; TAG] {
        self.counter += 1;
        let mut tagging = Tagging(Hasher::new(&self.key));
        // SAFETY: plain bytes, without any between them.
        tagging.0.update(unsafe { core::slice::from_raw_parts((&raw const *opening).cast::<u8>(), PREFIX + HEAD) });
        tagging.finish(self.counter, b"header")
    }
}

/// A tag under way.
struct Tagging(Hasher);

impl Tagging {
    /// These pages of a span come next.
    fn add(&mut self, base: Layout, pages: Bits) {
        for (_, at, count) in base.runs(pages) {
            // SAFETY: pages of a slot that is ours now, and all there.
            self.0.update(unsafe { core::slice::from_raw_parts(at as *const u8, count * PAGE) });
        }
    }

    fn finish(mut self, counter: u64, what: &[u8]) -> [u8; TAG] {
        self.0.update(&counter.to_le_bytes());
        self.0.update(what);
        self.0.tag()
    }
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

    /// Pages of a span.
    fn pages(&mut self, base: Layout, pages: Bits) {
        base.runs(pages).for_each(|(_, at, count)| self.push(at, count * PAGE));
    }

    fn bytes(&self) -> usize {
        self.parts[..self.len].iter().map(|part| part[1]).sum()
    }
}

impl Link {
    pub(super) const NONE: Link = Link { fd: -1, server: 0, sequence: 0, tags: None };

    pub(super) fn new(fd: i32, server: u32, granted: &Granted) -> Link {
        door::set_patience(fd, PATIENCE);
        let tags = [granted.send, granted.receive].map(|key| Tags { key, counter: granted.counter });
        Link { fd, server, sequence: 0, tags: (granted.tagged != 0).then_some(tags) }
    }

    pub(super) fn fd(&self) -> i32 {
        self.fd
    }

    /// Asks for pages of a span; they come to their places in `base`.
    pub(super) fn get(&mut self, span: u64, pages: Bits, base: Layout) -> Result<(), Gone> {
        let sequence = self.want(span, pages)?;
        self.got(sequence, pages, base)
    }

    /// Asks for pages of a span; answered with [`Link::got`], in order.
    pub(super) fn want(&mut self, span: u64, pages: Bits) -> Result<u32, Gone> {
        self.ask(op::GET, span, pages, [0; 4], Layout::NOWHERE, 0)?;
        Ok(self.sequence)
    }

    /// Waits for the pages that were asked for as `sequence`; they come to their places in `base`.
    pub(super) fn got(&mut self, sequence: u32, pages: Bits, base: Layout) -> Result<(), Gone> {
        let answer = self.hear(base, pages)?;
        // What was kept there must be there.
        if answer.op != op::GOT || answer.data != pages || answer.sequence != sequence {
            return Err(ALTERED);
        }
        counts::received(self.server, count(&pages));
        Ok(())
    }

    /// Begins with what another client keeps now.
    pub(super) fn copy(&mut self, client: [u64; 2]) -> Result<(), Gone> {
        let mut from = 0;
        loop {
            self.ask(op::COPY, from, [client[0], client[1], 0, 0], [0; 4], Layout::NOWHERE, 0)?;
            match self.answered(1)? {
                Head { op: op::DONE, .. } => return Ok(()),
                Head { op: op::COPIED, data, .. } if data[0] > from => from = data[0],
                _ => return Err(ALTERED),
            }
        }
    }

    /// Gives pages away; answered with [`Link::given`]. `more`: they need not leave before what is given next.
    pub(super) fn give(&mut self, span: u64, data: Bits, zero: Bits, base: Layout, more: bool) -> Result<(), Gone> {
        self.ask(op::PUT, span, data, zero, base, if more { MSG_MORE } else { 0 })?;
        counts::sent(self.server, count(&data));
        Ok(())
    }

    /// Tells of pages that are to be written into what is shared with the server; answered with [`Link::given`].
    pub(super) fn take(&mut self, span: u64, data: Bits, zero: Bits) -> Result<(), Gone> {
        self.ask(op::TAKE, span, data, zero, Layout::NOWHERE, 0)
    }

    /// Waits for the answer to the oldest of `open` gifts.
    pub(super) fn given(&mut self, open: u32) -> Result<(), Gone> {
        let answer = self.answered(open)?;
        if answer.op == op::DONE { Ok(()) } else { Err(ALTERED) }
    }

    /// The answer to the oldest of so many questions, without pages.
    fn answered(&mut self, open: u32) -> Result<Head, Gone> {
        let answer = self.hear(Layout::NOWHERE, [0; 4])?;
        match answer {
            _ if answer.sequence != self.sequence.wrapping_sub(open - 1) => Err(ALTERED),
            Head { op: op::FULL, data, .. } => Err(Gone { cause: cause::FULL, detail: [data[0], data[1]] }),
            _ => Ok(answer),
        }
    }

    fn ask(&mut self, op: u32, span: u64, data: Bits, zero: Bits, base: Layout, flags: usize) -> Result<(), Gone> {
        self.sequence = self.sequence.wrapping_add(1);
        let body = if op == op::PUT { data } else { [0; 4] };
        let head = Head { op, sequence: self.sequence, span, data, zero };
        let mut opening = Opening { prefix: prefix(count(&body) * PAGE), head };
        let mut vector = Vector::new(&mut opening);
        let Some([ours, _]) = &mut self.tags else {
            vector.pages(base, body);
            return transfer(self.fd, nr::SENDMSG, &vector, MSG_NOSIGNAL | flags);
        };
        let (mut header, mut tagging) = (ours.header(&opening), Tagging(Hasher::new(&ours.key)));
        vector.push(header.as_mut_ptr() as usize, TAG);
        for (nth, piece) in pieces(body, PIECE / PAGE).enumerate() {
            if nth > 0 {
                transfer(self.fd, nr::SENDMSG, &vector, MSG_NOSIGNAL | MSG_MORE)?;
                vector.len = 0;
            }
            tagging.add(base, piece);
            vector.pages(base, piece);
        }
        let mut tag = tagging.finish(ours.counter, b"body");
        if body != [0; 4] {
            vector.push(tag.as_mut_ptr() as usize, TAG);
        }
        transfer(self.fd, nr::SENDMSG, &vector, MSG_NOSIGNAL | flags)
    }

    /// The next answer, with so many pages.
    fn hear(&mut self, base: Layout, pages: Bits) -> Result<Head, Gone> {
        let (mut opening, mut tags) = (Opening::default(), [[0; TAG]; 2]);
        let [header, body] = tags.each_mut().map(|tag| tag.as_mut_ptr() as usize);
        let mut vector = Vector::new(&mut opening);
        if let Some([_, theirs]) = &mut self.tags {
            vector.push(header, TAG);
            let (mut last, mut tagging) = ([0; 4], Tagging(Hasher::new(&theirs.key)));
            for (nth, piece) in pieces(pages, PIECE / PAGE).enumerate() {
                if nth > 0 {
                    transfer(self.fd, nr::RECVMSG, &vector, MSG_WAITALL)?;
                    tagging.add(base, last);
                    vector.len = 0;
                }
                vector.pages(base, piece);
                last = piece;
            }
            let has_body = pages != [0; 4];
            if has_body {
                vector.push(body, TAG);
            }
            transfer(self.fd, nr::RECVMSG, &vector, MSG_WAITALL)?;
            tagging.add(base, last);
            let right = theirs.header(&opening) == tags[0];
            if !right || has_body && tagging.finish(theirs.counter, b"body") != tags[1] {
                return Err(ALTERED);
            }
        } else {
            vector.pages(base, pages);
            transfer(self.fd, nr::RECVMSG, &vector, MSG_WAITALL)?;
        }
        if opening.prefix != prefix(count(&pages) * PAGE) {
            return Err(ALTERED);
        }
        Ok(opening.head)
    }
}

fn lost(errno: u32) -> Gone {
    let cause = if errno == call::EAGAIN { cause::SILENT } else { cause::LOST };
    Gone { cause, detail: [errno.into(), 0] }
}

/// Bytes that the peer's kernel has of us, and we of it: a server on a slow way is not silent while these become more.
fn progress(fd: i32) -> u64 {
    const IPPROTO_TCP: usize = 6;
    const TCP_INFO: usize = 11;
    /// Words of `struct tcp_info`, and where those are that count.
    const WORDS: usize = 17;
    const ACKED: usize = 15;
    const RECEIVED: usize = 16;
    let (mut info, mut len) = ([0u64; WORDS], size_of::<[u64; WORDS]>() as u32);
    let args = [fd as usize, IPPROTO_TCP, TCP_INFO, info.as_mut_ptr() as usize, &raw mut len as usize, 0];
    // SAFETY: room for as many bytes as `len` says.
    let _ = unsafe { syscall(nr::GETSOCKOPT, args) };
    info[ACKED].wrapping_add(info[RECEIVED])
}

/// Sends or receives all of it.
fn transfer(fd: i32, number: usize, vector: &Vector, flags: usize) -> Result<(), Gone> {
    let (mut parts, len) = (vector.parts, vector.len);
    let (mut first, mut left, mut looks) = (0, vector.bytes(), if number == nr::RECVMSG { LOOKS } else { 0 });
    let (mut idle, mut since, mut before) = (0, 0, None);
    while left > 0 {
        let flags = if looks > 0 { flags | MSG_DONTWAIT } else { flags };
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
        let result = unsafe { syscall(number, [fd as usize, &raw const message as usize, flags, 0, 0, 0]) };
        let mut moved = match result {
            Ok(0) => return Err(lost(0)),
            Ok(moved) => moved,
            Err(call::EINTR) => continue,
            Err(call::EAGAIN) if looks > 0 => {
                looks -= 1;
                processors::give_way();
                continue;
            }
            Err(call::EAGAIN) if idle < IDLE || counts::clock() - since < SILENT => {
                let now = progress(fd);
                if before.replace(now) != Some(now) {
                    (idle, since) = (0, counts::clock() - PATIENCE * 1_000_000);
                }
                idle += 1;
                continue;
            }
            Err(errno) => return Err(lost(errno)),
        };
        idle = 0;
        left -= moved.min(left);
        looks = if looks > 0 { LOOKS } else { 0 };
        while let Some(part) = parts.get_mut(first).filter(|part| part[1] <= moved && part[1] > 0) {
            moved -= part[1];
            first += 1;
        }
        if let Some(part) = parts.get_mut(first) {
            (part[0], part[1]) = (part[0] + moved, part[1].wrapping_sub(moved));
        }
    }
    Ok(())
}
