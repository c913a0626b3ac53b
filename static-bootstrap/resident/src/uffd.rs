//! userfaultfd(2): who is told of missing pages, and fills, takes and gives back pages in one step.

use sys::page::PAGE;
use sys::syscall::{nr, syscall};

use super::call::EEXIST;
use super::{call, settings};

/// linux/userfaultfd.h
const CLOEXEC: usize = 0o2_000_000;
const USER_MODE_ONLY: usize = 1;
const API: usize = 0xc018_aa3f;
const REGISTER: usize = 0xc020_aa00;
const WAKE: usize = 0x8010_aa02;
const COPY: usize = 0xc028_aa03;
const ZEROPAGE: usize = 0xc020_aa04;
const MOVE: usize = 0xc028_aa05;
const WRITEPROTECT: usize = 0xc018_aa06;
const DONTWAKE: u64 = 1;
const MISSING: u64 = 1;
const WRITTEN: u64 = 2;
const FEATURE_WRITTEN: u64 = 1;
const FEATURE_THREAD: u64 = 1 << 8;
/// Linux 5.18
const FEATURE_EXACT: u64 = 1 << 11;
const FEATURE_MOVE: u64 = 1 << 16;
const PAGEFAULT: u8 = 0x12;
const ENOENT: u32 = 2;

/// One of these for the whole address space.
#[derive(Clone, Copy)]
pub(super) struct Uffd {
    pub(super) fd: i32,
    /// Pages can be moved: Linux 6.8. Else they are copied, and protected from writes meanwhile.
    pub(super) moves: bool,
    /// The kernel may not be let near pages that are away: its faults fail instead of being told, or a device may write to pages that are copied.
    pub(super) traps: bool,
}

/// `struct uffd_msg`, of a page fault.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    pub(super) address: u64,
    pub(super) thread: u32,
    padding: u32,
}

impl Uffd {
    /// Opens it: for all faults where that is allowed, else for those of user mode.
    pub(super) fn open() -> Result<Uffd, u32> {
        let settings = settings::get();
        // SAFETY: integers.
        let open = |flags| unsafe { syscall(nr::USERFAULTFD, [CLOEXEC | flags, 0, 0, 0, 0, 0]) };
        let full = if settings.user_mode_only != 0 { Err(call::EINVAL) } else { open(0) };
        let (fd, user_mode_only) = match full {
            Ok(fd) => (fd, false),
            Err(_) => (open(USER_MODE_ONLY)?, true),
        };
        let fd = fd as i32;
        let offers =
            |this: &Uffd, features| this.control(API, [0xaa_u64, FEATURE_THREAD | features, 0].as_mut_ptr() as usize);
        let moving = Uffd { fd, moves: true, traps: user_mode_only };
        if settings.without_move == 0 && offers(&moving, FEATURE_MOVE | FEATURE_EXACT).is_ok() {
            return Ok(moving);
        }
        let copying = Uffd { fd, moves: false, traps: true };
        let exact = offers(&copying, FEATURE_WRITTEN | FEATURE_EXACT);
        exact.or_else(|_| offers(&copying, FEATURE_WRITTEN)).map(|()| copying)
    }

    fn control(&self, request: usize, argument: usize) -> Result<(), u32> {
        // SAFETY: every caller passes the structure of its request.
        unsafe { syscall(nr::IOCTL, [self.fd as usize, request, argument, 0, 0, 0]) }.map(drop)
    }

    /// From now on missing pages of the range are told.
    pub(super) fn register(&self, at: usize, len: usize) -> Result<(), u32> {
        let mut range = [at as u64, len as u64, if self.moves { MISSING } else { MISSING | WRITTEN }, 0];
        self.control(REGISTER, &raw mut range as usize)
    }

    /// Who writes to these pages, which are there, waits until they are not.
    pub(super) fn protect(&self, at: usize, len: usize) -> Result<(), u32> {
        let mut range = [at as u64, len as u64, 1];
        loop {
            match self.control(WRITEPROTECT, &raw mut range as usize) {
                Err(call::EAGAIN) => {}
                result => return result,
            }
        }
    }

    /// Threads that wait for a page of the range look again.
    pub(super) fn wake(&self, at: usize, len: usize) {
        let mut range = [at as u64, len as u64];
        let _ = self.control(WAKE, &raw mut range as usize);
    }

    /// Waits for faults.
    pub(super) fn faults<'a>(&self, place: &'a mut [Message]) -> &'a [Message] {
        let len = size_of_val(place);
        // SAFETY: room for that many bytes, which may be any.
        let read = unsafe { syscall(nr::READ, [self.fd as usize, place.as_mut_ptr() as usize, len, 0, 0, 0]) };
        &place[..read.unwrap_or(0) / size_of::<Message>()]
    }

    /// Fills missing pages with copies. Who waits for one goes on at once if that is said, or is to be woken.
    pub(super) fn copy(&self, to: usize, from: usize, len: usize, wakes: bool) -> Result<(), u32> {
        let mode = if wakes { 0 } else { DONTWAKE };
        let copy = |done| [(to + done) as u64, (from + done) as u64, (len - done) as u64, mode, 0];
        match self.all(COPY, len, copy, true).1 {
            // Not one mapping to the kernel, which takes no more at once.
            Err(ENOENT) if len > PAGE => {
                let half = (len / 2).next_multiple_of(PAGE);
                self.copy(to, from, half, wakes)?;
                self.copy(to + half, from + half, len - half, wakes)
            }
            result => result,
        }
    }

    /// Fills missing pages with zeros.
    pub(super) fn zero(&self, at: usize, len: usize) -> Result<(), u32> {
        match self.all(ZEROPAGE, len, |done| [(at + done) as u64, (len - done) as u64, 0, 0, 0], true).1 {
            Err(ENOENT) if len > PAGE => {
                let half = (len / 2).next_multiple_of(PAGE);
                self.zero(at, half)?;
                self.zero(at + half, len - half)
            }
            result => result,
        }
    }

    /// Moves pages to where none are. After an error some may have been moved: Linux 6.18, if it had to begin again (its EAGAIN), forgets what it moved then, and says
    /// that the first is there already (EEXIST).
    pub(super) fn take(&self, to: usize, from: usize, len: usize) -> Result<(), u32> {
        self.shift(to, from, len, false).1
    }

    /// Moves pages that are all there, and copies those that cannot be moved: the kernel may find this after any. Whether all are known to have been moved. Who waits for
    /// one is to be woken ([`Uffd::wake`]).
    pub(super) fn bring(&self, to: usize, from: usize, len: usize) -> Result<bool, u32> {
        let (mut done, mut moved) = self.shift(to, from, len, false);
        if moved.is_ok() {
            return Ok(true);
        }
        // They may be there because they were moved (as above). Who copied from where they are not any more would miss them itself, and wait for itself.
        if moved == Err(EEXIST) {
            let (more, rest) = self.shift(to + done, from + done, len - done, true);
            (done, moved) = (done + more, rest);
        }
        if moved.is_err() {
            self.copy(to + done, from + done, len - done, false)?;
        }
        Ok(false)
    }

    fn shift(&self, to: usize, from: usize, len: usize, skip: bool) -> (usize, Result<(), u32>) {
        let request = |done| [(to + done) as u64, (from + done) as u64, (len - done) as u64, DONTWAKE, 0];
        self.all(MOVE, len, request, skip)
    }

    /// Until it is done for all pages: the kernel may stop after any. Of how many bytes it was done.
    fn all(
        &self,
        kind: usize,
        len: usize,
        request: impl Fn(usize) -> [u64; 5],
        skip: bool,
    ) -> (usize, Result<(), u32>) {
        let mut done = 0;
        while done < len {
            let mut words = request(done);
            let result = self.control(kind, &raw mut words as usize);
            let told = if kind == ZEROPAGE { words[3] } else { words[4] };
            done += usize::try_from(told.cast_signed()).unwrap_or(0);
            match result {
                Ok(()) => return (len, Ok(())),
                Err(call::EAGAIN) => {}
                // It is there already.
                Err(EEXIST) if skip => done += PAGE,
                Err(errno) => return (done, Err(errno)),
            }
        }
        (len, Ok(()))
    }
}

impl Message {
    pub(super) fn is_fault(&self) -> bool {
        self.event == PAGEFAULT
    }
}
