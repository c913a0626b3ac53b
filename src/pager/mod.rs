//! Memory of other nodes: who lends it ([`server`], [`store`], [`promise`], [`key`]).

pub mod key;
pub mod promise;
pub mod server;
pub mod store;
