//! One node's place in the control tree: the links to its children, what lies below each, and the pumps that move packets.
//!
//! Every link has a bounded outbox: a peer that does not read slows down only those who send to it. Orders and reports are handled by
//! different tasks, so the two directions never wait for each other.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use async_channel::{Receiver, Sender, bounded, unbounded};
use smol::future::FutureExt;
use smol::stream::StreamExt;
use smol::{LocalExecutor, Task, Timer};

use crate::net::link::{LinkError, Packet, Reader, SILENCE, Writer};
use crate::net::replicate::{FeedsLog, Rebuild};
use crate::net::wire::control::{Down, NodeId, Order, Report, Target};
use crate::net::wire::frame::Kind;

/// Packets that wait for a link, at most.
const OUTBOX: usize = 16;
/// The same for a link that carries the log: the next chunk is ready while one is being sent.
pub const LOG_OUTBOX: usize = 1;

/// Tasks of one thread.
pub type Spawner = Rc<LocalExecutor<'static>>;

/// What comes up from the children.
#[derive(Debug)]
pub enum Event {
    /// A report; `packet` is its frame, ready to be passed on.
    Report { child: NodeId, report: Report, packet: Packet },
    /// A child that reaches none of its feeders asks for the log over its control link.
    Log { child: NodeId, packet: Packet },
    /// The link to a child ended.
    Broken { child: NodeId, error: LinkError },
}

/// Starts the task that empties an outbox into a link, and a ping now and then. Closing the outbox ends it after
/// everything was sent.
pub fn pump(tasks: &Spawner, writer: Writer, ping: Packet) -> (Sender<Packet>, Task<()>) {
    pump_with(tasks, writer, ping, OUTBOX)
}

/// [`pump`] with an outbox of that many packets.
pub fn pump_with(tasks: &Spawner, mut writer: Writer, ping: Packet, room: usize) -> (Sender<Packet>, Task<()>) {
    let (outbox, waiting) = bounded::<Packet>(room);
    let task = tasks.spawn(async move {
        let mut ticks = Timer::interval(SILENCE / 3);
        loop {
            let quiet = async {
                ticks.next().await;
                Ok(ping.clone())
            };
            let Ok(packet) = waiting.recv().or(quiet).await else { return };
            // The reading side of the same link sees the failure and says why.
            if writer.send(&packet).await.is_err() {
                return;
            }
        }
    });
    (outbox, task)
}

/// A ping for a link to a child.
pub fn ping_down() -> Packet {
    Packet::new(&Down { to: Target::All, order: Order::Ping }, Vec::new())
}

/// A ping for the link to the parent.
pub fn ping_up() -> Packet {
    Packet::new(&Report::Ping, Vec::new())
}

/// The links to the children.
pub struct Children {
    tasks: Spawner,
    links: RefCell<BTreeMap<NodeId, (Sender<Packet>, Task<()>)>>,
    /// Which child leads to a node.
    route: RefCell<HashMap<NodeId, NodeId>>,
    /// Children that are fed the log over their control link: the way to who feeds each.
    fed: RefCell<HashMap<NodeId, Sender<Packet>>>,
    events: Sender<Event>,
    leaving: Cell<bool>,
}

impl Children {
    /// No children yet; what they say comes out of the receiver.
    pub fn new(tasks: Spawner) -> (Rc<Children>, Receiver<Event>) {
        let (events, receiver) = bounded(OUTBOX);
        let (links, route, fed) = Default::default();
        let this = Children { tasks, links, route, fed, events, leaving: Cell::new(false) };
        (Rc::new(this), receiver)
    }

    /// A child is up: `below` are the nodes reached through it, itself included.
    pub fn add(self: &Rc<Self>, child: NodeId, below: &[NodeId], mut reader: Reader, writer: Writer) {
        let pumped = pump(&self.tasks, writer, ping_down());
        self.links.borrow_mut().insert(child, pumped);
        self.route.borrow_mut().extend(below.iter().map(|node| (*node, child)));
        let this = Rc::clone(self);
        let listen = async move {
            let error = loop {
                let packet = match reader.receive_within().await {
                    Ok(packet) => packet,
                    Err(error) => break error,
                };
                if packet.kind == Kind::Log {
                    let _ = this.events.send(Event::Log { child, packet }).await;
                    continue;
                }
                match packet.message::<Report>() {
                    Ok(Report::Ping) => {}
                    Ok(report) => {
                        if this.events.send(Event::Report { child, report, packet }).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => break error.into(),
                }
            };
            this.links.borrow_mut().remove(&child);
            let _ = this.events.send(Event::Broken { child, error }).await;
        };
        self.tasks.spawn(listen).detach();
    }

    /// No child leads to this node: somebody else is to start it.
    pub fn forget(&self, node: NodeId) {
        self.route.borrow_mut().remove(&node);
    }

    /// Sends an order down: to every child, or towards one node. A child whose link is gone is skipped: its loss was reported.
    pub async fn send(&self, to: Target, packet: &Packet) {
        let outboxes: Vec<Sender<Packet>> = match to {
            Target::All => self.links.borrow().values().map(|l| l.0.clone()).collect(),
            Target::Node(node) => {
                let child = self.route.borrow().get(&node).copied();
                child.and_then(|c| self.links.borrow().get(&c).map(|l| l.0.clone())).into_iter().collect()
            }
        };
        for outbox in outboxes {
            let _ = outbox.send(packet.clone()).await;
        }
    }

    /// The way to a child.
    fn outbox(&self, child: NodeId) -> Option<Sender<Packet>> {
        self.links.borrow().get(&child).map(|link| link.0.clone())
    }

    /// A child asks for the log over its control link: `feeder` feeds it there from then on.
    pub async fn feed<F: FeedsLog + Rebuild + 'static>(&self, feeder: &Rc<F>, child: NodeId, packet: Packet) {
        let known = self.fed.borrow().get(&child).cloned();
        let asked = match known {
            Some(asked) => asked,
            None => {
                let Some(outbox) = self.outbox(child) else { return };
                let (asked, attachments) = unbounded();
                self.fed.borrow_mut().insert(child, asked.clone());
                let feeder = Rc::clone(feeder);
                let work = async move { drop(feeder.log().feed(attachments, outbox, &*feeder).await) };
                self.tasks.spawn(work).detach();
                asked
            }
        };
        let _ = asked.send(packet).await;
    }

    /// Makes and sends an order.
    pub async fn order(&self, to: Target, order: Order, body: Vec<u8>) {
        self.send(to, &Packet::new(&Down { to, order }, body)).await;
    }

    /// The nodes reached through a child.
    pub fn below(&self, child: NodeId) -> Vec<NodeId> {
        self.route.borrow().iter().filter(|(_, via)| **via == child).map(|(node, _)| *node).collect()
    }

    /// All nodes below.
    pub fn reached(&self) -> Vec<NodeId> {
        self.route.borrow().keys().copied().collect()
    }

    /// From now on a broken link is a child that left as it was told.
    pub fn expect_leaving(&self) {
        self.leaving.set(true);
    }

    /// Whether the children were told to leave.
    pub fn leaving(&self) -> bool {
        self.leaving.get()
    }

    /// No link is left.
    pub fn is_empty(&self) -> bool {
        self.links.borrow().is_empty()
    }
}

impl std::fmt::Debug for Children {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Children").field("links", &self.links.borrow().keys()).finish_non_exhaustive()
    }
}
