//! The overlay: bytes, peers and routes, without meaning. `wire` holds the types of every conversation.

pub mod alarm;
pub mod ascent;
pub mod auth;
pub mod collective;
pub mod direct;
pub mod gauge;
pub mod link;
pub mod listen;
pub mod memory_file;
pub mod pace;
pub mod pull;
pub mod relay;
pub mod replicate;
pub mod seqpacket;
pub mod sim;
pub mod single_flight;
pub mod topology;
pub mod welcome;
pub mod wire;
