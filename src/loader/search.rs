//! Search paths as the dynamic linkers read them: dynamic string tokens, separators, empty elements. See ld.so(8) and, for musl,
//! `fixup_rpath` and `path_open` of its `ldso/dynlink.c`.

use std::rc::Rc;

/// Directories in search order, each as the loader prepends it to a name: with a slash at its end,
/// or empty for the working directory.
pub type Dirs = Rc<[Vec<u8>]>;

/// The values of the dynamic string tokens for one object.
#[derive(Debug)]
pub struct Tokens<'a> {
    /// `$ORIGIN`: the directory of the object.
    pub origin: &'a [u8],
    /// `$LIB`.
    pub lib: &'a [u8],
    /// `$PLATFORM`.
    pub platform: &'a [u8],
}

impl Tokens<'_> {
    /// Replaces `$NAME` and `${NAME}`; what is no token stays as it is.
    pub fn expand(&self, text: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(text.len());
        let mut rest = text;
        while let Some((&first, behind)) = rest.split_first() {
            let token = [(&b"ORIGIN"[..], self.origin), (b"LIB", self.lib), (b"PLATFORM", self.platform)]
                .into_iter()
                .find_map(|(name, value)| Some((value, (first == b'$').then(|| after_token(behind, name))??)));
            if let Some((value, after)) = token {
                out.extend_from_slice(value);
                rest = after;
            } else {
                out.push(first);
                rest = behind;
            }
        }
        out
    }

    /// The directories of a glibc search path. An empty element is the working directory; repetitions are dropped.
    pub fn dirs(&self, list: &[u8], separators: &[u8]) -> Dirs {
        let mut dirs: Vec<Vec<u8>> = Vec::new();
        if !list.is_empty() {
            for element in list.split(|byte| separators.contains(byte)) {
                let mut dir = self.expand(element);
                while dir.len() > 1 && dir.last() == Some(&b'/') {
                    dir.pop();
                }
                if !dir.is_empty() && dir != b"/" {
                    dir.push(b'/');
                }
                if !dirs.contains(&dir) {
                    dirs.push(dir);
                }
            }
        }
        dirs.into()
    }
}

/// What follows the token `name` at the start of `text` (behind the dollar sign), if it is there.
fn after_token<'t>(text: &'t [u8], name: &[u8]) -> Option<&'t [u8]> {
    if let Some(braced) = text.strip_prefix(b"{") {
        return braced.strip_prefix(name)?.strip_prefix(b"}");
    }
    let after = text.strip_prefix(name)?;
    let goes_on = after.first().is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    (!goes_on).then_some(after)
}

/// The directories of a musl search path: separated by colons and newlines, empty elements ignored.
pub fn musl_dirs(list: &[u8]) -> Dirs {
    let elements = list.split(|byte| b":\n".contains(byte)).filter(|element| !element.is_empty());
    elements.map(|element| [element, b"/"].concat()).collect()
}

/// The directories of an object's `DT_RUNPATH` or `DT_RPATH` as musl sees them: only `$ORIGIN` is a token, any other voids the path.
pub fn musl_rpath(list: &[u8], origin: &[u8]) -> Dirs {
    let mut out = Vec::new();
    let mut parts = list.split(|&byte| byte == b'$');
    out.extend_from_slice(parts.next().unwrap_or_default());
    for part in parts {
        let Some(after) = part.strip_prefix(b"ORIGIN").or_else(|| part.strip_prefix(b"{ORIGIN}")) else {
            return Rc::new([]);
        };
        out.extend_from_slice(origin);
        out.extend_from_slice(after);
    }
    musl_dirs(&out)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENS: Tokens<'_> = Tokens { origin: b"/o", lib: b"lib64", platform: b"p" };

    #[test]
    fn expands_tokens() {
        for (text, expected) in [
            ("$ORIGIN/../${LIB}", "/o/../lib64"),
            ("$ORIGINAL $LIB64 ${LIB", "$ORIGINAL $LIB64 ${LIB"),
            ("a$PLATFORM-$", "ap-$"),
            ("$LIB$LIB", "lib64lib64"),
        ] {
            assert_eq!(TOKENS.expand(text.as_bytes()), expected.as_bytes(), "{text}");
        }
    }

    #[test]
    fn splits_as_glibc() {
        let dirs = TOKENS.dirs(b"/a//:/b;:/a:rel:/", b":;");
        assert_eq!(&*dirs, [&b"/a/"[..], b"/b/", b"", b"rel/", b"/"]);
        assert!(TOKENS.dirs(b"", b":").is_empty());
    }

    #[test]
    fn splits_as_musl() {
        assert_eq!(&*musl_dirs(b":/a\n\n/b:"), [&b"/a/"[..], b"/b/"]);
        assert_eq!(&*musl_rpath(b"$ORIGIN/x:${ORIGIN}", b"/o"), [&b"/o/x/"[..], b"/o/"]);
        assert!(musl_rpath(b"/a:$LIB", b"/o").is_empty());
    }
}
