//! The closure resolver against the dynamic linkers of this machine.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use hpcrt::loader::arch::{self, Cpu};
use hpcrt::loader::closure::{Closure, Environment, How, Object, resolve};
use hpcrt::loader::elf::Elf;
use hpcrt::loader::ldcache::LdCache;
use hpcrt::loader::ldso::Ldso;
use hpcrt::loader::probe::{FileSystem, Names, Opened, Probe};

fn environment(library_path: Option<&str>, preload: Option<&str>, cwd: &Path) -> Environment {
    Environment {
        cwd: cwd.to_path_buf(),
        library_path: library_path.map(Into::into),
        preload: preload.map(Into::into),
        path: Some("/usr/bin:/bin".into()),
    }
}

/// Name asked for -> path opened, as the resolver sees it; missing ones map to "not found".
fn ours(closure: &Closure) -> BTreeMap<String, String> {
    let text = |name: &OsStr| name.to_string_lossy().into_owned();
    let mut found = BTreeMap::new();
    for object in &closure.objects[closure.program..] {
        for (name, target) in &object.needs {
            let path = target.map_or("not found".into(), |index| text(closure.objects[index].path.as_os_str()));
            found.entry(text(name)).or_insert(path);
        }
        if object.how == How::Preload {
            found.insert(text(object.path.as_os_str()), text(object.path.as_os_str()));
        }
    }
    found
}

/// The same from the dynamic linker: it lists each object under the first name it was asked for.
fn theirs(program: &Path, environment: &Environment) -> Option<BTreeMap<String, String>> {
    let mut command = Command::new(program);
    command.env_clear().env("LD_TRACE_LOADED_OBJECTS", "1").current_dir(&environment.cwd);
    if let Some(path) = &environment.library_path {
        command.env("LD_LIBRARY_PATH", path);
    }
    if let Some(path) = &environment.preload {
        command.env("LD_PRELOAD", path);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // A fatal error (a damaged library) ends the trace.
    output.status.success().then(|| {
        let lines = text.lines().filter(|line| line.starts_with('\t') && !line.contains("linux-vdso"));
        lines
            .map(|line| {
                let line = line.trim();
                let line = line.rsplit_once(" (0x").map_or(line, |(line, _)| line);
                let (name, path) = line.split_once(" => ").unwrap_or((line, line));
                (name.to_owned(), path.to_owned())
            })
            .collect()
    })
}

/// Resolves a dynamic glibc program both ways and compares.
fn agree(program: &Path, environment: &Environment) -> Closure {
    let closure = resolve(&FileSystem, environment, program, |_, _| {}).unwrap();
    let theirs = theirs(program, environment).unwrap_or_else(|| panic!("{}: no trace", program.display()));
    let ours = ours(&closure);
    for (name, path) in &theirs {
        let is_interpreter = closure.interpreter.is_some_and(|own| closure.objects[own].path == Path::new(path));
        if !is_interpreter {
            assert_eq!(ours.get(name), Some(path), "{}: {name}; ours: {ours:#?}", program.display());
        }
    }
    for (name, path) in &ours {
        assert!(theirs.values().any(|other| other == path), "{}: superfluous {name} => {path}", program.display());
    }
    closure
}

fn found<'c>(closure: &'c Closure, file: &str) -> &'c Object {
    let named = |object: &&Object| object.path.file_name() == Some(OsStr::new(file));
    closure.objects.iter().find(named).unwrap_or_else(|| panic!("{file} is not in {closure:#?}"))
}

/// A directory in which programs and libraries are built. `None`, said aloud, where there is no such compiler.
struct Workshop {
    dir: tempfile::TempDir,
    compiler: &'static str,
}

impl Workshop {
    fn new(compiler: &'static str) -> Option<Workshop> {
        let Ok(_) = Command::new(compiler).arg("--version").output() else {
            eprintln!("SKIPPED: {compiler} is not installed");
            return None;
        };
        // Canonical, since the program's own $ORIGIN is.
        let dir = tempfile::tempdir_in(std::env::temp_dir().canonicalize().unwrap()).unwrap();
        fs::write(dir.path().join("main.c"), "int main(void) { return 0; }\n").unwrap();
        Some(Workshop { dir, compiler })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Compiles `output` in the workshop with linker options separated by blanks; `@` stands for the workshop.
    fn build(&self, output: &str, options: &str) -> PathBuf {
        let path = self.path(output);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let is_library = output.contains(".so");
        let source = if is_library { "-xc /dev/null -shared -fPIC" } else { "main.c" };
        let options = options.replace('@', self.dir.path().to_str().unwrap());
        let status = Command::new(self.compiler)
            .current_dir(self.dir.path())
            .args(source.split(' ').chain(["-x", "none", "-Wl,--no-as-needed", "-Wl,--allow-shlib-undefined", "-o"]))
            .arg(&path)
            .args(options.split_whitespace())
            .status()
            .unwrap();
        assert!(status.success(), "{output}: {options}");
        path
    }

    fn agree(&self, program: &Path) -> Closure {
        agree(program, &environment(None, None, self.dir.path()))
    }
}

#[test]
fn real_programs() {
    for program in ["/bin/ls", "/usr/bin/python3", "/usr/bin/git", "/usr/bin/ssh", "/usr/bin/gdb", "/usr/bin/gcc"] {
        let program = Path::new(program);
        if program.exists() {
            let closure = agree(program, &environment(None, None, Path::new("/")));
            assert!(closure.missing.is_empty());
            assert_eq!(closure.objects[closure.program].how, How::Program);
            assert_eq!(closure.objects[1].how, How::Interpreter);
        }
    }
}

#[test]
#[ignore = "long: every program of this machine"]
fn every_program() {
    let (mut compared, mut others) = (0, 0);
    for dir in ["/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/lib/git-core"] {
        for entry in fs::read_dir(dir).into_iter().flatten() {
            let program = entry.unwrap().path();
            let environment = environment(None, None, Path::new("/"));
            let Ok(closure) = resolve(&FileSystem, &environment, &program, |_, _| {}) else { continue };
            let is_dynamic =
                closure.interpreter.is_some_and(|own| !closure.objects[own].path.starts_with("/lib/ld-musl"));
            // A program that changes its group is secured against the environment: asked for a trace, it would really run.
            let is_secured = fs::metadata(&program).unwrap().permissions().mode() & 0o6000 != 0;
            if closure.program == 0 && is_dynamic && !is_secured {
                agree(&program, &environment);
                compared += 1;
            } else {
                others += 1;
            }
        }
    }
    println!("{compared} programs agree; {others} scripts and static programs");
    assert!(compared > 10);
}

#[test]
fn constants_of_the_dynamic_linker() {
    let shell =
        resolve(&FileSystem, &environment(None, None, Path::new("/")), Path::new("/bin/sh"), |_, _| {}).unwrap();
    let path = &shell.objects[shell.interpreter.unwrap()].path;
    let output = Command::new(path).arg("--list-diagnostics").output().unwrap();
    if !output.status.success() {
        eprintln!("SKIPPED: {} knows no --list-diagnostics", path.display());
        return;
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let value = |line: &str| Some(line.split_once('=')?.1.trim_matches('"').to_owned());
    let values = |key: &str| text.lines().filter(|line| line.starts_with(key)).filter_map(value).collect::<Vec<_>>();
    let program = Elf::read(&fs::File::open("/bin/sh").unwrap(), None).unwrap();
    let cpu = Cpu::detect(arch::of(program.abi.machine, program.abi.is_64).unwrap());
    let ldso = Ldso::scan(&fs::read(path).unwrap(), &cpu);
    let dirs: Vec<_> = ldso.system_dirs.iter().map(|dir| String::from_utf8(dir.clone()).unwrap()).collect();
    assert_eq!(dirs, values("path.system_dirs"));
    assert_eq!([String::from_utf8(ldso.lib).unwrap()], values("dl_dst_lib=")[..]);
    let minor: u32 = values("version.version=")[0].split('.').nth(1).unwrap().parse().unwrap();
    assert_eq!((ldso.hwcaps, ldso.legacy), (minor >= 33, minor < 37));
    let active = values("dl_hwcaps_subdirs_active=").concat();
    let active = u32::from_str_radix(active.trim_start_matches("0x"), 16).unwrap_or(0);
    let all = values("dl_hwcaps_subdirs=").concat();
    // The lowest bit stands for the last name.
    let names = all.split(':').filter(|name| !name.is_empty()).rev().enumerate();
    let mut wanted: Vec<_> = names.filter(|(bit, _)| active >> bit & 1 == 1).map(|(_, name)| name).collect();
    wanted.reverse();
    assert_eq!(cpu.hwcaps, wanted);
    assert_eq!(values("dl_platform="), [cpu.platform.unwrap().into_string().unwrap()]);
}

#[test]
fn the_cache_reads_as_ldconfig_prints_it() {
    let (Ok(bytes), Ok(output)) = (fs::read("/etc/ld.so.cache"), Command::new("/sbin/ldconfig").arg("-p").output())
    else {
        eprintln!("SKIPPED: no /etc/ld.so.cache or no ldconfig");
        return;
    };
    let program = Elf::read(&fs::File::open("/bin/sh").unwrap(), None).unwrap();
    let cpu = Cpu::detect(arch::of(program.abi.machine, program.abi.is_64).unwrap());
    let cache = LdCache::parse(bytes).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut first = BTreeMap::new();
    // "\tlibz.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libz.so.1"
    for (name, path) in text.lines().filter_map(|line| line.trim().split_once(" => ")) {
        let (name, kind) = name.split_once(" (").unwrap();
        if !kind.contains("hwcap") && (kind.starts_with("libc6,x86-64") || kind.starts_with("libc6,AArch64")) {
            first.entry(name).or_insert(path);
        }
    }
    assert!(first.len() > 10, "{text}");
    for (name, path) in first {
        let ours = cache.lookup(OsStr::new(name), &cpu).unwrap();
        assert!(ours == path || ours.to_string_lossy().contains("glibc-hwcaps"), "{name}: {ours:?}, {path}");
    }
}

#[test]
fn rpath_is_inherited_and_runpath_is_not() {
    let Some(shop) = Workshop::new("gcc") else { return };
    shop.build("deep/libdeep.so", "");
    shop.build("mid/libmid.so", "-Ldeep -ldeep");
    let links = "-Lmid -lmid -Wl,-rpath-link,deep -Wl,-rpath,@/mid:@/deep";
    let rpath = shop.build("rpath", &format!("{links} -Wl,--disable-new-dtags"));
    assert_eq!(found(&shop.agree(&rpath), "libdeep.so").how, How::RPath);
    let runpath = shop.build("runpath", &format!("{links} -Wl,--enable-new-dtags"));
    let closure = shop.agree(&runpath);
    assert_eq!(found(&closure, "libmid.so").how, How::RunPath);
    let missing = &closure.missing[0];
    assert_eq!(
        (missing.name.to_str(), closure.objects[missing.needed_by].soname.is_none()),
        (Some("libdeep.so"), true)
    );
    assert!(missing.searched.contains(&"/etc/ld.so.cache".into()));

    // A library with a RUNPATH of its own does not look into the RPATH of what loaded it.
    shop.build("mid/libmid.so", "-Ldeep -ldeep -Wl,-rpath,@/none -Wl,--enable-new-dtags");
    assert_eq!(shop.agree(&rpath).missing.len(), 1);
    // The chain: the RPATH of the library, then that of the program.
    shop.build("other/libdeep.so", "");
    shop.build("mid/libmid.so", "-Ldeep -ldeep -Wl,-rpath,@/other -Wl,--disable-new-dtags");
    assert_eq!(found(&shop.agree(&rpath), "libdeep.so").path, shop.path("other/libdeep.so"));
}

#[test]
fn library_path_comes_between_rpath_and_runpath() {
    let Some(shop) = Workshop::new("gcc") else { return };
    for dir in ["a", "b"] {
        shop.build(&format!("{dir}/libx.so"), "");
    }
    let old = shop.build("old", "-La -lx -Wl,-rpath,@/a -Wl,--disable-new-dtags");
    let new = shop.build("new", "-La -lx -Wl,-rpath,@/a -Wl,--enable-new-dtags");
    let plain = shop.build("plain", "-La -lx");
    let b = shop.path("b").to_str().unwrap().to_owned();
    for (program, path, dir, how) in [
        (&old, b.as_str(), "a", How::RPath),
        (&new, &b, "b", How::LibraryPath),
        (&new, "", "a", How::RunPath),
        (&plain, "none;b", "b", How::LibraryPath),
        (&plain, "$ORIGIN//b//", "b", How::LibraryPath),
    ] {
        let closure = agree(program, &environment(Some(path), None, shop.dir.path()));
        let object = found(&closure, "libx.so");
        assert_eq!((object.how, object.canonical.clone()), (how, shop.path(dir).join("libx.so")), "{path:?}");
    }
    // An empty element is the working directory.
    let closure = agree(&plain, &environment(Some("/none:"), None, &shop.path("b")));
    assert_eq!(found(&closure, "libx.so").path, Path::new("libx.so"));
}

#[test]
fn tokens() {
    let Some(shop) = Workshop::new("gcc") else { return };
    let lib = if Path::new("/lib/x86_64-linux-gnu").exists() { "lib/x86_64-linux-gnu" } else { "lib64" };
    shop.build(&format!("top/{lib}/liblib.so"), "");
    shop.build("top/haswell/libplatform.so", "");
    shop.build("top/x86_64/libplatform.so", "");
    shop.build("top/lib/liborigin.so", "-Wl,-rpath,$ORIGIN/../deep");
    shop.build("top/deep/libdeep.so", "");
    shop.build("top/lib/liborigin.so", "-Ltop/deep -ldeep -Wl,-rpath,$ORIGIN/../deep");
    let program = shop.build(
        "top/bin/program",
        &format!(
            "-Ltop/{lib} -Ltop/lib -Ltop/x86_64 -llib -lorigin -lplatform -Wl,-rpath-link,top/deep \
             -Wl,-rpath,$ORIGIN/../$LIB:${{ORIGIN}}/../lib:$ORIGIN/../$PLATFORM:$ORIGINAL"
        ),
    );
    assert!(shop.agree(&program).missing.is_empty());
    // Through a link, $ORIGIN of the program is where it really lies; that of a library is where it was found.
    fs::create_dir(shop.path("links")).unwrap();
    symlink("../top/bin/program", shop.path("links/program")).unwrap();
    let closure = shop.agree(&shop.path("links/program"));
    assert!(closure.missing.is_empty());
    assert_eq!(closure.objects[0].canonical, program);
}

#[test]
fn one_soname_is_one_object() {
    let Some(shop) = Workshop::new("gcc") else { return };
    shop.build("a/libx.so", "-Wl,-soname,libx.so.1");
    symlink("libx.so", shop.path("a/libx.so.1")).unwrap();
    shop.build("b/libx.so.1", "-Wl,-soname,libx.so.1");
    shop.build("liby.so", "-Lb -l:libx.so.1 -Wl,-rpath,@/b");
    let program = shop.build("program", "-La -l:libx.so.1 -L. -ly -Wl,-rpath,@/a:@");
    let closure = shop.agree(&program);
    assert_eq!(found(&closure, "libx.so.1").canonical, shop.path("a/libx.so"));
    assert_eq!(
        closure.objects.iter().filter(|object| object.soname.as_deref() == Some(OsStr::new("libx.so.1"))).count(),
        1
    );
    // One file under two names without a soname is one object, too.
    shop.build("c/libone.so", "");
    fs::hard_link(shop.path("c/libone.so"), shop.path("c/libtwo.so")).unwrap();
    let program = shop.build("twice", "-Lc -l:libone.so -l:libtwo.so -Wl,-rpath,@/c");
    assert_eq!(shop.agree_objects(&program), 4);
}

impl Workshop {
    /// The number of objects, where the linker's trace names only the first name of each.
    fn agree_objects(&self, program: &Path) -> usize {
        let environment = environment(None, None, self.dir.path());
        let closure = resolve(&FileSystem, &environment, program, |_, _| {}).unwrap();
        // The trace has no line for the program itself.
        assert_eq!(closure.objects.len(), theirs(program, &environment).unwrap().len() + 1);
        closure.objects.len()
    }
}

#[test]
fn nodeflib_skips_the_default_directories() {
    let Some(shop) = Workshop::new("gcc") else { return };
    shop.build("libx.so", "-nostdlib -lz -Wl,-z,nodefaultlib");
    let program = shop.build("program", "-L. -lx -Wl,-rpath,@");
    let closure = shop.agree(&program);
    assert_eq!(closure.missing[0].name, "libz.so.1");
}

#[test]
fn subdirectories_of_the_processor() {
    let Some(shop) = Workshop::new("gcc") else { return };
    for dir in ["glibc-hwcaps/x86-64-v2/", "glibc-hwcaps/x86-64-v3/", "glibc-hwcaps/x86-64-v9/", "tls/", "x86_64/", ""]
    {
        shop.build(&format!("lib/{dir}libx.so"), "");
    }
    let program = shop.build("program", "-Llib -lx -Wl,-rpath,@/lib");
    for gone in ["glibc-hwcaps/x86-64-v3/libx.so", "glibc-hwcaps", "tls", "x86_64"] {
        assert!(shop.agree(&program).missing.is_empty());
        let path = shop.path("lib").join(gone);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
    }
    assert_eq!(found(&shop.agree(&program), "libx.so").path, shop.path("lib/libx.so"));
}

#[test]
fn other_machines_are_passed_over_and_damage_is_not() {
    let Some(shop) = Workshop::new("gcc") else { return };
    let good = shop.build("good/libx.so", "");
    let program = shop.build("program", "-Lgood -lx -Wl,-rpath,@/bad:@/good");
    let mut bytes = fs::read(&good).unwrap();
    fs::create_dir(shop.path("bad")).unwrap();
    for (at, value) in [(18, 0xb7), (4, 1)] {
        let old = std::mem::replace(&mut bytes[at], value);
        fs::write(shop.path("bad/libx.so"), &bytes).unwrap();
        assert_eq!(found(&shop.agree(&program), "libx.so").path, good);
        bytes[at] = old;
    }
    for damaged in [&b"no library at all, and long enough for a header of an ELF file, which is not here"[..], b"short"]
    {
        fs::write(shop.path("bad/libx.so"), damaged).unwrap();
        let environment = environment(None, None, shop.dir.path());
        assert_eq!(theirs(&program, &environment), None);
        let closure = resolve(&FileSystem, &environment, &program, |_, _| {}).unwrap();
        assert!(closure.missing[0].reason.as_ref().unwrap().contains("bad/libx.so"));
    }
    // A dangling link is as good as nothing.
    fs::remove_file(shop.path("bad/libx.so")).unwrap();
    symlink("nowhere", shop.path("bad/libx.so")).unwrap();
    assert_eq!(found(&shop.agree(&program), "libx.so").path, good);
    // A loop of links ends the search of this list of directories.
    fs::remove_file(shop.path("bad/libx.so")).unwrap();
    symlink("libx.so", shop.path("bad/libx.so")).unwrap();
    assert_eq!(shop.agree(&program).missing.len(), 1);
}

#[test]
fn paths_links_and_preloads() {
    let Some(shop) = Workshop::new("gcc") else { return };
    shop.build("real/libx.so", "");
    symlink("real", shop.path("link")).unwrap();
    let program = shop.build("program", "@/real/libx.so -Wl,-rpath,@/link");
    assert_eq!(found(&shop.agree(&program), "libx.so").how, How::Path);
    let linked = shop.build("linked", "-Lreal -lx -Wl,-rpath,@/link");
    let closure = shop.agree(&linked);
    let object = found(&closure, "libx.so");
    assert_eq!((&object.path, &object.canonical), (&shop.path("link/libx.so"), &shop.path("real/libx.so")));
    shop.build("pre/libpre.so", "-Lreal -lx");
    let preload = format!("{}:libnone.so", shop.path("pre/libpre.so").display());
    let closure = agree(&linked, &environment(None, Some(&preload), shop.dir.path()));
    assert_eq!(closure.objects[2].how, How::Preload);
    assert!(closure.missing[0].optional);
}

#[test]
fn scripts() {
    let Some(shop) = Workshop::new("gcc") else { return };
    let environment = environment(None, None, shop.dir.path());
    for (name, text) in
        [("one", "#!/usr/bin/env sh\n"), ("two", "#! ./one -x\n"), ("lost", "#!/none/sh\n"), ("self", "#!./self\n")]
    {
        fs::write(shop.path(name), text).unwrap();
    }
    let closure = resolve(&FileSystem, &environment, Path::new("two"), |_, _| {}).unwrap();
    let hows: Vec<_> = closure.objects.iter().take(4).map(|object| object.how).collect();
    assert_eq!(hows, [How::Script, How::Script, How::Env, How::Program]);
    assert_eq!(closure.objects[closure.program].path, Path::new("/usr/bin/sh"));
    for (name, part) in [("lost", "interpreter of lost"), ("self", "too many"), ("none", "No such file")] {
        let error = resolve(&FileSystem, &environment, Path::new(name), |_, _| {}).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains(part), "{error}");
    }
}

#[test]
fn static_programs_are_their_own_closure() {
    let Some(shop) = Workshop::new("gcc") else { return };
    for option in ["-static", "-static-pie"] {
        let program = shop.build("program", option);
        let closure = resolve(&FileSystem, &environment(None, None, Path::new("/")), &program, |_, _| {}).unwrap();
        assert_eq!((closure.objects.len(), closure.interpreter), (1, None));
    }
}

#[test]
fn musl_programs() {
    let Some(shop) = Workshop::new("musl-gcc") else { return };
    shop.build("a/libdeep.so", "");
    shop.build("b/libdeep.so", "");
    shop.build("a/libmid.so", "-La -ldeep");
    shop.build("own/liborigin.so", "");
    // musl inherits every search path, a RUNPATH too.
    let program = shop.build("program", "-La -lmid -Lown -lorigin -Wl,-rpath-link,a -Wl,-rpath,@/a:$ORIGIN/own");
    let closure = resolve(&FileSystem, &environment(None, None, Path::new("/")), &program, |_, _| {}).unwrap();
    assert!(closure.missing.is_empty(), "{:?}", closure.missing);
    let b = shop.path("b").to_str().unwrap().to_owned();
    for library_path in [None, Some(b.as_str())] {
        let environment = environment(library_path, None, shop.dir.path());
        let closure = resolve(&FileSystem, &environment, &program, |_, _| {}).unwrap();
        let interpreter = &closure.objects[closure.interpreter.unwrap()].path;
        let mut command = Command::new(interpreter);
        command.arg("--list").arg(&program).env_clear().current_dir(shop.dir.path());
        let output = command.envs(library_path.map(|path| ("LD_LIBRARY_PATH", path))).output().unwrap();
        let ours = ours(&closure);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut lines = 0;
        for (name, path) in text.lines().filter_map(|line| line.trim().split_once(" => ")) {
            let path = path.split(" (0x").next().unwrap();
            if !name.starts_with("libc.") {
                assert_eq!(ours.get(name).map(String::as_str), Some(path), "{text}");
                lines += 1;
            }
        }
        assert_eq!(lines, 3, "{text}");
    }
}

/// Counts what reaches the file system, except for the system's own files.
struct Counting {
    below: PathBuf,
    opens: AtomicUsize,
    dirs: AtomicUsize,
    listings: AtomicUsize,
}

impl Counting {
    fn count(&self, path: &Path, counter: &AtomicUsize) {
        if path.starts_with(&self.below) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Probe for Counting {
    type File = fs::File;
    type Dir = (PathBuf, <FileSystem as Probe>::Dir);

    fn open(&self, path: &Path) -> io::Result<Opened<Self::File>> {
        self.count(path, &self.opens);
        FileSystem.open(path)
    }

    fn open_dir(&self, path: &Path) -> io::Result<Opened<Self::Dir>> {
        self.count(path, &self.dirs);
        let Opened { file, canonical, stat } = FileSystem.open_dir(path)?;
        Ok(Opened { file: (path.to_path_buf(), file), canonical, stat })
    }

    fn names(&self, (path, dir): &Self::Dir) -> io::Result<Names> {
        self.count(path, &self.listings);
        FileSystem.names(dir)
    }
}

#[test]
fn every_operation_counts() {
    const LIBRARIES: usize = 500;
    const DIRS: usize = 10;
    let Some(shop) = Workshop::new("gcc") else { return };
    let runpath: Vec<_> = (0..DIRS).map(|dir| format!("@/lib{dir}")).collect();
    let runpath = format!("-Wl,-rpath,{}", runpath.join(":"));
    // All libraries are copies of one that needs libz, with their names told apart in place.
    let template = shop.build("libxxxx.so", &format!("-Wl,-soname,libxxxx.so -lz {runpath}"));
    let template = fs::read(template).unwrap();
    let mut links = String::new();
    for number in 0..LIBRARIES {
        let name = format!("libx{number:03}.so");
        let dir = shop.path(&format!("lib{}", number % DIRS));
        fs::create_dir_all(&dir).unwrap();
        let mut bytes = template.clone();
        for at in 0..bytes.len() - 7 {
            if &bytes[at..at + 7] == b"libxxxx" {
                bytes[at..at + 7].copy_from_slice(&name.as_bytes()[..7]);
            }
        }
        fs::write(dir.join(&name), bytes).unwrap();
        links += &format!("-L{} -l:{name} ", dir.display());
    }
    let program = shop.build("program", &format!("{links} {runpath}"));
    let counting = Counting {
        below: shop.dir.path().to_path_buf(),
        opens: AtomicUsize::new(0),
        dirs: AtomicUsize::new(0),
        listings: AtomicUsize::new(0),
    };
    let environment = environment(None, None, Path::new("/"));
    let mut seen = Vec::new();
    let start = std::time::Instant::now();
    let closure = resolve(&counting, &environment, &program, |object, _| seen.push(object.path.clone())).unwrap();
    println!("{} objects in {:?}", closure.objects.len(), start.elapsed());
    assert_eq!(counting.opens.into_inner(), LIBRARIES + 1);
    assert_eq!((counting.dirs.into_inner(), counting.listings.into_inner()), (DIRS, DIRS));
    assert_eq!(seen, closure.objects.iter().map(|object| object.path.clone()).collect::<Vec<_>>());
    agree(&program, &environment);
}
