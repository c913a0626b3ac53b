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

/// Bytes in one request or reply, at most. `sdk/libi.c` has the same layout and is compiled with programs: another layout is asked for by another
/// verb than `board1`, which is then unknown.
pub const ROOM: usize = 496;

#[repr(C)]
struct Head {
    /// Grows with every ring; members wait for that.
    bell: AtomicU32,
    /// Members whose call is not answered, whether it stands here or was said on the socket.
    calling: AtomicU32,
    /// Members that have a slot. Who makes `calling` this tells the agent to look.
    members: AtomicU32,
    /// Not 0: who calls for what rank 0 gives does not, as it is not there yet.
    patient: AtomicU32,
    rest: [u32; 124],
}

/// A member may ask once more before it is answered, if it does not wait for that answer.
#[repr(C)]
struct Slot {
    /// Replies so far; above them, [`ASKED`] each, requests so far.
    turns: AtomicU64,
    rest: u64,
    /// Of every other request, and of the reply to it.
    cells: [Cell; 2],
}

#[repr(C)]
struct Cell {
    /// Bytes of the one or the other; 0: the reply is said on the socket.
    length: AtomicU32,
    rest: u32,
    bytes: [AtomicU64; ROOM / 8],
}

/// One request in [`Slot::turns`].
const ASKED: u64 = 1 << 32;

/// What answering a member has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answered {
    /// The reply stands on the board, else it is to be said on the socket.
    pub fits: bool,
    /// The member has asked again already, and waits for that answer only.
    pub asks: bool,
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

    /// Whether the agent looks by itself when what rank 0 gives is there. Once it is not patient any more, it must look after that.
    pub fn set_patient(&self, patient: bool) {
        self.head().patient.store(patient.into(), Ordering::SeqCst);
    }

    /// A member's call counts that was not counted; true: now all have called.
    pub fn add_call(&self) -> bool {
        let head = self.head();
        head.calling.fetch_add(1, Ordering::SeqCst) + 1 >= head.members.load(Ordering::SeqCst)
    }

    /// So many members are about to be answered. Returns how many are calling still.
    pub fn remove_calls(&self, answered: u32) -> u32 {
        self.head().calling.fetch_sub(answered, Ordering::SeqCst).wrapping_sub(answered)
    }

    /// Requests of a member that are not answered: one at most that it waits for.
    pub fn unanswered(&self, member: usize) -> u32 {
        let turns = self.slot(member).turns.load(Ordering::SeqCst);
        ((turns / ASKED) as u32).wrapping_sub(turns as u32)
    }

    /// What a member asks, if that is not answered yet.
    pub fn request(&self, member: usize) -> Option<Vec<u8>> {
        // More than two nobody asks who keeps to the rules.
        if !(1..=2).contains(&self.unanswered(member)) {
            return None;
        }
        let cell = self.cell(member);
        let length = (cell.length.load(Ordering::Relaxed) as usize).min(ROOM);
        let words = cell.bytes[..length.div_ceil(8)].iter();
        let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        bytes.truncate(length);
        Some(bytes)
    }

    /// Answers a member's request. [`Board::ring`] must follow, unless all that were answered ask again.
    pub fn answer(&self, member: usize, reply: &[u8]) -> Answered {
        let cell = self.cell(member);
        let fits = reply.len() <= ROOM;
        if fits {
            for (word, bytes) in cell.bytes.iter().zip(reply.chunks(8)) {
                let mut whole = [0; 8];
                whole[..bytes.len()].copy_from_slice(bytes);
                word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
            }
        }
        let length = if fits { u32::try_from(reply.len()).unwrap_or(0) } else { 0 };
        cell.length.store(length, Ordering::Relaxed);
        let turns = &self.slot(member).turns;
        // Replies must not be carried over into the requests.
        let next = |turns: u64| (turns & !(ASKED - 1)) | u64::from((turns as u32).wrapping_add(1));
        let before = turns.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |turns| Some(next(turns)));
        let after = next(before.unwrap_or_else(|turns| turns));
        Answered { fits, asks: (after / ASKED) as u32 != after as u32 }
    }

    /// Where the oldest request that is not answered stands.
    fn cell(&self, member: usize) -> &Cell {
        let slot = self.slot(member);
        &slot.cells[slot.turns.load(Ordering::SeqCst) as usize % 2]
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
        let ask = |cell: &Cell, request: &[u8; 8], length| {
            cell.bytes[0].store(u64::from_ne_bytes(*request), Ordering::Relaxed);
            cell.length.store(length, Ordering::Relaxed);
            slot.turns.fetch_add(ASKED, Ordering::SeqCst);
        };
        ask(&slot.cells[0], b"barrier ", 7);
        assert!(!board.add_call() && board.add_call());
        assert_eq!((board.request(2).as_deref(), board.unanswered(2)), (Some(&b"barrier"[..]), 1));
        // It asks again.
        ask(&slot.cells[1], b"gather  ", 6);
        assert_eq!((board.request(2).as_deref(), board.unanswered(2)), (Some(&b"barrier"[..]), 2));
        assert_eq!(board.answer(2, b"ok 1\n5\nabcde"), Answered { fits: true, asks: true });
        assert_eq!(board.remove_calls(1), 1);
        assert_eq!(slot.cells[0].length.load(Ordering::Relaxed), 12);
        assert_eq!(board.request(2).as_deref(), Some(&b"gather"[..]));
        assert_eq!(board.answer(2, b"ok"), Answered { fits: true, asks: false });
        assert_eq!(board.request(2), None);
        // A length that nobody could mean; and many turns later.
        slot.turns.store(ASKED * 5 + 5 - 1, Ordering::SeqCst);
        slot.cells[0].length.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(board.request(2).map(|bytes| bytes.len()), Some(ROOM));
        assert!(!board.answer(2, &[0; ROOM + 1]).fits);
        assert_eq!(slot.cells[0].length.load(Ordering::Relaxed), 0);
        slot.turns.store(u64::MAX, Ordering::SeqCst);
        slot.turns.fetch_add(ASKED, Ordering::SeqCst);
        assert_eq!(board.unanswered(2), 1);
        assert!(!board.answer(2, b"ok").asks);
        assert_eq!(slot.turns.load(Ordering::SeqCst), 0);
        board.ring();
        assert_eq!(length(1024), 512 + 1024 * 1024);
    }
}
