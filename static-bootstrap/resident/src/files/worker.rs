//! The node's I/O worker as a program sees it: the memory that they share, and the agent, which hands open files over.

use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use sys::extents::{BYTES, Head, Log, NOBODY, NONE, RING_AT, SEGMENTS, Segment, inode, segment_at};
use sys::files::{MARK, Question, ROOTS_MAX, Terms, op, why};
use sys::resident::DOOR;

use super::kernel::{block_signals, failed, nr, raw, restore_signals, wait, wake};
use super::sites::DIRTY;
use super::table;
use crate::settings;

const AF_UNIX: u16 = 1;
const SEQPACKET_CLOEXEC: usize = 5 | 0o2_000_000;
const MSG_NOSIGNAL: usize = 0x4000;
const MSG_CMSG_CLOEXEC: usize = 0x4000_0000;
/// Seconds.
const PATIENCE: usize = 30;
const EIO: u32 = 5;

/// Where the memory is, and our segment in it: 0 while we take no part, and none.
static AT: AtomicUsize = AtomicUsize::new(0);
static SEGMENT: AtomicU32 = AtomicU32::new(0);
/// Nobody is there, or he does not take us.
static ALONE: AtomicU32 = AtomicU32::new(0);

struct Roots(core::cell::UnsafeCell<([u8; ROOTS_MAX], usize)>);
// SAFETY: written once, before there are threads.
unsafe impl Sync for Roots {}
static ROOTS: Roots = Roots(core::cell::UnsafeCell::new(([0; ROOTS_MAX], 0)));

/// The directories that the user named.
pub(super) fn roots() -> &'static [u8] {
    // SAFETY: written once, in `attach`.
    unsafe {
        let (bytes, len) = &*ROOTS.0.get();
        &bytes[..*len]
    }
}

pub(super) fn head() -> Option<&'static Head> {
    let at = AT.load(Ordering::Acquire);
    // SAFETY: mapped for good; nothing but atomics.
    (at != 0).then(|| unsafe { &*(at as *const Head) })
}

fn log_of(segment: u32) -> Option<Log<'static>> {
    let at = AT.load(Ordering::Acquire);
    // SAFETY: mapped for good, with so many segments.
    (at != 0 && (segment as usize) < SEGMENTS).then(|| unsafe {
        let place = at + segment_at(segment as usize);
        Log::new(&*(place as *const Segment), (place + RING_AT) as *mut u8)
    })
}

/// Our log; `None`: we keep nothing.
pub(super) fn log() -> Option<Log<'static>> {
    log_of(own())
}

pub(super) fn own() -> u32 {
    SEGMENT.load(Ordering::Relaxed)
}

/// A child takes part anew.
pub(super) fn detach() {
    AT.store(0, Ordering::Release);
    ALONE.store(0, Ordering::Relaxed);
}

/// Takes part, at the program's begin.
pub(super) fn attach() -> bool {
    if head().is_some() {
        return true;
    }
    if ALONE.load(Ordering::Relaxed) != 0 {
        return false;
    }
    // SAFETY: integers and arrays of them, for which zero is a value.
    let mut terms: Terms = unsafe { core::mem::zeroed() };
    let question = Question { mark: MARK, op: op::ATTACH, file: 0, segment: 0, detail: 0 };
    let given = ask(&question, None, &raw mut terms as usize, size_of::<Terms>());
    let Some(memory) = given.filter(|_| terms.mark == MARK && terms.error == 0) else {
        ALONE.store(1, Ordering::Relaxed);
        return false;
    };
    let (read_write, shared_noreserve) = (3, 0x1 | 0x4000);
    // SAFETY: a new mapping of a file whose length is sealed.
    let at = unsafe {
        let at = raw(nr::MMAP, [0, BYTES, read_write, shared_noreserve, memory as usize, 0]);
        raw(nr::CLOSE, [memory as usize, 0, 0, 0, 0, 0]);
        at
    };
    if failed(at) {
        ALONE.store(1, Ordering::Relaxed);
        return false;
    }
    let len = terms.roots.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    // SAFETY: nobody reads it before `AT` is set, or reads the same.
    unsafe { *ROOTS.0.get() = (terms.roots, len) };
    SEGMENT.store(terms.segment, Ordering::Relaxed);
    AT.store(at as usize, Ordering::Release);
    true
}

/// `struct sockaddr_un` (unix(7)).
#[repr(C)]
struct Address {
    family: u16,
    path: [u8; 108],
}

/// Asks the agent: returns the descriptor that came, or -1; `None`: no answer of that length.
fn ask(question: &Question, fd: Option<i32>, answer: usize, len: usize) -> Option<i32> {
    let before = block_signals();
    let place = &settings::get().place;
    let mut address = Address { family: AF_UNIX, path: [0; 108] };
    let name = place.iter().take_while(|byte| **byte != 0).chain(b"/").chain(DOOR.as_bytes());
    address.path.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
    let time = [PATIENCE, 0];
    // `struct cmsghdr`: length, level and type in one word; then the descriptor.
    let mut control = [20u64, 1 | 1 << 32, fd.unwrap_or(0) as u64];
    let vector = [&raw const *question as usize, size_of::<Question>()];
    let control_len = if fd.is_some() { 24 } else { 0 };
    let message = [0, 0, vector.as_ptr() as usize, 1, control.as_ptr() as usize, control_len, 0];
    // SAFETY: integers, an address, a time and messages whose parts are there for as long as the calls take.
    let result = unsafe {
        let socket = raw(nr::SOCKET, [AF_UNIX.into(), SEQPACKET_CLOEXEC, 0, 0, 0, 0]);
        if failed(socket) {
            restore_signals(before);
            return None;
        }
        let socket = socket as usize;
        for option in [20, 21] {
            raw(nr::SETSOCKOPT, [socket, 1, option, time.as_ptr() as usize, 16, 0]);
        }
        let connected = raw(nr::CONNECT, [socket, &raw const address as usize, size_of::<Address>(), 0, 0, 0]);
        let sent = raw(nr::SENDMSG, [socket, message.as_ptr() as usize, MSG_NOSIGNAL, 0, 0, 0]);
        let into = [answer, len];
        control = [0; 3];
        let mut received = [0, 0, into.as_ptr() as usize, 1, control.as_mut_ptr() as usize, size_of_val(&control), 0];
        let mut got = -1;
        if connected == 0 && !failed(sent) {
            got = raw(nr::RECVMSG, [socket, received.as_mut_ptr() as usize, MSG_CMSG_CLOEXEC, 0, 0, 0]);
        }
        raw(nr::CLOSE, [socket, 0, 0, 0, 0, 0]);
        (got == len as isize).then(|| if control[0] == 20 { control[2] as i32 } else { -1 })
    };
    restore_signals(before);
    result
}

/// Has the worker write this open file from now on; false: it does not.
pub(super) fn keep(id: usize, fd: i32) -> bool {
    ask_about(op::KEEP, id, Some(fd)) && until_known(id, 1)
}

/// Has it forget the file: when this returns, nobody but this process has it open.
pub(super) fn drop_file(id: usize) {
    if ask_about(op::DROP, id, None) {
        until_known(id, 0);
    }
}

fn ask_about(op: u32, id: usize, fd: Option<i32>) -> bool {
    let question = Question { mark: MARK, op, file: id as u32, segment: own(), detail: 0 };
    let mut error = EIO;
    ask(&question, fd, &raw mut error as usize, 4).is_some() && error == 0
}

/// Tells why this program cannot be handled, and ends it.
pub(super) fn refuse(detail: u32) -> ! {
    let question = Question { mark: MARK, op: op::REFUSE, file: 0, segment: 0, detail };
    let mut answer = 0u32;
    ask(&question, None, &raw mut answer as usize, 4);
    loop {
        // SAFETY: an integer.
        unsafe { raw(nr::EXIT_GROUP, [125, 0, 0, 0, 0, 0]) };
    }
}

fn until_known(id: usize, state: u32) -> bool {
    let (Some(head), Some(log)) = (head(), log()) else { return false };
    loop {
        let seen = head.done.load(Ordering::SeqCst);
        if log.segment.files[id].known.load(Ordering::SeqCst) == state {
            return true;
        }
        wait_for(head, seen);
    }
}

fn wait_for(head: &Head, seen: u32) {
    if head.broken.load(Ordering::SeqCst) != 0 {
        refuse(why::NO_WORKER);
    }
    wait(&head.done, seen);
}

/// Has the worker look.
pub(super) fn ring() {
    if let Some(head) = head() {
        head.bell.fetch_add(1, Ordering::SeqCst);
        wake(&head.bell);
    }
}

/// Waits until the file system has what is in the log now.
fn drain(head: &Head, log: Log<'_>) {
    let target = log.now().tail;
    if log.segment.upto.load(Ordering::SeqCst) >= target {
        return;
    }
    log.segment.wanted.fetch_max(target, Ordering::SeqCst);
    ring();
    loop {
        let seen = head.done.load(Ordering::SeqCst);
        if log.segment.upto.load(Ordering::SeqCst) >= target {
            return;
        }
        wait_for(head, seen);
    }
}

/// Waits until all that we wrote is where it belongs, and gives all offsets back.
pub(super) fn settle() {
    let (Some(head), Some(log)) = (head(), log()) else { return };
    DIRTY.store(0, Ordering::SeqCst);
    drain(head, log);
    loop {
        let now = log.now();
        if now.holder != NONE {
            table::file(now.holder as usize).offset.store(now.offset, Ordering::Relaxed);
        } else if log.segment.busy.load(Ordering::Relaxed) == 0 {
            break;
        }
        // Whom this interrupts begins again.
        if log.hold(&now, NONE, 0) {
            break;
        }
    }
    for (_, file) in table::all() {
        let offset = file.offset.load(Ordering::Relaxed);
        if offset != table::AWAY {
            table::give_back(file, offset);
            // Unless a signal handler went on with it.
            let _ = file.offset.compare_exchange(offset, table::AWAY, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// Has another program's writes to this file be where they belong. `writes`: we are about to write it, too, so nobody keeps it any more.
pub(super) fn settle_other(device: u64, number: u64, writes: bool) {
    let Some(head) = head().filter(|head| head.owned.load(Ordering::SeqCst) != 0) else { return };
    let Some(inode) = head.find(device, number) else { return };
    let owner = inode.owner.load(Ordering::SeqCst);
    if inode.state.load(Ordering::SeqCst) == inode::OWNED && owner != own() {
        if writes {
            inode.state.store(inode::DIRECT, Ordering::SeqCst);
        }
        if let Some(log) = log_of(owner) {
            drain(head, log);
        }
    }
}

/// The same of all programs on this node.
pub(super) fn settle_all() {
    let Some(head) = head().filter(|head| head.owned.load(Ordering::SeqCst) != 0) else { return };
    for inode in head.inodes.iter().filter(|inode| inode.state.load(Ordering::SeqCst) == inode::OWNED) {
        let owner = inode.owner.load(Ordering::SeqCst);
        if let Some(log) = log_of(owner) {
            drain(head, log);
        }
    }
}

/// Nobody keeps this file from now on: it is locked or mapped.
pub(super) fn make_direct(device: u64, number: u64) {
    let Some(head) = head() else { return };
    settle_other(device, number, true);
    // Where there is no room to say so, nobody can keep it either.
    if let Some(inode) = head.claim(device, number, inode::DIRECT, NOBODY) {
        inode.state.store(inode::DIRECT, Ordering::SeqCst);
    }
}

/// Makes a file ours to keep; its place in the table, or `None`.
pub(super) fn own_inode(device: u64, number: u64) -> Option<u32> {
    let head = head()?;
    settle_other(device, number, true);
    let inode = head.claim(device, number, inode::OWNED, own())?;
    if inode.owner.load(Ordering::SeqCst) == NOBODY {
        let _ = inode.owner.compare_exchange(NOBODY, own(), Ordering::SeqCst, Ordering::SeqCst);
    }
    head.owned.fetch_max(1, Ordering::SeqCst);
    let place = (&raw const *inode as usize - head.inodes.as_ptr() as usize) / size_of_val(inode);
    is_ours(place as u32).then_some(place as u32)
}

/// Whether it still is.
pub(super) fn is_ours(place: u32) -> bool {
    head().is_some_and(|head| {
        let inode = &head.inodes[place as usize % sys::extents::INODES];
        inode.state.load(Ordering::SeqCst) == inode::OWNED && inode.owner.load(Ordering::SeqCst) == own()
    })
}
