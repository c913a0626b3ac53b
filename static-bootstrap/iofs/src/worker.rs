//! The node's I/O worker as a program sees it: the memory that they share, and the agent, which hands open files over.

use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use sys::extents::{
    CONTROL, Head, Inode, KNOWN, Log, NOBODY, NONE, NOT_TAKEN, SEGMENTS, Segment, inode, ring_at, segment_at,
};
use sys::files::{Answer, MARK, Question, Terms, op, why};
use sys::resident::{MEMORY, PLACE_MAX};
use sys::socket::{AF_UNIX, Address, MSG_CMSG_CLOEXEC, MSG_NOSIGNAL, SEQPACKET_CLOEXEC, SOL_SOCKET, TIMEOUTS};

use super::kernel::{block_signals, failed, nr, raw, restore_signals, wait, wake};
use super::{others, table};
use crate::{door, settings};

/// Seconds.
const PATIENCE: usize = 30;

/// Where the memory is: 0 while we take no part.
#[unsafe(link_section = ".data.hot")]
pub(super) static AT: AtomicUsize = AtomicUsize::new(0);

/// Bytes of a log's ring.
#[unsafe(link_section = ".data.hot")]
static RING: AtomicUsize = AtomicUsize::new(0);

/// A log of ours: for which file system, its segment, and where its ring is.
struct Own {
    device: AtomicU64,
    segment: AtomicU32,
    ring: AtomicUsize,
}
/// File systems that a program writes to asynchronously.
const LOGS: usize = 4;
#[unsafe(link_section = ".data.hot")]
static OWN: [Own; LOGS] =
    [const { Own { device: AtomicU64::new(0), segment: AtomicU32::new(NOBODY), ring: AtomicUsize::new(0) } }; LOGS];
/// Nobody is there, or he does not take us.
#[unsafe(link_section = ".data.hot")]
static ALONE: AtomicU32 = AtomicU32::new(0);

#[inline]
pub(super) fn head() -> Option<&'static Head> {
    let at = AT.load(Ordering::Acquire);
    // SAFETY: mapped for good; nothing but atomics.
    (at != 0).then(|| unsafe { &*(at as *const Head) })
}

/// The head, if anybody keeps anything.
pub(super) fn busy_head() -> Option<&'static Head> {
    head().filter(|head| head.owned.load(Ordering::SeqCst) != 0)
}

/// Whether somebody may keep something: nobody does, as far as is known.
pub(super) fn may_be_busy() -> bool {
    head().is_none_or(|head| head.owned.load(Ordering::SeqCst) != 0) && ALONE.load(Ordering::Relaxed) == 0
}

/// Whether something is missing in a file of the job, or was.
pub(super) fn is_lost() -> bool {
    head().is_some_and(|head| head.lost.load(Ordering::SeqCst) != 0)
}

/// The log of any program, without its ring.
fn log_of(segment: u32) -> Option<Log<'static>> {
    let at = AT.load(Ordering::Acquire);
    // SAFETY: mapped for good, with so many segments.
    (at != 0 && (segment as usize) < SEGMENTS).then(|| unsafe {
        Log::new(&*((at + segment_at(segment as usize)) as *const Segment), core::ptr::null_mut(), 0)
    })
}

/// A log of ours, and its segment.
#[inline]
pub(super) fn log(nth: usize) -> Option<(Log<'static>, u32)> {
    let own = &OWN[nth % LOGS];
    let (at, ring) = (AT.load(Ordering::Relaxed), own.ring.load(Ordering::Acquire));
    let segment = own.segment.load(Ordering::Relaxed);
    // SAFETY: as above, with the ring.
    (ring != 0).then(|| unsafe {
        let len = RING.load(Ordering::Relaxed) as u64;
        (Log::new(&*((at + segment_at(segment as usize)) as *const Segment), ring as *mut u8, len), segment)
    })
}

/// All of them.
fn logs() -> impl Iterator<Item = (Log<'static>, u32)> {
    (0..LOGS).filter_map(log)
}

/// A child sees what others do, and has no log of its own yet.
pub(super) fn detach() {
    for own in &OWN {
        own.segment.store(NOBODY, Ordering::Relaxed);
        let ring = own.ring.swap(0, Ordering::Relaxed);
        if ring != 0 {
            // SAFETY: its parent's, and nobody here refers to it any more.
            let _ = unsafe { raw(nr::MUNMAP, [ring, RING.load(Ordering::Relaxed), 0, 0, 0, 0]) };
        }
    }
    ALONE.store(0, Ordering::Relaxed);
}

/// Takes part.
pub(super) fn attach() -> bool {
    if head().is_some() {
        return true;
    }
    // A signal handler that came in between would be another one.
    let blocked = block_signals();
    let joined = head().is_some() || ALONE.load(Ordering::Relaxed) == 0 && (find() || join(op::ATTACH, 0, 0, None));
    ALONE.store(u32::from(!joined), Ordering::Relaxed);
    restore_signals(blocked);
    joined
}

/// Which of our logs is this file system's, and its segment: another one, if need be.
pub(super) fn log_for(device: u64) -> Option<(usize, u32)> {
    for (nth, own) in OWN.iter().enumerate() {
        let segment = own.segment.load(Ordering::Relaxed);
        if segment == NOBODY {
            return (join(op::LOG, u32::from(nth == 0), device, Some(own)) && own.ring.load(Ordering::Relaxed) != 0)
                .then(|| (nth, own.segment.load(Ordering::Relaxed)));
        }
        if own.device.load(Ordering::Relaxed) == device {
            return Some((nth, segment));
        }
    }
    None
}

/// Nanoseconds that a file system takes for a KiB, as far as a log of ours knows; 0: unknown.
pub(super) fn pace(device: u64) -> u32 {
    logs()
        .find(|(log, _)| log.segment.device.load(Ordering::Relaxed) == device)
        .map_or(0, |(log, _)| log.segment.pace.load(Ordering::Relaxed))
}

fn map(memory: isize, len: usize, from: usize) -> isize {
    let (read_write, shared_noreserve) = (3, 0x1 | 0x4000);
    // SAFETY: a new mapping of a file whose length is sealed.
    unsafe { raw(nr::MMAP, [0, len, read_write, shared_noreserve, memory as usize, from]) }
}

/// Finds the memory without asking.
fn find() -> bool {
    const AT_FDCWD: usize = -100_isize as usize;
    const READ_WRITE_CLOEXEC: usize = 0o2_000_002;
    let settings = settings::get();
    let mut path = [0; PLACE_MAX + MEMORY.len() + 2];
    let (place, len) = (settings.place(), settings.place().len());
    path[..len].copy_from_slice(place);
    path[len] = b'/';
    path[len + 1..][..MEMORY.len()].copy_from_slice(MEMORY.as_bytes());
    let mut stat = [0u64; 18];
    // SAFETY: a string, room for a `struct stat`, and a descriptor of ours.
    unsafe {
        let memory = raw(nr::OPENAT, [AT_FDCWD, path.as_ptr() as usize, READ_WRITE_CLOEXEC, 0, 0, 0]);
        if failed(memory) {
            return false;
        }
        // What the agent has now under that number may be another job's.
        let is_it = raw(nr::FSTAT, [memory as usize, stat.as_mut_ptr() as usize, 0, 0, 0, 0]) == 0
            && stat[1] == settings.memory;
        let at = if is_it { map(memory, CONTROL, 0) } else { -1 };
        raw(nr::CLOSE, [memory as usize, 0, 0, 0, 0, 0]);
        if !failed(at) {
            AT.store(at as usize, Ordering::Release);
        }
        !failed(at)
    }
}

/// Asks for the memory, or for a log in it.
fn join(op: u32, detail: u32, device: u64, own: Option<&Own>) -> bool {
    // SAFETY: integers and arrays of them, for which zero is a value.
    let mut terms: Terms = unsafe { core::mem::zeroed() };
    let question = Question { mark: MARK, op, file: 0, segment: 0, detail, device, number: 0 };
    let given = ask(&question, None, &raw mut terms as usize, size_of::<Terms>());
    let Some(memory) = given.filter(|fd| *fd >= 0 && terms.mark == MARK && terms.error == 0) else { return false };
    let at = if head().is_some() { 1 } else { map(memory as isize, CONTROL, 0) };
    let own = own.filter(|_| (terms.segment as usize) < SEGMENTS);
    let len = terms.ring as usize;
    let ring = own.map(|own| (own, map(memory as isize, len, ring_at(terms.segment as usize, terms.ring))));
    // SAFETY: ours.
    unsafe { raw(nr::CLOSE, [memory as usize, 0, 0, 0, 0, 0]) };
    if failed(at) {
        return false;
    }
    if at > 1 {
        AT.store(at as usize, Ordering::Release);
    }
    if let Some((own, ring)) = ring.filter(|(_, ring)| !failed(*ring)) {
        const DONTDUMP: usize = 16;
        // SAFETY: ours; a dump would have memory made for all of it.
        let _ = unsafe { raw(nr::MADVISE, [ring as usize, len, DONTDUMP, 0, 0, 0]) };
        RING.store(len, Ordering::Relaxed);
        own.device.store(device, Ordering::Relaxed);
        own.segment.store(terms.segment, Ordering::Relaxed);
        own.ring.store(ring as usize, Ordering::Release);
    }
    true
}

/// Asks the agent: returns the descriptor that came, or -1; `None`: no answer of that length.
fn ask(question: &Question, fd: Option<i32>, answer: usize, len: usize) -> Option<i32> {
    let address = door::address()?;
    let before = block_signals();
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
        for option in TIMEOUTS {
            raw(nr::SETSOCKOPT, [socket, SOL_SOCKET, option, time.as_ptr() as usize, 16, 0]);
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

/// Has the worker write this open file of ours from now on; the place of its file in the table, or none: it does not.
pub(super) fn keep(segment: u32, id: usize, file: &table::File) -> Option<u32> {
    let answer = ask_about(op::KEEP, segment, id, file)?;
    if !until_known(segment, id, KNOWN) {
        drop_file(id, file);
        return None;
    }
    Some(answer.inode)
}

/// Has it forget the file: when this returns, nobody but this process has it open, and what closing it said is among the errors.
pub(super) fn drop_file(id: usize, file: &table::File) {
    if let Some((_, segment)) = log(file.log.load(Ordering::Relaxed).into())
        && ask_about(op::DROP, segment, id, file).is_some()
    {
        until_known(segment, id, 0);
    }
}

/// Nobody keeps this file from now on: it is locked or mapped.
pub(super) fn mark_direct(file: &table::File) {
    if head().is_none() {
        return;
    }
    // That holds as long as who says so has a log. A signal handler that came in between would ask for another one.
    let blocked = block_signals();
    if OWN[0].segment.load(Ordering::Relaxed) == NOBODY {
        log_for(file.device.load(Ordering::Relaxed));
    }
    restore_signals(blocked);
    if ask_about(op::DIRECT, OWN[0].segment.load(Ordering::Relaxed), 0, file).is_some() {
        file.marked.store(1, Ordering::Relaxed);
    }
}

fn ask_about(op: u32, segment: u32, id: usize, file: &table::File) -> Option<Answer> {
    let [device, number] = [&file.device, &file.number].map(|word| word.load(Ordering::Relaxed));
    let question = Question { mark: MARK, op, file: id as u32, segment, detail: 0, device, number };
    let mut answer = Answer::default();
    let fd = (op == op::KEEP).then(|| file.fd.load(Ordering::Relaxed));
    ask(&question, fd, &raw mut answer as usize, size_of::<Answer>())?;
    (answer.error == 0).then_some(answer)
}

/// Has the user told.
pub(super) fn say(detail: u32) {
    tell(op::SAY, detail);
}

fn tell(op: u32, detail: u32) {
    let question = Question { mark: MARK, op, file: 0, segment: 0, detail, device: 0, number: 0 };
    let mut answer = Answer::default();
    ask(&question, None, &raw mut answer as usize, size_of::<Answer>());
}

/// Tells why this program cannot be handled, and ends it.
pub(super) fn refuse(detail: u32) -> ! {
    tell(op::REFUSE, detail);
    loop {
        // SAFETY: an integer.
        unsafe { raw(nr::EXIT_GROUP, [125, 0, 0, 0, 0, 0]) };
    }
}

fn until_known(segment: u32, id: usize, state: u32) -> bool {
    let (Some(head), Some(log)) = (head(), log_of(segment)) else { return false };
    loop {
        let seen = head.done.load(Ordering::SeqCst);
        match log.segment.files[id].known.load(Ordering::SeqCst) {
            known if known == state => return true,
            NOT_TAKEN if state == KNOWN => return false,
            _ => {}
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

/// Waits for what the worker does.
pub(super) fn wait_while(head: &Head, lasts: impl Fn() -> bool) {
    loop {
        let seen = head.done.load(Ordering::SeqCst);
        if !lasts() {
            return;
        }
        wait_for(head, seen);
    }
}

/// Has the worker look.
pub(super) fn ring() {
    if let Some(head) = head() {
        head.bell.fetch_add(1, Ordering::SeqCst);
        wake(&head.bell);
    }
}

/// Waits until the file system has what is in the log now; whether there was anything.
fn drain(head: &Head, log: Log<'_>) -> bool {
    // The program may end, and another have its log.
    let epoch = log.segment.epoch.load(Ordering::SeqCst);
    let target = log.now().tail;
    wait_until(head, log, epoch, target)
}

/// The same up to a position.
fn wait_until(head: &Head, log: Log<'_>, epoch: u64, target: u64) -> bool {
    if log.segment.upto.load(Ordering::SeqCst) >= target {
        return false;
    }
    log.segment.wanted.fetch_max(target, Ordering::SeqCst);
    ring();
    loop {
        let seen = head.done.load(Ordering::SeqCst);
        let is_over = log.segment.epoch.load(Ordering::SeqCst) != epoch;
        if is_over || log.segment.upto.load(Ordering::SeqCst) >= target {
            return true;
        }
        wait_for(head, seen);
    }
}

/// What a log may hold: its share of the memory that is free.
pub(super) fn limit() -> u64 {
    head().map_or(0, |head| head.limit.load(Ordering::Relaxed))
}

/// Waits until so many bytes may be put into a log; false: never.
pub(super) fn make_room(log: Log<'_>, bytes: u64) -> bool {
    let Some(head) = head() else { return false };
    let epoch = log.segment.epoch.load(Ordering::SeqCst);
    let enough = log.room_for(bytes, head.limit.load(Ordering::Relaxed));
    enough.inspect(|enough| _ = wait_until(head, log, epoch, *enough)).is_some()
}

/// Waits until all that we wrote is where it belongs, and gives all offsets back.
pub(super) fn settle() {
    let Some(head) = head() else { return };
    let settling = others::begin_settling();
    for (log, segment) in logs() {
        drain(head, log);
        // A signal handler that came in between has marked it again, or is to be.
        head.set_sharing(segment, false);
        if log.pending() > 0 {
            head.set_sharing(segment, others::shares());
        }
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
    }
    for (_, file) in table::all() {
        let offset = file.offset.load(Ordering::Relaxed);
        if offset != table::AWAY {
            table::give_back(file, offset);
            // Unless a signal handler went on with it.
            let _ = file.offset.compare_exchange(offset, table::AWAY, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
    others::end_settling(settling);
}

/// Whether somebody keeps this file.
pub(super) fn keeps(device: u64, number: u64) -> bool {
    busy_head().is_some_and(|head| is_in(head, device, number, inode::KEPT))
}

/// Whether nobody may keep this file: it is locked or mapped.
pub(super) fn is_direct(device: u64, number: u64) -> bool {
    head().is_some_and(|head| is_in(head, device, number, inode::DIRECT))
}

fn is_in(head: &Head, device: u64, number: u64, state: u32) -> bool {
    head.find(device, number).is_some_and(|inode| inode.state.load(Ordering::SeqCst) == state)
}

/// Has all that programs of the job wrote to this file be where it belongs; whether there was anything.
pub(super) fn settle_inode(device: u64, number: u64) -> bool {
    let Some(head) = busy_head() else { return false };
    let Some(inode) = head.find(device, number) else { return false };
    let mut any = false;
    for log in inode.writers().filter_map(log_of) {
        any |= drain(head, log);
    }
    any
}

/// Grows with all that the worker does.
pub(super) fn done() -> u32 {
    head().map_or(0, |head| head.done.load(Ordering::SeqCst))
}

/// The same of all programs on this node.
pub(super) fn settle_all() {
    if let Some(head) = busy_head() {
        head.inodes.iter().filter(|inode| inode.state.load(Ordering::SeqCst) >= inode::KEPT).for_each(|inode| {
            inode.writers().filter_map(log_of).for_each(|log| _ = drain(head, log));
        });
    }
}

/// The same of what we have for other file systems than this log's.
pub(super) fn settle_but(nth: usize) {
    if let Some(head) = head() {
        (0..LOGS).filter(|other| *other != nth).filter_map(log).for_each(|(log, _)| _ = drain(head, log));
    }
}

/// The same of all programs that share memory.
pub(super) fn settle_sharing() {
    if let Some(head) = busy_head() {
        head.sharing().filter_map(log_of).for_each(|log| _ = drain(head, log));
    }
}

/// Has nobody who shares memory keep anything from now on.
pub(super) fn set_unseen() {
    if let Some(head) = head() {
        head.unseen.store(1, Ordering::SeqCst);
        settle_sharing();
    }
}

/// The errno because of which something is missing in this file.
pub(super) fn failure(device: u64, number: u64) -> Option<u32> {
    let inode = head()?.find(device, number)?;
    Some(inode.failed.load(Ordering::SeqCst)).filter(|errno| *errno != 0)
}

/// The file was emptied or is a new one: nothing is missing in it.
pub(super) fn forgive(device: u64, number: u64) {
    if let Some(inode) = head().and_then(|head| head.find(device, number)) {
        inode.failed.store(0, Ordering::SeqCst);
    }
}

/// The table's entry at this place.
#[inline]
pub(super) fn inode(head: &'static Head, place: u32) -> &'static Inode {
    &head.inodes[place as usize % sys::extents::INODES]
}
