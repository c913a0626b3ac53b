//! A board: memory that an agent shares with those members of a job on its node that want to. Each has a slot for its request and the reply,
//! so that what all of them ask and are told together costs one wake-up of the agent and one system call for all.
#![allow(unsafe_code, reason = "a mapping that several processes write to")]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;

/// Bytes in one request or reply, at most; `sdk/libi.c` has the same layout.
pub const ROOM: usize = 496;

#[repr(C)]
struct Head {
    /// Grows with every ring; members wait for that.
    bell: AtomicU32,
    /// Members whose call is not answered, whether it stands here or was said on the socket.
    calling: AtomicU32,
    /// Members that have a slot. Who makes `calling` this tells the agent to look.
    members: AtomicU32,
    rest: [u32; 125],
}

#[repr(C)]
struct Slot {
    /// Requests, and replies to them, so far.
    asked: AtomicU32,
    answered: AtomicU32,
    /// Bytes of the one or the other; 0: the reply is said on the socket.
    length: AtomicU32,
    rest: u32,
    bytes: [AtomicU64; ROOM / 8],
}

/// See the module. Members may write anything at any time: what is read is copied, and bounded.
#[derive(Debug)]
pub struct Board {
    memory: OwnedFd,
    at: NonNull<u8>,
    slots: usize,
}

impl Board {
    /// With so many slots.
    ///
    /// # Errors
    /// The kernel refuses files in memory, or memory is short.
    pub fn new(slots: usize) -> io::Result<Board> {
        let memory = rustix::fs::memfd_create("hpcrt-board", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let bytes = length(slots);
        rustix::fs::ftruncate(&memory, bytes as u64)?;
        // Who maps it relies on its length.
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice; only atomics are made of it.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &memory, 0)? };
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Board { memory, at, slots })
    }

    /// What members map.
    pub fn memory(&self) -> impl AsFd + '_ {
        &self.memory
    }

    fn head(&self) -> &Head {
        // SAFETY: the mapping begins with it, is aligned to a page, and holds nothing but atomics.
        unsafe { self.at.cast().as_ref() }
    }

    fn slot(&self, member: usize) -> &Slot {
        assert!(member < self.slots, "a slot of this board");
        // SAFETY: the mapping is this long (`new`), aligned, and holds nothing but atomics.
        unsafe { self.at.add(size_of::<Head>() + member * size_of::<Slot>()).cast().as_ref() }
    }

    /// So many members have slots.
    pub fn set_members(&self, members: u32) {
        self.head().members.store(members, Ordering::SeqCst);
    }

    /// A member has called on its socket; true: now all have called.
    pub fn add_call(&self) -> bool {
        let head = self.head();
        head.calling.fetch_add(1, Ordering::SeqCst) + 1 >= head.members.load(Ordering::SeqCst)
    }

    /// So many members are about to be answered. Returns how many are calling still.
    pub fn remove_calls(&self, answered: u32) -> u32 {
        self.head().calling.fetch_sub(answered, Ordering::SeqCst).wrapping_sub(answered)
    }

    /// What a member asks, if that is not answered yet.
    pub fn request(&self, member: usize) -> Option<Vec<u8>> {
        let slot = self.slot(member);
        if slot.asked.load(Ordering::SeqCst) == slot.answered.load(Ordering::Relaxed) {
            return None;
        }
        let length = (slot.length.load(Ordering::Relaxed) as usize).min(ROOM);
        let words = slot.bytes[..length.div_ceil(8)].iter();
        let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        bytes.truncate(length);
        Some(bytes)
    }

    /// Answers a member's request; false: the reply is too long, and is to be said on the socket. [`Board::ring`] must follow.
    pub fn answer(&self, member: usize, reply: &[u8]) -> bool {
        let slot = self.slot(member);
        let fits = reply.len() <= ROOM;
        if fits {
            for (word, bytes) in slot.bytes.iter().zip(reply.chunks(8)) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
            }
        }
        let length = if fits { u32::try_from(reply.len()).unwrap_or(0) } else { 0 };
        slot.length.store(length, Ordering::Relaxed);
        slot.answered.fetch_add(1, Ordering::SeqCst);
        fits
    }

    /// Wakes the members that wait.
    pub fn ring(&self) {
        let bell = &self.head().bell;
        bell.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(bell, futex::Flags::empty(), i32::MAX as u32);
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nobody has a reference into it any more.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), length(self.slots)) };
    }
}

fn length(slots: usize) -> usize {
    size_of::<Head>() + slots * size_of::<Slot>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_answered_once() {
        let board = Board::new(3).unwrap();
        board.set_members(2);
        let slot = board.slot(2);
        assert_eq!(board.request(2), None);
        slot.bytes[0].store(u64::from_ne_bytes(*b"barrier "), Ordering::Relaxed);
        slot.length.store(7, Ordering::Relaxed);
        slot.asked.store(1, Ordering::SeqCst);
        assert!(!board.add_call() && board.add_call());
        assert_eq!(board.request(2).as_deref(), Some(&b"barrier"[..]));
        assert_eq!(board.remove_calls(2), 0);
        assert!(board.answer(2, b"ok 1\n5\nabcde"));
        assert_eq!((board.request(2), slot.length.load(Ordering::Relaxed)), (None, 12));
        slot.asked.store(2, Ordering::SeqCst);
        // A length that nobody could mean.
        slot.length.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(board.request(2).map(|bytes| bytes.len()), Some(ROOM));
        assert!(!board.answer(2, &[0; ROOM + 1]));
        assert_eq!(slot.length.load(Ordering::Relaxed), 0);
        board.ring();
        assert_eq!(length(1024), 512 + 1024 * 512);
    }
}
