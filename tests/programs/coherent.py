#!/usr/bin/env python3
"""What processes see of files that change while they are open. `alone DIR`: says what one sees by itself; `pair DIR SYNC`: two ranks, on
two hosts, check what one sees of what the other does; `outside DIR SYNC`: what somebody else does. DIR is made by the test; in SYNC they
meet."""
import ctypes, fcntl, mmap, os, stat, sys, time

here = sys.argv[2]
os.chdir(here)
libc = ctypes.CDLL(None, use_errno=True)


def bytes_of(name):
    fd = os.open(name, os.O_RDONLY)
    content = os.pread(fd, 1 << 20, 0)
    os.close(fd)
    return content


def shown(content):
    return len(content), sum(content), content[:4], content[-4:]


def attempt(call, *args):
    try:
        return call(*args)
    except OSError as error:
        return os.strerror(error.errno)


def writing():
    # A reader from before the first write shares the page cache with the writer.
    old = os.open("in-place.py", os.O_RDONLY)
    os.pread(old, 16, 0)
    fd = os.open("in-place.py", os.O_RDWR)
    os.pwrite(fd, b"NEW", 8192)
    print("reader", os.pread(old, 6, 8192), os.pread(fd, 6, 8192))
    with mmap.mmap(fd, 0) as m:
        m[8200:8203] = b"MAP"
        m.flush()
    os.ftruncate(fd, 12000)
    print("mapped", os.pread(old, 20, 8190), os.fstat(old).st_size, shown(os.pread(old, 20000, 0)))
    os.close(fd)
    # What was written is what an unlinked file holds.
    old = os.open("written.py", os.O_RDONLY)
    fd = os.open("written.py", os.O_RDWR)
    os.pwrite(fd, b"NEW", 4100)
    os.close(fd)
    os.unlink("written.py")
    print("unlinked", os.pread(old, 6, 4098), os.fstat(old).st_size)
    # A mapping of a file that was opened to append.
    fd = os.open("append", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"a" * 4096)
    with mmap.mmap(fd, 0) as m:
        m[0:4] = b"ZZZZ"
        m.flush()
    print("append", shown(bytes_of("append")))
    fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    os.pwrite(fd, b"YY", 4)
    print("no longer", shown(bytes_of("append")))
    other = os.open("append", os.O_WRONLY)
    fcntl.fcntl(other, fcntl.F_SETFL, os.O_APPEND)
    os.write(fd, b"end0")
    os.write(other, b"end1")
    print("append again", shown(bytes_of("append")))


def gone():
    for how in (lambda name: os.unlink(name), lambda name: os.rename("other", name)):
        fd = os.open("gone.py", os.O_RDONLY)
        before = os.fstat(fd)
        how("gone.py")
        after = os.fstat(fd)
        print("gone", after.st_size, after.st_nlink, after.st_ino == before.st_ino, stat.filemode(after.st_mode))
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as m:
            print(shown(m[:]))
        if not os.path.exists("gone.py"):
            with open("gone.py", "w") as f:
                f.write("again\n" * 100)
    fd = os.open("emptied", os.O_RDONLY)
    os.unlink("emptied/x")
    os.rmdir("emptied")
    print("directory", stat.filemode(os.fstat(fd).st_mode), os.fstat(fd).st_nlink, os.listdir(fd))


def links():
    bytes_of("one.py"), bytes_of("two.py")
    with open("one.py", "r+") as f:
        f.write("through the first")
    print("links", bytes_of("two.py")[:20], os.stat("two.py").st_nlink)
    os.rename("one.py", "two.py")
    print(sorted(n for n in os.listdir(".") if n in ("one.py", "two.py")), os.path.exists("one.py"), os.path.exists("two.py"))
    os.symlink("nowhere", "soft")
    os.link("soft", "soft2", follow_symlinks=False)
    print(os.readlink("soft"), os.readlink("soft2"), os.lstat("soft").st_nlink)


def directories():
    class Entry(ctypes.Structure):
        _fields_ = [("ino", ctypes.c_uint64), ("off", ctypes.c_int64), ("len", ctypes.c_ushort), ("kind", ctypes.c_ubyte), ("name", ctypes.c_char * 256)]

    libc.opendir.restype = ctypes.c_void_p
    libc.readdir.restype = ctypes.POINTER(Entry)
    libc.readdir.argtypes = libc.rewinddir.argtypes = [ctypes.c_void_p]
    d = libc.opendir(b"listed")

    def read_all():
        found = []
        while entry := libc.readdir(d):
            found.append(entry.contents.name)
        return sorted(found)

    print("listed", read_all())
    os.unlink("listed/a")
    open("listed/new", "w").close()
    libc.rewinddir(d)
    print("rewound", read_all())
    print("only entered", attempt(os.listdir, "exonly") if os.geteuid() else "root", bytes_of("exonly/file"), attempt(os.chdir, "exonly"))
    os.chdir(here)
    print(stat.filemode(os.stat("exonly").st_mode), attempt(os.stat, "exonly/none"))


def owners():
    if os.geteuid() != 0:
        return
    os.chmod(".", 0o777)
    os.setegid(20001), os.seteuid(20001)
    open("of-user", "w").close()
    os.mkdir("of-user.d"), os.symlink("x", "of-user.l"), os.mkfifo("of-user.f")
    os.seteuid(0), os.setegid(0)
    print("owners", [(os.lstat(n).st_uid, os.lstat(n).st_gid) for n in ("of-user", "of-user.d", "of-user.l", "of-user.f")])


def pair(sync):
    rank = int(os.environ["HPCRT_RANK"])
    steps = iter(range(200))

    def wait(name):
        begun = time.time()
        while not os.path.exists(name):
            assert time.time() - begun < 20, name
            time.sleep(0.002)

    def meet():
        step = next(steps)
        open("%s/%d.%d" % (sync, step, rank), "w").close()
        wait("%s/%d.%d" % (sync, step, 1 - rank))

    def other_does(change, *args, who=0):
        """What one rank changes, the other is told of before it goes on: its kernel knows that there is no such name as is made after the
        change, and forgets in the order in which things are told."""
        told = "told.%d" % next(steps)
        assert rank == who or not os.path.exists(told), told
        meet()
        if rank == who:
            change(*args)
            open(told, "x").close()
        else:
            wait(told)

    def check(what, is_, should):
        if rank == 1 and is_ != should:
            print("%s: %r instead of %r" % (what, is_, should))

    def put(name, content):
        with open(name, "w") as f:
            f.write(content)

    def replace(name, content):
        put(name + ".new", content)
        os.rename(name + ".new", name)

    def link(target):
        if os.path.lexists("link"):
            os.unlink("link")
        os.symlink(target, "link")

    # Open when it is replaced, removed, or a directory is made in its place; captured, then not.
    for name in ("open.py", "open.dat"):
        if rank == 0 and name == "open.dat":
            put(name, "0123456789" * 2000)
        other_does(lambda: None)
        for change in (lambda: replace(name, "new"), lambda: os.unlink(name), lambda: (os.unlink(name), os.mkdir(name), os.rmdir(name))):
            fd = os.open(name, os.O_RDONLY)
            size, head = os.fstat(fd).st_size, os.pread(fd, 10, 0)
            other_does(change)
            check(name + " size", os.fstat(fd).st_size, size)
            check(name + " rest", attempt(lambda: shown(os.pread(fd, 1 << 20, 0))), shown((b"0123456789" * 2000)[:size] if size > 3 else b"new"))
            os.close(fd)
            other_does(lambda: None if os.path.exists(name) else put(name, "new"))
    # Rewritten while it is open.
    fd = os.open("rewritten.py", os.O_RDONLY)
    os.pread(fd, 10, 0)
    other_does(put, "rewritten.py", "fresh " * 3000)
    fresh = shown(b"fresh " * 3000)
    check("old descriptor", shown(os.pread(fd, 1 << 20, 0)), fresh)
    check("new descriptor", shown(bytes_of("rewritten.py")), fresh)
    other_does(lambda: None)
    # Rewritten and removed before anybody reads again.
    other_does(lambda: (put("rewritten.py", "last " * 3000)))
    other_does(os.unlink, "rewritten.py")
    check("removed", shown(os.pread(fd, 1 << 20, 0)), shown(b"last " * 3000))
    # Links.
    for target in ("first", "second", "third"):
        other_does(link, target)
        check("link", os.readlink("link"), target)
    # Other names of a file.
    bytes_of("two.py")
    other_does(put, "one.py", "through the other name\n")
    check("other name", bytes_of("two.py"), b"through the other name\n")
    # Made again where it was looked for in vain, while what had the name is still in use.
    fd = os.open("gone.py", os.O_RDONLY)
    other_does(os.unlink, "gone.py")
    check("without", os.path.exists("gone.py"), False)
    other_does(put, "gone.py", "again\n")
    check("made again", (os.path.exists("gone.py"), attempt(bytes_of, "gone.py")), (True, b"again\n"))
    os.close(fd)
    # Made in a directory that got another name since it was looked for there.
    check("nothing there", os.path.exists("emptied/done"), False)
    other_does(os.rename, "emptied", "named", who=1)
    other_does(put, "named/done", "x")
    check("done under its new name", os.path.exists("named/done"), True)
    meet()
    if rank == 1:
        print("checked")


def outside(sync):
    """Somebody outside of the job changes what is beside this script, and is not captured."""
    looks = {
        "replaced": lambda: os.stat("status.json").st_size == 3,
        "read": lambda: bytes_of("status.json") == b"new",
        "in place": lambda: os.stat("in-place.json").st_size == 40000 and bytes_of("in-place.json") == b"0123456789" * 4000,
        "link": lambda: os.readlink("current") == "v2",
        "directory": lambda: os.path.isdir("becomes") and os.listdir("becomes") == ["inside"],
    }
    print([name for name, look in looks.items() if attempt(look) is True], bytes_of("opened.json") and os.stat("fifo").st_size)
    open(sync + "/ready", "w").close()
    while not os.path.exists(sync + "/done"):
        time.sleep(0.01)
    # Whole, though the kernel knew another size.
    print(shown(bytes_of("opened.json")), stat.S_ISFIFO(os.fstat(os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)).st_mode))
    begun = time.time()
    while looks and time.time() - begun < 12:
        looks = {name: look for name, look in looks.items() if attempt(look) is not True}
        time.sleep(0.05)
    print("not seen:", list(looks))


if sys.argv[1] == "pair":
    pair(sys.argv[3])
elif sys.argv[1] == "outside":
    outside(sys.argv[3])
else:
    for part in (writing, gone, links, directories, owners):
        try:
            part()
        except OSError as error:
            print(part.__name__, error)
