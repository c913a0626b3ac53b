//! `gen500 --python`: extension modules and Python files, and a script that imports them all.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::libraries::embed;
use super::payload::payload;
use super::{in_parallel, once, run};

/// Size of the generated modules.
#[derive(Debug, Clone)]
pub struct Modules {
    /// So many extension modules and as many Python files.
    pub count: usize,
    /// All extension modules together.
    pub megabytes: usize,
}

/// The part of the stable ABI that a module needs (PEP 384), so that no Python headers are.
const ABI: &str = r"typedef struct { long refs; void *type; void *init; long index; void *copy; } Base;
typedef void *(*Call)(void *, void *);
typedef struct { const char *name; Call call; int flags; const char *doc; } Method;
typedef struct { Base base; const char *name, *doc; long size; Method *methods; void *more[4]; } Module;
extern void *PyModule_Create2(Module *, int);
extern void *PyLong_FromLong(long);
";

impl Modules {
    /// Makes `dir/driver.py` and its modules in `dir/modules`; `false` if they are there already.
    ///
    /// The driver prints `modules N checksum X` to stdout, and with `GEN_T0` in the environment the same line to stderr as the C driver.
    pub fn generate(&self, dir: &Path) -> Result<bool> {
        once(dir, &format!("{self:?}"), || {
            let place = dir.join("modules");
            fs::create_dir_all(&place).context("make the module directory")?;
            in_parallel(0..self.count, |i| self.module(&place, i))?;
            fs::write(dir.join("driver.py"), self.driver()).context("write driver.py")?;
            run(Command::new("python3")
                .args(["-m", "compileall", "-q"])
                .arg(&place)
                .env_remove("PYTHONDONTWRITEBYTECODE"))
            .map(drop)
        })
    }

    fn module(&self, place: &Path, i: usize) -> Result<()> {
        let bytes = place.join(format!("{i}.bin"));
        fs::write(&bytes, payload(100_000 + i, self.megabytes * 1_000_000 / self.count)).context("write a payload")?;
        let mut source = String::from(ABI);
        writeln!(source, "static void *value(void *m, void *a) {{ return PyLong_FromLong({}); }}", i * 7919 % 1009)?;
        writeln!(source, "static Method methods[] = {{ {{\"value\", value, 4, 0}}, {{0}} }};")?;
        writeln!(source, "static Module module = {{ {{1}}, \"ext{i}\", 0, -1, methods }};")?;
        writeln!(source, "void *PyInit_ext{i}(void) {{ return PyModule_Create2(&module, 3); }}")?;
        source += &embed(&bytes);
        let file = place.join(format!("{i}.c"));
        fs::write(&file, source).context("write a C file")?;
        let mut cc = Command::new("cc");
        run(cc.args(["-O1", "-fPIC", "-shared", "-o"]).arg(place.join(format!("ext{i}.abi3.so"))).arg(&file))?;
        fs::remove_file(&file).and_then(|()| fs::remove_file(&bytes)).context("remove scratch files")?;
        let mut python = format!("import ext{i}\n");
        for k in 0..40 {
            writeln!(python, "def f{k}(x):\n    return x * {} + ext{i}.value()", k + i)?;
        }
        fs::write(place.join(format!("py{i}.py")), python).context("write a Python file")
    }

    fn driver(&self) -> String {
        let count = self.count;
        format!(
            "import time\nnow = time.time()\nimport os, sys\n\
             sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'modules'))\n\
             s = 1\nfor i in range({count}):\n    s = (s * 31 + __import__('py%d' % i).f1(s)) % (1 << 32)\n\
             print('modules {count} checksum %08x' % s)\n\
             if 'GEN_T0' in os.environ:\n\
             \x20   t0, rank = float(os.environ['GEN_T0']), os.environ.get('HPCRT_RANK', '0')\n\
             \x20   print('main_at %.6f rank %s startup %.6f' % (now, rank, now - t0), file=sys.stderr)\n\
             \x20   print('imported_at %.6f rank %s' % (time.time(), rank), file=sys.stderr)\n"
        )
    }
}
