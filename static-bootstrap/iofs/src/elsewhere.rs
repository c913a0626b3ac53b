//! Files that another host writes: it is to do so from the first write on, and has something to sync.

use core::sync::atomic::Ordering;

use sys::extents::inode::{IDLE, SYNC, WRITTEN};
use sys::resident::files;

use super::{look, table, worker};
use crate::settings;

/// Whether another host writes.
#[inline]
pub(super) fn is() -> bool {
    settings::get().files & files::ELSEWHERE != 0
}

/// Has whoever wrote a file sync it. Nothing of ours is pending there.
pub(super) fn sync(fd: usize) {
    if !is() {
        return;
    }
    let Some(file) = look(fd).map(table::file) else { return };
    let (device, number) = file.name();
    worker::settle_inode(device, number);
    let Some((head, inode)) = worker::head().and_then(|head| Some((head, head.find(device, number)?))) else { return };
    let state = &inode.elsewhere;
    if state.load(Ordering::SeqCst) == IDLE {
        return;
    }
    let _ = state.compare_exchange(WRITTEN, SYNC, Ordering::SeqCst, Ordering::SeqCst);
    head.syncs.fetch_add(1, Ordering::SeqCst);
    worker::ring();
    worker::wait_while(head, || state.load(Ordering::SeqCst) == SYNC);
}
