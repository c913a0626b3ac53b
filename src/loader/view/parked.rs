//! Questions of the kernel that wait for the log. A FUSE thread never waits; the question does.

use std::collections::HashMap;
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
    Getattr { ino: u64, reply: ReplyAttr },
    Readlink { ino: u64, reply: ReplyData },
    Opendir { ino: u64, reply: ReplyOpen },
    Open { ino: u64, flags: OpenFlags, reply: ReplyOpen },
    Read { fh: u64, offset: u64, size: u32, reply: ReplyData },
}

impl Question {
    /// What has to be known about its path.
    pub(super) fn need(&self) -> Need {
        if matches!(self, Question::Open { .. }) { Need::Content } else { Need::Attributes }
    }

    pub(super) fn refuse(self, errno: Errno) {
        match self {
            Question::Lookup { reply, .. } => reply.error(errno),
            Question::Getattr { reply, .. } => reply.error(errno),
            Question::Readlink { reply, .. } | Question::Read { reply, .. } => reply.error(errno),
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

#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) question: Question,
    pub(super) until: Instant,
    /// When the root was asked last because of it.
    pub(super) asked: Instant,
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
            for waiting in queue.iter_mut().filter(|w| w.asked + patience <= now) {
                waiting.asked = now;
                again.push((path.clone(), waiting.question.need()));
            }
        }
        again.dedup();
        again
    }

    pub(super) fn take(&mut self, key: &Key) -> Vec<Waiting> {
        self.waiting.remove(key).unwrap_or_default()
    }

    pub(super) fn take_all(&mut self) -> Vec<Waiting> {
        self.waiting.drain().flat_map(|(_, queue)| queue).collect()
    }

    /// Those whose time is over.
    pub(super) fn expired(&mut self, now: Instant) -> Vec<(Key, Waiting)> {
        let mut over = Vec::new();
        self.waiting.retain(|key, queue| {
            over.extend(queue.extract_if(.., |w| w.until <= now).map(|w| (key.clone(), w)));
            !queue.is_empty()
        });
        over
    }
}
