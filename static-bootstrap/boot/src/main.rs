//! The bootstrapper: becomes the application. Reads the node's launch plan, applies what belongs to this rank and execs the program.
//!
//! Started by the keeper as `boot INDEX` with the plan at [`PLAN_FD`] and the failure pipe at [`FAILURE_FD`]; standard streams are
//! in place. It must be tiny and quick: it runs once per rank, before the program.
#![no_std]
#![no_main]

use core::arch::naked_asm;
use core::mem::size_of;
use core::slice;

use sys::plan::{
    FAILURE_FD, Failure, MAGIC, PLAN_FD, Plan, Rank, STAGE_CWD, STAGE_EXEC, STAGE_HOLD, STAGE_HOME, STAGE_PLAN,
};
use sys::syscall::{nr, syscall};

const PR_SET_PDEATHSIG: usize = 1;
const SIGKILL: usize = 9;
const RLIMIT_NOFILE: usize = 7;
const F_SETFD: usize = 2;
const FD_CLOEXEC: usize = 1;
const PROT_READ: usize = 1;
const PROT_WRITE: usize = 2;
const MAP_PRIVATE: usize = 2;
const MAP_ANONYMOUS: usize = 32;
const SIG_SETMASK: usize = 2;
const PTRACE_TRACEME: usize = 0;
const ESRCH: u32 = 3;
const EINVAL: u32 = 22;

#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn _start() -> ! {
    naked_asm!("xor ebp, ebp", "mov rdi, rsp", "and rsp, -16", "call {main}", "ud2", main = sym main)
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn _start() -> ! {
    naked_asm!("mov x29, xzr", "mov x0, sp", "b {main}", main = sym main)
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(0, STAGE_PLAN, EINVAL)
}

/// `stack` is what the kernel left: argc, then the argv pointers (System V ABI, process initialisation).
extern "C" fn main(stack: *const usize) -> ! {
    // SAFETY: the kernel put argc and argc pointers to NUL-ended strings there; argv[1] is read only when argc says it exists.
    let index = unsafe {
        if *stack < 2 {
            exit(0, STAGE_PLAN, EINVAL);
        }
        decimal(*stack.add(2) as *const u8)
    };
    let block = Block::map(index);
    let plan = block.plan;

    // SAFETY: integer arguments only.
    unsafe {
        let _ = syscall(nr::PRCTL, [PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0, 0]);
        // The keeper may have died between its fork and the line above; then nobody would ever kill us.
        if syscall(nr::GETPPID, [0; 6]) != Ok(plan.keeper as usize) {
            exit(index, STAGE_PLAN, ESRCH);
        }
        let _ = syscall(nr::SETPGID, [0; 6]);
    }
    let rank = block.rank(index);
    let home = block.string(plan.home);
    // SAFETY: every pointer leads into the mapped plan, which lives until exec, and is of the length given.
    unsafe {
        if rank.mask_len > 0 {
            let _ =
                syscall(nr::SCHED_SETAFFINITY, [0, rank.mask_len as usize, block.string(rank.mask) as usize, 0, 0, 0]);
        }
        let _ = syscall(nr::PRLIMIT64, [0, RLIMIT_NOFILE, &raw const plan.nofile as usize, 0, 0, 0]);
        let none = 0u64;
        let _ = syscall(nr::RT_SIGPROCMASK, [SIG_SETMASK, &raw const none as usize, 0, 8, 0, 0]);
        if let Err(errno) = syscall(nr::CHDIR, [block.string(plan.cwd) as usize, 0, 0, 0, 0, 0]) {
            if syscall(nr::CHDIR, [home as usize, 0, 0, 0, 0, 0]).is_err() {
                exit(index, STAGE_CWD, errno);
            }
            report(index, STAGE_HOME, errno);
        }
        let argv = block.pointers(&[(plan.argc, plan.argv)], index);
        let envp = block.pointers(&[(plan.envc, plan.envp), (rank.envc, rank.envp)], index);
        let _ = syscall(nr::CLOSE, [PLAN_FD as usize, 0, 0, 0, 0, 0]);
        let _ = syscall(nr::FCNTL, [FAILURE_FD as usize, F_SETFD, FD_CLOEXEC, 0, 0, 0]);
        if plan.hold != 0
            && let Err(errno) = syscall(nr::PTRACE, [PTRACE_TRACEME, 0, 0, 0, 0, 0])
        {
            exit(index, STAGE_HOLD, errno);
        }
        match syscall(nr::EXECVE, [block.string(plan.program) as usize, argv as usize, envp as usize, 0, 0, 0]) {
            Ok(_) => exit(index, STAGE_EXEC, 0),
            Err(errno) => exit(index, STAGE_EXEC, errno),
        }
    }
}

/// The mapped plan.
struct Block {
    base: *const u8,
    plan: &'static Plan,
}

impl Block {
    fn map(index: u32) -> Block {
        let head = map(index, size_of::<Plan>(), PLAN_FD as usize);
        // SAFETY: the mapping holds at least one page; the keeper wrote a whole Plan at its start before it started us.
        let len = unsafe {
            let plan = &*(head as *const Plan);
            if plan.magic != MAGIC {
                exit(index, STAGE_PLAN, EINVAL);
            }
            plan.len as usize
        };
        let base = map(index, len, PLAN_FD as usize);
        // SAFETY: as above; the mapping stays until exec.
        Block { base, plan: unsafe { &*(base as *const Plan) } }
    }

    fn string(&self, offset: u32) -> *const u8 {
        self.base.wrapping_add(offset as usize)
    }

    fn rank(&self, index: u32) -> Rank {
        if index >= self.plan.ranks {
            exit(index, STAGE_PLAN, EINVAL);
        }
        // SAFETY: the keeper wrote `ranks` entries there, aligned to 8.
        unsafe { *(self.string(self.plan.rank_table) as *const Rank).add(index as usize) }
    }

    /// A NULL-ended array of pointers to the strings of several offset lists.
    fn pointers(&self, lists: &[(u32, u32)], index: u32) -> *const *const u8 {
        let count: usize = lists.iter().map(|l| l.0 as usize).sum();
        let array = map(index, (count + 1) * size_of::<usize>(), usize::MAX) as *mut *const u8;
        let mut at = array;
        for &(count, offsets) in lists {
            // SAFETY: the keeper wrote `count` offsets there, aligned to 4; the array has a place for each, and stays zero after.
            unsafe {
                for &offset in slice::from_raw_parts(self.string(offsets) as *const u32, count as usize) {
                    *at = self.string(offset);
                    at = at.add(1);
                }
            }
        }
        array
    }
}

/// Maps `len` bytes of a descriptor to read, or fresh zeroed memory.
fn map(index: u32, len: usize, fd: usize) -> *const u8 {
    let (prot, flags) = if fd == usize::MAX { (PROT_READ | PROT_WRITE, MAP_ANONYMOUS) } else { (PROT_READ, 0) };
    // SAFETY: a new mapping, at a place of the kernel's choice.
    match unsafe { syscall(nr::MMAP, [0, len, prot, flags | MAP_PRIVATE, fd, 0]) } {
        Ok(address) => address as *const u8,
        Err(errno) => exit(index, STAGE_PLAN, errno),
    }
}

/// # Safety
/// `text` must end with NUL.
unsafe fn decimal(mut text: *const u8) -> u32 {
    let mut value = 0u32;
    // SAFETY: stops at the NUL that the caller vouches for.
    unsafe {
        while (*text).is_ascii_digit() {
            value = value.wrapping_mul(10).wrapping_add(u32::from(*text - b'0'));
            text = text.add(1);
        }
    }
    value
}

fn report(rank: u32, stage: u32, errno: u32) {
    let failure = Failure { rank, stage, errno };
    // SAFETY: the record lives across the call.
    let _ = unsafe {
        syscall(nr::WRITE, [FAILURE_FD as usize, &raw const failure as usize, size_of::<Failure>(), 0, 0, 0])
    };
}

fn exit(rank: u32, stage: u32, errno: u32) -> ! {
    report(rank, stage, errno);
    loop {
        // SAFETY: an integer argument only.
        let _ = unsafe { syscall(nr::EXIT_GROUP, [125, 0, 0, 0, 0, 0]) };
    }
}
