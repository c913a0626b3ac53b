//! What few programs do with their memory, as dynamically and as statically linked ones.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::sync::Once;

use super::{Servers, Who, everybody, place, right};

const WAYS: [(&str, &[&str]); 2] = [("edges", &[]), ("edges-alone", &["-static"])];

const MODES: [&str; 18] = [
    "churn",
    "locked",
    "heap",
    "parts",
    "moved",
    "over",
    "wishes",
    "doors",
    "vectors",
    "signals",
    "whole",
    "early",
    "crowd",
    "queued",
    "jumped",
    "cancelled",
    "messages",
    "spliced",
];

/// Builds the program in each way, beside the others.
fn built() -> Option<&'static Path> {
    static BUILT: Once = Once::new();
    let place = place()?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/edges.c");
    BUILT.call_once(|| {
        for (name, flags) in WAYS {
            let mut gcc = Command::new("gcc");
            gcc.args(["-O2", "-pthread", "-fexceptions"])
                .args(flags)
                .arg("-o")
                .arg(place.join(name))
                .arg(&source)
                .arg("-lrt");
            assert!(gcc.status().unwrap().success());
        }
    });
    Some(place)
}

#[test]
fn what_few_programs_do() {
    let Some(place) = built() else { return };
    for who in everybody() {
        let servers = Servers::start(who, &[400]);
        for (way, _) in WAYS {
            for mode in MODES {
                let words = [place.join(way).into_os_string(), mode.into(), "60".into()];
                let done = servers.run_program(&words.each_ref().map(|word| &**word as &OsStr), 20).end();
                println!("{who:?} {way} {mode}: {:?}", done.took);
                right(done, 20);
            }
        }
    }
}

/// As scripts do: for an allocator, or since they take nothing over.
#[test]
fn what_is_started_with_another_environment_borrows() {
    let Some(place) = place() else { return };
    for who in everybody() {
        let servers = Servers::start(who, &[200]);
        for with in ["-i", "LD_PRELOAD=libm.so.6"] {
            let words = ["env".into(), with.into(), place.join("memory").into_os_string(), "triad".into(), "60".into()];
            right(servers.run_program(&words.each_ref().map(|word| &**word as &OsStr), 20).end(), 20);
        }
    }
}

/// Where pages can only be copied the program is told why that is not safe.
#[test]
fn what_is_pinned_is_not_lost() {
    let Some(place) = built() else { return };
    for who in everybody() {
        let servers = Servers::start(who, &[400]);
        for (way, _) in WAYS {
            let words = [place.join(way).into_os_string(), "pinned".into(), "60".into()];
            let done = servers.run_program(&words.each_ref().map(|word| &**word as &OsStr), 20).end();
            if who.without == "uffd-move" {
                done.code(125).says("pinned memory for a device");
            } else if done.err.contains("wrong: io_uring (errno") {
                eprintln!("SKIPPED: io_uring is not allowed here");
            } else {
                right(done, 20);
            }
        }
    }
}

/// More than a thousand spans at once.
#[test]
fn what_is_given_up_is_room_on_the_server() {
    runs(20, ["", "shared"], 2000, ["again", "1600"], 20);
}

/// Of a hundred thousand spans, whose table takes 72 MB.
#[test]
fn what_is_given_up_is_zero() {
    runs(20, ["", "uffd-move"], 400, ["beside", "60"], 100);
}

/// A hundred times 16,000 spans, of which it takes 44 MB to know.
#[test]
fn what_is_given_up_is_room_in_the_window() {
    runs(20, [""], 400, ["scattered", "60"], 60);
}

/// More at once than who may keep 20 MB may reserve. Besides, 16 MiB of the server's are mapped.
#[test]
fn what_is_reserved_is_captured() {
    runs(300, [""], 800, ["vast", "500"], 317);
}

/// As root, with `local` MB and a server that lends so many, in several ways; `most`: MB that may be here at once.
fn runs<const WAYS: usize>(local: u32, ways: [&'static str; WAYS], lent: u32, program: [&str; 2], most: u32) {
    let Some(place) = built() else { return };
    for without in ways {
        let servers = Servers::start(Who { uid: None, without }, &[lent]);
        let words = [place.join("edges").into_os_string(), program[0].into(), program[1].into()];
        right(servers.run_program(&words.each_ref().map(|word| &**word as &OsStr), local).end(), most);
    }
}

/// Where all that could be borrowed has no addresses, or what would be known of it could not be written.
#[test]
fn limits_of_address_space_are_named() {
    let Some(place) = place() else { return };
    for who in everybody() {
        let servers = Servers::start(who, &[20]);
        for limit in ["-v 8000000", "-d 1000000"] {
            let script = format!("ulimit {limit}; exec {} triad 10", place.join("memory").display());
            let done = servers.run_program(&["sh", "-c", &script].map(OsStr::new), 20).end();
            done.code(125).says("reserve address space").says("ulimit -v and ulimit -d must be unlimited");
        }
    }
}

#[test]
fn a_fork_that_gets_no_connections_fails_alone() {
    let Some(place) = built() else { return };
    let servers = Servers::start(Who { uid: None, without: "" }, &[200]);
    let (program, server) = (place.join("edges"), servers.all[0].0.id().to_string());
    let words = [program.as_os_str(), "alone".as_ref(), "40".as_ref(), server.as_ref()];
    right(servers.run_program(&words, 20).end().says("cannot let a program fork"), 20);
}
