//! A fork of the program: what is here the kernel copies, what is away the servers do. The child has connections, threads and a name of its own.
//!
//! Who forks stops the three threads first, each where it has no page in its hands; so the table says where every page is.

use core::sync::atomic::{AtomicBool, Ordering};

use sys::resident::{ASK_FOR_CHILD, step};

use super::{ENGINE, Engine, RUNS, SLOTS, WANTED, ahead, begin, gather, refused, slots};
use crate::lenders::Fresh;
use crate::lock::{Event, Guard, Lock};
use crate::table::TABLE;
use crate::uffd::Uffd;
use crate::{call, counts, door, fatal, holds, window};

/// Held by a thread of ours while it works.
pub(super) struct Gate {
    lock: Lock<()>,
    closed: AtomicBool,
}

/// One is open again.
static OPENED: Event = Event::new();

impl Gate {
    pub(super) const fn new() -> Gate {
        Gate { lock: Lock::new(()), closed: AtomicBool::new(false) }
    }

    /// To work; waits while somebody forks.
    pub(super) fn pass(&self) -> Guard<'_, ()> {
        loop {
            let seen = OPENED.now();
            if !self.is_closed() {
                return self.lock.lock();
            }
            OPENED.wait(seen, 100);
        }
    }

    /// Whether somebody wants to fork: who works should come to an end.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn close(&self) -> Closed<'_> {
        self.closed.store(true, Ordering::Release);
        WANTED.tell();
        Closed { gate: self, _held: self.lock.lock() }
    }
}

struct Closed<'a> {
    gate: &'a Gate,
    _held: Guard<'a, ()>,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.gate.closed.store(false, Ordering::Release);
        OPENED.tell();
    }
}

/// Forks by `clone`, which returns as the kernel does.
pub(crate) fn fork(clone: impl FnOnce() -> Result<usize, u32>) -> Result<usize, u32> {
    let engine = if RUNS.load(Ordering::Acquire) { *ENGINE.lock() } else { None };
    let Some(engine) = engine else {
        let _table = TABLE.lock();
        return clone();
    };
    // The agent has told the user why.
    let granted = door::ask(ASK_FOR_CHILD).map_err(|_| call::EAGAIN)?;
    let mut fresh = Fresh::new(&granted);
    // In this order: whoever answers a fault may need room, and who makes room needs nobody.
    let closed = [&super::demand::GATE, &ahead::GATE, &super::evict::GATE].map(Gate::close);
    // The child inherits what this thread may use.
    gather::spread();
    if let Err(errno) = fresh.copy() {
        granted.close();
        return Err(errno);
    }
    if let Err(errno) = inherited(true) {
        let _ = inherited(false);
        granted.close();
        return Err(errno);
    }
    let table = TABLE.lock();
    let result = clone();
    drop(table);
    let _ = inherited(false);
    if result != Ok(0) {
        drop(closed);
        granted.close();
        return result;
    }
    drop(closed);
    // No other thread exists. The parent's door has a number that may be something of the program's here.
    fatal::DOOR.store(granted.door, Ordering::Relaxed);
    counts::open(granted.counts).unwrap_or_else(|errno| refused(step::MEMORY, errno));
    let uffd = Uffd::open().and_then(|uffd| {
        window::visit(|at, len| uffd.register(at, len))?;
        Ok(uffd)
    });
    let uffd = uffd.unwrap_or_else(|errno| refused(step::USERFAULTFD, errno));
    ahead::abandon();
    holds::let_go();
    *SLOTS.lock() = slots::make(&uffd).unwrap_or_else(|errno| refused(step::MEMORY, errno));
    fresh.install();
    begin(Engine { uffd, ..engine }, &granted);
    Ok(0)
}

/// Whether a child finds what is captured: only if it then learns what is away, and does not take that for zeros. What else was put there is as the program wants it; at a device's
/// memory the kernel would stop.
pub(super) fn inherited(yes: bool) -> Result<(), u32> {
    let advice = if yes { call::DOFORK } else { call::DONTFORK };
    window::visit(|at, len| {
        // SAFETY: what is in there stays.
        match unsafe { call::advise(at, len, advice) } {
            // The program has unmapped a part of a static array.
            Err(call::ENOMEM) => Ok(()),
            done => done,
        }
    })
}
