//! Open files of the program by descriptor. Several descriptors may be one open file (dup), which has one offset.

use core::sync::atomic::{AtomicI32, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use sys::extents::FILES;

use super::ahead::Reading;
use super::kernel::{failed, nr, raw};
use super::{place, worker};

pub(super) const DESCRIPTORS: usize = 4096;
/// Nothing known; and: nothing that concerns us.
const UNKNOWN: u16 = 0;
pub(super) const OTHER: u16 = u16::MAX;
/// Opened by the program and not looked at yet; what is known of it is in the lowest bits: it may be kept, appends, and was empty when nothing was
/// known of others' files.
pub(super) const OPENED: u16 = 0xfff0;
pub(super) const MAY: u16 = 1;
pub(super) const APPENDS: u16 = 2;
const EMPTY: u16 = 4;
/// What an open file is to us.
pub(super) const FREE: u8 = 0;
pub(super) const TAKEN: u8 = 1;
/// A file that others may keep, and we may not.
pub(super) const DIRECT: u8 = 2;
/// Not kept yet.
pub(super) const FRESH: u8 = 3;
/// About to be kept: who finds that waits for it.
pub(super) const BEGUN: u8 = 4;
/// Kept.
pub(super) const KEPT: u8 = 5;
/// The kernel has the offset.
pub(super) const AWAY: u64 = u64::MAX;

/// An open file.
pub(super) struct File {
    pub(super) state: AtomicU8,
    /// The worker has it.
    pub(super) told: AtomicU8,
    /// Other processes may have it, too: the kernel has its offset, always.
    pub(super) shared: AtomicU8,
    /// O_APPEND.
    pub(super) appends: AtomicU8,
    /// The agent knows that nobody is to keep its file.
    pub(super) marked: AtomicU8,
    /// Which of our logs.
    pub(super) log: AtomicU8,
    /// Ticks that writes took that could have been kept, and nanoseconds for a KiB of a large one; 0: unknown.
    pub(super) cost: AtomicU64,
    pub(super) pace: AtomicU32,
    /// The errno that was told: every fsync is told again.
    pub(super) failed: AtomicU32,
    /// Calls on it, of other threads, too, while it is not kept.
    pub(super) under_way: AtomicU32,
    descriptors: AtomicU32,
    /// One of them.
    pub(super) fd: AtomicI32,
    pub(super) device: AtomicU64,
    pub(super) number: AtomicU64,
    /// Place in the table of all of them.
    pub(super) inode: AtomicU32,
    pub(super) offset: AtomicU64,
    pub(super) reading: Reading,
}

#[unsafe(link_section = ".data.hot.descriptors")]
pub(super) static DESCRIPTOR: [AtomicU16; DESCRIPTORS] = [const { AtomicU16::new(UNKNOWN) }; DESCRIPTORS];
/// Of what was not looked at yet.
#[repr(C)]
pub(super) struct Unlooked {
    /// Ticks that writes lost.
    pub(super) spent: AtomicU32,
    /// Calls.
    pub(super) under_way: AtomicU32,
}
/// As good as none, before the first.
pub(super) const UNTIMED: u32 = 1;
pub(super) static UNLOOKED: [Unlooked; DESCRIPTORS] =
    [const { Unlooked { spent: AtomicU32::new(0), under_way: AtomicU32::new(0) } }; DESCRIPTORS];
pub(super) static FILE: [File; FILES] = [const {
    File {
        state: AtomicU8::new(FREE),
        told: AtomicU8::new(0),
        shared: AtomicU8::new(0),
        appends: AtomicU8::new(0),
        marked: AtomicU8::new(0),
        log: AtomicU8::new(0),
        cost: AtomicU64::new(0),
        pace: AtomicU32::new(0),
        failed: AtomicU32::new(0),
        under_way: AtomicU32::new(0),
        descriptors: AtomicU32::new(0),
        fd: AtomicI32::new(-1),
        device: AtomicU64::new(0),
        number: AtomicU64::new(0),
        inode: AtomicU32::new(0),
        offset: AtomicU64::new(AWAY),
        reading: Reading::new(),
    }
}; FILES];

/// Open files that were known at a time, at most.
#[unsafe(link_section = ".data.hot")]
static USED: AtomicUsize = AtomicUsize::new(0);

/// The open file with this number.
pub(super) fn file(id: usize) -> &'static File {
    &FILE[id % FILES]
}

/// All that were in use: the first of them, since the first that is free is taken.
fn used() -> &'static [File] {
    &FILE[..USED.load(Ordering::Relaxed).min(FILES)]
}

/// All that are in use.
pub(super) fn all() -> impl Iterator<Item = (usize, &'static File)> {
    used().iter().enumerate().filter(|(_, file)| file.state.load(Ordering::Relaxed) > TAKEN)
}

/// The one behind a descriptor, if it is known to be a file that concerns us.
pub(super) fn known(fd: usize) -> Option<usize> {
    match DESCRIPTOR.get(fd)?.load(Ordering::Relaxed) {
        UNKNOWN | OPENED.. => None,
        id => Some(usize::from(id) - 1),
    }
}

/// [`known`], after a look at what nobody saw being opened: other processes may have it.
pub(super) fn look(fd: usize) -> Option<usize> {
    const GETFL: usize = 3;
    if DESCRIPTOR.get(fd)?.load(Ordering::Relaxed) == UNKNOWN {
        // SAFETY: integers.
        let flags = unsafe { raw(nr::FCNTL, [fd, GETFL, 0, 0, 0, 0]) };
        if failed(flags) {
            return None;
        }
        enter(fd, UNKNOWN, said(flags as usize));
    }
    look_opened(fd);
    known(fd)
}

/// The same of what the program opened: nobody else has it.
pub(super) fn look_opened(fd: usize) {
    if is_unlooked(fd) {
        let opened = DESCRIPTOR[fd].load(Ordering::Relaxed);
        enter(fd, opened, opened);
    }
}

/// Whether the program opened it, and it was not looked at yet.
#[inline]
pub(super) fn is_unlooked(fd: usize) -> bool {
    DESCRIPTOR.get(fd).is_some_and(|slot| (OPENED..OTHER).contains(&slot.load(Ordering::SeqCst)))
}

/// Whether nobody knows what it is: there is no room for more, or it is beyond what is watched.
pub(super) fn is_unknown(fd: usize) -> bool {
    DESCRIPTOR.get(fd).is_none_or(|slot| slot.load(Ordering::SeqCst) == UNKNOWN) || is_unlooked(fd)
}

/// Opened by the program just now: it is looked at when it has to be. `flags` as for open(2).
pub(super) fn opened(fd: usize, flags: usize, empty: bool) {
    if let (Some(slot), Some(unlooked)) = (DESCRIPTOR.get(fd), UNLOOKED.get(fd)) {
        unlooked.spent.store(UNTIMED, Ordering::Relaxed);
        slot.store(OPENED | said(flags) | if empty { EMPTY } else { 0 }, Ordering::Relaxed);
    }
}

/// So many more ticks were lost writing to what was not looked at yet, or gained: all of them. The last are not counted yet where that is too much.
pub(super) fn spent(fd: usize, lost: i64, price: u64) -> u64 {
    let Some(Unlooked { spent, .. }) = UNLOOKED.get(fd) else { return 0 };
    let all = u64::from(spent.load(Ordering::Relaxed)).saturating_add_signed(lost);
    if all < price {
        spent.store(all as u32, Ordering::Relaxed);
    }
    all
}

/// Calls of threads that found an open file not looked at yet.
pub(super) fn unlooked_under_way(file: &File) -> u32 {
    let unlooked = UNLOOKED.get(file.fd.load(Ordering::Relaxed) as usize);
    unlooked.map_or(0, |unlooked| unlooked.under_way.load(Ordering::SeqCst))
}

/// Flags of open(2): may be written; O_APPEND; O_EXCL; O_TRUNC; O_DIRECT, O_DSYNC and O_SYNC, O_PATH.
pub(super) const WRITES: usize = 3;
pub(super) const APPEND: usize = 0o2000;
pub(super) const EXCLUSIVE: usize = 0o200;
pub(super) const TRUNCATE: usize = 0o1000;
pub(super) const NOT_KEPT: usize = 0o40000 | 0o10000 | 0o4_000_000 | 0o10_000_000;

/// What flags say.
fn said(flags: usize) -> u16 {
    let may = if flags & WRITES != 0 && flags & NOT_KEPT == 0 { MAY } else { 0 };
    may | if flags & APPEND != 0 { APPENDS } else { 0 }
}

/// `before`: what its slot holds, unless a signal handler looks at it meanwhile.
fn enter(fd: usize, before: u16, said: u16) {
    let shared = before == UNKNOWN;
    let Some(slot) = DESCRIPTOR.get(fd) else { return };
    let Some((device, number)) = place::of(fd) else { return slot.store(OTHER, Ordering::Relaxed) };
    let free = |(_, file): &(usize, &File)| {
        file.state.compare_exchange(FREE, TAKEN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    // With no room it is looked at again at every call that asks.
    let Some((id, file)) = FILE.iter().enumerate().find(free) else { return };
    USED.fetch_max(id + 1, Ordering::Relaxed);
    for flag in [&file.told, &file.marked] {
        flag.store(0, Ordering::Relaxed);
    }
    file.shared.store(u8::from(shared), Ordering::Relaxed);
    file.appends.store(u8::from(said & APPENDS != 0), Ordering::Relaxed);
    let spent = if shared { 0 } else { UNLOOKED[fd].spent.load(Ordering::Relaxed) };
    file.cost.store(spent.into(), Ordering::Relaxed);
    file.pace.store(0, Ordering::Relaxed);
    file.failed.store(0, Ordering::Relaxed);
    file.reading.reset();
    file.descriptors.store(1, Ordering::Relaxed);
    file.fd.store(fd as i32, Ordering::Relaxed);
    file.device.store(device, Ordering::Relaxed);
    file.number.store(number, Ordering::Relaxed);
    file.offset.store(AWAY, Ordering::Relaxed);
    let state = if said & MAY != 0 { FRESH } else { DIRECT };
    file.state.store(state, Ordering::Relaxed);
    if slot.compare_exchange(before, id as u16 + 1, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        return file.state.store(FREE, Ordering::Relaxed);
    }
    if !shared && said & EMPTY != 0 {
        worker::forgive(device, number);
    }
}

/// `new` is another descriptor of what `old` is.
pub(super) fn duplicate(old: usize, new: usize) {
    let (Some(id), Some(slot)) = (known(old), DESCRIPTOR.get(new)) else {
        // Beyond what is watched it may be used like another process's.
        return share_one(old);
    };
    file(id).descriptors.fetch_add(1, Ordering::Relaxed);
    slot.store(id as u16 + 1, Ordering::Relaxed);
}

/// A descriptor is about to be closed: true if it is the last of its open file, which is known by this number.
pub(super) fn is_last(fd: usize) -> Option<usize> {
    known(fd).filter(|id| file(*id).descriptors.load(Ordering::Relaxed) == 1)
}

/// It is closed.
pub(super) fn remove(fd: usize) {
    let Some(slot) = DESCRIPTOR.get(fd) else { return };
    let id = match slot.swap(UNKNOWN, Ordering::Relaxed) {
        UNKNOWN | OPENED.. => return,
        id => usize::from(id) - 1,
    };
    if file(id).descriptors.fetch_sub(1, Ordering::Relaxed) == 1 {
        file(id).state.store(FREE, Ordering::Relaxed);
    } else if file(id).fd.load(Ordering::Relaxed) == fd as i32 {
        let other = DESCRIPTOR.iter().position(|slot| slot.load(Ordering::Relaxed) == id as u16 + 1);
        file(id).fd.store(other.map_or(-1, |fd| fd as i32), Ordering::Relaxed);
    }
}

/// Descriptors that are known, between these.
pub(super) fn between(first: usize, last: usize) -> impl Iterator<Item = usize> {
    (first..DESCRIPTORS.min(last.saturating_add(1))).filter(|fd| DESCRIPTOR[*fd].load(Ordering::Relaxed) != UNKNOWN)
}

/// Another process will have this open file, too.
pub(super) fn share_one(fd: usize) {
    if let Some(id) = known(fd) {
        file(id).shared.store(1, Ordering::Relaxed);
    } else if is_unlooked(fd) {
        DESCRIPTOR[fd].store(UNKNOWN, Ordering::Relaxed);
    }
}

/// Another process will have all open files; or those that stay open when a program is executed.
pub(super) fn share(all_of_them: bool) {
    const GETFD: usize = 1;
    for fd in between(0, DESCRIPTORS) {
        let concerns = known(fd).is_some() || is_unlooked(fd);
        // SAFETY: integers.
        if concerns && (all_of_them || unsafe { raw(nr::FCNTL, [fd, GETFD, 0, 0, 0, 0]) } & 1 == 0) {
            share_one(fd);
        }
    }
}

/// A fresh process has what its parent opened, and has not told the worker of anything. `threads`: the parent had several, whose calls end there.
pub(super) fn inherit(threads: bool) {
    let stale = |unlooked: &&Unlooked| unlooked.under_way.load(Ordering::Relaxed) != 0;
    if threads {
        UNLOOKED.iter().filter(stale).for_each(|unlooked| unlooked.under_way.store(0, Ordering::Relaxed));
    }
    for file in used() {
        match file.state.load(Ordering::Relaxed) {
            TAKEN => file.state.store(FREE, Ordering::Relaxed),
            BEGUN | KEPT => file.state.store(FRESH, Ordering::Relaxed),
            _ => {}
        }
        file.under_way.store(0, Ordering::Relaxed);
        file.told.store(0, Ordering::Relaxed);
        file.marked.store(0, Ordering::Relaxed);
        file.offset.store(AWAY, Ordering::Relaxed);
    }
}

/// Gives the kernel an offset that was kept here.
pub(super) fn give_back(file: &File, offset: u64) {
    const SET: usize = 0;
    let fd = file.fd.load(Ordering::Relaxed) as usize;
    // SAFETY: integers.
    let _ = unsafe { raw(nr::LSEEK, [fd, offset as usize, SET, 0, 0, 0]) };
}

/// The offset that the kernel has.
pub(super) fn kernel_offset(fd: usize) -> Option<u64> {
    const CURRENT: usize = 1;
    // SAFETY: integers.
    let offset = unsafe { raw(nr::LSEEK, [fd, 0, CURRENT, 0, 0, 0]) };
    (!failed(offset)).then_some(offset as u64)
}
