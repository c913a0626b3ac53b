//! A job whose ranks another launcher starts: lets them in, and watches over those that came.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nix::unistd::Pid;
use rustix::process::{Signal, pidfd_send_signal};
use smol::future::FutureExt;
use smol::{Async, Timer};

use super::job::{Job, misunderstood, unheard};
use crate::launch::guest::{self, Porch};
use crate::launch::keeper::KILLED;
use crate::loader::audit::Audit;
use crate::net::seqpacket::Seqpacket;
use crate::net::wire::control::Report;
use crate::net::wire::guest::{Guest, Welcome};
use crate::net::wire::keeper::{Ask, Tell};
use crate::sys::process;
use crate::{Result, error::Context};

/// Between SIGTERM and SIGKILL, for guests of a job that is ended.
const GRACE: Duration = Duration::from_millis(500);

/// How guests come to the job's files.
#[derive(Debug, Default)]
pub(super) enum Inside {
    /// There is nothing to show, or no way to.
    #[default]
    Plain,
    /// The mount namespace and, unless root made it, the user namespace.
    Namespaces(Vec<OwnedFd>),
    /// By what their linkers are told, with so many bytes of thread-local storage.
    Linker(Arc<Audit>, u64),
}

/// Guests that came.
#[derive(Debug, Default)]
struct Present {
    came: u32,
    /// Those that have not ended.
    there: Vec<Rc<Async<OwnedFd>>>,
}

impl Job {
    /// Asks the keeper for the namespaces that guests enter.
    pub(super) async fn share(&self) -> Result<()> {
        let ask = Ask::Share { name: guest::name(&self.node.session, self.launch.job) };
        self.tell_keeper(&ask, &[]).await.map_err(|e| unheard("show the program's files", e))?;
        match self.heard().await? {
            (Tell::Inside, fds) => {
                *self.inside.borrow_mut() = Inside::Namespaces(fds);
                Ok(())
            }
            (other, _) => Err(misunderstood(&other)),
        }
    }

    /// Lets guests in until as many as expected have come and ended, or the job is ended; then nobody of them is left.
    pub(super) async fn have_guests(self: &Rc<Self>) -> Result<()> {
        self.started.set(true);
        let (job, node) = (self.launch.job, self.node.id);
        let opened = Porch::of(&guest::name(&self.node.session, job))?.open()?;
        self.node.report(&Report::Open { job, node }).await;
        let present = Rc::new(RefCell::new(Present::default()));
        let serve = async {
            let Some(opened) = &opened else { return smol::future::pending().await };
            loop {
                let guest = opened.door.accept().await;
                let (this, present) = (Rc::clone(self), Rc::clone(&present));
                let answer = async move {
                    if let Err(error) = this.let_in(guest, &present).await {
                        log::debug!("a guest was not let in: {error}");
                    }
                };
                self.node.tasks.spawn(answer).detach();
            }
        };
        let ended = async {
            let _ = self.abort.1.recv().await;
            Ok(())
        };
        let all_gone = async {
            let expected = self.place.count;
            while expected == 0 || present.borrow().came < expected || !present.borrow().there.is_empty() {
                // Their ends are told one by one; this only ends the job.
                Timer::after(Duration::from_millis(20)).await;
            }
            Ok(())
        };
        let served: Result<()> = serve.or(ended).or(all_gone).await;
        drop(opened);
        see_out(&present).await;
        *self.inside.borrow_mut() = Inside::Plain;
        self.ask(Ask::Go);
        served
    }

    async fn let_in(&self, guest: Seqpacket, present: &RefCell<Present>) -> Result<()> {
        let pid = guest.peer();
        let guest = Async::new(guest).op("hear a guest")?;
        let heard = guest.read_with(Seqpacket::receive_now::<Guest>).await.op("hear a guest")?;
        let Some((Guest { env }, _)) = heard else { return Ok(()) };
        present.borrow_mut().came += 1;
        // Before it can end.
        let process = pid.and_then(watch);
        {
            let inside = self.inside.borrow();
            let sent = match &*inside {
                Inside::Plain => guest.get_ref().send(&Welcome::Plain, &[]),
                Inside::Namespaces(fds) => {
                    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                    guest.get_ref().send(&Welcome::Namespaces, &fds)
                }
                Inside::Linker(audit, static_tls) => {
                    guest.get_ref().send(&Welcome::Linker { env: audit.environment(&env, *static_tls) }, &[])
                }
            };
            sent.op("answer a guest")?;
        }
        if let Some(process) = process {
            present.borrow_mut().there.push(Rc::clone(&process));
            self.mark(|times| &mut times.started);
            self.running.set(self.running.get() + 1);
            let _ = process.readable().await;
            self.ended(1);
            present.borrow_mut().there.retain(|other| !Rc::ptr_eq(other, &process));
        }
        Ok(())
    }
}

/// A guest's process; `None` when it is gone already, or before Linux 5.3.
fn watch(pid: i32) -> Option<Rc<Async<OwnedFd>>> {
    process::watch(Pid::from_raw(pid)).and_then(Async::new_nonblocking).ok().map(Rc::new)
}

/// Ends those who are still there: without the agent their files are gone.
async fn see_out(present: &RefCell<Present>) {
    for (signal, limit) in [(Signal::TERM, GRACE), (Signal::KILL, KILLED)] {
        for guest in &present.borrow().there {
            let _ = pidfd_send_signal(guest.as_ref(), signal);
        }
        let gone = async {
            while !present.borrow().there.is_empty() {
                Timer::after(Duration::from_millis(5)).await;
            }
        };
        let late = async {
            Timer::after(limit).await;
        };
        gone.or(late).await;
    }
}
