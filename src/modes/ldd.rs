//! `hpcrt ldd PROGRAM`: what a program needs to start, where it is found, and what that will cost.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use serde_json::{Value, json};

use crate::error::{Context, EXIT_FAILED, Result};
use crate::loader::capture::is_shared;
use crate::loader::closure::{Closure, Environment, How, Object, resolve};
use crate::loader::probe::FileSystem;

/// Bytes that glibc reserves beside the libraries loaded at start for those with `DF_STATIC_TLS` that come later
/// (`glibc.rtld.optional_static_tls` and the surplus for its namespaces, 2.34 and later); with an auditor, the libraries of the
/// program must fit in it, too.
pub const TLS_SURPLUS: u64 = 1664;

/// Prints the closure of `program` in the environment of this process. Returns the exit code: 0, or 1 when a library is missing
/// without which the program does not start. A file that is no program is a usage error (exit code 2).
pub fn run(program: &Path, json: bool) -> Result<u8> {
    let environment = Environment::current().op("find the working directory")?;
    let closure = resolve(&FileSystem, &environment, program, |_, _| {})?;
    let totals = Totals::of(&closure);
    let report = if json { format!("{:#}\n", as_json(&closure, &totals)) } else { as_text(&closure, &totals) };
    match std::io::stdout().lock().write_all(report.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(EXIT_FAILED),
        written => written.op("write the report")?,
    }
    Ok(u8::from(closure.missing.iter().any(|missing| !missing.optional)))
}

/// Sums over a closure.
#[derive(Debug, PartialEq, Eq)]
struct Totals {
    objects: usize,
    bytes: u64,
    /// Of them, on file systems that other hosts see, too.
    shared_objects: usize,
    shared_bytes: u64,
    /// Static thread-local storage of all objects, with alignment.
    tls: u64,
}

impl Totals {
    fn of(closure: &Closure) -> Totals {
        let mut totals = Totals { objects: 0, bytes: 0, shared_objects: 0, shared_bytes: 0, tls: 0 };
        let mut shared_devices = HashMap::new();
        for object in &closure.objects {
            totals.objects += 1;
            totals.bytes = totals.bytes.saturating_add(object.size);
            if *shared_devices.entry(object.inode.0).or_insert_with(|| is_shared(&object.canonical)) {
                totals.shared_objects += 1;
                totals.shared_bytes = totals.shared_bytes.saturating_add(object.size);
            }
            if let Some(tls) = object.tls {
                let end = totals.tls.saturating_add(tls.size);
                totals.tls = end.checked_next_multiple_of(tls.align.max(1)).unwrap_or(u64::MAX);
            }
        }
        totals
    }
}

fn as_text(closure: &Closure, totals: &Totals) -> String {
    let mut out = String::new();
    let mut expanded = HashSet::new();
    // An explicit stack: the depth of a closure is the libraries' choice.
    let mut stack = vec![Line { depth: 0, name: None, target: Some(0), asker: 0 }];
    while let Some(line) = stack.pop() {
        let indent = "  ".repeat(line.depth);
        let Some(index) = line.target else {
            let name = line.name.unwrap_or_default();
            let missing =
                closure.missing.iter().find(|m| m.needed_by == line.asker && m.name.to_string_lossy() == name);
            let optional = if missing.is_some_and(|missing| missing.optional) { ", optional" } else { "" };
            _ = writeln!(out, "{indent}{name} => not found{optional}");
            let Some(missing) = missing else { continue };
            for dir in &missing.searched {
                _ = writeln!(out, "{indent}  searched {}", dir.display());
            }
            if let Some(reason) = &missing.reason {
                _ = writeln!(out, "{indent}  {reason}");
            }
            continue;
        };
        let object = &closure.objects[index];
        let first = expanded.insert(index);
        let name = line.name.filter(|name| **name != object.path.to_string_lossy());
        let arrow = name.map(|name| format!("{name} => ")).unwrap_or_default();
        let detail = if first { format!("({})", detail(object)) } else { "(above)".to_owned() };
        _ = writeln!(out, "{indent}{arrow}{} {detail}", object.path.display());
        if first {
            stack.extend(children(closure, index, line.depth + 1).into_iter().rev());
        }
    }
    let Totals { objects, bytes, shared_objects, shared_bytes, tls } = totals;
    _ = writeln!(
        out,
        "\n{objects} objects, {bytes} bytes; {shared_objects} of them, {shared_bytes} bytes, on shared file systems"
    );
    _ = writeln!(out, "static TLS {tls} bytes; glibc's surplus is {TLS_SURPLUS} bytes");
    let required = closure.missing.iter().filter(|missing| !missing.optional).count();
    if required > 0 {
        _ = writeln!(out, "{required} not found: the program does not start");
    }
    out
}

/// A line of the tree to be written.
struct Line {
    depth: usize,
    name: Option<String>,
    target: Option<usize>,
    asker: usize,
}

/// What hangs below an object: what came with it (its interpreter, the preloads), then what it asks for.
fn children(closure: &Closure, index: usize, depth: usize) -> Vec<Line> {
    let attached = |(_, object): &(usize, &Object)| {
        object.needed_by == Some(index)
            && matches!(object.how, How::Script | How::Env | How::Program | How::Interpreter | How::Preload)
    };
    let attached = closure.objects.iter().enumerate().filter(attached);
    let attached = attached.map(|(child, _)| Line { depth, name: None, target: Some(child), asker: index });
    let needs = closure.objects[index].needs.iter();
    let needs = needs.map(|(name, target)| {
        let name = Some(name.to_string_lossy().into_owned());
        Line { depth, name, target: *target, asker: index }
    });
    let preloads = closure.missing.iter().filter(|missing| {
        missing.needed_by == index && !closure.objects[index].needs.iter().any(|(name, _)| *name == missing.name)
    });
    let preloads = preloads.map(|missing| {
        let name = Some(missing.name.to_string_lossy().into_owned());
        Line { depth, name, target: None, asker: index }
    });
    attached.chain(preloads).chain(needs).collect()
}

fn detail(object: &Object) -> String {
    let mut detail = format!("{}, {} bytes", object.how.as_str(), object.size);
    if let Some(tls) = object.tls {
        _ = write!(detail, ", TLS {}{}", tls.size, if tls.must_be_static { " static" } else { "" });
    }
    detail
}

fn as_json(closure: &Closure, totals: &Totals) -> Value {
    let object = |object: &Object| {
        json!({
            "path": object.path.to_string_lossy(),
            "canonical": object.canonical.to_string_lossy(),
            "soname": object.soname.as_ref().map(|name| name.to_string_lossy()),
            "how": object.how.as_str(),
            "needed_by": object.needed_by,
            "bytes": object.size,
            "tls": object.tls.map(|tls| json!({"bytes": tls.size, "align": tls.align, "static": tls.must_be_static})),
            "needs": object.needs.iter().map(|(name, target)| json!({"name": name.to_string_lossy(), "object": target}))
                .collect::<Vec<_>>(),
        })
    };
    let missing = closure.missing.iter().map(|missing| {
        json!({
            "name": missing.name.to_string_lossy(),
            "needed_by": missing.needed_by,
            "optional": missing.optional,
            "searched": missing.searched.iter().map(|dir| dir.to_string_lossy()).collect::<Vec<_>>(),
            "reason": missing.reason,
        })
    });
    json!({
        "program": closure.program,
        "interpreter": closure.interpreter,
        "objects": closure.objects.iter().map(object).collect::<Vec<_>>(),
        "missing": missing.collect::<Vec<_>>(),
        "directories": closure.directories.iter().map(|dir| dir.canonical.to_string_lossy()).collect::<Vec<_>>(),
        "totals": {
            "objects": totals.objects,
            "bytes": totals.bytes,
            "shared_objects": totals.shared_objects,
            "shared_bytes": totals.shared_bytes,
            "static_tls": totals.tls,
            "static_tls_surplus": TLS_SURPLUS,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_this_machines_shell() {
        let environment = Environment { cwd: "/".into(), ..Environment::default() };
        let closure = resolve(&FileSystem, &environment, Path::new("bin/sh"), |_, _| {}).unwrap();
        let totals = Totals::of(&closure);
        assert_eq!(totals.objects, closure.objects.len());
        let text = as_text(&closure, &totals);
        assert!(text.starts_with("bin/sh (program, "), "{text}");
        assert!(closure.objects.iter().all(|object| text.contains(&*object.path.to_string_lossy())), "{text}");
        let json = as_json(&closure, &totals);
        assert_eq!(json["objects"][0]["how"], "program");
        assert_eq!(json["totals"]["bytes"], totals.bytes);
    }

    #[test]
    fn a_text_file_is_a_usage_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "plain text, long enough for a header").unwrap();
        let error = run(file.path(), false).unwrap_err();
        assert_eq!((error.exit_code(), error.to_string().contains("not an ELF file")), (2, true), "{error}");
        assert_eq!(run(Path::new("/nonexistent/program"), false).unwrap_err().exit_code(), 2);
    }
}
