//! What is captured: only files on file systems that the hosts share, and of those only what many processes load.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;

use super::catalog::{file_name, is_below, is_code, is_within, parent};

/// Any other file is captured up to this size where a whole tree is captured: data that packages carry.
const DATA_MAX: u64 = 16 << 20;
/// Files larger than this are not captured, whatever they are: a RAM disk is no place for them.
pub const FILE_MAX: u64 = 4 << 30;
/// More roots than this are merged into common parents: every root costs each node a look-up at the shared file system.
const ROOTS_MAX: usize = 4;

/// File systems that hosts share, by the magic number of `statfs(2)` (`linux/magic.h` and the file systems' own headers).
const SHARED: [i64; 17] = [
    0x6969,      // NFS
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x0BD0_0BD0, // Lustre
    0x4750_4653, // GPFS
    0x1983_0326, // BeeGFS
    0x00C3_6400, // Ceph
    0x0102_1997, // 9P
    0x5346_414F, // OpenAFS
    0x6B41_4653, // kAFS
    0x7375_7245, // Coda
    0x0116_1970, // GFS2
    0x7461_636F, // OCFS2
    0x6573_5546, // FUSE: sshfs, CVMFS, GlusterFS and the like
    0xAAD7_AAEA, // PanFS
    0x2003_0528, // OrangeFS
    0x1803_1977, // WekaFS
];

/// Whether the file system under `path` is one that other hosts see, too.
pub fn is_shared(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| is_shared_type(stat.f_type))
}

/// [`is_shared`] for a `statfs(2)` type.
pub fn is_shared_type(kind: i64) -> bool {
    // f_type is signed on some kernels and its upper half means nothing.
    SHARED.contains(&(kind & 0xFFFF_FFFF))
}

/// The rule for one job.
#[derive(Debug, Clone, Default)]
pub struct Capture {
    /// Trees that are captured whole (Python's own, `--prefix`).
    pub trees: Vec<Vec<u8>>,
    /// File names, and absolute paths with all below them, that are left to each node.
    pub excludes: Vec<Vec<u8>>,
    /// Taken for shared whatever file system they lie on (`--prefix`).
    pub shared: Vec<Vec<u8>>,
}

impl Capture {
    /// Whether a path is left alone, with all below it.
    pub fn excludes(&self, path: &[u8]) -> bool {
        let name = file_name(path);
        self.excludes.iter().any(|word| **word == *name || is_within(path, word))
    }

    /// Whether the content of this regular file goes through the tree.
    pub fn takes(&self, path: &[u8], mode: u32, size: u64) -> bool {
        let name = file_name(path);
        let code = is_code(name) || mode & 0o111 != 0;
        let data = size <= DATA_MAX && self.trees.iter().any(|tree| is_below(path, tree));
        size <= FILE_MAX && (code || data)
    }
}

/// Whether who looks at a file of this name goes on to load it. Python looks at a module's source, and loads its bytecode.
pub fn is_loaded(name: &[u8]) -> bool {
    is_code(name) && !name.ends_with(b".py")
}

/// The roots of a view: directories to show, none inside another, few.
pub fn roots(directories: impl IntoIterator<Item = Vec<u8>>) -> Vec<Vec<u8>> {
    let mut roots: BTreeSet<Vec<u8>> = directories.into_iter().filter(|d| d.len() > 1).collect();
    outermost(&mut roots);
    while roots.len() > ROOTS_MAX {
        // The deepest parent of two: what it adds to the view is least.
        let depth = |path: &[u8]| path.iter().filter(|b| **b == b'/').count();
        let parents: Vec<&[u8]> = roots.iter().filter_map(|r| parent(r)).collect();
        let common = |p: &&&[u8]| depth(p) > 1 && roots.iter().filter(|r| is_below(r, p)).count() > 1;
        let Some(chosen) = parents.iter().filter(common).max_by_key(|p| depth(p)).map(|p| p.to_vec()) else { break };
        roots.insert(chosen);
        outermost(&mut roots);
    }
    roots.into_iter().collect()
}

fn outermost(roots: &mut BTreeSet<Vec<u8>>) {
    let all: Vec<Vec<u8>> = roots.iter().cloned().collect();
    roots.retain(|r| !all.iter().any(|outer| is_below(r, outer)));
}

/// The trees of a Python program, if the program is one: its environment's and its base installation's.
pub fn python_trees(canonical: &Path) -> Vec<Vec<u8>> {
    let name = canonical.file_name().unwrap_or_default().as_bytes();
    let version = name.strip_prefix(b"python").or_else(|| name.strip_prefix(b"pypy"));
    // As in python3.11t and python3-dbg, not as in python_job.
    let is_version = |text: &[u8]| text.first().is_none_or(u8::is_ascii_digit);
    let prefix = canonical.parent().and_then(Path::parent).filter(|_| version.is_some_and(is_version));
    prefix.map(bytes).into_iter().collect()
}

/// The environment that `pyvenv.cfg` beside a link to Python makes.
pub fn virtual_environment(program: &Path) -> Option<PathBuf> {
    let prefix = program.parent()?.parent()?;
    prefix.join("pyvenv.cfg").is_file().then(|| prefix.to_owned())
}

fn bytes(path: &Path) -> Vec<u8> {
    AsRef::<OsStr>::as_ref(path).as_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(list: &[&str]) -> Vec<String> {
        let roots = roots(list.iter().map(|r| r.as_bytes().to_vec()));
        roots.into_iter().map(|r| String::from_utf8(r).unwrap()).collect()
    }

    #[test]
    fn few_roots_and_none_inside_another() {
        assert_eq!(of(&["/s/app/lib", "/s/app", "/s/app/lib/x"]), ["/s/app"]);
        assert_eq!(of(&["/s/a", "/s/b"]), ["/s/a", "/s/b"]);
        let many: Vec<String> = (0..10).map(|n| format!("/s/app/lib{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(of(&many), ["/s/app"]);
        assert_eq!(of(&["/a/x", "/b/x", "/c/x", "/d/x", "/e/x"]).len(), 5, "never a whole top directory");
    }

    #[test]
    fn what_is_excluded_is_left_alone_with_all_below_it() {
        let capture = Capture { excludes: vec![b"gcc".to_vec(), b"/s/intel".to_vec()], ..Capture::default() };
        for path in ["/s/bin/gcc", "/s/intel", "/s/intel/lib/libx.so"] {
            assert!(capture.excludes(path.as_bytes()), "{path}");
        }
        for path in ["/s/bin/gcc-12", "/s/intel2/libx.so", "/s"] {
            assert!(!capture.excludes(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn code_is_taken_and_data_is_not() {
        let capture = Capture { trees: vec![b"/s/env".to_vec()], ..Capture::default() };
        assert!(capture.takes(b"/s/app/libx.so.1.2", 0o644, 1 << 30));
        assert!(capture.takes(b"/s/app/tool", 0o755, 10));
        assert!(!capture.takes(b"/s/app/input.dat", 0o644, 10));
        assert!(capture.takes(b"/s/env/share/table.dat", 0o644, 10));
        assert!(!capture.takes(b"/s/env/share/model.bin", 0o644, 1 << 30));
    }

    #[test]
    fn types_are_known_with_any_sign() {
        assert!(is_shared_type(0xFF53_4D42) && is_shared_type(-0xAC_B2BE));
        assert!(!is_shared_type(0xEF53), "ext4 is the host's own");
    }
}
