//! `gen500`: a C program on hundreds of shared libraries in several RUNPATH directories, after the model of Pynamic.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::payload::payload;
use super::{in_parallel, once, run};

/// Size and place of the generated program.
#[derive(Debug, Clone)]
pub struct Libraries {
    pub count: usize,
    /// RUNPATH directories; library `i` is in directory `i % dirs`.
    pub dirs: usize,
    /// All libraries together.
    pub megabytes: usize,
    /// The directory's path on the hosts, if it is another there; RUNPATHs are absolute.
    pub at: Option<PathBuf>,
}

/// A library calls some of those at least so many numbers later: they are built before it.
const STEP: usize = 16;

impl Default for Libraries {
    fn default() -> Self {
        Libraries { count: 495, dirs: 10, megabytes: 259, at: None }
    }
}

impl Libraries {
    /// Makes `dir/driver` and its libraries; `false` if they are there already.
    ///
    /// The driver prints `libraries N checksum X` to stdout. If `GEN_T0` (seconds since the epoch) is in the environment, it also
    /// prints `main_at SECONDS rank R startup SECONDS` to stderr: when main was entered, `HPCRT_RANK`, and the time since `GEN_T0`.
    pub fn generate(&self, dir: &Path) -> Result<bool> {
        once(dir, &format!("{self:?}"), || self.build(dir))
    }

    fn build(&self, dir: &Path) -> Result<()> {
        for d in 0..self.dirs {
            fs::create_dir_all(dir.join(format!("d{d}"))).context("make a library directory")?;
        }
        let scratch = dir.join("scratch");
        fs::create_dir_all(&scratch).context("make the scratch directory")?;
        for first in (0..self.count).step_by(STEP).collect::<Vec<_>>().into_iter().rev() {
            in_parallel(first..(first + STEP).min(self.count), |i| self.library(dir, &scratch, i))?;
        }
        self.driver(dir, &scratch)?;
        fs::remove_dir_all(&scratch).context("remove the scratch directory")
    }

    fn path(&self, dir: &Path, i: usize) -> PathBuf {
        dir.join(format!("d{}/libg{i}.so", i % self.dirs))
    }

    fn runpath(&self, dir: &Path) -> String {
        let at = self.at.as_deref().unwrap_or(dir);
        let dirs: Vec<String> = (0..self.dirs).map(|d| at.join(format!("d{d}")).display().to_string()).collect();
        format!("-Wl,--no-as-needed,--enable-new-dtags,-rpath,{}", dirs.join(":"))
    }

    /// The libraries that `i` needs.
    fn needs(&self, i: usize) -> Vec<usize> {
        let rest = self.count.saturating_sub(i + STEP);
        let mut needed: Vec<usize> =
            if rest == 0 { Vec::new() } else { (1..=3).map(|k| i + STEP + (i * 31 + k * k * 97) % rest).collect() };
        needed.sort_unstable();
        needed.dedup();
        needed
    }

    /// Sizes vary between half and one and a half of the mean.
    fn size(&self, i: usize) -> usize {
        let mean = self.megabytes * 1_000_000 / self.count.max(1);
        (mean / 2 + mean * (i * 7919 % 1000) / 1000).saturating_sub(CODE)
    }

    fn library(&self, dir: &Path, scratch: &Path, i: usize) -> Result<()> {
        let bytes = scratch.join(format!("{i}.bin"));
        fs::write(&bytes, payload(i, self.size(i))).context("write a payload")?;
        let mut source = String::from("typedef unsigned U;\n");
        // A symbol table as real libraries have one.
        for k in 0..30 {
            writeln!(source, "U g{i}_{k}(U x) {{ return x * {}u ^ {}u; }}", 2 * (i + k) + 1, i * 1000 + k)?;
        }
        let needs = self.needs(i);
        let mut sum = format!("g{i}_0(x)");
        for j in &needs {
            writeln!(source, "U g{j}_{}(U);", i % 30)?;
            write!(sum, " ^ g{j}_{}(x)", i % 30)?;
        }
        writeln!(source, "U g{i}(U x) {{ return {sum}; }}")?;
        source += &embed(&bytes);
        let file = scratch.join(format!("{i}.c"));
        fs::write(&file, source).context("write a C file")?;
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-fPIC", "-shared", "-o"]).arg(self.path(dir, i)).arg(&file);
        cc.arg(format!("-Wl,-soname,libg{i}.so")).arg(self.runpath(dir));
        run(cc.args(needs.iter().map(|&j| self.path(dir, j))))?;
        fs::remove_file(&bytes).context("remove a payload")
    }

    fn driver(&self, dir: &Path, scratch: &Path) -> Result<()> {
        let mut source =
            String::from("#include <stdio.h>\n#include <stdlib.h>\n#include <time.h>\ntypedef unsigned U;\n");
        let mut calls = String::new();
        for i in 0..self.count {
            writeln!(source, "U g{i}(U);")?;
            writeln!(calls, "    s = s * 31 + g{i}(s);")?;
        }
        let count = self.count;
        write!(
            source,
            r#"int main(void) {{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    U s = 1;
{calls}    printf("libraries {count} checksum %08x\n", s);
    const char *t0 = getenv("GEN_T0"), *rank = getenv("HPCRT_RANK");
    double now = t.tv_sec + t.tv_nsec / 1e9;
    if (t0) fprintf(stderr, "main_at %.6f rank %s startup %.6f\n", now, rank ? rank : "0", now - atof(t0));
    return 0;
}}
"#
        )?;
        let file = scratch.join("driver.c");
        fs::write(&file, source).context("write a C file")?;
        let mut cc = Command::new("cc");
        cc.arg("-O1").arg("-o").arg(dir.join("driver")).arg(&file).arg(self.runpath(dir));
        run(cc.args((0..self.count).map(|i| self.path(dir, i)))).map(drop)
    }
}

/// What a library has besides its payload, roughly.
const CODE: usize = 19_000;

/// A line of C that puts a file into a mapped section that nothing reads.
pub(super) fn embed(bytes: &Path) -> String {
    format!("__asm__(\".section .payload,\\\"a\\\"\\n.incbin \\\"{}\\\"\\n.text\");\n", bytes.display())
}
