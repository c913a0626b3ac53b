//! The front end's part in what a job's members do together: answers their operations, keeps the table of names, and talks to the master
//! for whoever has given `--front` a descriptor.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use smol::future::FutureExt;
use smol::io::{AsyncReadExt, AsyncWriteExt};
use smol::{Async, Timer};

use super::placement::Placement;
use super::pmi;
use super::root::Root;
use crate::error::Context;
use crate::net::collective::text::{self, Request};
use crate::net::collective::{Trunk, pieces};
use crate::net::wire::collective::{Name, Verdict, Wiring, Word};
use crate::net::wire::control::{JobId, NodeId, Order, Target};
use crate::{Error, Result};

/// Who asks for the master's next message waits this long, unless he says how long.
const WITHIN: Duration = Duration::from_secs(600);
/// Who listens at the front end may take this long to receive what was sent before the job ended.
const LAST: Duration = Duration::from_secs(10);
/// Messages that the master has not received, at most.
const UNRECEIVED: usize = 64;

/// A member ends the job.
#[derive(Debug)]
pub(super) struct Aborted {
    pub(super) rank: u32,
    pub(super) code: u8,
    pub(super) message: String,
}

/// See the module.
pub(super) struct Rendezvous {
    root: Rc<Root>,
    job: JobId,
    trunk: Trunk,
    begun: Instant,
    front: Option<Front>,
    /// From the master: of a message of which there is more to come, and whole ones.
    partial: Vec<u8>,
    come: VecDeque<Vec<u8>>,
    /// Somebody waits for one until then.
    wanted: Option<Instant>,
    unreceived: usize,
    /// Where each rank is.
    hosts: Vec<String>,
}

/// What the members know from the start, of shares on these nodes. `local`: they all are one machine, so all ranks share its memory.
pub(super) fn wiring(placement: &Placement, nodes: &[NodeId], local: bool, front: bool) -> Wiring {
    let mut wiring = Wiring { front, ..Wiring::default() };
    let mut runs = Vec::new();
    for (share, node) in placement.shares.iter().zip(nodes) {
        let at = wiring.nodes.iter().position(|(known, _)| known == node).unwrap_or_else(|| {
            wiring.nodes.push((*node, Vec::new()));
            wiring.nodes.len() - 1
        });
        let ranks = share.ranks.end - share.ranks.start;
        wiring.nodes[at].1.push((share.ranks.start, ranks));
        runs.push((u32::try_from(at).unwrap_or(u32::MAX), ranks));
    }
    if local {
        runs = vec![(0, placement.ranks())];
    }
    wiring.mapping = pmi::mapping(&runs);
    wiring
}

impl Rendezvous {
    /// Of a job with shares on these nodes. `front`: who wants to talk to the master.
    pub(super) fn new(
        root: &Rc<Root>,
        job: JobId,
        placement: &Placement,
        nodes: &[NodeId],
        front: Option<Front>,
    ) -> Rendezvous {
        let each = |(share, node): (&super::placement::Share, &NodeId)| vec![*node; share.ranks.len()];
        Rendezvous {
            root: Rc::clone(root),
            job,
            trunk: Trunk::new(placement.shares.iter().zip(nodes).flat_map(each).collect()),
            begun: Instant::now(),
            front,
            partial: Vec::new(),
            come: VecDeque::new(),
            wanted: None,
            unreceived: 0,
            hosts: (0..placement.ranks()).map(|rank| placement.host_name(rank).to_owned()).collect(),
        }
    }

    /// A node has said something.
    pub(super) async fn handle_word(&mut self, word: Word, body: &[u8]) -> Option<Aborted> {
        match word {
            Word::Name { node, rank, ask } => {
                let port = look(&self.root.names, ask);
                self.order(Target::Node(node), Verdict::Named { rank, port }, Vec::new()).await;
            }
            Word::Abort { rank, code, message } => {
                // What a shell would make of it; an abort is never a success.
                let code = u8::try_from(code & 0xff).unwrap_or(1).max(1);
                return Some(Aborted { rank, code, message });
            }
            Word::ToFront { more } => {
                self.partial.extend_from_slice(body);
                if !more {
                    let message = std::mem::take(&mut self.partial);
                    self.come.push_back(message);
                    self.deliver().await;
                }
            }
            Word::Received => self.unreceived = self.unreceived.saturating_sub(1),
            word => self.trunk.handle_word(self.begun.elapsed(), word, body),
        }
        self.flush().await;
        None
    }

    /// These ranks have ended, or their hosts were lost.
    pub(super) async fn handle_gone(&mut self, ranks: impl IntoIterator<Item = u32>) {
        self.trunk.handle_gone(self.begun.elapsed(), ranks);
        self.flush().await;
    }

    /// When [`Rendezvous::handle_timeout`] is wanted.
    pub(super) fn wake(&self) -> Option<Instant> {
        let trunk = self.trunk.poll_timeout().map(|at| self.begun + at);
        [trunk, self.wanted].into_iter().flatten().min()
    }

    /// The time of [`Rendezvous::wake`] has come, perhaps.
    pub(super) async fn handle_timeout(&mut self) {
        self.trunk.handle_timeout(self.begun.elapsed());
        self.flush().await;
        if self.wanted.is_some_and(|at| at <= Instant::now()) {
            self.wanted = None;
            self.reply(&text::error("the master has sent nothing in time"));
        }
    }

    /// What is asked at the front end; never ends when nobody asks there. Safe to cancel.
    pub(super) async fn asked(&mut self) -> Ask {
        match &mut self.front {
            Some(front) => match front.next().await {
                Ok(ask) => ask,
                Err(error) => {
                    log::debug!("nobody listens at the front end any more: {error}");
                    self.front = None;
                    smol::future::pending().await
                }
            },
            None => smol::future::pending().await,
        }
    }

    /// The job is over: hands out the messages that were not received, while somebody listens, for [`LAST`] at most.
    pub(super) async fn finish(&mut self) {
        let until = Instant::now() + LAST;
        while let Some(front) = self.front.as_mut().filter(|front| !front.outbox.is_empty() || !self.come.is_empty()) {
            let more = !self.come.is_empty();
            let asked = async {
                front.send().await.ok()?;
                if more { front.next().await.ok() } else { None }
            };
            let late = async {
                Timer::at(until).await;
                None
            };
            let Some(ask) = asked.or(late).await else { return };
            self.handle_ask(ask).await;
        }
    }

    /// Does what was asked.
    pub(super) async fn handle_ask(&mut self, ask: Ask) {
        match ask {
            Ask::Send(_) if self.unreceived >= UNRECEIVED => {
                let why = format!("the master has not received the last {UNRECEIVED} messages");
                self.reply(&text::error(&why));
            }
            Ask::Send(message) => {
                self.unreceived += 1;
                let master = Target::Node(self.trunk.master());
                for (piece, more) in pieces(&message) {
                    self.order(master, Verdict::ToMaster { more }, piece.to_vec()).await;
                }
                self.reply(&text::done(&[]));
            }
            Ask::Receive(within) => {
                self.wanted = Some(Instant::now() + within.unwrap_or(WITHIN));
                self.deliver().await;
            }
            Ask::Members => {
                let hosts: Vec<&[u8]> = self.hosts.iter().map(String::as_bytes).collect();
                self.reply(&text::done(&hosts));
            }
            Ask::Unknown(why) => self.reply(&text::error(&why)),
        }
    }

    async fn deliver(&mut self) {
        if self.wanted.is_some()
            && let Some(message) = self.come.pop_front()
        {
            self.wanted = None;
            self.reply(&text::done(&[&message]));
            self.order(Target::Node(self.trunk.master()), Verdict::Received, Vec::new()).await;
        }
    }

    /// Answers with the next [`Rendezvous::asked`]: who asks may not read.
    fn reply(&mut self, reply: &[u8]) {
        self.front.iter_mut().for_each(|front| front.outbox.extend_from_slice(reply));
    }

    async fn flush(&mut self) {
        while let Some((to, verdict, body)) = self.trunk.poll_verdict() {
            self.order(to, verdict, body).await;
        }
    }

    async fn order(&self, to: Target, verdict: Verdict, body: Vec<u8>) {
        self.root.order(to, Order::Collective { job: self.job, verdict }, body).await;
    }
}

/// Names of a session, with their ports.
pub(super) type Names = RefCell<std::collections::BTreeMap<Vec<u8>, Vec<u8>>>;

fn look(names: &Names, ask: Name) -> Result<Vec<u8>, String> {
    /// Names in a session, at most.
    const MAX: usize = 65536;
    let mut names = names.borrow_mut();
    match ask {
        Name::Publish { service, .. } if names.contains_key(&service) => Err("it is published already".to_owned()),
        Name::Publish { .. } if names.len() >= MAX => Err("too many names are published".to_owned()),
        Name::Publish { service, port } => {
            names.insert(service, port);
            Ok(Vec::new())
        }
        Name::Unpublish { service } => {
            names.remove(&service).map(|_| Vec::new()).ok_or("it is not published".to_owned())
        }
        Name::LookUp { service } => names.get(&service).cloned().ok_or("it is not published".to_owned()),
    }
}

/// What is asked at the front end.
#[derive(Debug)]
pub(super) enum Ask {
    Send(Vec<u8>),
    Receive(Option<Duration>),
    Members,
    Unknown(String),
}

/// The descriptor of `--front`.
pub(super) struct Front {
    stream: Async<std::os::unix::net::UnixStream>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
}

impl Front {
    /// Of a connected stream socket.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn new(fd: OwnedFd) -> Result<Front> {
        let stream = Async::new(std::os::unix::net::UnixStream::from(fd)).op("use the descriptor of --front")?;
        Ok(Front { stream, inbox: Vec::new(), outbox: Vec::new() })
    }

    /// Sends what waits. Safe to cancel.
    async fn send(&mut self) -> Result<()> {
        while !self.outbox.is_empty() {
            let sent = self.stream.write(&self.outbox).await.op("answer the front end's owner")?;
            self.outbox.drain(..sent);
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Ask> {
        self.send().await?;
        let garbled = |error: text::Garbled| Error::new("understand the front end's owner", error);
        loop {
            if let Some((request, len)) = text::parse(&self.inbox).map_err(garbled)? {
                let ask = match request {
                    Request::Send(message) => Ask::Send(message.to_vec()),
                    Request::Receive(within) => Ask::Receive(within),
                    Request::Members => Ask::Members,
                    Request::Unknown(why) => Ask::Unknown(why),
                    _ => Ask::Unknown("only members do that".to_owned()),
                };
                self.inbox.drain(..len);
                return Ok(ask);
            }
            let mut bytes = vec![0; 64 << 10];
            let got = self.stream.read(&mut bytes).await.op("hear the front end's owner")?;
            if got == 0 {
                return Err(Error::new("hear the front end's owner", "it has closed its end"));
            }
            self.inbox.extend_from_slice(&bytes[..got]);
        }
    }
}
