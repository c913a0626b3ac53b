//! System calls on memory that is not here, where the kernel does not tell its own faults: a filter stops those with an address in the window,
//! before they begin, and the program's thread brings the pages here and holds them meanwhile.
//!
//! What the program executes keeps its filters ([`filter`]) and never meets them.

use core::sync::atomic::{AtomicBool, Ordering};

use sys::addresses;
use sys::page::PAGE;
use sys::syscall::{nr, syscall};

use super::filter::{self, Step};
use super::holds::{self, Holds};
use super::signals::{self, NEVER_BLOCKED, SIGSYS};
use super::{call, calls, hooks, window};

/// SA_SIGINFO, SA_RESTORER, SA_RESTART, SA_NODEFER.
const FLAGS: usize = 0x4 | 0x400_0000 | 0x1000_0000 | 0x4000_0000;
const SET_FILTER: usize = 1;
/// For all threads at once.
const TSYNC: usize = 1;
const NO_NEW_PRIVS: usize = 38;
const TRIES: usize = 12;
/// Bytes that a call may always hold at once; those of a message, which cannot come or go in parts.
const LEAST: usize = 16 * PAGE;
const MESSAGE: usize = 64 * PAGE;
const NOT_SUPPORTED: u32 = 95;
/// The position where an open file is.
const CURRENT: usize = usize::MAX;

/// It is in force.
static ON: AtomicBool = AtomicBool::new(false);
/// A call was stopped that was made to find out.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Of calls that may come back with less than was wanted: the argument that is a buffer, and the one that is its length.
fn buffer(number: usize) -> Option<(usize, usize)> {
    match number {
        nr::READ | nr::WRITE | nr::PREAD64 | nr::PWRITE64 | nr::RECVFROM | nr::SENDTO | nr::GETDENTS64 => Some((1, 2)),
        nr::GETRANDOM => Some((0, 1)),
        _ => None,
    }
}

/// Makes a system call of a program all of whose calls come to us.
pub(super) fn make(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    if is_ours(&args) { resolve(number, args, hooks::raw) } else { hooks::raw(number, args) }
}

/// Whether such a call is stopped where calls are: something that it is given is captured.
pub(super) fn is_ours(args: &[usize; 6]) -> bool {
    is_on() && args.iter().any(|at| window::contains(*at))
}

/// Makes a call with two pointers to so many bytes.
pub(super) fn with_parts<T>(parts: [usize; 2], len: usize, call: impl FnOnce() -> T) -> T {
    let mut holds = Holds::default();
    if is_on() {
        parts.iter().for_each(|at| _ = holds.add(*at, len));
    }
    call()
}

/// [`hooks::raw`], or the other in which a thread may be cancelled.
type Make = fn(usize, [usize; 6]) -> Result<usize, u32>;

/// Makes a system call that the filter stopped.
fn resolve(number: usize, args: [usize; 6], make: Make) -> Result<usize, u32> {
    const WAIT_ALL: usize = 0x100;
    if matches!(number, nr::MLOCK | nr::MLOCK2) {
        return hooks::lock(number, args);
    }
    if let Some((at, len)) = buffer(number).filter(|(at, _)| window::contains(args[*at])) {
        let least = if matches!(number, nr::RECVFROM | nr::SENDTO) { MESSAGE } else { LEAST };
        // What is written goes on as the kernel's own call would, and so does what is read whole. Anything but a file may have nothing more to give,
        // and would be waited for.
        let is_whole = matches!(number, nr::WRITE | nr::PWRITE64 | nr::SENDTO | nr::GETRANDOM)
            || number == nr::RECVFROM && args[3] & WAIT_ALL != 0
            || args[len] > holds::share(least) && is_regular(args[0]);
        return in_parts(args[len], is_whole, |done, left| {
            let mut args = args;
            args[at] += done;
            args[len] = left.min(holds::share(least));
            if matches!(number, nr::PREAD64 | nr::PWRITE64) {
                args[3] += done;
            }
            (args[len], held_call(number, args, make))
        });
    }
    held_call(number, args, make)
}

/// Calls with what was done, and is left, of so many bytes, which comes back with how many it wanted and what became of them, until they are done or, if not all is to
/// be, once.
fn in_parts(
    wanted: usize,
    is_whole: bool,
    call: impl Fn(usize, usize) -> (usize, Result<usize, u32>),
) -> Result<usize, u32> {
    let mut done = 0;
    loop {
        let (asked, result) = call(done, wanted - done);
        let moved = match result {
            Err(_) if done > 0 => return Ok(done),
            result => result?,
        };
        done += moved;
        if done >= wanted || moved < asked || !is_whole {
            return Ok(done);
        }
    }
}

/// Holds what the arguments point to: as many bytes as they say, or else as it takes.
fn held_call(number: usize, args: [usize; 6], make: Make) -> Result<usize, u32> {
    let lengths = addresses::lengths(number, &args);
    let mut guess = 256;
    for _ in 0..TRIES {
        let mut holds = Holds::default();
        for (at, len) in args.iter().zip(lengths) {
            holds.add(*at, if len > 0 { len } else { guess });
        }
        match make(number, args) {
            Err(call::EFAULT) => guess = (guess * 4).min(holds::most()),
            result => return result,
        }
    }
    Err(call::EFAULT)
}

fn is_regular(fd: usize) -> bool {
    const FORMAT: u32 = 0o170_000;
    const REGULAR: u32 = 0o100_000;
    let mut stat = [0u32; 36];
    // SAFETY: room for a `struct stat`, whose mode is its 7th word.
    let known = unsafe { syscall(nr::FSTAT, [fd, stat.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    known.is_ok() && stat[6] & FORMAT == REGULAR
}

/// A list of buffers, (address, length), of which the filter sees nothing.
#[derive(Clone, Copy)]
struct List {
    at: usize,
    count: usize,
}

impl List {
    /// The kernel takes no more.
    const MOST: usize = 1024;

    fn parts(self) -> impl Iterator<Item = [usize; 2]> {
        // SAFETY: the program says that there are so many.
        (0..self.count.min(List::MOST)).map(move |nth| unsafe { *(self.at as *const [usize; 2]).add(nth) })
    }

    /// Holds it, and what is in it up to so many bytes: how many there are, and how many of them are held.
    fn hold(self, holds: &mut Holds, most: usize) -> [usize; 2] {
        /// Held at once; of more the kernel takes what is here.
        const PARTS: usize = 256;
        holds.add(self.at, self.count.min(List::MOST) * size_of::<[usize; 2]>());
        let (mut all, mut held) = (0usize, 0);
        for (nth, [at, len]) in self.parts().enumerate() {
            let part = len.min(most - held);
            if nth < PARTS && held == all && holds.add(at, part) {
                held += part;
            }
            all = all.saturating_add(len);
        }
        [all, held]
    }

    /// Where the byte lies that so many are before, and how many of that buffer are left from there.
    fn find(self, mut before: usize) -> Option<(usize, usize)> {
        self.parts().find_map(|[at, len]| {
            let left = len.checked_sub(before).filter(|left| *left > 0);
            let found = left.map(|left| (at + before, left));
            before = before.saturating_sub(len);
            found
        })
    }

    /// Makes a call with all of it, and, if it `is_whole` but could not be held at once, others with one piece of a buffer each for what is left.
    fn go(
        self,
        least: usize,
        is_whole: impl Fn() -> bool,
        first: impl Fn() -> Result<usize, u32>,
        piece: impl Fn(usize, &[usize; 2]) -> Result<usize, u32>,
    ) -> Result<usize, u32> {
        let mut tries = 0..TRIES;
        let ([all, held], done) = loop {
            let mut holds = Holds::default();
            let parts = self.hold(&mut holds, holds::share(least));
            match first() {
                Err(call::EFAULT) if tries.next().is_some() => {}
                result => break (parts, result?),
            }
        };
        if done >= all || held >= all || done < held || !is_whole() {
            return Ok(done);
        }
        let more = in_parts(all - done, true, |more, _| {
            let Some((at, left)) = self.find(done + more) else { return (1, Ok(0)) };
            let part = [at, left.min(holds::share(least))];
            let mut holds = Holds::default();
            holds.add(at, part[1]);
            (part[1], piece(done + more, &part))
        });
        Ok(done + more.unwrap_or(0))
    }
}

/// Whether the second and third argument of a call are a list of buffers.
pub(super) fn has_list(number: usize) -> bool {
    matches!(number, nr::READV | nr::WRITEV | nr::PREADV | nr::PWRITEV | nr::PREADV2 | nr::PWRITEV2)
}

/// Makes such a call.
pub(super) fn with_list(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    let [fd, at, count, position, ..] = args;
    if !is_on() || at == 0 {
        return hooks::cancellable(number, args);
    }
    let is_whole = || matches!(number, nr::WRITEV | nr::PWRITEV | nr::PWRITEV2) || is_regular(fd);
    let piece = |done: usize, part: &[usize; 2]| {
        let position = if position == CURRENT { CURRENT } else { position.wrapping_add(done) };
        hooks::cancellable(number, [fd, &raw const *part as usize, 1, position, args[4], args[5]])
    };
    List { at, count }.go(LEAST, is_whole, || hooks::cancellable(number, args), piece)
}

/// Makes a call with lists of strings that ends the program if it succeeds: nothing is held, because nobody would let go of it.
pub(super) fn with_strings(
    path: usize,
    lists: [usize; 2],
    call: impl Fn() -> Result<usize, u32>,
) -> Result<usize, u32> {
    // SAFETY: the program says that these are strings, and lists of them that end with a null pointer.
    let string = |at: usize| (at..).find(|at| unsafe { (*at as *const u8).read_volatile() } == 0);
    // SAFETY: as above.
    let word = |at: usize| unsafe { (at as *const usize).read_volatile() };
    for _ in 0..TRIES {
        match call() {
            Err(call::EFAULT) if is_on() => {}
            result => return result,
        }
        let _ = string(path);
        for list in lists.into_iter().filter(|list| *list != 0) {
            (list..).step_by(size_of::<usize>()).map(word).take_while(|at| *at != 0).for_each(|at| _ = string(at));
        }
    }
    Err(call::EFAULT)
}

/// Whether calls may be stopped.
pub(super) fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// vmsplice(2) that copies: the pipe would have pages that go, and be others'. As that it waits until something fits, and not until all does.
pub(super) fn splice([fd, list, count, flags, ..]: [usize; 6]) -> Result<usize, u32> {
    const GET_FLAGS: usize = 3;
    const ACCESS: usize = 3;
    const READ_ONLY: usize = 0;
    const NO_WAIT: usize = 2;
    const RWF_NO_WAIT: usize = 8;
    /// What fits when anything does.
    const PIPE_BUF: usize = 4096;
    // SAFETY: integers.
    let mode = unsafe { call::gated(nr::FCNTL, [fd, GET_FLAGS, 0, 0, 0, 0]) }?;
    let reads = mode & ACCESS == READ_ONLY;
    let (some, one, ready) = if reads { (nr::PREADV2, nr::READ, 1) } else { (nr::PWRITEV2, nr::WRITE, 4) };
    let waits = flags & NO_WAIT == 0;
    loop {
        let mut polled = [fd as u32, ready];
        let time = if waits { usize::MAX } else { 0 };
        if hooks::cancellable(nr::POLL, [polled.as_mut_ptr() as usize, 1, time, 0, 0, 0])? == 0 {
            return Err(call::EAGAIN);
        }
        let result = match with_list(some, [fd, list, count, CURRENT, 0, RWF_NO_WAIT]) {
            // Before Linux 6.5 not of pipes.
            Err(NOT_SUPPORTED) => match (List { at: list, count }).find(0) {
                Some((at, left)) => make(one, [fd, at, left.min(PIPE_BUF), 0, 0, 0]),
                None => Ok(0),
            },
            result => result,
        };
        if result != Err(call::EAGAIN) || !waits {
            return result;
        }
    }
}

/// setsockopt(2): what is sent is copied, since pages go.
pub(super) fn set_option(args: [usize; 6]) -> Result<usize, u32> {
    const SOCKET: usize = 1;
    const ZEROCOPY: usize = 60;
    if args[1] == SOCKET && args[2] == ZEROCOPY { Err(NOT_SUPPORTED) } else { make(nr::SETSOCKOPT, args) }
}

/// Makes a call with a `struct msghdr`.
pub(super) fn with_message(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    let [fd, at, flags, ..] = args;
    if !is_on() || at == 0 {
        return hooks::cancellable(number, args);
    }
    let mut holds = Holds::default();
    let list = beside(&mut holds, at);
    // A message that does not go whole does not go at all; but it may be a stream.
    let piece = |_, [at, len]: &[usize; 2]| hooks::cancellable(nr::SENDTO, [fd, *at, *len, flags, 0, 0]);
    list.go(MESSAGE, || number == nr::SENDMSG, || hooks::cancellable(number, args), piece)
}

/// Makes a call with a list of them, or of as many from the first on as can be held: it says how many it has taken.
pub(super) fn with_messages(number: usize, mut args: [usize; 6]) -> Result<usize, u32> {
    /// `struct mmsghdr`
    const SIZE: usize = 64;
    let [_, at, count, ..] = args;
    let mut holds = Holds::default();
    if is_on() && at != 0 {
        let (mut left, count) = (holds::share(MESSAGE), count.min(List::MOST));
        holds.add(at, count * SIZE);
        holds.add(args[4], size_of::<[usize; 2]>());
        let fits = (0..count).take_while(|nth| {
            let [all, held] = beside(&mut holds, at + nth * SIZE).hold(&mut holds, left);
            left -= held;
            held == all
        });
        args[2] = fits.count().max(count.min(1));
    }
    hooks::cancellable(number, args)
}

/// Holds a `struct msghdr` and what it has beside its list.
fn beside(holds: &mut Holds, at: usize) -> List {
    holds.add(at, 56);
    // SAFETY: the program says that there is one.
    let [name, _, list, count, control, len, _] = unsafe { *(at as *const [usize; 7]) };
    holds.add(name, 128);
    holds.add(control, len.min(holds::most()));
    List { at: list, count: if list == 0 { 0 } else { count } }
}

/// Registers of a signal's frame (`asm/ucontext.h`): r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, ...
const REGISTERS: usize = 40 / 8;

extern "C" fn stopped(signal: i32, info: *const i32, frame: *mut usize) {
    /// `si_code`, the third word: a filter has stopped a call.
    const BY_FILTER: i32 = 1;
    // SAFETY: a `siginfo_t`.
    if unsafe { info.add(2).read() } != BY_FILTER {
        return signals::foreign(signal, info, frame);
    }
    // SAFETY: the kernel gives a frame with these registers, which are ours to change.
    unsafe {
        let at = |nth: usize| frame.add(REGISTERS + nth);
        let number = *at(13);
        let args = [*at(8), *at(9), *at(12), *at(2), *at(0), *at(1)];
        if (number, args[1]) == (PROBE, 0) {
            STOPPED.store(true, Ordering::Relaxed);
            *at(13) = (call::EINVAL as usize).wrapping_neg();
            return;
        }
        let make = if is_point(*at(16)) { hooks::cancellable } else { hooks::raw };
        *at(13) = match resolve(number, args, make) {
            Ok(value) => value,
            Err(errno) => (errno as usize).wrapping_neg(),
        };
        signals::keep(number, frame);
    }
}

/// Whether a call that goes on at `next` was made by glibc's one instruction (from 2.41 on) for those in which a thread may be cancelled. It knows them by that place, and this
/// one is made elsewhere; older ones have the thread cancelled anywhere meanwhile.
fn is_point(next: usize) -> bool {
    // mov [rsp + 8], r11; syscall
    const CODE: [u8; 7] = [0x4c, 0x89, 0x5c, 0x24, 8, 0x0f, 0x05];
    // SAFETY: in the page of the instruction that made the call.
    next % PAGE >= CODE.len() && unsafe { *((next - CODE.len()) as *const [u8; 7]) } == CODE
}

#[unsafe(naked)]
pub(super) extern "C" fn restore() {
    // These instructions are what unwinders know a handler's end by.
    core::arch::naked_asm!(".byte 0x48, 0xc7, 0xc0, {sigreturn}, 0, 0, 0", "syscall", sigreturn = const nr::RT_SIGRETURN)
}

/// A call that fails, since there is no room at the address that it is given, to see whether it is stopped.
const PROBE: usize = nr::SCHED_GETAFFINITY;

/// Sees to it that what the filter stops is made, and finds out whether there is one.
fn catch() -> Result<bool, u32> {
    let action = [stopped as *const () as usize, FLAGS, restore as *const () as usize, 0];
    let mut before = [0u64; 4];
    let unblocked = NEVER_BLOCKED;
    const UNBLOCK: usize = 1;
    // SAFETY: a `struct sigaction` as the kernel takes it; a set of signals; a call that does nothing.
    unsafe {
        syscall(nr::RT_SIGACTION, [SIGSYS, action.as_ptr() as usize, before.as_mut_ptr() as usize, 8, 0, 0])?;
        if before[0] != action[0] as u64 {
            signals::take_over(before);
        }
        syscall(nr::RT_SIGPROCMASK, [UNBLOCK, &raw const unblocked as usize, 0, 8, 0, 0])?;
        let _ = syscall(PROBE, [0, 0, window::BASE, 0, 0, 0]);
    }
    Ok(STOPPED.load(Ordering::Relaxed))
}

/// The program that executed this one may have left its filter.
pub(super) fn inherit() {
    let default = [0usize; 4];
    if catch() == Ok(true) {
        ON.store(true, Ordering::SeqCst);
    } else {
        // SAFETY: as in `catch`.
        let _ = unsafe { syscall(nr::RT_SIGACTION, [SIGSYS, default.as_ptr() as usize, 0, 8, 0, 0]) };
    }
}

/// Puts the filters in force, for all threads.
pub(super) fn install() -> Result<(), u32> {
    ON.store(true, Ordering::SeqCst);
    if calls::are_ours() {
        return Ok(());
    }
    // Who executed this program may have put the window's in force, but not that of its segments.
    if !catch()? {
        filter::of_window(set)?;
    }
    filter::of_segments(|filter| if filter.is_empty() { Ok(()) } else { set(filter) })
}

fn set(filter: &[Step]) -> Result<(), u32> {
    let program = [filter.len(), filter.as_ptr() as usize];
    // SAFETY: a `struct sock_fprog`, whose instructions are there.
    unsafe {
        syscall(nr::PRCTL, [NO_NEW_PRIVS, 1, 0, 0, 0, 0])?;
        match syscall(nr::SECCOMP, [SET_FILTER, TSYNC, program.as_ptr() as usize, 0, 0, 0])? {
            0 => Ok(()),
            // A thread has a filter of its own.
            _ => Err(call::EINVAL),
        }
    }
}
