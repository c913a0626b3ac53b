//! Whether what is to be lent can be kept: a promise that a limit of this process or its machine would break is not made.

use indicatif::HumanBytes;

use crate::error::{Error, Result};
use crate::sys::memory::{self, Limit};

/// What the server needs beside what it lends: its own code, threads of connections, and spans of those that give pages just now.
const OWN: u64 = 64 << 20;

/// Checks that `bytes` can be lent here.
///
/// # Errors
/// The tightest limit, and what it leaves.
pub fn check(bytes: u64) -> Result<()> {
    against(bytes, &memory::limits())
}

fn against(bytes: u64, limits: &[Limit]) -> Result<()> {
    let Some(tightest) = limits.iter().min_by_key(|limit| limit.left) else { return Ok(()) };
    if bytes.checked_add(OWN).is_some_and(|all| all <= tightest.left) {
        return Ok(());
    }
    let Limit { name, bytes: all, left } = tightest;
    let cause = format!("{name} is {}, of which {} are left", HumanBytes(*all), HumanBytes(*left));
    let most = left.saturating_sub(OWN) / 1_000_000;
    Err(Error::usage("lend", cause)
        .on(HumanBytes(bytes).to_string())
        .remedy(format!("at most {most} MB can be lent here")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_is_named() {
        let limit = |name: &str, bytes, left| Limit { name: name.to_owned(), bytes, left };
        let limits = [limit("machine", 8 << 30, 4 << 30), limit("group", 2 << 30, 1 << 30)];
        against((1 << 30) - OWN, &limits).unwrap();
        let error = against(1 << 30, &limits).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let said = error.to_string();
        assert!(
            said.contains("group is 2.00 GiB, of which 1.00 GiB are left") && said.contains("at most 1006 MB"),
            "{said}"
        );
        assert!(against(u64::MAX, &limits).is_err());
    }
}
