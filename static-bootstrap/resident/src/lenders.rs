//! The memory servers of this program: which has what, the connections to them, and what is done when one is lost. With a copy of everything on
//! another, the program goes on, and what has lost its copy gets one where there is room; without, it ends.
//!
//! What a server of this host keeps is in a file that both have open: it is told of pages that it did not have, and nobody is asked for any.

use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use sys::page::{Bits, PAGE, SPAN, count, runs};
use sys::places::{NOBODY, PLACES, Place, gap};
use sys::resident::{DESCRIPTORS, Failure, LINKS, SERVERS, cause};
use sys::syscall::{nr, syscall};

use super::link::{Gone, Link};
use super::lock::Lock;
use super::table::{NONE, TABLE, without};
use super::{call, counts, door, fatal, window};

/// What a connection is for.
pub(super) const DEMAND: usize = 0;
pub(super) const AHEAD: usize = 1;
pub(super) const BACK: usize = 2;

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
static COUNT: AtomicU32 = AtomicU32::new(0);
static MIRROR: AtomicBool = AtomicBool::new(false);
/// Something may be without its copy.
static BARE: AtomicBool = AtomicBool::new(false);

/// Of one program: its connections, and the servers that it could not reach.
pub(super) struct Fresh {
    links: [[Link; LINKS]; SERVERS],
    files: [i32; SERVERS],
    absent: u32,
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
        Fresh { links, files, absent: granted.grant.absent as u32, door: granted.door }
    }

    /// Has the servers give these connections what the program's own have now.
    pub(super) fn copy(&mut self, client: [u64; 2]) -> Result<(), u32> {
        for server in 0..servers() {
            let useless = LOST.load(Ordering::Acquire) | self.absent;
            if useless >> server & 1 == 1 {
                continue;
            }
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
        for (server, links) in self.links.iter().enumerate() {
            for (lane, link) in links.iter().enumerate() {
                FDS[server][lane].store(link.fd(), Ordering::Relaxed);
                *CONNECTIONS[server][lane].lock() = *link;
            }
            FILES[server].store(self.files[server], Ordering::Relaxed);
        }
        fatal::DOOR.store(self.door, Ordering::Relaxed);
        for server in (0..servers()).filter(|server| self.absent >> server & 1 == 1) {
            lose(server, &Gone { cause: cause::LOST, detail: [0; 2] });
        }
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

/// A question that waits for its answer.
#[derive(Clone, Copy, Default)]
pub(super) struct Ticket {
    server: u8,
    /// Of the question, if one was asked.
    sequence: Option<u32>,
}

/// Asks for pages of a span, on a lane that only the caller uses like this; answered with [`got`], in order.
pub(super) fn want(lane: usize, number: usize, pages: Bits) -> Ticket {
    loop {
        let server = place(number).first;
        if file(usize::from(server)).is_some() {
            return Ticket { server, sequence: None };
        }
        let asked = CONNECTIONS[usize::from(server)][lane].lock().want(name(number), pages);
        match asked {
            Ok(sequence) => return Ticket { server, sequence: Some(sequence) },
            Err(gone) => lose(usize::from(server), &gone),
        }
    }
}

/// Waits for what was wanted; it comes to its places in the span at `base`.
pub(super) fn got(lane: usize, ticket: Ticket, number: usize, pages: Bits, base: usize) {
    if let Some(sequence) = ticket.sequence.filter(|_| !is_lost(ticket.server)) {
        let came = CONNECTIONS[usize::from(ticket.server)][lane].lock().got(sequence, pages, base);
        match came {
            Ok(()) => return,
            Err(gone) => lose(usize::from(ticket.server), &gone),
        }
    }
    get(number, pages, base);
}

/// Asks for pages of a span and waits for them.
pub(super) fn get(number: usize, pages: Bits, base: usize) {
    loop {
        let server = usize::from(place(number).first);
        if !is_lost(server as u8) && read(server, number, pages, base) {
            return;
        }
        // Held until the answer is here: others get in this way, too.
        let got = CONNECTIONS[server][DEMAND].lock().get(name(number), pages, base);
        match got {
            Ok(()) => return,
            Err(gone) => lose(server, &gone),
        }
    }
}

/// What is shared with a server.
fn file(server: usize) -> Option<usize> {
    usize::try_from(FILES[server].load(Ordering::Relaxed)).ok()
}

/// Whether any server shares what it keeps.
pub(super) fn shares() -> bool {
    (0..servers()).any(|server| file(server).is_some())
}

/// Whether a server of a span is told and answers before it is given anything.
pub(super) fn is_shared(number: usize) -> bool {
    let Place { first, second, .. } = place(number);
    [first, second].into_iter().any(|server| server != NOBODY && file(usize::from(server)).is_some())
}

/// Reads pages of a span from what is shared, if anything is.
fn read(server: usize, number: usize, pages: Bits, base: usize) -> bool {
    let done = file(server).is_some_and(|file| transfer(nr::PREAD64, file, number, pages, base));
    if done {
        counts::received(server as u32, count(&pages));
    }
    done
}

/// Writes pages of a span into what is shared. `kept`: the server has made room for these. False: it has to be sent them.
fn write(server: usize, number: usize, pages: Bits, kept: Bits, zero: Bits, base: usize) -> Result<bool, Gone> {
    let Some(file) = file(server) else { return Ok(false) };
    let fresh = without(pages, kept);
    if fresh != NONE || zero != NONE {
        let mut link = CONNECTIONS[server][BACK].lock();
        link.take(name(number), fresh, zero)?;
        link.given(1)?;
    }
    if !transfer(nr::PWRITE64, file, number, pages, base) {
        FILES[server].store(-1, Ordering::Relaxed);
        return Ok(false);
    }
    counts::sent(server as u32, count(&pages));
    Ok(true)
}

fn transfer(call: usize, file: usize, number: usize, pages: Bits, base: usize) -> bool {
    runs(pages).all(|(first, count)| {
        let (mut done, len) = (first * PAGE, (first + count) * PAGE);
        while done < len {
            // SAFETY: pages of a slot that is ours now, and all there.
            let moved =
                unsafe { syscall(call, [file, base.wrapping_add(done), len - done, number * SPAN + done, 0, 0]) };
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

/// What is given away of a span: pages that lie at `base`, and those that are zero from now on. Of the former the servers have these already, if
/// perhaps as they were.
pub(super) struct Parcel {
    pub(super) number: usize,
    pub(super) sent: Bits,
    pub(super) zero: Bits,
    pub(super) kept: Bits,
    pub(super) base: usize,
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
                Err(gone) => lose(server, &gone),
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
            lose(server, &gone);
        }
    }
}

/// A server is lost. Ends the program unless all that it had is elsewhere, too.
fn lose(server: usize, gone: &Gone) {
    const BOTH_WAYS: usize = 2;
    let _alone = CHANGE.lock();
    if is_lost(server as u8) {
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
            lose(server, &Gone { cause: cause::LOST, detail: [0; 2] });
        }
    }
}

/// Makes copies of what has none, a span at a time.
pub(super) struct Healer {
    place: usize,
    next: usize,
}

impl Healer {
    pub(super) const fn new() -> Healer {
        Healer { place: PLACES, next: 0 }
    }

    /// The next span, through a buffer of one; only while no gift is open. False when there is nothing to do.
    pub(super) fn step(&mut self, buffer: usize) -> bool {
        let Some((nth, target)) = Healer::find() else { return false };
        if nth != self.place {
            *self = Healer { place: nth, next: 0 };
        }
        let mut table = TABLE.lock();
        let [heap, rest] = table.window.given();
        let end = rest.end;
        let number =
            (self.next..end).find(|number| number % PLACES == nth && (heap.contains(number) || rest.contains(number)));
        let Some(number) = number else {
            drop(table);
            let _alone = CHANGE.lock();
            let now = unpack(MAP[nth].load(Ordering::Relaxed));
            if now.second == target {
                MAP[nth].store(pack(Place { whole: 1, ..now }), Ordering::Release);
                tell_bare();
            }
            return true;
        };
        self.next = number + 1;
        let pages = table.span(number).remote;
        drop(table);
        if pages == NONE {
            return true;
        }
        get(number, pages, buffer);
        let server = usize::from(target);
        let copied = || {
            if write(server, number, pages, NONE, NONE, buffer)? {
                return Ok(());
            }
            let mut link = CONNECTIONS[server][BACK].lock();
            link.give(name(number), pages, NONE, buffer, false)?;
            link.given(1)
        };
        match copied() {
            Ok(()) => drop(KEPT[server].fetch_add(count(&pages) as u64, Ordering::Relaxed)),
            Err(gone) if gone.cause == cause::FULL => {
                FULL.fetch_or(1 << server, Ordering::Relaxed);
                let _alone = CHANGE.lock();
                let now = unpack(MAP[nth].load(Ordering::Relaxed));
                MAP[nth].store(pack(Place { second: NOBODY, whole: 0, ..now }), Ordering::Release);
            }
            Err(gone) => lose(server, &gone),
        }
        true
    }

    /// Something has no copy, and somebody could take one.
    pub(super) fn is_needed() -> bool {
        BARE.load(Ordering::Relaxed)
    }

    /// A place whose copy is being made, or is to be made, and where.
    fn find() -> Option<(usize, u8)> {
        let _alone = CHANGE.lock();
        let places: [Place; PLACES] = core::array::from_fn(|nth| unpack(MAP[nth].load(Ordering::Relaxed)));
        if let Some(nth) = places.iter().position(|place| place.second != NOBODY && place.whole == 0) {
            return Some((nth, places[nth].second));
        }
        let weights: [u64; SERVERS] = core::array::from_fn(|server| WEIGHTS[server].load(Ordering::Relaxed));
        let able = !(LOST.load(Ordering::Relaxed) | FULL.load(Ordering::Relaxed));
        let Some((nth, server)) = gap(&places, &weights[..servers()], able) else {
            BARE.store(false, Ordering::Relaxed);
            return None;
        };
        // From now on it is given what is given to the first.
        MAP[nth].store(pack(Place { second: server, whole: 0, ..places[nth] }), Ordering::Release);
        Some((nth, server))
    }
}
