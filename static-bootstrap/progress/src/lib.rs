//! Lets UCX go on while MPICH before 4.2 waits for PMI in `MPI_Finalize`. Preloaded into programs that are linked with both.
//!
//! There a rank whose connections are flushed waits in a PMI barrier, inside `read`, and its UCX answers nobody. Over TCP a flush is a
//! request that the other side's UCX has to answer: a rank that comes later waits for ever for one that came earlier. So who reads from
//! the agent after it began to close connections lets the workers go on by which it waited for its own flushes, until there
//! is something to read. Everything else is passed on to whom it is meant for.
//!
//! No libc of its own: `dlsym` and `poll` are the program's.
#![no_std]

use core::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use core::mem::transmute_copy;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed};

use sys::plan::MEMBER_FD;
use sys::syscall::{nr, syscall};

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, symbol: *const c_char) -> *mut c_void;
    fn poll(fds: *mut PollFd, count: c_ulong, milliseconds: c_int) -> c_int;
}

/// `struct pollfd`, `POLLIN`, `RTLD_NEXT`, `UCS_ERR_UNSUPPORTED`.
#[repr(C)]
struct PollFd {
    fd: c_int,
    events: i16,
    found: i16,
}
const POLLIN: i16 = 1;
const RTLD_NEXT: *mut c_void = usize::MAX as *mut c_void;
const UNSUPPORTED: isize = -22;

/// Workers of one process: MPICH has as many as it has virtual interfaces, 64 at most.
const WORKERS: usize = 64;
/// Between two rounds without work, in milliseconds: it doubles from one to the other.
const PAUSE: (c_int, c_int) = (1, 64);

/// The thread that closes connections; 0: none does.
static CLOSER: AtomicUsize = AtomicUsize::new(0);
/// By which it has waited since, from the first on.
static WAITED_BY: [AtomicPtr<c_void>; WORKERS] = [const { AtomicPtr::new(null_mut()) }; WORKERS];

type Read = unsafe extern "C" fn(c_int, *mut c_void, usize) -> isize;
type Progress = unsafe extern "C" fn(*mut c_void) -> c_uint;
type Disconnect = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type Destroy = unsafe extern "C" fn(*mut c_void);

static READ: Next = Next(c"read", AtomicPtr::new(null_mut()));
static PROGRESS: Next = Next(c"ucp_worker_progress", AtomicPtr::new(null_mut()));
static DISCONNECT: Next = Next(c"ucp_disconnect_nb", AtomicPtr::new(null_mut()));
static DESTROY: Next = Next(c"ucp_worker_destroy", AtomicPtr::new(null_mut()));

/// The function of this name that would be called were this object not here.
struct Next(&'static CStr, AtomicPtr<c_void>);

impl Next {
    /// # Safety
    /// `F` is the type of pointers to that function.
    unsafe fn get<F: Copy>(&self) -> Option<F> {
        let mut found = self.1.load(Relaxed);
        if found.is_null() {
            // SAFETY: a string with its end. Called from here, so that the search begins behind this object.
            found = unsafe { dlsym(RTLD_NEXT, self.0.as_ptr()) };
            self.1.store(found, Relaxed);
        }
        // SAFETY: the caller vouches for the type, which is as large as any pointer.
        (!found.is_null()).then(|| unsafe { transmute_copy(&found) })
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        // SAFETY: an integer argument only.
        let _ = unsafe { syscall(nr::EXIT_GROUP, [1, 0, 0, 0, 0, 0]) };
    }
}

fn thread() -> usize {
    // SAFETY: no arguments.
    unsafe { syscall(nr::GETTID, [0; 6]) }.unwrap_or(0)
}

/// # Safety
/// As UCX says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_disconnect_nb(endpoint: *mut c_void) -> *mut c_void {
    CLOSER.store(thread(), Relaxed);
    // SAFETY: its type.
    let Some(next) = (unsafe { DISCONNECT.get::<Disconnect>() }) else { return UNSUPPORTED as *mut c_void };
    // SAFETY: the caller vouches for it.
    unsafe { next(endpoint) }
}

/// # Safety
/// As UCX says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_progress(worker: *mut c_void) -> c_uint {
    let closer = CLOSER.load(Relaxed);
    if closer != 0 && closer == thread() {
        let place = WAITED_BY.iter().find(|place| [worker, null_mut()].contains(&place.load(Relaxed)));
        if let Some(place) = place {
            place.store(worker, Relaxed);
        }
    }
    // SAFETY: its type, and the caller vouches for the worker.
    unsafe { PROGRESS.get::<Progress>().map_or(0, |next| next(worker)) }
}

/// # Safety
/// As UCX says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ucp_worker_destroy(worker: *mut c_void) {
    CLOSER.store(0, Relaxed);
    WAITED_BY.iter().for_each(|place| place.store(null_mut(), Relaxed));
    // SAFETY: its type, and the caller vouches for the worker.
    unsafe { DESTROY.get::<Destroy>().map(|next| next(worker)) };
}

/// # Safety
/// As read(2) says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, length: usize) -> isize {
    let closer = CLOSER.load(Relaxed);
    if closer != 0 && fd == MEMBER_FD as c_int && closer == thread() {
        go_on_until_readable(fd);
    }
    // SAFETY: its type, and the caller vouches for the buffer.
    unsafe { READ.get::<Read>().map_or(-1, |next| next(fd, buffer, length)) }
}

fn go_on_until_readable(fd: c_int) {
    let mut asked = PollFd { fd, events: POLLIN, found: 0 };
    let mut pause = 0;
    // SAFETY: one descriptor, which outlives the call.
    while unsafe { poll(&raw mut asked, 1, pause) } <= 0 {
        // SAFETY: its type.
        let Some(progress) = (unsafe { PROGRESS.get::<Progress>() }) else { return };
        let workers = WAITED_BY.iter().map(|place| place.load(Relaxed)).take_while(|worker| !worker.is_null());
        // SAFETY: this thread has used them, and none has been destroyed since.
        let done: c_uint = workers.map(|worker| unsafe { progress(worker) }).sum();
        pause = if done > 0 { 0 } else { (pause * 2).clamp(PAUSE.0, PAUSE.1) };
    }
}
