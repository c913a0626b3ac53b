//! Names that the kernel was told do not exist, by directory: it believes that without limit, and where a directory goes on under another name or in another's
//! place it would go on believing it of what is in there now.

use std::collections::{HashMap, HashSet};

use crate::loader::catalog::{file_name, is_within, parent};

/// Names that are remembered, at most. Of others the kernel is told with a limit.
const MOST: usize = 1 << 16;

type Name = Box<[u8]>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Absent {
    names: HashMap<Name, HashSet<Name>>,
    count: usize,
}

impl Absent {
    /// The kernel is about to be told of this one; false: there is no room to remember it.
    pub(super) fn note(&mut self, path: &[u8]) -> bool {
        let Some(directory) = parent(path).filter(|_| self.count < MOST) else { return false };
        if !self.names.contains_key(directory) {
            self.names.insert(directory.into(), HashSet::new());
        }
        let names = self.names.get_mut(directory);
        self.count += usize::from(names.is_some_and(|names| names.insert(file_name(path).into())));
        true
    }

    /// Forgets and returns those in a directory.
    pub(super) fn take(&mut self, directory: &[u8]) -> Vec<Name> {
        let names: Vec<Name> = self.names.remove(directory).into_iter().flatten().collect();
        self.count -= names.len();
        names
    }

    /// The same of a directory and all below it: what they are called there, from its own name on.
    pub(super) fn take_within(&mut self, directory: &[u8]) -> Vec<Name> {
        let within: Vec<Name> = self.names.keys().filter(|other| is_within(other, directory)).cloned().collect();
        let mut found = Vec::new();
        for other in within {
            let below = &other[directory.len()..];
            found.extend(self.take(&other).iter().map(|name| [below, b"/", name].concat().into()));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_by_where_they_were_looked_for() {
        let mut absent = Absent::default();
        for path in ["/a/x", "/a/b/y", "/a/b/y", "/ab/z"] {
            assert!(absent.note(path.as_bytes()));
        }
        assert_eq!(absent.count, 3);
        let mut within = absent.take_within(b"/a");
        within.sort();
        assert_eq!(within, [b"/b/y".to_vec(), b"/x".to_vec()].map(Box::from));
        assert_eq!(absent.take(b"/ab"), [Box::from(*b"z")]);
        assert_eq!((absent.count, absent.take(b"/ab").len()), (0, 0));
        (0..MOST).for_each(|nth| assert!(absent.note(format!("/d/{nth}").as_bytes())));
        assert!(!absent.note(b"/d/more"));
        assert_eq!(absent.take(b"/d").len(), MOST);
    }
}
