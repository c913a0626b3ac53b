//! The file layer: small writes go into memory that the node's I/O worker writes from; before any other system call by which they could be missed
//! the program waits for them.
//!
//! Kept are writes of at most [`SMALL`] bytes to regular files that the program opened itself, that nobody else of the job writes, and that no other
//! process has open. For everything else the layer waits until nothing is pending, gives file offsets back to the kernel, and makes the call.
//!
//! Hazards. In a program with one thread a signal handler may come in anywhere and write, too: what counts changes by one store, and who was
//! interrupted begins again. In one with several threads a lock is held, with signals blocked.

mod kernel;
mod net;
mod place;
mod process;
mod sites;
mod table;
mod worker;

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sys::extents::{Log, OFFSETS, RUN, Refused, SMALL};
use sys::files::why;

use self::kernel::{block_signals, failed, nr, raw, restore_signals};
use self::sites::{DIRTY, OFF};
use crate::lock::{Guard, Lock};

/// A file is kept after so many small writes.
const FEW: u8 = 3;
const PARTS: usize = 64;
/// FSIZE of setrlimit(2).
const LIMIT_FSIZE: usize = 1;

static SEVERAL: AtomicBool = AtomicBool::new(false);
static INSIDE: Lock<()> = Lock::new(());
/// Run of which the worker has been told.
static TOLD: AtomicU64 = AtomicU64::new(u64::MAX);

core::arch::global_asm!(
    ".weak write",
    ".pushsection .data.rel.ro, \"aw\"",
    ".balign 8",
    ".hidden hpcrt_write",
    ".globl hpcrt_write",
    "hpcrt_write: .quad write",
    ".popsection",
);
unsafe extern "C" {
    #[link_name = "hpcrt_write"]
    static LIBC_WRITE: usize;
}

/// Begins, before any other code of the program.
pub(super) extern "C" fn begin() {
    // SAFETY: written by the dynamic linker.
    let write = unsafe { core::ptr::addr_of!(LIBC_WRITE).read_volatile() };
    let installed = if write == 0 { Err(why::NO_LIBC) } else { sites::install(write).map_err(|_| why::OTHER_LIBC) };
    match installed {
        Ok(()) if net::begin() => {}
        Ok(()) => worker::refuse(why::NO_DISPATCH),
        Err(why) => {
            sites::gate_only();
            worker::refuse(why)
        }
    }
    if limited() {
        OFF.store(1, Ordering::SeqCst);
    }
}

/// Whether the size of files is limited: a write that is too long is told to who makes it.
fn limited() -> bool {
    let mut limits = [0u64; 2];
    // SAFETY: room for a `struct rlimit64`.
    unsafe { raw(nr::PRLIMIT64, [0, LIMIT_FSIZE, 0, limits.as_mut_ptr() as usize, 0, 0]) };
    limits[0] != u64::MAX
}

fn is_off() -> bool {
    OFF.load(Ordering::Relaxed) != 0
}

/// From now on there may be threads.
fn several() {
    SEVERAL.store(true, Ordering::SeqCst);
}

/// The program is one that this layer cannot follow from here on: it goes on as without it.
fn step_aside() {
    leave();
    OFF.store(1, Ordering::SeqCst);
    net::end();
}

/// What a child begins with.
fn forget_all() {
    table::forget();
    worker::detach();
    DIRTY.store(0, Ordering::Relaxed);
    SEVERAL.store(false, Ordering::Relaxed);
    TOLD.store(u64::MAX, Ordering::Relaxed);
    INSIDE.reset();
}

/// Alone at what is kept.
struct Inside(Option<(Guard<'static, ()>, u64)>);

impl Inside {
    fn enter() -> Inside {
        if !SEVERAL.load(Ordering::Relaxed) {
            return Inside(None);
        }
        let before = block_signals();
        Inside(Some((INSIDE.lock(), before)))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some((guard, before)) = self.0.take() {
            drop(guard);
            restore_signals(before);
        }
    }
}

/// Waits until nothing is pending.
fn settle() {
    if DIRTY.load(Ordering::Relaxed) != 0 {
        let _inside = Inside::enter();
        worker::settle();
    }
}

/// No open file of ours is known to the worker any more.
fn leave() {
    settle();
    let _inside = Inside::enter();
    for (id, file) in table::all() {
        file.state.store(table::DIRECT, Ordering::Relaxed);
        if file.told.swap(0, Ordering::Relaxed) != 0 {
            worker::drop_file(id);
        }
    }
}

/// A system call of the program.
fn dispatch(number: usize, args: [usize; 6]) -> isize {
    if process::borrows() {
        return process::borrowed(number, args);
    }
    // SAFETY: the program's own call, with its arguments.
    let go = || unsafe { raw(number, args) };
    let [fd, second, third, fourth, ..] = args;
    match number {
        nr::WRITE => write(number, args, &[[second, third]], None),
        nr::PWRITE64 => write(number, args, &[[second, third]], Some(fourth)),
        nr::WRITEV if third <= PARTS && second != 0 => {
            // SAFETY: the program says that there are so many.
            write(number, args, unsafe { core::slice::from_raw_parts(second as *const [usize; 2], third) }, None)
        }
        nr::WRITEV | nr::PWRITEV | nr::PWRITEV2 | nr::FTRUNCATE | nr::FALLOCATE => touch(number, args, true),
        nr::READ | nr::PREAD64 | nr::READV | nr::PREADV | nr::PREADV2 | nr::FSTAT | nr::IOCTL => {
            touch(number, args, false)
        }
        nr::LSEEK => seek(args),
        nr::FSYNC | nr::FDATASYNC | nr::SYNC_FILE_RANGE => match (touch(number, args, false), take_error(fd)) {
            (_, Some(error)) => error,
            (result, None) => result,
        },
        nr::SENDFILE => {
            touch_only(second, false);
            touch(number, args, true)
        }
        nr::SPLICE | nr::COPY_FILE_RANGE => {
            touch_only(third, true);
            touch(number, args, false)
        }
        nr::MMAP => {
            const ANONYMOUS: usize = 0x20;
            if fourth & ANONYMOUS == 0 {
                make_direct(args[4]);
            }
            go()
        }
        nr::FLOCK => {
            make_direct(fd);
            go()
        }
        nr::FCNTL => control(args),
        nr::OPEN => opening(second, go),
        nr::CREAT => opening(0o1001, go),
        nr::OPENAT => opening(third, go),
        // SAFETY: the program's `struct open_how`, which begins with the flags.
        nr::OPENAT2 if third != 0 => opening(unsafe { *(third as *const u64) } as usize, go),
        nr::TRUNCATE => {
            settle();
            worker::settle_all();
            go()
        }
        nr::STAT | nr::LSTAT => told(go, || place::of_stat(second as *const u64)),
        nr::NEWFSTATAT => told(go, || place::of_stat(third as *const u64)),
        nr::STATX => told(go, || place::of_statx(args[4] as *const u32)),
        nr::CLOSE => close(fd, go),
        nr::CLOSE_RANGE => {
            const UNSHARE: usize = 2;
            const CLOEXEC: usize = 4;
            if third & UNSHARE != 0 {
                step_aside();
            } else if third & CLOEXEC == 0 {
                table::between(fd, second).for_each(|fd| _ = close(fd, || 0));
            }
            go()
        }
        nr::DUP => duplicated(fd, go),
        nr::DUP2 | nr::DUP3 => {
            if fd == second || table::known(second).is_none() {
                settle();
            } else {
                close(second, || 0);
            }
            if fd == second { go() } else { duplicated(fd, go) }
        }
        nr::SENDMSG | nr::SENDMMSG => {
            // Open files may go to another process.
            settle();
            // SAFETY: the program's `struct msghdr`.
            if number == nr::SENDMMSG || second != 0 && unsafe { *((second + 40) as *const usize) } != 0 {
                table::share(true);
            }
            go()
        }
        nr::EXECVE | nr::EXECVEAT | nr::EXIT_GROUP => {
            leave();
            go()
        }
        nr::UNSHARE => {
            const FILES: usize = 0x400;
            if fd & FILES != 0 {
                step_aside();
            }
            settle();
            go()
        }
        nr::IO_SETUP | nr::IO_URING_SETUP => {
            step_aside();
            go()
        }
        nr::SETRLIMIT if fd == LIMIT_FSIZE => {
            step_aside();
            go()
        }
        nr::PRLIMIT64 if second == LIMIT_FSIZE && third != 0 => {
            step_aside();
            go()
        }
        nr::RT_SIGACTION => net::set_action(args),
        nr::RT_SIGPROCMASK => net::set_mask(args),
        nr::PRCTL => {
            const SET_DISPATCH: usize = 59;
            if fd == SET_DISPATCH {
                step_aside();
            }
            go()
        }
        _ => {
            settle();
            go()
        }
    }
}

/// Everything that concerns this file is where it belongs: ours, and what others of the job wrote. `writes`: it is about to be changed.
fn touch_only(fd: usize, writes: bool) {
    settle();
    let id = {
        let _inside = Inside::enter();
        table::look(fd)
    };
    if let Some(file) = id.map(table::file) {
        let [device, number] = [&file.device, &file.number].map(|word| word.load(Ordering::Relaxed));
        worker::settle_other(device, number, writes);
    }
}

/// A call that reads a file, or changes it in a way that is not kept.
fn touch(number: usize, args: [usize; 6], writes: bool) -> isize {
    touch_only(args[0], writes);
    let kept = table::known(args[0]).filter(|id| table::file(*id).state.load(Ordering::Relaxed) == table::KEPT);
    // Of a file that is kept the offset must not move meanwhile.
    let _inside = kept.map(|_| {
        let inside = Inside::enter();
        worker::settle();
        inside
    });
    // SAFETY: the program's own call.
    unsafe { raw(number, args) }
}

/// The first error of the worker with this file that was not told.
fn take_error(fd: usize) -> Option<isize> {
    let id = table::known(fd).filter(|id| table::file(*id).told.load(Ordering::Relaxed) != 0)?;
    match worker::log()?.segment.files[id].error.swap(0, Ordering::SeqCst) {
        0 => None,
        errno => Some(-(errno as isize)),
    }
}

fn write(number: usize, args: [usize; 6], parts: &[[usize; 2]], at: Option<usize>) -> isize {
    let fd = args[0];
    let total = parts.iter().fold(0usize, |total, part| total.saturating_add(part[1]));
    if total > 0 && total <= SMALL {
        let inside = Inside::enter();
        if let Some(id) = table::known(fd)
            && is_kept(id, fd)
            && let Some(result) = keep(id, table::file(id), parts, total as u64, at)
        {
            return result;
        }
        drop(inside);
    }
    touch_only(fd, true);
    if let Some(error) = take_error(fd) {
        return error;
    }
    touch(number, args, true)
}

/// Whether a small write to this file is kept: from the third on.
fn is_kept(id: usize, fd: usize) -> bool {
    let file = table::file(id);
    match file.state.load(Ordering::Relaxed) {
        table::KEPT => true,
        table::FRESH => file.small.fetch_add(1, Ordering::Relaxed) + 1 >= FEW && promote(id, fd),
        _ => false,
    }
}

/// Has the worker write this file from now on.
fn promote(id: usize, fd: usize) -> bool {
    let file = table::file(id);
    let [device, number] = [&file.device, &file.number].map(|word| word.load(Ordering::Relaxed));
    let ours = worker::log().is_some()
        && match worker::own_inode(device, number) {
            Some(inode) => {
                file.inode.store(inode, Ordering::Relaxed);
                worker::keep(id, fd as i32)
            }
            None => false,
        };
    if ours {
        file.told.store(1, Ordering::Relaxed);
    }
    file.state.store(if ours { table::KEPT } else { table::DIRECT }, Ordering::Relaxed);
    ours
}

/// Puts a write into the log; `None`: it must be made at once.
fn keep(id: usize, file: &table::File, parts: &[[usize; 2]], total: u64, at: Option<usize>) -> Option<isize> {
    let log = worker::log()?;
    let inode = file.inode.load(Ordering::Relaxed);
    loop {
        if log.segment.files[id].error.load(Ordering::Relaxed) != 0 || !worker::is_ours(inode) {
            return None;
        }
        DIRTY.store(1, Ordering::Relaxed);
        if !log.begin() {
            worker::settle();
            return None;
        }
        let appended = append(&log, id, file, parts, total, at);
        log.end();
        match appended? {
            Ok(()) => break,
            Err(Refused::Again) => {}
            Err(Refused::Full) => worker::settle(),
        }
    }
    if !worker::is_ours(inode) {
        worker::settle();
    } else if log.pending() >= RUN && TOLD.swap(log.now().run, Ordering::Relaxed) != log.now().run {
        worker::ring();
    }
    Some(total as isize)
}

fn append(
    log: &Log<'_>,
    id: usize,
    file: &table::File,
    parts: &[[usize; 2]],
    total: u64,
    at: Option<usize>,
) -> Option<Result<(), Refused>> {
    let now = log.now();
    let (offset, held) = match at {
        Some(at) => (at as u64, (now.holder, now.offset)),
        None => {
            let offset = offset_of(id, file, &now)?;
            spill(id, &now);
            (offset, (id as u64, offset + total))
        }
    };
    if offset >= OFFSETS {
        return None;
    }
    // SAFETY: the program's own buffers; the lock is held where there are threads.
    Some(unsafe { log.append(&now, id as u32, offset, parts, held) })
}

/// Where an open file is, whoever knows it.
fn offset_of(id: usize, file: &table::File, now: &sys::extents::Now) -> Option<u64> {
    if now.holder == id as u64 {
        return Some(now.offset);
    }
    match file.offset.load(Ordering::Relaxed) {
        table::AWAY => table::kernel_offset(file.fd.load(Ordering::Relaxed) as usize),
        offset => Some(offset),
    }
}

/// Another open file's offset leaves the log for the table.
fn spill(id: usize, now: &sys::extents::Now) {
    if now.holder != id as u64 && now.holder != sys::extents::NONE {
        table::file(now.holder as usize).offset.store(now.offset, Ordering::Relaxed);
    }
}

fn seek(args: [usize; 6]) -> isize {
    let inside = Inside::enter();
    if let Some(offset) = seek_kept(args) {
        return offset;
    }
    drop(inside);
    touch(nr::LSEEK, args, false)
}

/// Moves an offset that is kept here; `None`: the kernel has to.
fn seek_kept([fd, to, whence, ..]: [usize; 6]) -> Option<isize> {
    let (id, log) = (table::known(fd)?, worker::log()?);
    let file = table::file(id);
    if file.state.load(Ordering::Relaxed) != table::KEPT {
        return None;
    }
    loop {
        DIRTY.store(1, Ordering::Relaxed);
        if !log.begin() {
            worker::settle();
            return None;
        }
        let moved = moved(&log, id, file, to, whence);
        log.end();
        if let (target, true) = moved? {
            return Some(target);
        }
    }
}

/// Where to, and whether it is there now.
fn moved(log: &Log<'_>, id: usize, file: &table::File, to: usize, whence: usize) -> Option<(isize, bool)> {
    const SET: usize = 0;
    const CURRENT: usize = 1;
    let now = log.now();
    let base = match whence {
        SET => 0,
        CURRENT => offset_of(id, file, &now)? as isize,
        _ => return None,
    };
    let target = base.checked_add(to as isize).filter(|target| (0..OFFSETS as isize).contains(target))?;
    spill(id, &now);
    Some((target, log.hold(&now, id as u64, target as u64)))
}

/// Nobody keeps this file any more.
fn make_direct(fd: usize) {
    settle();
    let _inside = Inside::enter();
    worker::settle();
    let Some(file) = table::look(fd).map(table::file) else { return };
    let [device, number] = [&file.device, &file.number].map(|word| word.load(Ordering::Relaxed));
    worker::make_direct(device, number);
    table::share_one(fd);
    // The worker's descriptor would hold the lock.
    if file.told.swap(0, Ordering::Relaxed) != 0
        && let Some(id) = table::known(fd)
    {
        worker::drop_file(id);
    }
}

fn control(args: [usize; 6]) -> isize {
    const DUPLICATE: usize = 0;
    const GETFD: usize = 1;
    const SETFD: usize = 2;
    const GETFL: usize = 3;
    const SETFL: usize = 4;
    const DUPLICATE_CLOEXEC: usize = 1030;
    // SAFETY: the program's own call.
    let go = || unsafe { raw(nr::FCNTL, args) };
    match args[1] {
        DUPLICATE | DUPLICATE_CLOEXEC => duplicated(args[0], go),
        GETFD | SETFD | GETFL => go(),
        SETFL => {
            settle();
            let _inside = Inside::enter();
            worker::settle();
            table::share_one(args[0]);
            go()
        }
        // Locks, and what else there is.
        _ => {
            make_direct(args[0]);
            go()
        }
    }
}

fn opening(flags: usize, go: impl FnOnce() -> isize) -> isize {
    const TRUNCATE: usize = 0o1000;
    settle();
    if flags & TRUNCATE != 0 {
        worker::settle_all();
    }
    let fd = go();
    if !failed(fd) {
        let _inside = Inside::enter();
        table::opened(fd as usize, flags);
    }
    fd
}

/// A call that tells of a file: again, if another program's writes to it were missing.
fn told(go: impl Fn() -> isize, which: impl FnOnce() -> (u64, u64)) -> isize {
    settle();
    let result = go();
    if result == 0 && worker::head().is_some_and(|head| head.owned.load(Ordering::SeqCst) != 0) {
        let (device, number) = which();
        worker::settle_other(device, number, false);
        return go();
    }
    result
}

fn duplicated(old: usize, go: impl FnOnce() -> isize) -> isize {
    settle();
    let _inside = Inside::enter();
    let new = go();
    if !failed(new) && table::known(old).is_some() {
        worker::settle();
        table::duplicate(old, new as usize);
    }
    new
}

fn close(fd: usize, go: impl FnOnce() -> isize) -> isize {
    if table::known(fd).is_none() {
        settle();
        table::remove(fd);
        return go();
    }
    let _inside = Inside::enter();
    worker::settle();
    let error = take_error(fd);
    if let Some(id) = table::is_last(fd).filter(|id| table::file(*id).told.swap(0, Ordering::Relaxed) != 0) {
        worker::drop_file(id);
    }
    table::remove(fd);
    let result = go();
    error.unwrap_or(result)
}
