//! Writes that are kept, and what a program does with the offset and the content of files that are: all of it without waiting, where it can be.

use core::arch::x86_64::_rdtsc;
use core::sync::atomic::{AtomicU64, Ordering};

use sys::extents::{APPEND, Log, Now, OFFSETS, RUN, Refused, SLOW, SMALL, Target, inode};
use sys::resident::files;

use super::cost::{MOVING, PRICE, Took, Watch, lost, pace};
use super::inside::{self, Inside};
use super::kernel::{block_signals, failed, nr, raw, restore_signals};
use super::table::{self, File};
use super::{
    PARTS, UnderWay, ahead, elsewhere, look, missing, others, process, quick, settle, settle_file, take_error, touch,
    with_kernel, worker,
};
use crate::settings;

/// So often what is more than a run is copied anew.
const TRIES: u32 = 3;
/// A read looks at so many runs, or waits.
const LOOKS: usize = 2048;
const CURRENT: usize = 1;

/// How far the worker was, in which of our logs, when it was told that there is a run for it.
static TOLD: AtomicU64 = AtomicU64::new(u64::MAX);

impl File {
    /// Which file it is: file system and number.
    pub(super) fn name(&self) -> (u64, u64) {
        (self.device.load(Ordering::Relaxed), self.number.load(Ordering::Relaxed))
    }

    fn is(flag: &core::sync::atomic::AtomicU8) -> bool {
        flag.load(Ordering::Relaxed) != 0
    }
}

pub(super) fn write(number: usize, args: [usize; 6], parts: &[[usize; 2]], at: Option<usize>) -> isize {
    let total = parts.iter().fold(0usize, |total, part| total.saturating_add(part[1]));
    let wanted = elsewhere::is() || total > RUN as usize && may_pay(args[0]) || others_keep(args[0]);
    if total > 0
        && let Some(id) = if wanted { begin(args[0]) } else { table::known(args[0]) }
    {
        let file = table::file(id);
        if file.state.load(Ordering::Relaxed) == table::KEPT {
            let inside = Inside::enter();
            let kept = match parts {
                _ if !is_kept(args[0], id, file) => None,
                _ if total <= SMALL => keep(args[0], id, file, parts, total, at),
                _ if is_slow(file) || is_behind(file) => keep_large(args[0], id, file, parts, total, at),
                [part]
                    if total > RUN as usize && pace_of(file) == 0 && !is_reserved(file) && !File::is(&file.appends) =>
                {
                    try_out(args[0], id, file, *part, at)
                }
                _ => None,
            };
            if let Some(result) = kept {
                return result;
            }
            drop(inside);
        }
    }
    write_now(number, args, total)
}

/// Whether a large write may be worth keeping: the file's system is slow, or nobody knows.
fn may_pay(fd: usize) -> bool {
    look(fd).map(table::file).is_some_and(|file| {
        let pace = worker::pace(file.device.load(Ordering::Relaxed)).max(file.pace.load(Ordering::Relaxed));
        file.state.load(Ordering::Relaxed) == table::FRESH && (pace == 0 || pace > SLOW)
    })
}

/// Whether other programs of the job keep the file: a write at once would wait for all that they have pending.
#[inline]
fn others_keep(fd: usize) -> bool {
    worker::may_be_busy()
        && look(fd).map(table::file).is_some_and(|file| {
            let (device, number) = file.name();
            file.state.load(Ordering::Relaxed) == table::FRESH && worker::keeps(device, number)
        })
}

/// Makes the beginning of a large write at once, and sees what that costs; `None`: nothing was written.
fn try_out(fd: usize, id: usize, file: &File, [from, total]: [usize; 2], at: Option<usize>) -> Option<isize> {
    // Whatever it came by: one part is left of it.
    let number = if at.is_some() { nr::PWRITE64 } else { nr::WRITE };
    settle();
    settle_file(fd);
    if missing(fd).is_some() {
        return None;
    }
    let direct = |begin: usize, len: usize| {
        let watch = Watch::begin(len, 0);
        let result = touch(number, [fd, from + begin, len, at.map_or(0, |at| at + begin), 0, 0]);
        if !failed(result) {
            judge(fd, file, len, watch.end(len));
        }
        result
    };
    let first = direct(0, RUN as usize);
    if first != RUN as isize {
        return Some(first);
    }
    let (begin, left) = (RUN as usize, total - RUN as usize);
    let kept = if is_slow(file) {
        keep_large(fd, id, file, &[[from + begin, left]], left, at.map(|at| at + begin))
    } else {
        None
    };
    let rest = kept.unwrap_or_else(|| direct(begin, left));
    Some(first + rest.max(0))
}

/// The open file behind a descriptor, which is kept from now on if it can be.
fn begin(fd: usize) -> Option<usize> {
    let id = look(fd)?;
    if table::file(id).state.load(Ordering::Relaxed) == table::FRESH {
        settle();
        let _inside = Inside::enter();
        // A handler that came in between would write directly, as often as it came.
        let before = block_signals();
        promote(fd);
        restore_signals(before);
    }
    Some(id)
}

/// Of what was not looked at yet, and is now: a read or write of so many bytes took so long that it matters.
pub(super) extern "C" fn timed(number: usize, fd: usize, result: usize, ticks: u64, total: usize, at: u64) {
    if matches!(number, nr::READ | nr::PREAD64) {
        if let Some(id) = look(fd) {
            table::file(id).reading.seen(fd, (number == nr::PREAD64).then_some(at), result as u64, ticks);
        }
    } else if table::spent(fd, lost(total, ticks), PRICE) >= PRICE
        && let Some(file) = look(fd).map(table::file)
    {
        judge(fd, file, total, Took { ticks, is_certain: false });
    }
}

/// Whether this descriptor is still this open file, and that kept.
#[inline]
fn is_kept(fd: usize, id: usize, file: &File) -> bool {
    table::known(fd) == Some(id) && file.state.load(Ordering::Relaxed) == table::KEPT
}

/// Writes directly, and sees what that costs.
fn write_now(number: usize, args: [usize; 6], total: usize) -> isize {
    if !worker::may_be_busy()
        && let Some(under_way) = UnderWay::unlooked(args[0])
    {
        let watch = Watch::begin(total, table::spent(args[0], 0, PRICE));
        // SAFETY: the program's own call.
        let result = unsafe { raw(number, args) };
        let took = watch.end(total);
        drop(under_way);
        if !failed(result)
            && (table::spent(args[0], lost(total, took.ticks), PRICE) >= PRICE || always())
            && let Some(file) = look(args[0]).map(table::file)
        {
            judge(args[0], file, total, took);
        }
        return result;
    }
    let Some(file) = look(args[0]).map(table::file) else {
        settle();
        // SAFETY: the program's own call.
        return unsafe { raw(number, args) };
    };
    settle();
    settle_file(args[0]);
    if let Some(error) = take_error(args[0]) {
        return error;
    }
    if file.state.load(Ordering::Relaxed) == table::DIRECT {
        // SAFETY: the program's own call.
        return unsafe { raw(number, args) };
    }
    let watch = Watch::begin(total, file.cost.load(Ordering::Relaxed));
    let result = touch(number, args);
    if !failed(result) {
        judge(args[0], file, total, watch.end(total));
    }
    result
}

/// A write of so many bytes took so long: whether the file is to be kept.
fn judge(fd: usize, file: &File, total: usize, Took { ticks, is_certain }: Took) {
    let pace = pace(total, ticks);
    if total > SMALL && (is_certain || pace <= SLOW) {
        file.pace.store(pace, Ordering::Relaxed);
        if file.state.load(Ordering::Relaxed) == table::KEPT
            && let Some((log, _)) = worker::log(file.log.load(Ordering::Relaxed).into())
        {
            log.segment.pace.store(pace, Ordering::Relaxed);
        }
    }
    let moving = if is_reserved(file) { MOVING } else { 0 };
    let cost = file.cost.load(Ordering::Relaxed).saturating_add_signed(lost(total, ticks) - moving);
    file.cost.store(cost, Ordering::Relaxed);
    if file.state.load(Ordering::Relaxed) == table::FRESH && (cost >= PRICE || always()) {
        let _inside = Inside::enter();
        promote(fd);
    }
}

/// Has the worker write this file from now on. No signal handler comes in between and writes to it, too.
fn promote(fd: usize) {
    if let Some(id) = table::known(fd) {
        let blocked = block_signals();
        promote_alone(id);
        restore_signals(blocked);
    }
}

fn promote_alone(id: usize) {
    let file = table::file(id);
    if file.state.load(Ordering::Relaxed) != table::FRESH || super::is_off() || !stands(file) {
        return;
    }
    let (device, number) = file.name();
    // The agent would refuse it, and hear what its descriptor's closing says.
    let log = if worker::is_direct(device, number) { None } else { worker::log_for(device) };
    let place = log.and_then(|(nth, segment)| {
        file.log.store(nth as u8, Ordering::Relaxed);
        worker::keep(segment, id, file)
    });
    if let Some(place) = place {
        file.inode.store(place, Ordering::Relaxed);
        file.told.store(1, Ordering::Relaxed);
        if let Some((log, _)) = worker::log(file.log.load(Ordering::Relaxed).into())
            && log.segment.pace.load(Ordering::Relaxed) == 0
        {
            log.segment.pace.store(file.pace.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
    file.state.store(if place.is_some() { table::KEPT } else { table::DIRECT }, Ordering::Relaxed);
}

/// No call on the file is under way, and none begins that does not find out that it is about to be kept; false: some take long.
fn stands(file: &File) -> bool {
    /// A call on a file takes less, mostly.
    const LOOKS: u32 = 1000;
    file.state.store(table::BEGUN, Ordering::SeqCst);
    for _ in 0..LOOKS {
        if file.under_way.load(Ordering::SeqCst) == 0 && table::unlooked_under_way(file) == 0 {
            return true;
        }
        // What a signal handler has interrupted does not go on before that has ended.
        if !inside::is_several() {
            break;
        }
        // SAFETY: nothing is given.
        let _ = unsafe { raw(nr::SCHED_YIELD, [0; 6]) };
    }
    file.state.store(table::FRESH, Ordering::SeqCst);
    false
}

/// Nobody asks whether it pays.
fn always() -> bool {
    settings::get().files & files::ALWAYS != 0
}

fn is_slow(file: &File) -> bool {
    always() || pace_of(file) > SLOW
}

/// What is known of its file system.
fn pace_of(file: &File) -> u32 {
    worker::log(file.log.load(Ordering::Relaxed).into()).map_or(0, |(log, _)| log.segment.pace.load(Ordering::Relaxed))
}

/// Whether more than a piece waits to be written before the next write could be made at once.
fn is_behind(file: &File) -> bool {
    worker::log(file.log.load(Ordering::Relaxed).into()).is_some_and(|(log, _)| log.pending() > RUN)
}

/// A large write: piece by piece, so that the worker begins with the first; or whole, where it appends, and what one write appends is to stay
/// together.
fn keep_large(
    fd: usize,
    id: usize,
    file: &File,
    parts: &[[usize; 2]],
    total: usize,
    at: Option<usize>,
) -> Option<isize> {
    let piece = if File::is(&file.appends) { total } else { RUN as usize };
    if piece > RUN as usize && (elsewhere::is() || room(piece) > worker::limit()) || missing(fd).is_some() {
        return None;
    }
    let reserved = if at.is_none() && is_reserved(file) { Some(reserve(id, file, total)?) } else { None };
    let at = at.or(reserved.map(|at| at as usize));
    let mut done = 0;
    while done < total {
        let (some, count) = part(parts, done, piece);
        let len = piece.min(total - done);
        let other = match keep(fd, id, file, &some[..count], len, at.map(|at| at + done)) {
            Some(kept) if kept > 0 => {
                done += kept as usize;
                continue;
            }
            None if let Some(at) = reserved => {
                let (some, count) = part(parts, done, total);
                worker::settle();
                settle_file(fd);
                write_reserved(file, &some[..count], at + done as u64)
            }
            other => other,
        };
        return if done > 0 { Some(done as isize + other.unwrap_or(0).max(0)) } else { other };
    }
    Some(done as isize)
}

/// What a write may take of a log: with a header for each run, and what is left free before the ring's beginning.
fn room(total: usize) -> u64 {
    (total + total / 1024) as u64 + 2 * RUN
}

/// Bytes of a write from `begin` on, at most so many.
fn part(parts: &[[usize; 2]], mut begin: usize, mut most: usize) -> ([[usize; 2]; PARTS], usize) {
    let (mut some, mut count) = ([[0; 2]; PARTS], 0);
    for [from, bytes] in parts {
        let skipped = begin.min(*bytes);
        let taken = (bytes - skipped).min(most);
        (begin, most) = (begin - skipped, most - taken);
        if taken > 0 {
            some[count] = [from + skipped, taken];
            count += 1;
        }
    }
    (some, count)
}

/// Puts a write into the log; `None`: it must be made at once.
#[inline]
fn keep(fd: usize, id: usize, file: &File, parts: &[[usize; 2]], total: usize, at: Option<usize>) -> Option<isize> {
    let (head, (log, segment)) = (worker::head()?, worker::log(file.log.load(Ordering::Relaxed).into())?);
    let place = file.inode.load(Ordering::Relaxed);
    let inode = worker::inode(head, place);
    let limit = head.limit.load(Ordering::Relaxed);
    // Other hosts may append, too: so much reaches the file system as one.
    let run = if File::is(&file.appends) && others::are() { SMALL as u64 } else { RUN };
    let to = Target { head, segment, file: id as u32, inode, place, limit, run };
    let is_fit = || {
        log.segment.files[id].error.load(Ordering::Relaxed) == 0
            && inode.state.load(Ordering::SeqCst) == inode::KEPT
            && !others::are_unseen(head)
    };
    if !is_fit() {
        return None;
    }
    let appends = File::is(&file.appends);
    // That appends, too, and leaves the offset where it is, which the worker could not tell.
    if appends && at.is_some() {
        return None;
    }
    let reserved = if at.is_none() && is_reserved(file) { Some(reserve(id, file, total)?) } else { None };
    let at = at.map(|at| at as u64).or(reserved);
    others::before_write(head, file.log.load(Ordering::Relaxed), segment);
    let mut tries = 0;
    let pending = loop {
        others::set_dirty();
        if !log.begin() {
            worker::settle();
            return write_reserved(file, parts, reserved?);
        }
        let appended = append(&log, &to, id, file, parts, total as u64, at, appends);
        log.end();
        match appended {
            Some(Ok(pending)) => break pending,
            Some(Err(Refused::Full)) if worker::make_room(log, room(total)) => {}
            // Handlers may come sooner than much is copied.
            Some(Err(Refused::Again)) if is_fit() && (total <= RUN as usize || tries < TRIES) => tries += 1,
            _ => {
                worker::settle();
                return write_reserved(file, parts, reserved?);
            }
        }
    };
    for (count, by) in [(&log.segment.writes, 1), (&log.segment.bytes, total as u64)] {
        count.store(count.load(Ordering::Relaxed) + by, Ordering::Relaxed);
    }
    if inode.state.load(Ordering::SeqCst) != inode::KEPT || others::are_unseen(head) {
        worker::settle();
    } else if pending >= RUN {
        let upto = log.segment.upto.load(Ordering::Relaxed) ^ u64::from(segment).rotate_right(8);
        if TOLD.load(Ordering::Relaxed) != upto {
            TOLD.store(upto, Ordering::Relaxed);
            worker::ring();
        }
    }
    if at.is_none()
        && !appends
        && process::none_borrows()
        && !others::shares()
        && let Some(growing) = log.growing(&to)
    {
        quick::arm(fd, &growing);
    }
    Some(total as isize)
}

#[inline]
#[allow(clippy::too_many_arguments, reason = "all of one call")]
fn append(
    log: &Log<'_>,
    to: &Target<'_>,
    id: usize,
    file: &File,
    parts: &[[usize; 2]],
    total: u64,
    at: Option<u64>,
    appends: bool,
) -> Option<Result<u64, Refused>> {
    let now = log.now();
    let (offset, held) = match at {
        _ if appends => (APPEND, (now.holder, now.offset)),
        Some(at) => (at, (now.holder, now.offset)),
        None => {
            let offset = offset_of(id, file, &now)?;
            spill(id, &now);
            (offset, (id as u64, offset + total))
        }
    };
    if offset >= OFFSETS && !appends {
        return None;
    }
    // SAFETY: the program's own buffers; the lock is held where there are threads.
    Some(unsafe { log.append(&now, to, offset, parts, held) })
}

/// Whether others may move its offset.
fn is_reserved(file: &File) -> bool {
    !File::is(&file.appends) && File::is(&file.shared)
}

/// Moves the offset that other processes have, too, over what will be written there; where that is.
fn reserve(id: usize, file: &File, total: usize) -> Option<u64> {
    if file.offset.load(Ordering::Relaxed) != table::AWAY
        || worker::log(file.log.load(Ordering::Relaxed).into()).is_none_or(|(log, _)| log.now().holder == id as u64)
    {
        worker::settle();
    }
    let fd = file.fd.load(Ordering::Relaxed) as usize;
    // SAFETY: integers.
    let end = unsafe { raw(nr::LSEEK, [fd, total, CURRENT, 0, 0, 0]) };
    if failed(end) { None } else { (end as u64).checked_sub(total as u64) }
}

/// Writes directly where the offset has been moved over.
fn write_reserved(file: &File, parts: &[[usize; 2]], at: u64) -> Option<isize> {
    let fd = file.fd.load(Ordering::Relaxed) as usize;
    let total: usize = parts.iter().map(|part| part[1]).sum();
    // SAFETY: the program's own buffers.
    let done = unsafe { raw(nr::PWRITEV, [fd, parts.as_ptr() as usize, parts.len(), at as usize, 0, 0]) };
    let missing = total as isize - done.max(0);
    if missing > 0 {
        // SAFETY: integers.
        let _ = unsafe { raw(nr::LSEEK, [fd, -missing as usize, CURRENT, 0, 0, 0]) };
    }
    Some(done)
}

/// Where an open file is, whoever knows it.
#[inline]
fn offset_of(id: usize, file: &File, now: &Now) -> Option<u64> {
    if now.holder == id as u64 {
        return Some(now.offset);
    }
    match file.offset.load(Ordering::Relaxed) {
        table::AWAY => table::kernel_offset(file.fd.load(Ordering::Relaxed) as usize),
        offset => Some(offset),
    }
}

/// Another open file's offset leaves the log for the table.
#[inline]
fn spill(id: usize, now: &Now) {
    if now.holder != id as u64 && now.holder != sys::extents::NONE {
        table::file(now.holder as usize).offset.store(now.offset, Ordering::Relaxed);
    }
}

pub(super) fn seek(args: [usize; 6]) -> isize {
    const END: usize = 2;
    let inside = Inside::enter();
    if let Some(offset) = seek_kept(args) {
        return offset;
    }
    drop(inside);
    if let Some(id) = table::known(args[0]) {
        table::file(id).reading.moved();
    }
    if args[2] < END {
        return move_offset(args);
    }
    let result = touch(nr::LSEEK, args);
    missing(args[0]).unwrap_or(result)
}

/// The kernel moves an offset: no file is looked at.
fn move_offset(args: [usize; 6]) -> isize {
    let _inside = Inside::enter();
    // SAFETY: integers.
    let go = || unsafe { raw(nr::LSEEK, args) };
    match table::known(args[0]).map(table::file) {
        Some(file) if file.state.load(Ordering::Relaxed) == table::KEPT => with_kernel(file, go),
        _ => go(),
    }
}

/// The log of a file whose offset is kept here.
fn own_log(id: usize) -> Option<(Log<'static>, u32)> {
    let file = table::file(id);
    let ours = file.state.load(Ordering::Relaxed) == table::KEPT && !File::is(&file.shared) && !File::is(&file.appends);
    if ours { worker::log(file.log.load(Ordering::Relaxed).into()) } else { None }
}

/// Moves an offset that is kept here; `None`: the kernel has to.
fn seek_kept([fd, to, whence, ..]: [usize; 6]) -> Option<isize> {
    let id = table::known(fd)?;
    let (file, (log, _)) = (table::file(id), own_log(id)?);
    loop {
        others::set_dirty();
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
fn moved(log: &Log<'_>, id: usize, file: &File, to: usize, whence: usize) -> Option<(isize, bool)> {
    const SET: usize = 0;
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

pub(super) fn read(number: usize, args: [usize; 6]) -> isize {
    // SAFETY: reads a register.
    let clock = || unsafe { _rdtsc() };
    let single = matches!(number, nr::READ | nr::PREAD64);
    let seen = |id: usize, result: isize, begun: u64| {
        if single && result > 0 {
            let at = (number == nr::PREAD64).then_some(args[3] as u64);
            table::file(id).reading.seen(args[0], at, result as u64, clock().saturating_sub(begun));
        }
        result
    };
    if !worker::may_be_busy()
        && let Some(under_way) = UnderWay::unlooked(args[0])
    {
        let begun = clock();
        // SAFETY: the program's own call.
        let result = unsafe { raw(number, args) };
        drop(under_way);
        return match ahead::is_slow(result.max(0) as u64, clock().saturating_sub(begun)) {
            true if let Some(id) = look(args[0]) => seen(id, result, begun),
            _ => result,
        };
    }
    let Some(id) = look(args[0]) else {
        settle_file(args[0]);
        // SAFETY: the program's own call.
        return unsafe { raw(number, args) };
    };
    if let Some(error) = missing(args[0]) {
        return error;
    }
    if single && own_log(id).is_some() {
        let inside = Inside::enter();
        if table::known(args[0]) == Some(id)
            && let Some(result) = read_kept(id, number, args)
        {
            return missing(args[0]).unwrap_or(result);
        }
        drop(inside);
    }
    let begun = clock();
    let result = touch(number, args);
    // It may have been waited for what could not be written.
    missing(args[0]).unwrap_or_else(|| seen(id, result, begun))
}

/// Reads what the file system has, and what is pending over it; `None`: it is to be read when nothing is.
fn read_kept(id: usize, number: usize, [fd, into, len, at, ..]: [usize; 6]) -> Option<isize> {
    let (file, (log, segment)) = (table::file(id), own_log(id)?);
    let place = file.inode.load(Ordering::Relaxed);
    if !worker::inode(worker::head()?, place).is_alone(segment) {
        return None;
    }
    loop {
        others::set_dirty();
        if !log.begin() {
            worker::settle();
            return None;
        }
        let now = log.now();
        let offset = if number == nr::READ { offset_of(id, file, &now) } else { Some(at as u64) };
        let result = offset.filter(|at| *at < OFFSETS).and_then(|offset| {
            let done = overlaid(&log, place, fd, (into, len as u64), offset)?;
            let held = failed(done) || number != nr::READ || {
                spill(id, &now);
                log.hold(&now, id as u64, offset + done as u64)
            };
            Some((done, held))
        });
        log.end();
        if let (done, true) = result? {
            return Some(done);
        }
    }
}

fn overlaid(log: &Log<'_>, place: u32, fd: usize, (into, len): (usize, u64), offset: u64) -> Option<isize> {
    // What comes before this is with the file system already; what comes after it stays in the ring as long as nobody appends.
    let (mut run, mut position) = (log.segment.run.load(Ordering::SeqCst), log.segment.upto.load(Ordering::SeqCst));
    // SAFETY: the program's own buffer.
    let done = unsafe { raw(nr::PREAD64, [fd, into, len as usize, offset as usize, 0, 0]) };
    if failed(done) {
        return Some(done);
    }
    let mut end = done as u64;
    for _ in 0..LOOKS {
        let Some(piece) = log.after(&mut run, position).ok()? else { return Some(end as isize) };
        position = piece.position + piece.len;
        if piece.inode != place {
            continue;
        }
        if piece.offset == APPEND {
            return None;
        }
        let within = |at: u64| at.saturating_sub(offset).min(len);
        let (from, to) = (within(piece.offset), within(piece.offset + piece.len));
        // A hole, or the file system gave less than there is.
        if from > end {
            return None;
        }
        if to > from {
            let bytes = log.address(piece.at + (from + offset - piece.offset));
            // SAFETY: within the program's buffer; the piece lies in the ring.
            unsafe { ((into + from as usize) as *mut u8).copy_from_nonoverlapping(bytes, (to - from) as usize) };
        }
        end = end.max(to);
    }
    None
}
