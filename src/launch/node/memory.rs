//! A job's programs that use memory of other nodes: the resident that is preloaded into them, and the door at which it gets its connections.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::rc::Rc;
use std::time::Duration;

use rustix::net::RecvFlags;
use rustix::process::Pid;
use smol::{Async, Task, Timer};

use super::Node;
use super::door::{self, Door, peer, send};
use super::lend::Lend;
use crate::net::wire::control::{JobId, Launch, Place, Report};
use crate::net::wire::facts::Paging;
use crate::net::wire::page::LABEL;
use crate::pager::borrow::{self, Servers};
use crate::pager::budget;
use crate::pager::counts::Page;
use crate::sys::resident::{AGAIN, ASK, ASK_FOR_CHILD, Again, Failure, cause};
use crate::{Error, Result, error::Context};

/// Limits are looked at this often.
const LOOK: Duration = Duration::from_secs(1);

/// See the module.
pub(super) struct Memory {
    programs: Rc<Programs>,
    door: Door,
    /// The program is statically linked.
    alone: bool,
    _serving: Task<()>,
    _budget: Task<()>,
}

/// The programs of a job that borrow memory.
struct Programs {
    servers: Servers,
    /// Bytes that each may keep here: as was said, and now.
    local: u64,
    /// What the node's limits allowed each when the job began.
    bound: u64,
    budget: Cell<u64>,
    /// What those that run count.
    running: RefCell<Vec<Rc<Page>>>,
    /// What the others counted.
    ended: RefCell<Paging>,
}

impl Programs {
    /// What all have counted; `None` while none has asked for more than it may keep.
    fn paging(&self) -> Option<Paging> {
        let mut all = self.ended.borrow().clone();
        self.running.borrow().iter().flat_map(|page| page.read()).for_each(|paging| all.add(&paging));
        (all.programs > 0).then_some(all)
    }

    /// Has them keep less while the node's limits are tighter than they were when the job began. Never ends.
    async fn follow_limits(self: Rc<Self>, count: u32, promised: u64) {
        loop {
            Timer::after(LOOK).await;
            let now = Some(budget::bound(count, promised)).filter(|now| *now < self.bound);
            let budget = now.map_or(self.local, |now| self.local.min(now).max(budget::LEAST.min(self.local)));
            if self.budget.replace(budget) != budget {
                self.running.borrow().iter().for_each(|page| drop(page.set_budget(budget)));
            }
        }
    }

    fn end(&self, page: &Rc<Page>) {
        self.running.borrow_mut().retain(|other| !Rc::ptr_eq(other, page));
        if let Ok(paging) = page.read() {
            self.ended.borrow_mut().add(&paging.ended());
        }
    }
}

impl Memory {
    /// Prepares what a job needs, and puts it into its environment; `None`: it uses no other memory.
    ///
    /// # Errors
    /// There is no place for the resident, or the program is none that it can be in.
    pub(super) fn open(node: &Rc<Node>, launch: &mut Launch, place: &Place) -> Result<Option<Memory>> {
        let Some(wish) = launch.memory.clone() else { return Ok(None) };
        let alone = door::statically_linked(launch, "use --memory")?.is_some();
        let promised = node.lends.borrow().values().map(Lend::lent).sum();
        let local = wish.local.map_or_else(|| budget::share(place.locals, promised), Ok)?;
        let servers = Servers::new(&wish, &node.key)?;
        let programs = Rc::new(Programs {
            servers,
            local,
            bound: budget::bound(place.locals, promised),
            budget: Cell::new(local),
            running: RefCell::default(),
            ended: RefCell::default(),
        });
        let door = Door::open("use memory of other nodes", &mut launch.env, borrow::settings(local)?)?;
        let (at, job, lent) = (Rc::clone(node), launch.job, Rc::clone(&programs));
        let _serving = door.serve(node, move |program| {
            let (node, programs) = (Rc::clone(&at), Rc::clone(&lent));
            async move {
                if let Err(error) = answer(&node, job, &program, &programs).await {
                    node.report(&Report::Failed { job, node: node.id, error: error.to_string() }).await;
                }
            }
        });
        let (following, count) = (Rc::clone(&programs), place.locals);
        let _budget = node.tasks.spawn(following.follow_limits(count, promised));
        Ok(Some(Memory { programs, door, alone, _serving, _budget }))
    }

    /// What is to be put into a program that loads nothing by itself.
    pub(super) fn resident(&self) -> Option<Vec<u8>> {
        self.alone.then(|| self.door.resident().into_os_string().into_vec())
    }

    /// What its programs have counted, if any borrows memory. `over`: none of them runs, though not all may have been heard to end.
    pub(super) fn paging(&self, over: bool) -> Option<Paging> {
        let paging = self.programs.paging();
        if over { paging.map(Paging::ended) } else { paging }
    }
}

/// Serves one program: gives it connections if it asks for them, and hears why it ends.
async fn answer(node: &Node, job: JobId, program: &Async<OwnedFd>, programs: &Programs) -> Result<()> {
    let Some(pid) = peer(program)? else { return Ok(()) };
    let mut page = None;
    let ended = loop {
        let mut message = [0; size_of::<Failure>()];
        let receive = program.read_with(|fd| Ok(rustix::net::recv(fd, &mut message[..], RecvFlags::empty())?.0)).await;
        match receive {
            Ok(len) if message[..len] == ASK || message[..len] == ASK_FOR_CHILD => {
                let (grant, fds, missing) = match programs.servers.connect(&label(&node.host, pid)).await {
                    Err(error) if message[..len] == ASK_FOR_CHILD => {
                        let error = Error::new("let a program fork", error).to_string();
                        node.report(&Report::Unlent { job, node: node.id, error }).await;
                        break Ok(());
                    }
                    connected => connected?,
                };
                for error in missing {
                    node.report(&Report::Unlent { job, node: node.id, error: error.to_string() }).await;
                }
                let counts = Rc::new(Page::new(programs.budget.get()).op("make a page for counts")?);
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).chain([counts.fd()]).collect();
                match send(program, &grant, &fds) {
                    // It is gone, or does not wait any more.
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => break Ok(()),
                    sent => sent.op("hand connections to a program")?,
                }
                programs.running.borrow_mut().push(Rc::clone(&counts));
                page = Some(counts);
            }
            Ok(len) if len == size_of::<Again>() && message.starts_with(&AGAIN) => {
                // It asks again.
                let again = programs.servers.connect_again(&label(&node.host, pid), &message[..len]).await;
                let Ok((grant, fds)) = again else { break Ok(()) };
                // One more than the servers', for counts.
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).chain(fds.first().map(AsFd::as_fd)).collect();
                let _ = send(program, &grant, &fds);
            }
            Ok(len) if len == message.len() && borrow::failure(&message).cause == cause::GOES_ON => {
                programs.servers.lose(&borrow::failure(&message));
                let error = programs.servers.explain(&borrow::failure(&message)).to_string();
                node.report(&Report::Unlent { job, node: node.id, error }).await;
            }
            Ok(len) if len == message.len() => break Err(programs.servers.explain(&borrow::failure(&message))),
            // It has ended, or says something that no resident says.
            _ => break Ok(()),
        }
    };
    page.iter().for_each(|page| programs.end(page));
    ended
}

/// What a memory server shows of a program: of the host's name as much as fits, without its domain if that does not.
fn label(host: &str, pid: Pid) -> String {
    let pid = pid.as_raw_nonzero();
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let program = format!("{pid} {}", name.trim_end());
    let room = LABEL.saturating_sub(program.len() + 1);
    let short = host.split('.').next().filter(|_| host.len() > room).unwrap_or(host);
    format!("{short:.room$} {program}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_shown_on_hosts_with_long_names() {
        let name = |host| label(host, rustix::process::getpid());
        let own = name("n");
        let program = own.strip_prefix("n ").unwrap();
        assert!(program.starts_with(&std::process::id().to_string()), "{own}");
        let host = &"compute-0123"[..12.min(LABEL - 1 - program.len())];
        assert_eq!(name("compute-0123.cluster.example.edu"), format!("{host} {program}"));
    }
}
