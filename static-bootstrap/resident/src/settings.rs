//! What the agent wrote into this file.

use core::hint::black_box;

use sys::resident::{MARK, Settings};

#[repr(C)]
struct Marked {
    mark: [u8; 16],
    settings: Settings,
}

#[used]
static MARKED: Marked = Marked { mark: MARK, settings: Settings::NONE };

/// As they are in the file, which is not what the compiler saw.
pub(super) fn get() -> &'static Settings {
    let marked = black_box(&MARKED);
    let _ = marked.mark;
    &marked.settings
}
