//! When nothing is kept for a while, so that what is used comes once more: all of it may fit.
//!
//! First in, first out has all that is used here sooner or later, if it fits. What is kept since it came back once may not be used any more, and takes the place of what is; to find that
//! piece by piece takes long, and what comes meanwhile needs slots, which take more. So when no more seems to be used than would fit, all goes first in, first out, until as much has gone.

/// More seems to be used than is, by one part in so many.
const DOUBT: u64 = 16;
/// As much as fits has to go so many times at most before it is tried once more.
const PATIENCE: u64 = 64;

/// See the module. Amounts are pages.
#[derive(Debug)]
pub(crate) struct Afresh {
    /// Whether it is so now.
    pub(crate) now: bool,
    /// What had gone when this began or ended, and what went and came back since.
    since: u64,
    back: u64,
    /// How many times as much as fits has to go before it is tried: one after another in vain, twice as long each time.
    patience: u64,
}

impl Afresh {
    pub(crate) const NEW: Afresh = Afresh { now: false, since: 0, back: 0, patience: 1 };

    /// So many come back when so much has gone in all, of it so much since they went.
    pub(crate) fn count(&mut self, pages: u64, gone: u64, meanwhile: u64) {
        self.back += if meanwhile <= gone - self.since { pages } else { 0 };
    }

    /// So much has gone in all; so much fits at most; so much seems to be used, if that is known. Whether it begins.
    pub(crate) fn begins(&mut self, gone: u64, most: u64, used: Option<u64>) -> bool {
        let since = gone - self.since;
        if self.now {
            // All that is used goes and comes back once. If more does, it does not fit; if more goes and does not, or what comes is new, the program does something else now.
            let vain = self.back > most + most / 4;
            if vain || since > 2 * most || used.is_none() {
                let patience = if vain { (self.patience * 2).min(PATIENCE) } else { 1 };
                *self = Afresh { now: false, since: gone, back: 0, patience };
            }
            return false;
        }
        let begins = since > self.patience * most && used.is_some_and(|used| used - used / DOUBT < most);
        if begins {
            *self = Afresh { now: true, since: gone, back: 0, ..*self };
        }
        begins
    }
}
