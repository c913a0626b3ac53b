//! The resident in a job's programs, and the door at which they come to their node's agent: a directory of the job's own on this node with the
//! file that is preloaded and the socket in it.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::Pid;
use smol::{Async, Task, Timer};

use super::Node;
use crate::loader::elf::Elf;
use crate::loader::linker::Linker;
use crate::loader::script::Shebang;
use crate::loader::view::directory::{self, Directory};
use crate::net::wire::control::Launch;
use crate::sys::resident::{DOOR, FILE, MARK, PLACE_MAX, Settings};
use crate::sys::without::Without;
use crate::{Error, Result, error::Context};

/// The residents, as `build.rs` made them: the pager, and the file layer.
#[cfg(target_arch = "x86_64")]
static RESIDENTS: Option<[&[u8]; 2]> =
    Some([include_bytes!(env!("HPCRT_RESIDENT")), include_bytes!(env!("HPCRT_IOFS"))]);
#[cfg(not(target_arch = "x86_64"))]
static RESIDENTS: Option<[&[u8]; 2]> = None;
/// In the first pages of what Go has linked: type and name of a note.
const GO: &[u8] = b"\x04\0\0\0Go\0\0";
const PRELOAD: &[u8] = b"LD_PRELOAD=";
/// Before the next attempt when no connection can be accepted.
const PAUSE: Duration = Duration::from_millis(50);

/// What is executed for a job's program if that is statically linked: itself, or what a script names. `None`: it is not, or cannot be read here, and so not be
/// executed here either, or is shown by the view.
///
/// # Errors
/// Its dynamic linker is not glibc's, it is one itself, or it is made by Go, whose threads have stacks on which no signal fits: nothing can be put into them for `operation`.
pub(super) fn statically_linked(launch: &Launch, operation: &'static str) -> Result<Option<PathBuf>> {
    let elf = |path: &Path| Elf::read(&fs::File::open(path).ok()?, None).ok();
    let program = Path::new(OsStr::from_bytes(&launch.program));
    let found = match elf(program) {
        Some(elf) => Some((program.to_owned(), elf)),
        None => script(program).and_then(|path| elf(&path).map(|elf| (path, elf))),
    };
    let Some((path, elf)) = found else { return Ok(None) };
    let refuse = |cause: &str, remedy| Err(Error::usage(operation, cause).on(&path).remedy(remedy));
    if let Some(linker) = elf.interpreter {
        return if Linker::is_musl(Path::new(&linker)) {
            refuse("its dynamic linker is musl's", "build it for glibc")
        } else {
            Ok(None)
        };
    }
    if elf.soname.is_some() {
        return refuse("it is a library or a dynamic linker", "name the program itself");
    }
    if memchr::memmem::find(&beginning(&path, 8 << 10), GO).is_some() {
        return refuse("it is statically linked by Go: nothing can be put into it", "build it with -linkmode=external");
    }
    Ok(Some(path))
}

/// What interprets a script.
fn script(program: &Path) -> Option<PathBuf> {
    Shebang::parse(&beginning(program, 256)).map(|script| script.interpreter.into())
}

fn beginning(path: &Path, len: usize) -> Vec<u8> {
    let read = |file| crate::loader::elf::read_up_to(&file, 0, len).ok();
    fs::File::open(path).ok().and_then(read).unwrap_or_default()
}

/// See the module. The directory goes with it.
pub(super) struct Door {
    directory: Directory,
    socket: Rc<Async<OwnedFd>>,
}

impl Door {
    /// Makes one, and has the programs with this environment preload the resident with these settings; their place is the door's.
    ///
    /// # Errors
    /// There is no place for the resident, or `operation`, which needs it, is not built for this processor.
    pub(super) fn open(operation: &'static str, env: &mut Vec<Vec<u8>>, settings: Settings) -> Result<Door> {
        let directory = Directory::create(&directory::executable(&Without::from_env()?)?)?;
        let path = &directory.path;
        let opened = (|| {
            let resident = resident(operation, path.as_os_str().as_bytes(), settings)?;
            fs::write(path.join(FILE), resident).op_on("write", path.join(FILE))?;
            listen(&path.join(DOOR))
        })();
        let socket = Rc::new(opened.inspect_err(|_| directory.remove())?);
        let door = Door { directory, socket };
        door.preload(env);
        Ok(door)
    }

    /// Has other programs preload it, too.
    pub(super) fn preload(&self, env: &mut Vec<Vec<u8>>) {
        preload(env, self.resident().as_os_str().as_bytes());
    }

    /// The resident's file.
    pub(super) fn resident(&self) -> PathBuf {
        self.directory.path.join(FILE)
    }

    /// The directory that it and what programs make beside it are in.
    pub(super) fn directory(&self) -> &Path {
        &self.directory.path
    }

    /// Shows a descriptor of ours there.
    ///
    /// # Errors
    /// Its directory takes no more names.
    pub(super) fn show(&self, name: &str, fd: BorrowedFd<'_>) -> Result<()> {
        let (path, target) =
            (self.directory.path.join(name), format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd()));
        std::os::unix::fs::symlink(target, &path).op_on("make", path)
    }

    /// Has every program that comes answered, each by a task of its own.
    pub(super) fn serve<F: Future<Output = ()> + 'static>(
        &self,
        node: &Rc<Node>,
        answer: impl Fn(Async<OwnedFd>) -> F + 'static,
    ) -> Task<()> {
        let (socket, tasks) = (Rc::clone(&self.socket), Rc::clone(&node.tasks));
        node.tasks.spawn(async move {
            loop {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let accepted = socket.read_with(|fd| Ok(rustix::net::accept_with(fd, flags)?)).await;
                match accepted.and_then(Async::new) {
                    Ok(program) => tasks.spawn(answer(program)).detach(),
                    Err(_) => _ = Timer::after(PAUSE).await,
                }
            }
        })
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.directory.remove();
    }
}

/// The process at the other end; `None`: it is another user's.
pub(super) fn peer(program: &Async<OwnedFd>) -> Result<Option<Pid>> {
    // The directory keeps others out already.
    let peer = rustix::net::sockopt::socket_peercred(program).op("ask who a program is")?;
    Ok((peer.uid == rustix::process::geteuid()).then_some(peer.pid))
}

/// Sends a program a message with descriptors.
pub(super) fn send(program: &Async<OwnedFd>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(fds));
    let vector = [io::IoSlice::new(bytes)];
    rustix::net::sendmsg(program, &vector, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The resident with its settings in it.
fn resident(operation: &'static str, place: &[u8], settings: Settings) -> Result<Vec<u8>> {
    let only_there = || Error::new(operation, "that is built for x86-64 only");
    let [pager, files] = RESIDENTS.ok_or_else(only_there)?;
    let mut bytes = if settings.files == 0 { pager } else { files }.to_vec();
    if place.len() >= PLACE_MAX {
        let error = Error::new("place the resident", format!("its path has more than {} bytes", PLACE_MAX - 1));
        return Err(error.remedy("set XDG_RUNTIME_DIR to a shorter one"));
    }
    let at = memchr::memmem::find(&bytes, &MARK).map(|at| at + MARK.len());
    let room = at.and_then(|at| bytes.get_mut(at..at + size_of::<Settings>()));
    let (there, rest) = room.expect("tests look into the resident that was built").split_at_mut(PLACE_MAX);
    there[..place.len()].copy_from_slice(place);
    let Settings { place: _, local, user_mode_only, without_move, files, memory, roots } = settings;
    let numbers = [local, user_mode_only, without_move, files, memory].map(u64::to_le_bytes).concat();
    rest.copy_from_slice(&[&numbers[..], &roots].concat());
    Ok(bytes)
}

/// The file comes before what else is preloaded.
pub(super) fn preload(env: &mut Vec<Vec<u8>>, file: &[u8]) {
    let mut line = [PRELOAD, file].concat();
    let others = env.iter().rposition(|var| var.starts_with(PRELOAD)).map(|at| env.remove(at));
    if let Some(others) = others.as_deref().and_then(|var| var.strip_prefix(PRELOAD)).filter(|list| !list.is_empty()) {
        line.push(b':');
        line.extend_from_slice(others);
    }
    env.push(line);
}

fn listen(path: &Path) -> Result<Async<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.op("make a socket")?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).op_on("name the socket", path)?).op_on("make", path)?;
    rustix::net::listen(&socket, 1024).op_on("listen on", path)?;
    Async::new(socket).op("watch a socket")
}
