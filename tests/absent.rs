//! Names that do not exist in captured directories: once the directory's listing is known, nobody asks the shared file system for them, however
//! many ranks look for them how often, and one that is made is found at once.
//! Needs root; says so and passes otherwise.
#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::Duration;

use cluster::{Cluster, Ops, Spec};
use common::Run;

/// Looks so many times for 50 names each: as files, as libraries by the program's RUNPATH, or both; then makes one of the names and looks again.
/// The second host's ranks may be late: what the first one's make there changes the directory before they look.
const ABSENT_C: &str = r#"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char path[256], name_of[64];
    struct stat stat_of;
    int found = 0, files = !(argc > 3), libraries = argc > 2;
    const char *rank = getenv("HPCRT_RANK") ? getenv("HPCRT_RANK") : "";
    if (argc > 4 && atoi(rank) > 3) sleep(1);
    for (int times = atoi(argv[1]); times > 0; times--) {
        for (int name = 0; name < 50; name++) {
            snprintf(path, sizeof path, "/shared/app/lib/absent%d", name);
            if (files) found += !access(path, F_OK) + !stat(path, &stat_of) + (open(path, O_RDONLY) >= 0);
            snprintf(path, sizeof path, "libabsent%d.so", name);
            if (libraries) found += !!dlopen(path, RTLD_NOW);
        }
    }
    printf("found %d\n", found);
    snprintf(path, sizeof path, "/shared/app/lib/made%s", rank);
    int here = access(path, F_OK);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    printf("made %d %d\n", here, access(path, F_OK));
    if (unlink(path)) return 2;
    if (!libraries) return 0;
    snprintf(name_of, sizeof name_of, "libmade%s.so", rank);
    snprintf(path, sizeof path, "/shared/app/lib/%s", name_of);
    int before = !!dlopen(name_of, RTLD_NOW);
    if (symlink("/shared/app/libempty.so", path)) return 3;
    printf("library %d %d\n", before, !!dlopen(name_of, RTLD_NOW));
    return unlink(path);
}
"#;

/// The same for modules, as Python looks for them.
const ABSENT_PY: &str = "
import importlib, sys
for _ in range(int(sys.argv[1])):
    importlib.invalidate_caches()
    for name in range(50):
        try:
            importlib.import_module('absent%d' % name)
        except ImportError:
            pass
print('found 0')
";

#[test]
fn absent_names_are_looked_up_once() {
    if let Some(obstacle) = Cluster::obstacle() {
        return eprintln!("SKIPPED: {obstacle}");
    }
    let backing = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::set_permissions(backing.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let app = backing.path().join("app");
    fs::create_dir_all(app.join("lib")).unwrap();
    fs::set_permissions(app.join("lib"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::write(app.join("absent.c"), ABSENT_C).unwrap();
    fs::write(app.join("absent.py"), ABSENT_PY).unwrap();
    let words = ["-o", "absent", "absent.c", "-ldl", "-Wl,-rpath,/shared/app/lib:/shared/app"];
    for words in [&words[..], &["-shared", "-x", "c", "/dev/null", "-o", "libempty.so"]] {
        assert!(Command::new("cc").args(words).current_dir(&app).status().unwrap().success());
    }
    let cluster = Cluster::up(Spec { hosts: 3, backing: Some(backing.path().into()), ..Spec::of("t-absent") });
    let cluster = cluster.unwrap();
    let (agent, python) = (cluster.agent_command(), ["python3", "/shared/app/absent.py"]);
    let run = |uid, view: &str, program: &[&str], times: &str| -> Vec<Ops> {
        let mut words = vec![env!("CARGO_BIN_EXE_hpcrt"), "exec", "-q", "--hosts", "hpc2,hpc3", "--ppn", "4"];
        words.extend(["--agent", &agent, "--prefix", "/shared/app", "--view", view, "--"]);
        words.extend(program.iter().take(2));
        words.push(times);
        words.extend(program.iter().skip(2));
        cluster.reset_ops().unwrap();
        let done = Run::new(cluster.command("hpc1", uid, &words)).within(Duration::from_secs(60)).end().code(0);
        let right = |line: &String| ["found 0", "made -1 0", "library 0 1"].contains(&line.as_str());
        assert!(done.lines().iter().all(right) && done.lines().len() >= 8, "{}", done.text());
        cluster.host_ops().unwrap().iter().map(|host| host.ops).collect()
    };
    let absent = |ops: &[Ops]| ops.iter().map(|ops| ops.absent).collect::<Vec<_>>();
    for (uid, view, program) in [
        (0, "namespace", &["/shared/app/absent"][..]),
        (20001, "namespace", &["env", "/shared/app/absent", "libraries"]),
        (20001, "namespace", &python),
        (20001, "audit", &python),
        (20001, "audit", &["env", "/shared/app/absent", "libraries", "only"]),
        (0, "audit", &["env", "/shared/app/absent", "libraries", "only"]),
        (20001, "audit", &["env", "/shared/app/absent", "libraries", "only", "late"]),
    ] {
        let (once, often) = (run(uid, view, program, "1"), run(uid, view, program, "20"));
        eprintln!("{view} {program:?} as {uid}: absent names asked for {:?}, {:?}", absent(&once), absent(&often));
        for (host, (once, often)) in once.iter().zip(&often).enumerate().skip(1) {
            // A rank makes and removes one name: the original is looked at before and after. Without a view its linker looks once for each
            // of the directories that it searches, and those for other processors below.
            let most = if view == "audit" && program.len() > 2 { 20 + 4 * 40 } else { 20 };
            assert!(once.absent.max(often.absent) <= most, "hpc{}: {once:?} {often:?}", host + 1);
        }
        assert!(often[0].absent <= 5, "the front end looks for names: {:?}", often[0]);
    }
}
