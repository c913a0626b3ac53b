//! What libc does when it is asked for memory, and for the few other things in which memory that is not here would show.

use core::arch::global_asm;

use sys::page::PAGE;
use sys::syscall::{nr, syscall};

use super::{call, calls, entry, fork, pager, patch, preload, segments, settings, signals, trap, window};

const FIXED: usize = call::FIXED | call::FIXED_NOREPLACE;
/// What is reserved at once and is larger stays where it is, since little of it will be used: this, or so many times the budget, of which it takes a twentieth to know of
/// that, but no more than leaves room for others.
const RESERVED: usize = 16 << 30;
const TIMES: usize = 64;
const RESERVED_MOST: usize = window::SIZE / 4;
/// MAP_SHARED and its likes, MAP_32BIT, MAP_GROWSDOWN, MAP_LOCKED, MAP_STACK, MAP_HUGETLB: not for us.
const OTHER: usize = 0x1 | 0x40 | 0x100 | 0x2000 | 0x2_0000 | 0x4_0000;
const PRIVATE_ANONYMOUS: usize = 0x22;
/// What is smaller stays where it is.
const SMALL: usize = 128 << 10;
/// What is reserved in programs whose threads' stacks cannot be told by a flag, and is smaller, stays where it is.
const STACKS: usize = 32 << 20;
const MAY_MOVE: usize = 1;
const MOVE_FIXED: usize = 2;
const FAILED: usize = usize::MAX;
/// MADV_FREE, MADV_REMOVE, MADV_DONTNEED_LOCKED; MADV_HUGEPAGE, MADV_NOHUGEPAGE; MADV_WIPEONFORK, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE.
const FREE: usize = 8;
const REMOVE: usize = 9;
const DONTNEED_LOCKED: usize = 24;
const HUGE: usize = 14;
const NOHUGE: usize = 15;
const WIPE_ON_FORK: usize = 18;
const GUARD: usize = 102;
const NO_GUARD: usize = 103;

// Addresses of libc's, or zero.
global_asm!(
    ".weak mmap, mmap64, munmap, mremap, madvise, mprotect, brk, pthread_sigmask, readv, writev, recvmsg, sendmsg",
    ".weak preadv, pwritev, preadv2, pwritev2, recvmmsg, sendmmsg, execve, mlock, mlock2, mlockall, __curbrk, __errno_location, _Fork, fork",
    ".weak sigaction, vmsplice, setsockopt, sigprocmask, sigfillset, gnu_get_libc_version, pthread_setcanceltype",
    ".pushsection .data.rel.ro, \"aw\"",
    ".balign 8",
    ".hidden hpcrt_libc",
    ".globl hpcrt_libc",
    "hpcrt_libc: .quad mmap, mmap64, munmap, mremap, madvise, mprotect, brk, pthread_sigmask, readv, writev, recvmsg, sendmsg",
    ".quad preadv, pwritev, execve, mlock, mlock2, mlockall, __curbrk, __errno_location, _Fork, fork, sigaction",
    ".quad preadv2, pwritev2, recvmmsg, sendmmsg, vmsplice, setsockopt, sigprocmask, sigfillset, gnu_get_libc_version, pthread_setcanceltype",
    ".popsection",
);

const COUNT: usize = 33;
/// Places among them.
const CURBRK: usize = 18;
const ERRNO: usize = 19;
const VERSION: usize = 31;
const CANCEL_TYPE: usize = 32;

unsafe extern "C" {
    #[link_name = "hpcrt_libc"]
    static LIBC: [usize; COUNT];
}

/// Whether it is glibc: of no other it is known how it starts threads and processes.
pub(super) fn are_known() -> bool {
    libc()[VERSION] != 0
}

/// An address in libc's text.
pub(super) fn inside() -> usize {
    libc()[0]
}

fn libc() -> &'static [usize; COUNT] {
    // SAFETY: written by the dynamic linker, before this code runs.
    unsafe { &*core::ptr::addr_of!(LIBC) }
}

/// Puts all of them in place.
pub(super) fn install() -> Result<(), u32> {
    let [
        mmap,
        mmap64,
        munmap,
        mremap,
        madvise,
        mprotect,
        brk,
        sigmask,
        readv,
        writev,
        recvmsg,
        sendmsg,
        preadv,
        pwritev,
        execve,
        mlock,
        mlock2,
        mlockall,
        curbrk,
        errno,
        in_fork,
        fork,
        sigaction,
        preadv2,
        pwritev2,
        recvmmsg,
        sendmmsg,
        vmsplice,
        setsockopt,
        sigprocmask,
        sigfillset,
        _,
        _,
    ] = *libc();
    if mmap == 0 || munmap == 0 || errno == 0 {
        return Err(call::EINVAL);
    }
    let all = [
        (mmap, our_mmap as *const () as usize),
        (if mmap64 == mmap { 0 } else { mmap64 }, our_mmap as *const () as usize),
        (munmap, our_munmap as *const () as usize),
        (mremap, our_mremap as *const () as usize),
        (madvise, our_madvise as *const () as usize),
        (mprotect, our_mprotect as *const () as usize),
        (if curbrk == 0 { 0 } else { brk }, our_brk as *const () as usize),
        (sigmask, our_sigmask as *const () as usize),
        (sigprocmask, our_sigprocmask as *const () as usize),
        (sigfillset, our_sigfillset as *const () as usize),
        (readv, our_readv as *const () as usize),
        (writev, our_writev as *const () as usize),
        (recvmsg, our_recvmsg as *const () as usize),
        (sendmsg, our_sendmsg as *const () as usize),
        (preadv, our_preadv as *const () as usize),
        (pwritev, our_pwritev as *const () as usize),
        (preadv2, our_preadv2 as *const () as usize),
        (pwritev2, our_pwritev2 as *const () as usize),
        (recvmmsg, our_recvmmsg as *const () as usize),
        (sendmmsg, our_sendmmsg as *const () as usize),
        (vmsplice, our_vmsplice as *const () as usize),
        (setsockopt, our_setsockopt as *const () as usize),
        (execve, our_execve as *const () as usize),
        (mlock, our_mlock as *const () as usize),
        (mlock2, our_mlock2 as *const () as usize),
        (mlockall, our_mlockall as *const () as usize),
        (sigaction, our_sigaction as *const () as usize),
    ];
    for (from, to) in all.into_iter().filter(|(from, _)| *from != 0) {
        // SAFETY: libc's functions, and ones that do the same; no thread but this one exists.
        unsafe { patch::replace(from, to) }?;
    }
    // From glibc 2.34 on fork calls another function for that.
    let forks = if in_fork == 0 { fork } else { in_fork };
    if forks != 0 {
        // SAFETY: as above.
        unsafe { fork::replace(forks) }?;
    }
    if curbrk != 0 && brk != 0 {
        // SAFETY: libc's own word for where the break is; from there on it asks for more.
        unsafe { (curbrk as *mut usize).write_volatile(window::BASE) };
    }
    Ok(())
}

/// As libc's functions return.
fn returned(result: Result<usize, u32>) -> usize {
    match result {
        Ok(value) => value,
        Err(errno) => {
            // SAFETY: libc's function of this type, called on a thread of the program; gives that thread's errno.
            unsafe {
                let location: extern "C" fn() -> *mut i32 = core::mem::transmute(libc()[ERRNO]);
                *location() = errno as i32;
            }
            FAILED
        }
    }
}

/// A call of the program's, or a part of one.
pub(super) fn raw(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    // SAFETY: what the program asked for, with its own arguments.
    unsafe { call::gated(number, args) }
}

/// The same, in which the thread may be cancelled as in libc's function: asynchronously, since libc sends it a signal only then.
///
/// Hazard: a thread that is cancelled leaves from here, and nothing is dropped. Who calls this has no lock; what he holds is let go later ([`super::holds`]). The
/// program's own frames are unwound, but not from the gate, of which nobody knows how: it is passed through only where the call would be stopped.
pub(super) fn cancellable(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    const ASYNCHRONOUS: i32 = 1;
    let at = libc()[CANCEL_TYPE];
    if at == 0 {
        return raw(number, args);
    }
    // SAFETY: libc's function of this type, called on a thread of the program.
    let set_type: extern "C" fn(i32, *mut i32) -> i32 = unsafe { core::mem::transmute(at) };
    let mut before = 0;
    set_type(ASYNCHRONOUS, &mut before);
    let result = if trap::is_ours(&args) {
        raw(number, args)
    } else {
        // SAFETY: as in `raw`.
        unsafe { syscall(number, args) }
    };
    set_type(before, core::ptr::null_mut());
    result
}

extern "C" fn our_mmap(at: usize, len: usize, protection: usize, flags: usize, fd: usize, offset: usize) -> usize {
    returned(mmap([at, len, protection, flags, fd, offset]))
}

extern "C" fn our_mprotect(at: usize, len: usize, protection: usize) -> usize {
    returned(mprotect(at, len, protection))
}

extern "C" fn our_munmap(at: usize, len: usize) -> usize {
    returned(munmap(at, len))
}

extern "C" fn our_mremap(at: usize, len: usize, new: usize, flags: usize, to: usize) -> usize {
    returned(mremap(at, len, new, flags, to))
}

extern "C" fn our_madvise(at: usize, len: usize, advice: usize) -> usize {
    returned(madvise(at, len, advice))
}

extern "C" fn our_brk(to: usize) -> usize {
    let end = set_break(to);
    // SAFETY: libc's own word.
    unsafe { (libc()[CURBRK] as *mut usize).write_volatile(end) };
    if end < to { returned(Err(call::ENOMEM)) } else { 0 }
}

pub(super) fn mmap(args: [usize; 6]) -> Result<usize, u32> {
    let [at, len, protection, flags, ..] = args;
    let anonymous = flags & PRIVATE_ANONYMOUS == PRIVATE_ANONYMOUS && flags & OTHER == 0;
    let call = || raw(nr::MMAP, args);
    if anonymous && flags & FIXED == 0 && protection == call::READ_WRITE && len >= SMALL {
        let given = entry::enter(move || {
            pager::before_growth(len);
            window::allocate(len)
        });
        return given.or_else(|_| call());
    }
    let least = if calls::are_ours() { STACKS } else { SMALL };
    let most = (settings::get().local as usize).saturating_mul(TIMES).clamp(RESERVED, RESERVED_MOST);
    if anonymous && flags & FIXED == 0 && protection == window::NO_ACCESS && (least..most).contains(&len) {
        // To be made accessible bit by bit.
        return entry::enter(move || window::reserve_near(at, len)).or_else(|_| call());
    }
    if flags & FIXED == 0 || !window::contains(at) {
        return call();
    }
    // Over what it has: that is gone.
    if flags & call::FIXED_NOREPLACE != 0 || !at.is_multiple_of(PAGE) || len == 0 {
        return Err(if flags & call::FIXED_NOREPLACE != 0 { call::EEXIST } else { call::EINVAL });
    }
    if !anonymous || entry::enter(move || window::is_left(at, len)) {
        entry::enter(move || window::leave(at, len));
        return call();
    }
    let changed = entry::enter(move || {
        window::forget(at, len, true);
        open(at, len, protection)
    });
    changed.map(|()| at)
}

pub(super) fn mprotect(at: usize, len: usize, protection: usize) -> Result<usize, u32> {
    let is_ours = window::contains(at) && (!segments::contains(at) || segments::holds_all(at, len));
    if !is_ours || !at.is_multiple_of(PAGE) || len == 0 {
        return raw(nr::MPROTECT, [at, len, protection, 0, 0, 0]);
    }
    entry::enter(move || open(at, len, protection)).map(|()| 0)
}

fn open(at: usize, len: usize, protection: usize) -> Result<(), u32> {
    if protection != window::NO_ACCESS {
        pager::before_growth(window::closed(at, len));
    }
    window::open(at, len, protection)
}

pub(super) fn munmap(at: usize, len: usize) -> Result<usize, u32> {
    if !window::contains(at) || !at.is_multiple_of(PAGE) || len == 0 {
        return raw(nr::MUNMAP, [at, len, 0, 0, 0, 0]);
    }
    if segments::contains(at) {
        entry::enter(move || window::leave(at, len));
        return raw(nr::MUNMAP, [at, len, 0, 0, 0, 0]);
    }
    entry::enter(move || window::release(at, len));
    Ok(0)
}

pub(super) fn mremap(at: usize, len: usize, new: usize, flags: usize, to: usize) -> Result<usize, u32> {
    if !window::contains(at) {
        if flags & MOVE_FIXED != 0 && window::touches(to, new) {
            return Err(call::EINVAL);
        }
        return raw(nr::MREMAP, [at, len, new, flags, to, 0]);
    }
    if flags & !MAY_MOVE != 0 || new == 0 || len == 0 || !at.is_multiple_of(PAGE) || segments::contains(at) {
        return Err(call::EINVAL);
    }
    let pages = |bytes: usize| bytes.next_multiple_of(PAGE);
    if pages(new) <= pages(len) {
        if pages(new) < pages(len) {
            entry::enter(move || window::release(at + pages(new), pages(len) - pages(new)));
        }
        return Ok(at);
    }
    // A copy would be something else than what was put there, and of what is reserved there is none.
    if entry::enter(move || window::mapped(at, len)) < len {
        return Err(call::EINVAL);
    }
    let longer = entry::enter(move || {
        pager::before_growth(new - len);
        window::extend(at, len, new)
    });
    if longer {
        return Ok(at);
    }
    if flags & MAY_MOVE == 0 {
        return Err(call::ENOMEM);
    }
    // Both are there at once.
    let fresh = entry::enter(move || {
        pager::before_growth(new);
        window::allocate(new)
    });
    let fresh = fresh.map_err(|_| call::ENOMEM)?;
    // SAFETY: the program's memory, of these lengths; as it would copy it itself.
    unsafe { core::ptr::copy_nonoverlapping(at as *const u8, fresh as *mut u8, pages(len)) };
    entry::enter(move || window::release(at, len));
    Ok(fresh)
}

pub(super) fn madvise(at: usize, len: usize, advice: usize) -> Result<usize, u32> {
    if window::contains(at) && at.is_multiple_of(PAGE) {
        match advice {
            // It would be what the file says, which nobody knows any more.
            call::DONTNEED | DONTNEED_LOCKED | FREE | REMOVE
                if segments::contains(at) && !segments::was_zero(at, len) =>
            {
                return Err(call::EINVAL);
            }
            call::DONTNEED | DONTNEED_LOCKED | FREE | REMOVE => entry::enter(move || window::forget(at, len, false)),
            // Who asks for these relies on them.
            WIPE_ON_FORK | GUARD | NO_GUARD => return Err(call::EINVAL),
            HUGE | NOHUGE => return raw(nr::MADVISE, [at, len, advice, 0, 0, 0]),
            _ => {
                entry::enter(move || pager::advise(at, window::mapped(at, len), advice));
            }
        }
        return Ok(0);
    }
    raw(nr::MADVISE, [at, len, advice, 0, 0, 0])
}

/// Has the kernel keep here what is not captured. All, that cannot be had back from it, is not locked: neither what is captured nor the rest.
pub(super) fn lock(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    match number {
        nr::MLOCKALL => Ok(0),
        _ if window::contains(args[0]) => Ok(0),
        _ => raw(number, args),
    }
}

/// Moves the program's break, if it can; returns where it is then.
pub(super) fn set_break(to: usize) -> usize {
    entry::enter(move || {
        pager::before_growth(window::growth(to));
        window::set_end(to)
    })
}

extern "C" fn our_mlock(at: usize, len: usize) -> usize {
    returned(lock(nr::MLOCK, [at, len, 0, 0, 0, 0]))
}

extern "C" fn our_mlock2(at: usize, len: usize, flags: usize) -> usize {
    returned(lock(nr::MLOCK2, [at, len, flags, 0, 0, 0]))
}

extern "C" fn our_mlockall(flags: usize) -> usize {
    returned(lock(nr::MLOCKALL, [flags, 0, 0, 0, 0, 0]))
}

/// Signals 32 and 33, with which glibc cancels threads and has all of them change their user.
const THREADS: u64 = 3 << 31;

/// Without the signal by which [`trap`] works, and glibc's own.
extern "C" fn our_sigmask(how: usize, set: *const u64, old: *mut u64) -> usize {
    set_mask(how, set, old).map_or_else(|errno| errno as usize, |()| 0)
}

/// Before glibc 2.32 it does not call the other.
extern "C" fn our_sigprocmask(how: usize, set: *const u64, old: *mut u64) -> usize {
    returned(set_mask(how, set, old).map(|()| 0))
}

/// What the mask was comes from here: where it is wanted may be away, which the kernel would find when it has changed the mask.
fn set_mask(how: usize, set: *const u64, old: *mut u64) -> Result<(), u32> {
    const UNBLOCK: usize = 1;
    let (mut mask, mut given, mut before) = (0, 0, 0u64);
    // SAFETY: the program's sets, of which the kernel knows the first word.
    unsafe {
        if let Some(set) = set.as_ref() {
            // What [`our_sigfillset`] leaves out may have been blocked by what did not come here.
            mask = if how == UNBLOCK { set | signals::NEVER_BLOCKED } else { set & !signals::NEVER_BLOCKED } & !THREADS;
            given = &raw const mask as usize;
        }
        core::hint::black_box(&mut mask);
        raw(nr::RT_SIGPROCMASK, [how, given, &raw mut before as usize, size_of::<u64>(), 0, 0])?;
        if let Some(old) = old.as_mut() {
            *old = before;
        }
    }
    Ok(())
}

/// Without that signal either: with such a set libc itself has threads block all (of aio(7), for one), by calls that nobody sees.
extern "C" fn our_sigfillset(set: *mut u64) -> usize {
    if set.is_null() {
        return returned(Err(call::EINVAL));
    }
    // SAFETY: room for a set, of which the kernel knows the first word.
    unsafe { set.write(!(signals::NEVER_BLOCKED | THREADS)) };
    0
}

/// glibc's `struct sigaction`; of its set the kernel knows the first word.
#[repr(C)]
struct Action {
    handler: u64,
    mask: [u64; 16],
    flags: i32,
    restorer: u64,
}

/// Without the signal by which [`trap`] works, whose action the program only thinks that it sets.
extern "C" fn our_sigaction(signal: i32, new: *const Action, old: *mut Action) -> usize {
    const RESTORER: u64 = 0x400_0000;
    if matches!(signal, 32 | 33) {
        return returned(Err(call::EINVAL));
    }
    let (mut given, mut before) = ([0u64; 4], [0u64; 4]);
    // SAFETY: the program's structures, as it says.
    unsafe {
        if let Some(new) = new.as_ref() {
            given = [new.handler, new.flags as u32 as u64 | RESTORER, trap::restore as *const () as u64, new.mask[0]];
        }
        let at = if new.is_null() { 0 } else { (&raw const given) as usize };
        let args = [signal as usize, at, (&raw mut before) as usize, 8, 0, 0];
        let set = if signal as usize != signals::SIGSYS || trap::is_on() {
            let result = signals::set_action(args, |_| {}, |_| {});
            if result < 0 { Err(result.unsigned_abs() as u32) } else { Ok(0) }
        } else {
            raw(nr::RT_SIGACTION, args)
        };
        if set.is_err() {
            return returned(set);
        }
        if let Some(old) = old.as_mut() {
            let [handler, flags, restorer, set] = before;
            let mut mask = [0; 16];
            mask[0] = set;
            *old = Action { handler, mask, flags: flags as i32, restorer };
        }
    }
    0
}

extern "C" fn our_readv(fd: usize, list: usize, count: usize) -> usize {
    returned(trap::with_list(nr::READV, [fd, list, count, 0, 0, 0]))
}

extern "C" fn our_writev(fd: usize, list: usize, count: usize) -> usize {
    returned(trap::with_list(nr::WRITEV, [fd, list, count, 0, 0, 0]))
}

extern "C" fn our_preadv(fd: usize, list: usize, count: usize, at: usize) -> usize {
    returned(trap::with_list(nr::PREADV, [fd, list, count, at, 0, 0]))
}

extern "C" fn our_pwritev(fd: usize, list: usize, count: usize, at: usize) -> usize {
    returned(trap::with_list(nr::PWRITEV, [fd, list, count, at, 0, 0]))
}

extern "C" fn our_preadv2(fd: usize, list: usize, count: usize, at: usize, flags: i32) -> usize {
    returned(trap::with_list(nr::PREADV2, [fd, list, count, at, 0, flags as usize]))
}

extern "C" fn our_pwritev2(fd: usize, list: usize, count: usize, at: usize, flags: i32) -> usize {
    returned(trap::with_list(nr::PWRITEV2, [fd, list, count, at, 0, flags as usize]))
}

extern "C" fn our_execve(path: usize, arguments: usize, environment: usize) -> usize {
    pager::part();
    returned(preload::with_this(environment, |environment| {
        trap::with_strings(path, [arguments, environment], || raw(nr::EXECVE, [path, arguments, environment, 0, 0, 0]))
    }))
}

extern "C" fn our_recvmsg(fd: usize, message: usize, flags: usize) -> usize {
    returned(trap::with_message(nr::RECVMSG, [fd, message, flags, 0, 0, 0]))
}

extern "C" fn our_sendmsg(fd: usize, message: usize, flags: usize) -> usize {
    returned(trap::with_message(nr::SENDMSG, [fd, message, flags, 0, 0, 0]))
}

extern "C" fn our_recvmmsg(fd: usize, messages: usize, count: u32, flags: usize, time: usize) -> usize {
    returned(trap::with_messages(nr::RECVMMSG, [fd, messages, count as usize, flags, time, 0]))
}

extern "C" fn our_sendmmsg(fd: usize, messages: usize, count: u32, flags: usize) -> usize {
    returned(trap::with_messages(nr::SENDMMSG, [fd, messages, count as usize, flags, 0, 0]))
}

extern "C" fn our_vmsplice(fd: usize, list: usize, count: usize, flags: u32) -> usize {
    returned(trap::splice([fd, list, count, flags as usize, 0, 0]))
}

extern "C" fn our_setsockopt(fd: usize, level: u32, name: u32, value: usize, len: u32) -> usize {
    returned(trap::set_option([fd, level as usize, name as usize, value, len as usize, 0]))
}
