//! The command line as users meet it: help texts (golden files in `tests/cli/`), completions, the doctor.
//!
//! After a wanted change of a text: `HPCRT_BLESS=1 cargo test --test cli`, then look at the difference in git.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Output};

fn hpcrt(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpcrt"));
    command.args(args).env_remove("HPCRT_WITHOUT");
    command
}

fn text(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

fn golden(name: &str, args: &[&str]) {
    let output = hpcrt(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli").join(name);
    if std::env::var_os("HPCRT_BLESS").is_some() {
        std::fs::write(&file, &output.stdout).unwrap();
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(
        text(&output),
        expected,
        "{} differs; HPCRT_BLESS=1 cargo test --test cli writes it anew",
        file.display()
    );
}

#[test]
fn help_of_all() {
    golden("help.txt", &["--help"]);
}

#[test]
fn help_of_exec() {
    golden("exec.txt", &["exec", "--help"]);
}

/// What bash would offer after `words` with the cursor behind the last one.
fn complete(words: &[&str]) -> Vec<String> {
    let script = "eval \"$(\"$0\" completions bash)\"
        spec=$(complete -p hpcrt) && [[ $spec =~ -F\\ ([^ ]+) ]] || exit 9
        COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); COMP_LINE=\"$*\"; COMP_POINT=${#COMP_LINE}
        \"${BASH_REMATCH[1]}\" hpcrt \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD - 1]}\"
        printf '%s\\n' \"${COMPREPLY[@]}\"";
    let output = Command::new("bash")
        .args(["--norc", "--noprofile", "-c", script, env!("CARGO_BIN_EXE_hpcrt")])
        .args(words)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    text(&output).lines().map(|word| word.trim().to_owned()).collect()
}

#[test]
fn bash_completes_modes_and_flags() {
    if Command::new("bash").arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no bash on this machine");
        return;
    }
    assert_eq!(complete(&["hpcrt", "ex"]), ["exec"]);
    assert_eq!(complete(&["hpcrt", "exec", "--la"]), ["--label"]);
    assert!(complete(&["hpcrt", "exec", "--"]).contains(&"--hosts".to_owned()));
}

fn doctor(without: &str) -> (Option<i32>, serde_json::Value) {
    let output = hpcrt(&["doctor", "--json"]).env("HPCRT_WITHOUT", without).output().unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), report)
}

fn check<'a>(report: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    let checks = report["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}: {report}"))
}

#[test]
fn the_doctor_takes_every_ability_away() {
    let (code, all) = doctor("");
    assert_eq!(code, Some(0), "{all}");
    assert_eq!(check(&all, "memfd")["state"], "ok", "{all}");

    let (code, no_userns) = doctor("userns");
    let next = if check(&all, "audit")["state"] == "ok" { "audit" } else { "none" };
    assert_eq!((code, &no_userns["view"]), (Some(0), &next.into()));
    assert_eq!(check(&no_userns, "namespaces")["remedy"], "unset HPCRT_WITHOUT");
    assert_eq!(check(&no_userns, "fuse")["remedy"], "namespaces come first");

    let (_, no_fuse) = doctor("fuse");
    if check(&all, "namespaces")["state"] == "ok" {
        assert_eq!(no_fuse["view"], "namespace-binds");
        assert_eq!(check(&no_fuse, "fuse")["detail"], "HPCRT_WITHOUT forbids it");
    } else {
        eprintln!("SKIPPED: tiers, since this machine has no namespaces: {all}");
    }
    let (code, no_memfd) = doctor("memfd");
    assert_eq!((code, &check(&no_memfd, "memfd")["state"]), (Some(0), &"limited".into()));
    assert_eq!(hpcrt(&["doctor"]).env("HPCRT_WITHOUT", "fus").output().unwrap().status.code(), Some(2));
}

#[test]
fn the_doctor_sees_a_noexec_mount() {
    let script = "mount -t tmpfs -o noexec,mode=1777 t /tmp && exec \"$0\" doctor --json";
    let mut unshare = Command::new("unshare");
    unshare.args(["--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_hpcrt")]);
    match unshare.env_remove("HPCRT_WITHOUT").output() {
        Ok(output) if !output.stdout.is_empty() => {
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let tmp = check(&report, "tmp");
            assert!(tmp["detail"].as_str().unwrap().contains("noexec"), "{tmp}");
        }
        other => {
            let can = Command::new("unshare")
                .args(["--map-root-user", "--mount", "mount", "-t", "tmpfs", "t", "/tmp"])
                .status();
            assert!(!can.is_ok_and(|status| status.success()), "{other:?}");
            eprintln!("SKIPPED: no mount of its own here: {other:?}");
        }
    }
}

/// The kernel's own setting belongs to a namespace of processes.
#[test]
fn jobs_run_where_nothing_is_executed_from_memory() {
    const SCRIPT: &str = "echo 2 > /proc/sys/vm/memfd_noexec || exit 77
        \"$0\" exec -q -n 2 -- echo started && exec \"$0\" doctor --json";
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--mount-proc", "sh", "-c", SCRIPT, env!("CARGO_BIN_EXE_hpcrt")]);
    match unshare.env_remove("HPCRT_WITHOUT").output() {
        Ok(output) if !output.stdout.is_empty() || ![Some(1), Some(77)].contains(&output.status.code()) => {
            let text = String::from_utf8(output.stdout).unwrap();
            let report = text.strip_prefix("started\nstarted\n").unwrap_or_else(|| panic!("{text}"));
            let memfd = check(&serde_json::from_str(report).unwrap(), "memfd").clone();
            assert_eq!(memfd["state"], "limited", "{memfd}");
            assert!(memfd["remedy"].as_str().unwrap().contains("memfd_noexec"), "{memfd}");
        }
        other => eprintln!("SKIPPED: vm.memfd_noexec cannot be set here: {other:?}"),
    }
}

#[test]
fn every_problem_has_a_remedy_and_every_line_fits_its_column() {
    let (_, report) = doctor("userns,fuse,memfd,uffd");
    for check in report["checks"].as_array().unwrap() {
        let problem = check["state"] == "limited" || check["state"] == "broken";
        assert!(!problem || check["remedy"].as_str().is_some_and(|r| !r.is_empty()), "{check}");
        assert!(check["name"].as_str().unwrap().len() <= 12, "{check}");
    }
}
