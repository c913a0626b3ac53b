//! The one error a user sees: which node, what was tried, on what, why it failed, and what to do about it.

use std::borrow::Cow;
use std::fmt::{self, Display};
use std::io::Write;
use std::path::Path;

/// Shorthand for results that end in front of the user.
pub type Result<T, E = Error> = std::result::Result<T, E>;

type Text = Cow<'static, str>;

/// A failure as a sentence: `node: operation "subject": cause (remedy)`.
///
/// Built at the place that knows the operation; node and remedy are added by the callers that know them.
#[derive(Debug)]
pub struct Error(Box<Parts>);

#[derive(Debug)]
struct Parts {
    node: Option<Text>,
    operation: Text,
    subject: Option<String>,
    cause: String,
    remedy: Option<Text>,
    usage: bool,
}

/// Tells the user a line on standard error. Unlike `eprintln!` it does not panic when nobody reads there any more.
pub fn say(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "hpcrt: {line}");
}

/// Exit code when hpcrt itself failed or a host was lost.
pub const EXIT_FAILED: u8 = 125;
/// Exit code for a command line or input that cannot be used.
pub const EXIT_USAGE: u8 = 2;

impl Error {
    /// `operation` in the infinitive ("read", "start the agent"); `cause` as the lower layer said it.
    pub fn new(operation: impl Into<Text>, cause: impl Display) -> Self {
        Error(Box::new(Parts {
            node: None,
            operation: operation.into(),
            subject: None,
            cause: cause.to_string(),
            remedy: None,
            usage: false,
        }))
    }

    /// Unusable input: the exit code becomes [`EXIT_USAGE`].
    pub fn usage(operation: impl Into<Text>, cause: impl Display) -> Self {
        let mut error = Error::new(operation, cause);
        error.0.usage = true;
        error
    }

    /// Names the thing operated on: a path, an address, an option.
    #[must_use]
    pub fn on(mut self, subject: impl AsRef<Path>) -> Self {
        self.0.subject = Some(subject.as_ref().display().to_string());
        self
    }

    /// Names the node, unless a deeper layer already did.
    #[must_use]
    pub fn at(mut self, node: impl Into<Text>) -> Self {
        self.0.node.get_or_insert(node.into());
        self
    }

    /// What the user can do about it, in one clause.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<Text>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// Takes the remedy away, for callers that know a better one.
    #[must_use]
    pub fn bare(mut self) -> Self {
        self.0.remedy = None;
        self
    }

    /// What was tried, and why it failed: from these another process makes it again.
    pub fn parts(&self) -> (String, &str) {
        let Parts { operation, subject, cause, .. } = &*self.0;
        (subject.as_ref().map_or_else(|| operation.to_string(), |subject| format!("{operation} {subject:?}")), cause)
    }

    /// The process exit code this error ends in: 2 or 125.
    pub fn exit_code(&self) -> u8 {
        if self.0.usage { EXIT_USAGE } else { EXIT_FAILED }
    }
}

impl Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Parts { node, remedy, .. }, (tried, cause)) = (&*self.0, self.parts());
        if let Some(node) = node {
            write!(f, "{node}: ")?;
        }
        write!(f, "cannot {tried}: {cause}")?;
        if let Some(remedy) = remedy {
            write!(f, " ({remedy})")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// Turns a lower layer's error into one that says what was tried.
pub trait Context<T> {
    /// See [`Error::new`].
    fn op(self, operation: impl Into<Text>) -> Result<T>;
    /// [`Context::op`] with [`Error::on`].
    fn op_on(self, operation: impl Into<Text>, subject: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Display> Context<T> for std::result::Result<T, E> {
    fn op(self, operation: impl Into<Text>) -> Result<T> {
        self.map_err(|cause| Error::new(operation, cause))
    }

    fn op_on(self, operation: impl Into<Text>, subject: impl AsRef<Path>) -> Result<T> {
        self.map_err(|cause| Error::new(operation, cause).on(subject))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_as_one_sentence() {
        let error = Error::new("read", "permission denied").on("/a b").at("n1").remedy("check its mode");
        assert_eq!(error.to_string(), "n1: cannot read \"/a b\": permission denied (check its mode)");
        assert_eq!(error.exit_code(), 125);
        assert_eq!(Error::usage("parse", "x").exit_code(), 2);
    }

    #[test]
    fn the_deepest_node_wins() {
        assert!(Error::new("x", "y").at("deep").at("shallow").to_string().starts_with("deep: "));
    }
}
