//! What a program needs before and while it runs.

pub mod arch;
pub mod closure;
pub mod elf;
pub mod ldcache;
pub mod ldso;
pub mod linker;
pub mod probe;
pub mod resolver;
pub mod script;
pub mod search;
