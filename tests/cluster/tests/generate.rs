//! The generated programs run, are the same each time, and are made once. Needs a C compiler and python3, not root.

use std::path::Path;
use std::process::Command;

use cluster::generate::libraries::Libraries;
use cluster::generate::modules::Modules;

fn output(command: &mut Command) -> (String, String) {
    let output = command.output().expect("start");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    (String::from_utf8_lossy(&output.stdout).into(), String::from_utf8_lossy(&output.stderr).into())
}

fn size(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).expect("list").flatten();
    entries.map(|e| if e.path().is_dir() { size(&e.path()) } else { e.metadata().expect("stat").len() }).sum()
}

#[test]
fn libraries() {
    let dir = std::env::temp_dir().join(format!("cluster-gen-{}", std::process::id()));
    let wanted = Libraries { count: 40, dirs: 4, megabytes: 4, at: None };
    assert!(wanted.generate(&dir).expect("generate"));
    assert!(!wanted.generate(&dir).expect("generate"), "the second time there is nothing to do");
    let (out, err) = output(Command::new(dir.join("driver")).env_remove("GEN_T0"));
    assert!(out.starts_with("libraries 40 checksum "), "{out}");
    assert_eq!(err, "");
    let (again, timed) = output(Command::new(dir.join("driver")).env("GEN_T0", "1").env("HPCRT_RANK", "5"));
    assert_eq!(again, out);
    assert!(timed.starts_with("main_at ") && timed.contains(" rank 5 startup "), "{timed}");
    let bytes = size(&dir);
    assert!((3_500_000..5_000_000).contains(&bytes), "{bytes}");
    std::fs::remove_dir_all(&dir).expect("remove");
}

#[test]
fn modules() {
    let dir = std::env::temp_dir().join(format!("cluster-py-{}", std::process::id()));
    assert!(Modules { count: 6, megabytes: 1 }.generate(&dir).expect("generate"));
    let (out, _) = output(Command::new("python3").arg(dir.join("driver.py")));
    assert!(out.starts_with("modules 6 checksum "), "{out}");
    std::fs::remove_dir_all(&dir).expect("remove");
}

#[test]
fn foreign_directories_are_left_alone() {
    let dir = std::env::temp_dir().join(format!("cluster-foreign-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("mkdir");
    std::fs::write(dir.join("thesis.tex"), "").expect("write");
    assert!(Libraries::default().generate(&dir).is_err());
    assert!(dir.join("thesis.tex").exists());
    std::fs::remove_dir_all(&dir).expect("remove");
}
