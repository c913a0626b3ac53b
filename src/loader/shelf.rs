//! What the root holds for those who ask (`Supply::Held`), so that the shared file system is read once however late somebody asks: all
//! files behind each other in one file in memory.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags};

use super::store::read_at;
use crate::net::wire::record::{FileId, Piece};

/// See the module. All methods may be called from any thread.
#[derive(Debug)]
pub struct Shelf {
    memory: OnceLock<File>,
    /// Bytes that it may hold.
    room: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    files: HashMap<FileId, Place>,
    /// Where the next file goes.
    end: u64,
    /// Bytes of files that were given up.
    freed: u64,
}

/// A file's place, its size, and how much of it is there.
#[derive(Debug, Clone, Copy)]
struct Place {
    at: u64,
    size: u64,
    here: u64,
}

impl Shelf {
    /// An empty one for so many bytes.
    pub fn new(room: u64) -> Shelf {
        Shelf { memory: OnceLock::new(), room, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> io::Result<&File> {
        if self.memory.get().is_none() {
            let fresh = File::from(rustix::fs::memfd_create("hpcrt-held", MemfdFlags::CLOEXEC)?);
            let _ = self.memory.set(fresh);
        }
        self.memory.get().ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    /// Whether there is room for another file.
    pub fn has_room(&self, size: u64) -> bool {
        let state = self.state();
        (state.end - state.freed).saturating_add(size) <= self.room && self.memory().is_ok()
    }

    /// Sets a place aside for a file of which nothing is there yet.
    pub fn begin(&self, file: FileId, size: u64) {
        let mut state = self.state();
        let at = state.end;
        state.end += size;
        state.files.insert(file, Place { at, size, here: 0 });
    }

    /// Whether a file was begun and not given up.
    pub fn holds(&self, file: FileId) -> bool {
        self.state().files.contains_key(&file)
    }

    /// Whether all of a file is here.
    pub fn is_whole(&self, file: FileId) -> bool {
        self.state().files.get(&file).is_some_and(|place| place.here == place.size)
    }

    /// Adds the bytes that follow those that are there. Returns how many are there then.
    ///
    /// # Errors
    /// Memory is short, or they are more than the file has.
    pub fn add(&self, file: FileId, bytes: &[u8]) -> io::Result<u64> {
        let place = self.state().files.get(&file).copied();
        let place = place.filter(|place| place.here + bytes.len() as u64 <= place.size);
        let place = place.ok_or(io::ErrorKind::InvalidInput)?;
        self.memory()?.write_all_at(bytes, place.at + place.here)?;
        let here = place.here + bytes.len() as u64;
        if let Some(place) = self.state().files.get_mut(&file) {
            place.here = here;
        }
        Ok(here)
    }

    /// Gives a file up.
    pub fn remove(&self, file: FileId) {
        let mut state = self.state();
        let Some(Place { at, size, .. }) = state.files.remove(&file) else { return };
        state.freed += size;
        drop(state);
        if let (Ok(memory), true) = (self.memory(), size > 0) {
            // What cannot be given back stays until the end.
            let _ = rustix::fs::fallocate(memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, size);
        }
    }

    /// Whether a piece is here.
    pub fn has(&self, piece: Piece) -> bool {
        let place = self.state().files.get(&piece.file).copied();
        place.is_some_and(|Place { size, here, .. }| {
            piece.len(size).is_some_and(|len| piece.offset() + u64::from(len) <= here)
        })
    }

    /// The bytes of a piece that is here.
    pub fn read(&self, piece: Piece) -> Option<Vec<u8>> {
        let Place { at, size, .. } = self.state().files.get(&piece.file).copied()?;
        let mut bytes = vec![0; piece.len(size)? as usize];
        let got = read_at(self.memory().ok()?, at + piece.offset(), &mut bytes).ok()?;
        (self.has(piece) && got == bytes.len()).then_some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::wire::record::PIECE;

    #[test]
    fn files_lie_behind_each_other() {
        let shelf = Shelf::new(3 * PIECE);
        assert!(shelf.has_room(3 * PIECE) && !shelf.has_room(3 * PIECE + 1));
        shelf.begin(1, PIECE + 2);
        shelf.begin(2, 3);
        assert!(!shelf.has_room(2 * PIECE));
        assert_eq!(shelf.add(2, b"abc").unwrap(), 3);
        assert!(shelf.add(2, b"d").is_err());
        assert_eq!(shelf.add(1, &vec![7; PIECE as usize]).unwrap(), PIECE);
        let piece = |file, index| Piece { file, index };
        assert!(shelf.has(piece(1, 0)) && !shelf.has(piece(1, 1)) && !shelf.has(piece(3, 0)));
        assert!(!shelf.is_whole(1) && shelf.is_whole(2) && !shelf.is_whole(3));
        shelf.add(1, b"xy").unwrap();
        assert_eq!(shelf.read(piece(1, 1)).as_deref(), Some(&b"xy"[..]));
        assert_eq!(shelf.read(piece(2, 0)).as_deref(), Some(&b"abc"[..]));
        assert_eq!(shelf.read(piece(2, 1)), None);
        shelf.remove(1);
        assert!(!shelf.holds(1) && shelf.read(piece(1, 0)).is_none() && shelf.has_room(2 * PIECE));
        assert_eq!(shelf.read(piece(2, 0)).as_deref(), Some(&b"abc"[..]));
    }
}
