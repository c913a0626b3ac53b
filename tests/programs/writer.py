#!/usr/bin/env python3
"""Writes beside itself in every way that programs do; prints what it finds afterwards. Argument: a name of its own."""
import fcntl, mmap, os, shutil, sqlite3, subprocess, sys, tempfile

sys.dont_write_bytecode = False
here = os.path.dirname(os.path.abspath(__file__))
mine = os.path.join(here, "out." + sys.argv[1])
shutil.rmtree(mine, ignore_errors=True)
os.mkdir(mine)
os.chdir(mine)
with open("text", "w") as f:
    f.write("one\n")
with open("text", "a") as f:
    f.write("two\n")
with open("text", "r+") as f:
    f.seek(4); f.write("TWO")
print(open("text").read().split())
os.rename("text", "renamed")
print(sorted(os.listdir(".")), os.path.exists("text"))
os.link("renamed", "hard"); os.symlink("renamed", "soft")
print(os.stat("hard").st_nlink, os.readlink("soft"), open("soft").read().split())
os.unlink("hard")
with open("renamed", "r+b") as f:
    with mmap.mmap(f.fileno(), 0) as m:
        m[0:3] = b"ONE"; m.flush()
    print(open("renamed").read().split())
os.truncate("renamed", 3)
print(os.path.getsize("renamed"), open("renamed").read())
os.chmod("renamed", 0o640); os.utime("renamed", (1, 2))
print(oct(os.stat("renamed").st_mode), int(os.stat("renamed").st_mtime))
os.umask(0o077)
os.close(os.open("masked", os.O_CREAT | os.O_WRONLY, 0o666)); os.mkdir("maskeddir")
print(oct(os.stat("masked").st_mode), oct(os.stat("maskeddir").st_mode))
os.umask(0o022)
with open("gone", "w+") as f:
    os.unlink("gone"); f.write("still here"); f.flush(); f.seek(0)
    print(f.read(), os.fstat(f.fileno()).st_nlink)
with tempfile.NamedTemporaryFile(dir=".") as f:
    f.write(b"x" * 3_000_000); f.flush(); print(os.path.getsize(f.name))
with tempfile.TemporaryFile(dir=".") as f:
    f.write(b"y"); print("temporary")
db = sqlite3.connect("data.db")
db.execute("pragma journal_mode=delete"); db.execute("create table t (n)")
for n in range(50):
    db.execute("insert into t values (?)", (n,)); db.commit()
print(db.execute("select count(*), sum(n) from t").fetchone())
db.close()
with open("lock", "w") as f:
    fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX)
    code = "import fcntl,sys\ntry: fcntl.lockf(open('lock','r+'), fcntl.LOCK_EX|fcntl.LOCK_NB); print('locked')\nexcept OSError: print('held')"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
os.makedirs("a/b/c"); open("a/b/c/f", "w").close(); os.rename("a", "z")
print([(d, s, f) for d, s, f in sorted(os.walk("z"))])
shutil.copytree("z", "y"); shutil.rmtree("z"); print(sorted(os.listdir(".")))
with open("module_of_%s.py" % sys.argv[1], "w") as f:
    f.write("answer = 42\n")
sys.path.insert(0, ".")
print(__import__("module_of_" + sys.argv[1]).answer, [n.split("_of_")[0] for n in os.listdir("__pycache__")])
with open("prog.c", "w") as f:
    f.write('#include <stdio.h>\nint main(void) { puts("compiled"); return 0; }\n')
subprocess.run(["gcc", "-o", "prog", "prog.c"], check=True)
print(subprocess.run(["./prog"], capture_output=True, text=True).stdout.strip())
with open("prog", "r+b") as f:
    print("writable")
os.mkfifo("fifo"); print(oct(os.stat("fifo").st_mode))
os.mkdir("full"); open("full/x", "w").close()
for what, call in (("rmdir", lambda: os.rmdir("full")), ("open", lambda: open("absent")), ("mkdir", lambda: os.mkdir("full")), ("excl", lambda: os.open("full/x", os.O_CREAT | os.O_EXCL))):
    try:
        call()
    except OSError as e:
        print(what, e.strerror)
print(sorted(os.listdir(".")))
