//! `HPCRT_WITHOUT=userns,fuse`: abilities of this node that hpcrt must not use, to try a fallback or to work around a fault.

use crate::{Error, Result};

/// The environment variable.
pub const VARIABLE: &str = "HPCRT_WITHOUT";

/// An ability that can be taken away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ability {
    /// Namespaces of our own (for root: mount namespaces).
    Userns,
    /// FUSE in such a namespace.
    Fuse,
    /// Executing from memory.
    Memfd,
    Userfaultfd,
    /// TCP connections between hosts.
    Tcp,
    /// Hosts starting agents on other hosts.
    Ssh,
    /// Executing programs from RAM disks.
    Exec,
    /// RAM disks large enough for the files of programs.
    Ram,
    /// Being told of page faults inside the kernel.
    KernelFaults,
    /// Moving pages.
    Move,
    /// Sharing what a memory server of the same host keeps.
    Shared,
    /// Judging whether it pays to keep what is written to a file.
    Pace,
}

const NAMES: [(&str, Ability); 12] = [
    ("userns", Ability::Userns),
    ("fuse", Ability::Fuse),
    ("memfd", Ability::Memfd),
    ("uffd", Ability::Userfaultfd),
    ("tcp", Ability::Tcp),
    ("ssh", Ability::Ssh),
    ("exec", Ability::Exec),
    ("ram", Ability::Ram),
    ("uffd-kernel", Ability::KernelFaults),
    ("uffd-move", Ability::Move),
    ("shared", Ability::Shared),
    ("pace", Ability::Pace),
];

/// The abilities taken away.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Without(Vec<Ability>);

impl Without {
    /// Reads the variable of this process; unset and empty mean nothing is taken away.
    ///
    /// # Errors
    /// A name that is none of ours: a misspelt one would silently try nothing.
    pub fn from_env() -> Result<Without> {
        Without::parse(&std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy())
    }

    fn parse(text: &str) -> Result<Without> {
        let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
        let ability = |word| match NAMES.iter().find(|(name, _)| *name == word) {
            Some((_, ability)) => Ok(*ability),
            None => {
                let known = NAMES.map(|(name, _)| name).join(", ");
                Err(Error::usage("do without", format!("it is none of {known}"))
                    .on(word)
                    .remedy(format!("see {VARIABLE}")))
            }
        };
        words.map(ability).collect::<Result<_>>().map(Without)
    }

    /// Whether `ability` must not be used.
    pub fn has(&self, ability: Ability) -> bool {
        self.0.contains(&ability)
    }

    /// Why what needs `ability` is not done, where it was taken away.
    pub fn denies(&self, ability: Ability) -> Option<String> {
        self.has(ability).then(|| format!("{VARIABLE} forbids it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_mistakes_refused() {
        let without = Without::parse(" fuse,,userns ").unwrap();
        assert!(without.has(Ability::Fuse) && without.has(Ability::Userns) && !without.has(Ability::Memfd));
        assert_eq!(Without::parse("").unwrap(), Without::default());
        let error = Without::parse("fuse,usrns").unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(
            error.to_string().contains(
                "\"usrns\": it is none of userns, fuse, memfd, uffd, tcp, ssh, exec, ram, uffd-kernel, uffd-move, shared, pace"
            ),
            "{error}"
        );
    }
}
