//! The bootstrapper: becomes the application. Maps the node's launch plan, applies what belongs to this rank and execs the program.
//!
//! Started by the keeper as `boot INDEX LENGTH` with the plan, so many bytes, at [`PLAN_FD`]; standard streams and process group are in
//! place. It must be tiny and quick: it runs once per rank, before the program.
#![no_std]
#![no_main]

use core::arch::naked_asm;
use core::sync::atomic::Ordering;

use sys::plan::{NOT_STARTED, PLAN_FD};
use sys::rank::Block;
use sys::syscall::{nr, syscall};

const PROT_READ_WRITE: usize = 3;
const MAP_PRIVATE_ANONYMOUS: usize = 0x22;

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
    exit()
}

/// `stack` is what the kernel left: argc, then the argv pointers (System V ABI, process initialisation).
extern "C" fn main(stack: *const usize) -> ! {
    // SAFETY: the kernel put argc and argc pointers to NUL-ended strings there, which are read only when argc says that they exist.
    unsafe {
        if *stack == 3 {
            let _ = start(decimal(*stack.add(2) as *const u8), decimal(*stack.add(3) as *const u8) as usize);
        }
    }
    exit()
}

/// Comes back only when something failed. Until the rank's failures say otherwise, the keeper takes it that we did not get there.
fn start(index: u32, len: usize) -> Result<(), u32> {
    const NO_SUCH_RANK: u32 = 0;
    // SAFETY: the keeper gives us a plan there, and its length.
    let block = unsafe { Block::map(PLAN_FD, len) }?;
    let rank = block.rank(index).ok_or(NO_SUCH_RANK)?;
    let room = block.pointers(rank) * size_of::<*const u8>();
    // SAFETY: integers; then a new mapping, which nobody else uses, of the size that is asked for; it is aligned to a page.
    unsafe {
        syscall(nr::CLOSE, [PLAN_FD, 0, 0, 0, 0, 0])?;
        let room = syscall(nr::MMAP, [0, room, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, usize::MAX, 0])?;
        rank.failures.boot.store(0, Ordering::Release);
        block.become_program(rank, room as *mut *const u8);
    }
    Ok(())
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

fn exit() -> ! {
    loop {
        // SAFETY: an integer argument only.
        let _ = unsafe { syscall(nr::EXIT_GROUP, [NOT_STARTED as usize, 0, 0, 0, 0, 0]) };
    }
}
