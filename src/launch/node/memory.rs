//! A job's programs that use memory of other nodes: the resident that is preloaded into them, and the door at which it gets its connections.

use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use smol::{Async, Task, Timer};

use super::Node;
use crate::loader::view::directory::{self, Directory};
use crate::net::wire::control::{JobId, Launch, Place, Report};
use crate::net::wire::facts::Paging;
use crate::pager::borrow::{self, Servers};
use crate::pager::budget;
use crate::pager::counts::Page;
use crate::sys::resident::{ASK, DOOR, FILE, Failure, cause};
use crate::sys::without::Without;
use crate::{Result, error::Context};

const PRELOAD: &[u8] = b"LD_PRELOAD=";
/// Limits are looked at this often.
const LOOK: Duration = Duration::from_secs(1);
/// Before the next attempt when no connection can be accepted.
const PAUSE: Duration = Duration::from_millis(50);

/// See the module. The directory goes with it.
pub(super) struct Memory {
    directory: Directory,
    programs: Rc<Programs>,
    _door: Task<()>,
    _budget: Task<()>,
}

/// The programs of a job that borrow memory.
struct Programs {
    servers: Servers,
    /// Bytes that each may keep here: as was said, and now.
    local: u64,
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

    /// Has them keep less where the node's limits have become tighter, and as much as before when they are not any more. Never ends.
    async fn follow_limits(self: Rc<Self>, count: u32) {
        loop {
            Timer::after(LOOK).await;
            let budget = self.local.min(budget::bound(count)).max(budget::LEAST.min(self.local));
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

impl Drop for Memory {
    fn drop(&mut self) {
        self.directory.remove();
    }
}

impl Memory {
    /// Prepares what a job needs, and puts it into its environment; `None`: it uses no other memory.
    ///
    /// # Errors
    /// There is no place for the resident.
    pub(super) fn open(node: &Rc<Node>, launch: &mut Launch, place: &Place) -> Result<Option<Memory>> {
        let Some(wish) = launch.memory.clone() else { return Ok(None) };
        let local = wish.local.map_or_else(|| budget::share(place.locals), Ok)?;
        let directory = Directory::create(&directory::executable(&Without::from_env()?)?)?;
        let path = directory.path.clone();
        let servers = Servers::new(&wish, &node.key)?;
        let programs = Rc::new(Programs {
            servers,
            local,
            budget: Cell::new(local),
            running: RefCell::default(),
            ended: RefCell::default(),
        });
        let door = (|| {
            let resident = borrow::resident(path.as_os_str().as_bytes(), local)?;
            std::fs::write(path.join(FILE), resident).op_on("write", path.join(FILE))?;
            listen(path.join(DOOR))
        })();
        let door = door.inspect_err(|_| directory.remove())?;
        let serving = serve(Rc::clone(node), door, launch.job, Rc::clone(&programs));
        preload(&mut launch.env, path.join(FILE).as_os_str());
        let (following, count) = (Rc::clone(&programs), place.locals);
        let _budget = node.tasks.spawn(following.follow_limits(count));
        Ok(Some(Memory { directory, programs, _door: node.tasks.spawn(serving), _budget }))
    }

    /// What its programs have counted, if any borrows memory. `over`: none of them runs, though not all may have been heard to end.
    pub(super) fn paging(&self, over: bool) -> Option<Paging> {
        let paging = self.programs.paging();
        if over { paging.map(Paging::ended) } else { paging }
    }
}

/// The resident comes before what else is preloaded.
fn preload(env: &mut Vec<Vec<u8>>, file: &OsStr) {
    let mut line = [PRELOAD, file.as_bytes()].concat();
    let others = env.iter().rposition(|var| var.starts_with(PRELOAD)).map(|at| env.remove(at));
    if let Some(others) = others.as_deref().and_then(|var| var.strip_prefix(PRELOAD)).filter(|list| !list.is_empty()) {
        line.push(b':');
        line.extend_from_slice(others);
    }
    env.push(line);
}

fn listen(path: PathBuf) -> Result<Async<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.op("make a socket")?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).op_on("name the socket", &path)?).op_on("make", &path)?;
    rustix::net::listen(&socket, 1024).op_on("listen on", &path)?;
    Async::new(socket).op("watch a socket")
}

async fn serve(node: Rc<Node>, door: Async<OwnedFd>, job: JobId, programs: Rc<Programs>) {
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accepted = door.read_with(|fd| Ok(rustix::net::accept_with(fd, flags)?)).await;
        let Ok(program) = accepted.and_then(Async::new) else {
            Timer::after(PAUSE).await;
            continue;
        };
        let (tasks, node, programs) = (Rc::clone(&node.tasks), Rc::clone(&node), Rc::clone(&programs));
        let answering = async move {
            if let Err(error) = answer(&node, job, &program, &programs).await {
                node.report(&Report::Failed { job, node: node.id, error: error.to_string() }).await;
            }
        };
        tasks.spawn(answering).detach();
    }
}

/// Serves one program: gives it connections if it asks for them, and hears why it ends.
async fn answer(node: &Node, job: JobId, program: &Async<OwnedFd>, programs: &Programs) -> Result<()> {
    // The directory keeps others out already.
    let peer = rustix::net::sockopt::socket_peercred(program).op("ask who a program is")?;
    if peer.uid != rustix::process::geteuid() {
        return Ok(());
    }
    let mut page = None;
    let ended = loop {
        let mut message = [0; size_of::<Failure>()];
        let receive = program.read_with(|fd| Ok(rustix::net::recv(fd, &mut message[..], RecvFlags::empty())?.0)).await;
        match receive {
            Ok(len) if message[..len] == ASK => {
                let (grant, fds, missing) = programs.servers.connect(&label(&node.host, peer.pid)).await?;
                for error in missing {
                    node.report(&Report::Unlent { job, node: node.id, error: error.to_string() }).await;
                }
                let counts = Rc::new(Page::new(programs.budget.get()).op("make a page for counts")?);
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).chain([counts.fd()]).collect();
                send(program, &grant, &fds).op("hand connections to a program")?;
                programs.running.borrow_mut().push(Rc::clone(&counts));
                page = Some(counts);
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

/// What a memory server shows of a program.
fn label(host: &str, pid: rustix::process::Pid) -> String {
    let pid = pid.as_raw_nonzero();
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("{host} {pid} {}", name.trim_end())
}

fn send(program: &Async<OwnedFd>, bytes: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]) -> io::Result<()> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(fds));
    let vector = [io::IoSlice::new(bytes)];
    rustix::net::sendmsg(program, &vector, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
