//! The bracket form of many names: `n1 n2 n3` -> `n[1-3]`, for messages and `--gather`.
//!
//! Every run of digits is a dimension. Names that differ in one dimension only become a range; the product form over
//! several dimensions is built greedily, one dimension after the other, from the last to the first and from the first
//! to the last, and the shorter text is taken (a minimal cover is NP-hard). Time O(n log n) for a bounded number of
//! dimensions. [`super::hostlist::expand`] is the inverse.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::hostlist::MAX_DIGITS;

/// A run of digits. The order puts `9` before `10` and keeps `1`, `01` and `001` apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Number {
    digits: u8,
    value: u64,
}

impl Number {
    /// Whether a leading zero is part of it.
    fn padded(self) -> bool {
        self.digits > 1 && self.value < 10u64.pow(u32::from(self.digits) - 1)
    }
}

/// Consecutive numbers, ends included.
type Span = (Number, Number);

/// Sorts spans and joins those that one `lo-hi` can express.
fn coalesce(spans: &mut Vec<Span>) {
    spans.sort_unstable();
    spans.dedup_by(|next, span| {
        let (from, to) = (span.1, next.0);
        let same_width = from.digits == to.digits;
        let carries = from.digits + 1 == to.digits && !span.0.padded() && !to.padded();
        let joined = to.value == from.value + 1 && (same_width || carries);
        if joined {
            span.1 = next.1;
        }
        joined
    });
}

fn write_spans(text: &mut String, spans: &[Span]) {
    for (i, (lo, hi)) in spans.iter().enumerate() {
        let comma = if i > 0 { "," } else { "" };
        let (low, high) = (usize::from(lo.digits), usize::from(hi.digits));
        write!(text, "{comma}{:0low$}", lo.value).expect("a String takes all");
        if hi != lo {
            write!(text, "-{:0high$}", hi.value).expect("a String takes all");
        }
    }
}

/// The shortest bracket form found for these names (host names as [`super::hostlist`] accepts them), in any order;
/// repeated names count once. An IPv6 literal is put in brackets. No names: the empty text.
pub fn fold<S: AsRef<str>>(names: &[S]) -> String {
    // Names with the same text between their numbers, which are stored one name after the other.
    let mut families: BTreeMap<String, Vec<Number>> = BTreeMap::new();
    let mut family = String::new();
    let mut numbers = Vec::new();
    for name in names {
        split(name.as_ref(), &mut family, &mut numbers);
        if let Some(known) = families.get_mut(&family) {
            known.append(&mut numbers);
        } else {
            families.insert(family.clone(), numbers.clone());
        }
    }
    let mut text = String::new();
    for (family, numbers) in &families {
        if !text.is_empty() {
            text.push(',');
        }
        let dimensions = family.matches(HOLE).count();
        if dimensions == 0 {
            text.push_str(family);
            continue;
        }
        let mut forms = vec![product(family, dimensions, numbers, (0..dimensions).rev())];
        if dimensions > 1 {
            forms.push(product(family, dimensions, numbers, 0..dimensions));
        }
        text.push_str(&forms.into_iter().min_by_key(String::len).unwrap_or_default());
    }
    text
}

/// `0-3,7`: the short form of rank numbers in any order.
pub fn fold_ranks(ranks: &[u32]) -> String {
    let number =
        |&rank: &u32| Number { digits: rank.checked_ilog10().map_or(1, |log| log as u8 + 1), value: rank.into() };
    let mut spans: Vec<Span> = ranks.iter().map(number).map(|number| (number, number)).collect();
    spans.sort_unstable();
    spans.dedup();
    coalesce(&mut spans);
    let mut text = String::new();
    write_spans(&mut text, &spans);
    text
}

/// Stands for a number in a family's text.
const HOLE: char = '\0';

/// Splits a name into the text around its numbers and the numbers. A user and an IPv6 literal are all text.
fn split(name: &str, family: &mut String, numbers: &mut Vec<Number>) {
    family.clear();
    numbers.clear();
    let (user, host) = name.split_at(name.rfind('@').map_or(0, |at| at + 1));
    family.push_str(user);
    if host.contains(':') {
        write!(family, "[{host}]").expect("a String takes all");
        return;
    }
    let mut rest = host;
    while !rest.is_empty() {
        let (text, tail) = rest.split_at(rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len()));
        let (run, tail) = tail.split_at(tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len()));
        family.push_str(text);
        match run.parse() {
            Ok(value) if run.len() <= MAX_DIGITS => {
                family.push(HOLE);
                numbers.push(Number { digits: run.len() as u8, value });
            }
            _ => family.push_str(run),
        }
        rest = tail;
    }
}

/// Product form of one family, its dimensions joined in this order.
fn product(family: &str, dimensions: usize, numbers: &[Number], order: impl Iterator<Item = usize>) -> String {
    let mut points: Vec<&[Number]> = numbers.chunks_exact(dimensions).collect();
    points.sort_unstable();
    points.dedup();
    let row = |point: &[Number]| point.iter().map(|&number| vec![(number, number)]).collect();
    let mut rows: Vec<Vec<Vec<Span>>> = points.into_iter().map(row).collect();
    for d in order {
        rows.sort_unstable_by(|a, b| (&a[..d], &a[d + 1..], &a[d]).cmp(&(&b[..d], &b[d + 1..], &b[d])));
        rows.dedup_by(|next, kept| {
            let same = kept[..d] == next[..d] && kept[d + 1..] == next[d + 1..];
            if same {
                kept[d].append(&mut next[d]);
            }
            same
        });
        rows.iter_mut().for_each(|row| coalesce(&mut row[d]));
    }
    rows.sort_unstable();
    let mut text = String::new();
    for (i, row) in rows.iter().enumerate() {
        if i > 0 {
            text.push(',');
        }
        let mut sets = row.iter();
        for part in family.split_inclusive(HOLE) {
            text.push_str(part.trim_end_matches(HOLE));
            if let Some(spans) = part.ends_with(HOLE).then(|| sets.next()).flatten() {
                let single = matches!(spans[..], [(lo, hi)] if lo == hi);
                text.push_str(if single { "" } else { "[" });
                write_spans(&mut text, spans);
                text.push_str(if single { "" } else { "]" });
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        for (names, expected) in [
            (&["n3", "n1", "n2", "n2"][..], "n[1-3]"),
            (&["n1"], "n1"),
            (&["n08", "n09", "n10", "n11"], "n[08-11]"),
            (&["n9", "n10", "n99", "n100", "n099"], "n[9-10,99,099-100]"),
            (&["n01", "n99", "n100"], "n[01,99-100]"),
            (&["r1c1", "r1c2", "r2c1", "r2c2"], "r[1-2]c[1-2]"),
            (&["r1c1", "r1c2", "r2c2"], "r1c[1-2],r2c2"),
            (&["a", "b", "a"], "a,b"),
            (&["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
            (&["::1", "fe80::2"], "[::1],[fe80::2]"),
            (&["u1@n1", "u1@n2"], "u1@n[1-2]"),
            (&["1", "2", "4"], "[1-2,4]"),
            (&[], ""),
        ] {
            assert_eq!(fold(names), expected);
        }
        assert_eq!(fold_ranks(&[7, 0, 2, 1, 10, 9, 2]), "0-2,7,9-10");
        assert_eq!(fold_ranks(&[]), "");
    }

    /// The order that joins the first dimension first is the shorter one here.
    #[test]
    fn the_better_order_wins() {
        let names = ["r1c1", "r2c1", "r3c1", "r1c2", "r2c3"];
        assert!(fold(&names).len() <= "r[1-3]c1,r1c2,r2c3".len(), "{}", fold(&names));
    }
}
