//! The file layer: writes go into memory that the node's I/O worker writes from; before any other system call by which they could be missed the
//! program waits for them.
//!
//! Kept are small writes, and large ones where the file system is slow, to regular files that the program has open for writing. What concerns one
//! file only waits for that file's; what others could notice, for everything.
//!
//! Hazards. In a program with one thread a signal handler may come in anywhere and write, too: what counts changes by one store, and who was
//! interrupted begins again. In one with several threads a lock is held ([`inside`]); what was seen before it was taken is looked at again.
//!
//! Preloaded, as [the resident](../../resident/src/lib.rs) of programs that use memory of other nodes, of which it has some files: no libc, no allocator, no
//! thread-local storage. One object each, since every page of one costs every program's start.
#![no_std]
#![cfg(target_arch = "x86_64")]

#[allow(dead_code, reason = "of the resident")]
#[path = "../../resident/src/call.rs"]
mod call;
#[allow(dead_code, reason = "of the resident")]
#[path = "../../resident/src/dispatch.rs"]
mod dispatch;
#[allow(dead_code, reason = "of the resident")]
#[path = "../../resident/src/door.rs"]
mod door;
#[allow(dead_code, reason = "of the resident")]
#[path = "../../resident/src/linker.rs"]
mod linker;
#[allow(dead_code, reason = "of the resident")]
#[path = "../../resident/src/objects.rs"]
mod objects;
#[allow(dead_code, reason = "of the resident")]
#[path = "../../resident/src/settings.rs"]
mod settings;
#[allow(dead_code, reason = "of the resident")]
#[path = "../../resident/src/signals.rs"]
mod signals;

mod ahead;
mod classes;
mod code;
mod cost;
mod elsewhere;
mod idle;
mod image;
mod inside;
mod keep;
mod kernel;
mod net;
mod others;
mod place;
mod process;
mod quick;
mod sites;
mod source;
mod stubs;
mod table;
mod threads;
mod verdicts;
mod worker;

use core::sync::atomic::{AtomicU8, AtomicU32, Ordering, compiler_fence};

use sys::files::why;
use sys::syscall::syscall;

use self::call::{ANONYMOUS, EXECUTE, SHARED};
use self::inside::Inside;
use self::kernel::{failed, nr, raw};
use self::sites::{DIRTY, OFF};

const PARTS: usize = 64;
const AT_FDCWD: usize = -100_isize as usize;
/// FSIZE of setrlimit(2).
const LIMIT_FSIZE: usize = 1;

core::arch::global_asm!(
    ".weak write",
    ".pushsection .data.rel.ro, \"aw\"",
    ".balign 8",
    ".hidden hpcrt_write",
    ".globl hpcrt_write",
    "hpcrt_write: .quad write",
    ".popsection",
);
// What every call looks at and passes through lies together: few lines of the cache, and a page of each, one of which a fork copies.
core::arch::global_asm!(
    ".pushsection .data.hot, \"aw\"",
    ".balign 4096",
    ".popsection",
    ".pushsection .text.hot, \"ax\"",
    ".balign 4096",
    ".popsection",
);

unsafe extern "C" {
    #[link_name = "hpcrt_write"]
    static LIBC_WRITE: usize;
}

const EXIT_CODE: usize = 125;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        // SAFETY: an integer.
        let _ = unsafe { syscall(nr::EXIT_GROUP, [EXIT_CODE, 0, 0, 0, 0, 0]) };
    }
}

/// Called by the dynamic linker before any other code of the program.
extern "C" fn begin() {
    if settings::get().place[0] == 0 {
        return;
    }
    // SAFETY: written by the dynamic linker.
    let write = unsafe { core::ptr::addr_of!(LIBC_WRITE).read_volatile() };
    let limited = limited();
    idle::begin();
    let install = || {
        let mut installed = Err(call::EINVAL);
        objects::loaded(|loaded| {
            if loaded.range.contains(&write) {
                installed = sites::install_libc(loaded, !limited);
            }
        });
        installed.map_err(|_| why::OTHER_LIBC)
    };
    let installed = if write == 0 { Err(why::NO_LIBC) } else { install() };
    match installed {
        Ok(complete) if net::begin(limited || complete && code::judge(write)) => {}
        Ok(_) => worker::refuse(why::NO_DISPATCH),
        Err(why) => {
            sites::gate_only();
            worker::refuse(why)
        }
    }
    if limited {
        step_aside();
    }
}

/// Whether the size of files is limited: a write that is too long is told to who makes it.
fn limited() -> bool {
    let mut limits = [0u64; 2];
    // SAFETY: room for a `struct rlimit64`; nothing is stopped yet.
    let _ = unsafe { syscall(nr::PRLIMIT64, [0, LIMIT_FSIZE, 0, limits.as_mut_ptr() as usize, 0, 0]) };
    limits[0] != u64::MAX
}

fn is_off() -> bool {
    OFF.load(Ordering::Relaxed) != 0
}

/// The program is one that this layer cannot follow from here on: it goes on as without it.
fn step_aside() {
    others::be_unseen();
    settle();
    let _inside = Inside::enter();
    let_go();
    OFF.store(1, Ordering::SeqCst);
    dispatch::end();
}

/// What a child begins with.
fn begin_again() {
    process::forget_borrowers();
    table::inherit(inside::is_several());
    worker::detach();
    quick::disarm();
    others::set_clean();
    inside::single();
}

/// Waits until nothing is pending, here and with those who may have told us something.
fn settle() {
    if DIRTY.load(Ordering::Relaxed) & others::OWN != 0 {
        let _inside = Inside::enter();
        if DIRTY.load(Ordering::Relaxed) & others::OWN != 0 {
            worker::settle();
        }
    }
    others::settle();
}

/// No open file of ours is known to the worker any more.
fn leave() {
    settle();
    let _inside = Inside::enter();
    let_go();
}

/// Nobody may ask any more for what is missing then.
fn let_go() {
    table::all().for_each(|(_, file)| hold_off(file));
    worker::settle();
    for (id, file) in table::all() {
        drop_file(id, file);
        if let Some((log, _)) = worker::log(file.log.load(Ordering::Relaxed).into())
            && log.segment.files[id].error.load(Ordering::SeqCst) != 0
        {
            log.segment.untold.store(1, Ordering::SeqCst);
        }
    }
}

/// Nothing more is kept of a file until it is dropped: a signal handler that comes in between writes directly.
fn hold_off(file: &table::File) {
    let _ = file.state.compare_exchange(table::KEPT, table::BEGUN, Ordering::Relaxed, Ordering::Relaxed);
    quick::forget();
}

/// The worker forgets an open file, if it knows it. Nothing is pending there, and nothing more is kept.
fn drop_file(id: usize, file: &table::File) {
    if file.told.swap(0, Ordering::Relaxed) != 0 {
        worker::drop_file(id, file);
    }
    let _ = file.state.compare_exchange(table::BEGUN, table::FRESH, Ordering::Relaxed, Ordering::Relaxed);
}

/// A system call of the program.
fn perform(number: usize, args: [usize; 6]) -> isize {
    if process::borrows() {
        return process::borrowed(number, args);
    }
    // SAFETY: the program's own call, with its arguments.
    let go = || unsafe { raw(number, args) };
    let [fd, second, third, fourth, ..] = args;
    match number {
        nr::WRITE => keep::write(number, args, &[[second, third]], None),
        nr::PWRITE64 => keep::write(number, args, &[[second, third]], Some(fourth)),
        nr::WRITEV if third <= PARTS && second != 0 => {
            // SAFETY: the program says that there are so many.
            keep::write(number, args, unsafe { core::slice::from_raw_parts(second as *const [usize; 2], third) }, None)
        }
        nr::WRITEV | nr::PWRITEV | nr::PWRITEV2 | nr::FALLOCATE => change(number, args),
        nr::FTRUNCATE => {
            let result = change(number, args);
            forgive(fd, result == 0 && second == 0);
            result
        }
        nr::READ | nr::PREAD64 | nr::READV | nr::PREADV | nr::PREADV2 => keep::read(number, args),
        nr::FSTAT => told(go, || place::of_stat(second as *const u64), fd, 0),
        nr::IOCTL => change(number, args),
        nr::LSEEK => keep::seek(args),
        nr::FSYNC | nr::FDATASYNC | nr::SYNC_FILE_RANGE => {
            others::settle();
            elsewhere::sync(fd);
            let result = touch(number, args);
            failure(fd).unwrap_or(result)
        }
        nr::SENDFILE => {
            settle_file(second);
            change(number, args)
        }
        nr::SPLICE | nr::COPY_FILE_RANGE => {
            settle_file(third);
            change(number, args)
        }
        nr::MMAP => {
            if fourth & ANONYMOUS == 0 {
                if fourth & SHARED != 0 {
                    make_direct(args[4]);
                    others::map(args[4]);
                } else {
                    settle_file(args[4]);
                }
            } else if fourth & SHARED != 0 {
                others::share();
            }
            let result = go();
            if third & EXECUTE != 0 && !failed(result) {
                code::mapped(args);
            }
            result
        }
        nr::MPROTECT | nr::PKEY_MPROTECT => {
            code::protect(third);
            go()
        }
        nr::PERSONALITY => {
            code::personality(fd);
            go()
        }
        nr::SHMAT => {
            const EXEC: usize = 0o100_000;
            if third & EXEC != 0 {
                code::protect(EXECUTE);
            }
            others::share();
            settle();
            go()
        }
        nr::WAIT4 => {
            let result = go();
            // SAFETY: what the kernel has just written.
            let killed = result > 0 && (second == 0 || !matches!(unsafe { *(second as *const u32) } & 0x7f, 0 | 0x7f));
            others::waited(killed);
            result
        }
        nr::WAITID => {
            const KILLED: i32 = 2;
            const DUMPED: i32 = 3;
            let result = go();
            // SAFETY: a `siginfo_t` that the kernel has just written.
            let killed = || third == 0 || matches!(unsafe { *((third + 8) as *const i32) }, KILLED | DUMPED);
            others::waited(result == 0 && killed());
            result
        }
        nr::FLOCK => {
            make_direct(fd);
            go()
        }
        nr::FCNTL => control(args),
        nr::OPEN => opening(AT_FDCWD, fd, second, go),
        nr::CREAT => opening(AT_FDCWD, fd, 0o1101, go),
        nr::OPENAT => opening(fd, second, third, go),
        // SAFETY: the program's `struct open_how`, which begins with the flags.
        nr::OPENAT2 if third != 0 => opening(fd, second, unsafe { *(third as *const u64) } as usize, go),
        nr::TRUNCATE => {
            settle();
            let file = settle_path(AT_FDCWD, fd);
            let result = go();
            if result == 0
                && second == 0
                && let Some((device, number)) = file
            {
                worker::forgive(device, number);
            }
            result
        }
        nr::STAT | nr::LSTAT => told(go, || place::of_stat(second as *const u64), AT_FDCWD, fd),
        nr::NEWFSTATAT => told(go, || place::of_stat(third as *const u64), fd, second),
        nr::STATX => told(go, || place::of_statx(args[4] as *const u32), fd, second),
        nr::CLOSE => close(fd, go),
        nr::CLOSE_RANGE => {
            const UNSHARE: usize = 2;
            const CLOEXEC: usize = 4;
            if third & UNSHARE != 0 {
                step_aside();
            } else if third & CLOEXEC == 0 {
                settle();
                table::between(fd, second).for_each(|fd| _ = forsake(fd));
            }
            go()
        }
        nr::DUP => duplicated(fd, go),
        nr::DUP2 | nr::DUP3 => {
            if fd == second {
                return go();
            }
            // Nobody is to find the new one as what the old one was.
            let _inside = Inside::enter();
            let lost = forsake(second);
            let result = duplicated(fd, go);
            if failed(result) { result } else { lost.unwrap_or(result) }
        }
        nr::SENDMSG | nr::SENDMMSG => {
            // Open files may go to another process.
            // SAFETY: the program's `struct msghdr`.
            if number == nr::SENDMMSG || second != 0 && unsafe { *((second + 40) as *const usize) } != 0 {
                let _inside = Inside::enter();
                worker::settle();
                table::share(true);
            }
            settle();
            go()
        }
        nr::SYNC | nr::SYNCFS => {
            settle();
            worker::settle_all();
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
        nr::RT_SIGPROCMASK => signals::set_mask(args),
        nr::RT_SIGSUSPEND | nr::PPOLL | nr::EPOLL_PWAIT | nr::PSELECT6 => {
            // SAFETY: the program's own call.
            signals::waiting(number, args, |args| unsafe { raw(number, args) })
        }
        nr::PRCTL => {
            if fd == dispatch::SET_DISPATCH {
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

/// The open file behind a descriptor, if it concerns us.
fn look(fd: usize) -> Option<usize> {
    table::known(fd).or_else(|| {
        let _inside = Inside::enter();
        table::look(fd)
    })
}

/// Everything that concerns this file is where it belongs: ours, and what others of the job wrote.
fn settle_file(fd: usize) {
    if worker::may_be_busy() {
        let name = look(fd).map(|id| table::file(id).name());
        let name = name.or_else(|| if table::is_unknown(fd) { place::of(fd) } else { None });
        name.into_iter().for_each(|(device, number)| _ = worker::settle_inode(device, number));
    }
}

/// The same of a file by its path; which it is.
fn settle_path(directory: usize, path: usize) -> Option<(u64, u64)> {
    let mut stat = [0u64; 18];
    // SAFETY: the program's path, and room for a `struct stat`.
    let result = unsafe { raw(nr::NEWFSTATAT, [directory, path, stat.as_mut_ptr() as usize, 0, 0, 0]) };
    (result == 0).then(|| {
        let told = place::of_stat(stat.as_ptr());
        place::join(&told, directory, path);
        worker::settle_inode(told.device, told.number);
        (told.device, told.number)
    })
}

/// A call on a file that is not kept, and does not begin to be meanwhile, by another thread or a signal handler: that would be with an offset that
/// the call moves.
struct UnderWay(&'static AtomicU32);

impl UnderWay {
    #[inline]
    fn new(count: &'static AtomicU32) -> UnderWay {
        if inside::is_several() {
            count.fetch_add(1, Ordering::SeqCst);
        } else {
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            compiler_fence(Ordering::SeqCst);
        }
        UnderWay(count)
    }

    /// On a file that was opened and not looked at yet.
    fn unlooked(fd: usize) -> Option<UnderWay> {
        let is = || table::is_unlooked(fd);
        is().then(|| UnderWay::new(&table::UNLOOKED[fd].under_way)).filter(|_| is())
    }
}

impl Drop for UnderWay {
    #[inline]
    fn drop(&mut self) {
        if inside::is_several() {
            self.0.fetch_sub(1, Ordering::SeqCst);
        } else {
            compiler_fence(Ordering::SeqCst);
            // A child has begun again.
            self.0.store(self.0.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed);
        }
    }
}

/// A call that looks at an open file.
fn touch(number: usize, args: [usize; 6]) -> isize {
    settle_file(args[0]);
    // SAFETY: the program's own call.
    let go = || unsafe { raw(number, args) };
    let unlooked = UnderWay::unlooked(args[0]);
    let Some(file) = table::known(args[0]).map(table::file) else { return go() };
    drop(unlooked);
    let under_way = UnderWay::new(&file.under_way);
    if file.state.load(Ordering::SeqCst) <= table::FRESH {
        return go();
    }
    drop(under_way);
    // Of a file that is kept the kernel is given the offset, which must not move meanwhile.
    let _inside = Inside::enter();
    with_kernel(file, go)
}

/// Makes a call with the offset that the kernel is given. A signal handler that comes in between keeps nothing, and so moves that offset, too.
fn with_kernel(file: &table::File, go: impl FnOnce() -> isize) -> isize {
    let log = worker::log(file.log.load(Ordering::Relaxed).into()).filter(|(log, _)| log.begin());
    worker::settle();
    let result = go();
    log.inspect(|(log, _)| log.end());
    result
}

/// One that changes a file in a way that is not kept, or is noticed by others.
fn change(number: usize, args: [usize; 6]) -> isize {
    settle();
    touch(number, args)
}

/// The first error of the worker with this open file that was not told.
fn take_error(fd: usize) -> Option<isize> {
    let (file, error) = error_of(fd)?;
    // Another thread may have been told meanwhile.
    let errno = Some(error.swap(0, Ordering::SeqCst)).filter(|errno| *errno != 0)?;
    file.failed.store(errno, Ordering::Relaxed);
    Some(-(errno as isize))
}

/// Where it is, if there is one.
fn error_of(fd: usize) -> Option<(&'static table::File, &'static AtomicU32)> {
    let id = table::known(fd)?;
    let (log, _) = worker::log(table::file(id).log.load(Ordering::Relaxed).into())?;
    let error = &log.segment.files[id].error;
    (error.load(Ordering::SeqCst) != 0).then_some((table::file(id), error))
}

/// What a call has to say that would show an open file without what is missing in it; who writes, syncs or closes is told, too.
fn missing(fd: usize) -> Option<isize> {
    error_of(fd).map(|(_, error)| -(error.load(Ordering::SeqCst) as isize)).filter(|error| *error != 0)
}

/// What fsync has to say: something is missing in this file, whoever wrote it and whoever was told.
fn failure(fd: usize) -> Option<isize> {
    let file = table::file(if worker::is_lost() { look(fd) } else { table::known(fd) }?);
    let (device, number) = file.name();
    let told = || Some(file.failed.load(Ordering::Relaxed)).filter(|errno| *errno != 0);
    take_error(fd).or_else(|| told().or_else(|| worker::failure(device, number)).map(|errno| -(errno as isize)))
}

/// The file is empty now.
fn forgive(fd: usize, empty: bool) {
    if empty && let Some(file) = table::known(fd).map(table::file) {
        let (device, number) = file.name();
        file.failed.store(0, Ordering::Relaxed);
        worker::forgive(device, number);
    }
}

/// Nobody keeps this file any more.
fn make_direct(fd: usize) {
    settle();
    let is_known = |file: &table::File| {
        file.state.load(Ordering::Relaxed) == table::DIRECT && file.marked.load(Ordering::Relaxed) != 0
    };
    // It was made so before; others may not have heard of it then.
    if table::known(fd).map(table::file).is_some_and(is_known) {
        return settle_file(fd);
    }
    let inside = Inside::enter();
    let Some(id) = table::look(fd) else {
        drop(inside);
        return settle_file(fd);
    };
    let file = table::file(id);
    file.state.store(table::DIRECT, Ordering::Relaxed);
    quick::forget();
    worker::settle();
    if file.marked.load(Ordering::Relaxed) == 0 {
        worker::mark_direct(file);
    }
    let (device, number) = file.name();
    worker::settle_inode(device, number);
    // The worker's descriptor would hold the lock.
    drop_file(id, file);
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
            let _inside = Inside::enter();
            worker::settle();
            if let Some(file) = table::look(args[0]).map(table::file) {
                file.state.store(table::DIRECT, Ordering::Relaxed);
            }
            go()
        }
        // Locks of records and leases (fcntl(2)).
        5..=7 | 36..=38 | 1024 => {
            make_direct(args[0]);
            go()
        }
        _ => change(nr::FCNTL, args),
    }
}

fn opening(directory: usize, path: usize, flags: usize, go: impl FnOnce() -> isize) -> isize {
    const CREATE: usize = 0o100;
    if flags & (CREATE | table::TRUNCATE) != 0 {
        settle();
    }
    if flags & table::TRUNCATE != 0 {
        place::join_named();
        if worker::may_be_busy() {
            settle_path(directory, path);
        }
    }
    let fd = go();
    if !failed(fd) {
        let _inside = Inside::enter();
        let empty = flags & (table::EXCLUSIVE | table::TRUNCATE) != 0;
        table::opened(fd as usize, flags, empty && worker::head().is_none());
        if empty && worker::is_lost() {
            table::look(fd as usize);
            forgive(fd as usize, true);
        }
    }
    fd
}

/// A call that tells of a file: again, if something that was written may have been missing.
fn told(go: impl Fn() -> isize, which: impl FnOnce() -> place::Told, directory: usize, path: usize) -> isize {
    let done = worker::done();
    let result = go();
    if result == 0 {
        let told = which();
        place::join(&told, directory, path);
        // What was pending may have been written since it was told of.
        let again = worker::settle_inode(told.device, told.number) || told.is_regular && worker::done() != done;
        // SAFETY: the program's path, which the kernel has just read.
        let by_descriptor = path == 0 || unsafe { *(path as *const u8) } == 0;
        if by_descriptor && let Some(error) = missing(directory) {
            return error;
        }
        if again {
            return go();
        }
    }
    result
}

fn duplicated(old: usize, go: impl FnOnce() -> isize) -> isize {
    let _inside = Inside::enter();
    table::look_opened(old);
    let new = go();
    if !failed(new) {
        if table::known(old).is_some() && new as usize >= table::DESCRIPTORS {
            worker::settle();
        }
        table::duplicate(old, new as usize);
    }
    new
}

fn close(fd: usize, go: impl FnOnce() -> isize) -> isize {
    let inside = Inside::enter();
    if DIRTY.load(Ordering::Relaxed) != 0 {
        table::look_opened(fd);
    }
    let Some(id) = table::known(fd) else {
        table::remove(fd);
        drop(inside);
        // Of a pipe or socket the other end may hear of it.
        settle();
        return go();
    };
    let file = table::file(id);
    if file.told.load(Ordering::Relaxed) != 0 {
        others::settle();
    } else if may_be_locked(file) {
        // Whoever waits for the lock has it then.
        settle();
    }
    if file.told.load(Ordering::Relaxed) != 0 {
        if table::is_last(fd).is_some() {
            hold_off(file);
        }
        worker::settle();
    }
    if table::is_last(fd).is_some() {
        drop_file(id, file);
    }
    // Behind what those say who have it open for us and close it first.
    let error = take_error(fd);
    table::remove(fd);
    let result = go();
    error.unwrap_or(result)
}

/// Whether closing a descriptor may release a lock: the program's own, or of another process that has the open file, too.
fn may_be_locked(file: &table::File) -> bool {
    let (device, number) = file.name();
    let is = |flag: &AtomicU8| flag.load(Ordering::Relaxed) != 0;
    is(&file.marked) || is(&file.shared) || worker::is_direct(device, number)
}

/// Closes what a call closes beside what it does: what is missing then.
fn forsake(fd: usize) -> Option<isize> {
    let log = table::known(fd).and_then(|id| worker::log(table::file(id).log.load(Ordering::Relaxed).into()));
    let lost = Some(close(fd, || 0)).filter(|result| *result != 0)?;
    log.inspect(|(log, _)| log.segment.untold.store(1, Ordering::SeqCst));
    Some(lost)
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
