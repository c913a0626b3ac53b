//! The members of a job on this node: their descriptors, and what is said on them. One epoll set, one buffer, and no work for who says
//! nothing.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use async_channel::{Receiver, Sender, bounded};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};
use smol::Async;
use smol::future::FutureExt;

use super::Node;
use crate::Error;
use crate::launch::fold::fold_ranks;
use crate::launch::pmi;
use crate::net::alarm::Alarm;
use crate::net::collective::text::{self, Pmi, Request};
use crate::net::collective::{Answer, Branch, TOTAL_MAX, pieces};
use crate::net::link::Packet;
use crate::net::wire::collective::{Act, Name, Verdict, Word};
use crate::net::wire::control::{JobId, Launch, NodeId, Report};
use crate::sys::board::Board;

/// A member waits this long for the others, unless it says how long.
const WITHIN: Duration = Duration::from_secs(600);
/// Who waits longer for what the master gives is doubtful whether all call the same.
const DOUBT: Duration = Duration::from_millis(100);
/// Messages between front end and master that are not received, at most.
const UNRECEIVED: usize = 64;
/// Bytes of a member's requests that are not answered, at most.
const INBOX: usize = TOTAL_MAX + (1 << 20);

/// See the module.
pub(super) struct Members {
    node: Rc<Node>,
    job: JobId,
    /// Of the job's program at each index.
    facts: pmi::Facts,
    front: bool,
    set: Epoll,
    ready: Async<OwnedFd>,
    pub(super) branch: RefCell<Branch>,
    pub(super) ends: RefCell<Vec<Option<End>>>,
    /// There are words to send, or something to wait for has changed.
    woken: (Sender<()>, Receiver<()>),
    /// When those who wait do not want to any longer.
    deadline: Cell<Option<Instant>>,
    /// When they have waited for [`DOUBT`].
    doubt: Cell<Option<Instant>>,
    messages: RefCell<Messages>,
    /// Words beside the branch's.
    words: RefCell<VecDeque<(Word, Vec<u8>)>>,
    /// Ranks of this node that are not over.
    left: Cell<u32>,
    /// One has begun to speak PMI-1.
    pub(super) asked: Cell<bool>,
    /// What members do is told by system calls only, which wait for what they wrote.
    pub(super) without_board: bool,
    /// Shared with members that want it ([`super::board`]): with how many, and how many of them have called and are not answered.
    pub(super) board: OnceCell<Board>,
    pub(super) sharing: Cell<u32>,
    pub(super) held: Cell<u32>,
    /// There are answers on it that nobody was woken for.
    pub(super) answered: Cell<bool>,
    pub(super) looking: Cell<bool>,
    pub(super) look_again: Cell<bool>,
}

/// The agent's end of a member's descriptor.
pub(super) struct End {
    pub(super) socket: OwnedFd,
    inbox: Vec<u8>,
    /// What the socket did not take, and how much of it has gone since.
    outbox: Vec<u8>,
    sent: usize,
    /// The call that waits is one of PMI-1.
    pmi: bool,
    /// The events that are waited for include that it takes more.
    full: bool,
    /// What it has asked the table of names.
    naming: &'static str,
    /// Its program's number in the job.
    app: u32,
    /// It shares the board.
    pub(super) shares: bool,
    /// Its request stands there, and the reply will.
    pub(super) on_board: bool,
    /// Its call is counted there and not answered.
    pub(super) held: bool,
    /// So is the next one, which stands there already.
    pub(super) counted: bool,
}

/// Between front end and master, on the master's node.
#[derive(Default)]
struct Messages {
    partial: Vec<u8>,
    come: VecDeque<Vec<u8>>,
    /// The master waits for one until then.
    wanted: Option<Instant>,
    /// Sent, and not received by the front end.
    unreceived: usize,
}

impl End {
    /// How much of this its socket takes now; `None`: it is gone, and its end is read next.
    fn take(&self, bytes: &[u8]) -> Option<usize> {
        match rustix::net::send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(taken) => Some(taken),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Some(0),
            Err(_) => None,
        }
    }
}

impl Members {
    /// Of the job that `launch` is a part of; `None` without ranks here. `below`: the nodes reached through this one.
    ///
    /// # Errors
    /// No descriptor is free.
    pub(super) fn new(node: &Rc<Node>, launch: &Launch, below: &[NodeId]) -> io::Result<Option<Rc<Members>>> {
        let wiring = &launch.wiring;
        let Some((_, runs)) = wiring.nodes.iter().find(|(at, _)| *at == node.id) else { return Ok(None) };
        let counted = wiring.nodes.iter().filter(|(at, _)| *at == node.id || below.contains(at));
        let expected = counted.flat_map(|(_, runs)| runs).map(|(_, ranks)| ranks).sum();
        let all: Vec<u32> = runs.iter().flat_map(|(first, ranks)| *first..first + ranks).collect();
        let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let ready = Async::new_nonblocking(set.0.try_clone()?)?;
        let members = Rc::new(Members {
            node: Rc::clone(node),
            job: launch.job,
            facts: pmi::Facts {
                size: launch.size,
                space: format!("hpcrt-{}-{}", node.session, launch.job),
                mapping: wiring.mapping.clone(),
                clique: if node.subtree.is_local() { list(&(0..launch.size).collect::<Vec<_>>()) } else { list(&all) },
            },
            front: wiring.front,
            set,
            ready,
            ends: RefCell::new(all.iter().map(|_| None).collect()),
            left: Cell::new(u32::try_from(all.len()).unwrap_or(u32::MAX)),
            asked: Cell::new(false),
            without_board: launch.writes_elsewhere(),
            board: OnceCell::new(),
            sharing: Cell::new(0),
            held: Cell::new(0),
            answered: Cell::new(false),
            looking: Cell::new(false),
            look_again: Cell::new(false),
            branch: RefCell::new(Branch::new(node.id, launch.size, all, expected)),
            woken: bounded(1),
            deadline: Cell::new(None),
            doubt: Cell::new(None),
            messages: RefCell::default(),
            words: RefCell::default(),
        });
        node.tasks.spawn(Rc::clone(&members).serve()).detach();
        Ok(Some(members))
    }

    /// A rank's way to its agent: the rank's end.
    ///
    /// # Errors
    /// No descriptor is free.
    pub(super) fn add(&self, rank: u32, app: u32) -> io::Result<OwnedFd> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        let member = self.branch.borrow().ranks().binary_search(&rank).map_err(|_| io::ErrorKind::InvalidInput)?;
        self.set.add(&ours, EpollEvent::new(EpollFlags::EPOLLIN, member as u64))?;
        let end = End {
            socket: ours,
            inbox: Vec::new(),
            outbox: Vec::new(),
            sent: 0,
            pmi: false,
            full: false,
            naming: "",
            app,
            shares: false,
            on_board: false,
            held: false,
            counted: false,
        };
        self.ends.borrow_mut()[member] = Some(end);
        Ok(theirs)
    }

    /// So many ranks of this node are over; true when all are, and nothing is served any more.
    pub(super) fn over(&self, ranks: u32) -> bool {
        self.left.set(self.left.get().saturating_sub(ranks));
        let all = self.left.get() == 0;
        if all {
            self.woken.0.close();
        }
        all
    }

    /// A node below has spoken.
    pub(super) fn handle_joined(&self, from: NodeId, seq: u32, act: Act, ranks: u32, more: bool, body: &[u8]) {
        self.branch.borrow_mut().handle_joined(from, seq, act, ranks, more, body);
        self.wake();
    }

    /// The root has spoken.
    pub(super) fn handle_verdict(&self, verdict: Verdict, body: &[u8]) {
        match verdict {
            Verdict::ToMaster { more } => {
                let mut messages = self.messages.borrow_mut();
                messages.partial.extend_from_slice(body);
                if !more {
                    let message = std::mem::take(&mut messages.partial);
                    messages.come.push_back(message);
                }
            }
            Verdict::Received => {
                let mut messages = self.messages.borrow_mut();
                messages.unreceived = messages.unreceived.saturating_sub(1);
            }
            Verdict::Named { rank, port } => {
                if let Ok(member) = self.branch.borrow().ranks().binary_search(&rank) {
                    let kind = self.ends.borrow()[member].as_ref().map_or("", |end| end.naming);
                    self.reply(member, &pmi::named(kind, port.as_deref().map_err(String::as_str)));
                }
            }
            other => {
                // What has been called is said of all who did.
                if matches!(other, Verdict::Roll { .. } | Verdict::Broken { .. }) {
                    self.look();
                }
                self.branch.borrow_mut().handle_verdict(other, body);
                self.lose_patience();
            }
        }
        self.deliver();
        self.answer();
        self.wake();
    }

    fn wake(&self) {
        let _ = self.woken.0.try_send(());
    }

    /// Serves the members until all are over.
    async fn serve(self: Rc<Self>) {
        let (mut bytes, mut alarm, is_ready) = (vec![0; 64 << 10], Alarm::default(), Cell::new(true));
        loop {
            let mut events = [EpollEvent::empty(); 256];
            let count = if is_ready.take() { self.set.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0) } else { 0 };
            for event in &events[..count] {
                self.hear(event, &mut bytes);
            }
            self.answer();
            self.send_words().await;
            if self.woken.0.is_closed() {
                return;
            }
            // There may be more. What comes meanwhile makes the set ready.
            if count == events.len() {
                is_ready.set(true);
                continue;
            }
            let times = [self.deadline.get(), self.doubt.get(), self.messages.borrow().wanted];
            let deadline = times.into_iter().flatten().min();
            let ready = async {
                is_ready.set(self.ready.readable().await.is_ok());
                is_ready.get()
            };
            let woken = async {
                let _ = self.woken.1.recv().await;
                true
            };
            let late = async {
                match deadline {
                    Some(at) => alarm.at(at).await,
                    None => smol::future::pending().await,
                }
                false
            };
            if !ready.or(woken).or(late).await {
                self.expire();
            }
        }
    }

    fn expire(&self) {
        let now = Instant::now();
        if self.deadline.get().is_some_and(|at| at <= now) {
            self.look();
            self.deadline.set(None);
            self.branch.borrow_mut().handle_late();
        }
        if self.doubt.get().is_some_and(|at| at <= now) {
            self.doubt.set(None);
            self.branch.borrow_mut().hurry();
        }
        let wanted = &mut self.messages.borrow_mut().wanted;
        if wanted.is_some_and(|at| at <= now) {
            *wanted = None;
            self.reply(0, &text::error("the front end has sent nothing in time"));
        }
    }

    async fn send_words(&self) {
        loop {
            let word = self.words.borrow_mut().pop_front();
            let Some((word, body)) = word.or_else(|| self.branch.borrow_mut().poll_word()) else { return };
            self.node.send_up(Packet::new(&Report::Collective { job: self.job, word }, body)).await;
        }
    }

    fn say(&self, word: Word) {
        self.words.borrow_mut().push_back((word, Vec::new()));
    }

    /// Reads what a member says, and writes what it did not take before.
    fn hear(&self, event: &EpollEvent, bytes: &mut [u8]) {
        let member = event.data() as usize;
        let mut ends = self.ends.borrow_mut();
        // A socket that was closed may linger in the set while a child that is about to exec has a copy.
        let Some(end) = ends.get_mut(member).and_then(Option::as_mut) else { return };
        if event.events().contains(EpollFlags::EPOLLOUT) {
            self.flush(member, end);
        }
        let heard = match rustix::net::recv(&end.socket, &mut *bytes, RecvFlags::DONTWAIT) {
            Ok((got @ 1.., _)) => {
                let inbox = if end.inbox.is_empty() { Vec::new() } else { std::mem::take(&mut end.inbox) };
                drop(ends);
                self.understand(member, inbox, &bytes[..got])
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            // It has closed its end. What it must do with others it does not do any more; its end is told when it ends.
            Ok(_) | Err(_) => {
                drop(ends);
                return self.close(member);
            }
        };
        if let Err(why) = heard {
            self.reply(member, &text::error(&why));
            self.close(member);
        }
    }

    /// Obeys all whole requests; keeps the rest.
    fn understand(&self, member: usize, mut inbox: Vec<u8>, new: &[u8]) -> Result<(), String> {
        let all = if inbox.is_empty() {
            new
        } else {
            inbox.extend_from_slice(new);
            &inbox
        };
        let mut rest = all;
        while !rest.is_empty()
            && let Some((request, len)) = text::parse(rest).map_err(|garbled| garbled.to_string())?
        {
            self.obey(member, request);
            rest = &rest[len..];
        }
        if rest.len() > INBOX {
            return Err("the request is too long".to_owned());
        }
        let done = all.len() - rest.len();
        if inbox.is_empty() {
            inbox = rest.to_vec();
        } else {
            inbox.drain(..done);
        }
        if let Some(Some(end)) = self.ends.borrow_mut().get_mut(member) {
            end.inbox = inbox;
        }
        Ok(())
    }

    pub(super) fn obey(&self, member: usize, request: Request<'_>) {
        match request {
            Request::Pmi(pmi) => self.obey_pmi(member, pmi),
            Request::Call(act, items, within) => {
                self.count_call(member);
                if let Err(why) = self.call(member, act, &items, Some(within.unwrap_or(WITHIN)), false) {
                    self.reply(member, &text::error(&why));
                }
            }
            Request::Put(key, value) => {
                self.branch.borrow_mut().put(member, key, value);
                self.reply(member, &text::done(&[]));
            }
            Request::Get(key) => {
                let reply = text::done(&self.branch.borrow().get(key).into_iter().collect::<Vec<_>>());
                self.reply(member, &reply);
            }
            Request::Send(_) | Request::Receive(_) if self.branch.borrow().ranks()[member] != 0 => {
                self.reply(member, &text::error("only rank 0 talks to the front end"));
            }
            Request::Send(_) | Request::Receive(_) if !self.front => {
                self.reply(member, &text::error("nobody listens at the front end: it was started without --front"));
            }
            Request::Send(message) => {
                let unreceived = self.messages.borrow().unreceived;
                if unreceived >= UNRECEIVED {
                    let why = format!("the front end has not received the last {unreceived} messages");
                    return self.reply(member, &text::error(&why));
                }
                self.messages.borrow_mut().unreceived += 1;
                let parts = pieces(message).map(|(piece, more)| (Word::ToFront { more }, piece.to_vec()));
                self.words.borrow_mut().extend(parts);
                self.reply(member, &text::done(&[]));
            }
            Request::Receive(within) => {
                self.messages.borrow_mut().wanted = Some(Instant::now() + within.unwrap_or(WITHIN));
                self.deliver();
            }
            Request::Members => self.reply(member, &text::error("only the front end asks that")),
            Request::Board => self.share_board(member),
            Request::Look => self.look(),
            Request::Unknown(why) => self.reply(member, &text::error(&why)),
        }
    }

    fn obey_pmi(&self, member: usize, request: Pmi<'_>) {
        self.asked.set(true);
        let rank = self.branch.borrow().ranks()[member];
        let name = |naming, ask| {
            if let Some(Some(end)) = self.ends.borrow_mut().get_mut(member) {
                end.naming = naming;
            }
            self.say(Word::Name { node: self.node.id, rank, ask });
        };
        match request {
            Pmi::Init { version } if version != b"1" => {
                let version = String::from_utf8_lossy(version);
                let cause = format!("its library speaks version {version} of PMI, hpcrt version 1");
                let error = Error::new("run the MPI program", cause)
                    .remedy("its own launcher can start it: hpcrt exec -- srun --mpi=pmi2 PROGRAM");
                let (node, job) = (Rc::clone(&self.node), self.job);
                let fail = async move {
                    let failed = Report::Failed { job, node: node.id, error: error.to_string() };
                    node.report(&failed).await;
                };
                self.node.tasks.spawn(fail).detach();
            }
            Pmi::Barrier => {
                // Others may compute for hours before they finalize.
                if let Err(why) = self.call(member, Act::Barrier, &[], None, true) {
                    self.reply(member, &pmi::barrier(Some(&why)));
                }
            }
            Pmi::Put { key, value } => {
                self.branch.borrow_mut().put(member, key, value);
                self.reply(member, pmi::PUT);
            }
            Pmi::Get { key } => {
                let reply = {
                    let branch = self.branch.borrow();
                    let own = self.facts.key(key, rank);
                    pmi::got(key, branch.get(key).or(own.as_deref()))
                };
                self.reply(member, &reply);
            }
            Pmi::Publish { service, port } => {
                name("publish", Name::Publish { service: service.to_vec(), port: port.to_vec() });
            }
            Pmi::Unpublish { service } => name("unpublish", Name::Unpublish { service: service.to_vec() }),
            Pmi::LookUp { service } => name("lookup", Name::LookUp { service: service.to_vec() }),
            Pmi::Abort { code, message } => {
                let message = String::from_utf8_lossy(message).into_owned();
                self.say(Word::Abort { rank, code, message });
            }
            other => {
                let app = self.ends.borrow()[member].as_ref().map_or(0, |end| end.app);
                if let Some(reply) = self.facts.reply(&other, app) {
                    self.reply(member, &reply);
                }
            }
        }
    }

    fn call(
        &self,
        member: usize,
        act: Act,
        items: &[&[u8]],
        within: Option<Duration>,
        pmi: bool,
    ) -> Result<(), String> {
        let mut branch = self.branch.borrow_mut();
        // Those who called an operation that is over since wait for nothing.
        let earlier = self.deadline.get().filter(|_| branch.is_waiting());
        branch.handle_call(member, act, items)?;
        let now = Instant::now();
        let new = within.map(|within| now + within);
        self.doubt.set(self.doubt.get().or(Some(now + DOUBT)));
        self.deadline.set([earlier, new].into_iter().flatten().min());
        if let Some(Some(end)) = self.ends.borrow_mut().get_mut(member) {
            end.pmi = pmi;
        }
        Ok(())
    }

    /// Gives the master a message, if it waits for one.
    fn deliver(&self) {
        let mut messages = self.messages.borrow_mut();
        if messages.wanted.is_some()
            && let Some(message) = messages.come.pop_front()
        {
            messages.wanted = None;
            drop(messages);
            self.say(Word::Received);
            self.reply(0, &text::done(&[&message]));
        }
    }

    /// Hands out what the branch answers.
    fn answer(&self) {
        loop {
            let answers: Vec<_> = std::iter::from_fn(|| self.branch.borrow_mut().poll_answer()).collect();
            if answers.is_empty() {
                return;
            }
            if let Some(board) = self.board.get() {
                board.set_patient(self.branch.borrow().is_patient());
            }
            let more = self.release(answers.iter().map(|(member, _)| *member));
            for (member, answer) in answers {
                let mut ends = self.ends.borrow_mut();
                let Some(Some(end)) = ends.get_mut(member) else { continue };
                match answer {
                    Answer::Done(_) if end.pmi => self.write(member, end, &pmi::barrier(None)),
                    Answer::Done(reply) => self.write(member, end, &reply),
                    Answer::Failed(broken) => {
                        let ranks = fold_ranks(&broken.ranks);
                        let reply = if end.pmi {
                            pmi::barrier(Some(&format!("ranks {ranks}: {}", broken.why)))
                        } else {
                            format!("{} {ranks} {}\n", broken.word(), broken.why).into_bytes()
                        };
                        self.write(member, end, &reply);
                    }
                }
            }
            self.ring();
            if more || self.look_again.get() {
                self.look();
            }
        }
    }

    pub(super) fn reply(&self, member: usize, reply: &[u8]) {
        let more = self.release(std::iter::once(member));
        if let Some(Some(end)) = self.ends.borrow_mut().get_mut(member) {
            self.write(member, end, reply);
        }
        self.ring();
        if more || self.look_again.get() {
            self.look();
        }
    }

    /// Writes to a member; what its socket does not take follows when it does. A member that does not read its replies only holds up
    /// itself: it gets none to what it has not asked.
    fn write(&self, member: usize, end: &mut End, mut reply: &[u8]) {
        if std::mem::take(&mut end.on_board)
            && let Some(board) = self.board.get()
            && self.answer_on(board, member, end, reply)
        {
            return;
        }
        if end.outbox.is_empty() {
            match end.take(reply) {
                Some(taken) if taken == reply.len() => return self.watch(member, end, false),
                Some(taken) => reply = &reply[taken..],
                None => return,
            }
        }
        end.outbox.extend_from_slice(reply);
        self.watch(member, end, true);
    }

    /// Writes more of what a member's socket did not take.
    fn flush(&self, member: usize, end: &mut End) {
        let left = &end.outbox[end.sent..];
        end.sent += end.take(left).unwrap_or(left.len());
        if end.sent == end.outbox.len() {
            (end.outbox, end.sent) = (Vec::new(), 0);
            self.watch(member, end, false);
        }
    }

    fn watch(&self, member: usize, end: &mut End, out: bool) {
        if std::mem::replace(&mut end.full, out) != out {
            let events = if out { EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
            // The set has it.
            let _ = self.set.modify(&end.socket, &mut EpollEvent::new(events, member as u64));
        }
    }
}

/// `0,1,2`.
fn list(ranks: &[u32]) -> String {
    ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}
