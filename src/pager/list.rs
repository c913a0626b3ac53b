//! `--memory`: which memory servers, found by name.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::sys::resident::SERVERS;

/// Where a server listens unless told otherwise.
pub const PORT: u16 = 20000;

/// The servers of a list `HOST[:PORT],...`: as they are named, and where they are.
///
/// # Errors
/// The list cannot be understood, names too many, or a host is not known.
pub fn find(list: &str) -> Result<Vec<(String, String)>> {
    let words: Vec<&str> = list.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    let problem = match words.len() {
        0 => Some("it names no server".to_owned()),
        n if n > SERVERS => Some(format!("it names {n} servers, {SERVERS} can be used")),
        _ => None,
    };
    if let Some(problem) = problem {
        return Err(Error::usage("use the memory servers", problem).on(list));
    }
    words.into_iter().map(|word| Ok((word.to_owned(), address(word)?.to_string()))).collect()
}

fn address(word: &str) -> Result<SocketAddr> {
    if let Ok(address) = word.parse() {
        return Ok(address);
    }
    let (host, port) = word.rsplit_once(':').unwrap_or((word, ""));
    let port = if port.is_empty() { Ok(PORT) } else { port.parse() };
    let port = port.map_err(|_| {
        Error::usage("use the memory server", "what follows its name is no port").on(word).remedy("HOST or HOST:PORT")
    })?;
    let ip = host.parse().ok().or_else(|| in_hosts(&fs::read_to_string("/etc/hosts").ok()?, host));
    let ip = ip
        .or_else(|| ask(host))
        .ok_or_else(|| Error::usage("find the memory server", "its name is not known").on(word));
    Ok(SocketAddr::new(ip?, port))
}

/// A name's IPv4 address in a file like `/etc/hosts`.
fn in_hosts(text: &str, host: &str) -> Option<IpAddr> {
    text.lines().find_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let ip: IpAddr = words.next()?.parse().ok()?;
        (ip.is_ipv4() && words.any(|name| name == host)).then_some(ip)
    })
}

/// What the system's own libraries say: they would load modules into a static program.
fn ask(host: &str) -> Option<IpAddr> {
    let asked =
        Command::new("getent").args(["ahostsv4", host]).stderr(Stdio::null()).stdin(Stdio::null()).output().ok()?;
    String::from_utf8_lossy(&asked.stdout).split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_by_name_and_number() {
        let found = find("192.0.2.1:7, localhost ,127.0.0.1").unwrap();
        let all: Vec<&str> = found.iter().map(|(_, address)| &**address).collect();
        assert_eq!(all, ["192.0.2.1:7", "127.0.0.1:20000", "127.0.0.1:20000"]);
        assert_eq!(found[1].0, "localhost");
        assert_eq!(in_hosts("127.0.0.1 a\n::1 n\n192.0.2.9 m n # o\n", "n"), Some([192, 0, 2, 9].into()));
        for (list, says) in [
            ("", "names no server"),
            ("no-such-host.invalid", "not known"),
            ("a:20G", "no port"),
            (&"127.0.0.1,".repeat(17), "16 can be used"),
        ] {
            let error = find(list).unwrap_err();
            assert!(error.to_string().contains(says) && error.exit_code() == 2, "{error}");
        }
    }
}
