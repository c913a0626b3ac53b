//! The memory servers of this program: which has what, the connections to them, and what is done when one is lost. With a copy of everything on
//! another, the program goes on, and what has lost its copy gets one where there is room; without, it ends.
//!
//! What a server of this host keeps is in a file that both have open: it is told of pages that it did not have, and nobody is asked for any.
//!
//! A server that is lost may come back, empty, with other connections. Who chose it before that must not take what it has then for what it had: all who
//! read note [`EPOCH`] before they choose.

mod healer;
mod mapped;
mod pieces;
mod returns;

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use sys::page::{Bits, Layout, NONE, PAGE, SPAN, count, without};
use sys::places::{NOBODY, PLACES, Place};
use sys::resident::{DESCRIPTORS, Failure, LINKS, SERVERS, cause};
use sys::syscall::{nr, syscall};

use super::link::{Gone, Link};
use super::lock::Lock;
use super::{call, counts, door, fatal, window};
pub(super) use healer::Healer;
pub(super) use mapped::fit;
pub(super) use pieces::help;
pub(super) use returns::Returns;

/// What a connection is for.
pub(super) const DEMAND: usize = 0;
pub(super) const AHEAD: usize = 1;
pub(super) const BACK: usize = 2;

/// Parts that are asked for together: bits of a word.
pub(super) const EACH: usize = 64;

static MAP: [AtomicU32; PLACES] = [const { AtomicU32::new(u32::MAX) }; PLACES];
/// A bit for each server that is lost, and for each that had no room for a copy.
static LOST: AtomicU32 = AtomicU32::new(0);
static FULL: AtomicU32 = AtomicU32::new(0);
/// Whoever changes who has what.
static CHANGE: Lock<()> = Lock::new(());
/// Pages that each keeps.
static KEPT: [AtomicU64; SERVERS] = [const { AtomicU64::new(0) }; SERVERS];
static CONNECTIONS: [[Lock<Link>; LINKS]; SERVERS] = [const { [const { Lock::new(Link::NONE) }; LINKS] }; SERVERS];
static FDS: [[AtomicI32; LINKS]; SERVERS] = [const { [const { AtomicI32::new(-1) }; LINKS] }; SERVERS];
/// What is shared with each, or -1.
static FILES: [AtomicI32; SERVERS] = [const { AtomicI32::new(-1) }; SERVERS];
static WEIGHTS: [AtomicU64; SERVERS] = [const { AtomicU64::new(0) }; SERVERS];
/// The program's name at each.
static CLIENTS: [[AtomicU64; 2]; SERVERS] = [const { [const { AtomicU64::new(0) }; 2] }; SERVERS];
/// How often a server came back; and the number of each one's last time. Counted before it can be reached anew.
static EPOCH: AtomicU32 = AtomicU32::new(0);
static SINCE: [AtomicU32; SERVERS] = [const { AtomicU32::new(0) }; SERVERS];
static COUNT: AtomicU32 = AtomicU32::new(0);
static MIRROR: AtomicBool = AtomicBool::new(false);
/// Something may be without its copy.
static BARE: AtomicBool = AtomicBool::new(false);

/// Of one program: its connections, and the servers that it could not reach.
pub(super) struct Fresh {
    links: [[Link; LINKS]; SERVERS],
    files: [i32; SERVERS],
    absent: u32,
    client: [u64; 2],
    door: i32,
}

impl Fresh {
    pub(super) fn new(granted: &door::Granted) -> Fresh {
        let servers = granted.grant.servers as usize;
        let fd = |server: usize, nth: usize| granted.fds[(server * DESCRIPTORS + nth).min(servers * DESCRIPTORS - 1)];
        let link =
            |server: usize, link: usize| Link::new(fd(server, link), server as u32, &granted.grant.links[server][link]);
        let links = core::array::from_fn(|server| core::array::from_fn(|lane| link(server, lane)));
        let file = |server: usize| if granted.grant.shared >> server & 1 == 1 { fd(server, LINKS) } else { -1 };
        let files = core::array::from_fn(file);
        Fresh { links, files, absent: granted.grant.absent as u32, client: granted.grant.client, door: granted.door }
    }

    /// Has the servers give these connections what the program's own have now.
    pub(super) fn copy(&mut self) -> Result<(), u32> {
        for (server, client) in CLIENTS.iter().enumerate().take(servers()) {
            let useless = LOST.load(Ordering::Acquire) | self.absent;
            if useless >> server & 1 == 1 {
                continue;
            }
            let client = client.each_ref().map(|word| word.load(Ordering::Relaxed));
            match self.links[server][DEMAND].copy(client) {
                Ok(()) => {}
                Err(gone) if gone.cause == cause::FULL => return Err(call::ENOMEM),
                Err(_) => self.absent |= 1 << server,
            }
        }
        Ok(())
    }

    /// Uses these connections from now on. What a server has that could not be reached is lost.
    pub(super) fn install(self) {
        pieces::reset();
        for (server, links) in self.links.iter().enumerate() {
            for (lane, link) in links.iter().enumerate() {
                FDS[server][lane].store(link.fd(), Ordering::Relaxed);
                *CONNECTIONS[server][lane].lock() = *link;
            }
            FILES[server].store(self.files[server], Ordering::Relaxed);
            mapped::open(server, self.files[server]);
            CLIENTS[server].iter().zip(self.client).for_each(|(to, from)| to.store(from, Ordering::Relaxed));
        }
        fatal::DOOR.store(self.door, Ordering::Relaxed);
        for server in (0..servers()).filter(|server| self.absent >> server & 1 == 1) {
            lose(server, epoch(), &Gone { cause: cause::LOST, detail: [0; 2] });
        }
    }

    /// Does without those to a server.
    fn close(&self, server: usize) {
        self.links[server].iter().for_each(|link| call::close(link.fd()));
        call::close(self.files[server]);
    }

    /// Uses those to one server that was lost, which has nothing of the program's now. For the thread that makes room, while no gift is open.
    fn take_back(&self, server: usize, weight: u64) {
        let _alone = CHANGE.lock();
        let bit = 1 << server;
        let now = EPOCH.fetch_add(1, Ordering::AcqRel) + 1;
        SINCE[server].store(now, Ordering::Release);
        for (lane, link) in self.links[server].iter().enumerate() {
            let mut place = CONNECTIONS[server][lane].lock();
            FDS[server][lane].store(link.fd(), Ordering::Relaxed);
            // Whoever used it holds the lock.
            call::close(core::mem::replace(&mut *place, *link).fd());
        }
        // Whoever reads it meanwhile, or another in its place, looks at the epoch then.
        call::close(FILES[server].swap(self.files[server], Ordering::AcqRel));
        mapped::open(server, self.files[server]);
        CLIENTS[server].iter().zip(self.client).for_each(|(to, from)| to.store(from, Ordering::Relaxed));
        WEIGHTS[server].store(weight, Ordering::Relaxed);
        FULL.fetch_and(!bit, Ordering::Relaxed);
        LOST.fetch_and(!bit, Ordering::AcqRel);
        BARE.store(true, Ordering::Relaxed);
    }
}

/// Notes who is to have what: once, before all else.
pub(super) fn deal(granted: &door::Granted) {
    let grant = &granted.grant;
    COUNT.store(grant.servers as u32, Ordering::Relaxed);
    MIRROR.store(grant.mirror != 0, Ordering::Relaxed);
    BARE.store(grant.mirror != 0, Ordering::Relaxed);
    WEIGHTS.iter().zip(grant.weights).for_each(|(to, from)| to.store(from, Ordering::Relaxed));
    MAP.iter().zip(grant.places).for_each(|(to, from)| to.store(pack(from), Ordering::Relaxed));
}

pub(super) fn servers() -> usize {
    COUNT.load(Ordering::Relaxed) as usize
}

/// All descriptors.
pub(super) fn fds() -> impl Iterator<Item = i32> {
    let links = FDS[..servers()].iter().flatten();
    links.chain(&FILES).map(|fd| fd.load(Ordering::Relaxed)).filter(|fd| *fd >= 0)
}

/// Pages that each server keeps.
pub(super) fn kept() -> &'static [AtomicU64] {
    &KEPT[..servers()]
}

fn pack(place: Place) -> u32 {
    u32::from_ne_bytes([place.first, place.second, place.whole, 0])
}

fn unpack(word: u32) -> Place {
    let [first, second, whole, reserved] = word.to_ne_bytes();
    Place { first, second, whole, reserved }
}

fn place(number: usize) -> Place {
    unpack(MAP[number % PLACES].load(Ordering::Acquire))
}

fn is_lost(server: u8) -> bool {
    server == NOBODY || LOST.load(Ordering::Acquire) >> server & 1 == 1
}

/// The number of a span as servers know it.
fn name(number: usize) -> u64 {
    (window::BASE / SPAN + number) as u64
}

/// Of a span so many pages more are kept.
pub(super) fn count_kept(number: usize, more: usize, less: usize) {
    let Place { first, second, .. } = place(number);
    for server in [first, second].into_iter().filter(|server| !is_lost(*server)) {
        let after = |kept: u64| Some((kept + more as u64).saturating_sub(less as u64));
        let _ = KEPT[usize::from(server)].fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
    }
}

fn epoch() -> u32 {
    EPOCH.load(Ordering::Acquire)
}

/// Asks a server that was chosen in this epoch. `None`: it is lost, or was and has come back.
fn ask<T>(server: usize, lane: usize, epoch: u32, question: impl FnOnce(&mut Link) -> Result<T, Gone>) -> Option<T> {
    let mut link = CONNECTIONS[server][lane].lock();
    if SINCE[server].load(Ordering::Acquire) > epoch {
        return None;
    }
    // Held until the answer is here: others get in this way, too.
    let answer = question(&mut link);
    drop(link);
    answer.map_err(|gone| lose(server, epoch, &gone)).ok()
}

/// A question that waits for its answer.
#[derive(Clone, Copy, Default)]
pub(super) struct Ticket {
    server: u8,
    epoch: u32,
    /// Of the question, if one was asked.
    sequence: Option<u32>,
}

/// Asks for pages of a span, on a lane that only the caller uses like this; answered with [`got`], in order.
pub(super) fn want(lane: usize, number: usize, pages: Bits) -> Ticket {
    loop {
        let epoch = epoch();
        let server = place(number).first;
        if file(usize::from(server)).is_some() {
            return Ticket { server, epoch, sequence: None };
        }
        let asked = ask(usize::from(server), lane, epoch, |link| link.want(name(number), pages));
        if asked.is_some() {
            return Ticket { server, epoch, sequence: asked };
        }
    }
}

/// Waits for what was wanted; it comes to its places in `base`.
pub(super) fn got(lane: usize, ticket: Ticket, number: usize, pages: Bits, base: Layout) {
    if let Some(sequence) = ticket.sequence.filter(|_| !is_lost(ticket.server)) {
        let came = |link: &mut Link| link.got(sequence, pages, base);
        if ask(usize::from(ticket.server), lane, ticket.epoch, came).is_some() {
            return;
        }
    }
    get_at_once(lane, number, pages, base);
}

/// Asks for pages of a span and waits for them.
pub(super) fn get(number: usize, pages: Bits, base: Layout) {
    bring(number, pages, base, None);
}

/// As [`get`], of at most [`EACH`] parts: a server is asked for all that it has of them before its first answer.
pub(super) fn get_each(parts: &[(usize, Bits, Layout)]) {
    let (then, mut done) = (epoch(), 0u64);
    for server in (0..servers()).filter(|server| file(*server).is_none() && !is_lost(*server as u8)) {
        let is_mine = |nth: &usize| usize::from(place(parts[*nth].0).first) == server;
        let mine = (0..parts.len()).filter(is_mine).fold(0, |all, nth| all | 1u64 << nth);
        let each = || parts.iter().enumerate().filter(|(nth, _)| mine >> nth & 1 == 1).map(|(_, part)| *part);
        let answered = ask(server, DEMAND, then, |link| {
            let asked = each().try_fold(0, |_, (number, pages, _)| link.want(name(number), pages))?;
            let first = asked.wrapping_add(1).wrapping_sub(mine.count_ones());
            (first..).zip(each()).try_for_each(|(sequence, (_, pages, base))| link.got(sequence, pages, base))
        });
        done |= answered.map_or(0, |()| mine);
    }
    for (_, (number, pages, base)) in parts.iter().enumerate().filter(|(nth, _)| done >> nth & 1 == 0) {
        get(*number, *pages, *base);
    }
}

/// As [`get`], for the thread that has this lane: another that is awake helps it where what is shared is read.
pub(super) fn get_at_once(lane: usize, number: usize, pages: Bits, base: Layout) {
    bring(number, pages, base, Some(lane));
}

fn bring(number: usize, pages: Bits, base: Layout, helped: Option<usize>) {
    loop {
        let then = epoch();
        let server = usize::from(place(number).first);
        if !is_lost(server as u8) && read(server, number, pages, base, helped) {
            if epoch() == then {
                return;
            }
            continue;
        }
        if ask(server, DEMAND, then, |link| link.get(name(number), pages, base)).is_some() {
            return;
        }
    }
}

/// What is shared with a server.
fn file(server: usize) -> Option<usize> {
    usize::try_from(FILES[server].load(Ordering::Acquire)).ok()
}

/// Whether any server shares what it keeps.
pub(super) fn shares() -> bool {
    (0..servers()).any(|server| file(server).is_some())
}

/// Whether a span is read from what the server shares that is asked for it: [`get_each`] takes its parts one after the other.
pub(super) fn is_read(number: usize) -> bool {
    file(usize::from(place(number).first)).is_some()
}

/// Whether a server of a span is told and answers before it is given anything.
pub(super) fn is_shared(number: usize) -> bool {
    let Place { first, second, .. } = place(number);
    [first, second].into_iter().any(|server| server != NOBODY && file(usize::from(server)).is_some())
}

/// What a span is read from: a file, or the place where it is mapped.
#[derive(Clone, Copy)]
enum Source {
    File(usize),
    Mapped(usize),
}

impl Source {
    /// Pages, to their places in `base`; false if they cannot be.
    fn read(self, number: usize, pages: Bits, base: Layout) -> bool {
        match self {
            Source::File(file) => transfer(nr::PREAD64, file, number, pages, base),
            Source::Mapped(at) => {
                mapped::read(at, pages, base);
                true
            }
        }
    }
}

/// Reads pages of a span from what is shared, if anything is.
fn read(server: usize, number: usize, pages: Bits, base: Layout, helped: Option<usize>) -> bool {
    let read = |file| {
        let source = mapped::place(server, number, pages).map_or(Source::File(file), Source::Mapped);
        match helped {
            Some(lane) => pieces::read(lane, source, number, pages, base),
            None => source.read(number, pages, base),
        }
    };
    let done = file(server).is_some_and(read);
    if done {
        counts::received(server as u32, count(&pages));
    }
    done
}

/// Writes pages of a span into what is shared. `kept`: the server has made room for these. False: it has to be sent them.
fn write(server: usize, number: usize, pages: Bits, kept: Bits, zero: Bits, base: Layout) -> Result<bool, Gone> {
    let Some(file) = file(server) else { return Ok(false) };
    let fresh = without(pages, kept);
    if fresh != NONE || zero != NONE {
        let mut link = CONNECTIONS[server][BACK].lock();
        link.take(name(number), fresh, zero)?;
        link.given(1)?;
    }
    if let Some(at) = mapped::place(server, number, pages) {
        mapped::write(at, pages, base);
    } else if !transfer(nr::PWRITE64, file, number, pages, base) {
        FILES[server].store(-1, Ordering::Relaxed);
        return Ok(false);
    }
    counts::sent(server as u32, count(&pages));
    Ok(true)
}

fn transfer(call: usize, file: usize, number: usize, pages: Bits, base: Layout) -> bool {
    base.runs(pages).all(|(first, at, count)| {
        let (mut done, len) = (0, count * PAGE);
        while done < len {
            // SAFETY: pages of a slot that is ours now, and all there.
            let moved =
                unsafe { syscall(call, [file, at + done, len - done, number * SPAN + first * PAGE + done, 0, 0]) };
            match moved {
                Ok(moved) if moved > 0 => done += moved,
                Err(call::EINTR) => {}
                _ => return false,
            }
        }
        true
    })
}

/// Who was given something: at most two.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Keepers(u32);

impl Keepers {
    pub(super) const NONE: Keepers = Keepers(0);

    pub(super) fn has(self, server: usize) -> bool {
        self.0 >> server & 1 == 1
    }
}

/// Whether a server keeps a span.
pub(super) fn keeps(number: usize, server: usize) -> bool {
    place(number).has(server as u8)
}

/// What is given away of a span: pages that lie in `base`, and those that are zero from now on. Of the former the servers have these already, if
/// perhaps as they were.
pub(super) struct Parcel {
    pub(super) number: usize,
    pub(super) sent: Bits,
    pub(super) zero: Bits,
    pub(super) kept: Bits,
    pub(super) base: Layout,
}

/// Gives pages away to all who are to have them; who is returned has not answered yet. For one thread. `more`: a server is given more at once.
pub(super) fn give(parcel: &Parcel, more: impl Fn(usize) -> bool) -> Keepers {
    let Parcel { number, sent, zero, base, .. } = *parcel;
    // Not all servers have the same while a copy is made.
    let kept = if MIRROR.load(Ordering::Relaxed) { NONE } else { parcel.kept };
    loop {
        let (Place { first, second, .. }, mut keepers, mut done) = (place(number), Keepers::NONE, false);
        for server in [first, second].into_iter().filter(|server| !is_lost(*server)) {
            let server = usize::from(server);
            let given = || {
                if write(server, number, sent, kept, zero, base)? {
                    return Ok(0);
                }
                CONNECTIONS[server][BACK].lock().give(name(number), sent, zero, base, more(server))?;
                Ok(1 << server)
            };
            match given() {
                Ok(waits) => (keepers.0, done) = (keepers.0 | waits, true),
                Err(gone) => lose(server, epoch(), &gone),
            }
        }
        // Else they were lost one after the other, and another has its place.
        if done {
            return keepers;
        }
    }
}

/// Waits until all who were given something have it. `open`: of how many gifts that each was given this is the oldest.
pub(super) fn given(keepers: Keepers, open: impl Fn(usize) -> usize) {
    for server in (0..servers()).filter(|server| keepers.has(*server) && !is_lost(*server as u8)) {
        let taken = CONNECTIONS[server][BACK].lock().given(open(server) as u32);
        if let Err(gone) = taken {
            lose(server, epoch(), &gone);
        }
    }
}

/// A server that was chosen in this epoch is lost. Ends the program unless all that it had is elsewhere, too.
fn lose(server: usize, epoch: u32, gone: &Gone) {
    const BOTH_WAYS: usize = 2;
    let _alone = CHANGE.lock();
    if is_lost(server as u8) || SINCE[server].load(Ordering::Relaxed) > epoch {
        return;
    }
    let pages = KEPT[server].load(Ordering::Relaxed);
    let detail = if gone.cause == cause::FULL { gone.detail } else { [gone.detail[0], pages] };
    for word in &MAP {
        match unpack(word.load(Ordering::Relaxed)).without(server as u8) {
            Some(next) => word.store(pack(next), Ordering::Release),
            None => fatal::say(gone.cause, server as u32, detail),
        }
    }
    LOST.fetch_or(1 << server, Ordering::AcqRel);
    KEPT[server].store(0, Ordering::Relaxed);
    BARE.store(MIRROR.load(Ordering::Relaxed), Ordering::Relaxed);
    tell_bare();
    // Who waits for it need not wait until its time is over.
    for fd in &FDS[server] {
        // SAFETY: integers.
        let _ = unsafe { syscall(nr::SHUTDOWN, [fd.load(Ordering::Relaxed) as usize, BOTH_WAYS, 0, 0, 0, 0]) };
    }
    let told = Failure { cause: cause::GOES_ON, server: server as u32, detail: [gone.cause.into(), pages] };
    fatal::tell(&told);
}

fn tell_bare() {
    let bare = MAP.iter().filter(|word| unpack(word.load(Ordering::Relaxed)).whole == 0).count();
    counts::bare(if MIRROR.load(Ordering::Relaxed) { bare } else { 0 });
}

/// Loses servers whose connection has ended, though nothing is wanted of them now.
pub(super) fn look() {
    const GONE: u16 = 0x8 | 0x10 | 0x2000;
    for server in (0..servers()).filter(|server| !is_lost(*server as u8)) {
        let mut polled = [FDS[server][BACK].load(Ordering::Relaxed) as u32, 0x2000];
        // SAFETY: one `struct pollfd`.
        let found = unsafe { syscall(nr::POLL, [polled.as_mut_ptr() as usize, 1, 0, 0, 0, 0]) };
        if found == Ok(1) && (polled[1] >> 16) as u16 & GONE != 0 {
            lose(server, epoch(), &Gone { cause: cause::LOST, detail: [0; 2] });
        }
    }
}
