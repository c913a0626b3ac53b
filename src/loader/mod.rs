//! Which files a program needs, where their bytes are, and how the program gets to see them.

pub mod catalog;
pub mod store;
pub mod view;
