//! A lock and an event on futexes.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use sys::syscall::{nr, syscall};

const WAIT_PRIVATE: usize = 128;
const WAKE_PRIVATE: usize = 129;
const FREE: u32 = 0;
const HELD: u32 = 1;
const WANTED: u32 = 2;

fn wait(word: &AtomicU32, value: u32, time: usize) {
    // SAFETY: a live word, and a time or none.
    let _ = unsafe { syscall(nr::FUTEX, [word.as_ptr() as usize, WAIT_PRIVATE, value as usize, time, 0, 0]) };
}

fn wake(word: &AtomicU32, count: usize) {
    // SAFETY: a live word.
    let _ = unsafe { syscall(nr::FUTEX, [word.as_ptr() as usize, WAKE_PRIVATE, count, 0, 0, 0]) };
}

/// See the module.
pub(super) struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by who holds the lock only.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub(super) const fn new(value: T) -> Lock<T> {
        Lock { word: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Free, in a child whose parent's thread held it.
    pub(super) fn reset(&self) {
        self.word.store(FREE, Ordering::Release);
    }

    pub(super) fn lock(&self) -> Guard<'_, T> {
        if self.word.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_err() {
            while self.word.swap(WANTED, Ordering::Acquire) != FREE {
                wait(&self.word, WANTED, 0);
            }
        }
        Guard(self)
    }
}

pub(super) struct Guard<'a, T>(&'a Lock<T>);

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.0.word.swap(FREE, Ordering::Release) == WANTED {
            wake(&self.0.word, 1);
        }
    }
}

/// Something happened; and how many wait for it.
pub(super) struct Event(AtomicU32, AtomicU32);

impl Event {
    pub(super) const fn new() -> Event {
        Event(AtomicU32::new(0), AtomicU32::new(0))
    }

    /// To be taken before what one waits for is looked at.
    pub(super) fn now(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn tell(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        if self.1.load(Ordering::SeqCst) > 0 {
            wake(&self.0, i32::MAX as usize);
        }
    }

    /// Waits until something has happened since `seen`, or for so long.
    pub(super) fn wait(&self, seen: u32, milliseconds: u64) {
        let time = [milliseconds / 1000, milliseconds % 1000 * 1_000_000];
        self.1.fetch_add(1, Ordering::SeqCst);
        wait(&self.0, seen, &raw const time as usize);
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}
