//! Becoming a rank: a child that still runs in its parent's memory applies what belongs to the rank and executes the program.
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
use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::libc;
use nix::unistd::{Pid, getpid};

use super::syscall::{nr, syscall};

/// How far a rank came that did not become the program.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Not fatal: there is no such working directory, the fall-back is used.
    Home,
    /// Neither the working directory nor the fall-back can be entered.
    Cwd,
    /// The program cannot be executed.
    Exec,
}

/// What all ranks of a job on this node become. Strings must not contain NUL.
#[derive(Debug, Clone, Default)]
pub struct Program {
    pub path: Vec<u8>,
    /// Working directory, and the one to fall back on.
    pub cwd: Vec<u8>,
    pub home: Vec<u8>,
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    /// Soft and hard RLIMIT_NOFILE.
    pub nofile: (u64, u64),
}

/// [`Program`] as the kernel takes it.
struct Image {
    path: CString,
    cwd: CString,
    home: CString,
    /// Pointers to leaked strings.
    argv: Vec<*const c_char>,
    env: Vec<CString>,
    nofile: [u64; 2],
    /// Who must still be the child's parent; otherwise the job is over.
    parent: usize,
}

/// The errno of each stage that failed for a rank; 0: none did.
#[derive(Default)]
struct Failures([AtomicU32; 3]);

/// Bytes of stack for a child: a few small frames. In a debug build they are larger.
const STACK: usize = 16 << 10;

#[repr(align(16))]
struct Stack([MaybeUninit<u8>; STACK]);

/// Everything that belongs to one child while it is in this memory.
struct Slot {
    /// Not 0 while a child uses the slot; cleared by the kernel.
    busy: AtomicU32,
    image: &'static Image,
    failures: &'static Failures,
    stdio: [RawFd; 3],
    mask: Vec<u8>,
    own_env: Vec<CString>,
    envp: Vec<*const c_char>,
    stack: Box<Stack>,
}

/// Starts the ranks of one job. What it allocates lives as long as the process, because children may be using it.
pub struct Starter {
    image: &'static Image,
    failures: &'static [Failures],
    /// Slots, the one used longest ago first. Each came out of a `Box` and is never freed.
    slots: VecDeque<*mut Slot>,
}

impl std::fmt::Debug for Starter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Starter").field("program", &self.image.path).field("slots", &self.slots.len()).finish()
    }
}

/// Exit code of a child that could not become the program.
const NOT_STARTED: c_int = 125;

impl Starter {
    /// For at most `ranks` ranks. They die with this process.
    ///
    /// # Errors
    /// A string contains NUL.
    pub fn new(program: Program, ranks: usize) -> io::Result<Starter> {
        let strings = |texts: Vec<Vec<u8>>| texts.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>();
        let argv = strings(program.argv)?.leak().iter().map(|word| word.as_ptr());
        let image = Image {
            path: CString::new(program.path)?,
            cwd: CString::new(program.cwd)?,
            home: CString::new(program.home)?,
            argv: argv.chain([null()]).collect(),
            env: strings(program.env)?,
            nofile: [program.nofile.0, program.nofile.1],
            parent: usize::try_from(getpid().as_raw()).unwrap_or(0),
        };
        let mut failures = Vec::new();
        failures.resize_with(ranks, Failures::default);
        Ok(Starter { image: Box::leak(Box::new(image)), failures: failures.leak(), slots: VecDeque::new() })
    }

    /// Starts the rank with this index: `stdio` becomes its standard streams, `own_env` is added to its environment, `mask` is its
    /// processor set as `sched_setaffinity(2)` takes it (empty: any). All other descriptors of this process must be close-on-exec,
    /// and none of `stdio` below 3.
    ///
    /// # Errors
    /// `clone(2)`'s, an index beyond the ranks, or a NUL in `own_env`. What fails in the child ends it with code 125 and is told by
    /// [`Starter::failed`].
    pub fn start(
        &mut self,
        index: u32,
        stdio: [BorrowedFd<'_>; 3],
        own_env: Vec<Vec<u8>>,
        mask: &[u8],
    ) -> io::Result<Pid> {
        let failures = self.failures.get(index as usize).ok_or(io::ErrorKind::InvalidInput)?;
        let own_env = own_env.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?;
        let at = self.free_slot();
        // SAFETY: `free_slot` gives a live slot that no child uses.
        let slot = unsafe { &mut *at };
        slot.failures = failures;
        slot.stdio = stdio.map(|fd| fd.as_raw_fd());
        slot.mask.clear();
        slot.mask.extend_from_slice(mask);
        slot.own_env = own_env;
        slot.envp.clear();
        slot.envp.extend(self.image.env.iter().chain(&slot.own_env).map(|var| var.as_ptr()));
        slot.envp.push(null());
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

    /// What failed for a rank, once it has ended or has become the program.
    pub fn failed(&self, index: u32) -> impl Iterator<Item = (Stage, i32)> {
        let failures = self.failures.get(index as usize);
        let stages = [Stage::Home, Stage::Cwd, Stage::Exec].into_iter();
        stages.filter_map(move |stage| {
            let errno = failures?.0[stage as usize].load(Ordering::Acquire);
            (errno != 0).then_some((stage, errno.cast_signed()))
        })
    }

    /// A slot that no child uses. Children leave about in the order in which they came.
    fn free_slot(&mut self) -> *mut Slot {
        let is_free = |slot: &*mut Slot| {
            // SAFETY: slots are never freed, and the kernel writes the word as one.
            unsafe { (**slot).busy.load(Ordering::Acquire) == 0 }
        };
        let oldest = if self.slots.front().is_some_and(is_free) { self.slots.pop_front() } else { None };
        let slot = oldest.unwrap_or_else(|| {
            Box::into_raw(Box::new(Slot {
                busy: AtomicU32::new(0),
                image: self.image,
                failures: &self.failures[0],
                stdio: [-1; 3],
                mask: Vec::new(),
                own_env: Vec::new(),
                envp: Vec::new(),
                stack: Box::new(Stack([MaybeUninit::uninit(); STACK])),
            }))
        });
        self.slots.push_back(slot);
        slot
    }
}

/// The child; see the module for what it must not do.
extern "C" fn become_rank(slot: *mut c_void) -> c_int {
    const SIGKILL: usize = libc::SIGKILL as usize;
    // SAFETY: `Starter::start` passes a slot that it does not touch while this child is in its memory.
    let Slot { image, failures, stdio, mask, envp, .. } = unsafe { &*slot.cast::<Slot>() };
    // SAFETY: every call gets integers, or pointers into the slot and its image, which live until exec and are of the type and length
    // that the call takes.
    let call = |number, args| unsafe { syscall(number, args) };
    let fail = |stage: Stage, errno| failures.0[stage as usize].store(errno, Ordering::Release);
    for (at, fd) in stdio.iter().enumerate() {
        // The copy is not close-on-exec, as wanted.
        if let Err(errno) = call(nr::DUP3, [*fd as usize, at, 0, 0, 0, 0]) {
            fail(Stage::Exec, errno);
            return NOT_STARTED;
        }
    }
    let _ = call(nr::PRCTL, [libc::PR_SET_PDEATHSIG as usize, SIGKILL, 0, 0, 0, 0]);
    // The parent may have died before the line above; then nobody would ever kill us.
    if call(nr::GETPPID, [0; 6]) != Ok(image.parent) {
        return NOT_STARTED;
    }
    let _ = call(nr::SETPGID, [0; 6]);
    if !mask.is_empty() {
        let _ = call(nr::SCHED_SETAFFINITY, [0, mask.len(), mask.as_ptr() as usize, 0, 0, 0]);
    }
    let _ = call(nr::PRLIMIT64, [0, libc::RLIMIT_NOFILE as usize, image.nofile.as_ptr() as usize, 0, 0, 0]);
    let none = 0u64;
    let _ = call(nr::RT_SIGPROCMASK, [libc::SIG_SETMASK as usize, &raw const none as usize, 0, size_of::<u64>(), 0, 0]);
    if let Err(errno) = call(nr::CHDIR, [image.cwd.as_ptr() as usize, 0, 0, 0, 0, 0]) {
        if call(nr::CHDIR, [image.home.as_ptr() as usize, 0, 0, 0, 0, 0]).is_err() {
            fail(Stage::Cwd, errno);
            return NOT_STARTED;
        }
        fail(Stage::Home, errno);
    }
    let (path, argv) = (image.path.as_ptr() as usize, image.argv.as_ptr() as usize);
    if let Err(errno) = call(nr::EXECVE, [path, argv, envp.as_ptr() as usize, 0, 0, 0]) {
        fail(Stage::Exec, errno);
    }
    NOT_STARTED
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use nix::sys::wait::{WaitStatus, waitpid};

    use super::*;

    fn shell(line: &str) -> Program {
        Program {
            path: b"/bin/sh".to_vec(),
            cwd: b"/".to_vec(),
            home: b"/".to_vec(),
            argv: ["sh", "-c", line].map(|word| word.as_bytes().to_vec()).to_vec(),
            env: vec![b"A=1".to_vec()],
            nofile: (64, 64),
        }
    }

    fn null() -> File {
        File::options().read(true).write(true).open("/dev/null").unwrap()
    }

    #[test]
    fn ranks_get_their_streams_environment_and_limits() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let mut starter = Starter::new(shell("echo $A $B $(ulimit -n) $(pwd); exit $B"), 40).unwrap();
        let null = null();
        let start = |index: u32| {
            let stdio = [null.as_fd(), writer.as_fd(), null.as_fd()];
            starter.start(index, stdio, vec![format!("B={index}").into_bytes()], &[]).unwrap()
        };
        let pids: Vec<Pid> = (0..40).map(start).collect();
        assert!(starter.start(40, [null.as_fd(); 3], Vec::new(), &[]).is_err());
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
        assert_eq!(starter.failed(0).count(), 0);
    }

    #[test]
    fn failures_are_told() {
        let null = null();
        let nowhere = Program { path: b"/nonexistent/x".to_vec(), cwd: b"/nonexistent".to_vec(), ..shell("") };
        let mut starter = Starter::new(nowhere.clone(), 1).unwrap();
        let pid = starter.start(0, [null.as_fd(); 3], Vec::new(), &[]).unwrap();
        assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, NOT_STARTED)));
        let told: Vec<_> = starter.failed(0).collect();
        assert_eq!(told, [(Stage::Home, libc::ENOENT), (Stage::Exec, libc::ENOENT)]);
        let mut starter = Starter::new(Program { home: b"/nonexistent".to_vec(), ..nowhere }, 1).unwrap();
        let pid = starter.start(0, [null.as_fd(); 3], Vec::new(), &[]).unwrap();
        waitpid(pid, None).unwrap();
        assert_eq!(starter.failed(0).collect::<Vec<_>>(), [(Stage::Cwd, libc::ENOENT)]);
        assert!(Starter::new(Program { argv: vec![b"a\0b".to_vec()], ..shell("") }, 1).is_err());
    }
}
