//! Which MPI library a program is linked with, and so how its processes find each other.
//!
//! MPICH and its kin (Intel MPI, MVAPICH, Cray) speak PMI-1 themselves. Open MPI up to version 4 has a component that loads a client of
//! PMI-1, meant for Flux; ours is embedded. Open MPI 5 speaks PMIx only, and without it becomes as many jobs of one process as there
//! are ranks, without a word: that is refused.

use std::path::Path;

use crate::loader::closure::{self, Closure, Environment};
use crate::loader::probe::FileSystem;
use crate::{Error, Result};

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mpi {
    /// It finds its way by itself.
    Pmi1,
    OpenMpi4,
    OpenMpi5,
}

impl Mpi {
    /// Of a program with this closure; `None`: it is not linked with any that is known.
    pub fn of(closure: &Closure) -> Option<Mpi> {
        let sonames = || closure.objects.iter().filter_map(|object| object.soname.as_ref()?.to_str());
        let has = |prefix: &str| sonames().any(|soname| soname.starts_with(prefix));
        if has("libopen-pal.so.80") || has("libpmix.so.2") && has("libmpi.so.40") && !has("libopen-rte.so.40") {
            Some(Mpi::OpenMpi5)
        } else if has("libopen-pal.so.") {
            Some(Mpi::OpenMpi4)
        } else {
            (has("libmpi") || has("libpmi")).then_some(Mpi::Pmi1)
        }
    }

    /// Of a program of this host; `None` also when it cannot be read here.
    pub fn of_program(program: &Path, environment: &Environment) -> Option<Mpi> {
        let closure = closure::resolve(&FileSystem, environment, program, |_, _| {}).ok()?;
        Mpi::of(&closure)
    }

    /// Whether `ranks` of `program` become one job.
    ///
    /// # Errors
    /// They would become as many jobs of one, without a word.
    pub fn check(self, program: &Path, ranks: u32) -> Result<()> {
        if self != Mpi::OpenMpi5 || ranks < 2 {
            return Ok(());
        }
        let cause = format!(
            "it is linked with Open MPI 5, which finds its ranks through PMIx only: each of the {ranks} would be a job of its own"
        );
        let remedy = "build it with MPICH or Open MPI 4, or let its own mpirun start it: hpcrt exec -- mpirun PROGRAM";
        Err(Error::usage("run the MPI program", cause).on(program).remedy(remedy))
    }
}
