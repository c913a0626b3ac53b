//! What programs load: the closure, and the way of its files from the shared file system to the view.

pub mod arch;
pub mod audit;
pub mod capture;
pub mod catalog;
pub mod chunk;
pub mod closure;
pub mod elf;
pub mod forest;
mod grace;
pub mod hints;
pub mod imports;
pub mod ldcache;
pub mod ldso;
pub mod linker;
pub mod prefetch;
pub mod probe;
pub mod resolver;
pub mod script;
pub mod search;
pub mod shelf;
pub mod source;
pub mod store;
pub mod tally;
mod told;
pub(crate) mod version;
pub mod view;
mod work_queue;
