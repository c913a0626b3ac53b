//! What few programs do with their memory, as dynamically and as statically linked ones.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use super::{Servers, Who, everybody, place, right};

const WAYS: [(&str, &[&str]); 2] = [("edges", &[]), ("edges-alone", &["-static"])];

/// Builds the program in each way, beside the others.
fn built() -> Option<&'static Path> {
    let place = place()?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/edges.c");
    for (name, flags) in WAYS {
        let mut gcc = Command::new("gcc");
        gcc.args(["-O2", "-pthread"]).args(flags).arg("-o").arg(place.join(name)).arg(&source);
        assert!(gcc.status().unwrap().success());
    }
    Some(place)
}

#[test]
fn what_few_programs_do() {
    let Some(place) = built() else { return };
    for who in everybody() {
        let servers = Servers::start(who, &[400]);
        for (way, _) in WAYS {
            for mode in ["churn", "locked", "heap", "parts", "doors", "vectors", "signals", "whole"] {
                let words = [place.join(way).into_os_string(), mode.into(), "60".into()];
                let done = servers.run_program(&words.each_ref().map(|word| &**word as &OsStr), 20).end();
                println!("{who:?} {way} {mode}: {:?}", done.took);
                right(done, 20);
            }
        }
    }
}

/// More than a thousand spans at once.
#[test]
fn what_is_given_up_is_room_on_the_server() {
    let Some(place) = built() else { return };
    for without in ["", "shared"] {
        let servers = Servers::start(Who { uid: None, without }, &[2000]);
        let program = place.join("edges");
        right(servers.run_program(&[program.as_os_str(), "again".as_ref(), "1600".as_ref()], 20).end(), 20);
    }
}

/// Of a hundred thousand spans, whose table takes 72 MB.
#[test]
fn what_is_given_up_is_zero() {
    let Some(place) = built() else { return };
    for without in ["", "uffd-move"] {
        let servers = Servers::start(Who { uid: None, without }, &[400]);
        let program = place.join("edges");
        right(servers.run_program(&[program.as_os_str(), "beside".as_ref(), "60".as_ref()], 20).end(), 100);
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
