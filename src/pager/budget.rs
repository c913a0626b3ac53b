//! How much memory a program keeps on its own node where nobody says: its share of what the node allows.

use indicatif::HumanBytes;

use crate::error::{Error, Result};
use crate::sys::memory::{self, Limit};

/// Less would be taken by what is on its way. Bytes.
pub const LEAST: u64 = 16_000_000;

/// The share of each of `programs` programs here, in bytes, beside so many bytes that are promised to others.
///
/// # Errors
/// It is less than [`LEAST`].
pub fn share(programs: u32, lent: u64) -> Result<u64> {
    of(programs, lent, &memory::shared())
}

/// The most that each of `programs` programs here may keep, as the limits are now, whatever is in use.
pub fn bound(programs: u32, lent: u64) -> u64 {
    let parts = memory::shared().into_iter().map(|limit| part(limit.bytes.saturating_sub(lent), programs));
    parts.min().unwrap_or(u64::MAX)
}

fn part(bytes: u64, programs: u32) -> u64 {
    bytes / 4 * 3 / u64::from(programs.max(1)) / 4096 * 4096
}

/// A quarter is left for what is not captured: code, stacks, files, and whoever else is there.
fn of(programs: u32, lent: u64, limits: &[Limit]) -> Result<u64> {
    let Some(tightest) = limits.iter().min_by_key(|limit| limit.left) else { return Ok(LEAST) };
    let share = part(tightest.left.saturating_sub(lent), programs);
    if share >= LEAST {
        return Ok(share);
    }
    let Limit { name, bytes, left } = tightest;
    let lent = if lent > 0 { format!(", and {} lent", HumanBytes(lent)) } else { String::new() };
    let cause = format!("{name} is {}, of which {} are left{lent}", HumanBytes(*bytes), HumanBytes(*left));
    Err(Error::new("choose how much each program keeps here", cause).remedy("say it with --local-mb"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_share_what_the_tightest_limit_leaves() {
        let limit = |name: &str, bytes, left| Limit { name: name.to_owned(), bytes, left };
        let limits = [limit("machine", 8 << 30, 6 << 30), limit("group", 4 << 30, 2 << 30)];
        assert_eq!((of(1, 0, &limits).unwrap(), of(3, 0, &limits).unwrap()), (3 << 29, 1 << 29));
        assert_eq!(of(1, 1 << 30, &limits).unwrap(), 3 << 28);
        let said = of(200, 0, &limits).unwrap_err().to_string();
        assert!(said.contains("group is 4.00 GiB") && said.contains("--local-mb"), "{said}");
        let said = of(1, 3 << 30, &limits).unwrap_err().to_string();
        assert!(said.contains("2.00 GiB are left, and 3.00 GiB lent"), "{said}");
    }
}
