//! Hosts of this machine with a shared directory full of programs, and runs of those, plainly and through hpcrt.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "each test crate uses its part")]

use std::fs;
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
        Site::of(Spec::of(&format!("t-{name}")))
    }

    pub fn of(spec: Spec) -> Site {
        let cluster = Cluster::up(spec).unwrap();
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

/// The programs of [`build`] as one user's, shown to the ranks in one way.
pub struct Shown<'a> {
    pub site: &'a Site,
    pub uid: u32,
    /// Which way: of every run.
    pub flags: &'a [&'a str],
    /// What a rank's host may open on the shared file system in a run. Where that is nothing, it reads nothing there either.
    pub opens: u64,
}

impl Shown<'_> {
    pub fn run(&self, hosts: &str, flags: &[&str], program: &[&str]) -> Run {
        let flags: Vec<&str> = self.flags.iter().chain(flags).copied().collect();
        self.site.run(self.uid, hosts, &flags, program)
    }

    /// Runs a program plainly and through hpcrt, and compares; returns the hpcrt run. `plain`: flags as words for `env`.
    #[track_caller]
    pub fn same(&self, flags: &[&str], plain: &[&str], program: &[&str]) -> Run {
        let cluster = &self.site.cluster;
        let command: Vec<&str> = ["env"].iter().chain(plain).chain(program).copied().collect();
        // Not where ranks run: what the kernel still reads ahead for it would be counted as theirs.
        let expected = cluster.exec("hpc1", self.uid, &command).unwrap();
        assert!(expected.status.success(), "{program:?} plainly: {expected:?}");
        let expected = String::from_utf8_lossy(&expected.stdout);
        let flags: Vec<&str> = ["--label", "-q"].iter().chain(flags).copied().collect();
        cluster.reset_ops().unwrap();
        let run = self.run(HOSTS, &flags, program).code(0);
        for rank in RANKS {
            assert_eq!(run.rank(rank), expected, "{program:?} as {}: {}", self.uid, run.err());
        }
        run
    }

    /// [`Shown::same`], and no rank's host opened more on the shared file system than it may.
    #[track_caller]
    pub fn staged(&self, flags: &[&str], plain: &[&str], program: &[&str]) {
        self.same(flags, plain, program);
        for host in self.site.cluster.host_ops().unwrap() {
            let few = host.ops.open <= self.opens && (self.opens > 0 || host.ops.read == 0);
            let is_rank = HOSTS.split(',').any(|name| name == host.host);
            assert!(few || !is_rank, "{program:?} as {} on {}: {:?}", self.uid, host.host, host.ops);
        }
    }

    /// Every way to find a library at the start.
    pub fn linked(&self, programs: &[&str]) {
        for program in programs {
            if self.site.backing("app/bin").join(program).exists() {
                self.staged(&[], &[], &[&format!("/shared/app/bin/{program}"), "an argument"]);
            }
        }
        let path = "LD_LIBRARY_PATH=/shared/app/other";
        self.staged(&["-x", path], &[path], &["/shared/app/bin/nopath"]);
        self.staged(&["-x", path], &[path], &["/shared/app/bin/rpath"]);
        let preload = "LD_PRELOAD=/shared/app/other/libpart.so";
        self.staged(&["-x", preload], &[preload], &["/shared/app/bin/runpath"]);
        self.staged(&[], &[], &["/shared/link/bin/origin"]);
        self.staged(&[], &[], &["/shared/app/lib/../bin/rpath"]);
        // A library that only one host has in another version.
        let local = self.run("hpc3,hpc4", &["-q", "--label"], &["/shared/hostlocal"]).code(0);
        assert_eq!((local.rank(0), local.rank(1)), ("common\n".into(), "last\n".into()));
    }

    /// Libraries that are opened late.
    pub fn opened(&self) {
        let names = [
            "libpart.so",
            "/shared/app/run/libpart.so",
            "/shared/link/other/libpart.so",
            "/shared/app/bin/../lib/libtls.so",
        ];
        let open: Vec<&str> = ["/shared/app/bin/open"].into_iter().chain(names).collect();
        self.staged(&["--prefix", "/shared/app"], &[], &open);
    }

    /// Programs that start others.
    pub fn children(&self, flags: &[&str]) {
        if ["git", "rsync", "ssh"].into_iter().all(tool) {
            let home = ["HOME=/tmp"];
            let flags: Vec<&str> = flags.iter().chain(&["-x", home[0]]).copied().collect();
            self.same(&flags, &home, &["/shared/app/bin/children.sh"]);
        }
        if tool("gdb") {
            let words =
                "gdb -batch -nx -ex break~who -ex run -ex backtrace -ex info~sharedlibrary /shared/app/bin/rpath";
            let words: Vec<String> = words.split(' ').map(|word| word.replace('~', " ")).collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let run = self.run(HOSTS, &["-q", "--label", "--prefix", "/shared/app"], &words).code(0);
            for rank in RANKS {
                let said = run.rank(rank);
                for name in ["/shared/app/lib/libpart.so", "part.c:", "in main"] {
                    assert!(said.contains(name), "{name} is not in {said}{}", run.err());
                }
            }
        }
    }

    /// What ranks write beside their programs, alone and together.
    pub fn writing(&self, times: usize) {
        let name = format!("w{}", self.uid);
        let place = self.site.place(self.uid, &name, &["writer.py", "together.py"]);
        let writer = format!("/shared/{name}/writer.py");
        let expected = self.site.cluster.exec("hpc4", self.uid, &[&writer, "plain"]).unwrap();
        let expected = String::from_utf8_lossy(&expected.stdout).replace("_of_plain", "_of_X");
        assert!(expected.contains("compiled"), "{expected}");
        for (rank, host) in HOSTS.split(',').enumerate() {
            let own = format!("own{rank}");
            let run = self.run(host, &["-q"], &[&writer, &own]).code(0);
            assert_eq!(run.out().replace(&format!("_of_{own}"), "_of_X"), expected, "as {}: {}", self.uid, run.err());
            assert_eq!(fs::read_to_string(place.join(format!("out.{own}/renamed"))).unwrap(), "ONE");
        }
        for n in 0..times {
            let script = format!("/shared/{name}/together.py");
            let run = self.run("hpc2:2,hpc3,hpc4", &["-q"], &[&script, &format!("t{n}")]).code(0);
            assert_eq!(run.out(), "together\n".repeat(4));
        }
    }
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
