//! The memory server: what is answered to whom ([`Session`], without sockets), and the threads that carry it.

use std::rc::Rc;
use std::sync::Arc;
use std::thread;

use rustix::io::Errno;
use smol::{Async, LocalExecutor};

use super::store::{Full, Lease, NotCopied, Store};
use crate::error::{Context, Result};
use crate::net::auth::SessionKey;
use crate::net::direct::Direct;
use crate::net::link::LinkError;
use crate::net::welcome::{Arrival, welcome};
use crate::net::wire::control::Service;
use crate::net::wire::frame::FrameError;
use crate::net::wire::hello::Purpose;
use crate::net::wire::page::{Ask, Page};
use crate::sys::page::{Bits, PAGE, op, runs};
use crate::sys::resident::LINKS;
use crate::sys::span::Span;

/// Connections at a time: each costs a thread, and while it gives pages a span.
const CONNECTIONS: usize = 512 * LINKS;

/// One connection: nothing is answered before it said whose it is.
#[derive(Debug)]
pub struct Session {
    store: Arc<Store>,
    lease: Option<Lease>,
    here: bool,
}

/// What is answered: a header, and the pages of a span that are its body.
#[derive(Debug)]
pub struct Answer {
    pub page: Page,
    pub span: Option<Arc<Span>>,
}

impl Session {
    /// A connection to this store. `here`: of a client of this host.
    pub fn new(store: &Arc<Store>, here: bool) -> Session {
        Session { store: Arc::clone(store), lease: None, here }
    }

    /// Answers a question. `body`: a span with the pages that came beside it in their places.
    ///
    /// # Errors
    /// A question that a client does not ask; the connection is to be ended.
    pub fn handle(&mut self, page: &Page, ask: Ask, body: Option<Span>) -> Result<Answer, FrameError> {
        const NONE: Bits = [0; 4];
        let plain = |op, data| Ok(Answer { page: page.answer(op, data, NONE), span: None });
        let done = |result| match result {
            Ok(()) => plain(op::DONE, NONE),
            Err(Full { capacity, used }) => plain(op::FULL, [capacity, used, 0, 0]),
        };
        match (ask, &self.lease) {
            (Ask::Open { client, label }, None) => {
                let lease = self.store.open(client, label);
                let (capacity, used) = (lease.store().capacity(), lease.store().used());
                self.lease = Some(lease);
                let [one, other] = self.store.name();
                plain(op::OPENED, [capacity, used, one, other])
            }
            (Ask::Get { span, pages }, Some(lease)) => {
                let (span, data) = lease.get(span, pages).map_or((None, NONE), |(span, data)| (Some(span), data));
                let zero = std::array::from_fn(|at| pages[at] & !data[at]);
                Ok(Answer { page: page.answer(op::GOT, data, zero), span })
            }
            (Ask::Put { span, data, zero }, Some(lease)) => {
                let Some(body) = body else { return Err(FrameError::Header) };
                done(lease.put(span, data, zero, body))
            }
            (Ask::Share, Some(lease)) => {
                plain(op::SHARED, if self.here { lease.share().unwrap_or_default() } else { NONE })
            }
            (Ask::Take { span, data, zero }, Some(lease)) => done(lease.take(span, data, zero)),
            (Ask::Drop { span, spans }, Some(lease)) => {
                lease.forget(span, spans);
                plain(op::DONE, NONE)
            }
            (Ask::Copy { client, from }, Some(lease)) => match lease.copy(client, from) {
                Ok(Some(next)) => plain(op::COPIED, [next, 0, 0, 0]),
                Ok(None) => done(Ok(())),
                Err(NotCopied::Full(full)) => done(Err(full)),
                Err(NotCopied::Unknown) => Err(FrameError::Header),
            },
            _ => Err(FrameError::Header),
        }
    }
}

/// Serves one connection until its client is gone.
///
/// # Errors
/// The client broke the protocol, or memory for what it sends cannot be had.
fn serve(link: &mut Direct, store: &Arc<Store>, here: bool) -> Result<(), LinkError> {
    let mut session = Session::new(store, here);
    while let Some((page, len)) = link.receive()? {
        let ask = page.ask(len)?;
        let body = match ask {
            Ask::Put { data, .. } => {
                let mut span = store.spare()?;
                link.body(parts_mut(span.bytes_mut(), data))?;
                Some(span)
            }
            _ => None,
        };
        let answer = session.handle(&page, ask, body)?;
        let bytes = answer.span.as_ref().map_or(&[][..], |span| span.bytes());
        let part = |(first, count)| &bytes[first * PAGE..][..count * PAGE];
        let data = if answer.page.op == op::GOT { answer.page.data } else { Bits::default() };
        link.send(&answer.page, &runs(data).map(part).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// The pages `data` of a span, in order.
fn parts_mut(mut bytes: &mut [u8], data: Bits) -> Vec<&mut [u8]> {
    let (mut parts, mut at) = (Vec::new(), 0);
    for (first, count) in runs(data) {
        let (_, rest) = bytes.split_at_mut(first * PAGE - at);
        let (part, rest) = rest.split_at_mut(count * PAGE);
        parts.push(part);
        (bytes, at) = (rest, (first + count) * PAGE);
    }
    parts
}

const FILES: &str = "files";

/// What a server is to do that an agent starts, as it is told: one line on its standard input, which also takes its answer: its
/// addresses, a line each, and an empty one.
#[derive(Debug)]
pub struct Terms {
    pub service: Service,
    /// It is asked over the loopback interface only.
    pub here: bool,
    pub key: SessionKey,
}

impl Terms {
    /// As a line, with its end.
    pub fn to_line(&self) -> String {
        let service = match self.service {
            Service::Memory { bytes } => bytes.to_string(),
            Service::Files => FILES.to_owned(),
        };
        format!("{service} {} {}\n", u8::from(self.here), blake3::Hash::from(self.key.0).to_hex())
    }

    /// From such a line.
    pub fn parse(line: &str) -> Option<Terms> {
        let mut words = line.split_whitespace();
        let service = match words.next()? {
            FILES => Service::Files,
            bytes => Service::Memory { bytes: bytes.parse().ok()? },
        };
        let here = words.next()? == "1";
        let key = SessionKey(*blake3::Hash::from_hex(words.next()?).ok()?.as_bytes());
        Some(Terms { service, here, key })
    }
}

/// Lends what is in `store` to whoever has the key, for ever.
///
/// # Errors
/// The kernel refuses what a server needs.
pub fn lend(listener: Async<std::net::TcpListener>, key: SessionKey, store: &Arc<Store>) -> Result<()> {
    let tasks = Rc::new(LocalExecutor::new());
    // Of the inner one whoever is served has one; of the outer one also who has not proved himself yet.
    let (store, present) = (Arc::clone(store), Arc::new(Arc::new(())));
    let arrived = move |one: Arrival| {
        // Not asked of the stream itself, whose crate would bring getaddrinfo along.
        let peer = socket2::SockRef::from(&one.stream).peer_addr().ok().and_then(|peer| peer.as_socket());
        let here = peer.is_some_and(|peer| peer.ip().to_canonical().is_loopback());
        let tagged = match one.purpose {
            Purpose::Memory => true,
            Purpose::MemoryHere if here => false,
            _ => return log::debug!("refused a connection that asks for something else"),
        };
        if Arc::strong_count(&*present) > CONNECTIONS {
            return log::warn!("refused a connection: {CONNECTIONS} are open");
        }
        let link = Direct::new(&one.stream, one.reader, one.writer, tagged);
        let (store, present) = (Arc::clone(&store), Arc::clone(&*present));
        let begun = thread::Builder::new().name("lend".to_owned()).stack_size(256 << 10).spawn(move || {
            let _present = present;
            if let Err(error) = link.and_then(|mut link| serve(&mut link, &store, here)) {
                log::debug!("a connection ended: {error}");
            }
        });
        if let Err(error) = begun {
            log::warn!("refused a connection: {error}");
        }
    };
    smol::block_on(tasks.run(welcome(Rc::clone(&tasks), listener, key, arrived)));
    Err(Errno::CANCELED).op("listen")
}
