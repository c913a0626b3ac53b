//! Refuses a release build that would not be static, because RUSTFLAGS in the environment silently replaces the flags in
//! `.cargo/config.toml`.

use std::env;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let features = env::var("CARGO_CFG_TARGET_FEATURE").unwrap_or_default();
    let release = env::var("PROFILE").is_ok_and(|p| p == "release");
    // A fuzzer is not the product, and its runtime is dynamic.
    let fuzzing = env::var_os("CARGO_CFG_FUZZING").is_some();
    if release && !fuzzing && !features.split(',').any(|f| f == "crt-static") {
        eprintln!(
            "hpcrt must be one static binary, but this build would be dynamic: RUSTFLAGS replaces the project's flags; add '-C target-feature=+crt-static' to it or unset it"
        );
        std::process::exit(1);
    }
}
