//! userfaultfd(2): who is told of missing pages, and fills, takes and gives back pages in one step.

use sys::syscall::{nr, syscall};

use super::call;

/// linux/userfaultfd.h
const CLOEXEC: usize = 0o2_000_000;
const USER_MODE_ONLY: usize = 1;
const API: usize = 0xc018_aa3f;
const REGISTER: usize = 0xc020_aa00;
const WAKE: usize = 0x8010_aa02;
const COPY: usize = 0xc028_aa03;
const ZEROPAGE: usize = 0xc020_aa04;
const MOVE: usize = 0xc028_aa05;
const MISSING: u64 = 1;
const FEATURE_THREAD: u64 = 1 << 8;
const FEATURE_MOVE: u64 = 1 << 16;
const ALLOW_HOLES: u64 = 2;
const PAGEFAULT: u8 = 0x12;
const PAGE: usize = 4096;
const EEXIST: u32 = 17;

/// One of these for the whole address space.
#[derive(Clone, Copy)]
pub(super) struct Uffd {
    pub(super) fd: i32,
    /// Faults inside the kernel fail instead of being told.
    pub(super) user_mode_only: bool,
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
    pub(super) fn open(user_mode_only: bool) -> Result<Uffd, u32> {
        // SAFETY: integers.
        let open = |flags| unsafe { syscall(nr::USERFAULTFD, [CLOEXEC | flags, 0, 0, 0, 0, 0]) };
        let full = if user_mode_only { Err(call::EINVAL) } else { open(0) };
        let (fd, user_mode_only) = match full {
            Ok(fd) => (fd, false),
            Err(_) => (open(USER_MODE_ONLY)?, true),
        };
        let this = Uffd { fd: fd as i32, user_mode_only };
        let mut api = [0xaa, FEATURE_THREAD | FEATURE_MOVE, 0];
        this.control(API, &raw mut api as usize)?;
        Ok(this)
    }

    fn control(&self, request: usize, argument: usize) -> Result<(), u32> {
        // SAFETY: every caller passes the structure of its request.
        unsafe { syscall(nr::IOCTL, [self.fd as usize, request, argument, 0, 0, 0]) }.map(drop)
    }

    /// From now on missing pages of the range are told.
    pub(super) fn register(&self, at: usize, len: usize) -> Result<(), u32> {
        let mut range = [at as u64, len as u64, MISSING, 0];
        self.control(REGISTER, &raw mut range as usize)
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

    /// Fills missing pages with copies.
    pub(super) fn copy(&self, to: usize, from: usize, len: usize) -> Result<(), u32> {
        self.all(COPY, len, |done| [(to + done) as u64, (from + done) as u64, (len - done) as u64, 0, 0], true)
    }

    /// Fills missing pages with zeros.
    pub(super) fn zero(&self, at: usize, len: usize) -> Result<(), u32> {
        self.all(ZEROPAGE, len, |done| [(at + done) as u64, (len - done) as u64, 0, 0, 0], true)
    }

    /// Moves pages to where none are; what is missing stays missing there.
    pub(super) fn take(&self, to: usize, from: usize, len: usize) -> Result<(), u32> {
        let request = |done| [(to + done) as u64, (from + done) as u64, (len - done) as u64, ALLOW_HOLES, 0];
        self.all(MOVE, len, request, false)
    }

    /// Until it is done for all pages: the kernel may stop after any.
    fn all(&self, kind: usize, len: usize, request: impl Fn(usize) -> [u64; 5], skip: bool) -> Result<(), u32> {
        let mut done = 0;
        while done < len {
            let mut words = request(done);
            let result = self.control(kind, &raw mut words as usize);
            let told = if kind == ZEROPAGE { words[3] } else { words[4] };
            done += usize::try_from(told.cast_signed()).unwrap_or(0);
            match result {
                Ok(()) => return Ok(()),
                Err(call::EAGAIN) => {}
                // It is there already.
                Err(EEXIST) if skip => done += PAGE,
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

impl Message {
    pub(super) fn is_fault(&self) -> bool {
        self.event == PAGEFAULT
    }
}
