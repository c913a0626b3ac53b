//! Where a program wants what it reserves. In the window it has what it gets, and nearly every program takes that. One that gives back place after place without using any needs
//! the one that it names (Java's ZGC: its pointers have bits of their own in it), and gets the kernel's: nothing of that is captured.

/// So many in a row. Java's other collectors take what they get after 30, glibc, for an arena, after one.
const MOST: u32 = 64;

/// Guarded by the table's lock.
pub(super) struct Wishes {
    /// What was reserved elsewhere than wished, if that was the last that was reserved: address and bytes.
    last: Option<(usize, usize)>,
    returned: u32,
}

impl Wishes {
    pub(super) const NONE: Wishes = Wishes { last: None, returned: 0 };

    /// The program reserves, and names a place (else 0): whether it is to have the kernel's.
    pub(super) fn are_granted(&self, wish: usize) -> bool {
        wish != 0 && self.returned >= MOST
    }

    /// It has got this.
    pub(super) fn gave(&mut self, at: usize, len: usize, wish: usize) {
        if self.returned >= MOST {
            return;
        }
        if wish == 0 || self.last.is_some() {
            self.returned = 0;
        }
        self.last = (wish != 0).then_some((at, len));
    }

    /// It gives this back.
    pub(super) fn take(&mut self, at: usize, len: usize) {
        if self.last == Some((at, len)) {
            self.last = None;
            self.returned += 1;
        }
    }
}
