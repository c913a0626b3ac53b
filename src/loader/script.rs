//! `#!` lines as the kernel reads them (`fs/binfmt_script.c`), and the program that `env` makes of its arguments.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::probe::Probe;

/// Bytes of a program's head that the kernel looks at (`BINPRM_BUF_SIZE` since Linux 5.1).
pub const HEAD: usize = 256;
/// Interpreters that are themselves scripts: the kernel follows so many.
pub const DEPTH_MAX: usize = 5;

/// The `#!` line of a script.
#[derive(Debug, PartialEq, Eq)]
pub struct Shebang {
    pub interpreter: OsString,
    /// All that follows the interpreter, as one argument.
    pub argument: Option<OsString>,
}

impl Shebang {
    /// Reads the first bytes of a file; `None` where the kernel would not see a script.
    pub fn parse(head: &[u8]) -> Option<Shebang> {
        let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
        let text = head.get(..head.len().min(HEAD))?.strip_prefix(b"#!")?;
        let end = text.iter().position(|&byte| byte == b'\n' || byte == 0);
        let line = text[..end.unwrap_or(text.len())].trim_ascii();
        let split = line.iter().position(blank);
        if line.is_empty() || (end.is_none() && split.is_none() && head.len() >= HEAD) {
            return None;
        }
        let (interpreter, argument) = line.split_at(split.unwrap_or(line.len()));
        let argument = argument.trim_ascii();
        Some(Shebang {
            interpreter: OsStr::from_bytes(interpreter).into(),
            argument: (!argument.is_empty()).then(|| OsStr::from_bytes(argument).into()),
        })
    }

    /// The name that `#!/usr/bin/env NAME` or `env -S [options] [VAR=value] NAME ...` will look up in `PATH`.
    pub fn env_target(&self) -> Option<&OsStr> {
        if Path::new(&self.interpreter).file_name()? != "env" {
            return None;
        }
        let argument = self.argument.as_ref()?.as_bytes();
        let split = argument.strip_prefix(b"-S").or_else(|| argument.strip_prefix(b"--split-string="));
        let Some(words) = split else { return (!argument.starts_with(b"-")).then_some(OsStr::from_bytes(argument)) };
        let mut words = words.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        words.find(|word| !word.starts_with(b"-") && !word.contains(&b'=')).map(OsStr::from_bytes)
    }
}

/// The executable that `execvp(3)` finds for `name`: itself if it has a slash, else the first in the directories of `path`.
pub fn which<P: Probe>(probe: &P, cwd: &Path, path: Option<&OsStr>, name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(name.into());
    }
    let path = path.unwrap_or(OsStr::new("/bin:/usr/bin")).as_bytes();
    let candidates = path.split(|&byte| byte == b':').map(|dir| Path::new(OsStr::from_bytes(dir)).join(name));
    let is_program = |candidate: &PathBuf| {
        probe.open(&cwd.join(candidate)).is_ok_and(|opened| {
            let mode = opened.stat.st_mode;
            rustix::fs::FileType::from_raw_mode(mode).is_file() && mode & 0o111 != 0
        })
    };
    candidates.into_iter().find(is_program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_as_the_kernel() {
        let parse = |text: &str| Shebang::parse(text.as_bytes()).map(|s| (s.interpreter, s.argument));
        assert_eq!(parse("#! /bin/sh -e -u \nrest"), Some(("/bin/sh".into(), Some("-e -u".into()))));
        assert_eq!(parse("#!/bin/sh"), Some(("/bin/sh".into(), None)));
        assert_eq!(parse("#!\n"), None);
        assert_eq!(parse("echo"), None);
        assert_eq!(parse(&format!("#!/{}", "x".repeat(300))), None);
        assert!(parse(&format!("#!/x {}", "x".repeat(300))).is_some());
    }

    #[test]
    fn env_targets() {
        let target = |argument: &str| {
            let shebang = Shebang { interpreter: "/usr/bin/env".into(), argument: Some(argument.into()) };
            shebang.env_target().map(|name| name.to_str().unwrap().to_owned())
        };
        assert_eq!(target("python3").as_deref(), Some("python3"));
        assert_eq!(target("-S -i A=b python3 -u").as_deref(), Some("python3"));
        assert_eq!(target("-i"), None);
    }
}
