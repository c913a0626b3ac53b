//! A client of PMI-1 with its C interface, for MPI libraries that load one instead of speaking the protocol: Open MPI up to version 4
//! takes that of Flux from `$FLUX_PMI_LIBRARY_PATH`. It talks to the agent over the descriptor that every rank has.
//!
//! No libc, no allocator. One thread at a time may call it, as PMI-1 says.
#![no_std]
#![allow(non_snake_case, reason = "names of the C interface")]

use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_int};
use core::slice;
use core::sync::atomic::{AtomicI32, Ordering};

use sys::plan::MEMBER_FD;
use sys::socket::MSG_NOSIGNAL;
use sys::syscall::{nr, syscall};

const SUCCESS: c_int = 0;
const FAIL: c_int = -1;
const ERR_INVALID_ARG: c_int = 3;
const ERR_INVALID_LENGTH: c_int = 8;

const EINTR: u32 = 4;
const LINE_MAX: usize = 256 << 10;

/// `-1` before [`PMI_Init`].
static RANK: AtomicI32 = AtomicI32::new(-1);
static SIZE: AtomicI32 = AtomicI32::new(0);

struct Line(UnsafeCell<[u8; LINE_MAX]>);

// SAFETY: one thread at a time calls this library.
unsafe impl Sync for Line {}

static LINE: Line = Line(UnsafeCell::new([0; LINE_MAX]));

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(1)
}

fn exit(code: usize) -> ! {
    loop {
        // SAFETY: an integer argument only.
        let _ = unsafe { syscall(nr::EXIT_GROUP, [code, 0, 0, 0, 0, 0]) };
    }
}

/// Sends the parts as one line and returns the line that comes back, without its end.
fn ask(parts: &[&[u8]]) -> Option<&'static [u8]> {
    say(parts)?;
    // SAFETY: one thread at a time; what an earlier call returned is not used any more.
    let line = unsafe { &mut *LINE.0.get() };
    let mut len = 0;
    loop {
        let rest = line.get_mut(len..).filter(|rest| !rest.is_empty())?;
        // SAFETY: a buffer of this length, which lives across the call.
        let got = unsafe { syscall(nr::RECVFROM, [MEMBER_FD, rest.as_mut_ptr() as usize, rest.len(), 0, 0, 0]) };
        match got {
            Err(EINTR) => continue,
            Err(_) | Ok(0) => return None,
            Ok(got) => len += got,
        }
        // One reply comes to one request.
        if line[len - 1] == b'\n' {
            return Some(&line[..len - 1]);
        }
    }
}

fn say(parts: &[&[u8]]) -> Option<()> {
    for part in parts {
        let mut rest = *part;
        while !rest.is_empty() {
            let to = [MEMBER_FD, rest.as_ptr() as usize, rest.len(), MSG_NOSIGNAL, 0, 0];
            // SAFETY: a buffer of this length, which lives across the call.
            match unsafe { syscall(nr::SENDTO, to) } {
                Err(EINTR) => {}
                Err(_) => return None,
                Ok(sent) => rest = &rest[sent..],
            }
        }
    }
    Some(())
}

/// What follows ` NAME=` in a reply whose `rc` is 0: to the next blank, or to the end of the line.
fn field<'a>(reply: &'a [u8], name: &[u8], whole: bool) -> Option<&'a [u8]> {
    let after = |name: &[u8]| {
        let at = reply.windows(name.len()).position(|window| window == name)?;
        reply.get(at + name.len()..)
    };
    if after(b" rc=")?.first() != Some(&b'0') {
        return None;
    }
    let value = after(name)?;
    let end = value.iter().position(|byte| *byte == b' ').filter(|_| !whole).unwrap_or(value.len());
    value.get(..end)
}

fn decimal(text: &[u8]) -> c_int {
    text.iter()
        .take_while(|b| b.is_ascii_digit())
        .fold(0, |n: c_int, b| n.wrapping_mul(10).wrapping_add(c_int::from(b - b'0')))
}

/// Stores a number where the caller wants it.
///
/// # Safety
/// `to` is null or a place for a number.
unsafe fn store(to: *mut c_int, value: Option<c_int>) -> c_int {
    let Some(value) = value else { return FAIL };
    if to.is_null() {
        return ERR_INVALID_ARG;
    }
    // SAFETY: see above.
    unsafe { to.write(value) };
    SUCCESS
}

/// Stores a string with its end.
///
/// # Safety
/// `to` is null or a place for `len` bytes.
unsafe fn store_text(to: *mut c_char, len: c_int, value: Option<&[u8]>) -> c_int {
    let Some(value) = value else { return FAIL };
    if to.is_null() || value.len() >= usize::try_from(len).unwrap_or(0) {
        return ERR_INVALID_LENGTH;
    }
    // SAFETY: see above; it is longer than the string.
    unsafe {
        slice::from_raw_parts_mut(to.cast::<u8>(), value.len()).copy_from_slice(value);
        to.add(value.len()).write(0);
    }
    SUCCESS
}

/// Bytes of a caller's string.
///
/// # Safety
/// `text` is null or ends with NUL.
unsafe fn text<'a>(text: *const c_char) -> &'a [u8] {
    // SAFETY: see above.
    if text.is_null() { b"" } else { unsafe { CStr::from_ptr(text) }.to_bytes() }
}

/// "RANK,SIZE,LOCAL RANK,...": a key of the agent's for us alone.
fn myself() -> Option<&'static [u8]> {
    field(ask(&[b"cmd=get kvsname=hpcrt key=hpcrt_self\n"])?, b" value=", true)
}

fn maximum(name: &[u8]) -> Option<c_int> {
    Some(decimal(field(ask(&[b"cmd=get_maxes\n"])?, name, false)?))
}

/// # Safety
/// `spawned` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Init(spawned: *mut c_int) -> c_int {
    let init = || {
        field(ask(&[b"cmd=init pmi_version=1 pmi_subversion=1\n"])?, b" pmi_version=", false)?;
        let mut numbers = myself()?.split(|b| *b == b',').map(decimal);
        RANK.store(numbers.next()?, Ordering::Relaxed);
        SIZE.store(numbers.next()?, Ordering::Relaxed);
        Some(0)
    };
    // SAFETY: the caller vouches for it.
    unsafe { store(spawned, init()) }
}

/// # Safety
/// `initialized` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Initialized(initialized: *mut c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { store(initialized, Some(c_int::from(RANK.load(Ordering::Relaxed) >= 0))) }
}

#[unsafe(no_mangle)]
pub extern "C" fn PMI_Finalize() -> c_int {
    RANK.store(-1, Ordering::Relaxed);
    if ask(&[b"cmd=finalize\n"]).is_some() { SUCCESS } else { FAIL }
}

/// # Safety
/// `size` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Get_size(size: *mut c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { store(size, Some(SIZE.load(Ordering::Relaxed))) }
}

/// # Safety
/// `rank` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Get_rank(rank: *mut c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { store(rank, Some(RANK.load(Ordering::Relaxed))) }
}

/// # Safety
/// `size` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Get_universe_size(size: *mut c_int) -> c_int {
    let get = || Some(decimal(field(ask(&[b"cmd=get_universe_size\n"])?, b" size=", false)?));
    // SAFETY: the caller vouches for it.
    unsafe { store(size, get()) }
}

/// # Safety
/// `number` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Get_appnum(number: *mut c_int) -> c_int {
    let get = || Some(decimal(field(ask(&[b"cmd=get_appnum\n"])?, b" appnum=", false)?));
    // SAFETY: the caller vouches for it.
    unsafe { store(number, get()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn PMI_Barrier() -> c_int {
    let done = ask(&[b"cmd=barrier_in\n"]).and_then(|reply| field(reply, b" rc=", false));
    if done.is_some() { SUCCESS } else { FAIL }
}

/// # Safety
/// `message` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Abort(code: c_int, message: *const c_char) -> c_int {
    let mut digits = [0u8; 10];
    let (mut rest, mut at) = (code.unsigned_abs(), digits.len());
    while at == digits.len() || rest > 0 {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let sign: &[u8] = if code < 0 { b"-" } else { b"" };
    // SAFETY: the caller vouches for it.
    let message = unsafe { text(message) };
    let message = message.split(|b| *b == b'\n').next().unwrap_or_default();
    let _ = say(&[b"cmd=abort exitcode=", sign, &digits[at..], b" message=", message, b"\n"]);
    exit((code & 0xff) as usize)
}

/// # Safety
/// `name` is null or a place for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_KVS_Get_my_name(name: *mut c_char, length: c_int) -> c_int {
    let get = || field(ask(&[b"cmd=get_my_kvsname\n"])?, b" kvsname=", false);
    // SAFETY: the caller vouches for it.
    unsafe { store_text(name, length, get()) }
}

/// # Safety
/// `length` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_KVS_Get_name_length_max(length: *mut c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { store(length, maximum(b" kvsname_max=")) }
}

/// # Safety
/// `length` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_KVS_Get_key_length_max(length: *mut c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { store(length, maximum(b" keylen_max=")) }
}

/// # Safety
/// `length` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_KVS_Get_value_length_max(length: *mut c_int) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { store(length, maximum(b" vallen_max=")) }
}

/// # Safety
/// The arguments are null or strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_KVS_Put(space: *const c_char, key: *const c_char, value: *const c_char) -> c_int {
    // SAFETY: the caller vouches for them.
    let (space, key, value) = unsafe { (text(space), text(key), text(value)) };
    let put = || field(ask(&[b"cmd=put kvsname=", space, b" key=", key, b" value=", value, b"\n"])?, b" rc=", false);
    if put().is_some() { SUCCESS } else { FAIL }
}

/// # Safety
/// None: the argument is not looked at. What was put is there with the next barrier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_KVS_Commit(_space: *const c_char) -> c_int {
    SUCCESS
}

/// # Safety
/// `space` and `key` are null or strings, `value` is null or a place for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_KVS_Get(
    space: *const c_char,
    key: *const c_char,
    value: *mut c_char,
    length: c_int,
) -> c_int {
    // SAFETY: the caller vouches for them.
    let (space, key) = unsafe { (text(space), text(key)) };
    let get = || field(ask(&[b"cmd=get kvsname=", space, b" key=", key, b"\n"])?, b" value=", true);
    // SAFETY: the caller vouches for it.
    unsafe { store_text(value, length, get()) }
}

/// # Safety
/// `size` is null or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Get_clique_size(size: *mut c_int) -> c_int {
    let count = || c_int::try_from(myself()?.split(|b| *b == b',').skip(2).count()).ok();
    // SAFETY: the caller vouches for it.
    unsafe { store(size, count()) }
}

/// # Safety
/// `ranks` is null or a place for `length` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PMI_Get_clique_ranks(ranks: *mut c_int, length: c_int) -> c_int {
    let Some(list) = myself() else { return FAIL };
    let local = || list.split(|b| *b == b',').skip(2).map(decimal);
    if ranks.is_null() || local().count() > usize::try_from(length).unwrap_or(0) {
        return ERR_INVALID_LENGTH;
    }
    for (at, rank) in local().enumerate() {
        // SAFETY: the caller vouches for as many places.
        unsafe { ranks.add(at).write(rank) };
    }
    SUCCESS
}
