//! Alone at what is kept. A program with one thread is, but for its signal handlers (see [`super`]). In one with several a lock is held, and a signal
//! that comes meanwhile is put off until it is free again: no handler runs in between, and none abandons what is half done, as the one that cancels a
//! thread does. That costs nothing where no signal comes: [`handler`] stands in front of every handler of the program.

use core::arch::naked_asm;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::kernel::{ALL, block_signals, failed, nr, raw, restore_signals, thread, wait, wake_one};

/// There may be threads.
#[unsafe(link_section = ".data.hot")]
pub(super) static SEVERAL: AtomicBool = AtomicBool::new(false);
/// Which thread is inside, and in the lowest bits [`WANTED`] and [`PUT_OFF`]; 0: none.
#[unsafe(link_section = ".data.hot")]
pub(super) static HOLDER: AtomicU64 = AtomicU64::new(0);
const WANTED: u64 = 1;
const PUT_OFF: u64 = 2;
/// Threads' own blocks are aligned to more.
const FLAGS: u64 = 15;
/// Looks before a thread sleeps.
const LOOKS: u32 = 200;

/// The signals that were blocked before some were put off.
static BLOCKED: AtomicU64 = AtomicU64::new(0);
/// The program's handlers, by signal; and a bit for each that it did not ask a `siginfo_t` for.
static HANDLERS: [AtomicU64; 65] = [const { AtomicU64::new(0) }; 65];
static PLAIN: AtomicU64 = AtomicU64::new(0);
const SIGINFO: u64 = 4;
/// SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV: they cannot wait.
const FAULTS: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10;
/// Word of a signal's frame (`asm/ucontext.h`) that has the signals blocked before.
const MASK: usize = 296 / 8;

/// From now on there may be threads.
pub(super) fn several() {
    SEVERAL.store(true, Ordering::SeqCst);
}

/// Whether there may be.
#[inline]
pub(super) fn is_several() -> bool {
    SEVERAL.load(Ordering::Relaxed)
}

/// A child has one thread, which holds what its parent's held.
pub(super) fn single() {
    SEVERAL.store(false, Ordering::Relaxed);
}

/// Alone, as long as this is there.
pub(super) struct Inside(bool);

impl Inside {
    #[inline]
    pub(super) fn enter() -> Inside {
        if !is_several() {
            return Inside(false);
        }
        let own = thread() as u64;
        Inside(HOLDER.compare_exchange(0, own, Ordering::Acquire, Ordering::Relaxed).is_ok() || enter_late(own))
    }

    /// Stays alone beyond this value's life; whether [`leave`] has to be called.
    pub(super) fn stay(self) -> bool {
        let held = self.0;
        core::mem::forget(self);
        held
    }
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        if self.0 {
            leave();
        }
    }
}

/// Waits for the lock; false: this thread has it, and the handler of a fault came in between.
#[cold]
fn enter_late(own: u64) -> bool {
    let mut looks = 0;
    loop {
        let held = HOLDER.load(Ordering::Relaxed);
        let is = |new: u64| HOLDER.compare_exchange(held, new, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if held & !FLAGS == own {
            return false;
        }
        // Others may sleep, too, once this one has.
        let wanted = if looks < LOOKS { 0 } else { WANTED };
        if held == 0 {
            if is(own | wanted) {
                return true;
            }
        } else if looks < LOOKS {
            looks += 1;
            core::hint::spin_loop();
        } else if held & WANTED != 0 || is(held | WANTED) {
            wait(word(), (held | WANTED) as u32);
        }
    }
}

/// The half of [`HOLDER`] that a thread can wait on.
fn word() -> &'static AtomicU32 {
    // SAFETY: the first half in memory, which lives as long, and is changed as a whole only.
    unsafe { AtomicU32::from_ptr(HOLDER.as_ptr().cast()) }
}

/// Lets others in, and signals that were put off come.
#[inline]
pub(super) fn leave() {
    loop {
        let held = HOLDER.load(Ordering::Relaxed);
        let blocked = BLOCKED.load(Ordering::Relaxed);
        if HOLDER.compare_exchange(held, 0, Ordering::Release, Ordering::Relaxed).is_ok() {
            if held & FLAGS != 0 {
                left(held, blocked);
            }
            return;
        }
    }
}

#[cold]
fn left(held: u64, blocked: u64) {
    if held & WANTED != 0 {
        wake_one(word());
    }
    if held & PUT_OFF != 0 {
        restore_signals(blocked);
    }
}

/// Has the kernel call [`handler`] in place of the program's handler: `action` is a `struct sigaction` as the kernel takes it. A signal that is put
/// off is given back with its information, which the kernel leaves out unless it is asked for.
pub(super) fn stand_before(signal: usize, action: &mut [u64; 4]) {
    const DEFAULT_IGNORE: u64 = 1;
    if action[0] > DEFAULT_IGNORE && action[0] != own() {
        HANDLERS[signal % 65].store(action[0], Ordering::Relaxed);
        let bit = 1 << (signal % 65).saturating_sub(1);
        _ = if action[1] & SIGINFO == 0 {
            PLAIN.fetch_or(bit, Ordering::Relaxed)
        } else {
            PLAIN.fetch_and(!bit, Ordering::Relaxed)
        };
        action[0] = own();
        action[1] |= SIGINFO;
    }
}

/// What the program thinks its handler is, and the flag that was set for ours.
pub(super) fn behind(signal: usize) -> (u64, u64) {
    let plain = PLAIN.load(Ordering::Relaxed) >> (signal % 65).saturating_sub(1) & 1;
    (HANDLERS[signal % 65].load(Ordering::Relaxed), plain * SIGINFO)
}

/// Address of [`handler`].
pub(super) fn own() -> u64 {
    handler as *const () as u64
}

/// In front of the program's handlers, which find the stack and their arguments as if it were not there.
#[unsafe(naked)]
extern "C" fn handler(signal: i32, info: *const i32, frame: *mut u64) {
    naked_asm!(
        "mov rax, fs:[0]",
        "mov rcx, [rip + {holder}]",
        "and rcx, {threads}",
        "cmp rax, rcx",
        "jne 2f",
        "push rdi",
        "push rsi",
        "push rdx",
        "call {put_off}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jz 2f",
        "ret",
        "2: lea rcx, [rip + {handlers}]",
        "xor eax, eax",
        "jmp qword ptr [rcx + rdi * 8]",
        holder = sym HOLDER,
        threads = const !FLAGS as i64,
        put_off = sym put_off,
        handlers = sym HANDLERS,
    )
}

/// A signal whose handler the kernel has taken away since it was to be called once (SA_RESETHAND): that was not yet.
///
/// # Safety
/// All signals are blocked.
unsafe fn again(signal: usize) {
    const ONCE: u64 = 0x8000_0000;
    let mut action = [0u64; 4];
    // SAFETY: a `struct sigaction` as the kernel takes it, which it wrote.
    unsafe {
        let known = raw(nr::RT_SIGACTION, [signal, 0, action.as_mut_ptr() as usize, 8, 0, 0]);
        if !failed(known) && action[0] == 0 && action[1] & ONCE != 0 {
            action[0] = own();
            let _ = raw(nr::RT_SIGACTION, [signal, action.as_ptr() as usize, 0, 8, 0, 0]);
        }
    }
}

/// This thread is inside: the signal comes again when it no longer is, and no other comes before. False: it cannot wait.
extern "C" fn put_off(signal: usize, info: *const i32, frame: *mut u64) -> bool {
    if FAULTS >> (signal - 1) & 1 != 0 {
        return false;
    }
    // Until the frame's are restored.
    block_signals();
    // SAFETY: the kernel's own information, given back; and its frame, which is ours to change. One that came in between was put off before, and
    // what was blocked when the first came counts.
    unsafe {
        let (process, thread) = (raw(nr::GETPID, [0; 6]) as usize, raw(nr::GETTID, [0; 6]) as usize);
        again(signal);
        if failed(raw(nr::RT_TGSIGQUEUEINFO, [process, thread, signal, info as usize, 0, 0])) {
            return false;
        }
        BLOCKED.store(*frame.add(MASK), Ordering::Relaxed);
        *frame.add(MASK) |= ALL;
    }
    HOLDER.fetch_or(PUT_OFF, Ordering::Relaxed);
    true
}
