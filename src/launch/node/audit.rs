//! A node without namespaces: the agent's side of what the dynamic linkers of its programs are told.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags};
use smol::future::FutureExt;
use smol::lock::Semaphore;
use smol::{Async, Timer};

use super::Node;
use super::guests::Inside;
use super::job::{Job, unheard};
use super::replica::Replica;
use crate::loader::audit::Audit;
use crate::loader::audit::program::Audited;
use crate::loader::catalog::as_path;
use crate::loader::closure::Environment;
use crate::net::seqpacket::{Listener, Seqpacket};
use crate::net::wire::control::View;
use crate::net::wire::keeper::Ask;
use crate::sys::audit_table::MESSAGE_MAX;
use crate::{Error, Result, error::Context};

/// What was learnt by answering is told to programs that start this much later.
const GATHER: Duration = Duration::from_millis(50);

/// Puts the auditor into the store at `place` and answers what it asks.
pub(super) fn open(node: &Rc<Node>, replica: &Replica, place: &[u8]) {
    let opened = replica.audit_at(place).and_then(|audit| {
        let audit = Arc::new(audit);
        node.tasks.spawn(serve(Rc::clone(node), audit.door()?, Arc::clone(&audit))).detach();
        let changes = Async::new(audit.changes()?).op("watch files for changes")?;
        node.tasks.spawn(watch(changes, Arc::clone(&audit))).detach();
        Ok(audit)
    });
    *replica.audit.borrow_mut() = Some(opened.map_err(|error| error.to_string()));
}

/// Answers that are under way at a time. Each holds one of the threads (500 at most) on which what it waits for is written, too.
const ANSWERS: usize = 200;

async fn serve(node: Rc<Node>, door: Listener, audit: Arc<Audit>) {
    let free = Rc::new(Semaphore::new(ANSWERS));
    let writing = Rc::new(Cell::new(false));
    loop {
        let auditor = door.accept().await;
        let (audit, writing, tasks) = (Arc::clone(&audit), Rc::clone(&writing), Rc::clone(&node.tasks));
        let free = Rc::clone(&free);
        let answer = async move {
            if let Err(error) = answer(auditor, &audit, &free).await {
                log::debug!("an auditor was not answered: {error}");
            }
            if audit.is_unwritten() && !writing.replace(true) {
                tasks.spawn(write_later(audit, writing)).detach();
            }
        };
        node.tasks.spawn(answer).detach();
    }
}

/// Follows what the ranks change.
async fn watch(changes: Async<OwnedFd>, audit: Arc<Audit>) {
    while changes.readable().await.is_ok() {
        let audit = Arc::clone(&audit);
        if let Err(error) = smol::unblock(move || audit.refresh()).await {
            log::warn!("{error}");
        }
    }
}

async fn answer(auditor: Seqpacket, audit: &Arc<Audit>, free: &Semaphore) -> io::Result<()> {
    let auditor = Async::new(auditor)?;
    let mut message = vec![0; MESSAGE_MAX];
    let len = auditor.read_with(|fd| Ok(rustix::net::recv(fd, &mut message[..], RecvFlags::empty())?.0)).await?;
    message.truncate(len);
    let audit = Arc::clone(audit);
    let _place = free.acquire().await;
    let answer = smol::unblock(move || audit.answer(&message)).await;
    rustix::net::send(&auditor, &answer, SendFlags::NOSIGNAL)?;
    Ok(())
}

async fn write_later(audit: Arc<Audit>, writing: Rc<Cell<bool>>) {
    Timer::after(GATHER).await;
    writing.set(false);
    if let Err(error) = smol::unblock(move || audit.write()).await {
        log::warn!("{error}");
    }
}

impl Job {
    /// Waits until the program's files are here, and prepares what its linker will be told.
    pub(super) async fn show_to_linkers(
        self: &Rc<Self>,
        replica: &Rc<Replica>,
        audit: Result<Arc<Audit>, String>,
    ) -> Result<()> {
        let audit = audit.map_err(|error| Error::new("show the program's files", error))?;
        let launch = &self.launch;
        {
            let (audit, roots) = (Arc::clone(&audit), launch.roots.clone());
            smol::unblock(move || audit.add_roots(&roots)).await;
        }
        if let Err(error) = replica.loaded(launch.load).or(self.keeper_gone()).await {
            replica.reserve(launch.bytes)?;
            return Err(error);
        }
        let environment = Environment::of(&launch.env, &launch.cwd);
        let program = as_path(&launch.program).to_owned();
        let told = {
            let audit = Arc::clone(&audit);
            smol::unblock(move || {
                // Before the ranks change anything.
                audit.look_for_changes();
                audit.tell(&program, &environment)
            })
            .await
        };
        match told? {
            Audited::Yes { static_tls } => {
                let mut launch = launch.clone();
                launch.env = audit.environment(&launch.env, static_tls);
                let plan = super::job::program(&self.node, &launch, &self.place, Vec::new())
                    .write()
                    .op("write the launch plan")?;
                self.tell_keeper(&Ask::Plan, &[plan.as_fd()]).await.map_err(|e| unheard("start ranks", e))?;
                *self.inside.borrow_mut() = Inside::Linker(Arc::clone(&audit), static_tls);
            }
            Audited::No(why) => {
                let program = String::from_utf8_lossy(&launch.program).into_owned();
                if launch.view == View::Audit {
                    let error = Error::new("use --view audit for", why).on(program);
                    return Err(error.remedy("use --view none, or --view namespace where user namespaces are allowed"));
                }
                let warning =
                    format!("{program} reads the shared file system itself: there are no namespaces, and {why}");
                self.warnings.borrow_mut().push(warning);
            }
        }
        self.mark(|times| &mut times.loaded);
        Ok(())
    }
}
