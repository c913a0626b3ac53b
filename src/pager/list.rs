//! Memory servers, found by name.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::net::listen::own;

/// Where a server listens unless told otherwise.
pub const PORT: u16 = 20000;

/// The addresses of a server that runs, best first. Many hosts have a loopback address for their own names (127.0.1.1), which would be another host on each: theirs
/// are taken in its place.
///
/// # Errors
/// The host is not known.
pub fn addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse() {
        return Ok(vec![SocketAddr::new(ip, port)]);
    }
    let ip = in_hosts(&fs::read_to_string("/etc/hosts").unwrap_or_default(), host)
        .or_else(|| ask(host))
        .ok_or_else(|| Error::usage("find the memory server", "its name is not known").on(host))?;
    let is_meant = !ip.is_loopback() || host == "localhost";
    let ours = if is_meant { Vec::new() } else { own() };
    let all = if ours.is_empty() { vec![ip] } else { ours };
    Ok(all.into_iter().map(|ip| SocketAddr::new(ip, port)).collect())
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
        let found = |host| addresses(host, 7).unwrap().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        assert_eq!(["192.0.2.1", "localhost", "::1"].map(found), ["192.0.2.1:7", "127.0.0.1:7", "[::1]:7"]);
        assert_eq!(in_hosts("127.0.0.1 a\n::1 n\n192.0.2.9 m n # o\n", "n"), Some([192, 0, 2, 9].into()));
        let error = addresses("no-such-host.invalid", 7).unwrap_err();
        assert!(error.to_string().contains("not known") && error.exit_code() == 2, "{error}");
    }
}
