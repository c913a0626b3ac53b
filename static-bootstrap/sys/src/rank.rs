//! From the plan to the program: what a rank does to itself, in this order, and then exec.
//!
//! Hazard: where nothing can be executed from memory this runs in a child that shares its keeper's memory. So: raw system calls only,
//! no allocation, no lock, no thread-local storage, no panic, and nothing is mapped here.
#![allow(unsafe_code, reason = "a mapped block of offsets, raw system calls, exec")]

use core::ffi::CStr;
use core::slice;
use core::sync::atomic::{AtomicU32, Ordering};

use super::plan::{Failures, MAGIC, Plan, Rank};
use super::syscall::{nr, syscall};

const PROT_READ: usize = 1;
const PROT_WRITE: usize = 2;
const MAP_SHARED: usize = 1;
const PR_SET_PDEATHSIG: usize = 1;
const SIGKILL: usize = 9;
const SIG_SETMASK: usize = 2;
const RLIMIT_NOFILE: usize = 7;
const PTRACE_TRACEME: usize = 0;
const EINVAL: u32 = 22;

/// The mapped plan; it stays for as long as the process.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    plan: &'static Plan,
}

impl Block {
    /// Maps `len` bytes of a descriptor. A positive errno when that fails, or when it holds no whole plan.
    ///
    /// # Safety
    /// If the file is a plan, then `src/sys/program.rs` wrote it, it never shrinks, and only the ranks' failures are still written.
    pub unsafe fn map(fd: usize, len: usize) -> Result<Block, u32> {
        if len < size_of::<Plan>() {
            return Err(EINVAL);
        }
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let base = unsafe { syscall(nr::MMAP, [0, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0]) }?;
        // SAFETY: the mapping is at least that long, aligned to a page, and stays.
        let plan = unsafe { &*(base as *const Plan) };
        let table = u64::from(plan.rank_table) + u64::from(plan.ranks) * size_of::<Rank>() as u64;
        if plan.magic != MAGIC || plan.len as usize != len || table > len as u64 {
            return Err(EINVAL);
        }
        Ok(Block { plan })
    }

    /// The rank with this index on its node.
    pub fn rank(&self, index: u32) -> Option<&'static Rank> {
        let table = self.at(self.plan.rank_table).cast::<Rank>();
        // SAFETY: the table lies within the block, see `map`; its writer aligned it.
        (index < self.plan.ranks).then(|| unsafe { &*table.wrapping_add(index as usize) })
    }

    /// Whether ranks are held for a debugger; and what is put into them.
    pub fn stops(&self) -> (bool, Option<&'static CStr>) {
        // SAFETY: the writer of the block put a string there.
        let resident = || unsafe { CStr::from_ptr(self.at(self.plan.resident).cast()) };
        (self.plan.hold != 0, (self.plan.resident != 0).then(resident))
    }

    /// The pointers for which [`Block::become_program`] needs room.
    pub fn pointers(&self, rank: &Rank) -> usize {
        self.plan.argc as usize + self.plan.envc as usize + rank.envc as usize + 2
    }

    /// Comes back only when the rank could not become the program: why is in its failures, unless its keeper is gone. The plan must be
    /// closed on exec, or closed.
    ///
    /// # Safety
    /// `rank` is of this block; `room` can take its [`Block::pointers`], and belongs to the caller until this process has left its memory.
    pub unsafe fn become_program(&self, rank: &Rank, room: *mut *const u8) {
        let plan = self.plan;
        // SAFETY: every call gets integers, or pointers into the block, to `none` or to `room`, of the type and length that it takes.
        let call = |number, args| unsafe { syscall(number, args) };
        let fail = |place: &AtomicU32, errno| place.store(errno, Ordering::Release);
        let Failures { home, cwd, hold, exec, .. } = &rank.failures;
        let _ = call(nr::PRCTL, [PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0, 0]);
        // The keeper may have died before the line above; then nobody would ever kill us.
        if call(nr::GETPPID, [0; 6]) != Ok(plan.keeper as usize) {
            return;
        }
        if rank.mask_len > 0 {
            let _ = call(nr::SCHED_SETAFFINITY, [0, rank.mask_len as usize, self.at(rank.mask) as usize, 0, 0, 0]);
        }
        let _ = call(nr::PRLIMIT64, [0, RLIMIT_NOFILE, plan.nofile.as_ptr() as usize, 0, 0, 0]);
        let none = 0u64;
        let _ = call(nr::RT_SIGPROCMASK, [SIG_SETMASK, &raw const none as usize, 0, size_of::<u64>(), 0, 0]);
        if let Err(errno) = call(nr::CHDIR, [self.at(plan.cwd) as usize, 0, 0, 0, 0, 0]) {
            if call(nr::CHDIR, [self.at(plan.home) as usize, 0, 0, 0, 0, 0]).is_err() {
                return fail(cwd, errno);
            }
            fail(home, errno);
        }
        // SAFETY: the caller vouches for the room.
        let envp = unsafe { self.pointers_to(room, &[(plan.argc, plan.argv)]) };
        // SAFETY: as above; this is the rest of it.
        unsafe { self.pointers_to(envp, &[(plan.envc, plan.envp), (rank.envc, rank.envp)]) };
        // The next exec stops, so nothing may come in between.
        if (plan.hold != 0 || plan.resident != 0)
            && let Err(errno) = call(nr::PTRACE, [PTRACE_TRACEME, 0, 0, 0, 0, 0])
        {
            return fail(hold, errno);
        }
        if let Err(errno) = call(nr::EXECVE, [self.at(plan.program) as usize, room as usize, envp as usize, 0, 0, 0]) {
            fail(exec, errno);
        }
    }

    /// Writes pointers to the strings of several lists, and NULL; returns the place after that.
    ///
    /// # Safety
    /// `room` can take them.
    unsafe fn pointers_to(&self, mut room: *mut *const u8, lists: &[(u32, u32)]) -> *mut *const u8 {
        for &(count, offsets) in lists {
            // SAFETY: the writer of the block put that many offsets there, aligned.
            for &offset in unsafe { slice::from_raw_parts(self.at(offsets).cast::<u32>(), count as usize) } {
                // SAFETY: the caller vouches for the room.
                unsafe { room.write(self.at(offset)) };
                room = room.wrapping_add(1);
            }
        }
        // SAFETY: as above.
        unsafe { room.write(core::ptr::null()) };
        room.wrapping_add(1)
    }

    fn at(&self, offset: u32) -> *const u8 {
        (&raw const *self.plan).cast::<u8>().wrapping_add(offset as usize)
    }
}
