//! Which MPI library a program is linked with, and so how its processes find each other.
//!
//! MPICH and its kin (Intel MPI, MVAPICH, Cray) speak PMI-1 themselves. Open MPI up to version 4 has a component that loads a client of
//! PMI-1, meant for Flux; ours is embedded. Open MPI 5 speaks PMIx only, and without it becomes as many jobs of one process as there
//! are ranks, without a word: that is refused.

use std::path::Path;

use crate::loader::closure::{self, Closure, Environment};
use crate::loader::probe::FileSystem;
use crate::net::wire::control::Aid;
use crate::{Error, Result};

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mpi {
    /// It finds its way by itself.
    Pmi1,
    /// It does, too, and MPICH before 4.2 needs help to end over UCX (`static-bootstrap/progress`).
    MpichOverUcx,
    OpenMpi4,
    OpenMpi5,
}

const ALONE: &str = "which finds its ranks through PMIx only: each of the";
/// What is said of ranks of a program that is linked with an MPI library when none has spoken PMI-1.
pub const NOBODY_ASKED: &str = "the program is linked with an MPI library, and no rank here asked through PMI-1 who the others are: \
     each may have been a job of its own; hpcrt exec -- mpirun PROGRAM lets the library's own launcher start them";
const REMEDY: &str = "build it with MPICH or Open MPI 4, or let its own mpirun start it: hpcrt exec -- mpirun PROGRAM";

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
            let mpich = if has("libmpi") && has("libucp.so.") { Mpi::MpichOverUcx } else { Mpi::Pmi1 };
            (has("libmpi") || has("libpmi")).then_some(mpich)
        }
    }

    /// What its ranks are given.
    pub fn aid(self) -> Aid {
        match self {
            Mpi::Pmi1 => Aid::None,
            Mpi::MpichOverUcx => Aid::Progress,
            Mpi::OpenMpi4 | Mpi::OpenMpi5 => Aid::Client,
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
        let cause = format!("it is linked with Open MPI 5, {ALONE} {ranks} would be a job of its own");
        Err(Error::usage("run the MPI program", cause).on(program).remedy(REMEDY))
    }

    /// What is said of ranks that have loaded Open MPI 5 while they ran, and are jobs of one.
    pub fn singletons(ranks: u32) -> Error {
        let cause = format!("a process of it has loaded Open MPI 5, {ALONE} {ranks} ranks is a job of its own");
        Error::new("run the MPI program", cause).remedy(REMEDY)
    }

    /// Whether Open MPI 5 is among the files that a process has mapped, as /proc lists them.
    pub fn is_mapped_5(maps: &[u8]) -> bool {
        ["/libmpi.so.40", "/libopen-pal.so.80"].iter().all(|name| memchr::memmem::find(maps, name.as_bytes()).is_some())
    }
}
