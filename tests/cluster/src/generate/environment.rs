//! `pyenv`: a real Python environment, interpreter included, with numpy and scipy.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{once, run};

const JOB: &str = r#"import os, sys
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site-packages"))
import numpy as np, scipy
import scipy.fft, scipy.integrate, scipy.linalg, scipy.optimize, scipy.signal, scipy.sparse, scipy.sparse.linalg, scipy.stats

n = 200
i = np.arange(n, dtype=float)
dense = np.cos(np.outer(i, i)) + n * np.eye(n)
x = scipy.linalg.solve(dense, i)
laplace = scipy.sparse.diags([-1.0, 2.5, -1.0], [-1, 0, 1], shape=(n, n), format="csc")
y = scipy.sparse.linalg.spsolve(laplace, i)
root = scipy.optimize.brentq(lambda t: t**3 - 2, 0, 2)
area = scipy.integrate.quad(np.exp, 0, 1)[0]
peak = int(np.argmax(np.abs(scipy.fft.rfft(np.sin(2 * np.pi * 12 * i / n)))))
print("result %.6f %.6f %.6f %.6f %d" % (x.sum(), y.sum(), root, area, peak))
"#;

/// Makes `dir/bin/python3`, its standard library, `dir/site-packages` with numpy and scipy, and `dir/job.py` which uses them and
/// prints one line `result ...`; `false` if they are there already. Packages come from where pip is configured to find them.
pub fn generate(dir: &Path) -> Result<bool> {
    // The distribution's interpreter needs no libpython, which a copy would not find.
    let base = ["/usr/bin/python3", "/usr/local/bin/python3"].into_iter().find(|p| Path::new(p).exists());
    let Some(base) = base else { bail!("no python3 in /usr/bin or /usr/local/bin (package python3)") };
    let question = "import os, sys, sysconfig; print(os.path.realpath(sys.executable), sysconfig.get_path('stdlib'), '%d.%d' % sys.version_info[:2])";
    let answer = run(Command::new(base).args(["-I", "-c", question]))?;
    let &[interpreter, library, version] = answer.split_whitespace().collect::<Vec<_>>().as_slice() else {
        bail!("{base} answers {answer:?}");
    };
    once(dir, &format!("python {version} numpy scipy"), || {
        fs::create_dir_all(dir.join("bin"))
            .and_then(|()| fs::create_dir_all(dir.join("lib")))
            .context("make directories")?;
        fs::copy(interpreter, dir.join("bin/python3")).with_context(|| format!("copy {interpreter}"))?;
        let copy = dir.join(format!("lib/python{version}"));
        // Byte code is only valid beside a source of the same age.
        run(Command::new("cp").args(["-a", library]).arg(&copy))?;
        for heavy in ["test", "site-packages", "dist-packages", "idlelib", "tkinter"] {
            let _ = fs::remove_dir_all(copy.join(heavy));
        }
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]);
        pip.args(["--python-version", version, "--target"]).arg(dir.join("site-packages"));
        run(pip.args(["numpy", "scipy"]).env_remove("PYTHONDONTWRITEBYTECODE"))?;
        fs::write(dir.join("job.py"), JOB).context("write job.py")?;
        let result = run(Command::new(dir.join("bin/python3")).args(["-I"]).arg(dir.join("job.py")))?;
        if !result.starts_with("result ") {
            bail!("job.py does not work: {result:?}");
        }
        Ok(())
    })
}
