//! Style as a test: what a reader may rely on and no compiler checks.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

/// Lines in a source file, at most.
const LINES_MAX: usize = 900;

/// The only files that may contain unsafe code. Each says why at its `allow(unsafe_code)`.
const UNSAFE: &[&str] = &[
    "src/iofs/oracle.rs",
    "src/sys/board.rs",
    "src/sys/boot.rs",
    "src/sys/extents_map.rs",
    "src/sys/huge.rs",
    "src/sys/mpir.rs",
    "src/sys/node.rs",
    "src/sys/process.rs",
    "src/sys/span.rs",
    "src/sys/tcp.rs",
    "static-bootstrap/sys/src/blake3.rs",
    "static-bootstrap/sys/src/digest.rs",
    "static-bootstrap/sys/src/extents.rs",
    "static-bootstrap/sys/src/rank.rs",
    "static-bootstrap/sys/src/syscall.rs",
    "static-bootstrap/sys/src/width.rs",
];

/// What a layer must not import, as (folder, names after `crate::`); arrows point downward only.
const LAYERS: &[(&str, &[&str])] = &[
    ("src/launch/", &["modes", "cli"]),
    ("src/loader/", &["modes", "cli", "launch", "pager", "iofs"]),
    ("src/pager/", &["modes", "cli", "launch", "loader", "iofs"]),
    ("src/iofs/", &["modes", "cli", "launch", "loader", "pager"]),
    ("src/net/", &["modes", "cli", "launch", "loader", "pager", "iofs"]),
    ("src/sys/", &["modes", "cli", "launch", "loader", "pager", "net"]),
    ("src/cli.rs", &["modes"]),
    ("src/error.rs", &["modes", "cli", "launch", "loader", "pager", "net", "sys"]),
];

/// Every source file of the project with its path from the root.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut waiting: Vec<PathBuf> =
        ["src", "static-bootstrap", "tests", "benches", "fuzz", "xtask", "examples", "build.rs"]
            .iter()
            .map(|name| root.join(name))
            .filter(|path| path.exists())
            .collect();
    let mut found = Vec::new();
    while let Some(path) = waiting.pop() {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            if !name.ends_with("target") {
                waiting.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            }
        } else if path.extension().is_some_and(|e| ["rs", "c", "h", "S", "py", "sh", "toml"].iter().any(|x| e == *x)) {
            found.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
    assert!(found.len() > 100, "the sources are not found");
    found
}

/// Fails with all offences at once.
fn nothing(offences: &[String]) {
    assert!(offences.is_empty(), "\n{}\n", offences.join("\n"));
}

#[test]
fn sources_are_ascii_and_short() {
    let mut bad = Vec::new();
    for (name, text) in sources() {
        for (nth, line) in text.lines().enumerate().filter(|(_, line)| !line.is_ascii()) {
            bad.push(format!("{name}:{}: not ASCII: {line}", nth + 1));
        }
        let lines = text.lines().count();
        if lines > LINES_MAX {
            bad.push(format!("{name}: {lines} lines, {LINES_MAX} are allowed"));
        }
    }
    nothing(&bad);
}

#[test]
fn nothing_is_left_for_later() {
    // Put together, so that this file does not find itself.
    let marks = [["TO", "DO"].concat(), ["FIX", "ME"].concat(), ["X", "XX"].concat(), ["todo", "!("].concat()];
    let mut bad = Vec::new();
    for (name, text) in sources() {
        for (nth, line) in text.lines().enumerate() {
            let marked = marks.iter().any(|mark| line.split(|c: char| !c.is_alphanumeric()).any(|w| w == mark));
            if marked || line.contains(&marks[3]) || line.contains(&["unimplemented", "!("].concat()) {
                bad.push(format!("{name}:{}: {}", nth + 1, line.trim()));
            }
        }
    }
    nothing(&bad);
}

#[test]
fn unsafe_code_is_where_it_is_said_to_be() {
    let allow = ["allow(", "unsafe_code"].concat();
    // All of these are compiled into hpcrt, which denies it elsewhere.
    let ours = |name: &str| name.starts_with("src/") || name.starts_with("static-bootstrap/sys/");
    let found = sources().into_iter().filter(|(name, text)| ours(name) && text.contains(&allow));
    let mut found: Vec<String> = found.map(|(name, _)| name).collect();
    found.sort();
    assert_eq!(found, UNSAFE, "the list in this file names every file with unsafe code");
}

/// Names of the crate's top modules that a line refers to.
fn referred(line: &str) -> Vec<&str> {
    let name = |rest: &'_ str| rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    let mut found = Vec::new();
    for rest in line.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            // `use crate::{Error, net::link}`; deeper braces hold no top module.
            Some(list) => {
                found.extend(list.split([',', '{', '}']).map(|item| item.trim()).map(|item| &item[..name(item)]));
            }
            None => found.push(&rest[..name(rest)]),
        }
    }
    found
}

#[test]
fn imports_point_downward() {
    assert_eq!(referred("use crate::{Error, net::link::Link};"), ["Error", "net", ""]);
    assert_eq!(referred("let x = crate::launch::plan(crate::sys::y);"), ["launch", "sys"]);
    let mut bad = Vec::new();
    for (name, text) in sources() {
        let Some((_, forbidden)) = LAYERS.iter().find(|(folder, _)| name.starts_with(folder)) else { continue };
        // A `use` may go over several lines.
        let mut statement = String::new();
        for (nth, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            statement.push_str(code);
            if statement.contains("use ") && statement.contains('{') && !statement.contains('}') {
                continue;
            }
            for module in referred(&statement).into_iter().filter(|module| forbidden.contains(module)) {
                bad.push(format!("{name}:{}: imports {module}, which is above it", nth + 1));
            }
            statement.clear();
        }
    }
    nothing(&bad);
}
