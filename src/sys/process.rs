//! Making, watching and removing processes.
//!
//! Hazard: [`fork`] is for single-threaded processes only (the keeper and the agent before its runtime starts): in the child of a
//! threaded one, a lock held by another thread is held for ever.
#![allow(unsafe_code, reason = "fork, exec in the child, signal dispositions")]

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid};
use rustix::io::Errno;
use rustix::process::{WaitOptions, wait};

/// `fork(2)`: `None` in the child, which must end in [`leave`] and run no destructor that belongs to the parent's work.
///
/// # Errors
/// `fork(2)`'s; also when this process has other threads, which would make it unsafe.
pub fn fork() -> io::Result<Option<Pid>> {
    if fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("this process has threads"));
    }
    // SAFETY: checked above: no other thread exists whose locks or half-done work the child could inherit.
    match unsafe { nix::unistd::fork() }? {
        ForkResult::Parent { child } => Ok(Some(child)),
        ForkResult::Child => Ok(None),
    }
}

/// Moves a descriptor above the standard streams and what a shell script may name.
///
/// # Errors
/// No descriptor is free.
pub fn above_standard(fd: OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 10)?)
}

/// Has the standard streams lead to `/dev/null`, which is returned.
///
/// # Errors
/// It cannot be opened.
pub fn let_go_of_streams() -> io::Result<fs::File> {
    let null = fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(null)
}

/// A descriptor that this process was started with, by the number that its environment tells; programs it starts do not get it. To be
/// called once for a number, before anything else is opened.
///
/// # Errors
/// It is not open.
pub fn inherited(number: u32) -> io::Result<OwnedFd> {
    let number = i32::try_from(number).map_err(|_| io::ErrorKind::InvalidInput)?;
    if !fs::exists(format!("/proc/self/fd/{number}"))? {
        return Err(io::Error::other("it is not open"));
    }
    // SAFETY: it is open, and as nothing else in this process knows of it (the caller promises), nobody else closes it.
    let fd: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(fd)
}

/// Has all programs that are started from now on get a copy of a descriptor under this number, in place of what this process was started
/// with under it (a lock of the shell's, or the same of a job around this one).
///
/// # Errors
/// This process has a descriptor of its own there: one that is close-on-exec.
pub fn pass_on(fd: &OwnedFd, number: i32) -> io::Result<()> {
    // SAFETY: asks only; a number that is free has no flags.
    let flags = unsafe { nix::libc::fcntl(number, nix::libc::F_GETFD) };
    if flags != -1 && flags & nix::libc::FD_CLOEXEC != 0 {
        return Err(io::Error::other(format!("number {number} is taken")));
    }
    // SAFETY: what is there, if anything, was inherited and is known to nobody here; the copy is nobody's but the programs'.
    if unsafe { nix::libc::dup2(fd.as_raw_fd(), number) } == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// From now on orphaned descendants become this process's children, so that it can find them all.
pub fn become_subreaper() {
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// Closes what this process was started with beyond its standard streams: the descriptors that programs would inherit. To be called while
/// nothing here knows of any of them.
///
/// # Errors
/// `/proc` cannot be read.
pub fn close_inherited() -> io::Result<()> {
    let numbers = fs::read_dir("/proc/self/fd")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for number in numbers.filter(|number: &i32| *number > 2).collect::<Vec<_>>() {
        // SAFETY: asks only; a number that is free has no flags.
        let flags = unsafe { nix::libc::fcntl(number, nix::libc::F_GETFD) };
        if flags != -1 && flags & nix::libc::FD_CLOEXEC == 0 {
            // SAFETY: all that this process opened is close-on-exec; this was inherited and is known to nobody here (the caller promises).
            unsafe { nix::libc::close(number) };
        }
    }
    Ok(())
}

/// Gets SIGTERM when its parent ends; `None`: not any more. Returns false when the parent is gone already.
pub fn end_with(parent: Option<Pid>) -> bool {
    let signal = parent.map(|_| rustix::process::Signal::TERM);
    let _ = rustix::process::set_parent_process_death_signal(signal);
    parent.is_none_or(|parent| nix::unistd::getppid() == parent)
}

/// Dies with its parent: the kernel sends SIGKILL when the parent's forking thread ends. Returns false when it is gone already.
pub fn die_with(parent: Pid) -> bool {
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    nix::unistd::getppid() == parent
}

/// Gives a signal its default disposition: SIGPIPE, which Rust ignores, because an ignored signal would stay ignored in the program;
/// SIGCHLD, because a parent that ignores it (and whoever it starts) hears nothing of its children's ends.
pub fn default_action(signal: Signal) {
    let action = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { sigaction(signal, &action) };
}

/// Has the allocator keep what is freed. Chunks come and go by the hundred; given back to the kernel each time, their pages would be
/// zeroed again for each. The buffers of threads that serve views (16 MiB, of which little is ever touched) are not kept: taken a second
/// time they would be zeroed, and so be there whole.
pub fn keep_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt sets parameters of the allocator and is called before any thread exists.
    unsafe {
        nix::libc::mallopt(nix::libc::M_MMAP_THRESHOLD, 8 << 20);
        nix::libc::mallopt(nix::libc::M_TRIM_THRESHOLD, 128 << 20);
    }
}

static NOFILE: OnceLock<(u64, u64)> = OnceLock::new();

/// Soft and hard RLIMIT_NOFILE as this process found them: what its programs get.
pub fn nofile() -> (u64, u64) {
    *NOFILE.get_or_init(|| {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        (limit.current.unwrap_or(u64::MAX), limit.maximum.unwrap_or(u64::MAX))
    })
}

/// Raises this process's own RLIMIT_NOFILE to what it may: every rank has two pipes here. Before there are threads: the table of
/// descriptors grows, too, and in a process with threads every doubling would wait for an RCU grace period, which is milliseconds.
pub fn raise_nofile() {
    const TABLE: u64 = 4096;
    let maximum = Some(nofile().1);
    let limit = rustix::process::Rlimit { current: maximum, maximum };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, limit);
    let last = i32::try_from(TABLE.min(nofile().1)).unwrap_or(0) - 1;
    drop(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stderr(), last));
}

/// Has a program be started as this process was: with that soft RLIMIT_NOFILE, and with no signal blocked. What is blocked here stays so in
/// what is started, which would not hear it if it does not unblock it by itself.
pub fn as_given(command: &mut Command) {
    let (resource, given) = (rustix::process::Resource::Nofile, nofile());
    let set = move || {
        let limit = rustix::process::Rlimit { current: given.0.into(), maximum: given.1.into() };
        let _ = rustix::process::setrlimit(resource, limit);
        Ok(SigSet::empty().thread_set_mask()?)
    };
    // SAFETY: two system calls and no allocation, which is all that a child of a process with threads may do.
    unsafe { command.pre_exec(set) };
}

/// Leaves without running anything that belongs to the parent this process was forked from.
pub fn leave(code: i32) -> ! {
    // SAFETY: never returns.
    unsafe { nix::libc::_exit(code) }
}

/// The bits that files which this process makes do not get.
pub fn umask() -> u32 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let octal = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    octal.and_then(|octal| u32::from_str_radix(octal.trim(), 8).ok()).unwrap_or(0o022)
}

/// The signals that this process was started to ignore, or ignores now; signal N is bit N - 1.
pub fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    signals(&status, "SigIgn:")
}

/// Whether a thread of any process was killed and has not left the kernel yet. False also when it cannot be asked.
pub fn is_dying(thread: u32) -> bool {
    // The kernel marks each thread of a process that is to end, by whatever signal.
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    ["SigPnd:", "ShdPnd:"].iter().any(|set| signals(&status, set) >> (Signal::SIGKILL as u32 - 1) & 1 == 1)
}

/// A set of signals in a status file of /proc; signal N is bit N - 1.
fn signals(status: &str, set: &str) -> u64 {
    let set = status.lines().find_map(|line| line.strip_prefix(set));
    set.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0)
}

/// Stops this process as a typed ^Z would have, had SIGTSTP not been blocked; returns when it is continued, or at once where nobody
/// could continue it (an orphaned process group).
pub fn stop_here() {
    let stop = SigSet::from(Signal::SIGTSTP);
    let _ = stop.thread_unblock();
    let _ = nix::sys::signal::raise(Signal::SIGTSTP);
    let _ = stop.thread_block();
}

/// Ends this process by a signal, without another core; returns if that does not end it.
pub fn die_by(signal: Signal) {
    let _ = nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_CORE, 0, 0);
    default_action(signal);
    let _ = SigSet::from(signal).thread_unblock();
    let _ = nix::sys::signal::raise(signal);
}

/// Pids of the direct children of this process.
pub fn children() -> Vec<Pid> {
    children_of(nix::unistd::getpid())
}

/// Pids of the direct children of a process that has no threads, or none that has children of its own.
pub fn children_of(parent: Pid) -> Vec<Pid> {
    if let Ok(text) = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")) {
        return text.split_whitespace().filter_map(|p| p.parse().ok().map(Pid::from_raw)).collect();
    }
    // Kernels without CONFIG_PROC_CHILDREN: ask every process for its parent.
    let parent_of = |pid: i32| -> Option<i32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    let all = fs::read_dir("/proc").into_iter().flatten().flatten();
    all.filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter(|&pid| parent_of(pid) == Some(parent.as_raw()))
        .map(Pid::from_raw)
        .collect()
}

/// Kills every descendant except `spare` (and theirs) and reaps them, generation after generation: whoever loses its parent becomes
/// a child of this subreaper. Gives up at the deadline (a process may hang in the kernel); true when none is left.
pub fn kill_descendants(spare: &[Pid], deadline: Duration) -> bool {
    let end = Instant::now() + deadline;
    loop {
        let doomed: Vec<Pid> = children().into_iter().filter(|c| !spare.contains(c)).collect();
        if doomed.is_empty() {
            return true;
        }
        for &pid in &doomed {
            let _ = nix::sys::signal::kill(pid, Signal::SIGKILL);
        }
        for pid in doomed {
            let _ = waitpid(pid, Some(WaitPidFlag::WNOHANG));
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A descriptor that becomes readable when a process ends: a child, or one that cannot have been reaped meanwhile.
///
/// # Errors
/// There is no such process, or no such descriptor before Linux 5.3.
pub fn watch(process: Pid) -> io::Result<OwnedFd> {
    let process = rustix::process::Pid::from_raw(process.as_raw()).ok_or(io::ErrorKind::InvalidInput)?;
    // Not PidfdFlags::NONBLOCK: that came with Linux 5.10, and nobody reads it.
    Ok(rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty())?)
}

/// Waits until a child has ended and reaps it, or the time is over.
pub fn await_end(child: Pid, deadline: Duration) {
    let (end, mut pause) = (Instant::now() + deadline, Duration::from_micros(50));
    if let Ok(died) = watch(child) {
        let limit = PollTimeout::try_from(deadline).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut [PollFd::new(died.as_fd(), PollFlags::POLLIN)], limit);
    }
    while let Ok(WaitStatus::StillAlive) = waitpid(child, Some(WaitPidFlag::WNOHANG))
        && Instant::now() < end
    {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(1));
    }
}

/// What a child has done; signals by number, since not all have names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Exited(i32),
    Killed(i32),
    Stopped(i32),
}

/// Takes what one child has done: one that is dead is reaped.
pub fn reap() -> Option<(Pid, Fate)> {
    loop {
        let (pid, status) = match wait(WaitOptions::NOHANG) {
            Ok(found) => found?,
            Err(Errno::INTR) => continue,
            Err(_) => return None,
        };
        let exited = status.exit_status().map(Fate::Exited);
        let killed = || status.terminating_signal().map(Fate::Killed);
        let stopped = || status.stopping_signal().map(Fate::Stopped);
        if let Some(fate) = exited.or_else(killed).or_else(stopped) {
            return Some((Pid::from_raw(pid.as_raw_nonzero().get()), fate));
        }
    }
}
