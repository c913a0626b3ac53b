//! One span of memory, mapped by itself: pages that were never written cost nothing, and can be given back one by one.
#![allow(unsafe_code, reason = "anonymous mappings")]

use std::io;
use std::ptr::NonNull;

use nix::libc;

use super::page::{Bits, PAGE, SPAN, runs};

/// See the module. Zero at first.
#[derive(Debug)]
pub struct Span(NonNull<u8>);

// SAFETY: memory of its own, reached through the usual rules of `&` and `&mut` only.
unsafe impl Send for Span {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for Span {}

impl Span {
    /// Maps one.
    ///
    /// # Errors
    /// `mmap(2)`'s.
    pub fn new() -> io::Result<Span> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at a place of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), SPAN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast()).map(Span).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is this long, readable, and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), SPAN) }
    }

    /// Its bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and writable; `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), SPAN) }
    }

    /// Gives these pages back: they cost nothing and are zero.
    pub fn forget(&mut self, pages: Bits) {
        for (first, count) in runs(pages) {
            // SAFETY: pages of this mapping, which is borrowed alone.
            unsafe { libc::madvise(self.0.as_ptr().add(first * PAGE).cast(), count * PAGE, libc::MADV_DONTNEED) };
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nobody has a reference into it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SPAN) };
    }
}
