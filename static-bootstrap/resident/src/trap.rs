//! System calls on memory that is not here, where the kernel does not tell its own faults: a filter stops those with an address in the window,
//! before they begin, and the program's thread brings the pages here and holds them meanwhile.
//!
//! What the program executes keeps its filters ([`filter`]) and never meets them.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sys::page::{Bits, NONE, PAGE, SPAN_PAGES, with};
use sys::syscall::{nr, syscall};

use super::filter::{self, Step};
use super::signals::{self, NEVER_BLOCKED, SIGSYS};
use super::table::range;
use super::{call, calls, entry, hooks, pager, settings, window};

/// SA_SIGINFO, SA_RESTORER, SA_RESTART, SA_NODEFER.
const FLAGS: usize = 0x4 | 0x400_0000 | 0x1000_0000 | 0x4000_0000;
const SET_FILTER: usize = 1;
/// For all threads at once.
const TSYNC: usize = 1;
const NO_NEW_PRIVS: usize = 38;
const TRIES: usize = 12;

/// It is in force.
static ON: AtomicBool = AtomicBool::new(false);
/// A call was stopped that was made to find out.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Ranges that stay here: first page (from the window's beginning) and number of pages in one word; 0 is free.
static HELD: [AtomicU64; 128] = [const { AtomicU64::new(0) }; 128];
const COUNT_BITS: u32 = 24;

/// The pages of a span that stay here.
pub(super) fn held(span: usize) -> Bits {
    let mut pages = NONE;
    if is_on() {
        for word in HELD.iter().map(|slot| slot.load(Ordering::SeqCst)).filter(|word| *word != 0) {
            let (first, count) = ((word >> COUNT_BITS) as usize, (word & ((1 << COUNT_BITS) - 1)) as usize);
            let (start, end) = (span * SPAN_PAGES, (span + 1) * SPAN_PAGES);
            if first < end && first + count > start {
                pages = with(pages, range(first.max(start) - start, (first + count).min(end) - start));
            }
        }
    }
    pages
}

/// Nothing has to stay here.
pub(super) fn let_go() {
    HELD.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
}

/// Brings a range here, and keeps it until this is dropped.
struct Hold(Option<&'static AtomicU64>);

impl Hold {
    fn new(at: usize, len: usize) -> Hold {
        let Some(first) = window::page(at).filter(|_| len > 0) else { return Hold(None) };
        let pages = |len: usize| (at % PAGE + len).div_ceil(PAGE);
        let word = (first as u64) << COUNT_BITS | pages(len).min((1 << COUNT_BITS) - 1) as u64;
        let taken = |slot: &&AtomicU64| slot.compare_exchange(0, word, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        let hold = Hold(HELD.iter().find(taken));
        // Who makes room from now on sees it; who has begun may have something of it in his hands.
        let (len, in_hands) = entry::enter(move || {
            let len = window::mapped(at, len);
            (len, pager::is_in_hands(at, len))
        });
        if len == 0 {
            return Hold(None);
        }
        let (at, len) = (at & !(PAGE - 1), pages(len) * PAGE);
        touch(at, len);
        for _ in 0..TRIES {
            if !in_hands || entry::enter(move || pager::is_here(at, len)) {
                break;
            }
            touch(at, len);
        }
        hold
    }
}

/// Brings what lies at an address here, if calls are stopped and that is memory of the program's.
pub(super) fn bring(at: usize) {
    if is_on() && window::contains(at) && entry::enter(move || window::mapped(at, 1)) > 0 {
        touch(at, 1);
    }
}

/// Brings a range of the program's memory here.
fn touch(at: usize, len: usize) {
    for page in (at..at + len).step_by(PAGE) {
        // SAFETY: the program's memory. This is where its thread waits for the page.
        unsafe { (page as *const u8).read_volatile() };
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot.store(0, Ordering::SeqCst);
        }
    }
}

/// Bytes of one call that are held at once.
pub(super) fn most() -> usize {
    (settings::get().local as usize / 8).max(PAGE * 16) & !(PAGE - 1)
}

/// The argument that is a buffer, and the one that is its length.
fn buffer(number: usize) -> Option<(usize, usize)> {
    match number {
        nr::READ | nr::WRITE | nr::PREAD64 | nr::PWRITE64 | nr::RECVFROM | nr::SENDTO | nr::GETDENTS64 => Some((1, 2)),
        nr::GETRANDOM => Some((0, 1)),
        nr::READLINKAT => Some((2, 3)),
        _ => None,
    }
}

/// Makes a system call of a program all of whose calls come to us.
pub(super) fn make(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    if is_on() && args.iter().any(|at| window::contains(*at)) {
        return resolve(number, args);
    }
    // SAFETY: the program's own call.
    unsafe { call::gated(number, args) }
}

/// Makes a call with two pointers to so many bytes.
pub(super) fn with_parts<T>(parts: [usize; 2], len: usize, call: impl FnOnce() -> T) -> T {
    let on = is_on();
    let _held = parts.map(|at| if on { Hold::new(at, len) } else { Hold(None) });
    call()
}

/// Makes a system call that the filter stopped.
fn resolve(number: usize, mut args: [usize; 6]) -> Result<usize, u32> {
    const WAIT_ALL: usize = 0x100;
    if matches!(number, nr::MLOCK | nr::MLOCK2) {
        return hooks::lock(number, args);
    }
    if let Some((at, len)) = buffer(number).filter(|(at, _)| window::contains(args[*at])) {
        let wanted = args[len];
        // What is written goes on as the kernel's own call would, and so does what is read whole. Anything but a file may have nothing more to give,
        // and would be waited for.
        let is_whole = matches!(number, nr::WRITE | nr::PWRITE64 | nr::SENDTO)
            || number == nr::RECVFROM && args[3] & WAIT_ALL != 0
            || wanted > most() && is_regular(args[0]);
        let mut done = 0;
        loop {
            args[len] = (wanted - done).min(most());
            let result = held_call(number, args, args[len]);
            let moved = match result {
                Err(_) if done > 0 => return Ok(done),
                result => result?,
            };
            done += moved;
            if done >= wanted || moved < args[len] || !is_whole {
                return Ok(done);
            }
            args[at] += moved;
            if matches!(number, nr::PREAD64 | nr::PWRITE64) {
                args[3] += moved;
            }
        }
    }
    held_call(number, args, 0)
}

/// Holds what the arguments point to: so many bytes, or as many as it takes.
fn held_call(number: usize, args: [usize; 6], len: usize) -> Result<usize, u32> {
    let mut guess = 256;
    for _ in 0..TRIES {
        let reach = if len > 0 { len } else { guess };
        let _held: [Hold; 6] = core::array::from_fn(|nth| Hold::new(args[nth], reach));
        // SAFETY: the program's own call.
        match unsafe { call::gated(number, args) } {
            Err(call::EFAULT) => guess = (guess * 4).min(most()),
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

/// Makes a call with a list of buffers, (address, length), of which the filter sees nothing.
pub(super) fn with_vector<T>(vector: usize, count: usize, call: impl FnOnce() -> T) -> T {
    /// Held at once; of more the kernel takes what is here.
    const PARTS: usize = 16;
    if !is_on() || vector == 0 {
        return call();
    }
    let _list = Hold::new(vector, count.min(1024) * 16);
    let mut left = most();
    let _held: [Hold; PARTS] = core::array::from_fn(|nth| {
        if nth >= count {
            return Hold(None);
        }
        // SAFETY: the program says that there are so many.
        let [at, len] = unsafe { *(vector as *const [usize; 2]).add(nth) };
        let part = len.min(left);
        left -= part;
        Hold::new(at, part)
    });
    call()
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

/// Makes a call with a `struct msghdr`.
pub(super) fn with_message<T>(message: usize, call: impl FnOnce() -> T) -> T {
    if !is_on() || message == 0 {
        return call();
    }
    let _message = Hold::new(message, 56);
    // SAFETY: the program says that there is one.
    let [name, _, vector, count, control, len, _] = unsafe { *(message as *const [usize; 7]) };
    let (_name, _control) = (Hold::new(name, 128), Hold::new(control, len.min(most())));
    with_vector(vector, count, call)
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
        *at(13) = match resolve(number, args) {
            Ok(value) => value,
            Err(errno) => (errno as usize).wrapping_neg(),
        };
        signals::keep(number, frame);
    }
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
