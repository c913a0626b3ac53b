//! Memory of other nodes: who lends it ([`server`], [`store`], [`promise`], [`key`]), and who borrows it ([`list`], [`borrow`]).

pub mod borrow;
pub mod key;
pub mod list;
pub mod promise;
pub mod server;
pub mod store;
