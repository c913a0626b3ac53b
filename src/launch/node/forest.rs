//! Reading parts of files from the shared file system in the root's stead.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{Advice, fadvise};

use super::Node;
use crate::loader::store::read_at;
use crate::loader::version;
use crate::net::link::Packet;
use crate::net::wire::control::{Extent, Report};
use crate::net::wire::record::CHUNK_MAX;

/// Files that are kept open for the next part, at most.
const OPEN: usize = 64;

/// A file that is opened by who reads its first part here.
pub(super) type Opened = Arc<Mutex<Option<Arc<File>>>>;

impl Node {
    /// Reads a part of a file and sends it up.
    pub(super) fn read(self: &Rc<Self>, extent: Extent) {
        let opened = {
            let mut all = self.opened.borrow_mut();
            if all.len() >= OPEN {
                all.clear();
            }
            let opened = Arc::clone(all.entry(extent.path.clone()).or_default());
            if extent.last {
                all.remove(&extent.path);
            }
            opened
        };
        let (node, ticket) = (Rc::clone(self), extent.ticket);
        let work = async move {
            let bytes = smol::unblock(move || read(&opened, &extent)).await.unwrap_or_default();
            node.send_up(Packet::new(&Report::Read { ticket }, bytes)).await;
        };
        self.tasks.spawn(work).detach();
    }
}

/// The bytes, if this host sees the file as the root does.
fn read(opened: &Opened, extent: &Extent) -> Option<Vec<u8>> {
    let file = {
        let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
        match &*opened {
            Some(file) => Arc::clone(file),
            None => {
                let file = Arc::new(File::open(Path::new(std::ffi::OsStr::from_bytes(&extent.path))).ok()?);
                if version::seen(&*file) != Ok(extent.seen) {
                    return None;
                }
                // What lies behind a part is another host's to read.
                let _ = fadvise(&*file, 0, None, Advice::Random);
                *opened = Some(Arc::clone(&file));
                file
            }
        }
    };
    let mut bytes = vec![0; (extent.len as usize).min(CHUNK_MAX)];
    let got = read_at(&*file, extent.offset, &mut bytes).ok()?;
    // What was changed meanwhile is not the same either.
    (got == bytes.len() && version::seen(&*file) == Ok(extent.seen)).then_some(bytes)
}
