//! What a member says on its descriptor, and what it hears: docs/COLLECTIVES.md. Two languages, told apart line by line.
//!
//! ```text
//! request   VERB COUNT [SECONDS]\n  then COUNT items      item   LENGTH\n  LENGTH bytes
//! reply     ok COUNT\n              then COUNT items  |  lost RANKS WHY\n  |  late RANKS WHY\n  |  error WHY\n
//! ```
//!
//! and version 1 of the Process Management Interface, as MPICH's and Open MPI's clients speak it: `cmd=NAME key=value ...\n`.

use std::time::Duration;

use super::{TOTAL_MAX, name};
use crate::net::wire::collective::Act;

/// Bytes in a line, at most.
const LINE_MAX: usize = 64 << 10;

/// What a member asks.
#[derive(Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// An operation, and how long it may take.
    Call(Act, Vec<&'a [u8]>, Option<Duration>),
    Put(&'a [u8], &'a [u8]),
    Get(&'a [u8]),
    /// A message to the other one of front end and master.
    Send(&'a [u8]),
    /// The next message from there, and how long that may take.
    Receive(Option<Duration>),
    /// Of the front end: who is there.
    Members,
    /// A place on the board that members share with their agent.
    Board,
    /// There are requests on it.
    Look,
    Pmi(Pmi<'a>),
    /// None of these; why, without a line end.
    Unknown(String),
}

/// What a client of PMI-1 asks.
#[derive(Debug, PartialEq, Eq)]
pub enum Pmi<'a> {
    Init {
        version: &'a [u8],
    },
    MaximalLengths,
    AppNumber,
    KeySpace,
    UniverseSize,
    Put {
        key: &'a [u8],
        value: &'a [u8],
    },
    Get {
        key: &'a [u8],
    },
    Barrier,
    Finalize,
    Abort {
        code: i32,
        message: &'a [u8],
    },
    Publish {
        service: &'a [u8],
        port: &'a [u8],
    },
    Unpublish {
        service: &'a [u8],
    },
    LookUp {
        service: &'a [u8],
    },
    /// A block of a request to start more processes. `last`: the one that is answered.
    Spawn {
        last: bool,
    },
}

/// What a member says is not in any language of ours; nothing after it can be understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Garbled(pub &'static str);

/// The first request in `bytes` and its length; `None`: it is not all there yet.
///
/// # Errors
/// Where the request ends cannot be told.
pub fn parse(bytes: &[u8]) -> Result<Option<(Request<'_>, usize)>, Garbled> {
    let Some((line, rest)) = line(bytes)? else { return Ok(None) };
    if let Some(words) = line.strip_prefix(b"cmd=") {
        return Ok(Some((pmi(words), bytes.len() - rest.len())));
    }
    if line.starts_with(b"mcmd=") {
        // One or more blocks, each ended by a line of its own.
        let end = memchr::memmem::find(bytes, b"endcmd\n").map(|at| at + b"endcmd\n".len());
        return match end {
            None if bytes.len() > LINE_MAX => Err(Garbled("a command of several lines is too long")),
            end => Ok(end.map(|len| (Request::Pmi(spawn(&bytes[..len])), len))),
        };
    }
    ours(bytes.len(), line, rest)
}

fn line(bytes: &[u8]) -> Result<Option<(&[u8], &[u8])>, Garbled> {
    match memchr::memchr(b'\n', &bytes[..bytes.len().min(LINE_MAX)]) {
        Some(at) => Ok(Some((&bytes[..at], &bytes[at + 1..]))),
        None if bytes.len() >= LINE_MAX => Err(Garbled("a line is too long")),
        None => Ok(None),
    }
}

/// More than a job lasts: a moment so far ahead can be told, and one much farther cannot.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

fn number<T: std::str::FromStr>(word: &[u8]) -> Option<T> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

fn ours<'a>(len: usize, line: &'a [u8], mut rest: &'a [u8]) -> Result<Option<(Request<'a>, usize)>, Garbled> {
    let mut words = line.split(|b| *b == b' ').filter(|word| !word.is_empty());
    let verb = words.next().unwrap_or_default();
    let count: usize = number(words.next().unwrap_or(b"0")).ok_or(Garbled("the number of items is none"))?;
    let within = match words.next() {
        None => None,
        Some(word) => {
            let seconds = number(word).and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            Some(seconds.ok_or(Garbled("the number of seconds is none"))?.min(FOR_EVER))
        }
    };
    if count > TOTAL_MAX / 2 {
        return Err(Garbled("there are too many items"));
    }
    let mut items = Vec::new();
    let mut total = 0usize;
    for _ in 0..count {
        let Some((length, after)) = self::line(rest)? else { return Ok(None) };
        let length: usize = number(length).ok_or(Garbled("the length of an item is none"))?;
        total = total.saturating_add(length);
        if total > TOTAL_MAX {
            return Err(Garbled("the items are too long"));
        }
        let Some((item, after)) = after.split_at_checked(length) else { return Ok(None) };
        items.push(item);
        rest = after;
    }
    let acts = [Act::Barrier, Act::Broadcast, Act::Gather, Act::Scatter, Act::AllGather];
    let request = match (acts.into_iter().find(|act| name(*act).as_bytes() == verb), verb, &items[..]) {
        (Some(act), ..) => Request::Call(act, items, within),
        (_, b"put", [key, value]) => Request::Put(key, value),
        (_, b"get", [key]) => Request::Get(key),
        (_, b"send", [message]) => Request::Send(message),
        (_, b"receive", []) => Request::Receive(within),
        (_, b"members", []) => Request::Members,
        (_, b"board1", []) => Request::Board,
        (_, b"look", []) => Request::Look,
        _ => Request::Unknown(format!("{} with {count} items is no request", printable(verb))),
    };
    Ok(Some((request, len - rest.len())))
}

/// Clients of PMI-1 end most values at a blank, but let the last, and `value` always, run to the end of the line.
fn pmi(line: &[u8]) -> Request<'_> {
    let (command, mut rest) = cut(line);
    let (mut fields, mut value) = (Vec::new(), None);
    while !rest.is_empty() {
        if let Some(text) = rest.strip_prefix(b"value=") {
            // Some write it first.
            let last = memchr::memmem::find(text, b" key=").is_none();
            let (text, after) = if last { (text, &b""[..]) } else { cut(text) };
            (value, rest) = (Some(text), after);
            continue;
        }
        let (field, after) = cut(rest);
        if let Some(at) = memchr::memchr(b'=', field) {
            // The last field of these may contain blanks, too.
            let whole = matches!(&field[..at], b"message" | b"error_msg" | b"port");
            fields.push((&field[..at], if whole { &rest[at + 1..] } else { &field[at + 1..] }));
            if whole {
                break;
            }
        }
        rest = after;
    }
    let field = |names: &[&str]| {
        let found = fields.iter().find(|(name, _)| names.iter().any(|n| n.as_bytes() == *name));
        found.map_or(&b""[..], |(_, value)| value)
    };
    Request::Pmi(match command {
        b"init" => Pmi::Init { version: field(&["pmi_version"]) },
        b"get_maxes" => Pmi::MaximalLengths,
        b"get_appnum" => Pmi::AppNumber,
        b"get_my_kvsname" => Pmi::KeySpace,
        b"get_universe_size" => Pmi::UniverseSize,
        b"put" => Pmi::Put { key: field(&["key"]), value: value.unwrap_or_default() },
        b"get" => Pmi::Get { key: field(&["key"]) },
        b"barrier_in" => Pmi::Barrier,
        b"finalize" => Pmi::Finalize,
        b"abort" => Pmi::Abort {
            code: number(field(&["exitcode", "exit_code"])).unwrap_or(1),
            message: field(&["message", "error_msg"]),
        },
        b"publish_name" => Pmi::Publish { service: field(&["service"]), port: field(&["port"]) },
        b"unpublish_name" => Pmi::Unpublish { service: field(&["service"]) },
        b"lookup_name" => Pmi::LookUp { service: field(&["service"]) },
        other => return Request::Unknown(format!("{} is no command of PMI-1", printable(other))),
    })
}

fn spawn(block: &[u8]) -> Pmi<'_> {
    let field = |name: &[u8]| block.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(name));
    Pmi::Spawn { last: field(b"totspawns=") == field(b"spawnssofar=") }
}

/// The first word and what follows the blanks behind it.
fn cut(line: &[u8]) -> (&[u8], &[u8]) {
    let at = memchr::memchr(b' ', line).unwrap_or(line.len());
    (&line[..at], line[at..].trim_ascii_start())
}

fn printable(word: &[u8]) -> String {
    word.escape_ascii().take(80).map(char::from).collect()
}

/// The reply that an operation is done, with these items.
pub fn done(items: &[&[u8]]) -> Vec<u8> {
    let mut reply = format!("ok {}\n", items.len()).into_bytes();
    for item in items {
        reply.extend_from_slice(format!("{}\n", item.len()).as_bytes());
        reply.extend_from_slice(item);
    }
    reply
}

/// The reply that it is not.
pub fn error(why: &str) -> Vec<u8> {
    format!("error {}\n", why.replace('\n', " ")).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_in_any_pieces() {
        let bytes = b"broadcast 1 2.5\n5\nhe\nlobarrier\n";
        for cut in 0..23 {
            assert_eq!(parse(&bytes[..cut]), Ok(None), "{cut}");
        }
        let within = Some(Duration::from_millis(2500));
        assert_eq!(parse(bytes), Ok(Some((Request::Call(Act::Broadcast, vec![b"he\nlo"], within), 23))));
        assert_eq!(parse(&bytes[23..]), Ok(Some((Request::Call(Act::Barrier, vec![], None), 8))));
        assert!(matches!(parse(b"what 1\n0\n"), Ok(Some((Request::Unknown(_), 9)))));
        for garbled in ["gather x\n", "gather 1\n-1\n", "gather 1\n99999999999\n", "gather 99999999999\n", "put 0 -1\n"]
        {
            assert!(parse(garbled.as_bytes()).is_err(), "{garbled}");
        }
    }

    #[test]
    fn pmi_as_its_clients_write_it() {
        let is = |line: &str, expected: Pmi<'_>| {
            let line = format!("{line}\n");
            assert_eq!(parse(line.as_bytes()), Ok(Some((Request::Pmi(expected), line.len()))), "{line}");
        };
        is("cmd=init pmi_version=1 pmi_subversion=1", Pmi::Init { version: b"1" });
        is("cmd=put kvsname=k key=a value=b c -", Pmi::Put { key: b"a", value: b"b c -" });
        is("cmd=put kvsname=k value=b key=a", Pmi::Put { key: b"a", value: b"b" });
        is("cmd=get kvsname=k key=a ", Pmi::Get { key: b"a" });
        is("cmd=barrier_in", Pmi::Barrier);
        is("cmd=abort exitcode=7 message=it is over", Pmi::Abort { code: 7, message: b"it is over" });
        is("cmd=abort exit_code=-1 error_msg=x", Pmi::Abort { code: -1, message: b"x" });
        is("cmd=publish_name service=s port=tag#0$x y", Pmi::Publish { service: b"s", port: b"tag#0$x y" });
        assert_eq!(parse(b"mcmd=spawn\nnprocs=1\n"), Ok(None));
        let spawn = |last, len| Ok(Some((Request::Pmi(Pmi::Spawn { last }), len)));
        assert_eq!(parse(b"mcmd=spawn\nnprocs=1\nendcmd\nx"), spawn(true, 27));
        assert_eq!(parse(b"mcmd=spawn\ntotspawns=2\nspawnssofar=1\nendcmd\n"), spawn(false, 44));
        assert!(matches!(parse(b"cmd=dance\n"), Ok(Some((Request::Unknown(_), 10)))));
    }
}
