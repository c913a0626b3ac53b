//! The status object for people.

use std::collections::BTreeMap;
use std::fmt::Write;

use indicatif::{HumanBytes, HumanCount};
use serde_json::Value;

use super::fold::fold;
use super::placement::plural;
use super::stats::counted;

/// Hosts that are named one by one, at most.
const SLOWEST: usize = 10;

/// Kind of a memory server.
const LENDER: &str = "memserver";

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// `3.2 s`, `4 min 10 s`, `2 h 5 min`.
fn time(seconds: &Value) -> String {
    let seconds = seconds.as_f64().unwrap_or(0.0);
    match seconds as u64 {
        0..60 => format!("{seconds:.1} s"),
        whole @ 60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        whole => format!("{} h {} min", whole / 3600, whole / 60 % 60),
    }
}

/// A line for each, under a heading; nothing for none.
pub fn list(all: &[Value]) -> String {
    let mut rows = vec![["id", "kind", "state", "hosts up", "jobs", "since", "program"].map(str::to_owned)];
    for one in all {
        if one["kind"] == LENDER {
            let clients = plural(items(&one["clients"]).len() as u64, "client");
            let (used, lends) = (HumanBytes(number(&one["used"])), HumanBytes(number(&one["lends"])));
            let (id, kind, phase) = (text(&one["id"]), text(&one["kind"]), text(&one["phase"]));
            let words = format!("{used} of {lends} in use by {clients}");
            rows.push([id, kind, phase, "", "", &time(&one["seconds"]), &words].map(str::to_owned));
            continue;
        }
        let jobs = items(&one["jobs"]);
        let program = one["program"].as_str().map(str::to_owned).unwrap_or_else(|| {
            let mut programs: Vec<&str> = jobs.iter().map(|job| text(&job["program"])).collect();
            programs.dedup();
            programs.join(", ")
        });
        rows.push([
            text(&one["id"]).to_owned(),
            text(&one["kind"]).to_owned(),
            text(&one["phase"]).to_owned(),
            format!("{} of {}", one["hosts"]["up"], one["hosts"]["named"]),
            jobs.len().to_string(),
            time(&one["seconds"]),
            program,
        ]);
    }
    if all.is_empty() { String::new() } else { columns(&rows) }
}

/// Rows whose cells stand below each other; the last is as long as it is.
fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut shown = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            write!(line, "{cell:width$}  ").expect("a String takes all");
        }
        shown.push_str(line.trim_end());
        shown.push('\n');
    }
    shown
}

/// All about a memory server.
fn lender(status: &Value) -> String {
    let mut shown = format!(
        "memory server {}: {}, process {}\n  at        {}\n  in use    {} of {}\n",
        text(&status["id"]),
        time(&status["seconds"]),
        status["pid"],
        items(&status["addresses"]).iter().map(text).collect::<Vec<_>>().join(", "),
        HumanBytes(number(&status["used"])),
        HumanBytes(number(&status["lends"])),
    );
    let mut rows = vec![["bytes", "host, process, program"].map(str::to_owned)];
    for client in items(&status["clients"]) {
        let bytes = format!("{:>10}", HumanBytes(number(&client["bytes"])).to_string());
        rows.push([bytes, text(&client["client"]).to_owned()]);
    }
    if rows.len() > 1 {
        shown += &columns(&rows);
    }
    shown
}

/// What a job's programs have of other nodes' memory, a line each.
fn memory(memory: &Value) -> Vec<String> {
    let (faults, ahead, seconds) = (&memory["faults"], &memory["ahead"], &memory["fault_seconds"]);
    let away = items(&memory["away"]).iter().map(|one| (number(&one["bytes"]), text(&one["server"])));
    let away: Vec<String> = away.map(|(bytes, server)| format!("{} with {server}", HumanBytes(bytes))).collect();
    let bare = memory["without_copy"].as_f64().filter(|part| *part > 0.0);
    let bare = bare.map_or(String::new(), |part| format!("; {:.0} % without a copy", part * 100.0));
    let micros = |which: &str| seconds[which].as_f64().map_or("-".to_owned(), |s| format!("{:.0} us", s * 1e6));
    let hits = ahead["hit_rate"].as_f64().map_or(String::new(), |rate| format!(", {:.0} % of it used", rate * 100.0));
    vec![
        format!(
            "{} borrow: {} of {} here; {}",
            plural(number(&memory["running"]), "program"),
            HumanBytes(number(&memory["resident"])),
            HumanBytes(number(&memory["budget"])),
            away.join(", ") + &bare,
        ),
        format!(
            "{}: {} waited for a server ({} half of them, {} nearly all), {} foreseen, {} fresh",
            counted(
                ["fetched", "foreseen", "fresh", "awaited"].iter().map(|kind| number(&faults[*kind])).sum(),
                "fault"
            ),
            HumanCount(number(&faults["fetched"])),
            micros("p50"),
            micros("p99"),
            HumanCount(number(&faults["foreseen"])),
            HumanCount(number(&faults["fresh"])),
        ),
        format!(
            "{} received, {} sent; {} ahead{hits}; {} for room, {:.1} s",
            HumanBytes(number(&memory["bytes"]["received"])),
            HumanBytes(number(&memory["bytes"]["sent"])),
            HumanBytes(number(&ahead["bytes"])),
            counted(number(&memory["stalls"]["count"]), "wait"),
            memory["stalls"]["seconds"].as_f64().unwrap_or(0.0),
        ),
    ]
}

/// All about one.
pub fn one(status: &Value) -> String {
    if status["kind"] == LENDER {
        return lender(status);
    }
    let hosts = &status["hosts"];
    let mut shown = format!(
        "{} {}: {}, {}, process {}\n",
        text(&status["kind"]),
        text(&status["id"]),
        text(&status["phase"]),
        time(&status["seconds"]),
        status["pid"]
    );
    let mut line = |title: &str, what: String| writeln!(shown, "  {title:9} {what}").expect("a String takes all");
    let mut up = format!("{} of {} up", number(&hosts["up"]), plural(number(&hosts["named"]), "host"));
    for (count, what) in [("starting", "starting"), ("lost", "lost"), ("silent", "did not answer")] {
        if number(&hosts[count]) > 0 {
            up += &format!(", {} {what}", number(&hosts[count]));
        }
    }
    line("hosts", up);
    let nodes = items(&status["nodes"]);
    if let Some(tree) = tree(nodes) {
        line("tree", tree);
    }
    for state in ["starting", "silent", "lost"] {
        let names: Vec<&str> = nodes.iter().filter(|n| n["state"] == state).map(|n| text(&n["host"])).collect();
        if !names.is_empty() {
            line(state, fold(&names));
        }
    }
    let reader = &status["reader"];
    line(
        "read",
        format!(
            "{}, {}, {} at the shared file system",
            counted(number(&reader["files"]), "file"),
            HumanBytes(number(&reader["bytes"])),
            counted(number(&reader["operations"]), "operation"),
        ),
    );
    if let Some(store) = store(nodes) {
        line("stores", store);
    }
    for job in items(&status["jobs"]) {
        let (ranks, on, captures) = (&job["ranks"], &job["hosts"], job["view"] == true);
        let hosts = plural(number(&on["all"]), "host");
        let hosts = if captures { format!("{} of {hosts} loaded", number(&on["loaded"])) } else { hosts };
        line(
            &format!("job {}", job["job"]),
            format!(
                "{}: {}, {}; {} of {} ended; {hosts}",
                text(&job["program"]),
                text(&job["phase"]),
                time(&job["seconds"]),
                number(&ranks["ended"]),
                plural(number(&ranks["all"]), "rank"),
            ),
        );
        if !job["memory"].is_null() {
            memory(&job["memory"]).into_iter().for_each(|words| line("memory", words));
        }
        let (operations, bytes) = (&job["operations"], &job["bytes"]);
        if captures {
            line(
                "",
                format!(
                    "{} avoided; {} and {} past the stores",
                    counted(number(&operations["avoided"]), "operation"),
                    HumanCount(number(&operations["original"])),
                    HumanBytes(number(&bytes["original"])),
                ),
            );
        }
    }
    shown += &paths("read from the shared file system", &status["paths"]);
    for job in items(&status["jobs"]) {
        let title = format!("what ranks of job {} took from it themselves", job["job"]);
        shown += &paths(&title, &job["originals"]);
    }
    shown += &slowest(nodes);
    for job in items(&status["jobs"]).iter().filter(|job| job["processes"].is_array()) {
        let title = ["job".to_owned(), "rank".to_owned(), "host".to_owned(), "process".to_owned()];
        let row = |process: &Value| {
            let pid = process["pid"].as_u64().map_or("-".to_owned(), |pid| pid.to_string());
            [job["job"].to_string(), process["rank"].to_string(), text(&process["host"]).to_owned(), pid]
        };
        let rows: Vec<_> = std::iter::once(title).chain(items(&job["processes"]).iter().map(row)).collect();
        shown += &columns(&rows);
    }
    shown
}

/// How the control tree is built.
fn tree(nodes: &[Value]) -> Option<String> {
    let mut depth: BTreeMap<u64, u32> = BTreeMap::from([(0, 0)]);
    let mut children: BTreeMap<u64, u32> = BTreeMap::new();
    for node in nodes {
        let (id, parent) = (number(&node["node"]), number(&node["parent"]));
        // Parents come before their children.
        depth.insert(id, depth.get(&parent).copied().unwrap_or(0) + 1);
        *children.entry(parent).or_default() += 1;
    }
    let levels = u64::from(*depth.values().max()?);
    let widest = children.values().max()?;
    let at_root = children.get(&0).copied().unwrap_or(0);
    Some(format!("{}; {at_root} below the front end, at most {widest} below a node", plural(levels, "level")))
}

/// What the nodes hold and had to ask for.
fn store(nodes: &[Value]) -> Option<String> {
    let told = || nodes.iter().filter(|node| number(&node["stored"]) > 0);
    let (least, most) = (told().min_by_key(|n| number(&n["stored"]))?, told().max_by_key(|n| number(&n["stored"]))?);
    let stored = match (number(&least["stored"]), number(&most["stored"])) {
        (a, b) if a == b => format!("{} on each host", HumanBytes(b)),
        (a, b) => format!("{} to {} ({})", HumanBytes(a), HumanBytes(b), text(&most["host"])),
    };
    let received: u64 = told().map(|node| number(&node["received"])).sum();
    let pulled = match told().map(|node| number(&node["pulled"])).sum() {
        0 => String::new(),
        pulled => format!(", {} of it because they asked", HumanBytes(pulled)),
    };
    let misses: u64 = told().map(|node| number(&node["misses"])).sum();
    let most = told().max_by_key(|node| number(&node["misses"]))?;
    let most = match number(&most["misses"]) {
        0 => String::new(),
        misses => format!(", most by {} ({misses})", text(&most["host"])),
    };
    let misses = counted(misses, "path");
    Some(format!("{stored}; {} sent to them{pulled}; {misses} asked for before they came{most}", HumanBytes(received)))
}

fn paths(title: &str, paths: &Value) -> String {
    let mut rows = vec![["operations", "bytes", title, ""].map(str::to_owned)];
    for path in items(paths) {
        let by = path["by"].as_object().into_iter().flatten();
        let mut by: Vec<(&String, u64)> = by.map(|(why, count)| (why, number(count))).collect();
        by.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let why: Vec<String> = match &by[..] {
            [(why, _)] => vec![why.to_string()],
            several => several.iter().map(|(why, count)| format!("{why} {count}")).collect(),
        };
        rows.push([
            format!("{:>10}", HumanCount(number(&path["operations"])).to_string()),
            format!("{:>10}", HumanBytes(number(&path["bytes"])).to_string()),
            text(&path["path"]).to_owned(),
            why.join(", "),
        ]);
    }
    if rows.len() > 1 { columns(&rows) } else { String::new() }
}

/// The hosts that need or needed longest to start their ranks.
fn slowest(nodes: &[Value]) -> String {
    let mut parts: Vec<(bool, f64, [String; 6])> = Vec::new();
    for node in nodes {
        for part in items(&node["jobs"]) {
            let seconds = &part["seconds"];
            let shown = |which: &str| seconds[which].as_f64().map_or("-".to_owned(), |s| format!("{s:.3} s"));
            let started = seconds["started"].as_f64();
            parts.push((
                started.is_none(),
                started.or(seconds["ordered"].as_f64()).unwrap_or(0.0),
                [
                    text(&node["host"]).to_owned(),
                    part["job"].to_string(),
                    shown("mounted"),
                    shown("loaded"),
                    started.map_or_else(|| format!("not in {}", shown("ordered")), |_| shown("started")),
                    shown("output"),
                ],
            ));
        }
    }
    if parts.is_empty() {
        return String::new();
    }
    parts.sort_by(|a, b| (b.0, b.1).partial_cmp(&(a.0, a.1)).unwrap_or(std::cmp::Ordering::Equal));
    let heading = ["slowest hosts", "job", "view", "loaded", "ranks started", "first output"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(heading).chain(parts.into_iter().take(SLOWEST).map(|(_, _, row)| row)).collect();
    columns(&rows)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lines_and_columns() {
        assert_eq!(list(&[]), "");
        let status = json!({
            "id": "x1", "kind": "job", "phase": "running", "seconds": 75.0, "pid": 7, "program": "./app",
            "hosts": { "named": 3, "up": 2, "starting": 0, "lost": 1, "silent": 0 },
            "reader": { "files": 1, "bytes": 1024, "operations": 12 },
            "paths": [{ "path": "/s/a", "operations": 11, "bytes": 1024, "by": { "closure": 1, "content": 10 } }],
            "jobs": [{
                "job": 1, "program": "./app", "phase": "running", "seconds": 70.0, "view": true,
                "ranks": { "all": 4, "ended": 1 }, "hosts": { "all": 2, "loaded": 2, "done": 0 },
                "operations": { "avoided": 5, "original": 0 }, "bytes": { "original": 0 }, "originals": [],
            }],
            "nodes": [
                { "node": 1, "parent": 0, "host": "a", "state": "up", "stored": 4096, "received": 5, "misses": 2, "jobs": [
                    { "job": 1, "seconds": { "ordered": 70.0, "mounted": 0.1, "loaded": 0.2, "started": 0.25, "output": null } },
                ]},
                { "node": 2, "parent": 1, "host": "b", "state": "up", "stored": 4096, "received": 5, "misses": 0, "jobs": [
                    { "job": 1, "seconds": { "ordered": 70.0, "mounted": 0.1, "loaded": null, "started": null, "output": null } },
                ]},
                { "node": 3, "parent": 1, "host": "c", "state": "lost" },
            ],
        });
        assert_eq!(
            list(std::slice::from_ref(&status)),
            "id  kind  state    hosts up  jobs  since       program\n\
             x1  job   running  2 of 3    1     1 min 15 s  ./app\n"
        );
        let shown = one(&status);
        for line in [
            "job x1: running, 1 min 15 s, process 7",
            "  hosts     2 of 3 hosts up, 1 lost",
            "  tree      2 levels; 1 below the front end, at most 2 below a node",
            "  lost      c",
            "  stores    4.00 KiB on each host; 10 B sent to them; 2 paths asked for before they came, most by a (2)",
            "  job 1     ./app: running, 1 min 10 s; 1 of 4 ranks ended; 2 of 2 hosts loaded",
            "        11    1.00 KiB  /s/a                              content 10, closure 1",
            "b              1    0.100 s  -        not in 70.000 s  -",
        ] {
            assert!(shown.contains(line), "{line:?} is not in\n{shown}");
        }
    }
}
