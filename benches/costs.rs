//! Programs as they are, on local file systems that are named in `--io-roots`, with `--async-io` beside plainly: by turns within one job, so that neither starting hpcrt
//! nor its agent counts, but the start of every process of the program's does. Seconds of processor time of a program and all that it starts, and of waiting for it.
//!
//! `HPCRT_COSTS=PROGRAM,...` runs these alone, `HPCRT_COSTS_RUNS=N` so many turns (7), `HPCRT_COSTS_AT=DIRECTORY,...` there (/dev/shm and the place of the build).

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use nix::sys::resource::{UsageWho, getrusage};

const HPCRT: &str = env!("CARGO_BIN_EXE_hpcrt");

/// What it is called, what it needs (a word: a program; with a dot behind it: a module of Python), and what it does in an empty directory beside `tree`.
type Program = (&'static str, &'static str, &'static str);

const TREE: &str = "mkdir -p tree/a/b; for n in $(seq 400); do seq $n $((n * 12)) > tree/a/b/$n; for to in tree/$n.txt tree/a/$n tree/a/b/$n.x; do cp tree/a/b/$n $to; done; done; \
    (for k in $(seq 1500); do echo 'begin;'; for n in 1 2 3 4 5 6 7 8 9 10; do echo \"insert into t(b) values('text $k $n');\"; done; echo 'commit;'; done) > some.sql; \
    (for n in $(seq 1500); do echo \"int f$n(int x, int y) { int z = x; for (int k = 0; k < y; k++) z = z * $n + k % (x + 1); return z; }\"; done) > some.c; \
    tar cf tree.tar tree";
const PROGRAMS: [Program; 11] = [
    ("tar c", "tar", "for k in 1 2; do tar cf t$k.tar -C .. tree tree; done"),
    ("tar x", "tar", "for k in 1 2; do mkdir o$k; tar xf ../tree.tar -C o$k; done"),
    ("rsync", "rsync", "rsync -rt ../tree/ copy; rsync -rt --checksum ../tree/ copy"),
    (
        "git",
        "git",
        "git init -q one; cp -r ../tree one; cd one; git add .; git -c user.name=n -c user.email=e commit -qm first; cd ..; git clone -q --no-hardlinks one two; cd two; \
         for n in 1 2 3; do echo x >> tree/2.txt; git -c user.name=n -c user.email=e commit -qam more; git status --short; done; git -c pack.threads=1 repack -adq",
    ),
    ("gcc", "gcc", "gcc -O1 -c ../some.c"),
    (
        "sqlite3",
        "sqlite3",
        "for k in 1 2; do sqlite3 $k.db 'create table t(a integer primary key, b text)'; sqlite3 $k.db < ../some.sql; done",
    ),
    (
        "python",
        "python3",
        "python3 -c \"import csv,pickle,json\nw=csv.writer(open('c.csv','w',newline=''))\nfor n in range(600000): w.writerow([n,n*n,str(n)*3])\n\
         pickle.dump(list(range(1000000)),open('p','wb'))\njson.dump({str(n):[n]*5 for n in range(30000)},open('j','w'),indent=1)\"",
    ),
    (
        "numpy",
        "python3 numpy.",
        "python3 -c \"import numpy as n\na=n.arange(8000000.).reshape(2000,4000)\nfor k in range(3):\n n.save('a.npy',a); n.savez('a.npz',a=a,b=a.T); n.savetxt('a.txt',a[:60]); n.load('a.npz')['b'].sum()\"",
    ),
    (
        "h5py",
        "python3 h5py. numpy.",
        "python3 -W ignore -c \"import h5py,numpy as n\nfor q in range(2):\n f=h5py.File('h.h5','w')\n for k in range(600): f.create_dataset('d%d'%k,data=n.arange(k*50.),chunks=(k*50,) if k else None)\n\
         \x20g=f.create_dataset('grow',(0,),maxshape=(None,),chunks=(64,))\n for k in range(2000): g.resize((g.shape[0]+7,)); g[-7:]=k\n f.close()\"",
    ),
    (
        "netCDF4",
        "python3 netCDF4.",
        "python3 -c \"import netCDF4,numpy as n\nfor kind in ('NETCDF4','NETCDF3_CLASSIC'):\n d=netCDF4.Dataset(kind+'.nc','w',format=kind);d.createDimension('t',None);\
         d.createDimension('x',50);v=d.createVariable('v','f8',('t','x'));[v.__setitem__((k,slice(None)),n.arange(50)*k) for k in range(4000)];d.close()\"",
    ),
    (
        "LAMMPS",
        "lmp",
        "printf 'units lj\\natom_style atomic\\nlattice fcc 0.8442\\nregion box block 0 10 0 10 0 10\\ncreate_box 1 box\\ncreate_atoms 1 box\\nmass 1 1.0\\n\
         velocity all create 3.0 87287\\npair_style lj/cut 2.5\\npair_coeff 1 1 1.0 1.0 2.5\\nfix 1 all nve\\ndump 1 all atom 2 dump.txt\\nrun 150\\n' > in; lmp -in in -log none > /dev/null",
    ),
];

fn main() {
    let mut words = env::args().skip(1);
    if words.next().as_deref() == Some("within") {
        return within(Path::new(&words.next().expect("a directory")), &words.next().unwrap_or_default());
    }
    let at = env::var("HPCRT_COSTS_AT").unwrap_or_else(|_| format!("/dev/shm,{}", env!("CARGO_TARGET_TMPDIR")));
    println!("processor time, s, medians: plain | --async-io | median of the ratios of neighbours | the same of time");
    for place in at.split(',') {
        let top = Path::new(place).join(format!("bench-costs-{}", std::process::id()));
        std::fs::create_dir_all(&top).expect("a place");
        println!("{place}");
        let ours = env::current_exe().expect("this program");
        // What measures is itself a plain program.
        let script = "P=$LD_PRELOAD; unset LD_PRELOAD; exec \"$0\" within \"$1\" \"$P\"";
        let mut run = Command::new(HPCRT);
        run.args(["exec", "-q", "--async-io", "--io-roots"])
            .arg(&top)
            .args(["--", "sh", "-c", script])
            .arg(ours)
            .arg(&top);
        let ended = run.status().expect("hpcrt starts");
        std::fs::remove_dir_all(&top).expect("it is ours");
        assert!(ended.success(), "it ended with {ended}");
    }
}

/// Processor time of children, and time.
fn now() -> (f64, Instant) {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).expect("it is known");
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    (seconds(usage.user_time()) + seconds(usage.system_time()), Instant::now())
}

fn sh(place: &Path, script: &str) -> Command {
    let mut command = Command::new("sh");
    command.current_dir(place).args(["-ec", script]).stdout(Stdio::null()).env("HOME", place);
    command.envs([("OMP_NUM_THREADS", "1"), ("OPENBLAS_NUM_THREADS", "1"), ("PYTHONDONTWRITEBYTECODE", "1")]);
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"), ("OMPI_MCA_btl", "self")]);
    command
}

/// In the job, without the resident.
fn within(top: &Path, preload: &str) {
    assert!(sh(top, TREE).status().is_ok_and(|status| status.success()), "the files are there");
    let runs = env::var("HPCRT_COSTS_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(7);
    let only = env::var("HPCRT_COSTS").unwrap_or_default();
    for (name, needs, script) in PROGRAMS {
        if !only.is_empty() && !only.split(',').any(|word| word == name) {
            continue;
        }
        let missing = needs.split(' ').find(|need| {
            let module = need.strip_suffix('.').map(|module| format!("python3 -c 'import {module}'"));
            let found = sh(top, &module.unwrap_or_else(|| format!("command -v {need}"))).stderr(Stdio::null()).status();
            !found.is_ok_and(|status| status.success())
        });
        if let Some(missing) = missing {
            eprintln!("SKIPPED: {name} needs {missing}");
            continue;
        }
        // [plain, ours], [processor, waiting]
        let mut took = [const { [const { Vec::new() }; 2] }; 2];
        for turn in 0..2 * runs {
            let ours = usize::from(matches!(turn % 4, 1 | 2));
            let work: PathBuf = top.join("work");
            std::fs::create_dir(&work).expect("an empty directory");
            let mut command = sh(&work, script);
            if ours == 1 {
                command.env("LD_PRELOAD", preload);
            }
            let before = now();
            let status = command.status().expect("a shell");
            let after = now();
            assert!(status.success(), "{name} ended with {status}");
            std::fs::remove_dir_all(&work).expect("it is ours");
            took[ours][0].push(after.0 - before.0);
            took[ours][1].push((after.1 - before.1).as_secs_f64());
        }
        let [plain, ours] = took;
        let ratios = |what: usize| ours[what].iter().zip(&plain[what]).map(|(ours, plain)| ours / plain).collect();
        let (processor, waiting) = (middle(ratios(0)), middle(ratios(1)));
        println!(
            "{name:<8} | {:6.3} | {:6.3} | {:.3} +- {:.3} | {:.3} +- {:.3}",
            middle(plain[0].clone()).0,
            middle(ours[0].clone()).0,
            processor.0,
            processor.1,
            waiting.0,
            waiting.1
        );
    }
}

/// The median, and its standard error: by the median distance from it, as for a normal distribution.
fn middle(mut values: Vec<f64>) -> (f64, f64) {
    let middle_of = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let median = middle_of(&mut values);
    let mut distances = values.iter().map(|value| (value - median).abs()).collect();
    (median, 1.4826 * 1.2533 * middle_of(&mut distances) / (values.len() as f64).sqrt())
}
