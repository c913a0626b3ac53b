//! The shared file system: what it counts, how long it takes, and that it is a file system.

use std::fs;
use std::time::Duration;

use cluster::spec::Service;
use cluster::{Cluster, Ops, Spec};

fn up(name: &str, spec: Spec) -> Option<Cluster> {
    if let Some(obstacle) = Cluster::obstacle() {
        eprintln!("SKIPPED {name}: {obstacle}");
        return None;
    }
    Some(Cluster::up(Spec { name: Spec::of(name).name, ..spec }).expect("cluster up"))
}

fn python(c: &Cluster, host: &str, uid: u32, script: &str) -> String {
    let output = c.exec(host, uid, &["/usr/bin/python3", "-I", "-S", "-c", script]).expect("exec");
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn known_accesses_give_known_counts() {
    let Some(c) = up("t-count", Spec { hosts: 2, ..Spec::default() }) else { return };
    fs::create_dir(c.backing().join("d")).expect("mkdir");
    fs::write(c.backing().join("d/file"), vec![7; 300_000]).expect("write");
    c.reset_ops().expect("reset");
    let script = "import os
for i in range(3):
    for name in ('absent', 'missing'):
        try: os.stat('/shared/d/' + name)
        except FileNotFoundError: pass
assert sorted(os.listdir('/shared/d')) == ['file']
for i in range(2):
    f = os.open('/shared/d/file', os.O_RDONLY)
    n = 0
    while b := os.read(f, 65536): n += len(b)
    assert n == 300000
    os.close(f)";
    python(&c, "hpc2", 0, script);
    let hosts = c.host_ops().expect("ops");
    assert_eq!(hosts[0].ops, Ops::default());
    let ops = hosts[1].ops;
    // The listing brought the attributes of what is in it.
    assert_eq!((ops.lookup, ops.absent, ops.open), (1, 6, 2), "d once, absences each time: {ops:?}");
    assert_eq!(ops.readdir, 3, "opendir, the listing, its end: {ops:?}");
    // The second reading is from the host's cache.
    assert!((3..=5).contains(&ops.read), "{ops:?}");
    assert_eq!((ops.read_bytes, ops.write), (300_000, 0));
    let paths = c.paths().expect("paths");
    assert!(paths.contains(&("/d/absent (absent)".into(), 3)), "{paths:?}");
    c.reset_ops().expect("reset");
    assert_eq!(c.ops().expect("ops"), Ops::default());
}

#[test]
fn users_can_do_what_they_do_on_a_file_system() {
    let Some(c) = up("t-posix", Spec { hosts: 2, ..Spec::default() }) else { return };
    fs::set_permissions(c.backing(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("chmod");
    let script = "import os, stat, mmap
os.umask(0o022)
os.chdir('/shared')
os.mkdir('dir', 0o777); os.chdir('dir')
with open('a', 'w') as f: f.write('x' * 500000); f.flush(); os.fsync(f.fileno())
assert os.stat('a').st_uid == 20001 and stat.S_IMODE(os.stat('a').st_mode) == 0o644
with open('a', 'a') as f: f.write('end')
assert os.path.getsize('a') == 500003
os.truncate('a', 10); os.rename('a', 'b'); os.symlink('b', 'c'); os.link('b', 'e')
assert os.readlink('c') == 'b' and open('c').read() == 'x' * 10 and os.stat('e').st_nlink == 2
os.chmod('b', 0o600); os.utime('b', (1, 2)); assert os.stat('b').st_mtime == 2
with open('b', 'r+b') as f:
    m = mmap.mmap(f.fileno(), 10); m[:3] = b'map'; m.flush()
assert open('e').read() == 'mapxxxxxxx'
try: os.chown('b', 0, 0)
except PermissionError: pass
else: raise SystemExit('chown by a user')
try: os.getxattr('b', 'user.x')
except OSError: pass
os.mkfifo('fifo'); os.unlink('fifo'); os.unlink('c'); os.unlink('e')
os.mkdir('sub'); os.rmdir('sub'); os.replace('b', 'final')
f = open('final'); os.rename('final', 'moved'); assert f.read() == 'mapxxxxxxx'
assert os.statvfs('.').f_bsize > 0
assert os.listdir('.') == ['moved']";
    python(&c, "hpc1", 20001, script);
    assert_eq!(python(&c, "hpc2", 20001, "print(open('/shared/dir/moved').read())"), "mapxxxxxxx");
    let source = c.exec("hpc2", 0, &["findmnt", "-n", "-o", "SOURCE,FSTYPE", "/shared"]).expect("exec");
    let source = String::from_utf8_lossy(&source.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(source, "slowfs fuse.slowfs");
}

#[test]
fn a_change_is_seen_by_the_other_host_after_the_attributes_expire() {
    let Some(c) = up("t-change", Spec { hosts: 2, ..Spec::default() }) else { return };
    fs::write(c.backing().join("f"), "old").expect("write");
    let script = "import time
old = open('/shared/f').read()
open('/shared/seen', 'w').close()
end = time.time() + 9
while (new := open('/shared/f').read()) == old and time.time() < end: time.sleep(0.1)
print(old, new)";
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| python(&c, "hpc1", 0, script));
        while !c.backing().join("seen").exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        python(&c, "hpc2", 0, "open('/shared/f', 'w').write('newer')");
        assert_eq!(reader.join().expect("reader"), "old newer");
    });
}

#[test]
fn parallel_operations_overlap_in_latency_only() {
    let ms = Duration::from_millis;
    let service = Service { per_op: ms(5), ns_per_byte: 0.0, host_ns_per_byte: 0.0, latency: ms(50) };
    let Some(c) = up("t-time", Spec { hosts: 2, service, ..Spec::default() }) else { return };
    let script = |threads: usize, stats: usize| {
        format!(
            "import os, threading, time
def work(n):
    for i in range({stats}):
        try: os.stat('/shared/none-%d-%d' % (n, i))
        except FileNotFoundError: pass
t = [threading.Thread(target=work, args=(n,)) for n in range({threads})]
begin = time.perf_counter()
[x.start() for x in t]; [x.join() for x in t]
print(time.perf_counter() - begin)"
        )
    };
    let took = |threads, stats| {
        Duration::from_secs_f64(python(&c, "hpc1", 0, &script(threads, stats)).parse().expect("seconds"))
    };
    let (one, parallel) = (took(1, 10), took(10, 1));
    assert!(one >= ms(550), "10 operations in a row take 5 + 50 ms each: {one:?}");
    assert!(parallel >= ms(100), "10 at once queue for 5 ms each: {parallel:?}");
    assert!(parallel < one * 2 / 3, "10 at once wait 50 ms together: {parallel:?} against {one:?}");
}
