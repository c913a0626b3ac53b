//! The flags of `exec` and `session run` that say which memory of other hosts programs use: `--memory`, `--local-mb`, `--mirror`, `--key`.

use std::path::Path;

use crate::launch::donors::{self, Donor};
use crate::net::auth::SessionKey;
use crate::net::wire::borrow::{Borrow, Lender};
use crate::pager::{budget, key, list};
use crate::sys::resident::SERVERS;
use crate::{Error, Result};

/// The memory that programs are to use; `None`: their nodes'.
pub(super) fn memory(
    list: Option<&str>,
    local_mb: Option<u32>,
    mirror: bool,
    key: Option<&Path>,
) -> Result<Option<Borrow>> {
    let Some(list) = list else {
        let given = [("use --mirror", mirror), ("use --local-mb", local_mb.is_some()), ("use --key", key.is_some())];
        let Some((flag, _)) = given.iter().find(|(_, given)| *given) else { return Ok(None) };
        let error = Error::usage(*flag, "there is no other memory to use");
        return Err(error.remedy("name hosts that lend some with --memory"));
    };
    let local = local_mb.map(|mb| u64::from(mb) * 1_000_000 / 4096 * 4096);
    if let Some(mb) = local_mb.filter(|mb| u64::from(*mb) * 1_000_000 < budget::LEAST) {
        let least = budget::LEAST.div_ceil(1_000_000);
        let cause = format!("it is less than {least}, which each program needs for what comes and goes");
        let error = Error::usage("use --local-mb", cause).remedy(format!("say {least} or more"));
        return Err(error.on(mb.to_string()));
    }
    let mut servers: Vec<Lender> = Vec::new();
    for donor in donors::parse(list)? {
        let server = lender(&donor)?;
        // It would have both copies, or what two are to have.
        if let Some(other) = servers.iter().find(|other| server.lend == 0 && other.addresses == server.addresses) {
            let cause = format!("it is the same server as {}", other.name);
            return Err(Error::usage("use --memory", cause).on(server.name).remedy("name each server once"));
        }
        servers.push(server);
    }
    if servers.len() > SERVERS {
        let cause = format!("it names {} servers, {SERVERS} can be used", servers.len());
        return Err(Error::usage("use --memory", cause).on(list));
    }
    if mirror && servers.len() < 2 {
        let error = Error::usage("use --mirror", "copies take two memory servers, and one is named");
        return Err(error.on(list));
    }
    // Those that the job starts take any key; those that run have the user's.
    let running = servers.iter().any(|server| server.lend == 0);
    if let Some(key) = key.filter(|_| !running) {
        let error = Error::usage("use --key", "the servers that a job starts have a key of their own");
        return Err(error.on(key));
    }
    let SessionKey(key) = match key {
        _ if !running => SessionKey::random(),
        Some(path) => key::read(path)?,
        None => key::read(&key::place()?)?,
    };
    Ok(Some(Borrow { servers, local, mirror, key, nonce: [0; 32] }))
}

fn lender(donor: &Donor) -> Result<Lender> {
    Ok(match donor {
        Donor::Running { host, port } => {
            let name = if *port == list::PORT { host.clone() } else { format!("{host}:{port}") };
            let addresses = list::addresses(host, *port)?.iter().map(ToString::to_string).collect();
            Lender { name, addresses, lend: 0 }
        }
        Donor::Started { host, bytes } => Lender { name: host.login(), addresses: Vec::new(), lend: *bytes },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_named() {
        let list = Some("localhost,[::1]:20000");
        for (list, local, mirror, key, says) in [
            (None, Some(20), false, None, "use --local-mb"),
            (None, None, true, None, "use --mirror"),
            (None, None, false, Some("/k"), "use --key"),
            (list, Some(15), false, None, "it is less than 16"),
            (Some("localhost,127.0.0.1:20000"), None, true, None, "the same server as localhost"),
            (Some("localhost"), None, true, None, "one is named"),
            (Some("n[1-17]:1G"), None, false, None, "17 servers, 16 can be used"),
            (Some("n1:1G"), None, false, Some("/k"), "have a key of their own"),
            (list, None, true, Some("/nonexistent/k"), "hpcrt memserver makes it"),
        ] {
            let error = memory(list, local, mirror, key.map(Path::new)).unwrap_err();
            assert!(error.to_string().contains(says) && error.exit_code() == 2, "{error}");
        }
    }
}
