//! Hostfiles: the forms of the common launchers in one parser, mixed at will.
//!
//! | line | from |
//! |---|---|
//! | `host` or any host list (see [`super::hostlist`]) | pdsh, all |
//! | `host:4` | MPICH |
//! | `host slots=4 max_slots=8` (`max-slots` too) | Open MPI |
//! | `4/host` | GNU parallel |
//! | `host` on several lines: one slot each | PBS, LSF |
//!
//! `#` starts a comment, blank lines are skipped.

use super::hostlist::{Bad, Host, Hosts, Items, parse_slots};
use crate::error::{Error, Result};

/// The hosts of a hostfile's text in order of first mention. `subject` names it in errors: its path, or "standard input".
///
/// # Errors
/// Usage errors that name the line and the position in it; a file without a host is one.
pub fn parse(text: &str, subject: &str) -> Result<Vec<Host>> {
    let error = |cause: String| Error::usage("read the hostfile", cause).on(subject);
    let mut hosts = Hosts::default();
    for (number, line) in text.lines().enumerate() {
        let line = line.split_once('#').map_or(line, |(before, _)| before).trim_end();
        add_line(&mut hosts, line)
            .map_err(|bad| error(format!("{} at line {}, character {}", bad.what, number + 1, bad.at + 1)))?;
    }
    hosts.finish().ok_or_else(|| error("it names no host".to_owned()))
}

fn add_line(hosts: &mut Hosts, line: &str) -> Result<(), Bad> {
    // The keys stand at the end; whatever is before the first is the host list.
    let keys = line.find('=').map_or(line.len(), |equals| {
        let key = line[..equals].trim_end();
        key.rfind(|c: char| c.is_ascii_whitespace() || c == ',').map_or(0, |blank| blank + 1)
    });
    let (list, keys) = line.split_at(keys);
    let (mut slots, mut max_slots) = (None, None);
    let place = |part: &str| part.as_ptr().addr() - line.as_ptr().addr();
    for pair in keys.split_ascii_whitespace() {
        let bad = |what: String| Bad { at: place(pair), what };
        match pair.split_once('=') {
            Some(("slots", value)) => slots = Some(parse_slots(value).map_err(bad)?),
            Some(("max_slots" | "max-slots", value)) => max_slots = Some(parse_slots(value).map_err(bad)?),
            _ => return Err(bad(format!("{pair:?} is neither slots=N nor max_slots=N"))),
        }
    }
    let list = match list.trim_start().split_once('/') {
        Some((count, rest)) if !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit()) => {
            slots = Some(parse_slots(count).map_err(|what| Bad { at: place(count), what })?);
            rest
        }
        _ => list,
    };
    let mut items = Items::new(list).peekable();
    if items.peek().is_none() && !keys.is_empty() {
        return Err(Bad { at: 0, what: "a host name is missing".to_owned() });
    }
    items.try_for_each(|item| hosts.item(line, &item, slots, max_slots))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slots(text: &str) -> Vec<(String, Option<u32>, Option<u32>)> {
        parse(text, "f").unwrap().into_iter().map(|host| (host.name, host.slots, host.max_slots)).collect()
    }

    fn row(name: &str, slots: Option<u32>, max: Option<u32>) -> (String, Option<u32>, Option<u32>) {
        (name.to_owned(), slots, max)
    }

    #[test]
    fn all_forms() {
        let text =
            "# cluster\n\na\nb:4 # fast\n  c slots=2 max_slots=8\r\n3/d\n2/n[1-2]\nx[1-2] slots=5\n::1 slots=2\ne\ne\n";
        let expected = [
            row("a", None, None),
            row("b", Some(4), None),
            row("c", Some(2), Some(8)),
            row("d", Some(3), None),
            row("n1", Some(2), None),
            row("n2", Some(2), None),
            row("x1", Some(5), None),
            row("x2", Some(5), None),
            row("::1", Some(2), None),
            row("e", Some(2), None),
        ];
        assert_eq!(slots(text), expected);
        assert_eq!(slots("me@a max-slots=3")[0], row("a", None, Some(3)));
        assert_eq!(slots("n[1-9/4]").len(), 3);
    }

    #[test]
    fn errors_name_the_line() {
        for (text, expected) in [
            ("", "names no host"),
            ("# nothing\n", "names no host"),
            ("a\nb slots=x", "slots must be 1 to 1048576 at line 2, character 3"),
            ("a colour=blue", "neither slots=N nor max_slots=N at line 1, character 3"),
            ("slots=4", "host name is missing at line 1"),
            ("a\n\nn[1-", "not closed at line 3, character 2"),
            ("-", "at line 1, character 1"),
            ("0/a", "at line 1, character 1"),
            // A blank of three bytes is no blank here.
            ("\u{2000}slots=", "is neither slots=N nor max_slots=N at line 1, character 1"),
        ] {
            let error = parse(text, "/etc/hosts.mpi").unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("/etc/hosts.mpi"), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "([-n@:,! \\[\\]/%.0-9a=#\n]|slots=|max_slots=|\\PC){0,24}") {
            let _ = parse(&text, "f");
        }
    }
}
