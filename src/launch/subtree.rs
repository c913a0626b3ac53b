//! Starting the nodes below this one, and the connections they make back to it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use async_channel::{Receiver, Sender, bounded, unbounded};
use smol::future::FutureExt;
use smol::lock::Semaphore;
use smol::net::TcpStream;
use smol::{Task, Timer};

use super::agent::{self, Agent, Process};
use super::keeper::KILLED;
use super::overlay::{Children, Spawner};
use crate::error::Context;
use crate::net::link::{Packet, Reader, Writer};
use crate::net::welcome;
use crate::net::wire::control::{AgentKind, Down, Enroll, NodeId, NodeSpec, Order, Report, Target};
use crate::net::wire::hello::Purpose;
use crate::{Error, Result};

/// A fresh agent joins within this time after it spoke: it tries its parent's addresses first.
const JOIN: Duration = Duration::from_secs(15);

/// Starts under way from one node, at most: each has a deadline, and a login that throttles others must not make them miss it.
const AT_ONCE: usize = 32;

/// Agents that a batch system starts come within this time.
const COME: Duration = Duration::from_secs(60);

/// Both halves of a link.
pub type Arrival = (Reader, Writer);
/// Who is to be fed the log, over which link, and the socket under it.
pub type Fed = (NodeId, Arrival, TcpStream);

/// Connections of nodes that were expected: each is handed to whoever waits for it, once.
#[derive(Clone)]
pub struct Arrivals {
    control: Rc<RefCell<HashMap<NodeId, Sender<Arrival>>>>,
    log: (Sender<Fed>, Receiver<Fed>),
}

impl Default for Arrivals {
    fn default() -> Self {
        Arrivals { control: Rc::default(), log: unbounded() }
    }
}

impl Arrivals {
    /// Where [`welcome`](crate::net::welcome::welcome) hands over whoever has proved himself.
    pub fn door(&self) -> impl Fn(welcome::Arrival) + Clone + 'static {
        let arrivals = self.clone();
        move |one| arrivals.hand_over(one.node, one.purpose, (one.reader, one.writer), one.stream)
    }

    /// Where this node's control link will come out.
    fn expect(&self, node: NodeId) -> Receiver<Arrival> {
        let (sender, arrived) = bounded(1);
        self.control.borrow_mut().insert(node, sender);
        arrived
    }

    /// Gives a proved connection to whoever waits for it; nobody waits twice for the same node's control link.
    fn hand_over(&self, node: NodeId, purpose: Purpose, link: Arrival, socket: TcpStream) {
        match purpose {
            Purpose::Memory | Purpose::MemoryHere | Purpose::Files => {
                log::debug!("refused a connection: that is another process's");
            }
            Purpose::Control => {
                if let Some(waiting) = self.control.borrow_mut().remove(&node) {
                    let _ = waiting.try_send(link);
                }
            }
            Purpose::Log => drop(self.log.0.try_send((node, link, socket))),
        }
    }

    /// The next node that connects for the log.
    pub async fn next_fed(&self) -> Option<Fed> {
        self.log.1.recv().await.ok()
    }
}

impl std::fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrivals").finish_non_exhaustive()
    }
}

/// What is needed to start nodes from here.
pub struct Subtree {
    tasks: Spawner,
    children: Rc<Children>,
    arrivals: Arrivals,
    /// The enrolment that this node's children get, but for their own number and host.
    enroll: Enroll,
    processes: Rc<RefCell<Vec<Process>>>,
    at_once: Rc<Semaphore>,
    /// Starts under way.
    starting: RefCell<Vec<Task<()>>>,
    /// A node that is this machine, however the others are reached.
    here: Cell<Option<NodeId>>,
}

impl std::fmt::Debug for Subtree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subtree").finish_non_exhaustive()
    }
}

impl Subtree {
    /// `enroll` is this node's own; `addresses` are where it listens.
    pub fn new(
        tasks: Spawner,
        children: Rc<Children>,
        arrivals: Arrivals,
        enroll: &Enroll,
        addresses: Vec<String>,
    ) -> Subtree {
        let enroll = Enroll { parent: addresses, ..enroll.clone() };
        Subtree {
            tasks,
            children,
            arrivals,
            enroll,
            processes: Rc::default(),
            at_once: Rc::new(Semaphore::new(AT_ONCE)),
            starting: RefCell::default(),
            here: Cell::new(None),
        }
    }

    /// This node is on this machine: no way has to be found there.
    pub fn start_here(&self, node: NodeId) {
        self.here.set(Some(node));
    }

    /// Whether all nodes are this machine.
    pub fn is_local(&self) -> bool {
        self.enroll.agent == AgentKind::Local
    }

    /// Starts those of `nodes` whose parent this node is, [`AT_ONCE`] at a time, and hands each what is below it. What fails is reported for
    /// the whole sub-tree.
    pub fn start(
        &self,
        nodes: Vec<NodeSpec>,
        report: impl Fn(Report) -> smol::future::BoxedLocal<()> + Clone + 'static,
    ) {
        let me = self.enroll.node;
        for spec in nodes.iter().filter(|s| s.parent == me) {
            let below = below(&nodes, spec.node);
            let (spec, report) = (spec.clone(), report.clone());
            let enroll = Enroll { node: spec.node, host: spec.host.clone(), ..self.enroll.clone() };
            let (tasks, children, arrivals) =
                (Rc::clone(&self.tasks), Rc::clone(&self.children), self.arrivals.clone());
            let (processes, at_once) = (Rc::clone(&self.processes), Rc::clone(&self.at_once));
            // Before anybody is told to come.
            let here = self.here.get() == Some(spec.node);
            let coming = (enroll.agent.come() && !here).then(|| arrivals.expect(spec.node));
            let kind = if here { AgentKind::Local } else { enroll.agent.clone() };
            let work = async move {
                let ids: Vec<NodeId> = below.iter().map(|s| s.node).chain([spec.node]).collect();
                let started = match coming {
                    Some(coming) => let_in(coming, enroll).await,
                    None => {
                        let _one = at_once.acquire().await;
                        bring_up(&tasks, &arrivals, &kind, enroll, &processes).await
                    }
                };
                match started {
                    Ok(((reader, writer), joined)) => {
                        children.add(spec.node, &ids, reader, writer);
                        report(joined).await;
                        if !below.is_empty() {
                            children.order(Target::Node(spec.node), Order::Start { nodes: below }, Vec::new()).await;
                        }
                    }
                    Err(error) => {
                        for node in ids {
                            report(Report::NotStarted { node, error: error.to_string() }).await;
                        }
                    }
                }
            };
            self.starting.borrow_mut().push(self.tasks.spawn(work));
        }
    }

    /// Takes over a command that started agents.
    pub fn adopt(&self, process: Process) {
        self.processes.borrow_mut().push(process);
    }

    /// Ends the starts that are under way, and collects the commands that started agents; those that linger are killed.
    pub async fn reap(&self) {
        let starting = self.starting.take();
        for start in starting {
            start.cancel().await;
        }
        let mut processes = self.processes.take();
        let ended = async {
            for process in &mut processes {
                process.end().await;
            }
        };
        let late = async {
            Timer::after(KILLED).await;
        };
        ended.or(late).await;
    }
}

/// The nodes of the sub-tree under `top`, without itself.
fn below(nodes: &[NodeSpec], top: NodeId) -> Vec<NodeSpec> {
    let mut within = std::collections::HashSet::from([top]);
    // Parents come before their children.
    nodes.iter().filter(|s| within.contains(&s.parent) && within.insert(s.node)).cloned().collect()
}

/// Starts an agent, enrols it, and waits for its link: a connection of its own, or the pipe.
async fn bring_up(
    tasks: &Spawner,
    arrivals: &Arrivals,
    kind: &AgentKind,
    enroll: Enroll,
    processes: &RefCell<Vec<Process>>,
) -> Result<(Arrival, Report)> {
    let host = enroll.host.clone();
    let Agent { mut reader, mut writer, process, said } = agent::start(tasks, kind, &host).await?;
    processes.borrow_mut().push(process);
    let node = enroll.node;
    let arrived = arrivals.expect(node);
    let local = *kind == AgentKind::Local;
    let enroll = if local { Enroll { parent: Vec::new(), ..enroll } } else { enroll };
    let order = Packet::new(&Down { to: Target::Node(node), order: Order::Enroll(enroll) }, Vec::new());
    let joining = async {
        writer.send(&order).await.op("enrol the agent")?;
        let by_pipe = async {
            let first = reader.receive().await.op("hear the agent")?;
            Ok((first, None))
        };
        let by_connection = async {
            let Ok((mut reader, writer)) = arrived.recv().await else { return smol::future::pending().await };
            let first = reader.receive().await.op("hear the agent")?;
            Ok((first, Some((reader, writer))))
        };
        by_connection.or(by_pipe).await
    };
    let late = async {
        Timer::after(JOIN).await;
        Err(Error::new("enrol the agent", format!("it did not join within {} s", JOIN.as_secs())))
    };
    let joined = joining.or(late).await;
    arrivals.control.borrow_mut().remove(&node);
    let (first, connection) = joined.map_err(|error| {
        let words = said.lock().map(|s| s.iter().cloned().collect::<Vec<_>>().join("; ")).unwrap_or_default();
        if words.is_empty() { error.at(host.clone()) } else { Error::new("enrol the agent", words).at(host.clone()) }
    })?;
    let report: Report = first.message().op("hear the agent")?;
    if !matches!(report, Report::Joined { .. }) {
        return Err(Error::new("enrol the agent", "its first word is not that it joined").at(host));
    }
    let link = match connection {
        Some(link) => {
            // The pipe stays open on both sides: to the agent its end means that we are gone.
            tasks.spawn(hold(reader, writer)).detach();
            link
        }
        None => (reader, writer),
    };
    Ok((link, report))
}

/// Waits for an agent that comes by itself, and enrols it.
async fn let_in(coming: Receiver<Arrival>, enroll: Enroll) -> Result<(Arrival, Report)> {
    let (host, node) = (enroll.host.clone(), enroll.node);
    // It has its link to the parent.
    let enroll = Enroll { parent: Vec::new(), ..enroll };
    let joining = async {
        let (mut reader, mut writer) = coming.recv().await.op("wait for the agent")?;
        let order = Down { to: Target::Node(node), order: Order::Enroll(enroll) };
        writer.send(&Packet::new(&order, Vec::new())).await.op("enrol the agent")?;
        let report: Report = reader.receive().await.op("hear the agent")?.message().op("hear the agent")?;
        match report {
            Report::Joined { .. } => Ok(((reader, writer), report)),
            _ => Err(Error::new("enrol the agent", "its first word is not that it joined")),
        }
    };
    let late = async {
        Timer::after(COME).await;
        Err(Error::new("wait for the agent", format!("it did not come within {} s", COME.as_secs())))
    };
    joining.or(late).await.map_err(|error| error.at(host))
}

/// Keeps an unused pipe open until the other side closes it.
async fn hold(mut reader: Reader, writer: Writer) {
    while reader.receive().await.is_ok() {}
    drop(writer);
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use crate::net::link;

    #[test]
    fn a_control_link_is_accepted_once_and_only_while_it_is_expected() {
        let arrivals = Arrivals::default();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let come = |node| {
            let link = link::trusted(smol::io::empty(), smol::io::sink());
            let socket = smol::block_on(TcpStream::connect(listener.local_addr().unwrap())).unwrap();
            arrivals.hand_over(node, Purpose::Control, link, socket);
        };
        come(7);
        let (expect, expected) = bounded(1);
        arrivals.control.borrow_mut().insert(7, expect);
        assert!(expected.try_recv().is_err(), "it came before it was expected");
        come(8);
        assert!(expected.try_recv().is_err(), "another node's");
        come(7);
        assert!(expected.try_recv().is_ok());
        come(7);
        assert!(expected.try_recv().is_err(), "a second one");
    }
}
