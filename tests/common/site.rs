//! Hosts of this machine with a shared directory full of programs, and runs of those, plainly and through hpcrt.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test crate uses its part")]

use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use cluster::{Cluster, Spec};

/// The front end runs on the first host, the ranks on these; the last has a local library of its own.
pub const HOSTS: &str = "hpc2,hpc3";
pub const RANKS: [usize; 2] = [0, 1];

pub struct Site {
    pub cluster: Cluster,
    pub hpcrt: PathBuf,
}

pub struct Run {
    pub output: Output,
    pub took: Duration,
}

impl Run {
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// What a rank of a labelled run printed.
    pub fn rank(&self, rank: usize) -> String {
        let label = format!("[{rank}] ");
        self.out().lines().filter_map(|l| l.strip_prefix(&label)).map(|l| format!("{l}\n")).collect()
    }

    #[track_caller]
    pub fn code(self, expected: i32) -> Run {
        assert_eq!(self.output.status.code(), Some(expected), "{:?} {}{}", self.output.status, self.out(), self.err());
        self
    }

    #[track_caller]
    pub fn says(self, words: &[&str]) -> Run {
        for word in words {
            assert!(self.err().contains(word), "{word:?} is not in: {}", self.err());
        }
        self
    }
}

impl Site {
    pub fn up(name: &str) -> Site {
        let cluster = Cluster::up(Spec { name: self::name(name), ..Spec::default() }).unwrap();
        // Where every user of every host can execute it, and no operation is counted.
        let hpcrt = cluster.state().file("hpcrt");
        fs::copy(env!("CARGO_BIN_EXE_hpcrt"), &hpcrt).unwrap();
        Site { cluster, hpcrt }
    }

    pub fn start(&self, uid: u32, hosts: &str, flags: &[&str], program: &[&str]) -> Command {
        self.start_within(60, uid, hosts, flags, program)
    }

    pub fn start_within(&self, seconds: u32, uid: u32, hosts: &str, flags: &[&str], program: &[&str]) -> Command {
        let (agent, limit) = (self.cluster.agent_command(), seconds.to_string());
        let mut words =
            vec![self.hpcrt.to_str().unwrap(), "exec", "--timeout", &limit, "--hosts", hosts, "--agent", &agent];
        words.extend(flags);
        words.push("--");
        words.extend(program);
        let mut command = self.cluster.command("hpc1", uid, &words);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn run(&self, uid: u32, hosts: &str, flags: &[&str], program: &[&str]) -> Run {
        let begun = Instant::now();
        let output = self.start(uid, hosts, flags, program).output().unwrap();
        Run { output, took: begun.elapsed() }
    }

    /// Runs a program plainly and through hpcrt, and compares; returns the hpcrt run. `plain`: flags as words for `env`.
    #[track_caller]
    pub fn same(&self, uid: u32, flags: &[&str], plain: &[&str], program: &[&str]) -> Run {
        let command: Vec<&str> = ["env"].iter().chain(plain).chain(program).copied().collect();
        // Not where ranks run: what the kernel still reads ahead for it would be counted as theirs.
        let expected = self.cluster.exec("hpc1", uid, &command).unwrap();
        assert!(expected.status.success(), "{program:?} plainly: {expected:?}");
        let flags: Vec<&str> = ["--label", "-q"].iter().chain(flags).copied().collect();
        self.cluster.reset_ops().unwrap();
        let run = self.run(uid, HOSTS, &flags, program).code(0);
        for rank in RANKS {
            assert_eq!(
                run.rank(rank),
                String::from_utf8_lossy(&expected.stdout),
                "{program:?} as {uid}: {}",
                run.err()
            );
        }
        run
    }

    /// [`Site::same`], and no rank's host read a file from the shared file system.
    #[track_caller]
    pub fn staged(&self, uid: u32, flags: &[&str], plain: &[&str], program: &[&str]) {
        self.same(uid, flags, plain, program);
        for host in self.cluster.host_ops().unwrap() {
            if ["hpc2", "hpc3"].contains(&host.host.as_str()) {
                assert_eq!(
                    (host.ops.open, host.ops.read),
                    (0, 0),
                    "{program:?} as {uid} on {}: {:?}",
                    host.host,
                    host.ops
                );
            }
        }
    }

    pub fn backing(&self, name: &str) -> PathBuf {
        self.cluster.backing().join(name)
    }

    /// A fresh directory of the user's, with copies of scripts.
    pub fn place(&self, uid: u32, name: &str, scripts: &[&str]) -> PathBuf {
        let place = self.backing(name);
        fs::create_dir(&place).unwrap();
        for script in scripts {
            fs::copy(source(script), place.join(script)).unwrap();
            mode(&place.join(script), 0o755);
        }
        std::os::unix::fs::chown(&place, Some(uid), Some(uid)).unwrap();
        place
    }
}

/// Of the cluster: the same in every run from one checkout, so that a run replaces what a killed one left, and no other's.
pub fn name(tests: &str) -> String {
    let mut hasher = std::hash::DefaultHasher::new();
    env!("CARGO_MANIFEST_DIR").hash(&mut hasher);
    format!("t-{tests}-{:08x}", hasher.finish() >> 32)
}

pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name)
}

pub fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

pub fn tool(name: &str) -> bool {
    let found = Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        eprintln!("SKIPPED what needs {name}: it is not here");
    }
    found
}

/// The programs, in `/shared/app` as the hosts see it.
pub fn build(site: &Site) {
    let app = site.backing("app");
    for directory in ["bin", "lib", "run", "other"] {
        fs::create_dir_all(app.join(directory)).unwrap();
    }
    let line = |line: &str| {
        let words = line.split_whitespace().map(|w| match w.strip_prefix('@') {
            Some(name) => source(name).into_os_string(),
            None => w.into(),
        });
        let words: Vec<_> = words.collect();
        let done = Command::new(&words[0]).args(&words[1..]).current_dir(&app).output().unwrap();
        assert!(done.status.success(), "{line}: {:?} {}", done.status, String::from_utf8_lossy(&done.stderr));
    };
    for who in ["lib", "run", "other"] {
        line(&format!("gcc -g -shared -fPIC -DWHO=\"{who}\" @part.c -o {who}/libpart.so -Wl,-soname,libpart.so"));
    }
    let app_c = "gcc -g @app.c -Llib -lpart";
    line(&format!("{app_c} -o bin/rpath -Wl,--disable-new-dtags,-rpath,/shared/app/lib"));
    line(&format!("{app_c} -o bin/runpath -Wl,--enable-new-dtags,-rpath,/shared/app/run"));
    line(&format!("{app_c} -o bin/origin -Wl,--enable-new-dtags,-rpath,$ORIGIN/../lib"));
    line(&format!("{app_c} -o bin/nopath"));
    line("gcc @open.c -o bin/open -ldl -Wl,-rpath,/shared/app/lib");
    line("gcc -shared -fPIC -DBYTES=8192 @tls.c -o lib/libtls.so -lpthread");
    line("gcc @tlsmain.c -o bin/tls -Llib -ltls -Wl,-rpath,$ORIGIN/../lib");
    line("g++ -shared -fPIC @thrower.cc -o lib/libthrower.so");
    line("g++ @catcher.cc -o bin/catcher -Llib -lthrower -Wl,-rpath,$ORIGIN/../lib -lpthread");
    line("gcc @plain.c -o bin/dynamic");
    line("gcc -static @plain.c -o bin/static");
    if tool("musl-gcc") {
        line("musl-gcc @plain.c -o bin/musl");
        line("musl-gcc -static @plain.c -o bin/muslstatic");
    }
    for name in ["pool.py", "helper.py", "children.sh"] {
        fs::copy(source(name), app.join("bin").join(name)).unwrap();
        mode(&app.join("bin").join(name), 0o755);
    }
    fs::write(app.join("bin/script"), "#!/shared/app/bin/dynamic one argument\n").unwrap();
    mode(&app.join("bin/script"), 0o755);
    for (name, bits) in [("xonly", 0o711), ("setuid", 0o4755)] {
        fs::copy(app.join("bin/static"), app.join("bin").join(name)).unwrap();
        mode(&app.join("bin").join(name), bits);
    }
    std::os::unix::fs::symlink("app", site.backing("link")).unwrap();
}
