//! `--memory LIST`: memory servers that run, and hosts on which the job starts one.
//!
//! | item | meaning |
//! |---|---|
//! | `node2`, `node2:20001`, `192.0.2.7:20001`, `[::1]:20001` | a server that runs there, at this port (20000) |
//! | `node[2-5]:20G` | the job starts one on each of these hosts, which lends so much, and ends it |
//!
//! A port is a number and nothing else, a size has a unit: K, M, G, T (powers of 1000), Ki, Mi, Gi, Ti (of 1024), each with or without a B.

use std::net::{IpAddr, SocketAddr};

use super::hostlist::{self, Host};
use crate::error::{Error, Result};
use crate::pager::list::PORT;

/// One memory server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Donor {
    /// It runs there.
    Running { host: String, port: u16 },
    /// It is to be started, and to lend so many bytes.
    Started { host: Host, bytes: u64 },
}

/// Less would not hold what one program has under way.
const LEAST: u64 = 1_000_000;

/// Reads a list.
///
/// # Errors
/// Usage errors that name the item.
pub fn parse(list: &str) -> Result<Vec<Donor>> {
    let mut donors: Vec<Donor> = Vec::new();
    for item in items(list) {
        for donor in one(item)? {
            let started = |other: &Donor| matches!((other, &donor), (Donor::Started { host: a, .. }, Donor::Started { host: b, .. }) if a.name == b.name);
            if donors.contains(&donor) || donors.iter().any(started) {
                return Err(refused(item, "it names a server twice"));
            }
            donors.push(donor);
        }
    }
    if donors.is_empty() { Err(refused(list, "it names no server")) } else { Ok(donors) }
}

fn refused(item: &str, cause: impl Into<String>) -> Error {
    Error::usage("use --memory", cause.into())
        .on(item)
        .remedy("HOST or HOST:PORT is a server that runs, HOST:20G one that the job starts")
}

/// The items of a list: commas and blanks outside brackets separate them.
fn items(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0usize;
    let separates = move |c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && (c == ',' || c.is_ascii_whitespace())
    };
    list.split(separates).filter(|item| !item.is_empty())
}

fn one(item: &str) -> Result<Vec<Donor>> {
    let running = |host: &str, port| vec![Donor::Running { host: host.to_owned(), port }];
    if let Ok(ip) = item.parse::<IpAddr>() {
        return Ok(running(&ip.to_string(), PORT));
    }
    if let Ok(at) = item.parse::<SocketAddr>() {
        return Ok(running(&at.ip().to_string(), at.port()));
    }
    let (hosts, what) = item.rsplit_once(':').filter(|(_, what)| !what.contains(']')).unwrap_or((item, ""));
    let mut stdin = || Err(refused(item, "the servers cannot be read from standard input"));
    let hosts = hostlist::parse(hosts, &mut stdin)?;
    if what.bytes().all(|byte| byte.is_ascii_digit()) {
        let port = if what.is_empty() { Some(PORT) } else { what.parse().ok().filter(|port| *port > 0) };
        let port = port.ok_or_else(|| refused(item, format!("{what} is no port")))?;
        return Ok(hosts.into_iter().map(|host| Donor::Running { host: host.name, port }).collect());
    }
    let bytes = size(what).ok_or_else(|| refused(item, format!("{what:?} is neither a port nor a size")))?;
    if bytes < LEAST {
        return Err(refused(item, "that is less than 1M"));
    }
    Ok(hosts.into_iter().map(|host| Donor::Started { host, bytes }).collect())
}

/// Bytes of a number with a unit, such as `20G` or `1.5TiB`.
pub fn size(text: &str) -> Option<u64> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(at);
    let unit = unit.strip_suffix(['B', 'b']).unwrap_or(unit);
    let (letter, base) = match unit.strip_suffix('i') {
        Some(letter) => (letter, 1024f64),
        None => (unit, 1000f64),
    };
    let power = ["k", "m", "g", "t"].iter().position(|known| letter.eq_ignore_ascii_case(known))?;
    let bytes = number.parse::<f64>().ok()? * base.powi(i32::try_from(power).ok()? + 1);
    // Above what any machine has, and far below where a float is not exact to the page.
    (bytes < 1e17).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_sizes_are_told_apart() {
        let shown = |list: &str| {
            let show = |donor: Donor| match donor {
                Donor::Running { host, port } => format!("{host} at {port}"),
                Donor::Started { host, bytes } => format!("{} lends {bytes}", host.login()),
            };
            parse(list).unwrap().into_iter().map(show).collect::<Vec<_>>()
        };
        assert_eq!(shown("node[2-3]:20G"), ["node2 lends 20000000000", "node3 lends 20000000000"]);
        assert_eq!(shown("a,me@b:1.5GiB c:7"), ["a at 20000", "me@b lends 1610612736", "c at 7"]);
        assert_eq!(
            shown("[::1]:9,192.0.2.1,192.0.2.1:8,::1"),
            ["::1 at 9", "192.0.2.1 at 20000", "192.0.2.1 at 8", "::1 at 20000"]
        );
        assert_eq!(shown("n[1,3]:20001,n9:2m"), ["n1 at 20001", "n3 at 20001", "n9 lends 2000000"]);
    }

    #[test]
    fn mistakes_are_named() {
        for (list, says) in [
            ("", "names no server"),
            ("a:20X", "neither a port nor a size"),
            ("a:G", "neither a port nor a size"),
            ("a:70000", "no port"),
            ("a:0", "no port"),
            ("a:20K", "less than 1M"),
            ("a:99999999T", "neither a port nor a size"),
            ("a:1G,b,a:2G", "twice"),
            ("a,a:20000", "twice"),
            ("-", "standard input"),
            ("a[1-:2G", "not closed"),
        ] {
            let error = parse(list).unwrap_err();
            assert!(error.to_string().contains(says) && error.exit_code() == 2, "{list}: {error}");
        }
    }
}
