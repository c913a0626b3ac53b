//! A deterministic simulator of many nodes in one process: it drives the real state machines under a virtual clock.
//!
//! Every node has one full-duplex network interface and one thread that handles messages. A link between two nodes, set up by the first
//! message of the node that opens it, has a latency and a buffer, keeps order and sends one message at a time. Links share an interface as
//! TCP connections do: each has the same part of what the receiver takes, and of what the sender has left when those that are held up
//! by their receivers have theirs. What senders do not use of a receiver's interface is not given to others. Links can break and nodes crash;
//! both ends, or the one that is left, learn it after the detection time. Equal seeds give equal runs.

#[cfg(test)]
mod collective;
pub mod pull;
pub mod replica;
#[cfg(test)]
mod scale;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::topology::Node;

/// A protocol as the simulator sees it. `now` is the time since the start of the simulation.
pub trait Machine {
    type Message;

    /// Something happened to this node.
    fn handle(&mut self, now: Duration, input: Input<Self::Message>);

    /// The next message, only for a link that takes it (`writable`). Asked until there is none, after every input and whenever a link takes more.
    fn poll_transmit(&mut self, now: Duration, writable: &dyn Fn(Link) -> bool) -> Option<Send<Self::Message>>;

    /// When it wants an [`Input::Wake`], at the latest.
    fn poll_timeout(&self) -> Option<Duration> {
        None
    }

    /// Whether it takes this message now; if not, it and all behind it on its link wait, and at length their sender.
    fn accepts(&self, _: &Self::Message) -> bool {
        true
    }
}

/// A link as one of its ends sees it. Two nodes have two links when both opened one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    pub peer: Node,
    /// Whether this end opened it; only then does sending set it up (again).
    pub opened: bool,
}

/// What a node is told.
#[derive(Debug)]
pub enum Input<M> {
    /// The node runs from now on.
    Start,
    Message {
        from: Link,
        message: M,
    },
    /// This link is gone with the messages in it, or could not be opened.
    Lost(Link),
    /// A time asked for by [`Machine::poll_timeout`] has come, or an earlier one that was asked for before.
    Wake,
}

/// A message to send, `bytes` long on the wire.
#[derive(Debug)]
pub struct Send<M> {
    pub to: Link,
    pub bytes: u64,
    pub message: M,
}

/// Properties of all nodes and links.
#[derive(Debug, Clone, Copy)]
pub struct Network {
    /// Bytes per second of an interface, each way.
    pub bandwidth: f64,
    /// One way.
    pub latency: Duration,
    /// Added to the latency of each link: between nothing and this, by the seed.
    pub jitter: Duration,
    /// Bytes per second that a node's thread looks through before it handles a message (verification, copies).
    pub processing: f64,
    /// Bytes that a link holds between sender and handling; it takes another message when it has sent the last one and holds less.
    pub buffer: u64,
    /// From the loss of a link or node until its peers know.
    pub detection: Duration,
}

impl Default for Network {
    /// A 10 Gbit/s Ethernet.
    fn default() -> Self {
        Network {
            bandwidth: 1.25e9,
            latency: Duration::from_micros(50),
            jitter: Duration::ZERO,
            processing: f64::INFINITY,
            buffer: 4 << 20,
            detection: Duration::from_millis(200),
        }
    }
}

/// Nanoseconds since the start.
type Nanos = u64;

#[derive(Debug)]
enum Event<M> {
    Start(Node),
    /// The last byte of this link's message has left the node, unless its share has changed since.
    Sent(Node, Link),
    /// All bytes are there.
    Arrive(Packet<M>),
    /// The thread has time for it.
    Handle(Packet<M>),
    Lost(Node, Link),
    Wake(Node),
    Crash(Node),
    Cut(Node, Node),
}

#[derive(Debug)]
struct Packet<M> {
    from: Node,
    /// The sender's end.
    link: Link,
    bytes: u64,
    /// The link it belongs to: dropped when that was cut in the meantime.
    epoch: u32,
    message: M,
}

/// A message that is leaving a node.
#[derive(Debug)]
struct Flow<M> {
    packet: Packet<M>,
    /// Bytes that had not left at `since`.
    left: f64,
    since: Nanos,
    /// Bytes per nanosecond from then on; 0: not known yet.
    rate: f64,
    ends: Nanos,
}

impl Link {
    /// The same link at its other end, given this end's node.
    fn seen_from(self, node: Node) -> Link {
        Link { peer: node, opened: !self.opened }
    }
}

/// What one node has sent and received so far; what was lost on the way counts as sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages.
    pub sent: u64,
    pub sent_bytes: u64,
    /// Messages.
    pub received: u64,
    pub received_bytes: u64,
}

/// What one end knows of a link and has sent over it.
struct End {
    link: Link,
    latency: Nanos,
    in_flight: u64,
    epoch: u32,
    /// A message is leaving.
    busy: bool,
    /// Broken, but this end does not know yet.
    broken: bool,
}

struct Host<M: Machine> {
    machine: M,
    up: bool,
    /// Bytes per nanosecond, each way.
    bandwidth: f64,
    leaving: Vec<Flow<M::Message>>,
    /// Who sends to it at present, once for each link.
    senders: Vec<Node>,
    /// How many there were when they were last given their shares.
    sharing: usize,
    handles_from: Nanos,
    wake: Nanos,
    inbox: VecDeque<Packet<M::Message>>,
    ends: Vec<End>,
    traffic: Traffic,
}

/// The simulation of one machine per node.
#[allow(missing_debug_implementations, reason = "machines need not be printable")]
pub struct Sim<M: Machine> {
    network: Network,
    seed: u64,
    now: Nanos,
    /// Events so far.
    count: u64,
    /// Those of one time in the order they were made; in a regular topology many share a time.
    agenda: BTreeMap<Nanos, VecDeque<Event<M::Message>>>,
    hosts: Vec<Host<M>>,
    /// Nodes to which, and from which, something began or ceased to be sent now.
    receiving: Vec<Node>,
    sending: Vec<Node>,
}

impl<M: Machine> Sim<M> {
    /// Node i runs the i-th machine. None runs before [`start`](Self::start).
    pub fn new(network: Network, seed: u64, machines: impl IntoIterator<Item = M>) -> Self {
        let host = |machine| Host {
            machine,
            up: false,
            bandwidth: network.bandwidth / 1e9,
            leaving: Vec::new(),
            senders: Vec::new(),
            sharing: 0,
            handles_from: 0,
            wake: Nanos::MAX,
            inbox: VecDeque::new(),
            ends: Vec::new(),
            traffic: Traffic::default(),
        };
        let hosts = machines.into_iter().map(host).collect();
        Sim {
            network,
            seed,
            now: 0,
            count: 0,
            agenda: BTreeMap::new(),
            hosts,
            receiving: Vec::new(),
            sending: Vec::new(),
        }
    }

    /// Starts a node; what others send to it before is lost as if it had crashed.
    pub fn start(&mut self, node: Node, at: Duration) {
        self.at(nanos(at), Event::Start(node));
    }

    /// Starts all nodes at once.
    pub fn start_all(&mut self) {
        for node in 0..self.hosts.len() as Node {
            self.hosts[node as usize].up = true;
            self.start(node, Duration::ZERO);
        }
    }

    /// Ends a node for good.
    pub fn crash(&mut self, node: Node, at: Duration) {
        self.at(nanos(at), Event::Crash(node));
    }

    /// Breaks the links between two nodes, as far as they are set up then.
    pub fn cut(&mut self, one: Node, other: Node, at: Duration) {
        self.at(nanos(at), Event::Cut(one, other));
    }

    /// Gives one node another bandwidth, in bytes per second, for what is sent from now on.
    pub fn set_bandwidth(&mut self, node: Node, bandwidth: f64) {
        self.hosts[node as usize].bandwidth = bandwidth / 1e9;
    }

    /// Runs until nothing more would happen; false if that was not so at `deadline`.
    pub fn run(&mut self, deadline: Duration) -> bool {
        while let Some(mut next) = self.agenda.first_entry() {
            if *next.key() > nanos(deadline) {
                return false;
            }
            self.now = *next.key();
            match next.get_mut().pop_front() {
                Some(event) => self.step(event),
                None => {
                    next.remove();
                    self.share();
                }
            }
        }
        true
    }

    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.now)
    }

    /// Events so far.
    pub fn events(&self) -> u64 {
        self.count
    }

    /// What a node has sent and received.
    pub fn traffic(&self, node: Node) -> Traffic {
        self.hosts[node as usize].traffic
    }

    /// The machines of the nodes that run.
    pub fn living(&self) -> impl Iterator<Item = &M> {
        self.hosts.iter().filter(|host| host.up).map(|host| &host.machine)
    }

    fn step(&mut self, event: Event<M::Message>) {
        match event {
            Event::Start(node) => {
                self.hosts[node as usize].up = true;
                self.input(node, Input::Start);
            }
            Event::Sent(node, link) => {
                if let Some(packet) = self.leave(node, link, Some(self.now)) {
                    let at = self.now + self.end(node, link).latency;
                    self.at(at, Event::Arrive(packet));
                    self.pump(node);
                }
            }
            Event::Arrive(packet) => self.receive(packet),
            Event::Handle(packet) => self.handle(packet),
            Event::Lost(node, link) => {
                let end = self.end(node, link);
                end.broken = false;
                end.in_flight = 0;
                self.input(node, Input::Lost(link));
            }
            Event::Wake(node) => {
                let host = &mut self.hosts[node as usize];
                if host.wake == self.now {
                    host.wake = Nanos::MAX;
                    self.input(node, Input::Wake);
                }
            }
            Event::Crash(node) => {
                self.hosts[node as usize].up = false;
                self.hosts[node as usize].inbox.clear();
                let links: Vec<Link> = self.hosts[node as usize].ends.iter().map(|end| end.link).collect();
                for link in links {
                    self.leave(node, link, None);
                    self.break_end(link.peer, link.seen_from(node));
                }
            }
            Event::Cut(one, other) => {
                let whole =
                    |node: Node, link| self.hosts[node as usize].ends.iter().any(|end| end.link == link && !end.broken);
                let links = [true, false].map(|opened| Link { peer: other, opened });
                for link in links
                    .into_iter()
                    .filter(|&link| whole(one, link) && whole(other, link.seen_from(one)))
                    .collect::<Vec<_>>()
                {
                    self.break_end(one, link);
                    self.break_end(other, link.seen_from(one));
                }
            }
        }
    }

    /// The thread handles the message after those it is busy with.
    fn receive(&mut self, packet: Packet<M::Message>) {
        if !self.current(&packet) {
            return;
        }
        if !self.hosts[packet.link.peer as usize].up {
            self.break_end(packet.from, packet.link);
            return;
        }
        let (now, own) = (self.now, (packet.bytes as f64 * 1e9 / self.network.processing) as Nanos);
        self.end(packet.link.peer, packet.link.seen_from(packet.from));
        let host = &mut self.hosts[packet.link.peer as usize];
        host.handles_from = host.handles_from.max(now) + own;
        let at = host.handles_from;
        if at > now { self.at(at, Event::Handle(packet)) } else { self.handle(packet) }
    }

    fn handle(&mut self, packet: Packet<M::Message>) {
        let node = packet.link.peer;
        if self.hosts[node as usize].up && self.current(&packet) {
            self.hosts[node as usize].inbox.push_back(packet);
            self.drain(node);
        }
    }

    /// Gives a node its messages as long as it takes them.
    fn drain(&mut self, node: Node) {
        let now = Duration::from_nanos(self.now);
        loop {
            let host = &mut self.hosts[node as usize];
            let mut full = Vec::new();
            let taken = host.inbox.iter().position(|packet| {
                let link = (packet.from, packet.link);
                let takes = !full.contains(&link) && host.machine.accepts(&packet.message);
                if !takes {
                    full.push(link);
                }
                takes
            });
            let Some(packet) = taken.and_then(|at| host.inbox.remove(at)) else { break };
            if !self.current(&packet) {
                continue;
            }
            let host = &mut self.hosts[node as usize];
            let Packet { from, link, bytes, message, .. } = packet;
            host.traffic.received += 1;
            host.traffic.received_bytes += bytes;
            host.machine.handle(now, Input::Message { from: link.seen_from(from), message });
            let buffer = self.network.buffer;
            let sender = self.end(from, link);
            let full = sender.in_flight >= buffer;
            sender.in_flight = sender.in_flight.saturating_sub(bytes);
            // A sender whose link took more before was asked then.
            if full && sender.in_flight < buffer {
                self.pump(from);
            }
        }
        self.pump(node);
    }

    fn input(&mut self, node: Node, input: Input<M::Message>) {
        let now = Duration::from_nanos(self.now);
        let host = &mut self.hosts[node as usize];
        if host.up {
            host.machine.handle(now, input);
            self.drain(node);
        }
    }

    /// Starts what a node has for links that take more, which may make room for what waits.
    fn pump(&mut self, node: Node) {
        if self.transmit(node) && !self.hosts[node as usize].inbox.is_empty() {
            self.drain(node);
        }
    }

    /// Returns whether something was sent; notes the node's timeout.
    fn transmit(&mut self, node: Node) -> bool {
        let now = Duration::from_nanos(self.now);
        let mut sent = false;
        loop {
            let buffer = self.network.buffer;
            let host = &mut self.hosts[node as usize];
            if !host.up {
                return false;
            }
            let ends = &host.ends;
            let takes = |end: &End| !end.busy && end.in_flight < buffer;
            let writable = |link| ends.iter().find(|end| end.link == link).is_none_or(takes);
            let Some(Send { to: link, bytes, message }) = host.machine.poll_transmit(now, &writable) else { break };
            sent = true;
            host.traffic.sent += 1;
            host.traffic.sent_bytes += bytes;
            let reachable = self.hosts[link.peer as usize].up;
            let (since, end) = (self.now, self.end(node, link));
            end.in_flight += bytes;
            if !reachable {
                self.break_end(node, link);
            } else if !end.broken {
                end.busy = true;
                let packet = Packet { from: node, link, bytes, epoch: end.epoch, message };
                let flow = Flow { packet, left: bytes as f64, since, rate: 0.0, ends: Nanos::MAX };
                self.hosts[node as usize].leaving.push(flow);
                self.hosts[link.peer as usize].senders.push(node);
                self.receiving.push(link.peer);
                self.sending.push(node);
            }
        }
        let host = &mut self.hosts[node as usize];
        if let Some(at) = host.machine.poll_timeout() {
            let at = nanos(at).max(self.now);
            if at < host.wake {
                host.wake = at;
                self.at(at, Event::Wake(node));
            }
        }
        sent
    }

    /// Takes the message that is leaving over a link, if it leaves at that time.
    fn leave(&mut self, node: Node, link: Link, ends: Option<Nanos>) -> Option<Packet<M::Message>> {
        let leaving = &mut self.hosts[node as usize].leaving;
        let is_it = |flow: &Flow<_>| flow.packet.link == link && ends.is_none_or(|ends| flow.ends == ends);
        let at = leaving.iter().position(is_it)?;
        let flow = leaving.swap_remove(at);
        self.end(node, link).busy = false;
        let senders = &mut self.hosts[link.peer as usize].senders;
        if let Some(at) = senders.iter().position(|sender| *sender == node) {
            senders.swap_remove(at);
        }
        self.receiving.push(link.peer);
        self.sending.push(node);
        Some(flow.packet)
    }

    /// Gives all messages that are leaving their shares, where these have changed.
    fn share(&mut self) {
        let mut sending = std::mem::take(&mut self.sending);
        for node in self.receiving.drain(..) {
            let host = &mut self.hosts[node as usize];
            if host.sharing != host.senders.len() {
                host.sharing = host.senders.len();
                sending.extend(&host.senders);
            }
        }
        sending.sort_unstable();
        sending.dedup();
        for node in sending.drain(..) {
            let mut leaving = std::mem::take(&mut self.hosts[node as usize].leaving);
            let most = |flow: &Flow<_>| {
                let host = &self.hosts[flow.packet.link.peer as usize];
                host.bandwidth / host.senders.len() as f64
            };
            leaving.sort_by(|a, b| most(a).total_cmp(&most(b)));
            let (mut capacity, count) = (self.hosts[node as usize].bandwidth, leaving.len());
            for (nth, flow) in leaving.iter_mut().enumerate() {
                let rate = most(flow).min(capacity / (count - nth) as f64);
                capacity -= rate;
                if rate != flow.rate {
                    flow.left = (flow.left - flow.rate * (self.now - flow.since) as f64).max(0.0);
                    (flow.rate, flow.since) = (rate, self.now);
                    flow.ends = self.now + (flow.left / rate).ceil() as Nanos;
                    let (ends, link) = (flow.ends, flow.packet.link);
                    self.count += 1;
                    self.agenda.entry(ends).or_default().push_back(Event::Sent(node, link));
                }
            }
            self.hosts[node as usize].leaving = leaving;
        }
        self.sending = sending;
    }

    /// Drops what `node` has on its way over `link` and tells it after the detection time.
    fn break_end(&mut self, node: Node, link: Link) {
        let end = self.end(node, link);
        end.epoch += 1;
        if !end.broken {
            end.broken = true;
            let at = self.now + nanos(self.network.detection);
            self.at(at, Event::Lost(node, link));
        }
    }

    fn current(&self, packet: &Packet<M::Message>) -> bool {
        let ends = &self.hosts[packet.from as usize].ends;
        ends.iter().any(|end| end.link == packet.link && end.epoch == packet.epoch)
    }

    /// One end of a link, made if it is new; both ends have one latency.
    fn end(&mut self, node: Node, link: Link) -> &mut End {
        let ends = &mut self.hosts[node as usize].ends;
        let at = ends.iter().position(|end| end.link == link).unwrap_or_else(|| {
            let pair = u64::from(node.min(link.peer)) << 32 | u64::from(node.max(link.peer));
            let share = fastrand::Rng::with_seed(self.seed ^ pair).f64();
            let latency = nanos(self.network.latency + self.network.jitter.mul_f64(share));
            ends.push(End { link, latency, in_flight: 0, epoch: 0, busy: false, broken: false });
            ends.len() - 1
        });
        &mut ends[at]
    }

    fn at(&mut self, at: Nanos, event: Event<M::Message>) {
        self.count += 1;
        self.agenda.entry(at).or_default().push_back(event);
    }
}

/// Saturating: a simulation lasts less than 500 years.
fn nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(Nanos::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: Link = Link { peer: 1, opened: true };

    /// Sends `todo` messages to node 1, which counts them, and one to each of the others.
    #[derive(Default)]
    struct Sender {
        todo: u32,
        others: Vec<Link>,
        got: Vec<Duration>,
        lost: Vec<Duration>,
    }

    impl Machine for Sender {
        type Message = ();

        fn handle(&mut self, now: Duration, input: Input<()>) {
            match input {
                Input::Message { .. } => self.got.push(now),
                Input::Lost(_) => self.lost.push(now),
                Input::Start | Input::Wake => {}
            }
        }

        fn poll_transmit(&mut self, _: Duration, writable: &dyn Fn(Link) -> bool) -> Option<Send<()>> {
            if let Some(to) = self.others.pop() {
                return Some(Send { to, bytes: 1000, message: () });
            }
            self.todo = self.todo.checked_sub(u32::from(writable(TO)))?;
            writable(TO).then_some(Send { to: TO, bytes: 1000, message: () })
        }
    }

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    const NETWORK: Network = Network {
        bandwidth: 1e6,
        latency: Duration::from_millis(5),
        jitter: Duration::ZERO,
        processing: 1e6,
        buffer: 4 << 20,
        detection: Duration::from_millis(200),
    };

    fn pair(todo: u32) -> Sim<Sender> {
        let mut sim = Sim::new(NETWORK, 1, [Sender { todo, ..Default::default() }, Sender::default()]);
        sim.start_all();
        sim
    }

    fn sender(to: &[Node]) -> Sender {
        Sender { others: to.iter().map(|&peer| Link { peer, opened: true }).collect(), ..Default::default() }
    }

    /// When each node has its message, in milliseconds; the thread takes no time.
    fn shared(senders: [&[Node]; 4], slow: Option<Node>) -> Vec<u128> {
        let network = Network { processing: f64::INFINITY, ..NETWORK };
        let mut sim = Sim::new(network, 1, senders.map(sender));
        slow.into_iter().for_each(|node| sim.set_bandwidth(node, 0.25e6));
        sim.start_all();
        assert!(sim.run(millis(1000)));
        sim.living().flat_map(|node| node.got.iter().map(Duration::as_micros)).collect()
    }

    #[test]
    fn links_share_the_interfaces_at_their_ends() {
        assert_eq!(shared([&[1], &[2], &[3], &[]], None), [6000; 3], "both ways at once");
        assert_eq!(shared([&[1, 2], &[], &[], &[]], None), [7000; 2], "both have half of the sender");
        assert_eq!(shared([&[2], &[2], &[], &[]], None), [7000; 2], "both have half of the receiver");
        assert_eq!(shared([&[1, 2], &[], &[], &[2]], None), [7000; 3], "half of the sender and half of the receiver");
        assert_eq!(shared([&[1, 2], &[], &[], &[]], Some(1)), [9000, 6333], "what one does not take is for the other");
    }

    #[test]
    fn messages_take_their_time() {
        let mut sim = pair(3);
        assert!(sim.run(millis(1000)));
        let got: Vec<_> = sim.living().flat_map(|node| node.got.clone()).collect();
        assert_eq!(got, [millis(7), millis(8), millis(9)]);
    }

    #[test]
    fn a_crash_is_noticed_after_the_detection_time_and_again_when_tried_again() {
        let mut sim = pair(10);
        sim.crash(1, Duration::from_micros(8500));
        assert!(sim.run(millis(1000)));
        let sender = sim.living().next().unwrap();
        assert_eq!(sender.lost, [Duration::from_micros(208_500)]);
        assert_eq!(sim.hosts[1].machine.got.len(), 2);
        sim.hosts[0].machine.todo = 1;
        sim.start(0, millis(300));
        assert!(sim.run(millis(1000)));
        assert_eq!(sim.hosts[0].machine.lost.last(), Some(&millis(500)));
    }

    #[test]
    fn a_cut_drops_what_is_under_way() {
        let mut sim = pair(4);
        sim.cut(0, 1, Duration::from_micros(8500));
        assert!(sim.run(millis(1000)));
        assert_eq!(sim.hosts[1].machine.got.len(), 2);
        assert_eq!((sim.hosts[0].machine.lost.len(), sim.hosts[1].machine.lost.len()), (1, 1));
    }
}
