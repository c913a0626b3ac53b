//! Starting ranks: a child that still runs in its parent's memory takes its streams and executes the bootstrapper out of memory, or,
//! where that is forbidden, does what the bootstrapper would (`rank.rs`).
//!
//! The child is made by `clone(2)` with CLONE_VM and without CLONE_VFORK: no page table is copied, whatever the size of the parent,
//! and the parent goes on at once, so that many children are on their way at the same time, even when the program comes from a file
//! system that lets them wait. The kernel clears a word of the child's slot when the child leaves this memory (CLONE_CHILD_CLEARTID:
//! at exec or at its end); then the slot is used for the next.
//!
//! Hazards: the child has the parent's thread-local storage. It makes raw system calls only (no `errno`), allocates nothing, takes no
//! lock and never panics. Until Linux 5.16 a signal that dumps core ends everybody who shares the memory, so the parent, too.
#![allow(unsafe_code, reason = "clone into shared memory, raw system calls, exec")]

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fs;
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::libc;
use nix::unistd::{Pid, getpid};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use super::plan::{MEMBER_FD, NOT_STARTED, PLAN_FD, Plan, Rank};
use super::process::above_standard;
use super::rank::Block;
use super::syscall::{nr, syscall};

/// The bootstrapper, as `build.rs` made it.
static BOOT: &[u8] = include_bytes!(env!("HPCRT_BOOT"));

/// How far a rank came that did not become the program; see [`super::plan::Failures`].
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Not fatal: the bootstrapper cannot be executed out of memory, the rank starts without it.
    Image,
    /// The bootstrapper did not come as far as its plan.
    Boot,
    /// Not fatal: there is no such working directory, the fall-back is used.
    Home,
    /// Neither the working directory nor the fall-back can be entered.
    Cwd,
    /// The rank is to be held, or something put into it, and may not be traced.
    Hold,
    /// The program cannot be executed.
    Exec,
}

/// The bootstrapper as an executable descriptor.
///
/// # Errors
/// The kernel refuses memfds, or executable ones (`vm.memfd_noexec`).
pub fn image() -> io::Result<OwnedFd> {
    // MFD_EXEC is needed where `vm.memfd_noexec` is 1, and unknown before Linux 6.3.
    let make = |flags| rustix::fs::memfd_create("hpcrt-boot", MemfdFlags::CLOEXEC | flags);
    let fd = match make(MemfdFlags::EXEC) {
        Err(Errno::INVAL) => make(MemfdFlags::empty()),
        made => made,
    }?;
    rustix::io::write(&fd, BOOT)?;
    // Exec refuses a file that anybody has open for writing: reopen it read-only.
    let image = fs::File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
    above_standard(image.into())
}

/// Bytes of stack for a child: a few small frames. In a debug build they are larger.
const STACK: usize = 16 << 10;

#[repr(align(16))]
struct Stack([MaybeUninit<u8>; STACK]);

/// Everything that belongs to one child while it is in this memory.
struct Slot {
    /// Not 0 while a child uses the slot; cleared by the kernel.
    busy: AtomicU32,
    block: Block,
    rank: &'static Rank,
    fds: [RawFd; 4],
    plan: RawFd,
    image: Option<RawFd>,
    /// What the bootstrapper is told.
    words: [CString; 3],
    argv: [*const u8; 4],
    /// For the pointers of a rank that starts without it.
    room: Vec<*const u8>,
    stack: Box<Stack>,
}

/// Starts the ranks of one job. What it maps and allocates lives as long as the process, because children may be using it.
pub struct Starter {
    block: Block,
    len: u64,
    plan: OwnedFd,
    image: Option<OwnedFd>,
    /// Slots, the one used longest ago first. Each came out of a `Box` and is never freed.
    slots: VecDeque<*mut Slot>,
}

impl std::fmt::Debug for Starter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Starter").field("image", &self.image).field("slots", &self.slots.len()).finish()
    }
}

impl Starter {
    /// For the ranks of a plan that [`super::program::Program::write`] made. They die with this process. Without an `image` of the
    /// bootstrapper, and where it cannot be executed, they start without it.
    ///
    /// # Errors
    /// The plan is none, or cannot be mapped.
    pub fn new(plan: OwnedFd, image: Option<OwnedFd>) -> io::Result<Starter> {
        let plan = above_standard(plan)?;
        let keeper = getpid().as_raw().cast_unsigned();
        rustix::io::pwrite(&plan, &keeper.to_ne_bytes(), offset_of!(Plan, keeper) as u64)?;
        let len = rustix::fs::fstat(&plan)?.st_size.cast_unsigned();
        // SAFETY: the caller gives a plan as it is written, sealed against changes of its length; the line above was the last change.
        let block = unsafe { Block::map(plan.as_raw_fd() as usize, len as usize) };
        let block = block.map_err(|errno| io::Error::from_raw_os_error(errno.cast_signed()))?;
        Ok(Starter { block, len, plan, image, slots: VecDeque::new() })
    }

    /// From now on starts the ranks of another plan. Before the first was started: what fails for ranks of the old one is not told.
    ///
    /// # Errors
    /// As [`Starter::new`]'s.
    pub fn follow(&mut self, plan: OwnedFd) -> io::Result<()> {
        *self = Starter::new(plan, self.image.take())?;
        Ok(())
    }

    /// Starts the rank with this index: `fds` become its standard streams and [`MEMBER_FD`]. All other descriptors of this process must
    /// be close-on-exec, and none of `fds` below 3.
    ///
    /// # Errors
    /// `clone(2)`'s, or an index beyond the ranks. What fails in the child ends it with [`NOT_STARTED`] and is told by
    /// [`Starter::failed`].
    pub fn start(&mut self, index: u32, fds: [BorrowedFd<'_>; 4]) -> io::Result<Pid> {
        let rank = self.block.rank(index).ok_or(io::ErrorKind::InvalidInput)?;
        let at = self.free_slot(rank);
        // SAFETY: `free_slot` gives a live slot that no child uses.
        let slot = unsafe { &mut *at };
        slot.rank = rank;
        slot.fds = fds.map(|fd| fd.as_raw_fd());
        let number = |number: u64| CString::new(number.to_string()).expect("digits have no NUL");
        slot.words = [c"hpcrt-boot".to_owned(), number(index.into()), number(self.len)];
        slot.argv =
            [slot.words[0].as_ptr(), slot.words[1].as_ptr(), slot.words[2].as_ptr(), null()].map(<*const _>::cast);
        slot.room.resize(self.block.pointers(rank), null());
        slot.busy.store(1, Ordering::Relaxed);
        let busy = slot.busy.as_ptr();
        // The stack grows downward; its end is aligned as the ABI wants.
        let top = slot.stack.0.as_mut_ptr_range().end;
        let flags = libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
        // SAFETY: `become_rank` gets the slot it takes and a stack of its own. The slot stays as it is until the kernel clears `busy`,
        // which it does when the child no longer uses this memory; what it points to is never freed.
        let pid = unsafe {
            libc::clone(become_rank, top.cast(), flags, at.cast(), null_mut::<c_void>(), null_mut::<c_void>(), busy)
        };
        if pid < 0 {
            let error = io::Error::last_os_error();
            slot.busy.store(0, Ordering::Relaxed);
            return Err(error);
        }
        Ok(Pid::from_raw(pid))
    }

    /// Whether ranks are held for a debugger when they have become their program; and what is to be put into them before.
    pub fn stops(&self) -> (bool, Option<&'static CStr>) {
        self.block.stops()
    }

    /// That it could not be put there.
    pub fn fail(&self, index: u32, errno: i32) {
        if let Some(rank) = self.block.rank(index) {
            rank.failures.hold.store(errno.cast_unsigned(), Ordering::Release);
        }
    }

    /// What failed for a rank, once it has ended.
    pub fn failed(&self, index: u32) -> impl Iterator<Item = (Stage, i32)> {
        let stages = self.block.rank(index).map(|Rank { failures, .. }| {
            [
                (Stage::Image, &failures.image),
                (Stage::Boot, &failures.boot),
                (Stage::Home, &failures.home),
                (Stage::Cwd, &failures.cwd),
                (Stage::Hold, &failures.hold),
                (Stage::Exec, &failures.exec),
            ]
        });
        let told =
            stages.into_iter().flatten().map(|(stage, errno)| (stage, errno.load(Ordering::Acquire).cast_signed()));
        told.filter(|(_, errno)| *errno != 0)
    }

    /// A slot that no child uses. Children leave about in the order in which they came.
    fn free_slot(&mut self, rank: &'static Rank) -> *mut Slot {
        let is_free = |slot: &*mut Slot| {
            // SAFETY: slots are never freed, and the kernel writes the word as one.
            unsafe { (**slot).busy.load(Ordering::Acquire) == 0 }
        };
        let oldest = if self.slots.front().is_some_and(is_free) { self.slots.pop_front() } else { None };
        let slot = oldest.unwrap_or_else(|| {
            Box::into_raw(Box::new(Slot {
                busy: AtomicU32::new(0),
                block: self.block,
                rank,
                fds: [-1; 4],
                plan: self.plan.as_raw_fd(),
                image: self.image.as_ref().map(AsRawFd::as_raw_fd),
                words: Default::default(),
                argv: [null(); 4],
                room: Vec::new(),
                stack: Box::new(Stack([MaybeUninit::uninit(); STACK])),
            }))
        });
        self.slots.push_back(slot);
        slot
    }
}

/// The child; see the module for what it must not do.
extern "C" fn become_rank(slot: *mut c_void) -> c_int {
    let slot = slot.cast::<Slot>();
    // SAFETY: `Starter::start` passes a slot that it does not touch while this child is in its memory, except to look at `busy`.
    let (room, Slot { block, rank, fds, plan, image, argv, .. }) = unsafe { ((*slot).room.as_mut_ptr(), &*slot) };
    // SAFETY: every call gets integers, or pointers to strings and arrays of the slot, which lives until exec.
    let call = |number, args| unsafe { syscall(number, args) };
    for (at, fd) in [0, 1, 2, MEMBER_FD].into_iter().zip(fds) {
        // The copy is not close-on-exec, as wanted; nor is what is in its place already.
        let done = if *fd as usize == at {
            call(nr::FCNTL, [at, libc::F_SETFD as usize, 0, 0, 0, 0])
        } else {
            call(nr::DUP3, [*fd as usize, at, 0, 0, 0, 0])
        };
        if let Err(errno) = done {
            rank.failures.exec.store(errno, Ordering::Release);
            return NOT_STARTED;
        }
    }
    // Signals go to the group, and may come any time.
    let _ = call(nr::SETPGID, [0; 6]);
    if let Some(image) = image
        && call(nr::DUP3, [*plan as usize, PLAN_FD, 0, 0, 0, 0]).is_ok()
    {
        rank.failures.boot.store(libc::ENOMEM as u32, Ordering::Release);
        let none = &argv[argv.len() - 1..];
        let [path, argv, envp] = [c"".as_ptr() as usize, argv.as_ptr() as usize, none.as_ptr() as usize];
        if let Err(errno) = call(nr::EXECVEAT, [*image as usize, path, argv, envp, libc::AT_EMPTY_PATH as usize, 0]) {
            rank.failures.image.store(errno, Ordering::Release);
        }
        rank.failures.boot.store(0, Ordering::Release);
        let _ = call(nr::CLOSE, [PLAN_FD, 0, 0, 0, 0, 0]);
    }
    // SAFETY: the rank is of this block, and the slot has room for its pointers.
    unsafe { block.become_program(rank, room) };
    NOT_STARTED
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use nix::sys::signal::Signal;
    use nix::sys::wait::{WaitStatus, waitpid};

    use super::super::program::Program;
    use super::*;

    fn shell(line: &str) -> Program {
        Program {
            path: b"/bin/sh".to_vec(),
            cwd: b"/".to_vec(),
            home: b"/".to_vec(),
            argv: ["sh", "-c", line].map(|word| word.as_bytes().to_vec()).to_vec(),
            env: vec![b"A=1".to_vec()],
            counted: vec![("B".to_owned(), 0)],
            ranks: 40,
            nofile: (64, 64),
            ..Program::default()
        }
    }

    fn null() -> File {
        File::options().read(true).write(true).open("/dev/null").unwrap()
    }

    /// The bootstrapper, none, and one that cannot be executed.
    fn images() -> [Option<OwnedFd>; 3] {
        [Some(image().unwrap()), None, Some(above_standard(null().into()).unwrap())]
    }

    #[test]
    fn ranks_get_their_streams_environment_and_limits() {
        for (image, refused) in images().into_iter().zip([false, false, true]) {
            let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
            // The plan must not stay open.
            let line = "[ -e /proc/$$/fd/3 ] && A=open; echo $A $B $(ulimit -n) $(pwd); exit $B";
            let mut starter = Starter::new(shell(line).write().unwrap(), image).unwrap();
            let null = null();
            let mut start =
                |index: u32| starter.start(index, [null.as_fd(), writer.as_fd(), null.as_fd(), null.as_fd()]).unwrap();
            let pids: Vec<Pid> = (0..40).map(&mut start).collect();
            assert!(starter.start(40, [null.as_fd(); 4]).is_err());
            drop(writer);
            for (pid, index) in pids.into_iter().zip(0..) {
                assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, index)));
            }
            let mut text = String::new();
            File::from(reader).read_to_string(&mut text).unwrap();
            let mut lines: Vec<&str> = text.lines().collect();
            lines.sort_by_key(|line| line.split(' ').nth(1).and_then(|n| n.parse::<u32>().ok()));
            let expected: Vec<String> = (0..40).map(|index| format!("1 {index} 64 /")).collect();
            assert_eq!(lines, expected);
            let told: Vec<_> = (0..40).flat_map(|index| starter.failed(index)).collect();
            assert_eq!(told, vec![(Stage::Image, libc::EACCES); if refused { 40 } else { 0 }]);
        }
    }

    fn told(program: &Program, image: Option<OwnedFd>) -> Vec<(Stage, i32)> {
        let null = null();
        let mut starter = Starter::new(program.write().unwrap(), image).unwrap();
        let pid = starter.start(1, [null.as_fd(); 4]).unwrap();
        assert!(matches!(waitpid(pid, None), Ok(WaitStatus::Exited(_, NOT_STARTED))));
        assert_eq!(starter.failed(0).count(), 0);
        starter.failed(1).filter(|(stage, _)| *stage != Stage::Image).collect()
    }

    #[test]
    fn failures_are_told() {
        let nowhere = Program { path: b"/nonexistent/x".to_vec(), cwd: b"/nonexistent".to_vec(), ..shell("") };
        let homeless = Program { home: b"/nonexistent".to_vec(), ..nowhere.clone() };
        for (image, again) in images().into_iter().zip(images()) {
            assert_eq!(told(&nowhere, image), [(Stage::Home, libc::ENOENT), (Stage::Exec, libc::ENOENT)]);
            assert_eq!(told(&homeless, again), [(Stage::Cwd, libc::ENOENT)]);
        }
    }

    #[test]
    fn a_rank_that_is_held_stops_as_its_program() {
        let null = null();
        for image in images() {
            let mut starter = Starter::new(shell("exit 1").write().unwrap(), image).unwrap();
            starter.follow(Program { hold: true, ..shell("exit 7") }.write().unwrap()).unwrap();
            let pid = starter.start(0, [null.as_fd(); 4]).unwrap();
            assert_eq!(waitpid(pid, None), Ok(WaitStatus::Stopped(pid, Signal::SIGTRAP)));
            let program = |path: &str| fs::canonicalize(path).unwrap();
            assert_eq!(program(&format!("/proc/{pid}/exe")), program("/bin/sh"));
            nix::sys::ptrace::detach(pid, None).unwrap();
            assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, 7)));
        }
    }

    #[test]
    fn a_bootstrapper_that_finds_no_plan_is_told() {
        let null = null();
        let mut starter = Starter::new(shell("").write().unwrap(), Some(image().unwrap())).unwrap();
        starter.len += 1;
        let pid = starter.start(0, [null.as_fd(); 4]).unwrap();
        assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, NOT_STARTED)));
        assert_eq!(starter.failed(0).collect::<Vec<_>>(), [(Stage::Boot, libc::ENOMEM)]);
        let other = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        assert!(Starter::new(other, None).is_err());
    }
}
