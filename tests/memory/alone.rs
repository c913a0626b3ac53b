//! Programs that are linked statically, at fixed addresses and at ones that the kernel chooses, with glibc and with musl.

use std::path::PathBuf;
use std::process::Command;

use super::{Run, Servers, Who, everybody, place, right};

/// Ways to link, and the compilers that do.
const WAYS: [(&str, &str, &[&str]); 3] = [
    ("fixed", "gcc", &["-static", "-no-pie"]),
    ("pie", "gcc", &["-static-pie", "-fPIE"]),
    ("musl", "musl-gcc", &["-static"]),
];

/// Builds a program of `tests/programs` in one way from its parts (source, flags); `None`: its compiler is not here.
fn build(name: &str, (way, compiler, flags): (&str, &str, &[&str]), parts: &[(&str, &str)]) -> Option<PathBuf> {
    let place = place()?;
    if Command::new(compiler).arg("--version").output().is_err() {
        eprintln!("SKIPPED: {compiler} is not installed (musl-tools)");
        return None;
    }
    let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs");
    let built = place.join(format!("{name}-{way}"));
    let mut objects = Vec::new();
    for (nth, (source, define)) in parts.iter().enumerate() {
        let object = place.join(format!("{name}-{way}-{nth}.o"));
        let mut cc = Command::new(compiler);
        cc.args(["-O2", "-pthread", "-c", define]).args(flags).arg("-o").arg(&object).arg(sources.join(source));
        assert!(cc.status().unwrap().success());
        objects.push(object);
    }
    let mut link = Command::new(compiler);
    assert!(link.arg("-pthread").args(flags).arg("-o").arg(&built).args(&objects).status().unwrap().success());
    Some(built)
}

fn run(servers: &Servers, who: Who, program: &std::path::Path, words: &[&str]) {
    let mut command = who.command(servers.config.path());
    command.env("GIVEN", "yes");
    command.args(["exec", "-q", "--memory", &servers.list(), "--local-mb", "20"]);
    let all: Vec<_> = std::iter::once(program.as_os_str()).chain(words.iter().map(|word| (*word).as_ref())).collect();
    let done = Run::new(command).program(&all).end();
    println!("{who:?} {} {words:?}: {:?}", program.display(), done.took);
    right(done, 20);
}

/// Runs what was built in each way, the larger program in these modes.
fn each(all: &[Who], modes: impl Fn(&str) -> &'static [&'static str]) {
    for way in WAYS {
        let Some(memory) = build("memory", way, &[("memory.c", "-DALONE")]) else { continue };
        let statics = build("statics", way, &[("statics.c", "-DMAIN"), ("statics.c", "-DLIBRARY")]).unwrap();
        let alone = build("alone", way, &[("alone.c", "-DALONE")]).unwrap();
        for &who in all {
            let servers = Servers::start(who, &[400]);
            run(&servers, who, &alone, &[alone.to_str().unwrap(), "40"]);
            run(&servers, who, &statics, &[]);
            modes(way.0).iter().for_each(|mode| run(&servers, who, &memory, &[mode, "40"]));
        }
    }
}

#[test]
fn statically_linked_programs_are_right() {
    // Both tiers.
    let all: Vec<_> = everybody().into_iter().filter(|who| who.without.is_empty()).collect();
    each(&all, |way| if way == "fixed" { &["threads"] } else { &[] });
}

#[test]
#[ignore = "three minutes"]
fn statically_linked_programs_of_every_kind() {
    // What musl's malloc gives out in small pieces is not counted; and its sort goes through all of its memory at random for minutes.
    each(&everybody(), |way| match way {
        "musl" => &["triad", "scatter", "calls", "threads", "children", "forks", "reserve", "heirs"],
        _ => &["triad", "sort", "scatter", "heap", "calls", "threads", "children", "forks", "reserve", "heirs"],
    });
}

/// Of whom it is not known how he starts threads; where a program starts him he is left alone.
#[test]
fn what_musl_links_dynamically_is_refused() {
    let Some(program) = build("musl-dynamic", ("dynamic", "musl-gcc", &[]), &[("memory.c", "-DALONE")]) else { return };
    for who in everybody() {
        let servers = Servers::start(who, &[400]);
        let refused = servers.run_program(&[program.as_os_str(), "threads".as_ref(), "40".as_ref()], 20).end();
        refused.code(125).says("dynamic linker is musl's");
        let line = format!("{} threads 40; exit $?", program.display());
        servers.run_program(&["sh".as_ref(), "-c".as_ref(), line.as_ref()], 20).end().code(0);
    }
}
