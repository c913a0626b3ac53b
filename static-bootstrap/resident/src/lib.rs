//! The resident: the one piece of code inside a program that uses memory of other nodes. Preloaded; no libc, no allocator, no thread-local
//! storage; own threads with own stacks and descriptors, and raw system calls.
//!
//! Services that features share: address space that can be told from all other ([`window`]), static arrays ([`segments`]), what libc is asked for ([`hooks`], put there by
//! [`patch`]; in a program without one, [`calls`]), system calls on memory that is not here ([`trap`]), threads ([`thread`]), the agent's [`door`]. The pager
//! stands on them ([`pager`]); it begins when the program has asked for more than it may keep here, and until then nothing differs.
//!
//! Hazards. Nothing in here may touch the window except where a fault is wanted: who answers faults would wait for himself. No lock may be held by a
//! thread of the program that can still take a signal. No panic: it would end the program, which is what [`fatal`] does with words.
#![no_std]
#![cfg(target_arch = "x86_64")]

#[allow(dead_code, reason = "of the file layer")]
mod call;
mod calls;
mod counts;
mod digest;
#[allow(dead_code, reason = "of the file layer")]
mod dispatch;
mod door;
mod early;
mod entry;
mod fatal;
mod filter;
mod fork;
mod freed;
mod heirs;
mod holds;
mod hooks;
mod lenders;
mod link;
mod linker;
mod lock;
#[allow(dead_code, reason = "of the file layer")]
mod objects;
mod pager;
mod patch;
mod pins;
mod preload;
mod processors;
mod segments;
mod settings;
mod signals;
mod start;
mod table;
mod thread;
mod trap;
mod uffd;
mod window;
mod wishes;

use sys::resident::{cause, step};

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    fatal::end()
}

/// Called by the dynamic linker before any other code of the program.
extern "C" fn begin() {
    if settings::get().place[0] == 0 || !hooks::are_known() {
        return;
    }
    if let Err(errno) = window::reserve(None) {
        fatal::say(cause::KERNEL, 0, [step::WINDOW, errno.into()]);
    }
    trap::inherit();
    if let Err(errno) = hooks::install() {
        fatal::say(cause::KERNEL, 0, [step::PATCH, errno.into()]);
    }
    segments::take();
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;
