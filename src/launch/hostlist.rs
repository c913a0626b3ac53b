//! Host lists as on the command line: `n[01-04,7]:2,user@gpu[1-9/2]!gpu5,[::1]`.
//!
//! | form | meaning |
//! |---|---|
//! | `a,b c` | hosts in this order; commas or blanks separate |
//! | `n[1-4,07-12/2]` | ranges, zero padding kept per range, steps; any number of brackets per name |
//! | `item:4` | slots of each host of the item; a host named k times has k slots (more with `:n`) |
//! | `list!item` or `list,-item` | without these hosts (ClusterShell's and pdsh's spelling), from left to right; `^` is refused: pdsh's is a file |
//! | `user@item` | log in as `user` |
//! | `::1`, `[::1]:2` | IPv6 literal: a bracket with two colons is an address, not a range |
//! | `-` or `@-` | hosts from standard input, as a hostfile |

use std::collections::HashMap;
use std::fmt::Write;
use std::net::Ipv6Addr;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Hosts one list may name (excluded ones included), so that a slip of the pen cannot eat the memory.
pub const MAX_HOSTS: usize = 1_000_000;
/// Slots of one host, at most.
pub const MAX_SLOTS: u32 = 1 << 20;
/// Characters of one name, at most (RFC 1035 allows 253).
const MAX_NAME: usize = 255;
/// Digits of a number in a bracket, at most: what fits into a `u64` whatever the digits are.
pub(super) const MAX_DIGITS: usize = 18;

/// A host as the user or the batch system named it; not resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Name or literal address (IPv6 without brackets). Letters, digits and `._-%:`, never starting with `-`:
    /// safe as an argument of ssh and in a shell command.
    pub name: String,
    /// Log-in name, where the list gave one; same characters, and `+`.
    pub user: Option<Arc<str>>,
    /// Ranks the host is meant for (1..=[`MAX_SLOTS`]); `None`: nobody said.
    pub slots: Option<u32>,
    /// Ranks the host must not exceed, even when oversubscribed.
    pub max_slots: Option<u32>,
}

impl Host {
    /// A host of which only the name is known. The name is not checked: for constants and the machine's own name.
    pub fn named(name: impl Into<String>) -> Self {
        Host { name: name.into(), user: None, slots: None, max_slots: None }
    }

    /// `user@name` or `name`: what ssh takes.
    pub fn login(&self) -> String {
        match &self.user {
            Some(user) => format!("{user}@{}", self.name),
            None => self.name.clone(),
        }
    }
}

/// The hosts of a list in order of first mention, each once. `stdin` supplies the hosts for a `-` item.
///
/// # Errors
/// Usage errors that name the position, and whatever `stdin` fails with. A list that leaves no host is an error.
pub fn parse(text: &str, stdin: &mut dyn FnMut() -> Result<Vec<Host>>) -> Result<Vec<Host>> {
    let error = |bad: Bad| {
        let cause = format!("{} at character {}", bad.what, bad.at + 1);
        Error::usage("read the host list", cause).on(excerpt(text, bad.at))
    };
    let mut hosts = Hosts::default();
    for item in Items::new(text) {
        if item.text == "-" || item.text == "@-" {
            if item.exclude {
                return Err(error(Bad::new(text, item.text, "standard input cannot be excluded")));
            }
            for host in stdin()? {
                hosts.add(host).map_err(|what| error(Bad::new(text, item.text, what)))?;
            }
        } else {
            hosts.item(text, &item, None, None).map_err(error)?;
        }
    }
    hosts.finish().ok_or_else(|| Error::usage("read the host list", "it names no host").on(excerpt(text, 0)))
}

/// The names of a list without standard input, for what batch systems hand over.
///
/// # Errors
/// As [`parse`].
pub fn expand(text: &str) -> Result<Vec<String>> {
    let mut refuse = || Err(Error::usage("read the host list", "\"-\" is not a host here"));
    Ok(parse(text, &mut refuse)?.into_iter().map(|host| host.login()).collect())
}

/// Something unusable at byte `at` of the text.
#[derive(Debug)]
pub(super) struct Bad {
    pub(super) at: usize,
    pub(super) what: String,
}

impl Bad {
    /// `part` is a subslice of `text`; its place gives the position.
    fn new(text: &str, part: &str, what: impl Into<String>) -> Self {
        Bad { at: part.as_ptr().addr().saturating_sub(text.as_ptr().addr()), what: what.into() }
    }
}

/// The whole text when short, else what surrounds byte `at`.
fn excerpt(text: &str, at: usize) -> String {
    if text.len() <= 80 {
        return text.to_owned();
    }
    let (from, to) = (at.saturating_sub(30), at.saturating_add(30).min(text.len()));
    let dots = |cut: bool| if cut { "..." } else { "" };
    let middle = String::from_utf8_lossy(&text.as_bytes()[from.min(to)..to]).into_owned();
    format!("{}{middle}{}", dots(from > 0), dots(to < text.len()))
}

/// One item of a list and whether it is to be taken away.
#[derive(Debug)]
pub(super) struct Item<'a> {
    text: &'a str,
    exclude: bool,
}

/// Splits a list at separators outside brackets. A stray bracket is left for the item's own parser to report.
pub(super) struct Items<'a> {
    rest: &'a str,
}

impl<'a> Items<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Items { rest: text }
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Item<'a>;

    fn next(&mut self) -> Option<Item<'a>> {
        let separator = |c: char| c == ',' || c.is_ascii_whitespace();
        self.rest = self.rest.trim_start_matches(separator);
        let mut exclude = false;
        if let Some(rest) = self.rest.strip_prefix('!') {
            exclude = true;
            self.rest = rest.trim_start();
        } else if self.rest.len() > 1
            && let Some(rest) = self.rest.strip_prefix('-')
            && !rest.starts_with(separator)
        {
            exclude = true;
            self.rest = rest;
        }
        if self.rest.is_empty() && !exclude {
            return None;
        }
        let mut inside = false;
        let end = self.rest.find(|c: char| {
            inside = (inside || c == '[') && c != ']';
            !inside && (separator(c) || c == '!')
        });
        let (text, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        Some(Item { text, exclude })
    }
}

/// Hosts in order of first mention, merged by name.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    /// `None`: excluded.
    list: Vec<Option<Host>>,
    index: HashMap<String, usize>,
    /// Names expanded so far, including repeated and excluded ones.
    expanded: usize,
}

impl Hosts {
    /// A mention of `host`: slots add up, where a mention without slots counts as one as soon as there are several.
    pub(super) fn add(&mut self, host: Host) -> Result<(), String> {
        let Some(&at) = self.index.get(&host.name) else {
            if self.list.len() == MAX_HOSTS {
                return Err(format!("more than {MAX_HOSTS} hosts"));
            }
            self.index.insert(host.name.clone(), self.list.len());
            self.list.push(Some(host));
            return Ok(());
        };
        let known = self.list[at].as_mut().expect("excluded hosts leave the index");
        if known.user != host.user {
            return Err(format!("{} is named with different users", host.name));
        }
        let slots = known.slots.unwrap_or(1).saturating_add(host.slots.unwrap_or(1));
        if slots > MAX_SLOTS {
            return Err(format!("{} has more than {MAX_SLOTS} slots", host.name));
        }
        known.slots = Some(slots);
        known.max_slots = known.max_slots.or(host.max_slots);
        Ok(())
    }

    /// Adds or takes away the hosts of an item, which is a subslice of `text`. `slots` (unless the item has its own)
    /// and `max_slots` hold for each.
    pub(super) fn item(
        &mut self,
        text: &str,
        item: &Item<'_>,
        slots: Option<u32>,
        max_slots: Option<u32>,
    ) -> Result<(), Bad> {
        if let Some(at) = item.text.find('^') {
            // pdsh's file of hosts, ClusterShell's symmetric difference, others' exclusion.
            let what = "'^' is not used here (!HOST leaves a host out, --hostfile FILE reads hosts from a file)";
            return Err(Bad::new(text, &item.text[at..], what));
        }
        let pattern = Pattern::parse(text, item.text)?;
        self.expanded = self.expanded.saturating_add(pattern.count());
        if self.expanded > MAX_HOSTS {
            return Err(Bad::new(text, item.text, format!("more than {MAX_HOSTS} hosts")));
        }
        if item.exclude && self.list.is_empty() {
            return Err(Bad::new(text, item.text, "no host before this to exclude from"));
        }
        let user = pattern.user.map(Arc::from);
        pattern
            .each(&mut |name| {
                if !item.exclude {
                    let slots = pattern.slots.or(slots);
                    return self.add(Host { name: name.to_owned(), user: user.clone(), slots, max_slots });
                }
                if let Some(&at) = self.index.get(name)
                    && let Some(host) = &self.list[at]
                    && (user.is_none() || user == host.user)
                {
                    self.list[at] = None;
                    self.index.remove(name);
                }
                Ok(())
            })
            .map_err(|what| Bad::new(text, item.text, what))
    }

    /// The hosts, unless none is left.
    pub(super) fn finish(self) -> Option<Vec<Host>> {
        let list: Vec<Host> = self.list.into_iter().flatten().collect();
        (!list.is_empty()).then_some(list)
    }
}

/// The numbers of one range in a bracket: `lo`, `lo + step` .. `hi`, at least `width` digits each.
#[derive(Debug)]
struct Range {
    lo: u64,
    hi: u64,
    step: u64,
    width: usize,
}

#[derive(Debug)]
enum Piece<'a> {
    Literal(&'a str),
    Ranges(Vec<Range>),
}

/// One parsed item.
#[derive(Debug)]
struct Pattern<'a> {
    user: Option<&'a str>,
    pieces: Vec<Piece<'a>>,
    slots: Option<u32>,
}

impl<'a> Pattern<'a> {
    fn parse(text: &str, item: &'a str) -> Result<Self, Bad> {
        let bad = |part: &str, what: &str| Bad::new(text, part, what);
        let (user, rest) = match item.rsplit_once('@') {
            Some((user, rest)) => (Some(user), rest),
            None => (None, item),
        };
        if let Some(user) = user {
            if user.is_empty() || user.starts_with('-') {
                return Err(bad(item, "the user name before \"@\" is missing or starts with \"-\""));
            }
            check_characters(text, user, "._-+", "a user name")?;
        }
        if rest.is_empty() {
            return Err(bad(rest, "a host name is missing"));
        }
        if rest.starts_with('-') {
            return Err(bad(rest, "a host name cannot start with \"-\""));
        }
        if let Some((address, slots)) = ipv6(text, rest)? {
            return Ok(Pattern { user, pieces: vec![Piece::Literal(address)], slots });
        }
        let mut pieces = Vec::new();
        let mut length = 0usize;
        let mut rest = rest;
        let mut slots = None;
        while !rest.is_empty() {
            let end = rest.find(['[', ':']).unwrap_or(rest.len());
            let (literal, tail) = rest.split_at(end);
            if !literal.is_empty() {
                check_characters(text, literal, "._-", "a host name")?;
                length += literal.len();
                pieces.push(Piece::Literal(literal));
            }
            rest = tail;
            if let Some(number) = tail.strip_prefix(':') {
                slots = Some(parse_slots(number).map_err(|what| Bad::new(text, number, what))?);
                break;
            }
            if let Some(inner) = tail.strip_prefix('[') {
                let Some((body, after)) = inner.split_once(']') else {
                    return Err(bad(tail, "a bracket is opened and not closed"));
                };
                let ranges = body.split(',').map(|range| parse_range(text, range)).collect::<Result<Vec<_>, _>>()?;
                length += ranges.iter().map(|range| range.width.max(digits(range.hi))).max().unwrap_or(0);
                pieces.push(Piece::Ranges(ranges));
                rest = after;
            }
            if length > MAX_NAME {
                return Err(bad(item, &format!("a host name longer than {MAX_NAME} characters")));
            }
        }
        if pieces.is_empty() {
            return Err(bad(item, "a host name is missing"));
        }
        Ok(Pattern { user, pieces, slots })
    }

    fn count(&self) -> usize {
        let dimension = |piece: &Piece<'_>| match piece {
            Piece::Literal(_) => 1,
            Piece::Ranges(ranges) => ranges.iter().fold(0usize, |sum, range| {
                let count = (range.hi - range.lo) / range.step + 1;
                sum.saturating_add(usize::try_from(count).unwrap_or(usize::MAX))
            }),
        };
        self.pieces.iter().map(dimension).fold(1, usize::saturating_mul)
    }

    /// Calls `found` with every name, the last bracket varying fastest.
    fn each(&self, found: &mut dyn FnMut(&str) -> Result<(), String>) -> Result<(), String> {
        // Depth is bounded: every piece adds a character and names have at most MAX_NAME.
        fn walk(
            pieces: &[Piece<'_>],
            name: &mut String,
            found: &mut dyn FnMut(&str) -> Result<(), String>,
        ) -> Result<(), String> {
            let Some((first, rest)) = pieces.split_first() else { return found(name) };
            let start = name.len();
            match first {
                Piece::Literal(literal) => {
                    name.push_str(literal);
                    walk(rest, name, found)?;
                }
                Piece::Ranges(ranges) => {
                    for range in ranges {
                        let mut value = range.lo;
                        while value <= range.hi {
                            name.truncate(start);
                            write!(name, "{value:0width$}", width = range.width).expect("a String takes all");
                            walk(rest, name, found)?;
                            value = value.saturating_add(range.step);
                        }
                    }
                }
            }
            name.truncate(start);
            Ok(())
        }
        walk(&self.pieces, &mut String::new(), found)
    }
}

/// Decimal digits of `value`.
fn digits(value: u64) -> usize {
    value.checked_ilog10().map_or(1, |log| log as usize + 1)
}

fn check_characters(text: &str, part: &str, also: &str, what: &str) -> Result<(), Bad> {
    match part.find(|c: char| !(c.is_ascii_alphanumeric() || also.contains(c))) {
        None => Ok(()),
        Some(at) => {
            let c = part[at..].chars().next().unwrap_or(' ');
            Err(Bad::new(text, &part[at..], format!("{c:?} cannot be in {what}")))
        }
    }
}

/// A number of slots as in `:4` and `slots=4`.
pub(super) fn parse_slots(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(slots) if (1..=MAX_SLOTS).contains(&slots) && !text.starts_with('+') => Ok(slots),
        _ => Err(format!("the number of slots must be 1 to {MAX_SLOTS}")),
    }
}

/// `addr`, `[addr]` or `[addr]:slots`, when it can be nothing else than an IPv6 literal (two colons in one part).
fn ipv6<'a>(text: &str, item: &'a str) -> Result<Option<(&'a str, Option<u32>)>, Bad> {
    let colons = |part: &str| part.bytes().filter(|&byte| byte == b':').count();
    let (address, tail) = match item.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        Some((address, tail)) if colons(address) >= 2 => (address, tail),
        None if colons(item) >= 2 && !item.contains('[') => (item, ""),
        _ => return Ok(None),
    };
    let (number, zone) = address.split_once('%').map_or((address, None), |(number, zone)| (number, Some(zone)));
    if number.parse::<Ipv6Addr>().is_err() || zone.is_some_and(|zone| zone.is_empty() || zone.len() > 15) {
        return Err(Bad::new(text, address, "not an IPv6 address"));
    }
    check_characters(text, zone.unwrap_or(""), "._-", "a zone")?;
    match tail.strip_prefix(':') {
        None if tail.is_empty() => Ok(Some((address, None))),
        None => Err(Bad::new(text, tail, "only \":SLOTS\" can follow an IPv6 address")),
        Some(slots) => {
            let slots = parse_slots(slots).map_err(|what| Bad::new(text, slots, what))?;
            Ok(Some((address, Some(slots))))
        }
    }
}

/// `7`, `07-12` or `1-9/2`.
fn parse_range(text: &str, range: &str) -> Result<Range, Bad> {
    let bad = |part: &str, what: String| Err(Bad::new(text, part, what));
    let number = |part: &str| {
        let whole = part.trim();
        if whole.is_empty() || whole.len() > MAX_DIGITS || !whole.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Bad::new(
                text,
                part,
                format!("a number of 1 to {MAX_DIGITS} digits is missing in the bracket"),
            ));
        }
        let value: u64 = whole.parse().expect("18 digits fit");
        Ok((value, whole.len(), whole.len() > 1 && whole.starts_with('0')))
    };
    let (span, step) = range.split_once('/').map_or((range, None), |(span, step)| (span, Some(step)));
    let (first, last) = span.split_once('-').unwrap_or((span, span));
    let (lo, lo_len, lo_padded) = number(first)?;
    let (hi, hi_len, hi_padded) = number(last)?;
    if (lo_padded || hi_padded) && lo_len != hi_len {
        return bad(range, format!("the ends of \"{}\" are padded to different widths", range.trim()));
    }
    if lo > hi {
        return bad(range, format!("the range \"{}\" runs backwards", range.trim()));
    }
    let step = match step {
        None => 1,
        Some(step) => match number(step)?.0 {
            0 => return bad(step, "a step of 0".to_owned()),
            step => step,
        },
    };
    Ok(Range { lo, hi, step, width: if lo_padded { lo_len } else { 0 } })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hosts(text: &str) -> Vec<Host> {
        parse(text, &mut || Ok(vec![Host::named("from-stdin")])).unwrap()
    }

    fn names(text: &str) -> String {
        expand(text).unwrap().join(" ")
    }

    fn error(text: &str) -> String {
        expand(text).unwrap_err().to_string()
    }

    #[test]
    fn forms() {
        for (list, expected) in [
            ("n[01-04,7]", "n01 n02 n03 n04 n7"),
            ("r[1-2]c[09-10]", "r1c09 r1c10 r2c09 r2c10"),
            ("n[1-9/3],x", "n1 n4 n7 x"),
            ("b,a b2,,c,", "b a b2 c"),
            ("n[9-11]-ib.site", "n9-ib.site n10-ib.site n11-ib.site"),
            ("n[1-5]!n3,n[2-3]", "n1 n2 n4 n5 n3"),
            ("n[1-5],-n[2-3],-n5", "n1 n4"),
            ("n[1-3] ! n2", "n1 n3"),
            ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
            ("[::1],fe80::1%eth0,[2001:db8::2]:3", "::1 fe80::1%eth0 2001:db8::2"),
            ("me@n[1-2]", "me@n1 me@n2"),
            ("[1-2]", "1 2"),
            ("n[1-2][3-4]", "n13 n14 n23 n24"),
        ] {
            assert_eq!(names(list), expected, "{list}");
        }
    }

    #[test]
    fn slots_and_repeats() {
        let slots = |text| hosts(text).iter().map(|host| host.slots).collect::<Vec<_>>();
        assert_eq!(slots("n[1-2]:4,x"), [Some(4), Some(4), None]);
        assert_eq!(slots("a,b,a,a"), [Some(3), None]);
        assert_eq!(slots("a:4,a"), [Some(5)]);
        assert_eq!(slots("[::1]:2"), [Some(2)]);
    }

    #[test]
    fn standard_input() {
        assert_eq!(hosts("a,-,b").iter().map(|host| &*host.name).collect::<Vec<_>>(), ["a", "from-stdin", "b"]);
        assert_eq!(hosts("@-").len(), 1);
        assert_eq!(hosts("-").len(), 1);
    }

    #[test]
    fn errors_name_the_position() {
        for (list, expected) in [
            ("", "names no host"),
            ("n[1-2]!n[1-2]", "names no host"),
            ("a,n[1", "not closed at character 4"),
            ("n[3-1]", "\"3-1\" runs backwards at character 3"),
            ("n[1,,2]", "is missing in the bracket at character 5"),
            ("n[1-010]", "different widths at character 3"),
            ("n[1-2/0]", "step of 0 at character 7"),
            ("a,b:0", "slots must be 1 to 1048576 at character 5"),
            ("a b$c", "'$' cannot be in a host name at character 4"),
            ("a,n]", "']' cannot be in a host name at character 4"),
            ("u@-oProxyCommand", "cannot start with \"-\" at character 3"),
            ("-x,a", "no host before this"),
            ("n[1-5]^n3", "(!HOST leaves a host out, --hostfile FILE reads hosts from a file) at character 7"),
            ("^file", "at character 1"),
            ("a,!", "a host name is missing at character 4"),
            ("[1:2:z]", "not an IPv6 address at character 2"),
            ("u@a,v@a", "different users at character 5"),
            ("n[1-1000001]", "more than 1000000 hosts at character 1"),
            ("n[1-999999],[1-9][1-9]", "more than 1000000 hosts at character 13"),
            ("n[0-999999999999999999][0-999999999999999999]", "more than 1000000 hosts"),
        ] {
            let error = error(list);
            assert!(error.contains(expected), "{list}: {error}");
        }
        assert!(error(&"[1]".repeat(100_000)).contains("longer than 255"));
        assert!(error(&format!("{}$", "a,".repeat(500))).contains("at character 1001"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = parse(&text, &mut || Ok(Vec::new()));
        }

        #[test]
        fn no_likely_text_panics(text in "[-n@:,! \\[\\]/%.0-9a]{0,24}") {
            for host in parse(&text, &mut || Ok(Vec::new())).unwrap_or_default() {
                prop_assert!(!host.name.starts_with('-') && !host.name.is_empty());
            }
        }
    }
}
