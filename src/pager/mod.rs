//! Memory of other nodes: who lends it ([`server`], [`store`], [`promise`], [`key`]), and who borrows it ([`list`], [`borrow`], [`budget`], [`counts`]).

mod backoff;
pub mod borrow;
pub mod budget;
pub mod counts;
pub mod key;
pub mod list;
pub mod promise;
pub mod server;
mod shared;
pub mod store;
