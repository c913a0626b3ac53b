//! System calls of a statically linked program, which has no libc whose functions could be replaced: all that it makes come here ([`dispatch`]). So in the tier for
//! ordinary users it needs no filter either.

use core::arch::naked_asm;
use core::sync::atomic::{AtomicBool, Ordering};

use sys::syscall::{nr, syscall};

use super::dispatch::{self, NEXT, STACK, Stopped};
use super::{call, entry, filter, heirs, hooks, pager, signals, trap, window};

const ENOSYS: isize = 38;
const CLONE_VM: usize = 0x100;
const CLONE_VFORK: usize = 0x4000;
const SIGCHLD: usize = 17;

static OURS: AtomicBool = AtomicBool::new(false);

/// Whether they come here.
pub(super) fn are_ours() -> bool {
    OURS.load(Ordering::Relaxed)
}

/// From now on they do, but for those made from `passing` on up to the window. False: the kernel does not offer that.
pub(super) fn begin(passing: usize) -> bool {
    dispatch::RESTORE.store(trap::restore as *const () as usize, Ordering::Relaxed);
    OURS.store(true, Ordering::Relaxed);
    dispatch::prepare(passing..window::BASE, handle, |_| None);
    dispatch::begin()
}

fn handle(mut stopped: Stopped) {
    let (number, args) = (stopped.number(), stopped.arguments());
    if heirs::concerns(number) {
        pager::part();
    }
    let result = match number {
        nr::CLONE if args[1] != 0 => thread(&mut stopped, args),
        nr::CLONE => fork([args[0] & !(CLONE_VM | CLONE_VFORK), 0, args[2], args[3], args[4], 0]),
        // Who borrowed the stack would overwrite what we have on it.
        nr::FORK | nr::VFORK => fork([SIGCHLD, 0, 0, 0, 0, 0]),
        // Every libc tries the older one then.
        nr::CLONE3 => -ENOSYS,
        nr::RT_SIGACTION => trap::with_parts([args[1], args[2]], 32, || signals::set_action(args, |_| {}, |_| {})),
        nr::RT_SIGPROCMASK => trap::with_parts([args[1], args[2]], 8, || signals::set_mask(args)),
        _ => returned(signals::waiting(number, args, |args| other(number, args))),
    };
    stopped.answer(result);
}

/// As the kernel returns.
fn returned(result: Result<usize, u32>) -> isize {
    match result {
        Ok(value) => value.cast_signed(),
        Err(errno) => -(errno as isize),
    }
}

fn other(number: usize, args: [usize; 6]) -> Result<usize, u32> {
    let [first, second, third, fourth, fifth, _] = args;
    // SAFETY: the program's own call.
    let raw = || unsafe { call::gated(number, args) };
    match number {
        nr::MMAP => hooks::mmap(args),
        nr::MPROTECT => hooks::mprotect(first, second, third),
        nr::MUNMAP => hooks::munmap(first, second),
        nr::MREMAP => hooks::mremap(first, second, third, fourth, fifth),
        nr::MADVISE => hooks::madvise(first, second, third),
        nr::BRK => Ok(hooks::set_break(first)),
        nr::MLOCK | nr::MLOCK2 | nr::MLOCKALL => hooks::lock(number, args),
        nr::VMSPLICE => trap::splice(args),
        nr::SETSOCKOPT => trap::set_option(args),
        _ if filter::ASYNCHRONOUS.contains(&number) && trap::is_on() => Err(ENOSYS as u32),
        _ if trap::has_list(number) => trap::with_list(number, args),
        nr::RECVMSG | nr::SENDMSG => trap::with_message(number, args),
        nr::RECVMMSG | nr::SENDMMSG => trap::with_messages(number, args),
        nr::EXECVE => trap::with_strings(first, [second, third], raw),
        nr::EXECVEAT => trap::with_strings(second, [third, fourth], raw),
        // Ours would end.
        nr::PRCTL if first == dispatch::SET_DISPATCH => Err(call::EINVAL),
        _ => trap::make(number, args),
    }
}

fn fork(args: [usize; 6]) -> isize {
    let result = entry::enter_elsewhere(move || {
        // SAFETY: the program's own call, with its arguments; the child has a copy of this stack.
        pager::fork(move || unsafe { syscall(nr::CLONE, args) })
    });
    if result == Ok(0) {
        dispatch::begin_thread();
    }
    returned(result)
}

/// What a thread begins with, at the top of its stack.
#[repr(C, align(16))]
struct Beginning {
    registers: [usize; NEXT + 1],
    units: [u32; 2],
}

/// A thread, or a process with a stack of its own: goes on where the program is.
fn thread(stopped: &mut Stopped, [flags, stack, parent, child, tls, _]: [usize; 6]) -> isize {
    /// Below the stack, so far, is its owner's.
    const RED_ZONE: usize = 128;
    let (mut registers, units) = stopped.all();
    registers[STACK] = stack;
    let at = (stack - RED_ZONE - size_of::<Beginning>()) & !63;
    // SAFETY: the program gives this stack to somebody who has not begun.
    unsafe {
        (at as *mut Beginning).write(Beginning { registers, units });
        clone(flags, at, parent, child, tls)
    }
}

/// # Safety
/// `stack` is the address of a [`Beginning`], and nobody uses what is below.
#[unsafe(naked)]
unsafe extern "C" fn clone(flags: usize, stack: usize, parent: usize, child: usize, tls: usize) -> isize {
    naked_asm!(
        "mov r10, rcx",
        "mov eax, {clone}",
        "syscall",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2: call {begin}",
        "ldmxcsr [rsp + 136]",
        "fldcw [rsp + 140]",
        "mov r8, [rsp]",
        "mov r9, [rsp + 8]",
        "mov r10, [rsp + 16]",
        "mov r12, [rsp + 32]",
        "mov r13, [rsp + 40]",
        "mov r14, [rsp + 48]",
        "mov r15, [rsp + 56]",
        "mov rdi, [rsp + 64]",
        "mov rsi, [rsp + 72]",
        "mov rbp, [rsp + 80]",
        "mov rbx, [rsp + 88]",
        "mov rdx, [rsp + 96]",
        "mov rcx, [rsp + 128]",
        "mov rsp, [rsp + 120]",
        "xor eax, eax",
        "jmp rcx",
        clone = const nr::CLONE,
        begin = sym dispatch::begin_thread,
    )
}
