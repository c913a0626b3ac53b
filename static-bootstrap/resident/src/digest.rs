//! The key of digests ([`sys::digest`]) of this program: also its children's, who begin with what is known of its pages.

use sys::digest::Key;
use sys::syscall::{nr, syscall};

use super::lock::Lock;

static KEY: Lock<Key> = Lock::new(Key::NONE);

/// Draws it.
pub(super) fn draw() -> Result<(), u32> {
    /// No signal interrupts the drawing of so many bytes.
    const UNINTERRUPTED: usize = 256;
    let mut key = KEY.lock();
    let start = &raw mut *key as usize;
    (0..size_of::<Key>()).step_by(UNINTERRUPTED).try_for_each(|at| {
        let len = UNINTERRUPTED.min(size_of::<Key>() - at);
        // SAFETY: a part of the key, whose bytes may be any.
        unsafe { syscall(nr::GETRANDOM, [start + at, len, 0, 0, 0, 0]) }.map(drop)
    })
}

pub(super) fn key() -> Key {
    *KEY.lock()
}
