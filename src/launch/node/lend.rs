//! The server that this node runs for a job, of memory or of files: a process of its own, so that what is lent is told apart from the agent's
//! memory, and that it is killed first where memory ends. It dies with the agent, and with the socket between them.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use async_channel::{Receiver, Sender, bounded};
use smol::future::FutureExt;
use smol::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use smol::stream::StreamExt;
use smol::{Async, Task, Timer};

use super::Node;
use crate::error::{Context, Result};
use crate::launch::agent::{OURSELVES, Process, listen};
use crate::net::auth::SessionKey;
use crate::net::wire::control::{JobId, Report, Service};
use crate::pager::server::Terms;

/// Servers that were stopped have ended within this time.
const PATIENCE: Duration = Duration::from_secs(10);

/// See the module. Dropped, it is killed, and its end is waited for.
pub(super) struct Lend {
    service: Service,
    serving: Task<()>,
    /// Closed: it is to end.
    stop: Sender<()>,
}

impl Lend {
    /// Starts it, and reports how that went and whether it ends by itself.
    pub(super) fn start(node: &Rc<Node>, job: JobId, service: Service, key: SessionKey) -> Lend {
        let this = Rc::clone(node);
        let (stop, stopped) = bounded(1);
        let before = node.stopped.take();
        let work = async move {
            // What they had may be what this one promises.
            let ended = async {
                while !before.iter().all(Task::is_finished) {
                    Timer::after(Duration::from_millis(10)).await;
                }
            };
            let late = async {
                Timer::after(PATIENCE).await;
            };
            ended.or(late).await;
            before.into_iter().for_each(Task::detach);
            let id = this.id;
            let ended = this.serve_job(job, Terms { service, here: this.subtree.is_local(), key }, &stopped).await;
            let error = ended.unwrap_or_else(|error| error.to_string());
            if !stopped.is_closed() {
                this.report(&Report::Unlent { job, node: id, error }).await;
            }
        };
        Lend { service, serving: node.tasks.spawn(work), stop }
    }

    /// Kills it, and waits for nothing: the kernel takes back what it has lent at some GB a second, and an agent that waited meanwhile would seem to be dead. Done when it has ended.
    pub(super) fn stop(self) -> Task<()> {
        self.stop.close();
        self.serving
    }

    /// Bytes that it has promised.
    pub(super) fn lent(&self) -> u64 {
        match self.service {
            Service::Memory { bytes } => bytes,
            Service::Files => 0,
        }
    }
}

impl Node {
    /// Runs the server until it ends, or is to; returns how it ended.
    async fn serve_job(&self, job: JobId, terms: Terms, stopped: &Receiver<()>) -> Result<String> {
        const OPERATION: &str = "start the server";
        let mode = match terms.service {
            Service::Memory { .. } => ["serve", "--lend"],
            Service::Files => ["ioworker", "--forward"],
        };
        let (ours, theirs) = UnixStream::pair().op(OPERATION)?;
        let mut command = Command::new(OURSELVES);
        command.args(mode).stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut server = Process::start(&mut command).op(OPERATION)?;
        // Ours: what it inherited from the command would keep the socket open.
        drop(command);
        let said = Arc::default();
        let hearing = server.errors().map(|errors| self.tasks.spawn(listen(errors, Arc::clone(&said))));
        let mut ours = Async::new(ours).op(OPERATION)?;
        match ours.write_all(terms.to_line().as_bytes()).await {
            // It has ended: how is told below.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            written => written.op(OPERATION)?,
        }
        let mut lines = BufReader::new(ours).lines();
        let mut addresses = Vec::new();
        // An empty line ends the list; the end of the socket before that is the server's own end.
        let mut up = false;
        let serving = async {
            while let Some(Ok(line)) = lines.next().await {
                if line.is_empty() {
                    up = true;
                    break;
                }
                addresses.push(line);
            }
            if up {
                self.report(&Report::Lent { job, node: self.id, addresses }).await;
                while let Some(Ok(_)) = lines.next().await {}
            }
        };
        let stopping = async {
            let _ = stopped.recv().await;
        };
        serving.or(stopping).await;
        if stopped.is_closed() {
            server.kill();
        }
        server.end().await;
        if let Some(hearing) = hearing {
            hearing.await;
        }
        let words = said.lock().map(|said| said.iter().cloned().collect::<Vec<_>>().join("; ")).unwrap_or_default();
        let words = words.strip_prefix("hpcrt: ").unwrap_or(&words).to_owned();
        let how = server.ended().map_or_else(|| "it ended".to_owned(), |status| status.to_string());
        let why = if words.is_empty() { how } else { words };
        Ok(if up { format!("its {} ended: {why}", terms.service.server()) } else { why })
    }
}
