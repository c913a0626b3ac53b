//! Builds what runs inside the application's process (`static-bootstrap/`) and hands the bytes to `include_bytes!`.
//!
//! With rustc directly: no nested cargo, no second lock, no registry. A release build that would not be static is refused here,
//! because RUSTFLAGS in the environment silently replaces the flags in `.cargo/config.toml`.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
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
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let sys = rustc("sys/src/lib.rs", &out, "libsys.rlib", &["--crate-type=rlib", "--crate-name=sys"]);
    let boot = rustc(
        "boot/src/main.rs",
        &out,
        "boot",
        &[
            "--crate-name=boot",
            "-Clto=fat",
            "-Cstrip=symbols",
            "-Crelocation-model=static",
            "-Clink-args=-nostdlib -nostartfiles -static -no-pie -Wl,-z,noexecstack,--build-id=none,--no-eh-frame-hdr",
            &format!("--extern=sys={}", sys.display()),
        ],
    );
    println!("cargo:rustc-env=HPCRT_BOOT={}", boot.display());
    let list = Path::new("src/sys/mpir.list");
    println!("cargo:rerun-if-changed={}", list.display());
    println!("cargo:rustc-link-arg-bins=-Wl,--dynamic-list={}", list.canonicalize().expect("it is there").display());
    let object = |name: &str, linker: &str, sys: &Path, flags: &[&str]| {
        // A name and a table of functions, by which the file layer knows what they do.
        let link =
            format!("-Clink-args=-nostdlib -nostartfiles -Wl,{linker}-z,noexecstack,--build-id=sha1,--eh-frame-hdr");
        let (named, sys) = (format!("--crate-name={name}"), format!("--extern=sys={}", sys.display()));
        let all = [&[&named, "--crate-type=cdylib", "-Clto=fat", "-Cstrip=symbols", &link, &sys], flags].concat();
        let built = rustc(&format!("{name}/src/lib.rs"), &out, &format!("{name}.so"), &all);
        println!("cargo:rustc-env=HPCRT_{}={}", name.to_uppercase(), built.display());
    };
    // Lazily bound, and not sealed: see got.rs.
    object("audit", "-z,lazy,-z,norelro,", &sys, &["-Crelro-level=off"]);
    // Their constructors come before all others: what is allocated there is the program's, too. Statically linked programs are begun at its entry.
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        const FAST: &str = "-Copt-level=3";
        let sys = rustc("sys/src/lib.rs", &out, "libfast.rlib", &["--crate-type=rlib", "--crate-name=sys", FAST]);
        object("resident", "-z,initfirst,-e,hpcrt_start,", &sys, &[FAST]);
        // Not sealed, which takes a mapping and a call of every start.
        object("iofs", "-z,initfirst,-z,norelro,", &sys, &[FAST, "-Crelro-level=off"]);
    }
    object("pmi", "", &sys, &[]);
    // Lazily bound: whose functions they are is known when they are called.
    object("progress", "-z,lazy,", &sys, &[]);
}

fn rustc(source: &str, out: &Path, name: &str, flags: &[&str]) -> PathBuf {
    // Not all of static-bootstrap: its lints leave a target directory there.
    let package = source.split('/').next().unwrap_or(source);
    println!("cargo:rerun-if-changed=static-bootstrap/{package}");
    let product = out.join(name);
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let mut command = Command::new(rustc);
    command
        .arg("--edition=2024")
        .args(["-Cpanic=abort", "-Copt-level=s", "-Ccodegen-units=1"])
        .arg("--target")
        .arg(env::var("TARGET").expect("cargo sets TARGET"))
        .args(flags)
        .arg("-o")
        .arg(&product)
        .arg(Path::new("static-bootstrap").join(source));
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        let mut option = OsString::from("-Clinker=");
        option.push(linker);
        command.arg(option);
    }
    let status = command.status().expect("rustc runs");
    if !status.success() {
        eprintln!("cannot build static-bootstrap/{source}");
        std::process::exit(1);
    }
    product
}
