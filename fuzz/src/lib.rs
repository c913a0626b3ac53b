//! What the fuzz targets share with `tests/fuzz_slice.rs`.

pub mod bodies;
