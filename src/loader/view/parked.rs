//! Questions of the kernel that wait for the log. A FUSE thread never waits; the question does.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::time::{Duration, Instant};

use fuser::{Errno, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen};

use crate::loader::catalog::{Effects, parent};
use crate::net::wire::control::Need;
use crate::net::wire::record::FileId;

/// A request with its reply, so that it can be asked again.
#[derive(Debug)]
pub(super) enum Question {
    Lookup { parent: u64, name: OsString, reply: ReplyEntry },
    Getattr { ino: u64, fh: Option<u64>, reply: ReplyAttr },
    Opendir { ino: u64, reply: ReplyOpen },
    Open { ino: u64, flags: OpenFlags, reply: ReplyOpen },
    Read { fh: u64, offset: u64, size: u32, reply: ReplyData },
}

impl Question {
    /// Others who look up the same name, or change its directory, wait in the kernel until this is answered, and cannot be killed.
    pub(super) fn is_lookup(&self) -> bool {
        matches!(self, Question::Lookup { .. })
    }

    /// What has to be known about its path.
    pub(super) fn need(&self) -> Need {
        if matches!(self, Question::Open { .. }) { Need::Content } else { Need::Attributes }
    }

    pub(super) fn refuse(self, errno: Errno) {
        match self {
            Question::Lookup { reply, .. } => reply.error(errno),
            Question::Getattr { reply, .. } => reply.error(errno),
            Question::Read { reply, .. } => reply.error(errno),
            Question::Opendir { reply, .. } | Question::Open { reply, .. } => reply.error(errno),
        }
    }
}

/// What a question waits for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Path(Box<[u8]>),
    Content(FileId),
}

/// Who asked, and how long he may have to wait.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    /// The number of the thread; 0 when it is hidden from this process.
    pub(super) by: u32,
    pub(super) until: Instant,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) question: Question,
    pub(super) asked: Asked,
    /// When the root was asked last because of it.
    pub(super) wanted: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Parked {
    waiting: HashMap<Key, Vec<Waiting>>,
}

impl Parked {
    /// Whether this is the first to wait for `key`.
    pub(super) fn park(&mut self, key: Key, waiting: Waiting) -> bool {
        let queue = self.waiting.entry(key).or_default();
        queue.push(waiting);
        queue.len() == 1
    }

    /// The keys that a record settles, among those waited for.
    pub(super) fn settled(&self, effects: &Effects) -> Vec<Key> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let mut keys: Vec<Key> = effects.settled.iter().map(|p| Key::Path(p.clone())).collect();
        keys.extend(effects.content.map(Key::Content));
        keys.retain(|k| self.waiting.contains_key(k));
        if let Some(directory) = &effects.listed {
            let below = |k: &&Key| matches!(k, Key::Path(p) if parent(p) == Some(directory));
            keys.extend(self.waiting.keys().filter(below).cloned());
        }
        keys
    }

    /// The paths about which the root was asked longer ago than `patience`, and how: they are asked about now.
    pub(super) fn repeat(&mut self, patience: Duration, now: Instant) -> Vec<(Box<[u8]>, Need)> {
        let mut again = Vec::new();
        for (key, queue) in &mut self.waiting {
            let Key::Path(path) = key else { continue };
            for waiting in queue.iter_mut().filter(|w| w.wanted + patience <= now) {
                waiting.wanted = now;
                again.push((path.clone(), waiting.question.need()));
            }
        }
        again.dedup();
        again
    }

    pub(super) fn take(&mut self, key: &Key) -> Vec<Waiting> {
        self.waiting.remove(key).unwrap_or_default()
    }

    /// Who waits.
    pub(super) fn askers(&self) -> HashSet<u32> {
        self.waiting.values().flatten().map(|w| w.asked.by).collect()
    }

    /// Names that somebody looks up.
    pub(super) fn looked_up(&self) -> impl Iterator<Item = Box<[u8]>> {
        let lookups = self.waiting.iter().filter(|(_, queue)| queue.iter().any(|w| w.question.is_lookup()));
        lookups.filter_map(|(key, _)| match key {
            Key::Path(path) => Some(path.clone()),
            Key::Content(_) => None,
        })
    }

    /// Takes out those that fulfil a condition.
    pub(super) fn take_if(&mut self, wanted: impl Fn(&Key, &Waiting) -> bool) -> Vec<(Key, Waiting)> {
        let mut taken = Vec::new();
        self.waiting.retain(|key, queue| {
            taken.extend(queue.extract_if(.., |w| wanted(key, w)).map(|w| (key.clone(), w)));
            !queue.is_empty()
        });
        taken
    }
}
