//! What reached the file server, counted by kind and host.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Operations that reached the file server since the last reset. Closing and forgetting cost nothing and are not counted.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Ops { $($(#[$doc])* pub $name: u64,)* }

        /// The same, being counted.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64,)* }

        impl Counters {
            pub(crate) fn read(&self) -> Ops {
                Ops { $($name: self.$name.load(Relaxed),)* }
            }

            pub(crate) fn reset(&self) {
                $(self.$name.store(0, Relaxed);)*
            }
        }

        impl Ops {
            pub(crate) const NAMES: &[&str] = &[$(stringify!($name)),*];

            pub(crate) fn values(&self) -> Vec<u64> {
                vec![$(self.$name),*]
            }
        }

        impl std::ops::AddAssign for Ops {
            fn add_assign(&mut self, other: Ops) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Names looked up and found.
    lookup,
    /// Names looked up that do not exist.
    absent,
    /// Attributes asked for again, after their 5 s.
    getattr,
    /// Files opened or created.
    open,
    /// Directories opened, and requests for a piece of a listing.
    readdir,
    /// Requests to read, each of at most 128 KiB.
    read,
    /// Bytes answered to them.
    read_bytes,
    /// Requests to write.
    write,
    /// Bytes in them.
    write_bytes,
    /// Everything else: readlink, setattr, rename, unlink, mkdir, statfs, fsync...
    other,
}

impl Ops {
    /// All operations; bytes are not operations.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.lookup + self.absent + self.getattr + self.open + self.readdir + self.read + self.write + self.other
    }
}

/// The operations of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostOps {
    pub host: String,
    pub ops: Ops,
}

/// As a table with a line per host and one for all.
pub(crate) fn table(hosts: &[HostOps]) -> String {
    let mut all = Ops::default();
    let mut text = format!("{:<8}", "host");
    for name in Ops::NAMES.iter().chain(&["total"]) {
        text += &format!(" {name:>11}");
    }
    let mut line = |name: &str, ops: &Ops| {
        text += &format!("\n{name:<8}");
        for value in ops.values().into_iter().chain([ops.total()]) {
            text += &format!(" {value:>11}");
        }
    };
    for HostOps { host, ops } in hosts {
        line(host, ops);
        all += *ops;
    }
    line("all", &all);
    text
}
